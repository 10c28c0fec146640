"""State of pods: which process of a container was its first, and when a deleted pod is over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from scrubber.adapters.clock import SystemClock
from scrubber.domain.assignment import Assignment, Claim, KubeletReading, Pod, Process, Trust
from scrubber.domain.errors import Unreadable
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.pods import PodLiveness, PodState, RemainingCgroups
from scrubber.domain.policy import Limits
from scrubber.domain.record import Grant
from scrubber.engine.pods import PodTracker

POD = Pod("team-a", "job", "uid-a")
SANDBOX = Process(1, 10, "sandbox")
HELPER, MAIN, CHILD = Process(2, 20, "main"), Process(3, 21, "main"), Process(4, 30, "main")
GRANT = Grant(1, Assignment(POD, "main", frozenset({"gpu"})), HandOverKind.UNKNOWN, 1000.0, "boot", baseline=(SANDBOX,))


class Node:
    """A kubelet with a list that the test sets, and the processes of one pod."""

    def __init__(self) -> None:
        self.listed = True
        self.at = 0.0
        self.passed = 0.0
        """Seconds since the last reading."""
        self.reads = 0
        """How often the processes were read."""
        self.running: tuple[Process, ...] | None = ()
        """None: they cannot be listed."""
        self.cgroups: RemainingCgroups | None = None
        self.starts: Mapping[str, int] | None = {}
        """How often each container was started, by the pod's logs; None: they cannot be read."""

    async def read(self) -> KubeletReading:
        self.at += 1.0 + self.passed
        self.passed = 0.0
        mine = (Assignment(POD, "main", frozenset({"gpu"})),) if self.listed else ()
        return KubeletReading(Trust.TRUSTED, mine, started_at=self.at)

    async def processes(self, pod: Pod) -> tuple[Process, ...]:
        self.reads += 1
        if self.running is None:
            raise Unreadable("There are too many.")
        return self.running

    async def pod_uid_of(self, pid: int) -> str | None:
        return POD.uid

    def container_starts(self, pod: Pod) -> Mapping[str, int] | None:
        return self.starts

    def watch_first_container(self, pod: Pod) -> None:
        return None

    def watch_end(self, pod: Pod) -> None:
        return None

    async def require_job_cgroups(self) -> None: ...

    async def remaining_cgroups(self, pod: Pod) -> RemainingCgroups | None:
        return self.cgroups

    async def terminate(self, pod: Pod, leftovers: Iterable[Process], deadline: float) -> tuple[Process, ...]:
        return tuple(leftovers)

    async def kill_cgroups(self, pod: Pod, deadline: float) -> bool:
        return False

    def not_covered(self) -> tuple[str, ...]:
        return ()


class Now(SystemClock):
    """A clock that stays at a minute after the grant; its monotonic time is that of the node, a second after a reading."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.offset = 0.0

    def monotonic(self) -> float:
        return self._node.at + self._node.passed + 1.0

    def wall(self) -> float:
        return GRANT.at + 60.0 + self.offset


def watching(node: Node, clock: Now | None = None) -> PodTracker:
    watch = PodTracker(assignments=node, containers=node, pod_cgroups=node, clock=clock or Now(node))
    watch.track([POD])
    return watch


async def state(watch: PodTracker, *, wall: float = 2000.0, grant: Grant = GRANT) -> PodState:
    where = await watch.liveness(grant, limits=Limits(), boot="boot", wall=wall, free_for=0.0)
    return where.state


async def own(watch: PodTracker, grant: Grant) -> PodLiveness:
    """Return the liveness of the earlier use by ``POD`` while one of its containers is about to start."""
    return await watch.liveness(grant, limits=Limits(), boot="boot", wall=2000.0, free_for=0.0, starting_pod=POD)


async def sample(watch: PodTracker, node: Node, grant: Grant = GRANT) -> bool:
    """Sample the pod a second after the last sample."""
    node.passed += 1.0
    return await watch.sample_processes(grant)


async def gone(watch: PodTracker, node: Node) -> None:
    """Remove the pod from the kubelet's list, for two readings."""
    node.listed = False
    await watch.refresh()
    await watch.refresh()


async def test_grant_of_an_earlier_boot_is_over_whatever_runs_now() -> None:
    node = Node()
    watch = watching(node)
    node.running = (SANDBOX, MAIN)
    await watch.refresh()
    assert await state(watch, grant=replace(GRANT, boot="the boot before")) is PodState.OVER


