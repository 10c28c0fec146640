"""What the kubelet is to see of the devices, in one place from which every stream sends full lists.

Promise: there is no queue that somebody can fail to read. A slow stream skips versions and always sends the newest,
and the version grows only when something that is sent has changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from plugin.injection import has_nvidia_node
from scrubber.domain.device import Access

__all__ = ["AdvertisedDevice", "AdvertisedDevices", "ServiceVerdict", "by_index"]


class ServiceVerdict(StrEnum):
    """The last thing that a service which was ready said about a device."""

    OFFERED = "offered"
    WITHHELD = "withheld"
    """Quarantined, or gone from the node: the device's ``refusal`` says which."""
    NONE = "none"
    """No service was ready since this plugin saw the device first."""


@dataclass(frozen=True, slots=True)
class AdvertisedDevice:
    """A device as the kubelet is to see it: the one shape between the service's snapshot and the kubelet's list.

    Attributes:
        certified, scrubbing: clean with a certificate that is not used up; being scrubbed. Hints for the order of
            preference.
        parent: id of the GPU that an instance is cut from; empty for a whole GPU.
        profile: what kind of instance it is, in the driver's words; empty for a whole GPU.
        pci_address: of its GPU for an instance; empty where there is none.
        refusal: a sentence for a pod's status; empty while the device is offered.
        gone: it is no longer on this node, and is listed only because it once was.
        share_of: of one of several shares of a device, that device's id; empty for the device itself.
    """

    id: str
    index: str
    verdict: ServiceVerdict
    healthy: bool = False
    certified: bool = False
    scrubbing: bool = False
    numa_node: int | None = None
    peers: frozenset[str] = frozenset()
    parent: str = ""
    profile: str = ""
    pci_address: str = ""
    access: tuple[Access, ...] = ()
    refusal: str = ""
    gone: bool = False
    share_of: str = ""

    @property
    def device_id(self) -> str:
        """The id of the device that this is, or is a share of."""
        return self.share_of or self.id

    @property
    def nvidia(self) -> bool:
        """Whether NVIDIA's flags say how containers are given it: it has a device node of NVIDIA's driver."""
        return has_nvidia_node(self.access)

    def withheld(self, refusal: str) -> AdvertisedDevice:
        """The same device, out of service for the reason in ``refusal``; one that is so already keeps its own."""
        if self.verdict is ServiceVerdict.WITHHELD:
            return self
        return replace(
            self,
            verdict=ServiceVerdict.WITHHELD,
            healthy=False,
            certified=False,
            scrubbing=False,
            refusal=refusal,
        )


def by_index(device: AdvertisedDevice) -> tuple[list[tuple[int, str]], str]:
    """``"2"`` before ``"10"``, ``"0:1"`` after ``"0"``; the id settles what is left."""
    return [(int(part) if part.isdecimal() else -1, part) for part in device.index.split(":")], device.id


class AdvertisedDevices:
    """The devices, their version, and a bell that rings at every change.

    Attributes:
        version: 0 until the first snapshot of the service has come.
        epoch: which run of the service is heard at present; empty while it is away.
    """

    def __init__(self) -> None:
        self.version = 0
        self.epoch = ""
        self._devices: dict[str, AdvertisedDevice] = {}
        self._bell = asyncio.Condition()

    @property
    def devices(self) -> tuple[AdvertisedDevice, ...]:
        return tuple(self._devices.values())

    @property
    def health(self) -> tuple[bool, ...]:
        """Whether each id of the list is healthy, as the kubelet is told."""
        return tuple(device.healthy for device in self._devices.values())

    def find(self, id_: str) -> AdvertisedDevice | None:
        return self._devices.get(id_)

    async def show(self, devices: tuple[AdvertisedDevice, ...], epoch: str) -> None:
        """Replace everything; the version grows when something in the kubelet's list is different."""
        before = (self.epoch, self._sent())
        self._devices = {device.id: device for device in devices}
        self.epoch = epoch
        now = (epoch, self._sent())
        if self.version == 0 or before[1] != now[1]:
            self.version += 1
        if before != now or self.version == 1:
            await self.ring()

    def _sent(self) -> list[tuple[str, bool, int | None]]:
        """What of the devices is sent to the kubelet: id, health and NUMA node."""
        return [(device.id, device.healthy, device.numa_node) for device in self._devices.values()]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds; it is looked at again at every change and every :meth:`ring`."""
        async with self._bell:
            await self._bell.wait_for(condition)

    async def ring(self) -> None:
        """Have everybody who waits look again."""
        async with self._bell:
            self._bell.notify_all()
