"""A console reports once that its reader is gone, and is silent from then on."""

from __future__ import annotations

import os
import pty
from collections.abc import Callable

import pytest

from scrubber.emulator.console import DemoConsole, OutputClosed


def a_closed_terminal() -> int:
    ours, theirs = pty.openpty()
    os.close(ours)
    return theirs


def unread_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("made", [a_closed_terminal, unread_pipe])
def test_console_raises_output_closed_once_and_writes_nothing_more(made: Callable[[], int]) -> None:
    with os.fdopen(made(), "w") as stream:  # closing it writes the buffered rest, as at the interpreter's exit
        console = DemoConsole(file=stream)
        with pytest.raises(OutputClosed):
            console.print("filtered out")
        console.print("nor this")


def test_full_disk_is_not_reported_as_closed_output() -> None:
    with open("/dev/full", "w", buffering=1) as stream:
        with pytest.raises(OSError, match="No space left"):
            DemoConsole(file=stream).print("there is no room for this")
        with open(os.devnull, "wb") as nowhere:  # closing the stream tries to write again
            os.dup2(nowhere.fileno(), stream.fileno())
