"""``scrubber device``: everything that is known of one device, with what happened to it.

It is what a person reads who was woken for this device: nothing that the service knows of it is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.client_run import run
from scrubber.cli.options import DeviceArgument, OutputOption, SocketOption
from scrubber.cli.render.cause_text import AUTOMATIC_RECOVERIES, recovery_text
from scrubber.cli.render.device_list import format_age, select_devices
from scrubber.cli.render.output import CommandResult, OutputColumn, OutputFormat, TableSection, print_result
from scrubber.cli.tenancy import current_tenancies, previous_tenancies
from scrubber.domain.formatting import format_size, format_utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["add_commands", "device_result"]

Rows = Iterator[tuple[str, str]]

LimitOption = Annotated[
    int,
    typer.Option(
        "--limit",
        min=0,
        max=10_000,
        help="At most so many entries of its history, the newest.",
    ),
]


_GRANT_COLUMNS = (
    OutputColumn("GRANT"),
    OutputColumn("TENANT", min_width=24),
    OutputColumn("HAND-OVER"),
    OutputColumn("GRANTED", min_width=21),
    OutputColumn("BY", min_width=20, drop_priority=1),
    OutputColumn("POD UID", drop_priority=2),
)


def add_commands(app: typer.Typer) -> None:
    app.command("device")(device)


def device(
    device: DeviceArgument,
    limit: LimitOption = 20,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show everything about one device, with its history."""

    async def ask() -> tuple[pb.Device, Sequence[pb.HistoryEntry]]:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            (found,) = select_devices((await client.devices()).devices, [device])
            entries = (await client.history(device=found.id, limit=limit)).entries if limit else []
            return found, entries

    print_result(device_result(*run(ask()), now=time.time()), output)


def device_result(message: pb.Device, entries: Sequence[pb.HistoryEntry], *, now: float) -> CommandResult:
    """One device in all forms.

    Args:
        entries: its history, newest first.
        now: wall-clock seconds as of which what happened is so long ago.
    """
    from scrubber.cli.render import json_objects

    return CommandResult(
        data={**json_objects.device(message), "history": [json_objects.history_entry(each) for each in entries]},
        names=[message.id],
        header=(),
        rows=list(_identity_rows(message)),
        kind="Device",
        sections=[
            TableSection("State", (), list(_state_rows(message, now))),
            *_tenancy_sections(message, now),
            *(
                [TableSection("Used without a grant", (), [(each,) for each in message.strangers])]
                if message.strangers
                else ()
            ),
            *(
                [TableSection("Not looked through", (), [(each,) for each in message.uninspected])]
                if message.uninspected
                else ()
            ),
            TableSection("Certificate", (), list(_certificate_rows(message, now))),
            TableSection(
                "Warnings that stand",
                ("CODE", "SINCE"),
                [(w.code, _time_and_age(w.since, now)) for w in message.lasting],
            ),
            TableSection("Counted over its life", (), [(name, str(n)) for name, n in sorted(message.lifetime.items())]),
            *_baseline_sections(message, now),
            _history_section(entries),
        ],
    )


def _time_and_age(at: float, now: float) -> str:
    return (
        f"{format_utc(at)}, {format_age(now - at)} ago" if at <= now else f"{format_utc(at)}, in {format_age(at - now)}"
    )


def _identity_rows(found: pb.Device) -> Rows:
    yield "device", found.id
    yield "index", found.index
    yield "model", found.model or "-"
    yield "memory", format_size(found.memory_bytes)
    if found.profile:
        yield "profile", found.profile
    if found.parent:
        yield "cut from", found.parent
    if found.HasField("numa_node"):
        yield "NUMA node", str(found.numa_node)
    yield from (("peer", each) for each in found.peers)
    yield from sorted(found.traits.items())


