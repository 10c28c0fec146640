"""``scrubber baseline``: compare devices with their baselines, and accept a device's current state as its baseline.

A device may change for a good reason (it was serviced) or a bad one (its firmware was overwritten). Only a person can
distinguish the two, so only this command makes the new state the expected one, and the audit log records it with a
reason.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scrubber.cli.app import App
from scrubber.cli.client_run import fetch_device, resolve_device, run, run_admin_action
from scrubber.cli.commands.quarantine import ReasonOption
from scrubber.cli.completers import complete_device
from scrubber.cli.confirmation import NoInputOption, YesOption, check_admin_access, confirm, needs_confirmation
from scrubber.cli.exit_codes import ExitCode
from scrubber.cli.options import DeviceArgument, NoHeadersOption, OutputOption, SocketOption, device_name
from scrubber.cli.render.output import CommandResult, OutputColumn, OutputFormat, TableSection, print_note, print_result
from scrubber.cli.render.output import print_table as show_on
from scrubber.domain.formatting import format_utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["accept", "app", "show"]

app = App("Show or accept the expected state of a device.")

OptionalDeviceArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="DEVICE",
        parser=device_name,
        autocompletion=complete_device,
        help="UUID, unique prefix of a UUID, or index. Default: all devices.",
        show_default=False,
    ),
]

_COLUMNS = (
    OutputColumn("FACT"),
    OutputColumn("EXPECTED", min_width=16),
    OutputColumn("ACTUAL", min_width=16),
    OutputColumn("VERDICT"),
)


@app.command()
def show(
    device: OptionalDeviceArgument = None,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """Compare devices with their baselines.

    Exits with 0 if every device is as expected, 1 if one differs or has no baseline.
    """
    found = run(_fetch_devices(socket, device))
    print_result(_answer(found, single=device is not None), output, no_headers=no_headers)
    raise typer.Exit(ExitCode.OK if found and all(_matches_baseline(each) for each in found) else ExitCode.FAILED)


@app.command()
def accept(
    device: DeviceArgument,
    reason: ReasonOption,
    yes: YesOption = False,
    no_input: NoInputOption = False,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """Accept the current state of a device as its baseline.

    Shows what would be accepted, and asks for confirmation. Exits with 3, and accepts nothing, if the device has changed
    since it was shown.
    """
    if needs_confirmation(yes=yes, no_input=no_input):
        check_admin_access(socket)
    found = fetch_device(socket, device)
    shown = _current_facts(found)
    show_on(_proposal(found, shown), sys.stderr)
    normal = _acceptable_warnings(found)
    confirm(
        f"The current state of device {found.index} ({found.id}) becomes its baseline"
        f"{f', including its current warnings ({normal})' if normal else ''}. It is then no longer reported.",
        yes=yes,
        no_input=no_input,
    )
    # By its id and with its facts: what was shown is accepted, even if another device has that index by now.
    answer = run_admin_action(socket, lambda client: client.accept_baseline(found.id, reason, expected_facts=shown))
    accepted = answer.device
    print_result(_answer([accepted], single=True), output, no_headers=no_headers)
    if output.is_table and accepted.cause.code == "baseline-mismatch":
        print_note(
            f"Device {accepted.index} is compared with its new baseline at the next check, within a minute. Until then, "
            "`scrubber devices` shows its previous state."
        )


async def _fetch_devices(socket: Path, device: str | None) -> Sequence[pb.Device]:
    from scrubber.api.client import ReadClient

    async with ReadClient(socket) as client:
        known = (await client.devices()).devices
    return known if device is None else [resolve_device(known, device)]


def _current_facts(device: pb.Device) -> dict[str, str]:
    """Return the device's current facts, as the service would accept them."""
    from scrubber.domain.baseline import baseline_facts
    from scrubber.domain.device import Device

    traits = tuple(sorted(device.attributes.items()))
    return dict(baseline_facts(Device(device.id, device.index, device.model, device.memory_bytes, traits=traits)))


