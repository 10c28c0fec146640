"""Formats durations, sizes and times for messages."""

from __future__ import annotations

from datetime import UTC, datetime

__all__ = ["format_duration", "format_size", "format_utc", "rfc3339"]

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def format_duration(seconds: float) -> str:
    """``90.0`` → ``"90 s"``, ``5400.0`` → ``"90 min"``, ``14400.0`` → ``"4 h"``: in the largest exact unit."""
    for size, name in _UNITS:
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {name}"
    return f"{seconds:g} s"


def format_size(count: int) -> str:
    """Format bytes in the largest binary unit that leaves a whole number: ``256 MiB``."""
    units = ("B", "KiB", "MiB", "GiB")
    power = 0
    while power + 1 < len(units) and count and count % 1024 == 0:
        count //= 1024
        power += 1
    return f"{count} {units[power]}"


def format_utc(at: float) -> str:
    """Format seconds since the epoch as ISO 8601 in UTC, to the second; a time outside the calendar stays a number."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return repr(at)


def rfc3339(at: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC, to the microsecond; a time outside the years 1 to 9999 stays a number."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    except (OverflowError, ValueError, OSError):
        return repr(at)
