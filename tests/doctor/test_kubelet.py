"""``scrubber doctor`` on the kubelet: its directories, the plugins at its sockets, its list of pods, its PID namespace."""

import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from scrubber.doctor.asking import ask_kubelet
from scrubber.doctor.examination import examine
from scrubber.doctor.finding import KubeletSaid, Level, Node, Places
from scrubber.wire import podresources_pb2 as messages
from scrubber.wire import podresources_pb2_grpc
from tests.doctor.stage import KUBELET, found, healthy, levels, serving, write

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"
SIM = {"backend": "sim"}
UNKNOWN = {"backend": "", "refusal": "Nobody answers."}
BY_BACKEND = [({}, Level.ERROR), (UNKNOWN, Level.WARNING), (SIM, Level.WARNING)]


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    with healthy(short_tmp) as node:
        yield node


def answering(node: Node, said: KubeletSaid) -> Node:
    return replace(node, kubelet=said)


# --- its directories


@pytest.mark.parametrize("name", ["device-plugins", "pod-resources"])
def test_a_directory_that_the_kubelet_has_not_made_is_named(node: Node, name: str) -> None:
    (node.root / KUBELET / name).rename(node.root / "elsewhere")
    check = found(node, "kubelet")
    assert (check.level, f"no {name}" in check.sentence) == (Level.WARNING, True)
    assert "--kubelet-dir" in check.remedy


def test_without_plugins_registry_nothing_is_missing_where_the_plugin_registers_in_device_plugins(node: Node) -> None:
    """As in the service's pod: it has no mount of that directory."""
    kubelet = node.root / KUBELET
    (kubelet / "plugins_registry/scrubber-gpu-1.sock").rename(kubelet / "device-plugins/scrubber-gpu-1.sock")
    (kubelet / "plugins_registry").rmdir()
    assert set(levels(node).values()) == {Level.OK}


def test_without_any_directory_to_register_in_both_are_named(node: Node) -> None:
    for name in ("device-plugins", "plugins_registry"):
        (node.root / KUBELET / name).rename(node.root / name)
    assert "has no device-plugins/kubelet.sock, no plugins_registry." in found(node, "kubelet").sentence


def test_a_node_without_a_kubelet_is_told_once(node: Node) -> None:
    (node.root / KUBELET).rename(node.root / "elsewhere")
    check = found(node, "kubelet")
    assert (check.level, "There is no kubelet here" in check.sentence) == (Level.WARNING, True)
    assert {"plugins", "pod-resources"}.isdisjoint(levels(answering(node, KubeletSaid())))


@pytest.mark.parametrize("what", ["a dead socket", "a file"])
def test_a_socket_that_nobody_listens_on_is_no_kubelet(node: Node, what: str) -> None:
    path = node.root / KUBELET / "device-plugins/kubelet.sock"
    path.unlink()
    if what == "a file":
        path.write_text("")
    else:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    check = found(node, "kubelet")
    assert check.level is Level.WARNING
    assert check.sentence == f"No kubelet listens on {path}."


def test_the_socket_that_the_service_names_is_the_one_that_counts(node: Node) -> None:
    theirs = serving(node, places=Places(pod_resources=Path("/run/elsewhere.sock")))
    assert "no pod-resources/kubelet.sock" in found(theirs, "kubelet").sentence


# --- plugins


def test_without_a_plugin_of_ours_no_pod_gets_a_gpu(node: Node) -> None:
    (node.root / KUBELET / "plugins_registry/scrubber-gpu-1.sock").unlink()
    check = found(answering(node, KubeletSaid(asked=True, believed=True)), "plugins")
    assert (check.level, "No device plugin of ours" in check.sentence) == (Level.WARNING, True)
    assert "critical (alert ScrubberPluginAway)" in check.sentence, "a warning only because it may be still to come"
    assert (RUNBOOKS / "ScrubberPluginAway.md").read_text().splitlines()[2].startswith("**critical**")
    assert "scrubber-plugin.service" in check.remedy


@pytest.mark.parametrize(("said", "level"), BY_BACKEND)
def test_a_node_whose_containers_would_start_without_being_asked_for_is_named(
    node: Node, said: dict[str, str], level: Level
) -> None:
    (node.root / KUBELET / "plugins_registry/scrubber-gpu-1.sock").unlink()
    check = found(answering(serving(node, **said), KubeletSaid(asked=True, believed=True, has_devices=2)), "plugins")
    assert (check.level, "2 containers have devices of ours" in check.sentence) == (level, True)
    assert "If the kubelet is restarted, it starts their containers without asking the service." in check.sentence


def test_a_socket_that_a_plugin_left_behind_is_no_plugin(node: Node) -> None:
    path = node.root / KUBELET / "plugins_registry/scrubber-gpu-1.sock"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert "No device plugin of ours" in found(node, "plugins").sentence


@pytest.mark.parametrize(("said", "level"), [({}, Level.ERROR), (UNKNOWN, Level.WARNING), (SIM, Level.OK)])
def test_another_plugin_for_the_same_gpus_is_named(node: Node, said: dict[str, str], level: Level) -> None:
    path = node.root / KUBELET / "device-plugins/nvidia-gpu.sock"
    path.symlink_to(node.root / "listens")
    checks = [check for check in examine(serving(node, **said)) if check.name == "plugins"]
    assert checks[0].level is level
    assert (str(path) in checks[0].sentence) == (level is not Level.OK)
    assert checks[-1].level is Level.OK


