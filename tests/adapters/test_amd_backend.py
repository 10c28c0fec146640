"""The AMD backend fulfils the contracts of every backend, over the files of a simulated machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.adapters.amd.backend import amd_backend
from scrubber.adapters.amd.conditions import AMD_SIGNALS
from scrubber.adapters.amd.driver_settings import validation_errors
from scrubber.adapters.children.process import Children
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceBusy, DeviceLost, Unavailable, Unreadable
from scrubber.domain.health.signal_table import ErrorClass
from scrubber.domain.policy import Policy
from scrubber.domain.telemetry import HolderKind, Signal
from scrubber.ports.device import DeviceBackend, EraseProgress
from tests.adapters.backend_contract import BackendContract, ignore_progress, request
from tests.adapters.diagnostics_contract import DiagnosticsContract
from tests.amd.machine import MIB, AmdMachine, Part, write

_BLOCKS = {1: "sdma", 2: "gfx", 3: "mmhub"}


class AmdRig:
    """The rig of both contracts."""

    error_signal = "ras"

    def __init__(self, machine: AmdMachine, backend: DeviceBackend, device: Device, other: Device) -> None:
        self.machine = machine
        self.backend = backend
        self.diagnostics = backend.diagnostics
        self.device = device
        self.other = other

    def part(self, device: Device) -> Part:
        return self.machine.parts[device.id]

    def fill(self, device: Device, text: str) -> None:
        memory = self.part(device).memory
        repeated = text.encode() * (device.memory_bytes // len(text) + 1)
        memory.write_bytes(repeated[: device.memory_bytes])

    def content(self, device: Device) -> bytes:
        return self.part(device).memory.read_bytes()

    @contextmanager
    def hold(self, device: Device) -> Iterator[int]:
        with self.machine.hold(self.part(device)) as pid:
            yield pid

    def raise_error(self, device: Device, code: int) -> None:
        self.machine.add_errors(self.part(device), _BLOCKS[code], 1)

    def add_ecc_errors(self, device: Device, errors: int) -> None:
        self.machine.add_errors(self.part(device), "umc", errors)

    def lose(self, device: Device) -> None:
        self.machine.lose(self.part(device))

    def hang(self, device: Device) -> None:
        self.machine.hang(self.part(device))

    def spoil(self, device: Device) -> None:
        (self.part(device).memory.parent / "spoiled").touch()

    def fail_resets(self, device: Device) -> None:
        self.machine.fail_resets(self.part(device))

    def tamper(self, device: Device) -> tuple[str, str]:
        write(self.part(device).gpu / "power_dpm_force_performance_level", "high")
        return "performance_level", "high"

    def remove_driver(self) -> None:
        self.machine.remove_driver()

    async def at_work(self, device: Device) -> int | None:
        self.machine.remove_ended_processes()
        return await self.backend.eraser.find_orphan(device)


async def _no_infrastructure(pid: int, *, has_context: bool) -> None:
    """Treat no process as infrastructure."""


@asynccontextmanager
async def started(machine: AmdMachine, state: Path) -> AsyncIterator[AmdRig]:
    """Provide the backend over ``machine``."""
    children = Children()
    async with amd_backend(
        machine.root,
        state,
        node="node-1",
        driver_call_timeout=5.0,
        infrastructure=_no_infrastructure,
        poll_interval=0.05,
        children=children,
    ) as backend:
        device, other, *_ = await backend.inventory.devices()
        yield AmdRig(machine, backend, device, other)
    assert children.pids() == frozenset()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[AmdRig]:
    with AmdMachine.create(tmp_path / "machine") as machine:
        async with started(machine, tmp_path / "state") as made:
            yield made


class TestAmdBackend(BackendContract):
    """The contract, over plain files and a stand-in for HIP."""

    codes = (2, 1, 3)


class TestAmdDiagnostics(DiagnosticsContract):
    """The contract, over a stand-in for HIP."""


# --- what only AMD devices have ---------------------------------------------------------------------------------------


async def test_gpu_is_described_with_the_ids_and_nodes_of_amds_plugin(rig: AmdRig) -> None:
    device = rig.device
    assert (device.id, device.index, device.parent, device.profile) == ("0000:0c:00.0", "0", None, "spx_nps1")
    assert (device.model, device.numa_node) == ("AMD Instinct MI300X", 0)
    assert [each.container_path for each in device.access] == ["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/card1"]
    traits = dict(device.traits)
    assert (traits["architecture"], traits["serial"], traits["unique_id"]) == ("gfx942", "692300", "1b2c3d4e5f600000")


async def test_gpu_that_cannot_be_partitioned_has_no_profile(tmp_path: Path) -> None:
    with AmdMachine.create(tmp_path / "m", gpus=2) as machine:
        for part in machine.parts.values():
            (part.gpu / "current_memory_partition").unlink()
        async with started(machine, tmp_path / "state") as rig:
            assert rig.device.profile is None


async def test_partitions_are_instances_of_one_gpu_and_share_its_memory(tmp_path: Path) -> None:
    with AmdMachine.create(tmp_path / "m", gpus=1, partitions=4) as machine:
        async with started(machine, tmp_path / "state") as rig:
            parts = await rig.backend.inventory.devices()
            assert [each.id for each in parts] == ["0000:0c:00.0", "amdgpu_xcp_0", "amdgpu_xcp_1", "amdgpu_xcp_2"]
            assert [each.index for each in parts] == ["0:0", "0:1", "0:2", "0:3"]
            assert {each.parent for each in parts} == {"GPU-1b2c3d4e5f600000"}
            assert {each.profile for each in parts} == {"qpx_nps1"}
            assert {each.memory_bytes for each in parts} == {4 * MIB}
            with rig.hold(parts[1]):
                assert [await rig.backend.holders.is_held(each) for each in parts] == [False, True, False, False]
            report = await rig.backend.eraser.erase(parts[1], request(), ignore_progress)
            assert any("share its memory" in each for each in report.not_covered)
            plan = await rig.backend.resetter.plan(parts[1])
            assert set(plan.also_reset) == {parts[0].id, parts[2].id, parts[3].id}


async def test_gpu_that_another_driver_has_is_not_advertised(tmp_path: Path) -> None:
    with AmdMachine.create(tmp_path / "m", gpus=3) as machine:
        link = machine.parts["0000:0d:00.0"].gpu / "driver"
        link.unlink()
        link.symlink_to("../../drivers/vfio-pci")
        async with started(machine, tmp_path / "state") as rig:
            assert [each.id for each in await rig.backend.inventory.devices()] == ["0000:0c:00.0", "0000:0e:00.0"]
            assert "vfio-pci" in rig.backend.not_advertised()["0000:0d:00.0"]


@pytest.mark.parametrize("which", ["node", "card"])
async def test_process_without_a_compute_context_is_found_by_its_open_node(rig: AmdRig, which: str) -> None:
    part = rig.part(rig.device)
    with rig.machine.hold(part, computes=False, node=getattr(part, which)) as pid:
        assert not await rig.backend.holders.is_held(rig.device)
        (holder,) = (await rig.backend.holders.list_holders(rig.device)).holders
        assert holder.pid == pid
        assert (await rig.backend.holders.list_holders(rig.other)).holders == ()


async def test_open_compute_node_names_no_gpu(rig: AmdRig) -> None:
    with rig.machine.hold(rig.part(rig.device), computes=False, node=rig.machine.root / "dev/kfd"):
        report = await rig.backend.holders.list_holders(rig.device)
    assert report.holders == ()
    assert any("1 process(es) have only /dev/kfd open" in each for each in report.not_covered)


async def test_certificate_of_a_slow_path_names_what_no_walk_detects(rig: AmdRig) -> None:
    (limits,) = (await rig.backend.holders.list_holders(rig.device)).not_covered
    for each in ("descriptors in flight", "io_uring", "opened later"):
        assert each in limits


async def test_memory_that_outlives_its_process_holds_the_device_until_it_is_free(rig: AmdRig) -> None:
    used = rig.part(rig.device).gpu / "mem_info_vram_used"
    assert not await rig.backend.holders.is_held(rig.device)
    write(used, str(100 * MIB))
    assert await rig.backend.holders.is_held(rig.device)
    with pytest.raises(DeviceBusy, match="memory of it is still in use"):
        await rig.backend.eraser.erase(rig.device, request(), ignore_progress)
    (holder,) = (await rig.backend.holders.list_holders(rig.device)).holders
    assert (holder.kind, holder.pid) == (HolderKind.UNTRACEABLE, 0)
    write(used, str(12 * MIB))
    assert not await rig.backend.holders.is_held(rig.device)


async def test_process_that_the_driver_lists_and_the_kernel_does_not_have_is_untraceable(rig: AmdRig) -> None:
    entry = rig.machine.kfd_process(2**22 + 1)
    write(entry / f"vram_{rig.part(rig.device).gpu_id}", "4096")
    assert await rig.backend.holders.is_held(rig.device)
    (holder,) = (await rig.backend.holders.list_holders(rig.device)).holders
    assert holder.kind is HolderKind.UNTRACEABLE


async def test_errors_before_a_reset_are_not_reported_again_after_a_restart(tmp_path: Path) -> None:
    with AmdMachine.create(tmp_path / "m") as machine:
        async with started(machine, tmp_path / "state") as rig:
            rig.raise_error(rig.device, 2)
            await rig.backend.resetter.reset(rig.device, 30.0)
        async with started(machine, tmp_path / "state") as rig:
            assert (await rig.backend.telemetry.snapshot(rig.device)).errors == {}
            rig.raise_error(rig.device, 2)
            assert (await rig.backend.telemetry.snapshot(rig.device)).errors == {2: 1}


async def test_fatal_records_before_a_reset_are_not_reported_again_after_a_restart(tmp_path: Path) -> None:
    with AmdMachine.create(tmp_path / "m") as machine:
        async with started(machine, tmp_path / "state") as rig:
            machine.add_record(rig.part(rig.device), 1)
            await rig.backend.resetter.reset(rig.device, 30.0)
        async with started(machine, tmp_path / "state") as rig:
            assert (await rig.backend.telemetry.snapshot(rig.device)).conditions == {}


async def test_bad_pages_and_a_narrow_link_are_conditions(rig: AmdRig) -> None:
    gpu = rig.part(rig.device).gpu
    write(gpu / "ras/gpu_vram_bad_pages", "0x1 : 0x1000 : R\n0x2 : 0x1000 : P\n0x3 : 0x1000 : F\n")
    write(gpu / "current_link_width", "8")
    snapshot = await rig.backend.telemetry.snapshot(rig.device)
    assert snapshot.conditions == {
        "page-retirement-pending": "1 pages",
        "page-retirement-failure": "1 pages",
        "pcie-width": "x8 of x16",
    }
    assert snapshot.counters["retired_pages"] == 1
    assert snapshot.temperature_celsius == 41


async def test_fatal_record_of_the_driver_requires_a_reset_and_is_reported_once(rig: AmdRig) -> None:
    part = rig.part(rig.device)
    assert "cper_fatal" not in (await rig.backend.telemetry.snapshot(rig.device)).counters
    for severity in (0, 1, 2, 2):
        rig.machine.add_record(part, severity)
    snapshot = await rig.backend.telemetry.snapshot(rig.device)
    assert snapshot.conditions == {"cper-fatal": "1 records"}
    assert {name: count for name, count in snapshot.counters.items() if name.startswith("cper")} == {
        "cper_fatal": 1,
        "cper_uncorrected": 1,
        "cper_corrected": 2,
        "cper_bad_page_threshold": 0,
    }
    assert (await rig.backend.telemetry.snapshot(rig.other)).conditions == {}
    await rig.backend.resetter.reset(rig.device, 30.0)
    assert (await rig.backend.telemetry.snapshot(rig.device)).conditions == {}


async def test_fatal_records_since_a_reset_are_those_that_were_not_there_at_the_reset(rig: AmdRig) -> None:
    part = rig.part(rig.device)

    async def conditions() -> dict[str, str]:
        return dict((await rig.backend.telemetry.snapshot(rig.device)).conditions)

    for number in (1, 2, 3):
        rig.machine.add_record(part, 1, number=number)
    await rig.backend.resetter.reset(rig.device, 30.0)
    rig.machine.overwrite_records(part, 1)
    assert await conditions() == {}
    rig.machine.overwrite_records(part, 2)
    for number in (1, 2, 3):  # of a driver that was bound again
        rig.machine.add_record(part, 1, number=number, second=1)
    assert await conditions() == {"cper-fatal": "3 records"}


@pytest.mark.parametrize("size", [0, 12])
async def test_empty_file_of_error_records_does_not_mean_zero_errors(rig: AmdRig, size: int) -> None:
    rig.machine.add_record(rig.part(rig.device), 1)
    os.truncate(rig.machine.error_records(rig.part(rig.device)), size)
    assert not [name for name in (await rig.backend.telemetry.snapshot(rig.device)).counters if "cper" in name]


async def test_error_records_that_cannot_be_read_make_the_device_unreadable(rig: AmdRig) -> None:
    ring = rig.machine.error_records(rig.part(rig.device))
    ring.mkdir(parents=True)
    with pytest.raises(Unreadable, match="Is a directory"):
        await rig.backend.telemetry.snapshot(rig.device)


async def test_record_of_too_many_bad_pages_outlasts_a_reset(rig: AmdRig) -> None:
    rig.machine.add_record(rig.part(rig.device), 1, section_flags=1 << 3)
    await rig.backend.resetter.reset(rig.device, 30.0)
    assert (await rig.backend.telemetry.snapshot(rig.device)).conditions == {"bad-page-threshold": "1 records"}


async def test_device_whose_driver_lists_no_processes_at_all_is_unreadable(rig: AmdRig) -> None:
    (rig.machine.root / "sys/class/kfd/kfd/proc").rmdir()
    with pytest.raises(Unreadable, match="proc"):
        await rig.backend.holders.is_held(rig.device)
    with pytest.raises(Unreadable, match="proc"):
        await rig.backend.eraser.erase(rig.device, request(), ignore_progress)


async def test_process_that_comes_while_the_device_is_cleared_is_reported_because_nothing_keeps_it_out(
    rig: AmdRig,
) -> None:
    with ExitStack() as other:

        def come(progress: EraseProgress) -> None:
            if not seen:
                seen.append(other.enter_context(rig.hold(rig.device)))

        seen: list[int] = []
        report = await rig.backend.eraser.erase(rig.device, request(), come)
    assert seen
    assert report.fence_broken
    assert any(each.startswith("fence: AMD's driver has no exclusive mode") for each in report.not_covered)
    assert not (await rig.backend.eraser.erase(rig.device, request(), ignore_progress)).fence_broken


async def test_gpus_of_a_hive_are_reset_together_and_a_holder_of_one_blocks_all(tmp_path: Path) -> None:
    with AmdMachine.create(tmp_path / "m", hive=77) as machine:
        async with started(machine, tmp_path / "state") as rig:
            assert rig.device.peers == {rig.other.id}
            with rig.hold(rig.other) as pid:
                plan = await rig.backend.resetter.plan(rig.device)
                assert plan.also_reset == (rig.other.id,)
                assert any(f"PID {pid}" in blocker for blocker in plan.blockers)
            await rig.backend.resetter.reset(rig.device, 30.0)
            for device in (rig.device, rig.other):
                assert (rig.part(device).gpu / "reset").read_text() == "1"


async def test_gpu_without_a_reset_of_the_bus_can_never_be_reset(rig: AmdRig) -> None:
    (rig.part(rig.device).gpu / "reset").unlink()
    assert "hypervisor" in str((await rig.backend.resetter.plan(rig.device)).unavailable)
    with pytest.raises(Unreadable, match="hypervisor"):
        await rig.backend.resetter.reset(rig.device, 30.0)


async def test_cleaner_shader_is_a_claim_and_names_the_partition(rig: AmdRig) -> None:
    report = await rig.backend.eraser.erase(rig.device, request(), ignore_progress)
    assert (rig.part(rig.device).gpu / "run_cleaner_shader").read_text() == "0"
    assert report.on_chip is None
    assert any("claimed" in each and "nothing measures" in each for each in report.not_covered)


async def test_certificate_says_why_on_chip_memory_was_not_cleared(rig: AmdRig) -> None:
    shader = rig.part(rig.device).gpu / "run_cleaner_shader"

    async def on_chip(*, requested: bool = True) -> str:
        expected = replace(request(), on_chip=requested)
        report = await rig.backend.eraser.erase(rig.device, expected, ignore_progress)
        assert report.on_chip is None
        (text,) = (each for each in report.not_covered if each.startswith("on-chip"))
        return text

    assert "the policy does not require" in await on_chip(requested=False)
    assert shader.read_text() == ""
    shader.unlink()
    assert "offers no cleaner shader" in await on_chip()
    shader.symlink_to("/dev/full")
    refused = await on_chip()
    assert "did not accept a request" in refused
    assert "No space left" in refused


async def test_settings_of_a_policy_are_written_and_read_back(rig: AmdRig) -> None:
    expected = {"enforce_isolation": "isolate-and-clean", "power_limit_watts": "550"}
    assert await rig.backend.settings.restore(rig.device, expected) == expected
    gpu = rig.part(rig.device).gpu
    assert (gpu / "enforce_isolation").read_text() == "1"
    assert (gpu / "hwmon/hwmon0/power1_cap").read_text() == "550000000"


async def test_partition_mode_of_a_policy_is_restored_by_a_reset_alone(rig: AmdRig) -> None:
    gpu, modes = rig.part(rig.device).gpu, {"compute_partition": "CPX", "memory_partition": "NPS4"}
    snapshot = await rig.backend.telemetry.snapshot(rig.device)
    present = {"compute_partition": "SPX", "memory_partition": "NPS1"}
    assert (
        {name: snapshot.settings[name] for name in modes}
        == {name: snapshot.defaults[name] for name in modes}
        == present
    )
    assert await rig.backend.settings.restore(rig.device, modes) == present
    assert (gpu / "current_compute_partition").read_text() == "SPX\n"
    plan = await rig.backend.resetter.plan(rig.device)
    assert any("0000:0c:00.0 from SPX to CPX" in each for each in plan.actions)
    with pytest.raises(DeviceBusy, match=r"from NPS1 to NPS4, 0000:0c:00\.0 from SPX to CPX, as the policy requires"):
        await rig.backend.resetter.reset(rig.device, 30.0)
    assert [(gpu / f"current_{name}").read_text().strip() for name in modes] == ["CPX", "NPS4"]
    await rig.backend.inventory.devices()
    await rig.backend.resetter.reset(rig.device, 30.0)


async def test_partition_mode_that_the_driver_refuses_is_named(rig: AmdRig) -> None:
    await rig.backend.settings.restore(rig.device, {"compute_partition": "QPX"})
    file = rig.part(rig.device).gpu / "current_compute_partition"
    file.unlink()
    file.symlink_to("/proc/version")  # can be opened for writing, and refuses what is written
    with pytest.raises(Unreadable, match=r"0000:0c:00\.0 could not be partitioned: .*current_compute_partition"):
        await rig.backend.resetter.reset(rig.device, 30.0)


async def test_partition_mode_that_the_driver_refused_is_not_tried_again_unless_requested_again(rig: AmdRig) -> None:
    await rig.backend.settings.restore(rig.device, {"compute_partition": "QPX"})
    file = rig.part(rig.device).gpu / "current_compute_partition"
    file.unlink()
    file.symlink_to("/proc/version")
    with pytest.raises(Unreadable):
        await rig.backend.resetter.reset(rig.device, 30.0)
    file.unlink()
    write(file, "SPX")
    await rig.backend.resetter.reset(rig.device, 30.0)
    assert file.read_text() == "SPX\n"


async def test_partition_mode_that_the_driver_accepts_and_ignores_is_named(rig: AmdRig) -> None:
    await rig.backend.settings.restore(rig.device, {"memory_partition": "NPS4"})
    file = rig.part(rig.device).gpu / "current_memory_partition"
    file.unlink()
    file.symlink_to("/proc/self/comm")  # accepts what a process writes, and shows every other process its own name
    with pytest.raises(Unreadable, match=r"memory_partition of 0000:0c:00\.0 is .*, not NPS4\. Choose modes"):
        await rig.backend.resetter.reset(rig.device, 30.0)


async def test_partition_has_the_modes_of_its_gpu_as_its_only_settings(tmp_path: Path) -> None:
    with AmdMachine.create(tmp_path / "m", gpus=1, partitions=2) as machine:
        async with started(machine, tmp_path / "state") as rig:
            expected = {"compute_partition": "DPX", "memory_partition": "NPS1"}
            assert (await rig.backend.telemetry.snapshot(rig.device)).settings == expected
            assert await rig.backend.settings.restore(rig.device, {**expected, "performance_level": "low"}) == expected


async def test_isolation_that_was_set_at_boot_is_the_default(rig: AmdRig) -> None:
    write(rig.machine.root / "sys/module/amdgpu/parameters/enforce_isolation", "1")
    assert (await rig.backend.telemetry.snapshot(rig.device)).defaults["enforce_isolation"] == "isolate-and-clean"


def test_policy_with_impossible_settings_is_refused_with_what_to_write() -> None:
    assert validation_errors({"performance_level": "auto", "power_limit_watts": "550"}) == ()
    clock, level, power = validation_errors({"clock": "1", "performance_level": "turbo", "power_limit_watts": "5.5"})
    assert "the settings are compute_partition, enforce_isolation, memory_partition, performance_level" in clock
    assert "write one of auto, low, high" in level
    assert "whole watts" in power


async def test_gpu_without_kernels_for_its_architecture_is_not_at_fault(tmp_path: Path) -> None:
    with AmdMachine.create(tmp_path / "m", architecture=110000) as machine:
        async with started(machine, tmp_path / "state") as rig:
            with pytest.raises(Unavailable, match="architecture gfx1100"):
                await rig.backend.eraser.erase(rig.device, request(), ignore_progress)


async def test_another_gpu_in_the_slot_is_not_taken_for_the_first(rig: AmdRig) -> None:
    write(rig.part(rig.device).gpu / "unique_id", "00000000deadbeef")
    with pytest.raises(DeviceLost, match="Another GPU"):
        await rig.backend.telemetry.snapshot(rig.device)


async def test_change_of_the_inventory_is_a_signal(rig: AmdRig) -> None:
    signals = rig.backend.telemetry.signals()
    link = rig.part(rig.other).gpu / "driver"
    link.unlink()
    async with asyncio.timeout(20):
        while await anext(signals) != Signal(None, "changed"):
            continue


def test_uncorrected_errors_of_every_block_require_a_reset_whatever_the_policys_codes_mean() -> None:
    policy = Policy().with_signals(AMD_SIGNALS)
    assert {policy.error_class(number) for number in (1, 2, 13, 18, 99)} == {ErrorClass.RESET}
    assert policy.error_class(95) is ErrorClass.UNKNOWN
    assert policy.error_notes == {}
