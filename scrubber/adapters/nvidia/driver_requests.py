"""How the driver's children are asked about a device, and how their answers are read.

Every question about a GPU or one of its instances goes under one key, the GPU's: a call that hangs, hangs for all of its
instances, and they should cost the node one killed child between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scrubber.adapters.children.message import Message
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.domain.device import Device
from scrubber.domain.errors import Unreadable

__all__ = [
    "DRIVER_MODULE",
    "count",
    "counts",
    "device_request",
    "driver_arguments",
    "gpu_uuid",
    "objects",
    "optional_count",
    "optional_text",
    "pci_address_of",
    "text",
    "texts",
]

DRIVER_MODULE = "scrubber.adapters.nvidia.driver"


def driver_arguments(paths: DriverPaths) -> tuple[str, ...]:
    """What a child of :data:`DRIVER_MODULE` is started with, beside ``paths.environment()``."""
    return str(paths.proc_driver), str(paths.pci_devices)


def gpu_uuid(device: Device) -> str:
    """UUID of the GPU that ``device`` is, or is cut from: the key under which a pool is asked about it."""
    return device.parent or device.id


def pci_address_of(device: Device) -> str:
    """Its GPU's address on the PCI bus, as sysfs writes it.

    Raises:
        Unreadable: it is no device of ours.
    """
    address = dict(device.traits).get("pci_address")
    if address is None:
        raise Unreadable(f"Device {device.index} has no PCI address, so the driver cannot be asked about it.")
    return address


def device_request(device: Device, name: str, **more: object) -> Message:
    """The question ``name`` about ``device``, for a pool of :data:`DRIVER_MODULE` under the key :func:`gpu_uuid`."""
    return {
        "ask": name,
        "pci": pci_address_of(device),
        "gpu": gpu_uuid(device),
        "instance": device.id if device.parent is not None else None,
        **more,
    }


def text(answer: Mapping[str, object], key: str) -> str:
    """The text under ``key``.

    Raises:
        Unreadable: there is none. So for all that follow.
    """
    found = answer.get(key)
    if not isinstance(found, str) or not found:
        raise _malformed(key, "is no text")
    return found


def optional_text(answer: Mapping[str, object], key: str) -> str | None:
    """The text under ``key``; None where it does not apply."""
    return None if answer.get(key) is None else text(answer, key)


def count(answer: Mapping[str, object], key: str) -> int:
    found = answer.get(key)
    if not isinstance(found, int) or isinstance(found, bool):
        raise _malformed(key, "is no number")
    return found


def optional_count(answer: Mapping[str, object], key: str) -> int | None:
    """The number under ``key``; None where it does not apply."""
    return None if answer.get(key) is None else count(answer, key)


def texts(answer: Mapping[str, object], key: str) -> dict[str, str]:
    found = answer.get(key)
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise _malformed(key, "is no object of texts")
    return found


def counts(answer: Mapping[str, object], key: str) -> dict[str, int]:
    found = answer.get(key)
    if not isinstance(found, dict) or not all(type(each) is int for each in found.values()):
        raise _malformed(key, "is no object of numbers")
    return found


def objects(answer: Mapping[str, object], key: str) -> Sequence[Mapping[str, object]]:
    """The list of objects under ``key``."""
    found = answer.get(key)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise _malformed(key, "is no list of objects")
    return found


def _malformed(key: str, what: str) -> Unreadable:
    return Unreadable(f"The driver's answer makes no sense: {key!r} {what}.")
