"""Times, sizes and number ranges as people write them, for policy files and the command line alike.

Everything here raises :class:`ValueError` with a sentence that says what to write instead; whoever reads the file or
the flag adds where it stood.
"""

from __future__ import annotations

import math
import re

__all__ = ["parse_codes", "parse_rate", "parse_seconds", "parse_size"]

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES: dict[str, int] = {
    "": 1,
    "b": 1,
    **{unit: 1024**power for power, letter in enumerate("kmgt", 1) for unit in (f"{letter}i", f"{letter}ib")},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
_NUMBER = r"([0-9]{1,18}(?:\.[0-9]{1,9})?)"
_DURATION = re.compile(rf"{_NUMBER}\s*(ms|s|m|h)", re.ASCII)
_SIZE = re.compile(rf"{_NUMBER}\s*([A-Za-z]{{0,3}})", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,9})\s*-\s*([0-9]{1,9})", re.ASCII)


def parse_seconds(written: object) -> float:
    """Seconds of ``25``, ``2.5``, ``"500ms"``, ``"25s"``, ``"2m"`` or ``"1h"``; never negative, never endless."""
    if isinstance(written, str):
        match = _DURATION.fullmatch(written.strip())
        if match is not None:
            return float(match[1]) * _SECONDS[match[2]]
        raise ValueError(
            f'"{written}" is not a time; write seconds as a number, or a time such as 500ms, 25s, 2m or 1h'
        )
    if isinstance(written, bool) or not isinstance(written, int | float) or not math.isfinite(written):
        raise ValueError("this is not a time; write seconds as a number, or a time such as 500ms, 25s, 2m or 1h")
    if written < 0:
        raise ValueError(f"a time cannot be negative ({written})")
    return float(written)


def parse_size(written: object) -> int:
    """Bytes of ``1048576``, ``"256MiB"``, ``"1.5GiB"`` or ``"100MB"`` (MiB = 2^20, MB = 10^6); at least 1."""
    if isinstance(written, bool) or not isinstance(written, int | str):
        raise ValueError("this is not a size; write bytes as a number, or a size such as 256MiB or 1GiB")
    match = _SIZE.fullmatch(str(written).strip())
    scale = None if match is None else _BYTES.get(match[2].lower())
    if match is None or scale is None:
        raise ValueError(f'"{written}" is not a size; write bytes as a number, or a size such as 256MiB or 1GiB')
    number = match[1]
    size = int(number) * scale if "." not in number else round(float(number) * scale)
    if size < 1:
        raise ValueError(f'"{written}" is less than one byte')
    return size


def parse_rate(written: object) -> int:
    """Bytes per second of ``"64MiB/s"`` or ``"64MiB"``; at least 1."""
    return parse_size(written.removesuffix("/s") if isinstance(written, str) else written)


def parse_codes(written: object, highest: int) -> tuple[int, ...]:
    """The numbers of ``79`` or ``"69-72"``, each from 1 to ``highest``."""
    if isinstance(written, int) and not isinstance(written, bool):
        first = last = written
    else:
        match = _RANGE.fullmatch(written.strip()) if isinstance(written, str) else None
        if match is None:
            raise ValueError(f"{_quoted(written)} is not an XID; write a number such as 79, or a range such as 69-72")
        first, last = int(match[1]), int(match[2])
    if not 1 <= first <= highest or not 1 <= last <= highest:
        raise ValueError(f"{_quoted(written)} is not an XID; they go from 1 to {highest}")
    if last < first:
        raise ValueError(f'the range "{written}" is empty; write the lower number first: {last}-{first}')
    return tuple(range(first, last + 1))


def _quoted(written: object) -> str:
    return f'"{written}"' if isinstance(written, str) else "this" if isinstance(written, list | dict) else str(written)
