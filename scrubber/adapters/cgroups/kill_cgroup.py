"""Ending a pod that is gone without having listed it: what is in its cgroups ends, and nobody else.

Promise: nothing outside the pod's own cgroups is touched. A whole cgroup is killed only by the kernel, which knows who
is in it; whoever that does not reach is signalled like any leftover, through a pidfd that was open before the kernel
was asked whose the process is.
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


@dataclass(frozen=True, slots=True)
class PodKiller:
    """How a pod is ended whole.

    Attributes:
        cgroups: the pod's own, in every hierarchy.
        killable: those of them that may be killed by their switch.
        kill_file: of a cgroup; None where it has none.
        is_in_pod: whether a process is in the pod, by the kernel's word at that moment.
        should_continue: asked before each signal; the sweep is broken off when it says no.
    """

    cgroups: Sequence[Path]
    killable: Sequence[Path]
    kill_file: Callable[[Path], Path | None]
    is_in_pod: Callable[[int], bool]
    should_continue: Callable[[], bool]

    def kill_cgroups(self) -> bool:
        """Have the kernel kill everybody in :attr:`killable`; whether that was done for all of the pod's cgroups."""
        done = [self._kill_cgroup(cgroup) for cgroup in self.killable]
        return all(done) and len(done) == len(self.cgroups)

    def freeze_and_kill(self) -> None:
        """Stop the pod, kill what can be killed at once, and signal one by one whoever is listed.

        ``cgroup.kill`` signals first threads only: a process whose first thread is dead lives on, and forks on.
        """
        struck: set[int] = set()
        with frozen(self.cgroups):
            self.kill_cgroups()
            while self._kill_listed(struck):
                continue  # a fork that was under way has appeared by now

    def _kill_listed(self, struck: set[int]) -> bool:
        """Signal who is listed and was not signalled yet; whether there was anybody, and it is to go on.

        A PID that was given anew meanwhile is passed over here. The caller looks who is left, and does not rest on this.
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
        """Kill ``cgroup``, or each one below where that cannot be written."""
        if self._write_kill_file(cgroup):
            return True
        for below in islice(walk_cgroups(cgroup), 1, None):
            self._write_kill_file(below)
        return False

    def _write_kill_file(self, cgroup: Path) -> bool:
        switch = self.kill_file(cgroup)
        return switch is not None and write_interface_file(switch, "1")
