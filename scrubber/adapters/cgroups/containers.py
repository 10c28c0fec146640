"""The processes of a pod by its cgroups, which the kernel maintains and no process can leave without privileges.

Every hierarchy in which the kubelet keeps the pod is inspected, and every cgroup in which a runtime may have placed its
containers; a process found in any of them belongs to the pod. To be signalled, however, it must not be in another pod
by any hierarchy.

The tenant controls how long it takes to read its pod. Therefore no pod is read on the event loop, each pass over a pod
is bounded (:mod:`~scrubber.adapters.cgroups.tally`), and between two passes other pods get their turn.
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

from scrubber.adapters.cgroups.hierarchy import hierarchy_of, sibling_hierarchies
from scrubber.adapters.cgroups.interface_files import frozen, kill_file, write_interface_file
from scrubber.adapters.cgroups.job_paths import is_job
from scrubber.adapters.cgroups.kill_cgroup import PodKiller
from scrubber.adapters.cgroups.paths import is_valid_uid, mentions_pod
from scrubber.adapters.cgroups.procfs import ProcFs, ResourceShortage, boot_ticks
from scrubber.adapters.cgroups.reader_threads import ReaderThreads
from scrubber.adapters.cgroups.tally import MAX_PROCESSES, CgroupTally, TooManyProcesses
from scrubber.adapters.cgroups.terminate import LeftoverProof, PodSnapshot, ProcessIdentity, kill_if_in_pod, terminate
from scrubber.adapters.cgroups.tree import CgroupTree, child_cgroups, is_populated
from scrubber.adapters.cgroups.watcher import CgroupWatcher
from scrubber.adapters.kernel_text import cgroup_paths
from scrubber.domain.assignment import Pod, Process
from scrubber.domain.errors import Unavailable, Unreadable
from scrubber.domain.pods import RemainingCgroups

__all__ = ["CgroupContainers"]

_REMEMBERED_PODS = 512
_REMEMBERED_PROCESSES = 65_536  # total over all pods; bounds the memory that tenants can make the service use
_MAX_ATTEMPTS = 50  # passes over a pod that changes while it is read, 2 ms apart
_PAUSE = 0.002
_LONGEST_PAUSE = 0.1
_THREADS = 2  # one stays free for reading while the other signals many processes

_P = ParamSpec("_P")
_T = TypeVar("_T")
CgroupLocation = tuple[CgroupTree, Path]


class CgroupContainers:
    """:class:`scrubber.ports.node.Containers` and ``PodCgroups`` by cgroups: v2, v1, or both side by side.

    Args:
        root: directory of a cgroup hierarchy below which the kubelet keeps ``kubepods`` (``discover_root``). The same
            directory of the other hierarchies is found through the mount table.
        proc: the node's proc file system; the service must be in the node's PID namespace.
        max_processes: maximum number of processes listed for one pod; a pod with more cannot be listed, and can only be
            killed without listing.

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
        self._watcher = CgroupWatcher()

    async def processes(self, pod: Pod) -> tuple[Process, ...]:
        snapshot = await self.snapshot(pod)
        self._remember_snapshot(_require_uid(pod), snapshot)
        return snapshot.processes

    async def pod_uid_of(self, pid: int) -> str | None:
        try:
            return self._pod_uid_of_process(pid)
        except ResourceShortage as short:  # the caller checks a device, which is not at fault
            raise Unavailable(f"{short} It is retried.") from short

    def may_run(self, pod_uid: str) -> bool:
        """Whether the pod has a cgroup. The kubelet removes it before the API server permits another pod of that name."""
        try:
            return any(tree.pod_cgroups(pod_uid) for tree in self._trees)
        except (OSError, Unreadable):
            return True

    def watch_first_container(self, pod: Pod) -> asyncio.Future[str] | None:
        try:
            # Every hierarchy has the same names; one of them has the pod before the first PreStart.
            found = next((cgroups for tree in self._trees if (cgroups := tree.pod_cgroups(_require_uid(pod)))), ())
            return self._watcher.watch_first(found) if found else None
        except (OSError, Unreadable):
            return None

    def watch_end(self, pod: Pod) -> asyncio.Future[None]:
        uid = _require_uid(pod)
        try:
            return self._watcher.watch_end([cgroup for tree in self._trees for cgroup in tree.pod_cgroups(uid)])
        except OSError as error:
            where = "" if error.filename is None else f"{error.filename}: "
            raise Unreadable(f"The end of pod {uid} cannot be watched: {where}{error.strerror}.") from error

    async def require_job_cgroups(self) -> None:
        if not await self._reader_threads(lambda: any(tree.slurm_cgroups() for tree in self._trees)):
            roots = ", ".join(str(tree.hierarchy.root) for tree in self._trees)
            raise Unreadable(
                f"Slurm keeps no cgroups below {roots}, so the end of a job could not be seen: set "
                "ProctrackType=proctrack/cgroup in slurm.conf and restart slurmd, or pass the hierarchy that it uses with "
                "--cgroup-root."
            )

    async def remaining_cgroups(self, pod: Pod) -> RemainingCgroups | None:
        return await self._reader_threads(self._remaining_cgroups, _require_uid(pod))

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
                    due = loop.time() + deadline if due is None else due  # time to die, counted from the first signal
                    if loop.time() >= due:
                        return False
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
                return True
            finally:
                broken_off.set()

    def close(self) -> None:
        """Stop reading and signalling processes."""
        self._watcher.close()
        self._reader_threads.close()

    def not_covered(self) -> tuple[str, ...]:
        return ()

    # --- used by the termination of a pod (terminate.PodProcessControl) ---

    async def snapshot(self, pod: Pod) -> PodSnapshot:
        """Return all processes in ``pod`` now; repeats the pass while the pod changes.

        Raises:
            Unreadable: The cgroups cannot be read, report processes that cannot be found, or contain too many
                processes.
        """
        uid = _require_uid(pod)
        tally = CgroupTally(uid, self._proc, self._max_processes)
        for _ in range(_MAX_ATTEMPTS):
            snapshot = await self._reader_threads(self._try_snapshot, uid, tally)
            if snapshot is not None:
                return snapshot
            await asyncio.sleep(_PAUSE)
        raise Unreadable(
            f"The cgroup of pod {uid} contains processes that are not in {self._proc.root}: run the service "
            "in the node's PID namespace, as root."
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
                # cgroup.kill signals thread group leaders only: where the leader is dead, the other threads live on
                # (seen on 6.18).
                kill_if_in_pod(self, self._proc, pod, process)
            return True
        if not self._proved_members(uid, places, proof):
            return False  # only proved leftovers are ever frozen
        with frozen([cgroup for _, cgroup in places]) as stopped:
            struck: set[ProcessIdentity] = set()
            while stopped:
                # Freezing takes a moment, and a fork in progress still appears.
                fresh = [each for each in self._members(uid, places) or () if each.identity not in struck]
                if not fresh or not proof.covers(fresh):
                    break
                for process in fresh:
                    kill_if_in_pod(self, self._proc, pod, process)
                struck |= {process.identity for process in fresh}
            return bool(struck)

    # --- killing without listing, in a reader thread ---

    def _kill_pod_once(self, uid: str, deadline: float, begun: threading.Event, broken_off: threading.Event) -> bool:
        """Kill the contents of the pod's cgroups once; return whether all of them are empty now."""
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
            # With several hierarchies, a process may be in this pod by one and in another pod by the next: the kernel
            # would kill it based on one alone. In that case every process is checked first.
            [path for tree, path in places if tree.version == 2 and len(self._trees) == 1],
            self._kill_file,
            lambda pid: self._is_certainly_in_pod(uid, pid, kubepods),
            lambda: not broken_off.is_set() and time.monotonic() < until,
        )
        if broken_off.is_set():
            return False  # no caller is waiting any more
        # cgroup.kill ends most processes. Those it does not reach are signalled one by one in the next pass.
        if begun.is_set() or not sweep.kill_cgroups():
            sweep.freeze_and_kill()
        begun.set()
        return self._is_empty(uid)

    def _is_empty(self, uid: str) -> bool:
        """Whether all cgroups of the pod are empty, as reported by the kernel."""
        if any(is_populated(path) for tree in self._trees if tree.version == 2 for path in tree.pod_cgroups(uid)):
            return False  # faster than inspecting every process
        try:
            return self._read_processes(uid, CgroupTally(uid, self._proc, self._max_processes)) == ()
        except TooManyProcesses:
            return False

    def _refuse_own_pod(self, uid: str) -> None:
        stat = self._proc.stat(os.getpid())
        text = self._proc.cgroup(stat) if stat is not None else None
        if text is None or any(tree.pod_uid_in(cgroup_paths(text)) == uid for tree in self._trees):
            raise Unreadable(
                f"The unreadable processes of pod {uid} are not killed: the service itself may be in that pod."
            )

    # --- reading, in a reader thread ---

    def _try_snapshot(self, uid: str, tally: CgroupTally) -> PodSnapshot | None:
        tick = boot_ticks()
        tally.start_pass()
        found = self._read_processes(uid, tally)
        return None if found is None else PodSnapshot(tick, found)

    def _read_processes(self, uid: str, tally: CgroupTally) -> tuple[Process, ...] | None:
        """Make one pass over the pod; None when it changed meanwhile, so that nothing can be concluded.

        Raises:
            Unreadable: The cgroups cannot be read.
            TooManyProcesses: There are more processes than ``tally`` allows to be inspected.
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
        if not anywhere and not is_job(uid):
            self._refuse_another_hierarchy(uid)
        return _without_duplicates(found)

    def _remaining_cgroups(self, uid: str) -> RemainingCgroups:
        own = [directory for tree in self._trees for directory in tree.pod_cgroups(uid)]
        containers = [path for directory in own for path in child_cgroups(directory)]
        containers += [path for tree in self._trees for path in tree.stray_containers(uid)]
        return RemainingCgroups(bool(own), frozenset(path.name for path in containers))

    def _refuse_another_hierarchy(self, uid: str) -> None:
        """Raise if the root contains no pods and a process of the node is in pod ``uid``: the root may be wrong.

        All processes are read only in this case.
        """
        tree = self._trees[0]
        if any(each.kubepods() for each in self._trees):
            return
        for pid in self._proc.pids():
            stat = self._proc.stat_if_alive(pid)
            text = self._proc.cgroup(stat) if stat is not None else None
            if text is not None and mentions_pod(text, uid):
                raise Unreadable(
                    f"Process {pid} belongs to pod {uid}, but there is no pod below {tree.hierarchy.root}: "
                    "pass the cgroup hierarchy that the kubelet uses."
                )

    def _container_locations(self, uid: str, container: str) -> list[CgroupLocation]:
        """Return the cgroups of a container of the pod, in every hierarchy."""
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
        """Return all processes in ``places`` if every one of them is proved; else an empty tuple."""
        for _ in range(_MAX_ATTEMPTS):
            members = self._members(uid, places)
            if members is not None:
                return members if proof.covers(members) else ()
        return ()

    def _pod_uid_of_process(self, pid: int, kubepods: tuple[tuple[str, ...], ...] | None = None) -> str | None:
        """Return the pod of a process if all hierarchies that report a pod agree; conflicting pods yield None."""
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
            return False  # the remaining listed processes are still signalled

    def _relative_kubepods(self) -> tuple[tuple[str, ...], ...]:
        """Return the relative kubepods paths of each hierarchy."""
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
    """Merge a process that several hierarchies show into one, in the first container that any of them reports."""
    found: dict[ProcessIdentity, Process] = {}
    for process in processes:
        if process.identity not in found or not found[process.identity].container:
            found[process.identity] = process
    return tuple(sorted(found.values()))


def _require_uid(pod: Pod) -> str:
    if pod.uid is None or not is_valid_uid(pod.uid):
        raise Unreadable(
            f"The processes of pod {pod.namespace}/{pod.name} cannot be determined: its UID is {pod.uid!r}."
        )
    return pod.uid
