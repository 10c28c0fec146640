"""Writes results to standard output: as a table, JSON, YAML or bare names.

Every JSON and YAML document contains the version of its shape and its kind; ``docs/cli-json.md`` lists the keys of each
kind. Text from a node's processes and pods may be hostile: only printable characters reach a terminal.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TextIO

from scrubber.cli.render.table import OutputColumn, PaintText, table_lines
from scrubber.cli.render.text_layout import wrap

__all__ = [
    "API_VERSION",
    "CommandResult",
    "ListDocument",
    "OutputColumn",
    "OutputFormat",
    "TableSection",
    "document",
    "flushed_stdout",
    "print_document",
    "print_error",
    "print_message",
    "print_note",
    "print_result",
    "print_table",
    "printable",
    "table_text",
    "terminal_width",
    "use_colour",
]

API_VERSION = "cli.scrubber.dev/v1"
"""The version of every JSON and YAML document. It changes when a key is renamed, removed, or changes its meaning."""

_STATUS_COLOURS = {
    "32": "clean passed ok granted valid intact as-expected found",
    "33": "scrubbing suspect probation recovering blocked abandoned warning refused under-way unknown",
    "31": "failed quarantined error invalid broken differs replaced truncated",
    "36": "in-use",
    "1;31": "condemned",
}
_COLOURS = {word: colour for colour, words in _STATUS_COLOURS.items() for word in words.split()}


class OutputFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


@dataclass(frozen=True, slots=True)
class TableSection:
    """A table below the main table; ``empty_message`` replaces it when it has no rows."""

    title: str
    header: Sequence[str | OutputColumn]
    rows: Sequence[Sequence[str]]
    empty_message: str = "none"


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A result in all output formats.

    Attributes:
        data: for JSON and YAML: a dict, or a list of dicts; ``None`` where those formats are never used.
        names: for ``-o name``, one per line.
        header: the table's columns, or only their titles; empty for a list of properties.
        rows: the table's cells.
        empty_message: message in place of a table without rows.
        sections: further tables, for the table format only.
        notes: full sentences on standard error, for the table format.
        kind: kind of ``data`` or of its items: "Device". Empty only where ``data`` is ``None``.

    Raises:
        ValueError: there is data without a kind.
    """

    data: Any
    names: Sequence[str]
    header: Sequence[str | OutputColumn]
    rows: Sequence[Sequence[str]]
    empty_message: str = ""
    notes: Sequence[str] = ()
    kind: str = ""
    sections: Sequence[TableSection] = ()

    def __post_init__(self) -> None:
        if self.data is not None and not self.kind:
            raise ValueError("an answer with data is of a kind")


def document(data: Any, kind: str) -> dict[str, Any]:
    """Return one JSON or YAML document: ``data`` below its version and kind.

    Raises:
        ValueError: ``data`` has a key that is reserved for the document.
    """
    if not isinstance(data, Mapping):
        return {"apiVersion": API_VERSION, "kind": f"{kind}List", "items": list(data)}
    if {"apiVersion", "kind"} & data.keys():
        raise ValueError("apiVersion and kind are the document's own keys")
    return {"apiVersion": API_VERSION, "kind": kind, **data}


def print_result(result: CommandResult, output: OutputFormat) -> None:
    """Write ``result`` to standard output.

    Raises:
        OSError: it cannot be written; nothing more is tried.
    """
    with flushed_stdout():
        _print_format(result, output)


class ListDocument:
    """One JSON or YAML document of a list on standard output, written incrementally: no item is kept in memory.

    It is incomplete until :meth:`end`. A truncated JSON list is invalid, so it cannot be mistaken for a complete one.
    """

    def __init__(self, kind: str, output: OutputFormat) -> None:
        """``kind``: of the list. ``output``: JSON or YAML."""
        self._head = {"apiVersion": API_VERSION, "kind": kind}
        self._output = output
        self._started = False

    def add(self, items: Iterable[Any]) -> None:
        """Write and flush ``items``.

        Raises:
            OSError: as in :func:`print_result`.
        """
        with flushed_stdout():
            for each in items:
                print(self._separator(), self._serialize(each), sep="", end="")
                self._started = True

    def end(self, **extra: Any) -> None:
        """Write the end, with the keys besides the items, which hold plain values or flat objects.

        Raises:
            OSError: as in :func:`print_result`.
        """
        with flushed_stdout():
            if self._output is OutputFormat.YAML:
                import yaml

                rest = extra if self._started else {**self._head, "items": [], **extra}
                print(yaml.safe_dump(rest, sort_keys=False) if rest else "", end="")
            else:
                import json

                end = "\n  ]" if self._started else self._separator().rstrip() + "]"
                print(end, *(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in extra.items()), sep=",\n")
                print("}")

    def _separator(self) -> str:
        """Return the text before the next item."""
        if self._output is OutputFormat.YAML:
            import yaml

            return "" if self._started else yaml.safe_dump(self._head, sort_keys=False) + "items:\n"
        import json

        if self._started:
            return ",\n    "
        return json.dumps(self._head, indent=2).removesuffix("\n}") + ',\n  "items": [\n    '

    def _serialize(self, item: Any) -> str:
        if self._output is OutputFormat.YAML:
            import yaml

            return str(yaml.safe_dump([item], sort_keys=False))
        import json

        return json.dumps(item, indent=2).replace("\n", "\n    ")


