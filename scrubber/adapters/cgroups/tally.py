"""How much of one pod is looked at before its reading is given up.

A tenant decides how many processes and cgroups there are. It must not decide how long everybody else waits for them to
be read; so a reading has a bound, and beyond it the answer is that the pod cannot be told, which is never "nobody".
"""

from __future__ import annotations

from collections.abc import Iterable

from scrubber.adapters.cgroups.procfs import ProcFs
from scrubber.adapters.kernel_text import ProcStat
from scrubber.domain.errors import Unreadable

__all__ = ["MAX_PROCESSES", "CgroupTally", "TooManyProcesses", "too_many_processes"]

MAX_PROCESSES = 4096
"""Of one pod, in one reading. To look at so many takes tenths of a second; beyond, they are not listed one by one."""

_MAX_CGROUPS = 2048
"""Of one pod, in one look. Who can make cgroups can make more than anybody can visit; then processes are asked instead."""

_MAX_NODE_PROCESSES = 32_768
"""Processes of the whole node, in one look: for a pod with more cgroups than are visited."""


class TooManyProcesses(Unreadable):
    """There are more processes than are looked at one by one."""


def too_many_processes(uid: str, max_processes: int) -> TooManyProcesses:
    """The refusal to list pod ``uid``."""
    return TooManyProcesses(
        f"There are more than {max_processes} processes in pod {uid}: they are not listed one by one, and the pod counts as "
        "living. Limit them with the kubelet's podPidsLimit."
    )


class CgroupTally:
    """Counts through one reading of pod ``uid``, which may take several looks.

    Args:
        max_processes: processes of the pod that are looked at.
    """

    def __init__(self, uid: str, proc: ProcFs, max_processes: int = MAX_PROCESSES) -> None:
        self._uid = uid
        self._proc = proc
        self._max_processes = max_processes
        self._pids: set[int] = set()
        self._cgroups = 0
        self._all_processes: list[tuple[ProcStat, bytes]] | None = None

    def start_pass(self) -> None:
        """What follows is another look. Who was counted stays counted: a pod that changes is no shorter to read."""
        self._cgroups = 0
        self._all_processes = None

    def count_processes(self, pids: Iterable[int]) -> None:
        """The pod has these processes; to be told before they are looked at.

        Raises:
            TooManyProcesses: with those counted before, there are more than are looked at.
        """
        self._pids.update(pids)
        if len(self._pids) > self._max_processes:
            raise too_many_processes(self._uid, self._max_processes)

    def count_cgroup(self) -> bool:
        """One more cgroup of the pod; whether it is still to be visited."""
        self._cgroups += 1
        return self._cgroups <= _MAX_CGROUPS

    def all_processes(self) -> list[tuple[ProcStat, bytes]]:
        """Every living process of the node and the text of its ``cgroup``: walked once in a look, however often asked.

        Raises:
            TooManyProcesses: there are more than are asked.
        """
        if self._all_processes is None:
            pids = self._proc.pids()
            if len(pids) > _MAX_NODE_PROCESSES:
                raise TooManyProcesses(
                    f"Pod {self._uid} has more cgroups than can be visited, and the node more than {_MAX_NODE_PROCESSES} "
                    "processes: which of them are the pod's cannot be told, and it counts as living."
                )
            stats = (stat for pid in pids if (stat := self._proc.stat_if_alive(pid)) is not None)
            self._all_processes = [(stat, text) for stat in stats if (text := self._proc.cgroup(stat)) is not None]
        return self._all_processes
