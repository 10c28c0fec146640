"""The list that the kubelet gets for a resource of a vendor's plugin.

Invariants: a device is ``Healthy`` only if the vendor reports exactly that, the service advertises the device, and its
id means one device. A device that the vendor omits stays listed, as unhealthy, until the vendor's plugin registers
again, because the kubelet shows an omitted device as healthy. Nothing else of the vendor's list is changed.

The decision is pure (:func:`build_entries`); :class:`UpstreamDeviceList` holds its result for the streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.kubelet.server import HEALTHY, UNHEALTHY
from plugin.upstream.device_ids import ResolvedId

__all__ = ["UpstreamDeviceList", "UpstreamListEntry", "VendorReport", "build_entries"]


@dataclass(frozen=True, slots=True)
class VendorReport:
    """What a vendor's plugin has reported for one resource, in its latest registration.

    Attributes:
        devices: its last full list.
        dropped: devices of earlier lists of this registration that the last one lacks.
        unusable_reason: why none of its devices can be used now; empty while they can.
    """

    devices: tuple[kubelet.Device, ...] = ()
    dropped: tuple[kubelet.Device, ...] = ()
    unusable_reason: str = ""

    def with_list(self, devices: Sequence[kubelet.Device]) -> VendorReport:
        """Return the report after another full list."""
        now = {device.ID for device in devices}
        earlier = {device.ID: device for device in (*self.dropped, *self.devices)}
        dropped = tuple(device for id_, device in earlier.items() if id_ not in now)
        return replace(self, devices=tuple(devices), dropped=dropped)


@dataclass(frozen=True, slots=True)
class UpstreamListEntry:
    """One device of the list.

    Attributes:
        message: the device as sent to the kubelet.
        resolved: the device of the service that it means.
        device: that device as the service reports it; None when there is none.
        unhealthy_reason: a message on why it is unhealthy; empty while it is healthy.
    """

    message: kubelet.Device
    resolved: ResolvedId
    device: AdvertisedDevice | None
    unhealthy_reason: str

    @property
    def id(self) -> str:
        return self.message.ID


def build_entries(
    report: VendorReport, resolved_ids: Mapping[str, ResolvedId], devices: Mapping[str, AdvertisedDevice]
) -> tuple[UpstreamListEntry, ...]:
    """Return the whole list in the vendor's order, followed by the dropped devices.

    Args:
        resolved_ids: meanings of every id of ``report.devices``.
        devices: the service's devices by id.
    """
    listed = [
        _entry(
            device,
            resolved_ids[device.ID],
            devices,
            _unhealthy_reason(report, device, resolved_ids[device.ID], devices),
        )
        for device in report.devices
    ]
    gone = [
        _entry(
            device,
            ResolvedId(base=device.ID),
            devices,
            f"The vendor's plugin no longer lists device {device.ID}.",
        )
        for device in report.dropped
    ]
    return (*listed, *gone)


def _unhealthy_reason(
    report: VendorReport, device: kubelet.Device, meaning: ResolvedId, offers: Mapping[str, AdvertisedDevice]
) -> str:
    """Return why a device is unhealthy; empty only for a healthy one."""
    if meaning.refusal:
        return meaning.refusal
    if report.unusable_reason:
        return report.unusable_reason
    if device.health != HEALTHY:
        return f"The vendor's plugin reports the health of device {device.ID} as {device.health!r}."
    offer = offers.get(meaning.device)
    if offer is not None and offer.healthy and offer.verdict is ServiceVerdict.ADVERTISED:
        return ""
    if offer is not None and offer.verdict in (ServiceVerdict.WITHHELD, ServiceVerdict.HELD):
        return offer.refusal or f"Device {device.ID} is out of service."
    return f"No ready scrub service has reported device {device.ID}, or its last report is too old."


def _entry(
    device: kubelet.Device, meaning: ResolvedId, offers: Mapping[str, AdvertisedDevice], why: str
) -> UpstreamListEntry:
    sent = kubelet.Device()
    sent.CopyFrom(device)
    if why and sent.health == HEALTHY:
        sent.health = UNHEALTHY
    return UpstreamListEntry(sent, meaning, offers.get(meaning.device), why)


class UpstreamDeviceList(AdvertisedDevices):
    """The list of one resource, for its streams.

    Attributes:
        entries: id → entry, in the order of the list.
    """

    def __init__(self, resource: str) -> None:
        super().__init__()
        self.resource = resource
        self.entries: dict[str, UpstreamListEntry] = {}

    @property
    def health(self) -> tuple[bool, ...]:
        return tuple(device.health == HEALTHY for device in self.messages)

    @property
    def messages(self) -> list[kubelet.Device]:
        """The full list as it is sent."""
        return [entry.message for entry in self.entries.values()]

    async def set_entries(self, entries: Iterable[UpstreamListEntry]) -> None:
        """Replace all entries; the version grows when something in the kubelet's list is different."""
        before = self.messages
        self.entries = {entry.id: entry for entry in entries}
        if self.version == 0 or self.messages != before:
            self.version += 1
            await self.notify()
