"""GPUs that the kernel knows, read from sysfs and /proc alone: no GPU is attached, and nothing here can hang on one."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scrubber.adapters.kernel_text import fields_in, lines_in, number_in, value_in
from scrubber.adapters.nvidia.driver_paths import DriverPaths

__all__ = ["PciGpu", "fingerprint", "list_gpus", "mig_minors", "numa_node"]

_VENDOR = 0x10DE
_DISPLAY = 0x03
_DRIVER = "nvidia"
_MINOR = re.compile(rb"[0-9]{1,7}")


@dataclass(frozen=True, slots=True)
class PciGpu:
    """One GPU on the PCI bus.

    Attributes:
        address: PCI address as sysfs writes it (``0000:3b:00.0``).
        unusable_reason: message why the driver cannot be queried about this GPU; None when it can.
    """

    address: str
    unusable_reason: str | None = None


def list_gpus(paths: DriverPaths) -> tuple[PciGpu, ...]:
    """Return all NVIDIA GPUs in the order of their addresses, whichever driver is bound to them."""
    named = _entry_names(paths.proc_driver / "gpus")
    addresses = {*named, *(each for each in _entry_names(paths.pci_devices) if _is_gpu(paths.pci_devices / each))}
    return tuple(
        PciGpu(address, _unusable_reason(paths, address, named=address in named))
        for address in sorted(addresses, key=_order)
    )


def numa_node(paths: DriverPaths, address: str) -> int | None:
    """Return the NUMA node that the GPU at ``address`` is attached to.

    Read from sysfs: NVML's ``GetNumaNodeId`` is something else, the node that a coherent GPU's own memory forms.
    """
    try:
        node = int(value_in((paths.pci_devices / address / "numa_node").read_bytes()))
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


def mig_minors(paths: DriverPaths) -> Mapping[str, int]:
    """Return the minor numbers of the capability nodes by name (``gpu0/gi1/ci0/access``); empty without MIG."""
    try:
        lines = lines_in(paths.mig_minors.read_bytes())
    except OSError:
        return {}
    rows = (fields_in(line) for line in lines)
    return {os.fsdecode(row[0]): number_in(row[1]) for row in rows if len(row) == 2 and _MINOR.fullmatch(row[1])}


def fingerprint(paths: DriverPaths) -> str:
    """Return a text that changes when a GPU or instance appears or disappears, or its driver changes or is reloaded."""
    digest = hashlib.sha256()
    for line in _fingerprint_lines(paths):
        digest.update(os.fsencode(line) + b"\n")
    return digest.hexdigest()


def _fingerprint_lines(places: DriverPaths) -> Iterator[str]:
    version = places.proc_driver / "version"
    yield f"driver {_inode(version.parent)} {os.fsdecode(_read(version))}"
    for gpu in list_gpus(places):
        place = places.pci_devices / gpu.address
        yield f"gpu {gpu.address} {_inode(place)} {_driver_of(place)} {gpu.unusable_reason}"
    capabilities = places.proc_driver / "capabilities"
    yield from sorted(str(path.relative_to(capabilities)) for path in capabilities.glob("gpu*/mig/gi*"))
    yield from sorted(str(path.relative_to(capabilities)) for path in capabilities.glob("gpu*/mig/gi*/ci*"))
    yield os.fsdecode(_read(places.mig_minors))


def _unusable_reason(places: DriverPaths, address: str, *, named: bool) -> str | None:
    driver = _driver_of(places.pci_devices / address)
    if driver is not None and driver != _DRIVER:
        return f"The GPU at {address} is bound to {driver}: it is passed through and is not advertised."
    if not named and driver is None:
        return f"No driver is bound to the GPU at {address}."
    if _excluded(places.proc_driver / "gpus" / address / "information"):
        return f"The GPU at {address} is excluded by an option of the nvidia module (NVreg_ExcludedGpus)."
    return None


def _excluded(information: Path) -> bool:
    rows = (line.partition(b":") for line in lines_in(_read(information)))
    return any(
        fields_in(name) == [b"GPU", b"Excluded"] and fields_in(value.lower()) == [b"yes"] for name, _, value in rows
    )


def _is_gpu(place: Path) -> bool:
    """Whether this is an NVIDIA display controller; the GPU's audio and USB functions have other classes."""
    try:
        vendor, kind = (int(value_in((place / each).read_bytes()), 16) for each in ("vendor", "class"))
    except (OSError, ValueError):
        return False
    return vendor == _VENDOR and kind >> 16 == _DISPLAY


def _driver_of(place: Path) -> str | None:
    try:
        return (place / "driver").readlink().name
    except OSError:
        return None


def _entry_names(directory: Path) -> frozenset[str]:
    try:
        return frozenset(path.name for path in directory.iterdir())
    except OSError:
        return frozenset()


def _order(address: str) -> tuple[int, ...]:
    """Sort key: domain, bus, device, function, which is the order in which NVML counts."""
    try:
        return tuple(int(part, 16) for part in address.replace(".", ":").split(":"))
    except ValueError:
        return ()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
