"""The components that give the plugin credentials: exactly the rights that it uses, with evictions separate."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import yaml
from lightkube.models.core_v1 import Node

from plugin.cluster.event_diff import GONE_REASON, REASONS
from plugin.cluster.view import CONDITION_TYPE, LABEL_PREFIX, PLUGIN_STOPPED_CONDITION, SERVICE_AWAY_CONDITION
from plugin.cluster.writers import WriterTimes
from plugin.service_client import WatchTimes
from scrubber.cli.commands.plugin import NodeNameOption
from tests.cluster.api_server import ApiServerStandIn
from tests.deployed import BASE, CDI, DEPLOY, ROOT, documents, value_of, yaml_of

CLUSTER, EVICTION = DEPLOY / "kubernetes" / "cluster", DEPLOY / "kubernetes" / "eviction"
PAGE = (ROOT / "docs" / "cluster.md").read_text()
TEXT = " ".join(PAGE.split())
"""The page as one line, so that a sentence is found wherever its lines are broken."""
Document = dict[str, Any]


def added(component: Path) -> list[Document]:
    """Return the objects that a component adds."""
    names = yaml_of(component)["resources"]
    return [each for name in names for each in yaml.safe_load_all((component / name).read_text())]


def of_kind(component: Path, kind: str) -> Document:
    (found,) = [each for each in added(component) if each["kind"] == kind]
    return found


def patched(base: Path) -> dict[tuple[str, str], Document]:
    """Return the objects of ``base`` after the component's patches: (kind, name) → object."""
    found = {(each["kind"], value_of(each, "name")): copy.deepcopy(each) for each in documents(base)}
    for patch in yaml_of(CLUSTER)["patches"]:
        target = found[patch["target"]["kind"], patch["target"]["name"]]
        for step in yaml.safe_load(patch["patch"]):
            *way, last = step["path"].strip("/").split("/")
            place: Any = target
            for word in way:
                place = place[int(word)] if isinstance(place, list) else place[word]
            if last == "-":
                assert step["op"] == "add"
                place.append(step["value"])
            else:
                assert step["op"] == "replace"
                assert last in place
                place[last] = step["value"]
    return found


def allowed(component: Path) -> set[str]:
    """Return what the role allows, as ``verb resource``."""
    rules = of_kind(component, "ClusterRole")["rules"]
    assert all(set(rule) == {"apiGroups", "resources", "verbs"} and rule["apiGroups"] == [""] for rule in rules)
    return {f"{verb} {resource}" for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


def test_cluster_role_allows_exactly_the_requests_of_the_plugin() -> None:
    assert allowed(CLUSTER) == ApiServerStandIn().allowed
    assert allowed(EVICTION) == {"create pods/eviction"}


@pytest.mark.parametrize("component", [CLUSTER, EVICTION])
def test_cluster_role_is_bound_to_the_plugins_service_account_only(component: Path) -> None:
    role, binding = of_kind(component, "ClusterRole"), of_kind(component, "ClusterRoleBinding")
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": value_of(role, "name"),
    }
    account = patched(BASE)["DaemonSet", "scrubber-plugin"]["spec"]["template"]["spec"]["serviceAccountName"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account, "namespace": yaml_of(BASE)["namespace"]},
    ]


def test_eviction_permission_is_a_separate_component() -> None:
    assert {each["kind"] for each in added(EVICTION)} == {"ClusterRole", "ClusterRoleBinding"}
    assert set(yaml_of(EVICTION)) == {"apiVersion", "kind", "resources"}
    assert str(EVICTION.name) not in str(yaml_of(CLUSTER))


