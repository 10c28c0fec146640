"""The first SIGINT, SIGTERM or SIGHUP cancels a task; later signals do not interrupt its cleanup.

For a program that started processes and created directories: by default a second Ctrl-C leaves them behind.
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
    """The signal that was received.

    Attributes:
        received: the first signal; None while there was none.
        cleaning_up: set this once only the cleanup is left: no signal cancels anything from then on.
    """

    received: signal.Signals | None = None
    cleaning_up: bool = False


@contextmanager
def cancel_on_first_signal() -> Iterator[Interruption]:
    """While this is open, the first of the signals cancels the current task, and later ones do nothing.

    For the main thread. A signal that was ignored before stays ignored: nohup starts a program that way, and a shell
    starts a background program that way. Afterwards there is nothing left to clean up: later signals end the program
    immediately, without a traceback.
    """
    task, loop, interruption = asyncio.current_task(), asyncio.get_running_loop(), Interruption()
    assert task is not None

    def interrupt(number: signal.Signals) -> None:
        if interruption.received is None and not interruption.cleaning_up:
            interruption.received = number
            task.cancel()

    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    signals = [number for number in ending if signal.getsignal(number) is not signal.SIG_IGN]

    # Handled by the event loop, which a signal wakes even if the kernel delivers it to another thread.
    for number in signals:
        loop.add_signal_handler(number, interrupt, number)
    try:
        yield interruption
    finally:
        for number in signals:
            # remove_signal_handler restores Python's handler for SIGINT, which would print a traceback as the program
            # ends.
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
