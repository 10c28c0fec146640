"""Times as people write them."""

from __future__ import annotations

__all__ = ["span"]

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def span(seconds: float) -> str:
    """``90.0`` → ``"90 s"``, ``5400.0`` → ``"90 min"``, ``14400.0`` → ``"4 h"``: in the largest unit that says it whole."""
    for size, name in _UNITS:
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {name}"
    return f"{seconds:g} s"
