"""Maps the node's devices to the resources of the vendors' plugins.

Invariants: every list is rebuilt whenever one of its three inputs changes: the vendor's list, the service's devices,
and the timeouts of either when it is silent. The service learns what the ids of a list mean before the list becomes
visible. An id that was once shown as one device is never handed over as another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from pathlib import PurePosixPath
from typing import Any, NoReturn

from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices
from plugin.logs import Logger
from plugin.resource_mapping import PublishMapping
from plugin.upstream.allocate_response import DevicePaths
from plugin.upstream.device_ids import DeviceIds, DeviceNames, ResolvedId, refuse_if_changed, resolve_lists
from plugin.upstream.device_list import UpstreamListEntry, build_entries
from plugin.upstream.resource import UpstreamResource, UpstreamResourceTimes
from plugin.upstream.vendor import MAX_DEVICES, VendorPlugin
from scrubber.domain.device import AccessKind
from scrubber.domain.errors import Unavailable

__all__ = ["UpstreamDevices", "device_names"]


def device_names(device: AdvertisedDevice) -> DeviceNames:
    """Return the names of a device of the service."""
    return DeviceNames(
        id=device.id,
        index=device.index,
        parent=device.parent,
        pci=device.pci_address,
        nodes=frozenset(PurePosixPath(access.container_path).name for access in device.access),
    )


class UpstreamDevices(AdvertisedDevices):
    """The service's devices, and a list for each resource that a vendor's plugin has registered.

    Args:
        publish_mapping: called with the meaning of a resource's ids, including ids of containers that its plugin no
            longer lists.

    Attributes:
        lists: resource → its list, once both the vendor and the service have reported; a list is never removed.
        upstreams: resource → the plugin behind it.
        device_ids: the devices of the service, by every name.
        error: always empty: the vendors decide which devices their resources contain.
    """

    def __init__(
        self, *, publish_mapping: PublishMapping, times: UpstreamResourceTimes, log: Logger, clock: Callable[[], float]
    ) -> None:
        super().__init__()
        self.lists: dict[str, AdvertisedDevices] = {}
        self.upstreams: dict[str, UpstreamResource] = {}
        self.device_ids = DeviceIds(())
        self.device_paths = DevicePaths({}, self.device_ids)
        self.error = ""
        self._publish_mapping = publish_mapping
        self._known_ids: dict[str, dict[str, str]] = {}
        self._times = times
        self._log = log
        self._clock = clock
        self._rebuild_lock = asyncio.Lock()
        self._lists_changed = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> NoReturn:
        """Follow the registered plugins, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                while True:
                    self._lists_changed.clear()
                    try:
                        async with asyncio.timeout(self._seconds_until_change()):
                            await self._lists_changed.wait()
                    except TimeoutError:
                        await self._rebuild_lists()
        finally:
            self._tasks = None

    async def update(self, devices: tuple[AdvertisedDevice, ...], epoch: str) -> None:
        await super().update(devices, epoch)
        await self._rebuild_lists()

    async def add_vendor(self, vendor: VendorPlugin) -> None:
        """Add a plugin that has registered and was dialled.

        Raises:
            Unavailable: :meth:`run` is not active.
        """
        upstream = self.upstreams.get(vendor.resource)
        if upstream is None:
            upstream = UpstreamResource(vendor.resource, self._times, self._log, self._clock, self._rebuild_lists)
            self.upstreams[vendor.resource] = upstream
        await upstream.attach(vendor, self._spawn)

    def missing_resources(self) -> dict[str, float]:
        """Return resource → since when its plugin is away, for plugins that may not know it and could come back."""
        return {
            resource: each.vendor_state.disconnected_since
            for resource, each in self.upstreams.items()
            if each.vendor_state.disconnected_since is not None and not each.vendor_state.invalid_reason
        }

    def _spawn(self, following: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        if self._tasks is None:
            following.close()
            raise Unavailable("The plugin is stopping.")
        return self._tasks.create_task(following, name="vendor's list")

    def _seconds_until_change(self) -> float | None:
        now = self._clock()
        left = [each.vendor_state.seconds_until_change(now) for each in self.upstreams.values()]
        return min((seconds for seconds in left if seconds is not None), default=None)

    async def _rebuild_lists(self) -> None:
        """Rebuild every list; does nothing before the service's first snapshot."""
        if self.version == 0:
            return
        async with self._rebuild_lock:
            offers = {offer.id: offer for offer in self.devices}
            present = tuple(offer for offer in self.devices if not offer.gone)
            self.device_ids = DeviceIds(tuple(device_names(offer) for offer in present))
            self.device_paths = DevicePaths({offer.id: _paths(offer) for offer in present}, self.device_ids)
            reporting = [each for each in self.upstreams.values() if each.report is not None]
            meanings = resolve_lists(
                self.device_ids,
                {each.resource: [device.ID for device in each.current_report.devices] for each in reporting},
                away={each.resource for each in reporting if not each.vendor_state.is_present},
            )
            kept = {each.resource: self._stable_ids(each.resource, meanings[each.resource]) for each in reporting}
            await asyncio.gather(*(self._publish(each.resource) for each in reporting))
            for each in reporting:
                await self._update_list(each, build_entries(each.current_report, kept[each.resource], offers))
            new = [each for each in reporting if each.resource not in self.lists]
            self.lists.update({each.resource: each.device_list for each in new})
        self._lists_changed.set()
        if new:
            await self.notify()

    async def _update_list(self, upstream: UpstreamResource, entries: tuple[UpstreamListEntry, ...]) -> None:
        before = {id_: entry.unhealthy_reason for id_, entry in upstream.device_list.entries.items()}
        await upstream.device_list.set_entries(entries)
        for entry in entries:
            if before.get(entry.id) == entry.unhealthy_reason:
                continue
            if entry.resolved.refusal:
                self._log.error(
                    "upstream.device-refused",
                    resource=upstream.resource,
                    device=entry.id,
                    message=entry.unhealthy_reason,
                )
            elif entry.unhealthy_reason:
                self._log.info(
                    "upstream.device-unhealthy",
                    resource=upstream.resource,
                    device=entry.id,
                    message=entry.unhealthy_reason,
                )
            else:
                self._log.info("upstream.device-healthy", resource=upstream.resource, device=entry.id)

    def _stable_ids(self, resource: str, meanings: Mapping[str, ResolvedId]) -> dict[str, ResolvedId]:
        """Return the meanings; an id whose meaning differs from its first one is refused."""
        meant = self._known_ids.setdefault(resource, {})
        kept = {id_: refuse_if_changed(id_, each, meant.get(id_, "")) for id_, each in meanings.items()}
        meant.update({id_: each.device for id_, each in kept.items() if each.device})
        for id_ in [each for each in meant if each not in kept][: max(len(meant) - MAX_DEVICES, 0)]:
            del meant[id_]
        return kept

    async def _publish(self, resource: str) -> None:
        """Publish every id that ever meant a device: a container may still have one that is no longer listed."""
        await self._publish_mapping(resource, self._known_ids[resource], self.epoch)

    async def ensure_mapped(self, resource: str, ids: Collection[str]) -> None:
        """Publish also those ``ids`` of a starting container that were in no list."""
        new = {id_: self.device_ids.resolve(id_) for id_ in ids if id_ not in self._known_ids[resource]}
        if any(each.device for each in self._stable_ids(resource, new).values()):
            await self._publish(resource)

    def resolve_id(self, resource: str, id_: str) -> ResolvedId:
        """Return the device that ``id_`` means, also for an id that its plugin no longer lists."""
        entry = self.upstreams[resource].device_list.entries.get(id_)
        if entry is not None and (entry.resolved.device or entry.resolved.refusal):
            return entry.resolved
        return refuse_if_changed(id_, self.device_ids.resolve(id_), self._known_ids.get(resource, {}).get(id_, ""))


def _paths(offer: AdvertisedDevice) -> frozenset[str]:
    """Return the files by which a container reaches the device; other kinds of access name no file."""
    files = (each for each in offer.access if each.kind in (AccessKind.MOUNT, AccessKind.DEVICE_NODE))
    return frozenset(path for each in files for path in (each.host_path, each.container_path))
