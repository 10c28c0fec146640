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
    """What came.

    Attributes:
        by: the signal that came first; None while none has come.
        over: set it once only the clearing up is left: no signal ends anything from then on.
    """

    by: signal.Signals | None = None
    over: bool = False


@contextmanager
def ended_once() -> Iterator[Interruption]:
    """Within it the first of the signals cancels the current task, and the others do nothing."""
    task, loop, interruption = asyncio.current_task(), asyncio.get_running_loop(), Interruption()
    assert task is not None

    def interrupt(number: signal.Signals) -> None:
        if interruption.by is None and not interruption.over:
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
