"""How requests about a device are made to the driver's children, and how the replies are parsed.

Every request about a GPU or one of its instances uses one key, the GPU's: a call that hangs does so for all of its
instances, and together they should cost the node only one killed child.
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
    """Return the arguments of a child of :data:`DRIVER_MODULE`; it also needs ``paths.environment()``."""
    return str(paths.proc_driver), str(paths.pci_devices)


def gpu_uuid(device: Device) -> str:
    """Return the UUID of the GPU that ``device`` is or belongs to: the key of requests about it in a pool."""
    return device.parent or device.id


def pci_address_of(device: Device) -> str:
    """Return the address of the device's GPU on the PCI bus, as sysfs writes it.

    Raises:
        Unreadable: the device is not one of this backend.
    """
    address = dict(device.traits).get("pci_address")
    if address is None:
        raise Unreadable(f"Device {device.index} has no PCI address, so the driver cannot be queried about it.")
    return address


def device_request(device: Device, name: str, **more: object) -> Message:
    """Build the request ``name`` about ``device``, for a pool of :data:`DRIVER_MODULE` with key :func:`gpu_uuid`."""
    return {
        "ask": name,
        "pci": pci_address_of(device),
        "gpu": gpu_uuid(device),
        "instance": device.id if device.parent is not None else None,
        **more,
    }


def text(answer: Mapping[str, object], key: str) -> str:
    """Return the text under ``key``.

    Raises:
        Unreadable: there is none. This holds for all functions that follow.
    """
    found = answer.get(key)
    if not isinstance(found, str) or not found:
        raise _malformed(key, "is not a string")
    return found


def optional_text(answer: Mapping[str, object], key: str) -> str | None:
    """Return the text under ``key``; None where it does not apply."""
    return None if answer.get(key) is None else text(answer, key)


def count(answer: Mapping[str, object], key: str) -> int:
    found = answer.get(key)
    if not isinstance(found, int) or isinstance(found, bool):
        raise _malformed(key, "is not a number")
    return found


def optional_count(answer: Mapping[str, object], key: str) -> int | None:
    """Return the number under ``key``; None where it does not apply."""
    return None if answer.get(key) is None else count(answer, key)


def texts(answer: Mapping[str, object], key: str) -> dict[str, str]:
    found = answer.get(key)
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise _malformed(key, "is not an object of strings")
    return found


def counts(answer: Mapping[str, object], key: str) -> dict[str, int]:
    found = answer.get(key)
    if not isinstance(found, dict) or not all(type(each) is int for each in found.values()):
        raise _malformed(key, "is not an object of numbers")
    return found


def objects(answer: Mapping[str, object], key: str) -> Sequence[Mapping[str, object]]:
    """Return the list of objects under ``key``."""
    found = answer.get(key)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise _malformed(key, "is not a list of objects")
    return found


def _malformed(key: str, what: str) -> Unreadable:
    return Unreadable(f"The driver's response is invalid: {key!r} {what}.")
