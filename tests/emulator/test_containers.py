"""Containers of the emulated node are real processes: their cgroups, what ends with them, and what outlives what.

Every test runs with the environment marker, and with cgroups too where this machine permits writing them.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from scrubber.adapters.cgroups import MarkerContainers
from scrubber.domain.assignment import Pod
from scrubber.emulator import Kubelet, PodPhase, PodStatus, RestartPolicy, markers, writable_cgroup_parent
from scrubber.emulator.cgroups import is_populated, process_ids
from scrubber.emulator.containers import ContainerCommand, ContainerRuntime
from scrubber.emulator.pods import EmulatedPod
from tests.emulation import (
    RESOURCE,
    SOON,
    TinyPlugin,
    alive,
    container,
    emulated,
    ended,
    listed,
    pod,
    registered,
    serving,
    timings,
)

CHILD = "sleep 60 & echo $! > child.pid; mv child.pid child; "


def cgroups_can_be_written() -> bool:
    parent = writable_cgroup_parent()
    if parent is None:
        return False
    parent.rmdir()
    return True


IDENTITIES = ["marker", "cgroup"] if cgroups_can_be_written() else ["marker"]


@pytest.fixture(params=IDENTITIES)
async def kubelet(request: pytest.FixtureRequest, short_tmp: Path) -> AsyncIterator[Kubelet]:
    async with emulated(short_tmp, cgroups=request.param == "cgroup") as running:
        yield running


async def child_of(kubelet: Kubelet, root: Path) -> int:
    """Return the PID that ``CHILD`` wrote; the kubelet's bell rings often enough to check for it."""
    await kubelet.wait_until(lambda _node: (root / "child").exists(), SOON)
    return int((root / "child").read_text())


async def events_later(kubelet: Kubelet, count: int, concerned: EmulatedPod) -> None:
    """Wait until ``count`` more events have happened on the node, or nothing more will happen to the pod.

    A pod that is refused, because its plugin is not registered again yet, causes no events.
    """
    moment = len(kubelet.events) + count
    await kubelet.wait_until(lambda node: concerned.phase.terminal or len(node.events) >= moment, SOON)


async def test_log_directory_exists_before_the_sandbox_and_names_the_pod_uid(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin()) as plugin:
        seen: list[tuple[bool, int]] = []

        async def look(_devices: list[str]) -> None:
            seen.append((started.log_directory.is_dir(), len(markers.marked_processes({started.uid}, markers.SANDBOX))))

        plugin.on_pre_start = look
        started = await kubelet.run(pod("p", namespace="team"))
        await started.wait(PodPhase.RUNNING, SOON)
        assert seen == [(True, 1)]
        assert started.log_directory == kubelet.pod_logs / f"team_p_{started.uid}"


async def test_container_runs_in_its_own_directory_with_the_pods_marker(kubelet: Kubelet) -> None:
    done = await kubelet.run(pod("p", container("main", f"pwd; echo ${markers.POD_UID} ${markers.CONTAINER}", gpus=0)))
    await done.wait(PodPhase.SUCCEEDED, SOON)
    assert done.read_log("main").split() == [str(done.container_root("main")), done.uid, "main"]


async def test_each_container_and_the_sandbox_have_their_own_cgroup_below_the_pods(short_tmp: Path) -> None:
    parent = writable_cgroup_parent()
    async with Kubelet(short_tmp, timings=timings(), cgroup_parent=parent) as kubelet:
        running = await kubelet.run(pod("p", container("main", "exec sleep 60", gpus=0)))
        status = await running.wait(PodPhase.RUNNING, SOON)
        pid = status.containers["main"].pid
        assert markers.marked_processes({running.uid}, "main") == [pid]
        if parent is not None:
            groups = list((parent / "kubepods" / f"pod{running.uid}").glob("*/cgroup.procs"))
            assert [len(group.parent.name) for group in groups] == [64, 64]
            assert [pid] in [process_ids(group.parent) for group in groups]
    assert parent is None or not parent.exists()


