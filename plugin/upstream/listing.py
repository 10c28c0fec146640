"""What the kubelet is told of a resource that a vendor's plugin lists.

Promises: ``Healthy`` is said only of a device that the vendor calls exactly that, that the service advertises, and
whose id means one device. A device that the vendor leaves out stays listed, as unhealthy, until the vendor's plugin
registers again: the kubelet shows an omitted device as healthy. Nothing else of the vendor's list is changed.

The judgement is pure (:func:`judged`); :class:`Listing` holds it for the streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.server import HEALTHY, UNHEALTHY
from plugin.upstream.names import Meaning

__all__ = ["Entry", "Listing", "Said", "judged"]


@dataclass(frozen=True, slots=True)
class Said:
    """What a vendor's plugin has said of one resource, in its latest registration.

    Attributes:
        devices: its last full list.
        dropped: what earlier lists of this registration had and the last one has not.
        trouble: why none of its devices can be used now; empty while they can.
    """

    devices: tuple[kubelet.Device, ...] = ()
    dropped: tuple[kubelet.Device, ...] = ()
    trouble: str = ""

    def after(self, devices: Sequence[kubelet.Device]) -> Said:
        """What was said once another full list has been heard."""
        now = {device.ID for device in devices}
        earlier = {device.ID: device for device in (*self.dropped, *self.devices)}
        dropped = tuple(device for id_, device in earlier.items() if id_ not in now)
        return replace(self, devices=tuple(devices), dropped=dropped)


@dataclass(frozen=True, slots=True)
class Entry:
    """One device of the list.

    Attributes:
        sent: as the kubelet gets it.
        meaning: which device of the service it is.
        offer: that device as the service shows it; None when there is none.
        why: a sentence on why it is unhealthy; empty while it is not.
    """

    sent: kubelet.Device
    meaning: Meaning
    offer: AdvertisedDevice | None
    why: str

    @property
    def id(self) -> str:
        return self.sent.ID


def judged(said: Said, meanings: Mapping[str, Meaning], offers: Mapping[str, AdvertisedDevice]) -> tuple[Entry, ...]:
    """The whole list, in the vendor's order, what it has dropped last.

    Args:
        meanings: of every id of ``said.devices``.
        offers: the service's devices by id.
    """
    listed = [
        _entry(device, meanings[device.ID], offers, _trouble(said, device, meanings[device.ID], offers))
        for device in said.devices
    ]
    gone = [
        _entry(
            device, Meaning(base=device.ID), offers, f"The vendor's plugin does not list device {device.ID} any more."
        )
        for device in said.dropped
    ]
    return (*listed, *gone)


def _trouble(said: Said, device: kubelet.Device, meaning: Meaning, offers: Mapping[str, AdvertisedDevice]) -> str:
    """Why a device is unhealthy; empty for exactly one that is not."""
    if meaning.refusal:
        return meaning.refusal
    if said.trouble:
        return said.trouble
    if device.health != HEALTHY:
        return f"The vendor's plugin calls device {device.ID} {device.health or 'nothing'!r}."
    offer = offers.get(meaning.device)
    if offer is not None and offer.healthy and offer.verdict is ServiceVerdict.OFFERED:
        return ""
    if offer is not None and offer.verdict is ServiceVerdict.WITHHELD:
        return offer.refusal or f"Device {device.ID} is out of service."
    return f"No scrub service has spoken for device {device.ID}, or none has for too long."


def _entry(device: kubelet.Device, meaning: Meaning, offers: Mapping[str, AdvertisedDevice], why: str) -> Entry:
    sent = kubelet.Device()
    sent.CopyFrom(device)
    if why and sent.health == HEALTHY:
        sent.health = UNHEALTHY
    return Entry(sent, meaning, offers.get(meaning.device), why)


class Listing(AdvertisedDevices):
    """One resource's list, for its streams.

    Attributes:
        entries: id → entry, in the order of the list.
    """

    def __init__(self, resource: str) -> None:
        super().__init__()
        self.resource = resource
        self.entries: dict[str, Entry] = {}

    @property
    def health(self) -> tuple[bool, ...]:
        return tuple(device.health == HEALTHY for device in self.sent)

    @property
    def sent(self) -> list[kubelet.Device]:
        """The full list as it is sent."""
        return [entry.sent for entry in self.entries.values()]

    async def state(self, entries: Iterable[Entry]) -> None:
        """Replace everything; the version grows when something in the kubelet's list is different."""
        before = self.sent
        self.entries = {entry.id: entry for entry in entries}
        if self.version == 0 or self.sent != before:
            self.version += 1
            await self.ring()
