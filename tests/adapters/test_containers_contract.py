"""Contract of every way to tell containers apart, tested with real processes: cgroups v2 and v1, and markers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.adapters.cgroups.procfs import ProcFs
from scrubber.adapters.cgroups.terminate import kill_if_in_pod
from scrubber.domain.assignment import Pod, Process
from scrubber.domain.errors import Unreadable
from tests.pods import CHILD_ON_REQUEST, DEADLINE, WAYS, Node, ground_of, lives, new_pod, node_of

DEAD_LEADER = """
def stay():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        os.sched_yield()
    print("ready", flush=True)
    signal.sigwait([signal.SIGUSR1])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
threading.Thread(target=stay).start()
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)
"""

UNREAPED_CHILD = """
child = os.fork()
if not child:
    os._exit(0)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
print("ready", flush=True)
print(child, flush=True)
signal.pause()
"""

FAMILY = """
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.pause()
os.wait()
print("ready", flush=True)
signal.pause()
"""

TREE = """
# Two children each, six generations: it grows while it is being ended.
print("ready", flush=True)
generation = 0
while generation < 6:
    generation += 1
    if os.fork() and os.fork():
        break
signal.pause()
"""

EXEC_WITHOUT_END = """
print("ready", flush=True)
os.execv("/bin/sh", ["/bin/sh", sys.argv[1]])
"""


@pytest.fixture(params=WAYS)
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    async with node_of(ground_of(request.param)) as made:
        yield made


async def test_processes_of_a_pod_are_those_of_all_its_containers_and_its_sandbox(node: Node) -> None:
    pod, other, containers = new_pod(), new_pod("other"), node.ground.containers()
    sandbox = await node.start(pod, "sandbox")
    main = await node.start(pod, "main")
    other_process = await node.start(other, "main")
    found = await containers.processes(pod)
    assert {(process.pid, process.container) for process in found} == {(sandbox.pid, "sandbox"), (main.pid, "main")}
    assert [process.pid for process in await containers.processes(other)] == [other_process.pid]


async def test_missing_pod_has_no_processes(node: Node) -> None:
    assert await node.ground.containers().processes(new_pod()) == ()


async def test_orphan_in_its_own_session_still_belongs_to_its_pod(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    parent = await node.start(pod, "main", FAMILY)
    found = await containers.processes(pod)
    assert len(found) == 2
    assert parent.pid in {process.pid for process in found}


async def test_process_in_the_middle_of_exec_is_not_missed(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "again.sh"
    script.write_text('exec /bin/sh "$0"\n')
    pod = new_pod()
    restless = await node.start(pod, "main", EXEC_WITHOUT_END, str(script))
    for _ in range(50):
        newcomer = node.ground.containers()  # it has not seen the process before
        assert [process.pid for process in await newcomer.processes(pod)] == [restless.pid]


async def test_zombie_process_counts_as_gone(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    parent = await node.start(pod, "main", UNREAPED_CHILD)
    child = int(await parent.line())
    assert [process.pid for process in await containers.processes(pod)] == [parent.pid]
    assert await containers.pod_uid_of(child) is None


async def test_process_with_a_dead_leader_thread_is_found_and_can_be_killed(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    leaderless = await node.start(pod, "main", DEAD_LEADER)
    found = await containers.processes(pod)
    assert [process.pid for process in found] == [leaderless.pid]
    assert await containers.pod_uid_of(leaderless.pid) == pod.uid
    assert await containers.terminate(pod, found, DEADLINE) == ()
    await leaderless.ended()
    assert await containers.processes(pod) == ()


async def test_process_resolves_to_its_pod_and_a_host_process_to_none(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    main = await node.start(pod, "main")
    assert await containers.pod_uid_of(main.pid) == pod.uid
    assert await containers.pod_uid_of(os.getpid()) is None
    main.child.kill()
    await main.ended()
    assert await containers.pod_uid_of(main.pid) is None


async def test_leftovers_are_killed_and_the_sandbox_is_not(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    sandbox = await node.start(pod, "sandbox")
    main = await node.start(pod, "main", FAMILY)
    leftovers = [process for process in await containers.processes(pod) if process.container == "main"]
    assert await containers.terminate(pod, leftovers, DEADLINE) == ()
    assert await main.ended() == -9
    assert [process.pid for process in await containers.processes(pod)] == [sandbox.pid]
    assert sandbox.runs


async def test_leftover_is_killed_alone_when_other_processes_of_its_container_are_unproved(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    rightful = await node.start(pod, "main", CHILD_ON_REQUEST)
    leftover = await node.start(pod, "main")
    [proved] = [process for process in await containers.processes(pod) if process.pid == leftover.pid]
    assert await containers.terminate(pod, [proved], DEADLINE) == ()
    await leftover.ended()
    assert [process.pid for process in await containers.processes(pod)] == [rightful.pid]
    assert await lives(rightful)


async def test_processes_forked_by_a_leftover_meanwhile_are_killed_with_it(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    rightful = await node.start(pod, "main")
    leftover = await node.start(pod, "main", CHILD_ON_REQUEST)
    [proved] = [process for process in await containers.processes(pod) if process.pid == leftover.pid]
    assert await lives(leftover), "it forked when it was asked"
    assert await containers.terminate(pod, [proved], DEADLINE) == ()
    await leftover.ended()
    assert [process.pid for process in await containers.processes(pod)] == [rightful.pid]


async def test_later_process_with_the_same_pid_is_not_signalled(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    innocent = await node.start(pod, "main", CHILD_ON_REQUEST)
    [process] = await containers.processes(pod)
    earlier = replace(process, started=process.started - 1)
    assert await containers.terminate(pod, [earlier], DEADLINE) == ()
    assert await lives(innocent)


async def test_process_of_another_pod_is_not_signalled_even_when_named(node: Node) -> None:
    pod, other, containers = new_pod(), new_pod("other"), node.ground.containers()
    leftover = await node.start(pod, "main")
    other_process = await node.start(other, "main", CHILD_ON_REQUEST)
    [named_wrongly] = await containers.processes(other)
    named = [*await containers.processes(pod), named_wrongly]
    assert await containers.terminate(pod, named, DEADLINE) == (named_wrongly,)
    await leftover.ended()
    assert await lives(other_process)


async def test_kill_verifies_start_time_and_pod_immediately_before_the_signal(node: Node) -> None:
    pod, other, containers = new_pod(), new_pod("other"), node.ground.containers()
    successor = await node.start(pod, "main", CHILD_ON_REQUEST)
    other_process = await node.start(other, "main", CHILD_ON_REQUEST)
    [process], [outside] = await containers.processes(pod), await containers.processes(other)
    kill_if_in_pod(containers, ProcFs(), pod, replace(process, started=process.started - 1))
    kill_if_in_pod(containers, ProcFs(), pod, outside)
    assert await lives(successor)
    assert await lives(other_process)


async def test_leftovers_that_multiply_faster_than_one_pass_are_all_killed(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    root = await node.start(pod, "main", TREE)
    leftovers = await containers.processes(pod)
    assert await containers.terminate(pod, leftovers, DEADLINE) == ()
    await root.ended()
    assert await containers.processes(pod) == ()


async def test_service_never_kills_itself(node: Node) -> None:
    containers, myself = node.ground.containers(), os.getpid()
    pod = new_pod()
    started = int(Path(f"/proc/{myself}/stat").read_text().rpartition(")")[2].split()[19])
    assert await containers.terminate(pod, [Process(myself, started, "main")], 0.0) == ()


async def test_pod_without_uid_is_unreadable_not_empty(node: Node) -> None:
    with pytest.raises(Unreadable, match="UID"):
        await node.ground.containers().processes(Pod("team-a", "train"))


async def test_two_callers_may_kill_the_same_leftovers_concurrently(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    main = await node.start(pod, "main", FAMILY)
    leftovers = await containers.processes(pod)
    both = await asyncio.gather(*(containers.terminate(pod, leftovers, DEADLINE) for _ in range(2)))
    assert both == [(), ()]
    await main.ended()