def it_runs_again(restarts: int, now: PodStatus) -> bool:
    main = now.containers["main"]
    return main.restarts == restarts and main.pid is not None


async def test_each_container_run_has_its_own_container_id_and_the_sandbox_stays_the_same(
    short_tmp: Path,
) -> None:
    """Otherwise the first run's dead process would turn the second run's processes into leftovers."""
    async with emulated(short_tmp, cgroups=False) as kubelet:
        forever = container("main", "exec sleep 60", gpus=0, restart=RestartPolicy.ALWAYS)
        running = await kubelet.run(pod("p", forever, namespace="team"))
        seen: list[dict[str, str]] = []
        for restarts in (0, 1):
            status = await running.wait(partial(it_runs_again, restarts), SOON)
            found = await MarkerContainers().processes(Pod("team", "p", running.uid))
            seen.append({process.container.partition("#")[0]: process.container for process in found})
            os.kill(status.containers["main"].pid or 0, 9)
    first, second = seen
    assert first.keys() == second.keys() == {"main", markers.SANDBOX}
    assert first[markers.SANDBOX] == second[markers.SANDBOX]
    assert first["main"] != second["main"]


async def test_container_ends_with_its_first_process(kubelet: Kubelet) -> None:
    done = await kubelet.run(pod("p", container("main", CHILD, gpus=0)))
    await done.wait(PodPhase.SUCCEEDED, SOON)
    assert not alive(await child_of(kubelet, done.container_root("main")))


@pytest.mark.parametrize("identity", IDENTITIES)
async def test_children_of_a_pod_may_outlive_the_pod_and_end_with_the_node(short_tmp: Path, identity: str) -> None:
    async with emulated(short_tmp, cgroups=identity == "cgroup") as kubelet:
        done = await kubelet.run(pod("p", container("main", CHILD, gpus=0), leave_children=True))
        await done.wait(PodPhase.SUCCEEDED, SOON)
        await kubelet.wait_until(lambda _node: not done.active, SOON)
        child = await child_of(kubelet, done.container_root("main"))
        assert alive(child)
    assert not alive(child)


async def test_cgroup_of_a_leftover_exists_until_the_leftover_ends(short_tmp: Path) -> None:
    parent = writable_cgroup_parent()
    async with Kubelet(short_tmp, timings=timings(), cgroup_parent=parent) as kubelet:
        done = await kubelet.run(pod("p", container("main", CHILD, gpus=0), leave_children=True))
        await done.wait(PodPhase.SUCCEEDED, SOON)
        await kubelet.wait_until(lambda _node: not done.active, SOON)
        child = await child_of(kubelet, done.container_root("main"))
        assert markers.marked_processes({done.uid}) == [child]
        if parent is not None:
            group = parent / "kubepods" / f"pod{done.uid}"
            assert is_populated(group)
            os.kill(child, 9)
            await kubelet.wait_until(lambda _node: not group.exists(), SOON)


async def test_deleted_pod_receives_sigterm_before_sigkill(kubelet: Kubelet) -> None:
    polite = "trap 'echo terminating; exit 0' TERM; touch ready; while true; do sleep 0.01; done"
    running = await kubelet.run(pod("p", container("main", polite, gpus=0)))
    await running.wait(PodPhase.RUNNING, SOON)
    await kubelet.wait_until(lambda _node: (running.container_root("main") / "ready").exists(), SOON)
    await kubelet.delete(running, grace=SOON)
    assert running.read_log("main") == "terminating\n"


async def test_sidecars_are_terminated_after_the_main_containers_in_reverse_order(kubelet: Kubelet) -> None:
    script = "trap 'echo {0} >> {1}/order; exit 0' TERM; touch ready; while true; do sleep 0.01; done"
    place = kubelet.root
    init = [
        container(name, script.format(name, place), gpus=0, restart=RestartPolicy.ALWAYS) for name in ("one", "two")
    ]
    running = await kubelet.run(pod("p", container("main", script.format("main", place), gpus=0), init=init))
    roots = [running.container_root(name) for name in ("one", "two", "main")]
    await kubelet.wait_until(lambda _node: all((root / "ready").exists() for root in roots), SOON)
    await kubelet.delete(running, grace=SOON)
    assert (place / "order").read_text().split() == ["main", "two", "one"]


