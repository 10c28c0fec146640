"""``scrubber device``: everything that is known of one device, with what happened to it.

It is what a person reads who was woken for this device: nothing that the service knows of it is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.asking import run
from scrubber.cli.causes import BY_ITSELF, leads_back
from scrubber.cli.having import had_last, tenancies
from scrubber.cli.listing import age, chosen
from scrubber.cli.options import DeviceArgument, OutputOption, SocketOption
from scrubber.cli.output import Answer, Column, Output, Section, emit
from scrubber.domain.quantities import binary_size, utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["add_commands", "answer"]

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


_GRANTED = (
    Column("GRANT"),
    Column("TENANT", least=24),
    Column("HAND-OVER"),
    Column("GRANTED", least=21),
    Column("BY", least=20, drop=1),
    Column("POD UID", drop=2),
)


def add_commands(app: typer.Typer) -> None:
    app.command("device")(device)


def device(
    device: DeviceArgument,
    limit: LimitOption = 20,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Show everything about one device, with its history."""

    async def ask() -> tuple[pb.Device, Sequence[pb.HistoryEntry]]:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            (found,) = chosen((await client.devices()).devices, [device])
            entries = (await client.history(device=found.id, limit=limit)).entries if limit else []
            return found, entries

    emit(answer(*run(ask()), now=time.time()), output)


def answer(found: pb.Device, entries: Sequence[pb.HistoryEntry], *, now: float) -> Answer:
    """One device in all forms.

    Args:
        entries: its history, newest first.
        now: wall-clock seconds as of which what happened is so long ago.
    """
    from scrubber.cli import shapes

    return Answer(
        data={**shapes.device(found), "history": [shapes.history_entry(each) for each in entries]},
        names=[found.id],
        header=(),
        rows=list(_identity(found)),
        kind="Device",
        sections=[
            Section("State", (), list(_state(found, now))),
            *_tenancies(found, now),
            *([Section("Used without a grant", (), [(each,) for each in found.strangers])] if found.strangers else ()),
            *(
                [Section("Not looked through", (), [(each,) for each in found.uninspected])]
                if found.uninspected
                else ()
            ),
            Section("Certificate", (), list(_certificate(found, now))),
            Section("Warnings that stand", ("CODE", "SINCE"), [(w.code, _when(w.since, now)) for w in found.lasting]),
            Section("Counted over its life", (), [(name, str(n)) for name, n in sorted(found.lifetime.items())]),
            *_baseline(found, now),
            _history(entries),
        ],
    )


def _when(at: float, now: float) -> str:
    return f"{utc(at)}, {age(now - at)} ago" if at <= now else f"{utc(at)}, in {age(at - now)}"


def _identity(found: pb.Device) -> Rows:
    yield "device", found.id
    yield "index", found.index
    yield "model", found.model or "-"
    yield "memory", binary_size(found.memory_bytes)
    if found.profile:
        yield "profile", found.profile
    if found.parent:
        yield "cut from", found.parent
    if found.HasField("numa_node"):
        yield "NUMA node", str(found.numa_node)
    yield from (("peer", each) for each in found.peers)
    yield from sorted(found.traits.items())


