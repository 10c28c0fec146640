"""Diagnostics through CUDA, against its stand-in: the contract of every diagnostic, and what only a GPU can do."""

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scrubber.adapters.children.process import Children
from scrubber.adapters.cuda.diagnostics import CudaDiagnostics
from scrubber.adapters.cuda.erasure import CudaEraser
from scrubber.adapters.cuda.gpu_jobs import GpuJobRunner
from scrubber.adapters.cuda.programs import ProgramLauncher
from scrubber.domain.device import Device
from scrubber.domain.diagnostics import DiagnosticLevel
from scrubber.domain.errors import Unreadable
from tests.adapters.diagnostics_contract import DiagnosticsContract, cancelled, under_way
from tests.adapters.sim_rig import Tenant
from tests.nvidia.machine import Machine
from tests.plugin_collaborators import DEADLINE

MEBIBYTES = 8
ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests/nvidia/standin"
MODES = {"0": "default", "3": "exclusive-process"}


class FileBackedGpu:
    """The driver's responses around a GPU job, read from the machine's files."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def compute_mode(self, device: Device) -> str | None:
        return None if device.parent else MODES[self._machine.find(device.id)[0].text("compute_mode")]

    async def fence(self, device: Device) -> None:
        self._machine.find(device.id)[0].set("compute_mode", 3)

    async def unfence(self, device: Device, compute_mode: str) -> None:
        number = next(number for number, word in MODES.items() if word == compute_mode)
        self._machine.find(device.id)[0].set("compute_mode", number)

    async def memory(self, device: Device) -> tuple[int, int, int]:
        _, subject = self._machine.find(device.id)
        return subject.number("total"), subject.number("reserved"), subject.number("used")

    async def wait_until_idle(self, device: Device, deadline: float) -> int:
        return 0


HOLDER = """
import json, signal
from cupy.cuda import runtime
runtime.free(0)
print(json.dumps({"ready": True}), flush=True)
signal.pause()
"""


class CudaDiagnosed:
    """:class:`~tests.adapters.diagnostics_contract.DiagnosticsRig` over the stand-ins."""

    def __init__(self, machine: Machine, workplace: GpuJobRunner) -> None:
        self.machine = machine
        self.device, self.other = (
            Device(gpu.uuid, str(gpu.index), gpu.text("name"), gpu.number("total")) for gpu in machine.gpus
        )
        self.eraser = CudaEraser(workplace)
        self.diagnostics = CudaDiagnostics(workplace)

    def fill(self, device: Device, text: str) -> None:
        self.machine.find(device.id)[1].fill(text)

    def content(self, device: Device) -> bytes:
        return self.machine.find(device.id)[1].content()

    @contextmanager
    def hold(self, device: Device) -> Iterator[int]:
        environment = {**stand_in(self.machine), "CUDA_VISIBLE_DEVICES": device.id}
        tenant = Tenant(
            ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, "-c", HOLDER]
        )
        try:
            yield tenant.until_ready().pid
        finally:
            tenant.end()

    def spoil(self, device: Device) -> None:
        self.machine.find(device.id)[0].set("wont_clear", "")

    async def at_work(self, device: Device) -> int | None:
        return await self.eraser.find_orphan(device)


def stand_in(machine: Machine) -> dict[str, str]:
    return {"PYTHONPATH": f"{STAND_IN}:{ROOT}", "SCRUBBER_STANDIN_WORLD": str(machine.root)}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[CudaDiagnosed]:
    children = Children(kill_timeout=DEADLINE)
    with Machine.create(tmp_path / "world", mebibytes=MEBIBYTES + 1, reserved_mebibytes=1) as machine:
        programs = ProgramLauncher(children, tmp_path / "state", environment=stand_in(machine))
        yield CudaDiagnosed(machine, GpuJobRunner(programs, FileBackedGpu(machine), tmp_path / "locks"))
        await programs.close()
        await children.close()
    assert children.pids() == frozenset()


class TestCudaDiagnostics(DiagnosticsContract):
    """The contract, over the stand-ins."""


async def test_diagnosis_sets_the_erasers_fence_and_removes_it_afterwards(rig: CudaDiagnosed) -> None:
    gpu = rig.machine.gpus[0]
    task = await under_way(rig)
    assert gpu.text("compute_mode") == "3"
    await cancelled(task)
    assert gpu.text("compute_mode") == "0"


async def test_memory_that_faults_when_accessed_is_unreadable(rig: CudaDiagnosed) -> None:
    rig.machine.gpus[0].set("bad_page", rig.machine.gpus[0].usable_bytes - 4096)
    with pytest.raises(Unreadable):
        await rig.diagnostics.diagnose(rig.device, DiagnosticLevel.QUICK, 30.0)
