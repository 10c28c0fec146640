"""``scrubber device``: everything that is known of one device, with its history.

For an operator who was paged for this device: nothing that the service knows of it is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.client_run import run
from scrubber.cli.options import DeviceArgument, NoHeadersOption, OutputOption, SocketOption
from scrubber.cli.render.device_facts import AUTOMATIC_RECOVERIES, is_in_use, job_name, recovery_text
from scrubber.cli.render.device_list import format_age, select_devices
from scrubber.cli.render.output import CommandResult, OutputColumn, OutputFormat, TableSection, print_result
from scrubber.domain.formatting import format_size, format_utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["add_commands", "device_result"]

Rows = Iterator[tuple[str, str]]

LimitOption = Annotated[
    int,
    typer.Option(
        "--limit",
        metavar="N",
        min=0,
        max=10_000,
        help="Maximum number of history entries, newest first.",
    ),
]


_GRANT_COLUMNS = (
    OutputColumn("GRANT"),
    OutputColumn("TENANT", min_width=24),
    OutputColumn("HAND-OVER"),
    OutputColumn("GRANTED", min_width=21),
    OutputColumn("BASIS", min_width=20, wide=True),
    OutputColumn("POD UID", wide=True),
)


def add_commands(app: typer.Typer) -> None:
    app.command("device")(device)


def device(
    device: DeviceArgument,
    limit: LimitOption = 20,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """Show details and history of a device."""

    async def ask() -> tuple[pb.Device, Sequence[pb.HistoryEntry]]:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            (found,) = select_devices((await client.devices()).devices, [device])
            entries = (await client.history(device=found.id, limit=limit)).entries if limit else []
            return found, entries

    print_result(device_result(*run(ask()), now=time.time()), output, no_headers=no_headers)


def device_result(message: pb.Device, entries: Sequence[pb.HistoryEntry], *, now: float) -> CommandResult:
    """Return one device in all output formats.

    Args:
        entries: its history, newest first.
        now: wall-clock seconds, for the age of events.
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
            *_open_grant_sections(message, now),
            *(
                [TableSection("Unauthorized users", (), [(each,) for each in message.unauthorized_users])]
                if message.unauthorized_users
                else ()
            ),
            *_holder_sections(message, now),
            *(
                [TableSection("Uninspected processes", (), [(each,) for each in message.uninspected_processes])]
                if message.uninspected_processes
                else ()
            ),
            TableSection("Certificate", (), list(_certificate_rows(message, now))),
            TableSection(
                "Conditions",
                ("CODE", "SINCE"),
                [(w.code, _time_and_age(w.since, now)) for w in message.conditions],
            ),
            TableSection(
                "Lifetime counters", (), [(name, str(n)) for name, n in sorted(message.lifetime_counters.items())]
            ),
            *_baseline_sections(message, now),
            _history_section(entries),
        ],
    )


def _holder_sections(message: pb.Device, now: float) -> Iterator[TableSection]:
    """Yield the holders that the service found; nothing if there are none."""
    if message.holders:
        rows = [
            (
                str(each.pid or "-"),
                each.command or "-",
                f"{each.namespace}/{each.pod}" if each.pod else each.pod_uid or each.unit or "-",
                each.kind,
                each.code if each.blocking else "allowed by the policy",
                _time_and_age(each.since, now),
            )
            for each in message.holders
        ]
        columns = ("PID", "PROCESS", "OWNER", "KIND", "FINDING", "SINCE")
        yield TableSection("Holders", columns, rows)


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
        yield "parent", found.parent
    if found.HasField("numa_node"):
        yield "NUMA node", str(found.numa_node)
    yield from (("peer", each) for each in found.peers)
    yield from sorted(found.attributes.items())


def _state_rows(found: pb.Device, now: float) -> Rows:
    yield "hygiene", found.hygiene or "-"
    yield "health", found.health or "-"
    yield "advertised", "yes, as Healthy" if found.advertised else "no"
    if found.active_scrub_id:
        yield "active scrub", found.active_scrub_id
    if found.HasField("cause"):
        yield "cause", f"{found.cause.code}: {found.cause.message}"
        yield "since", f"{_time_and_age(found.cause.since, now)}, by {found.cause.actor}"
        yield "recovery", recovery_text(found)
    if found.recovery_blocker:
        yield "blocked by", found.recovery_blocker
    if found.next_attempt_at and (not found.HasField("cause") or found.cause.recovery_method in AUTOMATIC_RECOVERIES):
        due = found.next_attempt_at <= now
        yield (
            "next attempt",
            f"overdue since {_time_and_age(found.next_attempt_at, now)}"
            if due
            else _time_and_age(found.next_attempt_at, now),
        )
    if found.reset_pending:
        yield "reset", f"pending: {_pending_reset_text(found)}"
    if found.failed_recoveries:
        many = "attempt" if found.failed_recoveries == 1 else "attempts"
        yield "failures", f"{found.failed_recoveries} recovery {many} failed since it was last healthy"
    for strike in found.quarantines:
        whose = f", while assigned to {strike.tenant}" if strike.tenant else ""
        yield "was quarantined", f"{_time_and_age(strike.timestamp, now)}: {strike.code}{whose}"
    for attempt in found.recovery_attempts:
        how = "with a reset" if attempt.reset else "without a reset"
        yield (
            "recovery attempt",
            f"{_time_and_age(attempt.timestamp, now)}, {how}{', requested by an operator' if attempt.by_operator else ''}",
        )
    yield "policy", f"{found.policy or '-'}{f' ({found.enforcement})' if found.enforcement else ''}"
    if found.HasField("break_glass"):
        yield (
            "break-glass",
            f"until {format_utc(found.break_glass.expires_at)} by {found.break_glass.actor}: {found.break_glass.reason}",
        )


