"""``scrubber quarantine`` and ``unquarantine``: take devices out of service, and return one to service.

A quarantine is the safe direction and needs no confirmation; a release does. Both need a reason, which the audit log
keeps with the uid of the operator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.client_run import resolve_device, run
from scrubber.cli.confirmation import NoInputOption, YesOption, check_admin_access, confirm, needs_confirmation
from scrubber.cli.exit_codes import ExitCode, exit_code_for, worst_exit_code
from scrubber.cli.options import DeviceArgument, DevicesArgument, OutputOption, SocketOption
from scrubber.cli.render.cause_text import OUT_OF_SERVICE, cause_text
from scrubber.cli.render.output import CommandResult, OutputColumn, OutputFormat, print_result
from scrubber.domain.errors import Refused, ScrubberError

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.api.client import AdminClient

__all__ = ["ReasonOption", "add_commands", "change_and_show_device", "fetch_device", "run_admin_action"]


def _require_reason(reason: str) -> str:
    if not reason.strip():
        raise typer.BadParameter("a reason must be given; the audit keeps it.")
    return reason


ReasonOption = Annotated[
    str,
    typer.Option(
        "--reason",
        metavar="TEXT",
        callback=_require_reason,
        help="Reason, for the audit log.",
        show_default=False,
    ),
]


def add_commands(app: typer.Typer) -> None:
    app.command()(quarantine)
    app.command()(unquarantine)


def quarantine(
    devices: DevicesArgument,
    reason: ReasonOption,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Take devices out of service. A pod that has one keeps it; no other pod gets it.

    All names are looked up before the first device is touched: if one of them is wrong, nothing is done. Exits with 0 only if
    every device was quarantined, else with the worst of: 130 interrupted, 1 failed, 2 no such device, 3 refused.
    """
    wanted = list(dict.fromkeys(devices))
    if len(wanted) == 1:
        change_and_show_device(socket, output, lambda client: client.quarantine(wanted[0], reason))
        return
    results = run(_quarantine_all(socket, wanted, reason))
    errors = [each.error for each in results if each.error is not None]
    if len(errors) == len(results) and len({str(each) for each in errors}) == 1:
        raise errors[0]  # the service refuses, not a single device
    print_result(_quarantine_result(results), output)
    raise typer.Exit(worst_exit_code(each.exit_code for each in results))


@dataclass(frozen=True, slots=True)
class _QuarantineResult:
    """Result for one device of several: the device afterwards, an error, or neither if interrupted.

    Attributes:
        requested: the request was sent to the service.
    """

    target: pb.Device
    device: pb.Device | None = None
    error: ScrubberError | None = None
    requested: bool = True

    @property
    def exit_code(self) -> ExitCode:
        if self.error is not None:
            return exit_code_for(self.error)
        return ExitCode.INTERRUPTED if self.device is None else ExitCode.OK

    @property
    def outcome(self) -> str:
        if self.error is not None:
            return "refused" if self.exit_code in (ExitCode.REFUSED, ExitCode.USAGE) else "failed"
        if self.device is not None:
            return self.device.health or "quarantined"
        return "unknown" if self.requested else "not-tried"

    @property
    def details(self) -> str:
        if self.error is not None:
            return str(self.error)
        if self.device is None:
            why = "interrupted before the service answered" if self.requested else "interrupted before it was its turn"
            return f"{why}; scrubber device {self.target.index} shows its state"
        return cause_text(self.device.cause) if self.device.HasField("cause") else "-"


