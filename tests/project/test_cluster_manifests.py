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

from plugin.cluster.condition import CONDITION_TYPE
from plugin.cluster.event_diff import GONE_REASON, REASONS
from plugin.cluster.taint import NodeTaint
from plugin.cluster.view import LABEL_PREFIX, PLUGIN_STOPPED_CONDITION, SERVICE_AWAY_CONDITION
from plugin.cluster.writers import WriterTimes
from plugin.service_client import WatchTimes
from scrubber.cli.commands.plugin import NodeNameOption, YieldLabelsOption
from tests.cel import AdmissionPolicy
from tests.cluster.plugin_server import REPORTS
from tests.deployed import BASE, CDI, DEPLOY, GPU_OPERATOR, ROOT, apply_patches, documents, patch_all, value_of, yaml_of
from tests.project.test_deploy import parsed

CLUSTER, EVICTION = DEPLOY / "kubernetes" / "cluster", DEPLOY / "kubernetes" / "eviction"
TAINT = DEPLOY / "kubernetes" / "taint"
YIELD = DEPLOY / "kubernetes" / "yield"
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
    assert allowed(CLUSTER) == REPORTS
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
def test_only_the_plugins_pod_gets_a_token(base: Path) -> None:
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
    ]
    assert {"name": variable(), "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}} in has


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
    assert spec["variables"][0] == {"name": "conditionType", "expression": f'"{CONDITION_TYPE}"'}
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


def node(**changes: Any) -> Document:
    """Return a node as the API server has it, with ``changes`` of its fields."""
    return {
        "metadata": {"name": "node-1", "labels": {"zone": "a"}, "annotations": {"a": "b"}},
        "spec": {"podCIDR": "10.0.0.0/24", "taints": [{"key": "other", "effect": "NoSchedule"}]},
        "status": {"conditions": [{"type": "Ready", "status": "True"}], "capacity": {"cpu": "4"}},
    } | changes


def request(*, node_name: str = "node-1", account: str = "scrubber-plugin") -> Document:
    return {
        "userInfo": {
            "username": f"system:serviceaccount:scrubber-system:{account}",
            "extra": {"authentication.kubernetes.io/node-name": [node_name]},
        }
    }


def with_conditions(*types: str) -> Document:
    status = node()["status"]
    return {"status": status | {"conditions": [*status["conditions"], *({"type": each} for each in types)]}}


def with_labels(**labels: str) -> Document:
    return {"metadata": node()["metadata"] | {"labels": {"zone": "a"} | labels}}


NOT_OF_ITS_NODE = "the plugin may change only the node that it runs on, and its token must name that node"
SPEC = "the plugin must not change a node's spec, including its taints"
LABELS = "the plugin may change only labels that begin with scrubber.dev/gpus."
CONDITIONS = "the plugin may change no condition but its own"
STATUS = "the plugin may change only its own condition in a node's status"
METADATA = "the plugin must not change a node's annotations, finalizers or owners"


@pytest.mark.parametrize(
    ("changes", "by", "refusals"),
    [
        ({}, request(), []),
        (with_conditions(CONDITION_TYPE), request(), []),
        (with_labels(**{"scrubber.dev/gpus.clean": "1"}), request(), []),
        (with_conditions("AcceleratedHardwareReady"), request(), [CONDITIONS]),
        ({"status": node()["status"] | {"conditions": []}}, request(), [CONDITIONS]),
        ({"status": node()["status"] | {"capacity": {"cpu": "8"}}}, request(), [STATUS]),
        ({"status": node()["status"] | {"addresses": []}}, request(), [STATUS]),
        ({"status": {"conditions": node()["status"]["conditions"]}}, request(), [STATUS]),
        (with_labels(zone="b"), request(), [LABELS]),
        ({"metadata": {"name": "node-1", "annotations": {"a": "b"}}}, request(), [LABELS]),
        ({"metadata": node()["metadata"] | {"annotations": {"a": "c"}}}, request(), [METADATA]),
        ({"metadata": node()["metadata"] | {"finalizers": ["a"]}}, request(), [METADATA]),
        ({"spec": node()["spec"] | {"unschedulable": True}}, request(), [SPEC]),
        ({"spec": node()["spec"] | {"taints": []}}, request(), [SPEC]),
        (with_conditions(CONDITION_TYPE), request(node_name="node-2"), [NOT_OF_ITS_NODE]),
        ({}, {"userInfo": {"username": request()["userInfo"]["username"]}}, [NOT_OF_ITS_NODE]),
        ({"spec": {}}, request(account="someone-else"), []),
    ],
)
def test_admission_policy_permits_the_plugins_writes_and_refuses_all_others(
    changes: Document, by: Document, refusals: list[str]
) -> None:
    policy = AdmissionPolicy(of_kind(CLUSTER, "ValidatingAdmissionPolicy"))
    assert policy.refusals(object=node(**changes), oldObject=node(), request=by) == refusals


def tainting() -> list[Document]:
    """Return the objects of the base with the components cluster and taint."""
    found = [*copy.deepcopy(documents(BASE)), *copy.deepcopy(added(CLUSTER))]
    patch_all(found, TAINT)
    return found


TAINTS = "the plugin may change only its own taint in a node's spec"
OWN = {"key": "scrubber.dev/no-gpu-in-service", "effect": "NoSchedule"}
OTHERS = {"key": "other", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("before", "after", "refusals"),
    [
        ({"taints": [OTHERS]}, {"taints": [OTHERS, OWN]}, []),
        ({"taints": [OTHERS, OWN]}, {"taints": [OTHERS]}, []),
        ({"taints": [OWN | {"value": "a"}]}, {"taints": []}, []),
        ({"taints": [OWN]}, {}, []),
        ({}, {"taints": [OWN]}, []),
        ({"taints": [OTHERS]}, {"taints": [OWN]}, [TAINTS]),
        ({"taints": [OTHERS]}, {"taints": [OTHERS | {"value": "a"}]}, [TAINTS]),
        ({}, {"taints": [OWN | {"effect": "NoExecute"}]}, [TAINTS]),
        ({}, {"taints": [OTHERS]}, [TAINTS]),
        ({"taints": [OTHERS]}, {}, [TAINTS]),
        ({}, {"unschedulable": True}, [TAINTS]),
        ({"unschedulable": True}, {}, [TAINTS]),
        ({"podCIDR": "10.0.0.0/24"}, {"podCIDR": "10.1.0.0/24", "taints": [OWN]}, [TAINTS]),
    ],
)
def test_admission_policy_of_the_taint_component_permits_one_taint_only(
    before: Document, after: Document, refusals: list[str]
) -> None:
    (policy,) = [each for each in tainting() if each["kind"] == "ValidatingAdmissionPolicy"]
    changed = {"object": node(spec=after), "oldObject": node(spec=before)}
    assert AdmissionPolicy(policy).refusals(**changed, request=request()) == refusals
    if before != after:
        without = AdmissionPolicy(of_kind(CLUSTER, "ValidatingAdmissionPolicy"))
        assert without.refusals(**changed, request=request()) == [SPEC]


def test_taint_of_the_component_is_the_one_that_its_policy_permits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {(each["kind"], value_of(each, "name")): each for each in tainting()}
    (container,) = found["DaemonSet", "scrubber-plugin"]["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value", "some-value") for each in container["env"]}
    _, values = parsed(container["args"], monkeypatch, environment)
    taint = NodeTaint.parse(values["taint"])
    assert taint is not None
    assert taint.to_api() == OWN | {"value": "true"}
    assert set(yaml_of(TAINT)) == {"apiVersion", "kind", "patches"}  # no role: the plugin may patch nodes already


