"""A pod's processes by environment variables, for the simulated node where cgroups cannot be written.

The kubelet emulator puts the markers into every container's environment and children inherit them. They prove less
than cgroups do, and :meth:`MarkerContainers.not_covered` says so: a process can start another with an environment of
its own making.

A container that starts again has the same name and another run. Each run is a container of its own here, as it is with
cgroups: that the first process of an earlier run is dead proves nothing against those of the next.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

from scrubber.adapters.containers.ending import Proof, Roll, end
from scrubber.adapters.containers.procfs import Proc, boot_ticks
from scrubber.adapters.proc import Stat
from scrubber.domain.assignment import Pod, Process
from scrubber.domain.errors import Unreadable

__all__ = ["CONTAINER_MARKER", "POD_MARKER", "RUN_MARKER", "MarkerContainers"]

POD_MARKER = "SCRUBBER_SIM_POD_UID"
CONTAINER_MARKER = "SCRUBBER_SIM_CONTAINER"
RUN_MARKER = "SCRUBBER_SIM_RUN"

_ROUNDS = 5
# In the midst of an exec, and of an exit, the environment reads as empty; some processes were given an empty one. On a
# busy machine an exec can lose the processor half way.
_EXEC_TAKES = 2.0
_GIVEN_EMPTY = 0.1
_PAUSE = 0.001

Identity = tuple[int, int]
Membership = tuple[str, str]  # the pod's UID; the container's name and run


class MarkerContainers:
    """:class:`scrubber.ports.containers.Containers` by environment markers; sees processes of one user only.

    Args:
        proc: the proc file system to walk.
        uid: whose processes carry markers that can be believed; the service's own user by default.
    """

    def __init__(self, *, proc: Path = Path("/proc"), uid: int | None = None) -> None:
        self._proc = Proc(proc)
        self._uid = os.geteuid() if uid is None else uid
        # Once known, a process stays in its pod whatever it does to its environment. Strangers are remembered by where
        # their environment lies, for that changes when they exec and might become a container's first process.
        self._members: dict[Identity, Membership] = {}
        self._strangers: dict[Identity, tuple[int, int]] = {}
        self._rolls: dict[str, Roll] = {}

    async def processes(self, pod: Pod) -> tuple[Process, ...]:
        roll = await self.roll(pod)
        self._rolls = {uid: known for uid, known in self._rolls.items() if known.processes}
        self._rolls[_uid(pod)] = roll
        return roll.processes

    async def pod_uid_of(self, pid: int) -> str | None:
        stat = self._ours(pid)
        memberships = await self._settled([stat] if stat is not None else [])
        return memberships[0][1][0] if memberships else None

    async def end(self, pod: Pod, leftovers: Iterable[Process], deadline: float) -> tuple[Process, ...]:
        return await end(self, self._proc, pod, leftovers, deadline, self._rolls.get(_uid(pod)))

    def not_covered(self) -> tuple[str, ...]:
        return (
            f"processes of other users than uid {self._uid}: containers are told apart by an environment marker",
            "processes that were given an environment without that marker, or that fork faster than a look at all takes",
        )

    # --- what ending asks (ending.Surroundings) ---

    async def roll(self, pod: Pod) -> Roll:
        """Everybody in ``pod`` now. Walks over all processes of the node.

        Raises:
            Unreadable: there is no proc file system to walk.
        """
        uid, tick = _uid(pod), boot_ticks()
        alive: dict[int, Stat] = {}
        seen: set[int] = set()
        for _ in range(_ROUNDS):
            # A process that forks and exits while we walk is seen by nobody who lists only once.
            new = self._pids() - seen
            seen |= new
            for pid in new:
                stat = self._ours(pid)
                if stat is not None:
                    alive[pid] = stat
                    self._look(stat)  # and remember it: it may be gone in a moment, and have left a child
            if not new:
                break
        memberships = await self._settled(alive.values())
        identities = {stat.identity for stat in alive.values()}
        for memory in (self._members, self._strangers):
            for gone in [identity for identity in memory if identity not in identities]:
                del memory[gone]
        found = (
            Process(pid, started, container) for (pid, started), (pod_uid, container) in memberships if pod_uid == uid
        )
        return Roll(tick, tuple(sorted(found)))

    def holds(self, pod: Pod, pid: int) -> bool:
        stat = self._ours(pid)
        membership = self._look(stat)[1] if stat is not None else None
        return membership is not None and membership[0] == pod.uid

    def end_whole(self, pod: Pod, container: str, proof: Proof) -> bool:
        return False  # nothing binds the processes of such a container together: they are signalled one by one

    # --- reading ---

    def _pids(self) -> set[int]:
        try:
            return set(self._proc.pids())
        except OSError as exc:
            raise Unreadable(f"{self._proc.root} cannot be read: {exc.strerror or exc}.") from exc

    def _ours(self, pid: int) -> Stat | None:
        if self._proc.owner(pid) != self._uid:
            return None
        stat = self._proc.living(pid)
        return None if stat is None or stat.kernel_thread else stat

    async def _settled(self, stats: Iterable[Stat]) -> list[tuple[Identity, Membership]]:
        """Who of ``stats`` is in a pod, and in which; waits for those in the midst of an exec."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        found: list[tuple[Identity, Membership]] = []
        waiting = list(stats)
        while waiting:
            unsettled: list[Stat] = []
            for stat in waiting:
                settled, membership = self._look(stat)
                if membership is not None:
                    found.append((stat.identity, membership))
                elif not settled:
                    unsettled.append(stat)
            waited = loop.time() - began
            waiting = []
            for stat in unsettled:
                if waited < (_GIVEN_EMPTY if stat.given_empty else _EXEC_TAKES):
                    waiting.append(stat)
                elif stat.given_empty:
                    self._strangers[stat.identity] = stat.environment
            if waiting:
                await asyncio.sleep(_PAUSE)
                again = (self._ours(stat.pid) for stat in waiting)
                waiting = [
                    now for now, stat in zip(again, waiting, strict=True) if now and now.identity == stat.identity
                ]
        return found

    def _look(self, stat: Stat) -> tuple[bool, Membership | None]:
        """Whether the process's environment could be judged, and what it says."""
        known = self._members.get(stat.identity)
        if known is not None:
            return True, known
        if stat.environment != (0, 0) and self._strangers.get(stat.identity) == stat.environment:
            return True, None
        environment = self._proc.environ(stat)
        if environment is None:
            return True, None
        pairs = (variable.partition(b"=") for variable in environment.split(b"\0"))
        values = {name: value.decode("utf-8", "replace") for name, _, value in pairs}
        uid = values.get(POD_MARKER.encode())
        if not uid:
            if environment:
                self._strangers[stat.identity] = stat.environment
            return bool(environment), None
        name, run = (values.get(marker.encode(), "") for marker in (CONTAINER_MARKER, RUN_MARKER))
        membership = (uid, f"{name}#{run}" if run else name)
        self._members[stat.identity] = membership
        return True, membership


def _uid(pod: Pod) -> str:
    if not pod.uid:
        raise Unreadable(f"The processes of pod {pod.namespace}/{pod.name} cannot be told: its UID is not known.")
    return pod.uid
