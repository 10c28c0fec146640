"""Contract of every backend: the simulated node, NVML against a stand-in, a real GPU.

What can be checked on any node is in :mod:`scrubber.ports.contract`, which ``scrubber backend check`` runs as well. A
test module of a backend derives a ``Test…`` class from :class:`BackendContract` and provides a ``rig`` fixture: the
started backend with at least two devices without holders, and methods that change a device as the outside world does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import pytest

from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceBusy, DeviceLost, DriverTimeout, Unavailable, Unreadable
from scrubber.domain.telemetry import HolderKind, Signal
from scrubber.ports import contract
from scrubber.ports.device import EraseProgress, Eraser, EraseRequest, Holders, Inventory, Resetter, Settings, Telemetry

__all__ = ["Backend", "BackendContract", "Rig", "request"]


class Backend(Protocol):
    """The device ports of one node."""

    @property
    def inventory(self) -> Inventory: ...
    @property
    def holders(self) -> Holders: ...
    @property
    def telemetry(self) -> Telemetry: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def resetter(self) -> Resetter: ...
    @property
    def eraser(self) -> Eraser: ...


class Rig(Protocol):
    """A backend, and the environment of its devices."""

    @property
    def backend(self) -> Backend: ...
    @property
    def error_signal(self) -> str:
        """The backend's name for the signal of an error code."""

    def fill(self, device: Device, text: str) -> None:
        """Fill the memory with ``text`` and release the device."""

    def content(self, device: Device) -> bytes:
        """Return all of the memory that any program can reach."""

    def hold(self, device: Device) -> AbstractContextManager[int]:
        """Run an unrelated process that has the device open; yields its PID."""

    def raise_error(self, device: Device, code: int) -> None: ...
    def add_ecc_errors(self, device: Device, errors: int) -> None: ...
    def lose(self, device: Device) -> None: ...
    def hang(self, device: Device) -> None: ...
    def fail_resets(self, device: Device) -> None: ...
    def tamper(self, device: Device) -> tuple[str, str]:
        """Change a setting behind the backend's back, as a tenant does; return its name and its new value."""

    def remove_driver(self) -> None: ...


def request(*, audit: bool = True, pattern: bool = False, deadline: float = 30.0) -> EraseRequest:
    return EraseRequest("scrub-1", audit=audit, pattern=pattern, deadline=deadline)


async def two(rig: Rig) -> tuple[Device, Device]:
    first, second, *_ = await rig.backend.inventory.devices()
    return first, second


async def error(rig: Rig, device: Device, code: int) -> None:
    """Raise an error code and wait until the backend has reported it."""
    signals = rig.backend.telemetry.signals()
    rig.raise_error(device, code)
    async with asyncio.timeout(20):
        while await anext(signals) != Signal(device.id, rig.error_signal, code):
            continue


def ignore_progress(_: EraseProgress) -> None:
    """Progress callback that ignores progress."""


