"""Queries of the past: history with filters, the whole audit log page by page, its head, and certificates by their id."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber.adapters.ledger.chain import verify_chain
from scrubber.adapters.ledger.offline import read_pages
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.domain.errors import AlreadyRunning, InvalidRequest, LedgerFailure, NotReady
from scrubber.ports.record import CHAIN_START, AuditHead, AuditLogPage, AuditRow, Event, HistoryQuery, LedgerChange
from tests.adapters.ledger_bench import KINDS, AnyLedger, Bench, bench_of
from tests.ledger_samples import GPU, OTHER_GPU, certificate, event, fill, record

ROWS = 20_000
VISIT = 2_000
PAGE = 500


@pytest.fixture(params=KINDS)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    made = bench_of(request.param, tmp_path / "ledger", ROWS)
    yield made
    await made.end()


async def found(ledger: AnyLedger, query: HistoryQuery) -> list[int]:
    return [entry.sequence for entry in await ledger.history(query)]


async def grow(ledger: AnyLedger, rows: int) -> None:
    await ledger.commit(LedgerChange(events=tuple(event(number=number) for number in range(rows))))


async def whole(ledger: AnyLedger, after: int = 0) -> tuple[list[AuditLogPage], list[AuditRow]]:
    read = [page async for page in ledger.pages(after)]
    return read, [row for page in read for row in page.rows]


EVENTS = (
    event("handover.granted", at=1.0, tenant="red"),
    event("scrub.finished", at=2.0, outcome="passed"),
    event("scrub.finished", at=3.0, device=OTHER_GPU, outcome="failed"),
    event("reset.finished", at=4.0, outcome="ok"),
    event("handover.refused", at=5.0, tenant="blue"),
    event("device.adopted", at=6.0, device=OTHER_GPU, tenant="red"),
    event("scrub.finished", at=7.0, outcome="passed"),
    event("odd.event", at=8.0, tenant=7, outcome=True),
)


class TestHistory:
    @pytest.mark.parametrize(
        ("query", "sequences"),
        [
            (HistoryQuery(tenant="red"), [6, 1]),
            (HistoryQuery(tenant="blue"), [5]),
            (HistoryQuery(tenant="re"), []),
            (HistoryQuery(tenant=""), []),
            (HistoryQuery(tenant="7"), []),
            (HistoryQuery(tenant="red' OR '1'='1"), []),
            (HistoryQuery(outcome="passed"), [7, 2]),
            (HistoryQuery(outcome="failed"), [3]),
            (HistoryQuery(outcome="ok"), [4]),
            (HistoryQuery(outcome="granted"), [1]),
            (HistoryQuery(outcome="refused"), [5]),
            (HistoryQuery(outcome="1"), []),
            (HistoryQuery(tenant="red", device=OTHER_GPU), [6]),
            (HistoryQuery(tenant="red", outcome="granted"), [1]),
            (HistoryQuery(tenant="blue", outcome="granted"), []),
            (HistoryQuery(outcome="passed", since=3.0), [7]),
            (HistoryQuery(outcome="passed", limit=1), [7]),
            (HistoryQuery(device=GPU, outcome="passed", since=1.0, limit=5), [7, 2]),
            (HistoryQuery(events=("reset.finished",)), [4]),
            (HistoryQuery(events=("reset.finished", "device.adopted")), [6, 4]),
            (HistoryQuery(events=("handover.", "odd.event")), [8, 5, 1]),
            (HistoryQuery(events=("scrub.",), outcome="passed"), [7, 2]),
            (HistoryQuery(events=("scrub.",), outcome="passed", before=7), [2]),
            (HistoryQuery(events=("scrub.",), device=OTHER_GPU, tenant="red"), []),
            (HistoryQuery(events=("scrub",)), []),
            (HistoryQuery(events=("finished",)), []),
            (HistoryQuery(events=("ub.",)), []),
            (HistoryQuery(events=("%.", "*.", "_crub.")), []),
            (HistoryQuery(events=("odd.event' OR '1'='1", "') OR ('1'='1.")), []),
            (HistoryQuery(before=3), [2, 1]),
            (HistoryQuery(before=3, limit=1), [2]),
            (HistoryQuery(before=1), []),
            (HistoryQuery(before=9, limit=1), [8]),
        ],
        ids=str,
    )
    async def test_history_is_filtered_by_the_query(
        self, bench: Bench, query: HistoryQuery, sequences: list[int]
    ) -> None:
        ledger, _ = await bench.start()
        await ledger.commit(LedgerChange(events=EVENTS))
        assert await found(ledger, query) == sequences

    async def test_rare_event_is_found_however_old(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        await ledger.commit(LedgerChange(events=EVENTS[:2]))
        await grow(ledger, 2 * VISIT + 7)
        await ledger.commit(LedgerChange(events=EVENTS[6:7]))
        newest = ledger.head().sequence
        assert await found(ledger, HistoryQuery(outcome="passed")) == [newest, 2]
        assert await found(ledger, HistoryQuery(outcome="passed", device=GPU, limit=2)) == [newest, 2]
        assert await found(ledger, HistoryQuery(tenant="red")) == [1]
        assert await found(ledger, HistoryQuery(tenant="unknown")) == []
        assert await found(ledger, HistoryQuery(events=("handover.",))) == [1]
        assert await found(ledger, HistoryQuery(outcome="passed", before=newest)) == [2]

    async def test_history_pages_contain_each_row_exactly_once(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        await grow(ledger, 2 * VISIT + 7)
        read, before = [], None
        while page := await found(ledger, HistoryQuery(limit=999, before=before)):
            read += page
            before = page[-1]
            await grow(ledger, 1)  # rows added meanwhile do not move the page
        assert read == [*range(2 * VISIT + 7, 0, -1)]

    async def test_history_before_a_row_that_does_not_exist_is_refused(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        assert await found(ledger, HistoryQuery(before=1)) == []
        await ledger.commit(LedgerChange(events=EVENTS))
        with pytest.raises(InvalidRequest, match="ends at row 8: there is no row 10 to start before"):
            await ledger.history(HistoryQuery(before=10))
        with pytest.raises(InvalidRequest, match="there is no row 18446744073709551615"):
            await ledger.history(HistoryQuery(before=2**64 - 1))

    @pytest.mark.parametrize("rows", [VISIT - 1, VISIT, VISIT + 1, 2 * VISIT])
    async def test_oldest_row_is_found_at_any_batch_boundary(self, bench: Bench, rows: int) -> None:
        ledger, _ = await bench.start()
        await ledger.commit(LedgerChange(events=EVENTS[:1]))
        await grow(ledger, rows - 1)
        assert await found(ledger, HistoryQuery(tenant="red")) == [1]
        assert len(await found(ledger, HistoryQuery(limit=ROWS))) == rows

    async def test_commit_does_not_wait_for_a_long_history_query(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        await grow(ledger, 8 * VISIT)
        looking = asyncio.create_task(ledger.history(HistoryQuery(since=1e9)))
        await asyncio.sleep(0)
        await ledger.commit(LedgerChange(events=(event(at=2e9),)))
        if isinstance(ledger, SqliteLedger):
            assert not looking.done(), "the change was stored between two parts of the look"
        assert list(await looking) == [], "it is a look at what was there when it came by"


class TestAuditLogPages:
    async def test_empty_audit_log_is_one_empty_page(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        assert [page async for page in ledger.pages()] == [AuditLogPage(CHAIN_START, CHAIN_START)]

    async def test_audit_log_pages_are_bounded_and_oldest_first(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        await grow(ledger, 2 * PAGE + 3)
        read, rows = await whole(ledger)
        assert [len(page.rows) for page in read] == [PAGE, PAGE, 3]
        assert {(page.preceding_head, page.head) for page in read} == {(CHAIN_START, ledger.head())}
        report = verify_chain(rows, CHAIN_START, ledger.head())
        assert (report.intact, report.rows) == (True, 2 * PAGE + 3)

    @pytest.mark.parametrize(("rows", "expected"), [(PAGE, [PAGE]), (PAGE + 1, [PAGE, 1])])
    async def test_audit_log_has_no_empty_last_page(self, bench: Bench, rows: int, expected: list[int]) -> None:
        ledger, _ = await bench.start()
        await grow(ledger, rows)
        read, _ = await whole(ledger)
        assert [len(page.rows) for page in read] == expected

    async def test_page_that_starts_later_names_the_head_before_its_first_row(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        await grow(ledger, 10)
        _, everything = await whole(ledger)
        (page,), rows = await whole(ledger, after=4)
        assert page.preceding_head == everything[3].head
        assert rows == everything[4:]
        assert verify_chain(rows, page.preceding_head, page.head).intact
        (page,), rows = await whole(ledger, after=10)
        assert (page.preceding_head, page.head, rows) == (ledger.head(), ledger.head(), [])

    async def test_page_after_a_row_beyond_the_end_is_refused(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        await grow(ledger, 10)
        with pytest.raises(InvalidRequest, match="ends at row 10: there is no row 11"):
            await whole(ledger, after=11)

    async def test_rows_written_while_paging_are_not_included(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        await grow(ledger, PAGE + 1)
        reading = ledger.pages()
        first = await anext(reading)
        await grow(ledger, 5)
        rest = [page async for page in reading]
        assert [row.sequence for page in rest for row in page.rows] == [PAGE + 1]
        assert {page.head for page in rest} == {first.head}

    async def test_slow_page_reader_does_not_block_commits(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        await grow(ledger, PAGE + 1)
        reading = ledger.pages()
        await anext(reading)
        await ledger.commit(LedgerChange(records=(record(1),), events=(event(),)))
        assert ledger.head().sequence == PAGE + 2
        assert await anext(reading)

    async def test_closed_ledger_reports_that_it_is_closed(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        await ledger.close()
        with pytest.raises(LedgerFailure):
            await whole(ledger)


@pytest.fixture(params=KINDS)
async def short(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    made = bench_of(request.param, tmp_path / "ledger", PAGE + 100)
    yield made
    await made.end()


class TestPagesOfAPrunedAuditLog:
    async def test_pruned_audit_log_starts_after_the_pruned_rows(self, short: Bench) -> None:
        ledger, _ = await short.start()
        await grow(ledger, PAGE)
        await grow(ledger, 200)
        read, rows = await whole(ledger)
        pruned = read[0].preceding_head
        assert pruned.sequence > 0
        assert rows[0].sequence == pruned.sequence + 1
        assert verify_chain(rows, pruned, ledger.head()).intact
        assert await whole(ledger, after=1) == (read, rows), "what was given up cannot be left out once more"

    async def test_rows_pruned_while_paging_are_reported_not_skipped(self, short: Bench) -> None:
        ledger, _ = await short.start()
        await grow(ledger, PAGE + 50)
        reading = ledger.pages()
        await anext(reading)
        await grow(ledger, PAGE + 50)
        await grow(ledger, PAGE + 50)
        with pytest.raises(NotReady, match=rf"Audit rows {PAGE + 1} to \d+ were pruned while .*; retry"):
            await anext(reading)
        assert await whole(ledger)

    async def test_rows_pruned_after_being_read_do_not_disturb_paging(self, short: Bench) -> None:
        ledger, _ = await short.start()
        await grow(ledger, PAGE + 50)
        reading = ledger.pages()
        await anext(reading)
        await grow(ledger, 100)
        (page,) = [page async for page in reading]
        assert [row.sequence for row in page.rows] == list(range(PAGE + 1, PAGE + 51))

    async def test_rows_pruned_after_the_last_page_do_not_matter(self, short: Bench) -> None:
        ledger, _ = await short.start()
        await grow(ledger, PAGE)
        reading = ledger.pages()
        await anext(reading)
        for _ in range(3):
            await grow(ledger, PAGE)
        assert [page async for page in reading] == []


class TestSqliteLedgerPages:
    async def test_page_of_long_rows_has_fewer_rows(self, tmp_path: Path) -> None:
        ledger = SqliteLedger(tmp_path / "ledger")
        await ledger.load()
        await ledger.commit(LedgerChange(events=tuple(event(message="x" * 30_000) for _ in range(100))))
        read = [page async for page in ledger.pages()]
        await ledger.close()
        assert sum(len(page.rows) for page in read) == 100
        assert max(sum(len(row.fields) for row in page.rows) for page in read) < 2 * 1024 * 1024

    async def test_audit_log_of_a_stopped_service_reads_the_same(self, tmp_path: Path) -> None:
        home = tmp_path / "ledger"
        await fill(home, commits=12)
        offline = list(read_pages(home))
        ledger = SqliteLedger(home)
        await ledger.load()
        assert [page async for page in ledger.pages()] == offline
        assert len(offline[0].rows) == 12
        with pytest.raises(AlreadyRunning, match="query that service, stop it first, or use a copy"):
            list(read_pages(home))
        await ledger.close()
        with pytest.raises(InvalidRequest):
            list(read_pages(home, after=13))

    async def test_pages_show_a_row_that_was_changed_in_the_file_after_it_was_read(self, tmp_path: Path) -> None:
        """Otherwise an auditor would get what the service once read."""
        home = tmp_path / "ledger"
        earlier = SqliteLedger(home)
        await earlier.load()
        await earlier.commit(LedgerChange(events=(event(message="as it was"),)))
        await earlier.close()
        ledger = SqliteLedger(home)
        await ledger.load()
        before = [page async for page in ledger.pages()]
        file = home / "ledger.db"
        content = file.read_bytes()
        assert b"as it was" in content
        with file.open("r+b") as changed:
            changed.seek(content.index(b"as it was"))
            changed.write(b"not so at")
        after = [page async for page in ledger.pages()]
        await ledger.close()
        assert "as it was" in before[0].rows[0].fields
        assert "not so at" in after[0].rows[0].fields

    async def test_audit_log_includes_the_write_ahead_log_of_a_killed_service(self, tmp_path: Path) -> None:
        home, copy = tmp_path / "ledger", tmp_path / "copy"
        ledger = SqliteLedger(home)
        await ledger.load()
        await ledger.commit(LedgerChange(events=tuple(event(number=number) for number in range(7))))
        shutil.copytree(home, copy)  # the files at this moment, as a kill would leave them
        await ledger.close()
        assert (copy / "ledger.db-wal").stat().st_size > 0
        (page,) = read_pages(copy)
        assert (len(page.rows), page.head) == (7, ledger.head())


class TestAuditHead:
    async def test_audit_head_is_the_last_committed_row(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        assert ledger.head() == CHAIN_START
        await grow(ledger, 3)
        (newest,) = await ledger.history(HistoryQuery(limit=1))
        assert ledger.head() == AuditHead(3, newest.hash)
        await ledger.commit(LedgerChange(records=(record(1),)))
        assert ledger.head().sequence == 3

    async def test_failed_commit_does_not_move_the_audit_head(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        await grow(ledger, 3)
        before = ledger.head()
        with pytest.raises(LedgerFailure):
            await ledger.commit(LedgerChange(records=(record(7),), events=(event(),)))
        assert ledger.head() == before

    async def test_next_service_starts_with_the_stored_audit_head(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        await grow(ledger, 3)
        following, state = await bench.start()
        assert following.head() == ledger.head() == AuditHead(state.head_sequence, state.head_hash)


class TestCertificates:
    async def test_certificate_is_found_by_its_id_as_last_stored(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        issued, used = certificate("C-1"), certificate("C-1", next_grant=4)
        await ledger.commit(LedgerChange(records=(record(1),), certificates=(issued, certificate("C-2"))))
        assert await ledger.certificate("C-1") == issued
        await ledger.commit(LedgerChange(certificates=(used,), events=(Event("handover.granted", 1.0, GPU),)))
        assert await ledger.certificate("C-1") == used

    @pytest.mark.parametrize("name", ["C-9", "", "C", "%", "c-1"])
    async def test_unknown_certificate_id_returns_none(self, bench: Bench, name: str) -> None:
        ledger, _ = await bench.start()
        await ledger.commit(LedgerChange(records=(record(1),), certificates=(certificate("C-1"),)))
        assert await ledger.certificate(name) is None
