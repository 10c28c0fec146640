"""Our own files, read back after a restart: saved heads, the key, a fence, CDI specifications, a simulated node."""

from __future__ import annotations

import base64
import copy
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from plugin.nvidia.cdi import CdiPublisher
from scrubber.adapters.cuda.fence import ComputeModeFence
from scrubber.adapters.ledger.saved_heads import SavedHead
from scrubber.adapters.locks import is_device_id
from scrubber.adapters.signing.ed25519 import Ed25519Key, encode_private_key
from scrubber.adapters.signing.node_key import FILE_NAME, NodeKey
from scrubber.adapters.sim.control import read_faults
from scrubber.adapters.sim.faults import Faults
from scrubber.adapters.sim.layout import load_node, write_json
from scrubber.domain.device import Device
from scrubber.domain.errors import InvalidConfiguration, Unreadable
from tests.fuzz.loop import complete, directory, on_close
from tests.fuzz.structure import EDIT_SEEDS, json_input, text_input
from tests.fuzz.target import SLOW_GOAL, target

_HASH = b"0123456789abcdef" * 4


@target(
    "saved-audit-head",
    parser="a saved head of the audit log, SEQ:HASH",
    covers=("scrubber.adapters.ledger.saved_heads",),
    oracle="a text is refused with a message, or has the number and the hash that a regular expression finds, and is written "
    "as a text that is read as the same head",
    seeds=(*EDIT_SEEDS, b"7:" + _HASH, b" 7:" + _HASH.upper() + b"\n", b"7:" + _HASH[:12], b"0:" + _HASH, b"7"),
    words=(b":", _HASH, b"abcdef"),
    longest=256,
)
def saved_audit_head(data: bytes) -> bool:
    text = text_input(data, b"7:" + _HASH).decode(errors="surrogateescape")
    written = re.fullmatch(r"\s*0*([1-9][0-9]{0,17}):([0-9a-fA-F]{64})\s*", text, re.ASCII)
    try:
        head = SavedHead.parse(text)
    except ValueError as error:
        assert str(error)
        assert written is None or len(text.strip().partition(":")[0]) > 18
        return False
    assert written is not None or not text.isascii()
    found = re.search(r"0*([1-9][0-9]*):([0-9a-fA-F]{64})", text)
    assert found is not None
    assert (head.sequence, head.hash) == (int(found[1]), found[2].lower())
    assert SavedHead.parse(str(head)) == head
    return True


_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_PEM = encode_private_key(_KEY)
_PREFIX = bytes.fromhex("302e020100300506032b657004220420")


def _written_key(pem: bytes) -> str | None:
    """Return the ID of the key whose 32 bytes the file contains in the form that the service writes; None without one."""
    block = re.search(rb"-----BEGIN PRIVATE KEY-----(.*?)-----END PRIVATE KEY-----", pem, re.DOTALL)
    digits = re.sub(rb"[^A-Za-z0-9+/=]", b"", block[1]) if block is not None else b""
    der = base64.b64decode(digits + b"===")
    if not der.startswith(_PREFIX) or len(der) < 48:
        return None
    return Ed25519Key(Ed25519PrivateKey.from_private_bytes(der[16:48])).key_id


@cache
def _state() -> Path:
    on_close(_state.cache_clear)
    return directory()


@target(
    "node-key",
    parser="the file of the node's signing key",
    covers=("scrubber.adapters.signing.node_key", "scrubber.adapters.signing.ed25519"),
    oracle="the file stays as it is, and is refused with a message of one line, or signs with the key whose bytes it contains",
    seeds=(
        *EDIT_SEEDS,
        _PEM,
        _PEM.replace(b"\n", b"\r\n"),
        b"text before\n" + _PEM,
        _PEM.replace(b"PRIVATE", b"PUBLIC"),
        _PEM.replace(b"PRIVATE", b"ENCRYPTED PRIVATE"),
        b"",
        _PEM * 100,
        _PEM.replace(b"KEY-----\nM", b"KEY-----M"),
    ),
    words=(b"-----BEGIN PRIVATE KEY-----\n", b"-----END PRIVATE KEY-----\n", b"MC4CAQAwBQYDK2VwBCIEIA"),
    longest=20_000,
    share=150,
    goal=SLOW_GOAL,
)
def node_key(data: bytes) -> bool:
    content, path = text_input(data, _PEM), _state() / FILE_NAME
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    try:
        key, created = NodeKey.open(_state())
    except InvalidConfiguration as error:
        assert str(error).isprintable()
        assert content != _PEM, "the service's own file is refused"
        return False
    finally:
        assert path.read_bytes() == content
    assert not created
    assert key.key_id == _written_key(content)
    return True


