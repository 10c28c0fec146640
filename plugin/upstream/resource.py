"""One resource of a vendor's plugin: its current registration, and what the plugin has reported.

Invariant: one registration at a time. The earlier one's stream has ended before the next one's is opened.
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
    """Times of a resource, in seconds.

    Attributes:
        grace: how long a list remains valid after its plugin is lost.
        pause: how long a plugin that did not respond in time is not called.
        vendor_away: how long a call waits for a plugin that is away.
    """

    grace: float = 10.0
    pause: float = 60.0
    vendor_away: float = 5.0


@dataclass(slots=True)
class UpstreamResource:
    """The plugin of one resource, and the list built from its reports.

    Attributes:
        on_change: called after everything that may change the list.
        options: the plugin's response at its last registration.
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
        """The last report, and why it cannot be used now."""
        return replace(self.report or VendorReport(), unusable_reason=self._unusable_reason)

    async def attach(
        self, vendor: VendorPlugin, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    ) -> None:
        """Make ``vendor`` the plugin of this resource, after detaching the previous one.

        Args:
            spawn: runs the task that follows the registration.
        """
        async with self._attach_lock:
            await self._detach()
            self._vendor, self._fresh = vendor, True
            self.options = vendor.options
            self.vendor_state = self.vendor_state.on_registration().on_disconnect(
                f"The vendor's plugin for {self.resource} has registered but has not sent a list yet.", self.clock()
            )
            self._follow_task = spawn(self._follow(vendor))

    async def current_vendor(self, *, after: VendorPlugin | None = None) -> VendorPlugin:
        """Return the plugin that is present; wait ``times.vendor_away`` for one that is away.

        Args:
            after: a plugin that was just found to be gone, and is not returned.

        Raises:
            Unavailable: there is none, or it did not respond in time or gave an unusable response, and is not called.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self.times.vendor_away):
                await self.device_list.wait_until(
                    lambda: (self.is_available and self._vendor is not after) or bool(self._unusable_reason)
                )
        if self._vendor in (None, after) or not self.is_available:
            away = f"The vendor's plugin for {self.resource} is not available. Its log may contain the cause."
            raise Unavailable(
                self._unusable_reason or self.vendor_state.disconnect_reason,
                public_message=self.vendor_state.public_fault(self.clock()) or away,
            )
        assert self._vendor is not None
        return self._vendor

    async def pause_vendor(self, error: VendorTimedOut) -> None:
        """Leave the plugin alone for a while: its devices are unhealthy meanwhile."""
        self.log.error("upstream.paused", resource=self.resource, message=str(error))
        self.vendor_state = self.vendor_state.on_timeout(
            str(error), self.clock() + self.times.pause, public_reason=error.public_message
        )
        await self.on_change()

    @property
    def _unusable_reason(self) -> str:
        return self.vendor_state.unusable_reason(self.clock())

    @property
    def is_available(self) -> bool:
        """Whether the plugin is present and may be called."""
        return self._vendor is not None and self.vendor_state.is_present and not self._unusable_reason

    async def reject_vendor(self, error: VendorInvalidAnswer) -> None:
        """Use nothing of this registration any more: its devices are unhealthy until the plugin registers again."""
        self.log.error("upstream.rejected", resource=self.resource, message=str(error))
        self.vendor_state = self.vendor_state.on_invalid(str(error), public_reason=error.public_message)
        await self.on_change()

    async def _follow(self, vendor: VendorPlugin) -> None:
        """Receive the lists of one registration until it ends."""
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
            self.log.warning("upstream.disconnected", resource=self.resource, message=str(error))
        finally:
            await vendor.close()
        await self._notify()

    async def _notify(self) -> None:
        await self.on_change()
        # Callers that wait for the plugin wait on the list, which notifies only when it changes.
        await self.device_list.notify()

    async def _detach(self) -> None:
        following, self._follow_task, self._vendor = self._follow_task, None, None
        if following is not None:
            following.cancel()
            await asyncio.wait({following})
