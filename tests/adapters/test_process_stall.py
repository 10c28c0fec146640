"""A service that stalled (stopped, swapped out, without CPU time) blames no device for it and loses no event.

Where a child has to send a message at a certain moment, the test sends it in its place.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scrubber.adapters.children.eraser_report import wait_for_report
from scrubber.adapters.children.message import HEADER_SIZE, Message, body_length, pack, unpack
from scrubber.adapters.children.process import Child, Children
from scrubber.adapters.children.zygote_client import Zygote
from scrubber.adapters.cuda.diagnostics import CudaDiagnostics
from scrubber.adapters.cuda.gpu_jobs import GpuJob, GpuJobRunner
from scrubber.adapters.cuda.programs import ERASER_MODULE, ProgramLauncher
from scrubber.adapters.nvidia.event_watch import EventWatch
from scrubber.adapters.nvidia.inventory import NvidiaInventory
from scrubber.adapters.nvidia.smi import NvidiaSmi
from scrubber.adapters.sim.backend import SimBackend
from scrubber.adapters.sim.diagnostics import SimDiagnostics
from scrubber.adapters.sim.erasure import SimEraser
from scrubber.domain.device import Device
from scrubber.domain.diagnostics import CHECK_NAMES, DiagnosticLevel
from scrubber.domain.telemetry import Signal
from tests.adapters.backend_contract import request
from tests.adapters.sim_rig import make
from tests.adapters.test_cuda_gpu_jobs import Unfenced
from tests.nvidia.machine import Machine

LONG = 30.0
SHORT = 0.3
MIB = 1 << 20


class Spoken(Children):
    """Children whose only child is the test: ``theirs`` is the child's end of the socket.

    The start of the child takes ``late`` seconds, in which nothing else runs. It sends its ``last_words`` at the moment
    it is killed.
    """

    def __init__(self, late: float = 0.0) -> None:
        super().__init__(send_signal=self._killed)
        self.late = late
        self.last_words: tuple[Message, ...] = ()
        self.started = asyncio.Event()
        self.child: Child
        self.theirs: socket.socket

    async def start(self, module: str, *_: str, device: str | None = None, **__: object) -> Child:
        await asyncio.sleep(0)
        stand_still(self.late)
        ours, self.theirs = socket.socketpair()
        self.send({"ready": True})
        self._over = asyncio.Event()
        self.child = Child(self, 0, os.pidfd_open(os.getpid()), self._over.wait(), ours, module, device)
        self.started.set()
        await self.wait_until_ready(self.child)
        return self.child

    async def fork(self, program: str, *, device: str | None = None) -> Child:
        return await self.start(program, device=device)

    def _killed(self, *_: object) -> None:
        self.send(*self.last_words)
        self._over.set()

    def send(self, *messages: Message) -> None:
        for each in messages:
            self.theirs.sendall(pack(each))

    def order(self) -> Message:
        """Receive the request that the child got."""
        return unpack(self.theirs.recv(body_length(self.theirs.recv(HEADER_SIZE))))

    async def request_received(self) -> None:
        """Return once the child has received its request, and the service waits for the answer."""
        await self.started.wait()
        loop = asyncio.get_running_loop()
        received = asyncio.Event()
        loop.add_reader(self.theirs, received.set)
        await received.wait()
        loop.remove_reader(self.theirs)


def stand_still(seconds: float, until: Callable[[], bool] = lambda: True) -> None:
    """Block this process for ``seconds``, and then until a condition holds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        continue
    while not until():
        assert time.monotonic() < end + LONG, "it did not happen in time"


@pytest.fixture
def spoken() -> Iterator[Spoken]:
    made = Spoken()
    yield made
    made.theirs.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with Machine.create(tmp_path / "world", gpus=1) as made:
        yield made


