"""What the command's exit code says, so that a script need not read a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from scrubber.domain.errors import BadConfiguration, InvalidRequest, NotReady, Refused, ScrubberError, SecondInstance

__all__ = ["Exit", "exit_for", "worst"]


class Exit(IntEnum):
    """0 is the only answer that means yes."""

    OK = 0
    NEGATIVE = 1
    """A negative verdict, or none: the service is away, or something broke."""
    USAGE = 2
    """The request itself is wrong; asking again changes nothing."""
    REFUSED = 3
    """Refused by policy, or busy."""
    TIMED_OUT = 4
    """The wait was over first; the operation still runs."""
    WARNINGS = 5
    """Nothing is wrong, and something is worth a look."""
    INTERRUPTED = 130


_FROM_THE_WORST = (Exit.INTERRUPTED, Exit.NEGATIVE, Exit.USAGE, Exit.REFUSED, Exit.TIMED_OUT, Exit.WARNINGS, Exit.OK)


def worst(codes: Iterable[Exit]) -> Exit:
    """Return the exit code of a command whose parts ended with ``codes``; 0 for none."""
    return min(codes, key=_FROM_THE_WORST.index, default=Exit.OK)


def exit_for(error: ScrubberError) -> Exit:
    """The exit code of an error of ours."""
    match error:
        case InvalidRequest() | BadConfiguration():
            return Exit.USAGE
        case Refused() | SecondInstance():
            return Exit.REFUSED
        case NotReady():
            return Exit.REFUSED
        case _:
            return Exit.NEGATIVE
