"""What an eraser child and its parent agree on: how far it is, and how its numbers are read.

Promise: a number that makes no sense is refused and never rounded to one that does.
"""

from __future__ import annotations

from collections.abc import Callable

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Child
from scrubber.adapters.children.request_pool import parse_answer
from scrubber.domain.errors import DriverTimeout, Unreadable
from scrubber.ports.device import EraseProgress

__all__ = ["parse_byte_count", "parse_seconds_by_phase", "wait_for_report"]

_SILENCE_TIMEOUT = 60.0
"""An eraser speaks several times a second, except while it opens the device and the driver compiles its kernels."""


async def wait_for_report(
    child: Child, progress: Callable[[EraseProgress], None], *, silence_timeout: float = _SILENCE_TIMEOUT
) -> Message:
    """Pass on how far ``child`` is until it has a result, and answer that.

    Args:
        silence_timeout: seconds without a word after which it hangs. Its own deadline goes by the size of the device, and a
            slot that is lost for so long would be missed by the others.

    Raises:
        ScrubberError: the fault that it answers instead; Unreadable for what makes no sense; Stuck when it hangs.
        ChildDied: there is none.
    """
    while "phase" in (message := await _next_message(child, silence_timeout)):
        phase = message["phase"]
        if not isinstance(phase, str):
            raise Unreadable("The eraser's progress makes no sense.")
        progress(
            EraseProgress(phase, parse_byte_count(message, "done_bytes"), parse_byte_count(message, "total_bytes"))
        )
    return parse_answer(message)


async def _next_message(child: Child, silence: float) -> Message:
    try:
        return await child.receive_within(silence)
    except TimeoutError as error:
        raise DriverTimeout(
            f"Process {child.pid} has not said for {silence:g} s how far it is; it was killed."
        ) from error


def parse_byte_count(message: Message, key: str) -> int:
    """A number of bytes (or of anything else that is counted) in a report.

    Raises:
        Unreadable: it is none.
    """
    value = message.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise Unreadable(f"The eraser's report makes no sense: {key!r} is {value!r}.")
    return value


def parse_seconds_by_phase(message: Message) -> tuple[tuple[str, float], ...]:
    """How long each pass of a report took.

    Raises:
        Unreadable: it does not say so.
    """
    rows = message.get("seconds_by_phase")
    if not isinstance(rows, list):
        raise Unreadable("The eraser's report makes no sense.")
    try:
        return tuple((str(phase), float(duration)) for phase, duration in rows)
    except (TypeError, ValueError) as error:
        raise Unreadable("The eraser's report makes no sense.") from error
