"""The first SIGINT, SIGTERM or SIGHUP ends what a task does; those that follow do not end its clearing up.

For a program that started processes and made directories: by default a second Ctrl-C leaves them behind.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Interruption", "ended_once"]


@dataclass(slots=True)
class Interruption:
    """``by`` is the signal that came first; None while none has come."""

    by: signal.Signals | None = None


@contextmanager
def ended_once() -> Iterator[Interruption]:
    """Within it the first of the signals cancels the current task, and the others do nothing."""
    task, loop, interruption = asyncio.current_task(), asyncio.get_running_loop(), Interruption()
    assert task is not None

    def interrupt(number: signal.Signals) -> None:
        if interruption.by is None:
            interruption.by = number
            task.cancel()

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, interrupt, number)
    try:
        yield interruption
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
