"""``scrubber quarantine`` and ``unquarantine``: take a device out of service, and let it back in.

Taking one out is the safe direction and asks nobody; letting one back in does. Both need a reason, which the audit keeps
together with the uid of whoever gave it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.asking import run
from scrubber.cli.causes import OUT, said
from scrubber.cli.consent import NoInputOption, YesOption, admitted, ask, asks
from scrubber.cli.options import DeviceArgument, OutputOption, SocketOption
from scrubber.cli.output import Output, emit
from scrubber.domain.errors import Refused, ScrubberError

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.api.client import AdminClient

__all__ = ["ReasonOption", "act", "add_commands", "described", "order"]


def _given(reason: str) -> str:
    if not reason.strip():
        raise typer.BadParameter("a reason must be given; the audit keeps it.")
    return reason


ReasonOption = Annotated[
    str,
    typer.Option(
        "--reason",
        metavar="TEXT",
        callback=_given,
        help="Why; the audit keeps it.",
        show_default=False,
    ),
]


def add_commands(app: typer.Typer) -> None:
    app.command()(quarantine)
    app.command()(unquarantine)


def quarantine(
    device: DeviceArgument,
    reason: ReasonOption,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Take a device out of service until a person releases it. Who has it keeps it; nobody else gets it."""
    act(socket, output, lambda client: client.quarantine(device, reason))


def unquarantine(
    device: DeviceArgument,
    reason: ReasonOption,
    yes: YesOption = False,
    no_input: NoInputOption = False,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Let a device back in. It returns after its probation: clean scrubs in a row, as many as the policy says."""
    if asks(yes=yes, no_input=no_input):
        admitted(socket)
        found = described(socket, device)
        if found.health not in OUT:
            called = "on probation" if found.health == "probation" else found.health
            raise Refused(f"Device {found.index} ({found.id}) is {called}, not quarantined.")
        cause = f": {said(found.cause)}" if found.HasField("cause") else "."
        ask(
            f"Device {found.index} ({found.id}) is {found.state}{cause} Once it has proved itself clean again, it goes to "
            "whoever asks for it.",
            yes=yes,
            no_input=no_input,
        )
    act(socket, output, lambda client: client.unquarantine(device, reason))


def described(socket: Path, device: str) -> pb.Device:
    """What is known of ``device`` at this moment; raises :class:`InvalidRequest` unless it is exactly one."""

    async def look() -> pb.Device:
        from scrubber.api.client import ReadClient
        from scrubber.cli.naming import find

        async with ReadClient(socket) as client:
            return find((await client.devices()).devices, device)

    return run(look())


def order(socket: Path, action: Callable[[AdminClient], Awaitable[pb.DeviceAnswer]]) -> pb.Device:
    """Have the service do ``action`` to a device: the device afterwards."""

    async def ask_service() -> pb.Device:
        from scrubber.api.client import AdminClient

        async with AdminClient(socket) as client:
            return (await action(client)).device

    return run(ask_service())


def act(socket: Path, output: Output, action: Callable[[AdminClient], Awaitable[pb.DeviceAnswer]]) -> None:
    """Have the service do ``action`` to a device, and show the device afterwards."""
    from scrubber.cli.listing import answer

    device = order(socket, action)
    changed = answer([device], _service(socket) if output is Output.TABLE else None)
    emit(replace(changed, data=changed.data[0]), output)


def _service(socket: Path) -> pb.ServiceInfo | None:
    """What runs there, so that people read the same of a device as in the list; None: it is not said to this user."""

    async def ask_service() -> pb.ServiceInfo | None:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            try:
                return await client.info()
            except ScrubberError:  # the order was carried out all the same
                return None

    return run(ask_service())
