"""Confidential computing on the stand-in for NVML: the mode, the ready state, attestation reports, and their faults."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from scrubber.adapters.children.process import Children
from scrubber.adapters.nvidia.inventory import NvidiaInventory
from scrubber.domain.device import Device
from scrubber.domain.errors import DriverTimeout, Unavailable, Unreadable
from scrubber.ports.device import ConfidentialComputing
from tests.adapters.backend_contract import ignore_progress, request
from tests.adapters.nvidia_rig import NvidiaRig, started
from tests.nvidia.machine import Machine

NONCE = bytes(range(32))
REPORT = "nvmlDeviceGetConfComputeGpuAttestationReport"
SET_READY = "nvmlSystemSetConfComputeGpusReadyState"


@pytest.fixture
def machine(short_tmp: Path) -> Iterator[Machine]:
    with Machine.create(short_tmp / "node", mebibytes=48) as machine:
        yield machine


@pytest.fixture
async def rig(machine: Machine, short_tmp: Path) -> AsyncIterator[NvidiaRig]:
    """Provide a backend on a node in the mode."""
    machine.enter_confidential_mode()
    async with started(machine, short_tmp / "state", question=2.0) as rig:
        yield rig


def port(rig: NvidiaRig) -> ConfidentialComputing:
    assert rig.backend.confidential is not None
    return rig.backend.confidential


async def first_device(rig: NvidiaRig) -> Device:
    return (await rig.backend.inventory.devices())[0]


async def listed(machine: Machine) -> tuple[Device, ...]:
    children = Children()
    inventory = NvidiaInventory(machine.places, children, node="node-1")
    try:
        return await inventory.devices()
    finally:
        await inventory.close()
        await children.close()


# --- the mode


async def test_node_without_the_mode_is_neither_enabled_nor_described_as_such(
    machine: Machine, short_tmp: Path
) -> None:
    async with started(machine, short_tmp / "state") as rig:
        assert not port(rig).enabled
        assert "confidential" not in dict((await first_device(rig)).traits)


async def test_driver_older_than_the_mode_counts_as_without_it(machine: Machine, short_tmp: Path) -> None:
    machine.enter_confidential_mode()
    machine.age("nvmlSystemGetConfComputeState")
    async with started(machine, short_tmp / "state") as rig:
        assert not port(rig).enabled


@pytest.mark.parametrize(
    ("attributes", "mode"),
    [
        ({"confidential": 0}, None),
        ({"confidential": 1}, "on"),
        ({"confidential": 1, "confidential_devtools": 1}, "devtools"),
        ({"confidential": 0, "confidential_multi_gpu": 1}, "on"),
    ],
)
async def test_mode_of_the_node_is_a_trait_of_each_device(
    machine: Machine, attributes: dict[str, int], mode: str | None
) -> None:
    for name, value in attributes.items():
        machine.set(name, value)
    assert {dict(each.traits).get("confidential") for each in await listed(machine)} == {mode}


@pytest.mark.parametrize("function", ["nvmlSystemGetConfComputeState", "nvmlSystemGetConfComputeSettings"])
async def test_mode_that_cannot_be_read_makes_the_driver_unavailable(machine: Machine, function: str) -> None:
    machine.set("confidential", 0)
    machine.fail(function, 999)
    with pytest.raises(Unavailable, match=f"{function}: The driver reports an internal error"):
        await listed(machine)


# --- the ready state


async def test_ready_state_is_set_and_read_back(rig: NvidiaRig) -> None:
    await port(rig).set_accepting(True)
    assert rig.machine.gpus_ready
    await port(rig).set_accepting(False)
    assert not rig.machine.gpus_ready


@pytest.mark.parametrize("fault", ["error", "stubborn", "hang"])
async def test_ready_state_that_cannot_be_set_is_unavailable_and_not_a_fault_of_a_device(
    rig: NvidiaRig, fault: str
) -> None:
    if fault == "error":
        rig.machine.fail(SET_READY, 4)
    else:
        rig.machine.set("stubborn/gpus_ready" if fault == "stubborn" else f"hangs/{SET_READY}", "")
    with pytest.raises(Unavailable, match="ready"):
        await port(rig).set_accepting(True)


async def test_gpus_are_ready_while_the_eraser_works_and_not_ready_afterwards(rig: NvidiaRig) -> None:
    """The stand-in for CUDA opens no context while the GPUs are not ready, so the erasure itself is the evidence."""
    device = await first_device(rig)
    rig.fill(device, "secret")
    report = await rig.backend.eraser.erase(device, request(), ignore_progress)
    assert report.failed_bytes == 0
    assert report.residue_bytes == report.cleared_bytes > 0
    assert not rig.machine.gpus_ready


async def test_gpus_stay_ready_after_an_eraser_while_they_are_to_accept_work(rig: NvidiaRig) -> None:
    await port(rig).set_accepting(True)
    await rig.backend.eraser.erase(await first_device(rig), request(), ignore_progress)
    assert rig.machine.gpus_ready


async def test_eraser_that_ends_does_not_end_the_ready_state_of_another_one(rig: NvidiaRig) -> None:
    slow, quick = await rig.backend.inventory.devices()
    rig.gpu(slow).set("slow_clear", 600)
    began = asyncio.Event()
    erasing = asyncio.create_task(rig.backend.eraser.erase(slow, request(), lambda _: began.set()))
    await began.wait()
    await rig.backend.eraser.erase(quick, request(), ignore_progress)
    assert rig.machine.gpus_ready
    erasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await erasing
    assert not rig.machine.gpus_ready


async def test_erasure_is_refused_without_a_fault_of_the_device_where_the_gpus_cannot_be_set_ready(
    rig: NvidiaRig,
) -> None:
    device = await first_device(rig)
    rig.fill(device, "secret")
    rig.machine.fail(SET_READY, 4)
    with pytest.raises(Unavailable, match="could not be set ready"):
        await rig.backend.eraser.erase(device, request(), ignore_progress)
    rig.machine.unset(f"errors/{SET_READY}")
    await rig.backend.eraser.erase(device, request(), ignore_progress)


# --- attestation


async def test_report_is_returned_as_its_sha256(rig: NvidiaRig) -> None:
    device = await first_device(rig)
    report = b"\x11\xe0\x01\xff" + NONCE + device.id.encode()
    assert await port(rig).attest(device, NONCE) == hashlib.sha256(report).hexdigest()


async def test_mig_instance_is_attested_by_its_gpu(machine: Machine, short_tmp: Path) -> None:
    machine.enter_confidential_mode()
    gpu = machine.gpus[0]
    gpu.split("7g.141gb")
    async with started(machine, short_tmp / "state") as rig:
        device = await first_device(rig)
        assert device.parent == gpu.uuid
        report = b"\x11\xe0\x01\xff" + NONCE + gpu.uuid.encode()
        assert await port(rig).attest(device, NONCE) == hashlib.sha256(report).hexdigest()


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("report_is_empty", "report of 0 bytes"),
        ("report_is_stale", "does not contain the nonce"),
        (f"errors/{REPORT}", "internal error"),
    ],
)
async def test_report_that_is_missing_or_for_another_nonce_is_refused(
    rig: NvidiaRig, attribute: str, message: str
) -> None:
    device = await first_device(rig)
    rig.gpu(device).set(attribute, 999)
    with pytest.raises(Unreadable, match=message):
        await port(rig).attest(device, NONCE)


async def test_report_that_never_comes_times_out(rig: NvidiaRig) -> None:
    device = await first_device(rig)
    rig.gpu(device).hang(REPORT)
    with pytest.raises(DriverTimeout):
        await port(rig).attest(device, NONCE)


async def test_nonce_of_another_size_is_refused(rig: NvidiaRig) -> None:
    with pytest.raises(Unreadable, match="32 bytes, not 4"):
        await port(rig).attest(await first_device(rig), b"1234")
