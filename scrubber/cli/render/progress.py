"""Live progress on a terminal: a line for each device, redrawn in place and removed at the end.

Invariants: it is shown only on a terminal, and no line is wider than the terminal. Unknown values are not shown: no
rate before progress was observed, and no remaining time without a rate.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scrubber.cli.render.output import printable
from scrubber.cli.render.scrub_result import format_bytes, outcome_word
from scrubber.cli.render.text_layout import display_width, shorten_ids
from scrubber.cli.scrub_updates import ProgressDisplay, ScrubTarget, TargetStatus

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["ProgressTable", "progress_display"]

_BAR_WIDTH = 20
_MIN_SECONDS = 0.5
"""Minimum observation of a phase for a rate: two updates may arrive at almost the same time."""
_GAP = "  "


def progress_display() -> ProgressDisplay:
    """Return the progress display: on standard error if that is a terminal that can redraw a line, else none."""
    if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return _TerminalDisplay()
    return _NoDisplay()


@dataclass(frozen=True, slots=True)
class _DeviceLine:
    """State of a device. ``phase_started`` and ``first_bytes`` are from the first observation of its phase."""

    target: ScrubTarget
    device: str
    activity: str = ""
    joined: bool = False
    outcome: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    phase_started: float = 0.0
    first_bytes: int = 0

    def rate(self, now: float) -> float | None:
        """Return bytes per second over the observed part of the phase."""
        took, moved = now - self.phase_started, self.done_bytes - self.first_bytes
        return moved / took if took >= _MIN_SECONDS and moved > 0 else None


class ProgressTable:
    """The lines, independent of a terminal.

    Args:
        clock: seconds since an arbitrary moment.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Replaced as a whole at every change: another thread may be drawing it.
        self._lines: dict[ScrubTarget, _DeviceLine] = {}
        # The last layout and its width: without them, lines that briefly fit again would jump to and fro.
        self._layout, self._columns = 0, 0

    def update(self, status: TargetStatus) -> None:
        """Store the current ``status``."""
        self._lines = {**self._lines, status.target: self._next_line(self._lines.get(status.target), status)}

    def _next_line(self, line: _DeviceLine | None, course: TargetStatus) -> _DeviceLine:
        line = replace(line or _DeviceLine(course.target, ""), device=course.device_id)
        if course.result is not None or course.error is not None:
            return replace(line, outcome=outcome_word(course))
        progress = course.progress
        if progress is None:
            return line
        doing = ": ".join(printable(each) for each in (progress.step, progress.phase) if each) or "waiting"
        done = progress.done_bytes
        if doing != line.activity or done < line.done_bytes:
            line = replace(line, phase_started=self._clock(), first_bytes=done)
        return replace(line, activity=doing, joined=progress.joined, done_bytes=done, total_bytes=progress.total_bytes)

    def lines(self, columns: int, rows: int) -> list[tuple[str, str]]:
        """Return the lines for ``columns`` by ``rows`` cells, each with its device's outcome or an empty text.

        If there are more devices than rows, those that have ended are dropped first, and the last line counts the rest.
        """
        known = sorted(self._lines.values(), key=_sort_key)
        chosen = known
        if len(known) > rows:
            chosen = sorted(known, key=lambda line: bool(line.outcome))[: max(rows - 1, 0)]
        shown = [(text, line.outcome) for text, line in zip(self._line_texts(chosen, columns), chosen, strict=True)]
        if len(chosen) < len(known):
            over = sum(1 for line in known if line.outcome)
            shown.append((_truncate(f"… {len(known)} devices in all, {over} of them done with", columns), ""))
        return shown

    def _line_texts(self, lines: Sequence[_DeviceLine], columns: int) -> list[str]:
        now = self._clock()
        short = shorten_ids([printable(line.device) for line in lines])
        self._layout, self._columns = (self._layout if columns == self._columns else 0), columns
        for ids, parts in _LAYOUTS[self._layout :]:
            names = [_device_name(line, short if ids else {}) for line in lines]
            texts = list(_align_columns([[name, *parts(line, now)] for name, line in zip(names, lines, strict=True)]))
            if all(display_width(text) <= columns for text in texts):
                return texts
            self._layout += 1
        return [
            _truncate(" ".join(part for part in (line.target.index, _activity_or_outcome(line)) if part), columns)
            for line in lines
        ]


