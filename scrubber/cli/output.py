"""How answers reach people and scripts: a table, JSON, YAML or bare names on standard output.

What comes from a node's processes and pods may be hostile: nothing but printable characters reaches a terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TextIO

__all__ = ["Answer", "Output", "binary_size", "complain", "emit", "plain", "utc"]

_COLOURS = {
    "clean": "32",
    "passed": "32",
    "in-use": "36",
    "scrubbing": "33",
    "suspect": "33",
    "probation": "33",
    "recovering": "33",
    "held-up": "33",
    "failed": "31",
    "quarantined": "31",
    "condemned": "1;31",
}


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer in all its forms.

    Attributes:
        data: for JSON and YAML; plain lists, dicts and scalars.
        names: for ``-o name``, one a line.
        header: the table's columns; empty for a list of properties.
        rows: the table's cells.
        empty: what a person is told instead of a table without rows.
        notes: what a person is told besides the table, on standard error: whole sentences.
    """

    data: Any
    names: Sequence[str]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty: str = ""
    notes: Sequence[str] = ()


def emit(answer: Answer, output: Output) -> None:
    """Write ``answer`` to standard output.

    Raises:
        OSError: it cannot be written; nothing more is tried.
    """
    try:
        _write(answer, output)
        sys.stdout.flush()
    except OSError:
        # What is still buffered would be tried again when the interpreter ends, and fail with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _write(answer: Answer, output: Output) -> None:
    match output:
        case Output.JSON:
            import json

            print(json.dumps(answer.data, indent=2))
        case Output.YAML:
            import yaml

            print(yaml.safe_dump(answer.data, sort_keys=False), end="")
        case Output.NAME:
            for name in answer.names:
                print(plain(name))
        case Output.TABLE:
            if not answer.rows and answer.empty:
                print(answer.empty, file=sys.stderr)
            else:
                _table(answer.header, answer.rows)
            for note in answer.notes:
                print(f"Note: {plain(note)}", file=sys.stderr)


def complain(text: str) -> None:
    """Write an error to standard error."""
    for line in text.splitlines():
        print(f"Error: {plain(line)}", file=sys.stderr)


def plain(text: str) -> str:
    """``text`` without anything that a terminal would act on."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def binary_size(count: int) -> str:
    """Bytes in the largest binary unit that leaves a whole number: ``256 MiB``."""
    units = ("B", "KiB", "MiB", "GiB")
    power = 0
    while power + 1 < len(units) and count and count % 1024 == 0:
        count //= 1024
        power += 1
    return f"{count} {units[power]}"


def utc(at: float) -> str:
    """Seconds since the epoch as ISO 8601 in UTC, to the second; a number that no calendar knows stays a number."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return repr(at)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    cells = [[plain(cell) for cell in row] for row in rows]
    lines = [list(header), *cells] if header else cells
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    coloured = _wants_colour(sys.stdout)
    for line in lines:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        if coloured:
            padded = [_coloured(cell, text) for cell, text in zip(line, padded, strict=True)]
        print("  ".join(padded).rstrip())


def _wants_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _coloured(word: str, padded: str) -> str:
    colour = _COLOURS.get(word)
    return padded if colour is None else f"\x1b[{colour}m{padded}\x1b[0m"
