"""The plugin's request to the service to yield the node, repeated until the service has it.

The service keeps the request, also across restarts of both. So a plugin that requests nothing withdraws what an earlier
one may have left. The first request needs no snapshot: it is sent at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn, Protocol

from plugin.logs import Logger, WaitLogger
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import ScrubberError

__all__ = ["YieldSender", "YieldService"]

_CALL_TIMEOUT = 2.0
_RETRY_SECONDS = 0.5
_LOG_INTERVAL = 30.0


class YieldService(Protocol):
    async def set_yield(self, plugin: str, reason: str, timeout: float) -> pb.NodeYield:
        """See :meth:`scrubber.api.client.PluginClient.set_yield`."""
        ...


class YieldSender:
    """What this plugin requests.

    Args:
        plugin: how this plugin is named among the plugins of the node, each of which has a request of its own; the same
            after a restart.
        reason: of the request; empty: none. None: not known yet, so that the service keeps what it has.
    """

    def __init__(
        self, service: YieldService, plugin: str, reason: str | None, *, log: Logger, clock: Callable[[], float]
    ) -> None:
        self._service = service
        self._plugin = plugin
        self._reason = reason
        self._log = log
        self._reminder = WaitLogger(log, every=_LOG_INTERVAL, clock=clock)
        self._accepted: str | None = None
        self._epoch = ""
        self._yielded = False
        self._changed = asyncio.Event()
        if reason is not None:
            self._changed.set()

    def set_reason(self, reason: str) -> None:
        """Request that the node be yielded for ``reason``; nothing if it is empty."""
        if reason != self._reason:
            self._log.info("node.yield-label-changed", message=reason or None)
            self._reason = reason
            self._changed.set()

    def on_snapshot(self, snapshot: pb.Snapshot) -> None:
        """Repeat the request to a service that was started meanwhile, or that is yielded."""
        seen = (snapshot.epoch, bool(snapshot.yielded))
        if seen != (self._epoch, self._yielded):
            self._epoch, self._yielded = seen
            self._changed.set()

    async def run(self) -> NoReturn:
        """Send the request whenever the service may not have it, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            reason = self._reason
            if reason is None or not (reason or self._yielded or self._accepted != reason):
                continue
            self._accepted = None  # a call that fails may have been carried out
            try:
                await self._service.set_yield(self._plugin, reason, _CALL_TIMEOUT)
            except ScrubberError as error:
                if reason or self._yielded:
                    self._reminder.log_waiting("node.yield-request-failed", message=str(error))
                await asyncio.sleep(_RETRY_SECONDS)
                self._changed.set()
            else:
                self._accepted = reason
                self._reminder.log_ended("node.yield-request-sent", message=reason or None)
