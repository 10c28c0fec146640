"""Parses and formats times, sizes and number ranges, for policy files and the command line.

A parser raises :class:`ValueError` with a message that contains valid examples; its caller adds the location in the
file or the flag. A formatter returns what a person would have written, and parsing that gives the same value again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

__all__ = [
    "format_codes",
    "format_rate",
    "format_seconds",
    "format_size",
    "format_window",
    "parse_codes",
    "parse_rate",
    "parse_seconds",
    "parse_size",
    "parse_window",
]

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES: dict[str, int] = {
    "": 1,
    "b": 1,
    **{unit: 1024**power for power, letter in enumerate("kmgt", 1) for unit in (f"{letter}i", f"{letter}ib")},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
_DIGITS = 18
_MAX_BYTES = 1 << 100
"""Bytes; more than any number of :data:`_DIGITS` digits with any unit."""
_NUMBER = rf"([0-9]{{1,{_DIGITS}}}(?:\.[0-9]{{1,9}})?)"
_DURATION = re.compile(rf"{_NUMBER}\s*(ms|s|m|h)", re.ASCII)
_SIZE = re.compile(rf"{_NUMBER}\s*([A-Za-z]{{0,3}})", re.ASCII)
_WINDOW = re.compile(r"([0-9]{1,2}):([0-9]{2})\s*-\s*([0-9]{1,2}):([0-9]{2})", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,9})\s*-\s*([0-9]{1,9})", re.ASCII)


def parse_seconds(raw: object) -> float:
    """Return the seconds of ``25``, ``2.5``, ``"500ms"``, ``"25s"``, ``"2m"`` or ``"1h"``; finite and not negative."""
    if isinstance(raw, str):
        match = _DURATION.fullmatch(raw.strip())
        if match is not None:
            return float(match[1]) * _SECONDS[match[2]]
        raise ValueError(f'"{raw}" is not a time; write seconds as a number, or a time such as 500ms, 25s, 2m or 1h')
    try:
        seconds = math.nan if isinstance(raw, bool) or not isinstance(raw, int | float) else float(raw)
    except OverflowError:  # an integer with hundreds of digits
        seconds = math.inf
    if not math.isfinite(seconds):
        raise ValueError("this is not a time; write seconds as a number, or a time such as 500ms, 25s, 2m or 1h")
    if seconds < 0:
        raise ValueError(f"a time cannot be negative ({raw})")
    return abs(seconds)  # convert negative zero to zero


def parse_window(raw: object) -> tuple[float, float]:
    """Return start and end of ``"02:00-05:00"`` as seconds of the day; the end may be earlier: ``"22:00-04:00"``."""
    match = _WINDOW.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if match is None:
        raise ValueError(f"{_quoted(raw)} is not a time of day; write from and until, such as 02:00-05:00")
    hours, minutes = (int(match[1]), int(match[3])), (int(match[2]), int(match[4]))
    if any(minute > 59 or hour * 60 + minute > 24 * 60 for hour, minute in zip(hours, minutes, strict=True)):
        raise ValueError(f'"{raw}" is not a time of day; hours go from 00:00 to 24:00')
    begin, end = (float(hour * 3600 + minute * 60) for hour, minute in zip(hours, minutes, strict=True))
    if begin % 86400 == end % 86400:
        raise ValueError(f'"{raw}" has the same start and end; write two different times')
    return begin, end


def parse_size(raw: object) -> int:
    """Return the bytes of ``1048576``, ``"256MiB"``, ``"1.5GiB"`` or ``"100MB"`` (MiB = 2^20, MB = 10^6): 1 or more."""
    size = _size(raw)
    if size is None:
        raise ValueError(f"{_quoted(raw)} is not a size; write bytes as a number, or a size such as 256MiB or 1GiB")
    if size < 1:
        raise ValueError(f"{_quoted(raw)} is less than one byte")
    return size


def parse_rate(raw: object) -> int:
    """Return the rate per second of ``"64MiB/s"``, ``"64MiB"`` or ``67108864``; at least 1."""
    rate = _size(raw.strip().removesuffix("/s") if isinstance(raw, str) else raw)
    if rate is None:
        raise ValueError(
            f"{_quoted(raw)} is not a rate; write bytes (or operations) per second as a number, or a rate "
            "such as 64MiB/s or 20GB/s"
        )
    if rate < 1:
        raise ValueError(f"{_quoted(raw)} is too low for a rate; write at least 1")
    return rate


def _size(raw: object) -> int | None:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw if abs(raw) <= _MAX_BYTES else None
    match = _SIZE.fullmatch(raw.strip()) if isinstance(raw, str) else None
    scale = None if match is None else _BYTES.get(match[2].lower())
    if match is None or scale is None:
        return None
    number = match[1]
    return int(number) * scale if "." not in number else round(float(number) * scale)


def parse_codes(raw: object, highest: int) -> tuple[int, ...]:
    """Return the numbers of ``79`` or ``"69-72"``, each from 1 to ``highest``."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        first = last = raw
    else:
        match = _RANGE.fullmatch(raw.strip()) if isinstance(raw, str) else None
        if match is None:
            raise ValueError(f"{_quoted(raw)} is not an XID; write a number such as 79, or a range such as 69-72")
        first, last = int(match[1]), int(match[2])
    if not 1 <= first <= highest or not 1 <= last <= highest:
        raise ValueError(f"{_quoted(raw)} is not an XID; XIDs go from 1 to {highest}")
    if last < first:
        raise ValueError(f'the range "{raw}" is empty; write the lower number first: {last}-{first}')
    return tuple(range(first, last + 1))


