"""The layout of a simulated node: created once, read carefully, changed only while no process holds it."""

import json
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.layout import (
    DRIVER_VERSION,
    SimDevice,
    load_node,
    read_device,
    read_json_if_exists,
    write_json,
)
from scrubber.adapters.sim.shape import MIB, create, merge, split
from scrubber.domain.device import Access, AccessKind
from scrubber.domain.errors import DeviceBusy, DeviceLost, InvalidConfiguration, InvalidRequest, Unavailable, Unreadable


@pytest.fixture
def node(tmp_path: Path) -> Path:
    numbers = count()
    create(tmp_path / "sim", 2, MIB, node_name="node-1", new_uuid=lambda: f"uuid-{next(numbers)}")
    return tmp_path / "sim"


@pytest.fixture
def opened(node: Path) -> Iterator[int]:
    fd = os.open(node / "devices" / "0" / "memory", os.O_RDONLY)
    yield fd
    os.close(fd)


def test_new_device_is_a_sparse_private_file_of_its_full_size(node: Path) -> None:
    for found in load_node(node).devices:
        itself = found.memory.stat()
        assert (itself.st_size, itself.st_blocks, itself.st_mode & 0o777) == (MIB, 0, 0o600)
        assert itself.st_ino == found.inode


def test_container_gets_the_device_file_as_a_mount(node: Path) -> None:
    first, second = load_node(node).devices
    assert first.device.access == (Access(AccessKind.MOUNT, str(first.memory), "/dev/simgpu0"),)
    assert second.device.access[0].container_path == "/dev/simgpu1"


def test_devices_are_spread_over_two_numa_nodes_and_linked_within_each(tmp_path: Path) -> None:
    devices = [found.device for found in create(tmp_path / "sim", 4, MIB).devices]
    assert [device.numa_node for device in devices] == [0, 0, 1, 1]
    assert [device.peers for device in devices] == [frozenset({devices[peer].id}) for peer in (1, 0, 3, 2)]


def test_existing_node_of_the_requested_layout_is_kept(node: Path) -> None:
    assert create(node, 2, MIB) == load_node(node)


@pytest.mark.parametrize(("devices", "memory"), [(3, MIB), (2, 2 * MIB)])
def test_existing_node_of_another_layout_is_refused_and_kept(node: Path, devices: int, memory: int) -> None:
    before = load_node(node)
    with pytest.raises(InvalidConfiguration, match="contains a node of 2 devices"):
        create(node, devices, memory)
    assert load_node(node) == before


@pytest.mark.parametrize(
    ("devices", "memory", "hint"),
    [(0, MIB, "1 to"), (257, MIB, "1 to"), (2, 0, "256MiB"), (2, 5000, "256MiB"), (1, 1 << 60, "free")],
)
def test_impossible_layout_is_refused_with_a_hint(tmp_path: Path, devices: int, memory: int, hint: str) -> None:
    with pytest.raises(InvalidConfiguration, match=hint):
        create(tmp_path / "sim", devices, memory)
    assert not (tmp_path / "sim" / "node.json").exists()


