"""Asking a person before something is done that cannot be taken back.

Promise: no is the answer of everybody who does not say yes. Nothing is done for an end of input, an interrupt, an empty
line or any other word, and where nobody is there to be asked the command says so instead of guessing.
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

YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask; needed where nobody is there to be asked.")]
NoInputOption = Annotated[
    bool,
    typer.Option("--no-input", envvar="SCRUBBER_NO_INPUT", help="Never ask: without --yes nothing is done."),
]


def needs_confirmation(*, yes: bool, no_input: bool) -> bool:
    """Whether a person is about to be asked: what is looked up for the question only, can be left out otherwise.

    Raises:
        typer.BadParameter: nobody said yes, and nobody is there to be asked.
    """
    if yes:
        return False
    if no_input:
        raise typer.BadParameter("With --no-input nobody is asked: say --yes if it is to be done.")
    if not (_is_terminal(sys.stdin) and _is_terminal(sys.stderr)):
        raise typer.BadParameter("Nobody is here to be asked: say --yes if it is to be done.")
    return True


def check_admin_access(directory: Path) -> None:
    """See that the service would take an order from this user, before a person is asked to give one. Orders nothing.

    Args:
        directory: of the service's sockets.

    Raises:
        PermissionDenied, Unavailable, InvalidConfiguration: as an order would.
    """
    from scrubber.api.sockets import Purpose, Sockets

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fsencode(Sockets(directory).path(Purpose.ADMIN)))
        except BlockingIOError:  # more callers wait there than the kernel lets queue
            return
        except OSError:
            run(_probe_admin_socket(directory))


async def _probe_admin_socket(directory: Path) -> None:
    """Ask on the admin socket what only the read one answers: why nobody answers is said as it is of an order."""
    from scrubber.api.client import ReadClient
    from scrubber.api.sockets import Purpose

    class Door(ReadClient):
        purpose = Purpose.ADMIN

    async with Door(directory) as door:
        try:
            await door.service_info()
        except PermissionDenied as error:
            if error.code not in (ErrorCode.WRONG_SOCKET, ErrorCode.UNKNOWN_METHOD):  # somebody answers by now
                raise


def confirm(message: str, *, yes: bool, no_input: bool) -> None:
    """Go on only if ``yes`` was said on the command line, or is said now.

    Args:
        message: one or two sentences on what will happen.

    Raises:
        typer.BadParameter: as in :func:`needs_confirmation`.
        typer.Exit: the answer was no.
        KeyboardInterrupt: the answer was an interrupt.
    """
    if not needs_confirmation(yes=yes, no_input=no_input):
        return
    try:
        print_message(message)
        print("Go on? [y/N] ", end="", file=sys.stderr, flush=True)
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
        print(file=sys.stderr)  # the end of input leaves the cursor behind the question
    return answered


def _wait_for_input() -> None:
    """Wait for a line, or raise for an interrupt.

    Reading alone may lose the interrupt: one that arrives just before the kernel is asked, or that the kernel gives to a
    thread of gRPC's, is only noted, and the read then waits for a key. A signal that is also a byte on a socket is seen.
    """
    told, heard = socket.socketpair()
    with told, heard:
        told.setblocking(False)
        before = -1
        try:
            before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
            select.select([sys.stdin, heard], [], [])
        finally:
            signal.set_wakeup_fd(before)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()
