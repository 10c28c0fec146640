"""The shape of a simulated node: made once, read carefully, changed only while nobody holds it."""

import json
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.layout import DRIVER, SimDevice, load, read_device, read_if_there, write_json
from scrubber.adapters.sim.shape import MIB, create, merge, split
from scrubber.domain.device import Access, AccessKind
from scrubber.domain.errors import Away, BadConfiguration, Held, InvalidRequest, Lost, Unreadable


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


def test_a_device_is_a_private_file_of_its_size_that_takes_no_space_yet(node: Path) -> None:
    for found in load(node).devices:
        itself = found.memory.stat()
        assert (itself.st_size, itself.st_blocks, itself.st_mode & 0o777) == (MIB, 0, 0o600)
        assert itself.st_ino == found.inode


def test_a_container_gets_the_file_as_a_mount(node: Path) -> None:
    first, second = load(node).devices
    assert first.device.access == (Access(AccessKind.MOUNT, str(first.memory), "/dev/simgpu0"),)
    assert second.device.access[0].container_path == "/dev/simgpu1"


def test_devices_are_spread_over_two_numa_nodes_and_linked_within_one(tmp_path: Path) -> None:
    devices = [found.device for found in create(tmp_path / "sim", 4, MIB).devices]
    assert [device.numa_node for device in devices] == [0, 0, 1, 1]
    assert [device.peers for device in devices] == [frozenset({devices[peer].id}) for peer in (1, 0, 3, 2)]


def test_a_node_that_is_there_as_asked_for_is_kept(node: Path) -> None:
    assert create(node, 2, MIB) == load(node)


@pytest.mark.parametrize(("devices", "memory"), [(3, MIB), (2, 2 * MIB)])
def test_a_node_of_another_shape_is_refused_and_kept(node: Path, devices: int, memory: int) -> None:
    before = load(node)
    with pytest.raises(BadConfiguration, match="holds a node of 2 devices"):
        create(node, devices, memory)
    assert load(node) == before


@pytest.mark.parametrize(
    ("devices", "memory", "hint"),
    [(0, MIB, "1 to"), (257, MIB, "1 to"), (2, 0, "256MiB"), (2, 5000, "256MiB"), (1, 1 << 60, "free")],
)
def test_an_impossible_node_is_refused_with_a_hint(tmp_path: Path, devices: int, memory: int, hint: str) -> None:
    with pytest.raises(BadConfiguration, match=hint):
        create(tmp_path / "sim", devices, memory)
    assert not (tmp_path / "sim" / "node.json").exists()


