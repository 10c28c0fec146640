"""The adapter against a PodResources server on a real socket: honest, slow, busy, restarted, or talking nonsense."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from scrubber.adapters.clock import SystemClock
from scrubber.adapters.kubelet import KubeletAssignments
from scrubber.domain.assignment import Assignment, Pod, PodAbsence, Reading, Trust
from scrubber.domain.errors import BadConfiguration
from scrubber.wire import podresources_pb2 as messages

GPU = "scrubber.dev/gpu"
FIRST, SECOND = "1f6e5f0e-8a57-4f7c-9d57-0b8c5f2f3a11", "2d0b51c5-57b5-4a0f-8f0b-7a4f6f1e9c22"
OURS = {"gpu-0", "gpu-1", "gpu-2"}
PATIENCE = 20.0

Answer = bytes | grpc.StatusCode


class AgedClock(SystemClock):
    """Real time, and a wall clock that makes every socket look ``age`` seconds older than it is."""

    def __init__(self, age: float) -> None:
        self._age = age

    def wall(self) -> float:
        return super().wall() + self._age


def listing(*pods: messages.PodResources) -> bytes:
    return messages.ListPodResourcesResponse(pod_resources=pods).SerializeToString()


def pod(name: str, *devices: str, container: str = "main", namespace: str = "team-a") -> messages.PodResources:
    """A pod as the kubelet lists it: one entry for each device."""
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
    """The kubelet's files and socket; ``answer`` is what ``List`` gives, as bytes on the wire or a status."""

    root: Path
    answer: Answer = b""
    asked: int = 0
    before_answer: Callable[[], Awaitable[None]] | None = None
    server: grpc.aio.Server | None = None
    checkpointed: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.root / "kubelet.sock"

    async def _list(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        self.asked += 1
        answer = self.answer
        if self.before_answer is not None:
            await self.before_answer()
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
        self, *, age: float = 3_600.0, settle: float = 60.0, deadline: float = 10.0
    ) -> AsyncIterator[KubeletAssignments]:
        """The adapter; unless told otherwise the kubelet seems to have run for an hour when it first asks."""
        adapter = KubeletAssignments(
            pod_resources_socket=self.socket,
            kubelet_dir=self.root,
            pod_logs_dir=self.root / "pods",
            device_ids=lambda: OURS,
            clock=AgedClock(age),
            settle=settle,
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


async def test_a_reading_names_pod_uid_container_and_devices(kubelet: Kubelet) -> None:
    kubelet.log("train", FIRST)
    kubelet.answer = listing(pod("train", "gpu-0"))
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    assert (reading.trust, reading.detail) == (Trust.TRUSTED, "")
    assert reading.assignments == (Assignment(Pod("team-a", "train", FIRST), "main", frozenset({"gpu-0"})),)
    assert reading.at > 0


async def test_devices_split_over_numa_nodes_are_one_containers_and_others_are_left_out(kubelet: Kubelet) -> None:
    kubelet.answer = listing(pod("train", "gpu-1", "nic-4", "gpu-0"))
    async with kubelet.adapter() as adapter:
        [assignment] = (await adapter.read()).assignments
    assert assignment.devices == {"gpu-0", "gpu-1"}


async def test_two_pods_with_the_same_device_make_no_certain_assignment(kubelet: Kubelet) -> None:
    kubelet.answer = listing(pod("train", "gpu-0"), pod("infer", "gpu-0"))
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    assert len(reading.having("gpu-0")) == 2
    assert reading.assignment_of("gpu-0") is None


async def test_a_recreated_pod_is_told_apart_by_the_checkpoint(kubelet: Kubelet) -> None:
    kubelet.log("web-0", FIRST)
    kubelet.log("web-0", SECOND)
    kubelet.allocate(SECOND, "main", "gpu-0")
    kubelet.answer = listing(pod("web-0", "gpu-0"))
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    assignment = reading.assignment_of("gpu-0")
    assert assignment is not None
    assert assignment.pod.uid == SECOND
    assert not reading.lists(Pod("team-a", "web-0", FIRST))


async def test_an_init_containers_device_is_a_hint_and_no_assignment(kubelet: Kubelet) -> None:
    kubelet.log("train", FIRST)
    kubelet.allocate(FIRST, "init", "gpu-2")
    kubelet.answer = listing(pod("train"))
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    assert reading.trust is Trust.TRUSTED
    assert reading.assignment_of("gpu-2") is None
    hint = reading.hint_of("gpu-2")
    assert hint == Assignment(Pod("team-a", "train", FIRST), "init", frozenset({"gpu-2"}))


async def test_a_pod_that_is_over_becomes_absent_though_checkpoint_and_logs_still_know_it(kubelet: Kubelet) -> None:
    kubelet.log("train", FIRST)
    kubelet.allocate(FIRST, "main", "gpu-0")
    kubelet.answer = listing()
    absence = PodAbsence()
    async with kubelet.adapter() as adapter:
        for _ in range(2):
            absence = absence.after(await adapter.read(), Pod("team-a", "train", FIRST))
    assert absence.proved


async def test_a_kubelet_that_is_not_there_makes_an_unreadable_reading(kubelet: Kubelet) -> None:
    await kubelet.stop()
    kubelet.log("train", FIRST)
    kubelet.allocate(FIRST, "main", "gpu-0")
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    assert reading.trust is Trust.UNREADABLE
    assert "is the kubelet running" in reading.detail
    assert reading.hint_of("gpu-0") is not None


async def test_a_socket_that_nobody_serves_is_unreadable(kubelet: Kubelet) -> None:
    await kubelet.stop()
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(kubelet.socket))
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
    assert reading.trust is Trust.UNREADABLE
    assert "UNAVAILABLE" in reading.detail


