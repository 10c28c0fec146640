"""What is known of pods: which process of a container was its first, and when a pod that is gone is over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from scrubber.adapters.clock import SystemClock
from scrubber.domain.assignment import Assignment, Pod, Process, Reading, Trust
from scrubber.domain.basis import Basis, HandOver
from scrubber.domain.errors import Unreadable
from scrubber.domain.leftover import PodState, Standing
from scrubber.domain.policy import Limits
from scrubber.domain.record import Grant
from scrubber.engine.pods import PodWatch

POD = Pod("team-a", "job", "uid-a")
SANDBOX = Process(1, 10, "sandbox")
HELPER, MAIN, CHILD = Process(2, 20, "main"), Process(3, 21, "main"), Process(4, 30, "main")
GRANT = Grant(1, Assignment(POD, "main", frozenset({"gpu"})), HandOver.UNKNOWN, 1000.0, "boot", baseline=(SANDBOX,))


class Node:
    """A kubelet that lists what it is told to, and the processes of one pod."""

    def __init__(self) -> None:
        self.listed = True
        self.at = 0.0
        self.running: tuple[Process, ...] | None = ()
        """None: they cannot be told."""

    async def read(self) -> Reading:
        self.at += 1.0
        mine = (Assignment(POD, "main", frozenset({"gpu"})),) if self.listed else ()
        return Reading(Trust.TRUSTED, mine, at=self.at)

    async def processes(self, pod: Pod) -> tuple[Process, ...]:
        if self.running is None:
            raise Unreadable("There are too many.")
        return self.running

    async def pod_uid_of(self, pid: int) -> str | None:
        return POD.uid

    def starts(self, pod: Pod) -> Mapping[str, int]:
        return {}

    def first_container(self, pod: Pod) -> None:
        return None

    async def end(self, pod: Pod, leftovers: Iterable[Process], deadline: float) -> tuple[Process, ...]:
        return tuple(leftovers)

    async def end_unread(self, pod: Pod, deadline: float) -> bool:
        return False

    def not_covered(self) -> tuple[str, ...]:
        return ()


class Now(SystemClock):
    """Stands still a second after the last reading, and a minute after the grant."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def monotonic(self) -> float:
        return self._node.at + 1.0

    def wall(self) -> float:
        return GRANT.at + 60.0


def watching(node: Node) -> PodWatch:
    watch = PodWatch(assignments=node, containers=node, clock=Now(node))
    watch.track([POD])
    return watch


async def state(watch: PodWatch, *, wall: float = 2000.0, grant: Grant = GRANT) -> PodState:
    where = await watch.standing(grant, limits=Limits(), boot="boot", wall=wall, free_for=0.0)
    return where.state


async def own(watch: PodWatch, grant: Grant) -> Standing:
    """Where the earlier use by ``POD`` stands while one of its containers is about to start."""
    return await watch.standing(grant, limits=Limits(), boot="boot", wall=2000.0, free_for=0.0, asking=POD)


async def gone(watch: PodWatch, node: Node) -> None:
    """The kubelet's list does not have the pod any more, twice."""
    node.listed = False
    await watch.refresh()
    await watch.refresh()


async def test_a_helper_of_the_runtime_that_died_before_the_main_process_came_proves_nothing_against_it() -> None:
    node = Node()
    watch = watching(node)
    for running in ((SANDBOX, HELPER), (SANDBOX, MAIN), (SANDBOX, MAIN)):
        node.running = running
        await watch.sample(GRANT)
    await gone(watch, node)
    assert await state(watch) is PodState.LIVING


async def test_what_outlives_a_first_process_that_was_seen_twice_is_a_leftover() -> None:
    node = Node()
    watch = watching(node)
    for running in ((SANDBOX, MAIN), (SANDBOX, MAIN, CHILD)):
        node.running = running
        await watch.sample(GRANT)
    await gone(watch, node)
    node.running = (SANDBOX, CHILD)
    where = await watch.standing(GRANT, limits=Limits(), boot="boot", wall=2000.0, free_for=0.0)
    assert (where.state, where.processes, where.others) == (PodState.LEFTOVER, (CHILD,), (SANDBOX,))


async def test_a_process_first_seen_once_the_pod_was_gone_is_nobodys_first() -> None:
    node = Node()
    watch = watching(node)
    await gone(watch, node)
    for _ in range(3):
        node.running = (SANDBOX, MAIN, CHILD)
        await watch.sample(GRANT)
    node.running = (SANDBOX, CHILD)
    assert await state(watch) is PodState.LIVING


async def test_a_sidecar_that_stood_before_the_first_grant_keeps_the_pod_from_being_over() -> None:
    """The container with the device may have handed it on, over a socket that both can reach."""
    node = Node()
    watch = watching(node)
    node.running = (SANDBOX, MAIN)
    await watch.sample(GRANT)
    await gone(watch, node)
    node.running = (SANDBOX,)
    assert await state(watch) is PodState.LIVING
    node.running = ()
    assert await state(watch) is PodState.OVER


async def test_an_adopted_pod_without_a_sandbox_is_not_over_while_its_main_process_lives() -> None:
    """The runtime keeps no sandbox process, so the main one was taken for it when the pod was adopted."""
    node = Node()
    watch = watching(node)
    node.running = (MAIN,)
    await gone(watch, node)
    assert await state(watch, grant=replace(GRANT, basis=Basis.ADOPTED, baseline=(MAIN,))) is PodState.LIVING