@pytest.mark.parametrize(
    ("init", "main", "expected"),
    [
        pytest.param([("init", 2)], 1, 2, id="an init container that asks for more"),
        pytest.param([("sidecar", 1)], 1, 2, id="a sidecar beside the main container"),
        pytest.param([("sidecar", 1), ("init", 1)], 0, 2, id="an init container beside an earlier sidecar"),
        pytest.param([("init", 1), ("sidecar", 1)], 0, 1, id="a sidecar after an init container"),
    ],
)
def test_pod_requests_the_maximum_of_its_concurrent_containers(
    init: list[tuple[str, int]], main: int, expected: int
) -> None:
    restarts = {"init": RestartPolicy.NEVER, "sidecar": RestartPolicy.ALWAYS}
    before = [container(f"c{number}", gpus=gpus, restart=restarts[kind]) for number, (kind, gpus) in enumerate(init)]
    assert pod("p", container("main", gpus=main), init=before).request(RESOURCE) == expected


async def test_pod_that_does_not_end_is_killed_after_its_grace_period(kubelet: Kubelet) -> None:
    stubborn = "trap '' TERM; touch ready; while true; do sleep 0.01; done"
    running = await kubelet.run(pod("p", container("main", stubborn, gpus=0)))
    status = await running.wait(PodPhase.RUNNING, SOON)
    await kubelet.wait_until(lambda _node: (running.container_root("main") / "ready").exists(), SOON)
    await kubelet.delete(running, grace=0.05)
    assert not alive(status.containers["main"].pid or 0)
    assert running.status.containers["main"].exit_code == 128 + 9
    assert running not in kubelet.pods


