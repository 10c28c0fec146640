"""``scrubber devices``: list all or some of the node's devices, once or continuously."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.client_run import run
from scrubber.cli.options import NoHeadersOption, OutputOption, SocketOption, device_name
from scrubber.cli.render.device_list import device_list_result, select_devices
from scrubber.cli.render.output import OutputFormat, print_result

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

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

    async def fetch() -> tuple[Sequence[pb.Device], pb.ServiceInfo | None]:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            found = (await client.devices()).devices
            # Node-level information is shown only to people: a script gets a list of devices, from one request.
            return found, await client.service_info() if output.is_table else None

    found, info = run(fetch())
    print_result(device_list_result(select_devices(found, device or ()), info), output, no_headers=no_headers)
