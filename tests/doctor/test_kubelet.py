"""``scrubber doctor`` on the kubelet: its directories, plugins at its sockets, its list of pods, its PID namespace."""

import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from scrubber.doctor.checks import check_node
from scrubber.doctor.model import CheckContext, CheckLevel, KubeletReport, ServicePaths
from scrubber.doctor.queries import query_kubelet
from scrubber.wire import podresources_pb2 as messages
from scrubber.wire import podresources_pb2_grpc
from tests.doctor.stage import KUBELET, found, healthy, levels, serving, write

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"
SIM = {"backend": "sim"}
UNKNOWN = {"backend": "", "error": "No answer."}
BY_BACKEND = [({}, CheckLevel.ERROR), (UNKNOWN, CheckLevel.WARNING), (SIM, CheckLevel.WARNING)]


@pytest.fixture
def node(short_tmp: Path) -> Iterator[CheckContext]:
    with healthy(short_tmp) as node:
        yield node


def answering(node: CheckContext, report: KubeletReport) -> CheckContext:
    return replace(node, kubelet=report)


# --- its directories


@pytest.mark.parametrize("name", ["device-plugins", "pod-resources"])
def test_missing_kubelet_directory_is_named(node: CheckContext, name: str) -> None:
    (node.root / KUBELET / name).rename(node.root / "elsewhere")
    check = found(node, "kubelet")
    assert (check.level, f"no {name}" in check.message) == (CheckLevel.WARNING, True)
    assert "--kubelet-dir" in check.remedy


def test_missing_plugins_registry_is_no_finding_when_the_plugin_registers_in_device_plugins(
    node: CheckContext,
) -> None:
    """The service's pod does not mount that directory."""
    kubelet = node.root / KUBELET
    (kubelet / "plugins_registry/scrubber-gpu-1.sock").rename(kubelet / "device-plugins/scrubber-gpu-1.sock")
    (kubelet / "plugins_registry").rmdir()
    assert set(levels(node).values()) == {CheckLevel.OK}


def test_both_registration_directories_are_named_when_missing(node: CheckContext) -> None:
    for name in ("device-plugins", "plugins_registry"):
        (node.root / KUBELET / name).rename(node.root / name)
    assert "has no device-plugins/kubelet.sock, no plugins_registry." in found(node, "kubelet").message


def test_missing_kubelet_is_reported_once(node: CheckContext) -> None:
    (node.root / KUBELET).rename(node.root / "elsewhere")
    check = found(node, "kubelet")
    assert (check.level, "There is no kubelet" in check.message) == (CheckLevel.WARNING, True)
    assert {"device-plugins", "pod-resources"}.isdisjoint(levels(answering(node, KubeletReport())))


def test_missing_kubelet_is_no_finding_if_the_service_runs_without_one(node: CheckContext) -> None:
    (node.root / KUBELET).rename(node.root / "elsewhere")
    alone = serving(answering(node, KubeletReport()), kubelet_status="none")
    check = found(alone, "kubelet")
    assert (check.level, "--no-kubelet" in check.message) == (CheckLevel.OK, True)
    assert {"device-plugins", "pod-resources"}.isdisjoint(levels(alone))


@pytest.mark.parametrize("what", ["a dead socket", "a file"])
def test_socket_without_a_listener_is_no_kubelet(node: CheckContext, what: str) -> None:
    path = node.root / KUBELET / "device-plugins/kubelet.sock"
    path.unlink()
    if what == "a file":
        path.write_text("")
    else:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    check = found(node, "kubelet")
    assert check.level is CheckLevel.WARNING
    assert check.message == f"No kubelet listens on {path}."


def test_pod_resources_socket_named_by_the_service_is_checked(node: CheckContext) -> None:
    theirs = serving(node, paths=ServicePaths(pod_resources=Path("/run/elsewhere.sock")))
    assert "no pod-resources/kubelet.sock" in found(theirs, "kubelet").message


# --- plugins