async def test_forced_deletion_frees_the_device_while_its_holder_runs_beside_the_next_pod(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"])):
        last = await kubelet.run(pod("last", container("main", "exec sleep 60")))
        holder = (await last.wait(PodPhase.RUNNING, SOON)).containers["main"].pid or 0
        await kubelet.delete(last, force=True, linger=3600.0)
        assert await listed(kubelet) == {}
        following = await kubelet.run(pod("next"))
        assert following.device_ids == ("a",)
        await following.wait(PodPhase.RUNNING, SOON)
        assert alive(holder)


async def test_processes_of_a_force_deleted_pod_end_eventually(kubelet: Kubelet) -> None:
    last = await kubelet.run(pod("last", container("main", f"{CHILD} exec sleep 60", gpus=0)))
    holder = (await last.wait(PodPhase.RUNNING, SOON)).containers["main"].pid or 0
    child = await child_of(kubelet, last.container_root("main"))
    await kubelet.delete(last, force=True, linger=0.01)
    await ended(holder)
    await ended(child)


async def test_processes_of_a_pod_force_deleted_before_a_restarted_kubelet_has_admitted_it_live_on(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = await kubelet.run(pod("over", container("main", "true", gpus=0, restart=RestartPolicy.NEVER)))
    await over.wait(PodPhase.SUCCEEDED, SOON)
    last = await kubelet.run(pod("last", container("main", "exec sleep 60", gpus=0)))
    holder = (await last.wait(PodPhase.RUNNING, SOON)).containers["main"].pid or 0
    admitting, go_on, remove_pod = asyncio.Event(), asyncio.Event(), ContainerRuntime.remove_pod

    async def remove_later(self: ContainerRuntime, uid: str) -> None:
        if uid == over.uid:
            admitting.set()
            await go_on.wait()
        await remove_pod(self, uid)

    monkeypatch.setattr(ContainerRuntime, "remove_pod", remove_later)
    await kubelet.restart()
    await admitting.wait()
    await kubelet.delete(last, force=True, linger=3600.0)
    go_on.set()
    following = await kubelet.run(pod("next", container("main", gpus=0)))
    await following.wait(PodPhase.RUNNING, SOON)
    assert alive(holder)


async def test_pod_force_deleted_during_container_creation_leaves_nothing(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"])) as plugin:
        requested, answer = asyncio.Event(), asyncio.Event()

        async def hold(_devices: list[str]) -> None:
            requested.set()
            await answer.wait()

        plugin.on_pre_start = hold
        starting = await kubelet.run(pod("p"))
        await asyncio.wait_for(requested.wait(), SOON)
        await kubelet.delete(starting, force=True)
        answer.set()
        await kubelet.wait_until(lambda _node: not markers.marked_processes({starting.uid}), SOON)
        assert "ContainerStarted" not in [event.name for event in kubelet.events]


async def test_containers_run_while_the_kubelet_is_down_and_their_end_is_noticed_later(kubelet: Kubelet) -> None:
    running = await kubelet.run(pod("p", container("main", "until test -e die; do sleep 0.01; done", gpus=0)))
    pid = (await running.wait(PodPhase.RUNNING, SOON)).containers["main"].pid or 0
    await kubelet.stop()
    assert alive(pid)
    (running.container_root("main") / "die").touch()
    await ended(pid)
    assert running.status.phase is PodPhase.RUNNING
    await kubelet.start()
    await running.wait(PodPhase.SUCCEEDED, SOON)


async def test_graceful_deletion_waits_for_a_stopped_kubelet(kubelet: Kubelet) -> None:
    running = await kubelet.run(pod("p", container("main", "exec sleep 60", gpus=0)))
    pid = (await running.wait(PodPhase.RUNNING, SOON)).containers["main"].pid or 0
    await kubelet.stop()
    deletion = asyncio.create_task(kubelet.delete(running, grace=0.05))
    await running.wait(lambda now: now.deleting, SOON)
    assert alive(pid)
    await kubelet.start()
    await asyncio.wait_for(deletion, SOON)
    assert not alive(pid)


async def test_logs_of_a_removed_pod_are_deleted(short_tmp: Path) -> None:
    async with emulated(short_tmp, log_directory_removal=0.02) as kubelet:
        running = await kubelet.run(pod("p", container(gpus=0)))
        await running.wait(PodPhase.RUNNING, SOON)
        await kubelet.delete(running)
        await kubelet.wait_until(lambda _node: not running.log_directory.exists(), SOON)


async def test_each_container_run_has_its_own_log(kubelet: Kubelet) -> None:
    flaky = container(
        "main", "echo run; test -e once || { touch once; exit 1; }", gpus=0, restart=RestartPolicy.ON_FAILURE
    )
    done = await kubelet.run(pod("p", flaky))
    await done.wait(PodPhase.SUCCEEDED, SOON)
    assert [done.read_log("main", 0), done.read_log("main", 1)] == ["run\n", "run\n"]


@pytest.mark.parametrize("identity", IDENTITIES)
async def test_closing_the_node_ends_every_process(short_tmp: Path, identity: str) -> None:
    async with emulated(short_tmp, cgroups=identity == "cgroup") as kubelet:
        stubborn = container("main", f"trap '' TERM; {CHILD} sleep 60", gpus=0, restart=RestartPolicy.ALWAYS)
        running = await kubelet.run(pod("p", stubborn))
        crashing = await kubelet.run(pod("q", container("main", "exit 1", gpus=0, restart=RestartPolicy.ALWAYS)))
        await crashing.wait(lambda now: now.containers["main"].restarts > 0, SOON)
        await child_of(kubelet, running.container_root("main"))
    assert markers.marked_processes({running.uid, crashing.uid}) == []


@pytest.mark.parametrize("turns", range(12))
async def test_removed_pod_leaves_no_process_although_a_container_of_it_was_being_started(turns: int) -> None:
    runtime = ContainerRuntime(None, random.Random(turns))
    await runtime.run_sandbox("uid-1")
    start = asyncio.ensure_future(runtime.start("uid-1", "main", ContainerCommand(("sleep", "60"))))
    for _ in range(turns):
        await asyncio.sleep(0)
    await runtime.remove_pod("uid-1")
    await asyncio.wait({start})
    assert markers.marked_processes({"uid-1"}) == []
    await runtime.close()


@pytest.mark.parametrize("identity", IDENTITIES)
async def test_kubelet_restarts_at_any_moment_lose_no_pod_and_no_process(short_tmp: Path, identity: str) -> None:
    async with (
        emulated(short_tmp, cgroups=identity == "cgroup") as kubelet,
        serving(TinyPlugin(["a"]), kubelet.plugins_registry / "tiny-reg.sock"),
    ):
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 1, SOON)
        uids = set()
        for number in range(15):
            interrupted = kubelet.create(pod(f"p{number}", container("main", "true"), container("none", gpus=0)))
            uids.add(interrupted.uid)
            await events_later(kubelet, number % 5, interrupted)
            await kubelet.restart()
            await interrupted.wait(lambda now: now.containers["main"].exit_code == 0 or bool(now.reason), SOON)
            await kubelet.delete(interrupted, grace=0)
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 1, SOON)
        assert markers.marked_processes(uids) == []
        assert (await kubelet.run(pod("last"))).device_ids == ("a",)


async def test_process_in_the_middle_of_exec_is_not_missed() -> None:
    """Between two programs a process has no readable environment."""
    seen = []
    for number in range(100):
        marker = markers.marker_environment(f"uid-{number}", "main", "1")
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", "exec sh -c 'exec sleep 60'", env=os.environ | marker
        )
        seen += [markers.marked_processes({f"uid-{number}"}) == [process.pid] for _ in range(3)]
        process.kill()
        await process.wait()
    assert all(seen)


