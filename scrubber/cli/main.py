"""The ``scrubber`` command: one application of all commands, and the edge where errors become sentences.

Nobody sees a traceback for what the node, the service or the request is to blame for; one that is our own fault is
shown on request (``SCRUBBER_TRACEBACK=1``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

import typer

from scrubber.cli import break_glass, devices, doctor, history, policy, reset, scrub, serve, sim
from scrubber.cli.exits import Exit, exit_for
from scrubber.cli.options import OutputOption, new_app
from scrubber.cli.output import Answer, Output, complain, emit
from scrubber.domain.errors import ScrubberError

__all__ = ["app", "main"]

app = new_app(
    "Proves that a GPU is clean before a Kubernetes node hands it to the next tenant.\n\n"
    "Exit codes: 0 ok; 1 a negative verdict, or none; 2 usage; 3 refused by policy, or busy; "
    "4 the wait was over first, the operation still runs; 5 warnings only; 130 interrupted."
)
for group in (serve, devices, break_glass, scrub, reset, history, doctor):
    group.add_commands(app)
app.add_typer(sim.app, name="sim")
app.add_typer(policy.app, name="policy")


@app.command()
def version(output: OutputOption = Output.TABLE) -> None:
    """Say which version this is."""
    from importlib import metadata

    number = metadata.version("gpu-scrubber")
    emit(Answer({"version": number}, [number], (), [(number,)]), output)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line ``argv`` (default: this process's own) and exit."""
    try:
        typer.main.get_command(app)(args=argv, prog_name="scrubber")
    except ScrubberError as error:
        complain(str(error))
        sys.exit(exit_for(error))
    except ExceptionGroup as group:
        ours, others = group.split(ScrubberError)
        if ours is None or others is not None:
            _confess(group)
        causes = list(_leaves(ours))
        for cause in causes:
            complain(str(cause))
        sys.exit(exit_for(causes[0]))
    except OSError as error:
        about = f": {error.filename}" if error.filename is not None else ""
        complain(f"{error.strerror or error}{about}.")
        sys.exit(Exit.NEGATIVE)
    except Exception as bug:  # noqa: BLE001 - above us is only the interpreter, which would print a traceback
        _confess(bug)
    raise AssertionError("the command line ended without an exit code")


def _leaves(group: ExceptionGroup[ScrubberError]) -> Iterator[ScrubberError]:
    for each in group.exceptions:
        if isinstance(each, ExceptionGroup):
            yield from _leaves(each)
        else:
            yield each


def _confess(bug: Exception) -> NoReturn:
    if os.environ.get("SCRUBBER_TRACEBACK"):
        raise bug
    complain(f"This is a fault of scrubber itself ({type(bug).__name__}: {bug}); SCRUBBER_TRACEBACK=1 shows where.")
    sys.exit(Exit.NEGATIVE)


if __name__ == "__main__":
    main()
