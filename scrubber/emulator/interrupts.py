"""The first SIGINT, SIGTERM or SIGHUP ends what a task does; those that follow do not end its clearing up.

For a program that started processes and made directories: by default a second Ctrl-C leaves them behind.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Interruption", "cancel_on_first_signal"]


@dataclass(slots=True)
class Interruption:
    """What came.

    Attributes:
        received: the signal that came first; None while none has come.
        cleaning_up: set it once only the clearing up is left: no signal ends anything from then on.
    """

    received: signal.Signals | None = None
    cleaning_up: bool = False


@contextmanager
def cancel_on_first_signal() -> Iterator[Interruption]:
    """Within it the first of the signals cancels the current task, and the others do nothing.

    For the main thread. One that was ignored before stays ignored: nohup starts a program so, and a shell one in the
    background. Afterwards nothing is left to clear up: the others end the program at once, without a traceback.
    """
    task, loop, interruption = asyncio.current_task(), asyncio.get_running_loop(), Interruption()
    assert task is not None

    def interrupt(number: signal.Signals) -> None:
        if interruption.received is None and not interruption.cleaning_up:
            interruption.received = number
            task.cancel()

    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    signals = [number for number in ending if signal.getsignal(number) is not signal.SIG_IGN]

    # By the loop, which a signal wakes even if the kernel gives it to another thread.
    for number in signals:
        loop.add_signal_handler(number, interrupt, number)
    try:
        yield interruption
    finally:
        for number in signals:
            # It puts Python's own back for SIGINT, which would make a traceback as the program ends.
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
