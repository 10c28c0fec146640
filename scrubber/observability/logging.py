"""Format of log lines of both daemons: JSON for machines, columns for terminals, one line per event in both.

Invariants: no logged value can control a terminal, split a line in two, or produce invalid JSON, whatever its source. A
traceback shows no variables, because they may contain data that a tenant must not see. A broken stream loses the line
and has no other effect. Messages of libraries through the standard library's ``logging`` appear in the same format on
the same stream.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final, Literal, TextIO, TypeAlias, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

from scrubber.observability.log_sink import LineWriter, LostLineCounter

__all__ = ["LIBRARY_EVENT", "LogFormatName", "configure_logging", "format_timestamp", "make_logger"]

LogFormatName: TypeAlias = Literal["json", "console", "auto"]

LIBRARY_EVENT: Final = "library.logged"
"""The event of a line from a library: its message is in the field ``sentence``."""

_LEADING_KEYS: Final = ("timestamp", "level", "event", "component")
_TRACEBACK: Final = "traceback"
_LEVELS: Final = ("debug", "info", "warning", "error", "critical")

_MAX_VALUE_CHARS: Final = 4096
"""Limit of one value in characters; journald and container runtimes truncate very long lines, which makes JSON invalid.
"""
_MAX_TRACEBACK_CHARS: Final = 16384
"""Limit of a traceback in characters; its end is kept, because that contains the error."""


def configure_logging(
    format: LogFormatName,
    level: str,
    stream: TextIO | None,
    *,
    component: str,
    now: Callable[[], float] = time.time,
    environ: Mapping[str, str] = os.environ,
    lost_lines: LostLineCounter | None = None,
) -> FilteringBoundLogger:
    """Set up logging for this process, including libraries; return the logger to pass around.

    Called once, by a composition root. Arguments and errors are those of :func:`make_logger`. Libraries are logged from
    warnings on, or completely where ``level`` is ``debug``: their details are not meant for operators.
    """
    logger = make_logger(format, level, stream, component=component, now=now, environ=environ, lost_lines=lost_lines)
    root = logging.getLogger()
    root.handlers[:] = [_LibraryLogHandler(logger, lost_lines or LostLineCounter())]
    root.setLevel(logging.DEBUG if level.lower() == "debug" else max(logging.WARNING, _level_number(level)))
    logging.captureWarnings(capture=True)
    return logger


def make_logger(
    format: LogFormatName,
    level: str,
    stream: TextIO | None,
    *,
    component: str,
    now: Callable[[], float] = time.time,
    environ: Mapping[str, str] = os.environ,
    lost_lines: LostLineCounter | None = None,
) -> FilteringBoundLogger:
    """Return a logger that writes to ``stream`` and changes nothing else in the process.

    Calls of its methods never raise, provided that the values can be converted to strings.

    Args:
        format: ``auto`` is ``console`` on a terminal and ``json`` elsewhere.
        level: ``debug``, ``info``, ``warning`` or ``error``.
        stream: None where there is none, as in a process started with standard error closed.
        component: name of the daemon; on every line.
        now: wall-clock seconds, for lines without the time of their event as ``timestamp``.
        lost_lines: counts lines that could not be written.

    Raises:
        ValueError: no such format or level.
    """
    number = _level_number(level)
    if format not in ("json", "console", "auto"):
        raise ValueError(f"there is no log format {format!r}; write json, console or auto")
    terminal = _is_terminal(stream)
    console = format == "console" or (format == "auto" and terminal)
    plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"

    def stamp(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
        at = line.get("timestamp")
        line["timestamp"] = at if isinstance(at, str) else format_timestamp(now() if at is None else at)
        line.setdefault("component", component)
        return line

    logger = structlog.wrap_logger(
        LineWriter(stream, lost_lines or LostLineCounter()),
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            stamp,
            _format_exception,
            _make_values_json_safe,
            _order_keys,
            _ConsoleRenderer(colors=terminal and not plain) if console else _render_json,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        context_class=dict,
    )
    return cast(FilteringBoundLogger, logger.bind())


def format_timestamp(at: float) -> str:
    """Return wall-clock seconds as ISO 8601 in UTC with milliseconds; a number out of range stays a number."""
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return repr(at)


def _level_number(level: str) -> int:
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"there is no log level {level!r}; write debug, info, warning or error")
    return number


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):  # it is closed
        return False


# -- log records of libraries ------------------------------------------------------------------------------------------


class _LibraryLogHandler(logging.Handler):
    """Writes the log records of libraries as lines of our format."""

    def __init__(self, logger: FilteringBoundLogger, lost_lines: LostLineCounter) -> None:
        super().__init__()
        self._logger = logger
        self._lost_lines = lost_lines

    def emit(self, record: logging.LogRecord) -> None:
        level = max((each for each in map(_level_number, _LEVELS) if each <= record.levelno), default=logging.DEBUG)
        about = {"exc_info": record.exc_info} if record.exc_info else {}
        try:
            self._logger.log(level, LIBRARY_EVENT, logger=record.name, message=record.getMessage(), **about)
        except Exception:  # noqa: BLE001 - a library's message that cannot be formatted is lost
            self._lost_lines.count_line()


# -- format of lines ---------------------------------------------------------------------------------------------------


def _format_exception(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
    """Replace an exception by its text, under a key that no event's field has."""
    if line.get("exc_info"):
        formatted = structlog.processors.format_exc_info(_logger, _method, {"exc_info": line["exc_info"]})
        text = str(formatted.get("exception", ""))
        cut = len(text) - _MAX_TRACEBACK_CHARS
        line[_TRACEBACK] = text if cut <= 0 else f"({cut} characters before) … {text[cut:]}"
    line.pop("exc_info", None)
    return line