async def _quarantine_all(socket: Path, wanted: Sequence[str], reason: str) -> Sequence[_QuarantineResult]:
    """Quarantine the ``wanted`` devices, each once; an interrupt ends it with the results so far.

    Raises:
        InvalidRequest: a name that matches no device, or more than one. Nothing was done.
    """
    from scrubber.api.client import AdminClient, ReadClient

    async with ReadClient(socket) as reader:
        known = (await reader.devices()).devices
    targets = list({found.id: found for found in (resolve_device(known, each) for each in wanted)}.values())
    results: list[_QuarantineResult] = []
    async with AdminClient(socket) as client:
        for place, target in enumerate(targets):
            try:
                answered = await client.quarantine(target.id, reason)
                results.append(_QuarantineResult(target, device=answered.device))
            except ScrubberError as error:
                results.append(_QuarantineResult(target, error=error))
            except asyncio.CancelledError:
                rest = (_QuarantineResult(each, requested=False) for each in targets[place + 1 :])
                return [*results, _QuarantineResult(target), *rest]
    return results


def _quarantine_result(results: Sequence[_QuarantineResult]) -> CommandResult:
    from scrubber.cli.render import json_objects

    return CommandResult(
        data=[
            {
                "target": each.target.id,
                "device": None if each.device is None else json_objects.device(each.device),
                "error": None if each.error is None else {"code": each.error.code, "message": str(each.error)},
            }
            for each in results
        ],
        names=[each.device.id for each in results if each.device is not None],
        header=(
            OutputColumn("INDEX"),
            OutputColumn("DEVICE", holds_ids=True),
            OutputColumn("RESULT"),
            OutputColumn("DETAILS", min_width=32, can_move_below=True),
        ),
        rows=[(each.target.index or "-", each.target.id, each.outcome, each.details) for each in results],
        kind="QuarantineResult",
    )


def unquarantine(
    device: DeviceArgument,
    reason: ReasonOption,
    yes: YesOption = False,
    no_input: NoInputOption = False,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Return a quarantined device to service, after probation. It returns after its probation: clean scrubs in a row, as many as the policy says."""
    if needs_confirmation(yes=yes, no_input=no_input):
        check_admin_access(socket)
        found = fetch_device(socket, device)
        if found.health not in OUT_OF_SERVICE:
            called = "on probation" if found.health == "probation" else found.health
            raise Refused(f"Device {found.index} ({found.id}) is {called}, not quarantined.")
        cause = f": {cause_text(found.cause)}" if found.HasField("cause") else "."
        confirm(
            f"Device {found.index} ({found.id}) is {found.state}{cause} Once it has proved itself clean again, it goes to "
            "whoever asks for it.",
            yes=yes,
            no_input=no_input,
        )
    change_and_show_device(socket, output, lambda client: client.unquarantine(device, reason))


def fetch_device(socket: Path, device: str) -> pb.Device:
    """Return the current state of ``device``; raises :class:`InvalidRequest` unless it matches exactly one."""

    async def look() -> pb.Device:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            return resolve_device((await client.devices()).devices, device)

    return run(look())


def run_admin_action(socket: Path, action: Callable[[AdminClient], Awaitable[pb.DeviceResponse]]) -> pb.Device:
    """Request ``action`` from the service; return the device afterwards."""

    async def ask_service() -> pb.Device:
        from scrubber.api.client import AdminClient

        async with AdminClient(socket) as client:
            return (await action(client)).device

    return run(ask_service())


def change_and_show_device(
    socket: Path, output: OutputFormat, action: Callable[[AdminClient], Awaitable[pb.DeviceResponse]]
) -> None:
    """Request ``action`` from the service, and show the device afterwards."""
    from scrubber.cli.render.device_list import device_list_result

    device = run_admin_action(socket, action)
    changed = device_list_result([device], _fetch_service_info(socket) if output is OutputFormat.TABLE else None)
    print_result(replace(changed, data=changed.data[0]), output)


def _fetch_service_info(socket: Path) -> pb.ServiceInfo | None:
    """Return the service's information, for the same output as in the list; None if this user may not read it."""

    async def ask_service() -> pb.ServiceInfo | None:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            try:
                return await client.service_info()
            except ScrubberError:  # the action succeeded nevertheless
                return None

    return run(ask_service())