@pytest.mark.parametrize("base", [BASE, CDI])
def test_only_the_plugins_pod_gets_a_token_and_its_node_name(base: Path) -> None:
    before = {(each["kind"], value_of(each, "name")): each for each in documents(base)}
    after = patched(base)
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {("DaemonSet", "scrubber-plugin")}
    was, now = (each["DaemonSet", "scrubber-plugin"]["spec"]["template"]["spec"] for each in (before, after))
    assert (was.pop("automountServiceAccountToken"), now.pop("automountServiceAccountToken")) == (False, True)
    had, has = (each["containers"][0].pop("env") for each in (was, now))
    assert was == now
    assert [each for each in has if each not in had] == [
        {"name": "SCRUBBER_CLUSTER_REPORTING", "value": "auto"},
        {"name": variable(), "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]


def variable() -> str:
    """Return the variable with which the plugin gets its node name."""
    option = get_args(NodeNameOption)[1]
    assert isinstance(option, typer.models.OptionInfo)
    assert isinstance(option.envvar, str)
    return option.envvar


def test_admission_policy_restricts_the_plugin_to_its_labels_condition_and_own_node() -> None:
    policy, binding = (of_kind(CLUSTER, f"ValidatingAdmissionPolicy{word}") for word in ("", "Binding"))
    spec = policy["spec"]
    assert spec["failurePolicy"] == "Fail"
    assert binding["spec"] == {"policyName": value_of(policy, "name"), "validationActions": ["Deny"]}
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert set(rule["resources"]) == {each.split()[1] for each in allowed(CLUSTER) if "nodes" in each}
    assert rule["operations"] == ["UPDATE"]  # includes patches
    (condition,) = spec["matchConditions"]
    (account,) = of_kind(CLUSTER, "ClusterRoleBinding")["subjects"]
    assert condition["expression"].endswith(f'"system:serviceaccount:{account["namespace"]}:{account["name"]}"')
    expressions = " ".join(each["expression"] for each in spec["validations"])
    assert set(re.findall(r'startsWith\("([^"]+)"\)', expressions)) == {LABEL_PREFIX}
    assert set(re.findall(r'type == "([^"]+)"', expressions)) == {CONDITION_TYPE}
    assert "object.spec == oldObject.spec" in expressions
    assert all(each["message"] for each in spec["validations"])


def test_admission_policy_allows_changes_to_conditions_of_the_node_status_only() -> None:
    """The status also contains the kubelet's ports, volumes and images: each must be unchanged, or still absent."""
    spec = of_kind(CLUSTER, "ValidatingAdmissionPolicy")["spec"]
    (guard,) = [each["expression"] for each in spec["validations"] if "variables.status" in each["expression"]]
    assert guard == (
        'variables.status.all(field, field == "conditions" || (field in variables.statusBefore '
        "&& variables.status[field] == variables.statusBefore[field])) "
        '&& variables.statusBefore.all(field, field == "conditions" || field in variables.status)'
    )
    variables = {each["name"]: each["expression"] for each in spec["variables"]}
    assert (variables["status"], variables["statusBefore"]) == ("dyn(object.status)", "dyn(oldObject.status)")


STRING_MAPS = {"labels", "annotations"}
"""Maps of strings. Every other map of a node has quantities, which have no type for the API server's type check."""


def undefined(expression: str) -> list[str]:
    """Return the fields of ``expression`` that the API server's type check does not know.

    It treats ``object`` and ``oldObject`` as the kind that the policy matches, and leaves out every field whose schema
    has no single type, such as a quantity (string or number), and every map and list of such.
    """
    found = []
    for path in re.findall(r"\b(?:object|oldObject)((?:\.\w+\b(?!\())+)", expression):
        kind: Any = Node
        for name in path.strip(".").split("."):
            parameters = inspect.signature(kind).parameters if isinstance(kind, type) else {}
            if name not in parameters or (parameters[name].annotation == dict | None and name not in STRING_MAPS):
                found.append(f"{path}: {name}")
                break
            kind = next(iter(get_args(parameters[name].annotation)), parameters[name].annotation)
    return found


def test_admission_policy_uses_only_fields_known_to_the_type_check() -> None:
    spec = of_kind(CLUSTER, "ValidatingAdmissionPolicy")["spec"]
    expressions = [each["expression"] for each in (*spec["variables"], *spec["validations"], *spec["matchConditions"])]
    assert [each for expression in expressions for each in undefined(expression)] == []


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("has(object.status.allocatable)", [".status.allocatable: allocatable"]),
        ("object.status.capacity == oldObject.status.capacity", [".status.capacity: capacity"] * 2),
        ("object.replicas > 1", [".replicas: replicas"]),
        ("object.metadata.labels.all(key, true)", []),
        ("object.status.conditions.exists(each, each.type == 'a')", []),
        ("dyn(object.status).capacity", []),
    ],
)
def test_type_check_of_the_admission_policy_finds_unknown_fields(expression: str, wrong: list[str]) -> None:
    assert undefined(expression) == wrong


