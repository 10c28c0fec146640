"""Which process answers as the kubelet: real processes on real sockets, some of them in a pod's real cgroup."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from scrubber.adapters.clock import SystemClock
from scrubber.adapters.kubelet.assignments import KubeletAssignments
from scrubber.adapters.kubelet.crosscheck import ListedPod
from scrubber.adapters.kubelet.listening_process import (
    PinnedSocket,
    PodUidLookup,
    listening_process,
    reason_not_kubelet,
)
from scrubber.adapters.kubelet.pod_resources import PodResourcesClient
from scrubber.adapters.kubelet.rate_limiter import RateLimiter
from scrubber.domain.assignment import KubeletReading, Trust
from scrubber.domain.errors import Unavailable, Unreadable
from tests.adapters.test_children_zygote import ended
from tests.pods import CGROUP_WAYS, DEADLINE, MarkerGround, Node, ground_of, new_pod, node_of, only_with
from tests.relay import compiled

FORGED = ListedPod("team-a", "forged", {})

KUBELET = """
sys.path[:0] = sys.argv[2].split(os.pathsep)
import grpc
from concurrent.futures import ThreadPoolExecutor
from scrubber.wire import podresources_pb2 as messages
answer = messages.ListPodResourcesResponse(pod_resources=[messages.PodResources(name="forged", namespace="team-a")])
serve = grpc.unary_unary_rpc_method_handler(lambda request, context: answer.SerializeToString())
server = grpc.server(ThreadPoolExecutor(1))
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": serve}),))
server.add_insecure_port(f"unix:{sys.argv[1]}")
server.start()
print("ready", flush=True)
signal.pause()
"""
"""A kubelet that lists one pod, to every client."""

INHERITED = """
import socket
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
if os.fork():
    os._exit(0)
print("ready", flush=True)
signal.pause()
"""
"""The process that made the socket listen is gone; a child of it has the socket."""

MODULES = os.pathsep.join(path or os.getcwd() for path in sys.path)


@asynccontextmanager
async def querying(path: Path, in_a_pod: PodUidLookup | None) -> AsyncIterator[PodResourcesClient]:
    resources = PodResourcesClient(
        path, clock=SystemClock(), deadline=DEADLINE, rate_limiter=RateLimiter(rate=100, burst=10), pod_uid_of=in_a_pod
    )
    try:
        yield resources
    finally:
        await resources.close()


async def reading_of(path: Path, in_a_pod: PodUidLookup) -> KubeletReading:
    assignments = KubeletAssignments(
        pod_resources_socket=path,
        kubelet_dir=path.parent,
        pod_logs_dir=path.parent,
        device_ids=lambda: {"gpu-0"},
        clock=SystemClock(),
        pod_uid_of=in_a_pod,
    )
    try:
        return await assignments.read()
    finally:
        await assignments.close()


async def nobodys(pid: int) -> str | None:
    return None


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield server


@pytest.fixture
async def bench() -> AsyncIterator[Node]:
    """Provide a node whose processes are in no pod at all, according to their cgroups."""
    async with node_of(MarkerGround()) as made:
        yield made


@only_with(CGROUP_WAYS)
@pytest.mark.parametrize("way", [way for way in CGROUP_WAYS if not way.endswith("without-kill")])
async def test_kubelet_that_runs_in_a_pod_is_refused(short_tmp: Path, way: str) -> None:
    path, pod = short_tmp / "kubelet.sock", new_pod()
    async with node_of(ground_of(way)) as node:
        containers = node.ground.containers()
        forger = await node.start(pod, "main", KUBELET, str(path), MODULES)
        async with querying(path, containers.pod_uid_of) as resources:
            with pytest.raises(
                Unavailable, match=rf"{path} belongs to pod {pod.uid} \(PID {forger.pid}\): delete that pod"
            ):
                await resources.list_pods(resources.socket_identity())
        reading = await reading_of(path, containers.pod_uid_of)
        assert (reading.trust, reading.assignments) == (Trust.UNREADABLE, ())
        assert "belongs to pod" in reading.untrusted_reason
        # It is a working kubelet; only its cgroup is wrong.
        async with querying(path, nobodys) as resources:
            assert await resources.list_pods(resources.socket_identity()) == (FORGED,)


@only_with(CGROUP_WAYS)
@pytest.mark.parametrize("way", [way for way in CGROUP_WAYS if not way.endswith("without-kill")])
async def test_kubelet_in_a_pod_cannot_evade_detection_by_changing_threads(short_tmp: Path, way: str) -> None:
    path, pod = short_tmp / "kubelet.sock", new_pod()
    async with node_of(ground_of(way)) as node:
        containers = node.ground.containers()
        program = "os.execv(sys.argv[1], sys.argv[1:])"
        await node.start(pod, "main", program, compiled(short_tmp), "ready", "listens", str(path))
        doubts = [
            await reason_not_kubelet(str(path), own_uid=os.geteuid(), pod_uid_of=containers.pod_uid_of)
            for _ in range(50)
        ]
        assert {doubt.partition(" ")[0] for doubt in doubts} <= {"belongs", "may"}, set(doubts)


@only_with(CGROUP_WAYS)
async def test_socket_replaced_by_a_pod_is_detected_at_the_next_query(short_tmp: Path) -> None:
    path, forged = short_tmp / "kubelet.sock", short_tmp / "forged.sock"
    async with node_of(ground_of(CGROUP_WAYS[0])) as node:
        containers = node.ground.containers()
        await node.start(new_pod(), "main", KUBELET, str(forged), MODULES)
        async with node_of(MarkerGround()) as bench, querying(path, containers.pod_uid_of) as resources:
            await bench.start(new_pod(), "main", KUBELET, str(path), MODULES)
            assert await resources.list_pods(resources.socket_identity()) == (FORGED,)
            forged.rename(path)
            with pytest.raises(Unavailable, match="belongs to pod"):
                await resources.list_pods(resources.socket_identity())


async def test_host_process_of_our_user_is_accepted_as_kubelet(bench: Node, short_tmp: Path) -> None:
    """The emulator's kubelet is such a process; so is a real kubelet, which runs as root."""
    path = short_tmp / "kubelet.sock"
    await bench.start(new_pod(), "main", KUBELET, str(path), MODULES)
    async with querying(path, nobodys) as resources:
        assert await resources.list_pods(resources.socket_identity()) == (FORGED,)


