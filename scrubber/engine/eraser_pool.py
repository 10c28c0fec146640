"""Limits how many children work on devices at once, by what their work shares, and decides which scrub goes first."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import IntEnum
from itertools import count

from scrubber.domain.device import SharedResource

__all__ = ["EraserPool", "ScrubPriority"]


class ScrubPriority(IntEnum):
    """What a scrub is needed for; a lower value goes first."""

    START_WAITS = 0
    """A container start, or another caller, waits for it."""
    RESERVED = 1
    """The kubelet has allocated the device, and the start of the container will follow."""
    IDLE = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    order: int
    turn: asyncio.Future[None]
    resource: SharedResource | None
    priority: Callable[[], ScrubPriority]


# See docs/decisions/0005-scrub-order-and-pauses.md.
class EraserPool:
    """Slots for work on devices. A free slot goes to the most urgent scrub that it fits, else to the oldest.

    Work on a device that shares nothing gets a slot at once. Work that shares a resource gets one of the slots of that
    resource.

    Args:
        limit: returns the maximum number of slots in use on the node; None: only the shared resources limit it.
    """

    def __init__(self, limit: Callable[[], int | None] = lambda: None) -> None:
        self._limit = limit
        self._order = count()
        self._used: Counter[str] = Counter()
        self._busy = 0
        self._waiting: list[_Waiter] = []

    @property
    def busy(self) -> int:
        return self._busy

    @property
    def waiting(self) -> int:
        """Number of scrubs that wait for a slot."""
        return sum(not each.turn.done() for each in self._waiting)

    def size(self, resources: Iterable[SharedResource | None]) -> int:
        """Return the number of slots for devices, given by what work on each of them shares."""
        every = list(resources)
        shared = {each.name: each.slots for each in every if each is not None}
        slots, limit = sum(each is None for each in every) + sum(shared.values()), self._limit()
        return slots if limit is None else min(slots, limit)

    @asynccontextmanager
    async def slot(self, resource: SharedResource | None, priority: Callable[[], ScrubPriority]) -> AsyncIterator[None]:
        """Hold a slot; ``priority`` is evaluated at the moment one becomes free.

        Args:
            resource: what the work shares with work on other devices; None: nothing.
        """
        if self._has_room(resource):
            self._take(resource)
        else:
            waiter = _Waiter(next(self._order), asyncio.get_running_loop().create_future(), resource, priority)
            self._waiting.append(waiter)
            try:
                await waiter.turn
            except asyncio.CancelledError:
                if waiter.turn.done() and not waiter.turn.cancelled():
                    self._release(resource)
                raise
        try:
            yield
        finally:
            self._release(resource)

    def assign(self) -> None:
        """Give the free slots to scrubs that wait; call this after the limit has changed."""
        self._waiting = [each for each in self._waiting if not each.turn.done()]
        while fitting := [each for each in self._waiting if self._has_room(each.resource)]:
            chosen = min(fitting, key=lambda each: (each.priority(), each.order))
            self._waiting.remove(chosen)
            self._take(chosen.resource)
            chosen.turn.set_result(None)

    def _has_room(self, resource: SharedResource | None) -> bool:
        limit = self._limit()
        if limit is not None and self._busy >= limit:
            return False
        return resource is None or self._used[resource.name] < resource.slots

    def _take(self, resource: SharedResource | None) -> None:
        self._busy += 1
        if resource is not None:
            self._used[resource.name] += 1

    def _release(self, resource: SharedResource | None) -> None:
        self._busy -= 1
        if resource is not None:
            self._used[resource.name] -= 1
        self.assign()
