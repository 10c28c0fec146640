"""Tables and lists of properties, for terminals and for scripts.

Invariants: without a terminal, every row is one complete line. On a terminal, no line is wider than the terminal, and
nothing is lost: ids are shortened to a unique prefix, which every command accepts as a name, and then texts are folded.
Hostile text is harmless: non-printable characters are replaced, and no markup is interpreted.

Loading Rich takes a fifth of the time of a short command, so it is loaded only to fold a table that is too wide.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "OutputColumn",
    "TableSection",
    "device_name",
    "display_width",
    "printable",
    "render_lines",
    "shorten_ids",
    "table_lines",
    "table_renderables",
    "terminal_width",
    "use_colour",
    "wrap",
]

_GAP = 2
"""Cells between two columns."""
_MIN_PREFIX = 12
"""Minimum length of a shortened id: people recognise ``SIM-GPU-1f3a`` or ``GPU-1f3a09c2``."""
_STATUS_STYLES = {
    "green": "clean passed ok granted valid intact as-expected found",
    "yellow": "scrubbing suspect probation recovering blocked abandoned warning refused under-way unknown",
    "red": "failed quarantined error invalid broken differs replaced truncated",
    "cyan": "in-use",
    "bold red": "condemned",
}
_STYLES = {word: style for style, words in _STATUS_STYLES.items() for word in words.split()}
_ANSI = {"green": "32", "yellow": "33", "red": "31", "cyan": "36", "bold red": "1;31", "bold": "1"}


@dataclass(frozen=True, slots=True)
class OutputColumn:
    """One column of a table.

    Attributes:
        min_width: on a terminal, a text may be folded to this many cells; 0: never folded.
        wide: only in the output format ``wide``.
        holds_ids: it holds ids, which are shortened where there is too little room. ``-`` is not an id.
    """

    title: str
    min_width: int = 0
    wide: bool = False
    holds_ids: bool = False


@dataclass(frozen=True, slots=True)
class TableSection:
    """A table with a title; ``empty_message`` replaces it when it has no rows.

    Attributes:
        header: the columns, or only their titles; empty for a list of properties.
    """

    title: str
    header: Sequence[str | OutputColumn]
    rows: Sequence[Sequence[str]]
    empty_message: str = "none"


def table_lines(
    tables: Sequence[TableSection],
    width: int | None,
    *,
    wide: bool = False,
    headers: bool = True,
    colours: bool = False,
) -> list[str]:
    """Return the lines of ``tables``, separated by empty lines. Rows of a single cell alone are written unchanged.

    Args:
        width: cells of a line; ``None`` means unlimited.
        wide: include the columns of the output format ``wide``.
        headers: write the titles of the columns.
    """
    if width is None or all(_is_verbatim(each) for each in tables):
        return list(_plain_lines(tables, wide=wide, headers=headers))
    for short_ids in (False, True):
        lines = list(_plain_lines(tables, wide=wide, headers=headers, short_ids=short_ids))
        if max(map(display_width, lines), default=0) <= width:
            painted = _plain_lines(tables, wide=wide, headers=headers, short_ids=short_ids, colours=True)
            return list(painted) if colours else lines
    return render_lines(table_renderables(tables, width, wide=wide, headers=headers), width, colours=colours)


def _is_verbatim(table: TableSection) -> bool:
    """Return whether the table is a text in a format of its own, such as PEM: it must not be folded."""
    return not table.title and not table.header and all(len(row) == 1 for row in table.rows)


def _plain_lines(
    tables: Iterable[TableSection], *, wide: bool, headers: bool, short_ids: bool = False, colours: bool = False
) -> Iterator[str]:
    """Yield each row as one line, as wide as it is."""
    paint = _ansi if colours else _unchanged
    for number, table in enumerate(tables):
        if number:
            yield ""
        if table.title:
            yield paint(printable(table.title), "bold")
        if not table.rows and table.empty_message:
            yield table.empty_message
            continue
        columns, rows = _shown(table, wide=wide)
        if short_ids:
            rows = _with_short_ids(columns, rows)
        if headers and columns:
            rows = [[each.title for each in columns], *rows]
        widths = [max(map(display_width, cells)) for cells in list(zip(*rows, strict=True))[:-1]]
        for *row, last in rows:
            line = "".join(
                paint(cell, _status_style(cell)) + " " * (width - display_width(cell) + _GAP)
                for cell, width in zip(row, widths, strict=True)
            )
            yield (line + paint(last, _status_style(last))).rstrip(" ")


def _status_style(cell: str) -> str:
    """Return the style of the first word of a cell: "quarantined, advertised"."""
    return _STYLES.get(cell.partition(",")[0], "")


def _ansi(text: str, style: str) -> str:
    return f"\x1b[{_ANSI[style]}m{text}\x1b[0m" if text and style else text


def _unchanged(text: str, _: str) -> str:
    return text


def _shown(table: TableSection, *, wide: bool) -> tuple[list[OutputColumn], list[list[str]]]:
    """Return the columns of the output format, and the rows with their cells only; no columns in a list of properties."""
    last = len(table.header) - 1
    columns = [
        each if isinstance(each, OutputColumn) else OutputColumn(each, min_width=24 if place == last else 8)
        for place, each in enumerate(table.header)
    ]
    places = [place for place, each in enumerate(columns) if wide or not each.wide]
    if not columns:
        return [], [[printable(cell) for cell in row] for row in table.rows]
    return [columns[place] for place in places], [[printable(row[place]) for place in places] for row in table.rows]


def table_renderables(
    tables: Iterable[TableSection], width: int, *, wide: bool, headers: bool
) -> Iterator[RenderableType]:
    """Yield what Rich prints for ``tables`` on a terminal of ``width`` cells."""
    from rich.text import Text

    for number, table in enumerate(tables):
        if number:
            yield Text()
        if table.title:
            yield Text(printable(table.title), "bold")
        if not table.rows and table.empty_message:
            yield Text(table.empty_message)
            continue
        columns, rows = _shown(table, wide=wide)
        if columns:
            yield from _grid(columns, rows, width, headers=headers)
        elif rows:
            yield _property_list(rows)


def _grid(
    columns: Sequence[OutputColumn], rows: list[list[str]], width: int, *, headers: bool
) -> Iterator[RenderableType]:
    """Yield a table; each row as a list of properties where the table is too wide even when it is folded."""
    from rich.table import Table
    from rich.text import Text

    titles = [[each.title for each in columns]] if headers else []
    cells, widths = rows, _full_widths([*titles, *rows])
    if _line_width(widths) > width:
        cells = _with_short_ids(columns, rows)
        widths = _full_widths([*titles, *cells])
    if _fold(widths, columns, width):
        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, show_header=headers, header_style="")
        for column, given in zip(columns, widths, strict=True):
            table.add_column(Text(column.title), width=given, justify="default", overflow="fold")
        for row in cells:
            table.add_row(*map(_cell, row))
        yield table
        return
    for number, row in enumerate(rows):
        if number:
            yield Text()
        yield _property_list([(each.title, cell) for each, cell in zip(columns, row, strict=True) if cell])


def _full_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(1, *map(display_width, cells)) for cells in zip(*rows, strict=True)]


def _line_width(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _fold(widths: list[int], columns: Sequence[OutputColumn], room: int) -> bool:
    """Reduce ``widths`` until a line fits, the widest text first; return whether there is enough room."""
    minimum = [
        min(full, max(column.min_width, display_width(column.title))) if column.min_width else full
        for full, column in zip(widths, columns, strict=True)
    ]
    widths[:] = [min(full, room) for full in widths]
    for _ in range(_line_width(widths) - room):
        foldable = [place for place, each in enumerate(widths) if each > minimum[place]]
        if not foldable:
            return False
        widths[max(foldable, key=widths.__getitem__)] -= 1
    return True


def _with_short_ids(columns: Sequence[OutputColumn], rows: list[list[str]]) -> list[list[str]]:
    if not any(each.holds_ids for each in columns):
        return rows
    short = [
        shorten_ids([row[place] for row in rows if row[place] != "-"]) if column.holds_ids else {}
        for place, column in enumerate(columns)
    ]
    return [[names.get(cell, cell) for names, cell in zip(short, row, strict=True)] for row in rows]


def device_name(text: str) -> str:
    """Return a device name as copied by a user: tables truncate ids to a unique prefix and "…"."""
    return text.strip().removesuffix("…").removesuffix("...")


def _property_list(rows: Sequence[Sequence[str]]) -> RenderableType:
    from rich.table import Table

    table = Table.grid(padding=(0, _GAP, 0, 0))
    for _ in rows[0]:
        table.add_column(justify="default", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(text: str) -> RenderableType:
    from rich.text import Text

    return Text(text, _status_style(text))


def render_lines(renderables: Iterable[RenderableType], width: int, *, colours: bool) -> list[str]:
    """Return the lines that Rich prints on a terminal of ``width`` cells."""
    from io import StringIO

    from rich.console import Console, Group

    screen = StringIO()
    console = Console(
        file=screen,
        width=width,
        height=1,
        force_terminal=True,
        color_system="standard" if colours else None,
        no_color=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(Group(*renderables))
    return [line.rstrip(" ") for line in screen.getvalue().split("\n")[:-1]]


def wrap(text: str, width: int) -> list[str]:
    """Fold printable ``text`` to lines of at most ``width`` cells, between words where possible."""
    if display_width(text) <= width:
        return [text]
    from rich.text import Text

    return render_lines([Text(text)], max(width, 2), colours=False)


def shorten_ids(ids: Collection[str]) -> dict[str, str]:
    """Return a unique prefix of each of ``ids`` with an ellipsis; the whole id where that is no shorter."""
    in_order = sorted(set(ids))
    short = {}
    for place, each in enumerate(in_order):
        neighbours = in_order[max(0, place - 1) : place] + in_order[place + 1 : place + 2]
        prefixes = (each[:length] for length in range(_MIN_PREFIX, len(each) - 1))
        short[each] = next(
            (f"{prefix}…" for prefix in prefixes if not any(other.startswith(prefix) for other in neighbours)), each
        )
    return short


def display_width(text: str) -> int:
    """Return the cells that ``text`` takes on a terminal; it contains printable characters only."""
    if text.replace("…", "").isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def printable(text: str) -> str:
    """Return ``text`` with every non-printable character replaced."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def terminal_width(stream: TextIO | None) -> int | None:
    """Return the width of ``stream`` in cells; ``None`` if it is no terminal, where nothing is shortened or folded."""
    if stream is None or not stream.isatty():
        return None
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    written = os.environ.get("COLUMNS", "")
    return columns or (int(written) if written.isdecimal() else 0) or 80


def use_colour(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal for which colours are not disabled."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