async def test_while_the_kubelet_cannot_be_read_the_sandbox_alone_keeps_nobody_waiting() -> None:
    node = Node()
    watch = watching(node)
    node.running = (SANDBOX,)
    assert await state(watch) is PodState.OVER


async def test_a_container_may_still_be_started_in_the_sandbox_of_a_pod_that_was_deleted_by_force() -> None:
    node = Node()
    watch = watching(node)
    node.running = (SANDBOX,)
    await gone(watch, node)
    assert await state(watch, wall=GRANT.at + 4.0) is PodState.LIVING
    node.running = ()
    assert await state(watch, wall=GRANT.at + 4.0) is PodState.OVER


async def test_a_clock_that_was_set_back_leaves_nobody_waiting_for_the_future() -> None:
    node = Node()
    watch = watching(node)
    node.running = (SANDBOX,)
    await gone(watch, node)
    where = await watch.standing(
        GRANT, limits=Limits(dying_grace=1.0), boot="boot", wall=GRANT.at - 31_536_000.0, free_for=0.0
    )
    assert where.state is PodState.LEFTOVER
    nobody = replace(GRANT, assignment=None)
    where = await watch.standing(nobody, limits=Limits(settle=5.0), boot="boot", wall=GRANT.at - 10.0, free_for=5.0)
    assert where.state is PodState.OVER


async def test_what_a_helper_left_that_was_seen_once_is_not_the_end_of_a_first_process() -> None:
    """It was gone by the next look, when nothing new is believed any more."""
    node = Node()
    watch = watching(node)
    node.running = (SANDBOX, HELPER)
    await watch.sample(GRANT)
    await gone(watch, node)
    node.running = (SANDBOX, MAIN)
    assert await state(watch) is PodState.LIVING


async def test_a_pod_ran_only_if_it_was_seen_to_since_the_grant() -> None:
    node = Node()
    watch = watching(node)
    assert not watch.ran(GRANT)
    node.running = (SANDBOX,)
    await watch.sample(GRANT)
    assert not watch.ran(GRANT), "its sandbox is not the container"
    node.running = (SANDBOX, MAIN)
    await watch.sample(GRANT)
    assert watch.ran(GRANT)
    assert watch.ran(replace(GRANT, at=GRANT.at + 60.0))
    assert not watch.ran(replace(GRANT, at=GRANT.at + 61.0)), "that was before this grant"


async def test_that_nobody_held_the_device_before_the_grant_does_not_end_a_pod_that_nobody_can_name() -> None:
    watch, nobody = watching(Node()), replace(GRANT, assignment=None)
    for age, expected in ((4.9, PodState.LIVING), (5.0, PodState.OVER)):
        where = await watch.standing(
            nobody, limits=Limits(settle=5.0), boot="boot", wall=GRANT.at + age, free_for=3600.0
        )
        assert where.state is expected


async def test_a_pod_that_cannot_be_read_is_ended_after_its_grace_and_never_the_one_that_asks() -> None:
    node = Node()
    watch = watching(node)
    await watch.refresh()
    node.running = None
    started = replace(GRANT, cgroups=("main-1",))
    assert (await own(watch, started)).state is PodState.LIVING
    assert (
        await own(watch, GRANT)
    ).state is PodState.OVER  # which container had the device is not known: holders decide
    await gone(watch, node)
    where = await watch.standing(started, limits=Limits(dying_grace=1.0), boot="boot", wall=2000.0, free_for=0.0)
    assert where.state is PodState.LEFTOVER
    assert where.unread


async def test_only_the_container_that_had_the_device_last_keeps_its_own_pod_waiting() -> None:
    node = Node()
    watch = watching(node)
    await watch.refresh()
    node.running = (SANDBOX, Process(3, 21, "main-1"), Process(5, 25, "plain-1"))
    assert (await own(watch, replace(GRANT, cgroups=("main-1",)))).processes == (Process(3, 21, "main-1"),)
    after_it = await own(watch, replace(GRANT, cgroups=("main-0",)))
    assert (after_it.state, after_it.elsewhere) == (PodState.OVER, True)


async def test_a_container_that_the_kubelet_does_not_give_the_device_any_more_keeps_its_own_pod_from_nothing() -> None:
    node = Node()
    watch = watching(node)
    node.running = (SANDBOX, Process(3, 21, "main-1"))
    assert (
        await own(watch, replace(GRANT, cgroups=("main-1",)))
    ).state is PodState.LIVING  # nothing says otherwise yet
    node.listed = False
    await watch.refresh()
    node.running = (SANDBOX, Process(3, 21, "main-1"))
    assert (await own(watch, replace(GRANT, cgroups=("main-1",)))).state is PodState.OVER


async def test_what_stood_there_when_a_pod_was_adopted_is_no_baseline_of_a_grant() -> None:
    """Nobody saw what came first: its main process may be among it."""
    node = Node()
    watch = watching(node)
    node.running = (SANDBOX, MAIN)
    adopted = replace(GRANT, basis=Basis.ADOPTED, baseline=())
    assert await watch.baseline(GRANT.assignment, [adopted]) == (SANDBOX, MAIN)
    assert await watch.baseline(GRANT.assignment, [adopted, GRANT]) == (SANDBOX,)