async def test_second_pod_of_the_same_name_is_refused_and_a_later_one_has_another_uid(kubelet: Kubelet) -> None:
    first = await kubelet.run(pod("web-0", container(gpus=0)))
    with pytest.raises(ValueError, match="already exists"):
        kubelet.create(pod("web-0"))
    await kubelet.delete(first, force=True)
    second = await kubelet.run(pod("web-0", container(gpus=0)))
    assert second.uid != first.uid


async def test_kubelet_socket_directories_are_closed_to_other_users(kubelet: Kubelet) -> None:
    for directory in (kubelet.device_plugins, kubelet.plugins_registry, kubelet.pod_resources_socket.parent):
        assert directory.stat().st_mode & 0o007 == 0


async def test_kubelet_whose_start_failed_can_be_closed_and_started_again(short_tmp: Path) -> None:
    blocked = short_tmp / "pod-resources" / "kubelet.sock"
    blocked.mkdir(parents=True)
    parent = writable_cgroup_parent()
    kubelet = Kubelet(short_tmp, cgroup_parent=parent)
    with pytest.raises(RuntimeError):
        await kubelet.start()
    await kubelet.close()
    await kubelet.close()
    assert parent is None or not parent.exists()
    with pytest.raises(RuntimeError, match="closed"):
        await kubelet.start()


async def test_wait_timeout_reports_the_current_state(kubelet: Kubelet) -> None:
    failed = await kubelet.run(pod("p"))
    with pytest.raises(RuntimeError, match="will never be Running: Failed UnexpectedAdmissionError"):
        await failed.wait(PodPhase.RUNNING, SOON)
    with pytest.raises(TimeoutError, match="did not reach"):
        await failed.wait(lambda now: now.phase is PodPhase.RUNNING, 0.01)
    with pytest.raises(TimeoutError, match="was not met"):
        await kubelet.wait_until(lambda node: node.capacity("x/y") == 1, 0.01)
