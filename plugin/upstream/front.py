"""The node's devices, dealt out to the resources of the vendors' plugins.

Promise: every list is judged anew whenever one of its three parts changes: what the vendor says, what the service
says, and what the clock says of either that is silent. The service knows what the ids of a list mean before the list is
shown, and an id once shown as one device is never handed out as another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from pathlib import PurePosixPath
from typing import Any, NoReturn

from plugin.announcements import Announce
from plugin.devices import AdvertisedDevice, AdvertisedDevices
from plugin.logs import Log
from plugin.upstream.answers import Reach
from plugin.upstream.listing import Entry, judged
from plugin.upstream.names import Directory, Known, Meaning, claims, steady
from plugin.upstream.upstream import Upstream, UpstreamTimes
from plugin.upstream.vendor import MOST_DEVICES, Vendor
from scrubber.domain.errors import Away

__all__ = ["Front", "known"]


def known(offer: AdvertisedDevice) -> Known:
    """What a device of the service is called."""
    return Known(
        id=offer.id,
        index=offer.index,
        parent=offer.parent,
        pci=offer.pci_address,
        nodes=frozenset(PurePosixPath(access.container_path).name for access in offer.access),
    )


class Front(AdvertisedDevices):
    """What the service says of the node, and a list for each resource that a vendor's plugin has registered.

    Args:
        announce: told what a resource's ids mean, those of containers that its plugin does not list any more included.

    Attributes:
        lists: resource → its list, once the vendor and the service have each spoken; one that is there stays.
        upstreams: resource → who stands behind it.
        directory: the devices of the service, by every name.
        complaint: always empty: the vendors decide what is advertised as what.
    """

    def __init__(self, *, announce: Announce, times: UpstreamTimes, log: Log, clock: Callable[[], float]) -> None:
        super().__init__()
        self.lists: dict[str, AdvertisedDevices] = {}
        self.upstreams: dict[str, Upstream] = {}
        self.directory = Directory(())
        self.reach = Reach({}, self.directory)
        self.complaint = ""
        self._announce = announce
        self._meant: dict[str, dict[str, str]] = {}
        self._times = times
        self._log = log
        self._clock = clock
        self._judging = asyncio.Lock()
        self._news = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> NoReturn:
        """Follow the registered plugins, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                while True:
                    self._news.clear()
                    try:
                        async with asyncio.timeout(self._changes_in()):
                            await self._news.wait()
                    except TimeoutError:
                        await self._judge()
        finally:
            self._tasks = None

    async def show(self, offers: tuple[AdvertisedDevice, ...], epoch: str) -> None:
        await super().show(offers, epoch)
        await self._judge()

    async def admit(self, vendor: Vendor) -> None:
        """A plugin has registered and was dialled.

        Raises:
            Away: nobody follows plugins now.
        """
        upstream = self.upstreams.get(vendor.resource)
        if upstream is None:
            upstream = Upstream(vendor.resource, self._times, self._log, self._clock, self._judge)
            self.upstreams[vendor.resource] = upstream
        await upstream.take(vendor, self._spawn)

    def missing(self) -> dict[str, float]:
        """Resource → since when its plugin has been away, for those that may not know of it and could come back."""
        return {
            resource: each.standing.lost_since
            for resource, each in self.upstreams.items()
            if each.standing.lost_since is not None and not each.standing.unsound
        }

    def _spawn(self, following: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        if self._tasks is None:
            following.close()
            raise Away("The plugin is stopping.")
        return self._tasks.create_task(following, name="a vendor's list")

    def _changes_in(self) -> float | None:
        now = self._clock()
        left = [each.standing.changes_in(now) for each in self.upstreams.values()]
        return min((seconds for seconds in left if seconds is not None), default=None)

    async def _judge(self) -> None:
        """Make every list anew; before the service has spoken there is nothing to judge by."""
        if self.version == 0:
            return
        async with self._judging:
            offers = {offer.id: offer for offer in self.devices}
            present = tuple(offer for offer in self.devices if not offer.gone)
            self.directory = Directory(tuple(known(offer) for offer in present))
            self.reach = Reach({offer.id: _paths(offer) for offer in present}, self.directory)
            heard = [each for each in self.upstreams.values() if each.said is not None]
            meanings = claims(
                self.directory,
                {each.resource: [device.ID for device in each.now_said.devices] for each in heard},
                lingering={each.resource for each in heard if not each.standing.present},
            )
            kept = {each.resource: self._kept(each.resource, meanings[each.resource]) for each in heard}
            await asyncio.gather(*(self._tell(each.resource) for each in heard))
            for each in heard:
                await self._state(each, judged(each.now_said, kept[each.resource], offers))
            new = [each for each in heard if each.resource not in self.lists]
            self.lists.update({each.resource: each.listing for each in new})
        self._news.set()
        if new:
            await self.ring()

    async def _state(self, upstream: Upstream, entries: tuple[Entry, ...]) -> None:
        before = {id_: entry.why for id_, entry in upstream.listing.entries.items()}
        await upstream.listing.state(entries)
        for entry in entries:
            if before.get(entry.id) == entry.why:
                continue
            if entry.meaning.refusal:
                self._log.error(
                    "vendor.device-refused", resource=upstream.resource, device=entry.id, sentence=entry.why
                )
            elif entry.why:
                self._log.info(
                    "vendor.device-unhealthy", resource=upstream.resource, device=entry.id, sentence=entry.why
                )
            else:
                self._log.info("vendor.device-healthy", resource=upstream.resource, device=entry.id)

    def _kept(self, resource: str, meanings: Mapping[str, Meaning]) -> dict[str, Meaning]:
        """The meanings, those refused that are not what they were at first."""
        meant = self._meant.setdefault(resource, {})
        kept = {id_: steady(id_, each, meant.get(id_, "")) for id_, each in meanings.items()}
        meant.update({id_: each.device for id_, each in kept.items() if each.device})
        for id_ in [each for each in meant if each not in kept][: max(len(meant) - MOST_DEVICES, 0)]:
            del meant[id_]
        return kept

    async def _tell(self, resource: str) -> None:
        """Of every id that was ever a device: a container may still have one that is listed no more."""
        await self._announce(resource, self._meant[resource], self.epoch)

    async def recall(self, resource: str, ids: Collection[str]) -> None:
        """A container is about to start on ``ids``: have the service know those that no list has had, too."""
        new = {id_: self.directory.find(id_) for id_ in ids if id_ not in self._meant[resource]}
        if any(each.device for each in self._kept(resource, new).values()):
            await self._tell(resource)

    def meaning(self, resource: str, id_: str) -> Meaning:
        """Which device ``id_`` is; also of an id that its plugin does not list any more."""
        entry = self.upstreams[resource].listing.entries.get(id_)
        if entry is not None and (entry.meaning.device or entry.meaning.refusal):
            return entry.meaning
        return steady(id_, self.directory.find(id_), self._meant.get(resource, {}).get(id_, ""))


def _paths(offer: AdvertisedDevice) -> frozenset[str]:
    return frozenset(path for access in offer.access for path in (access.host_path, access.container_path))
