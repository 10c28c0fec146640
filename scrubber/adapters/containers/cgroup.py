"""A pod's processes by its cgroups: what the kernel itself keeps, and no process can leave without privilege.

Every hierarchy in which the kubelet keeps the pod is looked into, and every cgroup in which a runtime may have put its
containers; a process that any of them has is the pod's. To be signalled, though, it must be in no other pod by any.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from scrubber.adapters.containers.ending import Identity, Proof, Roll, end, strike
from scrubber.adapters.containers.hierarchy import beside, hierarchy_of
from scrubber.adapters.containers.paths import names_pod, usable_uid
from scrubber.adapters.containers.procfs import Proc, boot_ticks
from scrubber.adapters.containers.tree import Tree, cgroups_in, children_of, is_populated
from scrubber.domain.assignment import Pod, Process
from scrubber.domain.errors import Unreadable

__all__ = ["CgroupContainers"]

_REMEMBERED_PODS = 512
_LOOKS = 50  # how often a pod that changes under our eyes is looked at again, 2 ms apart
_PAUSE = 0.002

_T = TypeVar("_T")
Place = tuple[Tree, Path]


class CgroupContainers:
    """:class:`scrubber.ports.containers.Containers` by cgroups: v2, v1, or both side by side.

    Args:
        root: directory of a cgroup hierarchy below which the kubelet keeps ``kubepods`` (``discover_root``). The same
            directory of the other hierarchies is found by the mount table.
        proc: the node's proc file system; the service must be in the node's PID namespace.

    Raises:
        BadConfiguration: ``root`` is not inside a mounted cgroup hierarchy.
    """

    def __init__(self, root: Path, *, proc: Path = Path("/proc")) -> None:
        mountinfo = (proc / "self" / "mountinfo").read_text()
        hierarchy = hierarchy_of(root, mountinfo)
        self._proc = Proc(proc)
        self._trees = tuple(Tree(each, self._proc) for each in (hierarchy, *beside(hierarchy, mountinfo)))
        self._rolls: OrderedDict[str, Roll] = OrderedDict()

    async def processes(self, pod: Pod) -> tuple[Process, ...]:
        roll = await self.roll(pod)
        _remember(self._rolls, _uid(pod), roll)
        return roll.processes

    async def pod_uid_of(self, pid: int) -> str | None:
        return self._uid_of(pid)

    async def end(self, pod: Pod, leftovers: Iterable[Process], deadline: float) -> tuple[Process, ...]:
        return await end(self, self._proc, pod, leftovers, deadline, self._rolls.get(_uid(pod)))

    def not_covered(self) -> tuple[str, ...]:
        return ()

    # --- what ending asks (ending.Surroundings) ---

    async def roll(self, pod: Pod) -> Roll:
        """Everybody in ``pod`` now; looks again while the pod changes under our eyes.

        Raises:
            Unreadable: the cgroups cannot be read, or say that somebody is there whom nobody can find.
        """
        uid = _uid(pod)
        for _ in range(_LOOKS):
            tick = boot_ticks()
            found = self._look(uid)
            if found is not None:
                return Roll(tick, found)
            await asyncio.sleep(_PAUSE)
        raise Unreadable(
            f"The cgroup of pod {uid} holds processes that cannot be found in {self._proc.root}: "
            "run the service in the node's PID namespace, as root."
        )

    def holds(self, pod: Pod, pid: int) -> bool:
        return self._uid_of(pid) == pod.uid

    def end_whole(self, pod: Pod, container: str, proof: Proof) -> bool:
        places = self._container(_uid(pod), container)
        switches = [switch for _, cgroup in places if (switch := self._kill_switch(cgroup)) is not None]
        members = self._all_proved(places, proof) if switches else ()
        killed = [switch for switch in switches if members and _write(switch, "1")]
        if killed:
            for process in members:
                # cgroup.kill signals first threads only: where that one is dead, the others live on (seen on 6.18).
                strike(self, self._proc, pod, process)
            return True
        with self._frozen(places, proof) as frozen:
            struck: set[Identity] = set()
            while frozen:
                # Freezing takes a moment, and a fork that was under way still appears; it is frozen from birth.
                fresh = [each for each in self._members(places) or () if each.identity not in struck]
                if not fresh or not proof.covers(fresh):
                    break
                for process in fresh:
                    strike(self, self._proc, pod, process)
                struck |= {process.identity for process in fresh}
            return bool(struck)

    # --- reading ---

    def _look(self, uid: str) -> tuple[Process, ...] | None:
        """One look at the pod; None when it changed meanwhile, so that nothing can be concluded."""
        found: list[Process] = []
        anywhere = False
        for tree in self._trees:
            containers: list[Path] = list(tree.stray_containers(uid))
            own: list[Path] = []
            for directory in tree.pod_cgroups(uid):
                anywhere = True
                if tree.version == 2 and is_populated(directory) is False:
                    continue
                own.append(directory)
                containers += children_of(directory)
            looks = [tree.members(cgroup, cgroup.name) for cgroup in containers]
            looks += [tree.members(directory, "", deep=False) for directory in own]
            for members in looks:
                if members is None:
                    return None
                found += members
            anywhere = anywhere or bool(containers)
        if not anywhere:
            self._refuse_another_hierarchy(uid)
        return _each_once(found)

    def _refuse_another_hierarchy(self, uid: str) -> None:
        """A root without any pod may be the wrong root; then, and only then, every process is asked."""
        tree = self._trees[0]
        if any(each.kubepods() for each in self._trees):
            return
        for pid in self._proc.pids():
            stat = self._proc.living(pid)
            text = self._proc.cgroup(stat) if stat is not None else None
            if text is not None and names_pod(text, uid):
                raise Unreadable(
                    f"Process {pid} belongs to pod {uid}, but there is no pod below {tree.hierarchy.root}: "
                    "name the cgroup hierarchy that the kubelet uses."
                )

    def _container(self, uid: str, container: str) -> list[Place]:
        """Where a container of the pod is, in every hierarchy."""
        places: list[Place] = []
        for tree in self._trees:
            cgroups = [directory / container for directory in tree.pod_cgroups(uid)]
            cgroups += [path for path in tree.stray_containers(uid) if path.name == container]
            places += [(tree, path) for path in cgroups if path.is_dir()]
        return places

    def _members(self, places: Iterable[Place]) -> tuple[Process, ...] | None:
        found: list[Process] = []
        for tree, cgroup in places:
            members = tree.members(cgroup, cgroup.name)
            if members is None:
                return None
            found += members
        return _each_once(found)

    def _all_proved(self, places: Iterable[Place], proof: Proof) -> tuple[Process, ...]:
        """Everybody in ``places`` if they are proved one and all; else nobody."""
        for _ in range(_LOOKS):
            members = self._members(places)
            if members is not None:
                return members if proof.covers(members) else ()
        return ()

    def _uid_of(self, pid: int) -> str | None:
        """The one pod that every hierarchy which names one names: two would make it nobody's for certain."""
        stat = self._proc.living(pid)
        text = self._proc.cgroup(stat) if stat is not None else None
        uids = {tree.pod_uid_in(text) for tree in self._trees} - {None} if text is not None else set()
        return uids.pop() if len(uids) == 1 else None

    def _kill_switch(self, cgroup: Path) -> Path | None:
        """The file that kills a whole cgroup, forks under way included; v2 since Linux 5.14."""
        switch = cgroup / "cgroup.kill"
        return switch if switch.exists() else None

    @contextmanager
    def _frozen(self, places: Iterable[Place], proof: Proof) -> Iterator[bool]:
        """Stop a container from forking while its processes are signalled; yields whether that was possible.

        Nothing but proved leftovers is ever frozen, and what was frozen is thawed whatever happens. On v1 that is done
        to every cgroup below, too: a v1 process dies of its signal only when it is thawed, and a leftover may have
        frozen itself in a cgroup of its own making.
        """
        switches = [switch for _, cgroup in places if (switch := _freezer(cgroup)) is not None]
        if not switches or not self._all_proved(places, proof):
            yield False
            return
        frozen = [switch for switch in switches if _write(switch, _STOP[switch.name])]
        try:
            yield bool(frozen)
        finally:
            for switch in switches:
                for below in cgroups_in(switch.parent):
                    _write(below / switch.name, _GO[switch.name])


