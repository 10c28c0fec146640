"""``scrubber devices``, ``quarantine`` and ``unquarantine``: see the node's devices, take one out, let it back in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.asking import run
from scrubber.cli.options import DeviceArgument, OutputOption, SocketOption
from scrubber.cli.output import Answer, Output, binary_size, emit, utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.api.client import AdminClient

__all__ = ["ReasonOption", "act", "add_commands"]


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
    app.command()(devices)
    app.command()(quarantine)
    app.command()(unquarantine)


def devices(socket: SocketOption = Path("/run/scrubber"), output: OutputOption = Output.TABLE) -> None:
    """List the node's devices. Says what state they are in, and who has them."""

    async def ask() -> tuple[Sequence[pb.Device], pb.ServiceInfo | None]:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            found = (await client.devices()).devices
            # What concerns the node as a whole is for people: a script gets a list of devices, and asks once.
            return found, await client.info() if output is Output.TABLE else None

    emit(answer(*run(ask())), output)


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
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Let a device back in. It returns after its probation: clean scrubs in a row, as many as the policy says."""
    act(socket, output, lambda client: client.unquarantine(device, reason))


def act(socket: Path, output: Output, action: Callable[[AdminClient], Awaitable[pb.DeviceAnswer]]) -> None:
    """Have the service do ``action`` to a device, and show the device afterwards."""

    async def ask() -> pb.Device:
        from scrubber.api.client import AdminClient

        async with AdminClient(socket) as client:
            return (await action(client)).device

    changed = answer([run(ask())])
    emit(replace(changed, data=changed.data[0]), output)


def answer(found: Sequence[pb.Device], info: pb.ServiceInfo | None = None) -> Answer:
    """Devices in all forms; ``data`` is a list.

    Args:
        info: what runs there, where that was asked: the node's own policy then need not be named at every device.
    """
    from scrubber.cli import shapes

    return Answer(
        data=[shapes.device(each) for each in found],
        names=[each.id for each in found],
        header=("INDEX", "DEVICE", "STATE", "MEMORY", "GRANTS", "POD", "CERTIFICATE", "POLICY", "CAUSE"),
        rows=[_row(each, "" if info is None else info.policy) for each in found],
        empty="There are no devices on this node.",
        notes=[*_broken(found), *_stopped(info)],
    )


def _row(device: pb.Device, usual: str) -> Sequence[str]:
    has_certificate = device.HasField("certificate")
    holder = "/".join(part for part in (device.tenant_namespace, device.pod, device.container) if part)
    return (
        device.index,
        device.id,
        _state(device),
        binary_size(device.memory_bytes),
        str(device.grants),
        holder or "-",
        device.certificate.id if has_certificate else "-",
        ", ".join(_ruled(device, usual)) or "-",
        f"{device.cause.code}: {device.cause.sentence}" if device.HasField("cause") else "-",
    )


def _state(device: pb.Device) -> str:
    """The state, and where it is not the whole of it: a device that is suspect, or handed out all the same."""
    if device.health == "suspect":
        return f"{device.state}, suspect"
    out = device.state not in ("dirty", "scrubbing", "clean", "in-use")
    return f"{device.state}, offered" if out and device.offered else device.state


def _ruled(device: pb.Device, usual: str) -> Iterator[str]:
    """What of the device's rules is not the node's, or lets through what they refuse."""
    if device.policy not in ("", usual):
        yield device.policy
    if device.enforcement == "observe":
        yield device.enforcement
    if device.HasField("glass"):
        yield f"glass broken until {utc(device.glass.until)}"


def _broken(found: Sequence[pb.Device]) -> Iterator[str]:
    for device in found:
        if device.HasField("glass"):
            yield (
                f"Until {utc(device.glass.until)} nothing is refused for device {device.index} ({device.id}), whatever "
                f"is known of it: {device.glass.actor} broke the glass ({device.glass.reason}). "
                f"scrubber break-glass {device.index} --end --reason … ends that now."
            )


def _stopped(info: pb.ServiceInfo | None) -> Iterator[str]:
    """What the service no longer does by itself."""
    if info is not None and info.breaker.resets:
        again = f" The next one may be at {utc(info.breaker.resets_until)}." if info.breaker.resets_until else ""
        yield info.breaker.resets + again
    if info is not None and info.breaker.soft:
        yield info.breaker.soft