def _make_values_json_safe(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
    for key, value in line.items():
        if key != _TRACEBACK:
            line[key] = _json_safe(value)
    return line


def _json_safe(value: object, depth: int = 4) -> object:
    """Return ``value`` as JSON data within the size limits; other types become text."""
    if isinstance(value, str):
        return value if len(value) <= _MAX_VALUE_CHARS else f"{value[:_MAX_VALUE_CHARS]}… ({len(value)} characters)"
    if value is None or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, int):  # one with thousands of digits cannot even be printed
        return value if value.bit_length() <= _MAX_VALUE_CHARS else f"a number of {value.bit_length()} bits"
    if isinstance(value, list | tuple) and depth:
        return [_json_safe(each, depth - 1) for each in value]
    if isinstance(value, dict) and depth:
        return {_json_safe(str(key)): _json_safe(each, depth - 1) for key, each in value.items()}
    return _json_safe(str(value))


def _order_keys(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
    """Put time, level and event first and a traceback last; the other keys keep their order."""
    leading = {key: line[key] for key in _LEADING_KEYS if key in line}
    ending = {_TRACEBACK: line[_TRACEBACK]} if _TRACEBACK in line else {}
    between = {key: value for key, value in line.items() if key not in leading and key not in ending}
    return {**leading, **between, **ending}


def _render_json(_logger: WrappedLogger, _method: str, line: EventDict) -> str:
    """Return the line as ASCII JSON, which is safe for every terminal and parser."""
    return json.dumps(line, allow_nan=False)


class _ConsoleRenderer:
    """Renders lines for terminals. Tenants choose process names, so control characters are escaped."""

    def __init__(self, *, colors: bool) -> None:
        self._render = structlog.dev.ConsoleRenderer(
            colors=colors, sort_keys=False, exception_formatter=structlog.dev.plain_traceback
        )

    def __call__(self, logger: WrappedLogger, method: str, line: EventDict) -> str:
        traceback = line.pop(_TRACEBACK, None)
        # The renderer treats this key as a traceback and prints it unescaped; here it is an ordinary field.
        shown = {_printable(key): _printable(value) for key, value in line.items() if key != "exception"}
        if line.get("exception") is not None:
            shown["by_exception"] = _printable(line["exception"])
        text = str(self._render(logger, method, cast(EventDict, shown)))
        if traceback is None:
            return text
        # Indented: a message with line breaks must not look like several lines of the log.
        return "\n".join([text, *(f"    {_printable(each)}" for each in str(traceback).splitlines())])


def _printable(value: object) -> object:
    shown = value if isinstance(value, str | int | float | None) else repr(value)
    return shown if not isinstance(shown, str) or shown.isprintable() else _escaped(shown)


def _escaped(text: str) -> str:
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)
