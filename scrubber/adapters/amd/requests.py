"""How requests about a GPU are made to the driver's children.

Requests about partitions use the key of their GPU: a file that blocks does so for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from scrubber.adapters.amd.kernel_files import AmdPaths
from scrubber.adapters.children.driver_response import is_count, malformed
from scrubber.adapters.children.message import Message
from scrubber.domain.device import Device
from scrubber.domain.errors import Unreadable

__all__ = [
    "DRIVER_MODULE",
    "Trait",
    "device_request",
    "driver_arguments",
    "pci_address",
    "process_memory",
    "trait",
]

DRIVER_MODULE = "scrubber.adapters.amd.driver"


class Trait:
    """Names of the traits of a device that this backend relies on."""

    PCI = "pci_address"
    UNIQUE_ID = "unique_id"
    KFD_ID = "kfd_id"
    ARCHITECTURE = "architecture"
    COMPUTE_UNITS = "compute_units"
    POSITION = "runtime_position"
    PARTITION = "partition"
    HIVE = "hive"
    NUMBER = "device_number"
    CARD_NUMBER = "card_number"
    KFD_NUMBER = "kfd_number"
    MEMORY_MODE = "memory_partition"
    COMPUTE_MODE = "compute_partition"


def driver_arguments(paths: AmdPaths) -> tuple[str, ...]:
    """Return the arguments of a child of :data:`DRIVER_MODULE`."""
    return str(paths.root), str(paths.proc)


def trait(device: Device, name: str) -> str:
    """Return a trait of ``device``.

    Raises:
        Unreadable: it has none: the driver did not describe it completely.
    """
    found = dict(device.traits).get(name)
    if found is None:
        raise Unreadable(f"Device {device.index} was described without {name}, so it cannot be inspected.")
    return found


def pci_address(device: Device) -> str:
    """Return the address of the device's GPU: the key of requests about it in a pool."""
    return trait(device, Trait.PCI)


def device_request(device: Device, name: str, **more: object) -> Message:
    """Build the request ``name`` about ``device``."""
    return {
        "ask": name,
        "pci": pci_address(device),
        "unique_id": dict(device.traits).get(Trait.UNIQUE_ID),
        "gpu_id": int(trait(device, Trait.KFD_ID)),
        "whole": device.parent is None,
        **more,
    }


def process_memory(answer: Mapping[str, object]) -> dict[int, int]:
    """Return bytes by PID from the rows under ``processes``."""
    rows = answer.get("processes")
    if not isinstance(rows, list):
        raise malformed("processes", "is not a list")
    found: dict[int, int] = {}
    for row in rows:
        if not (isinstance(row, list) and len(row) == 2 and all(map(is_count, row))):
            raise malformed("processes", "has a row that is not a PID and a number of bytes")
        found[row[0]] = max(row[1], found.get(row[0], 0))
    return found
