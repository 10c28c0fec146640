"""``scrubber history``: events of this node, from the hash-chained audit log."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.client_run import run
from scrubber.cli.completers import complete_device, complete_event
from scrubber.cli.options import NoHeadersOption, OutputOption, SocketOption, device_name, seconds
from scrubber.cli.render.output import (
    CommandResult,
    ListDocument,
    OutputColumn,
    OutputFormat,
    print_note,
    print_result,
    printable,
)
from scrubber.domain.formatting import format_utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["HISTORY_COLUMNS", "add_commands", "history_row", "parse_outcome", "parse_time"]

_OUTCOMES = ("passed", "blocked", "failed", "abandoned", "ok", "granted", "refused")
"""Of a scrub; ``ok`` of a reset; the last two of a hand-over."""

DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        parser=device_name,
        autocompletion=complete_device,
        help="Only this device: UUID, unique prefix of a UUID, or index.",
        show_default="all devices",
    ),
]
TenantOption = Annotated[
    str,
    typer.Option(
        "--tenant",
        metavar="NAMESPACE",
        help="Only events of this tenant, a namespace: hand-overs, errors, quarantines.",
        show_default="all tenants",
    ),
]
OutcomeOption = Annotated[
    str,
    typer.Option(
        "--outcome",
        metavar="OUTCOME",
        autocompletion=lambda: _OUTCOMES,
        help=f"Only events with this outcome. One of: {', '.join(_OUTCOMES)}. Refused hand-overs are only in the log.",
        show_default="all outcomes",
    ),
]
EventOption = Annotated[
    list[str] | None,
    typer.Option(
        "--event",
        metavar="EVENT",
        autocompletion=complete_event,
        help="Only this event, such as scrub.finished, or, with a final dot, all events with this prefix, "
        'such as "health.". May be repeated.',
        show_default="all events",
    ),
]
BeforeOption = Annotated[
    int,
    typer.Option(
        "--before",
        metavar="SEQUENCE",
        min=0,
        help="Only entries before this sequence number.",
        show_default="no limit",
    ),
]
SinceOption = Annotated[
    str,
    typer.Option(
        "--since",
        metavar="TIME",
        help="Only entries since a time, such as 2026-11-20T08:00:00Z, or of the last 30m or 2h.",
        show_default="no limit",
    ),
]
LimitOption = Annotated[
    int,
    typer.Option("--limit", metavar="N", min=1, help="Maximum number of entries, newest first."),
]
AllOption = Annotated[bool, typer.Option("--all", help="Show all entries; overrides --limit.")]

_LIMIT = 100
HISTORY_COLUMNS = (
    OutputColumn("SEQUENCE", wide=True),
    OutputColumn("TIME"),
    OutputColumn("EVENT"),
    OutputColumn("DEVICE", holds_ids=True),
    OutputColumn("SCRUB", holds_ids=True, wide=True),
    OutputColumn("ACTOR", wide=True),
    OutputColumn("DETAILS", min_width=12),
)
_MAX_SEQUENCE = 2**64 - 1
"""The largest number in a request; no audit log is that long."""

_TIME_FIELDS = ("next_attempt_at", "since", "expires_at")
"""Fields of events that are seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class _HistoryFilter:
    """Filters for history; an empty one selects everything."""

    device: str = ""
    tenant: str = ""
    outcome: str = ""
    events: Sequence[str] = ()
    since: float = 0.0
    before: int = 0
    limit: int | None = _LIMIT
    limit_typed: bool = False

    def flags(self) -> list[str]:
        """Return the command-line flags of these filters."""
        values = {
            "--device": [self.device],
            "--tenant": [self.tenant],
            "--outcome": [self.outcome],
            "--event": self.events,
            "--since": [_exact_time(self.since) if self.since else ""],
            "--limit": [str(self.limit or "") if self.limit_typed else ""],
            "--before": [str(self.before or "")],
        }
        return [word for flag, given in values.items() for value in given if value for word in (flag, value)]


