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

from scrubber.cli.exit_codes import ExitCode, exit_code_for
from scrubber.cli.gc_tuning import make_gc_rare
from scrubber.cli.lazy import CommandEntry, HelpSection, LazyGroup
from scrubber.cli.options import new_app
from scrubber.cli.render.output import print_error
from scrubber.domain.errors import ScrubberError

__all__ = ["app", "main"]

_COMPLETION_SHELL = "_SCRUBBER_COMPLETE"
"""The environment variable in which a shell that completes a line says which one it is."""


class Commands(LazyGroup):
    """Every command, in the order of the summary."""

    entries = (
        CommandEntry("devices", "devices", HelpSection.INSPECT, "List the node's devices."),
        CommandEntry("device", "device", HelpSection.INSPECT, "Show everything about one device, with its history."),
        CommandEntry("history", "history", HelpSection.INSPECT, "Show what happened."),
        CommandEntry("reset-plan", "reset", HelpSection.INSPECT, "Show what a reset of a device would do."),
        CommandEntry("doctor", "doctor", HelpSection.INSPECT, "Look for what would undo a hand-over on this node."),
        CommandEntry(
            "scrub", "scrub", HelpSection.OPERATE, "Scrub devices that nobody has, or join the scrubs under way."
        ),
        CommandEntry("reset", "reset", HelpSection.OPERATE, "Reset a device that nobody has, and scrub it."),
        CommandEntry(
            "quarantine", "quarantine", HelpSection.OPERATE, "Take devices out of service until a person releases them."
        ),
        CommandEntry("unquarantine", "quarantine", HelpSection.OPERATE, "Let a device back in."),
        CommandEntry(
            "break-glass",
            "break_glass",
            HelpSection.OPERATE,
            "Have a device handed out for a time whatever is known of it.",
        ),
        CommandEntry(
            "baseline", "baseline", HelpSection.OPERATE, "See what a device should be, and accept what it is now."
        ),
        CommandEntry(
            "certificate", "certificate", HelpSection.VERIFY, "Show, export and verify what was proved about devices."
        ),
        CommandEntry("audit", "audit", HelpSection.VERIFY, "Verify, export and name the audit trail."),
        CommandEntry("policy", "policy", HelpSection.VERIFY, "Judge a policy before a node has it."),
        CommandEntry("serve", "serve", HelpSection.RUN, "Run the scrub service."),
        CommandEntry("plugin", "serve", HelpSection.RUN, "Run the device plugin."),
        CommandEntry(
            "completion", "completion", HelpSection.RUN, "Print what a shell loads to complete this command with Tab."
        ),
        CommandEntry("version", "version", HelpSection.RUN, "Say which version this is."),
        CommandEntry("demo", "serve", HelpSection.TRY, "Tell the story of a hand-over."),
        CommandEntry("sim", "sim", HelpSection.TRY, "Make and drive a simulated node."),
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
def _root_callback() -> None: ...


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line ``argv`` (default: this process's own) and exit."""
    make_gc_rare()
    try:
        command = typer.main.get_command(app)
        if (shell := os.environ.get(_COMPLETION_SHELL)) is not None:
            _complete(command, shell, sys.argv[1:] if argv is None else argv)
        command(args=argv, prog_name="scrubber")
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
    except Exception as bug:  # noqa: BLE001 - above us is only the interpreter, which would print a traceback
        _report_bug(bug)
    raise AssertionError("the command line ended without an exit code")


def _complete(command: object, shell: str, words: Sequence[str]) -> NoReturn:
    """Answer a shell that wants to know what may come next."""
    from scrubber.cli.completing import completion_lines

    assert isinstance(command, LazyGroup)
    for line in completion_lines(command, shell, words, os.environ):
        print(line)
    sys.exit(ExitCode.OK)


def _leaves(group: ExceptionGroup[ScrubberError]) -> Iterator[ScrubberError]:
    for each in group.exceptions:
        if isinstance(each, ExceptionGroup):
            yield from _leaves(each)
        else:
            yield each


def _report_bug(bug: Exception) -> NoReturn:
    if os.environ.get("SCRUBBER_TRACEBACK"):
        raise bug
    print_error(f"This is a fault of scrubber itself ({type(bug).__name__}: {bug}); SCRUBBER_TRACEBACK=1 shows where.")
    sys.exit(ExitCode.FAILED)


if __name__ == "__main__":
    main()
