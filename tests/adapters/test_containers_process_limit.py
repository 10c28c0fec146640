"""Pods with too many processes to list: only they are affected, and they can still be killed.

Real processes in real cgroups, v2 and v1. Limits are tested with small values.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest

from scrubber.adapters.cgroups import CgroupContainers, MarkerContainers
from scrubber.adapters.cgroups.reader_threads import ReaderThreads
from scrubber.domain.assignment import Pod
from scrubber.domain.errors import Unavailable, Unreadable
from tests.adapters.shortage import descriptors_left
from tests.adapters.test_containers_contract import DEAD_LEADER
from tests.ahead import advance_until
from tests.pods import (
    CGROUP1,
    CGROUP2,
    CGROUP_WAYS,
    CHILD_ON_REQUEST,
    DEADLINE,
    IDLE,
    WAYS,
    CgroupGround,
    CgroupsWithoutKill,
    Node,
    Started,
    ground_of,
    lives,
    new_pod,
    node_of,
    only_with,
)
from tests.relay import compiled

MOST = 8

CROWD = """
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        signal.pause()
print("ready", flush=True)
signal.pause()
"""

BOMB = """
# A crowd of runners: each forks and exits without end, so that a list of them is old when it is read.
until = time.monotonic() + 60
for number in range(24):
    if os.fork() == 0:
        while time.monotonic() < until:
            if number < 4 and os.fork():
                os._exit(0)
            if number >= 4:
                signal.pause()
        os._exit(0)
print("ready", flush=True)
signal.pause()
"""

SERVICE = """
import asyncio, pathlib
from scrubber.adapters.cgroups import CgroupContainers
from scrubber.domain.assignment import Pod
from scrubber.domain.errors import Unreadable
async def main():
    try:
        await CgroupContainers(pathlib.Path(sys.argv[1])).kill_cgroups(Pod("team-a", "train", sys.argv[2]), 1.0)
    except Unreadable as refusal:
        print("ready", flush=True)
        print(refusal, flush=True)
