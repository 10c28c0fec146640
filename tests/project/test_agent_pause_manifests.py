"""The component by which the plugin pauses agents: its rights, its settings, and what the admission policies permit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from plugin.cluster.pause_labels import PAUSE_LABEL, LeaseName, parse_pause_labels
from tests.cel import AdmissionPolicy
from tests.cluster.plugin_server import PAUSES_AGENTS
from tests.deployed import BASE, DEPLOY, GPU_OPERATOR, apply_patches, documents, patch_all, value_of, yaml_of
from tests.project.test_cluster_manifests import (
    CLUSTER,
    LABELS,
    NOT_OF_ITS_NODE,
    OTHERS,
    OWN,
    TAINT,
    YIELD,
    added,
    node,
    of_kind,
    request,
    undefined,
    with_labels,
)
from tests.project.test_deploy import parsed

PAUSE = DEPLOY / "kubernetes" / "agent-pause"
Document = dict[str, Any]
EXPORTER = "nvidia.com/gpu.deploy.dcgm-exporter"
SPEC = "the plugin must not change a node's spec, except its own taint"
ONLY_LABELS = "the plugin may change only labels that begin with scrubber.dev/gpus. and those that pause agents"
METADATA = "the plugin must not change a node's annotations, finalizers or owners"


def built(*components: Path, base: Path = BASE) -> list[Document]:
    """Return the objects as kustomize builds them: a patch without its target changes nothing."""
    found = copy.deepcopy(documents(base))
    for component in components:
        found += copy.deepcopy(added(component)) if "resources" in yaml_of(component) else []
        names = {(each["kind"], value_of(each, "name")) for each in found}
        patches = yaml_of(component).get("patches", [])
        apply_patches(found, [each for each in patches if (each["target"]["kind"], each["target"]["name"]) in names])
    return found


def policies(*components: Path) -> list[AdmissionPolicy]:
    return [AdmissionPolicy(each) for each in built(*components) if each["kind"] == "ValidatingAdmissionPolicy"]


def environment(*components: Path, base: Path = BASE) -> dict[str, str]:
    (plugin,) = [
        each
        for each in built(*components, base=base)
        if (each["kind"], value_of(each, "name")) == ("DaemonSet", "scrubber-plugin")
    ]
    pod = plugin["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is True
    (own,) = pod["containers"]
    return {each["name"]: each.get("value", "some-value") for each in own["env"]}


def test_roles_allow_exactly_the_requests_of_a_pause() -> None:
    assert of_kind(PAUSE, "ClusterRole")["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]}
    ]
    rules = of_kind(PAUSE, "Role")["rules"]
    assert {f"{verb} {what}" for rule in rules for what in rule["resources"] for verb in rule["verbs"]} == PAUSES_AGENTS
    (named,) = [rule["resourceNames"] for rule in rules if "resourceNames" in rule]
    lease = LeaseName.parse(environment(PAUSE)["SCRUBBER_PAUSE_LEASE"])
    assert lease is not None
    assert ([lease.name], lease.namespace) == (named, of_kind(PAUSE, "Role")["metadata"]["namespace"])
    account = {"kind": "ServiceAccount", "name": "scrubber-plugin", "namespace": yaml_of(BASE)["namespace"]}
    for kind in ("ClusterRole", "Role"):
        binding = of_kind(PAUSE, f"{kind}Binding")
        assert (binding["subjects"], binding["roleRef"]["name"]) == ([account], value_of(of_kind(PAUSE, kind), "name"))


@pytest.mark.parametrize("components", [(PAUSE,), (CLUSTER, PAUSE), (CLUSTER, TAINT, PAUSE), (YIELD, PAUSE)])
def test_plugin_gets_the_labels_in_order_which_both_policies_permit(
    components: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = environment(*components, base=GPU_OPERATOR)
    (workload,) = [
        each for each in documents(BASE) if (each["kind"], value_of(each, "name")) == ("DaemonSet", "scrubber-plugin")
    ]
    _, values = parsed(workload["spec"]["template"]["spec"]["containers"][0]["args"], monkeypatch, found)
    labels = parse_pause_labels(values["pause_labels"])
    assert [each.key.rpartition("/")[2].removeprefix("gpu.deploy.") for each in labels] == [
        *("ManagedByNVSentinel", "gpu-feature-discovery", "node-status-exporter", "dcgm-exporter", "dcgm")
    ]
    assert {each.during for each in labels} == {"false"}
    permitted = {PAUSE_LABEL, *(each.key for each in labels)}
    lists = [
        variable["expression"]
        for each in built(*components)
        if each["kind"] == "ValidatingAdmissionPolicy"
        for variable in each["spec"]["variables"]
        if variable["name"] == "pauseLabels"
    ]
    assert len(lists) == (2 if CLUSTER in components else 1)
    assert all(set(yaml.safe_load(each)) == permitted for each in lists)


@pytest.mark.parametrize("components", [(PAUSE,), (CLUSTER, PAUSE), (CLUSTER, TAINT, PAUSE), (CLUSTER, PAUSE, TAINT)])
@pytest.mark.parametrize(
    ("changes", "by", "permitted"),
    [
        (with_labels(**{EXPORTER: "false"}), request(), True),
        (with_labels(**{PAUSE_LABEL: "pause-1"}), request(), True),
        (with_labels(**{"k8saas.nvidia.com/ManagedByNVSentinel": "false"}), request(), True),
        (with_labels(**{"scrubber.dev/gpus.clean": "1"}), request(), True),
        (with_labels(**{"nvidia.com/gpu.deploy.driver": "false"}), request(), False),
        (with_labels(**{"nvidia.com/gpu.deploy.client": "false"}), request(), False),
        (with_labels(zone="b"), request(), False),
        ({"metadata": {"name": "node-1", "annotations": {"a": "b"}}}, request(), False),
        ({"metadata": node()["metadata"] | {"annotations": {"a": "c"}}}, request(), False),
        (with_labels(**{EXPORTER: "false"}), request(node_name="node-2"), False),
        ({"spec": node()["spec"] | {"unschedulable": True}}, request(), False),
        ({"spec": node()["spec"] | {"taints": []}}, request(), False),
        (
            {"spec": node()["spec"] | {"taints": [*node()["spec"]["taints"], OWN | {"effect": "NoExecute"}]}},
            request(),
            False,
        ),
        (with_labels(zone="b"), request(account="someone-else"), True),
    ],
)
def test_policies_permit_the_labels_of_a_pause_on_the_own_node_and_nothing_else_with_or_without_the_cluster_component(
    components: tuple[Path, ...], changes: Document, by: Document, permitted: bool
) -> None:
    refusals = [
        message
        for policy in policies(*components)
        for message in policy.refusals(object=node(**changes), oldObject=node(), request=by)
    ]
    assert (refusals == []) is permitted


def test_policies_of_cluster_taint_and_pause_together_permit_the_taint_and_without_taint_they_refuse_it() -> None:
    changed = {"object": node(spec={"taints": [OTHERS, OWN]}), "oldObject": node(spec={"taints": [OTHERS]})}
    for components, refused in [((CLUSTER, TAINT, PAUSE), False), ((CLUSTER, PAUSE), True)]:
        refusals = [each.refusals(**changed, request=request()) for each in policies(*components)]
        assert any(refusals) is refused


def test_own_policy_names_what_it_refuses() -> None:
    (policy,) = policies(PAUSE)
    for changes, by, message in [
        (with_labels(zone="b"), request(), ONLY_LABELS),
        ({"spec": {}}, request(), SPEC),
        ({"metadata": node()["metadata"] | {"finalizers": ["a"]}}, request(), METADATA),
        ({}, request(node_name="node-2"), NOT_OF_ITS_NODE),
    ]:
        assert policy.refusals(object=node(**changes), oldObject=node(), request=by) == [message]


def test_policy_of_the_cluster_component_alone_refuses_the_labels_of_a_pause() -> None:
    (policy,) = policies(CLUSTER)
    changed = node(**with_labels(**{EXPORTER: "false"}))
    assert policy.refusals(object=changed, oldObject=node(), request=request()) == [LABELS]
    assert "List it after `cluster`" in (PAUSE / "kustomization.yaml").read_text()


def test_policies_with_pauses_use_only_fields_known_to_the_type_check() -> None:
    found = [each for each in built(CLUSTER, PAUSE) if each["kind"] == "ValidatingAdmissionPolicy"]
    assert len(found) == 2
    for each in found:
        expressions = [
            part["expression"]
            for name in ("variables", "validations", "matchConditions")
            for part in each["spec"][name]
        ]
        assert [field for expression in expressions for field in undefined(expression)] == []


def test_components_that_give_the_plugin_access_add_objects_of_different_names() -> None:
    names = [
        (each["kind"], value_of(each, "name")) for component in (CLUSTER, YIELD, PAUSE) for each in added(component)
    ]
    assert len(names) == len(set(names))
    assert set(yaml_of(PAUSE)["resources"]) == {each.name for each in PAUSE.iterdir()} - {"kustomization.yaml"}
    patch_all(built(CLUSTER, PAUSE), YIELD)
