"""``scrubber doctor`` beside NVIDIA's GPU Operator: what of our installation would break there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.doctor.checks import check_node
from scrubber.doctor.gpu_operator import (
    config_manager,
    deploy_label,
    driver_mounts,
    driver_root,
    mig_manager,
    nvsentinel_yield,
    operator_validations,
    runtime_class,
)
from scrubber.doctor.injection import cdi_hook, injection, plugin_config_file
from scrubber.doctor.libraries import driver_libraries
from scrubber.doctor.model import CheckContext, CheckFunction, CheckLevel, CheckResult
from tests.doctor.stage import (
    CONTAINERD,
    OPERATORS_TOOLKIT,
    as_units,
    beside_operator,
    found,
    healthy,
    process,
    write,
)

CLIENT = "nvidia.com/gpu.deploy.client"
PLUGIN = "nvidia.com/gpu.deploy.device-plugin"
OF_THE_OPERATOR = (
    deploy_label,
    driver_root,
    mig_manager,
    nvsentinel_yield,
    operator_validations,
    runtime_class,
)
OWN = f"proc/{os.getpid()}"


@pytest.fixture
def node(short_tmp: Path) -> Iterator[CheckContext]:
    with healthy(short_tmp) as node:
        yield node


def result(check: CheckFunction, node: CheckContext) -> CheckResult:
    (one,) = check(node)
    return one


def test_well_configured_node_of_the_operator_has_no_remedies(node: CheckContext) -> None:
    checks = check_node(beside_operator(node))
    assert [check for check in checks if check.level is not CheckLevel.OK or check.remedy] == []


@pytest.mark.parametrize("check", OF_THE_OPERATOR)
def test_checks_of_the_operator_are_silent_on_other_nodes(node: CheckContext, check: CheckFunction) -> None:
    process(node.root, os.getpid(), cgroup="/system.slice/scrubber.service")
    assert list(check(node)) == []


@pytest.mark.parametrize("check", [deploy_label, driver_root, injection, cdi_hook, driver_mounts, config_manager])
def test_check_without_our_process_yields_nothing(node: CheckContext, check: CheckFunction) -> None:
    beside_operator(node)
    (node.root / OWN / "environ").unlink()
    assert list(check(node)) == []


@pytest.mark.parametrize("check", [deploy_label, driver_root, injection, driver_mounts])
def test_process_of_ours_that_cannot_be_read_is_never_ok(node: CheckContext, check: CheckFunction) -> None:
    beside_operator(node)
    (node.root / OWN / "environ").unlink()
    (node.root / OWN / "environ").mkdir()
    one = result(check, node)
    assert (one.level, "is unknown" in one.message) == (CheckLevel.WARNING, True)


def test_plugin_that_cannot_be_read_is_reported_once(node: CheckContext) -> None:
    beside_operator(node)
    (node.root / OWN / "environ").unlink()
    (node.root / OWN / "environ").mkdir()
    assert [list(each(node)) for each in (cdi_hook, plugin_config_file, config_manager)] == [[], [], []]


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_runtime_configuration_that_is_no_file_is_not_read_by_the_plugins_check(node: CheckContext, kind: str) -> None:
    beside_operator(node)
    path = node.root / CONTAINERD
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    one = result(injection, node)
    assert (one.level, "is unknown" in one.message) == (CheckLevel.WARNING, True)


# --- the operator can end our pods


@pytest.mark.parametrize(
    ("version", "label", "yields", "level", "text"),
    [
        ("v26.7.0", CLIENT, None, CheckLevel.OK, "they select nodes by"),
        ("v25.10.1", PLUGIN, None, CheckLevel.OK, "they select nodes by"),
        ("v26.7.0", None, CLIENT, CheckLevel.OK, "it follows"),
        ("v25.10.1", None, PLUGIN, CheckLevel.OK, "it follows"),
        ("v26.7.0", None, None, CheckLevel.WARNING, "component gpu-operator-client-label:"),
        ("v25.10.1", None, None, CheckLevel.WARNING, "component gpu-operator-plugin-label:"),
        ("latest", None, None, CheckLevel.WARNING, "gpu-operator-client-label (operator 26.7 or newer) or"),
        ("v25.10.1", CLIENT, None, CheckLevel.WARNING, "gpu-operator-plugin-label instead of"),
        ("v27.1.0", PLUGIN, None, CheckLevel.WARNING, "gpu-operator-client-label instead of"),
        ("latest", PLUGIN, None, CheckLevel.OK, "they select nodes by"),
        ("v25.10.1", None, CLIENT, CheckLevel.WARNING, f"SCRUBBER_YIELD_LABELS={PLUGIN}"),
    ],
)
def test_label_that_does_not_fit_the_operators_version_is_reported_with_the_right_component(
    node: CheckContext, version: str, label: str | None, yields: str | None, level: CheckLevel, text: str
) -> None:
    changed = {"SCRUBBER_DEPLOY_LABEL": label, "SCRUBBER_YIELD_LABELS": yields}
    one = result(deploy_label, beside_operator(node, version=version, changed=changed))
    assert (one.level, text in f"{one.message} {one.remedy}") == (level, True), one


def test_unit_that_follows_no_label_is_reported_with_the_variable_that_makes_the_plugin_yield(
    node: CheckContext,
) -> None:
    changed = {"SCRUBBER_DEPLOY_LABEL": None, "SCRUBBER_YIELD_LABELS": None}
    one = result(deploy_label, as_units(beside_operator(node, changed=changed)))
    assert one.level is CheckLevel.WARNING
    assert "the unit scrubber.service" in one.message
    assert f"SCRUBBER_YIELD_LABELS={CLIENT}" in one.remedy


@pytest.mark.parametrize(
    ("label", "yields", "level"),
    [
        (CLIENT, None, CheckLevel.WARNING),
        (CLIENT, PLUGIN, CheckLevel.OK),
        (PLUGIN, None, CheckLevel.OK),
        (None, CLIENT, CheckLevel.WARNING),
    ],
)
def test_nvsentinel_whose_label_nothing_of_ours_follows_is_reported(
    node: CheckContext, label: str | None, yields: str | None, level: CheckLevel
) -> None:
    changed = {"SCRUBBER_DEPLOY_LABEL": label, "SCRUBBER_YIELD_LABELS": yields}
    one = result(nvsentinel_yield, beside_operator(node, changed=changed))
    assert (one.level, PLUGIN in f"{one.message} {one.remedy}") == (level, True)


# --- what containers get


@pytest.mark.parametrize("strategy", ["envvar", "volume-mounts"])
def test_strategy_that_injects_nothing_with_the_default_runtime_is_an_error(node: CheckContext, strategy: str) -> None:
    one = result(injection, beside_operator(node, changed={"DEVICE_LIST_STRATEGY": strategy}))
    assert one.level is CheckLevel.ERROR
    assert "Containers would start without a GPU" in one.message
    assert "cdi-cri" in one.remedy


def test_strategy_is_only_a_warning_with_a_runtime_check_that_only_warns(node: CheckContext) -> None:
    changed = {"DEVICE_LIST_STRATEGY": "volume-mounts", "SCRUBBER_RUNTIME_CHECK": "warn"}
    assert result(injection, beside_operator(node, changed=changed)).level is CheckLevel.WARNING


def test_runtime_whose_configuration_says_nothing_about_cdi_is_never_ok(node: CheckContext) -> None:
    beside_operator(node)
    write(node.root, CONTAINERD, "version = 2\n")
    (node.root / "etc/containerd/conf.d/99-nvidia.toml").unlink()
    one = result(injection, node)
    assert (one.level, "enable_cdi" in one.message) == (CheckLevel.WARNING, True)


@pytest.mark.parametrize(
    "flag", [["--device-list-strategy", "volume-mounts"], ["--device-list-strategy=volume-mounts"]]
)
def test_flag_of_the_plugin_wins_over_its_variable(node: CheckContext, flag: list[str]) -> None:
    beside_operator(node)
    arguments = ["/opt/scrubber/bin/python", "/opt/scrubber/bin/scrubber", "plugin", *flag]
    process(node.root, os.getpid(), arguments=arguments, variables={"DEVICE_LIST_STRATEGY": "cdi-cri"})
    assert result(injection, node).level is CheckLevel.ERROR


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("version: v1\nflags: {plugin: {deviceListStrategy: [cdi-cri]}}\n", CheckLevel.OK),
        ("version: v1\nflags: {plugin: {deviceListStrategy: envvar}}\n", CheckLevel.ERROR),
        ("version: v1\n", CheckLevel.ERROR),
        ("version: v2\n", CheckLevel.WARNING),
    ],
)
def test_strategy_of_the_configuration_file_counts_where_neither_flag_nor_variable_is_set(
    node: CheckContext, text: str, level: CheckLevel
) -> None:
    beside_operator(node, changed={"DEVICE_LIST_STRATEGY": None})
    write(node.root, f"{OWN}/root/config/config.yaml", text)
    assert result(injection, node).level is level


def test_plugin_that_passes_devices_by_cdi_needs_no_volume_mounts(node: CheckContext) -> None:
    beside_operator(node)
    assert found(node, "toolkit-volume-mounts").level is CheckLevel.OK
    process(node.root, os.getpid(), variables={"DEVICE_LIST_STRATEGY": "volume-mounts"})
    assert found(node, "toolkit-volume-mounts").level is CheckLevel.WARNING


def test_toolkit_of_the_operator_is_configured_in_the_cluster_policy(node: CheckContext) -> None:
    beside_operator(node)
    write(node.root, OPERATORS_TOOLKIT, "")
    check = found(node, "toolkit-envvar")
    assert check.level is CheckLevel.ERROR
    assert "toolkit.env of the ClusterPolicy" in check.remedy


@pytest.mark.parametrize("given", [None, "/opt/elsewhere/nvidia-cdi-hook"])
def test_missing_hook_is_reported(node: CheckContext, given: str | None) -> None:
    beside_operator(node, changed={"NVIDIA_CDI_HOOK_PATH": given})
    if given is None:
        assert result(cdi_hook, node).message == "NVIDIA's hook program is /usr/local/nvidia/toolkit/nvidia-cdi-hook."
        (node.root / "usr/local/nvidia/toolkit/nvidia-cdi-hook").unlink()
    one = result(cdi_hook, node)
    assert one.level is CheckLevel.WARNING
    assert ("is not at /opt" in one.message) == (given is not None)


@pytest.mark.parametrize(
    ("text", "level", "message"),
    [
        ("version: v1\n", CheckLevel.OK, "is valid"),
        ("version: v1\nflags: {novelty: true}\n", CheckLevel.WARNING, "flags.novelty"),
        ("version: v2\n", CheckLevel.ERROR, "would not start"),
    ],
)
def test_configuration_file_of_the_plugin_is_read_as_the_plugin_reads_it(
    node: CheckContext, text: str, level: CheckLevel, message: str
) -> None:
    beside_operator(node)
    write(node.root, f"{OWN}/root/config/config.yaml", text)
    one = result(plugin_config_file, node)
    assert (one.level, message in one.message) == (level, True), one


@pytest.mark.parametrize(
    ("signalled", "level"),
    [("/opt/scrubber/bin/python", CheckLevel.OK), ("/usr/bin/nvidia-device-plugin", CheckLevel.WARNING)],
)
def test_config_manager_that_signals_another_process_is_reported(
    node: CheckContext, signalled: str, level: CheckLevel
) -> None:
    beside_operator(node)
    write(node.root, "proc/4800/environ", f"A=b\0PROCESS_TO_SIGNAL={signalled}\0")
    one = result(config_manager, node)
    assert one.level is level
    assert ("PROCESS_TO_SIGNAL=/opt/scrubber/bin/python" in one.remedy) == (level is CheckLevel.WARNING)


def test_config_manager_of_another_pod_is_not_ours(node: CheckContext) -> None:
    beside_operator(node)
    write(node.root, "proc/4800/cgroup", "0::/kubepods.slice/kubepods-pod9.slice/x.scope\n")
    assert list(config_manager(node)) == []


# --- where the driver is


def test_plugin_that_looks_for_a_containers_driver_on_the_host_is_an_error(node: CheckContext) -> None:
    one = result(driver_root, beside_operator(node, changed={"SCRUBBER_DRIVER_READY_FILE": None}))
    assert one.level is CheckLevel.ERROR
    assert "/run/nvidia/driver" in one.message
    assert "SCRUBBER_DRIVER_READY_FILE" in one.remedy


def test_driver_root_that_contradicts_the_validator_is_an_error(node: CheckContext) -> None:
    one = result(driver_root, beside_operator(node, changed={"NVIDIA_DRIVER_ROOT": "/"}))
    assert (one.level, "but it is in /run/nvidia/driver" in one.message) == (CheckLevel.ERROR, True)


def test_libraries_and_persistence_daemon_of_a_driver_in_a_container_are_found(node: CheckContext) -> None:
    beside_operator(node)
    for name in ("usr/lib/x86_64-linux-gnu", "run/nvidia-persistenced"):
        (node.root / "run/nvidia/driver" / name).parent.mkdir(parents=True, exist_ok=True)
        (node.root / name).rename(node.root / "run/nvidia/driver" / name)
    assert result(driver_libraries, node).level is CheckLevel.OK
    assert found(node, "persistenced").level is CheckLevel.OK


def test_libraries_of_the_driver_before_are_an_error_that_names_both_versions(node: CheckContext) -> None:
    beside_operator(node)
    library = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.550.54.15"
    write(node.root, f"{OWN}/mountinfo", f"40 30 0:9 {library} {library} ro - overlay overlay ro\n")
    one = result(driver_mounts, node)
    assert one.level is CheckLevel.ERROR
    assert "550.54.15, but 570.133.20 is loaded" in one.message
    assert "rollout restart daemonset/scrubber" in one.remedy


@pytest.mark.parametrize("missing", ["driver-ready", "toolkit-ready"])
def test_missing_file_of_the_validator_is_named(node: CheckContext, missing: str) -> None:
    beside_operator(node)
    (node.root / "run/nvidia/validations" / missing).unlink()
    one = result(operator_validations, node)
    assert (one.level, f"has no {missing}" in one.message) == (CheckLevel.WARNING, True)
    assert "kubectl -n gpu-operator logs daemonset/nvidia-operator-validator" in one.remedy


def test_validators_file_that_the_plugin_refuses_is_an_error(node: CheckContext) -> None:
    beside_operator(node)
    write(node.root, "run/nvidia/validations/driver-ready", "NVIDIA_DRIVER_ROOT=$(id)\n")
    assert result(operator_validations, node).level is CheckLevel.ERROR


# --- the service's way to the driver


def test_runtime_without_a_handler_for_the_service_is_reported(node: CheckContext) -> None:
    beside_operator(node)
    (node.root / "etc/containerd/conf.d/99-nvidia.toml").unlink()
    one = result(runtime_class, node)
    assert (one.level, "handler nvidia" in one.message) == (CheckLevel.WARNING, True)


@pytest.mark.parametrize(
    ("listed", "level"),
    [(None, CheckLevel.WARNING), ("monitoring", CheckLevel.WARNING), ("a, scrubber-system", CheckLevel.OK)],
)
def test_nri_plugin_that_does_not_serve_our_namespace_is_reported(
    node: CheckContext, listed: str | None, level: CheckLevel
) -> None:
    beside_operator(node)
    variables = {"ENABLE_NRI_PLUGIN": "true"} | ({"NRI_MANAGEMENT_CDI_DEVICE_NAMESPACES": listed} if listed else {})
    process(node.root, 4900, comm="nvidia-ctk-inst", variables=variables)
    one = result(runtime_class, node)
    expected = "NRI_MANAGEMENT_CDI_DEVICE_NAMESPACES=scrubber-system"
    assert (one.level, expected in one.remedy) == (level, level is CheckLevel.WARNING)


@pytest.mark.parametrize(
    ("clients", "level"),
    [
        (None, CheckLevel.WARNING),
        ("systemd-services:\n- nvsm.service\n", CheckLevel.WARNING),
        ("systemd-services:\n- scrubber-plugin.service\n- scrubber.service\n", CheckLevel.OK),
    ],
)
def test_mig_manager_that_does_not_stop_our_units_is_reported(
    node: CheckContext, clients: str | None, level: CheckLevel
) -> None:
    as_units(beside_operator(node, changed={"SCRUBBER_YIELD_LABELS": None}))
    if clients is not None:
        write(node.root, "var/lib/kubelet/pods/uid-4/volumes/kubernetes.io~configmap/gpu-clients/clients.yaml", clients)
    one = result(mig_manager, node)
    assert (one.level, "migManager.gpuClientsConfig" in one.remedy) == (level, level is CheckLevel.WARNING)


def test_pods_and_a_plugin_that_yields_need_no_entry_for_mig_manager(node: CheckContext) -> None:
    assert list(mig_manager(beside_operator(node))) == []
    assert result(mig_manager, as_units(node)).level is CheckLevel.OK


def test_nri_plugin_is_unknown_in_a_container_without_the_nodes_processes(node: CheckContext) -> None:
    (node.root / "proc/self/status").unlink()
    write(node.root, "proc/self/status", "NSpid:\t4711\t1\n")
    (node.root / "proc/17").mkdir()
    one = found(replace(node, root_of_init=node.root), "nri-annotations")
    assert (one.level, "is unknown" in one.message) == (CheckLevel.WARNING, True)
    assert "--node-root /proc/1/root" in one.remedy
