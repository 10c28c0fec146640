"""The one place that holds what the kubelet is to see; every stream sends full lists from it.

Promise: there is no queue that somebody can fail to read. A slow stream skips versions and always sends the newest,
and the version grows only when something that is sent has changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from plugin.availability import Offer

__all__ = ["Board"]


class Board:
    """Offers, their version, and a bell that rings at every change.

    Attributes:
        version: 0 until the first snapshot of the service has come.
        epoch: which run of the service is heard at present; empty while it is away.
    """

    def __init__(self) -> None:
        self.version = 0
        self.epoch = ""
        self._offers: dict[str, Offer] = {}
        self._bell = asyncio.Condition()

    @property
    def offers(self) -> tuple[Offer, ...]:
        return tuple(self._offers.values())

    @property
    def health(self) -> tuple[bool, ...]:
        """Whether each id of the list is healthy, as the kubelet is told."""
        return tuple(offer.healthy for offer in self._offers.values())

    def find(self, device_id: str) -> Offer | None:
        return self._offers.get(device_id)

    async def show(self, offers: tuple[Offer, ...], epoch: str) -> None:
        """Replace everything; the version grows when something in the kubelet's list is different."""
        before = (self.epoch, [offer.listed for offer in self._offers.values()])
        self._offers = {offer.id: offer for offer in offers}
        self.epoch = epoch
        now = (epoch, [offer.listed for offer in offers])
        if self.version == 0 or before[1] != now[1]:
            self.version += 1
        if before != now or self.version == 1:
            await self.ring()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds; it is looked at again at every change and every :meth:`ring`."""
        async with self._bell:
            await self._bell.wait_for(condition)

    async def ring(self) -> None:
        """Have everybody who waits look again."""
        async with self._bell:
            self._bell.notify_all()
