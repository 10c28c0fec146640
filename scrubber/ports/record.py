"""Ports for persistent records: the ledger with its audit log, the journal of events, and signatures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from scrubber.domain.agent_pause import AgentPauseRecord
from scrubber.domain.evidence import Certificate, ScrubRecord
from scrubber.domain.node_record import NodeRecord
from scrubber.domain.record import DeviceRecord, Grant

__all__ = [
    "CHAIN_START",
    "HAND_OVER_EVENTS",
    "AuditHead",
    "AuditLog",
    "AuditLogPage",
    "AuditRow",
    "Certificates",
    "Event",
    "HistoryEntry",
    "HistoryQuery",
    "Journal",
    "Ledger",
    "LedgerChange",
    "LedgerState",
    "Signer",
]


@dataclass(frozen=True, slots=True)
class Event:
    """An event to be recorded.

    Attributes:
        name: stable, dotted: ``handover.granted``, ``handover.refused``, ``scrub.finished``, ``health.quarantined`` …
        device: None for an event of the node.
        actor: ``service``, ``plugin``, ``driver`` (a DRA driver), or ``uid:1000``.
        fields: JSON-able scalars only; names carry the unit (seconds, bytes) as a suffix.
    """

    name: str
    at: float
    device: str | None = None
    scrub: str | None = None
    actor: str = "service"
    fields: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


class Journal(Protocol):
    def record(self, events: Sequence[Event]) -> None:
        """Write log lines and update metrics for events that are already durable (or need not be). Never raises."""

    def record_scrub(self, scrub: ScrubRecord) -> None:
        """Update the metrics of a scrub's steps once the scrub is durable. Never raises.

        Its event goes to :meth:`record`. The check of a granted hand-over is recorded here too, and has no separate
        event.
        """


@dataclass(frozen=True, slots=True)
class AuditHead:
    """A position in the chain: the sequence and hash of a row; 0 and empty before the first row."""

    sequence: int = 0
    hash: str = ""

    def __str__(self) -> str:
        """The form that operators save and that ``scrubber audit verify --head`` accepts."""
        return f"{self.sequence}:{self.hash}"


CHAIN_START = AuditHead()


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One row of the audit log. ``at`` is in wall-clock seconds; ``fields`` is canonical JSON, as text."""

    sequence: int
    at: float
    name: str
    device: str | None
    scrub: str | None
    actor: str
    fields: str
    prev_hash: str
    hash: str

    @property
    def head(self) -> AuditHead:
        return AuditHead(self.sequence, self.hash)


@dataclass(frozen=True, slots=True)
class AuditLogPage:
    """A part of the audit log; all pages of one read have the same ``preceding_head`` and ``head``.

    Attributes:
        preceding_head: the row before the first row of the first page: the last row that was deleted to keep the log
            bounded, or the last one that the reader did not request.
        head: the last row that existed when the read began.
        rows: oldest first; all pages together contain every row after ``preceding_head`` up to ``head``.
    """

    preceding_head: AuditHead
    head: AuditHead
    rows: tuple[AuditRow, ...] = ()


HAND_OVER_EVENTS: Mapping[str, str] = MappingProxyType({"granted": "handover.granted", "refused": "handover.refused"})
"""Outcomes that have a separate event each, by the word that a query uses for them."""


@dataclass(frozen=True, slots=True)
class LedgerChange:
    """Everything that one decision changes; stored completely or not at all.

    Attributes:
        records: the new record of each device that changes; each must be exactly one version ahead of the stored one.
        grants: new (device, grant) pairs.
        certificates: issued or used (``next_grant`` is now set) certificates, stored under their ID.
        scrubs: started or finished scrubs, stored under their ID.
        events: events that become audit rows, in order.
        node: the new record of the node; None when it does not change.
        agent_pause: the new record of a pause of the node's agents; None when it does not change.
    """

    records: tuple[DeviceRecord, ...] = ()
    grants: tuple[tuple[str, Grant], ...] = ()
    certificates: tuple[Certificate, ...] = ()
    scrubs: tuple[ScrubRecord, ...] = ()
    events: tuple[Event, ...] = ()
    node: NodeRecord | None = None
    agent_pause: AgentPauseRecord | None = None

    def __or__(self, other: LedgerChange) -> LedgerChange:
        """Combine both changes into one transaction."""
        return LedgerChange(
            self.records + other.records,
            self.grants + other.grants,
            self.certificates + other.certificates,
            self.scrubs + other.scrubs,
            self.events + other.events,
            self.node if other.node is None else other.node,
            self.agent_pause if other.agent_pause is None else other.agent_pause,
        )


