"""GPU jobs on an NVIDIA device: fence, lock and child stay consistent in every failure and cancellation."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.zygote_client import Zygote
from scrubber.adapters.cuda.diagnostics import CudaDiagnostics
from scrubber.adapters.cuda.erasure import CudaEraser
from scrubber.adapters.cuda.fence import ComputeModeFence, GpuControl
from scrubber.adapters.cuda.gpu_jobs import GpuJob, GpuJobResult, GpuJobRunner
from scrubber.adapters.cuda.programs import DIAGNOSIS_MODULE, ERASER_MODULE
from scrubber.domain.device import Device
from scrubber.domain.diagnostics import DiagnosticLevel
from scrubber.domain.errors import DeviceBusy, RetryableError, Unavailable, Unreadable
from scrubber.ports.device import EraseReport
from tests.adapters.cuda_rig import CudaRig, cuda_rig, request
from tests.adapters.shortage import descriptors_left
from tests.adapters.test_children_zygote import ended
from tests.plugin_collaborators import DEADLINE

MIB = 1 << 20
HOLDER = """\
import sys
from scrubber.adapters.locks import acquire_lock
print(acquire_lock(sys.argv[1]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
async def rig(short_tmp: Path) -> AsyncIterator[CudaRig]:
    async with cuda_rig(short_tmp, modules=(ERASER_MODULE, DIAGNOSIS_MODULE)) as made:
        yield made


# --- consistency under cancellation at any time


class AtStep:
    """``work``, whose task is cancelled at its ``step``-th wait; ``reached`` reports whether that happened."""

    def __init__(self, work: Coroutine[Any, Any, EraseReport], step: int) -> None:
        self._work = work
        self._step = step
        self.reached = False

    async def run(self) -> EraseReport:
        return await self

    def __await__(self) -> Generator[Any, Any, EraseReport]:
        task = asyncio.current_task()
        assert task is not None
        work = self._work.__await__()
        resume: Callable[[], Any] = partial(next, work)
        for step in range(10_000):
            try:
                waits_for = resume()
            except StopIteration as over:
                report: EraseReport = over.value
                return report
            if step == self._step:
                self.reached = True
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                yield waits_for
            except asyncio.CancelledError as stop:
                resume = partial(work.throw, stop)
            else:
                resume = partial(next, work)
        raise AssertionError("it waits for ever")


async def test_scrub_cancelled_at_any_step_leaves_no_fence_and_no_eraser(rig: CudaRig) -> None:
    device = rig.device()
    await rig.programs.warm_up()
    for step in range(200):
        rig.machine.gpus[0].fill("secret")
        cancelled = AtStep(rig.erase(device, request(pattern=True, on_chip=True)), step)
        task = asyncio.create_task(cancelled.run())
        await asyncio.wait({task}, timeout=60)
        assert (rig.gpu.mode(device), rig.note(device).exists()) == ("default", False)
        assert await rig.eraser.find_orphan(device) is None
        assert task.cancelled() == cancelled.reached
        if not cancelled.reached:
            assert (task.result().verified_bytes or 0) > 0
            break
    # Forking, exiting and cleaning up; how many of its messages arrive together depends on the machine.
    assert step > 2
    for pid in rig.children.pids() - {rig.programs.zygote.pid}:  # forked for a caller that was cancelled by then
        await ended(pid)


# --- the fence


@contextmanager
def another_program_at_work(rig: CudaRig, device: Device) -> Iterator[int]:
    """Run a process that holds the device's lock; yields its PID."""
    command = [sys.executable, "-c", HOLDER, str(rig.locks / device.id)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"True\n"
        yield holder.pid
        holder.kill()


async def test_next_scrub_does_not_remove_the_fence_of_a_running_program(rig: CudaRig) -> None:
    device = rig.device()
    await rig.gpu.fence(device)
    rig.note(device).parent.mkdir()
    rig.note(device).write_text("default\n", encoding="ascii")
    with another_program_at_work(rig, device) as pid:
        with pytest.raises(DeviceBusy, match=f"Process {pid} still works"):
            await rig.erase(device)
        assert rig.gpu.mode(device) == "exclusive-process"
        assert rig.note(device).exists()
    assert (await rig.erase(device)).failed_bytes == 0
    assert rig.gpu.mode(device) == "default"


async def test_fence_removed_during_a_scrub_is_reported_as_broken(rig: CudaRig) -> None:
    device = rig.device()
    begun = await rig.in_mid_clear(device)
    rig.machine.gpus[0].set("compute_mode", 0)
    rig.lift(device)
    assert (await begun.task).fence_broken
    assert not (await rig.erase(device)).fence_broken


async def test_slow_disk_delays_only_the_device_that_is_being_fenced(
    rig: CudaRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence, device = ComputeModeFence(rig.gpu, rig.locks), rig.device()
    syncing, answered = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def sync(_: int) -> None:
        loop.call_soon_threadsafe(syncing.set)
        if not answered.wait(DEADLINE):
            raise OSError("The event loop waits for the disk.")

    monkeypatch.setattr(os, "fsync", sync)
    enabling = asyncio.create_task(fence.enable(device))
    await syncing.wait()
    assert rig.gpu.mode(device) == "default"
    answered.set()
    assert await enabling
    assert (rig.gpu.mode(device), rig.note(device).exists()) == ("exclusive-process", True)


async def test_fence_record_that_cannot_be_removed_is_no_device_fault(rig: CudaRig) -> None:
    device = rig.device()

    def spoil(what: str) -> None:
        if what == "down":
            rig.note(device).unlink()
            rig.note(device).mkdir()

    rig.gpu.on_fence = spoil
    with pytest.raises(Unavailable, match="cannot be removed"):
        await rig.erase(device)
    assert rig.gpu.mode(device) == "default"
    with pytest.raises(Unavailable, match="cannot be read"):
        await rig.erase(device)


async def test_diagnosis_is_refused_where_cuda_does_not_enforce_the_fence(rig: CudaRig) -> None:
    rig.gpu.stubborn = True
    with pytest.raises(Unavailable, match="does not report it as exclusive"):
        await CudaDiagnostics(rig.workplace).diagnose(rig.device(), DiagnosticLevel.QUICK, 30.0)


# --- no device is blamed for faults of the node


async def test_killed_zygote_is_no_fault_of_the_devices_being_cleared(rig: CudaRig) -> None:
    devices = [rig.device(0), rig.device(1)]
    begun = [await rig.in_mid_clear(device) for device in devices]
    assert rig.programs.zygote.pid is not None
    os.kill(rig.programs.zygote.pid, signal.SIGKILL)
    for device, each in zip(devices, begun, strict=True):
        with pytest.raises(Unavailable, match="killed together with its zygote"):
            await each.task
        assert rig.gpu.mode(device) == "default"
        rig.lift(device)
        assert (await rig.erase(device)).residue_bytes


async def test_termination_signals_to_eraser_and_zygote_do_not_end_a_scrub(rig: CudaRig) -> None:
    device = rig.device()
    begun = await rig.in_mid_clear(device)
    eraser, zygote = await rig.eraser.find_orphan(device), rig.programs.zygote.pid
    assert eraser
    assert zygote
    for pid in (eraser, zygote):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
    rig.lift(device)
    assert (await begun.task).failed_bytes == 0
    assert (await rig.erase(device)).failed_bytes == 0
    assert rig.programs.zygote.pid == zygote


class Unfenced:
    """Driver access without a file of this process: a child answers."""

    async def compute_mode(self, device: Device) -> str | None:
        return None

    async def fence(self, device: Device) -> None:
        raise AssertionError("a device without a compute mode is not fenced")

    async def unfence(self, device: Device, compute_mode: str) -> None:
        raise AssertionError("nor let go")

    async def memory(self, device: Device) -> tuple[int, int, int]:
        return device.memory_bytes, 2 * MIB, 0

    async def wait_until_idle(self, device: Device, deadline: float) -> int:
        return 0


async def test_descriptor_shortage_during_a_scrub_is_no_device_fault(rig: CudaRig) -> None:
    device = rig.device()
    eraser = CudaEraser(GpuJobRunner(rig.programs, Unfenced(), rig.locks))
    requested = request()
    await eraser.erase(device, requested, lambda _: None)
    refusals = 0
    for spare in range(12):
        try:
            with descriptors_left(spare):
                assert await eraser.find_orphan(device) is None
                await eraser.erase(device, requested, lambda _: None)
        except RetryableError:
            refusals += 1
    assert 0 < refusals < 12


async def test_closed_zygote_starts_no_process_for_a_pending_fork(rig: CudaRig) -> None:
    zygote: Zygote = rig.programs.zygote
    await zygote.warm_up()
    fork = asyncio.create_task(zygote.fork(ERASER_MODULE))
    await asyncio.sleep(0)
    await zygote.close()
    with pytest.raises(Unavailable):
        await fork
    with pytest.raises(Unavailable, match="stopping"):
        await zygote.fork(ERASER_MODULE)
    assert (zygote.pid, rig.children.pids()) == (None, frozenset())


# --- what a report must contain


@pytest.mark.parametrize("audit", [True, False])
async def test_device_on_which_no_kernel_runs_is_not_reported_clear(rig: CudaRig, audit: bool) -> None:
    """No launch fails and none has an effect: therefore no byte other than zero is found either."""
    device, gpu = rig.device(), rig.machine.gpus[0]
    gpu.fill("secret")
    gpu.set("sm_dead", "0 1 2 3")
    with pytest.raises(Unreadable, match="did not detect the non-zero bytes"):
        await rig.erase(device, request(audit=audit))
    assert b"secret" in gpu.content()


GOOD: Message = {
    "covered_bytes": 12 * MIB,
    "cleared_bytes": 12 * MIB,
    "verified_bytes": 12 * MIB,
    "failed_bytes": 0,
    "residue_bytes": 0,
    "residue_map": [],
    "on_chip": None,
    "seconds_by_phase": [["audit", 0.1], ["clear", 0.1], ["verify", 0.1]],
}


class Reporting(GpuJobRunner):
    """A job runner without a child; every job ends with ``report``."""

    def __init__(self, gpu: GpuControl, report: Message) -> None:
        self.gpu = gpu
        self._report = report

    async def run(self, device: Device, work: GpuJob) -> GpuJobResult:
        return GpuJobResult(self._report, fenced=True, fence_broken=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds_by_phase": [["audit", 0.1], ["clear", 0.1]]},
        {"seconds_by_phase": [["audit", 0.1], ["pattern", 0.1], ["clear", 0.1], ["verify", 0.1]]},
        {"residue_bytes": None},
        {"residue_bytes": 1},
        {"residue_bytes": 1, "residue_map": [2]},
        {"residue_bytes": 1, "residue_map": [2, -1]},
        {"on_chip": {}},
        {"covered_bytes": 17 * MIB},
        {"verified_bytes": 13 * MIB},
        {"verified_bytes": 11 * MIB},
        {"cleared_bytes": -1},
    ],
)
async def test_report_of_passes_other_than_the_requested_ones_is_refused(rig: CudaRig, changes: Message) -> None:
    good = CudaEraser(Reporting(rig.gpu, GOOD))
    assert (await good.erase(rig.device(), request(), lambda _: None)).verified_bytes == 12 * MIB
    bad = CudaEraser(Reporting(rig.gpu, {**GOOD, **changes}))
    with pytest.raises(Unreadable, match="is invalid"):
        await bad.erase(rig.device(), request(), lambda _: None)


@pytest.mark.parametrize("requested", [{"pattern": True}, {"on_chip": True}])
async def test_report_that_omits_a_requested_pass_is_refused(rig: CudaRig, requested: dict[str, bool]) -> None:
    eraser = CudaEraser(Reporting(rig.gpu, GOOD))
    with pytest.raises(Unreadable, match="asked for"):
        await eraser.erase(rig.device(), request(**requested), lambda _: None)
