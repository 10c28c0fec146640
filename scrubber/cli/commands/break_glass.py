"""``scrubber break-glass``: temporarily hand a device over without any checks.

It is the only command that gives up the guarantee of the service, so it requires a deliberate decision: a reason, a
duration, and a confirmation by a user at a terminal or in the script.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scrubber.cli.commands.quarantine import ReasonOption, change_and_show_device
from scrubber.cli.confirmation import NoInputOption, YesOption, check_admin_access, confirm, needs_confirmation
from scrubber.cli.options import DeviceArgument, NoHeadersOption, OutputOption, SocketOption, seconds
from scrubber.cli.render.output import OutputFormat

__all__ = ["add_commands"]


def _positive_seconds(written: str | float) -> float:
    time = seconds(written)
    if not time:
        raise typer.BadParameter("must be more than 0; pass --end to end the override now.")
    return time


ForOption = Annotated[
    float | None,
    typer.Option(
        "--duration",
        metavar="TIME",
        parser=_positive_seconds,
        help="Duration of the override, such as 30m. The policy limits it.",
        show_default=False,
    ),
]
EndOption = Annotated[bool, typer.Option("--end", help="End the override now.")]


def add_commands(app: typer.Typer) -> None:
    app.command("break-glass")(break_glass)


def break_glass(
    device: DeviceArgument,
    reason: ReasonOption,
    time: ForOption = None,
    end: EndOption = False,
    yes: YesOption = False,
    no_input: NoInputOption = False,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """Temporarily bypass all checks for a device (audited).

    Tenants may see each other's data: until the override ends, no hand-over of the device is refused, and the kubelet sees it
    as healthy. Findings are still evaluated and recorded. The override is in the audit log, and an alert fires until it ends.
    A device that an operator quarantined stays out of service.
    """
    if end == (time is not None):
        raise typer.BadParameter("Pass either --duration or --end.")
    if time is not None:
        if needs_confirmation(yes=yes, no_input=no_input):
            check_admin_access(socket)
        confirm(
            f"For {time:g} seconds, device {device} is handed over whatever its checks find, even if it is dirty or faulty: a pod may "
            "find another tenant's data on it.",
            yes=yes,
            no_input=no_input,
        )
    change_and_show_device(
        socket, output, lambda client: client.break_glass(device, time or 0.0, reason), no_headers=no_headers
    )
