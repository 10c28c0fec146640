"""The fast path queries the kernel about one file and one cgroup; it never walks all of /proc.

Nothing is timed: the interpreter reports each directory that the service and its children list.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scrubber.emulator.playground import Playground, gpu_pod_spec, tenant_argv
from scrubber.emulator.pods import RestartPolicy
from tests.integration.acting import QUICK, SOON, history, restarted, running, seen_to_run, writer
from tests.integration.listing_witness import environment, listings
from tests.pods import CGROUP2

IDENTITIES = ["cgroup"] if CGROUP2 is not None else []
if not IDENTITIES:
    print(
        "NOT TESTED HERE: that the fast path walks no /proc (writing to cgroups is not permitted)", file=sys.__stderr__
    )


@pytest.mark.parametrize("identity", IDENTITIES)
async def test_restarts_and_certified_starts_do_not_list_proc(tmp_path: Path, identity: str) -> None:
    async with Playground(devices=2, memory="2MiB", policy=QUICK) as stage:
        stage.service.environment = environment(tmp_path)
        await stage.start_daemons(SOON)
        await stage.wait_until_clean(SOON)

        argv = tenant_argv("--write", "a", "--hold", "forever")
        attempts = 0
        while not attempts or (attempts < MOST_ATTEMPTS and not all(map(any, starts_without_a_walk(stage, tmp_path)))):
            spec = gpu_pod_spec(f"restarts-{attempts}", "team-a", argv, restart=RestartPolicy.ALWAYS)
            pod = await running(stage, spec)
            for number in range(3):
                await seen_to_run(stage)
                await restarted(pod)
                next_one = await running(stage, writer(f"p{attempts}-{number}", "team-b"))
                await stage.kubelet.delete(next_one, grace=0)
                await stage.wait_until_clean(SOON)
            await stage.kubelet.delete(pod, grace=0)
            attempts += 1

        granted = await history(stage, "handover.granted")
        again = [row["exception"] for row in granted if row["pod"].startswith("restarts")]
        assert again == [None, *["same-container"] * 3] * attempts
        certified = [row["exception"] for row in granted if not row["pod"].startswith("restarts")]
        assert certified == [None] * 3 * attempts
        watched, _ = listings(tmp_path)
        assert stage.service.pid in watched
        assert watched & set(
            stage.child_processes(stage.service)
        )  # a process that has just started may not have reported yet
        for starts in starts_without_a_walk(stage, tmp_path):
            assert len(starts) == 3 * attempts
            assert any(starts)


MOST_ATTEMPTS = 10
"""On a simulated node the usage check walks about once a second, also during a start; a start that walks always does."""


def starts_without_a_walk(stage: Playground, directory: Path) -> tuple[list[bool], list[bool]]:
    """Return whether no process listed /proc during each restart, and during each start of another pod."""
    _, walks = listings(directory)
    restarts: list[bool] = []
    others: list[bool] = []
    known: set[str] = set()
    for each in stage.kubelet.events:
        if (each.name, each.outcome) == ("PreStartContainer", "OK"):
            quiet = all(not each.at <= at <= each.at + each.duration for _, at in walks)
            if not each.pod.startswith("team-a/"):
                others.append(quiet)
            elif each.pod in known:
                restarts.append(quiet)
            known.add(each.pod)
    return restarts, others


@pytest.mark.parametrize("identity", IDENTITIES)
async def test_proc_listing_hook_detects_the_walk_of_a_slow_scrub(tmp_path: Path, identity: str) -> None:
    """Without a working hook, the test above would prove nothing."""
    async with Playground(devices=1, memory="2MiB", policy=QUICK) as stage:
        stage.service.environment = environment(tmp_path)
        await stage.start_daemons(SOON)
        await stage.wait_until_clean(SOON)
        with (stage.sim_dir / "devices" / "0" / "memory").open("rb"):
            scrub = await stage.run_command("scrub", "0", "--path", "slow", "--wait", "-o", "json")
        assert scrub.returncode != 0
        watched, walks = listings(tmp_path)
        walkers = {pid for pid, _ in walks}
        assert walkers
        assert walkers <= watched
        assert stage.service.pid not in walkers, "a walk can hang, so a child does it"
