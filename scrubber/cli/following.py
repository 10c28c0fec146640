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

from scrubber.domain.errors import Away, ScrubberError

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["Course", "Display", "Ended", "Followed", "Target", "Updates", "follow"]

_AT_ONCE = 64
"""Streams that are open at a time; a connection of gRPC carries a hundred, and the next caller wants some, too."""

Updates = Callable[[str], "AsyncGenerator[pb.ScrubUpdate, None]"]
"""Given what a device is called: its updates, the last one with the result."""


@dataclass(frozen=True, slots=True)
class Target:
    """A device that something is done to.

    Attributes:
        called: what the service is asked for.
        id, index: of the device; empty while only the service knows them.
    """

    called: str
    id: str = ""
    index: str = ""

    def __str__(self) -> str:
        return f"{self.index} ({self.id})" if self.id else self.called


@dataclass(frozen=True, slots=True)
class Course:
    """What was heard of one device: its result, or why there is none, or the last word before nobody listened."""

    target: Target
    progress: pb.ScrubProgress | None = None
    result: pb.ScrubResult | None = None
    error: ScrubberError | None = None

    @property
    def device(self) -> str:
        """The id of the device, or what it was called while nobody said its id."""
        if self.result is not None:
            return self.result.scrub.device
        if self.progress is not None:
            return self.progress.device
        return self.target.id or self.target.called


class Display(Protocol):
    """Where progress goes."""

    def show(self, course: Course) -> None:
        """Take note of ``course`` as it is now."""

    def close(self) -> None:
        """Leave the terminal as it was; may be called again."""


class Ended(Enum):
    """Why nobody listens any more."""

    ALL_SAID = auto()
    TIME_OVER = auto()
    INTERRUPTED = auto()


@dataclass(frozen=True, slots=True)
class Followed:
    """All courses, in the order of their targets."""

    courses: tuple[Course, ...]
    ended: Ended


async def follow(
    targets: Sequence[Target], updates: Updates, display: Display, *, wait: bool, timeout: float | None
) -> Followed:
    """Listen until every target has its result or its error; being cancelled counts as an interrupt.

    Args:
        wait: False listens until each has begun, and no longer.
        timeout: seconds for all of them together; None waits for as long as it takes.
    """
    heard = [Course(target) for target in targets]
    slots = asyncio.Semaphore(_AT_ONCE)

    async def listen(place: int) -> None:
        async with slots:
            try:
                async for course in _courses(heard[place], updates):
                    heard[place] = course
                    if course.result is None and not wait:
                        break
                    display.show(course)
            except ScrubberError as error:
                heard[place] = replace(heard[place], error=error)
                display.show(heard[place])

    ended = Ended.ALL_SAID
    try:
        async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
            for place in range(len(targets)):
                group.create_task(listen(place))
    except TimeoutError:
        ended = Ended.TIME_OVER
    except asyncio.CancelledError:
        ended = Ended.INTERRUPTED
    finally:
        display.close()
    return Followed(tuple(heard), ended)


async def _courses(course: Course, updates: Updates) -> AsyncGenerator[Course, None]:
    """``course`` after each update, up to the one with the result."""
    async with aclosing(updates(course.target.called)) as stream:
        async for update in stream:
            if update.HasField("result"):
                yield replace(course, result=update.result)
                return
            if update.HasField("progress"):
                course = replace(course, progress=update.progress)
                yield course
    raise Away(
        f"The service ended its answer before device {course.target} was done with; "
        f"scrubber device {course.device} shows what became of it."
    )