async def test_listening_process_is_checked_once_per_connection(bench: Node, short_tmp: Path) -> None:
    path, checks = short_tmp / "kubelet.sock", list[int]()

    async def in_a_pod(pid: int) -> str | None:
        checks.append(pid)
        return None

    first = await bench.start(new_pod(), "main", KUBELET, str(path), MODULES)
    async with querying(path, in_a_pod) as resources:
        for _ in range(3):
            await resources.list_pods(resources.socket_identity())
        assert checks == [first.pid]
        await resources.close()
        await resources.list_pods(resources.socket_identity())
        assert checks == [first.pid, first.pid]
        path.unlink()
        second = await bench.start(new_pod(), "main", KUBELET, str(path), MODULES)
        await resources.list_pods(resources.socket_identity())
        assert checks == [first.pid, first.pid, second.pid]


async def test_query_goes_to_the_checked_process_although_the_path_was_swapped(bench: Node, short_tmp: Path) -> None:
    """The directory is swapped for a forger's while the listener is inspected: no socket's timestamps reveal that."""
    real, forged, aside = short_tmp / "real", short_tmp / "forged", short_tmp / "aside"
    for each in (real, forged):
        each.mkdir()
    path = real / "kubelet.sock"
    await bench.start(new_pod(), "main", KUBELET, str(path), MODULES)
    with listening(forged / "kubelet.sock") as forgery:

        async def in_a_pod(pid: int) -> str | None:
            real.rename(aside)
            forged.rename(real)
            return None

        async with querying(path, in_a_pod) as resources:
            assert await resources.list_pods(resources.socket_identity()) == (FORGED,)
        forgery.setblocking(False)
        with pytest.raises(BlockingIOError):
            forgery.accept()


async def test_ended_listening_process_is_not_confused_with_the_sockets_new_owner(bench: Node, short_tmp: Path) -> None:
    path = short_tmp / "kubelet.sock"
    left = await bench.start(new_pod(), "main", INHERITED, str(path))
    # The process that opened the socket was in the pod's cgroup; a query by its PID now would describe another process.
    await ended(left.pid)  # not its wait(), which also waits for every process that has its output open
    async with querying(path, nobodys) as resources:
        with pytest.raises(Unavailable, match=rf"that one \(PID {left.pid}\) has exited; restart the kubelet"):
            await resources.list_pods(resources.socket_identity())


