"""Asks for confirmation before an irreversible action.

Invariants: only an explicit yes confirms. An end of input, an interrupt, an empty line or any other word changes
nothing, and without a terminal the command reports that instead of guessing.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

from scrubber.cli.client_run import run
from scrubber.cli.exit_codes import ExitCode
from scrubber.cli.render.output import print_message
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import PermissionDenied

__all__ = ["NoInputOption", "YesOption", "check_admin_access", "confirm", "needs_confirmation"]

YesOption = Annotated[bool, typer.Option("--yes", help="Confirm without asking; required if stdin is not a terminal.")]
NoInputOption = Annotated[
    bool,
    typer.Option("--no-input", envvar="SCRUBBER_NO_INPUT", help="Never prompt; fail where --yes is required."),
]


def needs_confirmation(*, yes: bool, no_input: bool) -> bool:
    """Return whether the user will be asked: data needed only for the question need not be fetched otherwise.

    Raises:
        typer.BadParameter: there is no confirmation, and no terminal to ask on.
    """
    if yes:
        return False
    if no_input:
        raise typer.BadParameter("--no-input disables the confirmation prompt; pass --yes to confirm.")
    for name, stream in (("stdin", sys.stdin), ("stderr", sys.stderr)):
        if not _is_terminal(stream):
            raise typer.BadParameter(f"{name} is not a terminal; pass --yes to confirm.")
    return True


def check_admin_access(directory: Path) -> None:
    """Check that the service would accept an action of this user, before asking for confirmation. Changes nothing.

    Args:
        directory: directory of the service's sockets.

    Raises:
        PermissionDenied, Unavailable, InvalidConfiguration: as the action would.
    """
    from scrubber.api.sockets import Purpose, Sockets

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fsencode(Sockets(directory).path(Purpose.ADMIN)))
        except BlockingIOError:  # the kernel's queue of waiting callers is full
            return
        except OSError:
            run(_probe_admin_socket(directory))


async def _probe_admin_socket(directory: Path) -> None:
    """Call a method of the read service on the admin socket: its connection errors are those of an action."""
    from scrubber.api.client import ReadClient
    from scrubber.api.sockets import Purpose

    class Probe(ReadClient):
        purpose = Purpose.ADMIN

    async with Probe(directory) as probe:
        try:
            await probe.service_info()
        except PermissionDenied as error:
            if error.code not in (
                ErrorCode.WRONG_SOCKET,
                ErrorCode.UNKNOWN_METHOD,
            ):  # these two: the user is admitted by now
                raise


# See docs/decisions/0036-operator-commands.md.
def confirm(message: str, *, yes: bool, no_input: bool) -> None:
    """Return only if ``yes`` was given on the command line, or is answered now.

    Args:
        message: one or two sentences on what will happen.

    Raises:
        typer.BadParameter: as in :func:`needs_confirmation`.
        typer.Exit: the answer was no.
        KeyboardInterrupt: the user interrupted the question.
    """
    if not needs_confirmation(yes=yes, no_input=no_input):
        return
    try:
        print_message(message)
        print("Continue? [y/N] ", end="", file=sys.stderr, flush=True)
        answered = _read_answer()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        print_message("Nothing was changed.")
        raise
    if answered.strip().lower() not in ("y", "yes"):
        print_message("Nothing was changed.")
        raise typer.Exit(ExitCode.FAILED)


def _read_answer() -> str:
    try:
        _wait_for_input()
        answered = sys.stdin.readline()
    except UnicodeDecodeError:
        return ""
    if not answered.endswith("\n"):
        print(file=sys.stderr)  # after an end of input the cursor is still behind the question
    return answered


def _wait_for_input() -> None:
    """Wait for a line, or raise for an interrupt.

    Reading alone may miss the interrupt: if it arrives just before the system call, or if the kernel delivers it to a
    thread of gRPC, it is only recorded, and the read then waits for a key. A signal that is also written to a socket is
    noticed.
    """
    signalled, wakeup = socket.socketpair()
    with signalled, wakeup:
        signalled.setblocking(False)
        before = -1
        try:
            before = signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
            select.select([sys.stdin, wakeup], [], [])
        finally:
            signal.set_wakeup_fd(before)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()
