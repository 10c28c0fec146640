"""What the ledger may forget, so that it never fills the disk, and what it must not.

The audit trail sets the pace: once it is longer than its bound, its oldest part goes, and with it everything that was
last written before the first row that stays. No clock is asked, because a node's clock may jump. What a device's
current record names stays, however old.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scrubber.domain.record import DeviceRecord

__all__ = ["MAX_AUDIT_ROWS", "MAX_BYTES", "ReferencedRows", "Retention"]

MAX_AUDIT_ROWS = 100_000
MAX_BYTES = 256 * 1024 * 1024

_PRUNE_ROWS = 100
"""One part in this many goes at a time, so that the commit that prunes is not much slower than the others."""

_MIN_AUDIT_ROWS = 10


@dataclass(frozen=True, slots=True)
class Retention:
    """How much is kept.

    Attributes:
        max_audit_rows: rows of the audit trail, at least ten.
        max_bytes: live pages of the database; once above, each commit prunes until they are below again.
    """

    max_audit_rows: int = MAX_AUDIT_ROWS
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        if self.max_audit_rows < _MIN_AUDIT_ROWS:
            raise ValueError(f"an audit trail is at least {_MIN_AUDIT_ROWS} rows long, not {self.max_audit_rows}")
        if self.max_bytes <= 0:
            raise ValueError("a ledger needs room")

    def cutoff(self, pruned: int, head: int, live_bytes: int) -> int | None:
        """The sequence through which to forget; None while everything is within bounds.

        Args:
            pruned: the last sequence that was forgotten before.
            head: the last sequence written, this commit's rows included.
        """
        if head - pruned > self.max_audit_rows:
            return head - self.max_audit_rows + max(1, self.max_audit_rows // _PRUNE_ROWS)
        if live_bytes > self.max_bytes and head - pruned > 1:
            return pruned + max(1, (head - pruned) // _PRUNE_ROWS)
        return None


@dataclass(frozen=True, slots=True)
class ReferencedRows:
    """What the current records name. An unused certificate that no record names is void, and may go."""

    certificates: frozenset[str]
    grants: frozenset[tuple[str, int]]

    @classmethod
    def from_records(cls, records: Iterable[DeviceRecord]) -> ReferencedRows:
        certificates: set[str] = set()
        grants: set[tuple[str, int]] = set()
        for record in records:
            held = (*record.open_grants, *((record.last_grant,) if record.last_grant is not None else ()))
            grants.update((record.device, grant.sequence) for grant in held)
            certificates.update(grant.certificate for grant in held if grant.certificate is not None)
            if record.certificate is not None:
                certificates.add(record.certificate.id)
            if record.rests_on is not None:
                certificates.add(record.rests_on)
        return cls(frozenset(certificates), frozenset(grants))
