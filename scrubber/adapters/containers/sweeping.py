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

from scrubber.adapters.containers.ending import strike_if
from scrubber.adapters.containers.freezing import frozen, press
from scrubber.adapters.containers.tree import cgroups_in, listed

__all__ = ["Sweep"]


@dataclass(frozen=True, slots=True)
class Sweep:
    """How a pod is ended whole.

    Attributes:
        cgroups: the pod's own, in every hierarchy.
        killed: those of them that may be killed by their switch.
        kill_switch: of a cgroup; None where it has none.
        holds: whether a process is in the pod, by the kernel's word at that moment.
        go_on: asked before each signal; the sweep is broken off when it says no.
    """

    cgroups: Sequence[Path]
    killed: Sequence[Path]
    kill_switch: Callable[[Path], Path | None]
    holds: Callable[[int], bool]
    go_on: Callable[[], bool]

    def kill(self) -> bool:
        """Have the kernel kill everybody in :attr:`killed`; whether that was done for all of the pod's cgroups."""
        done = [self._kill(cgroup) for cgroup in self.killed]
        return all(done) and len(done) == len(self.cgroups)

    def strike(self) -> None:
        """Stop the pod, kill what can be killed at once, and signal one by one whoever is listed.

        ``cgroup.kill`` signals first threads only: a process whose first thread is dead lives on, and forks on.
        """
        struck: set[int] = set()
        with frozen(self.cgroups):
            self.kill()
            while self._strike_listed(struck):
                continue  # a fork that was under way has appeared by now

    def _strike_listed(self, struck: set[int]) -> bool:
        """Signal who is listed and was not signalled yet; whether there was anybody, and it is to go on.

        A PID that was given anew meanwhile is passed over here. The caller looks who is left, and does not rest on this.
        """
        before = len(struck)
        for pid in self._listed():
            if not self.go_on():
                return False
            if pid not in struck:
                struck.add(pid)
                strike_if(pid, lambda: self.holds(pid) and self.go_on())  # noqa: B023 - called at once
        return len(struck) > before

    def _listed(self) -> Iterator[int]:
        for cgroup in self.cgroups:
            for directory in cgroups_in(cgroup):
                yield from listed(directory) or ()

    def _kill(self, cgroup: Path) -> bool:
        """Kill ``cgroup``, or each one below where that cannot be written."""
        if self._pressed(cgroup):
            return True
        for below in islice(cgroups_in(cgroup), 1, None):
            self._pressed(below)
        return False

    def _pressed(self, cgroup: Path) -> bool:
        switch = self.kill_switch(cgroup)
        return switch is not None and press(switch, "1")
