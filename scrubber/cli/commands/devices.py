"""``scrubber devices``: list all or some of the node's devices, once or continuously."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scrubber.cli.device_listing import list_devices
from scrubber.cli.options import NoHeadersOption, OutputOption, SocketOption, device_name
from scrubber.cli.render.output import OutputFormat

__all__ = ["add_commands"]

DevicesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DEVICE",
        parser=device_name,
        help="UUIDs, unique prefixes of UUIDs, or indexes. Default: all devices.",
        show_default=False,
    ),
]
WatchOption = Annotated[
    bool,
    typer.Option(
        "-w",
        "--watch",
        help="Watch until interrupted: in place on a terminal, otherwise one output per change.",
    ),
]


def add_commands(app: typer.Typer) -> None:
    app.command()(devices)


def devices(
    device: DevicesArgument = None,
    watch: WatchOption = False,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """List the devices of the node. Shows their state, their tenants, and why devices are out of service."""
    if watch:
        from scrubber.cli.commands.devices_watch import watch_devices

        watch_devices(socket, device or (), output, no_headers=no_headers)
        return

    list_devices(socket, device or (), output, no_headers=no_headers)
