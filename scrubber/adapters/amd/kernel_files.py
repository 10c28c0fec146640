"""The files in which the amdgpu driver describes its GPUs: where they are, and how their text is parsed.

Every read may block while a GPU is being reset, so only child processes read below the directories of a GPU. No path but
:meth:`AmdPaths.error_records` leads to debugfs: reading its file ``amdgpu_gpu_recover`` resets the GPU.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scrubber.adapters.kernel_text import fields_in, lines_in, number_in, value_in

__all__ = [
    "AmdPaths",
    "KfdProcess",
    "TopologyNode",
    "error_counts",
    "fdinfo_memory",
    "kfd_processes",
    "optional_number",
    "optional_text",
    "properties_in",
    "retired_pages",
    "topology_nodes",
]

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_KFD_ENTRY = re.compile(r"(?:pid:)?([0-9]+)(?:-id:[0-9]+)?")
"""``PID``, or ``pid:PID-id:N``: newer drivers have an entry for each context of a process."""
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20}")
_VENDOR, _DISPLAY, _ACCELERATOR = 0x1002, 0x03, 0x12
_KIB = 1024
_VANISHED = frozenset({errno.ENOENT, errno.ESRCH, errno.ENODEV})
"""What the kernel reports for a file of a process that has gone; for one that was open already, ENODEV."""


@dataclass(frozen=True, slots=True)
class AmdPaths:
    """The kernel's directories below ``root``, and the node's processes.

    Attributes:
        proc: ``/proc`` of the node's PID namespace.
    """

    root: Path
    proc: Path = Path("/proc")

    @property
    def module(self) -> Path:
        return self.root / "sys/module/amdgpu"

    @property
    def driver(self) -> Path:
        """The driver's directory on the PCI bus: a link for each GPU, and the files that unbind and bind one."""
        return self.root / "sys/bus/pci/drivers/amdgpu"

    @property
    def kfd(self) -> Path:
        return self.root / "sys/class/kfd/kfd"

    def pci(self, address: str) -> Path:
        """Return the directory of the GPU at ``address``."""
        return self.root / "sys/bus/pci/devices" / address

    def render(self, minor: int) -> Path:
        """Return the directory of a render node in its class."""
        return self.root / "sys/class/drm" / f"renderD{minor}"

    def error_records(self, card: str) -> Path:
        """Return the file with the hardware error records of the GPU whose node is ``card`` (``card1``)."""
        return self.root / "sys/kernel/debug/dri" / card.removeprefix("card") / "amdgpu_ring_cper"

    def cards(self, device: Path) -> tuple[str, ...]:
        """Return the names of the card nodes of a device, given its directory: one, or none."""
        return tuple(sorted(path.name for path in (device / "drm").glob("card*") if path.name[4:].isdigit()))

    def gpu_addresses(self) -> tuple[str, ...]:
        """Return the PCI addresses of all AMD GPUs of the node in bus order, bound to any driver or to none."""
        try:
            names = os.listdir(self.root / "sys/bus/pci/devices")
        except OSError:
            return ()
        return tuple(sorted(name for name in names if _ADDRESS.fullmatch(name) and _is_gpu(self.pci(name))))

    def driver_of(self, address: str) -> str | None:
        """Return the name of the kernel driver that the GPU at ``address`` is bound to; None for none."""
        try:
            return (self.pci(address) / "driver").readlink().name
        except OSError:
            return None


def _is_gpu(place: Path) -> bool:
    vendor, kind = optional_number(place / "vendor"), optional_number(place / "class")
    return vendor == _VENDOR and kind is not None and kind >> 16 in (_DISPLAY, _ACCELERATOR)


def optional_text(path: Path) -> str | None:
    """Return the value of a file with one value; None if the file does not exist or has none.

    Raises:
        OSError: it exists and cannot be read.
    """
    try:
        return value_in(path.read_bytes()) or None
    except FileNotFoundError:
        return None


def optional_number(path: Path) -> int | None:
    """Return the number in a file, decimal or with ``0x``; None if it does not exist or is no number."""
    text = optional_text(path)
    if text is None or not _NUMBER.fullmatch(text):
        return None
    return int(text, 16 if text[1:2] in "xX" else 10)