@pytest.mark.parametrize(
    ("listed", "running", "expected"),
    [(False, (), True), (True, (), False), (False, (CHILD,), False), (False, None, False)],
    ids=["neither listed nor running", "listed", "running", "unreadable"],
)
async def test_pod_is_gone_once_it_is_neither_listed_nor_running(
    listed: bool, running: tuple[Process, ...] | None, expected: bool
) -> None:
    node = Node()
    watch = watching(node)
    await watch.refresh()
    if not listed:
        await gone(watch, node)
    node.running = running
    assert await watch.is_gone(POD) is expected


async def test_runtime_helper_that_died_before_the_main_process_started_does_not_make_the_main_process_a_leftover() -> (
    None
):
    node = Node()
    watch = watching(node)
    for running in ((SANDBOX, HELPER), (SANDBOX, MAIN), (SANDBOX, MAIN)):
        node.running = running
        await sample(watch, node)
    await gone(watch, node)
    assert await state(watch) is PodState.ALIVE


async def test_process_that_outlives_a_first_process_observed_twice_is_a_leftover() -> None:
    node = Node()
    watch = watching(node)
    for running in ((SANDBOX, MAIN), (SANDBOX, MAIN, CHILD)):
        node.running = running
        await sample(watch, node)
    await gone(watch, node)
    node.running = (SANDBOX, CHILD)
    where = await watch.liveness(GRANT, limits=Limits(), boot="boot", wall=2000.0, free_for=0.0)
    assert (where.state, where.processes, where.unproven_processes) == (PodState.LEFTOVER, (CHILD,), (SANDBOX,))


CLAIM = Claim("uid-c", "team-a", "gpu", "gpu.example.com", (POD,), listed_pods=(POD,))
CLAIMED = replace(GRANT, assignment=None, claim=CLAIM)
RELEASED = replace(CLAIMED, claim=replace(CLAIM, released_at=1500.0))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (((SANDBOX, MAIN), (SANDBOX, MAIN, CHILD), (SANDBOX, CHILD), (SANDBOX, CHILD)), PodState.LEFTOVER),
        (((SANDBOX, HELPER), (SANDBOX, HELPER), (SANDBOX, MAIN, CHILD), (SANDBOX, CHILD)), PodState.ALIVE),
        (((SANDBOX, MAIN, CHILD), (SANDBOX, CHILD), (SANDBOX, CHILD)), PodState.ALIVE),
    ],
    ids=["a child beside the first process", "no child of the helper", "first process seen once"],
)
async def test_process_that_outlives_the_first_one_before_its_claim_is_released_is_a_leftover_if_it_ran_beside_it(
    samples: tuple[tuple[Process, ...], ...], expected: PodState
) -> None:
    node = Node()
    watch = watching(node)
    for running in samples:
        node.running = running
        for each in CLAIMED.by_pod():
            await sample(watch, node, each)
    node.running = (CHILD,)
    (released,) = RELEASED.by_pod()
    assert await state(watch, grant=released) is expected


async def test_process_first_observed_after_the_pod_was_gone_never_counts_as_a_first_process() -> None:
    node = Node()
    watch = watching(node)
    await gone(watch, node)
    for _ in range(3):
        node.running = (SANDBOX, MAIN, CHILD)
        await sample(watch, node)
    node.running = (SANDBOX, CHILD)
    assert await state(watch) is PodState.ALIVE


async def test_sidecar_that_ran_before_the_first_grant_keeps_the_pod_alive() -> None:
    """The container with the device may have passed it on over a shared socket."""
    node = Node()
    watch = watching(node)
    node.running = (SANDBOX, MAIN)
    await sample(watch, node)
    await gone(watch, node)
    node.running = (SANDBOX,)
    assert await state(watch) is PodState.ALIVE
    node.running = ()
    assert await state(watch) is PodState.OVER


async def test_adopted_pod_without_a_sandbox_is_alive_while_its_main_process_lives() -> None:
    """The runtime keeps no sandbox process, so the main process was mistaken for it when the pod was adopted."""
    node = Node()
    watch = watching(node)
    node.running = (MAIN,)
    await gone(watch, node)
    assert await state(watch, grant=replace(GRANT, basis=Basis.ADOPTED, baseline=(MAIN,))) is PodState.ALIVE


async def test_sandbox_alone_keeps_no_pod_alive_while_the_kubelet_cannot_be_read() -> None:
    node = Node()
    watch = watching(node)
    node.running = (SANDBOX,)
    assert await state(watch) is PodState.OVER