def _acceptable_warnings(device: pb.Device) -> str:
    """Return the current warnings that acceptance makes normal for the device."""
    from scrubber.backends import BACKENDS

    acceptable = {code for each in BACKENDS.values() for code in each.signal_table().acceptable}
    return ", ".join(sorted({each.code for each in device.conditions} & acceptable))


def _proposal(device: pb.Device, shown: Mapping[str, str]) -> CommandResult:
    """Return the facts for the user to accept: ``shown``, beside the previous baseline."""
    expected = {each.name: each.expected for each in device.baseline.facts}
    rows = [
        (name, expected.get(name) or "-", shown.get(name) or "-", _compare_fact(expected.get(name), shown.get(name)))
        for name in sorted(expected.keys() | shown.keys())
    ]
    return CommandResult(
        data=None,
        names=(),
        header=(),
        rows=list(_properties(device)),
        sections=[TableSection("Facts", _COLUMNS, rows, "unknown: the service reports no facts of this device")],
    )


def _compare_fact(expected: str | None, found: str | None) -> str:
    if expected is None:
        return "new"
    return "as-expected" if expected == found else "differs"


def _matches_baseline(device: pb.Device) -> bool | None:
    """Return whether the device matches its baseline; None where it has none."""
    if not device.HasField("baseline"):
        return None
    return all(verdict == "as-expected" for _, verdict in _fact_verdicts(device.baseline))


def _fact_verdicts(baseline: pb.Baseline) -> Iterator[tuple[pb.Fact, str]]:
    for fact in baseline.facts:
        yield fact, "as-expected" if fact.actual == fact.expected else "differs"
    for condition in baseline.accepted_conditions:
        # A condition that was accepted and has disappeared is not a problem.
        yield condition, "as-expected" if condition.actual in ("", condition.expected) else "differs"


def _answer(devices: Sequence[pb.Device], *, single: bool) -> CommandResult:
    data = [_data(each) for each in devices]
    return CommandResult(
        data=data[0] if single else data,
        names=[each.id for each in devices],
        header=() if single else (OutputColumn("INDEX"), OutputColumn("DEVICE", holds_ids=True), *_COLUMNS),
        rows=list(_properties(devices[0]) if single else _rows(devices)),
        empty_message="There are no devices on this node.",
        sections=[TableSection("Facts", _COLUMNS, list(_facts(devices[0])), "unknown")] if single else (),
        kind="Baseline",
    )


def _facts(device: pb.Device) -> Iterator[tuple[str, ...]]:
    for fact, word in _fact_verdicts(device.baseline):
        yield (fact.name, fact.expected or "-", fact.actual or "-", word)


def _rows(devices: Sequence[pb.Device]) -> Iterator[tuple[str, ...]]:
    for device in devices:
        facts = list(_facts(device)) if device.HasField("baseline") else [("-", "-", "-", "unknown")]
        yield from ((device.index, device.id, *fact) for fact in facts)


def _properties(device: pb.Device) -> Iterator[tuple[str, str]]:
    yield ("index", device.index)
    yield ("device", device.id)
    if not device.HasField("baseline"):
        yield ("verdict", "unknown: no baseline was recorded yet")
        return
    yield ("recorded", format_utc(device.baseline.recorded_at))
    yield ("by", device.baseline.actor)
    yield ("reason", device.baseline.reason or "-")
    off = sum(1 for _, word in _fact_verdicts(device.baseline) if word == "differs")
    yield ("verdict", f"{off} {'fact differs' if off == 1 else 'facts differ'}" if off else "as expected")


def _data(device: pb.Device) -> dict[str, Any]:
    from scrubber.cli.render import json_objects

    recorded: dict[str, Any] = {
        "recordedAt": None,
        "actor": None,
        "reason": None,
        "facts": [],
        "acceptedConditions": [],
    }
    if device.HasField("baseline"):
        recorded = json_objects.baseline(device.baseline)
    return {"metadata": {"name": device.id}, "index": device.index, "matches": _matches_baseline(device), **recorded}