def test_missing_scrubber_plugin_is_a_warning(node: CheckContext) -> None:
    (node.root / KUBELET / "plugins_registry/scrubber-gpu-1.sock").unlink()
    check = found(answering(node, KubeletReport(was_queried=True, is_trusted=True)), "device-plugins")
    assert (check.level, "Our device plugin does not listen" in check.message) == (CheckLevel.WARNING, True)
    assert "critical (alert ScrubberPluginDown)" in check.message, "a warning only because it may be still to come"
    assert (RUNBOOKS / "ScrubberPluginDown.md").read_text().splitlines()[2].startswith("**critical**")
    assert "scrubber-plugin.service" in check.remedy


@pytest.mark.parametrize(("expected", "level"), BY_BACKEND)
def test_running_containers_without_a_plugin_are_counted_in_the_finding(
    node: CheckContext, expected: dict[str, str], level: CheckLevel
) -> None:
    (node.root / KUBELET / "plugins_registry/scrubber-gpu-1.sock").unlink()
    check = found(
        answering(
            serving(node, **expected), KubeletReport(was_queried=True, is_trusted=True, containers_with_devices=2)
        ),
        "device-plugins",
    )
    assert (check.level, "2 containers use our devices" in check.message) == (level, True)
    assert "If the kubelet is restarted, it starts their containers without calling the plugin." in check.message


def test_leftover_socket_is_no_plugin(node: CheckContext) -> None:
    path = node.root / KUBELET / "plugins_registry/scrubber-gpu-1.sock"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert "Our device plugin does not listen" in found(node, "device-plugins").message


@pytest.mark.parametrize("name", ["nvidia-gpu.sock", "nvidiaGPU-1764000000.sock"])
@pytest.mark.parametrize(
    ("expected", "level"), [({}, CheckLevel.ERROR), (UNKNOWN, CheckLevel.WARNING), (SIM, CheckLevel.OK)]
)
def test_another_plugin_for_the_same_gpus_is_named(
    node: CheckContext, expected: dict[str, str], level: CheckLevel, name: str
) -> None:
    path = node.root / KUBELET / "device-plugins" / name
    path.symlink_to(node.root / "listens")
    checks = [check for check in check_node(serving(node, **expected)) if check.name == "device-plugins"]
    assert checks[0].level is level
    assert (str(path) in checks[0].message) == (level is not CheckLevel.OK)
    assert checks[-1].level is CheckLevel.OK


def test_leftover_socket_of_another_plugin_is_no_finding(node: CheckContext) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(node.root / KUBELET / "device-plugins/nvidia-gpu.sock"))
    assert found(node, "device-plugins").level is CheckLevel.OK


# --- assignments


@pytest.mark.parametrize(("expected", "level"), BY_BACKEND)
def test_untrusted_kubelet_list_is_reported_with_the_reason(
    node: CheckContext, expected: dict[str, str], level: CheckLevel
) -> None:
    check = found(
        answering(serving(node, **expected), KubeletReport(was_queried=True, message="It lives in a pod.")),
        "pod-resources",
    )
    assert (check.level, check.message) == (level, "It lives in a pod.")
    assert "systemctl status kubelet" in check.remedy


@pytest.mark.parametrize(("expected", "level"), [({}, CheckLevel.ERROR), (SIM, CheckLevel.WARNING)])
def test_kubelet_untrusted_by_the_service_is_a_finding_even_if_doctor_trusts_the_kubelet(
    node: CheckContext, expected: dict[str, str], level: CheckLevel
) -> None:
    checks = check_node(serving(node, kubelet_status="It was restarted.", **expected))
    findings = [check for check in checks if check.name == "pod-resources"]
    assert [check.level for check in findings] == [level, CheckLevel.OK]
    assert "It was restarted." in findings[0].message


def test_recently_started_kubelet_is_a_finding_only_if_the_service_does_not_trust_the_kubelet(
    node: CheckContext,
) -> None:
    young = answering(node, KubeletReport(was_queried=True, is_recently_started=True, message="It started 3 s ago."))
    assert found(young, "pod-resources").level is CheckLevel.OK
    assert found(serving(young, **UNKNOWN), "pod-resources").message == "It started 3 s ago."
    for reason, expected_message in {"": "It started 3 s ago.", "It lists no pod yet.": "It lists no pod yet."}.items():
        check = found(serving(young, kubelet_status=reason), "pod-resources")
        assert (check.level, check.message) == (CheckLevel.WARNING, expected_message)
        assert "again in a minute" in check.remedy


