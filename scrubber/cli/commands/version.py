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
    typer.Option("--service", help="Also print the version of the running service, and compare."),
]


def add_commands(app: typer.Typer) -> None:
    app.command()(version)


def version(
    service: ServiceOption = False,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Print the version.

    With --service, exits with 0 if the running service has the same version, and with 1 if not or if it does not answer. A
    service keeps the version that it was started with until it is restarted.
    """
    from platform import python_version

    from scrubber import __version__ as ours

    service_version = _fetch_service_version(socket) if service else None
    rows = [(ours,)] if service_version is None else [("client", ours), ("service", service_version)]
    notes = []
    if service_version is not None and service_version != ours:
        notes.append(f"The service runs version {printable(service_version)}; restart it to run {ours}.")
    data = {"clientVersion": ours, "pythonVersion": python_version(), "serviceVersion": service_version}
    print_result(CommandResult(data, [ours], (), rows, notes=notes, kind="Version"), output)
    raise typer.Exit(ExitCode.OK if not notes else ExitCode.FAILED)


def _fetch_service_version(socket: Path) -> str:
    from scrubber.cli.client_run import run

    async def ask() -> str:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            return (await client.service_info()).version

    return run(ask())
