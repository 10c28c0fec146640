"""The adapter against a PodResources server on a real socket: working, slow, busy, restarted, or sending nonsense."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest

from scrubber.adapters.clock import SystemClock
from scrubber.adapters.kubelet.assignments import KubeletAssignments
from scrubber.domain.assignment import Assignment, Claim, KubeletReading, ListedClaim, Pod, PodAbsence, Trust
from scrubber.domain.errors import InvalidConfiguration
from scrubber.ports.runtime import Clock
from scrubber.wire import podresources_pb2 as messages

GPU = "scrubber.dev/gpu"
FIRST, SECOND = "1f6e5f0e-8a57-4f7c-9d57-0b8c5f2f3a11", "2d0b51c5-57b5-4a0f-8f0b-7a4f6f1e9c22"
OURS = {"gpu-0", "gpu-1", "gpu-2"}
DEADLINE = 20.0

Answer = bytes | grpc.StatusCode


class AgedClock(SystemClock):
    """Real time, and a wall clock that makes every socket look ``age`` seconds older than it is."""

    def __init__(self, age: float) -> None:
        self._age = age

    def wall(self) -> float:
        return super().wall() + self._age


class RacingClock(AgedClock):
    """A clock without real waiting: only a sleep advances it, however slow the machine is."""

    def __init__(self, age: float) -> None:
        super().__init__(age)
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return 1_000.0 + sum(self.slept)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def listing(*pods: messages.PodResources) -> bytes:
    return messages.ListPodResourcesResponse(pod_resources=pods).SerializeToString()


def pod(name: str, *devices: str, container: str = "main", namespace: str = "team-a") -> messages.PodResources:
    """Return a pod as the kubelet lists it: one entry for each device."""
    entries = [
        messages.ContainerDevices(
            resource_name=GPU,
            device_ids=[device],
            topology=messages.TopologyInfo(nodes=[messages.NUMANode(ID=number)]),
        )
        for number, device in enumerate(devices)
    ]
    containers = [messages.ContainerResources(name=container, devices=entries)]
    return messages.PodResources(name=name, namespace=namespace, containers=containers)


@dataclass
class Kubelet:
    """The kubelet's files and socket; ``answer`` is the response of ``List``, as bytes on the wire or a status."""

    root: Path
    answer: Answer = b""
    requests: int = 0
    before_response: Callable[[], Awaitable[None]] | None = None
    server: grpc.aio.Server | None = None
    checkpointed: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.root / "kubelet.sock"

    async def _list(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        self.requests += 1
        answer = self.answer
        if self.before_response is not None:
            await self.before_response()
        if isinstance(answer, grpc.StatusCode):
            await context.abort(answer, "rejected by rate limit")
        return answer

    async def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "List": grpc.unary_unary_rpc_method_handler(self._list)
        }
        self.server = grpc.aio.server()
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers),))
        self.server.add_insecure_port(f"unix:{self.socket}")
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(None)
            self.server = None

    def log(self, name: str, uid: str, namespace: str = "team-a") -> None:
        (self.root / "pods" / f"{namespace}_{name}_{uid}").mkdir(parents=True)

    def allocate(self, uid: str, container: str, device: str) -> None:
        self.checkpointed.append((uid, container, device))
        entries = [
            {"PodUID": uid, "ContainerName": name, "ResourceName": GPU, "DeviceIDs": {"0": [device]}, "AllocResp": ""}
            for uid, name, device in self.checkpointed
        ]
        self.write_checkpoint(json.dumps({"Data": {"PodDeviceEntries": entries}, "Checksum": 1}))

    def write_checkpoint(self, text: str) -> None:
        (self.root / "device-plugins").mkdir(exist_ok=True)
        (self.root / "device-plugins" / "kubelet_internal_checkpoint").write_text(text)

    @asynccontextmanager
    async def adapter(
        self,
        *,
        age: float = 3_600.0,
        settle: float = 60.0,
        deadline: float = 10.0,
        clock: Clock | None = None,
    ) -> AsyncIterator[KubeletAssignments]:
        """Provide the adapter; by default the kubelet seems to have run for an hour at the first query."""
        adapter = KubeletAssignments(
            pod_resources_socket=self.socket,
            kubelet_dir=self.root,
            pod_logs_dir=self.root / "pods",
            device_ids=lambda: OURS,
            clock=clock or AgedClock(age),
            restart_grace=settle,
            deadline=deadline,
        )
        try:
            yield adapter
        finally:
            await adapter.close()


