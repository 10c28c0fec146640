"""The protocol between an eraser child and its parent: progress, and how the reported numbers are parsed.

Guarantee: an invalid number is rejected and never rounded to a valid one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Child
from scrubber.adapters.children.request_pool import parse_answer
from scrubber.domain.errors import DriverTimeout, Unreadable
from scrubber.ports.device import EraseProgress

__all__ = ["parse_byte_count", "parse_residue_map", "parse_seconds_by_phase", "wait_for_report"]

_MAX_MAP_PARTS = 64
_MAX_COUNT = 2**63 - 1
"""What the API's messages and SQLite can represent."""

_SILENCE_TIMEOUT = 60.0
"""Seconds without a message after which an eraser counts as hung.

It reports several times a second, except while it opens the device and the driver compiles its kernels.
"""


async def wait_for_report(
    child: Child, progress: Callable[[EraseProgress], None], *, silence_timeout: float = _SILENCE_TIMEOUT
) -> Message:
    """Forward the progress of ``child`` until it has a result, and return the result.

    Args:
        silence_timeout: seconds without a message after which the child counts as hung. Its own deadline depends on the
            size of the device, and a slot blocked for that long would be missing for other devices.

    Raises:
        ScrubberError: The fault that the child reports instead of a result; Unreadable for a malformed message;
            DriverTimeout when the child hangs.
        ChildDied: The child ended without a result.
    """
    while "phase" in (message := await _next_message(child, silence_timeout)):
        phase = message["phase"]
        if not isinstance(phase, str):
            raise Unreadable("The eraser's progress report is invalid.")
        progress(
            EraseProgress(phase, parse_byte_count(message, "done_bytes"), parse_byte_count(message, "total_bytes"))
        )
    return parse_answer(message)


async def _next_message(child: Child, silence: float) -> Message:
    try:
        return await child.receive_within(silence)
    except TimeoutError as error:
        raise DriverTimeout(
            f"Process {child.pid} has not reported its progress for {silence:g} s; it was killed."
        ) from error


def parse_byte_count(message: Message, key: str) -> int:
    """Return a number of bytes (or of anything else that is counted) from a report.

    Raises:
        Unreadable: The value is not a non-negative integer of 63 bits.
    """
    value = message.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        raise Unreadable(f"The eraser's report is invalid: {key!r} is {value!r}.")
    return value


def parse_seconds_by_phase(message: Message) -> tuple[tuple[str, float], ...]:
    """Return how long each pass of a report took, in seconds.

    Raises:
        Unreadable: The report lacks this or is malformed.
    """
    rows = message.get("seconds_by_phase")
    if not isinstance(rows, list):
        raise Unreadable("The eraser's report is invalid: it has no list of seconds by phase.")
    if not all(isinstance(row, list) and len(row) == 2 and _is_phase(*row) for row in rows):
        raise Unreadable("The eraser's report is invalid: its seconds by phase are malformed.")
    return tuple((phase, float(duration)) for phase, duration in rows)


def _is_phase(phase: object, duration: object) -> bool:
    if not isinstance(phase, str) or not isinstance(duration, int | float) or isinstance(duration, bool):
        return False
    try:
        return math.isfinite(duration) and duration >= 0
    except OverflowError:  # an integer beyond the largest float
        return False


def parse_residue_map(message: Message, residue: int) -> tuple[int, ...]:
    """Return how many of the ``residue`` bytes were in each part of the memory.

    Raises:
        Unreadable: The report lacks this, or the parts do not add up to ``residue``.
    """
    rows = message.get("residue_map")
    if (
        not isinstance(rows, list)
        or len(rows) > _MAX_MAP_PARTS
        or not all(type(each) is int and each >= 0 for each in rows)
        or sum(rows) != residue
    ):
        raise Unreadable("The eraser's report is invalid: it has no residue map.")
    return tuple(rows)