def test_directory_with_other_content_is_not_made_a_node(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(InvalidConfiguration, match="not empty"):
        create(tmp_path, 2, MIB)
    with pytest.raises(InvalidConfiguration, match="cannot be used"):
        create(tmp_path / "precious", 2, MIB)


def test_missing_or_broken_node_is_reported_with_the_remedy(tmp_path: Path, node: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="scrubber sim create"):
        load_node(tmp_path / "nothing")
    write_json(node / "node.json", {"version": 99})
    with pytest.raises(InvalidConfiguration, match="version 99"):
        load_node(node)
    (node / "node.json").write_text("{")
    with pytest.raises(InvalidConfiguration, match="not JSON"):
        load_node(node)
    write_json(node / "node.json", {"version": 1, "node": ""})
    with pytest.raises(InvalidConfiguration, match="'node'"):
        load_node(node)


BROKEN: list[object] = [
    "{",
    [],
    {},
    {"id": 1, "memory_bytes": MIB, "inode": 1},
    {"id": "x", "memory_bytes": "1", "inode": 1},
    {"id": "x", "memory_bytes": True, "inode": 1},
    {"id": "x", "memory_bytes": MIB, "inode": 1, "defaults": {}},
    "[" * 100_000,
    '{"a":' * 100_000,
    '{"id": "x", "memory_bytes": Infinity, "inode": 1}',
    '{"id": "x", "memory_bytes": 1e999, "inode": 1}',
    '{"id": "\\ud800", "memory_bytes": 1048576, "inode": 1}',
    f'{{"id": "x", "inode": 1, "memory_bytes": {"9" * 5000}}}',
    f'{{"id": "{"x" * (1 << 20)}"}}',
]


@pytest.mark.parametrize("document", BROKEN)
def test_unreadable_device_does_not_affect_other_devices(node: Path, document: object) -> None:
    (node / "devices" / "0" / "device.json").write_text(document if isinstance(document, str) else json.dumps(document))
    found = load_node(node)
    assert [each.device.index for each in found.devices] == ["1"]
    assert list(found.broken_devices) == ["0"]
    assert "devices/0" in found.broken_devices["0"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("id", ""),
        ("id", "../../../etc/cron.d/x"),
        ("id", ".."),
        ("id", "service"),
        ("id", "a/b"),
        ("id", "a b"),
        ("id", "a\n"),
        ("id", "ä"),
        ("id", "x" * 129),
        ("numa_node", -1),
        ("numa_node", 1024),
        ("numa_node", True),
        ("memory_bytes", (1 << 46) + 1),
        ("memory_bytes", -MIB),
        ("inode", 1 << 64),
    ],
)
def test_device_description_out_of_bounds_is_a_broken_device(node: Path, key: str, value: object) -> None:
    place = node / "devices" / "0" / "device.json"
    document = json.loads(place.read_text())
    write_json(place, {**document, key: value})
    found = load_node(node)
    assert [each.device.index for each in found.devices] == ["1"]
    assert repr(key) in found.broken_devices["0"]


def test_fifo_in_place_of_a_description_does_not_block(node: Path) -> None:
    description = node / "devices" / "0" / "device.json"
    description.unlink()
    os.mkfifo(description)
    (node / "devices" / "1" / "instances").touch()
    found = load_node(node)
    assert [each.device.index for each in found.devices] == ["1"]
    assert "not a regular file" in found.broken_devices["0"]


def same_id(node: Path, taker: str, owner: str) -> None:
    """Give device ``taker`` the id of ``owner``."""
    place = node / "devices" / taker / "device.json"
    theirs = json.loads((node / "devices" / owner / "device.json").read_text())
    write_json(place, {**json.loads(place.read_text()), "id": theirs["id"]})


def test_second_of_two_devices_with_one_id_is_broken(node: Path) -> None:
    same_id(node, "1", "0")
    found = load_node(node)
    assert [each.device.index for each in found.devices] == ["0"]
    assert "is already that of device 0" in found.broken_devices["1"]


@pytest.mark.parametrize(("taker", "owner"), [("0", "1"), ("1", "0")])
async def test_device_that_takes_anothers_id_does_not_displace_the_owner(node: Path, taker: str, owner: str) -> None:
    inventory = SimInventory(node)
    before = await inventory.devices()
    same_id(node, taker, owner)
    for _ in range(2):
        assert await inventory.devices() == before
        assert [inventory.find_sim_device(device).device.id for device in before] == [device.id for device in before]


def test_swapped_or_missing_memory_file_is_a_broken_device(node: Path) -> None:
    memory = node / "devices" / "0" / "memory"
    memory.rename(memory.with_name("hidden"))
    assert "fell off" in load_node(node).broken_devices["0"]
    memory.touch()
    assert "was replaced since the device was created" in load_node(node).broken_devices["0"]


