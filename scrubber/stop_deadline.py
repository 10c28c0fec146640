"""Ends the service if its orderly end takes too long: its children end with it, and with them their use of the driver.

The rest of a node waits for that: a driver can be unloaded only when nothing has it open. What a killed service leaves is
what ``kill -9`` leaves at any other time, and is dirty.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from scrubber.domain.device import Device
from scrubber.domain.reset_plan import ResetPlan
from scrubber.ports.device import Resetter

__all__ = ["STOP_SECONDS", "CountedResetter", "StopDeadline"]

STOP_SECONDS = 20.0
"""Seconds from SIGTERM until no child of the service exists, unless a reset is in progress."""

_RESET_CHECK_INTERVAL = 0.2


class StopDeadline:
    """Limits the time for an orderly end.

    A thread enforces it, because the event loop may hang as well. The kernel kills the children when this process ends.

    Args:
        seconds: the limit. A reset in progress is waited for: interrupting one is worse than a driver that stays open.
        end_process: ends this process without any clean-up.

    Attributes:
        resets: number of resets in progress.
    """

    def __init__(
        self,
        log: structlog.typing.FilteringBoundLogger,
        *,
        seconds: float = STOP_SECONDS,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._log = log
        self._seconds = seconds
        self._end_process = end_process
        self._over = threading.Event()
        self.resets = 0

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Enforce the limit while the context is open."""
        thread = threading.Thread(target=self._enforce, name="stop deadline", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _enforce(self) -> None:
        ends = time.monotonic() + self._seconds
        if self._over.wait(self._seconds):
            return
        while self.resets:
            if self._over.wait(_RESET_CHECK_INTERVAL):
                return
        waited = round(self._seconds + time.monotonic() - ends, 1)
        self._log.error("service.stop-timed-out", duration_seconds=waited)
        self._end_process(1)


class CountedResetter:
    """A resetter whose resets in progress are counted."""

    def __init__(self, resetter: Resetter, deadline: StopDeadline) -> None:
        self._resetter = resetter
        self._deadline = deadline

    async def plan(self, device: Device) -> ResetPlan:
        return await self._resetter.plan(device)

    async def reset(self, device: Device, deadline: float) -> None:
        self._deadline.resets += 1
        try:
            await self._resetter.reset(device, deadline)
        finally:
            self._deadline.resets -= 1