@pytest.fixture
async def kubelet(short_tmp: Path) -> AsyncIterator[Kubelet]:
    made = Kubelet(short_tmp)
    (short_tmp / "pods").mkdir()
    await made.start()
    yield made
    await made.stop()


async def test_reading_names_pod_uid_container_and_devices(kubelet: Kubelet) -> None:
    kubelet.log("train", FIRST)
    kubelet.answer = listing(pod("train", "gpu-0"))
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    assert (reading.trust, reading.untrusted_reason) == (Trust.TRUSTED, "")
    assert reading.assignments == (Assignment(Pod("team-a", "train", FIRST), "main", frozenset({"gpu-0"})),)
    assert reading.started_at > 0


async def test_devices_split_over_numa_nodes_are_merged_and_foreign_devices_omitted(kubelet: Kubelet) -> None:
    kubelet.answer = listing(pod("train", "gpu-1", "nic-4", "gpu-0"))
    async with kubelet.adapter() as adapter:
        [assignment] = (await adapter.read()).assignments
    assert assignment.devices == {"gpu-0", "gpu-1"}


async def test_device_listed_for_two_pods_has_no_certain_assignment(kubelet: Kubelet) -> None:
    kubelet.answer = listing(pod("train", "gpu-0"), pod("infer", "gpu-0"))
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    assert len(reading.listed_assignments("gpu-0")) == 2
    assert reading.assignment_of("gpu-0") is None


async def test_recreated_pod_is_identified_by_the_checkpoint(kubelet: Kubelet) -> None:
    kubelet.log("web-0", FIRST)
    kubelet.log("web-0", SECOND)
    kubelet.allocate(SECOND, "main", "gpu-0")
    kubelet.answer = listing(pod("web-0", "gpu-0"))
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    assignment = reading.assignment_of("gpu-0")
    assert assignment is not None
    assert assignment.pod.uid == SECOND
    assert not reading.is_listed(Pod("team-a", "web-0", FIRST))


async def test_init_containers_device_is_a_checkpoint_only_assignment(kubelet: Kubelet) -> None:
    kubelet.log("train", FIRST)
    kubelet.allocate(FIRST, "init", "gpu-2")
    kubelet.answer = listing(pod("train"))
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    assert reading.trust is Trust.TRUSTED
    assert reading.assignment_of("gpu-2") is None
    hint = reading.checkpoint_assignment("gpu-2")
    assert hint == Assignment(Pod("team-a", "train", FIRST), "init", frozenset({"gpu-2"}))


TRAIN = Pod("team-a", "train", FIRST)


async def test_ended_pod_becomes_absent_although_checkpoint_and_logs_still_name_it(kubelet: Kubelet) -> None:
    kubelet.log("train", FIRST)
    kubelet.allocate(FIRST, "main", "gpu-0")
    kubelet.answer = listing(pod("train", "gpu-0"))
    absence = PodAbsence()
    async with kubelet.adapter() as adapter:
        assert (await adapter.read()).is_listed(TRAIN)
        kubelet.answer = listing()
        for second in range(2):
            absence = absence.with_reading(replace(await adapter.read(), started_at=1e9 + second), TRAIN)
    assert absence.proved


