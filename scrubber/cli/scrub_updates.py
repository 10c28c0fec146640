"""Following scrubs and resets until they end, several at once, over one connection.

Promise: whatever ends the listening (a time that is over, an interrupt, a service that goes), what was heard of each
device until then is kept and told. Nothing in here ends a scrub: it goes on in the service.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from scrubber.domain.errors import ScrubberError, Unavailable

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["FollowEnd", "FollowResult", "ProgressDisplay", "ScrubTarget", "TargetStatus", "Updates", "follow_scrubs"]

_MAX_STREAMS = 64
"""Streams that are open at a time; a connection of gRPC carries a hundred, and the next caller wants some, too."""

Updates = Callable[[str], "AsyncGenerator[pb.ScrubUpdate, None]"]
"""Given what a device is called: its updates, the last one with the result."""


@dataclass(frozen=True, slots=True)
class ScrubTarget:
    """A device that something is done to.

    Attributes:
        requested_name: what the service is asked for.
        id, index: of the device; empty while only the service knows them.
    """

    requested_name: str
    id: str = ""
    index: str = ""

    def __str__(self) -> str:
        return f"{self.index} ({self.id})" if self.id else self.requested_name


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """What was heard of one device: its result, or why there is none, or the last word before nobody listened."""

    target: ScrubTarget
    progress: pb.ScrubProgress | None = None
    result: pb.ScrubResult | None = None
    error: ScrubberError | None = None

    @property
    def device_id(self) -> str:
        """The id of the device, or what it was called while nobody said its id."""
        if self.result is not None:
            return self.result.scrub.device
        if self.progress is not None:
            return self.progress.device
        return self.target.id or self.target.requested_name


class ProgressDisplay(Protocol):
    """Where progress goes."""

    def update(self, status: TargetStatus) -> None:
        """Take note of ``status`` as it is now."""

    def close(self) -> None:
        """Leave the terminal as it was; may be called again."""


class FollowEnd(Enum):
    """Why nobody listens any more."""

    COMPLETED = auto()
    TIMED_OUT = auto()
    INTERRUPTED = auto()


@dataclass(frozen=True, slots=True)
class FollowResult:
    """All courses, in the order of their targets."""

    statuses: tuple[TargetStatus, ...]
    end: FollowEnd


async def follow_scrubs(
    targets: Sequence[ScrubTarget], updates: Updates, display: ProgressDisplay, *, wait: bool, timeout: float | None
) -> FollowResult:
    """Listen until every target has its result or its error; being cancelled counts as an interrupt.

    Args:
        wait: False listens until each has begun, and no longer.
        timeout: seconds for all of them together; None waits for as long as it takes.
    """
    heard = [TargetStatus(target) for target in targets]
    slots = asyncio.Semaphore(_MAX_STREAMS)

    async def listen(place: int) -> None:
        async with slots:
            try:
                async for course in _status_updates(heard[place], updates):
                    heard[place] = course
                    if course.result is None and not wait:
                        break
                    display.update(course)
            except ScrubberError as error:
                heard[place] = replace(heard[place], error=error)
                display.update(heard[place])

    ended = FollowEnd.COMPLETED
    try:
        async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
            for place in range(len(targets)):
                group.create_task(listen(place))
    except TimeoutError:
        ended = FollowEnd.TIMED_OUT
    except asyncio.CancelledError:
        ended = FollowEnd.INTERRUPTED
    finally:
        display.close()
    return FollowResult(tuple(heard), ended)


async def _status_updates(course: TargetStatus, updates: Updates) -> AsyncGenerator[TargetStatus, None]:
    """``course`` after each update, up to the one with the result."""
    async with aclosing(updates(course.target.requested_name)) as stream:
        async for update in stream:
            if update.HasField("result"):
                yield replace(course, result=update.result)
                return
            if update.HasField("progress"):
                course = replace(course, progress=update.progress)
                yield course
    raise Unavailable(
        f"The service ended its answer before device {course.target} was done with; "
        f"scrubber device {course.device_id} shows what became of it."
    )