_DEVICE = Device("GPU-1", "0", "m", 1)


class _Gpu:
    """Records the mode that is restored."""

    def __init__(self) -> None:
        self.mode: str | None = None

    async def unfence(self, device: Device, compute_mode: str) -> None:
        self.mode = compute_mode


@cache
def _fences() -> Path:
    on_close(_fences.cache_clear)
    place = directory()
    (place / "fences").mkdir()
    return place


@target(
    "fence-record",
    parser="the record of the compute mode that a device had before its fence",
    covers=("scrubber.adapters.cuda.fence",),
    oracle="the whole record is one word, which is restored before the record is removed, or nothing is changed and the "
    "record stays",
    seeds=(*EDIT_SEEDS, b"default\n", b"exclusive-process\n", b"", b"default" + b" " * 70 + b"x\n", b"a b\n"),
    words=(b"default", b"prohibited", b" " * 64, b"\n"),
    longest=256,
)
def fence_record(data: bytes) -> bool:
    record = text_input(data, b"exclusive-process\n")
    path = _fences() / "fences" / _DEVICE.id
    path.write_bytes(record)
    gpu = _Gpu()
    word = re.fullmatch(rb"([a-z0-9]+(-[a-z0-9]+)*)\n?", record)
    try:
        complete(ComputeModeFence(gpu, _fences()).disable(_DEVICE))  # type: ignore[arg-type]
    except Unreadable:
        assert gpu.mode is None
        assert path.read_bytes() == record
        assert word is None or len(record) > 64
        return False
    assert word is not None, gpu.mode
    assert gpu.mode == word[1].decode()
    assert not path.exists()
    return True


_SPEC: dict[str, Any] = {
    "cdiVersion": "0.5.0",
    "kind": "scrubber.dev/gpu",
    "devices": [
        {"name": "GPU-1", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0", "major": 195, "minor": 1}]}},
        {"name": "GPU-2", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia1", "major": 195, "minor": 0}]}},
    ],
    "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"], "hooks": []},
}


@target(
    "written-cdi-specification",
    parser="the CDI specification that the plugin wrote, where it cannot be written again",
    covers=("plugin.nvidia.cdi",),
    oracle="a device counts as given only if the file has its edits and those of all devices exactly as they would be written, "
    "with the same types; the plugin's own file gives all devices",
    seeds=(
        *EDIT_SEEDS,
        json.dumps(_SPEC).encode(),
        b"{}",
        b"[" * 3000,
        b'{"containerEdits": {}}',
        json.dumps(_SPEC).replace("0}", "false}").encode(),
    ),
    words=(b'"devices":', b'"containerEdits":', b'"GPU-1"', b"true", b"1.0"),
)
def written_cdi_specification(data: bytes) -> bool:
    text = json_input(data, _SPEC)
    path = _state() / "spec.json"
    path.write_bytes(text)
    publisher = CdiPublisher.__new__(CdiPublisher)
    publisher._path = path
    given = publisher._devices_in_file(copy.deepcopy(_SPEC))
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    expected: set[str] = set()
    devices = found.get("devices") if isinstance(found, dict) else None
    if isinstance(devices, list) and _exact(found.get("containerEdits")) == _exact(_SPEC["containerEdits"]):
        expected = {each["name"] for each in _SPEC["devices"] if _exact(each) in map(_exact, devices)}
    assert given == expected
    return bool(given)


def _exact(value: Any) -> str:
    """Return JSON in which no number equals true, false or a number of another type, and the order of keys is one."""
    return json.dumps(value, sort_keys=True)


_NODE = {"version": 1, "node": "node-1", "driver": "sim-1", "model": "SimGPU"}
_DESCRIPTION: dict[str, Any] = {
    "id": "GPU-1",
    "memory_bytes": 4096,
    "inode": 0,
    "numa_node": 1,
    "peers": ["GPU-2"],
    "defaults": {"power": "300"},
}
_FILES = ("node.json", "devices/0/device.json")


@cache
def _sim() -> Path:
    on_close(_sim.cache_clear)
    top = directory()
    for index in range(2):
        place = top / "devices" / str(index)
        place.mkdir(parents=True)
        (place / "memory").touch()
        inode = (place / "memory").stat().st_ino
        write_json(place / "device.json", {**_DESCRIPTION, "id": f"GPU-{index + 1}", "inode": inode})
    write_json(top / "node.json", _NODE)
    return top


