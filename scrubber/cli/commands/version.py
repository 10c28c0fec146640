"""``scrubber version``: the version of this command, and whether the running service has the same one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scrubber.cli.exit_codes import ExitCode
from scrubber.cli.options import OutputOption, SocketOption
from scrubber.cli.render.output import CommandResult, OutputFormat, print_result, printable

__all__ = ["add_commands"]

ServiceOption = Annotated[
    bool,
    typer.Option("--service", help="Also query the running service's version and compare."),
]


def add_commands(app: typer.Typer) -> None:
    app.command()(version)


def version(
    service: ServiceOption = False,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Print the version.

    With --service it exits with 0 if the running service is of the same version, and with 1 if it is not or does not
    answer: a service goes on with the version that it was started with until it is restarted.
    """
    from platform import python_version

    from scrubber import __version__ as ours

    theirs = _fetch_service_version(socket) if service else None
    rows = [(ours,)] if theirs is None else [("this command", ours), ("the service", theirs)]
    notes = []
    if theirs is not None and theirs != ours:
        notes.append(f"The service is of version {printable(theirs)}: restart it to have {ours} run.")
    data = {"clientVersion": ours, "pythonVersion": python_version(), "serviceVersion": theirs}
    print_result(CommandResult(data, [ours], (), rows, notes=notes, kind="Version"), output)
    raise typer.Exit(ExitCode.OK if not notes else ExitCode.FAILED)


def _fetch_service_version(socket: Path) -> str:
    from scrubber.cli.client_run import run

    async def ask() -> str:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            return (await client.service_info()).version

    return run(ask())
