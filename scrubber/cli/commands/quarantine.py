"""``scrubber quarantine`` and ``unquarantine``: take devices out of service, and return one to service.

A quarantine is the safe direction and needs no confirmation; a release does. Both need a reason, which the audit log
keeps with the uid of the operator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.client_run import fetch_device, resolve_device, run, run_admin_action
from scrubber.cli.confirmation import NoInputOption, YesOption, check_admin_access, confirm, needs_confirmation
from scrubber.cli.exit_codes import ExitCode, exit_code_for, worst_exit_code
from scrubber.cli.options import DeviceArgument, DevicesArgument, NoHeadersOption, OutputOption, SocketOption
from scrubber.cli.render.device_facts import OUT_OF_SERVICE, cause_text, probation_text
from scrubber.cli.render.output import CommandResult, OutputColumn, OutputFormat, print_note, print_result
from scrubber.domain.errors import Refused, ScrubberError
from scrubber.domain.formatting import format_utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.api.client import AdminClient

__all__ = ["ReasonOption", "add_commands", "change_and_show_device"]


def _require_reason(reason: str) -> str:
    if not reason.strip():
        raise typer.BadParameter("must not be empty; the reason is recorded in the audit log.")
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
    no_headers: NoHeadersOption = False,
) -> None:
    """Take devices out of service.

    A pod that has a device keeps it; no other pod gets it. If one of the names is invalid, no device is quarantined. The audit
    log records each quarantine as the event operator.quarantined.

    Exits with 0 only if every device was quarantined, otherwise with the worst of: 130 interrupted, 1 failed, 2 no such
    device, 3 refused.
    """
    names = list(dict.fromkeys(devices))
    if len(names) == 1:
        answered = change_and_show_device(
            socket, output, lambda client: client.quarantine(names[0], reason), no_headers=no_headers
        )
        if output.is_table:
            for note in _previous_cause_notes(answered):
                print_note(note)
        return
    results = run(_quarantine_all(socket, names, reason))
    errors = [each.error for each in results if each.error is not None]
    if len(errors) == len(results) and len({str(each) for each in errors}) == 1:
        raise errors[0]  # the service refuses, not a single device
    print_result(_quarantine_result(results), output, no_headers=no_headers)
    raise typer.Exit(worst_exit_code(each.exit_code for each in results))


@dataclass(frozen=True, slots=True)
class _QuarantineResult:
    """Result for one device of several: the answer, an error, or neither if interrupted.

    Attributes:
        requested: the request was sent to the service.
    """

    target: pb.Device
    answer: pb.DeviceResponse | None = None
    error: ScrubberError | None = None
    requested: bool = True

    @property
    def device(self) -> pb.Device | None:
        """The device afterwards."""
        return None if self.answer is None else self.answer.device

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
            when = "the service answered" if self.requested else "the request was sent"
            return f"interrupted before {when}; run `scrubber device {self.target.index}` to see its state"
        return cause_text(self.device.cause) if self.device.HasField("cause") else "-"


async def _quarantine_all(socket: Path, names: Sequence[str], reason: str) -> Sequence[_QuarantineResult]:
    """Quarantine the devices called ``names``, each once; an interrupt ends it with the results so far.

    Raises:
        InvalidRequest: a name that matches no device, or more than one. Nothing was done.
    """
    from scrubber.api.client import AdminClient, ReadClient

    async with ReadClient(socket) as reader:
        known = (await reader.devices()).devices
    targets = list({found.id: found for found in (resolve_device(known, each) for each in names)}.values())
    results: list[_QuarantineResult] = []
    async with AdminClient(socket) as client:
        for place, target in enumerate(targets):
            try:
                results.append(_QuarantineResult(target, answer=await client.quarantine(target.id, reason)))
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
                "previousCause": None
                if each.answer is None or not each.answer.HasField("previous_cause")
                else json_objects.cause(each.answer.previous_cause),
                "error": None if each.error is None else {"code": each.error.code, "message": str(each.error)},
            }
            for each in results
        ],
        names=[each.device.id for each in results if each.device is not None],
        header=(
            OutputColumn("INDEX"),
            OutputColumn("DEVICE", holds_ids=True),
            OutputColumn("OUTCOME"),
            OutputColumn("DETAILS", min_width=20),
        ),
        rows=[(each.target.index or "-", each.target.id, each.outcome, each.details) for each in results],
        notes=[note for each in results if each.answer is not None for note in _previous_cause_notes(each.answer)],
        kind="QuarantineResult",
    )


def _previous_cause_notes(answer: pb.DeviceResponse) -> Iterator[str]:
    """Yield why the device was out of service before this quarantine, if it was: the new reason replaces the old one."""
    if answer.HasField("previous_cause"):
        before = answer.previous_cause
        yield (
            f"Device {answer.device.index} ({answer.device.id}) was already out of service, since {format_utc(before.since)} "
            f"by {before.actor}: {cause_text(before)} The new reason replaces it."
        )


def unquarantine(
    device: DeviceArgument,
    reason: ReasonOption,
    yes: YesOption = False,
    no_input: NoInputOption = False,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """Return a quarantined device to service, after probation.

    On probation, the device must pass as many scrubs in a row as its policy requires (recovery.probationScrubs). The audit
    log records the release as the event operator.released.
    """
    if needs_confirmation(yes=yes, no_input=no_input):
        check_admin_access(socket)
        found = fetch_device(socket, device)
        if found.health not in OUT_OF_SERVICE:
            called = "on probation" if found.health == "probation" else found.health
            raise Refused(f"Device {found.index} ({found.id}) is {called}, not quarantined.")
        cause = f": {cause_text(found.cause)}" if found.HasField("cause") else "."
        confirm(
            f"Device {found.index} ({found.id}) is {found.state}{cause} After it passes its probation, it is handed over to "
            "tenants again.",
            yes=yes,
            no_input=no_input,
        )
    released = change_and_show_device(
        socket, output, lambda client: client.unquarantine(device, reason), no_headers=no_headers
    ).device
    if output.is_table and released.health == "probation":
        print_note(f"Device {released.index} ({released.id}) is on probation: {probation_text(released)}.")


def change_and_show_device(
    socket: Path,
    output: OutputFormat,
    action: Callable[[AdminClient], Awaitable[pb.DeviceResponse]],
    *,
    no_headers: bool = False,
) -> pb.DeviceResponse:
    """Request ``action`` from the service, show the device afterwards, and return the answer."""
    from scrubber.cli.render.device_list import device_list_result

    answered = run_admin_action(socket, action)
    changed = device_list_result([answered.device], _fetch_service_info(socket) if output.is_table else None)
    print_result(replace(changed, data=changed.data[0]), output, no_headers=no_headers)
    return answered


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
