"""An event of a simulated device is reported at once, to every listener, once for each kind."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.adapters.sim import control, shape, signal_watch
from scrubber.adapters.sim.backend import SimBackend
from scrubber.adapters.sim.control import Faults
from scrubber.adapters.sim.layout import write_json
from scrubber.adapters.sim.signal_watch import fault_signals
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceBusy, DeviceLost, Unreadable
from scrubber.domain.telemetry import Signal
from tests.adapters.sim_rig import Sim, make

SOUND = Faults()


@pytest.fixture
async def sim(tmp_path: Path) -> AsyncIterator[Sim]:
    backend = SimBackend(make(tmp_path / "sim", mebibytes=1))
    await backend.start()
    made = Sim(tmp_path / "sim", backend)
    yield made
    made.close()
    await backend.close()


@pytest.fixture
async def device(sim: Sim) -> Device:
    return (await sim.backend.inventory.devices())[0]


async def the_next(signals: AsyncIterator[Signal]) -> Signal:
    async with asyncio.timeout(20):
        return await anext(signals)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (SOUND, SOUND, ()),
        (SOUND, SOUND.with_xid(95), [("xid", 95)]),
        (SOUND.with_xid(95), SOUND.with_xid(95).with_xid(95), [("xid", 95)]),
        (SOUND.with_xid(31), SOUND.with_xid(31).with_xid(79).with_xid(95), [("xid", 79), ("xid", 95)]),
        (SOUND.with_xid(95), SOUND.with_xid(95).after_reset(), [("changed", None)]),
        (SOUND, replace(SOUND, ecc=3), [("ecc", 3)]),
        (replace(SOUND, ecc=3), SOUND, [("changed", None)]),
        (SOUND, replace(SOUND, lost=True), [("lost", None)]),
        (replace(SOUND, lost=True), SOUND, [("changed", None)]),
        (SOUND, replace(SOUND, temperature=99), [("changed", None)]),
        (SOUND, replace(SOUND, conditions={"nvlink-down": ""}), [("changed", None)]),
        (replace(SOUND, conditions={"nvlink-down": ""}), SOUND, [("changed", None)]),
        (SOUND, replace(SOUND, counters={"retired_pages": 1}), [("changed", None)]),
        (SOUND, replace(SOUND, recovery="imex"), [("changed", None)]),
        (SOUND, None, [("changed", None)]),
        (None, SOUND.with_xid(95), [("changed", None)]),
        (None, None, ()),
    ],
)
def test_each_change_of_faults_maps_to_its_signals(
    before: Faults | None, after: Faults | None, expected: list[tuple[str, int | None]]
) -> None:
    assert fault_signals("GPU", before, after) == tuple(Signal("GPU", code, value) for code, value in expected)


async def test_cleared_condition_is_signalled_as_a_change(sim: Sim, device: Device) -> None:
    signals = sim.backend.telemetry.signals()
    sim.raise_error(device, 95)
    assert await the_next(signals) == Signal(device.id, "xid", 95)
    control.clear_faults(sim.directory, device.id)
    assert await the_next(signals) == Signal(device.id, "changed")


async def test_xid_cleared_before_being_read_is_still_signalled(sim: Sim, device: Device) -> None:
    signals = sim.backend.telemetry.signals()
    sim.raise_error(device, 95)
    control.clear_faults(sim.directory, device.id)
    assert await the_next(signals) == Signal(device.id, "xid", 95)
    assert (await sim.backend.telemetry.snapshot(device)).errors == {}


async def test_signal_between_listening_and_reading_is_not_missed(sim: Sim, device: Device) -> None:
    signals = sim.backend.telemetry.signals()
    sim.raise_error(device, 48)
    await sim.backend.telemetry.snapshot(device)
    assert await the_next(signals) == Signal(device.id, "xid", 48)


async def test_unread_event_flood_collapses_to_one_signal_of_each_kind(sim: Sim, device: Device) -> None:
    signals = sim.backend.telemetry.signals()
    for _ in range(50):
        sim.raise_error(device, 95)
        await sim.backend.telemetry.snapshot(device)
    sim.lose(device)
    xid, lost = Signal(device.id, "xid", 95), Signal(device.id, "lost")
    received = [await the_next(signals)]
    while received[-1] != lost:
        received.append(await the_next(signals))
    assert received in ([xid, lost], [xid, xid, lost])  # the last of the flood may arrive while the first is read


async def test_missing_driver_is_signalled_for_the_node(sim: Sim) -> None:
    signals = sim.backend.telemetry.signals()
    sim.remove_driver()
    assert await the_next(signals) == Signal(None, "driver")
    control.clear_faults(sim.directory)
    assert await the_next(signals) == Signal(None, "driver")


async def test_split_is_signalled_and_a_gpu_fault_is_signalled_for_each_instance(sim: Sim, device: Device) -> None:
    signals = sim.backend.telemetry.signals()
    parts = shape.split(sim.directory, device.id, 2)
    assert await the_next(signals) == Signal(None, "changed")
    sim.raise_error(device, 95)
    assert {await the_next(signals), await the_next(signals)} == {Signal(part.device.id, "xid", 95) for part in parts}
    for part in parts:
        assert (await sim.backend.telemetry.snapshot(part.device)).errors == {95: 1}
        assert (await sim.backend.resetter.plan(part.device)).unavailable is not None
        with pytest.raises(Unreadable, match="instance"):
            await sim.backend.resetter.reset(part.device, 10.0)
    shape.merge(sim.directory, device.id)
    assert await the_next(signals) == Signal(None, "changed")
    with pytest.raises(DeviceLost):
        await sim.backend.telemetry.snapshot(parts[0].device)


async def test_newly_broken_description_is_signalled_and_its_device_stays_listed(sim: Sim, device: Device) -> None:
    devices = await sim.backend.inventory.devices()
    signals = sim.backend.telemetry.signals()
    write_json(sim.files(device).directory / "device.json", {"id": 7})
    assert await the_next(signals) == Signal(device.id, "changed")
    assert await sim.backend.inventory.devices() == devices
    with pytest.raises(Unreadable, match=r"device\.json"):
        await sim.backend.telemetry.snapshot(device)
    assert (await sim.backend.telemetry.snapshot(devices[1])).errors == {}


async def test_malformed_control_file_is_signalled_and_unreadable(sim: Sim, device: Device) -> None:
    signals = sim.backend.telemetry.signals()
    write_json(sim.files(device).directory / "control.json", {"xids": {"95": "often"}})
    assert await the_next(signals) == Signal(device.id, "changed")
    with pytest.raises(Unreadable, match="xids"):
        await sim.backend.telemetry.snapshot(device)


async def test_missing_device_is_signalled_and_lost(sim: Sim, device: Device) -> None:
    signals = sim.backend.telemetry.signals()
    sim.files(device).directory.rename(sim.directory / "away")
    assert await the_next(signals) == Signal(None, "changed")
    assert [each.index for each in await sim.backend.inventory.devices()] == ["1"]
    with pytest.raises(DeviceLost):
        await sim.backend.telemetry.snapshot(device)


async def test_tenant_activity_causes_no_signal(sim: Sim, device: Device) -> None:
    signals = sim.backend.telemetry.signals()
    sim.fill(device, "secret")
    with sim.hold(device):
        sim.raise_error(device, 95)
    assert await the_next(signals) == Signal(device.id, "xid", 95)


async def test_current_driver_reports_are_in_the_snapshot(sim: Sim, device: Device) -> None:
    quiet = await sim.backend.telemetry.snapshot(device)
    assert (quiet.recovery_action, quiet.conditions, quiet.counters) == ("none", {}, {})
    conditions, counters = {"pcie-width": "x8 of x16", "row-remap-pending": ""}, {"retired_pages": 3}
    control.add_faults(sim.directory, device.id, conditions=conditions, counters=counters, recovery="imex")
    snapshot = await sim.backend.telemetry.snapshot(device)
    assert (snapshot.recovery_action, snapshot.conditions, snapshot.counters) == ("imex", conditions, counters)
    await sim.backend.resetter.reset(device, 10.0)
    after = await sim.backend.telemetry.snapshot(device)
    assert (after.recovery_action, after.conditions, after.counters) == ("imex", {"pcie-width": "x8 of x16"}, counters)


async def test_driver_without_recovery_actions_reports_none(sim: Sim, device: Device) -> None:
    control.add_faults(sim.directory, device.id, recovery="absent")
    assert (await sim.backend.telemetry.snapshot(device)).recovery_action is None


async def test_closing_the_watch_ends_the_signal_stream(tmp_path: Path) -> None:
    backend = SimBackend(make(tmp_path / "other"))
    await backend.start()
    signals = backend.telemetry.signals()
    await backend.close()
    with pytest.raises(StopAsyncIteration):
        await the_next(signals)


async def test_reset_with_a_descriptor_in_flight_is_refused_and_changes_nothing(sim: Sim, device: Device) -> None:
    sim.change_setting(device, "power_limit_watts", "100")
    tenant = sim.start(device, "--in-flight", "--hold", "forever").until_ready()
    with pytest.raises(DeviceBusy, match="held by a process"):
        await sim.backend.resetter.reset(device, 10.0)
    assert (await sim.backend.telemetry.snapshot(device)).settings["power_limit_watts"] == "100"
    tenant.end()
    await sim.backend.resetter.reset(device, 10.0)


async def test_reset_restores_the_default_settings(sim: Sim, device: Device) -> None:
    sim.change_setting(device, "power_limit_watts", "100")
    await sim.backend.resetter.reset(device, 10.0)
    snapshot = await sim.backend.telemetry.snapshot(device)
    assert snapshot.settings == snapshot.defaults == shape.DEFAULT_SETTINGS
    assert json.loads((sim.files(device).directory / "settings.json").read_text()) == shape.DEFAULT_SETTINGS


async def test_temporary_file_does_not_delay_the_fault_whose_file_it_becomes(
    sim: Sim, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal_watch, "_DEBOUNCE_SECONDS", 3600.0)
    signals = sim.backend.telemetry.signals()
    directory = control.find_sim_device(sim.directory, device.id).directory
    (directory / ".control.json.1").touch()
    for _ in range(3):
        await asyncio.sleep(0)  # the event loop reads what the kernel has already reported
    control.add_faults(sim.directory, device.id, xid=95)
    assert await the_next(signals) == Signal(device.id, "xid", 95)
