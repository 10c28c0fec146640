"""``scrubber demo``: run the demo scenario on a simulated node of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["add_commands"]


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
) -> None:
    """Run the demo scenario.

    It runs on a simulated node of its own. Exits with 0 if every expectation was met.
    """
    from scrubber.emulator.scenario import main

    raise typer.Exit(main(keep=keep, directory=directory, stay=stay, dra=dra))
