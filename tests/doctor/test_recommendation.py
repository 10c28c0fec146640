"""``scrubber doctor``: what is recognized on the node, and the configuration that it recommends for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from scrubber.config.infrastructure_file import load_infrastructure_table
from scrubber.doctor.environment import OPERANDS, OPERATOR_NAMESPACES
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, Recommendation
from scrubber.doctor.recommendation import recommendation
from tests.doctor.stage import (
    CONTAINERD,
    MOUNTS,
    OPERATORS_TOOLKIT,
    as_units,
    beside_operator,
    healthy,
    process,
    serving,
    write,
)

KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
PLUGIN = "nvidia.com/gpu.deploy.device-plugin"


@pytest.fixture
def node(short_tmp: Path) -> Iterator[CheckContext]:
    with healthy(short_tmp) as node:
        yield node


def result(node: CheckContext) -> CheckResult:
    (one,) = recommendation(node)
    return one


def recommended(node: CheckContext) -> Recommendation:
    one = result(node)
    assert one.level is CheckLevel.OK, one
    assert one.recommendation is not None
    return one.recommendation


def exists(found: Recommendation) -> bool:
    """Return whether every kustomization exists, as a kustomization or a component, and every value of the chart."""
    for key, _ in found.chart_values:
        at = yaml.safe_load((KUBERNETES.parent / "chart/values.yaml").read_text())
        for word in key.split("."):
            at = at[word]
    parts = {each.rpartition("/")[2]: "Kustomization" for each in found.resources}
    parts |= dict.fromkeys((*found.components, *found.choices), "Component")
    return all(
        yaml.safe_load((KUBERNETES / name / "kustomization.yaml").read_text())["kind"] == kind
        for name, kind in parts.items()
    )


def without_nvsentinel(node: CheckContext) -> CheckContext:
    (node.pod_logs / "nvsentinel_platform-connectors-x_uid-9").rmdir()
    return node


# --- beside the operator


def test_current_operator_gets_the_overlay_the_label_component_and_the_settings_of_the_cluster_policy(
    node: CheckContext,
) -> None:
    found = recommended(without_nvsentinel(beside_operator(node)))
    assert found.environment == (
        "NVIDIA's GPU Operator (version 26.7, in the namespace gpu-operator, driver in a container, CDI on, MIG manager)"
    )
    assert found.resources == ("gpu-scrubber/deploy/kubernetes/gpu-operator",)
    assert found.components == ("gpu-operator-client-label", "admission")
    assert dict(found.chart_values) == {
        "gpuOperator.enabled": "true",
        "gpuOperator.deployLabel": "client",
        "admission.enabled": "true",
    }
    assert dict(found.cluster_policy) == {"devicePlugin.enabled": "false"}
    assert dict(found.toolkit_environment) == {"ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED": "false"}
    assert (found.policy, found.notes, exists(found)) == ((), (), True)


def test_recommendation_is_readable_without_json(node: CheckContext) -> None:
    message = result(without_nvsentinel(beside_operator(node))).message
    assert "resources: [gpu-scrubber/deploy/kubernetes/gpu-operator]" in message
    assert "gpu-scrubber/deploy/kubernetes/gpu-operator-client-label" in message
    assert "ClusterPolicy: devicePlugin.enabled=false." in message
    assert "toolkit.env: ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED=false." in message


def test_operator_before_26_7_gets_the_other_label_component(node: CheckContext) -> None:
    found = recommended(without_nvsentinel(beside_operator(node, version="v25.10.1")))
    assert found.components == ("gpu-operator-plugin-label", "admission")
    assert exists(found)


def test_operator_without_a_visible_version_gets_both_label_components_to_choose_from(node: CheckContext) -> None:
    found = recommended(without_nvsentinel(beside_operator(node, version="latest@sha256:00")))
    assert found.choices == ("gpu-operator-client-label", "gpu-operator-plugin-label")
    assert found.components == ("admission",)
    assert "version is not visible" in found.notes[0]
    assert exists(found)


def test_image_of_another_namespace_does_not_show_the_operators_version(node: CheckContext) -> None:
    beside_operator(node)
    (bundle,) = (node.root / "run/containerd").rglob("config.json")
    bundle.write_text(bundle.read_text().replace('"gpu-operator"', '"tenant"'))
    assert "of an unknown version" in recommended(node).environment


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"annotations": "/gpu-operator:v26.7"}', '"/gpu-operator"', "[" * 100000]
)
def test_container_configuration_that_is_not_what_a_runtime_writes_is_passed_over(
    node: CheckContext, text: str
) -> None:
    beside_operator(node)
    (bundle,) = (node.root / "run/containerd").rglob("config.json")
    bundle.write_text(text and f"{text}/gpu-operator")
    assert "of an unknown version" in recommended(node).environment


def test_cri_o_shows_the_version(node: CheckContext) -> None:
    beside_operator(node)
    (bundle,) = (node.root / "run/containerd").rglob("config.json")
    text = bundle.read_text().replace("io.kubernetes.cri.image-name", "io.kubernetes.cri-o.ImageName")
    text = text.replace("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.pod.namespace")
    bundle.unlink()
    write(node.root, "run/containers/storage/overlay-containers/0a/userdata/config.json", text)
    assert "version 26.7" in recommended(node).environment


def test_nri_plugin_gets_its_component_and_our_namespace(node: CheckContext) -> None:
    beside_operator(node)
    process(node.root, 4900, comm="nvidia-ctk-inst", variables={"ENABLE_NRI_PLUGIN": "true"})
    found = recommended(node)
    assert "gpu-operator-nri" in found.components
    assert dict(found.toolkit_environment)["NRI_MANAGEMENT_CDI_DEVICE_NAMESPACES"] == "scrubber-system"
    assert ("NRI plugin" in found.environment, exists(found)) == (True, True)


def test_operator_without_cdi_has_to_turn_it_on(node: CheckContext) -> None:
    beside_operator(node)
    write(node.root, OPERATORS_TOOLKIT, "[nvidia-container-runtime]\nmode = 'legacy'\n")
    found = recommended(node)
    assert dict(found.cluster_policy)["cdi.enabled"] == "true"
    assert "CDI off" in found.environment


def test_driver_on_the_host_is_distinguished_from_one_in_a_container(node: CheckContext) -> None:
    beside_operator(node)
    text = "NVIDIA_DRIVER_ROOT=/\nDRIVER_ROOT_CTR_PATH=/host\nNVIDIA_DEV_ROOT=/\n"
    write(node.root, "run/nvidia/validations/driver-ready", text)
    assert "driver on the host" in recommended(node).environment


def test_nvsentinel_gets_its_components_and_the_label_that_it_sets(node: CheckContext) -> None:
    found = recommended(beside_operator(node))
    assert {"nvsentinel", "yield"} <= set(found.components)
    assert dict(found.plugin_environment) == {"SCRUBBER_YIELD_LABELS": PLUGIN}
    assert dict(found.chart_values)["cluster.yield.labels"] == f"{{{PLUGIN}}}"
    assert exists(found)


def test_operator_in_a_namespace_of_its_own_needs_a_line_of_the_policy(node: CheckContext) -> None:
    beside_operator(node)
    for directory in list(node.pod_logs.iterdir()):
        directory.rename(node.pod_logs / directory.name.replace("gpu-operator_", "gpus_", 1))
    found = recommended(node)
    assert found.policy == ("infrastructure: {pods: [{namespace: gpus}]}",)
    assert "Add gpus to the namespaceSelector" in found.notes[0]


def test_pods_that_are_named_like_operands_prove_no_operator(node: CheckContext) -> None:
    (node.pod_logs / "tenant_nvidia-operator-validator-x_uid-1").mkdir(parents=True)
    assert "No GPU Operator" in recommended(node).environment


def test_units_get_variables_and_the_list_of_mig_manager_in_place_of_manifests(node: CheckContext) -> None:
    as_units(without_nvsentinel(beside_operator(node)))
    write(
        node.root,
        "run/nvidia/validations/driver-ready",
        "NVIDIA_DRIVER_ROOT=/\nDRIVER_ROOT_CTR_PATH=/host\nNVIDIA_DEV_ROOT=/\n",
    )
    found = recommended(node)
    assert (found.resources, found.chart_values) == ((), ())
    assert dict(found.plugin_environment) == {
        "DEVICE_LIST_STRATEGY": "cdi-annotations,cdi-cri",
        "SCRUBBER_DRIVER_READY_FILE": "/run/nvidia/validations/driver-ready",
        "SCRUBBER_YIELD_LABELS": "nvidia.com/gpu.deploy.client",
    }
    assert "migManager.gpuClientsConfig.name" in dict(found.cluster_policy)


def test_operator_in_dra_mode_is_a_warning_that_says_why(node: CheckContext) -> None:
    (node.pod_logs / "gpu-operator_nvidia-dra-driver-kubelet-plugin-x_uid-1").mkdir(parents=True)
    one = result(node)
    assert (one.level, one.recommendation) == (CheckLevel.WARNING, None)
    assert one.message.startswith("NVIDIA's GPU Operator is in DRA mode here")


# --- other environments


def test_runtime_with_cdi_gets_cdi_and_one_with_nvidias_default_runtime_gets_base(node: CheckContext) -> None:
    write(node.root, "usr/bin/nvidia-ctk")
    found = recommended(node)
    assert found.resources == ("gpu-scrubber/deploy/kubernetes/cdi",)
    write(
        node.root,
        CONTAINERD,
        "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd]\ndefault_runtime_name = 'nvidia'\n",
    )
    found = recommended(node)
    assert found.resources == ("gpu-scrubber/deploy/kubernetes/base",)
    assert MOUNTS in found.notes[0]
    assert exists(found)


def test_node_without_the_container_toolkit_gets_the_units_as_an_alternative(node: CheckContext) -> None:
    assert any("deploy/systemd" in each for each in recommended(node).notes)


@pytest.mark.parametrize(
    ("pod", "unit", "provider"),
    [
        ("kube-system_dcgm-server-x_uid-1", "", "Amazon EKS"),
        ("kube-system_nvidia-gpu-device-plugin-x_uid-1", "", "Google Kubernetes Engine"),
        ("", "nvidia-device-plugin.service", "Azure Kubernetes Service"),
    ],
)
def test_provider_is_recognized_by_its_agents(node: CheckContext, pod: str, unit: str, provider: str) -> None:
    (node.pod_logs / pod).mkdir(parents=True)
    (node.root / "sys/fs/cgroup/system.slice" / unit).mkdir(parents=True)
    found = recommended(node)
    assert found.environment.startswith(provider)
    assert "Remove the provider's device plugin" in found.notes[0]


def test_files_of_a_removed_operator_are_no_operator(node: CheckContext) -> None:
    write(node.root, OPERATORS_TOOLKIT)
    found = recommended(node)
    assert "No GPU Operator" in found.environment
    assert f"{node.root}/usr/local/nvidia/toolkit is left" in found.notes[0]


def test_container_that_does_not_see_the_node_says_unknown(node: CheckContext) -> None:
    one = result(replace(node, root_of_init=node.root / "proc"))
    assert (one.level, "is unknown" in one.message) == (CheckLevel.WARNING, True)
    assert "--node-root /proc/1/root" in one.remedy


def test_operator_whose_pods_are_visible_in_a_container_is_recognized_and_the_rest_is_unknown(
    node: CheckContext,
) -> None:
    (node.pod_logs / "gpu-operator_nvidia-operator-validator-x_uid-1").mkdir(parents=True)
    found = recommended(replace(node, root_of_init=node.root / "proc"))
    assert "of an unknown version" in found.environment
    assert any("NRI plugin runs is not visible" in each for each in found.notes)


def test_unreadable_log_directory_is_unknown(node: CheckContext) -> None:
    write(node.root, "var/log/pods", "a file")
    one = result(node)
    assert (one.level, "is unknown" in one.message) == (CheckLevel.WARNING, True)


def test_simulated_node_needs_no_manifests(node: CheckContext) -> None:
    one = result(serving(node, backend="sim"))
    assert (one.level, one.recommendation) == (CheckLevel.OK, None)


def test_names_that_prove_an_operator_are_those_of_the_shipped_list() -> None:
    group = load_infrastructure_table()["gpu-operator"]
    assert group.namespaces == OPERATOR_NAMESPACES
    assert all(group.expects(each) for each in OPERANDS)