async def test_inventory_is_unavailable_without_a_node_and_lost_without_a_device(node: Path) -> None:
    inventory = SimInventory(node)
    device = (await inventory.devices())[0]
    fresh = SimInventory(node)
    assert fresh.find_sim_device(device).device.id == device.id
    (node / "node.json").rename(node / "elsewhere")
    with pytest.raises(Unavailable, match="scrubber sim create"):
        await inventory.devices()
    with pytest.raises(DeviceLost):
        SimInventory(node).find_sim_device(device)


async def test_driver_version_is_read_without_reading_any_device(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def noting(place: Path, index: str, model: str) -> SimDevice:
        looked.append(index)
        return read_device(place, index, model)

    monkeypatch.setattr("scrubber.adapters.sim.layout.read_device", noting)
    assert (await SimInventory(node).identity()).driver == DRIVER_VERSION
    assert looked == []
    await SimInventory(node).devices()
    assert looked == ["0", "1"]


def test_missing_file_and_unreadable_file_are_distinguished(node: Path) -> None:
    path = node / "devices" / "0" / "settings.json"
    path.unlink(missing_ok=True)
    assert read_json_if_exists(path) is None
    path.mkdir()
    with pytest.raises(Unreadable, match="cannot be read"):
        read_json_if_exists(path)


# --- instances


async def test_parent_of_mig_instances_is_not_listed(node: Path) -> None:
    parts = split(node, "0", 2)
    devices = await SimInventory(node).devices()
    assert [device.index for device in devices] == ["0:0", "0:1", "1"]
    assert [part.device.id for part in parts] == [device.id for device in devices[:2]]
    parent = load_node(node).devices[0].device
    assert {part.device.parent for part in parts} == {parent.id}
    assert [part.device.memory_bytes for part in parts] == [MIB // 2, MIB // 2]
    assert [part.device.access[0].container_path for part in parts] == ["/dev/simgpu0-0", "/dev/simgpu0-1"]
    assert merge(node, "0").device == parent
    assert [device.index for device in await SimInventory(node).devices()] == ["0", "1"]


def test_layout_change_keeps_every_byte_and_the_inode(node: Path) -> None:
    memory = node / "devices" / "0" / "memory"
    content = os.urandom(MIB)
    memory.write_bytes(content)
    inode = memory.stat().st_ino
    parts = split(node, "0", 4)
    assert b"".join(part.memory.read_bytes() for part in parts) == content
    parts[1].memory.write_bytes(b"short")
    merge(node, "0")
    quarter = MIB // 4
    expected = content[:quarter] + b"short".ljust(quarter, b"\0") + content[2 * quarter :]
    assert memory.read_bytes() == expected
    assert memory.stat().st_ino == inode


def test_held_device_is_not_split_or_merged(node: Path, opened: int) -> None:
    with pytest.raises(DeviceBusy, match="while it is free"):
        split(node, "0", 2)
    assert opened
    parts = split(node, "1", 2)
    with parts[0].memory.open("rb"), pytest.raises(DeviceBusy):
        merge(node, "1")
    assert len(load_node(node).devices) == 4
    merge(node, "1")


@pytest.mark.parametrize("instances", [-1, 0, 1, 8])
def test_impossible_split_is_refused(node: Path, instances: int) -> None:
    with pytest.raises(InvalidRequest, match="2 to 7"):
        split(node, "0", instances)


def test_only_whole_gpus_can_be_split_and_only_once(node: Path) -> None:
    with pytest.raises(InvalidRequest, match="not split"):
        merge(node, "0")
    part = split(node, "SIM-GPU-uuid-0", 2)[0]
    with pytest.raises(InvalidRequest, match="already"):
        split(node, "0", 2)
    with pytest.raises(InvalidRequest):
        split(node, part.device.id, 2)
    with pytest.raises(InvalidRequest):
        split(node, "7", 2)


def test_interrupted_split_can_be_repeated(node: Path) -> None:
    (node / "devices" / "0" / ".instances.new" / "0").mkdir(parents=True)
    assert [found.device.index for found in load_node(node).devices] == ["0", "1"]
    assert len(split(node, "0", 2)) == 2