def _state(found: pb.Device, now: float) -> Rows:
    yield "hygiene", found.hygiene or "-"
    yield "health", found.health or "-"
    yield "offered", "yes: the kubelet is told that it is healthy" if found.offered else "no"
    if found.scrub:
        yield "scrub under way", found.scrub
    if found.HasField("cause"):
        yield "cause", f"{found.cause.code}: {found.cause.sentence}"
        yield "since", f"{_when(found.cause.since, now)}, by {found.cause.actor}"
        yield "way back", leads_back(found)
    if found.waits:
        yield "it waits", found.waits
    if found.retry_at and (not found.HasField("cause") or found.cause.way_back in BY_ITSELF):
        due = found.retry_at <= now
        yield "next attempt", f"due since {_when(found.retry_at, now)}" if due else _when(found.retry_at, now)
    if found.must_reset:
        yield "reset", f"owed: {_without_it(found)}"
    if found.clean_scrubs or found.health == "probation":
        yield "clean scrubs", f"{found.clean_scrubs} on the probation under way"
    if found.failures:
        many = "attempt" if found.failures == 1 else "attempts"
        yield "failures", f"{found.failures} {many} at recovery failed since it was last healthy"
    for strike in found.strikes:
        whose = f", while {strike.tenant_namespace} had it" if strike.tenant_namespace else ""
        yield "was quarantined", f"{_when(strike.at, now)}: {strike.code}{whose}"
    for attempt in found.attempts:
        how = "with a reset" if attempt.reset else "without a reset"
        yield "recovery tried", f"{_when(attempt.at, now)}, {how}{', by order of a person' if attempt.ordered else ''}"
    yield "policy", f"{found.policy or '-'}{f' ({found.enforcement})' if found.enforcement else ''}"
    if found.HasField("glass"):
        yield "glass", f"broken until {utc(found.glass.until)} by {found.glass.actor}: {found.glass.reason}"


def _without_it(found: pb.Device) -> str:
    """What becomes of hand-overs while a reset is owed."""
    if found.HasField("glass"):
        return "the device is handed over without it all the same while its glass is broken"
    if found.enforcement == "observe":
        return "the device is handed over without it all the same, because its policy only observes"
    return "nothing is handed over before it"


def _tenancies(found: pb.Device, now: float) -> Iterator[Section]:
    """Who has it; and who had it, where nobody has and no scrub has shown yet that they are over."""
    nobody = "nobody by a grant" if found.strangers else "nobody"
    yield Section("Who has it", _GRANTED, _grants(tenancies(found), now), empty=nobody)
    if had_last(found):
        yield Section("Had it last", _GRANTED, _grants(had_last(found), now))


def _grants(granted: Sequence[pb.Tenancy], now: float) -> Sequence[Sequence[str]]:
    return [
        (
            str(each.grant),
            "/".join(part for part in (each.tenant_namespace, each.pod, each.container) if part) or "nobody known",
            each.kind or "-",
            _when(each.at, now),
            each.certificate or (f"the policy's exception {each.exception}" if each.exception else "-"),
            each.uid or "-",
        )
        for each in granted
    ]


def _certificate(found: pb.Device, now: float) -> Rows:
    if not found.HasField("certificate"):
        return
    certificate = found.certificate
    used = certificate.HasField("next_grant")
    yield "certificate", certificate.id
    yield "standing", f"used by grant {certificate.next_grant}" if used else "unused"
    yield "issued", _when(certificate.issued_at, now)
    yield "path", certificate.path
    yield "scrub", certificate.scrub
    if certificate.rests_on:
        yield "rests on", certificate.rests_on
    yield "policy", certificate.policy
    yield "driver", certificate.driver
    yield "signed by", certificate.key_id or "nobody"
    yield from (("covered", each) for each in certificate.covered)
    yield from (("not covered", each) for each in certificate.not_covered)


def _baseline(found: pb.Device, now: float) -> Iterator[Section]:
    """What it should be, fact by fact; then what a person called normal, if anything."""
    if not found.HasField("baseline"):
        yield Section("Baseline", (), [], empty="was not taken")
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
    title = f"Baseline of {_when(baseline.at, now)}, by {baseline.actor}{why}"
    yield Section(title, (Column("FACT"), Column("EXPECTED", 12), Column("FOUND", 12), Column("VERDICT")), rows)
    if baseline.conditions:
        normal = [(each.name, each.expected) for each in baseline.conditions]
        yield Section("Normal for this device", ("CONDITION", "READ"), normal)


def _history(entries: Sequence[pb.HistoryEntry]) -> Section:
    from scrubber.cli.history import HEADER, row

    kept = [place for place, each in enumerate(HEADER) if each.title != "DEVICE"]
    return Section(
        "History, the newest first",
        [HEADER[place] for place in kept],
        [[cells[place] for place in kept] for cells in map(row, entries)],
        empty="nothing yet, or none asked for",
    )