def test_a_socket_that_another_plugin_left_behind_gives_nothing_away(node: Node) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(node.root / KUBELET / "device-plugins/nvidia-gpu.sock"))
    assert found(node, "plugins").level is Level.OK


# --- who has which device


@pytest.mark.parametrize(("said", "level"), BY_BACKEND)
def test_a_list_that_is_not_believed_says_why(node: Node, said: dict[str, str], level: Level) -> None:
    check = found(
        answering(serving(node, **said), KubeletSaid(asked=True, sentence="It lives in a pod.")), "pod-resources"
    )
    assert (check.level, check.sentence) == (level, "It lives in a pod.")
    assert "systemctl status kubelet" in check.remedy


@pytest.mark.parametrize(("said", "level"), [({}, Level.ERROR), (SIM, Level.WARNING)])
def test_what_the_service_doubts_counts_though_we_do_not(node: Node, said: dict[str, str], level: Level) -> None:
    checks = examine(serving(node, kubelet="It was restarted.", **said))
    told = [check for check in checks if check.name == "pod-resources"]
    assert [check.level for check in told] == [level, Level.OK]
    assert "It was restarted." in told[0].sentence


def test_a_kubelet_that_has_just_begun_is_believed_as_far_as_the_service_believes_it(node: Node) -> None:
    young = answering(node, KubeletSaid(asked=True, young=True, sentence="It started 3 s ago."))
    assert found(young, "pod-resources").level is Level.OK
    assert found(serving(young, **UNKNOWN), "pod-resources").sentence == "It started 3 s ago."
    for heard, sentence in {"": "It started 3 s ago.", "It lists no pod yet.": "It lists no pod yet."}.items():
        check = found(serving(young, kubelet=heard), "pod-resources")
        assert (check.level, check.sentence) == (Level.WARNING, sentence)
        assert "again in a minute" in check.remedy


def test_witnesses_that_do_not_agree_are_a_warning(node: Node) -> None:
    check = found(answering(node, KubeletSaid(asked=True, believed=True, remarks=("No checkpoint.",))), "pod-resources")
    assert (check.level, check.sentence) == (Level.WARNING, "No checkpoint.")
    assert "--pod-logs-dir" in check.remedy


def test_whoever_may_not_ask_did_not_see_whether_it_answers(node: Node) -> None:
    check = found(answering(node, KubeletSaid(asked=True, forbidden=True)), "pod-resources")
    assert (check.level, "was not seen" in check.sentence) == (Level.WARNING, True)
    assert "sudo" in check.remedy


class Kubelet(podresources_pb2_grpc.PodResourcesListerServicer):
    """Lists one pod with one of our devices."""

    async def List(self, request: object, context: object) -> messages.ListPodResourcesResponse:
        devices = [messages.ContainerDevices(resource_name="nvidia.com/gpu", device_ids=["GPU-a"])]
        container = messages.ContainerResources(name="main", devices=devices)
        pod = messages.PodResources(name="p", namespace="team", containers=[container])
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


async def asked(directory: Path) -> KubeletSaid:
    return await ask_kubelet(
        directory / "kubelet.sock",
        kubelet_dir=directory,
        pod_logs=directory / "logs",
        cgroups=directory / "cgroups",
        device_ids=["GPU-a"],
        seconds=20.0,
    )


async def test_the_kubelet_is_asked_as_the_service_asks_it(short_tmp: Path) -> None:
    path = short_tmp / "kubelet.sock"
    async with kubelet(path):
        os.utime(path, (1.0, 1.0))
        said = await asked(short_tmp)
    assert (said.asked, said.has_devices) == (True, 1)
    # Its checkpoint and its pods' logs are not there, so that list is not all there is to say.
    assert said.remarks or said.sentence


async def test_whatever_stands_in_the_kubelets_place_is_not_believed(short_tmp: Path) -> None:
    assert await asked(short_tmp) == KubeletSaid()
    write(short_tmp, "kubelet.sock")
    said = await asked(short_tmp)
    assert (said.asked, said.believed, "is not a socket" in said.sentence) == (True, False, True)
    (short_tmp / "kubelet.sock").unlink()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(short_tmp / "kubelet.sock"))
    said = await asked(short_tmp)
    assert (said.believed, "takes no connection" in said.sentence) == (False, True)


async def test_a_path_that_no_socket_can_have_is_told_of(short_tmp: Path) -> None:
    deep = short_tmp / ("long" * 30)
    deep.mkdir()
    write(deep, "kubelet.sock")
    said = await asked(deep)
    assert (said.believed, "107" in said.sentence) == (False, True)


# --- the PID namespace


@pytest.mark.parametrize(("said", "level"), [({}, Level.ERROR), (UNKNOWN, Level.WARNING), (SIM, Level.OK)])
def test_a_pid_namespace_that_is_not_the_nodes_is_what_the_service_would_refuse(
    node: Node, said: dict[str, str], level: Level
) -> None:
    write(node.root, "proc/self/status", "Name:\tscrubber\nNSpid:\t5012\t7\n")
    check = found(serving(node, **said), "pid-namespace")
    assert check.level is level
    assert ("hostPID: true" in check.remedy) == (level is not Level.OK)