async def test_kubelet_with_an_unreadable_cgroup_is_refused(short_tmp: Path) -> None:
    async def unreadable(pid: int) -> str | None:
        raise Unreadable("The kernel's description of a process is invalid.")

    path = short_tmp / "kubelet.sock"
    with listening(path):
        async with querying(path, unreadable) as resources:
            with pytest.raises(Unavailable, match=r"may belong to a pod: the cgroup of its process \d+ cannot be read"):
                await resources.list_pods(resources.socket_identity())


AS_ANOTHER_USER = """
import socket
os.setuid(65533)
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("ready", flush=True)
signal.pause()
"""


if os.geteuid() != 0:
    print(
        "NOT TESTED HERE: a kubelet of another user (only root may start a process of another user)",
        file=sys.__stderr__,
    )


@only_with(os.geteuid() == 0)
async def test_kubelet_that_runs_as_an_unprivileged_user_is_refused(bench: Node, short_tmp: Path) -> None:
    open_to_all = short_tmp / "open"
    short_tmp.chmod(0o711)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    path = open_to_all / "kubelet.sock"
    await bench.start(new_pod(), "main", AS_ANOTHER_USER, str(path))
    async with querying(path, nobodys) as resources:
        with pytest.raises(Unavailable, match=r"runs as uid 65533 .* a kubelet runs as root"):
            await resources.list_pods(resources.socket_identity())


def _can_unshare() -> bool:
    program = shutil.which("unshare")
    command = [str(program), "--pid", "--fork", "--mount-proc", "true"]
    return program is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


CAN_UNSHARE = _can_unshare()
if not CAN_UNSHARE:
    print(
        "NOT TESTED HERE: a kubelet outside our PID namespace (creating a PID namespace is not permitted)",
        file=sys.__stderr__,
    )

QUERY_FROM_HERE = """
import asyncio, os, sys
from scrubber.adapters.kubelet.listening_process import reason_not_kubelet
print(asyncio.run(reason_not_kubelet(sys.argv[1], own_uid=os.geteuid(), pod_uid_of=None)))
"""


@only_with(CAN_UNSHARE)
def test_kubelet_outside_our_pid_namespace_is_refused(short_tmp: Path) -> None:
    with listening(short_tmp / "kubelet.sock") as server:
        result = subprocess.run(
            ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", QUERY_FROM_HERE, server.getsockname()],
            capture_output=True, text=True, check=True, timeout=DEADLINE,
        )  # fmt: skip
    assert "is in a PID namespace that is not visible from here: the service must run in the node's" in result.stdout


async def test_kubelet_with_a_full_accept_queue_blocks_no_caller(short_tmp: Path) -> None:
    path = short_tmp / "kubelet.sock"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as waiting:
        server.bind(str(path))
        server.listen(0)
        waiting.connect(str(path))
        async with querying(path, nobodys) as resources:
            with pytest.raises(Unavailable, match="accepts no connection"):
                await resources.list_pods(resources.socket_identity())


def test_identifying_the_listening_process_sends_nothing_and_closes_its_connection(short_tmp: Path) -> None:
    with listening(short_tmp / "kubelet.sock") as server:
        with listening_process(server.getsockname()) as found:
            assert (found.pid, found.uid, found.is_running) == (os.getpid(), os.geteuid(), True)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1) == b""


def opened() -> set[tuple[str, str]]:
    """Return the descriptors of this process, each with its target: a number alone is reused."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of this listing
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def test_checking_the_socket_leaves_no_descriptor_open(short_tmp: Path) -> None:
    before = opened()
    with listening(short_tmp / "kubelet.sock"):
        # Descriptors that were open before do not count: gRPC's threads may just now be closing those of earlier tests.
        served = opened() - before
        assert len(served) == 1
        pinned = PinnedSocket(short_tmp / "kubelet.sock")
        with listening_process(pinned.address):
            assert len(opened() - before - served) == 2
        pinned.close()
        pinned.close()
        assert opened() - before == served
    assert opened() - before == set()