async def test_pod_not_yet_listed_by_a_restarted_kubelet_is_never_absent(kubelet: Kubelet) -> None:
    """Without an API server the kubelet lists only static pods, however long, while every container keeps running."""
    kubelet.log("train", FIRST)
    kubelet.allocate(FIRST, "main", "gpu-0")
    kubelet.answer = listing(pod("static-proxy"))
    async with kubelet.adapter(settle=0.0) as adapter:
        absence = PodAbsence()
        for _ in range(3):
            reading = await adapter.read()
            assert reading.trust is Trust.TRUSTED
            assert reading.not_yet_listed == {TRAIN}
            absence = absence.with_reading(reading, TRAIN)
        assert absence == PodAbsence()
        kubelet.answer = listing(pod("static-proxy"), pod("train", "gpu-0"))
        assert (await adapter.read()).not_yet_listed == frozenset()
        kubelet.answer = listing(pod("static-proxy"))
        for second in range(2):
            absence = absence.with_reading(replace(await adapter.read(), started_at=1e9 + second), TRAIN)
        assert absence.proved
        await kubelet.stop()
        await kubelet.start()
        assert (await adapter.read()).not_yet_listed == {TRAIN}


async def test_pod_with_device_ids_not_yet_mapped_is_never_absent(kubelet: Kubelet) -> None:
    """A service that has just started does not know yet which devices a vendor's ids mean."""
    kubelet.log("train", FIRST)
    kubelet.allocate(FIRST, "main", "vendors-own-name")
    kubelet.answer = listing(pod("static-proxy"), pod("train", "vendors-own-name"))
    async with kubelet.adapter(settle=0.0) as adapter:
        assert (await adapter.read()).is_listed(TRAIN)
    kubelet.answer = listing(pod("static-proxy"))
    async with kubelet.adapter(settle=0.0) as adapter:
        reading = await adapter.read()
    assert reading.trust is Trust.TRUSTED
    assert reading.not_yet_listed == {TRAIN}
    assert not reading.proves_absent(TRAIN)


async def test_missing_kubelet_makes_the_reading_unreadable(kubelet: Kubelet) -> None:
    await kubelet.stop()
    kubelet.log("train", FIRST)
    kubelet.allocate(FIRST, "main", "gpu-0")
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    assert reading.trust is Trust.UNREADABLE
    assert "is the kubelet running" in reading.untrusted_reason
    assert reading.checkpoint_assignment("gpu-0") is not None


async def test_socket_without_a_listener_is_unreadable(kubelet: Kubelet) -> None:
    await kubelet.stop()
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(kubelet.socket))
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    assert reading.trust is Trust.UNREADABLE
    assert "accepts no connection (Connection refused): is the kubelet running?" in reading.untrusted_reason


async def test_regular_file_in_place_of_the_socket_is_unreadable(kubelet: Kubelet) -> None:
    await kubelet.stop()
    kubelet.socket.write_text("")
    async with kubelet.adapter() as adapter:
        assert "is not a socket" in (await adapter.read()).untrusted_reason


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        b"\x0a\x7f",
        b"\x0a\x03\x0a\x01\xff",
        listing(messages.PodResources(name="", namespace="team-a")),
        listing(messages.PodResources(name="train", namespace="")),
    ],
    ids=["no protobuf", "cut short", "not UTF-8", "no name", "no namespace"],
)
async def test_garbage_answer_is_unreadable_and_the_next_answer_is_read(kubelet: Kubelet, garbage: bytes) -> None:
    async with kubelet.adapter() as adapter:
        kubelet.answer = garbage
        reading = await adapter.read()
        assert reading.trust is Trust.UNREADABLE
        assert reading.untrusted_reason
        kubelet.answer = listing(pod("train", "gpu-0"))
        assert (await adapter.read()).assignment_of("gpu-0") is not None


async def test_server_that_does_not_speak_grpc_is_unreadable(kubelet: Kubelet) -> None:
    await kubelet.stop()
    kubelet.socket.unlink(missing_ok=True)

    async def mumble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 418 I'm a teapot\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_unix_server(mumble, kubelet.socket)
    async with server, kubelet.adapter(deadline=1.0) as adapter:
        assert (await adapter.read()).trust is Trust.UNREADABLE


