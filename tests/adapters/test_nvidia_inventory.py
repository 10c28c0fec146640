"""The inventory of NVIDIA devices: each GPU is queried separately, and one that cannot answer affects no other."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber.adapters.nvidia.inventory import NvidiaInventory
from scrubber.domain.errors import Unavailable
from tests.adapters.nvidia_node import NvidiaNode, nvidia_node


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[NvidiaNode]:
    async with nvidia_node(tmp_path) as made:
        yield made


@pytest.fixture
async def brief(tmp_path: Path) -> AsyncIterator[NvidiaNode]:
    """Provide a node with a short timeout for GPUs that do not answer."""
    async with nvidia_node(tmp_path, deadline=2.0) as made:
        yield made


async def test_gpus_are_described_as_the_driver_reports_them(node: NvidiaNode) -> None:
    first, second = await node.inventory.devices()
    gpu = node.gpu(first)
    assert (first.index, second.index) == ("0", "1")
    assert (first.id, first.model, first.memory_bytes) == (gpu.uuid, "NVIDIA H200", gpu.number("total"))
    assert (first.numa_node, second.numa_node) == (0, 1)
    assert [Path(access.host_path).exists() for access in first.access] == [True] * 5
    traits = dict(first.traits)
    number = gpu.node.stat().st_rdev
    assert traits["device_number"] == f"{os.major(number)}:{os.minor(number)}"
    assert traits["pci_address"] == gpu.pci_address
    assert (traits["architecture"], traits["compute_capability"], traits["cuda"]) == ("hopper", "9.0", "13.0")
    assert (traits["vbios"], traits["virtualization"]) == ("96.00.D0.00.01", "none")
    assert (first, second) == await node.inventory.devices()
    assert node.inventory.not_advertised == {}


async def test_inventory_identity_names_the_driver(node: NvidiaNode) -> None:
    identity = await node.inventory.identity()
    assert (identity.node, identity.driver) == ("node-1", "580.65.06")
    assert identity.boot == Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


async def test_each_gpu_is_described_by_its_own_child_that_ends_afterwards(node: NvidiaNode) -> None:
    await node.inventory.devices()
    (first,), (second,) = (gpu.attached() for gpu in node.machine.gpus)
    assert first != second
    assert node.children.pids() == frozenset()


async def test_query_about_one_gpu_attaches_to_no_other(node: NvidiaNode) -> None:
    device, _ = await node.inventory.devices()
    before = [gpu.attached() for gpu in node.machine.gpus]
    await node.telemetry.snapshot(device)
    await node.query(device, "used")
    await node.settings.restore(device, {"compute_mode": "default"})
    after = [gpu.attached() for gpu in node.machine.gpus]
    assert len(after[0]) == len(before[0]) + 1
    assert after[1] == before[1]


async def test_identifying_the_driver_attaches_to_no_gpu(node: NvidiaNode) -> None:
    await node.inventory.identity()
    await node.inventory.fingerprint()
    assert [gpu.attached() for gpu in node.machine.gpus] == [(), ()]


async def test_gpu_is_described_with_fewer_traits_by_an_older_driver(node: NvidiaNode) -> None:
    node.machine.age(
        "nvmlDeviceGetGspFirmwareVersion",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetNvLinkRemoteDeviceType",
    )
    first, _ = await node.inventory.devices()
    assert "gsp_firmware" not in dict(first.traits)
    assert first.memory_bytes == node.gpu(first).number("total")


# --- a faulty GPU


async def test_gpu_lost_at_the_start_is_omitted_and_named(node: NvidiaNode) -> None:
    first, second = node.machine.gpus
    first.lose()
    assert [device.id for device in await node.inventory.devices()] == [second.uuid]
    assert list(node.inventory.not_advertised) == [first.pci_address]
    assert "fallen off the bus" in node.inventory.not_advertised[first.pci_address]


async def test_gpu_that_never_answers_does_not_affect_other_gpus(brief: NvidiaNode) -> None:
    first, second = brief.machine.gpus
    second.hang()
    assert [device.id for device in await brief.inventory.devices()] == [first.uuid]
    assert "did not answer" in brief.inventory.not_advertised[second.pci_address]
    second.heal()
    assert [device.id for device in await brief.inventory.devices()] == [first.uuid, second.uuid]
    assert brief.inventory.not_advertised == {}


async def test_gpu_that_could_not_be_described_is_retried_periodically(node: NvidiaNode) -> None:
    now = [100.0]
    inventory = NvidiaInventory(
        node.machine.places, node.children, node="node-1", retry_after=30.0, monotonic=lambda: now[0]
    )
    node.machine.gpus[0].lose()
    await inventory.devices()
    marks = []
    for now[0] in (100.0, 129.0, 130.0, 159.0, 160.0):
        marks.append(await inventory.fingerprint())
    assert [each != before for before, each in itertools.pairwise(marks)] == [False, True, False, True]
    node.machine.gpus[0].heal()
    assert len(await inventory.devices()) == 2
    well = await inventory.fingerprint()
    now[0] = 1000.0
    assert await inventory.fingerprint() == well


@pytest.mark.parametrize("code", [15, 16, 999])
async def test_described_gpu_keeps_its_description_during_later_errors(node: NvidiaNode, code: int) -> None:
    before = await node.inventory.devices()
    node.machine.gpus[1].set("error", code)
    assert await node.inventory.devices() == before


async def test_hanging_gpu_keeps_its_earlier_description(brief: NvidiaNode) -> None:
    before = await brief.inventory.devices()
    brief.machine.gpus[0].hang()
    assert await brief.inventory.devices() == before


async def test_gpu_removed_from_the_bus_is_removed_from_the_inventory(node: NvidiaNode) -> None:
    _, second = await node.inventory.devices()
    mark = await node.inventory.fingerprint()
    node.machine.remove_gpu(node.machine.gpus[0])
    assert await node.inventory.fingerprint() != mark
    assert await node.inventory.devices() == (second,)
    assert second.index == "1"


async def test_gpu_added_to_the_bus_is_added_to_the_inventory(node: NvidiaNode) -> None:
    before = await node.inventory.devices()
    mark = await node.inventory.fingerprint()
    added = node.machine.add_gpu()
    assert await node.inventory.fingerprint() != mark
    after = await node.inventory.devices()
    assert after[:2] == before
    assert (after[2].id, after[2].index) == (added.uuid, "2")


async def test_gpu_passed_through_to_a_virtual_machine_is_omitted_and_named(node: NvidiaNode) -> None:
    first, second = node.machine.gpus
    await node.inventory.devices()
    link = first.pci_device / "driver"
    link.unlink()
    link.symlink_to("../../drivers/vfio-pci")
    assert [device.id for device in await node.inventory.devices()] == [second.uuid]
    assert "vfio-pci" in node.inventory.not_advertised[first.pci_address]


async def test_vgpu_host_is_omitted_and_named(node: NvidiaNode) -> None:
    first, second = node.machine.gpus
    first.set("virtualization", 3)
    assert [device.id for device in await node.inventory.devices()] == [second.uuid]
    assert "is a vGPU host" in node.inventory.not_advertised[first.pci_address]


async def test_gpu_being_reset_is_not_queried_and_stays_in_the_inventory(node: NvidiaNode) -> None:
    before = await node.inventory.devices()
    first, second = node.machine.gpus
    touched = first.attached(), len(second.attached())
    async with node.inventory.suspend([first.pci_address]):
        assert await node.inventory.devices() == before
    assert first.attached() == touched[0]
    assert len(second.attached()) == touched[1] + 1


# --- no driver


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (9, "The driver is not loaded"),
        (18, "differ: reboot"),
        (4, "permission: run the scrub service as root"),
        (999, "internal error"),
    ],
)
async def test_driver_that_does_not_start_is_unavailable_with_the_reason(
    node: NvidiaNode, code: int, message: str
) -> None:
    node.machine.init_error(code)
    with pytest.raises(Unavailable, match=message):
        await node.inventory.devices()
    with pytest.raises(Unavailable, match=message):
        await node.inventory.identity()


async def test_driver_without_its_library_is_unavailable(node: NvidiaNode) -> None:
    (node.machine.library_directory / "libnvidia-ml.so.1").unlink()
    with pytest.raises(Unavailable, match=r"libnvidia-ml\.so\.1"):
        await node.inventory.devices()


async def test_driver_that_returns_is_queried_again(node: NvidiaNode) -> None:
    before = await node.inventory.devices()
    node.machine.remove_driver()
    with pytest.raises(Unavailable):
        await node.inventory.devices()
    node.machine.bring_driver_back()
    assert await node.inventory.devices() == before


async def test_driver_that_hangs_for_all_gpus_is_unavailable(brief: NvidiaNode) -> None:
    brief.machine.set("hangs/nvmlInitWithFlags", "")
    with pytest.raises(Unavailable, match="did not answer"):
        await brief.inventory.devices()


async def test_driver_without_gpus_is_no_error(tmp_path: Path) -> None:
    async with nvidia_node(tmp_path, gpus=0) as node:
        assert await node.inventory.devices() == ()
        assert node.inventory.not_advertised == {}


# --- instances


async def test_mig_instances_replace_their_gpu_in_the_inventory(node: NvidiaNode) -> None:
    gpu = node.machine.gpus[0]
    instances = gpu.split("1g.18gb", "2g.35gb")
    first, second, whole = await node.inventory.devices()
    assert (first.index, second.index, whole.index) == ("0:0", "0:1", "1")
    assert (first.id, second.id) == tuple(each.uuid for each in instances)
    assert {first.parent, second.parent} == {gpu.uuid}
    assert (first.profile, second.profile) == ("1g.18gb", "2g.35gb")
    assert first.memory_bytes == instances[0].number("total")
    caps = [Path(access.host_path) for access in first.access if "nvidia-caps" in access.host_path]
    assert len(caps) == 2
    assert all(cap.exists() for cap in caps)
    gpu.merge()
    assert [device.id for device in await node.inventory.devices()] == [gpu.uuid, whole.id]


async def test_gpu_in_mig_mode_without_instances_is_omitted_and_named(node: NvidiaNode) -> None:
    gpu, other = node.machine.gpus
    gpu.split()
    assert [device.id for device in await node.inventory.devices()] == [other.uuid]
    assert "has no instances" in node.inventory.not_advertised[gpu.pci_address]


# --- links


async def test_gpus_joined_by_nvlink_are_peers(node: NvidiaNode) -> None:
    first, second = node.machine.gpus
    first.link(0, second)
    second.link(0, first)
    one, other = await node.inventory.devices()
    assert (set(one.peers), set(other.peers)) == ({other.id}, {one.id})


@pytest.mark.parametrize("speaks", [True, False])
async def test_gpus_on_nvswitches_are_peers_even_without_a_remote_device_type(node: NvidiaNode, speaks: bool) -> None:
    if not speaks:
        node.machine.age("nvmlDeviceGetNvLinkRemoteDeviceType")
    for number, gpu in enumerate(node.machine.gpus):
        gpu.link(0, f"00000000:{0xC0 + number:02X}:00.0")
        gpu.link(1, "00000000:C5:00.0", active=False)
    one, other = await node.inventory.devices()
    assert (set(one.peers), set(other.peers)) == ({other.id}, {one.id})
