"""Settings: read by name, restored to the driver's defaults or the policy's values, and read back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber.adapters.nvidia.gpu_control import NvmlGpuControl
from scrubber.domain.device import Device
from scrubber.domain.errors import Unreadable
from tests.adapters.nvidia_node import NvidiaNode, nvidia_node

BOOSTED = {"auto_boost": 0, "auto_boost_default": 1, "api_restriction/1": 0}
"""Additional settings of older GPUs."""


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[NvidiaNode]:
    async with nvidia_node(tmp_path) as made:
        for attribute, value in BOOSTED.items():
            made.machine.gpus[0].set(attribute, value)
        made.machine.gpus[0].set("auto_boost", 1)
        yield made


async def test_unchanged_gpu_has_the_drivers_default_settings(node: NvidiaNode) -> None:
    snapshot = await node.snapshot()
    assert snapshot.settings == snapshot.defaults
    assert snapshot.defaults == {
        "compute_mode": "default",
        "persistence_mode": "disabled",
        "power_limit_watts": "700",
        "application_clocks": "3201,1980",
        "clock_offsets": "none",
        "auto_boost": "enabled",
        "accounting_mode": "disabled",
        "api_restriction_application_clocks": "restricted",
        "api_restriction_auto_boosted_clocks": "unrestricted",
        "ecc_mode": "enabled",
    }


@pytest.mark.parametrize(
    ("attribute", "tampered", "name", "shown"),
    [
        ("compute_mode", "2", "compute_mode", "prohibited"),
        ("power_limit", "200500", "power_limit_watts", "200.5"),
        ("application_clocks", "3201 345", "application_clocks", "3201,345"),
        ("clock_offsets/0.0", "150 -300 300", "clock_offsets", "graphics P0 +150"),
        ("clock_offsets/2.0", "-50 -500 500", "clock_offsets", "memory P0 -50"),
        ("auto_boost", "0", "auto_boost", "disabled"),
        ("accounting_mode", "1", "accounting_mode", "enabled"),
        ("api_restriction/0", "0", "api_restriction_application_clocks", "unrestricted"),
        ("api_restriction/1", "1", "api_restriction_auto_boosted_clocks", "restricted"),
        ("ecc_mode_pending", "0", "ecc_mode", "disabled"),
    ],
)
async def test_setting_changed_by_a_tenant_is_detected_and_restored(
    node: NvidiaNode, attribute: str, tampered: str, name: str, shown: str
) -> None:
    device, gpu = node.devices()[0], node.machine.gpus[0]
    before = gpu.text(attribute)
    gpu.set(attribute, tampered)
    snapshot = await node.telemetry.snapshot(device)
    assert snapshot.settings[name] == shown
    assert await node.settings.restore(device, snapshot.defaults) == snapshot.defaults
    assert gpu.text(attribute) == before
    assert (await node.telemetry.snapshot(device)).settings == snapshot.defaults


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compute_mode", "exclusive-process"),
        ("persistence_mode", "enabled"),
        ("power_limit_watts", "450"),
        ("application_clocks", "3201,1500"),
        ("clock_offsets", "graphics P0 -30"),
        ("accounting_mode", "enabled"),
    ],
)
async def test_policy_value_overrides_the_default_setting(node: NvidiaNode, name: str, value: str) -> None:
    device = node.devices()[0]
    assert await node.settings.restore(device, {name: value}) == {name: value}
    assert (await node.telemetry.snapshot(device)).settings[name] == value


async def test_enabled_persistence_mode_counts_as_the_default(node: NvidiaNode) -> None:
    node.machine.gpus[0].set("persistence_mode", 1)
    snapshot = await node.snapshot()
    assert snapshot.defaults["persistence_mode"] == snapshot.settings["persistence_mode"] == "enabled"


async def test_every_restore_unlocks_clocks_and_clears_accounted_processes(node: NvidiaNode) -> None:
    device, gpu = node.devices()[0], node.machine.gpus[0]
    gpu.set("gpu_locked_clocks", "345 345")
    gpu.set("memory_locked_clocks", "1593 1593")
    gpu.set("accounting_pids", "4711")
    await node.settings.restore(device, {})
    locked = gpu.text("gpu_locked_clocks"), gpu.text("memory_locked_clocks")
    assert (locked, gpu.get("accounting_pids")) == (("none", "none"), "")


async def test_unsupported_settings_are_omitted(node: NvidiaNode) -> None:
    device, gpu = node.devices()[0], node.machine.gpus[0]
    gpu.unset("application_clocks", "power_limit_default", "clock_offsets/0.0", "clock_offsets/2.0", "ecc_mode_default")
    snapshot = await node.telemetry.snapshot(device)
    assert set(snapshot.settings) == set(snapshot.defaults)
    assert not {"application_clocks", "power_limit_watts", "clock_offsets", "ecc_mode"} & set(snapshot.settings)
    assert await node.settings.restore(device, {"application_clocks": "1,2", "no_such_setting": "1"}) == {}


async def test_setting_that_does_not_change_is_returned_with_its_actual_value(node: NvidiaNode) -> None:
    device, gpu = node.devices()[0], node.machine.gpus[0]
    gpu.set("compute_mode", 2)
    gpu.refuse_changes("compute_mode")
    assert await node.settings.restore(device, {"compute_mode": "default"}) == {"compute_mode": "prohibited"}


async def test_setting_with_the_requested_value_is_not_written(node: NvidiaNode) -> None:
    device, gpu = node.devices()[0], node.machine.gpus[0]
    gpu.fail("nvmlDeviceSetComputeMode", 999)
    assert await node.settings.restore(device, {"compute_mode": "default"}) == {"compute_mode": "default"}


@pytest.mark.parametrize(("code", "message"), [(4, "run the scrub service as root"), (999, "internal error")])
async def test_setting_that_the_driver_refuses_is_a_fault(node: NvidiaNode, code: int, message: str) -> None:
    device, gpu = node.devices()[0], node.machine.gpus[0]
    gpu.set("compute_mode", 2)
    gpu.fail("nvmlDeviceSetComputeMode", code)
    with pytest.raises(Unreadable, match=message):
        await node.settings.restore(device, {"compute_mode": "default"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compute_mode", "fast"),
        ("power_limit_watts", "much"),
        ("application_clocks", "1500"),
        ("clock_offsets", "+100"),
        ("ecc_mode", "on"),
    ],
)
async def test_unsupported_setting_value_is_refused_by_name(node: NvidiaNode, name: str, value: str) -> None:
    device = node.devices()[0]
    with pytest.raises(Unreadable, match=name):
        await node.settings.restore(device, {name: value})


async def test_no_setting_is_written_through_a_mig_instance(tmp_path: Path) -> None:
    async with nvidia_node(tmp_path, gpus=1) as node:
        gpu = node.machine.gpus[0]
        gpu.split("1g.18gb")
        gpu.set("gpu_locked_clocks", "345 345")
        device = node.devices()[0]
        snapshot = await node.telemetry.snapshot(device)
        assert (snapshot.settings, snapshot.defaults) == ({}, {})
        assert await node.settings.restore(device, {"power_limit_watts": "300"}) == {}
        assert (gpu.text("power_limit"), gpu.text("gpu_locked_clocks")) == ("700000", "345 345")


# --- the fence, and requirements of a reset


class Unsettled:
    """Memory that is never released."""

    async def wait_until_idle(self, _: Device, deadline: float) -> int:
        return int(deadline)


async def test_fence_restricts_the_gpu_to_one_process_and_can_be_removed(node: NvidiaNode) -> None:
    device, gpu = node.devices()[0], node.machine.gpus[0]
    control = NvmlGpuControl(node.questions, Unsettled())
    assert await control.compute_mode(device) == "default"
    await control.fence(device)
    assert gpu.number("compute_mode") == 3
    assert await control.wait_until_idle(device, 7.0) == 7
    await control.unfence(device, "default")
    assert gpu.number("compute_mode") == 0


async def test_mig_instance_cannot_be_fenced(tmp_path: Path) -> None:
    async with nvidia_node(tmp_path, gpus=1) as node:
        node.machine.gpus[0].split("1g.18gb")
        device = node.devices()[0]
        control = NvmlGpuControl(node.questions, Unsettled())
        assert await control.compute_mode(device) is None
        await control.fence(device)
        await control.unfence(device, "prohibited")
        assert node.machine.gpus[0].number("compute_mode") == 0


async def test_unknown_compute_mode_is_not_restored(node: NvidiaNode) -> None:
    with pytest.raises(Unreadable, match="is not a value of compute_mode"):
        await NvmlGpuControl(node.questions, Unsettled()).unfence(node.devices()[0], "as before")


@pytest.mark.parametrize("reserved_is_reported", [True, False])
async def test_memory_is_reported_in_bytes(node: NvidiaNode, reserved_is_reported: bool) -> None:
    device, gpu = node.devices()[0], node.machine.gpus[0]
    gpu.set("used", 4096)
    if not reserved_is_reported:
        node.machine.age("nvmlDeviceGetMemoryInfo_v2")
    total, reserved, used = await NvmlGpuControl(node.questions, Unsettled()).memory(device)
    assert (total, reserved) == (gpu.number("total"), gpu.number("reserved") if reserved_is_reported else 0)
    assert used == 4096 + (0 if reserved_is_reported else gpu.number("reserved"))


async def test_persistence_mode_is_switched_and_reported(node: NvidiaNode) -> None:
    device = node.devices()[0]
    assert await node.query(device, "persistence") == {"mode": "disabled"}
    assert await node.query(device, "persistence", mode="enabled") == {"mode": "enabled"}
    assert node.machine.gpus[0].number("persistence_mode") == 1
