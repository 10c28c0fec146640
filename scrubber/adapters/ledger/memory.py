"""A ledger without a disk, for tests of the engine: the same contract, with a crash at any commit on demand.

It stores text, like the one on disk, so that a value that would not survive a restart is detected at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from scrubber.adapters.ledger.chain import chain_events, event_of, verify_chain
from scrubber.adapters.ledger.documents import CERTIFICATE, GRANT, NODE, PAUSE, RECORD, SCRUB
from scrubber.adapters.ledger.failures import contradiction_message
from scrubber.adapters.ledger.json_codec import CodecError
from scrubber.adapters.ledger.pages import ROWS_PER_PAGE, check_before, past_end_error, pruned_error
from scrubber.adapters.ledger.retention import MAX_AUDIT_ROWS, ReferencedRows, Retention
from scrubber.domain.agent_pause import AgentPauseRecord
from scrubber.domain.errors import LedgerFailure
from scrubber.domain.evidence import Certificate
from scrubber.domain.node_record import NodeRecord
from scrubber.domain.record import DeviceRecord
from scrubber.ports.record import (
    CHAIN_START,
    HAND_OVER_EVENTS,
    AuditHead,
    AuditLogPage,
    AuditRow,
    HistoryEntry,
    HistoryQuery,
    LedgerChange,
    LedgerState,
)

__all__ = ["MemoryLedger"]

CommitHook = Callable[[LedgerChange], None]


@dataclass(slots=True)
class _Rows:
    """The equivalent of the disk. Documents are stored with the audit head at which they were last written."""

    devices: dict[str, str] = field(default_factory=dict)
    grants: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)
    certificates: dict[str, tuple[int, str]] = field(default_factory=dict)
    scrubs: dict[str, tuple[int, str]] = field(default_factory=dict)
    node: str = NODE.encode(NodeRecord())
    agent_pause: str = PAUSE.encode(AgentPauseRecord())
    audit: list[AuditRow] = field(default_factory=list)
    pruned: AuditHead = CHAIN_START
    head: AuditHead = CHAIN_START

    def records(self) -> dict[str, DeviceRecord]:
        return {device: RECORD.decode(document) for device, document in self.devices.items()}


class MemoryLedger:
    """A :class:`scrubber.ports.record.Ledger` whose rows outlive it through :meth:`successor`.

    Args:
        before_commit: called with each change before any of it is stored; its exception is raised by ``commit`` (a
            crash, or a ``LedgerFailure``), and nothing is stored.
        after_commit: called when the change is stored; its exception is raised by ``commit`` (a crash before the caller
            could act on the change).
    """

    def __init__(
        self,
        *,
        max_audit_rows: int = MAX_AUDIT_ROWS,
        before_commit: CommitHook | None = None,
        after_commit: CommitHook | None = None,
    ) -> None:
        self.before_commit = before_commit
        self.after_commit = after_commit
        self._retention = Retention(max_audit_rows)
        self._rows = _Rows()
        self._open = False
        self._ended = False
        self._health = "ok"
        self._head = CHAIN_START

    def successor(self) -> MemoryLedger:
        """Return the ledger for the next service. This one stores nothing any more, as if its process had exited."""
        self._open, self._ended = False, True
        following = MemoryLedger(
            max_audit_rows=self._retention.max_audit_rows,
            before_commit=self.before_commit,
            after_commit=self.after_commit,
        )
        following._rows = self._rows
        return following

    async def load(self) -> LedgerState:
        """Return the stored state, decoded again."""
        await asyncio.sleep(0)
        if self._ended:
            raise self._record_failure("The ledger in memory is closed.")
        rows = self._rows
        report = verify_chain(rows.audit, rows.pruned, rows.head)
        if not report.intact:
            raise self._record_failure(report.message)
        self._open, self._health, self._head = True, "ok", rows.head
        scrubs = [SCRUB.decode(document) for _, document in rows.scrubs.values()]
        return LedgerState(
            records=rows.records(),
            node=NODE.decode(rows.node),
            agent_pause=PAUSE.decode(rows.agent_pause),
            unfinished_scrubs=tuple(scrub for scrub in scrubs if scrub.ended is None),
            head_sequence=rows.head.sequence,
            head_hash=rows.head.hash,
        )

    async def commit(self, change: LedgerChange) -> None:
        """Store ``change`` completely, or raise and store none of it; other tasks run first, as with a real disk."""
        await asyncio.sleep(0)
        if not self._open:
            raise self._record_failure("The ledger in memory is not open.")
        try:
            if self.before_commit is not None:
                self.before_commit(change)
            self._store(change)
        except LedgerFailure as failure:
            self._health = str(failure)
            raise
        except CodecError as error:
            raise self._record_failure(contradiction_message(f"cannot be written ({error})")) from error
        self._health = "ok"
        if self.after_commit is not None:
            self.after_commit(change)

    async def history(self, query: HistoryQuery) -> Sequence[HistoryEntry]:
        """See :class:`scrubber.ports.record.Ledger`."""
        await self._yield_to_tasks()
        check_before(query.before, self._head)
        found: list[HistoryEntry] = []
        for row in reversed(self._rows.audit):
            if len(found) >= query.limit:
                break
            if _matches(row, query):
                found.append(self._entry(row))
        return found

    async def pages(self, after: int = 0) -> AsyncIterator[AuditLogPage]:
        """See :class:`scrubber.ports.record.AuditLog`; a page is at most 500 rows."""
        await self._yield_to_tasks()
        start, head = self._rows.pruned, self._rows.head
        if after > head.sequence:
            raise past_end_error(after, head)
        if after > start.sequence:
            start = next(row.head for row in self._rows.audit if row.sequence == after)
        last = start.sequence
        while True:
            if self._rows.pruned.sequence > last:
                raise pruned_error(last, self._rows.pruned)
            rows = [row for row in self._rows.audit if last < row.sequence <= head.sequence][:ROWS_PER_PAGE]
            yield AuditLogPage(start, head, tuple(rows))
            last = rows[-1].sequence if rows else head.sequence
            if last >= head.sequence:
                return
            await self._yield_to_tasks()

    async def certificate(self, id: str) -> Certificate | None:
        """See :class:`scrubber.ports.record.Certificates`."""
        await self._yield_to_tasks()
        found = self._rows.certificates.get(id)
        return None if found is None else CERTIFICATE.decode(found[1])

    def head(self) -> AuditHead:
        """Return the last committed audit row; the start of the chain before a load."""
        return self._head

    async def close(self) -> None:
        """Close the ledger; nothing can be committed afterwards. See :meth:`successor`."""
        self._open, self._ended = False, True

    def health(self) -> str:
        """Return ``"ok"``, or the message of the last load or change that failed; a stored change clears it."""
        return self._health

    async def _yield_to_tasks(self) -> None:
        """Let other tasks run first, as with a real disk."""
        await asyncio.sleep(0)
        if not self._open:
            raise LedgerFailure("The ledger in memory is not open.")

    def _record_failure(self, message: str) -> LedgerFailure:
        self._health = message
        return LedgerFailure(message)

    def _store(self, change: LedgerChange) -> None:
        rows = self._rows
        added = chain_events(rows.head, change.events)
        head = added[-1].head if added else rows.head
        devices = self._next_devices(change)
        known = rows.devices.keys() | devices.keys()
        for device in (
            *(scrub.device for scrub in change.scrubs),
            *(certificate.device for certificate in change.certificates),
            *(device for device, _ in change.grants),
        ):
            if device not in known:
                raise LedgerFailure(contradiction_message(f"concerns device {device}, which has no record"))
        certificates = self._next_certificates(change.certificates, head)
        grants: dict[tuple[str, int], tuple[int, str]] = {}
        for device, grant in change.grants:
            key = (device, grant.sequence)
            if key in rows.grants or key in grants:
                raise LedgerFailure(contradiction_message(f"repeats grant {grant.sequence} of device {device}"))
            grants[key] = (head.sequence, GRANT.encode(grant))
        scrubs = {scrub.id: (head.sequence, SCRUB.encode(scrub)) for scrub in change.scrubs}
        node = rows.node if change.node is None else NODE.encode(change.node)
        pause = rows.agent_pause if change.agent_pause is None else PAUSE.encode(change.agent_pause)
        # Everything was checked above: nothing can fail from here on, so the change is stored completely.
        rows.devices |= devices
        rows.certificates |= certificates
        rows.grants |= grants
        rows.scrubs |= scrubs
        rows.node = node
        rows.agent_pause = pause
        rows.audit.extend(added)
        rows.head = self._head = head
        cut = self._retention.cutoff(rows.pruned.sequence, head.sequence, live_bytes=0)
        if cut is not None:
            self._prune(cut)

    def _next_devices(self, change: LedgerChange) -> dict[str, str]:
        devices: dict[str, str] = {}
        for record in change.records:
            document = devices.get(record.device, self._rows.devices.get(record.device))
            stored = 0 if document is None else json.loads(document)["version"]
            if record.version != stored + 1:
                raise LedgerFailure(
                    contradiction_message(
                        f"would set device {record.device} to version {record.version}, but the ledger has {stored}"
                    )
                )
            devices[record.device] = RECORD.encode(record)
        return devices

    def _next_certificates(self, changed: Sequence[Certificate], head: AuditHead) -> dict[str, tuple[int, str]]:
        following: dict[str, tuple[int, str]] = {}
        for certificate in changed:
            document = CERTIFICATE.encode(certificate)
            stored = following.get(certificate.id, self._rows.certificates.get(certificate.id))
            if stored is not None and stored[1] != document and CERTIFICATE.decode(stored[1]).next_grant is not None:
                raise LedgerFailure(
                    contradiction_message(f"would change certificate {certificate.id}, which was already used")
                )
            following[certificate.id] = (head.sequence, document)
        return following

    def _prune(self, cut: int) -> None:
        rows = self._rows
        gone = [row for row in rows.audit if row.sequence <= cut]
        named = ReferencedRows.from_records(rows.records().values())
        rows.audit = rows.audit[len(gone) :]
        rows.pruned = gone[-1].head
        rows.scrubs = {
            name: (seen, document)
            for name, (seen, document) in rows.scrubs.items()
            if seen > cut or SCRUB.decode(document).ended is None
        }
        rows.certificates = {
            name: (seen, document)
            for name, (seen, document) in rows.certificates.items()
            if seen > cut or name in named.certificates
        }
        rows.grants = {
            key: (seen, document) for key, (seen, document) in rows.grants.items() if seen > cut or key in named.grants
        }

    def _entry(self, row: AuditRow) -> HistoryEntry:
        event = event_of(row)
        named = event.fields.get("certificate")
        scrub = None if event.scrub is None else self._rows.scrubs.get(event.scrub)
        certificate = self._rows.certificates.get(named) if isinstance(named, str) else None
        return HistoryEntry(
            sequence=row.sequence,
            hash=row.hash,
            event=event,
            scrub=None if scrub is None else SCRUB.decode(scrub[1]),
            certificate=None if certificate is None else CERTIFICATE.decode(certificate[1]),
        )


def _matches(row: AuditRow, query: HistoryQuery) -> bool:
    if query.device not in (None, row.device) or (query.since is not None and row.at < query.since):
        return False
    if not query.matches_event(row.name) or (query.before is not None and row.sequence >= query.before):
        return False
    fields = event_of(row).fields
    if query.tenant is not None and fields.get("tenant") != query.tenant:
        return False
    if query.outcome is not None and query.outcome in HAND_OVER_EVENTS:
        return row.name == HAND_OVER_EVENTS[query.outcome]
    return query.outcome is None or fields.get("outcome") == query.outcome
