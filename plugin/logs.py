"""One event, one line: how the plugin logs, and how it waits for others without filling the log.

Promise: no module-level configuration. A logger is built once, in the composition root, and handed to whoever needs it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, Protocol, TextIO

import structlog

from scrubber.domain.errors import BadConfiguration

__all__ = ["Log", "Reminder", "logger"]

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "json", "console")


class Log(Protocol):
    """What the plugin asks of a logger: an event in a few words, and its facts by name."""

    def debug(self, event: str, **facts: Any) -> Any: ...
    def info(self, event: str, **facts: Any) -> Any: ...
    def warning(self, event: str, **facts: Any) -> Any: ...
    def error(self, event: str, **facts: Any) -> Any: ...


def logger(format_: str = "auto", level: str = "info", stream: TextIO | None = None) -> Log:
    """A logger that writes to ``stream`` (standard error): JSON lines, or for people when that is a terminal.

    Raises:
        BadConfiguration: a format or a level that does not exist.
    """
    if format_ not in FORMATS:
        raise BadConfiguration(f"{format_!r} is no log format: write one of {', '.join(FORMATS)}.")
    if level not in LEVELS:
        raise BadConfiguration(f"{level!r} is no log level: write one of {', '.join(LEVELS)}.")
    out = stream if stream is not None else sys.stderr
    console = format_ == "console" or (format_ == "auto" and out.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=out.isatty()) if console else structlog.processors.JSONRenderer()
    )
    log: Log = structlog.wrap_logger(
        structlog.WriteLogger(out),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        context_class=dict,
    ).bind(component="plugin")
    return log


class Reminder:
    """Says that something is being waited for: once when the wait begins, then at intervals of ``every`` seconds.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, log: Log, *, every: float, clock: Callable[[], float]) -> None:
        self._log = log
        self._every = every
        self._clock = clock
        self._since: float | None = None
        self._said = 0.0
        self._facts: dict[str, Any] = {}

    def waiting(self, event: str, **facts: Any) -> None:
        """Call as often as you like while the wait goes on; different facts are said at once."""
        now = self._clock()
        if self._since is None:
            self._since = now
        elif facts == self._facts and now - self._said < self._every:
            return
        self._said, self._facts = now, facts
        self._log.warning(event, **facts, waited_seconds=round(now - self._since, 1))

    def over(self, event: str, **facts: Any) -> None:
        """The wait has ended; silent when there was none."""
        if self._since is not None:
            self._log.info(event, **facts, waited_seconds=round(self._clock() - self._since, 1))
            self._since = None
