"""Follows scrubs and resets until they end, several at once, over one connection.

Invariants: whatever interrupts the following (a timeout, an interrupt, a lost service), the last status of each device
is kept and reported. Nothing here stops a scrub: it continues in the service.
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

__all__ = [
    "FollowEnd",
    "FollowResult",
    "ProgressDisplay",
    "ScrubTarget",
    "TargetStatus",
    "Updates",
    "follow_scrubs",
]

_MAX_STREAMS = 64
"""Limit of open streams; an HTTP/2 connection carries a hundred, and the next caller needs some, too."""

Updates = Callable[[str], "AsyncGenerator[pb.ScrubUpdate, None]"]
"""Takes a device name; returns its updates, the last one with the result."""


@dataclass(frozen=True, slots=True)
class ScrubTarget:
    """A device to act on.

    Attributes:
        requested_name: the name sent to the service.
        id, index: of the device; empty while only the service knows them.
    """

    requested_name: str
    id: str = ""
    index: str = ""

    def __str__(self) -> str:
        return f"{self.index} ({self.id})" if self.id else self.requested_name


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """Last known status of one device: its result, or the error, or its progress when the following ended."""

    target: ScrubTarget
    progress: pb.ScrubProgress | None = None
    result: pb.ScrubResult | None = None
    error: ScrubberError | None = None

    @property
    def device_id(self) -> str:
        """The id of the device, or the requested name while the id is unknown."""
        if self.result is not None:
            return self.result.scrub.device_id
        if self.progress is not None:
            return self.progress.device_id
        return self.target.id or self.target.requested_name


class ProgressDisplay(Protocol):
    """Display of progress."""

    def update(self, status: TargetStatus) -> None:
        """Store the current ``status``."""

    def close(self) -> None:
        """Restore the terminal; may be called repeatedly."""


class FollowEnd(Enum):
    """Why the following ended."""

    COMPLETED = auto()
    TIMED_OUT = auto()
    INTERRUPTED = auto()


@dataclass(frozen=True, slots=True)
class FollowResult:
    """The statuses of all targets, in the order of the targets."""

    statuses: tuple[TargetStatus, ...]
    end: FollowEnd


async def follow_scrubs(
    targets: Sequence[ScrubTarget], updates: Updates, display: ProgressDisplay, *, wait: bool, timeout: float | None
) -> FollowResult:
    """Follow until every target has its result or its error; cancellation counts as an interrupt.

    Args:
        wait: False follows only until each has begun.
        timeout: seconds for all of them together; None waits indefinitely.
    """
    statuses = [TargetStatus(target) for target in targets]
    limit = asyncio.Semaphore(_MAX_STREAMS)

    async def follow(place: int) -> None:
        async with limit:
            try:
                async for status in _status_updates(statuses[place], updates):
                    statuses[place] = status
                    if status.result is None and not wait:
                        break
                    display.update(status)
            except ScrubberError as error:
                statuses[place] = replace(statuses[place], error=error)
                display.update(statuses[place])

    end = FollowEnd.COMPLETED
    try:
        async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
            for place in range(len(targets)):
                group.create_task(follow(place))
    except TimeoutError:
        end = FollowEnd.TIMED_OUT
    except asyncio.CancelledError:
        end = FollowEnd.INTERRUPTED
    finally:
        display.close()
    return FollowResult(tuple(statuses), end)


async def _status_updates(status: TargetStatus, updates: Updates) -> AsyncGenerator[TargetStatus, None]:
    """Yield ``status`` after each update, up to the one with the result."""
    async with aclosing(updates(status.target.requested_name)) as stream:
        async for update in stream:
            if update.HasField("result"):
                yield replace(status, result=update.result)
                return
            if update.HasField("progress"):
                status = replace(status, progress=update.progress)
                yield status
    raise Unavailable(
        f"The service closed the stream before device {status.target} was finished. Run `scrubber device {status.device_id}` "
        "to see its state."
    )