async def test_unread_xid_survives_ending_the_event_child_for_a_reset(machine: Machine, spoken: Spoken) -> None:
    children = Children()
    inventory = NvidiaInventory(machine.places, children, node="node-1")
    watch = EventWatch(spoken, machine.places, inventory.fingerprint, silence_timeout=LONG, restart_delays=(LONG,))
    devices = await inventory.devices()
    watch.follow(devices)
    await spoken.started.wait()
    spoken.send({"registered": 8})
    await watch.wait_until_ready(LONG)
    spoken.send({"watching": True}, {"event": 8, "data": 79, "gi": None, "ci": None})
    await watch.pause(devices[0].id)
    assert watch.xids(devices[0].id) == {79: 1}
    assert list(watch.unwatched_gpus.values()) == ["The GPU is being reset."]
    await watch.close()
    await inventory.close()
    await children.close()


async def test_unread_xid_survives_a_gpu_that_the_inventory_misses_once(machine: Machine, spoken: Spoken) -> None:
    children = Children()
    inventory = NvidiaInventory(machine.places, children, node="node-1")
    watch = EventWatch(spoken, machine.places, inventory.fingerprint, silence_timeout=LONG, restart_delays=(LONG,))
    devices = await inventory.devices()
    watch.follow(devices)
    await spoken.started.wait()
    spoken.send({"registered": 8})
    await watch.wait_until_ready(LONG)
    spoken.send({"event": 8, "data": 79, "gi": None, "ci": None})
    with spoken.theirs:
        watch.follow([])
        watch.follow(devices)
        await watch.close()
    assert watch.xids(devices[0].id) == {79: 1}
    await inventory.close()
    await children.close()


async def test_xid_that_arrives_at_the_moment_of_the_kill_is_not_lost(machine: Machine, spoken: Spoken) -> None:
    children = Children()
    inventory = NvidiaInventory(machine.places, children, node="node-1")
    watch = EventWatch(spoken, machine.places, inventory.fingerprint, silence_timeout=LONG, restart_delays=(LONG,))
    devices = await inventory.devices()
    watch.follow(devices)
    await spoken.started.wait()
    spoken.last_words = ({"event": 8, "data": 79, "gi": None, "ci": None},)
    await watch.pause(devices[0].id)
    assert watch.xids(devices[0].id) == {79: 1}
    await watch.close()
    await inventory.close()
    await children.close()


async def test_message_of_an_ended_event_child_does_not_mark_its_gpu_as_watched(
    machine: Machine, spoken: Spoken
) -> None:
    children = Children()
    inventory = NvidiaInventory(machine.places, children, node="node-1")
    watch = EventWatch(spoken, machine.places, inventory.fingerprint, silence_timeout=LONG, restart_delays=(LONG,))
    devices = await inventory.devices()
    watch.follow(devices)
    await spoken.started.wait()
    await watch.pause(devices[0].id)
    spoken.theirs.close()
    spoken.started.clear()
    resuming = asyncio.create_task(watch.resume(devices[0].id, LONG))
    await spoken.started.wait()
    spoken.send({"registered": 8})
    await watch.pause(devices[0].id)
    await resuming
    assert watch.event_stream_error(devices[0].id) is not None
    await watch.close()
    await inventory.close()
    await children.close()


async def test_xid_received_during_a_process_stall_is_not_lost_with_its_child(machine: Machine, spoken: Spoken) -> None:
    children = Children()
    inventory = NvidiaInventory(machine.places, children, node="node-1")
    watch = EventWatch(spoken, machine.places, inventory.fingerprint, silence_timeout=SHORT, restart_delays=(LONG,))
    devices = await inventory.devices()
    signals = watch.listen()
    watch.follow(devices)
    await spoken.started.wait()
    spoken.send({"registered": 8})
    await watch.wait_until_ready(LONG)
    spoken.send({"event": 8, "data": 79, "gi": None, "ci": None})
    stand_still(2 * SHORT)
    async with asyncio.timeout(LONG):
        while await anext(signals) != Signal(devices[0].id, "xid", 79):
            continue
    assert watch.xids(devices[0].id) == {79: 1}
    await watch.close()
    await inventory.close()
    await children.close()


async def test_eraser_progress_during_a_process_stall_counts_as_progress(spoken: Spoken) -> None:
    child = await spoken.start("an eraser")
    listening = asyncio.create_task(wait_for_report(child, lambda _: None, silence_timeout=SHORT))
    await asyncio.sleep(0)
    spoken.send({"ok": {"said": True}})
    stand_still(2 * SHORT)
    assert await listening == {"said": True}
    await child.kill()