def add_commands(app: typer.Typer) -> None:
    app.command()(history)


def history(
    context: typer.Context,
    device: DeviceOption = "",
    tenant: TenantOption = "",
    outcome: OutcomeOption = "",
    event: EventOption = None,
    since: SinceOption = "",
    before: BeforeOption = 0,
    limit: LimitOption = _LIMIT,
    everything: AllOption = False,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """Show the audit history.

    It contains hand-overs, scrubs with their evidence, certificates and quarantines. With -o wide, it also shows who requested
    them (ACTOR).
    """
    query = _HistoryFilter(
        device=device,
        tenant=tenant.strip(),
        outcome=parse_outcome(outcome) if outcome else "",
        events=tuple(each.strip().lower() for each in event or ()),
        since=parse_time(since, time.time()) if since else 0.0,
        before=min(before, _MAX_SEQUENCE),
        limit=None if everything else limit,
        limit_typed=_was_typed(context, "limit"),
    )

    if output in (OutputFormat.JSON, OutputFormat.YAML):
        run(_write_document(query, socket, output))
        return
    found, next_before = run(_fetch_rows(query, socket, output))
    if next_before and (output.is_table or _stderr_is_terminal()):
        # Above the table: below it, the note would be missed after many rows.
        print_note(_older_rows_note(query, found.entry_count))
        onward = replace(query, before=next_before).flags()
        if _was_typed(context, "socket"):
            onward += ["--socket-dir", str(socket)]
        if output in (OutputFormat.NAME, OutputFormat.WIDE):
            onward += ["--output", output]
        if no_headers:
            onward += ["--no-headers"]
        _show_command(onward)
    print_result(found.to_result(empty_message=_no_rows_message(query)), output, no_headers=no_headers)


async def _fetch_rows(query: _HistoryFilter, socket: Path, output: OutputFormat) -> tuple[_HistoryRows, int]:
    """Return the matching rows, and the row before which there are more; 0 if there are none."""
    found, next_before = _HistoryRows(output), 0
    async for page in _pages(query, socket):
        found.add(page.entries)
        next_before = page.next_before_sequence
    return found, next_before


async def _write_document(query: _HistoryFilter, socket: Path, output: OutputFormat) -> None:
    """Write the matches as one JSON or YAML document, page by page: a whole log is 100,000 rows with their evidence.

    Nothing is written before the first page has arrived, so that a refused request leaves standard output empty.
    """
    from scrubber.cli.render import json_objects

    document, next_before = ListDocument(kind="HistoryEntryList", output=output), 0
    async for page in _pages(query, socket):
        document.add(map(json_objects.history_entry, page.entries))
        next_before = page.next_before_sequence
    document.end(metadata={"continue": next_before or None})


async def _pages(query: _HistoryFilter, socket: Path) -> AsyncGenerator[pb.GetHistoryResponse, None]:
    from scrubber.api.client import ReadClient

    async with ReadClient(socket) as client:
        pages = client.history_pages(
            device=query.device,
            since=query.since,
            limit=query.limit,
            tenant=query.tenant,
            outcome=query.outcome,
            events=query.events,
            before=query.before,
        )
        async for page in pages:
            yield page


def _was_typed(context: typer.Context, parameter: str) -> bool:
    """Return whether the parameter was typed; a value from the environment also applies to the next command."""
    return getattr(context.get_parameter_source(parameter), "name", "") == "COMMANDLINE"


def _exact_time(moment: float) -> str:
    """Return ``moment`` in a form for :func:`parse_time`, exact to the microsecond; empty if it is out of range."""
    try:
        return datetime.fromtimestamp(moment, UTC).isoformat().replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return ""


def parse_outcome(text: str) -> str:
    """Return the outcome that ``text`` names; raises ``typer.BadParameter`` for an unknown one."""
    word = text.strip().lower().replace("_", "-")
    if word not in _OUTCOMES:
        raise typer.BadParameter(f'"{text}" is not one of: {", ".join(_OUTCOMES)}.', param_hint="--outcome")
    return word


def parse_time(text: str, now: float) -> float:
    """Return seconds since the epoch for ``text``: a duration before ``now``, or an ISO 8601 time (default UTC).

    Raises:
        typer.BadParameter: it is neither.
    """
    if text.strip().replace(".", "", 1).isdecimal():
        raise typer.BadParameter(
            f'"{text}" has no unit; write {text.strip()}h, {text.strip()}m or {text.strip()}s.',
            param_hint="--since",
        )
    try:
        return now - seconds(text)
    except typer.BadParameter:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(
            f'"{text}" is neither a duration, such as 30m or 2h, nor a time, such as 2026-11-20T08:00:00Z.',
            param_hint="--since",
        ) from error
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


@dataclass(slots=True)
class _HistoryRows:
    """Audit rows reduced to a table or names: a whole log is 100,000 rows with their evidence."""

    output: OutputFormat
    entry_count: int = 0
    names: list[str] = field(default_factory=list)
    rows: list[Sequence[str]] = field(default_factory=list)

    def add(self, entries: Sequence[pb.HistoryEntry]) -> None:
        self.entry_count += len(entries)
        if self.output is OutputFormat.NAME:
            self.names += (str(each.sequence) for each in entries)
        else:
            self.rows += map(history_row, entries)

    def to_result(self, *, empty_message: str) -> CommandResult:
        return CommandResult(
            data=None, names=self.names, header=HISTORY_COLUMNS, rows=self.rows, empty_message=empty_message
        )


def _no_rows_message(query: _HistoryFilter) -> str:
    """Return the message for an empty result, with the filters, because a filter may be the cause."""
    events = " or ".join(f"{each}*" if each.endswith(".") else each for each in query.events)
    filters = [
        f"event {events}" if events else "",
        f"device {query.device}" if query.device else "",
        f"tenant {query.tenant}" if query.tenant else "",
        f"outcome {query.outcome}" if query.outcome else "",
        f"since {format_utc(query.since)}" if query.since else "",
        f"before entry {query.before}" if query.before else "",
    ]
    if not any(filters):
        return "The audit log of this node is empty."
    message = f"No entry of the audit log matches: {', '.join(each for each in filters if each)}."
    if query.outcome == "refused":
        message += " Refused hand-overs are not in the audit log; see the service's log and metrics."
    return message


def _older_rows_note(query: _HistoryFilter, shown: int) -> str:
    """Return the note for an incomplete result; the command for the next page follows it."""
    since = f" since {format_utc(query.since)}" if query.since else ""
    before = f" before entry {query.before}" if query.before else ""
    return (
        f"Showing the newest {shown} entries{since}{before}; there are older ones. Pass --all to show all. Next page:"
    )


def _stderr_is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _show_command(flags: Sequence[str]) -> None:
    """Write a command line to standard error as one line of any width, so that it can be copied."""
    with suppress(OSError):
        print(f"  {printable(shlex.join(('scrubber', 'history', *flags)))}", file=sys.stderr, flush=True)


def history_row(entry: pb.HistoryEntry) -> Sequence[str]:
    """Return the cells of an audit row for :data:`HISTORY_COLUMNS`."""
    return (
        str(entry.sequence),
        format_utc(entry.timestamp),
        entry.event,
        entry.device_id or "-",
        entry.scrub_id or "-",
        entry.actor,
        _details_text(entry.fields_json),
    )


def _details_text(fields_json: str) -> str:
    from scrubber.cli.render.json_objects import parse_embedded_json

    fields = parse_embedded_json(fields_json)
    if not isinstance(fields, dict):
        return str(fields)
    message = str(fields.pop("message", None) or "")
    facts = " ".join(f"{name}={_field_text(name, value)}" for name, value in fields.items() if value not in ("", None))
    return ": ".join(part for part in (facts, message) if part) or "-"


def _field_text(name: str, value: object) -> str:
    return format_utc(value) if name in _TIME_FIELDS and isinstance(value, int | float) else str(value)