def test_documented_patches_let_the_plugin_write_another_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    (snippet,) = [each for each in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "conditionType" in each]
    found = [*copy.deepcopy(documents(BASE)), *copy.deepcopy(added(CLUSTER))]
    apply_patches(found, yaml.safe_load(snippet)["patches"])
    (policy,) = [each for each in found if each["kind"] == "ValidatingAdmissionPolicy"]
    admission = AdmissionPolicy(policy)
    new = node(**with_conditions("AcceleratedHardwareReady"))
    assert admission.refusals(object=new, oldObject=node(), request=request()) == []
    new = node(**with_conditions(CONDITION_TYPE))
    assert admission.refusals(object=new, oldObject=node(), request=request()) == [CONDITIONS]
    (workload,) = [each for each in found if (each["kind"], value_of(each, "name")) == ("DaemonSet", "scrubber-plugin")]
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value", "some-value") for each in container["env"]}
    _, values = parsed(container["args"], monkeypatch, environment)
    assert values["condition_type"] == "AcceleratedHardwareReady"


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
    (with_taint,) = [each["spec"] for each in tainting() if each["kind"] == "ValidatingAdmissionPolicy"]
    parts = [
        each
        for of in (spec, with_taint)
        for name in ("variables", "validations", "matchConditions")
        for each in of[name]
    ]
    expressions = [each["expression"] for each in parts]
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


def test_component_that_follows_node_labels_reads_nodes_and_nothing_else_and_the_plugin_has_its_node_name() -> None:
    assert of_kind(YIELD, "ClusterRole")["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "watch"]}
    ]
    (plugin,) = [
        each for each in documents(BASE) if (each["kind"], value_of(each, "name")) == ("DaemonSet", "scrubber-plugin")
    ]
    (own,) = plugin["spec"]["template"]["spec"]["containers"]
    assert get_args(NodeNameOption)[1].envvar in {each["name"] for each in own["env"]}


@pytest.mark.parametrize("base", [BASE, CDI, GPU_OPERATOR])
@pytest.mark.parametrize("components", [(YIELD,), (CLUSTER, YIELD), (YIELD, CLUSTER)])
def test_component_that_follows_node_labels_adds_a_token_and_its_variable_last_in_any_order(
    base: Path, components: tuple[Path, ...]
) -> None:
    found = {value_of(each, "name"): each for each in documents(base) if each["kind"] == "DaemonSet"}
    before = copy.deepcopy(found)
    for component in components:
        patch_all([*found.values()], component)
    assert found["scrubber"] == before["scrubber"]
    was, now = (each["scrubber-plugin"]["spec"]["template"]["spec"] for each in (before, found))
    assert (was.pop("automountServiceAccountToken"), now.pop("automountServiceAccountToken")) == (False, True)
    had, has = (each["containers"][0].pop("env") for each in (was, now))
    assert was == now
    assert has[: len(had)] == had  # so that patches of env/0, as in the overlays, still mean the same variable
    added_last = {each["name"]: each["value"] for each in has[len(had) :]}
    assert added_last.pop(get_args(YieldLabelsOption)[1].envvar) == "nvidia.com/gpu.deploy.client"
    assert set(added_last) == ({"SCRUBBER_CLUSTER_REPORTING"} if CLUSTER in components else set())


def test_taint_component_says_that_it_comes_after_the_cluster_component() -> None:
    assert "List it after the component `cluster`" in (TAINT / "kustomization.yaml").read_text()
    assert "List `taint` after `cluster`" in TEXT
