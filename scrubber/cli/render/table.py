"""Tables and lists of properties that fit the width of a terminal.

Invariants: with a given width, no line is wider; without one (standard output is no terminal), every cell is complete,
on the line of its row. A column is never truncated. It is wrapped, its ids are shortened to a unique prefix, it moves
below its row, or it is dropped, as its :class:`OutputColumn` defines. If even that is too wide, every row becomes a
list of properties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scrubber.cli.render.text_layout import display_width, shorten_ids, wrap

__all__ = ["OutputColumn", "PaintText", "table_lines"]

PaintText = Callable[[str, str], str]
"""Colours a line of a cell: called with the whole cell, and the line."""

_GAP = 2
_INDENT = 4
_EMPTY = ("", "-")


@dataclass(frozen=True, slots=True)
class OutputColumn:
    """One column, and how it may shrink when there is too little room.

    Attributes:
        title: heading; empty in a list of properties.
        min_width: minimum width in cells when wrapped; 0: never wrapped.
        drop_priority: columns with a number are dropped when there is no room, the highest first; 0: never dropped.
        holds_ids: it holds ids, which are shortened before anything is wrapped. ``-`` is not an id.
        can_move_below: its content may be placed below the row instead.
    """

    title: str
    min_width: int = 0
    drop_priority: int = 0
    holds_ids: bool = False
    can_move_below: bool = False


@dataclass(frozen=True, slots=True)
class _MeasuredColumn:
    """A column with its cells; ``full_width`` is its preferred and ``tight_width`` its minimum width."""

    column: OutputColumn
    cells: Sequence[str]
    short: Sequence[str]
    full_width: int
    tight_width: int

    @property
    def comfortable_width(self) -> int:
        """Width that is easy to read: no column is added to the table before every column has this width."""
        return max(self.tight_width, min(self.full_width, 2 * self.column.min_width))


def table_lines(
    header: Sequence[str | OutputColumn],
    rows: Sequence[Sequence[str]],
    max_width: int | None,
    paint: PaintText = lambda _, text: text,
) -> list[str]:
    """Return the lines of a table, or of a list of properties where ``header`` is empty.

    Args:
        header: a column that is only a title may be wrapped. The rows of a list are a name and its value, or one text,
            which is written unchanged.
        rows: as many cells in each as there are columns; printable characters only.
        max_width: cells of a line; ``None`` means unlimited.
    """
    if not rows and not header:
        return []
    if not header and len(rows[0]) == 1:
        return [paint(cell, cell) for (cell,) in rows]
    return list(_fit_lines(_columns(header, rows), rows, max_width, paint))


def _columns(header: Sequence[str | OutputColumn], rows: Sequence[Sequence[str]]) -> Sequence[OutputColumn]:
    if not header:
        return (*(OutputColumn("") for _ in rows[0][:-1]), OutputColumn("", min_width=24))
    last = len(header) - 1
    return [
        each if isinstance(each, OutputColumn) else OutputColumn(each, min_width=24 if place == last else 8)
        for place, each in enumerate(header)
    ]


def _fit_lines(
    columns: Sequence[OutputColumn], rows: Sequence[Sequence[str]], room: int | None, paint: PaintText
) -> Iterator[str]:
    filled = [_measure(column, [row[place] for row in rows]) for place, column in enumerate(columns)]
    if room is None or _total_width([each.full_width for each in filled]) <= room:
        yield from _grid(filled, [each.full_width for each in filled], (), room, paint)
        return
    chosen = _choose_columns(filled, room)
    if chosen is None:
        yield from _property_lists(columns, rows, room, paint)
        return
    kept, below = chosen
    yield from _grid(kept, _column_widths(kept, room), below, room, paint)


def _measure(column: OutputColumn, cells: Sequence[str]) -> _MeasuredColumn:
    names = shorten_ids([each for each in cells if each not in _EMPTY]) if column.holds_ids else {}
    short = [names.get(each, each) for each in cells]
    title = display_width(column.title)
    full = max([title, *map(display_width, cells)])
    tight = max([title, *map(display_width, short)])
    if column.min_width:
        tight = max(title, min(tight, column.min_width))
    return _MeasuredColumn(column, cells, short, full, tight)


def _total_width(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _choose_columns(
    filled: Sequence[_MeasuredColumn], room: int
) -> tuple[list[_MeasuredColumn], list[_MeasuredColumn]] | None:
    """Return the columns side by side, and those whose cells move below the row; ``None`` if nothing fits."""
    kept = [each for each in filled if not each.column.drop_priority]
    below: list[_MeasuredColumn] = []
    while _total_width([each.tight_width for each in kept]) > room:
        movable = [each for each in kept if each.column.can_move_below]
        if not movable:
            return None
        kept.remove(movable[-1])
        below.insert(0, movable[-1])
    for extra in sorted(
        (each for each in filled if each.column.drop_priority), key=lambda each: each.column.drop_priority
    ):
        tried = [each for each in filled if each in kept or each is extra]
        if _total_width([each.comfortable_width for each in tried]) > room:
            break
        kept = tried
    return (kept, below) if kept else None


def _column_widths(kept: Sequence[_MeasuredColumn], room: int) -> list[int]:
    """Return the column widths: tight ones first, then comfortable ones, complete ids, and equal shares of the rest."""
    widths = [each.tight_width for each in kept]
    spare = room - _total_width(widths)
    by_need = sorted(range(len(kept)), key=lambda place: kept[place].full_width)
    for wanted in ([each.comfortable_width for each in kept], [each.full_width for each in kept]):
        for place in [each for each in by_need if kept[each].column.holds_ids]:
            if kept[place].full_width - widths[place] <= spare and wanted[place] == kept[place].full_width:
                spare -= kept[place].full_width - widths[place]
                widths[place] = kept[place].full_width
        elastic = [each for each in by_need if kept[each].column.min_width]
        for number, place in enumerate(elastic):
            given = min(wanted[place] - widths[place], spare // (len(elastic) - number))
            widths[place] += given
            spare -= given
    return widths


def _grid(
    kept: Sequence[_MeasuredColumn],
    widths: Sequence[int],
    below: Sequence[_MeasuredColumn],
    room: int | None,
    paint: PaintText,
) -> Iterator[str]:
    if any(each.column.title for each in kept):
        yield _join_cells([(each.column.title, each.column.title) for each in kept], widths)
    for place in range(len(kept[0].cells)):
        cells = [
            each.cells[place] if display_width(each.cells[place]) <= given else each.short[place]
            for each, given in zip(kept, widths, strict=True)
        ]
        columns = [wrap(cell, given) for cell, given in zip(cells, widths, strict=True)]
        for number in range(max(map(len, columns))):
            line = [lines[number] if number < len(lines) else "" for lines in columns]
            yield _join_cells([(text, paint(cell, text)) for cell, text in zip(cells, line, strict=True)], widths)
        for each in below:
            cell = each.cells[place]
            if cell not in _EMPTY and room is not None:
                indent = min(_INDENT, room // 2)
                yield from (" " * indent + paint(cell, text) for text in wrap(cell, room - indent))


def _join_cells(cells: Sequence[tuple[str, str]], widths: Sequence[int]) -> str:
    """Join pairs of text and coloured text into one line without trailing spaces."""
    line, owed = "", 0
    for (text, painted), given in zip(cells, widths, strict=True):
        if text:
            line += " " * owed + painted
            owed = given - display_width(text) + _GAP
        else:
            owed += given + _GAP
    return line


def _property_lists(
    columns: Sequence[OutputColumn], rows: Sequence[Sequence[str]], room: int, paint: PaintText
) -> Iterator[str]:
    """Yield each row as a separate list of its cells."""
    for place, row in enumerate(rows):
        if any(each.title for each in columns):
            if place:
                yield ""
            titled = [(each.title, cell) for each, cell in zip(columns, row, strict=True) if cell]
            yield from _fit_lines((OutputColumn(""), OutputColumn("", min_width=24)), titled, room, paint)
        else:
            first, *others = row
            yield from (paint(first, text) for text in wrap(first, room))
            for cell in others:
                yield from ("  " + paint(cell, text) for text in wrap(cell, room - 2))
