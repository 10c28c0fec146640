"""The ``scrubber`` command: runs a command line, and turns errors into messages.

No traceback is shown for errors of the node, the service or the request; for a bug of this program it is shown on
request (``SCRUBBER_TRACEBACK=1``).
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from scrubber.cli.exit_codes import ExitCode, exit_code_for
from scrubber.cli.plain_lines import plain_command
from scrubber.cli.render.output import print_error
from scrubber.cli.startup import make_gc_rare
from scrubber.domain.errors import ScrubberError

__all__ = ["main"]

_COMPLETION_VARIABLE = "_SCRUBBER_COMPLETE"
"""The environment variable by which a shell requests completions; Typer reads it."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line ``argv`` (default: this process's own) and exit."""
    make_gc_rare()
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        if _COMPLETION_VARIABLE in os.environ:
            from scrubber.cli.shell_completion import enable_completion

            enable_completion()
        elif (command := plain_command(words, os.environ)) is not None:
            _run_plain(command)
        _run_any(words)
    except ScrubberError as error:
        print_error(str(error))
        sys.exit(exit_code_for(error))
    except ExceptionGroup as group:
        ours, others = group.split(ScrubberError)
        if ours is None or others is not None:
            _report_bug(group)
        causes = list(_leaves(ours))
        for cause in causes:
            print_error(str(cause))
        sys.exit(exit_code_for(causes[0]))
    except OSError as error:
        about = f": {error.filename}" if error.filename is not None else ""
        print_error(f"{error.strerror or error}{about}.")
        sys.exit(ExitCode.FAILED)
    except Exception as bug:  # noqa: BLE001 - otherwise the interpreter would print a traceback
        _report_bug(bug)
    raise AssertionError("the command line ended without an exit code")


def _run_any(words: Sequence[str]) -> None:
    import typer

    from scrubber.cli.command_tree import app

    typer.main.get_command(app)(args=words, prog_name="scrubber")


def _run_plain(command: Callable[[], ExitCode | None]) -> NoReturn:
    """Run a command and exit as Typer does."""
    try:
        code = command()
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader has closed the pipe
            sys.exit(ExitCode.FAILED)
        raise
    sys.exit(ExitCode.OK if code is None else code)


def _leaves(group: ExceptionGroup[ScrubberError]) -> Iterator[ScrubberError]:
    for each in group.exceptions:
        if isinstance(each, ExceptionGroup):
            yield from _leaves(each)
        else:
            yield each


def _report_bug(bug: Exception) -> NoReturn:
    if os.environ.get("SCRUBBER_TRACEBACK"):
        raise bug
    print_error(
        f"Internal error ({type(bug).__name__}: {bug}). This is a bug in scrubber; to report it, run the command again with "
        "SCRUBBER_TRACEBACK=1 in the environment for a traceback."
    )
    sys.exit(ExitCode.FAILED)


if __name__ == "__main__":
    main()
