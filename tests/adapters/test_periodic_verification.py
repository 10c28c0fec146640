"""The service verifies its own audit log periodically: a finding is exposed and logged, and stops nothing."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from prometheus_client import CollectorRegistry

from scrubber.adapters.children.process import Children
from scrubber.adapters.clock import SystemClock
from scrubber.adapters.ledger.periodic_verification import verify_periodically
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.errors import LedgerFailure
from scrubber.observability.journal import StructlogJournal
from scrubber.ports.record import AuditLogPage, LedgerChange
from tests.ledger_samples import event

DEADLINE = 20.0
OFTEN = 0.01


class AuditLogFile:
    """A audit log that a test may change, or make unreadable for a while."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self._ledger = ledger
        self.changed = False
        self.away = False
        self.looks = 0

    async def pages(self, after: int = 0) -> AsyncIterator[AuditLogPage]:
        self.looks += 1
        if self.away:
            raise LedgerFailure("The disk gives nothing.")
        async for page in self._ledger.pages(after):
            rows = page.rows
            yield replace(page, rows=tuple(replace(row, actor="uid:0") for row in rows)) if self.changed else page


class RecordedEvents:
    """A journal, and the events that it wrote."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        logger = structlog.wrap_logger(
            structlog.WriteLogger(self.stream),
            processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer()],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        )
        self.registry = CollectorRegistry()
        self.journal = StructlogJournal(registry=self.registry, logger=logger, signals=NVIDIA_SIGNALS)

    @property
    def events(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    def intact(self) -> float | None:
        return self.registry.get_sample_value("scrubber_audit_intact")


@pytest.fixture
async def audit_log(tmp_path: Path) -> AsyncIterator[AuditLogFile]:
    ledger = SqliteLedger(tmp_path / "ledger")
    await ledger.load()
    await ledger.commit(LedgerChange(events=tuple(event(number=number) for number in range(5))))
    yield AuditLogFile(ledger)
    await ledger.close()


@pytest.fixture
def recorded() -> RecordedEvents:
    return RecordedEvents()


@asynccontextmanager
async def looking(audit_log: AuditLogFile, recorded: RecordedEvents) -> AsyncIterator[None]:
    service = recorded.journal.metrics.service
    watching = verify_periodically(
        audit_log,
        recorded.journal,
        SystemClock(),
        OFTEN,
        on_verified=lambda intact, at: service.set_audit_result(intact=intact, at=at),
    )
    task = asyncio.create_task(watching)
    try:
        yield
    finally:
        assert not task.done()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def looks(audit_log: AuditLogFile, more: int = 2) -> None:
    """Return once the audit log was verified ``more`` times from now on."""
    expected = audit_log.looks + more
    async with asyncio.timeout(DEADLINE):
        while audit_log.looks < expected:  # noqa: ASYNC110 - nothing notifies of a verification
            await asyncio.sleep(OFTEN)


async def test_intact_audit_log_sets_the_metric_and_logs_nothing(
    audit_log: AuditLogFile, recorded: RecordedEvents
) -> None:
    async with looking(audit_log, recorded):
        await looks(audit_log)
    assert recorded.intact() == 1
    assert recorded.events == []


async def test_broken_audit_log_sets_the_metric_logs_an_error_and_is_verified_again(
    audit_log: AuditLogFile, recorded: RecordedEvents
) -> None:
    audit_log.changed = True
    async with looking(audit_log, recorded):
        await looks(audit_log)
        assert recorded.intact() == 0
        audit_log.changed = False
        await looks(audit_log)
    assert recorded.intact() == 1
    first = recorded.events[0]
    assert (first["event"], first["level"]) == ("audit.broken", "error")
    assert "row 1" in first["message"]


async def test_unreadable_audit_log_is_reported_as_unknown_not_broken(
    audit_log: AuditLogFile, recorded: RecordedEvents
) -> None:
    audit_log.away = True
    async with looking(audit_log, recorded):
        await looks(audit_log)
        assert recorded.intact() is None
        audit_log.away = False
        await looks(audit_log)
    assert recorded.intact() == 1
    assert recorded.events[0]["event"] == "audit.unverified"


async def test_child_starts_are_counted_by_module() -> None:
    children = Children()
    module = "tests.adapters.wayward_child"
    try:
        assert children.starts == {}
        for _ in range(2):
            await (await children.start(module)).kill()
        assert children.starts == {module: 2}
    finally:
        await children.close()
