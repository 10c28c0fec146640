"""How answers reach people and scripts: a table, JSON, YAML or bare names on standard output.

JSON and YAML say in every document which version of their shape it is, and of what kind; ``docs/cli-json.md`` has the
keys of each kind.

What comes from a node's processes and pods may be hostile: nothing but printable characters reaches a terminal.
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

from scrubber.cli.cells import wrapped
from scrubber.cli.table import Column, Paint, lines_of

__all__ = [
    "API_VERSION",
    "Answer",
    "Column",
    "ListDocument",
    "Output",
    "Section",
    "complain",
    "delivering",
    "document",
    "emit",
    "emit_one",
    "note",
    "plain",
    "room",
    "show",
    "table",
    "tell",
    "wants_colour",
]

API_VERSION = "cli.scrubber.dev/v1"
"""The version of every JSON and YAML document. It changes when a key is renamed or removed, or changes its meaning."""

_WORDS = {
    "32": "clean passed ok granted valid intact as-expected found",
    "33": "scrubbing suspect probation recovering held-up abandoned warning refused under-way cannot-tell",
    "31": "failed quarantined error invalid broken differs replaced cut-off",
    "36": "in-use",
    "1;31": "condemned",
}
_COLOURS = {word: colour for colour, words in _WORDS.items() for word in words.split()}


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


@dataclass(frozen=True, slots=True)
class Section:
    """A further table below an answer's own; ``empty`` stands in its place where it has no rows."""

    title: str
    header: Sequence[str | Column]
    rows: Sequence[Sequence[str]]
    empty: str = "none"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer in all its forms.

    Attributes:
        data: for JSON and YAML: a dict, or a list of dicts; ``None`` where an answer is never written so.
        names: for ``-o name``, one a line.
        header: the table's columns, or only their titles; empty for a list of properties.
        rows: the table's cells.
        empty: what a person is told instead of a table without rows.
        sections: what follows the table, for people only.
        notes: what a person is told besides the table, on standard error: whole sentences.
        kind: of what ``data`` is one, or a list: "Device". Only where ``data`` is ``None`` there is none.

    Raises:
        ValueError: there are data, and they are of no kind.
    """

    data: Any
    names: Sequence[str]
    header: Sequence[str | Column]
    rows: Sequence[Sequence[str]]
    empty: str = ""
    notes: Sequence[str] = ()
    kind: str = ""
    sections: Sequence[Section] = ()

    def __post_init__(self) -> None:
        if self.data is not None and not self.kind:
            raise ValueError("an answer with data is of a kind")


def document(data: Any, kind: str) -> dict[str, Any]:
    """What is written as one JSON or YAML document: ``data`` below its version and kind.

    Raises:
        ValueError: ``data`` has a key that the document needs for itself.
    """
    if not isinstance(data, Mapping):
        return {"apiVersion": API_VERSION, "kind": f"{kind}List", "items": list(data)}
    if {"apiVersion", "kind"} & data.keys():
        raise ValueError("apiVersion and kind are the document's own keys")
    return {"apiVersion": API_VERSION, "kind": kind, **data}


def emit(answer: Answer, output: Output) -> None:
    """Write ``answer`` to standard output.

    Raises:
        OSError: it cannot be written; nothing more is tried.
    """
    with delivering():
        _write(answer, output)


class ListDocument:
    """One JSON or YAML document of a list on standard output, written while its items come: none of them is kept.

    Until :meth:`end` it is no whole document. A list that breaks off is no valid JSON, and nobody takes it for a whole one.
    """

    def __init__(self, kind: str, output: Output) -> None:
        """``kind``: of the list. ``output``: JSON or YAML."""
        self._head = {"apiVersion": API_VERSION, "kind": kind}
        self._output = output
        self._begun = False

    def add(self, items: Iterable[Any]) -> None:
        """Write ``items``, and have them arrive.

        Raises:
            OSError: as in :func:`emit`.
        """
        with delivering():
            for each in items:
                print(self._before(), self._written(each), sep="", end="")
                self._begun = True

    def end(self, **more: Any) -> None:
        """Write the end, with the keys that stand beside the items; their values are no lists and no objects.

        Raises:
            OSError: as in :func:`emit`.
        """
        with delivering():
            if self._output is Output.YAML:
                import yaml

                rest = more if self._begun else {**self._head, "items": [], **more}
                print(yaml.safe_dump(rest, sort_keys=False) if rest else "", end="")
            else:
                import json

                end = "\n  ]" if self._begun else self._before().rstrip() + "]"
                print(end, *(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in more.items()), sep=",\n")
                print("}")

    def _before(self) -> str:
        """What stands before the next item."""
        if self._output is Output.YAML:
            import yaml

            return "" if self._begun else yaml.safe_dump(self._head, sort_keys=False) + "items:\n"
        import json

        if self._begun:
            return ",\n    "
        return json.dumps(self._head, indent=2).removesuffix("\n}") + ',\n  "items": [\n    '

    def _written(self, item: Any) -> str:
        if self._output is Output.YAML:
            import yaml

            return str(yaml.safe_dump([item], sort_keys=False))
        import json

        return json.dumps(item, indent=2).replace("\n", "\n    ")


def emit_one(data: Any, kind: str, output: Output = Output.JSON) -> None:
    """Write one of a stream of documents to standard output, at once: a line of JSON, or a document of YAML.

    Raises:
        OSError: as in :func:`emit`.
    """
    with delivering():
        if output is Output.YAML:
            import yaml

            print(yaml.safe_dump(document(data, kind), sort_keys=False, explicit_start=True), end="")
        else:
            import json

            print(json.dumps(document(data, kind), separators=(",", ":")))


@contextmanager
def delivering() -> Iterator[None]:
    """Have what is written to standard output arrive there, or raise :class:`OSError`; nothing more is tried then."""
    stream: TextIO | None = sys.stdout
    if stream is None:
        raise OSError(errno.EBADF, "Standard output is closed")
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        _given_up(stream)
        if error.errno == errno.EPIPE:  # whoever reads has seen enough
            raise
        why = error.strerror or str(error)
        raise OSError(error.errno, f"Standard output could not be written: {why}") from error


def _given_up(stream: TextIO) -> None:
    """Have nothing more arrive at ``stream``: what is buffered would be tried again at the end, and fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _write(answer: Answer, output: Output) -> None:
    match output:
        case Output.JSON:
            import json

            print(json.dumps(document(answer.data, answer.kind), indent=2))
        case Output.YAML:
            import yaml

            print(yaml.safe_dump(document(answer.data, answer.kind), sort_keys=False), end="")
        case Output.NAME:
            for name in answer.names:
                print(plain(name))
        case Output.TABLE:
            show(answer, sys.stdout)


