"""What a simulated node is on disk, and how it is read.

::

    DIR/node.json                       version, node name, driver, model
    DIR/control.json                    faults of the node (see control)
    DIR/locks/<id>                      flocked by the eraser at work on the device
    DIR/locks/service                   flocked by the service that works on the node
    DIR/devices/<index>/memory          the device: mode 0600; its inode is never replaced
    DIR/devices/<index>/node            what a monitoring agent keeps open: mode 0600; it has no content
    DIR/devices/<index>/device.json     id, memory_bytes, inode, numa_node, peers, default settings
    DIR/devices/<index>/settings.json   current settings; absent: the defaults
    DIR/devices/<index>/control.json    faults and telemetry; absent: nothing is wrong
    DIR/devices/<index>/instances/<k>/  an instance, with the same files; its parent is then not advertised

Promise: a device with broken files does not affect the others, whatever the files contain; no path is built from an id
before the id is validated; and a memory file that was replaced by another one is detected, because holders of the old
file would not be found. The driver's child imports this module.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from scrubber.adapters.locks import SERVICE_LOCK, is_device_id
from scrubber.domain.device import Access, AccessKind, Device, SharedResource
from scrubber.domain.errors import DeviceLost, InvalidConfiguration, ScrubberError, Unreadable

__all__ = [
    "DRIVER_VERSION",
    "FORMAT_VERSION",
    "HOST_MEMORY",
    "SimDevice",
    "SimNode",
    "current_settings",
    "device_directories",
    "load_node",
    "read_device",
    "read_json",
    "read_json_if_exists",
    "read_node",
    "write_json",
]

FORMAT_VERSION = 1
DRIVER_VERSION = "sim-1"
HOST_MEMORY = SharedResource("host memory", 2 * len(os.sched_getaffinity(0)))
"""A simulated device's memory is the host's, and clearing it keeps a CPU busy; while one eraser starts or ends, another
one can work."""
_MAX_BYTES = 1 << 46
_MAX_INODE = (1 << 64) - 1
_MAX_NUMA_NODE = 1023
_MAX_JSON_BYTES = 1 << 20
"""Maximum size of a file of the node, in bytes; a longer one is not read."""
_PART = 16 * 1024


@dataclass(frozen=True, slots=True)
class SimDevice:
    """A device as its files describe it.

    Attributes:
        directory: absolute path of its directory.
        inode: inode of the memory file, as created.
        parent_directory: directory of the GPU that an instance belongs to.
        has_instances: whether it is the parent of instances and not advertised itself.
        memory: its memory.
        node: where a process has the device open without a context: it reads and writes nothing there.
    """

    device: Device
    directory: Path
    inode: int
    defaults: Mapping[str, str]
    parent_directory: Path | None = None
    has_instances: bool = False
    memory: Path = field(init=False, compare=False)
    node: Path = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", self.directory / "memory")
        object.__setattr__(self, "node", self.directory / "node")

    @property
    def control_directories(self) -> tuple[Path, ...]:
        """The directories with faults that concern it: its own, and its parent's."""
        return (self.directory,) if self.parent_directory is None else (self.directory, self.parent_directory)


@dataclass(frozen=True, slots=True)
class SimNode:
    """The whole node. ``broken_devices`` maps the index of a device that cannot be read to the message why."""

    name: str
    driver: str
    model: str
    devices: tuple[SimDevice, ...]
    broken_devices: Mapping[str, str] = field(default_factory=dict)

    @property
    def assignable_devices(self) -> tuple[SimDevice, ...]:
        """Everything but the parents of instances."""
        return tuple(found for found in self.devices if not found.has_instances)


def read_node(directory: Path) -> SimNode:
    """Read ``node.json`` of the node in ``directory``: everything but its devices, which are not read.

    Raises:
        InvalidConfiguration: there is none, it is of another version, or ``node.json`` is malformed.
    """
    path = directory.absolute() / "node.json"
    if not path.exists():
        raise InvalidConfiguration(
            f"{path.parent} is not a simulated node: create one with `scrubber sim create --dir {path.parent}`."
        )
    try:
        document = read_json(path)
        if document.get("version") != FORMAT_VERSION:
            raise InvalidConfiguration(
                f"{path} has version {document.get('version')!r}; this program reads {FORMAT_VERSION}."
            )
        name, driver, model = (_text(path, document, key) for key in ("node", "driver", "model"))
    except Unreadable as error:
        raise InvalidConfiguration(f"{error} Fix it, or create the node again in an empty directory.") from error
    return SimNode(name, driver, model, ())


def load_node(directory: Path) -> SimNode:
    """Read the node in ``directory``, with its devices.

    Raises:
        InvalidConfiguration: as :func:`read_node`.
    """
    directory = directory.absolute()
    node = read_node(directory)
    found: dict[str, SimDevice] = {}
    broken: dict[str, str] = {}
    for index, place in device_directories(directory):
        try:
            device = read_device(place, index, node.model)
            first = found.setdefault(device.device.id, device)
            if first is not device:
                raise Unreadable(
                    f"{place / 'device.json'}: the id {device.device.id} is already that of device "
                    f"{first.device.index}; every device needs its own."
                )
        except ScrubberError as error:
            broken[index] = str(error)
    return replace(node, devices=tuple(found.values()), broken_devices=broken)


def device_directories(directory: Path) -> list[tuple[str, Path]]:
    """Return index (``"0"``, ``"0:1"``) and directory of every device that exists, broken or not, in order."""
    found: list[tuple[str, Path]] = []
    for index, place in _numbered(directory / "devices"):
        found.append((index, place))
        found += [(f"{index}:{number}", instance) for number, instance in _numbered(place / "instances")]
    return found


