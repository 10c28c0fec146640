"""The plugin's log: one event, one line; and rate-limited log lines for waits.

Invariant: every log line of a call of the kubelet has the fields of that call, whichever module writes it. A logger is
created once, in the composition root, and passed to every part that needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TextIO, cast

from structlog.contextvars import bound_contextvars

from scrubber.domain.errors import InvalidConfiguration
from scrubber.observability.log_sink import LostLineCounter
from scrubber.observability.logging import LogFormatName, configure_logging, make_logger

__all__ = ["Logger", "WaitLogger", "create_logger", "log_context"]

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "json", "console")
COMPONENT = "plugin"


class Logger(Protocol):
    """The plugin's logger: an event with a stable, dotted name, and fields with stable names."""

    def debug(self, event: str, **facts: Any) -> Any: ...
    def info(self, event: str, **facts: Any) -> Any: ...
    def warning(self, event: str, **facts: Any) -> Any: ...
    def error(self, event: str, **facts: Any) -> Any: ...


def create_logger(
    format_: str = "auto",
    level: str = "info",
    stream: TextIO | None = None,
    *,
    libraries: bool = False,
    losses: LostLineCounter | None = None,
) -> Logger:
    """Return a logger that writes to ``stream`` (standard error): JSON lines, or text for a terminal.

    Args:
        libraries: the log lines of libraries get the same format, in the whole process.
        losses: counts lines that could not be written.

    Raises:
        InvalidConfiguration: a format or a level that does not exist.
    """
    if format_ not in FORMATS:
        raise InvalidConfiguration(f"Unknown log format {format_!r}. Use one of: {', '.join(FORMATS)}.")
    if level not in LEVELS:
        raise InvalidConfiguration(f"Unknown log level {level!r}. Use one of: {', '.join(LEVELS)}.")
    make = configure_logging if libraries else make_logger
    out = sys.stderr if stream is None else stream
    return make(cast(LogFormatName, format_), level, out, component=COMPONENT, lost_lines=losses)


def log_context(**facts: Any) -> AbstractContextManager[None]:
    """Add these fields to every line that is written inside the context; fields of a line override them."""
    return bound_contextvars(**facts)


class WaitLogger:
    """Logs a wait: once when it begins, then at intervals of ``every`` seconds.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, log: Logger, *, every: float, clock: Callable[[], float]) -> None:
        self._log = log
        self._every = every
        self._clock = clock
        self._since: float | None = None
        self._logged_at = 0.0
        self._facts: dict[str, Any] = {}

    def log_waiting(self, event: str, **facts: Any) -> None:
        """Log the wait; may be called any number of times. Changed fields are logged at once."""
        now = self._clock()
        if self._since is None:
            self._since = now
        elif facts == self._facts and now - self._logged_at < self._every:
            return
        self._logged_at, self._facts = now, facts
        self._log.warning(event, **facts, waited_seconds=round(now - self._since, 1))

    def log_ended(self, event: str, **facts: Any) -> None:
        """Log the end of the wait; does nothing when there was none."""
        if self._since is not None:
            self._log.info(event, **facts, waited_seconds=round(self._clock() - self._since, 1))
            self._since = None