def show(answer: Answer, stream: TextIO) -> None:
    """Write ``answer`` for a person to ``stream``, and to standard error what is said besides it."""
    if not answer.rows and not answer.sections and answer.empty:
        tell(answer.empty)
    else:
        for line in table(answer, room(stream), colours=wants_colour(stream)):
            print(line, file=stream)
    for each in answer.notes:
        note(each)


def note(text: str) -> None:
    """Write to standard error what a person should know besides the answer."""
    tell(text, "Note: ")


def complain(text: str) -> None:
    """Write an error to standard error."""
    for line in text.splitlines():
        tell(line, "Error: ")


def tell(text: str, before: str = "") -> None:
    """Write a sentence to standard error, which a terminal gets in lines that fit; ``before`` says what it is."""
    stream: TextIO | None = sys.stderr
    if stream is None:  # print would take standard output instead
        return
    text, width = plain(text), room(stream)
    lines = [text] if width is None else wrapped(text, width - len(before))
    try:
        for number, line in enumerate(lines):
            print(f"{' ' * len(before) if number else before}{line}", file=stream)
        stream.flush()
    except OSError:
        # Nobody can be told; what was to be answered, and how it ended, counts all the same.
        _given_up(stream)


def plain(text: str) -> str:
    """``text`` without anything that a terminal would act on."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def room(stream: TextIO | None) -> int | None:
    """How many cells a line of ``stream`` has; ``None`` if it is no terminal, where nothing is cut or wrapped."""
    if stream is None or not stream.isatty():
        return None
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    written = os.environ.get("COLUMNS", "")
    return columns or (int(written) if written.isdecimal() else 0) or 80


def table(answer: Answer, width: int | None, *, colours: bool) -> list[str]:
    """The lines of ``answer`` for a person: its table, and its sections below.

    Args:
        width: cells of a line; ``None`` means that there is no end of it.
    """
    paint = _coloured if colours else _uncoloured
    lines = _lines(answer.header, answer.rows, width, paint)
    for section in answer.sections:
        if lines:
            lines.append("")
        title = plain(section.title)
        titles = [title] if width is None else wrapped(title, width)
        lines += [f"\x1b[1m{each}\x1b[0m" if colours else each for each in titles]
        lines += _lines(section.header, section.rows, width, paint) if section.rows else [section.empty]
    return lines


def wants_colour(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal, and nobody said that it should have no colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _lines(header: Sequence[str | Column], rows: Sequence[Sequence[str]], width: int | None, paint: Paint) -> list[str]:
    return lines_of(header, [[plain(cell) for cell in row] for row in rows], width, paint)


def _coloured(cell: str, text: str) -> str:
    """``text``, in the colour of the first word of the cell that it is of: "quarantined, offered"."""
    colour = _COLOURS.get(cell.partition(",")[0])
    return text if colour is None or not text else f"\x1b[{colour}m{text}\x1b[0m"


def _uncoloured(_: str, text: str) -> str:
    return text
