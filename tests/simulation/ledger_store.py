"""Durable state: the ledger in memory, a crash at any of its writes, and a mirror of everything that was stored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from scrubber.adapters.ledger.memory import MemoryLedger
from scrubber.domain.agent_pause import AgentPauseRecord
from scrubber.domain.assignment import Pod
from scrubber.domain.errors import LedgerFailure
from scrubber.domain.evidence import Certificate, ScrubRecord
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.ports.record import AuditLogPage, Event, HistoryEntry, HistoryQuery, LedgerChange, LedgerState
from tests.simulation.life import Killed, Life

__all__ = ["CrashPoint", "LedgerStore", "SimulatedLedger"]


@dataclass(slots=True)
class CrashPoint:
    """Kill -9 at a write: the ``writes``-th from now, before or after it became durable."""

    writes: int
    durable: bool


class LedgerStore:
    """The ledger store, which survives every service.

    Args:
        crash: ends the writing service at once.
        stored: called with every change that became durable.

    Attributes:
        refuses: the error message of every write, or None.
        records, grants, certificates, scrubs, agent_pause: what is stored.
        claim_pods: pods that a claim in the ledger named at any time.
        granting, scrubbing: called when a grant, or the start of a scrub, has just become durable.
    """

    def __init__(self, crash: Callable[[], None], stored: Callable[[LedgerChange], None]) -> None:
        self._crash = crash
        self._stored = stored
        self.ledger = MemoryLedger(before_commit=self._before, after_commit=self._after)
        self.refuses: str | None = None
        self.point: CrashPoint | None = None
        self.writes = 0
        self.records: dict[str, DeviceRecord] = {}
        self.grants: dict[tuple[str, int], Grant] = {}
        self.certificates: dict[str, Certificate] = {}
        self.scrubs: dict[str, ScrubRecord] = {}
        self.events: list[Event] = []
        self.claim_pods: set[Pod] = set()
        self.agent_pause = AgentPauseRecord()
        self.granting: Callable[[], object] | None = None
        self.scrubbing: Callable[[], object] | None = None

    def next_service(self, life: Life) -> SimulatedLedger:
        """Return the ledger as the next service finds it."""
        self.ledger = self.ledger.successor()
        return SimulatedLedger(life, self.ledger)

    def _before(self, change: LedgerChange) -> None:
        if self.refuses is not None:
            raise LedgerFailure(self.refuses)
        if self.point is not None:
            self.point.writes -= 1
            if self.point.writes <= 0 and not self.point.durable:
                self._die()

    def _after(self, change: LedgerChange) -> None:
        self.writes += 1
        self.records |= {record.device: record for record in change.records}
        self.grants |= {(device, grant.sequence): grant for device, grant in change.grants}
        self.certificates |= {certificate.id: certificate for certificate in change.certificates}
        self.scrubs |= {scrub.id: scrub for scrub in change.scrubs}
        self.events += change.events
        self.claim_pods |= {
            pod for record in change.records for grant in record.open_grants if grant.claim for pod in grant.pods
        }
        self.agent_pause = self.agent_pause if change.agent_pause is None else change.agent_pause
        self._stored(change)
        if change.grants and self.granting is not None:
            self.granting()
        if any(scrub.ended is None for scrub in change.scrubs) and self.scrubbing is not None:
            self.scrubbing()
        if self.point is not None and self.point.writes <= 0:
            self._die()

    def _die(self) -> None:
        self.point = None
        self._crash()
        raise Killed("at a write")


class SimulatedLedger:
    """:class:`scrubber.ports.Ledger` for one service."""

    def __init__(self, life: Life, ledger: MemoryLedger) -> None:
        self._life = life
        self._ledger = ledger

    async def load(self) -> LedgerState:
        self._life.check()
        return await self._ledger.load()

    async def commit(self, change: LedgerChange) -> None:
        self._life.check()
        await self._ledger.commit(change)

    async def history(self, query: HistoryQuery) -> Sequence[HistoryEntry]:
        self._life.check()
        return await self._ledger.history(query)

    async def close(self) -> None:
        self._life.check()
        await self._ledger.close()

    async def pages(self, after: int = 0) -> AsyncIterator[AuditLogPage]:
        self._life.check()
        async for page in self._ledger.pages(after):
            yield page

    async def certificate(self, id: str) -> Certificate | None:
        self._life.check()
        return await self._ledger.certificate(id)
