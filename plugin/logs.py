"""One event, one line: how the plugin logs, and how it waits for others without filling the log.

Promise: what the kubelet asked for is on every line of the call, whoever writes it. A logger is built once, in the
composition root, and handed to whoever needs it.
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
    """What the plugin asks of a logger: an event by its stable, dotted name, and its facts by theirs."""

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
    """A logger that writes to ``stream`` (standard error): JSON lines, or for people when that is a terminal.

    Args:
        libraries: what they log comes out the same way, in the whole process.
        losses: told of lines that could not be written.

    Raises:
        InvalidConfiguration: a format or a level that does not exist.
    """
    if format_ not in FORMATS:
        raise InvalidConfiguration(f"{format_!r} is no log format: write one of {', '.join(FORMATS)}.")
    if level not in LEVELS:
        raise InvalidConfiguration(f"{level!r} is no log level: write one of {', '.join(LEVELS)}.")
    make = configure_logging if libraries else make_logger
    out = sys.stderr if stream is None else stream
    return make(cast(LogFormatName, format_), level, out, component=COMPONENT, lost_lines=losses)


def log_context(**facts: Any) -> AbstractContextManager[None]:
    """Have every line that is written inside, by whomever, name these facts; a line's own win."""
    return bound_contextvars(**facts)


class WaitLogger:
    """Says that something is being waited for: once when the wait begins, then at intervals of ``every`` seconds.

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
        """Call as often as you like while the wait goes on; different facts are said at once."""
        now = self._clock()
        if self._since is None:
            self._since = now
        elif facts == self._facts and now - self._logged_at < self._every:
            return
        self._logged_at, self._facts = now, facts
        self._log.warning(event, **facts, waited_seconds=round(now - self._since, 1))

    def log_ended(self, event: str, **facts: Any) -> None:
        """The wait has ended; silent when there was none."""
        if self._since is not None:
            self._log.info(event, **facts, waited_seconds=round(self._clock() - self._since, 1))
            self._since = None
