"""What a device is: a whole GPU or an instance of one, and how a container reaches it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from scrubber.domain.errors import InvalidRequest

__all__ = ["Access", "AccessKind", "Device", "NodeIdentity", "find_device"]


_LOCATION_TRAITS = ("pci_address", "minor", "device_number", "gpu_instance", "compute_instance")
"""The traits that say where a device is; holders, containers and resets go by them."""


class AccessKind(StrEnum):
    """What a container is given so that it can use a device; the inventory of a backend says it of each device."""

    MOUNT = "mount"
    """A bind mount, read-write."""
    DEVICE_NODE = "node"
    """A device node, with leave to read and write it."""
    ENVIRONMENT = "environment"
    """A variable: its name is the ``container_path``, its value the ``host_path``. Names a device; isolates nothing."""
    CDI = "cdi"
    """A device in a CDI specification of the vendor's: its qualified name (``amd.com/gpu=0``) is the ``host_path``."""


@dataclass(frozen=True, slots=True)
class Access:
    """One thing that a container is given; what the two paths are, :class:`AccessKind` says."""

    kind: AccessKind
    host_path: str
    container_path: str


@dataclass(frozen=True, slots=True)
class Device:
    """A device as the driver describes it. While it is there, nothing in here changes but its peers and some traits.

    Attributes:
        id: the UUID that the driver gives.
        index: ``"0"`` for a whole GPU, ``"0:1"`` for instance 1 of GPU 0.
        memory_bytes: all memory, the part that the driver keeps for itself included.
        parent: id of the GPU that an instance is cut from. The parent of instances is not handed out itself.
        profile: what kind of instance it is, in the driver's words (``1g.10gb``); None for a whole GPU.
        numa_node: None when the platform does not say.
        peers: ids of devices joined by a fast link.
        access: what a container needs to use it.
        driver: version of the device's own driver, on a node that has several; empty: the node's.
        traits: what else the driver says and people ask for: ``pci_address``, ``vbios``, ``architecture``, …
    """

    id: str
    index: str
    model: str
    memory_bytes: int
    parent: str | None = None
    numa_node: int | None = None
    peers: frozenset[str] = frozenset()
    access: tuple[Access, ...] = ()
    profile: str | None = None
    driver: str = ""
    traits: tuple[tuple[str, str], ...] = ()

    def has_same_location(self, other: Device) -> bool:
        """Whether who looks for this device where ``other`` is finds it: at the same address, behind the same node and driver."""
        mine, theirs = dict(self.traits), dict(other.traits)
        moved = [name for name in _LOCATION_TRAITS if mine.get(name) != theirs.get(name)]
        return not moved and (self.parent, self.memory_bytes, self.driver) == (
            other.parent,
            other.memory_bytes,
            other.driver,
        )


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Where and under what a certificate holds: cleanness does not outlive a boot or a driver."""

    node: str
    boot: str
    driver: str

    def for_device(self, device: Device) -> NodeIdentity:
        """Return where and under what a certificate of ``device`` holds."""
        return replace(self, driver=device.driver) if device.driver else self


def find_device(devices: Iterable[Device], query: str) -> Device:
    """The one device that ``query`` names: its UUID, a unique prefix of it, or its index.

    Raises:
        InvalidRequest: no device, or more than one, answers to the name.
    """
    everything = sorted(devices, key=lambda device: device.index)
    exact = [each for each in everything if each.id == query] or [each for each in everything if each.index == query]
    if len(exact) == 1:
        return exact[0]
    if exact:
        listed = ", ".join(device.id for device in exact)
        raise InvalidRequest(f"{query!r} is the index of {len(exact)} devices ({listed}): write an id.")
    matches = [device for device in everything if query and device.id.startswith(query)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        listed = ", ".join(device.id for device in matches)
        raise InvalidRequest(f"{query!r} is the beginning of {len(matches)} device ids ({listed}): write more of it.")
    known = ", ".join(f"{device.index} ({device.id})" for device in everything) or "none"
    raise InvalidRequest(f"No device is called {query!r}; this node has: {known}.")