def _pending_reset_text(found: pb.Device) -> str:
    """Return how a pending reset affects hand-overs."""
    if found.HasField("break_glass"):
        return "the device is handed over without it while break-glass is active"
    if found.enforcement == "observe":
        return "the device is handed over without it because its policy only observes"
    return "the device is not handed over before it"


def _open_grant_sections(found: pb.Device, now: float) -> Iterator[TableSection]:
    """Yield the open grants: of the current pods, or of previous ones of which no scrub has shown yet that they ended."""
    none = "none, but it is used without a grant" if found.unauthorized_users else "none"
    grants = _grant_rows(found.open_grants, now)
    yield TableSection("Assigned to", _GRANT_COLUMNS, grants if is_in_use(found) else [], empty_message=none)
    if grants and not is_in_use(found):
        yield TableSection("Previously assigned to", _GRANT_COLUMNS, grants)


def _grant_rows(granted: Sequence[pb.OpenGrant], now: float) -> Sequence[Sequence[str]]:
    return [
        (
            str(each.sequence),
            _grantee(each),
            each.hand_over_kind or "-",
            _time_and_age(each.granted_at, now),
            each.certificate_id or (f"policy exception {each.exception}" if each.exception else "-"),
            each.pod_uid or "-",
        )
        for each in granted
    ]


def _grantee(grant: pb.OpenGrant) -> str:
    """Return the container that has the device by ``grant``, the claim with its pod or the number of its pods, or the job."""
    if grant.HasField("job") and not grant.HasField("claim"):
        return f"{job_name(grant.job)} ({grant.job.manager}{', ended' if grant.job_ended else ''})"
    who = "/".join(part for part in (grant.tenant, grant.pod, grant.container) if part) or "unknown"
    if not grant.HasField("claim"):
        return who
    pods = "" if grant.pod else f", {len(grant.claim_pods)} pods"
    return f"{who} (claim {grant.claim.name}{pods}{', released' if grant.claim_releasing else ''})"


def _certificate_rows(found: pb.Device, now: float) -> Rows:
    if not found.HasField("certificate"):
        return
    certificate = found.certificate
    used = certificate.HasField("next_grant")
    yield "certificate", certificate.id
    yield "status", f"consumed by grant {certificate.next_grant}" if used else "unused"
    yield "issued", _time_and_age(certificate.issued_at, now)
    yield "path", certificate.path
    yield "scrub", certificate.scrub_id
    if certificate.base_certificate_id:
        yield "base certificate", certificate.base_certificate_id
    if certificate.HasField("attestation"):
        yield "attestation", certificate.attestation.digest
    yield "policy", certificate.policy
    yield "driver", certificate.driver_version
    yield "signed by", certificate.key_id or "none"
    yield from (("covered", each) for each in certificate.covered)
    yield from (("not covered", each) for each in certificate.not_covered)


def _baseline_sections(found: pb.Device, now: float) -> Iterator[TableSection]:
    """Yield the baseline, fact by fact, then the conditions that an operator accepted as normal, if any."""
    if not found.HasField("baseline"):
        yield TableSection("Baseline", (), [], empty_message="not recorded")
        return
    baseline = found.baseline
    why = f": {baseline.reason}" if baseline.reason else ""
    rows = [
        (
            fact.name,
            fact.expected or "-",
            fact.actual or "-",
            "as-expected" if fact.expected == fact.actual else "differs",
        )
        for fact in baseline.facts
    ]
    title = f"Baseline of {_time_and_age(baseline.recorded_at, now)}, by {baseline.actor}{why}"
    yield TableSection(
        title,
        (OutputColumn("FACT"), OutputColumn("EXPECTED", 12), OutputColumn("ACTUAL", 12), OutputColumn("VERDICT")),
        rows,
    )
    if baseline.accepted_conditions:
        normal = [(each.name, each.expected) for each in baseline.accepted_conditions]
        yield TableSection("Accepted conditions", ("CONDITION", "VALUE"), normal)


def _history_section(entries: Sequence[pb.HistoryEntry]) -> TableSection:
    from scrubber.cli.commands.history import HISTORY_COLUMNS, history_row

    kept = [place for place, each in enumerate(HISTORY_COLUMNS) if each.title != "DEVICE"]
    return TableSection(
        "History, newest first",
        [HISTORY_COLUMNS[place] for place in kept],
        [[cells[place] for place in kept] for cells in map(history_row, entries)],
        empty_message="none",
    )