@dataclass(frozen=True, slots=True)
class LedgerState:
    """State at a start.

    It has the records of the devices, the node and its agents, scrubs that never finished, and the audit chain's head.
    """

    records: Mapping[str, DeviceRecord] = field(default_factory=dict)
    unfinished_scrubs: tuple[ScrubRecord, ...] = ()
    node: NodeRecord = field(default_factory=NodeRecord)
    agent_pause: AgentPauseRecord = field(default_factory=AgentPauseRecord)
    head_sequence: int = 0
    head_hash: str = ""


@dataclass(frozen=True, slots=True)
class HistoryQuery:
    """A filter on the audit log; newest first, at most ``limit`` entries. None disables a condition.

    Attributes:
        since: wall-clock seconds; older events are excluded.
        tenant: the event's tenant namespace (``tenant``).
        outcome: the event's ``outcome``, or one of :data:`HAND_OVER_EVENTS`.
        events: accepted event names; one that ends in a dot is a prefix. Empty: any name.
        before: a sequence; only rows before it are returned.
    """

    device: str | None = None
    since: float | None = None
    limit: int = 100
    tenant: str | None = None
    outcome: str | None = None
    events: tuple[str, ...] = ()
    before: int | None = None

    def matches_event(self, event: str) -> bool:
        """Whether ``events`` accepts the event name ``event``."""
        return not self.events or any(
            event.startswith(each) if each.endswith(".") else event == each for each in self.events
        )


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One audit row: the event, its sequence and hash in the chain, and the scrub or certificate it names, if any."""

    sequence: int
    hash: str
    event: Event
    scrub: ScrubRecord | None = None
    certificate: Certificate | None = None


class Ledger(Protocol):
    async def load(self) -> LedgerState:
        """The state as of the last commit.

        Raises:
            LedgerFailure: the ledger is corrupt, truncated or of an unsupported version, or its audit chain is broken.
        """

    async def commit(self, change: LedgerChange) -> None:
        """Store ``change`` durably (it survives a power failure once this returns), or raise and store nothing of it.

        A cancelled commit may or may not have happened: callers shield it.

        Raises:
            LedgerFailure: the ledger is full, read-only or corrupt, or a record is not one version ahead of the stored
                one.
        """

    async def history(self, query: HistoryQuery) -> Sequence[HistoryEntry]:
        """Audit rows, newest first; fewer than ``query.limit`` means that there are no more.

        Raises:
            InvalidRequest: ``query.before`` is beyond the row that comes next.
            LedgerFailure: the rows cannot be read.
        """

    async def close(self) -> None:
        """Close the files; no commit is possible afterwards."""


class AuditLog(Protocol):
    def pages(self, after: int = 0) -> AsyncIterator[AuditLogPage]:
        """The audit log as of the request for the first page, without the rows up to sequence ``after``.

        Yields at least one page, even if there is no row. Pages are bounded, and the ledger serves other requests
        between two pages: a long read delays no hand-over.

        Raises:
            InvalidRequest: the log ends before row ``after``.
            LedgerFailure: the log cannot be read.
            NotReady: rows were deleted, to keep the log bounded, before they were read; repeat the request.
        """


class Certificates(Protocol):
    async def certificate(self, id: str) -> Certificate | None:
        """The certificate with the ID ``id``, as last stored; None when the ledger never had or no longer has it.

        Raises:
            LedgerFailure: the certificate cannot be read.
        """


class Signer(Protocol):
    """An Ed25519 private key that never leaves its holder, with what verifiers need of it."""

    @property
    def key_id(self) -> str:
        """``sha256:`` and the SHA-256, in hexadecimal digits, of the public key's DER SubjectPublicKeyInfo."""

    @property
    def public_key(self) -> str:
        """PEM of the SubjectPublicKeyInfo; ends with a line feed."""

    def sign(self, payload: bytes) -> bytes:
        """Return the 64-byte signature of the DSSE encoding of ``payload`` (:func:`scrubber.domain.statement.pae`).

        The same payload always produces the same signature. Takes well below a millisecond; no I/O and no waiting.
        """
