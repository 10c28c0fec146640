"""The components that give the plugin credentials: what it asks and no more, for itself alone, and evictions apart."""

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

from plugin.cluster.bulletin import GONE, REASONS
from plugin.cluster.duties import NodeTimes
from plugin.cluster.view import AWAY, CONDITION, PREFIX, STOPPED
from plugin.service import WatchTimes
from scrubber.cli import plugin_flags
from tests.cluster.api_server import ApiServerStandIn
from tests.deployed import BASE, CDI, DEPLOY, ROOT, documents, said_of, yaml_of

CLUSTER, EVICTION = DEPLOY / "kubernetes" / "cluster", DEPLOY / "kubernetes" / "eviction"
PAGE = (ROOT / "docs" / "cluster.md").read_text()
Document = dict[str, Any]


def added(component: Path) -> list[Document]:
    """The objects that a component brings along."""
    names = yaml_of(component)["resources"]
    return [each for name in names for each in yaml.safe_load_all((component / name).read_text())]


def of_kind(component: Path, kind: str) -> Document:
    (found,) = [each for each in added(component) if each["kind"] == kind]
    return found


def patched(base: Path) -> dict[tuple[str, str], Document]:
    """The objects of ``base`` after the component's patches: (kind, name) → object."""
    found = {(each["kind"], said_of(each, "name")): copy.deepcopy(each) for each in documents(base)}
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
    """What the role allows: ``verb resource``."""
    rules = of_kind(component, "ClusterRole")["rules"]
    assert all(set(rule) == {"apiGroups", "resources", "verbs"} and rule["apiGroups"] == [""] for rule in rules)
    return {f"{verb} {resource}" for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


def test_the_role_allows_what_the_plugin_asks_and_nothing_else() -> None:
    assert allowed(CLUSTER) == ApiServerStandIn().allowed
    assert allowed(EVICTION) == {"create pods/eviction"}


@pytest.mark.parametrize("component", [CLUSTER, EVICTION])
def test_a_role_is_the_plugins_account_s_alone(component: Path) -> None:
    role, binding = of_kind(component, "ClusterRole"), of_kind(component, "ClusterRoleBinding")
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": said_of(role, "name"),
    }
    account = patched(BASE)["DaemonSet", "scrubber-plugin"]["spec"]["template"]["spec"]["serviceAccountName"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account, "namespace": yaml_of(BASE)["namespace"]},
    ]


def test_nobody_may_evict_by_the_way() -> None:
    assert {each["kind"] for each in added(EVICTION)} == {"ClusterRole", "ClusterRoleBinding"}
    assert set(yaml_of(EVICTION)) == {"apiVersion", "kind", "resources"}
    assert str(EVICTION.name) not in str(yaml_of(CLUSTER))


