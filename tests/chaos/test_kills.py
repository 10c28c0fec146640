"""kill -9, a hundred times and more, of every process that may die, under pods that come and go.

The tenants are witnesses: each first reads its device, then writes its own text and watches it. Their reports, the
kubelet's events and the ledger must agree (:mod:`tests.chaos.verdict`).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

import pytest

from scrubber.adapters.ledger.offline import verify_ledger
from scrubber.adapters.sim import control
from scrubber.emulator.playground import RESOURCE
from tests.chaos import verdict
from tests.chaos.staging import SOON, chaos_stage
from tests.chaos.storm import STORM_LIMIT, Hand, Supervisor, Workload

KILLS = 105
LANES = 4


@pytest.fixture
def seed() -> int:
    """The seed of everything random in the test; ``CHAOS_SEED`` repeats a run as far as the machine allows."""
    return int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(10**9))


@pytest.mark.timeout(900)  # recovery from each of a hundred kills takes seconds on a busy machine
async def test_a_hundred_sigkills_leave_no_dirty_grant_no_damaged_tenant_and_no_gap_in_the_ledger(
    tmp_path: Path, seed: int
) -> None:
    print(f"CHAOS_SEED={seed}")
    rng = random.Random(seed)
    report = tmp_path / "report"
    async with chaos_stage(tmp_path) as stage:
        loop = asyncio.get_running_loop()
        wall = time.time() - loop.time()
        service, plugin = Supervisor(stage.service, rng), Supervisor(stage.plugin, rng)
        enough = asyncio.Event()
        workload, hand = Workload(stage, report, rng, enough), Hand(stage, service, plugin, rng)
        supervisors = [loop.create_task(service.run()), loop.create_task(plugin.run())]
        try:
            async with asyncio.TaskGroup() as storm:
                for _ in range(LANES):
                    storm.create_task(workload.run())
                await hand.run(KILLS)
                async with asyncio.timeout(STORM_LIMIT):
                    while workload.started <= 2 * LANES:  # noqa: ASYNC110 - on a slow machine kills delay the starts
                        await asyncio.sleep(0.05)
                enough.set()
            control.clear_faults(stage.sim_dir, None, ["slow-clear"])
            await hand.let_go()
            await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 4, SOON)
            await stage.wait_for_devices(
                lambda devices: len(devices) == 4 and all(each.state == "clean" for each in devices), SOON
            )
        finally:
            print(f"kills {dict(hand.kills)}, also {dict(hand.others)}; {workload.started} pods started")
            for each in supervisors:
                each.cancel()
            await asyncio.gather(*supervisors, return_exceptions=True)
            await hand.let_go()
        ends = [await stage.plugin.stop(SOON), await stage.service.stop(SOON)]
        chain = verify_ledger(stage.directory / "state")
        record = verdict.read_ledger(stage.directory / "state", tmp_path)
        events, reports = list(stage.kubelet.events), verdict.read_reports(report)

    assert verdict.dirty_starts(reports, events) == []
    assert verdict.bytes_that_were_touched(reports) == []
    assert workload.damaged == []
    assert chain.intact, chain.message
    assert (chain.pruned.sequence, chain.head.sequence) == (0, chain.rows)
    assert 1 < record.audit.count("service.started") <= service.lives
    assert verdict.starts_without_a_grant(events, record, wall=wall) == []
    assert verdict.certificates_that_do_not_carry_their_grant(record) == []
    assert set(service.deaths) | set(plugin.deaths) == {-9}, "nothing but a kill ends a daemon"
    assert ends == [0, 0]
    assert workload.started > 2 * LANES
    assert hand.kills.total() >= 100
