"""Exit codes of the command, so that a script need not parse messages."""

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
    """Only 0 means success."""

    OK = 0
    FAILED = 1
    """A negative verdict, or none: the service is away, or an unexpected error occurred."""
    USAGE = 2
    """The request itself is invalid; repeating it changes nothing."""
    REFUSED = 3
    """Refused by policy, or busy."""
    TIMED_OUT = 4
    """The wait timed out; the operation still runs."""
    WARNINGS = 5
    """No errors, but something should be checked."""
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
    """Return the exit code for an error of this project."""
    match error:
        case InvalidRequest() | InvalidConfiguration():
            return ExitCode.USAGE
        case Refused() | AlreadyRunning():
            return ExitCode.REFUSED
        case NotReady():
            return ExitCode.REFUSED
        case _:
            return ExitCode.FAILED