ERASED: Message = {
    "total_bytes": 2 * MIB,
    "cleared_bytes": 2 * MIB,
    "verified_bytes": 2 * MIB,
    "residue_bytes": 0,
    "failed_bytes": 0,
    "fence_broken": False,
    "restored": None,
    "seconds_by_phase": [],
}
CHECKED: Message = {
    "checks": [
        {
            "name": name,
            "errors": 0,
            "unit": "operations" if name == "matrix-product" else "bytes",
            "done": 1,
            "seconds": 1.0,
        }
        for name in CHECK_NAMES
    ]
}


class FromTheTest(ProgramLauncher):
    """Every program that is started is played by the test."""

    def __init__(self, children: Children) -> None:
        self._children = children

    async def start(self, module: str, device: Device) -> Child:
        return await self._children.start(module, device=device.id)

    async def died_with_zygote(self, child: Child) -> bool:
        return False


class ForkedByTheTest(Zygote):
    """Every process that is forked is played by the test."""

    def __init__(self, children: Children) -> None:
        self._children = children

    async def fork(self, program: str, *, device: str | None = None, environment: object = None) -> Child:
        return await self._children.start(program, device=device)

    async def died_with_zygote(self, child: Child) -> bool:
        return False


async def work_of(what: str, children: Children, directory: Path, deadline: float) -> object:
    """Run a job that a child has to do within ``deadline``."""
    backend = SimBackend(make(directory))
    try:
        device = (await backend.inventory.devices())[0]
        if what == "sim eraser":
            eraser = SimEraser(backend.inventory, ForkedByTheTest(children), directory / "locks")
            return await eraser.erase(device, request(deadline=deadline), lambda _: None)
        if what == "sim diagnostic":
            return await SimDiagnostics(backend.inventory, children, directory / "locks").diagnose(
                device, DiagnosticLevel.QUICK, deadline
            )
        workplace = GpuJobRunner(FromTheTest(children), Unfenced(), directory / "locks")
        if what == "cuda diagnostic":
            return await CudaDiagnostics(workplace).diagnose(device, DiagnosticLevel.QUICK, deadline)
        return await workplace.run(
            device, GpuJob(ERASER_MODULE, "eraser", {}, lambda child: wait_for_report(child, lambda _: None), deadline)
        )
    finally:
        await backend.close()


WORK = [
    ("sim eraser", ERASED),
    ("sim diagnostic", CHECKED),
    ("cuda eraser", {"covered_bytes": 0}),
    ("cuda diagnostic", CHECKED),
]


@pytest.mark.parametrize(("what", "report"), WORK)
async def test_report_received_by_the_deadline_is_in_time_despite_a_process_stall(
    short_tmp: Path, spoken: Spoken, what: str, report: Message
) -> None:
    working = asyncio.create_task(work_of(what, spoken, short_tmp / "node", SHORT))
    await spoken.request_received()
    spoken.send({"ok": report})
    stand_still(2 * SHORT)
    assert await working


@pytest.mark.parametrize(("what", "report"), WORK)
async def test_slow_child_start_does_not_consume_the_devices_time(
    short_tmp: Path, spoken: Spoken, what: str, report: Message
) -> None:
    spoken.late = 2 * SHORT
    working = asyncio.create_task(work_of(what, spoken, short_tmp / "node", SHORT))
    await spoken.request_received()
    if report is CHECKED:
        assert spoken.order()["seconds"] == DiagnosticLevel.QUICK.seconds
    spoken.send({"ok": report})
    assert await working


class Unwatched(NvidiaSmi):
    """The service stalls from the start of the run to its end, and beyond its deadline."""

    async def _start(self, *arguments: str) -> Any:
        started = await super()._start(*arguments)
        process = started[0]
        asyncio.get_running_loop().call_soon(stand_still, 2 * SHORT, lambda: not _lives(process.pid))
        return started


async def test_reset_that_ended_during_a_process_stall_is_not_reported_hung(machine: Machine) -> None:
    gpu = machine.gpus[0]
    await Unwatched(machine.places, Children()).reset([gpu.uuid], "Device 0", SHORT)
    assert gpu.resets() == 1


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