async def test_a_file_in_the_sockets_place_is_unreadable(kubelet: Kubelet) -> None:
    await kubelet.stop()
    kubelet.socket.write_text("")
    async with kubelet.adapter() as adapter:
        assert "is not a socket" in (await adapter.read()).detail


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
async def test_garbage_is_unreadable_and_the_next_answer_is_read(kubelet: Kubelet, garbage: bytes) -> None:
    async with kubelet.adapter() as adapter:
        kubelet.answer = garbage
        reading = await adapter.read()
        assert reading.trust is Trust.UNREADABLE
        assert reading.detail
        kubelet.answer = listing(pod("train", "gpu-0"))
        assert (await adapter.read()).assignment_of("gpu-0") is not None


async def test_something_that_does_not_speak_the_protocol_is_unreadable(kubelet: Kubelet) -> None:
    await kubelet.stop()
    kubelet.socket.unlink(missing_ok=True)

    async def mumble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 418 I'm a teapot\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_unix_server(mumble, kubelet.socket)
    async with server, kubelet.adapter(deadline=1.0) as adapter:
        assert (await adapter.read()).trust is Trust.UNREADABLE


async def test_a_kubelet_that_hangs_is_given_up_at_the_deadline(kubelet: Kubelet) -> None:
    forever = asyncio.Event()

    async def hang() -> None:
        await forever.wait()

    kubelet.before_answer = hang
    async with kubelet.adapter(deadline=0.2) as adapter:
        reading = await asyncio.wait_for(adapter.read(), PATIENCE)
    assert reading.trust is Trust.UNREADABLE
    assert "DEADLINE_EXCEEDED" in reading.detail
    forever.set()


async def test_a_kubelet_that_is_merely_busy_is_asked_again(kubelet: Kubelet) -> None:
    async def calm_down() -> None:
        if kubelet.asked == 2:
            kubelet.answer = listing()

    kubelet.answer = grpc.StatusCode.RESOURCE_EXHAUSTED
    kubelet.before_answer = calm_down
    async with kubelet.adapter() as adapter:
        assert (await adapter.read()).trust is Trust.TRUSTED
    assert kubelet.asked == 3


async def test_a_restarted_kubelets_empty_list_is_not_believed_until_it_lists_everybody(kubelet: Kubelet) -> None:
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
        assert "team-a/infer, team-a/train" in reading.detail
        assert reading.lists(Pod("team-a", "train", FIRST)), "the checkpoint still hints at it"

        kubelet.answer = listing(pod("train", "gpu-0"))
        assert "team-a/infer" in (await adapter.read()).detail

        kubelet.answer = both
        assert (await adapter.read()).trust is Trust.TRUSTED
        kubelet.answer = listing()
        assert (await adapter.read()).trust is Trust.TRUSTED


async def test_an_old_kubelet_that_still_has_our_connection_is_not_asked_for_a_new_one(kubelet: Kubelet) -> None:
    kubelet.answer = listing(pod("train", "gpu-0"))
    async with kubelet.adapter() as adapter:
        assert (await adapter.read()).having("gpu-0")
        successor = Kubelet(kubelet.root, answer=listing(pod("infer", "gpu-1")))
        await successor.start()
        reading = await adapter.read()
    assert reading.having("gpu-1")
    assert not reading.having("gpu-0")
    await successor.stop()


