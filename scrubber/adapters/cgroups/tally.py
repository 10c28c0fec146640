"""Limits on how much of one pod is inspected before reading it is abandoned.

A tenant controls the number of its processes and cgroups. It must not control how long other readers wait for them to
be read. Reading is therefore bounded, and beyond the bound the result is that the pod cannot be listed, which is never
reported as "no processes".
"""

from __future__ import annotations

from collections.abc import Iterable

from scrubber.adapters.cgroups.procfs import ProcFs
from scrubber.adapters.kernel_text import ProcStat
from scrubber.domain.errors import Unreadable

__all__ = ["MAX_PROCESSES", "CgroupTally", "TooManyProcesses", "too_many_processes"]

MAX_PROCESSES = 4096
"""Limit for one pod and one reading. Inspecting this many takes tenths of a second; more are not listed one by one."""

_MAX_CGROUPS = 2048
"""Limit for one pod and one pass; beyond it, processes are inspected instead.

A tenant that can create cgroups can create more than can be visited.
"""

_MAX_NODE_PROCESSES = 32_768
"""Limit on processes of the whole node, in one pass: used for a pod with more cgroups than are visited."""


class TooManyProcesses(Unreadable):
    """There are more processes than are inspected one by one."""


def too_many_processes(uid: str, max_processes: int) -> TooManyProcesses:
    """Return the error for refusing to list pod ``uid``."""
    return TooManyProcesses(
        f"Pod {uid} has more than {max_processes} processes: they are not listed individually, and the pod "
        "counts as running. Limit them with the kubelet's podPidsLimit."
    )


class CgroupTally:
    """Counters for one reading of pod ``uid``, which may take several passes.

    Args:
        max_processes: maximum number of processes of the pod that are inspected.
    """

    def __init__(self, uid: str, proc: ProcFs, max_processes: int = MAX_PROCESSES) -> None:
        self._uid = uid
        self._proc = proc
        self._max_processes = max_processes
        self._pids: set[int] = set()
        self._cgroups = 0
        self._alive: dict[int, ProcStat] = {}
        self._all_processes: list[tuple[ProcStat, bytes]] | None = None

    def start_pass(self) -> None:
        """Start another pass. Counted processes stay counted: a pod that changes is no faster to read."""
        self._cgroups = 0
        self._alive.clear()
        self._all_processes = None

    def count_processes(self, pids: Iterable[int]) -> None:
        """Count these processes of the pod; call this before inspecting them.

        Raises:
            TooManyProcesses: With those counted before, there are more than are inspected.
        """
        self._pids.update(pids)
        if len(self._pids) > self._max_processes:
            raise too_many_processes(self._uid, self._max_processes)

    def stat_if_alive(self, pid: int) -> ProcStat | None:
        """Return the process if it lives; read once per pass, because every hierarchy lists it again."""
        stat = self._alive.get(pid) or self._proc.stat_if_alive(pid)
        if stat is not None:
            self._alive[pid] = stat
        return stat

    def count_cgroup(self) -> bool:
        """Count one more cgroup of the pod; return whether it may still be visited."""
        self._cgroups += 1
        return self._cgroups <= _MAX_CGROUPS

    def all_processes(self) -> list[tuple[ProcStat, bytes]]:
        """Return every living process of the node and the text of its ``cgroup``; walks once per pass.

        Raises:
            TooManyProcesses: There are more than are inspected.
        """
        if self._all_processes is None:
            pids = self._proc.pids()
            if len(pids) > _MAX_NODE_PROCESSES:
                raise TooManyProcesses(
                    f"Pod {self._uid} has more cgroups than can be visited, and the node has more than "
                    f"{_MAX_NODE_PROCESSES} processes: the pod's processes cannot be determined, and it "
                    "counts as running."
                )
            stats = (stat for pid in pids if (stat := self._proc.stat_if_alive(pid)) is not None)
            self._all_processes = [(stat, text) for stat in stats if (text := self._proc.cgroup(stat)) is not None]
        return self._all_processes
