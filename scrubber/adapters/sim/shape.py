"""The shape of a simulated node: created once, split into instances and merged again, never while a device is held.

Promise: bytes are never lost by a change of shape. What a tenant left in a GPU is found in the instances that it is
split into, and vice versa; only the eraser clears.
"""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from scrubber.adapters.locks import lock_path
from scrubber.adapters.sim import lease
from scrubber.adapters.sim.layout import DRIVER_VERSION, FORMAT_VERSION, SimDevice, SimNode, load_node, write_json
from scrubber.domain.device import find_device
from scrubber.domain.errors import DeviceBusy, InvalidConfiguration, InvalidRequest, Unreadable

__all__ = ["DEFAULT_SETTINGS", "MIB", "create", "merge", "split"]

MIB = 1024 * 1024
_PAGE = 4096
_CHUNK = MIB
_MAX_DEVICES = 256
_MAX_INSTANCES = 7

DEFAULT_SETTINGS = {
    "accounting_mode": "disabled",
    "compute_mode": "default",
    "persistence_mode": "enabled",
    "power_limit_watts": "700",
}


def _new_uuid() -> str:
    return str(uuid.uuid4())


def create(
    directory: Path,
    devices: int = 4,
    memory: int = 256 * MIB,
    *,
    node_name: str | None = None,
    model: str = "Simulated GPU",
    new_uuid: Callable[[], str] = _new_uuid,
) -> SimNode:
    """Create a node of ``devices`` GPUs with ``memory`` bytes each in ``directory``; return the same one if it exists.

    Raises:
        InvalidConfiguration: another node or something else exists there, a number is invalid, or the file system has
            no room or grants no leases.
    """
    directory = directory.absolute()
    if not 1 <= devices <= _MAX_DEVICES:
        raise InvalidConfiguration(f"A node has 1 to {_MAX_DEVICES} devices, not {devices}.")
    if memory < _PAGE or memory % _PAGE:
        raise InvalidConfiguration(
            f"{memory} bytes of memory per device are not possible: use a multiple of {_PAGE}, such as 256MiB."
        )
    if (directory / "node.json").exists():
        return _require_same_node(directory, devices, memory)
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise InvalidConfiguration(f"{directory} is not empty and is not a simulated node: pass another directory.")
        space = os.statvfs(directory)
    except OSError as error:
        raise InvalidConfiguration(f"{directory} cannot be used: {error.strerror}.") from error
    if space.f_bavail * space.f_frsize < devices * memory:
        raise InvalidConfiguration(
            f"{devices} devices of {memory} bytes need {devices * memory} bytes; the file system of "
            f"{directory} has {space.f_bavail * space.f_frsize} free. Use less memory, or pass a directory on "
            "another file system."
        )
    ids = [f"SIM-GPU-{new_uuid()}" for _ in range(devices)]
    numas = [number * 2 // devices for number in range(devices)]
    (directory / "locks").mkdir(mode=0o700)
    for number, (id_, numa) in enumerate(zip(ids, numas, strict=True)):
        peers = [other for other, place in zip(ids, numas, strict=True) if place == numa and other != id_]
        _make(directory / "devices" / str(number), id_, memory, numa, peers)
    _check_leases(directory / "devices" / "0" / "memory")
    # Last: a directory without it is not a node, so no process finds an incomplete one.
    document = {
        "version": FORMAT_VERSION,
        "node": node_name or socket.gethostname(),
        "driver": DRIVER_VERSION,
        "model": model,
    }
    write_json(directory / "node.json", document)
    return load_node(directory)


def split(
    directory: Path, device: str, instances: int, *, new_uuid: Callable[[], str] = _new_uuid
) -> tuple[SimDevice, ...]:
    """Split ``device`` (UUID, unique prefix or index) into equal ``instances``; it is then not advertised itself.

    Raises:
        InvalidRequest: no such GPU, it is split already or an instance itself, or the number is invalid.
        DeviceBusy: a process holds it.
    """
    found = _find_whole_gpu(directory, device)
    if found.has_instances:
        raise InvalidRequest(f"Device {found.device.index} is already split; merge it first.")
    each = found.device.memory_bytes // max(instances, 1) // _PAGE * _PAGE
    if not 2 <= instances <= _MAX_INSTANCES or not each:
        raise InvalidRequest(f"Device {found.device.index} can be split into 2 to {_MAX_INSTANCES}, not {instances}.")
    fresh = found.directory / ".instances.new"
    shutil.rmtree(fresh, ignore_errors=True)  # left by an interrupted split
    with _exclusive(found) as source:
        for number in range(instances):
            id_ = f"SIM-MIG-{new_uuid()}"
            _make(fresh / str(number), id_, each, found.device.numa_node, [], parent=found.device.id)
            target = os.open(fresh / str(number) / "memory", os.O_RDWR | os.O_CLOEXEC)
            try:
                _copy_range(source, number * each, target, 0, each)
            finally:
                os.close(target)
        fresh.rename(found.directory / "instances")
    node = load_node(directory)
    return tuple(part for part in node.devices if part.device.parent == found.device.id)


def merge(directory: Path, device: str) -> SimDevice:
    """Make the instances of ``device`` one GPU again, and return it.

    Raises:
        InvalidRequest: no such GPU, or it is not split.
        DeviceBusy: a process holds one of its instances.
    """
    found = _find_whole_gpu(directory, device)
    parts = [part for part in load_node(directory).devices if part.device.parent == found.device.id]
    if not found.has_instances:
        raise InvalidRequest(f"Device {found.device.index} is not split.")
    offset = 0
    with ExitStack() as stack:
        target = stack.enter_context(_exclusive(found))
        sources = [stack.enter_context(_exclusive(part)) for part in parts]
        for part, source in zip(parts, sources, strict=True):
            _copy_range(source, 0, target, offset, part.device.memory_bytes)
            offset += part.device.memory_bytes
        old = found.directory / ".instances.old"
        shutil.rmtree(old, ignore_errors=True)
        (found.directory / "instances").rename(old)
    shutil.rmtree(old)
    for part in parts:
        lock_path(directory / "locks", part.device.id).unlink(missing_ok=True)
    return _find_whole_gpu(directory, found.device.id)


def _require_same_node(directory: Path, devices: int, memory: int) -> SimNode:
    node = load_node(directory)
    wholes = [each for each in node.devices if each.device.parent is None]
    sizes = {each.device.memory_bytes for each in wholes}
    if node.broken_devices or len(wholes) != devices or sizes != {memory}:
        present = " and ".join(f"{size} bytes" for size in sorted(sizes)) or "unreadable memory"
        raise InvalidConfiguration(
            f"{directory} contains a node of {len(wholes)} devices with {present}, not {devices} with {memory} "
            "bytes: pass another directory, or remove that node first."
        )
    return node


def _find_whole_gpu(directory: Path, name: str) -> SimDevice:
    wholes = {each.device.id: each for each in load_node(directory).devices if each.device.parent is None}
    return wholes[find_device((each.device for each in wholes.values()), name).id]


def _make(place: Path, id_: str, memory: int, numa: int | None, peers: list[str], *, parent: str | None = None) -> None:
    place.mkdir(parents=True, mode=0o755)
    fd = os.open(place / "memory", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, memory)
        inode = os.fstat(fd).st_ino
    finally:
        os.close(fd)
    os.close(os.open(place / "node", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    document: dict[str, object] = {
        "id": id_,
        "memory_bytes": memory,
        "inode": inode,
        "numa_node": numa,
        "peers": peers,
        "parent": parent,
        "defaults": DEFAULT_SETTINGS,
    }
    write_json(place / "device.json", document)


def _check_leases(memory: Path) -> None:
    try:
        lease.is_held(memory, memory.stat().st_ino)
    except Unreadable as error:
        raise InvalidConfiguration(f"{error} Pass a directory on tmpfs or ext4, for example below /dev/shm.") from error


@contextmanager
def _exclusive(found: SimDevice) -> Iterator[int]:
    """Yield the memory, open and fenced: a process that opens it now waits."""
    taken = f"Device {found.device.index} is held by a process: it can only be split or merged while it is free."
    try:
        fd = os.open(found.memory, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except BlockingIOError as error:
        raise DeviceBusy(taken) from error
    try:
        if not lease.acquire(fd, found.memory):
            raise DeviceBusy(taken)
        yield fd
    finally:
        os.close(fd)


def _copy_range(source: int, source_offset: int, target: int, target_offset: int, length: int) -> None:
    """Copy ``length`` bytes of ``source`` to ``target``; writes only where they differ, so holes stay holes."""
    for done in range(0, length, _CHUNK):
        size = min(_CHUNK, length - done)
        data = os.pread(source, size, source_offset + done).ljust(size, b"\0")
        if os.pread(target, size, target_offset + done).ljust(size, b"\0") != data:
            os.pwrite(target, data, target_offset + done)