def properties_in(data: bytes) -> dict[str, int]:
    """Return the numbers in a ``properties`` file of the topology, by name; other lines are left out."""
    rows = (fields_in(line) for line in lines_in(data))
    return {os.fsdecode(row[0]): int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


@dataclass(frozen=True, slots=True)
class TopologyNode:
    """A GPU, or a partition of one, as the compute driver (KFD) lists it.

    Attributes:
        position: its position among the GPUs of the topology, which is how the ROCm runtime counts them.
        gpu_id: the driver's number for it, in the names of files about processes.
        memory_bytes: the memory that programs on it can use.
    """

    position: int
    gpu_id: int
    properties: Mapping[str, int]
    memory_bytes: int

    @property
    def pci_address(self) -> str:
        """Address of its GPU; the lowest three bits of the location number the partitions."""
        location, domain = self.properties.get("location_id", 0), self.properties.get("domain", 0)
        return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.0"

    @property
    def partition(self) -> int:
        return self.properties.get("location_id", 0) & 7

    @property
    def architecture(self) -> str:
        """The instruction set, as compilers name it: ``gfx942`` for version 90402."""
        version = self.properties.get("gfx_target_version", 0)
        return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def topology_nodes(kfd: Path) -> tuple[TopologyNode, ...]:
    """Return the GPUs of the topology in order; processors are left out.

    Raises:
        OSError: the topology cannot be read.
        ValueError: the driver wrote something that is not a number.
    """
    nodes = sorted((path for path in (kfd / "topology/nodes").iterdir() if path.name.isdigit()), key=_number_of)
    found: list[TopologyNode] = []
    for node in nodes:
        gpu_id = number_in(value_in((node / "gpu_id").read_bytes()).encode())
        if gpu_id == 0:
            continue
        banks = sorted((node / "mem_banks").glob("*/properties"))
        memory = sum(properties_in(bank.read_bytes()).get("size_in_bytes", 0) for bank in banks)
        properties = properties_in((node / "properties").read_bytes())
        found.append(TopologyNode(len(found), gpu_id, properties, memory))
    return tuple(found)


def _number_of(path: Path) -> int:
    return int(path.name)


@dataclass(frozen=True, slots=True)
class KfdProcess:
    """A process with a compute context on a GPU, and the bytes of the GPU's memory that it has allocated."""

    pid: int
    vram_bytes: int


def kfd_processes(kfd: Path, gpu_id: int) -> tuple[KfdProcess, ...]:
    """Return the processes that use the GPU ``gpu_id``: those with memory or a queue on it.

    Every process that opens ``/dev/kfd`` has files for all GPUs, so the existence of an entry means nothing.

    Raises:
        OSError: the list cannot be read, or does not exist. The driver creates it when it is loaded, so a missing list does not
            mean that no process uses the GPU. An entry that vanishes meanwhile is of a process that has gone.
    """
    found: dict[int, int] = {}
    for name in os.listdir(kfd / "proc"):
        matched = _KFD_ENTRY.fullmatch(name)
        if matched is None:
            continue
        entry, pid = kfd / "proc" / name, int(matched[1])
        contexts = (entry / each for each in _vanishing_entries(entry) if each.startswith("context_"))
        for context in (entry, *contexts):
            vram = _vanishing_number(context / f"vram_{gpu_id}")
            if vram or _has_queue(context, gpu_id):
                found[pid] = found.get(pid, 0) + vram
    return tuple(KfdProcess(pid, found[pid]) for pid in sorted(found))


def _has_queue(context: Path, gpu_id: int) -> bool:
    queues = context / "queues"
    return any(_vanishing_number(queues / each / "gpuid") == gpu_id for each in _vanishing_entries(queues))


def _vanishing_number(path: Path) -> int:
    """Return the number in a file of a process; 0 once it is gone."""
    try:
        return optional_number(path) or 0
    except OSError as error:
        if error.errno in _VANISHED:
            return 0
        raise


def _vanishing_entries(directory: Path) -> list[str]:
    """Return the names in a directory of a process; none once it is gone.

    ``Path.glob`` would raise if the directory vanished while it is listed, and return nothing if it may not be listed.
    """
    try:
        return os.listdir(directory)
    except OSError as error:
        if error.errno in _VANISHED:
            return []
        raise


def error_counts(directory: Path) -> dict[str, dict[str, int]]:
    """Return the error counters of a GPU: block → kind (``ue`` uncorrected, ``ce`` corrected, ``de`` deferred) → count.

    Raises:
        OSError: a counter cannot be read.
    """
    found: dict[str, dict[str, int]] = {}
    for path in sorted(directory.glob("*_err_count")):
        rows = (line.partition(b":") for line in lines_in(path.read_bytes()))
        counts = {os.fsdecode(name.strip(b" \t")): value.strip(b" \t") for name, _, value in rows}
        found[path.name.removesuffix("_err_count")] = {
            kind: int(value) for kind, value in counts.items() if value.isdigit()
        }
    return found


def retired_pages(path: Path) -> dict[str, int] | None:
    """Return how many bad pages are ``R`` retired, ``P`` pending and ``F`` not retirable; None without a list.

    Raises:
        OSError: the list cannot be read.
    """
    try:
        rows = [line.split(b":") for line in lines_in(path.read_bytes())]
    except FileNotFoundError:
        return None
    kinds = [os.fsdecode(row[2].strip(b" \t")) for row in rows if len(row) == 3]
    return {kind: kinds.count(kind) for kind in ("R", "P", "F")}


def fdinfo_memory(proc: Path, pid: int, numbers: frozenset[int]) -> int:
    """Return the bytes of video memory that ``pid`` has allocated through descriptors of the nodes ``numbers``.

    Descriptors that share a client count once. 0 for a process that has gone or may not be inspected.
    """
    clients: dict[bytes, int] = {}
    for descriptor in _entries(proc / str(pid) / "fd"):
        try:
            if os.stat(proc / str(pid) / "fd" / descriptor).st_rdev not in numbers:
                continue
            lines = lines_in((proc / str(pid) / "fdinfo" / descriptor).read_bytes())
        except OSError:
            continue
        rows = {name: fields_in(value) for name, _, value in (line.partition(b":") for line in lines)}
        client = b" ".join(rows.get(b"drm-client-id", [descriptor.encode()]))
        clients[client] = max(clients.get(client, 0), _bytes_in(rows.get(b"drm-memory-vram", [])))
    return sum(clients.values())


def _bytes_in(words: list[bytes]) -> int:
    if not words or not words[0].isdigit():
        return 0
    return int(words[0]) * {b"KiB": _KIB, b"MiB": _KIB**2}.get(words[-1], 1)


def _entries(directory: Path) -> Iterator[str]:
    try:
        yield from os.listdir(directory)
    except OSError:
        return
