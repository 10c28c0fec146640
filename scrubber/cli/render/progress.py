"""Live progress on a terminal: a line for each device, redrawn in place and removed at the end.

Loading this module loads Rich. Invariants: no line is wider than the terminal, and there are no more lines than it has.
Unknown values are not shown: no rate before progress was observed, and no remaining time without a rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

from scrubber.cli.render.scrub_result import format_bytes, outcome_word
from scrubber.cli.render.table import printable, shorten_ids

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from scrubber.cli.scrub_updates import ScrubTarget, TargetStatus

__all__ = ["LiveProgress"]

_STYLES = {"passed": "green", "failed": "red", "abandoned": "red", "unknown": "red", "not-certified": "red"}


class LiveProgress:
    """The lines of all devices. A thread of Rich draws them after :meth:`start`.

    Args:
        clock: seconds since an arbitrary moment; default: the monotonic clock.
    """

    def __init__(self, console: Console, clock: Callable[[], float] | None = None) -> None:
        self.lines = _DeviceLines(
            console=console, transient=True, redirect_stdout=False, redirect_stderr=False, get_time=clock
        )
        self._tasks: dict[ScrubTarget, TaskID] = {}

    def start(self) -> None:
        self.lines.start()

    def update(self, status: TargetStatus) -> None:
        """Store the current ``status``."""
        device = printable(status.device_id)
        if status.target not in self._tasks:
            self._tasks[status.target] = self.lines.add_task(
                "", total=0, index=printable(status.target.index), device=device, joined="", style=""
            )
        task_id, progress = self._tasks[status.target], status.progress
        if status.result is not None or status.error is not None:
            outcome = outcome_word(status)
            self.lines.update(task_id, device=device, joined="", style=_STYLES.get(outcome, "yellow"))
            self.lines.show_activity(task_id, outcome)
        elif progress is not None:
            activity = ": ".join(printable(each) for each in (progress.step, progress.phase) if each) or "waiting"
            self.lines.update(task_id, device=device, joined="joined" if progress.joined else "")
            self.lines.show_activity(task_id, activity, progress.done_bytes, progress.total_bytes)

    def close(self) -> None:
        self.lines.stop()


class _DeviceLines(Progress):
    """A task for each device. Its total is 0 where the amount of work is unknown, and after its end."""

    def show_activity(self, task_id: TaskID, activity: str, done: int = 0, total: int = 0) -> None:
        """Store how much of an ``activity`` is done; less than before means that it began again.

        What was done when an activity began does not count for its rate.
        """
        task, done = self._tasks[task_id], min(done, total)
        if (activity, total) == (task.description, task.total) and done >= task.completed:
            self.update(task_id, completed=done)
        else:
            self.reset(task_id, description=activity, total=total, completed=done)

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the lines that fit the terminal, running devices first, and a last one that counts the devices."""
        if not self._tasks:  # also while Rich is still constructing this object
            return
        width, rows = self.console.width, max(1, self.console.height - 1)
        self.columns = next(columns for least, columns in _LAYOUTS if width >= least)
        tasks = sorted(self.tasks, key=_sort_key)
        short = shorten_ids([each.fields["device"] for each in tasks]) if width < _WIDE else {}
        for each in tasks:
            device = each.fields["device"]
            each.fields["name"] = " ".join(part for part in (each.fields["index"], short.get(device, device)) if part)
        shown = tasks
        if len(tasks) > rows:
            shown = sorted(tasks, key=_has_ended)[: rows - 1]
        yield self.make_tasks_table(shown)
        if len(shown) < len(tasks):
            summary = f"… {len(tasks)} devices, {sum(map(_has_ended, tasks))} finished"
            yield Text(summary, no_wrap=True, overflow="ellipsis")


def _has_ended(task: Task) -> bool:
    return bool(task.fields["style"])


def _sort_key(task: Task) -> tuple[bool, int, str, str]:
    """Return a sort key: numeric by index; devices without an index last, by id."""
    index = task.fields["index"]
    number = int(index) if index.isascii() and index.isdecimal() else 0
    return (not index, number, index, task.fields["device"])


class _ActivityColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.description, task.fields["style"])


class _SpeedColumn(TransferSpeedColumn):
    """In binary units, as all amounts of memory."""

    def render(self, task: Task) -> Text:
        return Text(f"{format_bytes(task.speed or 0)}/s", "progress.data.speed")


class _IfKnown(ProgressColumn):
    """A column that is empty while its value is unknown."""

    def __init__(self, column: ProgressColumn, *, needs_rate: bool = False) -> None:
        super().__init__(_line())
        self._column = column
        self._needs_rate = needs_rate

    def render(self, task: Task) -> RenderableType:
        known = bool(task.total) and (bool(task.speed) or not self._needs_rate)
        return self._column(task) if known else Text()


def _line() -> Column:
    return Column(no_wrap=True)


_WIDE = 120
"""Width of a terminal on which complete ids and a bar have room."""

_INDEX, _NAME = (TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("index", "name"))
_ACTIVITY = _ActivityColumn(_line())
_AMOUNT = _IfKnown(DownloadColumn(binary_units=True))
_RATE = (_IfKnown(_SpeedColumn(), needs_rate=True), _IfKnown(TimeRemainingColumn(), needs_rate=True))
_JOINED = TextColumn("{task.fields[joined]}", markup=False)
_LAYOUTS = (
    (_WIDE, (_NAME, _ACTIVITY, _IfKnown(BarColumn(20)), _AMOUNT, *_RATE, _JOINED)),
    (80, (_NAME, _ACTIVITY, _AMOUNT, *_RATE, _JOINED)),
    (40, (_NAME, _ACTIVITY, _IfKnown(TaskProgressColumn()))),
    (0, (_INDEX, _ACTIVITY, _IfKnown(TaskProgressColumn()))),
)
"""The columns by the least width of the terminal, the widest first."""
