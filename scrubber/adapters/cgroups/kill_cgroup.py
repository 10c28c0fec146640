"""Killing a deleted pod without listing it first: everything in its cgroups is killed, and nothing else.

Guarantee: nothing outside the pod's own cgroups is touched. Only the kernel, which knows the members, kills a whole
cgroup. A process that this does not reach is signalled like any leftover, through a pidfd that was opened before the
kernel was queried for the process's pod.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from scrubber.adapters.cgroups.interface_files import frozen, write_interface_file
from scrubber.adapters.cgroups.terminate import kill_if
from scrubber.adapters.cgroups.tree import read_cgroup_procs, walk_cgroups

__all__ = ["PodKiller"]


# See docs/decisions/0010-unnamed-and-unreadable-pods.md.
@dataclass(frozen=True, slots=True)
class PodKiller:
    """Kills all processes of a pod.

    Attributes:
        cgroups: the pod's own cgroups, in every hierarchy.
        killable: those of ``cgroups`` that may be killed through their kill file.
        kill_file: returns the kill file of a cgroup; None where there is none.
        is_in_pod: returns whether the kernel reports the process as a member of the pod at that moment.
        should_continue: called before each signal; False stops the operation.
    """

    cgroups: Sequence[Path]
    killable: Sequence[Path]
    kill_file: Callable[[Path], Path | None]
    is_in_pod: Callable[[int], bool]
    should_continue: Callable[[], bool]

    def kill_cgroups(self) -> bool:
        """Have the kernel kill everything in :attr:`killable`; return whether this covered all of the pod's cgroups."""
        done = [self._kill_cgroup(cgroup) for cgroup in self.killable]
        return all(done) and len(done) == len(self.cgroups)

    def freeze_and_kill(self) -> None:
        """Freeze the pod, kill what can be killed at once, and signal all listed processes one by one.

        ``cgroup.kill`` signals thread group leaders only: a process whose leader is dead lives on, and continues to
        fork.
        """
        struck: set[int] = set()
        with frozen(self.cgroups):
            self.kill_cgroups()
            while self._kill_listed(struck):
                continue  # a fork that was in progress has appeared by now

    def _kill_listed(self, struck: set[int]) -> bool:
        """Signal processes that were not signalled yet; return whether there were any and the caller should continue.

        A PID that was reused meanwhile is skipped here. The caller checks which processes are left and does not rely on
        this.
        """
        before = len(struck)
        for pid in self._listed():
            if not self.should_continue():
                return False
            if pid not in struck:
                struck.add(pid)
                kill_if(pid, lambda: self.is_in_pod(pid) and self.should_continue())  # noqa: B023 - called at once
        return len(struck) > before

    def _listed(self) -> Iterator[int]:
        for cgroup in self.cgroups:
            for directory in walk_cgroups(cgroup):
                yield from read_cgroup_procs(directory) or ()

    def _kill_cgroup(self, cgroup: Path) -> bool:
        """Kill ``cgroup``, or each cgroup below it where its kill file cannot be written."""
        if self._write_kill_file(cgroup):
            return True
        for below in islice(walk_cgroups(cgroup), 1, None):
            self._write_kill_file(below)
        return False

    def _write_kill_file(self, cgroup: Path) -> bool:
        switch = self.kill_file(cgroup)
        return switch is not None and write_interface_file(switch, "1")
