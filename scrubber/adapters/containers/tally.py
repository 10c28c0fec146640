"""How much of one pod is looked at before its reading is given up.

A tenant decides how many processes and cgroups there are. It must not decide how long everybody else waits for them to
be read; so a reading has a bound, and beyond it the answer is that the pod cannot be told, which is never "nobody".
"""

from __future__ import annotations

from collections.abc import Iterable

from scrubber.adapters.containers.procfs import Proc
from scrubber.adapters.proc import Stat
from scrubber.domain.errors import Unreadable

__all__ = ["MOST_PROCESSES", "Tally", "TooMany", "too_many"]

MOST_PROCESSES = 4096
"""Of one pod, in one reading. To look at so many takes tenths of a second; beyond, they are not listed one by one."""

_MOST_CGROUPS = 2048
"""Of one pod, in one look. Who can make cgroups can make more than anybody can visit; then processes are asked instead."""

_MOST_ASKED = 32_768
"""Processes of the whole node, in one look: for a pod with more cgroups than are visited."""


class TooMany(Unreadable):
    """There are more processes than are looked at one by one."""


def too_many(uid: str, most: int) -> TooMany:
    """The refusal to list pod ``uid``."""
    return TooMany(
        f"There are more than {most} processes in pod {uid}: they are not listed one by one, and the pod counts as "
        "living. Limit them with the kubelet's podPidsLimit."
    )


class Tally:
    """Counts through one reading of pod ``uid``, which may take several looks.

    Args:
        most: processes of the pod that are looked at.
    """

    def __init__(self, uid: str, proc: Proc, most: int = MOST_PROCESSES) -> None:
        self._uid = uid
        self._proc = proc
        self._most = most
        self._pids: set[int] = set()
        self._cgroups = 0
        self._everybody: list[tuple[Stat, bytes]] | None = None

    def look_again(self) -> None:
        """What follows is another look. Who was counted stays counted: a pod that changes is no shorter to read."""
        self._cgroups = 0
        self._everybody = None

    def count(self, pids: Iterable[int]) -> None:
        """The pod has these processes; to be told before they are looked at.

        Raises:
            TooMany: with those counted before, there are more than are looked at.
        """
        self._pids.update(pids)
        if len(self._pids) > self._most:
            raise too_many(self._uid, self._most)

    def visit(self) -> bool:
        """One more cgroup of the pod; whether it is still to be visited."""
        self._cgroups += 1
        return self._cgroups <= _MOST_CGROUPS

    def everybody(self) -> list[tuple[Stat, bytes]]:
        """Every living process of the node and the text of its ``cgroup``: walked once in a look, however often asked.

        Raises:
            TooMany: there are more than are asked.
        """
        if self._everybody is None:
            pids = self._proc.pids()
            if len(pids) > _MOST_ASKED:
                raise TooMany(
                    f"Pod {self._uid} has more cgroups than can be visited, and the node more than {_MOST_ASKED} "
                    "processes: which of them are the pod's cannot be told, and it counts as living."
                )
            stats = (stat for pid in pids if (stat := self._proc.living(pid)) is not None)
            self._everybody = [(stat, text) for stat in stats if (text := self._proc.cgroup(stat)) is not None]
        return self._everybody
