"""Live progress on a terminal: a line for each device, redrawn in place, gone when it is over.

Promise: it is shown on a terminal only, and no line is wider than that. What is not known is not shown: no rate before
bytes were seen to move, no time that remains without a rate.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scrubber.cli.cells import shortened, width
from scrubber.cli.following import Course, Display, Target
from scrubber.cli.output import plain
from scrubber.cli.verdict import amount, word

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["Board", "display"]

_BAR = 20
_LEAST_SECONDS = 0.5
"""What is seen of a phase for less than this gives no rate: two updates may come in one breath."""
_GAP = "  "


def display() -> Display:
    """Where progress goes: to standard error if that is a terminal on which a line can be redrawn, else nowhere."""
    if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return _Terminal()
    return _Nowhere()


@dataclass(frozen=True, slots=True)
class _Line:
    """What is known of a device. ``since`` and ``first_bytes`` are of the moment when its phase was first seen."""

    target: Target
    device: str
    doing: str = ""
    joined: bool = False
    ended: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    since: float = 0.0
    first_bytes: int = 0

    def rate(self, now: float) -> float | None:
        """Bytes a second over the phase, as far as it was seen."""
        took, moved = now - self.since, self.done_bytes - self.first_bytes
        return moved / took if took >= _LEAST_SECONDS and moved > 0 else None


class Board:
    """The lines, apart from any terminal.

    Args:
        clock: seconds, from any moment on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Replaced as a whole at every change: another thread may be drawing it.
        self._lines: dict[Target, _Line] = {}
        # The layout last drawn, and for how many cells: lines that fit again for a moment must not jump to and fro.
        self._layout, self._columns = 0, 0

    def show(self, course: Course) -> None:
        """Take note of ``course`` as it is now."""
        self._lines = {**self._lines, course.target: self._after(self._lines.get(course.target), course)}

    def _after(self, line: _Line | None, course: Course) -> _Line:
        line = replace(line or _Line(course.target, ""), device=course.device)
        if course.result is not None or course.error is not None:
            return replace(line, ended=word(course))
        progress = course.progress
        if progress is None:
            return line
        doing = ": ".join(plain(each) for each in (progress.step, progress.phase) if each) or "waiting"
        done = progress.done_bytes
        if doing != line.doing or done < line.done_bytes:
            line = replace(line, since=self._clock(), first_bytes=done)
        return replace(line, doing=doing, joined=progress.joined, done_bytes=done, total_bytes=progress.total_bytes)

    def lines(self, columns: int, rows: int) -> list[tuple[str, str]]:
        """What is shown on ``columns`` by ``rows`` cells: lines, each with how its device ended, or an empty text.

        Where there are more devices than rows, those that have ended give way first, and the last line counts the rest.
        """
        known = sorted(self._lines.values(), key=_place)
        chosen = known
        if len(known) > rows:
            chosen = sorted(known, key=lambda line: bool(line.ended))[: max(rows - 1, 0)]
        shown = [(text, line.ended) for text, line in zip(self._texts(chosen, columns), chosen, strict=True)]
        if len(chosen) < len(known):
            over = sum(1 for line in known if line.ended)
            shown.append((_cut(f"… {len(known)} devices in all, {over} of them done with", columns), ""))
        return shown

    def _texts(self, lines: Sequence[_Line], columns: int) -> list[str]:
        now = self._clock()
        short = shortened([plain(line.device) for line in lines])
        self._layout, self._columns = (self._layout if columns == self._columns else 0), columns
        for ids, parts in _LAYOUTS[self._layout :]:
            names = [_name(line, short if ids else {}) for line in lines]
            texts = list(_aligned([[name, *parts(line, now)] for name, line in zip(names, lines, strict=True)]))
            if all(width(text) <= columns for text in texts):
                return texts
            self._layout += 1
        return [_cut(" ".join(part for part in (line.target.index, _state(line)) if part), columns) for line in lines]


