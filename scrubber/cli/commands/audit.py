"""``scrubber audit``: verify the audit log on this side, export it off the node, and print its newest hash.

Invariant: the log is reported as intact only when every row was read and follows the previous one, up to the recorded
head, and every head that was saved elsewhere is in it. The service provides rows, never a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from scrubber.cli.app import App
from scrubber.cli.client_run import run
from scrubber.cli.exit_codes import ExitCode
from scrubber.cli.options import OutputOption, SocketOption
from scrubber.cli.render.output import CommandResult, OutputFormat, print_document, print_error, print_result
from scrubber.domain.errors import InvalidRequest, LedgerFailure
from scrubber.domain.formatting import format_utc, rfc3339

if TYPE_CHECKING:
    from scrubber.adapters.ledger.saved_heads import HeadComparison, SavedHead
    from scrubber.adapters.ledger.verification import AuditLogVerification
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.ports.record import AuditHead, AuditLogPage, AuditRow

__all__ = ["app", "head_data", "report_data"]

app = App("Verify and export the audit log.\n\nEach row contains the hash of the row before it.")

LedgerOption = Annotated[
    Path | None,
    typer.Option(
        "--ledger-dir",
        metavar="DIR",
        help="State directory of a stopped service, or a copy of one.",
        show_default="the log of the running service",
    ),
]
FileOption = Annotated[
    str | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="Output of audit export, or - for standard input.",
        show_default="the log of the running service",
    ),
]
HeadOption = Annotated[
    list[str] | None,
    typer.Option(
        "--head",
        metavar="SEQ:HASH",
        help="Head that was saved outside the node. May be repeated.",
        show_default=False,
    ),
]
AfterOption = Annotated[
    int,
    typer.Option(
        "--after",
        metavar="SEQUENCE",
        min=0,
        help="Only rows after this sequence number.",
        show_default="no limit",
    ),
]


@app.command()
def verify(
    ledger: LedgerOption = None,
    file: FileOption = None,
    head: HeadOption = None,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Verify that the audit log was not changed.

    This command reads and hashes every row itself, and does not rely on the service.

    Exits with 0 if the log is intact, 1 if it is not or if that is unknown, 2 if the file cannot be read. Without --head, a
    log that was truncated at its end, or rewritten from some row on, looks intact: keep heads outside the node.
    """
    from scrubber.adapters.ledger.verification import AuditLogVerifier, ChainVerdict
    from scrubber.cli.audit_file import DamagedExport

    if ledger is not None and file is not None:
        raise typer.BadParameter("cannot be combined with --ledger-dir; pass one of the two.", param_hint="--file")
    examination = AuditLogVerifier(_parse_saved_heads(head or ()))
    flaw, source = "", "service"
    if file is not None:
        source = "file"
        try:
            with _open_export(file) as stream:
                for page in _read_export_pages(stream, file):
                    examination.add_page(page)
        except DamagedExport as error:
            flaw = str(error)
    elif ledger is not None:
        source = "ledger"
        for page in _read_ledger_pages(ledger, 0):
            examination.add_page(page)
    else:
        run(_read_service_pages(socket, 0, examination.add_page))
    found = examination.result(flaw)
    print_result(_report(found, source), output)
    if output is OutputFormat.NAME and found.verdict is not ChainVerdict.INTACT:
        print_error(found.message)
    raise typer.Exit(ExitCode.OK if found.verdict is ChainVerdict.INTACT else ExitCode.FAILED)


@app.command()
def export(
    to: Annotated[
        str, typer.Argument(metavar="-", help="Write to standard output (the default).", show_default=False)
    ] = "-",
    ledger: LedgerOption = None,
    after: AfterOption = 0,
    socket: SocketOption = Path("/run/scrubber"),
) -> None:
    """Write the audit log to standard output, as JSON lines.

    The first line has the two ends of the log, every other line is a row.
    """
    if to != "-":
        raise typer.BadParameter("The log is written to standard output only; run `scrubber audit export > FILE`.")
    writer = _ExportWriter()
    if ledger is not None:
        for page in _read_ledger_pages(ledger, after):
            writer.write(page)
    else:
        run(_read_service_pages(socket, after, writer.write))
    writer.end()


@app.command("head")
def head_(socket: SocketOption = Path("/run/scrubber"), output: OutputOption = OutputFormat.TABLE) -> None:
    """Print the head of the audit log: SEQ:HASH of its newest row.

    Keep it outside the node, for audit verify --head.
    """

    async def ask() -> pb.ServiceInfo:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            return await client.service_info()

    newest = run(ask()).audit_head
    if not newest.sequence:
        print_error(
            "The service on this node reported no head: its audit log is empty, or the service is an older version."
        )
        raise typer.Exit(ExitCode.FAILED)
    written = f"{newest.sequence}:{newest.hash}"
    print_result(
        CommandResult(
            data=head_data(newest),
            names=[written],
            header=(),
            rows=[(written,)],
            kind="AuditHead",
        ),
        output,
    )


# -- sources of the log ------------------------------------------------------------------------------------------------


async def _read_service_pages(socket: Path, after: int, take: Callable[[AuditLogPage], None]) -> None:
    """Pass each page of the running service's log to ``take``."""
    from contextlib import aclosing

    from scrubber.api.client import ReadClient

    async with ReadClient(socket) as client, aclosing(client.audit_pages(after)) as pages:
        async for page in pages:
            take(_page(page))