async def test_hanging_kubelet_is_abandoned_at_the_deadline(kubelet: Kubelet) -> None:
    forever = asyncio.Event()

    async def hang() -> None:
        await forever.wait()

    kubelet.before_response = hang
    async with kubelet.adapter(deadline=0.2) as adapter:
        reading = await asyncio.wait_for(adapter.read(), DEADLINE)
    assert reading.trust is Trust.UNREADABLE
    assert "DEADLINE_EXCEEDED" in reading.untrusted_reason
    forever.set()


async def test_busy_kubelet_is_queried_again(kubelet: Kubelet) -> None:
    async def calm_down() -> None:
        if kubelet.requests == 2:
            kubelet.answer = listing()

    kubelet.answer = grpc.StatusCode.RESOURCE_EXHAUSTED
    kubelet.before_response = calm_down
    async with kubelet.adapter() as adapter:
        assert (await adapter.read()).trust is Trust.TRUSTED
    assert kubelet.requests == 3


async def test_kubelet_that_rejects_every_query_is_backed_off_longer_each_time(kubelet: Kubelet) -> None:
    kubelet.log("train", FIRST)
    clock = RacingClock(3_600.0)
    async with kubelet.adapter(clock=clock) as adapter:
        kubelet.answer = listing()
        assert (await adapter.read()).trust is Trust.TRUSTED
        kubelet.answer = grpc.StatusCode.RESOURCE_EXHAUSTED
        reading = await adapter.read()
        assert reading.trust is Trust.UNREADABLE
        assert "queries it too often" in reading.untrusted_reason
        assert clock.slept[:5] == [0.02, 0.04, 0.08, 0.16, 0.32]
        assert set(clock.slept[5:]) == {0.5}
        kubelet.answer = listing()
        assert (await adapter.read()).trust is Trust.TRUSTED, "it never was away, so its empty list is believed"


async def test_queries_stay_below_the_kubelets_rate_limit(kubelet: Kubelet) -> None:
    kubelet.answer = listing()
    clock = RacingClock(3_600.0)
    async with kubelet.adapter(clock=clock) as adapter:
        began = clock.monotonic()
        for _ in range(108):
            assert (await adapter.read()).trust is Trust.TRUSTED
        assert clock.monotonic() - began >= (108 - 8) / 80
    assert kubelet.requests == 108
    assert len(clock.slept) >= 1, "it was the waiting that took the time"


async def test_restarted_kubelets_list_is_untrusted_until_every_checkpoint_pod_is_listed(kubelet: Kubelet) -> None:
    kubelet.log("train", FIRST)
    kubelet.log("infer", SECOND)
    kubelet.allocate(FIRST, "main", "gpu-0")
    kubelet.allocate(SECOND, "main", "gpu-1")
    both = listing(pod("train", "gpu-0"), pod("infer", "gpu-1"))
    kubelet.answer = both
    async with kubelet.adapter() as adapter:
        assert (await adapter.read()).trust is Trust.TRUSTED

        await kubelet.stop()
        kubelet.answer = listing()
        await kubelet.start()
        reading = await adapter.read()
        assert reading.trust is Trust.EMPTY_AFTER_RESTART
        assert "team-a/infer, team-a/train" in reading.untrusted_reason
        assert reading.is_listed(Pod("team-a", "train", FIRST)), "the checkpoint still hints at it"

        kubelet.answer = listing(pod("train", "gpu-0"))
        assert "team-a/infer" in (await adapter.read()).untrusted_reason

        kubelet.answer = both
        assert (await adapter.read()).trust is Trust.TRUSTED
        kubelet.answer = listing()
        assert (await adapter.read()).trust is Trust.TRUSTED


async def test_old_kubelet_is_not_queried_through_a_kept_connection_after_a_restart(kubelet: Kubelet) -> None:
    kubelet.answer = listing(pod("train", "gpu-0"))
    async with kubelet.adapter() as adapter:
        assert (await adapter.read()).listed_assignments("gpu-0")
        successor = Kubelet(kubelet.root, answer=listing(pod("infer", "gpu-1")))
        await successor.start()
        reading = await adapter.read()
    assert reading.listed_assignments("gpu-1")
    assert not reading.listed_assignments("gpu-0")
    await successor.stop()