def read_device(directory: Path, index: str, model: str) -> SimDevice:
    """Read the device in ``directory``.

    Raises:
        DeviceLost: its memory file is gone.
        Unreadable: its description is malformed, or its memory file is not the one that was created with it.
    """
    path = directory / "device.json"
    document = read_json(path)
    memory = directory / "memory"
    inode = _count(path, document, "inode", _MAX_INODE)
    memory_bytes = _count(path, document, "memory_bytes", _MAX_BYTES)
    try:
        actual = os.stat(memory, follow_symlinks=False)
    except OSError as error:
        raise DeviceLost(f"Device {index} fell off the bus: {memory} cannot be read ({error.strerror}).") from error
    if actual.st_ino != inode:
        raise Unreadable(f"{memory} was replaced since the device was created; its holders are unknown.")
    instance = ":" in index
    numa, parent = document.get("numa_node"), document.get("parent")
    if not isinstance(numa, int | None) or isinstance(numa, bool) or not 0 <= (numa or 0) <= _MAX_NUMA_NODE:
        raise Unreadable(f"{path}: 'numa_node' must be a number from 0 to {_MAX_NUMA_NODE}, or null.")
    if not isinstance(parent, str | None) or instance != (parent is not None):
        raise Unreadable(f"{path}: an instance, and only an instance, has a parent.")
    device = Device(
        id=_device_id(path, document),
        index=index,
        model=f"{model} instance" if instance else model,
        memory_bytes=memory_bytes,
        parent=parent,
        numa_node=numa,
        peers=_texts(path, document, "peers"),
        access=(Access(AccessKind.MOUNT, str(memory), f"/dev/simgpu{index.replace(':', '-')}"),),
        shared_resource=HOST_MEMORY,
    )
    return SimDevice(
        device,
        directory,
        inode,
        _settings(path, document.get("defaults")),
        directory.parent.parent if instance else None,
        bool(_numbered(directory / "instances")),
    )


def current_settings(directory: Path, defaults: Mapping[str, str]) -> dict[str, str]:
    """Return the present settings of the device in ``directory``.

    Raises:
        Unreadable: the file is malformed.
    """
    path = directory / "settings.json"
    document = read_json_if_exists(path)
    return dict(defaults) if document is None else {**defaults, **_settings(path, document)}


def read_json_if_exists(path: Path) -> dict[str, object] | None:
    """Return the JSON object in ``path``; None where there is no such file.

    One access, so the file cannot vanish in between.

    Raises:
        Unreadable: as :func:`read_json`.
    """
    try:
        return _object(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}.") from error


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in ``path``.

    Raises:
        Unreadable: missing, unreadable, too long, or not a JSON object. Infinity and NaN, texts that cannot be
            encoded, and too deep a nesting are not JSON either.
    """
    try:
        return _object(path)
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}.") from error


def _object(path: Path) -> dict[str, object]:
    """Implement :func:`read_json`, except that errors of the operating system are raised unchanged."""
    try:
        document = json.loads(_content(path), parse_constant=_reject_constant)
        json.dumps(document, ensure_ascii=False).encode()  # half a surrogate pair could not be written anywhere
    except ValueError as error:
        raise Unreadable(f"{path} is not JSON: {error}.") from error
    except RecursionError as error:
        raise Unreadable(f"{path} is nested too deeply.") from error
    if not isinstance(document, dict):
        raise Unreadable(f"{path} contains a JSON {type(document).__name__}, not an object.")
    return document


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Replace ``path`` atomically: a reader sees the old text or the new one. For one writer at a time."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    fresh.chmod(0o600)
    fresh.replace(path)


def _content(path: Path) -> bytes:
    """Return all of a regular file. Any other type (a pipe, a terminal) could block the reader forever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        content = b""
        # In parts: a read first allocates all that is requested, and a megabyte of that costs more than reading a line.
        while len(content) <= _MAX_JSON_BYTES and (part := file.read(_PART)):
            content += part
    if len(content) > _MAX_JSON_BYTES:
        raise ValueError(f"it is longer than {_MAX_JSON_BYTES} bytes")
    return content


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def _numbered(directory: Path) -> list[tuple[str, Path]]:
    try:
        names = [name for name in os.listdir(directory) if name.isascii() and name.isdigit()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [(name, directory / name) for name in sorted(names, key=int)]


def _text(path: Path, document: Mapping[str, object], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not value:
        raise Unreadable(f"{path}: {key!r} must be a non-empty string.")
    return value


def _device_id(path: Path, document: Mapping[str, object]) -> str:
    value = _text(path, document, "id")
    if not is_device_id(value):
        raise Unreadable(
            f"{path}: 'id' must be 1 to 128 letters, digits, colons, dots, underscores or hyphens, and "
            f"neither {SERVICE_LOCK!r} nor dots alone."
        )
    return value


def _count(path: Path, document: Mapping[str, object], key: str, most: int) -> int:
    value = document.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise Unreadable(f"{path}: {key!r} must be a number from 1 to {most}.")
    return value


def _texts(path: Path, document: Mapping[str, object], key: str) -> frozenset[str]:
    value = document.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise Unreadable(f"{path}: {key!r} must be a list of strings.")
    return frozenset(value)


def _settings(path: Path, value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise Unreadable(f"{path}: settings must be an object of strings.")
    return value