def print_document(data: Any, kind: str, output: OutputFormat = OutputFormat.JSON) -> None:
    """Write and flush one document of a stream to standard output: a line of JSON, or a document of YAML.

    Raises:
        OSError: as in :func:`print_result`.
    """
    with flushed_stdout():
        if output is OutputFormat.YAML:
            import yaml

            print(yaml.safe_dump(document(data, kind), sort_keys=False, explicit_start=True), end="")
        else:
            import json

            print(json.dumps(document(data, kind), separators=(",", ":")))


@contextmanager
def flushed_stdout() -> Iterator[None]:
    """Flush standard output at the end, or raise :class:`OSError`; nothing more is tried then."""
    stream: TextIO | None = sys.stdout
    if stream is None:
        raise OSError(errno.EBADF, "Standard output is closed")
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        _discard_output(stream)
        if error.errno == errno.EPIPE:  # the reader has closed the pipe
            raise
        why = error.strerror or str(error)
        raise OSError(error.errno, f"Standard output could not be written: {why}") from error


def _discard_output(stream: TextIO) -> None:
    """Discard further output to ``stream``: buffered text would be flushed again at exit, and fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print_format(answer: CommandResult, output: OutputFormat) -> None:
    match output:
        case OutputFormat.JSON:
            import json

            print(json.dumps(document(answer.data, answer.kind), indent=2))
        case OutputFormat.YAML:
            import yaml

            print(yaml.safe_dump(document(answer.data, answer.kind), sort_keys=False), end="")
        case OutputFormat.NAME:
            for name in answer.names:
                print(printable(name))
        case OutputFormat.TABLE:
            print_table(answer, sys.stdout)


def print_table(result: CommandResult, stream: TextIO) -> None:
    """Write ``result`` as a table to ``stream``, and its notes to standard error."""
    if not result.rows and not result.sections and result.empty_message:
        print_message(result.empty_message)
    else:
        for line in table_text(result, terminal_width(stream), colours=use_colour(stream)):
            print(line, file=stream)
    for each in result.notes:
        print_note(each)


def print_note(text: str) -> None:
    """Write a note to standard error."""
    print_message(text, "Note: ")


def print_error(text: str) -> None:
    """Write an error to standard error."""
    for line in text.splitlines():
        print_message(line, "Error: ")


def print_message(text: str, prefix: str = "") -> None:
    """Write a message to standard error, wrapped to a terminal's width; ``prefix`` names its category."""
    stream: TextIO | None = sys.stderr
    if stream is None:  # print would use standard output instead
        return
    text, width = printable(text), terminal_width(stream)
    lines = [text] if width is None else wrap(text, width - len(prefix))
    try:
        for number, line in enumerate(lines):
            print(f"{' ' * len(prefix) if number else prefix}{line}", file=stream)
        stream.flush()
    except OSError:
        # There is no other place to report this; the result and the exit code are unaffected.
        _discard_output(stream)


def printable(text: str) -> str:
    """Return ``text`` with every non-printable character replaced."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def terminal_width(stream: TextIO | None) -> int | None:
    """Return the width of ``stream`` in cells; ``None`` if it is no terminal, where nothing is truncated or wrapped."""
    if stream is None or not stream.isatty():
        return None
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    written = os.environ.get("COLUMNS", "")
    return columns or (int(written) if written.isdecimal() else 0) or 80


def table_text(result: CommandResult, width: int | None, *, colours: bool) -> list[str]:
    """Return the lines of ``result`` in the table format: its table, and its sections below.

    Args:
        width: cells of a line; ``None`` means unlimited.
    """
    paint = _colour_by_status if colours else _no_colour
    lines = _lines(result.header, result.rows, width, paint)
    for section in result.sections:
        if lines:
            lines.append("")
        title = printable(section.title)
        titles = [title] if width is None else wrap(title, width)
        lines += [f"\x1b[1m{each}\x1b[0m" if colours else each for each in titles]
        lines += _lines(section.header, section.rows, width, paint) if section.rows else [section.empty_message]
    return lines


def use_colour(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal for which colours are not disabled."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _lines(
    header: Sequence[str | OutputColumn], rows: Sequence[Sequence[str]], width: int | None, paint: PaintText
) -> list[str]:
    return table_lines(header, [[printable(cell) for cell in row] for row in rows], width, paint)


def _colour_by_status(cell: str, text: str) -> str:
    """Return ``text`` in the colour of the first word of its cell: "quarantined, offered"."""
    colour = _COLOURS.get(cell.partition(",")[0])
    return text if colour is None or not text else f"\x1b[{colour}m{text}\x1b[0m"


def _no_colour(_: str, text: str) -> str:
    return text