def test_kubelet_list_that_disagrees_with_checkpoint_or_logs_is_a_warning(node: CheckContext) -> None:
    check = found(
        answering(node, KubeletReport(was_queried=True, is_trusted=True, remarks=("No checkpoint.",))), "pod-resources"
    )
    assert (check.level, check.message) == (CheckLevel.WARNING, "No checkpoint.")
    assert "--pod-logs-dir" in check.remedy


def test_kubelet_query_without_permission_is_reported_as_unverified(node: CheckContext) -> None:
    check = found(answering(node, KubeletReport(was_queried=True, is_permission_denied=True)), "pod-resources")
    assert (check.level, "is unknown" in check.message) == (CheckLevel.WARNING, True)
    assert "sudo" in check.remedy


class Kubelet(podresources_pb2_grpc.PodResourcesListerServicer):
    """Lists one pod with two of our devices: one of a device plugin, one of a resource claim."""

    async def List(self, request: object, context: object) -> messages.ListPodResourcesResponse:
        devices = [messages.ContainerDevices(resource_name="nvidia.com/gpu", device_ids=["GPU-a"])]
        container = messages.ContainerResources(name="main", devices=devices)
        claimed = messages.ClaimResource(driver_name="gpu.scrubber.dev", pool_name="node-1", device_name="gpu-b")
        claim = messages.DynamicResource(claim_name="c", claim_namespace="team", claim_resources=[claimed])
        other = messages.ContainerResources(name="other", dynamic_resources=[claim])
        pod = messages.PodResources(name="p", namespace="team", containers=[container, other])
        return messages.ListPodResourcesResponse(pod_resources=[pod])


@asynccontextmanager
async def kubelet(socket_: Path) -> AsyncIterator[None]:
    server = grpc.aio.server()
    podresources_pb2_grpc.add_PodResourcesListerServicer_to_server(Kubelet(), server)
    server.add_insecure_port(f"unix:{socket_}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


async def query(directory: Path) -> KubeletReport:
    return await query_kubelet(
        directory / "kubelet.sock",
        kubelet_dir=directory,
        pod_logs=directory / "logs",
        cgroups=directory / "cgroups",
        device_ids=["GPU-a", "GPU-b"],
        seconds=20.0,
    )


async def test_doctor_queries_the_kubelet_like_the_service(short_tmp: Path) -> None:
    path = short_tmp / "kubelet.sock"
    async with kubelet(path):
        os.utime(path, (1.0, 1.0))
        report = await query(short_tmp)
    assert (report.was_queried, report.containers_with_devices, report.containers_with_claims) == (True, 2, 1)
    # Its checkpoint and its pods' logs do not exist, so the result contains more than that list.
    assert report.remarks or report.message


async def test_socket_in_the_kubelets_place_without_a_kubelet_is_untrusted(short_tmp: Path) -> None:
    assert await query(short_tmp) == KubeletReport()
    write(short_tmp, "kubelet.sock")
    expected = await query(short_tmp)
    assert (expected.was_queried, expected.is_trusted, "is not a socket" in expected.message) == (True, False, True)
    (short_tmp / "kubelet.sock").unlink()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(short_tmp / "kubelet.sock"))
    expected = await query(short_tmp)
    assert (expected.is_trusted, "accepts no connection" in expected.message) == (False, True)


async def test_socket_path_that_is_too_long_is_reported(short_tmp: Path) -> None:
    deep = short_tmp / ("long" * 30)
    deep.mkdir()
    write(deep, "kubelet.sock")
    report = await query(deep)
    assert (report.is_trusted, "107" in report.message) == (False, True)


# --- the PID namespace


@pytest.mark.parametrize(
    ("expected", "level"), [({}, CheckLevel.ERROR), (UNKNOWN, CheckLevel.WARNING), (SIM, CheckLevel.OK)]
)
def test_pid_namespace_other_than_the_nodes_is_a_finding(
    node: CheckContext, expected: dict[str, str], level: CheckLevel
) -> None:
    write(node.root, "proc/self/status", "Name:\tscrubber\nNSpid:\t5012\t7\n")
    check = found(serving(node, **expected), "pid-namespace")
    assert check.level is level
    assert ("hostPID: true" in check.remedy) == (level is not CheckLevel.OK)
