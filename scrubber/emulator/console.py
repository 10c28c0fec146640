"""The console of the scenario, which raises an error when its output is closed.

A terminal that was closed, or a pipe whose reader has ended, would otherwise end the program at the next print, with
processes and directories left behind.
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
    """Prints as any console until its output is closed: that is raised once, and later output is discarded."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as :meth:`rich.console.Console.print` does.

        Raises:
            OutputClosed: the output was closed.
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
        # Otherwise the interpreter would write the buffered output at its end, fail, and exit with status 120.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)
