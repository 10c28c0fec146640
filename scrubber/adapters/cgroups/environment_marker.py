"""The processes of a pod by environment variables, for the simulated node where cgroups cannot be written.

The kubelet emulator sets the markers in the environment of every container, and child processes inherit them. They
prove less than cgroups do, and :meth:`MarkerContainers.not_covered` reports this: a process can start another one with
an environment of its choice.

A walk over all processes of the node takes time proportional to their number, so it runs in a thread: always the same
one, because the remembered processes are not protected by a lock.

A container that restarts has the same name and another run. Each run is treated as a separate container, as with
cgroups: that the first process of an earlier run is dead proves nothing about those of the next run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ParamSpec, TypeVar

from scrubber.adapters.cgroups.procfs import ProcFs, boot_ticks
from scrubber.adapters.cgroups.reader_threads import ReaderThreads
from scrubber.adapters.cgroups.tally import MAX_PROCESSES, too_many_processes
from scrubber.adapters.cgroups.terminate import LeftoverProof, PodSnapshot, ProcessIdentity, terminate
from scrubber.adapters.kernel_text import ProcStat
from scrubber.domain.assignment import Pod, Process
from scrubber.domain.errors import Unreadable
from scrubber.domain.pods import RemainingCgroups

__all__ = ["CONTAINER_MARKER", "POD_MARKER", "RUN_MARKER", "MarkerContainers", "membership_in"]

POD_MARKER = "SCRUBBER_SIM_POD_UID"
CONTAINER_MARKER = "SCRUBBER_SIM_CONTAINER"
RUN_MARKER = "SCRUBBER_SIM_RUN"

_MAX_PASSES = 5
# During an exec and during an exit the environment reads as empty; some processes were started with an empty one. On a
# busy machine an exec can lose the CPU halfway.
_EXEC_TIMEOUT = 2.0
_EMPTY_ENVIRONMENT_TIMEOUT = 0.1
_PAUSE = 0.001
_MAX_STEP = 0.05  # maximum time that one wait for another pass counts, in seconds

_P = ParamSpec("_P")
_T = TypeVar("_T")
Membership = tuple[str, str]  # pod UID; container name and run


class MarkerContainers:
    """:class:`scrubber.ports.node.Containers` by environment markers; sees the processes of one user only.

    Args:
        proc: the proc file system to walk.
        uid: user whose processes carry trusted markers; the service's own user by default.
        max_processes: maximum number of processes listed for one pod; a pod with more cannot be listed.
    """

    def __init__(
        self, *, proc: Path = Path("/proc"), uid: int | None = None, max_processes: int = MAX_PROCESSES
    ) -> None:
        self._proc = ProcFs(proc)
        self._max_processes = max_processes
        self._reader_threads = ReaderThreads(1, "containers")
        self._uid = os.geteuid() if uid is None else uid
        # Once identified, a process stays in its pod regardless of what it does to its environment. Processes without a
        # marker are remembered by the address range of their environment, because that changes when they exec and might
        # become the first process of a container.
        self._members: dict[ProcessIdentity, Membership] = {}
        self._unmarked: dict[ProcessIdentity, tuple[int, int]] = {}
        self._snapshots: dict[str, PodSnapshot] = {}

    async def processes(self, pod: Pod) -> tuple[Process, ...]:
        snapshot = await self.snapshot(pod)
        self._snapshots = {uid: known for uid, known in self._snapshots.items() if known.processes}
        self._snapshots[_require_uid(pod)] = snapshot
        return snapshot.processes

    async def pod_uid_of(self, pid: int) -> str | None:
        stat = await self._reader_threads(self._own_process, pid)
        memberships = await self._memberships([stat] if stat is not None else [])
        return memberships[0][1][0] if memberships else None

    def may_run(self, pod_uid: str) -> bool:
        """Return True: only a walk over all processes could show that a pod has none."""
        return True

    def watch_first_container(self, pod: Pod) -> asyncio.Future[str] | None:
        return None  # nothing reports the appearance of a marker

    def watch_end(self, pod: Pod) -> asyncio.Future[None] | None:
        return None

    async def require_job_cgroups(self) -> None:
        """Return: a job's processes have the marker."""

    async def remaining_cgroups(self, pod: Pod) -> RemainingCgroups | None:
        return None

    async def terminate(self, pod: Pod, leftovers: Iterable[Process], deadline: float) -> tuple[Process, ...]:
        return await terminate(self, self._proc, pod, leftovers, deadline, self._snapshots.get(_require_uid(pod)))

    async def kill_cgroups(self, pod: Pod, deadline: float) -> bool:
        return False  # a marker is not kernel state: a process that shows none is not known to be outside the pod

    def close(self) -> None:
        """Stop reading processes."""
        self._reader_threads.close()

    def not_covered(self) -> tuple[str, ...]:
        return (
            f"processes of users other than uid {self._uid}: containers are identified by an environment marker",
            "processes that were started without that marker in their environment, or that fork too fast to be read",
        )

    # --- used by the termination of a pod (terminate.PodProcessControl) ---

    async def snapshot(self, pod: Pod) -> PodSnapshot:
        """Return all processes in ``pod`` now. Walks over all processes of the node.

        Raises:
            Unreadable: There is no proc file system to walk, or there are too many processes in the pod.
        """
        uid, tick = _require_uid(pod), boot_ticks()
        alive = await self._reader_threads(self._list_processes)
        memberships = await self._memberships(alive)
        found = [
            Process(pid, started, container) for (pid, started), (pod_uid, container) in memberships if pod_uid == uid
        ]
        if len(found) > self._max_processes:
            raise too_many_processes(uid, self._max_processes)
        return PodSnapshot(tick, tuple(sorted(found)))

    async def run_in_thread(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await self._reader_threads(function, *args, **kwargs)

    def is_in_pod(self, pod: Pod, pid: int) -> bool:
        stat = self._own_process(pid)
        membership = self._membership(stat)[1] if stat is not None else None
        return membership is not None and membership[0] == pod.uid

    def kill_container(self, pod: Pod, container: str, proof: LeftoverProof) -> bool:
        return False  # nothing groups the processes of such a container: they are signalled one by one

    # --- reading, in the reader thread ---

    def _list_processes(self) -> tuple[ProcStat, ...]:
        """Return every living process of the user. Exited processes are forgotten."""
        alive: dict[int, ProcStat] = {}
        seen: set[int] = set()
        for _ in range(_MAX_PASSES):
            # A single listing misses a process that forks and exits during the walk.
            new = set(self._proc.pids()) - seen
            seen |= new
            for pid in new:
                stat = self._own_process(pid)
                if stat is not None:
                    alive[pid] = stat
                    self._membership(stat)  # remember it: it may exit in a moment and leave a child
            if not new:
                break
        identities = {stat.identity for stat in alive.values()}
        for memory in (self._members, self._unmarked):
            for gone in [identity for identity in memory if identity not in identities]:
                del memory[gone]
        return tuple(alive.values())

    def _own_process(self, pid: int) -> ProcStat | None:
        if self._proc.owner(pid) != self._uid:
            return None
        stat = self._proc.stat_if_alive(pid)
        return None if stat is None or stat.kernel_thread else stat

    async def _memberships(self, stats: Iterable[ProcStat]) -> list[tuple[ProcessIdentity, Membership]]:
        """Return which of ``stats`` are in a pod, and in which; waits for processes that are in an exec."""
        loop = asyncio.get_running_loop()
        found: list[tuple[ProcessIdentity, Membership]] = []
        waiting, waited, last_check = tuple(stats), 0.0, loop.time()
        while waiting:
            settled, waiting = await self._reader_threads(self._classify, waiting, waited)
            found += settled
            if waiting:
                await asyncio.sleep(_PAUSE)
            # Time during which nothing was inspected proves nothing about a process.
            now = loop.time()
            waited, last_check = waited + min(now - last_check, _MAX_STEP), now
        return found

    def _classify(
        self, stats: Iterable[ProcStat], waited: float
    ) -> tuple[list[tuple[ProcessIdentity, Membership]], tuple[ProcStat, ...]]:
        """Return which of ``stats`` are in a pod, and which must be waited for, after ``waited`` seconds of waiting."""
        found: list[tuple[ProcessIdentity, Membership]] = []
        waiting: list[ProcStat] = []
        for each in stats:
            stat = each if not waited else self._own_process(each.pid)
            if stat is None or stat.identity != each.identity:
                continue
            settled, membership = self._membership(stat)
            if membership is not None:
                found.append((stat.identity, membership))
            elif not settled and waited < (_EMPTY_ENVIRONMENT_TIMEOUT if stat.has_empty_environment else _EXEC_TIMEOUT):
                waiting.append(stat)
            elif not settled and stat.has_empty_environment:
                self._unmarked[stat.identity] = stat.environment_range
        return found, tuple(waiting)

    def _membership(self, stat: ProcStat) -> tuple[bool, Membership | None]:
        """Return whether the environment was conclusive, and the membership it shows."""
        known = self._members.get(stat.identity)
        if known is not None:
            return True, known
        if stat.environment_range != (0, 0) and self._unmarked.get(stat.identity) == stat.environment_range:
            return True, None
        environment = self._proc.environ(stat)
        if environment is None:
            return True, None
        membership = membership_in(environment)
        if membership is not None:
            self._members[stat.identity] = membership
        elif environment:
            self._unmarked[stat.identity] = stat.environment_range
        return bool(environment), membership


def membership_in(environment: bytes) -> Membership | None:
    """Return the membership that the text of ``/proc/PID/environ`` shows."""
    pairs = (variable.partition(b"=") for variable in environment.split(b"\0"))
    values = {name: value.decode("utf-8", "replace") for name, _, value in pairs}
    uid, name, run = (values.get(marker.encode(), "") for marker in (POD_MARKER, CONTAINER_MARKER, RUN_MARKER))
    return (uid, f"{name}#{run}" if run else name) if uid else None


def _require_uid(pod: Pod) -> str:
    if not pod.uid:
        raise Unreadable(f"The processes of pod {pod.namespace}/{pod.name} cannot be determined: its UID is unknown.")
    return pod.uid
