"""The NVIDIA backend, with whole GPUs and instances, fulfils the contract of every backend over stand-ins."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from scrubber.domain.errors import Unavailable, Unreadable
from scrubber.domain.telemetry import Signal
from tests.adapters.backend_contract import BackendContract, ignore_progress, request
from tests.adapters.nvidia_rig import DEADLINE, NvidiaRig, started
from tests.nvidia.machine import MIB, Machine


class TestNvidiaBackend(BackendContract):
    @pytest.fixture
    async def rig(self, short_tmp: Path) -> AsyncIterator[NvidiaRig]:
        with Machine.create(short_tmp / "node", mebibytes=48) as machine:
            async with started(machine, short_tmp / "state", question=2.0) as rig:
                yield rig


# --- MIG: the first GPU is two instances, the second one is whole


@pytest.fixture
def split(short_tmp: Path) -> Iterator[Machine]:
    with Machine.create(short_tmp / "node", mebibytes=98) as machine:
        machine.gpus[0].split("2g.35gb", "3g.71gb")
        yield machine


@pytest.fixture
async def instances(split: Machine, short_tmp: Path) -> AsyncIterator[NvidiaRig]:
    async with started(split, short_tmp / "state") as rig:
        yield rig


async def test_mig_instances_are_listed_as_devices_and_their_gpu_is_not(instances: NvidiaRig) -> None:
    first, second, whole = await instances.backend.inventory.devices()
    gpu, other = instances.machine.gpus
    assert [each.id for each in (first, second, whole)] == [*(each.uuid for each in gpu.instances), other.uuid]
    assert [(each.index, each.profile) for each in (first, second, whole)] == [
        ("0:0", "2g.35gb"),
        ("0:1", "3g.71gb"),
        ("1", None),
    ]
    assert {first.parent, second.parent} == {gpu.uuid}


async def test_mig_instance_is_cleared_and_its_sibling_is_untouched(instances: NvidiaRig) -> None:
    first, second, _ = await instances.backend.inventory.devices()
    instances.fill(first, "secret")
    instances.fill(second, "another tenant's")
    report = await instances.backend.eraser.erase(first, request(), ignore_progress)
    assert report.total_bytes == first.memory_bytes == (report.verified_bytes or 0) + report.not_covered_bytes
    assert (report.failed_bytes, report.residue_bytes) == (0, report.cleared_bytes)
    content = instances.content(first)
    assert len(content) - content.count(0) <= report.not_covered_bytes - report.reserved_bytes
    assert instances.content(second).startswith(b"another tenant's")


async def test_holder_of_one_instance_does_not_hold_its_sibling_or_another_gpu(instances: NvidiaRig) -> None:
    first, second, whole = await instances.backend.inventory.devices()
    holders = instances.backend.holders
    with instances.hold(first) as pid:
        assert [await holders.is_held(each) for each in (first, second, whole)] == [True, False, False]
        assert [each.pid for each in (await holders.list_holders(first)).holders] == [pid]
        assert (await holders.list_holders(second)).holders == ()
        assert (await instances.backend.eraser.erase(second, request(), ignore_progress)).failed_bytes == 0
        assert (await instances.backend.eraser.erase(whole, request(), ignore_progress)).failed_bytes == 0


async def test_scrub_report_states_that_an_instance_cannot_be_fenced(instances: NvidiaRig) -> None:
    first, _, whole = await instances.backend.inventory.devices()
    reports = [await instances.backend.eraser.erase(each, request(), ignore_progress) for each in (first, whole)]
    assert [any(each.startswith("fence: ") for each in report.not_covered) for report in reports] == [True, False]


async def test_gpu_fault_affects_every_instance_and_an_instance_fault_only_itself(instances: NvidiaRig) -> None:
    first, second, whole = await instances.backend.inventory.devices()
    gpu = instances.gpu(first)
    signals = instances.backend.telemetry.signals()

    async def add_signals(*expected: Signal) -> None:
        missing = set(expected)
        async with asyncio.timeout(DEADLINE):
            while missing:
                missing.discard(await anext(signals))

    gpu.raise_xid(94, gpu.instances[0])
    await add_signals(Signal(first.id, "xid", 94))
    gpu.raise_xid(95)
    await add_signals(Signal(first.id, "xid", 95), Signal(second.id, "xid", 95))
    gpu.add_ecc_errors(2)
    snapshots = [await instances.backend.telemetry.snapshot(each) for each in (first, second, whole)]
    assert [each.errors for each in snapshots] == [{94: 1, 95: 1}, {95: 1}, {}]
    assert [each.ecc_uncorrected for each in snapshots] == [2, 2, 0]


async def test_gpu_is_not_reset_on_behalf_of_one_instance(instances: NvidiaRig) -> None:
    first, second, whole = await instances.backend.inventory.devices()
    resetter = instances.backend.resetter
    plan = await resetter.plan(first)
    assert plan.also_reset == (second.id,)
    assert plan.unavailable is not None
    with pytest.raises(Unreadable, match="is a MIG instance"):
        await resetter.reset(first, 30.0)
    await resetter.reset(whole, 30.0)
    assert (instances.gpu(first).resets(), instances.gpu(whole).resets()) == (0, 1)
    assert await instances.backend.inventory.devices() == (first, second, whole)


# --- the driver goes and comes back


async def test_devices_are_unchanged_after_a_driver_reload(short_tmp: Path) -> None:
    with Machine.create(short_tmp / "node") as machine:
        async with started(machine, short_tmp / "state") as rig:
            before = await rig.backend.inventory.devices()
            machine.remove_driver()
            with pytest.raises(Unavailable, match="not loaded"):
                await rig.backend.inventory.devices()
            machine.bring_driver_back()
            assert await rig.backend.inventory.devices() == before
            assert (await rig.backend.telemetry.snapshot(before[0])).recovery_action == "none"


async def test_added_gpu_is_listed_and_removed_gpu_is_not(short_tmp: Path) -> None:
    with Machine.create(short_tmp / "node") as machine:
        async with started(machine, short_tmp / "state") as rig:
            first, second = await rig.backend.inventory.devices()
            added = machine.add_gpu()
            assert [each.id for each in await rig.backend.inventory.devices()] == [first.id, second.id, added.uuid]
            assert (await rig.backend.eraser.erase(second, request(), ignore_progress)).failed_bytes == 0
            machine.remove_gpu(machine.gpus[0])
            assert [each.id for each in await rig.backend.inventory.devices()] == [second.id, added.uuid]
            assert (await rig.backend.telemetry.snapshot(second)).recovery_action == "none"


async def test_idle_memory_of_a_gpu_is_measured_again_when_the_gpu_returns(short_tmp: Path) -> None:
    """A driver may reserve more on a GPU that was in MIG mode, or off the bus, than it did before."""
    with Machine.create(short_tmp / "node", gpus=1, mebibytes=64) as machine:
        async with started(machine, short_tmp / "state") as rig:
            (whole,) = await rig.backend.inventory.devices()
            assert not await rig.backend.holders.is_held(whole)
            machine.gpus[0].split("1g.18gb")
            assert whole not in await rig.backend.inventory.devices()
            machine.gpus[0].merge()
            machine.gpus[0].set("used", 20 * MIB)
            assert await rig.backend.inventory.devices() == (whole,)
            assert not await rig.backend.holders.is_held(whole)
