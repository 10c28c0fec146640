"""Chooses the display of progress: live lines on a terminal, nothing elsewhere. Rich is loaded only for the lines."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scrubber.cli.scrub_updates import ProgressDisplay, TargetStatus

__all__ = ["progress_display"]


class _NoDisplay:
    """No display: a script reads only the result."""

    def update(self, status: TargetStatus) -> None:
        pass

    def close(self) -> None:
        pass


def progress_display() -> ProgressDisplay:
    """Return a started display on standard error if that is a terminal that can redraw a line, else none."""
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return _NoDisplay()
    from rich.console import Console

    from scrubber.cli.render.progress import LiveProgress

    display = LiveProgress(Console(stderr=True, highlight=False))
    display.start()
    return display