async def test_a_kubelet_as_young_as_its_socket_is_not_believed_when_it_lists_nobody(kubelet: Kubelet) -> None:
    kubelet.answer = listing()
    async with kubelet.adapter(age=0.0) as adapter:
        assert (await adapter.read()).trust is Trust.EMPTY_AFTER_RESTART
        kubelet.answer = listing(pod("train", "gpu-0"))
        assert (await adapter.read()).trust is Trust.TRUSTED


async def test_an_unreadable_checkpoint_is_remarked_and_does_not_spoil_a_proved_list(kubelet: Kubelet) -> None:
    kubelet.log("train", FIRST)
    kubelet.write_checkpoint("{")
    kubelet.answer = listing(pod("train", "gpu-0"))
    async with kubelet.adapter() as adapter:
        reading = await adapter.read()
        assert (reading.trust, reading.detail) == (Trust.TRUSTED, "")
        assert any("checkpoint" in remark for remark in adapter.remarks)


async def test_without_log_directories_pods_have_no_uid(kubelet: Kubelet) -> None:
    shutil.rmtree(kubelet.root / "pods")
    kubelet.allocate(FIRST, "main", "gpu-0")
    kubelet.answer = listing(pod("train", "gpu-0"))
    async with kubelet.adapter() as adapter:
        [assignment] = (await adapter.read()).assignments
    assert assignment.pod == Pod("team-a", "train", None)


async def test_callers_share_a_question_but_never_one_that_began_before_they_asked(kubelet: Kubelet) -> None:
    on_the_wire, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        on_the_wire.set()
        await go_on.wait()

    kubelet.before_answer = wait
    kubelet.answer = listing()
    async with kubelet.adapter() as adapter:
        early = [asyncio.create_task(adapter.read()) for _ in range(5)]
        await asyncio.wait_for(on_the_wire.wait(), PATIENCE)
        kubelet.answer = listing(pod("train", "gpu-0"))
        late = [asyncio.create_task(adapter.read()) for _ in range(20)]
        await asyncio.sleep(0)
        go_on.set()
        old: list[Reading] = await asyncio.gather(*early)
        new: list[Reading] = await asyncio.gather(*late)
    assert kubelet.asked == 2
    assert {reading.having("gpu-0") for reading in old} == {()}
    assert all(reading.having("gpu-0") for reading in new)
    assert new[0].at > old[0].at


async def test_a_caller_that_gives_up_does_not_take_the_others_answer_away(kubelet: Kubelet) -> None:
    on_the_wire, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        on_the_wire.set()
        await go_on.wait()

    kubelet.before_answer = wait
    kubelet.answer = listing()
    async with kubelet.adapter() as adapter:
        impatient, patient = asyncio.create_task(adapter.read()), asyncio.create_task(adapter.read())
        await asyncio.wait_for(on_the_wire.wait(), PATIENCE)
        impatient.cancel()
        go_on.set()
        assert (await asyncio.wait_for(patient, PATIENCE)).trust is Trust.TRUSTED
    assert impatient.cancelled()
    assert kubelet.asked == 1


async def test_closing_leaves_no_question_behind(kubelet: Kubelet) -> None:
    on_the_wire, forever = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        on_the_wire.set()
        await forever.wait()

    kubelet.before_answer = hang
    async with kubelet.adapter() as adapter:
        reader = asyncio.create_task(adapter.read())
        await asyncio.wait_for(on_the_wire.wait(), PATIENCE)
    await asyncio.wait([reader])
    assert reader.cancelled()
    assert [task for task in asyncio.all_tasks() if task.get_name() == "kubelet-question"] == []
    forever.set()


async def test_a_socket_path_with_signs_of_a_url_is_a_path_all_the_same(short_tmp: Path) -> None:
    odd = short_tmp / "a%20b?c#d"
    odd.mkdir()
    plain = Kubelet(short_tmp, answer=listing(pod("train", "gpu-0")))
    await plain.start()
    plain.socket.rename(odd / "kubelet.sock")
    async with Kubelet(odd).adapter() as adapter:
        assert (await adapter.read()).assignment_of("gpu-0") is not None
    await plain.stop()


def test_a_socket_path_that_is_too_long_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="107 bytes"):
        KubeletAssignments(
            pod_resources_socket=tmp_path / ("x" * 120),
            kubelet_dir=tmp_path,
            pod_logs_dir=tmp_path,
            device_ids=lambda: OURS,
            clock=SystemClock(),
        )
