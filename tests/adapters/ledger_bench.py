"""Both ledgers behind one interface: a storage location, and the services that use it one after the other."""

from pathlib import Path
from typing import Protocol

from scrubber.adapters.ledger.memory import MemoryLedger
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.ports.record import AuditHead, AuditLog, Certificates, Ledger, LedgerState

__all__ = ["KINDS", "AnyLedger", "Bench", "bench_of"]

KINDS = ("sqlite", "memory")


class AnyLedger(Ledger, AuditLog, Certificates, Protocol):
    """A ledger that also reports its health and the head of its audit log."""

    def health(self) -> str: ...

    def head(self) -> AuditHead: ...


class Bench(Protocol):
    """One location for a ledger, and the services that use it one after the other."""

    async def start(self) -> tuple[AnyLedger, LedgerState]:
        """Stop the previous service, start a new one, and return its ledger with the state that it loaded."""

    async def end(self) -> None: ...


class _OnDisk:
    def __init__(self, directory: Path, max_audit_rows: int) -> None:
        self._directory, self._max_audit_rows = directory, max_audit_rows
        self._ledger: SqliteLedger | None = None

    async def start(self) -> tuple[AnyLedger, LedgerState]:
        await self.end()
        self._ledger = SqliteLedger(self._directory, max_audit_rows=self._max_audit_rows)
        return self._ledger, await self._ledger.load()

    async def end(self) -> None:
        if self._ledger is not None:
            await self._ledger.close()


class _InMemory:
    def __init__(self, max_audit_rows: int) -> None:
        self._ledger = MemoryLedger(max_audit_rows=max_audit_rows)

    async def start(self) -> tuple[AnyLedger, LedgerState]:
        self._ledger = self._ledger.successor()
        return self._ledger, await self._ledger.load()

    async def end(self) -> None:
        await self._ledger.close()


def bench_of(kind: str, directory: Path, max_audit_rows: int) -> Bench:
    """Return a bench for the ledger of ``kind``, one of :data:`KINDS`."""
    return _OnDisk(directory, max_audit_rows) if kind == "sqlite" else _InMemory(max_audit_rows)
