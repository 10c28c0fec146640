"""Devices: a whole GPU or an instance of one, and how a container accesses it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from scrubber.domain.errors import InvalidRequest

__all__ = ["Access", "AccessKind", "Device", "NodeIdentity", "SharedResource", "find_device"]


_LOCATION_TRAITS = ("pci_address", "minor", "device_number", "gpu_instance", "compute_instance")
"""The traits that locate a device; holders, containers and resets rely on them."""


class AccessKind(StrEnum):
    """How a container gets access to a device; the inventory of a backend sets it for each device."""

    MOUNT = "mount"
    """A bind mount, read-write."""
    DEVICE_NODE = "node"
    """A device node, with permission to read and write it."""
    ENVIRONMENT = "environment"
    """An environment variable, which names a device and isolates nothing.

    ``container_path`` is the name of the variable, ``host_path`` its value.
    """
    CDI = "cdi"
    """A device in a CDI specification of the vendor: ``host_path`` is its qualified name (``amd.com/gpu=0``)."""


@dataclass(frozen=True, slots=True)
class Access:
    """One means of access for a container; :class:`AccessKind` defines the meaning of the two paths."""

    kind: AccessKind
    host_path: str
    container_path: str


@dataclass(frozen=True, slots=True)
class SharedResource:
    """Something that the erasers of several devices share, such as the host's memory.

    Attributes:
        name: unique on the node; backends whose devices share the same thing give it the same name.
        slots: erasers that may work at once; more would only slow each other down.
    """

    name: str
    slots: int


@dataclass(frozen=True, slots=True)
class Device:
    """A device as the driver describes it. While it exists, only its peers and some traits change.

    Attributes:
        id: the UUID from the driver.
        index: ``"0"`` for a whole GPU, ``"0:1"`` for instance 1 of GPU 0.
        memory_bytes: all memory, including the part that the driver reserves for itself.
        parent: ID of the GPU that an instance is part of. The parent of instances is not advertised itself.
        profile: the kind of instance, in the driver's terms (``1g.10gb``); None for a whole GPU, unless its driver names
            a kind for that too (``spx_nps1``).
        numa_node: None when the platform does not report it.
        peers: IDs of devices joined by a fast link.
        access: what a container needs to use it.
        driver: version of the device's own driver, on a node with several drivers; empty: the driver version of the
            node.
        backend: name of its backend, on a node with several; otherwise empty.
        claimed_by: who claims what is known about it, where this service cannot measure it: ``command sha256:…``;
            empty: the service measures it.
        shared_resource: what its eraser shares with those of other devices; None: the device has memory of its own.
        traits: other facts from the driver: ``pci_address``, ``vbios``, ``architecture``, …
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
    backend: str = ""
    claimed_by: str = ""
    shared_resource: SharedResource | None = None
    traits: tuple[tuple[str, str], ...] = ()

    def has_same_location(self, other: Device) -> bool:
        """Whether both devices are in the same location: same address, device nodes, parent, size and driver."""
        mine, other_traits = dict(self.traits), dict(other.traits)
        moved = [name for name in _LOCATION_TRAITS if mine.get(name) != other_traits.get(name)]
        return not moved and (self.parent, self.memory_bytes, self.driver) == (
            other.parent,
            other.memory_bytes,
            other.driver,
        )


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """The scope of a certificate: a proof does not outlive a boot or a driver version."""

    node: str
    boot: str
    driver: str

    def for_device(self, device: Device) -> NodeIdentity:
        """Return the scope of a certificate of ``device``."""
        return replace(self, driver=device.driver) if device.driver else self


def find_device(devices: Iterable[Device], query: str) -> Device:
    """Return the one device that ``query`` names: its UUID, a unique prefix of it, or its index.

    Raises:
        InvalidRequest: no device, or more than one, matches.
    """
    everything = sorted(devices, key=lambda device: device.index)
    exact = [each for each in everything if each.id == query] or [each for each in everything if each.index == query]
    if len(exact) == 1:
        return exact[0]
    if exact:
        listed = ", ".join(device.id for device in exact)
        raise InvalidRequest(f"{query!r} is the index of {len(exact)} devices ({listed}); use an id.")
    matches = [device for device in everything if query and device.id.startswith(query)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        listed = ", ".join(device.id for device in matches)
        raise InvalidRequest(f"{query!r} is the prefix of {len(matches)} device ids ({listed}); use a longer one.")
    known = ", ".join(f"{device.index} ({device.id})" for device in everything) or "none"
    raise InvalidRequest(f"No device matches {query!r}; this node has: {known}.")