@pytest.mark.parametrize("base", [BASE, CDI])
def test_only_the_plugins_pod_gets_a_token_and_the_name_of_its_node(base: Path) -> None:
    before = {(each["kind"], said_of(each, "name")): each for each in documents(base)}
    after = patched(base)
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {("DaemonSet", "scrubber-plugin")}
    was, now = (each["DaemonSet", "scrubber-plugin"]["spec"]["template"]["spec"] for each in (before, after))
    assert (was.pop("automountServiceAccountToken"), now.pop("automountServiceAccountToken")) == (False, True)
    had, has = (each["containers"][0].pop("env") for each in (was, now))
    assert was == now
    assert [each for each in has if each not in had] == [
        {"name": "SCRUBBER_CLUSTER", "value": "auto"},
        {"name": variable(), "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]


def variable() -> str:
    """That names the node to the plugin."""
    option = get_args(plugin_flags.NodeNameOption)[1]
    assert isinstance(option, typer.models.OptionInfo)
    assert isinstance(option.envvar, str)
    return option.envvar


def test_what_a_role_cannot_say_an_admission_policy_does() -> None:
    policy, binding = (of_kind(CLUSTER, f"ValidatingAdmissionPolicy{word}") for word in ("", "Binding"))
    spec = policy["spec"]
    assert spec["failurePolicy"] == "Fail"
    assert binding["spec"] == {"policyName": said_of(policy, "name"), "validationActions": ["Deny"]}
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert set(rule["resources"]) == {each.split()[1] for each in allowed(CLUSTER) if "nodes" in each}
    assert rule["operations"] == ["UPDATE"]  # which a patch is
    (condition,) = spec["matchConditions"]
    (account,) = of_kind(CLUSTER, "ClusterRoleBinding")["subjects"]
    assert condition["expression"].endswith(f'"system:serviceaccount:{account["namespace"]}:{account["name"]}"')
    expressions = " ".join(each["expression"] for each in spec["validations"])
    assert set(re.findall(r'startsWith\("([^"]+)"\)', expressions)) == {PREFIX}
    assert set(re.findall(r'type == "([^"]+)"', expressions)) == {CONDITION}
    assert "object.spec == oldObject.spec" in expressions
    assert all(each["message"] for each in spec["validations"])


def test_of_a_nodes_status_nothing_but_the_conditions_may_differ() -> None:
    """The ports of the kubelet, volumes and images are there, too; each must be as it was, or as absent as it was."""
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
"""Maps of text. Every other map of a node has quantities, which have no type for the API server's type check."""


def undefined(expression: str) -> list[str]:
    """Return the fields of ``expression`` that the API server's type check does not know.

    It takes ``object`` and ``oldObject`` as the kind that the policy matches, and leaves out every field whose schema names
    no single type, as that of a quantity does (text or number), and every map and list of such.
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


def test_the_api_server_s_type_check_knows_every_field_that_the_admission_policy_names() -> None:
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
def test_what_the_type_check_does_not_know_is_found(expression: str, wrong: list[str]) -> None:
    assert undefined(expression) == wrong


def test_the_plugin_reaches_the_network_and_the_service_does_not() -> None:
    policy = of_kind(CLUSTER, "NetworkPolicy")
    labels = patched(BASE)["DaemonSet", "scrubber-plugin"]["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"] == {"matchLabels": labels}
    assert policy["spec"]["policyTypes"] == ["Egress"]
    assert policy["metadata"]["namespace"] == yaml_of(BASE)["namespace"]


@pytest.mark.parametrize("component", [CLUSTER, EVICTION])
def test_every_manifest_of_a_component_is_in_it(component: Path) -> None:
    assert yaml_of(component)["kind"] == "Component"
    assert set(yaml_of(component)["resources"]) == {each.name for each in component.iterdir()} - {"kustomization.yaml"}


def test_the_page_names_everything_that_is_told() -> None:
    code = (ROOT / "plugin" / "cluster" / "view.py").read_text()
    told = {CONDITION, GONE, *REASONS.values(), AWAY.reason, STOPPED.reason}
    told |= set(re.findall(r'"((?:All|Some|None|No)[A-Z][A-Za-z]+)"', code))
    told |= {f"{PREFIX}{word}" for word in ("clean", "dirty", "quarantined")}
    assert len(told) > 12
    assert {each for each in told if f"`{each}`" not in PAGE} == set()
    named = set(re.findall(r"^\| (?:node|pod) \| `(\w+)` \|", PAGE, re.MULTILINE))
    assert named == {GONE, *REASONS.values(), "GpuNotHandedOver"}


def test_the_page_says_whom_an_eviction_hits_and_what_a_stolen_token_can_do() -> None:
    hits = PAGE.partition("## Whom an eviction hits")[2].partition("\n## ")[0]
    for each in ("never the one that holds", "without a controller", "Off by default", "containers that run"):
        assert each in hits
    can = PAGE.partition("## What the credentials can do")[2]
    for verb in sorted(allowed(CLUSTER)):
        assert f"`{verb.split()[0]}`" in can
    assert "any event of any namespace" in can


def test_the_page_says_the_times_that_the_plugin_keeps() -> None:
    times, watch = NodeTimes(), WatchTimes()
    assert times.labels == 60
    assert "at most once a minute" in PAGE.partition("## The labels")[2].partition("\n## ")[0]
    silence = watch.heartbeat + watch.probe + watch.grace
    row = next(line for line in PAGE.splitlines() if "`ScrubServiceAway`" in line)
    assert f"{watch.grace:g} s" in row
    assert f"{silence:g} s" in row
    assert f"once more {times.confirm:g} s after the plugin's first write" in PAGE


def test_the_page_says_what_was_not_tried() -> None:
    assert "A node with a real\nGPU has not been tried.**" in PAGE
    for each in (CLUSTER, EVICTION):
        assert str(each.relative_to(ROOT)) in PAGE or f"gpu-scrubber/{each.relative_to(ROOT)}" in PAGE