def _state_rows(found: pb.Device, now: float) -> Rows:
    yield "hygiene", found.hygiene or "-"
    yield "health", found.health or "-"
    yield "offered", "yes: the kubelet is told that it is healthy" if found.offered else "no"
    if found.scrub:
        yield "scrub under way", found.scrub
    if found.HasField("cause"):
        yield "cause", f"{found.cause.code}: {found.cause.sentence}"
        yield "since", f"{_time_and_age(found.cause.since, now)}, by {found.cause.actor}"
        yield "way back", recovery_text(found)
    if found.waits:
        yield "it waits", found.waits
    if found.retry_at and (not found.HasField("cause") or found.cause.way_back in AUTOMATIC_RECOVERIES):
        due = found.retry_at <= now
        yield (
            "next attempt",
            f"due since {_time_and_age(found.retry_at, now)}" if due else _time_and_age(found.retry_at, now),
        )
    if found.must_reset:
        yield "reset", f"owed: {_pending_reset_text(found)}"
    if found.clean_scrubs or found.health == "probation":
        yield "clean scrubs", f"{found.clean_scrubs} on the probation under way"
    if found.failures:
        many = "attempt" if found.failures == 1 else "attempts"
        yield "failures", f"{found.failures} {many} at recovery failed since it was last healthy"
    for strike in found.strikes:
        whose = f", while {strike.tenant_namespace} had it" if strike.tenant_namespace else ""
        yield "was quarantined", f"{_time_and_age(strike.at, now)}: {strike.code}{whose}"
    for attempt in found.attempts:
        how = "with a reset" if attempt.reset else "without a reset"
        yield (
            "recovery tried",
            f"{_time_and_age(attempt.at, now)}, {how}{', by order of a person' if attempt.ordered else ''}",
        )
    yield "policy", f"{found.policy or '-'}{f' ({found.enforcement})' if found.enforcement else ''}"
    if found.HasField("glass"):
        yield "glass", f"broken until {format_utc(found.glass.until)} by {found.glass.actor}: {found.glass.reason}"


def _pending_reset_text(found: pb.Device) -> str:
    """What becomes of hand-overs while a reset is owed."""
    if found.HasField("glass"):
        return "the device is handed over without it all the same while its glass is broken"
    if found.enforcement == "observe":
        return "the device is handed over without it all the same, because its policy only observes"
    return "nothing is handed over before it"


def _tenancy_sections(found: pb.Device, now: float) -> Iterator[TableSection]:
    """Who has it; and who had it, where nobody has and no scrub has shown yet that they are over."""
    none = "nobody by a grant" if found.strangers else "nobody"
    yield TableSection("Who has it", _GRANT_COLUMNS, _grant_rows(current_tenancies(found), now), empty_message=none)
    if previous_tenancies(found):
        yield TableSection("Had it last", _GRANT_COLUMNS, _grant_rows(previous_tenancies(found), now))


def _grant_rows(granted: Sequence[pb.Tenancy], now: float) -> Sequence[Sequence[str]]:
    return [
        (
            str(each.grant),
            "/".join(part for part in (each.tenant_namespace, each.pod, each.container) if part) or "nobody known",
            each.kind or "-",
            _time_and_age(each.at, now),
            each.certificate or (f"the policy's exception {each.exception}" if each.exception else "-"),
            each.uid or "-",
        )
        for each in granted
    ]


def _certificate_rows(found: pb.Device, now: float) -> Rows:
    if not found.HasField("certificate"):
        return
    certificate = found.certificate
    used = certificate.HasField("next_grant")
    yield "certificate", certificate.id
    yield "standing", f"used by grant {certificate.next_grant}" if used else "unused"
    yield "issued", _time_and_age(certificate.issued_at, now)
    yield "path", certificate.path
    yield "scrub", certificate.scrub
    if certificate.rests_on:
        yield "rests on", certificate.rests_on
    yield "policy", certificate.policy
    yield "driver", certificate.driver
    yield "signed by", certificate.key_id or "nobody"
    yield from (("covered", each) for each in certificate.covered)
    yield from (("not covered", each) for each in certificate.not_covered)


def _baseline_sections(found: pb.Device, now: float) -> Iterator[TableSection]:
    """What it should be, fact by fact; then what a person called normal, if anything."""
    if not found.HasField("baseline"):
        yield TableSection("Baseline", (), [], empty_message="was not taken")
        return
    baseline = found.baseline
    why = f": {baseline.reason}" if baseline.reason else ""
    rows = [
        (
            fact.name,
            fact.expected or "-",
            fact.found or "-",
            "as-expected" if fact.expected == fact.found else "differs",
        )
        for fact in baseline.facts
    ]
    title = f"Baseline of {_time_and_age(baseline.at, now)}, by {baseline.actor}{why}"
    yield TableSection(
        title,
        (OutputColumn("FACT"), OutputColumn("EXPECTED", 12), OutputColumn("FOUND", 12), OutputColumn("VERDICT")),
        rows,
    )
    if baseline.conditions:
        normal = [(each.name, each.expected) for each in baseline.conditions]
        yield TableSection("Normal for this device", ("CONDITION", "READ"), normal)


def _history_section(entries: Sequence[pb.HistoryEntry]) -> TableSection:
    from scrubber.cli.commands.history import HISTORY_COLUMNS, history_row

    kept = [place for place, each in enumerate(HISTORY_COLUMNS) if each.title != "DEVICE"]
    return TableSection(
        "History, the newest first",
        [HISTORY_COLUMNS[place] for place in kept],
        [[cells[place] for place in kept] for cells in map(history_row, entries)],
        empty_message="nothing yet, or none asked for",
    )
