"""Streams of the node's state: the newest state after each change, until the service stops.

Invariant: a stream delivers whole states, never a queue of changes, so a slow reader skips versions and costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from scrubber.domain.errors import Unavailable
from scrubber.engine.views import NodeView, Service

__all__ = ["ViewStreams"]


class ViewStreams:
    """Follows ``service`` for any number of streams."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End every stream: when the service stops, an open stream would use up the grace period."""
        self._stopping.set()

    async def views(self) -> AsyncGenerator[NodeView, None]:
        """Yield the current state at once, then the newest one after each change.

        Raises:
            Unavailable: the service stops.
        """
        view = self._service.view()
        while not self._stopping.is_set():
            yield view
            view = await self._next_view(view.version)
        raise Unavailable(
            "The scrub service is stopping.", public_message="The scrub service on this node is stopping."
        )

    async def _next_view(self, version: int) -> NodeView:
        """Return the next state, or the current one once the service stops."""
        changed = asyncio.ensure_future(self._service.wait_for_change(version))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({changed, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return changed.result() if changed.done() else self._service.view()
        finally:
            changed.cancel()
            stopping.cancel()