_STOP = {"cgroup.freeze": "1", "freezer.state": "FROZEN"}
_GO = {"cgroup.freeze": "0", "freezer.state": "THAWED"}


def _freezer(cgroup: Path) -> Path | None:
    """The file that freezes ``cgroup``, where this hierarchy has one."""
    for name in _STOP:
        if (cgroup / name).exists():
            return cgroup / name
    return None


def _each_once(processes: Iterable[Process]) -> tuple[Process, ...]:
    """A process that several hierarchies show is one, and in the container that the first of them says, if any does."""
    found: dict[Identity, Process] = {}
    for process in processes:
        if process.identity not in found or not found[process.identity].container:
            found[process.identity] = process
    return tuple(sorted(found.values()))


def _uid(pod: Pod) -> str:
    if pod.uid is None or not usable_uid(pod.uid):
        raise Unreadable(f"The processes of pod {pod.namespace}/{pod.name} cannot be told: its UID is {pod.uid!r}.")
    return pod.uid


def _remember(memory: OrderedDict[str, _T], uid: str, value: _T) -> None:
    memory[uid] = value
    memory.move_to_end(uid)
    while len(memory) > _REMEMBERED_PODS:
        memory.popitem(last=False)


def _write(file: Path, text: str) -> bool:
    try:
        file.write_text(text)
    except OSError:
        return False  # gone, or not to be done: the processes are then signalled one by one, and looked at again
    return True
