"""Where the engine keeps what must survive it: the ledger with its audit log, the journal of events, and signatures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from scrubber.domain.evidence import Certificate, ScrubRecord
from scrubber.domain.record import DeviceRecord, Grant

__all__ = [
    "CHAIN_START",
    "HAND_OVER_EVENTS",
    "AuditHead",
    "AuditRow",
    "AuditTrail",
    "Certificates",
    "Event",
    "HistoryEntry",
    "HistoryQuery",
    "Journal",
    "Ledger",
    "LedgerChange",
    "LedgerState",
    "Signer",
    "TrailPage",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened and is worth remembering.

    Attributes:
        name: stable, dotted: ``handover.granted``, ``handover.refused``, ``scrub.finished``, ``health.quarantined`` …
        device: None for the node.
        actor: ``service``, ``plugin``, or ``uid:1000``.
        fields: JSON-able scalars only; seconds and bytes by suffix.
    """

    name: str
    at: float
    device: str | None = None
    scrub: str | None = None
    actor: str = "service"
    fields: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


class Journal(Protocol):
    def record(self, events: Sequence[Event]) -> None:
        """Write log lines and move metrics for events that are already durable (or need not be). Never raises."""

    def record_scrub(self, scrub: ScrubRecord) -> None:
        """Move metrics for what the steps of a scrub did, once it is durable; its event is told apart. Never raises.

        The check of a hand-over that was granted is told here too, and has no event of its own.
        """


@dataclass(frozen=True, slots=True)
class AuditHead:
    """A place in the chain: the sequence of a row and its hash; 0 and empty before the first row."""

    sequence: int = 0
    hash: str = ""

    def __str__(self) -> str:
        """As people keep it, and ``scrubber audit verify --head`` takes it."""
        return f"{self.sequence}:{self.hash}"


CHAIN_START = AuditHead()


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One row of the trail. ``at`` is in wall-clock seconds; ``fields`` is canonical JSON, as text."""

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
class TrailPage:
    """A part of the trail; every page of one reading has the same two ends.

    Attributes:
        preceding_head: what the first row of the first page follows: the last row that was given up to keep the trail bounded,
            or the last one that the reader did not want.
        head: the last row as recorded when the reading began.
        rows: oldest first; together with those of the other pages, everything between the two ends.
    """

    preceding_head: AuditHead
    head: AuditHead
    rows: tuple[AuditRow, ...] = ()


HAND_OVER_EVENTS: Mapping[str, str] = MappingProxyType({"granted": "handover.granted", "refused": "handover.refused"})
"""Outcomes that are an event of their own, by the word that a query uses for them."""


@dataclass(frozen=True, slots=True)
class LedgerChange:
    """Everything that one decision changes; stored whole or not at all.

    Attributes:
        records: the new record of each device that changes; each must be exactly one version ahead of the stored one.
        grants: (device, grant) pairs that are new.
        certificates: issued, or used up (``next_grant`` now set): stored under their id.
        scrubs: started or finished: stored under their id.
        events: become audit rows, in order.
    """

    records: tuple[DeviceRecord, ...] = ()
    grants: tuple[tuple[str, Grant], ...] = ()
    certificates: tuple[Certificate, ...] = ()
    scrubs: tuple[ScrubRecord, ...] = ()
    events: tuple[Event, ...] = ()

    def __or__(self, other: LedgerChange) -> LedgerChange:
        """Both, in one transaction."""
        return LedgerChange(
            self.records + other.records,
            self.grants + other.grants,
            self.certificates + other.certificates,
            self.scrubs + other.scrubs,
            self.events + other.events,
        )


@dataclass(frozen=True, slots=True)
class LedgerState:
    """What a start finds: the record of each device, scrubs that never ended, and the head of the audit chain."""

    records: Mapping[str, DeviceRecord] = field(default_factory=dict)
    unfinished_scrubs: tuple[ScrubRecord, ...] = ()
    head_sequence: int = 0
    head_hash: str = ""


@dataclass(frozen=True, slots=True)
class HistoryQuery:
    """Which part of the past; newest first, at most ``limit`` entries. None asks for no such thing.

    Attributes:
        since: wall-clock seconds; nothing older.
        tenant: the namespace that an event names as its tenant's (``tenant_namespace``).
        outcome: what an event has as its ``outcome``, or one of :data:`HAND_OVER_EVENTS`.
        events: names, of which an event has any; one that ends in a dot is the beginning of names. Empty: no such wish.
        before: a sequence; nothing of it, and nothing newer.
    """

    device: str | None = None
    since: float | None = None
    limit: int = 100
    tenant: str | None = None
    outcome: str | None = None
    events: tuple[str, ...] = ()
    before: int | None = None

    def matches_event(self, event: str) -> bool:
        """Whether ``event`` is called as ``events`` asks for."""
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
            LedgerFailure: corrupt, truncated, newer than this program, or its audit chain is broken.
        """

    async def commit(self, change: LedgerChange) -> None:
        """Store ``change`` durably (it survives a power cut once this returns), or raise and store nothing of it.

        A cancelled commit may or may not have happened: callers shield it.

        Raises:
            LedgerFailure: full, read-only, corrupt, or a record is not one version ahead of what is stored.
        """

    async def history(self, query: HistoryQuery) -> Sequence[HistoryEntry]:
        """Audit rows, newest first; fewer than ``query.limit`` are all that there are.

        Raises:
            InvalidRequest: ``query.before`` is beyond the row that comes next.
            LedgerFailure: they cannot be read.
        """

    async def close(self) -> None:
        """Let go of the files; nothing may be committed afterwards."""


class AuditTrail(Protocol):
    def pages(self, after: int = 0) -> AsyncIterator[TrailPage]:
        """The trail as it stands when the first page is asked for, without the rows up to sequence ``after``.

        At least one page, also when there is no row. Pages are bounded, and between two of them the ledger does what
        else it is asked: a long reading holds up no hand-over.

        Raises:
            InvalidRequest: the trail ends before row ``after``.
            LedgerFailure: it cannot be read.
            NotReady: rows were given up, to keep the trail bounded, before they were read; ask again.
        """


class Certificates(Protocol):
    async def certificate(self, id: str) -> Certificate | None:
        """The certificate that is called ``id``, as it was last stored; None when the ledger has none, or forgot it.

        Raises:
            LedgerFailure: it cannot be read.
        """


class Signer(Protocol):
    """A private key that never leaves its holder, and what verifiers need of it. Ed25519."""

    @property
    def key_id(self) -> str:
        """``sha256:`` and the SHA-256, in hexadecimal digits, of the public key's DER SubjectPublicKeyInfo."""

    @property
    def public_key(self) -> str:
        """PEM of the SubjectPublicKeyInfo; ends with a line feed."""

    def sign(self, payload: bytes) -> bytes:
        """64 bytes over the DSSE encoding of ``payload`` (:func:`scrubber.domain.statement.pae`).

        The same payload always makes the same signature. Takes well below a millisecond; nothing is written or waited for.
        """