@target(
    "simulated-node",
    parser="the files that describe a simulated node and its devices",
    covers=("scrubber.adapters.sim.layout",),
    oracle="a file is refused with a message that names it, or the node and the device have exactly its values; a broken "
    "device changes no other device",
    seeds=(
        *EDIT_SEEDS,
        b"\0\1",
        b"\0\1\2\0\1",
        json.dumps(_NODE).encode(),
        json.dumps(_DESCRIPTION).encode(),
        b"{}",
        b"[" * 3000,
    ),
    words=(b'"inode":', b'"peers":', b'"parent":', b'"version":', b"NaN"),
    goal=SLOW_GOAL,
)
def simulated_node(data: bytes) -> bool:
    top = _sim()
    inode = (top / "devices/0/memory").stat().st_ino
    description = {**_DESCRIPTION, "inode": inode}
    kept = {name: (top / name).read_bytes() for name in _FILES}
    text = json_input(data, _NODE, description)
    accepted = False
    try:
        (top / _FILES[0]).write_bytes(text)
        try:
            node = load_node(top)
        except InvalidConfiguration as error:
            assert _FILES[0] in str(error)
        else:
            found = json.loads(text)
            assert (node.name, node.driver, node.model) == (found["node"], found["driver"], found["model"])
            assert found["version"] == 1
            assert [each.device.id for each in node.devices] == ["GPU-1", "GPU-2"]
            accepted = True
        (top / _FILES[0]).write_bytes(kept[_FILES[0]])
        (top / _FILES[1]).write_bytes(text)
        node = load_node(top)
        ids = [each.device.id for each in node.devices]
        if "0" in node.broken_devices:
            assert ids == ["GPU-2"]
            assert _FILES[1] in node.broken_devices["0"] or "memory" in node.broken_devices["0"]
            assert text != json.dumps(description).encode()
            return accepted
        found = json.loads(text)
        device = node.devices[0].device
        assert (device.id, device.memory_bytes, device.numa_node) == (
            found["id"],
            found["memory_bytes"],
            found.get("numa_node"),
        )
        assert all(type(found[name]) is int for name in ("memory_bytes", "inode"))
        assert is_device_id(device.id)
        assert (device.peers, node.devices[0].defaults) == (frozenset(found.get("peers", [])), found["defaults"])
        assert (node.devices[0].inode, found.get("parent")) == (inode, None)
        assert ids == [device.id] if device.id == "GPU-2" else [device.id, "GPU-2"]
        return True
    finally:
        for name, content in kept.items():
            (top / name).write_bytes(content)


_FAULTS = Faults(
    xid_counts={31: 2, 79: 1},
    active_xids={79: 1},
    ecc=3,
    slow_clear=0.5,
    temperature=90,
    recovery="reset",
    conditions={"pcie-width": "x8 of x16"},
    counters={"retired_pages": 2},
).to_json()


@cache
def _faulty() -> Path:
    on_close(_faulty.cache_clear)
    return directory()


@target(
    "simulated-faults",
    parser="the file with the faults of a simulated device",
    covers=("scrubber.adapters.sim.faults", "scrubber.adapters.sim.control"),
    oracle="a file is refused, or its faults are written and read back without a change, and every number is that of the file "
    "and within its range",
    seeds=(
        *EDIT_SEEDS,
        json.dumps(_FAULTS).encode(),
        b"{}",
        b'{"xids": {"79": {"seen": 1, "active": 1}}}',
        b'{"xids": {"9": {"seen": 1, "active": 2}}}',
        b'{"xids": {"9": {"seen": 0, "active": 1}}}',
    ),
    words=(b'"xids":', b'"seen":', b'"active":', b'"counters":', b"1e999"),
)
def simulated_faults(data: bytes) -> bool:
    text, place = json_input(data, _FAULTS), _faulty()
    (place / "control.json").write_bytes(text)
    try:
        found = read_faults(place)
    except Unreadable as error:
        assert str(error)
        return False
    write_json(place / "control.json", found.to_json())
    assert read_faults(place) == found
    document = json.loads(text)
    for name in ("ecc", "lost", "stuck", "slow_clear", "temperature", "recovery", "firmware", "conditions", "counters"):
        if name in document:
            assert getattr(found, name) == document[name]
            assert isinstance(getattr(found, name), bool) == isinstance(document[name], bool)
    xids = document.get("xids", {})
    assert len(found.xid_counts) == len(xids)
    for code, seen in xids.items():
        assert re.fullmatch("[1-9][0-9]{0,8}", code), code
        assert type(seen["seen"]) is int
        assert found.xid_counts[int(code)] == seen["seen"]
        assert 0 <= found.active_xids.get(int(code), 0) <= seen["seen"]
    return True
