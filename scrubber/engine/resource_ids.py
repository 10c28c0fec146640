"""Maps the kubelet's resources and IDs to devices, based on the plugins' announcements and on requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from scrubber.domain.errors import InvalidRequest
from scrubber.domain.handover_kind import Basis
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.resource_mapping import MAX_NAME_LENGTH, MAX_RESOURCES, MappedDevice, ResourceMappings

__all__ = ["ANNOUNCEMENT_SECONDS", "Announcer", "ResourceIds"]

ANNOUNCEMENT_SECONDS = 30.0
"""How long a plugin's announcement keeps devices from claims after the plugin has ended: a restarted one is back by then."""


class Announcer:
    """One run of a plugin that announces its IDs, by the streams with which it follows the service.

    Args:
        monotonic: returns the current time, in seconds.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._streams = 0
        self._ended_at = monotonic()

    @contextmanager
    def following(self) -> Iterator[None]:
        """The plugin follows the service while the body runs."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1
            self._ended_at = self._monotonic()

    @property
    def is_following(self) -> bool:
        return self._streams > 0

    @property
    def is_gone(self) -> bool:
        """Whether the plugin has not followed the service for :data:`ANNOUNCEMENT_SECONDS`."""
        return not self.is_following and self._monotonic() - self._ended_at >= ANNOUNCEMENT_SECONDS


class ResourceIds:
    """The kubelet's device IDs on one node."""

    def __init__(self) -> None:
        self._mappings = ResourceMappings()
        self._named: dict[str, set[str]] = {}
        self._by_device: dict[str, frozenset[str]] | None = None
        self._announcers: dict[str, frozenset[Announcer]] = {}

    def announce(
        self,
        resource: str,
        mapping: Mapping[str, str],
        own_devices: Collection[str],
        announcer: Announcer | None = None,
    ) -> None:
        """Replace the mapping of the IDs of ``resource``.

        Args:
            own_devices: the IDs of the managed devices.
            announcer: the plugin; None: one whose end cannot be noticed.
        """
        self._mappings = self._mappings.with_mapping(resource, mapping, own_devices)
        self._by_device = None
        if announcer is None:
            self._announcers.pop(resource, None)
        else:
            known = self._announcers.get(resource, frozenset())
            self._announcers[resource] = frozenset({announcer, *(each for each in known if not each.is_gone)})

    def resolve_one(self, resource: str, kubelet_id: str, own_devices: Collection[str]) -> MappedDevice | None:
        """Return the managed device behind ``kubelet_id`` of ``resource``, and whether it is a share; else None."""
        return self._mappings.resolve(resource, kubelet_id, own_devices)

    def resolve(
        self, resource: str, ids: Sequence[str], own_devices: Collection[str]
    ) -> dict[str, dict[str, MappedDevice]]:
        """Return the meaning of each of ``ids`` of ``resource``, by device, in the order of the devices' IDs.

        Raises:
            InvalidRequest: unknown, duplicate or no IDs, or a whole device together with a share of it.
        """
        if not ids:
            raise InvalidRequest("The request names no device.")
        if len(set(ids)) != len(ids):
            raise InvalidRequest("The request names a device twice.")
        meanings = {id_: self._mappings.resolve(resource, id_, own_devices) for id_ in ids}
        unknown = sorted(id_ for id_, meaning in meanings.items() if meaning is None)
        if unknown:
            raise InvalidRequest(f"This node has no device {', '.join(unknown)}.")
        found: dict[str, dict[str, MappedDevice]] = {}
        for id_, meaning in meanings.items():
            if meaning is not None:
                found.setdefault(meaning.device, {})[id_] = meaning
        if any(len(each) > 1 and not all(one.is_share for one in each.values()) for each in found.values()):
            raise InvalidRequest("The request names a device twice.")
        self._note_named(resource, found.keys())
        return dict(sorted(found.items()))

    def _note_named(self, resource: str, devices: Collection[str]) -> None:
        if 0 < len(resource) <= MAX_NAME_LENGTH and (resource in self._named or len(self._named) < MAX_RESOURCES):
            known = self._named.setdefault(resource, set())
            if not known.issuperset(devices):
                known.update(devices)
                self._by_device = None

    def own_resources(self, grants: Iterable[Grant]) -> frozenset[str]:
        """Return the resources under which our plugins advertise devices.

        These are the resources that the plugins announced or named, and those of the open ``grants``. Empty while no
        plugin has announced or requested anything.
        """
        given = {
            grant.assignment.resource
            for grant in grants
            if grant.assignment is not None and grant.basis is not Basis.ADOPTED
        }
        return frozenset((self._mappings.resources.keys() | self._named.keys() | given) - {""})

    def plugin_resources(self, device: str) -> frozenset[str]:
        """Return the resources under which device plugins advertise ``device``, by announcement or by request."""
        if self._by_device is None:
            self._by_device = self._resources_by_device()
        return self._by_device.get(device, frozenset()) - {""}

    def advertised_as(self, device: str) -> frozenset[str]:
        """Return the resources under which plugins that have not ended advertise ``device``.

        Only this ends with the plugin. What its IDs mean, and that its resource is ours, stays: its pods may still run.
        """
        return self._still_served(self.plugin_resources(device))

    @property
    def advertised(self) -> frozenset[str]:
        """The resources under which plugins that have not ended advertise any device of the node."""
        if self._by_device is None:
            self._by_device = self._resources_by_device()
        return self._still_served(frozenset().union(*self._by_device.values()) - {""})

    def _still_served(self, resources: frozenset[str]) -> frozenset[str]:
        ended = {each for each, known in self._announcers.items() if all(one.is_gone for one in known)}
        return resources - ended

    def assigners_of(self, record: DeviceRecord, own_resources: frozenset[str]) -> frozenset[str]:
        """Return the names under which the device of ``record`` is rightly assigned: of plugins and DRA drivers of ours.

        A device that a claim has is assigned by that claim's driver only.

        Args:
            own_resources: the resources under which our plugins advertise devices.
        """
        claimed = frozenset(each.claim.driver for each in record.open_grants if each.claim is not None)
        last = record.last_grant
        before = {last.claim.driver} if last is not None and last.claim is not None else set()
        return claimed or own_resources | before

    def resources_of(self, record: DeviceRecord) -> frozenset[str]:
        """Return the resources that advertise the device of ``record``, by a plugin, a request or the record.

        For a device whose last grant was to a claim, the name of the claim's DRA driver: by the grant, because any name can
        be requested.
        """
        found, last = self.plugin_resources(record.device), record.last_grant
        if not found and last is not None and last.claim is not None:
            found = frozenset({last.claim.driver})
        if not found and last is not None and last.assignment is not None and last.basis is not Basis.ADOPTED:
            found = frozenset({last.assignment.resource})
        return found - {""}

    def _resources_by_device(self) -> dict[str, frozenset[str]]:
        """An announcement covers everything that its resource has; requests count only for resources without one."""
        found: dict[str, set[str]] = {}
        for resource, meanings in self._mappings.resources.items():
            for meaning in meanings.values():
                found.setdefault(meaning.device, set()).add(resource)
        for resource, devices in self._named.items():
            for device in devices if resource not in self._mappings.resources else ():
                found.setdefault(device, set()).add(resource)
        return {device: frozenset(resources) for device, resources in found.items()}