def _page(message: pb.AuditPage) -> AuditLogPage:
    from scrubber.ports.record import AuditHead, AuditLogPage, AuditRow

    rows = tuple(
        AuditRow(
            each.sequence,
            each.timestamp,
            each.event,
            each.device_id if each.HasField("device_id") else None,
            each.scrub_id if each.HasField("scrub_id") else None,
            each.actor,
            each.fields,
            each.previous_hash,
            each.hash,
        )
        for each in message.rows
    )
    return AuditLogPage(
        AuditHead(message.pruned.sequence, message.pruned.hash),
        AuditHead(message.head.sequence, message.head.hash),
        rows,
    )


def _read_ledger_pages(directory: Path, after: int) -> Iterator[AuditLogPage]:
    from scrubber.adapters.ledger.offline import read_pages

    return read_pages(directory, after)


def _read_export_pages(stream: TextIO, file: str) -> Iterator[AuditLogPage]:
    from scrubber.cli.audit_file import read_pages

    return read_pages(stream, "Standard input" if file == "-" else file)


def _open_export(file: str) -> TextIO:
    """Open the export; raises :class:`InvalidRequest` if that fails."""
    # Invalid UTF-8 was not written by the export: it is replaced by characters that match no hash.
    try:
        if file == "-":
            return open(0, encoding="utf-8", errors="replace", closefd=False)
        return Path(file).open(encoding="utf-8", errors="replace")
    except OSError as error:
        called = "standard input" if file == "-" else file
        raise InvalidRequest(f"Cannot read {called}: {error.strerror}.") from None


# -- uses of the log ---------------------------------------------------------------------------------------------------


def _parse_saved_heads(written: Sequence[str]) -> Sequence[SavedHead]:
    from scrubber.adapters.ledger.saved_heads import SavedHead

    try:
        return [SavedHead.parse(each) for each in written]
    except ValueError as error:
        raise typer.BadParameter(f"{error}.", param_hint="--head") from error


class _ExportWriter:
    """Writes pages as lines, and checks that they are complete."""

    def __init__(self) -> None:
        self._head: AuditHead | None = None
        self._last = 0

    def write(self, page: AuditLogPage) -> None:
        from scrubber.cli.audit_file import ROW_KIND, TRAIL_KIND, audit_log_data, row_data

        if self._head is None:
            print_document(audit_log_data(page), TRAIL_KIND)
            self._head, self._last = page.head, page.preceding_head.sequence
        for row in page.rows:
            print_document(row_data(row), ROW_KIND)
            self._last = row.sequence

    def end(self) -> None:
        """Raise :class:`LedgerFailure` when rows are missing at the end."""
        if self._head is None or self._last < self._head.sequence:
            recorded = 0 if self._head is None else self._head.sequence
            raise LedgerFailure(
                f"The audit log ends at row {self._last}, but its head is row {recorded}: the export is incomplete. Run "
                "`scrubber audit verify` for details."
            )


def _report(found: AuditLogVerification, source: str) -> CommandResult:
    head = _head_text(found.head)
    rows = [("verdict", found.verdict.value), ("reason", found.message), ("rows", _row_range(found))]
    if head:
        rows.append(("head", head))
    rows += [("saved head", f"{_short_head(each)} {each.status.value}: {each.message}") for each in found.comparisons]
    return CommandResult(
        data=report_data(found, source),
        names=[head] if head and found.verdict == "intact" else [],
        header=(),
        rows=rows,
        kind="AuditReport",
    )


def report_data(found: AuditLogVerification, source: str) -> dict[str, Any]:
    """Return the verification result as JSON. ``source`` is where the log came from: service, ledger or file."""
    return {
        "source": source,
        "verdict": found.verdict.value,
        "message": found.message,
        "rowCount": found.rows,
        "first": _row_data(found.first),
        "last": _row_data(found.last),
        "pruned": _place_data(found.pruned),
        "head": _place_data(found.head),
        "savedHeads": [
            {
                "sequence": each.saved_head.sequence,
                "hash": each.saved_head.hash,
                "status": each.status.value,
                "message": each.message,
            }
            for each in found.comparisons
        ],
    }


def head_data(head: pb.AuditHead) -> dict[str, Any]:
    """Return a head of the chain as JSON."""
    return {"sequence": head.sequence, "hash": head.hash}


def _row_range(found: AuditLogVerification) -> str:
    if found.first is None or found.last is None:
        return "none"
    since, until = format_utc(found.first.at), format_utc(found.last.at)
    return f"{found.rows}, from {found.first.sequence} ({since}) to {found.last.sequence} ({until})"


def _short_head(comparison: HeadComparison) -> str:
    return f"{comparison.saved_head.sequence}:{comparison.saved_head.hash[:12]}"


def _head_text(place: AuditHead) -> str:
    return f"{place.sequence}:{place.hash}" if place.sequence else ""


def _row_data(row: AuditRow | None) -> dict[str, Any] | None:
    return None if row is None else {"sequence": row.sequence, "timestamp": rfc3339(row.at)}


def _place_data(place: AuditHead) -> dict[str, Any] | None:
    return {"sequence": place.sequence, "hash": place.hash} if place.sequence else None
