"""What only cgroups can do, and where a wrong root or a tenant could mislead them. Real cgroups, v2 and v1."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber.adapters.cgroups import CgroupContainers, discover_root
from scrubber.adapters.cgroups.terminate import LeftoverProof
from scrubber.domain.assignment import Pod, Process
from scrubber.domain.errors import InvalidConfiguration, Unreadable
from tests.pods import (
    CGROUP1,
    CGROUP2,
    CGROUP_WAYS,
    CHILD_ON_REQUEST,
    DEADLINE,
    CgroupGround,
    Node,
    Started,
    ground_of,
    lives,
    new_pod,
    node_of,
    only_with,
)

__test__ = bool(CGROUP_WAYS)  # tests.pods reports what cannot be tested on this machine

RUNNER = """
# Never more than one process, and never the same for long: every child's parent is gone by the time it is read.
until = time.monotonic() + 60
print("ready", flush=True)
while time.monotonic() < until:
    if os.fork():
        os._exit(0)
"""

HOPPER = """
# Between two cgroups without end: a reader of one after the other may find it in neither.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
places = [open(f"{each}/cgroup.procs", "w") for each in sys.argv[1:]]
until = time.monotonic() + 60
print("ready", flush=True)
while time.monotonic() < until:
    for place in places:
        place.write("0")
        place.flush()