async def test_sandbox_of_a_force_deleted_pod_keeps_the_pod_alive_for_a_while_after_its_grant() -> None:
    node = Node()
    watch = watching(node)
    node.running = (SANDBOX,)
    await gone(watch, node)
    assert await state(watch, wall=GRANT.at + 4.0) is PodState.ALIVE
    node.running = ()
    assert await state(watch, wall=GRANT.at + 4.0) is PodState.OVER


async def test_clock_set_back_does_not_prolong_the_grace_period_of_a_pod() -> None:
    node = Node()
    watch = watching(node)
    node.running = (SANDBOX,)
    await gone(watch, node)
    where = await watch.liveness(
        GRANT, limits=Limits(leftover_grace_period=1.0), boot="boot", wall=GRANT.at - 31_536_000.0, free_for=0.0
    )
    assert where.state is PodState.LEFTOVER
    unassigned = replace(GRANT, assignment=None)
    where = await watch.liveness(
        unassigned, limits=Limits(unknown_pod_idle_period=5.0), boot="boot", wall=GRANT.at - 10.0, free_for=5.0
    )
    assert where.state is PodState.OVER


async def test_helper_process_observed_once_does_not_count_as_a_dead_first_process() -> None:
    """It was gone at the next sample, and by then no new process is accepted as the first."""
    node = Node()
    watch = watching(node)
    node.running = (SANDBOX, HELPER)
    await sample(watch, node)
    await gone(watch, node)
    node.running = (SANDBOX, MAIN)
    assert await state(watch) is PodState.ALIVE


async def test_helper_process_does_not_count_twice_because_its_pod_has_several_devices() -> None:
    node = Node()
    watch = watching(node)
    node.running = (SANDBOX, HELPER)
    await sample(watch, node)
    await watch.sample_processes(replace(GRANT, sequence=2))
    assert node.reads == 1
    await gone(watch, node)
    node.running = (SANDBOX, MAIN)
    assert await state(watch) is PodState.ALIVE


async def test_pod_whose_first_processes_are_known_is_sampled_every_five_seconds_until_something_changes() -> None:
    node = Node()
    watch = watching(node)
    await watch.refresh()
    node.running = (SANDBOX, MAIN)
    assert [await sample(watch, node) for _ in range(6)] == [True] * 6
    assert node.reads == 2
    assert await sample(watch, node)
    assert node.reads == 3
    watch.note_container_created(POD, GRANT.at + 60.0)
    assert await sample(watch, node)
    assert node.reads == 4, "a container was created"
    assert await sample(watch, node, replace(GRANT, at=GRANT.at + 61.0))
    assert node.reads == 5, "the sample is older than the grant"
    node.listed = False
    await watch.refresh()
    assert not await sample(watch, node), "the kubelet no longer lists the pod, so its liveness is determined"
    assert node.reads == 5


async def test_sample_of_a_pod_without_processes_beyond_its_baseline_proves_nothing() -> None:
    node = Node()
    watch = watching(node)
    for running in ((SANDBOX,), (), None):
        node.running = running
        assert not await sample(watch, node)
    assert node.reads == 3


async def test_pod_has_run_only_if_its_container_was_observed_since_the_grant() -> None:
    node = Node()
    watch = watching(node)
    assert not watch.has_run(GRANT)
    node.running = (SANDBOX,)
    await sample(watch, node)
    assert not watch.has_run(GRANT), "its sandbox is not the container"
    node.running = (SANDBOX, MAIN)
    await sample(watch, node)
    assert watch.has_run(GRANT)
    assert watch.has_run(replace(GRANT, at=GRANT.at + 60.0))
    assert not watch.has_run(replace(GRANT, at=GRANT.at + 61.0)), "that was before this grant"


async def test_run_before_the_clock_was_set_back_is_no_run_since_a_later_grant() -> None:
    node = Node()
    clock = Now(node)
    watch = watching(node, clock)
    node.running = (SANDBOX, MAIN)
    await sample(watch, node)
    clock.offset = -3600.0
    assert not watch.has_run(GRANT)
    later = replace(GRANT, at=clock.wall())
    clock.offset = 0.0
    assert not watch.has_run(later), "an hour later it is still unknown"


