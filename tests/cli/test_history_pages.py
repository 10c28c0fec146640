"""``scrubber history`` from the command line to the disk: the service's own sockets before a ledger of many rows."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.api.server import serve
from scrubber.api.sockets import Sockets
from scrubber.domain.errors import LedgerFailure
from scrubber.ports.record import HistoryEntry, HistoryQuery, LedgerChange
from tests.api.service import FakeNode
from tests.cli.stage import Ended, run
from tests.ledger_samples import event

ROWS = 4_500
"""More than four pages, and than two reads of the ledger."""


class _Remembering(FakeNode):
    """A node whose history is on disk; the row ``damaged`` of it cannot be read."""

    def __init__(self, ledger: SqliteLedger) -> None:
        super().__init__()
        self._stored = ledger
        self.damaged: int | None = None

    async def history(self, query: HistoryQuery) -> Sequence[HistoryEntry]:
        self.requests.append(query)
        found = await self._stored.history(query)
        if any(each.sequence == self.damaged for each in found):
            raise LedgerFailure(f"Row {self.damaged} is damaged.")
        return found


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[_Remembering]:
    ledger = SqliteLedger(short_tmp / "ledger")
    await ledger.load()
    first = (event("health.quarantined", at=1.0, cause="xid-95"), event("break-glass.started", at=2.0), event(at=3.0))
    await ledger.commit(
        LedgerChange(events=(*first, *(event(at=100.0) for _ in range(ROWS - 4)), event("break-glass.ended")))
    )
    node = _Remembering(ledger)
    async with serve(node, Sockets(short_tmp / "s"), grace=0):
        yield node
    await ledger.close()


def sequences(ended: Ended) -> list[int]:
    assert (ended.code, ended.err) == (0, "")
    return [each["sequence"] for each in ended.items]


async def test_all_option_returns_every_row_once_in_bounded_requests(node: _Remembering, short_tmp: Path) -> None:
    ended = await run(short_tmp / "s", "history", "--all", "-o", "json")
    assert sequences(ended) == [*range(ROWS, 0, -1)]
    assert ended.json["metadata"]["continue"] is None
    assert [each.limit for each in node.requests if isinstance(each, HistoryQuery)] == [1001] * 5


async def test_next_page_commands_lead_to_the_end_of_the_audit_log(node: _Remembering, short_tmp: Path) -> None:
    words, seen = ["history", "--limit", "2000", "-o", "wide"], 0
    while words:
        ended = await run(short_tmp / "s", *words)
        rows = ended.out.splitlines()[1:]
        assert [int(row.split()[0]) for row in rows] == [*range(ROWS - seen, ROWS - seen - len(rows), -1)]
        seen += len(rows)
        words = shlex.split(ended.err.splitlines()[1])[1:] if ended.err else []
    assert seen == ROWS


async def test_damaged_row_after_a_page_does_not_fail_that_page(node: _Remembering, short_tmp: Path) -> None:
    node.damaged = ROWS - 2
    ended = await run(short_tmp / "s", "history", "--limit", "2", "-o", "json")
    assert (sequences(ended), ended.json["metadata"]["continue"]) == ([ROWS, ROWS - 1], ROWS - 1)
    older = await run(short_tmp / "s", "history", "--limit", "2", "--before", str(ROWS - 1), "-o", "json")
    assert older == Ended(1, "", f"Error: Row {ROWS - 2} is damaged.\n")


async def test_rare_event_is_found_and_the_result_is_known_to_be_complete(node: _Remembering, short_tmp: Path) -> None:
    ended = await run(
        short_tmp / "s", "history", "--event", "break-glass.", "--event", "health.quarantined", "-o", "json"
    )
    assert (sequences(ended), ended.json["metadata"]["continue"]) == ([ROWS, 2, 1], None)
    ended = await run(short_tmp / "s", "history", "--event", "break-glass.", "--limit", "1", "-o", "json")
    assert (sequences(ended), ended.json["metadata"]["continue"]) == ([ROWS], ROWS)
    assert sequences(
        await run(short_tmp / "s", "history", "--event", "break-glass.", "--before", str(ROWS), "-o", "json")
    ) == [2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--event", "break-glass.shattered"),
            (
                'The audit log has no event "break-glass.shattered". Similar events: break-glass.ended, break-glass.started. '
                '"break-glass." selects all of them.'
            ),
        ),
        (
            ("--before", str(ROWS + 2)),
            f"The audit log ends at row {ROWS}: there is no row {ROWS + 2} to start before.",
        ),
        (("--before", "9" * 30), f"The audit log ends at row {ROWS}: there is no row {2**64 - 1} to start before."),
    ],
)
async def test_unsupported_history_filter_is_refused_with_the_supported_ones(
    node: _Remembering, short_tmp: Path, words: tuple[str, ...], message: str
) -> None:
    assert await run(short_tmp / "s", "history", *words) == Ended(2, "", f"Error: {message}\n")