def _sort_key(line: _DeviceLine) -> tuple[bool, int, str, str]:
    """Return a sort key: numeric by index; devices without an index last, by id."""
    index = line.target.index
    number = int(index) if index.isascii() and index.isdecimal() else 0
    return (not index, number, index, line.device)


def _device_name(line: _DeviceLine, short: dict[str, str]) -> str:
    device = printable(line.device)
    return " ".join(part for part in (line.target.index, short.get(device, device)) if part)


def _activity_or_outcome(line: _DeviceLine) -> str:
    return line.outcome or line.activity


def _percent_text(line: _DeviceLine) -> str:
    return f"{100 * min(line.done_bytes, line.total_bytes) // line.total_bytes} %" if _has_amount(line) else ""


def _has_amount(line: _DeviceLine) -> bool:
    return line.total_bytes > 0 and not line.outcome


def _bar_text(line: _DeviceLine) -> str:
    if not _has_amount(line):
        return ""
    full = _BAR_WIDTH * min(line.done_bytes, line.total_bytes) // line.total_bytes
    return f"[{'#' * full}{'.' * (_BAR_WIDTH - full)}]"


def _bytes_text(line: _DeviceLine) -> str:
    return f"{format_bytes(line.done_bytes)} of {format_bytes(line.total_bytes)}" if _has_amount(line) else ""


def _rate_text(line: _DeviceLine, now: float) -> str:
    rate = line.rate(now) if _has_amount(line) else None
    return "" if rate is None else f"{format_bytes(rate)}/s"


def _time_left(line: _DeviceLine, now: float) -> str:
    rate = line.rate(now) if _has_amount(line) else None
    if rate is None:
        return ""
    seconds = max(0, line.total_bytes - line.done_bytes) / rate
    if seconds >= 86400:
        return "over a day left"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} left" if minutes else f"{rest} s left"


def _joined_text(line: _DeviceLine) -> str:
    return "joined" if line.joined else ""


def _everything(line: _DeviceLine, now: float) -> Sequence[str]:
    return (
        _activity_or_outcome(line),
        _bar_text(line),
        _bytes_text(line),
        _rate_text(line, now),
        _time_left(line, now),
        _joined_text(line),
    )


def _without_bar(line: _DeviceLine, now: float) -> Sequence[str]:
    return (
        _activity_or_outcome(line),
        _bytes_text(line),
        _rate_text(line, now),
        _time_left(line, now),
        _joined_text(line),
    )


def _without_rate(line: _DeviceLine, now: float) -> Sequence[str]:
    return (_activity_or_outcome(line), _percent_text(line), _time_left(line, now), _joined_text(line))


def _percent_only(line: _DeviceLine, _: float) -> Sequence[str]:
    return (_activity_or_outcome(line), _percent_text(line))


_LAYOUTS: Sequence[tuple[bool, Callable[[_DeviceLine, float], Sequence[str]]]] = (
    (False, _everything),
    (True, _everything),
    (True, _without_bar),
    (True, _without_rate),
    (True, _percent_only),
)
"""From the widest to the narrowest: whether ids are shortened, and the columns after them."""


def _align_columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    widths = [max(display_width(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        cells = [cell + " " * (wide - display_width(cell)) for cell, wide in zip(row, widths, strict=True) if wide]
        yield _GAP.join(cells).rstrip()


def _truncate(text: str, columns: int) -> str:
    if display_width(text) <= columns:
        return text
    while text and display_width(text) > columns - 1:
        text = text[:-1]
    return f"{text}…" if columns > 0 else ""


class _NoDisplay:
    """No display: a script reads only the result."""

    def update(self, status: TargetStatus) -> None:
        pass

    def close(self) -> None:
        pass


class _TerminalDisplay:
    """The lines, drawn several times a second by a thread of rich."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._table = ProgressTable()
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            transient=True,
            refresh_per_second=8,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def update(self, status: TargetStatus) -> None:
        self._table.update(status)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Text:
        from rich.text import Text

        size = self._console.size
        # One cell stays free: some terminals wrap after a line that fills the whole width.
        lines = self._table.lines(size.width - 1, size.height - 1)
        text = Text(no_wrap=True, overflow="crop")
        for number, (line, ended) in enumerate(lines):
            text.append("\n" if number else "")
            text.append(line, style=_STYLES.get(ended, "yellow") if ended else "")
        return text


_STYLES = {"passed": "green", "failed": "red", "abandoned": "red", "unknown": "red", "not-certified": "red"}
