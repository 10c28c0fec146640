"""Where the story is told: a console that says so when nobody hears it any more.

A terminal that was closed, or a pipe whose reader has ended, would otherwise end the program wherever it prints next, with
what it made left behind.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from rich.console import Console

__all__ = ["DemoConsole", "OutputClosed"]


class OutputClosed(Exception):
    """The terminal was closed, or the pipe's reader has ended."""


class DemoConsole(Console):
    """Prints as any console, until nobody hears it: that is raised once, and what is printed afterwards goes nowhere."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's.

        Raises:
            OutputClosed: nobody hears it any more.
            OSError: it could not be written for another reason.
        """
        try:
            super().print(*objects, **options)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            self._discard_output()
            raise OutputClosed from error

    def on_broken_pipe(self) -> None:
        """Leave it to :meth:`print`: rich would end the program here."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def _discard_output(self) -> None:
        # What is buffered would be tried again as the interpreter ends, fail, and make the exit status 120.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)
