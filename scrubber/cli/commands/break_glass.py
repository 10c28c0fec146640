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
from scrubber.cli.options import DeviceArgument, OutputOption, SocketOption, seconds
from scrubber.cli.render.output import OutputFormat

__all__ = ["add_commands"]


def _positive_seconds(written: str | float) -> float:
    time = seconds(written)
    if not time:
        raise typer.BadParameter("that is no time at all; --end ends it now.")
    return time


ForOption = Annotated[
    float | None,
    typer.Option(
        "--duration",
        metavar="TIME",
        parser=_positive_seconds,
        help="Duration from now, such as 30m; the policy limits it.",
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
) -> None:
    """Temporarily bypass all checks for a device (audited). Tenants may meet each other's data.

    Nothing is refused for the device meanwhile, and the kubelet is told that it is healthy; all is judged and recorded as
    ever. It is on the audit and an alarm until it ends. What a person quarantined stays out.
    """
    if end == (time is not None):
        raise typer.BadParameter("say either for how long, or --end.", param_hint="--duration")
    if time is not None:
        if needs_confirmation(yes=yes, no_input=no_input):
            check_admin_access(socket)
        confirm(
            f"For {time:g} seconds device {device} goes to whoever asks for it, scrubbed or not and sick or not: "
            "a pod may find on it what another tenant left.",
            yes=yes,
            no_input=no_input,
        )
    change_and_show_device(socket, output, lambda client: client.break_glass(device, time or 0.0, reason))
