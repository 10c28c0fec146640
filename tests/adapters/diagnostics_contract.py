"""Contract of every diagnostic, independent of the kind of devices: the simulated node, CUDA against a stand-in, a GPU.

A test module derives a ``Test…`` class from :class:`DiagnosticsContract` and provides a ``rig`` fixture: diagnostics,
two devices without holders, and methods that change a device as the outside world does.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AbstractContextManager
from typing import Protocol

import pytest

from scrubber.domain.device import Device
from scrubber.domain.diagnostics import DiagnosticCheck, DiagnosticLevel
from scrubber.domain.errors import DeviceBusy, DriverTimeout, Unavailable, Unreadable
from scrubber.ports.device import Diagnostics

__all__ = ["DiagnosticsContract", "DiagnosticsRig", "cancelled", "under_way", "untouched"]

CHECKS = ("memory-pattern", "matrix-product", "host-to-device", "device-to-host")
DEADLINE = 30.0


class DiagnosticsRig(Protocol):
    """Diagnostics, and the environment of their devices."""

    @property
    def diagnostics(self) -> Diagnostics: ...
    @property
    def device(self) -> Device: ...
    @property
    def other(self) -> Device: ...

    def fill(self, device: Device, text: str) -> None:
        """Fill the memory with ``text`` and release the device."""

    def content(self, device: Device) -> bytes:
        """Return all of the memory that a program can reach."""

    def hold(self, device: Device) -> AbstractContextManager[object]:
        """Run an unrelated process that holds the device."""

    def spoil(self, device: Device) -> None:
        """Make the memory lose everything that is written from now on."""

    async def at_work(self, device: Device) -> int | None:
        """Return the PID of the child that holds the lock of ``device``, as the eraser's ``orphan`` reports it."""


class DiagnosticsContract:
    """The contract tests; derive from this class and provide ``rig``. A quick diagnosis takes a tenth of a second here.

    Attributes:
        checks: names of the checks that the diagnostics run, in order; the first one is that of the memory.
    """

    checks: tuple[str, ...] = CHECKS

    @pytest.fixture(autouse=True)
    def quicker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seconds = {level: 0.1 if level is DiagnosticLevel.QUICK else level.seconds for level in DiagnosticLevel}
        monkeypatch.setattr(DiagnosticLevel, "seconds", property(seconds.__getitem__))

    async def test_working_device_passes_every_check_with_a_rate(self, rig: DiagnosticsRig) -> None:
        checks = await rig.diagnostics.diagnose(rig.device, DiagnosticLevel.QUICK, DEADLINE)
        assert tuple(check.name for check in checks) == self.checks
        assert not any(check.errors for check in checks)
        for check in checks:
            unit = "operations" if check.name == "matrix-product" else "bytes"
            assert set(check.measured) == {unit, f"{unit}_per_second", "seconds"}
            assert all(value > 0 for value in check.measured.values())

    async def test_diagnostic_level_none_runs_no_checks(self, rig: DiagnosticsRig) -> None:
        rig.fill(rig.device, "secret")
        assert await rig.diagnostics.diagnose(rig.device, DiagnosticLevel.NONE, DEADLINE) == ()
        assert untouched(rig)

    async def test_diagnosis_leaves_its_device_clear_and_touches_no_other_device(self, rig: DiagnosticsRig) -> None:
        rig.fill(rig.other, "another tenant's")
        await rig.diagnostics.diagnose(rig.device, DiagnosticLevel.QUICK, DEADLINE)
        assert rig.content(rig.device).strip(b"\0") == b""
        assert rig.content(rig.other).startswith(b"another tenant's")

    async def test_memory_that_loses_writes_fails_the_pattern_check(self, rig: DiagnosticsRig) -> None:
        rig.spoil(rig.device)
        pattern, *others = await rig.diagnostics.diagnose(rig.device, DiagnosticLevel.QUICK, DEADLINE)
        assert pattern.errors > 0
        assert not any(check.errors for check in others if check.name == "matrix-product")

    async def test_held_device_is_not_diagnosed_and_not_reported_faulty(self, rig: DiagnosticsRig) -> None:
        rig.fill(rig.device, "secret")
        with rig.hold(rig.device), pytest.raises(DeviceBusy):
            await rig.diagnostics.diagnose(rig.device, DiagnosticLevel.QUICK, DEADLINE)
        assert untouched(rig)

    async def test_two_diagnoses_never_run_on_one_device(self, rig: DiagnosticsRig) -> None:
        first = await under_way(rig)
        with pytest.raises((DeviceBusy, Unavailable)):
            await rig.diagnostics.diagnose(rig.device, DiagnosticLevel.QUICK, DEADLINE)
        assert not first.done()
        await cancelled(first)

    async def test_diagnosis_ends_at_its_deadline(self, rig: DiagnosticsRig) -> None:
        with pytest.raises(DriverTimeout):
            await rig.diagnostics.diagnose(rig.device, DiagnosticLevel.EXTENDED, 1.0)
        assert await rig.at_work(rig.device) is None

    async def test_cancelled_diagnosis_leaves_no_process_running(self, rig: DiagnosticsRig) -> None:
        await cancelled(await under_way(rig))
        assert await rig.at_work(rig.device) is None
        checks = await rig.diagnostics.diagnose(rig.device, DiagnosticLevel.QUICK, DEADLINE)
        assert checks
        assert not any(check.errors for check in checks)

    async def test_killed_diagnostic_child_yields_no_result(self, rig: DiagnosticsRig) -> None:
        task = await under_way(rig)
        pid = await rig.at_work(rig.device)
        assert pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unreadable):
            await task
        assert await rig.at_work(rig.device) is None


async def under_way(rig: DiagnosticsRig) -> asyncio.Task[tuple[DiagnosticCheck, ...]]:
    """Start a diagnosis that takes a minute; returns once it has the device."""
    task = asyncio.create_task(rig.diagnostics.diagnose(rig.device, DiagnosticLevel.EXTENDED, 120.0))
    async with asyncio.timeout(DEADLINE):
        while not await rig.at_work(rig.device):
            assert not task.done(), task.exception()
            await asyncio.sleep(0.005)
    return task


def untouched(rig: DiagnosticsRig) -> bool:
    """Return whether the end of the memory still contains "secret"; a holder has its share at the start."""
    return b"secret" in rig.content(rig.device)[-64:]


async def cancelled(task: asyncio.Task[tuple[DiagnosticCheck, ...]]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
