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
from plugin.logs import Logger
from plugin.upstream.device_list import UpstreamDeviceList, VendorReport
from plugin.upstream.vendor import VendorInvalidAnswer, VendorPlugin, VendorTimedOut
from plugin.upstream.vendor_state import VendorState
from scrubber.domain.errors import ScrubberError, Unavailable

__all__ = ["UpstreamResource", "UpstreamResourceTimes"]


@dataclass(frozen=True, slots=True)
class UpstreamResourceTimes:
    """Seconds.

    Attributes:
        grace: that a list outlives its plugin.
        pause: that a plugin which let a call hang is left alone for.
        vendor_away: that a call waits for a plugin that is away.
    """

    grace: float = 10.0
    pause: float = 60.0
    vendor_away: float = 5.0


@dataclass(slots=True)
class UpstreamResource:
    """One resource's plugin, and the list that is made of what it says.

    Attributes:
        on_change: called after everything that may change the list.
        options: as the plugin answered when it registered last.
        clock: monotonic seconds.
    """

    resource: str
    times: UpstreamResourceTimes
    log: Logger
    clock: Callable[[], float]
    on_change: Callable[[], Awaitable[None]]
    options: kubelet.DevicePluginOptions = field(default_factory=kubelet.DevicePluginOptions, init=False)
    device_list: UpstreamDeviceList = field(init=False)
    report: VendorReport | None = field(default=None, init=False)
    vendor_state: VendorState = field(init=False)
    _vendor: VendorPlugin | None = field(default=None, init=False)
    _follow_task: asyncio.Task[None] | None = field(default=None, init=False)
    _fresh: bool = field(default=True, init=False)
    _attach_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        self.device_list = UpstreamDeviceList(self.resource)
        self.vendor_state = VendorState(self.times.grace)

    @property
    def current_report(self) -> VendorReport:
        """What it said last, and why that cannot be used now."""
        return replace(self.report or VendorReport(), unusable_reason=self._unusable_reason)

    async def attach(
        self, vendor: VendorPlugin, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    ) -> None:
        """``current_vendor`` answers for the resource from now on; whoever did before is let go of first.

        Args:
            spawn: runs what follows the registration.
        """
        async with self._attach_lock:
            await self._detach()
            self._vendor, self._fresh = vendor, True
            self.options = vendor.options
            self.vendor_state = self.vendor_state.on_registration().on_disconnect(
                f"The vendor's plugin for {self.resource} has registered and has sent no list yet.", self.clock()
            )
            self._follow_task = spawn(self._follow(vendor))

    async def current_vendor(self, *, after: VendorPlugin | None = None) -> VendorPlugin:
        """Who answers now; waits a while for one that is away.

        Args:
            after: not this one, which was just found to be gone.

        Raises:
            Unavailable: nobody does, or it has let a call hang or answered what cannot be used, and is left alone.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self.times.vendor_away):
                await self.device_list.wait_until(
                    lambda: (self.is_available and self._vendor is not after) or bool(self._unusable_reason)
                )
        if self._vendor in (None, after) or not self.is_available:
            away = f"The vendor's plugin for {self.resource} is away; its own log says why."
            raise Unavailable(
                self._unusable_reason or self.vendor_state.disconnect_reason,
                public_message=self.vendor_state.public_fault(self.clock()) or away,
            )
        assert self._vendor is not None
        return self._vendor

    async def pause_vendor(self, error: VendorTimedOut) -> None:
        """Leave the plugin alone for a while: its devices are unhealthy meanwhile."""
        self.log.error("vendor.resting", resource=self.resource, sentence=str(error))
        self.vendor_state = self.vendor_state.on_timeout(
            str(error), self.clock() + self.times.pause, public_reason=error.public_message
        )
        await self.on_change()

    @property
    def _unusable_reason(self) -> str:
        return self.vendor_state.unusable_reason(self.clock())

    @property
    def is_available(self) -> bool:
        """Whether the plugin is there and may be asked."""
        return self._vendor is not None and self.vendor_state.is_present and not self._unusable_reason

    async def reject_vendor(self, error: VendorInvalidAnswer) -> None:
        """Use nothing of this registration any more: its devices are unhealthy until the plugin registers again."""
        self.log.error("vendor.condemned", resource=self.resource, sentence=str(error))
        self.vendor_state = self.vendor_state.on_invalid(str(error), public_reason=error.public_message)
        await self.on_change()

    async def _follow(self, vendor: VendorPlugin) -> None:
        """Take in one registration's lists until it is over."""
        try:
            async with aclosing(vendor.lists()) as lists:
                async for devices in lists:
                    before = VendorReport() if self._fresh or self.report is None else self.report
                    self.report, self._fresh = before.with_list(devices), False
                    self.vendor_state = self.vendor_state.on_list()
                    await self._notify()
        except VendorInvalidAnswer as error:
            await self.reject_vendor(error)
        except ScrubberError as error:
            self.vendor_state = self.vendor_state.on_disconnect(str(error), self.clock())
            self.log.warning("vendor.away", resource=self.resource, sentence=str(error))
        finally:
            await vendor.close()
        await self._notify()

    async def _notify(self) -> None:
        await self.on_change()
        # Whoever waits for the plugin waits at the list, which rings only when it changes.
        await self.device_list.notify()

    async def _detach(self) -> None:
        following, self._follow_task, self._vendor = self._follow_task, None, None
        if following is not None:
            following.cancel()
            await asyncio.wait({following})
