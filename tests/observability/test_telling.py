"""A console says so once when nobody hears it any more, and is silent from then on."""

from __future__ import annotations

import os
import pty
from collections.abc import Callable

import pytest

from scrubber.emulator.telling import Teller, Unheard


def a_closed_terminal() -> int:
    ours, theirs = pty.openpty()
    os.close(ours)
    return theirs


def a_pipe_that_nobody_reads() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("made", [a_closed_terminal, a_pipe_that_nobody_reads])
def test_it_is_raised_once_and_nothing_is_left_to_be_written(made: Callable[[], int]) -> None:
    with os.fdopen(made(), "w") as stream:  # closing it writes what is left, as the interpreter's end does
        console = Teller(file=stream)
        with pytest.raises(Unheard):
            console.print("nobody hears this")
        console.print("nor this")


def test_a_full_disk_is_no_absence() -> None:
    with open("/dev/full", "w", buffering=1) as stream:
        with pytest.raises(OSError, match="No space left"):
            Teller(file=stream).print("there is no room for this")
        with open(os.devnull, "wb") as nowhere:  # closing the stream tries again
            os.dup2(nowhere.fileno(), stream.fileno())