def test_a_directory_with_something_else_in_it_is_not_made_a_node(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(BadConfiguration, match="not empty"):
        create(tmp_path, 2, MIB)
    with pytest.raises(BadConfiguration, match="cannot be used"):
        create(tmp_path / "precious", 2, MIB)


def test_no_node_and_a_broken_node_say_what_to_do(tmp_path: Path, node: Path) -> None:
    with pytest.raises(BadConfiguration, match="scrubber sim create"):
        load(tmp_path / "nothing")
    write_json(node / "node.json", {"version": 99})
    with pytest.raises(BadConfiguration, match="version 99"):
        load(node)
    (node / "node.json").write_text("{")
    with pytest.raises(BadConfiguration, match="not JSON"):
        load(node)
    write_json(node / "node.json", {"version": 1, "node": ""})
    with pytest.raises(BadConfiguration, match="'node'"):
        load(node)


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
def test_a_device_that_cannot_be_read_does_not_take_the_others_down(node: Path, document: object) -> None:
    (node / "devices" / "0" / "device.json").write_text(document if isinstance(document, str) else json.dumps(document))
    found = load(node)
    assert [each.device.index for each in found.devices] == ["1"]
    assert list(found.broken) == ["0"]
    assert "devices/0" in found.broken["0"]


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
def test_a_description_out_of_bounds_is_a_broken_device(node: Path, key: str, value: object) -> None:
    place = node / "devices" / "0" / "device.json"
    document = json.loads(place.read_text())
    write_json(place, {**document, key: value})
    found = load(node)
    assert [each.device.index for each in found.devices] == ["1"]
    assert repr(key) in found.broken["0"]


def test_what_is_no_file_keeps_nobody_waiting(node: Path) -> None:
    description = node / "devices" / "0" / "device.json"
    description.unlink()
    os.mkfifo(description)
    (node / "devices" / "1" / "instances").touch()
    found = load(node)
    assert [each.device.index for each in found.devices] == ["1"]
    assert "no regular file" in found.broken["0"]


def same_id(node: Path, taker: str, owner: str) -> None:
    """Give device ``taker`` the id of ``owner``."""
    place = node / "devices" / taker / "device.json"
    theirs = json.loads((node / "devices" / owner / "device.json").read_text())
    write_json(place, {**json.loads(place.read_text()), "id": theirs["id"]})


def test_of_two_devices_with_one_id_the_later_is_broken(node: Path) -> None:
    same_id(node, "1", "0")
    found = load(node)
    assert [each.device.index for each in found.devices] == ["0"]
    assert "is that of device 0" in found.broken["1"]


@pytest.mark.parametrize(("taker", "owner"), [("0", "1"), ("1", "0")])
async def test_a_device_that_takes_another_one_s_id_pushes_nobody_out(node: Path, taker: str, owner: str) -> None:
    inventory = SimInventory(node)
    before = await inventory.devices()
    same_id(node, taker, owner)
    for _ in range(2):
        assert await inventory.devices() == before
        assert [inventory.find(device).device.id for device in before] == [device.id for device in before]


def test_a_memory_file_that_was_swapped_or_lost_is_a_broken_device(node: Path) -> None:
    memory = node / "devices" / "0" / "memory"
    memory.rename(memory.with_name("hidden"))
    assert "fell off" in load(node).broken["0"]
    memory.touch()
    assert "another file" in load(node).broken["0"]


async def test_the_inventory_is_away_without_a_node_and_lost_without_a_device(node: Path) -> None:
    inventory = SimInventory(node)
    device = (await inventory.devices())[0]
    fresh = SimInventory(node)
    assert fresh.find(device).device.id == device.id
    (node / "node.json").rename(node / "elsewhere")
    with pytest.raises(Away, match="scrubber sim create"):
        await inventory.devices()
    with pytest.raises(Lost):
        SimInventory(node).find(device)


async def test_which_driver_it_is_is_asked_without_a_look_at_the_devices(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def noting(place: Path, index: str, model: str) -> SimDevice:
        looked.append(index)
        return read_device(place, index, model)

    monkeypatch.setattr("scrubber.adapters.sim.layout.read_device", noting)
    assert (await SimInventory(node).identity()).driver == DRIVER
    assert looked == []
    await SimInventory(node).devices()
    assert looked == ["0", "1"]


def test_what_is_not_there_is_told_from_what_cannot_be_read(node: Path) -> None:
    path = node / "devices" / "0" / "settings.json"
    path.unlink(missing_ok=True)
    assert read_if_there(path) is None
    path.mkdir()
    with pytest.raises(Unreadable, match="cannot be read"):
        read_if_there(path)


# --- instances


async def test_the_parent_of_instances_is_not_handed_out(node: Path) -> None:
    parts = split(node, "0", 2)
    devices = await SimInventory(node).devices()
    assert [device.index for device in devices] == ["0:0", "0:1", "1"]
    assert [part.device.id for part in parts] == [device.id for device in devices[:2]]
    parent = load(node).devices[0].device
    assert {part.device.parent for part in parts} == {parent.id}
    assert [part.device.memory_bytes for part in parts] == [MIB // 2, MIB // 2]
    assert [part.device.access[0].container_path for part in parts] == ["/dev/simgpu0-0", "/dev/simgpu0-1"]
    assert merge(node, "0").device == parent
    assert [device.index for device in await SimInventory(node).devices()] == ["0", "1"]


def test_a_change_of_shape_loses_no_byte_and_keeps_the_inode(node: Path) -> None:
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


def test_a_device_is_not_split_or_merged_under_anybody_s_hands(node: Path, opened: int) -> None:
    with pytest.raises(Held, match="while it is free"):
        split(node, "0", 2)
    assert opened
    parts = split(node, "1", 2)
    with parts[0].memory.open("rb"), pytest.raises(Held):
        merge(node, "1")
    assert len(load(node).devices) == 4
    merge(node, "1")


@pytest.mark.parametrize("instances", [-1, 0, 1, 8])
def test_an_impossible_split_is_refused(node: Path, instances: int) -> None:
    with pytest.raises(InvalidRequest, match="2 to 7"):
        split(node, "0", instances)


def test_only_whole_devices_change_their_shape_and_only_once(node: Path) -> None:
    with pytest.raises(InvalidRequest, match="not split"):
        merge(node, "0")
    part = split(node, "SIM-GPU-uuid-0", 2)[0]
    with pytest.raises(InvalidRequest, match="already"):
        split(node, "0", 2)
    with pytest.raises(InvalidRequest):
        split(node, part.device.id, 2)
    with pytest.raises(InvalidRequest):
        split(node, "7", 2)


def test_a_split_that_was_cut_short_can_be_done_again(node: Path) -> None:
    (node / "devices" / "0" / ".instances.new" / "0").mkdir(parents=True)
    assert [found.device.index for found in load(node).devices] == ["0", "1"]
    assert len(split(node, "0", 2)) == 2
