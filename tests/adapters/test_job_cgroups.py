"""The processes of jobs, in the cgroups of Slurm and of ``scrubber run``. Real cgroups, v2 and v1."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from scrubber.adapters.cgroups import CgroupContainers
from scrubber.domain.assignment import JobManager
from scrubber.domain.errors import Unreadable
from scrubber.domain.jobs import Job
from tests.pods import CGROUP1, CGROUP2, DEADLINE, CgroupGround, Node, new_pod, node_of, only_with

ALICE = Job(JobManager.SLURM, "4711", "alice", 1000)
RUN = Job(JobManager.RUN, "c0ffee", "alice", 1000)


def _slurm2() -> CgroupGround:
    assert CGROUP2 is not None
    return CgroupGround((CGROUP2,), kubepods="system.slice/slurmstepd.scope", pod_directory="job_4711")


def _slurm1() -> CgroupGround:
    assert CGROUP1 is not None
    return CgroupGround(CGROUP1, kubepods="slurm/uid_1000", pod_directory="job_4711")


GROUNDS = ([_slurm2] if CGROUP2 else []) + ([_slurm1] if CGROUP1 else [])
__test__ = bool(GROUNDS)


@pytest.fixture(params=GROUNDS, ids=lambda each: each.__name__.strip("_"))
async def slurm(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Node, CgroupContainers]]:
    ground = request.param()
    async with node_of(ground) as node:
        containers = ground.containers()
        yield node, containers
        containers.close()


async def test_job_is_the_processes_of_all_its_steps_and_nothing_else(slurm: tuple[Node, CgroupContainers]) -> None:
    node, containers = slurm
    first = await node.start(ALICE.pod, "step_0/user/task_0")
    second = await node.start(ALICE.pod, "step_extern/slurm")
    found = await containers.processes(ALICE.pod)
    assert {(each.pid, each.container) for each in found} == {(first.pid, "step_0"), (second.pid, "step_extern")}
    assert await containers.pod_uid_of(first.pid) == ALICE.pod.uid
    assert await containers.processes(Job(JobManager.SLURM, "4712", "bob", 1001).pod) == ()
    await containers.require_job_cgroups()
    for each in (first, second):
        each.child.kill()
        await each.ended()
    assert await containers.processes(ALICE.pod) == ()


async def test_end_of_a_job_is_reported_by_the_kernel(slurm: tuple[Node, CgroupContainers]) -> None:
    node, containers = slurm
    step = await node.start(ALICE.pod, "step_0")
    ended = containers.watch_end(ALICE.pod)
    assert isinstance(node.ground, CgroupGround)
    step.child.kill()
    await step.ended()
    for each in node.ground.cgroups(ALICE.pod, "step_0"):  # as slurmstepd does; v1 reports nothing before
        while each.exists():
            with suppress(OSError):
                each.rmdir()
    await asyncio.wait_for(ended, DEADLINE)
    assert await containers.processes(ALICE.pod) == ()


@only_with(CGROUP2)
async def test_node_without_cgroups_of_slurm_is_reported_with_what_to_set() -> None:
    assert CGROUP2 is not None
    async with node_of(CgroupGround((CGROUP2,))) as node:
        containers = node.ground.containers()
        with pytest.raises(Unreadable, match="ProctrackType=proctrack/cgroup"):
            await containers.require_job_cgroups()
        containers.close()


@only_with(CGROUP2)
async def test_command_of_scrubber_run_includes_what_a_container_runtime_starts_in_its_slice() -> None:
    assert CGROUP2 is not None
    ground = CgroupGround((CGROUP2,), kubepods="scrubber.slice", pod_directory="scrubber-runc0ffee.slice")
    async with node_of(ground) as node:
        containers = ground.containers()
        command = await node.start(RUN.pod, "command")
        container = await node.start(RUN.pod, "docker-3fa9.scope")
        assert {each.pid for each in await containers.processes(RUN.pod)} == {command.pid, container.pid}
        assert await containers.pod_uid_of(container.pid) == RUN.pod.uid
        assert await containers.processes(new_pod()) == ()
        containers.close()
