"""``scrubber history``: what happened on this node, from the hash-chained audit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.asking import run
from scrubber.cli.options import OutputOption, SocketOption, device_name, seconds
from scrubber.cli.output import Answer, Column, Output, emit, note, utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["add_commands", "answer", "moment_of", "outcome_of"]

_OUTCOMES = ("passed", "held-up", "failed", "abandoned", "ok", "granted", "refused")
"""Of a scrub; ``ok`` of a reset; the last two of a hand-over."""

DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        envvar="SCRUBBER_DEVICE",
        metavar="DEVICE",
        parser=device_name,
        help="This device only: UUID, unique beginning of one, or index.",
        show_default="all devices",
    ),
]
TenantOption = Annotated[
    str,
    typer.Option(
        "--tenant",
        envvar="SCRUBBER_TENANT",
        metavar="NAMESPACE",
        help="Only what names this namespace as the tenant: hand-overs, signals, quarantines.",
        show_default="all tenants",
    ),
]
OutcomeOption = Annotated[
    str,
    typer.Option(
        "--outcome",
        envvar="SCRUBBER_OUTCOME",
        metavar="OUTCOME",
        help=f"Only what ended so, one of: {', '.join(_OUTCOMES)}.",
        show_default="all outcomes",
    ),
]
SinceOption = Annotated[
    str,
    typer.Option(
        "--since",
        envvar="SCRUBBER_SINCE",
        metavar="TIME",
        help="Not older than this: 30m, 2h, or a moment such as 2026-11-20T08:00:00Z.",
        show_default="the beginning",
    ),
]
LimitOption = Annotated[
    int,
    typer.Option("--limit", envvar="SCRUBBER_LIMIT", min=1, max=1_000, help="At most so many entries, the newest."),
]

_MOST = 1000
"""So many entries the service gives at once."""

_MOMENTS = ("retry_at", "since", "until")
"""Fields of events that are seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What part of the past somebody wants to see; empty for no such wish."""

    device: str = ""
    tenant: str = ""
    outcome: str = ""
    since: float = 0.0
    limit: int = 0


def add_commands(app: typer.Typer) -> None:
    app.command()(history)


def history(
    device: DeviceOption = "",
    tenant: TenantOption = "",
    outcome: OutcomeOption = "",
    since: SinceOption = "",
    limit: LimitOption = 100,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what happened. Hand-overs, scrubs with their evidence, certificates, quarantines, and who asked for them."""
    moment = moment_of(since, time.time()) if since else 0.0
    asked = _Asked(device, tenant.strip(), outcome_of(outcome) if outcome else "", moment, limit)

    async def ask() -> Sequence[pb.HistoryEntry]:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            found = await client.history(
                device=asked.device, since=asked.since, limit=limit, tenant=asked.tenant, outcome=asked.outcome
            )
            return found.entries

    found = run(ask())
    if output is Output.TABLE and len(found) == limit:
        # Above the table: nobody scrolls through rows to learn that the oldest of them are not there.
        note(_more(asked))
    emit(replace(answer(found), empty=_nothing(asked)), output)


def outcome_of(written: str) -> str:
    """The outcome that ``written`` names; raises ``typer.BadParameter`` for none."""
    word = written.strip().lower().replace("_", "-")
    if word not in _OUTCOMES:
        raise typer.BadParameter(
            f'"{written}" is no outcome; there are: {", ".join(_OUTCOMES)}.', param_hint="--outcome"
        )
    return word


def moment_of(written: str, now: float) -> float:
    """Seconds since the epoch of ``written``: so long before ``now``, or a moment in ISO 8601 (UTC if it names none).

    Raises:
        typer.BadParameter: it is neither.
    """
    try:
        return now - seconds(written)
    except typer.BadParameter:
        pass
    try:
        moment = datetime.fromisoformat(written)
    except ValueError as error:
        raise typer.BadParameter(
            f'"{written}" is neither a time such as 30m or 2h nor a moment such as 2026-11-20T08:00:00Z.',
            param_hint="--since",
        ) from error
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def answer(entries: Sequence[pb.HistoryEntry]) -> Answer:
    """Audit rows in all forms; ``data`` is a list."""
    from scrubber.cli import shapes

    return Answer(
        data=[shapes.history_entry(each) for each in entries],
        names=[str(each.sequence) for each in entries],
        header=(
            Column("SEQUENCE"),
            Column("TIME"),
            Column("EVENT", least=12),
            Column("DEVICE", ids=True),
            Column("SCRUB", ids=True, drop=2),
            Column("ACTOR", drop=1),
            Column("DETAILS", least=32, below=True),
        ),
        rows=[_row(each) for each in entries],
        empty="Nothing happened in that time.",
        kind="HistoryEntry",
    )


def _nothing(asked: _Asked) -> str:
    """What a person is told when nothing was found: what was looked for, because a filter may be to blame."""
    wishes = [
        f"of device {asked.device}" if asked.device else "",
        f"of tenant {asked.tenant}" if asked.tenant else "",
        f"with the outcome {asked.outcome}" if asked.outcome else "",
        f"since {utc(asked.since)}" if asked.since else "",
    ]
    looked_for = " ".join(each for each in wishes if each)
    if not looked_for:
        return "The audit trail of this node has no rows yet."
    sentence = f"The audit trail has nothing {looked_for}."
    if asked.outcome == "refused":
        sentence += " Hand-overs that are refused are told of in the service's log and metrics, not on the trail."
    return sentence


def _more(asked: _Asked) -> str:
    """What a person is told who sees as many rows as were asked for: there may be older ones, and how to see them."""
    since = f" since {utc(asked.since)}" if asked.since else ""
    if asked.limit < _MOST:
        how = f"--limit shows more, up to {_MOST}"
    else:
        how = "--device, --tenant and --outcome reach further back, and scrubber audit export has all"
    return f"These are the newest {asked.limit}{since}, and there may be older ones: {how}."


def _row(entry: pb.HistoryEntry) -> Sequence[str]:
    return (
        str(entry.sequence),
        utc(entry.at),
        entry.name,
        entry.device or "-",
        entry.scrub_id or "-",
        entry.actor,
        _details(entry.fields_json),
    )


def _details(fields_json: str) -> str:
    from scrubber.cli.shapes import embedded

    fields = embedded(fields_json)
    if not isinstance(fields, dict):
        return str(fields)
    sentence = str(fields.pop("sentence", None) or "")
    facts = " ".join(f"{name}={_fact(name, value)}" for name, value in fields.items() if value not in ("", None))
    return ": ".join(part for part in (facts, sentence) if part) or "-"


def _fact(name: str, value: object) -> str:
    return utc(value) if name in _MOMENTS and isinstance(value, int | float) else str(value)
