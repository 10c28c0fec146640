"""What is published of a device: the service's verdict on it as the scheduler should see it. Pure, but for sysfs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from plugin.cluster.taint import TaintEffect
from plugin.dra.slices import DeviceTaint, Readiness, SliceDevice
from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict
from scrubber.domain.states import BindingState

__all__ = ["device_taints", "pcie_root", "slice_devices"]

_PCI_ROOT = re.compile("pci[0-9a-f]{4}:[0-9a-f]{2}")
_PCI_ADDRESS = re.compile("[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}[.][0-7]")

OUT_OF_SERVICE, HELD, SERVICE_AWAY = "out-of-service", "held", "service-away"
"""Reasons of taints where the service states no cause."""


def slice_devices(devices: Iterable[AdvertisedDevice], *, sysfs: Path = Path("/sys")) -> tuple[SliceDevice, ...]:
    """Return the devices to publish. A device that is gone from the node is not published.

    A device that may not be handed over has a taint, so that no pod waits for it. The service decides about taints, but for
    those that mean that it is away, or that this driver does not know how to pass the device to a container.
    """
    return tuple(
        SliceDevice(
            id=device.id,
            index=device.index,
            readiness=_readiness(device),
            model=device.model,
            memory_bytes=device.memory_bytes,
            driver_version=device.driver_version,
            pci_address=device.pci_address,
            pcie_root=pcie_root(device.pci_address, sysfs),
            numa_node=device.numa_node,
            peers=device.peers,
            parent=device.parent,
            profile=device.profile,
            taints=device_taints(device),
            being_cleaned=device.binding is BindingState.BEING_CLEANED,
        )
        for device in devices
        if not device.gone
    )


def _readiness(device: AdvertisedDevice) -> Readiness:
    if not device.healthy:
        return Readiness.WITHHELD
    if device.certified:
        return Readiness.CLEAN
    return Readiness.SCRUBBING if device.scrubbing else Readiness.DIRTY


def device_taints(device: AdvertisedDevice) -> tuple[DeviceTaint, ...]:
    """Return why the scheduler should not choose the device; nothing for one that may be handed over."""
    found = tuple(
        DeviceTaint(each.reason, TaintEffect.NO_EXECUTE if each.evicts else TaintEffect.NO_SCHEDULE)
        for each in device.taints
    )
    if device.healthy:
        return found
    if device.verdict in (ServiceVerdict.ADVERTISED, ServiceVerdict.UNKNOWN):
        return (*found, DeviceTaint(SERVICE_AWAY))
    return found or (DeviceTaint(OUT_OF_SERVICE if device.verdict is ServiceVerdict.WITHHELD else HELD),)


def pcie_root(pci_address: str, sysfs: Path) -> str:
    """Return the PCIe root complex of a device, ``pci0000:3a``; empty where it is unknown."""
    address = pci_address.lower()
    if not _PCI_ADDRESS.fullmatch(address):
        return ""
    try:
        parts = (sysfs / "bus/pci/devices" / address).resolve(strict=True).parts
    except OSError:
        return ""
    return next((part for part in parts if _PCI_ROOT.fullmatch(part)), "")
