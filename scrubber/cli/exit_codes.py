"""What the command's exit code says, so that a script need not read a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from scrubber.domain.errors import (
    AlreadyRunning,
    InvalidConfiguration,
    InvalidRequest,
    NotReady,
    Refused,
    ScrubberError,
)

__all__ = ["ExitCode", "exit_code_for", "worst_exit_code"]


class ExitCode(IntEnum):
    """0 is the only answer that means yes."""

    OK = 0
    FAILED = 1
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


_WORST_FIRST = (
    ExitCode.INTERRUPTED,
    ExitCode.FAILED,
    ExitCode.USAGE,
    ExitCode.REFUSED,
    ExitCode.TIMED_OUT,
    ExitCode.WARNINGS,
    ExitCode.OK,
)


def worst_exit_code(codes: Iterable[ExitCode]) -> ExitCode:
    """Return the exit code of a command whose parts ended with ``codes``; 0 for none."""
    return min(codes, key=_WORST_FIRST.index, default=ExitCode.OK)


def exit_code_for(error: ScrubberError) -> ExitCode:
    """The exit code of an error of ours."""
    match error:
        case InvalidRequest() | InvalidConfiguration():
            return ExitCode.USAGE
        case Refused() | AlreadyRunning():
            return ExitCode.REFUSED
        case NotReady():
            return ExitCode.REFUSED
        case _:
            return ExitCode.FAILED
