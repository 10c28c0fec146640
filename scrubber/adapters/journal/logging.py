"""How lines look: JSON for machines, columns for people, one line an event either way.

What libraries say through the standard library's ``logging`` comes out in the same form on the same stream. Local
variables are never printed with a traceback: they may hold what a tenant must not see.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Literal, TextIO, TypeAlias, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

__all__ = ["LogFormat", "configure_logging", "timestamp"]

LogFormat: TypeAlias = Literal["json", "console", "auto"]

_FIRST = ("timestamp", "level", "event")


def timestamp(at: float) -> str:
    """Wall-clock seconds as ISO 8601 in UTC with milliseconds; a number that no calendar knows stays a number."""
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return repr(at)


def configure_logging(
    format: LogFormat,
    level: str,
    stream: TextIO,
    *,
    now: Callable[[], float] = time.time,
    environ: Mapping[str, str] = os.environ,
) -> FilteringBoundLogger:
    """Set up structlog and the standard library's logging for this process; answers the logger to hand around.

    Called once, by a composition root.

    Args:
        format: ``auto`` is ``console`` on a terminal and ``json`` elsewhere.
        level: ``debug``, ``info``, ``warning`` or ``error``.
        now: wall-clock seconds, for lines that do not bring the time of their event.

    Raises:
        ValueError: no such format or level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"there is no log level {level!r}; write debug, info, warning or error")
    if format not in ("json", "console", "auto"):
        raise ValueError(f"there is no log format {format!r}; write json, console or auto")
    terminal = stream.isatty()
    console = format == "console" or (format == "auto" and terminal)
    render = _console(colors=terminal and not environ.get("NO_COLOR")) if console else _json()

    def stamp(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
        if "timestamp" not in line:
            line["timestamp"] = timestamp(now())
        return line

    shared: list[Processor] = [structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, stamp]
    structlog.configure(
        processors=[*shared, structlog.processors.StackInfoRenderer(), *render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    return cast(FilteringBoundLogger, structlog.get_logger().bind())


def _json() -> list[Processor]:
    return [structlog.processors.format_exc_info, _ordered, structlog.processors.JSONRenderer()]


def _console(*, colors: bool) -> list[Processor]:
    return [
        _printable,
        structlog.dev.ConsoleRenderer(
            colors=colors, sort_keys=False, exception_formatter=structlog.dev.plain_traceback
        ),
    ]


def _ordered(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
    """Time, level and event lead every line; the rest keeps its order."""
    leading = {key: line[key] for key in _FIRST if key in line}
    return leading | {key: value for key, value in line.items() if key not in leading}


def _printable(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
    """Names of processes are written by tenants: no control character of theirs reaches a terminal."""
    return {
        key: value.encode("unicode_escape").decode("ascii")
        if isinstance(value, str) and not value.isprintable()
        else value
        for key, value in line.items()
    }
