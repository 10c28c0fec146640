"""What the ledger lets others count, and the service's own look at its trail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.adapters.clock import SystemClock
from scrubber.adapters.ledger.auditor import look_through
from scrubber.adapters.ledger.examination import ChainVerdict
from scrubber.adapters.ledger.shapes import Undecodable
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.domain.errors import LedgerFailure
from scrubber.ports.record import Change, TrailPage
from tests.ledger_samples import event, record

ROWS = 1200


@pytest.fixture
def told() -> list[tuple[float, bool]]:
    return []


@pytest.fixture
async def ledger(tmp_path: Path, told: list[tuple[float, bool]]) -> AsyncIterator[SqliteLedger]:
    made = SqliteLedger(tmp_path / "ledger", observe=lambda seconds, stored: told.append((seconds, stored)))
    await made.load()
    yield made
    await made.close()


# -- changes -----------------------------------------------------------------------------------------------------------


async def test_every_change_is_told_with_the_time_that_it_took(
    ledger: SqliteLedger, told: list[tuple[float, bool]]
) -> None:
    assert told == []  # to load is no change
    await ledger.commit(Change(events=(event(),)))
    ((seconds, stored),) = told
    assert stored
    assert seconds > 0


async def test_a_change_that_could_not_be_stored_is_told_as_such(
    ledger: SqliteLedger, told: list[tuple[float, bool]]
) -> None:
    first = record(version=1)
    await ledger.commit(Change(records=(first,)))
    with pytest.raises(LedgerFailure):
        await ledger.commit(Change(records=(replace(first, version=1),)))
    assert [stored for _, stored in told] == [True, False]


async def test_its_size_is_that_of_its_files(ledger: SqliteLedger, tmp_path: Path) -> None:
    before = ledger.size_bytes
    await ledger.commit(Change(events=tuple(event(number=number) for number in range(200))))
    files = [tmp_path / "ledger" / name for name in ("ledger.db", "ledger.db-wal")]
    assert ledger.size_bytes == sum(file.stat().st_size for file in files)
    assert before is not None
    assert ledger.size_bytes > before


def test_before_it_is_loaded_it_has_no_size(tmp_path: Path) -> None:
    assert SqliteLedger(tmp_path / "ledger").size_bytes is None


# -- the trail ---------------------------------------------------------------------------------------------------------


class Spoiled:
    """A trail of which the pages come otherwise than they were written."""

    def __init__(self, ledger: SqliteLedger, *, change: int | None = None, fail: Exception | None = None) -> None:
        self._ledger, self._change, self._fail = ledger, change, fail

    async def pages(self, after: int = 0) -> AsyncIterator[TrailPage]:
        async for page in self._ledger.pages(after):
            yield replace(
                page,
                rows=tuple(replace(row, actor="uid:0") if row.sequence == self._change else row for row in page.rows),
            )
            if self._fail is not None:
                raise LedgerFailure("The disk gives nothing.") from self._fail


@pytest.fixture
async def long_ledger(ledger: SqliteLedger) -> SqliteLedger:
    await ledger.commit(Change(events=tuple(event(number=number) for number in range(ROWS))))
    return ledger


async def test_a_whole_trail_is_intact_while_it_grows(long_ledger: SqliteLedger) -> None:
    looking = asyncio.create_task(look_through(long_ledger, SystemClock()))
    for number in range(20):
        await long_ledger.commit(Change(events=(event(number=number),)))
    found = await looking
    assert found.verdict is ChainVerdict.INTACT
    assert found.rows >= ROWS


async def test_one_row_that_was_changed_is_found_and_named(long_ledger: SqliteLedger) -> None:
    found = await look_through(Spoiled(long_ledger, change=700), SystemClock())
    assert found.verdict is ChainVerdict.BROKEN
    assert "row 700" in found.sentence


async def test_a_row_that_cannot_be_read_as_one_is_a_broken_trail(long_ledger: SqliteLedger) -> None:
    found = await look_through(Spoiled(long_ledger, fail=Undecodable("audit row 7 is missing")), SystemClock())
    assert found.verdict is ChainVerdict.BROKEN


async def test_a_disk_that_does_not_answer_is_no_broken_trail(long_ledger: SqliteLedger) -> None:
    with pytest.raises(LedgerFailure):
        await look_through(Spoiled(long_ledger, fail=OSError("I/O")), SystemClock())


async def test_bytes_that_were_changed_on_the_disk_are_found_although_they_were_read_before(
    long_ledger: SqliteLedger, tmp_path: Path
) -> None:
    assert (await look_through(long_ledger, SystemClock())).verdict is ChainVerdict.INTACT
    for file in (tmp_path / "ledger" / name for name in ("ledger.db", "ledger.db-wal")):
        changed = file.read_bytes().replace(b"GPU-a", b"GPU-z")
        with file.open("r+b") as opened:
            opened.write(changed)
    found = await look_through(long_ledger, SystemClock())
    assert found.verdict is ChainVerdict.BROKEN