async def test_changed_mode_owner_or_name_of_the_socket_is_no_kubelet_restart(kubelet: Kubelet) -> None:
    kubelet.answer = listing(pod("train"))
    async with kubelet.adapter() as adapter:
        before = await adapter.read()
        ctime = kubelet.socket.stat().st_ctime_ns
        while kubelet.socket.stat().st_ctime_ns == ctime:  # the file system's clock has a tick
            kubelet.socket.chmod(0o600)
            os.chown(kubelet.socket, os.geteuid(), os.getegid())
            kubelet.socket.rename(kubelet.root / "renamed.sock").rename(kubelet.socket)
        kubelet.answer = listing()
        after = await adapter.read()
    assert before.kubelet_instance == after.kubelet_instance != ""
    assert after.trust is Trust.TRUSTED, "an empty list of the kubelet that has proved itself is believed"


async def test_recreated_socket_is_a_kubelet_restart_whatever_its_inode_number(kubelet: Kubelet) -> None:
    kubelet.answer = listing(pod("train"))
    async with kubelet.adapter() as adapter:
        before, created = await adapter.read(), kubelet.socket.stat().st_mtime_ns
        while kubelet.socket.stat().st_mtime_ns == created:
            await kubelet.stop()
            await kubelet.start()
        kubelet.answer = listing()
        after = await adapter.read()
    assert before.kubelet_instance != after.kubelet_instance != ""
    assert before.kubelet_instance.partition(":")[2] != after.kubelet_instance.partition(":")[2], (
        "the time alone tells them apart"
    )
    assert after.trust is Trust.EMPTY_AFTER_RESTART


async def test_empty_list_of_a_kubelet_as_young_as_its_socket_is_untrusted(kubelet: Kubelet) -> None:
    kubelet.answer = listing()
    async with kubelet.adapter(age=0.0) as adapter:
        assert (await adapter.read()).trust is Trust.EMPTY_AFTER_RESTART
        kubelet.allocate(FIRST, "main", "gpu-0")
        kubelet.answer = listing(pod("train", "gpu-0"))
        assert (await adapter.read()).trust is Trust.TRUSTED


async def test_unreadable_checkpoint_is_a_caveat_and_keeps_a_trusted_list(kubelet: Kubelet) -> None:
    kubelet.log("train", FIRST)
    kubelet.write_checkpoint("{")
    kubelet.answer = listing(pod("train", "gpu-0"))
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    assert (reading.trust, reading.untrusted_reason) == (Trust.TRUSTED, "")
    assert any("checkpoint" in remark for remark in reading.caveats)
    assert not reading.init_containers_known, "an init container may have had the device unnoticed"


async def test_checkpoint_of_another_kubelet_gives_no_knowledge_of_init_containers(kubelet: Kubelet) -> None:
    kubelet.answer = listing(pod("train", "gpu-0"))
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
        assert not reading.init_containers_known
        assert "team-a/train" in reading.caveats[0]
        kubelet.log("train", FIRST)
        kubelet.allocate(FIRST, "main", "gpu-0")
        reading = await adapter.read()
    assert reading.init_containers_known
    assert reading.caveats == ()


async def test_young_kubelet_is_not_trusted_because_of_another_kubelets_checkpoint(kubelet: Kubelet) -> None:
    kubelet.answer = listing(pod("train", "gpu-0"))
    async with kubelet.adapter(age=0.0) as adapter:
        assert (await adapter.read()).trust is Trust.EMPTY_AFTER_RESTART


async def test_ended_pod_that_is_still_listed_may_not_start_a_container_on_a_device(kubelet: Kubelet) -> None:
    ended = Pod("team-a", "job", FIRST)
    kubelet.log("job", FIRST)
    kubelet.log("train", SECOND)
    kubelet.allocate(SECOND, "main", "gpu-0")
    kubelet.answer = listing(pod("job"), pod("train", "gpu-0"))
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
        assert reading.without_devices == {ended}
        assert not reading.may_start_container(ended)
        assert reading.may_start_container(Pod("team-a", "train", SECOND))
        kubelet.write_checkpoint("{")
        assert (await adapter.read()).may_start_container(ended), "an init container of it may have one"


