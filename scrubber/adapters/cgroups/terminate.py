"""Termination of leftovers: which processes may be signalled, in which order, and when the termination is complete.

Guarantee: a process is signalled only while it is one of the named processes, or descends from one, and still lives in
the pod. A PID proves nothing, because it may belong to another process a moment later. Therefore the pidfd is opened
first, the start time and the pod are read again, and the signal is sent through the pidfd.

Tenants control the number of processes. All per-process work therefore runs off the event loop, where the
:class:`PodProcessControl` has a thread for it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from scrubber.adapters.cgroups.procfs import ProcFs
from scrubber.domain.assignment import Pod, Process
from scrubber.domain.errors import Unreadable

__all__ = [
    "LeftoverProof",
    "PodProcessControl",
    "PodSnapshot",
    "ProcessIdentity",
    "kill_if",
    "kill_if_in_pod",
    "terminate",
]

_WATCHED_AT_ONCE = 64  # pidfds held open while waiting; a fork bomb must not exhaust the service's descriptors
_POLL_INTERVAL = 0.002  # seconds between two passes when only time can make a difference

ProcessIdentity = tuple[int, int]
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PodSnapshot:
    """All processes of a pod found in one pass. ``tick`` precedes the pass, in clock ticks since boot."""

    tick: int
    processes: tuple[Process, ...]

    def by_container(self) -> dict[str, tuple[Process, ...]]:
        groups: defaultdict[str, list[Process]] = defaultdict(list)
        for process in self.processes:
            groups[process.container].append(process)
        return {container: tuple(group) for container, group in groups.items()}


class PodProcessControl(Protocol):
    """Operations on a pod that each way of identifying its processes provides."""

    async def snapshot(self, pod: Pod) -> PodSnapshot:
        """Return all processes in ``pod`` now."""

    async def run_in_thread(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return the result of ``function``, run in a thread where it does not block the event loop."""

    def is_in_pod(self, pod: Pod, pid: int) -> bool:
        """Whether ``pid`` is in ``pod`` now."""

    def kill_container(self, pod: Pod, container: str, proof: LeftoverProof) -> bool:
        """Kill a container at once, provided that ``proof`` covers all its processes; False when that is impossible."""


class LeftoverProof:
    """Which processes are proved leftovers: the named ones, and from then on only their descendants.

    A parent that has exited cannot vouch for its child any more, and a tenant can fork and exit faster than any reader
    can follow. However, a process enters a container only by fork: if every process in a container was proved in one
    pass, every process that started later is proved too.
    """

    def __init__(
        self,
        leftovers: Iterable[Process],
        last_snapshot: PodSnapshot | None,
        parent_of: Callable[[Process], ProcessIdentity | None],
    ) -> None:
        self._proved = {process.identity: process for process in leftovers}
        self._proved = {each: process for each, process in self._proved.items() if process.pid != os.getpid()}
        self._parent_of = parent_of
        self._all_proved_at: dict[str, int] = {}
        if last_snapshot is not None:
            self._note_whole_containers(last_snapshot)

    def __call__(self, process: Process) -> bool:
        return process.identity in self._proved

    @property
    def all_processes(self) -> tuple[Process, ...]:
        """All processes that were ever proved, alive or dead."""
        return tuple(sorted(self._proved.values()))

    def add_snapshot(self, snapshot: PodSnapshot) -> tuple[Process, ...]:
        """Take another pass into account; return the proved processes of ``snapshot``."""
        self.covers(snapshot.processes)
        self._note_whole_containers(snapshot)
        return tuple(process for process in snapshot.processes if self(process))

    def covers(self, processes: Sequence[Process]) -> bool:
        """Whether all of ``processes`` are proved, including those started since the last pass."""
        unproved = [process for process in processes if not self(process) and process.pid != os.getpid()]
        children: defaultdict[ProcessIdentity, list[Process]] = defaultdict(list)
        born: list[Process] = []
        for process in unproved:
            if self._started_later(process):
                born.append(process)
            elif (parent := self._parent_of(process)) is not None:
                children[parent].append(process)  # read once each: a tenant controls the length of a chain of forks
        born += [child for parent in children.keys() & self._proved.keys() for child in children[parent]]
        while born:
            process = born.pop()
            if not self(process):
                self._proved[process.identity] = process
                born += children.get(process.identity, ())
        return all(self(process) for process in processes)

    def _started_later(self, process: Process) -> bool:
        """Whether ``process`` started in a container after every process in it was proved."""
        since = self._all_proved_at.get(process.container)
        return since is not None and process.started >= since

    def _note_whole_containers(self, snapshot: PodSnapshot) -> None:
        for container, group in snapshot.by_container().items():
            if container and all(self(process) for process in group):
                self._all_proved_at.setdefault(container, snapshot.tick)
            else:
                self._all_proved_at.pop(container, None)


