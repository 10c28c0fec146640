"""What the ledger reports for metrics, and the service's own verification of its audit log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.adapters.clock import SystemClock
from scrubber.adapters.ledger.json_codec import CodecError
from scrubber.adapters.ledger.periodic_verification import verify_audit_log
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.adapters.ledger.verification import ChainVerdict
from scrubber.domain.errors import LedgerFailure
from scrubber.ports.record import AuditLogPage, LedgerChange
from tests.ledger_samples import event, record

ROWS = 1200


@pytest.fixture
def commits() -> list[tuple[float, bool]]:
    return []


@pytest.fixture
async def ledger(tmp_path: Path, commits: list[tuple[float, bool]]) -> AsyncIterator[SqliteLedger]:
    made = SqliteLedger(tmp_path / "ledger", observe=lambda seconds, stored: commits.append((seconds, stored)))
    await made.load()
    yield made
    await made.close()


# -- changes -----------------------------------------------------------------------------------------------------------


async def test_commit_is_reported_with_its_duration(ledger: SqliteLedger, commits: list[tuple[float, bool]]) -> None:
    assert commits == []  # loading is no change
    await ledger.commit(LedgerChange(events=(event(),)))
    ((seconds, stored),) = commits
    assert stored
    assert seconds > 0


async def test_failed_commit_is_reported_as_not_stored(ledger: SqliteLedger, commits: list[tuple[float, bool]]) -> None:
    first = record(version=1)
    await ledger.commit(LedgerChange(records=(first,)))
    with pytest.raises(LedgerFailure):
        await ledger.commit(LedgerChange(records=(replace(first, version=1),)))
    assert [stored for _, stored in commits] == [True, False]


async def test_ledger_size_is_the_size_of_its_files(ledger: SqliteLedger, tmp_path: Path) -> None:
    before = ledger.size_bytes
    await ledger.commit(LedgerChange(events=tuple(event(number=number) for number in range(200))))
    files = [tmp_path / "ledger" / name for name in ("ledger.db", "ledger.db-wal")]
    assert ledger.size_bytes == sum(file.stat().st_size for file in files)
    assert before is not None
    assert ledger.size_bytes > before


def test_ledger_has_no_size_before_loading(tmp_path: Path) -> None:
    assert SqliteLedger(tmp_path / "ledger").size_bytes is None


# -- the audit log ---------------------------------------------------------------------------------------------------------


class Spoiled:
    """A audit log whose pages are returned altered or fail."""

    def __init__(self, ledger: SqliteLedger, *, change: int | None = None, fail: Exception | None = None) -> None:
        self._ledger, self._change, self._fail = ledger, change, fail

    async def pages(self, after: int = 0) -> AsyncIterator[AuditLogPage]:
        async for page in self._ledger.pages(after):
            yield replace(
                page,
                rows=tuple(replace(row, actor="uid:0") if row.sequence == self._change else row for row in page.rows),
            )
            if self._fail is not None:
                raise LedgerFailure("The disk gives nothing.") from self._fail


@pytest.fixture
async def long_ledger(ledger: SqliteLedger) -> SqliteLedger:
    await ledger.commit(LedgerChange(events=tuple(event(number=number) for number in range(ROWS))))
    return ledger


async def test_intact_audit_log_verifies_while_the_ledger_grows(long_ledger: SqliteLedger) -> None:
    looking = asyncio.create_task(verify_audit_log(long_ledger, SystemClock()))
    for number in range(20):
        await long_ledger.commit(LedgerChange(events=(event(number=number),)))
    found = await looking
    assert found.verdict is ChainVerdict.INTACT
    assert found.rows >= ROWS


async def test_changed_audit_row_is_found_and_named(long_ledger: SqliteLedger) -> None:
    found = await verify_audit_log(Spoiled(long_ledger, change=700), SystemClock())
    assert found.verdict is ChainVerdict.BROKEN
    assert "row 700" in found.message


async def test_unreadable_audit_row_is_a_broken_audit_log(long_ledger: SqliteLedger) -> None:
    found = await verify_audit_log(Spoiled(long_ledger, fail=CodecError("audit row 7 is missing")), SystemClock())
    assert found.verdict is ChainVerdict.BROKEN


async def test_disk_error_during_verification_is_no_broken_audit_log(long_ledger: SqliteLedger) -> None:
    with pytest.raises(LedgerFailure):
        await verify_audit_log(Spoiled(long_ledger, fail=OSError("I/O")), SystemClock())


async def test_bytes_changed_on_disk_after_an_earlier_read_are_found(long_ledger: SqliteLedger, tmp_path: Path) -> None:
    assert (await verify_audit_log(long_ledger, SystemClock())).verdict is ChainVerdict.INTACT
    for file in (tmp_path / "ledger" / name for name in ("ledger.db", "ledger.db-wal")):
        changed = file.read_bytes().replace(b"GPU-a", b"GPU-z")
        with file.open("r+b") as opened:
            opened.write(changed)
    found = await verify_audit_log(long_ledger, SystemClock())
    assert found.verdict is ChainVerdict.BROKEN
