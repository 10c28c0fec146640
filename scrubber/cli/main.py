"""The ``scrubber`` command: the application of all commands, and the place where errors become messages.

No traceback is shown for errors of the node, the service or the request; for a bug of this program it is shown on
request (``SCRUBBER_TRACEBACK=1``).
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
"""The environment variable with the name of the shell that requests completions."""


class Commands(LazyGroup):
    """Every command, in the order of the summary."""

    entries = (
        CommandEntry("devices", "devices", HelpSection.INSPECT, "List the devices of the node."),
        CommandEntry("device", "device", HelpSection.INSPECT, "Show details and history of a device."),
        CommandEntry("history", "history", HelpSection.INSPECT, "Show the audit history."),
        CommandEntry("reset-plan", "reset", HelpSection.INSPECT, "Show what a reset would do and what blocks it."),
        CommandEntry("doctor", "doctor", HelpSection.INSPECT, "Check the node for problems."),
        CommandEntry("scrub", "scrub", HelpSection.OPERATE, "Scrub idle devices, or join running scrubs."),
        CommandEntry("reset", "reset", HelpSection.OPERATE, "Reset an idle device and scrub it."),
        CommandEntry("quarantine", "quarantine", HelpSection.OPERATE, "Take devices out of service."),
        CommandEntry(
            "unquarantine",
            "quarantine",
            HelpSection.OPERATE,
            "Return a quarantined device to service, after probation.",
        ),
        CommandEntry(
            "break-glass",
            "break_glass",
            HelpSection.OPERATE,
            "Temporarily bypass all checks for a device (audited).",
        ),
        CommandEntry("baseline", "baseline", HelpSection.OPERATE, "Show or accept the expected state of a device."),
        CommandEntry("certificate", "certificate", HelpSection.VERIFY, "Show, export and verify certificates."),
        CommandEntry("audit", "audit", HelpSection.VERIFY, "Verify and export the audit log."),
        CommandEntry("policy", "policy", HelpSection.VERIFY, "Validate, show and explain policies."),
        CommandEntry("serve", "serve", HelpSection.RUN, "Run the scrub service."),
        CommandEntry("plugin", "serve", HelpSection.RUN, "Run the device plugin."),
        CommandEntry("completion", "completion", HelpSection.RUN, "Print the completion script of a shell."),
        CommandEntry("version", "version", HelpSection.RUN, "Print the version."),
        CommandEntry("demo", "serve", HelpSection.TRY, "Run the demo scenario."),
        CommandEntry("sim", "sim", HelpSection.TRY, "Create and control a simulated node."),
    )

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, with ``--version``, which users try first, as a synonym of ``version``."""
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
    except Exception as bug:  # noqa: BLE001 - otherwise the interpreter would print a traceback
        _report_bug(bug)
    raise AssertionError("the command line ended without an exit code")


def _complete(command: object, shell: str, words: Sequence[str]) -> NoReturn:
    """Print completions for a shell."""
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
