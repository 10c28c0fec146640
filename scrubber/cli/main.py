"""The ``scrubber`` command: one application of all commands, and the edge where errors become sentences.

Nobody sees a traceback for what the node, the service or the request is to blame for; one that is our own fault is
shown on request (``SCRUBBER_TRACEBACK=1``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import typer

from scrubber.cli.exits import Exit, exit_for
from scrubber.cli.lasting import seldom
from scrubber.cli.lazy import Entry, LazyGroup, Section
from scrubber.cli.options import new_app
from scrubber.cli.output import complain
from scrubber.domain.errors import ScrubberError

__all__ = ["app", "main"]

_ASKING_SHELL = "_SCRUBBER_COMPLETE"
"""The environment variable in which a shell that completes a line says which one it is."""


class Commands(LazyGroup):
    """Every command, in the order of the summary."""

    entries = (
        Entry("devices", "devices", Section.LOOK, "List the node's devices."),
        Entry("device", "device", Section.LOOK, "Show everything about one device, with its history."),
        Entry("history", "history", Section.LOOK, "Show what happened."),
        Entry("reset-plan", "reset", Section.LOOK, "Show what a reset of a device would do."),
        Entry("doctor", "doctor", Section.LOOK, "Look for what would undo a hand-over on this node."),
        Entry("scrub", "scrub", Section.ACT, "Scrub devices that nobody has, or join the scrubs under way."),
        Entry("reset", "reset", Section.ACT, "Reset a device that nobody has, and scrub it."),
        Entry("quarantine", "acting", Section.ACT, "Take devices out of service until a person releases them."),
        Entry("unquarantine", "acting", Section.ACT, "Let a device back in."),
        Entry(
            "break-glass",
            "break_glass",
            Section.ACT,
            "Have a device handed out for a time whatever is known of it.",
        ),
        Entry("baseline", "baseline", Section.ACT, "See what a device should be, and accept what it is now."),
        Entry("certificate", "certificate", Section.PROVE, "Show, export and verify what was proved about devices."),
        Entry("audit", "audit", Section.PROVE, "Verify, export and name the audit trail."),
        Entry("policy", "policy", Section.PROVE, "Judge a policy before a node has it."),
        Entry("serve", "serve", Section.RUN, "Run the scrub service."),
        Entry("plugin", "serve", Section.RUN, "Run the device plugin."),
        Entry("completion", "completion", Section.RUN, "Print what a shell loads to complete this command with Tab."),
        Entry("version", "version", Section.RUN, "Say which version this is."),
        Entry("demo", "serve", Section.TRY, "Tell the story of a hand-over."),
        Entry("sim", "sim", Section.TRY, "Make and drive a simulated node."),
    )

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As always, and ``--version``, which people try first, is ``version``."""
        return super().parse_args(ctx, ["version"] if args == ["--version"] else args)


app = new_app(
    "Proves that a GPU is clean before a Kubernetes node hands it to the next tenant.\n\n"
    "Exit codes: 0 ok; 1 a negative verdict, or none; 2 usage; 3 refused by policy, or busy; "
    "4 the wait was over first, the operation still runs; 5 warnings only; 130 interrupted.",
    Commands,
    "New here? scrubber demo tells the whole story on a simulated node. scrubber COMMAND --help has a command's flags, the "
    "environment variables of those that are settings, and examples. scrubber completion makes Tab complete all of it.",
)


@app.callback()
def _nothing_of_its_own() -> None: ...


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line ``argv`` (default: this process's own) and exit."""
    seldom()
    try:
        command = typer.main.get_command(app)
        if (shell := os.environ.get(_ASKING_SHELL)) is not None:
            _complete(command, shell, sys.argv[1:] if argv is None else argv)
        command(args=argv, prog_name="scrubber")
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


def _complete(command: object, shell: str, words: Sequence[str]) -> NoReturn:
    """Answer a shell that wants to know what may come next."""
    from scrubber.cli.completing import answer

    assert isinstance(command, LazyGroup)
    for line in answer(command, shell, words, os.environ):
        print(line)
    sys.exit(Exit.OK)


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