# See docs/decisions/0008-when-a-pod-is-over.md.
async def terminate(
    control: PodProcessControl,
    proc: ProcFs,
    pod: Pod,
    leftovers: Iterable[Process],
    deadline: float,
    last_snapshot: PodSnapshot | None,
) -> tuple[Process, ...]:
    """Kill ``leftovers`` and what they fork; return those still alive ``deadline`` seconds after the first signal.

    A process that has left the pod is not signalled any more, but it is still returned: it lives.

    Args:
        last_snapshot: the last snapshot of the pod before this call, if there was one.
    """
    loop = asyncio.get_running_loop()
    due: float | None = None  # starts after the first signal: time spent reading and signalling does not count
    proof = LeftoverProof(leftovers, last_snapshot, lambda process: _parent_identity(proc, process))
    struck: set[ProcessIdentity] = set()
    while True:
        snapshot = await control.snapshot(pod)
        living = await control.run_in_thread(proof.add_snapshot, snapshot)
        fresh = [process for process in living if process.identity not in struck]
        if fresh:
            struck |= {process.identity for process in living}
            await control.run_in_thread(_kill_all, control, proc, pod, snapshot, proof, fresh)
        now = loop.time()
        due = now + deadline if due is None else due
        if not living or now >= due:
            break
        if fresh:
            await asyncio.sleep(0)
            continue  # inspect again at once: new forks continue to fork
        await _wait_for_exits(proc, living[:_WATCHED_AT_ONCE], due - now)
    return await control.run_in_thread(_select_alive, proc, proof.all_processes)


def _select_alive(proc: ProcFs, processes: Iterable[Process]) -> tuple[Process, ...]:
    now = ((process, proc.stat_if_alive(process.pid)) for process in processes)
    return tuple(process for process, stat in now if stat is not None and stat.started == process.started)


def kill_if_in_pod(control: PodProcessControl, proc: ProcFs, pod: Pod, process: Process) -> None:
    """Kill ``process`` if it is the same process and still in ``pod``; one that may not be signalled is left alone."""

    def is_still_itself() -> bool:
        stat = proc.stat_if_alive(process.pid)
        return stat is not None and stat.started == process.started and control.is_in_pod(pod, process.pid)

    kill_if(process.pid, is_still_itself)


def kill_if(pid: int, should_kill: Callable[[], bool]) -> None:
    """Kill process ``pid`` if ``should_kill`` returns true; it is called after the pidfd is open.

    So everything read about the PID applies to the process that the signal reaches, or the signal reaches no process.
    """
    pidfd = _open_pidfd(pid)
    if pidfd is None:
        return
    try:
        if should_kill():
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # gone, or not permitted: the caller checks which processes are alive and reports them
    finally:
        os.close(pidfd)


def _kill_all(
    surroundings: PodProcessControl,
    proc: ProcFs,
    pod: Pod,
    snapshot: PodSnapshot,
    proof: LeftoverProof,
    fresh: Iterable[Process],
) -> None:
    groups = snapshot.by_container()
    for container in sorted({process.container for process in fresh}):
        whole = bool(container) and all(proof(process) for process in groups[container])
        if not (whole and surroundings.kill_container(pod, container, proof)):
            for process in fresh:
                if process.container == container:
                    kill_if_in_pod(surroundings, proc, pod, process)


def _parent_identity(proc: ProcFs, process: Process) -> ProcessIdentity | None:
    child = proc.stat(process.pid)
    if child is None or child.started != process.started:
        return None
    parent = proc.stat(child.parent)
    return None if parent is None else parent.identity


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except OSError as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE):
            raise Unreadable(
                "The service has too many open files to kill a leftover process: raise its limit (ulimit -n)."
            ) from exc
        raise


async def _wait_for_exits(proc: ProcFs, processes: Iterable[Process], seconds: float) -> None:
    """Return once all of ``processes`` have exited, including their threads, or after ``seconds``."""
    loop = asyncio.get_running_loop()
    all_gone = asyncio.Event()
    watched: set[int] = set()

    def exited(pidfd: int) -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        watched.discard(pidfd)
        if not watched:
            all_gone.set()

    try:
        for process in processes:
            pidfd = _open_pidfd(process.pid)
            if pidfd is None:
                continue
            watched.add(pidfd)
            stat = proc.stat(process.pid)
            if stat is None or stat.started != process.started:
                watched.discard(pidfd)  # the PID was reused; the new process is not waited for
                os.close(pidfd)
        for pidfd in watched:
            loop.add_reader(pidfd, exited, pidfd)
        if watched:
            await asyncio.wait_for(all_gone.wait(), seconds)
        else:
            await asyncio.sleep(min(_POLL_INTERVAL, seconds))
    except TimeoutError:
        return  # the caller checks which processes are alive and reports them
    finally:
        for pidfd in watched:
            loop.remove_reader(pidfd)
            os.close(pidfd)
