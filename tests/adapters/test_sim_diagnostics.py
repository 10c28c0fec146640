"""Diagnostics of the simulated node: the contract of every diagnostic, and what only files can show."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scrubber.adapters.sim import control
from scrubber.adapters.sim.backend import SimBackend
from scrubber.adapters.sim.diagnostics import SimDiagnostics
from scrubber.domain.device import Device
from scrubber.domain.diagnostics import DiagnosticLevel
from scrubber.domain.errors import DeviceBusy, Unavailable
from tests.adapters.backend_contract import request
from tests.adapters.diagnostics_contract import DiagnosticsContract, cancelled, under_way, untouched
from tests.adapters.shortage import descriptors_left
from tests.adapters.sim_rig import Sim, make


class SimDiagnosed:
    """:class:`~tests.adapters.diagnostics_contract.DiagnosticsRig` over a simulated node."""

    def __init__(self, sim: Sim, device: Device, other: Device) -> None:
        self.sim = sim
        self.device = device
        self.other = other
        self.locks = sim.directory / "locks"
        self.diagnostics = SimDiagnostics(sim.backend.inventory, sim.backend.children, self.locks)

    def fill(self, device: Device, text: str) -> None:
        self.sim.fill(device, text)

    def content(self, device: Device) -> bytes:
        return self.sim.content(device)

    @contextmanager
    def hold(self, device: Device) -> Iterator[int]:
        with self.sim.hold(device) as pid:
            yield pid

    def spoil(self, device: Device) -> None:
        control.add_faults(self.sim.directory, device.id, wont_clear=True)

    async def at_work(self, device: Device) -> int | None:
        return await self.sim.backend.eraser.find_orphan(device)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[SimDiagnosed]:
    backend = SimBackend(make(tmp_path / "sim", mebibytes=3))
    await backend.start()
    sim = Sim(tmp_path / "sim", backend)
    device, other = await backend.inventory.devices()
    yield SimDiagnosed(sim, device, other)
    sim.close()
    await backend.close()
    assert backend.children.pids() == frozenset()


class TestSimDiagnostics(DiagnosticsContract):
    """The contract, over files."""


async def test_diagnosis_blocks_the_eraser_until_finished(rig: SimDiagnosed) -> None:
    task = await under_way(rig)
    with pytest.raises(DeviceBusy):
        await rig.sim.backend.eraser.erase(rig.device, request(), lambda _: None)
    await cancelled(task)
    report = await rig.sim.backend.eraser.erase(rig.device, request(), lambda _: None)
    assert report.verified_bytes == rig.device.memory_bytes


async def test_opening_the_device_ends_its_diagnosis(rig: SimDiagnosed) -> None:
    task = await under_way(rig)
    tenant = rig.sim.start(rig.device, "--read", "--hold", "forever")
    with pytest.raises(DeviceBusy, match="opened"):
        await task
    tenant.until_ready()


async def test_diagnosis_releases_the_space_of_the_device_file(rig: SimDiagnosed) -> None:
    await rig.diagnostics.diagnose(rig.device, DiagnosticLevel.QUICK, 30.0)
    found = rig.sim.files(rig.device).memory.stat()
    assert (found.st_blocks, found.st_size) == (0, rig.device.memory_bytes)


async def test_diagnostic_child_that_cannot_start_is_no_device_fault(rig: SimDiagnosed) -> None:
    rig.fill(rig.device, "secret")
    with descriptors_left(1), pytest.raises(Unavailable):
        await rig.diagnostics.diagnose(rig.device, DiagnosticLevel.QUICK, 30.0)
    assert untouched(rig)
