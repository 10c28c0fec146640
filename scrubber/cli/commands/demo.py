"""``scrubber demo``: run the demo scenario on a simulated node of its own."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from scrubber.domain.errors import InvalidRequest

__all__ = ["add_commands"]


class DemoBackend(StrEnum):
    SIM = "sim"
    COMMAND = "command"


def add_commands(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    keep: Annotated[bool, typer.Option("--keep-files", help="Keep the directory and logs of the node.")] = False,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Directory for the node, its logs and its ledger.",
            show_default="a temporary directory",
        ),
    ] = None,
    stay: Annotated[
        bool,
        typer.Option(
            "--keep-running",
            help="Keep the node running afterwards until Ctrl-C, with its metrics on ports of 127.0.0.1 "
            "that it prints.",
        ),
    ] = False,
    dra: Annotated[
        bool, typer.Option("--dra", help="Have pods request devices by resource claims, with the DRA driver.")
    ] = False,
    backend: Annotated[
        DemoBackend,
        typer.Option(help="What manages the simulated devices. command: a program, as an administrator writes one."),
    ] = DemoBackend.SIM,
) -> None:
    """Run the demo scenario.

    It runs on a simulated node of its own. Exits with 0 if every expectation was met.
    """
    if dra and backend is DemoBackend.COMMAND:
        raise InvalidRequest("The scenario of the command backend has no claims; pass --dra or --backend command.")
    from scrubber.emulator.scenario import main

    command = backend is DemoBackend.COMMAND
    raise typer.Exit(main(keep=keep, directory=directory, stay=stay, dra=dra, command=command))
