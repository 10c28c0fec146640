"""What only cgroups can do, and where a root or a tenant could mislead them. Real cgroups, v2 and v1."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber.adapters.containers import CgroupContainers, discover_root
from scrubber.adapters.containers.ending import Proof
from scrubber.domain.assignment import Pod, Process
from scrubber.domain.errors import BadConfiguration, Unreadable
from tests.pods import (
    CGROUP1,
    CGROUP2,
    CGROUP_WAYS,
    CHILD_ON_REQUEST,
    PATIENCE,
    CgroupGround,
    Node,
    ground_of,
    lives,
    new_pod,
    node_of,
    only_with,
)

__test__ = bool(CGROUP_WAYS)  # what cannot be tried here is said aloud by tests.pods

RUNNER = """
# Never more than one process, and never the same for long: every child's parent is gone when anybody looks.
until = time.monotonic() + 60
print("ready", flush=True)
while time.monotonic() < until:
    if os.fork():
        os._exit(0)
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


@pytest.fixture(params=CGROUP_WAYS)
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    async with node_of(ground_of(request.param)) as made:
        yield made


def ground(node: Node) -> CgroupGround:
    assert isinstance(node.ground, CgroupGround)
    return node.ground


@only_with(CGROUP2)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_pod_is_found_in_every_layout_of_kubelet_and_runtime(layout: str) -> None:
    assert CGROUP2 is not None
    kubepods, directory = LAYOUTS[layout]
    made = CgroupGround((CGROUP2,), kubepods=kubepods, pod_directory=directory)
    async with node_of(made) as node:
        pod = new_pod()
        main = await node.start(pod, f"cri-containerd-{'ab' * 32}.scope")
        containers = made.containers()
        assert [process.pid for process in await containers.processes(pod)] == [main.pid]
        assert await containers.pod_uid_of(main.pid) == pod.uid


