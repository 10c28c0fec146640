"""The list of devices as the service has it now, once: the work of ``scrubber devices`` without ``--watch``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scrubber.cli.client_run import run
from scrubber.cli.render.output import OutputFormat, print_result

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["list_devices"]


def list_devices(socket: Path, device: Sequence[str], output: OutputFormat, *, no_headers: bool) -> None:
    """Print the devices with these names, all if there are none."""

    async def fetch() -> tuple[Sequence[pb.Device], pb.ServiceInfo | None]:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            found = (await client.devices()).devices
            # Node-level information is shown only to people: a script gets a list of devices, from one request.
            return found, await client.service_info() if output.is_table else None

    found, info = run(fetch())
    from scrubber.cli.render.device_list import device_list_result, select_devices

    print_result(device_list_result(select_devices(found, device), info), output, no_headers=no_headers)