class BackendContract:
    """The contract tests; derive from this class and provide ``rig``.

    Attributes:
        codes: three error codes of the backend.
    """

    codes: tuple[int, int, int] = (95, 31, 13)

    # --- inventory

    async def test_devices_have_distinct_ids_and_are_listed_in_index_order(self, rig: Rig) -> None:
        devices = await contract.check_inventory(rig.backend.inventory)
        assert len(devices) >= 2
        assert all(device.memory_bytes > 0 and device.access for device in devices)

    async def test_identity_names_node_boot_and_driver(self, rig: Rig) -> None:
        await contract.check_identity(rig.backend.inventory)

    async def test_missing_driver_makes_inventory_unavailable_and_devices_unreadable(self, rig: Rig) -> None:
        device, _ = await two(rig)
        rig.remove_driver()
        with pytest.raises(Unavailable):
            await rig.backend.inventory.devices()
        with pytest.raises(Unavailable):
            await rig.backend.inventory.identity()
        with pytest.raises(Unreadable):
            await rig.backend.telemetry.snapshot(device)

    # --- holders

    async def test_free_device_has_no_holders(self, rig: Rig) -> None:
        device, _ = await two(rig)
        assert not await rig.backend.holders.is_held(device)
        assert not await contract.check_holders(rig.backend.holders, device)

    async def test_holder_is_found_by_pid_and_start_time_on_its_device_alone(self, rig: Rig) -> None:
        device, other = await two(rig)
        with rig.hold(device) as pid:
            assert await rig.backend.holders.is_held(device)
            assert not await rig.backend.holders.is_held(other)
            (holder,) = (await rig.backend.holders.list_holders(device)).holders
            assert (holder.pid, holder.kind) == (pid, HolderKind.PROCESS)
            assert holder.started > 0
        assert not await rig.backend.holders.is_held(device)

    async def test_free_device_has_no_users_and_every_user_is_a_holder(self, rig: Rig) -> None:
        device, other = await two(rig)
        assert await rig.backend.holders.list_users(device) == ()
        with rig.hold(device) as pid:
            (user,) = await rig.backend.holders.list_users(device)
            assert (user.pid, user.kind) == (pid, HolderKind.PROCESS)
            assert await contract.check_holders(rig.backend.holders, device)
            assert await rig.backend.holders.list_users(other) == ()
        assert await rig.backend.holders.list_users(device) == ()

    async def test_inspected_holder_is_not_reported_as_uninspected(self, rig: Rig) -> None:
        device, _ = await two(rig)
        with rig.hold(device) as pid:
            assert pid not in {each.pid for each in (await rig.backend.holders.list_holders(device)).uninspected}

    # --- telemetry

    async def test_healthy_snapshot_reports_no_conditions(self, rig: Rig) -> None:
        device, _ = await two(rig)
        snapshot = await contract.check_snapshot(rig.backend.telemetry, device)
        assert snapshot.errors == {}
        assert not snapshot.ecc_uncorrected
        assert snapshot.recovery_action in (None, "none")

    async def test_device_error_is_a_signal_and_a_condition_of_its_device_alone(self, rig: Rig) -> None:
        device, other = await two(rig)
        signals = rig.backend.telemetry.signals()
        rig.raise_error(device, self.codes[0])
        async with asyncio.timeout(20):
            assert await anext(signals) == Signal(device.id, rig.error_signal, self.codes[0])
        assert (await rig.backend.telemetry.snapshot(device)).errors == {self.codes[0]: 1}
        assert (await rig.backend.telemetry.snapshot(other)).errors == {}

    async def test_device_error_is_counted_each_time_it_occurs(self, rig: Rig) -> None:
        device, other = await two(rig)
        _, often, once = self.codes
        for code in (often, once, often):
            await error(rig, device, code)
        assert (await rig.backend.telemetry.snapshot(device)).errors == {once: 1, often: 2}
        await error(rig, device, often)
        assert (await rig.backend.telemetry.snapshot(device)).errors == {once: 1, often: 3}
        assert (await rig.backend.telemetry.snapshot(other)).errors == {}

    async def test_lost_device_is_reported_lost_while_other_devices_answer(self, rig: Rig) -> None:
        device, other = await two(rig)
        rig.lose(device)
        with pytest.raises(DeviceLost):
            await rig.backend.telemetry.snapshot(device)
        assert (await rig.backend.telemetry.snapshot(other)).device == other.id

    async def test_stuck_device_is_reported_stuck_while_other_devices_answer(self, rig: Rig) -> None:
        device, other = await two(rig)
        rig.hang(device)
        stuck = asyncio.create_task(rig.backend.telemetry.snapshot(device))
        assert (await rig.backend.telemetry.snapshot(other)).device == other.id
        with pytest.raises(DriverTimeout):
            await stuck
        assert (await rig.backend.telemetry.snapshot(other)).device == other.id

    # --- settings

    async def test_changed_setting_is_detected_and_restored(self, rig: Rig) -> None:
        device, other = await two(rig)
        defaults: Mapping[str, str] = (await rig.backend.telemetry.snapshot(device)).defaults
        name, tampered = rig.tamper(device)
        assert defaults[name] != tampered
        assert (await rig.backend.telemetry.snapshot(device)).settings[name] == tampered
        await contract.check_restored_settings(rig.backend.telemetry, rig.backend.settings, device)
        for each in (device, other):
            assert (await rig.backend.telemetry.snapshot(each)).settings == defaults

    async def test_setting_that_does_not_apply_is_omitted(self, rig: Rig) -> None:
        device, _ = await two(rig)
        await contract.check_unknown_setting(rig.backend.settings, device)

    # --- resets

    async def test_reset_lifts_conditions_and_does_not_clear_memory(self, rig: Rig) -> None:
        device, _ = await two(rig)
        rig.fill(device, "secret")
        await error(rig, device, self.codes[0])
        rig.add_ecc_errors(device, 2)
        assert (await rig.backend.telemetry.snapshot(device)).ecc_uncorrected == 2
        plan = await contract.check_reset_plan(rig.backend.resetter, device)
        assert (plan.unavailable, plan.blockers, plan.also_reset) == (None, (), ())
        after = await contract.check_reset(rig.backend.resetter, rig.backend.telemetry, device, 30.0)
        assert after.ecc_uncorrected == 0
        assert b"secret" in rig.content(device)

    async def test_error_that_recurs_after_a_reset_is_counted_from_one(self, rig: Rig) -> None:
        device, _ = await two(rig)
        for _ in range(3):
            await error(rig, device, self.codes[0])
        await rig.backend.resetter.reset(device, 30.0)
        await error(rig, device, self.codes[0])
        assert (await rig.backend.telemetry.snapshot(device)).errors == {self.codes[0]: 1}

    async def test_failed_reset_raises_an_error_and_keeps_the_condition(self, rig: Rig) -> None:
        device, _ = await two(rig)
        await error(rig, device, self.codes[0])
        rig.fail_resets(device)
        with pytest.raises(Unreadable):
            await rig.backend.resetter.reset(device, 30.0)
        assert (await rig.backend.telemetry.snapshot(device)).errors == {self.codes[0]: 1}

    async def test_held_device_is_not_reset_and_not_reported_faulty(self, rig: Rig) -> None:
        device, _ = await two(rig)
        await error(rig, device, self.codes[0])
        with rig.hold(device):
            assert (await rig.backend.resetter.plan(device)).blockers
            with pytest.raises(DeviceBusy):
                await rig.backend.resetter.reset(device, 30.0)
        assert (await rig.backend.telemetry.snapshot(device)).errors == {self.codes[0]: 1}
        await rig.backend.resetter.reset(device, 30.0)
        assert (await rig.backend.telemetry.snapshot(device)).errors == {}

    async def test_reset_of_a_stuck_device_ends_at_its_deadline(self, rig: Rig) -> None:
        device, _ = await two(rig)
        rig.hang(device)
        with pytest.raises(DriverTimeout):
            await rig.backend.resetter.reset(device, 0.2)

    # --- clearing

    async def test_residue_of_a_tenant_is_counted_cleared_and_verified(self, rig: Rig) -> None:
        device, other = await two(rig)
        rig.fill(device, "secret")
        rig.fill(other, "another tenant's")
        seen: list[EraseProgress] = []
        report = await rig.backend.eraser.erase(device, request(), seen.append)
        assert report.cleared_bytes == report.verified_bytes == report.total_bytes - report.not_covered_bytes
        assert report.residue_bytes == report.cleared_bytes > 0
        assert (report.failed_bytes, report.fence_broken, report.size_restored, report.unreleased_bytes) == (
            0,
            False,
            None,
            0,
        )
        left = len(rig.content(device)) - rig.content(device).count(0)
        assert left <= report.not_covered_bytes - report.reserved_bytes <= device.memory_bytes // 8
        assert bool(report.not_covered) is (report.not_covered_bytes > 0)
        assert rig.content(other).startswith(b"another tenant's")
        phases = [phase for phase in dict.fromkeys(progress.phase for progress in seen) if phase != "on-chip"]
        assert phases == ["audit", "clear", "verify"]
        assert phases == [phase for phase, _ in report.seconds_by_phase if phase not in ("on-chip", "map")]
        assert all(0 <= each.done_bytes <= each.total_bytes <= device.memory_bytes for each in seen)
        assert seen[-1].done_bytes == seen[-1].total_bytes

    async def test_clean_device_has_no_residue_and_a_skipped_audit_reports_none(self, rig: Rig) -> None:
        device, _ = await two(rig)
        await rig.backend.eraser.erase(device, request(), ignore_progress)
        assert (await rig.backend.eraser.erase(device, request(), ignore_progress)).residue_bytes == 0
        assert (await rig.backend.eraser.erase(device, request(audit=False), ignore_progress)).residue_bytes is None

    async def test_pattern_pass_leaves_no_residue(self, rig: Rig) -> None:
        device, _ = await two(rig)
        report = await contract.check_erasure(rig.backend.eraser, rig.backend.holders, device, request(pattern=True))
        assert "pattern" in dict(report.seconds_by_phase)
        left = len(rig.content(device)) - rig.content(device).count(0)
        assert left <= report.not_covered_bytes - report.reserved_bytes

    async def test_held_device_is_not_scrubbed(self, rig: Rig) -> None:
        device, _ = await two(rig)
        rig.fill(device, "secret")
        with rig.hold(device), pytest.raises(DeviceBusy):
            await rig.backend.eraser.erase(device, request(), ignore_progress)
        assert rig.content(device).startswith(b"secret")

    async def test_eraser_covers_all_memory_and_has_released_the_device_after_its_report(self, rig: Rig) -> None:
        device, _ = await two(rig)
        await contract.check_erasure(rig.backend.eraser, rig.backend.holders, device, request())
        assert await rig.backend.eraser.terminate_orphan(device, 1.0)