async def test_a_process_in_a_nested_cgroup_counts_for_its_container(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    inner = await node.start(pod, "main/inner/most")
    [process] = await containers.processes(pod)
    assert (process.pid, process.container) == (inner.pid, "main")
    assert await containers.end(pod, [process], PATIENCE) == ()
    await inner.ended()


async def test_a_leftover_that_moved_to_another_pods_cgroup_is_not_signalled_and_is_reported_alive(node: Node) -> None:
    pod, other, containers = new_pod(), new_pod("other"), node.ground.containers()
    await node.start(other, "main")
    moved = await node.start(pod, "main")
    leftovers = await containers.processes(pod)
    for cgroup in ground(node).cgroups(other, "main"):
        (cgroup / "cgroup.procs").write_text(str(moved.pid))
    assert await containers.end(pod, leftovers, PATIENCE) == leftovers
    assert moved.runs


async def test_a_leftover_that_forks_and_exits_without_end_is_caught(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    await node.start(pod, "sandbox")
    await node.start(pod, "main", RUNNER)
    leftovers: list[Process] = []
    for _ in range(300):
        leftovers = [process for process in await containers.processes(pod) if process.container == "main"]
        assert leftovers, "nobody was seen in a container where somebody always is"
    assert await containers.end(pod, leftovers, PATIENCE) == ()
    assert [process.container for process in await containers.processes(pod)] == ["sandbox"]


async def test_a_container_is_not_ended_whole_when_a_stranger_joined_it_at_the_last_moment(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    assert isinstance(containers, CgroupContainers)
    await node.start(pod, "main")
    [leftover] = await containers.processes(pod)
    stranger = await node.start(pod, "main", CHILD_ON_REQUEST)
    assert not containers.end_whole(pod, "main", Proof([leftover], None, lambda _: None))
    assert await lives(stranger)


async def test_a_forged_pod_name_inside_a_container_does_not_make_a_process_somebody_elses(node: Node) -> None:
    pod, victim, containers = new_pod(), new_pod("victim"), node.ground.containers()
    forger = await node.start(pod, f"main/kubepods/pod{victim.uid}")
    assert await containers.pod_uid_of(forger.pid) == pod.uid
    assert await containers.processes(victim) == ()


async def test_a_root_that_went_away_is_unreadable_not_empty(node: Node) -> None:
    containers = node.ground.containers()
    ground(node).clear()
    with pytest.raises(Unreadable, match="cannot be read"):
        await containers.processes(new_pod())
    for root in ground(node).roots:
        root.mkdir()


async def test_a_root_without_any_pod_is_refused_when_the_pod_lives_elsewhere(node: Node) -> None:
    pod = new_pod()
    main = await node.start(pod, "main")
    empty = ground(node).root / "empty"
    empty.mkdir()
    with pytest.raises(Unreadable, match="hierarchy that the kubelet uses"):
        await CgroupContainers(empty).processes(pod)
    assert await CgroupContainers(empty).processes(new_pod()) == ()
    assert main.runs


async def test_a_process_that_the_service_may_not_look_at_is_not_taken_for_gone(node: Node, tmp_path: Path) -> None:
    pod = new_pod()
    await node.start(pod, "main")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_text(Path("/proc/self/mountinfo").read_text())
    with pytest.raises(Unreadable, match="cannot be found"):
        await CgroupContainers(ground(node).root, proc=tmp_path).processes(pod)


@pytest.mark.parametrize("uid", ["../../../etc", "", "a/b", "x" * 200])
async def test_a_uid_that_leads_out_of_the_hierarchy_is_refused(node: Node, uid: str) -> None:
    with pytest.raises(Unreadable, match="UID"):
        await node.ground.containers().processes(Pod("team-a", "train", uid))


def test_a_root_outside_the_cgroups_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="not in a cgroup hierarchy"):
        CgroupContainers(tmp_path)


def test_cgroups_leave_nothing_uncovered(node: Node) -> None:
    assert node.ground.containers().not_covered() == ()


@only_with(CGROUP1)
async def test_leftovers_that_do_not_die_are_answered_at_the_deadline() -> None:
    assert CGROUP1 is not None
    made = CgroupGround(CGROUP1)
    async with node_of(made) as node:
        pod, containers = new_pod(), made.containers()
        stuck = await node.start(pod, "main")
        leftovers = await containers.processes(pod)
        freezer = made.roots[1] / "kubepods"
        (freezer / "freezer.state").write_text("FROZEN")
        assert await containers.end(pod, leftovers, 0.1) == leftovers
        assert await containers.processes(pod) == leftovers
        (freezer / "freezer.state").write_text("THAWED")
        assert await stuck.ended() == -9
        assert await containers.end(pod, leftovers, PATIENCE) == ()


@only_with(CGROUP1)
async def test_what_was_frozen_to_be_ended_is_thawed() -> None:
    assert CGROUP1 is not None
    made = CgroupGround(CGROUP1)
    async with node_of(made) as node:
        pod, containers = new_pod(), made.containers()
        main = await node.start(pod, "main")
        assert await containers.end(pod, await containers.processes(pod), PATIENCE) == ()
        await main.ended()
        assert (made.roots[1] / "kubepods" / f"pod{pod.uid}" / "main" / "freezer.state").read_text() == "THAWED\n"


@only_with(CGROUP2)
async def test_the_processes_of_a_container_with_threaded_cgroups_are_seen() -> None:
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


def test_the_hierarchy_that_holds_pods_is_discovered_before_one_that_holds_none(tmp_path: Path) -> None:
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


async def test_no_descriptor_is_left_open(node: Node) -> None:
    pod, containers = new_pod(), node.ground.containers()
    main = await node.start(pod, "main")
    leftovers = await containers.processes(pod)
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.suppress(Unreadable):
        await containers.end(pod, leftovers, PATIENCE)
    await main.ended()
    assert len(os.listdir("/proc/self/fd")) <= before