def test_network_policy_allows_egress_for_the_plugin_only() -> None:
    policy = of_kind(CLUSTER, "NetworkPolicy")
    labels = patched(BASE)["DaemonSet", "scrubber-plugin"]["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"] == {"matchLabels": labels}
    assert policy["spec"]["policyTypes"] == ["Egress"]
    assert policy["metadata"]["namespace"] == yaml_of(BASE)["namespace"]


@pytest.mark.parametrize("component", [CLUSTER, EVICTION])
def test_every_manifest_of_a_cluster_component_is_in_its_kustomization(component: Path) -> None:
    assert yaml_of(component)["kind"] == "Component"
    assert set(yaml_of(component)["resources"]) == {each.name for each in component.iterdir()} - {"kustomization.yaml"}


def test_cluster_page_names_every_condition_label_and_event() -> None:
    code = (ROOT / "plugin" / "cluster" / "view.py").read_text()
    expected = {
        CONDITION_TYPE,
        GONE_REASON,
        *REASONS.values(),
        SERVICE_AWAY_CONDITION.reason,
        PLUGIN_STOPPED_CONDITION.reason,
    }
    expected |= set(re.findall(r'"((?:All|Some|None|No)[A-Z][A-Za-z]+)"', code))
    expected |= {f"{LABEL_PREFIX}{word}" for word in ("clean", "dirty", "quarantined")}
    assert len(expected) > 12
    assert {each for each in expected if f"`{each}`" not in PAGE} == set()
    named = set(re.findall(r"^\| (?:node|pod) \| `(\w+)` \|", PAGE, re.MULTILINE))
    assert named == {GONE_REASON, *REASONS.values(), "GpuHandOverRefused"}


def test_cluster_page_describes_eviction_targets_and_the_impact_of_a_stolen_token() -> None:
    targets = TEXT.partition("## Which pods are evicted")[2].partition(" ## ")[0]
    for each in ("never the one that holds", "without a controller", "off by default", "containers that run"):
        assert each in targets
    can = TEXT.partition("## What the credentials can do")[2]
    for verb in sorted(allowed(CLUSTER)):
        assert f"`{verb.split()[0]}`" in can
    assert "any event of any namespace" in can


def test_cluster_page_states_the_intervals_that_the_plugin_uses() -> None:
    times, watch = WriterTimes(), WatchTimes()
    assert times.labels == 60
    assert "at most once a minute" in TEXT.partition("## Labels")[2].partition(" ## ")[0]
    silence = watch.heartbeat + watch.probe + watch.grace
    row = next(line for line in PAGE.splitlines() if "`ScrubServiceUnavailable`" in line)
    assert f"{watch.grace:g} s" in row
    assert f"{silence:g} s" in row
    assert f"once more {times.confirm:g} s after the plugin's first write" in TEXT


def test_cluster_page_states_that_no_real_gpu_node_was_tested() -> None:
    assert "A node with a real GPU has not been tried.**" in TEXT
    for each in (CLUSTER, EVICTION):
        assert str(each.relative_to(ROOT)) in PAGE or f"gpu-scrubber/{each.relative_to(ROOT)}" in PAGE