async def test_idle_time_of_a_device_before_the_grant_does_not_end_an_unknown_pod() -> None:
    watch, unassigned = watching(Node()), replace(GRANT, assignment=None)
    for age, expected in ((4.9, PodState.ALIVE), (5.0, PodState.OVER)):
        where = await watch.liveness(
            unassigned, limits=Limits(unknown_pod_idle_period=5.0), boot="boot", wall=GRANT.at + age, free_for=3600.0
        )
        assert where.state is expected


async def test_unreadable_pod_is_a_leftover_after_its_grace_period_unless_it_is_the_requesting_pod() -> None:
    node = Node()
    watch = watching(node)
    await watch.refresh()
    node.running = None
    started = replace(GRANT, cgroups=("main-1",))
    assert (await own(watch, started)).state is PodState.ALIVE
    assert (await own(watch, GRANT)).state is PodState.OVER  # the container with the device is unknown: holders decide
    await gone(watch, node)
    where = await watch.liveness(
        started, limits=Limits(leftover_grace_period=1.0), boot="boot", wall=2000.0, free_for=0.0
    )
    assert where.state is PodState.LEFTOVER
    assert where.unreadable


async def test_requesting_pod_waits_only_for_its_own_container_that_had_the_device_last() -> None:
    node = Node()
    watch = watching(node)
    await watch.refresh()
    node.running = (SANDBOX, Process(3, 21, "main-1"), Process(5, 25, "plain-1"))
    assert (await own(watch, replace(GRANT, cgroups=("main-1",)))).processes == (Process(3, 21, "main-1"),)
    after_it = await own(watch, replace(GRANT, cgroups=("main-0",)))
    assert (after_it.state, after_it.in_other_containers) == (PodState.OVER, True)


async def test_container_that_the_kubelet_no_longer_assigns_the_device_does_not_delay_its_own_pod() -> None:
    node = Node()
    watch = watching(node)
    node.running = (SANDBOX, Process(3, 21, "main-1"))
    assert (await own(watch, replace(GRANT, cgroups=("main-1",)))).state is PodState.ALIVE  # no evidence against it yet
    node.listed = False
    await watch.refresh()
    node.running = (SANDBOX, Process(3, 21, "main-1"))
    assert (await own(watch, replace(GRANT, cgroups=("main-1",)))).state is PodState.OVER


async def test_processes_present_at_the_adoption_of_a_pod_are_no_baseline_of_a_later_grant() -> None:
    """Their order of creation is unknown: the main process may be among them."""
    node = Node()
    watch = watching(node)
    node.running = (SANDBOX, MAIN)
    adopted = replace(GRANT, basis=Basis.ADOPTED, baseline=())
    assert await watch.baseline(GRANT.assignment, [adopted]) == (SANDBOX, MAIN)
    assert await watch.baseline(GRANT.assignment, [adopted, GRANT]) == (SANDBOX,)


@pytest.mark.parametrize(
    ("starts", "listed", "expected"),
    [
        ({"main": 0}, True, PodState.OVER),
        ({"init": 1, "main": 0}, True, PodState.ALIVE),
        (None, True, PodState.ALIVE),
        ({"main": 0}, False, PodState.ALIVE),
    ],
    ids=["only a sandbox", "an init container was started", "logs that cannot be read", "not listed"],
)
async def test_released_pod_counts_as_never_started_only_if_the_kubelet_lists_it_and_its_logs_show_that(
    starts: dict[str, int] | None, listed: bool, expected: PodState
) -> None:
    node = Node()
    watch = watching(node)
    node.running, node.starts = (SANDBOX,), starts
    (grant,) = RELEASED.by_pod()
    assert grant.claim is not None
    watch.note_withdrawn(grant.claim.uid, [grant.claim])
    node.passed += Limits().leftover_grace_period
    if listed:
        await watch.refresh()
    else:
        await gone(watch, node)
    assert await state(watch, grant=grant) is expected


@pytest.mark.parametrize(
    ("cgroups", "expected"),
    [(RemainingCgroups(pod=True), False), (RemainingCgroups(pod=False), True), (None, True)],
)
async def test_pod_of_a_claim_counts_as_removed_only_once_its_own_cgroup_is_gone(
    cgroups: RemainingCgroups | None, expected: bool
) -> None:
    """The kubelet may leave out a pod whose containers it has not removed yet; None: pods are not known by cgroups."""
    node = Node()
    watch = watching(node)
    await watch.refresh()
    node.cgroups = cgroups
    await gone(watch, node)
    facts = await watch.claim_pod_facts(POD, (), limits=Limits())
    assert (facts.has_processes, facts.is_removed) == (False, expected)
