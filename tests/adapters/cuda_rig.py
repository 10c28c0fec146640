"""The CUDA adapters over the stand-ins: a machine with GPUs, and CuPy's stand-in in the zygote."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from scrubber.adapters.children.process import Children
from scrubber.adapters.cuda.erasure import CudaEraser
from scrubber.adapters.cuda.gpu_jobs import GpuJobRunner
from scrubber.adapters.cuda.programs import ERASER_MODULE, ProgramLauncher
from scrubber.domain.device import Device
from scrubber.ports.device import EraseProgress, EraseReport, EraseRequest
from tests.nvidia.hostgpu import lives
from tests.nvidia.machine import Instance, Machine
from tests.plugin_collaborators import DEADLINE

__all__ = ["STANDIN", "CudaRig", "FileBackedGpu", "UnderWay", "cuda_rig", "environment", "request"]

ROOT = Path(__file__).parents[2]
STANDIN = ROOT / "tests" / "nvidia" / "standin"
GRANULE = 2 << 20

_MODES = {"0": "default", "2": "prohibited", "3": "exclusive-process"}

_HOLDER = """
import sys
from cupy.cuda import runtime
runtime.malloc(1)
print("It holds.", flush=True)
sys.stdin.read()
"""


def environment(machine: Machine, **more: str) -> dict[str, str]:
    """Return the environment in which a process finds the stand-in for CuPy, and the world."""
    return {"PYTHONPATH": f"{STANDIN}:{ROOT}", "SCRUBBER_STANDIN_WORLD": str(machine.root), "PATH": os.defpath, **more}


def request(
    *, audit: bool = True, pattern: bool = False, on_chip: bool = False, deadline: float = 60.0
) -> EraseRequest:
    return EraseRequest("scrub-1", audit=audit, pattern=pattern, deadline=deadline, on_chip=on_chip)


class FileBackedGpu:
    """The driver's responses around a GPU job, read from the machine's files.

    Attributes:
        on_fence: called before the fence is set and after it is removed.
        unsettled: bytes of memory that are never released.
        refusal: the error of every change of the compute mode.
        stubborn: accepts every change of the compute mode and applies none.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.on_fence: Callable[[str], None] = lambda _: None
        self.unsettled = 0
        self.refusal: Exception | None = None
        self.stubborn = False

    def mode(self, device: Device) -> str:
        gpu, _ = self._machine.find(device.id)
        return _MODES[gpu.text("compute_mode")]

    async def compute_mode(self, device: Device) -> str | None:
        _, subject = self._machine.find(device.id)
        return None if isinstance(subject, Instance) else self.mode(device)

    async def fence(self, device: Device) -> None:
        self.on_fence("up")
        self._set(device, "exclusive-process")

    async def unfence(self, device: Device, compute_mode: str) -> None:
        self._set(device, compute_mode)
        self.on_fence("down")

    async def memory(self, device: Device) -> tuple[int, int, int]:
        gpu, subject = self._machine.find(device.id)
        records = [each for each in (gpu.directory / "processes/compute.d").glob("[0-9]*") if lives(each)]
        used = sum(int(each.read_text("ascii").split()[0]) for each in records)
        return subject.number("total"), subject.number("reserved"), subject.number("used") + used

    async def wait_until_idle(self, device: Device, deadline: float) -> int:
        return self.unsettled

    def _set(self, device: Device, mode: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        gpu, _ = self._machine.find(device.id)
        if not self.stubborn:
            gpu.set("compute_mode", next(number for number, word in _MODES.items() if word == mode))


class CudaRig:
    """An eraser over a machine, and the operations of tests on both."""

    def __init__(
        self, machine: Machine, state: Path, children: Children, *, modules: Sequence[str] = (ERASER_MODULE,)
    ) -> None:
        self.machine = machine
        self.state = state
        self.locks = state / "locks"
        self.locks.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.gpu = FileBackedGpu(machine)
        self.children = children
        self.programs = ProgramLauncher(children, state, environment=environment(machine), modules=modules)
        self.workplace = GpuJobRunner(self.programs, self.gpu, self.locks)
        self.eraser = CudaEraser(self.workplace)

    def device(self, number: int = 0) -> Device:
        """Return the GPU or instance with position ``number`` among all."""
        gpu, subject = [*self.machine.subjects()][number]
        return Device(
            id=subject.uuid,
            index=str(number),
            model=subject.text("name"),
            memory_bytes=subject.number("total"),
            parent=gpu.uuid if isinstance(subject, Instance) else None,
        )

    def note(self, device: Device) -> Path:
        """Return the file in which the fence of ``device`` is recorded."""
        return self.locks / "fences" / device.id

    async def erase(self, device: Device, requested: EraseRequest | None = None) -> EraseReport:
        return await self.eraser.erase(device, requested or request(), lambda _: None)

    @contextmanager
    def holding(self, device: Device) -> Iterator[int]:
        """Run an unrelated process with a context on ``device``; yields its PID."""
        variables = environment(self.machine, CUDA_VISIBLE_DEVICES=device.id)
        command = [sys.executable, "-c", _HOLDER]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"It holds.\n"
            yield holder.pid
            holder.kill()

    async def in_mid_clear(self, device: Device, deadline: float = 60.0) -> UnderWay:
        """Start a scrub of ``device``, filled with ``secret``, and return it in a clear pass that takes minutes."""
        gpu, subject = self.machine.find(device.id)
        subject.fill("secret")
        gpu.set("slow_clear", 600)
        begun = UnderWay(self, device, deadline)
        async with asyncio.timeout(60):
            await begun.reached.wait()
        return begun

    def lift(self, device: Device) -> None:
        """Restore the device's normal speed."""
        gpu, _ = self.machine.find(device.id)
        gpu.unset("slow_clear")


class UnderWay:
    """An erase in progress; its result is in ``task``."""

    def __init__(self, rig: CudaRig, device: Device, deadline: float) -> None:
        self.reached = asyncio.Event()
        self.task = asyncio.create_task(rig.eraser.erase(device, request(deadline=deadline), self._on_progress))
        self.task.add_done_callback(lambda _: self.reached.set())

    def _on_progress(self, progress: EraseProgress) -> None:
        if progress.phase == "clear":
            self.reached.set()


@asynccontextmanager
async def cuda_rig(root: Path, *, gpus: int = 2, modules: Sequence[str] = (ERASER_MODULE,)) -> AsyncIterator[CudaRig]:
    """Provide GPUs of 16 MiB, of which the driver keeps 2 and a context takes 2."""
    children = Children(kill_timeout=DEADLINE)
    with Machine.create(root / "world", gpus=gpus) as machine:
        rig = CudaRig(machine, root / "state", children, modules=modules)
        try:
            yield rig
        finally:
            await rig.programs.close()
            await children.close()
    assert children.pids() == frozenset()