async def test_dra_claims_and_unknown_fields_of_later_kubelets_are_read(kubelet: Kubelet) -> None:
    claim = messages.ClaimResource(
        cdi_devices=[messages.CDIDevice(name="k8s.gpu.vendor.com/claim=5f1d-gpu-0")],
        driver_name="gpu.vendor.com",
        pool_name="node-1",
        device_name="first",
        share_id="a",
    )
    container = messages.ContainerResources(
        name="main",
        cpu_ids=[1, 2],
        memory=[messages.ContainerMemory(memory_type="memory", size=1 << 30)],
        dynamic_resources=[messages.DynamicResource(claim_name="c", claim_namespace="team-b", claim_resources=[claim])],
    )
    claiming = messages.PodResources(name="claims", namespace="team-b", containers=[container])
    unknown_field = b"\xaa\x06\x03new"  # number 101, of type bytes
    claiming.MergeFromString(unknown_field)
    kubelet.answer = listing(pod("train", "gpu-0"), claiming) + unknown_field
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    assert reading.trust is Trust.TRUSTED
    assert reading.assignment_of("gpu-0") is None, "two pods have it"
    assert reading.assigned_by_other_plugins("gpu-0", {GPU}) == (
        Assignment(Pod("team-b", "claims"), "main", frozenset({"gpu-0"}), "gpu.vendor.com"),
    )


async def test_claims_of_listed_pods_are_read_whatever_their_devices_are_called(kubelet: Kubelet) -> None:
    kubelet.log("share-0", FIRST)
    dynamic = [
        messages.DynamicResource(
            claim_name=name,
            claim_namespace="team-a",
            claim_resources=[
                messages.ClaimResource(driver_name="gpu.scrubber.dev", pool_name="node-1", device_name=device)
                for device in ("card-7", "card-8")
            ],
        )
        for name in ("gpus", "others")
    ]
    containers = [messages.ContainerResources(name=name, dynamic_resources=dynamic) for name in ("main", "sidecar")]
    kubelet.answer = listing(messages.PodResources(name="share-0", namespace="team-a", containers=containers))
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    pod = Pod("team-a", "share-0", FIRST)
    assert reading.claims == tuple(ListedClaim(pod, "gpu.scrubber.dev", "team-a", name) for name in ("gpus", "others"))
    claim = Claim("claim-uid", "team-a", "gpus", "gpu.scrubber.dev")
    assert reading.pods_of_claim(claim) == {pod}
    assert reading.pods_of_claim(replace(claim, name="another")) == frozenset()
    assert reading.pods_of_claim(replace(claim, driver="gpu.vendor.com")) == frozenset()


async def test_device_listed_under_several_numa_nodes_is_one_device(kubelet: Kubelet) -> None:
    entries = [
        messages.ContainerDevices(
            resource_name=GPU,
            device_ids=["gpu-0"],
            topology=messages.TopologyInfo(nodes=[messages.NUMANode(ID=node)]),
        )
        for node in range(4)
    ]
    container = messages.ContainerResources(name="main", devices=entries)
    kubelet.answer = listing(messages.PodResources(name="train", namespace="team-a", containers=[container]))
    async with kubelet.adapter() as adapter:
        [assignment] = (await adapter.read()).assignments
    assert assignment == Assignment(Pod("team-a", "train"), "main", frozenset({"gpu-0"}))


async def test_list_of_thousands_of_pods_is_read_whole(kubelet: Kubelet) -> None:
    crowd = [pod(f"pod-{number}", *(f"nic-{number}-{each}" for each in range(24))) for number in range(5_000)]
    kubelet.answer = listing(*crowd, pod("train", "gpu-0"))
    assert len(kubelet.answer) > 4 * 1024 * 1024, "more than gRPC accepts by default"
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    assert reading.trust is Trust.TRUSTED
    assert len(reading.assignments) == 5_001
    assert reading.assignment_of("gpu-0") is not None


