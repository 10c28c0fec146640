"""The component by which the plugin has NVSentinel reset GPUs: its rights, its setting, and what its policy permits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cel import AdmissionPolicy
from tests.cluster.plugin_server import RESETS_GPUS
from tests.deployed import BASE, DEPLOY, patch_all, value_of, yaml_of
from tests.project.test_agent_pause_manifests import PAUSE, built, environment
from tests.project.test_cluster_manifests import CLUSTER, YIELD, added, of_kind, request

RESET = DEPLOY / "kubernetes" / "gpu-reset"
OWN = {"app.kubernetes.io/managed-by": "scrubber-plugin"}


def test_role_allows_exactly_the_requests_about_resets() -> None:
    (rule,) = of_kind(RESET, "ClusterRole")["rules"]
    assert rule["apiGroups"] == ["janitor.dgxc.nvidia.com"]
    assert {f"{verb} {what}" for what in rule["resources"] for verb in rule["verbs"]} == RESETS_GPUS
    binding = of_kind(RESET, "ClusterRoleBinding")
    account = {"kind": "ServiceAccount", "name": "scrubber-plugin", "namespace": yaml_of(BASE)["namespace"]}
    assert (binding["subjects"], binding["roleRef"]["name"]) == (
        [account],
        value_of(of_kind(RESET, "ClusterRole"), "name"),
    )


@pytest.mark.parametrize("components", [(RESET,), (CLUSTER, RESET), (CLUSTER, PAUSE, RESET), (YIELD, RESET)])
def test_plugin_gets_the_setting_and_a_token_beside_other_components(components: tuple[Any, ...]) -> None:
    assert environment(*components)["SCRUBBER_GPU_RESET"] == "true"


@pytest.mark.parametrize(
    ("operation", "node", "labels", "by", "permitted"),
    [
        ("CREATE", "node-1", OWN, request(), True),
        ("DELETE", "node-1", OWN, request(), True),
        ("CREATE", "node-2", OWN, request(), False),
        ("DELETE", "node-2", OWN, request(), False),
        ("CREATE", "node-1", {}, request(), False),
        ("DELETE", "node-1", {"app.kubernetes.io/managed-by": "someone"}, request(), False),
        ("CREATE", "node-1", OWN, {"userInfo": {"username": request()["userInfo"]["username"]}}, False),
        ("DELETE", "node-2", {}, request(account="someone-else"), True),
    ],
)
def test_policy_permits_requests_for_resets_of_the_own_node_and_no_others(
    operation: str, node: str, labels: dict[str, str], by: dict[str, Any], permitted: bool
) -> None:
    reset = {"metadata": {"name": "pause-1", "labels": labels}, "spec": {"nodeName": node}}
    gone = operation == "DELETE"
    policy = AdmissionPolicy(of_kind(RESET, "ValidatingAdmissionPolicy"))
    refusals = policy.refusals(
        object=None if gone else reset, oldObject=reset if gone else None, request=by | {"operation": operation}
    )
    assert (refusals == []) is permitted


def test_component_can_be_combined_with_all_others_that_give_the_plugin_access() -> None:
    names = [
        (each["kind"], value_of(each, "name"))
        for component in (CLUSTER, YIELD, PAUSE, RESET)
        for each in added(component)
    ]
    assert len(names) == len(set(names))
    assert set(yaml_of(RESET)["resources"]) == {each.name for each in RESET.iterdir()} - {"kustomization.yaml"}
    patch_all(built(CLUSTER, PAUSE, RESET), YIELD)
