"""Publishes the state of the node: complete views with a version, and a wait for the next one. No queue to overflow."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from scrubber.domain.agent_pause import AgentPause
from scrubber.engine.views import DeviceView, NodeView, PodNotice

__all__ = ["Publisher"]


class Publisher:
    """One writer, any number of readers. A slow reader skips versions and never misses the newest."""

    def __init__(self, epoch: str) -> None:
        self._view = NodeView(0, (), ready=False, epoch=epoch)
        self._changed = asyncio.Event()

    @property
    def view(self) -> NodeView:
        return self._view

    def publish(
        self,
        devices: tuple[DeviceView, ...],
        *,
        ready: bool,
        ledger_status: str,
        refuses_envvar: bool,
        notices: tuple[PodNotice, ...] = (),
        yielded: str = "",
        driver_error: str = "",
        agent_pause: AgentPause | None = None,
        driver_closed: bool = False,
        driver_version: str = "",
    ) -> None:
        """Publish a view, unless nothing in it changed."""
        seen = self._view
        # A device that did not change keeps its view, so that its messages need not be made again.
        known = {each.device.id: each for each in seen.devices}
        devices = tuple(
            old if (old := known.get(each.device.id)) is not each and old == each else each for each in devices
        )
        view = replace(
            seen,
            devices=devices,
            ready=ready,
            ledger_status=ledger_status,
            refuses_envvar=refuses_envvar,
            notices=notices,
            yielded=yielded,
            driver_error=driver_error,
            agent_pause=agent_pause,
            driver_closed=driver_closed,
            driver_version=driver_version,
        )
        if view == seen:
            return
        self._view = replace(view, version=seen.version + 1)
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self, since: int) -> NodeView:
        """Return the newest view once its version is above ``since``."""
        while self._view.version <= since:
            await self._changed.wait()
        return self._view