asyncio.run(main())
"""

__test__ = bool(CGROUP_WAYS)  # tests.pods reports what cannot be tested on this machine


@pytest.fixture(params=CGROUP_WAYS)
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    async with node_of(ground_of(request.param)) as made:
        yield made


def ground(node: Node) -> CgroupGround:
    assert isinstance(node.ground, CgroupGround)
    return node.ground


class HeldUp:
    """A copy of the proc file system that is real except for one process, whose files block until the test answers.

    A reader of that process waits in the kernel, as it would for a very long list.
    """

    def __init__(self, directory: Path, pid: int, *others: int) -> None:
        self.proc = directory
        self._pid = pid
        (directory / "self").symlink_to("/proc/self")
        for each in (os.getpid(), *others):
            (directory / str(each)).symlink_to(f"/proc/{each}")
        (directory / str(pid)).mkdir()
        (directory / str(pid) / "cgroup").symlink_to(f"/proc/{pid}/cgroup")
        os.mkfifo(directory / str(pid) / "stat")

    async def until_a_reader_waits(self) -> None:
        """Return once a reader waits for the process; it keeps waiting."""
        self._answer = await asyncio.wait_for(asyncio.to_thread(self._opened), DEADLINE)

    def go_on(self) -> None:
        """Answer the waiting reader, and all later ones at once."""
        stat = self.proc / str(self._pid) / "stat"
        stat.unlink()
        stat.symlink_to(f"/proc/{self._pid}/stat")
        os.write(self._answer, Path(f"/proc/{self._pid}/stat").read_bytes())
        os.close(self._answer)

    def _opened(self) -> int:
        return os.open(self.proc / str(self._pid) / "stat", os.O_WRONLY)


# --- reading ---


async def test_pod_above_the_process_limit_is_unreadable_and_its_neighbour_is_still_read(node: Node) -> None:
    pod, other = new_pod(), new_pod("other")
    containers = ground(node).kind(ground(node).root, max_processes=MOST)
    await node.start(pod, "main", CROWD, str(MOST))
    quiet = await node.start(other, "main")
    crowded, found = await asyncio.gather(
        containers.processes(pod), containers.processes(other), return_exceptions=True
    )
    assert isinstance(crowded, Unreadable)
    assert "more than 8 processes" in str(crowded)
    assert not isinstance(found, BaseException)
    assert [process.pid for process in found] == [quiet.pid]


async def test_pod_at_the_process_limit_is_listed_whole(node: Node) -> None:
    pod = new_pod()
    containers = ground(node).kind(ground(node).root, max_processes=MOST)
    await node.start(pod, "main/nested", CROWD, str(MOST - 2))
    await node.start(pod, "sandbox")
    found = await containers.processes(pod)
    assert len(found) == MOST
    assert await containers.terminate(pod, found, DEADLINE) == ()
    assert await containers.processes(pod) == ()


async def test_processes_in_containers_and_nested_cgroups_count_towards_one_limit(node: Node) -> None:
    pod = new_pod()
    containers = ground(node).kind(ground(node).root, max_processes=MOST)
    for container in ("a", "b/deeper", "c"):
        await node.start(pod, container, CROWD, "2")
    with pytest.raises(Unreadable, match="more than 8 processes"):
        await containers.processes(pod)


async def test_pod_that_exceeds_the_process_limit_during_termination_is_reported(node: Node) -> None:
    pod = new_pod()
    containers = ground(node).kind(ground(node).root, max_processes=MOST)
    await node.start(pod, "main")
    leftovers = await containers.processes(pod)
    await node.start(pod, "more", CROWD, str(MOST))
    with pytest.raises(Unreadable, match="more than 8 processes"):
        await containers.terminate(pod, leftovers, DEADLINE)


async def test_pod_above_the_process_limit_is_empty_after_its_cgroups_were_killed(node: Node) -> None:
    pod = new_pod()
    containers = ground(node).kind(ground(node).root, max_processes=MOST)
    crowd = await node.start(pod, "main", CROWD, str(MOST))
    assert await containers.kill_cgroups(pod, DEADLINE)
    await crowd.ended()
    assert await containers.processes(pod) == ()


async def test_pod_above_the_process_limit_is_unreadable_by_markers() -> None:
    async with node_of(ground_of(WAYS[0])) as node:
        pod, other = new_pod(), new_pod("other")
        containers = MarkerContainers(max_processes=MOST)
        await node.start(pod, "main", CROWD, str(MOST))
        quiet = await node.start(other, "main")
        with pytest.raises(Unreadable, match="more than 8 processes"):
            await containers.processes(pod)
        assert [process.pid for process in await containers.processes(other)] == [quiet.pid]


async def test_slow_read_of_a_pod_does_not_block_the_event_loop_or_another_pod(node: Node, tmp_path: Path) -> None:
    pod, other = new_pod(), new_pod("other")
    slow, quick = await node.start(pod, "main"), await node.start(other, "main")
    machine = HeldUp(tmp_path, slow.pid, quick.pid)
    containers = CgroupContainers(ground(node).root, proc=tmp_path)
    reading = asyncio.create_task(containers.processes(pod))
    await machine.until_a_reader_waits()
    assert [process.pid for process in await containers.processes(other)] == [quick.pid]
    assert not reading.done()
    machine.go_on()
    assert [process.pid for process in await reading] == [slow.pid]


async def test_abandoned_read_does_not_disturb_a_later_read(node: Node, tmp_path: Path) -> None:
    pod = new_pod()
    main = await node.start(pod, "main")
    machine = HeldUp(tmp_path, main.pid)
    containers = CgroupContainers(ground(node).root, proc=tmp_path)
    reading = asyncio.create_task(containers.processes(pod))
    await machine.until_a_reader_waits()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    machine.go_on()
    assert [process.pid for process in await containers.processes(pod)] == [main.pid]


async def test_closed_reader_threads_report_that_the_service_is_stopping() -> None:
    aside = ReaderThreads(2, "test")
    assert await aside(sum, (1, 2)) == 3
    aside.close()
    with pytest.raises(Unavailable, match="stopping"):
        await aside(sum, (1, 2))


# --- killing without a list ---


async def test_forking_pod_is_killed_whole_without_touching_other_pods(node: Node) -> None:
    pod, other = new_pod(), new_pod("other")
    containers = ground(node).kind(ground(node).root, max_processes=MOST)
    started = [
        await node.start(pod, "sandbox"),
        await node.start(pod, "main", BOMB),
        await node.start(pod, "main/nested", BOMB),
        await node.start(pod, "side", DEAD_LEADER),
        await node.start(pod, ""),
    ]
    bystander = await node.start(other, "main", CHILD_ON_REQUEST)
    with pytest.raises(Unreadable):
        await containers.processes(pod)
    assert await containers.kill_cgroups(pod, DEADLINE)
    for each in started:
        await each.ended()
    assert await containers.processes(pod) == ()
    assert await lives(bystander)


async def test_pod_killed_by_cgroup_is_not_left_frozen(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    await node.start(pod, "main", DEAD_LEADER)
    assert await containers.kill_cgroups(pod, DEADLINE)
    later = await node.start(pod, "main", CHILD_ON_REQUEST)
    assert await lives(later)


async def test_self_frozen_process_is_killed_by_cgroup(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    asleep = await node.start(pod, "main/self")
    for cgroup in ground(node).cgroups(pod, "main/self"):
        for name, state in (("cgroup.freeze", "1"), ("freezer.state", "FROZEN")):
            if (cgroup / name).exists():
                (cgroup / name).write_text(state)
    assert await containers.kill_cgroups(pod, DEADLINE)
    assert await asleep.ended() == -9


async def test_process_beyond_the_visited_cgroup_limit_is_still_killed_by_cgroup(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scrubber.adapters.cgroups.tally._MAX_CGROUPS", 10)
    pod, containers = new_pod(), node.ground.containers()
    hiding = await node.start(pod, "main")
    for container in ground(node).cgroups(pod, "main"):
        for number in range(30):
            (container / str(number)).mkdir()
        (container / "19" / "cgroup.procs").write_text(str(hiding.pid))
    assert [process.pid for process in await containers.processes(pod)] == [hiding.pid]
    assert await containers.kill_cgroups(pod, DEADLINE)
    assert await hiding.ended() == -9


async def test_process_in_a_cgroup_deeper_than_the_path_limit_is_still_killed(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    hiding = [await node.start(pod, "main", program) for program in (DEAD_LEADER, IDLE)]
    deep = [Deep(cgroup, hiding) for cgroup in ground(node).cgroups(pod, "main")]
    try:
        assert await containers.kill_cgroups(pod, DEADLINE)
        for each in hiding:
            await each.ended()
        assert await containers.processes(pod) == ()
    finally:
        for cgroup in deep:
            cgroup.clear()


class Deep:
    """Nested cgroups below ``top``; the innermost contains ``processes``."""

    def __init__(self, top: Path, processes: list[Started]) -> None:
        self._name = "d" * 200
        self._processes = processes
        self._levels = [os.open(top, os.O_RDONLY | os.O_DIRECTORY)]
        for _ in range(25):
            os.mkdir(self._name, dir_fd=self._levels[-1])
            self._levels.append(os.open(self._name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._levels[-1]))
        entry = os.open("cgroup.procs", os.O_WRONLY, dir_fd=self._levels[-1])
        for each in processes:
            os.write(entry, str(each.pid).encode())
        os.close(entry)

    def clear(self) -> None:
        for each in self._processes:
            if each.runs:
                each.child.kill()
        for above, level in reversed(list(pairwise(self._levels))):
            os.close(level)
            while True:  # the kernel releases an emptied cgroup shortly after the last exit
                with contextlib.suppress(OSError):
                    os.rmdir(self._name, dir_fd=above)
                    break
        os.close(self._levels[0])


async def test_pod_with_changing_threads_is_listed_and_can_be_killed(node: Node, tmp_path: Path) -> None:
    pod, containers = new_pod(), node.ground.containers()
    await node.start(pod, "main")
    program = "os.execv(sys.argv[1], sys.argv[1:])"
    fast = await node.start(pod, "main", program, compiled(tmp_path), "ready", "shared", "/dev/null")
    processes = await containers.processes(pod)
    for _ in range(50):
        assert await containers.processes(pod) == processes
        with contextlib.suppress(Unreadable):  # if only a living thread is in the cgroup, it need not be found in time
            assert await containers.pod_uid_of(fast.pid) == pod.uid
    assert fast.pid in {process.pid for process in processes}
    assert await containers.kill_cgroups(pod, DEADLINE)
    await fast.ended()


async def test_descriptor_shortage_makes_no_process_gone_and_no_device_faulty(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    main = await node.start(pod, "main")
    assert len(await containers.processes(pod)) == 1
    for spare in range(3):
        with descriptors_left(spare):
            with contextlib.suppress(Unreadable):
                assert len(await containers.processes(pod)) == 1
            with contextlib.suppress(Unavailable):
                assert await containers.pod_uid_of(main.pid) == pod.uid
    with descriptors_left(0), pytest.raises(Unavailable, match="It is retried"):
        await containers.pod_uid_of(main.pid)


async def test_cgroup_kill_of_a_pod_without_cgroups_or_processes_succeeds(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    await node.start(new_pod("other"), "main")
    assert await containers.kill_cgroups(pod, 0.0)
    for cgroup in ground(node).cgroups(pod, "main"):
        cgroup.mkdir(parents=True)
    assert await containers.kill_cgroups(pod, 0.0)


async def test_pod_with_an_unusable_uid_is_not_killed_by_cgroup(node: Node) -> None:
    bystander = await node.start(new_pod("other"), "main", CHILD_ON_REQUEST)
    for uid in (None, "", "..", "../other", "a/b", "*", "x" * 200):
        with pytest.raises(Unreadable, match="UID"):
            await node.ground.containers().kill_cgroups(Pod("team-a", "train", uid), DEADLINE)
    assert await lives(bystander)


async def test_services_own_pod_is_not_killed(node: Node) -> None:
    pod = new_pod()
    neighbour = await node.start(pod, "main", CHILD_ON_REQUEST)
    service = await node.start(pod, "service", SERVICE, str(ground(node).root), str(pod.uid))
    assert "the service itself may be in that pod" in await service.line()
    assert await service.ended() == 0
    assert await lives(neighbour)


async def test_vanished_cgroup_root_does_not_count_as_a_killed_pod(node: Node) -> None:
    containers = node.ground.containers()
    ground(node).clear()
    with pytest.raises(Unreadable, match="cannot be read"):
        await containers.kill_cgroups(new_pod(), DEADLINE)
    for root in ground(node).roots:
        root.mkdir()


async def test_cgroup_kill_is_not_available_with_markers() -> None:
    async with node_of(ground_of(WAYS[0])) as node:
        pod = new_pod()
        main = await node.start(pod, "main", CHILD_ON_REQUEST)
        assert not await node.ground.containers().kill_cgroups(pod, DEADLINE)
        assert await lives(main)


async def test_cancelled_cgroup_kill_leaves_no_process_frozen_and_sends_no_later_signal(
    node: Node, tmp_path: Path
) -> None:
    pod = new_pod()
    main = await node.start(pod, "main", CHILD_ON_REQUEST)
    machine = HeldUp(tmp_path, main.pid)
    containers = CgroupsWithoutKill(ground(node).root, proc=tmp_path)
    ending = asyncio.create_task(containers.kill_cgroups(pod, DEADLINE))
    await machine.until_a_reader_waits()
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    machine.go_on()
    both = threading.Barrier(2)  # both of the adapter's threads: the one that was busy has finished then
    await asyncio.gather(*(containers.run_in_thread(both.wait, DEADLINE) for _ in range(2)))
    assert await lives(main)
    assert await node.ground.containers().kill_cgroups(pod, DEADLINE), "and a later one ends it"
    await main.ended()


async def test_reads_and_kills_leave_no_descriptor_and_at_most_two_threads(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    await containers.processes(pod)
    threads, descriptors = (len(os.listdir(f"/proc/self/{each}")) for each in ("task", "fd"))
    crowd = await node.start(pod, "main", CROWD, "20")
    await asyncio.gather(*(containers.processes(pod) for _ in range(8)))
    with contextlib.suppress(Unreadable):
        await asyncio.gather(*(containers.kill_cgroups(pod, DEADLINE) for _ in range(4)))
    await crowd.ended()
    assert len(os.listdir("/proc/self/task")) <= threads + 1, "asyncio's own, which waits for the child"
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1, "the pipe of the process that was started here"


@only_with(CGROUP2)
async def test_containers_are_killed_where_the_pods_own_cgroup_cannot_be_killed() -> None:
    assert CGROUP2 is not None
    pressed: list[str] = []

    class WithoutThePodsOwn(CgroupContainers):
        def _kill_file(self, cgroup: Path) -> Path | None:
            switch = None if cgroup.name.startswith("pod") else super()._kill_file(cgroup)
            if switch is not None:
                pressed.append(cgroup.name)
            return switch

    made = CgroupGround((CGROUP2,), WithoutThePodsOwn)
    async with node_of(made) as node:
        pod = new_pod()
        bomb, sandbox = await node.start(pod, "main", BOMB), await node.start(pod, "sandbox")
        assert await made.containers().kill_cgroups(pod, DEADLINE)
        await bomb.ended()
        await sandbox.ended()
        assert {"main", "sandbox"} <= set(pressed)


@only_with(CGROUP2)
async def test_containers_beside_their_pod_cgroup_are_killed_with_the_pod() -> None:
    assert CGROUP2 is not None
    made = CgroupGround((CGROUP2,), kubepods="kubepods.slice", pod_directory="kubepods-pod{escaped}.slice")
    async with node_of(made) as node:
        pod, other, containers = new_pod(), new_pod("other"), made.containers()
        assert pod.uid is not None
        main, bystander = await node.start(pod, "main"), await node.start(other, "main", CHILD_ON_REQUEST)
        astray = await node.start(pod, "main")
        stray = made.root / f"kubepods-pod{pod.uid.replace('-', '_')}.slice:cri-containerd:{'ab' * 32}" / "deeper"
        stray.mkdir(parents=True)
        (stray / "cgroup.procs").write_text(str(astray.pid))
        assert await containers.kill_cgroups(pod, DEADLINE)
        await main.ended()
        await astray.ended()
        assert await lives(bystander)


@only_with(CGROUP1)
async def test_process_in_two_pods_by_two_hierarchies_is_not_killed_with_either_pod() -> None:
    assert CGROUP1 is not None
    made = CgroupGround((CGROUP2, *CGROUP1) if CGROUP2 is not None else CGROUP1)
    async with node_of(made) as node:
        pod, other, containers = new_pod(), new_pod("other"), made.containers()
        alone = await node.start(pod, "main")
        astride = await node.start(pod, "main", CHILD_ON_REQUEST)
        elsewhere = made.cgroups(other, "main")[-1]
        elsewhere.mkdir(parents=True)
        (elsewhere / "cgroup.procs").write_text(str(astride.pid))
        ending = asyncio.create_task(containers.kill_cgroups(pod, DEADLINE))
        await alone.ended()
        await advance_until(ending.done)
        assert not await ending, "the pod is not over"
        ending = asyncio.create_task(containers.kill_cgroups(other, DEADLINE))
        await advance_until(ending.done)
        assert not await ending
        assert await lives(astride)


@only_with(CGROUP1)
async def test_pod_that_does_not_die_is_reported_at_the_deadline_and_thawed() -> None:
    assert CGROUP1 is not None
    made = CgroupGround(CGROUP1)
    async with node_of(made) as node:
        pod, containers = new_pod(), made.containers()
        stuck = await node.start(pod, "main", CROWD, "3")
        above = made.roots[1] / "kubepods"
        (above / "freezer.state").write_text("FROZEN")
        ending = asyncio.create_task(containers.kill_cgroups(pod, DEADLINE))
        await advance_until(ending.done)
        assert not await ending
        (above / "freezer.state").write_text("THAWED")
        assert await stuck.ended() == -9
        assert (made.cgroups(pod)[1] / "freezer.self_freezing").read_text() == "0\n"
        assert await containers.kill_cgroups(pod, DEADLINE)
