"""What the ledger may delete, so that it never fills the disk, and what it must keep.

The length of the audit log is decisive: once it exceeds its bound, its oldest part is deleted, together with
everything last written before the first remaining row. No clock is used, because the clock of a node may jump. What the
current record of a device references is kept, however old.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scrubber.domain.record import DeviceRecord

__all__ = ["MAX_AUDIT_ROWS", "MAX_BYTES", "ReferencedRows", "Retention"]

MAX_AUDIT_ROWS = 100_000
MAX_BYTES = 256 * 1024 * 1024

_PRUNE_ROWS = 100
"""One part in this many is deleted at a time, so that a commit that prunes is not much slower than the others."""

_MIN_AUDIT_ROWS = 10


# See docs/decisions/0035-full-disk-and-bounded-history.md.
@dataclass(frozen=True, slots=True)
class Retention:
    """The limits on what is kept.

    Attributes:
        max_audit_rows: rows of the audit log, at least ten.
        max_bytes: size of the live pages of the database; above it, each commit prunes until it is below again.
    """

    max_audit_rows: int = MAX_AUDIT_ROWS
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        if self.max_audit_rows < _MIN_AUDIT_ROWS:
            raise ValueError(f"an audit log keeps at least {_MIN_AUDIT_ROWS} rows, not {self.max_audit_rows}")
        if self.max_bytes <= 0:
            raise ValueError("the ledger's size limit is too small")

    def cutoff(self, pruned: int, head: int, live_bytes: int) -> int | None:
        """Return the sequence up to which to delete; None while everything is within bounds.

        Args:
            pruned: the last sequence deleted before.
            head: the last sequence written, including the rows of this commit.
        """
        if head - pruned > self.max_audit_rows:
            return head - self.max_audit_rows + max(1, self.max_audit_rows // _PRUNE_ROWS)
        if live_bytes > self.max_bytes and head - pruned > 1:
            return pruned + max(1, (head - pruned) // _PRUNE_ROWS)
        return None


@dataclass(frozen=True, slots=True)
class ReferencedRows:
    """What the current records reference. An unused certificate without a reference is void, and may be deleted."""

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
