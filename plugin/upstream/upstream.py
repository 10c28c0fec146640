"""One resource behind which a vendor's plugin stands: who answers for it now, and what it has said.

Promise: one registration at a time. The earlier one's stream has ended before the next one's is opened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.logs import Log
from plugin.upstream.listing import Listing, Said
from plugin.upstream.standing import Standing
from plugin.upstream.vendor import Garbled, Hung, Vendor
from scrubber.domain.errors import Away, ScrubberError

__all__ = ["Upstream", "UpstreamTimes"]


@dataclass(frozen=True, slots=True)
class UpstreamTimes:
    """Seconds.

    Attributes:
        grace: that a list outlives its plugin.
        rest: that a plugin which let a call hang is left alone for.
        absent: that a call waits for a plugin that is away.
    """

    grace: float = 10.0
    rest: float = 60.0
    absent: float = 5.0


@dataclass(slots=True)
class Upstream:
    """One resource's plugin, and the list that is made of what it says.

    Attributes:
        changed: called after everything that may change the list.
        options: as the plugin answered when it registered last.
        clock: monotonic seconds.
    """

    resource: str
    times: UpstreamTimes
    log: Log
    clock: Callable[[], float]
    changed: Callable[[], Awaitable[None]]
    options: kubelet.DevicePluginOptions = field(default_factory=kubelet.DevicePluginOptions, init=False)
    listing: Listing = field(init=False)
    said: Said | None = field(default=None, init=False)
    standing: Standing = field(init=False)
    _vendor: Vendor | None = field(default=None, init=False)
    _following: asyncio.Task[None] | None = field(default=None, init=False)
    _fresh: bool = field(default=True, init=False)
    _taking: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        self.listing = Listing(self.resource)
        self.standing = Standing(self.times.grace)

    @property
    def now_said(self) -> Said:
        """What it said last, and why that cannot be used now."""
        return replace(self.said or Said(), trouble=self._trouble)

    async def take(self, vendor: Vendor, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """``vendor`` answers for the resource from now on; whoever did before is let go of first.

        Args:
            spawn: runs what follows the registration.
        """
        async with self._taking:
            await self._let_go()
            self._vendor, self._fresh = vendor, True
            self.options = vendor.options
            self.standing = self.standing.registered().lost(
                f"The vendor's plugin for {self.resource} has registered and has sent no list yet.", self.clock()
            )
            self._following = spawn(self._follow(vendor))

    async def vendor(self, *, after: Vendor | None = None) -> Vendor:
        """Who answers now; waits a while for one that is away.

        Args:
            after: not this one, which was just found to be gone.

        Raises:
            Away: nobody does, or it has let a call hang or answered what cannot be used, and is left alone.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self.times.absent):
                await self.listing.until(lambda: (self.answering and self._vendor is not after) or bool(self._trouble))
        if self._vendor in (None, after) or not self.answering:
            away = f"The vendor's plugin for {self.resource} is away; its own log says why."
            raise Away(self._trouble or self.standing.why, public=self.standing.fault(self.clock()) or away)
        assert self._vendor is not None
        return self._vendor

    async def rest(self, hung: Hung) -> None:
        """Leave the plugin alone for a while: its devices are unhealthy meanwhile."""
        self.log.error("vendor.resting", resource=self.resource, sentence=str(hung))
        self.standing = self.standing.resting(str(hung), self.clock() + self.times.rest, told=hung.public)
        await self.changed()

    @property
    def _trouble(self) -> str:
        return self.standing.trouble(self.clock())

    @property
    def answering(self) -> bool:
        """Whether the plugin is there and may be asked."""
        return self._vendor is not None and self.standing.present and not self._trouble

    async def condemn(self, garbled: Garbled) -> None:
        """Use nothing of this registration any more: its devices are unhealthy until the plugin registers again."""
        self.log.error("vendor.condemned", resource=self.resource, sentence=str(garbled))
        self.standing = self.standing.useless(str(garbled), told=garbled.public)
        await self.changed()

    async def _follow(self, vendor: Vendor) -> None:
        """Take in one registration's lists until it is over."""
        try:
            async with aclosing(vendor.lists()) as lists:
                async for devices in lists:
                    before = Said() if self._fresh or self.said is None else self.said
                    self.said, self._fresh = before.after(devices), False
                    self.standing = self.standing.heard()
                    await self._tell()
        except Garbled as error:
            await self.condemn(error)
        except ScrubberError as error:
            self.standing = self.standing.lost(str(error), self.clock())
            self.log.warning("vendor.away", resource=self.resource, sentence=str(error))
        finally:
            await vendor.close()
        await self._tell()

    async def _tell(self) -> None:
        await self.changed()
        # Whoever waits for the plugin waits at the list, which rings only when it changes.
        await self.listing.ring()

    async def _let_go(self) -> None:
        following, self._following, self._vendor = self._following, None, None
        if following is not None:
            following.cancel()
            await asyncio.wait({following})
