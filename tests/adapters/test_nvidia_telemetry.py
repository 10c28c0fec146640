"""What the driver reports about a device's health, and the state of a device about which it cannot report."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from scrubber.domain.errors import DeviceLost, DriverTimeout, Unreadable
from tests.adapters.nvidia_node import NvidiaNode, nvidia_node
from tests.nvidia.machine import Gpu


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[NvidiaNode]:
    async with nvidia_node(tmp_path) as made:
        yield made


async def test_healthy_gpu_reports_no_conditions(node: NvidiaNode) -> None:
    snapshot = await node.snapshot()
    assert (snapshot.ecc_uncorrected, snapshot.temperature_celsius, snapshot.is_held) == (0, 31, False)
    assert (snapshot.recovery_action, snapshot.conditions, snapshot.errors) == ("none", {}, {})
    assert set(snapshot.settings) == set(snapshot.defaults)
    assert snapshot.counters["pcie_replays"] == 0


async def test_unsupported_values_are_absent_not_zero(node: NvidiaNode) -> None:
    gpu = node.machine.gpus[0]
    gpu.unset("ecc_uncorrected_volatile", "temperature", "fields/230", "pcie_replays", "remapped_rows_correctable")
    snapshot = await node.snapshot()
    assert (snapshot.ecc_uncorrected, snapshot.temperature_celsius, snapshot.recovery_action) == (None, None, None)
    assert "pcie_replays" not in snapshot.counters


async def test_xids_in_a_snapshot_come_from_the_event_watch(node: NvidiaNode) -> None:
    device = node.devices()[0]
    node.events.seen[device.id] = {95: 2}
    assert (await node.telemetry.snapshot(device)).errors == {95: 2}
    assert [signal.device async for signal in node.telemetry.signals()] == [device.id]


@pytest.mark.parametrize(
    ("action", "word"),
    [
        (0, "none"),
        (1, "reset"),
        (2, "reboot"),
        (3, "drain-p2p"),
        (4, "drain-and-reset"),
        (5, "imex"),
        (6, "bus-reset"),
        (7, "system-reboot"),
        (42, "unknown-42"),
    ],
)
async def test_recovery_action_requested_by_the_driver_is_named(node: NvidiaNode, action: int, word: str) -> None:
    node.machine.gpus[0].set("fields/230", action)
    assert (await node.snapshot()).recovery_action == word


async def test_gpu_with_a_lost_event_stream_has_a_condition(node: NvidiaNode) -> None:
    first, second = node.devices()
    node.events.deaf[first.id] = "Its child does not live long."
    node.events.corrupt.add(first.id)
    conditions = [(await node.telemetry.snapshot(each)).conditions for each in (first, second)]
    assert conditions == [
        {"event-stream-lost": "Its child does not live long.", "inforom-corrupt": "its checksums are wrong"},
        {},
    ]


def pending_rows(gpu: Gpu) -> None:
    gpu.set("remapped_rows_pending", 1)


def failed_rows(gpu: Gpu) -> None:
    gpu.set("remapped_rows_failure", 1)


def pending_pages(gpu: Gpu) -> None:
    gpu.set("retired_pages_pending", 1)


def all_pages(gpu: Gpu) -> None:
    gpu.set("retired_pages/0", " ".join(str(4096 * page) for page in range(40)))
    gpu.set("retired_pages/1", " ".join(str(4096 * page) for page in range(40, 64)))


def slow(reasons: int) -> Callable[[Gpu], None]:
    return lambda gpu: gpu.set("clocks_event_reasons", reasons)


def narrow(gpu: Gpu) -> None:
    gpu.set("pcie_width", 8)


def slow_link(gpu: Gpu) -> None:
    gpu.set("pcie_generation", 3)


def link_down(gpu: Gpu) -> None:
    gpu.link(0, "00000000:C0:00.0")
    gpu.link(1, "00000000:C1:00.0", active=False)


def ecc_pending(gpu: Gpu) -> None:
    gpu.set("ecc_mode_pending", 0)


def mig_pending(gpu: Gpu) -> None:
    gpu.set("mig_mode_pending", 1)


def unscrubbed(gpu: Gpu) -> None:
    gpu.machine.set_parameters("RmSomething=0;RMDisableScrubOnFree=1")


@pytest.mark.parametrize(
    ("harm", "code", "read"),
    [
        (pending_rows, "row-remap-pending", "next reset"),
        (failed_rows, "row-remap-failure", "could not be remapped"),
        (pending_pages, "page-retirement-pending", "next reset"),
        (all_pages, "page-retirement-limit", "64 pages"),
        (slow(0x08), "hw-slowdown", "0x8"),
        (slow(0x40), "hw-thermal-slowdown", "0x40"),
        (slow(0x80), "power-brake", "0x80"),
        (narrow, "pcie-width", "x8 of x16"),
        (slow_link, "pcie-generation", "generation 3 of 5"),
        (link_down, "nvlink-down", "1 of 2 links"),
        (ecc_pending, "ecc-mode-pending", "enabled; disabled after a reset"),
        (mig_pending, "mig-mode-pending", "disabled; enabled after a reset"),
        (unscrubbed, "scrub-on-free-disabled", "RMDisableScrubOnFree"),
    ],
)
async def test_each_fault_is_a_condition_with_the_value_read(
    node: NvidiaNode, harm: Callable[[Gpu], None], code: str, read: str
) -> None:
    harm(node.machine.gpus[0])
    conditions = (await node.snapshot()).conditions
    assert set(conditions) == {code}
    assert read in conditions[code]


async def test_idle_link_at_low_speed_is_no_fault(node: NvidiaNode) -> None:
    gpu = node.machine.gpus[0]
    gpu.set("pcie_generation", 1)
    gpu.set("performance_state", 8)
    assert (await node.snapshot()).conditions == {}


async def test_inactive_links_of_an_unconnected_gpu_are_no_fault(node: NvidiaNode) -> None:
    gpu = node.machine.gpus[0]
    gpu.link(0, "00000000:C0:00.0", active=False)
    gpu.link(1, "00000000:C1:00.0", active=False)
    assert (await node.snapshot()).conditions == {}


@pytest.mark.parametrize(
    ("state", "status", "linked", "condition"),
    [
        (0, 0, True, None),
        (3, 0, True, None),
        (3, 999, True, "registration ended with NVML error 999"),
        (2, 0, True, "registration in progress"),
        (1, 0, True, "registration not started"),
        (1, 0, False, None),
    ],
)
async def test_gpu_that_failed_to_join_its_fabric_has_a_condition(
    node: NvidiaNode, state: int, status: int, linked: bool, condition: str | None
) -> None:
    gpu = node.machine.gpus[0]
    gpu.set("fabric_state", state)
    gpu.set("fabric_status", status)
    if linked:
        gpu.link(0, "00000000:C0:00.0")
    assert (await node.snapshot()).conditions.get("fabric-failed") == condition


async def test_older_nvml_function_names_are_supported(node: NvidiaNode) -> None:
    node.machine.age("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetTemperatureV")
    node.machine.gpus[0].set("clocks_event_reasons", 0x80)
    snapshot = await node.snapshot()
    assert set(snapshot.conditions) == {"power-brake"}
    assert snapshot.temperature_celsius == 31


async def test_ecc_errors_are_counted_by_name(node: NvidiaNode) -> None:
    gpu = node.machine.gpus[0]
    gpu.add_ecc_errors(3)
    counted: dict[str, str | int] = {
        "ecc_corrected_volatile": 5,
        "remapped_rows_correctable": 1,
        "remapped_rows_uncorrectable": 2,
        "retired_pages/0": "4096 8192",
        "pcie_replays": 7,
        "fields/38": 10,
        "fields/52": 1,
    }
    for attribute, value in counted.items():
        gpu.set(attribute, value)
    snapshot = await node.snapshot()
    assert snapshot.ecc_uncorrected == 3
    assert snapshot.counters == {
        "ecc_corrected": 5,
        "ecc_uncorrected_aggregate": 3,
        "remapped_rows_correctable": 1,
        "remapped_rows_uncorrectable": 2,
        "retired_pages": 2,
        "pcie_replays": 7,
        "nvlink_errors": 11,
    }


# --- a GPU that does not answer


async def test_gpu_that_requires_a_reset_reports_only_that_condition(node: NvidiaNode) -> None:
    device = node.devices()[0]
    node.gpu(device).need_reset()
    snapshot = await node.telemetry.snapshot(device)
    assert set(snapshot.conditions) == {"reset-required"}
    assert (snapshot.is_held, snapshot.settings, snapshot.defaults) == (None, {}, {})
    with pytest.raises(Unreadable, match="until it is reset"):
        await node.query(device, "used")


async def test_lost_gpu_is_reported_lost_while_other_gpus_answer(node: NvidiaNode) -> None:
    device, other = node.devices()
    node.gpu(device).lose()
    with pytest.raises(DeviceLost, match="fallen off the bus"):
        await node.telemetry.snapshot(device)
    assert (await node.telemetry.snapshot(other)).device == other.id


async def test_hanging_gpu_is_reported_stuck_while_other_gpus_answer(tmp_path: Path) -> None:
    async with nvidia_node(tmp_path, deadline=2.0) as node:
        device, other = node.devices()
        gpu = node.gpu(device)
        gpu.hang()
        stuck = asyncio.create_task(node.telemetry.snapshot(device))
        assert (await node.telemetry.snapshot(other)).device == other.id
        with pytest.raises(DriverTimeout):
            await stuck
        gpu.heal()
        assert (await node.telemetry.snapshot(device)).device == device.id


async def test_instances_of_a_hanging_gpu_share_one_hung_child(tmp_path: Path) -> None:
    async with nvidia_node(tmp_path, deadline=2.0) as node:
        node.machine.gpus[0].split("1g.18gb", "1g.18gb")
        one, another, other = node.devices()
        await node.telemetry.snapshot(other)
        before = len(node.gpu(other).attached())
        node.gpu(one).hang()
        answers = await asyncio.gather(
            *(node.telemetry.snapshot(each) for each in (one, another)), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [DriverTimeout, DriverTimeout]
        await node.telemetry.snapshot(other)
        assert len(node.gpu(other).attached()) == before + 1


@pytest.mark.parametrize("code", [9, 18, 1])
async def test_device_is_unreadable_when_its_driver_is_gone(node: NvidiaNode, code: int) -> None:
    device = node.devices()[0]
    await node.telemetry.snapshot(device)
    node.machine.init_error(code)
    with pytest.raises(Unreadable):
        await node.telemetry.snapshot(device)
    node.machine.bring_driver_back()
    assert (await node.telemetry.snapshot(device)).conditions == {}


async def test_different_gpu_at_the_same_address_is_device_lost(node: NvidiaNode) -> None:
    device = node.devices()[0]
    node.gpu(device).set("uuid", "GPU-00000000-0000-0000-0000-000000000000")
    with pytest.raises(DeviceLost, match="was replaced by another one"):
        await node.telemetry.snapshot(device)


async def test_gpu_that_appeared_after_the_child_started_is_found(node: NvidiaNode) -> None:
    await node.snapshot(0)
    node.machine.add_gpu()
    assert (await node.snapshot(2)).conditions == {}


async def test_gpu_that_returned_to_the_bus_is_attached_again(node: NvidiaNode) -> None:
    await node.snapshot()
    gpu = node.machine.gpus[0]
    before = gpu.attached()
    gone = gpu.pci_device.rename(gpu.pci_device.with_name("gone"))
    shutil.copytree(gone, gpu.pci_device, symlinks=True)
    await node.snapshot()
    await node.snapshot()
    assert gpu.attached() == (*before, before[-1])


# --- instances


async def test_instance_reports_its_gpus_conditions_and_its_own_holders(tmp_path: Path) -> None:
    async with nvidia_node(tmp_path, gpus=1) as node:
        gpu = node.machine.gpus[0]
        first, second = gpu.split("1g.18gb", "2g.35gb")
        gpu.set("remapped_rows_pending", 1)
        gpu.add_ecc_errors(1)
        gpu.add_process(os.getppid(), 4096, instance=second)
        one, other = [await node.telemetry.snapshot(each) for each in node.devices()]
        for snapshot in (one, other):
            assert set(snapshot.conditions) == {"row-remap-pending"}
            assert snapshot.ecc_uncorrected == 1
        assert (one.is_held, other.is_held) == (False, True)
        assert (one.device, other.device) == (first.uuid, second.uuid)


async def test_destroyed_mig_instance_is_device_lost(tmp_path: Path) -> None:
    async with nvidia_node(tmp_path, gpus=1) as node:
        node.machine.gpus[0].split("1g.18gb")
        device = node.devices()[0]
        node.machine.gpus[0].merge()
        with pytest.raises(DeviceLost, match="MIG instance"):
            await node.telemetry.snapshot(device)


# --- users


async def test_processes_of_all_three_driver_lists_are_reported(node: NvidiaNode) -> None:
    device = node.devices()[0]
    gpu = node.gpu(device)
    gpu.add_process(11, 1024)
    gpu.add_process(12, None, list_name="graphics")
    gpu.add_process(13, 0, list_name="mps")
    used = await node.query(device, "used")
    assert used["processes"] == [[11, 1024, "compute"], [12, None, "graphics"], [13, 0, "mps"]]
    assert (used["total"], used["reserved"]) == (gpu.number("total"), gpu.number("reserved"))


async def test_driver_that_lists_no_processes_at_all_is_unreadable(node: NvidiaNode) -> None:
    device = node.devices()[0]
    for version in ("_v2", "_v3"):
        node.gpu(device).fail(f"nvmlDeviceGetComputeRunningProcesses{version}", 3)
    with pytest.raises(Unreadable, match="does not list the processes"):
        await node.query(device, "used")


async def test_instance_lists_its_own_processes_and_those_without_an_instance(tmp_path: Path) -> None:
    async with nvidia_node(tmp_path, gpus=1) as node:
        gpu = node.machine.gpus[0]
        first, second = gpu.split("1g.18gb", "1g.18gb")
        gpu.add_process(21, 10, instance=first)
        gpu.add_process(22, 20, instance=second)
        gpu.add_process(23, 30)
        one, other = node.devices()
        assert [row[0] for row in (await node.query(one, "used"))["processes"]] == [21, 23]  # type: ignore[attr-defined]
        assert [row[0] for row in (await node.query(other, "used"))["processes"]] == [22, 23]  # type: ignore[attr-defined]
