"""The fast path asks the kernel about one file and one cgroup. It never walks all of /proc, whatever runs on the node.

Nothing is timed: the interpreter itself tells of each directory that the service and its children list.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from plugin.emulator.pods import RestartPolicy
from plugin.emulator.stage import Stage, gpu_pod, tenant
from tests.integration.acting import QUICK, SOON, history, running, writer
from tests.integration.listing_witness import environment, listings
from tests.pods import CGROUP2

IDENTITIES = ["cgroup"] if CGROUP2 is not None else []
if not IDENTITIES:
    print("NOT TESTED HERE: that the fast path walks no /proc (nobody may write cgroups)", file=sys.__stderr__)


@pytest.mark.parametrize("identity", IDENTITIES)
async def test_restarts_and_certified_starts_list_no_proc(tmp_path: Path, identity: str) -> None:
    async with Stage(devices=2, memory="2MiB", policy=QUICK) as stage:
        stage.service.environment = environment(tmp_path)
        await stage.start_daemons(SOON)
        await stage.all_clean(SOON)

        argv = tenant("--write", "a", "--hold", "0.05")
        pod = await stage.kubelet.run(gpu_pod("restarts", "team-a", argv, restart=RestartPolicy.ALWAYS))
        await pod.wait(lambda status: status.containers["main"].restarts >= 3, SOON)
        for number in range(3):
            next_one = await running(stage, writer(f"p{number}", "team-b"))
            await stage.kubelet.delete(next_one, grace=0)
            await stage.all_clean(SOON)

        granted = await history(stage, "handover.granted")
        assert sum(row["exception"] == "same-container" for row in granted) >= 3
        assert sum(row["exception"] is None for row in granted) >= 3
        watched, walks = listings(tmp_path)
        assert {stage.service.pid, *stage.children_of(stage.service)} <= watched
        assert walks == []


@pytest.mark.parametrize("identity", IDENTITIES)
async def test_the_walk_is_seen_where_there_is_one(tmp_path: Path, identity: str) -> None:
    """The test above would be worth nothing if the hook were deaf."""
    async with Stage(devices=1, memory="2MiB", policy=QUICK) as stage:
        stage.service.environment = environment(tmp_path)
        await stage.start_daemons(SOON)
        await stage.all_clean(SOON)
        with (stage.sim / "devices" / "0" / "memory").open("rb"):
            scrub = await stage.command("scrub", "0", "--path", "slow", "--wait", "-o", "json")
        assert scrub.status != 0
        watched, walks = listings(tmp_path)
        assert walks
        assert set(walks) <= watched
        assert stage.service.pid not in walks, "a walk can hang, so a child does it"
