"""``scrubber history``: what happened on this node, from the hash-chained audit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.asking import run
from scrubber.cli.options import OutputOption, SocketOption, seconds
from scrubber.cli.output import Answer, Output, emit, utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["add_commands"]

DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", envvar="SCRUBBER_DEVICE", metavar="DEVICE", help="This device only.", show_default="all devices"
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
    typer.Option("--limit", envvar="SCRUBBER_LIMIT", min=1, max=10_000, help="At most so many entries, the newest."),
]


_MOMENTS = ("retry_at", "since", "until")
"""Fields of events that are seconds since the epoch."""


def add_commands(app: typer.Typer) -> None:
    app.command()(history)


def history(
    device: DeviceOption = "",
    since: SinceOption = "",
    limit: LimitOption = 100,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what happened. Hand-overs, scrubs with their evidence, certificates, quarantines, and who asked for them."""
    moment = moment_of(since, time.time()) if since else 0.0

    async def ask() -> Sequence[pb.HistoryEntry]:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            return (await client.history(device=device, since=moment, limit=limit)).entries

    emit(answer(run(ask())), output)


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
    from scrubber.cli import shapes

    return Answer(
        data=[shapes.history_entry(each) for each in entries],
        names=[str(each.sequence) for each in entries],
        header=("SEQUENCE", "TIME", "EVENT", "DEVICE", "SCRUB", "ACTOR", "DETAILS"),
        rows=[_row(each) for each in entries],
        empty="Nothing happened in that time.",
    )


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
