"""What the service is told of the ids that the kubelet knows devices by.

The kubelet's lists, which the service reads by itself, have a resource's own ids: shares, and whatever a vendor's plugin
calls its devices. Promises: each run of the service is told what the ids of a list mean before the kubelet gets that
list, and a service that could not be told is told again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence

from plugin.logs import Log
from plugin.service import ScrubService
from scrubber.domain.errors import InvalidRequest, ScrubberError
from scrubber.domain.resources import REPLICA

__all__ = ["Announce", "Announcements", "to_nobody"]

Announce = Callable[[str, Mapping[str, str], str], Awaitable[None]]
"""Has a run of the service know a resource's ids: (resource, id → device, epoch). Raises nothing of its own."""


async def to_nobody(resource: str, meanings: Mapping[str, str], epoch: str) -> None:
    """For lists that no service is asked about."""


class Announcements:
    """Tells the service; of one resource, one call after the other.

    Args:
        timeout: seconds that the service may take; lists wait for it.
    """

    def __init__(self, service: ScrubService, *, log: Log, timeout: float = 2.0) -> None:
        self._service = service
        self._log = log
        self._timeout = timeout
        self._meanings: dict[str, Mapping[str, str]] = {}
        self._told: dict[str, tuple[str, Mapping[str, str]]] = {}
        self._epoch = ""
        self._complaints: dict[str, str] = {}
        self._one_by_one: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def announce(self, resource: str, meanings: Mapping[str, str], epoch: str) -> None:
        """Tell of a list, unless this run of the service was told exactly this.

        Returns also when it could not be told: the next list, which comes with the next heartbeat at the latest, tries
        again, and so does whoever is refused for an id (:meth:`again`).

        Args:
            meanings: by the kubelet's id, the id of the device.
            epoch: which run of the service is there; empty while it is away, which is then told when it is back.
        """
        async with self._one_by_one[resource]:
            self._meanings[resource] = dict(meanings)
            if not epoch:
                return
            self._epoch = epoch
            await self._catch_up(resource)

    async def due(self, resource: str) -> None:
        """Tell what could not be told before. A service that goes by an earlier plugin's word takes ids for others."""
        async with self._one_by_one[resource]:
            await self._catch_up(resource)

    async def again(self, resource: str) -> bool:
        """Tell a service that has just refused an id of ``resource`` although it was told of it, or may have been: it
        was started anew meanwhile. Answers whether it was told now.
        """
        async with self._one_by_one[resource]:
            return resource in self._meanings and await self._tell(resource)

    def devices(self, resource: str, ids: Sequence[str]) -> frozenset[str]:
        """The devices that ``ids`` mean here; one that no list has had is a device's own, or one of its shares."""
        known = self._meanings.get(resource, {})
        return frozenset(known.get(id_) or id_.rpartition(REPLICA)[0] or id_ for id_ in ids)

    async def _catch_up(self, resource: str) -> None:
        meanings = self._meanings.get(resource)
        if meanings is not None and self._told.get(resource) != (self._epoch, meanings):
            await self._tell(resource)

    async def _tell(self, resource: str) -> bool:
        meanings = self._meanings[resource]
        try:
            async with asyncio.timeout(self._timeout):
                await self._service.announce(resource, meanings, timeout=self._timeout)
        except (ScrubberError, TimeoutError) as error:
            sentence = str(error) or "It did not answer in time."
            if self._complaints.get(resource) != sentence:
                if isinstance(error, InvalidRequest):
                    self._log.error("announcement.refused", resource=resource, sentence=sentence)
                else:
                    self._log.warning("announcement.failed", resource=resource, sentence=sentence)
            self._complaints[resource] = sentence
            return False
        self._told[resource] = (self._epoch, meanings)
        self._complaints.pop(resource, None)
        return True
