"""``scrubber baseline``: what a device should be and where it is something else, and saying that it is right so.

What a device is may change for a good reason (it was serviced) or a bad one (somebody wrote its firmware). Only a person
can tell the two apart, so nothing but this command makes the new state the expected one, and it is on the audit with a
reason.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scrubber.cli.client_run import resolve_device, run
from scrubber.cli.commands.quarantine import ReasonOption, fetch_device, run_admin_action
from scrubber.cli.confirmation import NoInputOption, YesOption, check_admin_access, confirm, needs_confirmation
from scrubber.cli.exit_codes import ExitCode
from scrubber.cli.options import DeviceArgument, OutputOption, SocketOption, device_name, new_app
from scrubber.cli.render.output import CommandResult, OutputColumn, OutputFormat, TableSection, print_note, print_result
from scrubber.cli.render.output import print_table as show_on
from scrubber.domain.formatting import format_utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["accept", "app", "show"]

app = new_app("See what a device should be, and accept what it is now.")

OptionalDeviceArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="DEVICE",
        parser=device_name,
        help="UUID, unique beginning of one, or index; none: all.",
        show_default=False,
    ),
]

_COLUMNS = (
    OutputColumn("FACT"),
    OutputColumn("EXPECTED", min_width=16),
    OutputColumn("FOUND", min_width=16),
    OutputColumn("VERDICT"),
)


@app.command()
def show(
    device: OptionalDeviceArgument = None,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Compare devices with what they should be. Exits with 0 if all is as expected, 1 if anything differs or is unknown."""
    found = run(_fetch_devices(socket, device))
    print_result(_answer(found, single=device is not None), output)
    raise typer.Exit(ExitCode.OK if found and all(_matches_baseline(each) for each in found) else ExitCode.FAILED)


@app.command()
def accept(
    device: DeviceArgument,
    reason: ReasonOption,
    yes: YesOption = False,
    no_input: NoInputOption = False,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Accept what a device is now as what it should be. Shows what would be accepted, and asks.

    Exits with 3, and nothing is accepted, if the device is something else by then than what was shown: look again.
    """
    if needs_confirmation(yes=yes, no_input=no_input):
        check_admin_access(socket)
    found = fetch_device(socket, device)
    shown = _current_facts(found)
    show_on(_proposal(found, shown), sys.stderr)
    normal = _acceptable_warnings(found)
    confirm(
        f"From now on what device {found.index} ({found.id}) is at present counts as right"
        f"{f', the warnings that stand too ({normal})' if normal else ''}. Nobody is told of it any more.",
        yes=yes,
        no_input=no_input,
    )
    # By its id and with its facts: what was shown is what is accepted, whichever device has that index now.
    accepted = run_admin_action(socket, lambda client: client.accept_baseline(found.id, reason, expected_facts=shown))
    print_result(_answer([accepted], single=True), output)
    if output is OutputFormat.TABLE and accepted.cause.code == "baseline-changed":
        print_note(
            f"Device {accepted.index} is judged by it at the next look, within a minute; until then scrubber devices "
            "says of it what it said before."
        )


async def _fetch_devices(socket: Path, device: str | None) -> Sequence[pb.Device]:
    from scrubber.api.client import ReadClient

    async with ReadClient(socket) as client:
        known = (await client.devices()).devices
    return known if device is None else [resolve_device(known, device)]


def _current_facts(device: pb.Device) -> dict[str, str]:
    """What the device is now, fact by fact, as the service would accept it."""
    from scrubber.domain.baseline import baseline_facts
    from scrubber.domain.device import Device

    traits = tuple(sorted(device.traits.items()))
    return dict(baseline_facts(Device(device.id, device.index, device.model, device.memory_bytes, traits=traits)))


def _acceptable_warnings(device: pb.Device) -> str:
    """Warnings that stand now and that a person who accepts the device calls normal for it."""
    from scrubber.backends import BACKENDS

    acceptable = {code for each in BACKENDS.values() for code in each.signal_table().acceptable}
    return ", ".join(sorted({each.code for each in device.lasting} & acceptable))


def _proposal(device: pb.Device, shown: Mapping[str, str]) -> CommandResult:
    """What a person is asked to accept: ``shown``, beside what was expected so far."""
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
        sections=[TableSection("Facts", _COLUMNS, rows, "none: the service says nothing of what it is")],
    )


def _compare_fact(expected: str | None, found: str | None) -> str:
    if expected is None:
        return "new"
    return "as-expected" if expected == found else "differs"


def _matches_baseline(device: pb.Device) -> bool | None:
    """None where nobody knows what the device should be."""
    if not device.HasField("baseline"):
        return None
    return all(verdict == "as-expected" for _, verdict in _fact_verdicts(device.baseline))


def _fact_verdicts(baseline: pb.Baseline) -> Iterator[tuple[pb.Fact, str]]:
    for fact in baseline.facts:
        yield fact, "as-expected" if fact.found == fact.expected else "differs"
    for condition in baseline.conditions:
        # One that was called normal and has gone is no worse a device.
        yield condition, "as-expected" if condition.found in ("", condition.expected) else "differs"


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
        yield (fact.name, fact.expected or "-", fact.found or "-", word)


def _rows(devices: Sequence[pb.Device]) -> Iterator[tuple[str, ...]]:
    for device in devices:
        facts = list(_facts(device)) if device.HasField("baseline") else [("-", "-", "-", "unknown")]
        yield from ((device.index, device.id, *fact) for fact in facts)


def _properties(device: pb.Device) -> Iterator[tuple[str, str]]:
    yield ("index", device.index)
    yield ("device", device.id)
    if not device.HasField("baseline"):
        yield ("verdict", "unknown: no baseline was taken yet, so nobody knows what it should be")
        return
    yield ("taken", format_utc(device.baseline.at))
    yield ("by", device.baseline.actor)
    yield ("reason", device.baseline.reason or "-")
    off = sum(1 for _, word in _fact_verdicts(device.baseline) if word == "differs")
    yield ("verdict", f"differs in {off}" if off else "as expected")


def _data(device: pb.Device) -> dict[str, Any]:
    from scrubber.cli.render import json_objects

    taken: dict[str, Any] = {"at": None, "actor": None, "reason": None, "facts": [], "conditions": []}
    if device.HasField("baseline"):
        taken = json_objects.baseline(device.baseline)
    return {"device": device.id, "index": device.index, "as_expected": _matches_baseline(device), **taken}
