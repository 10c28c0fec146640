"""``scrubber devices``, ``quarantine`` and ``unquarantine``: see the node's devices, take one out, let it back in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.asking import run
from scrubber.cli.options import DeviceArgument, OutputOption, SocketOption
from scrubber.cli.output import Answer, Output, binary_size, emit

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.api.client import AdminClient

__all__ = ["add_commands"]

ReasonOption = Annotated[
    str,
    typer.Option(
        "--reason", envvar="SCRUBBER_REASON", metavar="TEXT", help="Why; the audit keeps it.", show_default=False
    ),
]


def add_commands(app: typer.Typer) -> None:
    app.command()(devices)
    app.command()(quarantine)
    app.command()(unquarantine)


def devices(socket: SocketOption = Path("/run/scrubber"), output: OutputOption = Output.TABLE) -> None:
    """List the node's devices. Says what state they are in, and who has them."""

    async def ask() -> Sequence[pb.Device]:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            return (await client.devices()).devices

    emit(answer(run(ask())), output)


def quarantine(
    device: DeviceArgument,
    reason: ReasonOption,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Take a device out of service until a person releases it. Who has it keeps it; nobody else gets it."""
    _act(socket, output, reason, lambda client: client.quarantine(device, reason))


def unquarantine(
    device: DeviceArgument,
    reason: ReasonOption,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Let a device back in. It returns after its probation: clean scrubs in a row, as many as the policy says."""
    _act(socket, output, reason, lambda client: client.unquarantine(device, reason))


def _act(
    socket: Path, output: Output, reason: str, action: Callable[[AdminClient], Awaitable[pb.DeviceAnswer]]
) -> None:
    if not reason.strip():
        raise typer.BadParameter("a reason must be given; the audit keeps it.", param_hint="--reason")

    async def ask() -> pb.Device:
        from scrubber.api.client import AdminClient

        async with AdminClient(socket) as client:
            return (await action(client)).device

    changed = answer([run(ask())])
    emit(Answer(changed.data[0], changed.names, changed.header, changed.rows), output)


def answer(found: Sequence[pb.Device]) -> Answer:
    """Devices in all forms; ``data`` is a list."""
    from scrubber.cli import shapes

    return Answer(
        data=[shapes.device(each) for each in found],
        names=[each.id for each in found],
        header=("INDEX", "DEVICE", "STATE", "MEMORY", "GRANTS", "POD", "CERTIFICATE", "CAUSE"),
        rows=[_row(each) for each in found],
        empty="There are no devices on this node.",
    )


def _row(device: pb.Device) -> Sequence[str]:
    has_certificate = device.HasField("certificate")
    holder = "/".join(part for part in (device.tenant_namespace, device.pod, device.container) if part)
    return (
        device.index,
        device.id,
        device.state,
        binary_size(device.memory_bytes),
        str(device.grants),
        holder or "-",
        device.certificate.id if has_certificate else "-",
        f"{device.cause.code}: {device.cause.sentence}" if device.HasField("cause") else "-",
    )