def format_seconds(seconds: float) -> str | float:
    """Return the shortest of ``"1h"``, ``"2m"``, ``"2.5s"`` and ``"50ms"``; the number itself where none is exact."""
    texts = [f"{seconds / _SECONDS[unit]:.0f}{unit}" for unit in ("s", "m", "h", "ms")]
    texts.append(f"{seconds:.9f}".rstrip("0") + "s")
    exact = (
        text for text in texts if len(text) <= _DIGITS and _DURATION.fullmatch(text) and parse_seconds(text) == seconds
    )
    return min(exact, key=len, default=seconds)


def format_window(window: tuple[float, float]) -> str:
    """Return ``"02:00-05:00"`` for seconds of the day, which are whole minutes."""
    begin, end = (f"{int(each) // 3600:02}:{int(each) // 60 % 60:02}" for each in window)
    return f"{begin}-{end}"


def format_size(size: int) -> str | int:
    """Return the shortest of ``"256MiB"``, ``"20GB"`` and the number itself."""
    scales = [(f"{letter}{rest}", _BYTES[f"{letter}{rest}".lower()]) for rest in ("iB", "B") for letter in "KMGT"]
    texts = [f"{size // scale}{unit}" for unit, scale in scales if size % scale == 0]
    best = min((text for text in texts if len(text) <= _DIGITS), key=len, default="")
    return best if 0 < len(best) < len(str(size)) else size


def format_rate(rate: int) -> str | int:
    """Like :func:`format_size`, with ``/s``."""
    written = format_size(rate)
    return written if isinstance(written, int) else f"{written}/s"


def format_codes(codes: Iterable[int]) -> list[int | str]:
    """Return ``[79, "110-112"]``: numbers, and ranges of consecutive ones; in order."""
    spans: list[list[int]] = []
    for code in sorted(codes):
        if spans and code == spans[-1][1] + 1:
            spans[-1][1] = code
        else:
            spans.append([code, code])
    return [first if first == last else f"{first}-{last}" for first, last in spans]


def _quoted(raw: object) -> str:
    if isinstance(raw, str):
        return f'"{raw}"'
    return str(raw) if isinstance(raw, int | float) and not isinstance(raw, bool) else "this"
