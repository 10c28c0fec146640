"""``scrubber version``: which version this is, and whether the service that runs here is of the same one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scrubber.cli.exits import Exit
from scrubber.cli.options import OutputOption, SocketOption
from scrubber.cli.output import Answer, Output, emit, plain

__all__ = ["add_commands"]

ServiceOption = Annotated[
    bool,
    typer.Option("--service", help="Ask the running service for its version too, and compare."),
]


def add_commands(app: typer.Typer) -> None:
    app.command()(version)


def version(
    service: ServiceOption = False, socket: SocketOption = Path("/run/scrubber"), output: OutputOption = Output.TABLE
) -> None:
    """Say which version this is.

    With --service it exits with 0 if the running service is of the same version, and with 1 if it is not or does not
    answer: a service goes on with the version that it was started with until it is restarted.
    """
    from platform import python_version

    from scrubber import __version__ as ours

    theirs = _of_service(socket) if service else None
    rows = [(ours,)] if theirs is None else [("this command", ours), ("the service", theirs)]
    notes = []
    if theirs is not None and theirs != ours:
        notes.append(f"The service is of version {plain(theirs)}: restart it to have {ours} run.")
    data = {"version": ours, "python": python_version(), "service": theirs}
    emit(Answer(data, [ours], (), rows, notes=notes, kind="Version"), output)
    raise typer.Exit(Exit.OK if not notes else Exit.NEGATIVE)


def _of_service(socket: Path) -> str:
    from scrubber.cli.asking import run

    async def ask() -> str:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            return (await client.info()).version

    return run(ask())
