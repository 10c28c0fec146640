"""Contract of every ledger, tested on the one on disk and the one in memory."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber.adapters.ledger.memory import MemoryLedger
from scrubber.domain.agent_pause import AgentPause, AgentPauseRecord, LabelChange, PauseWay
from scrubber.domain.errors import LedgerFailure
from scrubber.domain.node_record import NodeRecord, YieldRequest, YieldRequester
from scrubber.domain.states import Cause, Health, Hygiene, RecoveryMethod
from scrubber.ports.record import Event, HistoryQuery, LedgerChange, LedgerState
from tests.adapters.ledger_bench import KINDS, Bench, bench_of
from tests.ledger_samples import GPU, OTHER_GPU, certificate, event, grant, record, scrub

ROWS = 40


@pytest.fixture(params=KINDS)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    made = bench_of(request.param, tmp_path / "ledger", ROWS)
    yield made
    await made.end()


class TestEveryLedger:
    async def test_new_ledger_is_empty(self, bench: Bench) -> None:
        ledger, state = await bench.start()
        assert state == LedgerState()
        assert list(await ledger.history(HistoryQuery())) == []
        assert ledger.health() == "ok"

    async def test_next_service_loads_what_was_committed(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        cause = Cause("xid-95", "XID 95 was reported.", RecoveryMethod.RESET, 99.5, "uid:0")
        first = record(
            1,
            hygiene=Hygiene.IN_USE,
            health=Health.QUARANTINED,
            cause=cause,
            last_grant=grant(1),
            open_grants=(grant(1),),
            retry_at=123.5,
            must_reset=True,
        )
        second = record(1, OTHER_GPU, certificate=certificate("C-1", device=OTHER_GPU), exclusive_use=True)
        await ledger.commit(
            LedgerChange(
                records=(first, second),
                grants=((GPU, grant(1)),),
                certificates=(certificate("C-1", device=OTHER_GPU),),
                scrubs=(scrub("S-1"), scrub("S-2", finished=False, device=OTHER_GPU)),
                events=(event(), event("service.started", device=None)),
            )
        )
        _, state = await bench.start()
        assert state.records == {GPU: first, OTHER_GPU: second}
        assert state.unfinished_scrubs == (scrub("S-2", finished=False, device=OTHER_GPU),)
        assert state.head_sequence == 2

    async def test_requests_to_yield_the_node_are_loaded_until_they_are_withdrawn(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        requested = NodeRecord((YieldRequest(YieldRequester.OPERATOR, "driver upgrade", "uid:0", 99.5),))
        await ledger.commit(LedgerChange(node=requested))
        await ledger.commit(LedgerChange(events=(event(),)))
        ledger, state = await bench.start()
        assert state.node == requested
        overridden = NodeRecord(overridden=(("plugin of nvidia.com/gpu", "label is paused"),))
        await ledger.commit(LedgerChange(node=overridden))
        _, state = await bench.start()
        assert state.node == overridden

    async def test_pause_of_agents_is_loaded_until_it_is_over(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        changes = (LabelChange("a", None, "false"), LabelChange("b", "true", "false"))
        pause = AgentPauseRecord(AgentPause("pause-1", PauseWay.LABELS, (GPU,), 99.5, False, changes))
        await ledger.commit(LedgerChange(agent_pause=pause))
        await ledger.commit(
            LedgerChange(node=NodeRecord(overridden=(("plugin", "why"),))) | LedgerChange(events=(event(),))
        )
        ledger, state = await bench.start()
        assert state.agent_pause == pause
        await ledger.commit(LedgerChange(agent_pause=AgentPauseRecord()) | LedgerChange())
        _, state = await bench.start()
        assert state.agent_pause == AgentPauseRecord()

    async def test_finished_scrub_is_no_longer_under_way(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        await ledger.commit(LedgerChange(records=(record(1),), scrubs=(scrub("S-1", finished=False),)))
        await ledger.commit(LedgerChange(scrubs=(scrub("S-1"),)))
        _, state = await bench.start()
        assert state.unfinished_scrubs == ()

    @pytest.mark.parametrize(
        "flawed",
        [
            LedgerChange(records=(record(3, OTHER_GPU),)),
            LedgerChange(grants=((GPU, grant(1)),)),
            LedgerChange(certificates=(certificate("C-used", next_grant=2),)),
            LedgerChange(scrubs=(scrub("S-9", device="GPU-unknown"),)),
            LedgerChange(certificates=(certificate("C-9", device="GPU-unknown"),)),
            LedgerChange(grants=(("GPU-unknown", grant(1)),)),
            LedgerChange(events=(event(at=float("nan")),)),
            LedgerChange(events=(event(share=[1, 2]),)),
        ],
        ids=[
            "version skipped",
            "grant repeated",
            "certificate used twice",
            "scrub of no device",
            "certificate of no device",
            "grant of no device",
            "no time",
            "not a scalar",
        ],
    )
    async def test_ledger_change_is_stored_whole_or_not_at_all(self, bench: Bench, flawed: LedgerChange) -> None:
        ledger, _ = await bench.start()
        await ledger.commit(
            LedgerChange(
                records=(record(1),),
                grants=((GPU, grant(1)),),
                certificates=(certificate("C-used", next_grant=1),),
                events=(event(certificate="C-used"),),
            )
        )
        sound = LedgerChange(
            records=(record(2, hygiene=Hygiene.IN_USE),),
            grants=((GPU, grant(2)),),
            scrubs=(scrub("S-2", finished=False),),
            events=(event("handover.granted"),),
        )
        with pytest.raises(LedgerFailure):
            await ledger.commit(sound | flawed)
        (only,) = await ledger.history(HistoryQuery())
        assert only.certificate == certificate("C-used", next_grant=1)
        ledger, state = await bench.start()
        assert state.records == {GPU: record(1)}
        assert state.unfinished_scrubs == ()
        await ledger.commit(sound)

    @pytest.mark.parametrize("version", [0, 1, 3, 4])
    async def test_record_must_follow_the_stored_version_by_one(self, bench: Bench, version: int) -> None:
        ledger, _ = await bench.start()
        await ledger.commit(LedgerChange(records=(record(1),)))
        with pytest.raises(LedgerFailure, match=f"version {version}, but the ledger has 1"):
            await ledger.commit(LedgerChange(records=(record(version),)))

    async def test_one_change_may_advance_a_device_by_several_versions(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        await ledger.commit(
            LedgerChange(records=(record(1), record(2))) | LedgerChange(records=(record(3, failures=1),))
        )
        _, state = await bench.start()
        assert state.records == {GPU: record(3, failures=1)}

    async def test_certificate_is_issued_and_then_consumed_once(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        await ledger.commit(LedgerChange(records=(record(1),), certificates=(certificate("C-1"),)))
        used = certificate("C-1", next_grant=1)
        await ledger.commit(LedgerChange(certificates=(used,), events=(event("handover.granted", certificate="C-1"),)))
        for again in (certificate("C-1"), certificate("C-1", next_grant=2)):
            with pytest.raises(LedgerFailure, match="C-1, which was already used"):
                await ledger.commit(LedgerChange(certificates=(again,)))
        await ledger.commit(LedgerChange(certificates=(used,)))
        (entry,) = await ledger.history(HistoryQuery())
        assert entry.certificate == used

    async def test_history_is_newest_first_with_the_objects_each_event_names(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        ended = Event("scrub.finished", 100.0, GPU, "S-1", "uid:7", {"outcome": "passed", "seconds": 0.5})
        issued = event("certificate.issued", certificate="C-S-1")
        await ledger.commit(LedgerChange(events=(event("service.started", device=None),)))
        await ledger.commit(
            LedgerChange(
                records=(record(1),),
                scrubs=(scrub("S-1"),),
                certificates=(certificate("C-S-1"),),
                events=(ended, issued),
            )
        )
        entries = await ledger.history(HistoryQuery())
        assert [entry.sequence for entry in entries] == [3, 2, 1]
        assert [entry.event for entry in entries] == [issued, ended, event("service.started", device=None)]
        assert [entry.scrub for entry in entries] == [None, scrub("S-1"), None]
        assert [entry.certificate for entry in entries] == [certificate("C-S-1"), None, None]
        _, state = await bench.start()
        assert (state.head_sequence, state.head_hash) == (entries[0].sequence, entries[0].hash)

    async def test_history_can_be_filtered(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        devices = (GPU, OTHER_GPU, GPU, None)
        await ledger.commit(
            LedgerChange(events=tuple(event(at=float(at), device=each) for at, each in enumerate(devices)))
        )

        async def found(query: HistoryQuery) -> list[int]:
            return [entry.sequence for entry in await ledger.history(query)]

        assert await found(HistoryQuery(device=GPU)) == [3, 1]
        assert await found(HistoryQuery(since=1.0)) == [4, 3, 2]
        assert await found(HistoryQuery(device=GPU, since=1.0)) == [3]
        assert await found(HistoryQuery(limit=2)) == [4, 3]
        assert await found(HistoryQuery(limit=0)) == []
        assert await found(HistoryQuery(device="GPU-unknown")) == []

    async def test_concurrent_commits_are_all_stored(self, bench: Bench) -> None:
        ledger, _ = await bench.start()

        async def keeper(device: str) -> None:
            for version in range(1, 5):
                await ledger.commit(LedgerChange(records=(record(version, device),), events=(event(device=device),)))

        await asyncio.gather(*(keeper(f"GPU-{number}") for number in range(8)))
        _, state = await bench.start()
        assert {each.version for each in state.records.values()} == {4}
        assert len(state.records) == 8
        assert state.head_sequence == 32

    async def test_ledger_health_is_the_last_failure_until_a_change_is_stored(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        with pytest.raises(LedgerFailure) as failure:
            await ledger.commit(LedgerChange(records=(record(7),)))
        assert ledger.health() == str(failure.value)
        await ledger.commit(LedgerChange(records=(record(1),)))
        assert ledger.health() == "ok"

    async def test_closed_ledger_refuses_commits(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        await ledger.close()
        await ledger.close()
        with pytest.raises(LedgerFailure):
            await ledger.commit(LedgerChange(records=(record(1),)))
        _, state = await bench.start()
        assert state == LedgerState()

    async def test_audit_log_stays_within_its_bound_and_intact(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        for number in range(3 * ROWS):
            await ledger.commit(LedgerChange(events=(event(number=number), event(number=number))))
            assert len(await ledger.history(HistoryQuery(limit=10_000))) <= ROWS
        ledger, state = await bench.start()
        assert state.head_sequence == 6 * ROWS
        kept = await ledger.history(HistoryQuery(limit=10_000))
        assert len(kept) >= ROWS // 2
        assert [entry.sequence for entry in kept] == list(range(6 * ROWS, 6 * ROWS - len(kept), -1))

    async def test_current_records_grants_and_certificates_are_never_pruned(self, bench: Bench) -> None:
        ledger, _ = await bench.start()
        unused, used, void = certificate("C-unused"), certificate("C-used", next_grant=1), certificate("C-void")
        current = record(1, certificate=unused, open_grants=(grant(1, "C-used"),), last_grant=grant(1, "C-used"))
        await ledger.commit(
            LedgerChange(
                records=(current,),
                grants=((GPU, grant(1, "C-used")),),
                certificates=(unused, used, void),
                scrubs=(scrub("S-1", finished=False), scrub("S-old")),
                events=(event(),),
            )
        )
        for _ in range(2 * ROWS):
            await ledger.commit(LedgerChange(events=(event(),)))
        ledger, state = await bench.start()
        assert state.records == {GPU: current}
        assert state.unfinished_scrubs == (scrub("S-1", finished=False),)
        names = ("C-unused", "C-used", "C-void")
        await ledger.commit(
            LedgerChange(
                events=(*(event(certificate=name) for name in names), Event("scrub.finished", 1.0, GPU, "S-old"))
            )
        )
        entries = list(reversed(await ledger.history(HistoryQuery(limit=4))))
        assert [entry.certificate for entry in entries[:3]] == [unused, used, None]
        assert entries[3].scrub is None
        with pytest.raises(LedgerFailure):
            await ledger.commit(LedgerChange(grants=((GPU, grant(1, "C-used")),)))


class Crash(BaseException):
    """The service dies here."""


class TestMemoryLedger:
    async def test_crash_before_the_commit_leaves_no_change(self) -> None:
        def crash(change: LedgerChange) -> None:
            if change.records:
                raise Crash

        ledger = MemoryLedger(before_commit=crash)
        await ledger.load()
        with pytest.raises(Crash):
            await ledger.commit(LedgerChange(records=(record(1),), events=(event(),)))
        assert await ledger.successor().load() == LedgerState()

    async def test_crash_after_the_commit_leaves_the_whole_change(self) -> None:
        def crash(_: LedgerChange) -> None:
            raise Crash

        ledger = MemoryLedger(after_commit=crash)
        await ledger.load()
        with pytest.raises(Crash):
            await ledger.commit(LedgerChange(records=(record(1),), events=(event(),)))
        assert (await ledger.successor().load()).records == {GPU: record(1)}

    async def test_storage_failure_can_be_simulated_and_lifted(self) -> None:
        def fail(_: LedgerChange) -> None:
            raise LedgerFailure("No space left.")

        ledger = MemoryLedger(before_commit=fail)
        await ledger.load()
        with pytest.raises(LedgerFailure):
            await ledger.commit(LedgerChange(records=(record(1),)))
        assert ledger.health() == "No space left."
        ledger.before_commit = None
        await ledger.commit(LedgerChange(records=(record(1),)))
        assert ledger.health() == "ok"

    async def test_replaced_service_can_no_longer_commit(self) -> None:
        old = MemoryLedger()
        await old.load()
        new = old.successor()
        await new.load()
        with pytest.raises(LedgerFailure):
            await old.commit(LedgerChange(records=(record(1),)))
        assert (await new.successor().load()).records == {}