async def test_oversized_list_is_not_requested_repeatedly(kubelet: Kubelet) -> None:
    kubelet.answer = listing(pod("x" * (17 * 1024 * 1024)))
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    assert reading.trust is Trust.UNREADABLE
    assert "larger than max" in reading.untrusted_reason
    assert kubelet.requests == 1


async def test_pods_have_no_uid_without_log_directories(kubelet: Kubelet) -> None:
    shutil.rmtree(kubelet.root / "pods")
    kubelet.allocate(FIRST, "main", "gpu-0")
    kubelet.answer = listing(pod("train", "gpu-0"))
    async with kubelet.adapter() as adapter:
        [assignment] = (await adapter.read()).assignments
    assert assignment.pod == Pod("team-a", "train", None)


async def test_concurrent_callers_share_a_query_but_never_one_that_began_earlier(kubelet: Kubelet) -> None:
    on_the_wire, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        on_the_wire.set()
        await go_on.wait()

    kubelet.before_response = wait
    kubelet.answer = listing()
    async with kubelet.adapter() as adapter:
        early = [asyncio.create_task(adapter.read()) for _ in range(5)]
        await asyncio.wait_for(on_the_wire.wait(), DEADLINE)
        kubelet.answer = listing(pod("train", "gpu-0"))
        late = [asyncio.create_task(adapter.read()) for _ in range(20)]
        await asyncio.sleep(0)
        go_on.set()
        old: list[KubeletReading] = await asyncio.gather(*early)
        new: list[KubeletReading] = await asyncio.gather(*late)
    assert kubelet.requests == 2
    assert {reading.listed_assignments("gpu-0") for reading in old} == {()}
    assert all(reading.listed_assignments("gpu-0") for reading in new)
    assert new[0].started_at > old[0].started_at


async def test_cancelled_caller_does_not_cancel_the_shared_query(kubelet: Kubelet) -> None:
    on_the_wire, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        on_the_wire.set()
        await go_on.wait()

    kubelet.before_response = wait
    kubelet.answer = listing()
    async with kubelet.adapter() as adapter:
        impatient, patient = asyncio.create_task(adapter.read()), asyncio.create_task(adapter.read())
        await asyncio.wait_for(on_the_wire.wait(), DEADLINE)
        impatient.cancel()
        go_on.set()
        assert (await asyncio.wait_for(patient, DEADLINE)).trust is Trust.TRUSTED
    assert impatient.cancelled()
    assert kubelet.requests == 1


async def test_closing_the_adapter_leaves_no_query_pending(kubelet: Kubelet) -> None:
    on_the_wire, forever = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        on_the_wire.set()
        await forever.wait()

    kubelet.before_response = hang
    async with kubelet.adapter() as adapter:
        reader = asyncio.create_task(adapter.read())
        await asyncio.wait_for(on_the_wire.wait(), DEADLINE)
    await asyncio.wait([reader])
    assert reader.cancelled()
    assert [task for task in asyncio.all_tasks() if task.get_name() == "kubelet-question"] == []
    forever.set()


async def test_socket_path_with_url_characters_is_used_as_a_path(short_tmp: Path) -> None:
    odd = short_tmp / "a%20b?c#d"
    odd.mkdir()
    plain = Kubelet(short_tmp, answer=listing(pod("train", "gpu-0")))
    await plain.start()
    plain.socket.rename(odd / "kubelet.sock")
    async with Kubelet(odd).adapter() as adapter:
        assert (await adapter.read()).assignment_of("gpu-0") is not None
    await plain.stop()


def test_socket_path_that_is_too_long_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="107 bytes"):
        KubeletAssignments(
            pod_resources_socket=tmp_path / ("x" * 120),
            kubelet_dir=tmp_path,
            pod_logs_dir=tmp_path,
            device_ids=lambda: OURS,
            clock=SystemClock(),
        )
