"""How the driver's children are asked about a device, and how their answers are read.

Every question about a GPU or one of its instances goes under one key, the GPU's: a call that hangs, hangs for all of its
instances, and they should cost the node one killed child between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scrubber.adapters.children.message import Message
from scrubber.adapters.nvidia.places import Places
from scrubber.domain.device import Device
from scrubber.domain.errors import Unreadable

__all__ = [
    "DRIVER_MODULE",
    "about",
    "count",
    "counts",
    "driver_arguments",
    "gpu_of",
    "listed",
    "optional_count",
    "optional_text",
    "pci_address_of",
    "text",
    "texts",
]

DRIVER_MODULE = "scrubber.adapters.nvidia.driver"


def driver_arguments(places: Places) -> tuple[str, ...]:
    """What a child of :data:`DRIVER_MODULE` is started with, beside ``places.environment()``."""
    return str(places.proc_driver), str(places.pci_devices)


def gpu_of(device: Device) -> str:
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


def about(device: Device, ask: str, **more: object) -> Message:
    """The question ``ask`` about ``device``, for a pool of :data:`DRIVER_MODULE` under the key :func:`gpu_of`."""
    return {
        "ask": ask,
        "pci": pci_address_of(device),
        "gpu": gpu_of(device),
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
        raise _nonsense(key, "is no text")
    return found


def optional_text(answer: Mapping[str, object], key: str) -> str | None:
    """The text under ``key``; None where it does not apply."""
    return None if answer.get(key) is None else text(answer, key)


def count(answer: Mapping[str, object], key: str) -> int:
    found = answer.get(key)
    if not isinstance(found, int) or isinstance(found, bool):
        raise _nonsense(key, "is no number")
    return found


def optional_count(answer: Mapping[str, object], key: str) -> int | None:
    """The number under ``key``; None where it does not apply."""
    return None if answer.get(key) is None else count(answer, key)


def texts(answer: Mapping[str, object], key: str) -> dict[str, str]:
    found = answer.get(key)
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise _nonsense(key, "is no object of texts")
    return found


def counts(answer: Mapping[str, object], key: str) -> dict[str, int]:
    found = answer.get(key)
    if not isinstance(found, dict) or not all(type(each) is int for each in found.values()):
        raise _nonsense(key, "is no object of numbers")
    return found


def listed(answer: Mapping[str, object], key: str) -> Sequence[Mapping[str, object]]:
    """The list of objects under ``key``."""
    found = answer.get(key)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise _nonsense(key, "is no list of objects")
    return found


def _nonsense(key: str, what: str) -> Unreadable:
    return Unreadable(f"The driver's answer makes no sense: {key!r} {what}.")
