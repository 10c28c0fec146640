"""The service verifies its own trail periodically: a finding is exposed and logged, and stops nothing."""

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
from scrubber.ports.record import LedgerChange, TrailPage
from tests.ledger_samples import event

PATIENCE = 20.0
OFTEN = 0.01


class Trail:
    """A trail that a test may change, or make unreadable for a while."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self._ledger = ledger
        self.changed = False
        self.away = False
        self.looks = 0

    async def pages(self, after: int = 0) -> AsyncIterator[TrailPage]:
        self.looks += 1
        if self.away:
            raise LedgerFailure("The disk gives nothing.")
        async for page in self._ledger.pages(after):
            rows = page.rows
            yield replace(page, rows=tuple(replace(row, actor="uid:0") for row in rows)) if self.changed else page


class Told:
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
async def trail(tmp_path: Path) -> AsyncIterator[Trail]:
    ledger = SqliteLedger(tmp_path / "ledger")
    await ledger.load()
    await ledger.commit(LedgerChange(events=tuple(event(number=number) for number in range(5))))
    yield Trail(ledger)
    await ledger.close()


@pytest.fixture
def told() -> Told:
    return Told()


@asynccontextmanager
async def looking(trail: Trail, told: Told) -> AsyncIterator[None]:
    service = told.journal.metrics.service
    watching = verify_periodically(
        trail,
        told.journal,
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


async def looks(trail: Trail, more: int = 2) -> None:
    """Return once the trail was verified ``more`` times from now on."""
    wanted = trail.looks + more
    async with asyncio.timeout(PATIENCE):
        while trail.looks < wanted:  # noqa: ASYNC110 - nothing notifies of a verification
            await asyncio.sleep(OFTEN)


async def test_intact_trail_sets_the_metric_and_logs_nothing(trail: Trail, told: Told) -> None:
    async with looking(trail, told):
        await looks(trail)
    assert told.intact() == 1
    assert told.events == []


async def test_broken_trail_sets_the_metric_logs_an_error_and_is_verified_again(trail: Trail, told: Told) -> None:
    trail.changed = True
    async with looking(trail, told):
        await looks(trail)
        assert told.intact() == 0
        trail.changed = False
        await looks(trail)
    assert told.intact() == 1
    first = told.events[0]
    assert (first["event"], first["level"]) == ("audit.broken", "error")
    assert "row 1" in first["message"]


async def test_unreadable_trail_is_reported_as_unknown_not_broken(trail: Trail, told: Told) -> None:
    trail.away = True
    async with looking(trail, told):
        await looks(trail)
        assert told.intact() is None
        trail.away = False
        await looks(trail)
    assert told.intact() == 1
    assert told.events[0]["event"] == "audit.unverified"


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
