"""How containers of a pod begin and end, as the kernel reports it: real cgroups, v2 and v1."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from scrubber.adapters.cgroups import CgroupContainers
from scrubber.adapters.kubelet.pod_logs import count_container_starts
from scrubber.domain.assignment import Pod
from scrubber.domain.errors import Unreadable
from scrubber.domain.pods import RemainingCgroups
from tests.pods import CGROUP_WAYS, DEADLINE, CgroupGround, ground_of, new_pod


@pytest.fixture(params=CGROUP_WAYS)
def ground(request: pytest.FixtureRequest) -> Iterator[CgroupGround]:
    made = ground_of(request.param)
    assert isinstance(made, CgroupGround)
    yield made
    made.clear()


def containers_of(ground: CgroupGround, pod: Pod, *names: str) -> CgroupContainers:
    for name in names:
        for cgroup in ground.cgroups(pod, name):
            cgroup.mkdir(parents=True)
    return ground.containers()


async def test_first_container_creation_is_reported_whatever_is_created_and_removed_later(
    ground: CgroupGround,
) -> None:
    pod = new_pod()
    containers = containers_of(ground, pod, "sandbox", "ended")
    first = containers.watch_first_container(pod)
    assert first is not None
    for cgroup in ground.cgroups(pod, "ended"):
        cgroup.rmdir()
    for name in ("main", "plain"):
        for cgroup in ground.cgroups(pod, name):
            cgroup.mkdir()
    for cgroup in ground.cgroups(pod, "main"):
        cgroup.rmdir()
    assert await asyncio.wait_for(first, DEADLINE) == "main"
    containers.close()


async def test_containers_of_another_pod_and_nested_cgroups_are_not_reported(
    ground: CgroupGround,
) -> None:
    pod, other = new_pod(), new_pod("other")
    containers = containers_of(ground, pod, "sandbox")
    containers_of(ground, other, "sandbox")
    first, others = containers.watch_first_container(pod), containers.watch_first_container(other)
    assert first is not None
    assert others is not None
    for cgroup in (*ground.cgroups(pod, "sandbox/inner"), *ground.cgroups(other, "theirs")):
        cgroup.mkdir()
    assert await asyncio.wait_for(others, DEADLINE) == "theirs"
    assert not first.done()
    for cgroup in ground.cgroups(pod, "main"):
        cgroup.mkdir()
    assert await asyncio.wait_for(first, DEADLINE) == "main"
    containers.close()


async def test_all_waiters_for_one_pod_are_notified_and_cancelling_one_stops_no_other(
    ground: CgroupGround,
) -> None:
    pod = new_pod()
    containers = containers_of(ground, pod, "sandbox")
    waiting = [containers.watch_first_container(pod) for _ in range(3)]
    assert waiting[0] is not None
    waiting[0].cancel()
    await asyncio.wait({waiting[0]})
    for cgroup in ground.cgroups(pod, "main"):
        cgroup.mkdir()
    assert [await asyncio.wait_for(each, DEADLINE) for each in waiting[1:] if each is not None] == ["main", "main"]
    containers.close()


async def test_pod_without_a_cgroup_cannot_be_watched_for_its_first_container(ground: CgroupGround) -> None:
    containers = ground.containers()
    assert containers.watch_first_container(new_pod()) is None
    containers.close()


async def test_removal_of_a_container_is_reported_and_what_is_left_of_the_pod_can_be_read(ground: CgroupGround) -> None:
    pod = new_pod()
    containers = containers_of(ground, pod, "sandbox", "main")
    ended = containers.watch_end(pod)
    for cgroup in ground.cgroups(pod, "main"):
        cgroup.rmdir()
    await asyncio.wait_for(ended, DEADLINE)
    assert await containers.remaining_cgroups(pod) == RemainingCgroups(True, frozenset({"sandbox"}))
    containers.close()


async def test_removal_of_the_pods_own_cgroup_is_reported(ground: CgroupGround) -> None:
    pod = new_pod()
    containers = containers_of(ground, pod, "sandbox")
    for cgroup in ground.cgroups(pod, "sandbox"):
        cgroup.rmdir()
    ended = containers.watch_end(pod)
    for cgroup in ground.cgroups(pod, "sandbox"):
        cgroup.parent.rmdir()
    await asyncio.wait_for(ended, DEADLINE)
    assert await containers.remaining_cgroups(pod) == RemainingCgroups(False)
    containers.close()


async def test_end_of_the_last_process_is_reported_before_its_cgroup_is_removed(ground: CgroupGround) -> None:
    pod = new_pod()
    containers = containers_of(ground, pod, "main")
    if not any((cgroup / "cgroup.events").exists() for cgroup in ground.cgroups(pod, "main")):
        assert await containers.remaining_cgroups(pod) == RemainingCgroups(True, frozenset({"main"}))
        return  # v1 does not report it: the removal of the container's cgroup does
    process = await asyncio.create_subprocess_exec("sleep", "inf")
    for cgroup in ground.cgroups(pod, "main"):
        (cgroup / "cgroup.procs").write_text(f"{process.pid}\n")
    ended = containers.watch_end(pod)
    process.kill()
    await process.wait()
    await asyncio.wait_for(ended, DEADLINE)
    assert await containers.processes(pod) == ()
    containers.close()


async def test_nothing_more_ends_in_a_pod_without_a_cgroup(ground: CgroupGround) -> None:
    containers = ground.containers()
    assert not containers.watch_end(new_pod()).done()
    containers.close()


async def test_end_that_cannot_be_watched_is_refused_with_the_reason(ground: CgroupGround) -> None:
    pod = new_pod()
    containers = containers_of(ground, pod, "sandbox")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        with pytest.raises(Unreadable, match=os.strerror(errno.EMFILE)):
            containers.watch_end(pod)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    watched = containers.watch_end(pod)
    for cgroup in ground.cgroups(pod, "sandbox"):
        cgroup.rmdir()
    await asyncio.wait_for(watched, DEADLINE)
    containers.close()


def test_container_starts_of_a_pod_are_counted_by_their_log_files(tmp_path: Path) -> None:
    pod = Pod("team-a", "train", "uid-1")
    assert count_container_starts(tmp_path, pod) is None
    directory = tmp_path / "team-a_train_uid-1"
    directory.mkdir()
    assert count_container_starts(tmp_path, pod) == {}
    for name in ("init/0.log", "main/3.log", "main/2.log.20261121-100000.gz", "main/2.log", "side/not-a-log"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).touch()
    assert count_container_starts(tmp_path, pod) == {"init": 1, "main": 4, "side": 0}