def _place(line: _Line) -> tuple[bool, int, str, str]:
    """Where the line stands: by index, as people count; what has none below, by its id."""
    index = line.target.index
    number = int(index) if index.isascii() and index.isdecimal() else 0
    return (not index, number, index, line.device)


def _name(line: _Line, short: dict[str, str]) -> str:
    device = plain(line.device)
    return " ".join(part for part in (line.target.index, short.get(device, device)) if part)


def _state(line: _Line) -> str:
    return line.ended or line.doing


def _percent(line: _Line) -> str:
    return f"{100 * min(line.done_bytes, line.total_bytes) // line.total_bytes} %" if _moving(line) else ""


def _moving(line: _Line) -> bool:
    return line.total_bytes > 0 and not line.ended


def _bar(line: _Line) -> str:
    if not _moving(line):
        return ""
    full = _BAR * min(line.done_bytes, line.total_bytes) // line.total_bytes
    return f"[{'#' * full}{'.' * (_BAR - full)}]"


def _bytes(line: _Line) -> str:
    return f"{amount(line.done_bytes)} of {amount(line.total_bytes)}" if _moving(line) else ""


def _rate(line: _Line, now: float) -> str:
    rate = line.rate(now) if _moving(line) else None
    return "" if rate is None else f"{amount(rate)}/s"


def _left(line: _Line, now: float) -> str:
    rate = line.rate(now) if _moving(line) else None
    if rate is None:
        return ""
    seconds = max(0, line.total_bytes - line.done_bytes) / rate
    if seconds >= 86400:
        return "over a day left"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} left" if minutes else f"{rest} s left"


def _joined(line: _Line) -> str:
    return "joined" if line.joined else ""


def _everything(line: _Line, now: float) -> Sequence[str]:
    return (_state(line), _bar(line), _bytes(line), _rate(line, now), _left(line, now), _joined(line))


def _without_bar(line: _Line, now: float) -> Sequence[str]:
    return (_state(line), _bytes(line), _rate(line, now), _left(line, now), _joined(line))


def _without_rate(line: _Line, now: float) -> Sequence[str]:
    return (_state(line), _percent(line), _left(line, now), _joined(line))


def _how_far(line: _Line, _: float) -> Sequence[str]:
    return (_state(line), _percent(line))


_LAYOUTS: Sequence[tuple[bool, Callable[[_Line, float], Sequence[str]]]] = (
    (False, _everything),
    (True, _everything),
    (True, _without_bar),
    (True, _without_rate),
    (True, _how_far),
)
"""From the widest to the narrowest: whether ids are shortened, and what stands behind them."""


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    widths = [max(width(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        cells = [cell + " " * (wide - width(cell)) for cell, wide in zip(row, widths, strict=True) if wide]
        yield _GAP.join(cells).rstrip()


def _cut(text: str, columns: int) -> str:
    if width(text) <= columns:
        return text
    while text and width(text) > columns - 1:
        text = text[:-1]
    return f"{text}…" if columns > 0 else ""


class _Nowhere:
    """Nobody watches: a script reads the verdict only."""

    def show(self, course: Course) -> None:
        pass

    def close(self) -> None:
        pass


class _Terminal:
    """The board, drawn several times a second by a thread of rich's."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._board = Board()
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(
            console=self._console,
            get_renderable=self._drawn,
            transient=True,
            refresh_per_second=8,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def show(self, course: Course) -> None:
        self._board.show(course)

    def close(self) -> None:
        self._live.stop()

    def _drawn(self) -> Text:
        from rich.text import Text

        size = self._console.size
        # One cell stays free: a terminal that is written full to its edge may go to the next line by itself.
        lines = self._board.lines(size.width - 1, size.height - 1)
        text = Text(no_wrap=True, overflow="crop")
        for number, (line, ended) in enumerate(lines):
            text.append("\n" if number else "")
            text.append(line, style=_STYLES.get(ended, "yellow") if ended else "")
        return text


_STYLES = {"passed": "green", "failed": "red", "abandoned": "red", "unknown": "red", "not-certified": "red"}