"""

LAYOUTS = {
    "systemd-guaranteed": ("kubepods.slice", "kubepods-pod{escaped}.slice"),
    "systemd-burstable": ("kubepods.slice", "kubepods-burstable.slice/kubepods-burstable-pod{escaped}.slice"),
    "systemd-besteffort": ("kubepods.slice", "kubepods-besteffort.slice/kubepods-besteffort-pod{escaped}.slice"),
    "systemd-below-a-root": (
        "kubelet.slice/kubelet-kubepods.slice",
        "kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{escaped}.slice",
    ),
    "cgroupfs-guaranteed": ("kubepods", "pod{uid}"),
    "cgroupfs-burstable": ("kubepods", "burstable/pod{uid}"),
    "cgroupfs-besteffort": ("kubepods", "besteffort/pod{uid}"),
    "cgroupfs-below-a-root": ("kubelet/kubepods", "besteffort/pod{uid}"),
}


def move(process: Started, cgroup: Path) -> None:
    cgroup.mkdir(parents=True, exist_ok=True)
    (cgroup / "cgroup.procs").write_text(str(process.pid))


@pytest.fixture(params=CGROUP_WAYS)
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    async with node_of(ground_of(request.param)) as made:
        yield made


def ground(node: Node) -> CgroupGround:
    assert isinstance(node.ground, CgroupGround)
    return node.ground


@only_with(CGROUP2)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_pod_is_found_in_every_cgroup_layout_of_kubelet_and_runtime(layout: str) -> None:
    assert CGROUP2 is not None
    kubepods, directory = LAYOUTS[layout]
    made = CgroupGround((CGROUP2,), kubepods=kubepods, pod_directory=directory)
    async with node_of(made) as node:
        pod = new_pod()
        main = await node.start(pod, f"cri-containerd-{'ab' * 32}.scope")
        containers = made.containers()
        assert [process.pid for process in await containers.processes(pod)] == [main.pid]
        assert await containers.pod_uid_of(main.pid) == pod.uid
        assert containers.may_run(pod.uid or "")
        assert not containers.may_run(new_pod("other").uid or "")


async def test_process_in_a_nested_cgroup_counts_for_its_container(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    inner = await node.start(pod, "main/inner/most")
    [process] = await containers.processes(pod)
    assert (process.pid, process.container) == (inner.pid, "main")
    assert await containers.terminate(pod, [process], DEADLINE) == ()
    await inner.ended()


async def test_leftover_moved_to_another_pods_cgroup_is_not_killed_and_is_reported_alive(node: Node) -> None:
    pod, other, containers = new_pod(), new_pod("other"), node.ground.containers()
    await node.start(other, "main")
    moved = await node.start(pod, "main")
    leftovers = await containers.processes(pod)
    for cgroup in ground(node).cgroups(other, "main"):
        (cgroup / "cgroup.procs").write_text(str(moved.pid))
    assert await containers.terminate(pod, leftovers, DEADLINE) == leftovers
    assert moved.runs


async def test_process_in_a_new_cgroup_beside_its_container_still_belongs_to_its_pod(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    moved = await node.start(pod, "main")
    for beside, container in (("hidden", "hidden"), ("hidden/kubepods/pod0", "hidden"), ("", "")):
        for cgroup in ground(node).cgroups(pod, beside):
            move(moved, cgroup)
        found = await containers.processes(pod)
        assert [(process.pid, process.container) for process in found] == [(moved.pid, container)]
        assert await containers.pod_uid_of(moved.pid) == pod.uid
    assert await containers.terminate(pod, await containers.processes(pod), DEADLINE) == ()
    await moved.ended()


async def test_process_that_moves_between_nested_cgroups_is_never_missed(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    await node.start(pod, "sandbox")
    places = [cgroup for each in ("main/a", "main/b") for cgroup in ground(node).cgroups(pod, each)]
    for place in places:
        place.mkdir(parents=True)
    restless = await node.start(pod, "main/a", HOPPER, *map(str, places))
    for _ in range(300):
        assert restless.pid in {process.pid for process in await containers.processes(pod)}
    leftovers = [process for process in await containers.processes(pod) if process.container == "main"]
    assert await containers.terminate(pod, leftovers, DEADLINE) == ()
    await restless.ended()


async def test_process_hidden_among_thousands_of_cgroups_is_found_and_killed(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    hiding = await node.start(pod, "main")
    for container in ground(node).cgroups(pod, "main"):
        for number in range(2_100):
            (container / str(number)).mkdir()
        move(hiding, container / "1049")
    found = await containers.processes(pod)
    assert [(process.pid, process.container) for process in found] == [(hiding.pid, "main")]
    assert await containers.terminate(pod, found, DEADLINE) == ()
    await hiding.ended()


async def test_leftover_that_froze_itself_is_killed(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    frozen = await node.start(pod, "main/self")
    leftovers = await containers.processes(pod)
    for cgroup in ground(node).cgroups(pod, "main/self"):
        for name, state in (("cgroup.freeze", "1"), ("freezer.state", "FROZEN")):
            if (cgroup / name).exists():
                (cgroup / name).write_text(state)
    assert await containers.terminate(pod, leftovers, DEADLINE) == ()
    assert await frozen.ended() == -9


async def test_local_user_cannot_impersonate_a_pod(node: Node) -> None:
    victim, containers = new_pod("victim"), node.ground.containers()
    await node.start(victim, "main")
    forger = await node.start(new_pod("forger"), "main")
    for root in ground(node).roots:
        move(forger, root / "user.slice" / "user@1000.service" / "kubepods" / f"pod{victim.uid}" / "main")
    assert await containers.pod_uid_of(forger.pid) is None
    assert forger.pid not in {process.pid for process in await containers.processes(victim)}


async def test_leftover_that_forks_and_exits_endlessly_is_killed(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    await node.start(pod, "sandbox")
    await node.start(pod, "main", RUNNER)
    leftovers: list[Process] = []
    for _ in range(300):
        leftovers = [process for process in await containers.processes(pod) if process.container == "main"]
        assert leftovers, "no process was found in a container that always has one"
    assert await containers.terminate(pod, leftovers, DEADLINE) == ()
    assert [process.container for process in await containers.processes(pod)] == ["sandbox"]


async def test_container_joined_by_an_unproved_process_is_not_killed_whole(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    assert isinstance(containers, CgroupContainers)
    await node.start(pod, "main")
    [leftover] = await containers.processes(pod)
    unauthorized = await node.start(pod, "main", CHILD_ON_REQUEST)
    assert not containers.kill_container(pod, "main", LeftoverProof([leftover], None, lambda _: None))
    assert await lives(unauthorized)


async def test_forged_pod_name_inside_a_container_does_not_change_a_processes_pod(node: Node) -> None:
    pod, victim, containers = new_pod(), new_pod("victim"), node.ground.containers()
    forger = await node.start(pod, f"main/kubepods/pod{victim.uid}")
    assert await containers.pod_uid_of(forger.pid) == pod.uid
    assert await containers.processes(victim) == ()


async def test_vanished_cgroup_root_is_unreadable_not_empty(node: Node) -> None:
    containers = node.ground.containers()
    ground(node).clear()
    with pytest.raises(Unreadable, match="cannot be read"):
        await containers.processes(new_pod())
    assert containers.may_run("11111111-2222-3333-4444-555555555555")
    for root in ground(node).roots:
        root.mkdir()


async def test_cgroup_root_without_pods_is_refused_when_the_pod_lives_elsewhere(node: Node) -> None:
    pod = new_pod()
    main = await node.start(pod, "main")
    empty = ground(node).root / "empty"
    empty.mkdir()
    with pytest.raises(Unreadable, match="hierarchy that the kubelet uses"):
        await CgroupContainers(empty).processes(pod)
    assert await CgroupContainers(empty).processes(new_pod()) == ()
    assert main.runs


async def test_process_that_the_service_may_not_inspect_is_not_treated_as_gone(node: Node, tmp_path: Path) -> None:
    pod = new_pod()
    await node.start(pod, "main")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_bytes(Path("/proc/self/mountinfo").read_bytes())
    with pytest.raises(Unreadable, match="contains processes that are not in"):
        await CgroupContainers(ground(node).root, proc=tmp_path).processes(pod)


@pytest.mark.parametrize("uid", ["../../../etc", "", "a/b", "x" * 200])
async def test_pod_uid_that_leads_out_of_the_hierarchy_is_refused(node: Node, uid: str) -> None:
    with pytest.raises(Unreadable, match="UID"):
        await node.ground.containers().processes(Pod("team-a", "train", uid))


def test_root_outside_the_cgroups_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="not in a cgroup hierarchy"):
        CgroupContainers(tmp_path)


def test_cgroup_containers_report_no_coverage_gaps(node: Node) -> None:
    assert node.ground.containers().not_covered() == ()


@only_with(CGROUP1)
async def test_leftovers_that_do_not_die_are_returned_at_the_deadline() -> None:
    assert CGROUP1 is not None
    made = CgroupGround(CGROUP1)
    async with node_of(made) as node:
        pod, containers = new_pod(), made.containers()
        stuck = await node.start(pod, "main")
        leftovers = await containers.processes(pod)
        freezer = made.roots[1] / "kubepods"
        (freezer / "freezer.state").write_text("FROZEN")
        assert await containers.terminate(pod, leftovers, 0.1) == leftovers
        assert await containers.processes(pod) == leftovers
        (freezer / "freezer.state").write_text("THAWED")
        assert await stuck.ended() == -9
        assert await containers.terminate(pod, leftovers, DEADLINE) == ()


@only_with(CGROUP1)
async def test_frozen_cgroup_is_thawed_after_its_processes_were_killed() -> None:
    assert CGROUP1 is not None
    made = CgroupGround(CGROUP1)
    async with node_of(made) as node:
        pod, containers = new_pod(), made.containers()
        main = await node.start(pod, "main")
        assert await containers.terminate(pod, await containers.processes(pod), DEADLINE) == ()
        await main.ended()
        assert (made.roots[1] / "kubepods" / f"pod{pod.uid}" / "main" / "freezer.state").read_text() == "THAWED\n"


@only_with(CGROUP2)
async def test_processes_of_a_container_with_threaded_cgroups_are_found() -> None:
    assert CGROUP2 is not None
    made = CgroupGround((CGROUP2,))
    async with node_of(made) as node:
        pod, containers = new_pod(), made.containers()
        main = await node.start(pod, "main")
        threaded = made.cgroups(pod, "main")[0] / "threads"
        threaded.mkdir()
        (threaded / "cgroup.type").write_text("threaded")
        (threaded / "cgroup.threads").write_text(str(main.pid))
        assert [process.pid for process in await containers.processes(pod)] == [main.pid]


@only_with(CGROUP2)
async def test_processes_of_a_threaded_container_are_found_and_killed() -> None:
    assert CGROUP2 is not None
    made = CgroupGround((CGROUP2,))
    async with node_of(made) as node:
        pod, containers = new_pod(), made.containers()
        main = await node.start(pod, "")
        [container] = made.cgroups(pod, "main")
        container.mkdir()
        (container / "cgroup.type").write_text("threaded")
        (container / "cgroup.threads").write_text(str(main.pid))
        with pytest.raises(OSError, match="not supported"):
            (container / "cgroup.procs").read_text()
        leftovers = await containers.processes(pod)
        assert [process.pid for process in leftovers] == [main.pid]
        assert await containers.terminate(pod, leftovers, DEADLINE) == ()
        await main.ended()
        assert await containers.processes(pod) == ()


@only_with(CGROUP2)
async def test_containers_beside_their_pod_cgroup_are_found() -> None:
    assert CGROUP2 is not None
    made = CgroupGround((CGROUP2,), kubepods="kubepods.slice", pod_directory="kubepods-pod{escaped}.slice")
    async with node_of(made) as node:
        pod, other, containers = new_pod(), new_pod("other"), made.containers()
        assert pod.uid is not None
        assert other.uid is not None
        [own] = made.cgroups(pod)
        own.mkdir(parents=True)
        main = await node.start(other, "main")
        stray = f"kubepods-burstable-pod{pod.uid.replace('-', '_')}.slice:cri-containerd:{'ab' * 32}"
        for parent in (made.root / "system.slice" / "containerd.service", made.root):
            move(main, parent / stray / "deeper")
            found = await containers.processes(pod)
            assert [(process.pid, process.container) for process in found] == [(main.pid, stray)]
            assert await containers.pod_uid_of(main.pid) == pod.uid
            assert await containers.processes(other) == ()
        assert await containers.terminate(pod, await containers.processes(pod), DEADLINE) == ()
        await main.ended()
        assert await containers.processes(pod) == ()


@only_with(CGROUP2)
async def test_pod_that_runs_through_a_cgroup_driver_change_is_still_found() -> None:
    assert CGROUP2 is not None
    made = CgroupGround((CGROUP2,))
    async with node_of(made) as node:
        pod, containers = new_pod(), made.containers()
        assert pod.uid is not None
        slices = made.root / "kubepods.slice" / f"kubepods-pod{pod.uid.replace('-', '_')}.slice"
        slices.mkdir(parents=True)
        main = await node.start(pod, "main")
        assert [process.pid for process in await containers.processes(pod)] == [main.pid]
        assert await containers.terminate(pod, await containers.processes(pod), DEADLINE) == ()
        await main.ended()


@only_with(CGROUP1 and CGROUP2)
@pytest.mark.parametrize("runtime", ["all", "v1 only"])
async def test_pod_in_one_of_two_mounted_hierarchies_is_not_reported_empty(runtime: str) -> None:
    assert CGROUP1 is not None
    assert CGROUP2 is not None
    both = CgroupGround((CGROUP2, *CGROUP1))
    async with node_of(both) as node:
        pod, containers = new_pod(), both.containers()
        main = await node.start(pod, "main")
        if runtime != "all":
            move(main, both.root)
        [process] = await containers.processes(pod)
        assert (process.pid, process.container) == (main.pid, "main")
        assert await containers.pod_uid_of(main.pid) == pod.uid
        assert await containers.terminate(pod, [process], DEADLINE) == ()
        await main.ended()


@only_with(CGROUP1)
async def test_process_in_two_pods_by_two_hierarchies_counts_for_both_and_is_not_signalled() -> None:
    assert CGROUP1 is not None
    made = CgroupGround(CGROUP1)
    async with node_of(made) as node:
        pod, other, containers = new_pod(), new_pod("other"), made.containers()
        astride = await node.start(pod, "main", CHILD_ON_REQUEST)
        move(astride, made.cgroups(other, "main")[1])
        for each in (pod, other):
            leftovers = await containers.processes(each)
            assert [process.pid for process in leftovers] == [astride.pid], "neither pod is over"
            assert await containers.terminate(each, leftovers, 0.1) == leftovers
        assert await containers.pod_uid_of(astride.pid) is None, "its pod is ambiguous"
        assert await lives(astride)


def test_hierarchy_with_pods_is_preferred_during_discovery(tmp_path: Path) -> None:
    assert discover_root(tmp_path) is None
    for name in ("unified", "pids", "systemd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").touch()
    assert discover_root(tmp_path) == tmp_path / "unified"
    (tmp_path / "pids" / "kubepods.slice").mkdir()
    assert discover_root(tmp_path) == tmp_path / "pids"
    (tmp_path / "cgroup.controllers").touch()
    (tmp_path / "kubepods").mkdir()
    assert discover_root(tmp_path) == tmp_path


async def test_cgroup_reads_leave_no_descriptor_open(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    main = await node.start(pod, "main")
    leftovers = await containers.processes(pod)
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.suppress(Unreadable):
        await containers.terminate(pod, leftovers, DEADLINE)
    await main.ended()
    assert len(os.listdir("/proc/self/fd")) <= before
