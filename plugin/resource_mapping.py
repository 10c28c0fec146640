"""What the service is told of the ids that the kubelet knows devices by.

The kubelet's lists, which the service reads by itself, have a resource's own ids: shares, and whatever a vendor's plugin
calls its devices. Promises: each run of the service is told what the ids of a list mean before the kubelet gets that
list, and a service that could not be told is told again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence

from plugin.logs import Logger
from plugin.service_client import ScrubService
from scrubber.domain.errors import InvalidRequest, ScrubberError
from scrubber.domain.resource_mapping import REPLICA_SEPARATOR

__all__ = ["PublishMapping", "ResourceMapping", "discard_mapping"]

PublishMapping = Callable[[str, Mapping[str, str], str], Awaitable[None]]
"""Has a run of the service know a resource's ids: (resource, id → device, epoch). Raises nothing of its own."""


async def discard_mapping(resource: str, mapping: Mapping[str, str], epoch: str) -> None:
    """For lists that no service is asked about."""


class ResourceMapping:
    """Tells the service; of one resource, one call after the other.

    Args:
        timeout: seconds that the service may take; lists wait for it.
    """

    def __init__(self, service: ScrubService, *, log: Logger, timeout: float = 2.0) -> None:
        self._service = service
        self._log = log
        self._timeout = timeout
        self._mappings: dict[str, Mapping[str, str]] = {}
        self._published: dict[str, tuple[str, Mapping[str, str]]] = {}
        self._epoch = ""
        self._last_errors: dict[str, str] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def publish(self, resource: str, mapping: Mapping[str, str], epoch: str) -> None:
        """Tell of a list, unless this run of the service was told exactly this.

        Returns also when it could not be told: the next list, which comes with the next heartbeat at the latest, tries
        again, and so does whoever is refused for an id (:meth:`republish`).

        Args:
            mapping: by the kubelet's id, the id of the device.
            epoch: which run of the service is there; empty while it is away, which is then told when it is back.
        """
        async with self._locks[resource]:
            self._mappings[resource] = dict(mapping)
            if not epoch:
                return
            self._epoch = epoch
            await self._publish_if_changed(resource)

    async def publish_pending(self, resource: str) -> None:
        """Tell what could not be told before. A service that goes by an earlier plugin's word takes ids for others."""
        async with self._locks[resource]:
            await self._publish_if_changed(resource)

    async def republish(self, resource: str) -> bool:
        """Tell a service that has just refused an id of ``resource`` although it was told of it, or may have been: it
        was started anew meanwhile. Answers whether it was told now.
        """
        async with self._locks[resource]:
            return resource in self._mappings and await self._publish(resource)

    def resolve_devices(self, resource: str, ids: Sequence[str]) -> frozenset[str]:
        """The devices that ``ids`` mean here; one that no list has had is a device's own, or one of its shares."""
        known = self._mappings.get(resource, {})
        return frozenset(known.get(id_) or id_.rpartition(REPLICA_SEPARATOR)[0] or id_ for id_ in ids)

    async def _publish_if_changed(self, resource: str) -> None:
        meanings = self._mappings.get(resource)
        if meanings is not None and self._published.get(resource) != (self._epoch, meanings):
            await self._publish(resource)

    async def _publish(self, resource: str) -> bool:
        meanings = self._mappings[resource]
        try:
            async with asyncio.timeout(self._timeout):
                await self._service.announce(resource, meanings, timeout=self._timeout)
        except (ScrubberError, TimeoutError) as error:
            message = str(error) or "It did not answer in time."
            if self._last_errors.get(resource) != message:
                if isinstance(error, InvalidRequest):
                    self._log.error("announcement.refused", resource=resource, sentence=message)
                else:
                    self._log.warning("announcement.failed", resource=resource, sentence=message)
            self._last_errors[resource] = message
            return False
        self._published[resource] = (self._epoch, meanings)
        self._last_errors.pop(resource, None)
        return True
