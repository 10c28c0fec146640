"""How requests about a device are made to the driver's children.

Every request about a GPU or one of its instances uses one key, the GPU's: a call that hangs does so for all of its
instances, and together they should cost the node only one killed child.
"""

from __future__ import annotations

from scrubber.adapters.children.message import Message
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.domain.device import Device
from scrubber.domain.errors import Unreadable

__all__ = [
    "DRIVER_MODULE",
    "device_request",
    "driver_arguments",
    "gpu_uuid",
    "pci_address_of",
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
