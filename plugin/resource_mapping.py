"""Publishes to the service which device each id of the kubelet's lists means.

The kubelet's lists, which the service reads directly, contain a resource's own ids: shares, and the ids that a vendor's
plugin gives its devices. Invariants: each run of the service learns what the ids of a list mean before the kubelet gets
that list, and a publication that failed is repeated.
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
"""Publishes a resource's ids to a run of the service: (resource, id → device, epoch). Raises no error of the service.
"""


async def discard_mapping(resource: str, mapping: Mapping[str, str], epoch: str) -> None:
    """Ignore the mapping: for lists without a service."""


# See docs/decisions/0012-resource-ids.md.
class ResourceMapping:
    """Publishes mappings to the service; for one resource, one call after the other.

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
        """Publish the mapping of a list, unless this run of the service already has exactly this one.

        Returns also when publishing failed. The next list, which arrives with the next heartbeat at the latest, tries
        again, and so does a caller whose id is refused (:meth:`republish`).

        Args:
            mapping: the kubelet's id → id of the device.
            epoch: run of the service; empty while the service is away, which then gets the mapping when it is back.
        """
        async with self._locks[resource]:
            self._mappings[resource] = dict(mapping)
            if not epoch:
                return
            self._epoch = epoch
            await self._publish_if_changed(resource)

    async def publish_pending(self, resource: str) -> None:
        """Publish what could not be published before. With a mapping of an earlier plugin, a service misreads ids."""
        async with self._locks[resource]:
            await self._publish_if_changed(resource)

    async def republish(self, resource: str) -> bool:
        """Publish again after the service refused an id of ``resource``; return whether that succeeded.

        The service already had the mapping, or may have had it, and was restarted meanwhile.
        """
        async with self._locks[resource]:
            return resource in self._mappings and await self._publish(resource)

    def resolve_devices(self, resource: str, ids: Sequence[str]) -> frozenset[str]:
        """Return the devices that ``ids`` mean; an id that was in no list is a device's own id or one of its shares."""
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
            message = str(error) or "The scrub service did not respond in time."
            if self._last_errors.get(resource) != message:
                if isinstance(error, InvalidRequest):
                    self._log.error("resource-mapping.refused", resource=resource, message=message)
                else:
                    self._log.warning("resource-mapping.failed", resource=resource, message=message)
            self._last_errors[resource] = message
            return False
        self._published[resource] = (self._epoch, meanings)
        self._last_errors.pop(resource, None)
        return True
