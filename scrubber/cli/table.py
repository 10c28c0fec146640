"""Tables and lists of properties that fit the terminal they are written on.

Promise: with room given, no line is wider than that room; without (standard output is no terminal), every cell is whole,
on the line of its row. A column is never cut. It is wrapped, its ids are shortened to a beginning that is still unique,
it moves below its row, or it is left out, as its :class:`Column` says; where even that is too wide, every row becomes a
list of properties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scrubber.cli.cells import shortened, width, wrapped

__all__ = ["Column", "Paint", "lines_of"]

Paint = Callable[[str, str], str]
"""What colours a line of a cell: called with the whole cell, and the line."""

_GAP = 2
_INDENT = 4
_EMPTY = ("", "-")


@dataclass(frozen=True, slots=True)
class Column:
    """One column, and what may be done with it where room is short.

    Attributes:
        title: what stands above it; empty in a list of properties.
        least: cells to which it may be wrapped; 0 means never.
        drop: columns with a number are left out where there is no room, the highest first; 0 means never.
        ids: it holds ids, which are shortened before anything is wrapped. ``-`` is none.
        below: what it holds may stand below the row instead.
    """

    title: str
    least: int = 0
    drop: int = 0
    ids: bool = False
    below: bool = False


@dataclass(frozen=True, slots=True)
class _Filled:
    """A column with its cells; ``full`` is what it would like to have and ``tight`` what it can do with."""

    column: Column
    cells: Sequence[str]
    short: Sequence[str]
    full: int
    tight: int

    @property
    def comfort(self) -> int:
        """What it takes to be read easily: nothing is added to the table before each column has as much."""
        return max(self.tight, min(self.full, 2 * self.column.least))


def lines_of(
    header: Sequence[str | Column], rows: Sequence[Sequence[str]], room: int | None, paint: Paint = lambda _, text: text
) -> list[str]:
    """The lines of a table, or of a list of properties where ``header`` is empty.

    Args:
        header: a column that is a bare title may be wrapped. The rows of a list are a name and what belongs to it, or
            one text, which is written as it is.
        rows: as many cells in each as there are columns; printable characters only.
        room: cells of a line; ``None`` means that there is no end of it.
    """
    if not rows and not header:
        return []
    if not header and len(rows[0]) == 1:
        return [paint(cell, cell) for (cell,) in rows]
    return list(_lines(_columns(header, rows), rows, room, paint))


def _columns(header: Sequence[str | Column], rows: Sequence[Sequence[str]]) -> Sequence[Column]:
    if not header:
        return (*(Column("") for _ in rows[0][:-1]), Column("", least=24))
    last = len(header) - 1
    return [
        each if isinstance(each, Column) else Column(each, least=24 if place == last else 8)
        for place, each in enumerate(header)
    ]


def _lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int | None, paint: Paint) -> Iterator[str]:
    filled = [_filled(column, [row[place] for row in rows]) for place, column in enumerate(columns)]
    if room is None or _taken([each.full for each in filled]) <= room:
        yield from _grid(filled, [each.full for each in filled], (), room, paint)
        return
    chosen = _chosen(filled, room)
    if chosen is None:
        yield from _stacked(columns, rows, room, paint)
        return
    kept, below = chosen
    yield from _grid(kept, _widths(kept, room), below, room, paint)


def _filled(column: Column, cells: Sequence[str]) -> _Filled:
    names = shortened([each for each in cells if each not in _EMPTY]) if column.ids else {}
    short = [names.get(each, each) for each in cells]
    title = width(column.title)
    full = max([title, *map(width, cells)])
    tight = max([title, *map(width, short)])
    if column.least:
        tight = max(title, min(tight, column.least))
    return _Filled(column, cells, short, full, tight)


def _taken(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _chosen(filled: Sequence[_Filled], room: int) -> tuple[list[_Filled], list[_Filled]] | None:
    """The columns that stand side by side, and those whose cells stand below; ``None`` if there is no way."""
    kept = [each for each in filled if not each.column.drop]
    below: list[_Filled] = []
    while _taken([each.tight for each in kept]) > room:
        movable = [each for each in kept if each.column.below]
        if not movable:
            return None
        kept.remove(movable[-1])
        below.insert(0, movable[-1])
    for extra in sorted((each for each in filled if each.column.drop), key=lambda each: each.column.drop):
        tried = [each for each in filled if each in kept or each is extra]
        if _taken([each.comfort for each in tried]) > room:
            break
        kept = tried
    return (kept, below) if kept else None


def _widths(kept: Sequence[_Filled], room: int) -> list[int]:
    """Who gets how much: everyone what is tight, then comfort, then ids whole, then the rest in equal shares."""
    widths = [each.tight for each in kept]
    spare = room - _taken(widths)
    by_need = sorted(range(len(kept)), key=lambda place: kept[place].full)
    for wanted in ([each.comfort for each in kept], [each.full for each in kept]):
        for place in [each for each in by_need if kept[each].column.ids]:
            if kept[place].full - widths[place] <= spare and wanted[place] == kept[place].full:
                spare -= kept[place].full - widths[place]
                widths[place] = kept[place].full
        elastic = [each for each in by_need if kept[each].column.least]
        for number, place in enumerate(elastic):
            given = min(wanted[place] - widths[place], spare // (len(elastic) - number))
            widths[place] += given
            spare -= given
    return widths


def _grid(
    kept: Sequence[_Filled], widths: Sequence[int], below: Sequence[_Filled], room: int | None, paint: Paint
) -> Iterator[str]:
    if any(each.column.title for each in kept):
        yield _joined([(each.column.title, each.column.title) for each in kept], widths)
    for place in range(len(kept[0].cells)):
        cells = [
            each.cells[place] if width(each.cells[place]) <= given else each.short[place]
            for each, given in zip(kept, widths, strict=True)
        ]
        columns = [wrapped(cell, given) for cell, given in zip(cells, widths, strict=True)]
        for number in range(max(map(len, columns))):
            line = [lines[number] if number < len(lines) else "" for lines in columns]
            yield _joined([(text, paint(cell, text)) for cell, text in zip(cells, line, strict=True)], widths)
        for each in below:
            cell = each.cells[place]
            if cell not in _EMPTY and room is not None:
                indent = min(_INDENT, room // 2)
                yield from (" " * indent + paint(cell, text) for text in wrapped(cell, room - indent))


def _joined(cells: Sequence[tuple[str, str]], widths: Sequence[int]) -> str:
    """One line of (text, the same painted); nothing stands behind the last of them."""
    line, owed = "", 0
    for (text, painted), given in zip(cells, widths, strict=True):
        if text:
            line += " " * owed + painted
            owed = given - width(text) + _GAP
        else:
            owed += given + _GAP
    return line


def _stacked(columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int, paint: Paint) -> Iterator[str]:
    """Each row by itself: its cells under each other."""
    for place, row in enumerate(rows):
        if any(each.title for each in columns):
            if place:
                yield ""
            titled = [(each.title, cell) for each, cell in zip(columns, row, strict=True) if cell]
            yield from _lines((Column(""), Column("", least=24)), titled, room, paint)
        else:
            first, *others = row
            yield from (paint(first, text) for text in wrapped(first, room))
            for cell in others:
                yield from ("  " + paint(cell, text) for text in wrapped(cell, room - 2))
