"""A pod's processes by its cgroups: what the kernel itself keeps, and no process can leave without privilege.

Every hierarchy in which the kubelet keeps the pod is looked into, and every cgroup in which a runtime may have put its
containers; a process that any of them has is the pod's. To be signalled, though, it must be in no other pod by any.

How long it takes to read a pod is up to its tenant. So no pod is read on the event loop, each look at one is bounded
(:mod:`~scrubber.adapters.cgroups.tally`), and between two looks at it others have their turn.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ParamSpec, TypeVar

from scrubber.adapters.cgroups.creation import CreationWatcher
from scrubber.adapters.cgroups.hierarchy import hierarchy_of, sibling_hierarchies
from scrubber.adapters.cgroups.interface_files import frozen, kill_file, write_interface_file
from scrubber.adapters.cgroups.kill_cgroup import PodKiller
from scrubber.adapters.cgroups.paths import is_valid_uid, mentions_pod
from scrubber.adapters.cgroups.procfs import ProcFs, ResourceShortage, boot_ticks
from scrubber.adapters.cgroups.reader_threads import ReaderThreads
from scrubber.adapters.cgroups.tally import MAX_PROCESSES, CgroupTally, TooManyProcesses
from scrubber.adapters.cgroups.terminate import LeftoverProof, PodSnapshot, ProcessIdentity, kill_if_in_pod, terminate
from scrubber.adapters.cgroups.tree import CgroupTree, child_cgroups, is_populated
from scrubber.adapters.kernel_text import cgroup_paths
from scrubber.domain.assignment import Pod, Process
from scrubber.domain.errors import Unavailable, Unreadable

__all__ = ["CgroupContainers"]

_REMEMBERED_PODS = 512
_REMEMBERED_PROCESSES = 65_536  # of all of them together; what a tenant has us remember must not fill the memory
_MAX_ATTEMPTS = 50  # how often a pod that changes under our eyes is looked at again, 2 ms apart
_PAUSE = 0.002
_LONGEST_PAUSE = 0.1
_THREADS = 2  # one is left for looks while the other signals whole crowds

_P = ParamSpec("_P")
_T = TypeVar("_T")
CgroupLocation = tuple[CgroupTree, Path]


class CgroupContainers:
    """:class:`scrubber.ports.node.Containers` by cgroups: v2, v1, or both side by side.

    Args:
        root: directory of a cgroup hierarchy below which the kubelet keeps ``kubepods`` (``discover_root``). The same
            directory of the other hierarchies is found by the mount table.
        proc: the node's proc file system; the service must be in the node's PID namespace.
        max_processes: of one pod that are listed; one with more cannot be told, and can only be ended unread.

    Raises:
        InvalidConfiguration: ``root`` is not inside a mounted cgroup hierarchy.
    """

    def __init__(self, root: Path, *, proc: Path = Path("/proc"), max_processes: int = MAX_PROCESSES) -> None:
        mountinfo = (proc / "self" / "mountinfo").read_bytes()
        hierarchy = hierarchy_of(root, mountinfo)
        self._proc = ProcFs(proc)
        self._trees = tuple(
            CgroupTree(each, self._proc) for each in (hierarchy, *sibling_hierarchies(hierarchy, mountinfo))
        )
        self._max_processes = max_processes
        self._snapshots: OrderedDict[str, PodSnapshot] = OrderedDict()
        self._reader_threads = ReaderThreads(_THREADS, "containers")
        self._kill_lock = asyncio.Lock()
        self._creations = CreationWatcher()

    async def processes(self, pod: Pod) -> tuple[Process, ...]:
        snapshot = await self.snapshot(pod)
        self._remember_snapshot(_require_uid(pod), snapshot)
        return snapshot.processes

    async def pod_uid_of(self, pid: int) -> str | None:
        try:
            return self._pod_uid_of_process(pid)
        except ResourceShortage as short:  # whoever asks this asks about a device, and it is no fault of that
            raise Unavailable(f"{short} It is tried again.") from short

    def watch_first_container(self, pod: Pod) -> asyncio.Future[str] | None:
        try:
            # Every hierarchy has the same names; one of them has the pod before the first PreStart.
            found = next((cgroups for tree in self._trees if (cgroups := tree.pod_cgroups(_require_uid(pod)))), ())
            return self._creations.watch_first(found) if found else None
        except (OSError, Unreadable):
            return None

    async def terminate(self, pod: Pod, leftovers: Iterable[Process], deadline: float) -> tuple[Process, ...]:
        return await terminate(self, self._proc, pod, leftovers, deadline, self._snapshots.get(_require_uid(pod)))

    async def kill_cgroups(self, pod: Pod, deadline: float) -> bool:
        uid = _require_uid(pod)
        async with self._kill_lock:
            loop, begun = asyncio.get_running_loop(), threading.Event()
            broken_off, pause = threading.Event(), _PAUSE
            try:
                due: float | None = None
                while not await self._reader_threads(self._kill_pod_once, uid, deadline, begun, broken_off):
                    due = loop.time() + deadline if due is None else due  # they have that long to die, once signalled
                    if loop.time() >= due:
                        return False
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
                return True
            finally:
                broken_off.set()

    def close(self) -> None:
        """Look at nobody any more, and signal nobody."""
        self._creations.close()
        self._reader_threads.close()

    def not_covered(self) -> tuple[str, ...]:
        return ()

    # --- what the termination of a pod asks (terminate.PodProcessControl) ---

    async def snapshot(self, pod: Pod) -> PodSnapshot:
        """Everybody in ``pod`` now; looks again while the pod changes under our eyes.

        Raises:
            Unreadable: the cgroups cannot be read, say that somebody is there whom nobody can find, or have too many.
        """
        uid = _require_uid(pod)
        tally = CgroupTally(uid, self._proc, self._max_processes)
        for _ in range(_MAX_ATTEMPTS):
            snapshot = await self._reader_threads(self._try_snapshot, uid, tally)
            if snapshot is not None:
                return snapshot
            await asyncio.sleep(_PAUSE)
        raise Unreadable(
            f"The cgroup of pod {uid} holds processes that cannot be found in {self._proc.root}: "
            "run the service in the node's PID namespace, as root."
        )

    async def run_in_thread(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await self._reader_threads(function, *args, **kwargs)

    def is_in_pod(self, pod: Pod, pid: int) -> bool:
        return self._pod_uid_of_process(pid) == pod.uid

    def kill_container(self, pod: Pod, container: str, proof: LeftoverProof) -> bool:
        uid = _require_uid(pod)
        places = self._container_locations(uid, container)
        switches = [switch for _, cgroup in places if (switch := self._kill_file(cgroup)) is not None]
        members = self._proved_members(uid, places, proof) if switches else ()
        pressed = [write_interface_file(switch, "1") for switch in switches if members]
        if any(pressed):
            for process in members:
                # cgroup.kill signals first threads only: where that one is dead, the others live on (seen on 6.18).
                kill_if_in_pod(self, self._proc, pod, process)
            return True
        if not self._proved_members(uid, places, proof):
            return False  # nothing but proved leftovers is ever frozen
        with frozen([cgroup for _, cgroup in places]) as stopped:
            struck: set[ProcessIdentity] = set()
            while stopped:
                # Freezing takes a moment, and a fork that was under way still appears.
                fresh = [each for each in self._members(uid, places) or () if each.identity not in struck]
                if not fresh or not proof.covers(fresh):
                    break
                for process in fresh:
                    kill_if_in_pod(self, self._proc, pod, process)
                struck |= {process.identity for process in fresh}
            return bool(struck)

    # --- ending unread, in a thread aside ---

    def _kill_pod_once(self, uid: str, deadline: float, begun: threading.Event, broken_off: threading.Event) -> bool:
        """End what is in the pod's cgroups, once; whether nobody is in any of them now."""
        self._refuse_own_pod(uid)
        if self._is_empty(uid):
            return True
        until = time.monotonic() + deadline
        places = [
            (tree, path) for tree in self._trees for path in (*tree.pod_cgroups(uid), *tree.stray_containers(uid))
        ]
        kubepods = self._relative_kubepods()
        sweep = PodKiller(
            [path for _, path in places],
            # Where there are several hierarchies, a process may be in this pod by one and in another by the next: the
            # kernel would kill it for the one alone. There everybody is asked before.
            [path for tree, path in places if tree.version == 2 and len(self._trees) == 1],
            self._kill_file,
            lambda pid: self._is_certainly_in_pod(uid, pid, kubepods),
            lambda: not broken_off.is_set() and time.monotonic() < until,
        )
        if broken_off.is_set():
            return False  # nobody waits for it any more
        # Most die of the kernel's kill. Whom it does not reach is signalled one by one, the next time.
        if begun.is_set() or not sweep.kill_cgroups():
            sweep.freeze_and_kill()
        begun.set()
        return self._is_empty(uid)

    def _is_empty(self, uid: str) -> bool:
        """Whether nobody is in any of the pod's cgroups, by the kernel's own word."""
        if any(is_populated(path) for tree in self._trees if tree.version == 2 for path in tree.pod_cgroups(uid)):
            return False  # which says it sooner than a look at everybody
        try:
            return self._read_processes(uid, CgroupTally(uid, self._proc, self._max_processes)) == ()
        except TooManyProcesses:
            return False

    def _refuse_own_pod(self, uid: str) -> None:
        stat = self._proc.stat(os.getpid())
        text = self._proc.cgroup(stat) if stat is not None else None
        if text is None or any(tree.pod_uid_in(cgroup_paths(text)) == uid for tree in self._trees):
            raise Unreadable(f"Pod {uid} is not ended unread: the service itself may be in it.")

    # --- reading, in a thread aside ---

    def _try_snapshot(self, uid: str, tally: CgroupTally) -> PodSnapshot | None:
        tick = boot_ticks()
        tally.start_pass()
        found = self._read_processes(uid, tally)
        return None if found is None else PodSnapshot(tick, found)

    def _read_processes(self, uid: str, tally: CgroupTally) -> tuple[Process, ...] | None:
        """One look at the pod; None when it changed meanwhile, so that nothing can be concluded.

        Raises:
            Unreadable: the cgroups cannot be read.
            TooManyProcesses: there are more processes than ``tally`` lets be looked at.
        """
        found: list[Process] = []
        anywhere = False
        for tree in self._trees:
            kubepods = tree.kubepods()
            containers: list[Path] = list(tree.stray_containers(uid, kubepods))
            own: list[Path] = []
            for directory in tree.pod_cgroups(uid, kubepods):
                anywhere = True
                if tree.version == 2 and is_populated(directory) is False:
                    continue
                own.append(directory)
                containers += child_cgroups(directory)
            looks = [tree.members(cgroup, cgroup.name, tally) for cgroup in containers]
            looks += [tree.members(directory, "", tally, recursive=False) for directory in own]
            for members in looks:
                if members is None:
                    return None
                found += members
            anywhere = anywhere or bool(containers)
        if not anywhere:
            self._refuse_another_hierarchy(uid)
        return _without_duplicates(found)

    def _refuse_another_hierarchy(self, uid: str) -> None:
        """A root without any pod may be the wrong root; then, and only then, every process is asked."""
        tree = self._trees[0]
        if any(each.kubepods() for each in self._trees):
            return
        for pid in self._proc.pids():
            stat = self._proc.stat_if_alive(pid)
            text = self._proc.cgroup(stat) if stat is not None else None
            if text is not None and mentions_pod(text, uid):
                raise Unreadable(
                    f"Process {pid} belongs to pod {uid}, but there is no pod below {tree.hierarchy.root}: "
                    "name the cgroup hierarchy that the kubelet uses."
                )

    def _container_locations(self, uid: str, container: str) -> list[CgroupLocation]:
        """Where a container of the pod is, in every hierarchy."""
        places: list[CgroupLocation] = []
        for tree in self._trees:
            cgroups = [directory / container for directory in tree.pod_cgroups(uid)]
            cgroups += [path for path in tree.stray_containers(uid) if path.name == container]
            places += [(tree, path) for path in cgroups if path.is_dir()]
        return places

    def _members(self, uid: str, places: Iterable[CgroupLocation]) -> tuple[Process, ...] | None:
        found: list[Process] = []
        tally = CgroupTally(uid, self._proc, self._max_processes)
        for tree, cgroup in places:
            members = tree.members(cgroup, cgroup.name, tally)
            if members is None:
                return None
            found += members
        return _without_duplicates(found)

    def _proved_members(self, uid: str, places: Iterable[CgroupLocation], proof: LeftoverProof) -> tuple[Process, ...]:
        """Everybody in ``places`` if they are proved one and all; else nobody."""
        for _ in range(_MAX_ATTEMPTS):
            members = self._members(uid, places)
            if members is not None:
                return members if proof.covers(members) else ()
        return ()

    def _pod_uid_of_process(self, pid: int, kubepods: tuple[tuple[str, ...], ...] | None = None) -> str | None:
        """The one pod that every hierarchy which names one names: two would make it nobody's for certain."""
        stat = self._proc.stat_if_alive(pid)
        text = self._proc.cgroup(stat) if stat is not None else None
        if text is None:
            return None
        paths = cgroup_paths(text)
        named = zip(self._trees, self._relative_kubepods() if kubepods is None else kubepods, strict=True)
        uids = {tree.pod_uid_in(paths, names) for tree, names in named} - {None}
        return uids.pop() if len(uids) == 1 else None

    def _is_certainly_in_pod(self, uid: str, pid: int, kubepods: tuple[tuple[str, ...], ...]) -> bool:
        try:
            return self._pod_uid_of_process(pid, kubepods) == uid
        except Unreadable:
            return False  # and whoever else is listed is signalled all the same

    def _relative_kubepods(self) -> tuple[tuple[str, ...], ...]:
        """Of each hierarchy."""
        return tuple(tree.relative_kubepods() for tree in self._trees)

    def _kill_file(self, cgroup: Path) -> Path | None:
        return kill_file(cgroup)

    def _remember_snapshot(self, uid: str, snapshot: PodSnapshot) -> None:
        rolls = self._snapshots
        rolls[uid] = snapshot
        rolls.move_to_end(uid)
        while (
            len(rolls) > _REMEMBERED_PODS or sum(len(each.processes) for each in rolls.values()) > _REMEMBERED_PROCESSES
        ):
            rolls.popitem(last=False)


def _without_duplicates(processes: Iterable[Process]) -> tuple[Process, ...]:
    """A process that several hierarchies show is one, and in the container that the first of them says, if any does."""
    found: dict[ProcessIdentity, Process] = {}
    for process in processes:
        if process.identity not in found or not found[process.identity].container:
            found[process.identity] = process
    return tuple(sorted(found.values()))


def _require_uid(pod: Pod) -> str:
    if pod.uid is None or not is_valid_uid(pod.uid):
        raise Unreadable(f"The processes of pod {pod.namespace}/{pod.name} cannot be told: its UID is {pod.uid!r}.")
    return pod.uid
