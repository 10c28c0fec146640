"""Writes results to standard output, in the requested format, and messages to standard error.

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

from scrubber.cli.render.table import (
    OutputColumn,
    TableSection,
    printable,
    table_lines,
    terminal_width,
    use_colour,
    wrap,
)

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
]

API_VERSION = "cli.scrubber.dev/v1"
"""The version of every JSON and YAML document. It changes when a key is renamed, removed, or changes its meaning."""


class OutputFormat(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"

    @property
    def is_table(self) -> bool:
        """Whether the output is for people: a table, with notes on standard error."""
        return self in (OutputFormat.TABLE, OutputFormat.WIDE)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A result in all output formats.

    Attributes:
        data: for JSON and YAML: a dict, or a list of dicts; ``None`` where those formats are never used.
        names: for ``-o name``, one per line.
        header: the table's columns, or only their titles; empty for a list of properties.
        rows: the table's cells.
        empty_message: message in place of a table without rows.
        sections: further tables, for the table formats only.
        notes: full sentences on standard error, for the table formats only.
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
            raise ValueError("a result with data needs a kind")

    @property
    def tables(self) -> Sequence[TableSection]:
        """The main table and the sections below it."""
        main = TableSection("", self.header, self.rows, empty_message="")
        return (main, *self.sections) if self.header or self.rows else self.sections


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


def print_result(result: CommandResult, output: OutputFormat, *, no_headers: bool = False) -> None:
    """Write ``result`` to standard output.

    Args:
        no_headers: omit the titles of a table's columns.

    Raises:
        OSError: it cannot be written; nothing more is tried.
    """
    with flushed_stdout():
        _print_format(result, output, no_headers=no_headers)


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


def _print_format(answer: CommandResult, output: OutputFormat, *, no_headers: bool) -> None:
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
        case OutputFormat.TABLE | OutputFormat.WIDE:
            print_table(answer, sys.stdout, wide=output is OutputFormat.WIDE, no_headers=no_headers)


def print_table(result: CommandResult, stream: TextIO, *, wide: bool = False, no_headers: bool = False) -> None:
    """Write ``result`` as a table to ``stream``, and its notes to standard error.

    Args:
        wide: with the columns of the output format ``wide``.
        no_headers: omit the titles of the columns.
    """
    if not result.rows and not result.sections and result.empty_message:
        print_message(result.empty_message)
    else:
        width, colours = terminal_width(stream), use_colour(stream)
        for line in table_lines(result.tables, width, wide=wide, headers=not no_headers, colours=colours):
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
