"""Ending leftovers: who may be signalled, in which order, and when it is over.

The promise: a process is signalled only while it is the one that was named, or descends from one, and still lives in
the pod. A PID proves nothing, for it can be somebody else's a moment later; so the pidfd is opened first, the start
time and the pod are read again, and the signal goes through the pidfd.

How many processes there are is the tenants' doing. So all that is done for each of them is done aside from the event
loop, where the surroundings have a thread for it.
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

_WATCHED_AT_ONCE = 64  # pidfds held open while waiting; a fork bomb must not use up the service's descriptors
_POLL_INTERVAL = 0.002  # between two looks that nothing but time can tell apart

ProcessIdentity = tuple[int, int]
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PodSnapshot:
    """Everybody in a pod at one look. ``tick`` is from before the look, in clock ticks since boot."""

    tick: int
    processes: tuple[Process, ...]

    def by_container(self) -> dict[str, tuple[Process, ...]]:
        groups: defaultdict[str, list[Process]] = defaultdict(list)
        for process in self.processes:
            groups[process.container].append(process)
        return {container: tuple(group) for container, group in groups.items()}


class PodProcessControl(Protocol):
    """How a way of telling containers apart looks at a pod."""

    async def snapshot(self, pod: Pod) -> PodSnapshot:
        """Everybody in ``pod`` now."""

    async def run_in_thread(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """What ``function`` answers, from a thread in which it does not hold the event loop up."""

    def is_in_pod(self, pod: Pod, pid: int) -> bool:
        """Whether ``pid`` is in ``pod`` now."""

    def kill_container(self, pod: Pod, container: str, proof: LeftoverProof) -> bool:
        """End a container at once, provided that ``proof`` covers everybody in it; False when it cannot be done so."""


class LeftoverProof:
    """Which processes are proved leftovers: those named, and from then on their descendants only.

    A parent that is gone cannot vouch for its child any more, and a tenant can fork and exit faster than anybody
    looks. But nobody enters a container except by fork: where everybody in it was proved at one look, everybody who
    started later is proved too.
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
        """All who were ever proved, alive or not."""
        return tuple(sorted(self._proved.values()))

    def add_snapshot(self, snapshot: PodSnapshot) -> tuple[Process, ...]:
        """Take one more look into account; answers those of ``snapshot`` that are proved."""
        self.covers(snapshot.processes)
        self._note_whole_containers(snapshot)
        return tuple(process for process in snapshot.processes if self(process))

    def covers(self, processes: Sequence[Process]) -> bool:
        """Whether all of ``processes`` are proved, those born since the last look included."""
        unproved = [process for process in processes if not self(process) and process.pid != os.getpid()]
        children: defaultdict[ProcessIdentity, list[Process]] = defaultdict(list)
        born: list[Process] = []
        for process in unproved:
            if self._started_later(process):
                born.append(process)
            elif (parent := self._parent_of(process)) is not None:
                children[parent].append(process)  # asked once: a chain of forks is as long as a tenant likes
        born += [child for parent in children.keys() & self._proved.keys() for child in children[parent]]
        while born:
            process = born.pop()
            if not self(process):
                self._proved[process.identity] = process
                born += children.get(process.identity, ())
        return all(self(process) for process in processes)

    def _started_later(self, process: Process) -> bool:
        """Whether it came into a container after everybody in it was proved."""
        since = self._all_proved_at.get(process.container)
        return since is not None and process.started >= since

    def _note_whole_containers(self, snapshot: PodSnapshot) -> None:
        for container, group in snapshot.by_container().items():
            if container and all(self(process) for process in group):
                self._all_proved_at.setdefault(container, snapshot.tick)
            else:
                self._all_proved_at.pop(container, None)


async def terminate(
    control: PodProcessControl,
    proc: ProcFs,
    pod: Pod,
    leftovers: Iterable[Process],
    deadline: float,
    last_snapshot: PodSnapshot | None,
) -> tuple[Process, ...]:
    """End ``leftovers`` and what they fork meanwhile; answers those alive ``deadline`` seconds after the first signal.

    One that has left the pod is not signalled any more, but it is still answered: it lives.

    Args:
        last_snapshot: the last look at the pod before this, if there was one.
    """
    loop = asyncio.get_running_loop()
    due: float | None = None  # how long it took to look and to signal is not held against those who are to die
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
            continue  # look again at once: what was forked meanwhile forks on
        await _wait_for_exits(proc, living[:_WATCHED_AT_ONCE], due - now)
    return await control.run_in_thread(_select_alive, proc, proof.all_processes)


def _select_alive(proc: ProcFs, processes: Iterable[Process]) -> tuple[Process, ...]:
    now = ((process, proc.stat_if_alive(process.pid)) for process in processes)
    return tuple(process for process, stat in now if stat is not None and stat.started == process.started)


def kill_if_in_pod(control: PodProcessControl, proc: ProcFs, pod: Pod, process: Process) -> None:
    """Kill ``process`` if it is still itself and still in ``pod``; one that may not be signalled is left alone."""

    def is_still_itself() -> bool:
        stat = proc.stat_if_alive(process.pid)
        return stat is not None and stat.started == process.started and control.is_in_pod(pod, process.pid)

    kill_if(process.pid, is_still_itself)


def kill_if(pid: int, should_kill: Callable[[], bool]) -> None:
    """Kill process ``pid`` if it is ``should_kill``, which is asked once its pidfd is open.

    So whatever was read of the PID was true of the process that the signal reaches, or the signal reaches nobody.
    """
    pidfd = _open_pidfd(pid)
    if pidfd is None:
        return
    try:
        if should_kill():
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # gone, or not ours to signal: the caller looks who is alive and says so
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
                "The service has too many files open to end a leftover: raise its limit (ulimit -n)."
            ) from exc
        raise


async def _wait_for_exits(proc: ProcFs, processes: Iterable[Process], seconds: float) -> None:
    """Return once all of ``processes`` are gone, their threads included, or after ``seconds``."""
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
                watched.discard(pidfd)  # the PID is somebody else's by now, and nobody waits for a stranger
                os.close(pidfd)
        for pidfd in watched:
            loop.add_reader(pidfd, exited, pidfd)
        if watched:
            await asyncio.wait_for(all_gone.wait(), seconds)
        else:
            await asyncio.sleep(min(_POLL_INTERVAL, seconds))
    except TimeoutError:
        return  # the caller looks who is alive and says so
    finally:
        for pidfd in watched:
            loop.remove_reader(pidfd)
            os.close(pidfd)
