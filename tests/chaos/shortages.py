"""Events of the soak that concern the whole node: its clock, its disk, its memory, descriptors and processes.

Each happens on real nodes, for the reason that its docstring states. All but those of the clock end after a while. During
each and afterwards no device is handed over dirty, no record is lost, and every pod starts.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos import node_faults
from tests.chaos.children import ERASER, DaemonChild, children_of
from tests.chaos.node_faults import NodeFaults
from tests.chaos.storm import Supervisor

__all__ = ["Shortages", "daemon_kind", "has_own_pids", "kind_of"]

HOUR = 3600.0
MEBIBYTE = 1 << 20
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")

Act = Callable[[], Awaitable[bool]]


def has_own_pids() -> bool:
    """Return whether this soak runs in a PID namespace of its own, as each round does (:mod:`tests.chaos.rounds`)."""
    return os.getppid() == 1 and "OWN_PIDS" in os.environ


def daemon_kind(daemon: Supervisor) -> str:
    """Return what a daemon is called in the counts of kills."""
    return {"serve": "service", "plugin": "plugin", "dra": "DRA driver"}[daemon.daemon.arguments[0]]


def kind_of(child: DaemonChild) -> str:
    """Return what a child of the service is called in the counts of kills."""
    return "eraser" if child.module == ERASER else "driver's or walker's child"


@dataclass(frozen=True, slots=True)
class Shortages:
    """Acts on the whole node.

    Attributes:
        later: runs what ends an act, beside other acts.
        kills: processes that were killed, by kind.
    """

    faults: NodeFaults
    state: Path
    service: Supervisor
    plugin: Supervisor
    rng: random.Random
    later: Callable[[Coroutine[Any, Any, None]], None]
    kills: Counter[str]

    def acts(self) -> dict[str, tuple[int, Act]]:
        """Return the acts: name → how often, and what is done; it returns whether its target existed."""
        acts: dict[str, tuple[int, Act]] = {
            "disk full": (3, self._disk_full),
            "disk read-only": (2, self._disk_read_only),
            "disk with I/O errors": (1, self._disk_broken),
            "page torn in the log": (2, partial(self._torn_page, of_log=True)),
            "page torn in the database": (2, partial(self._torn_page, of_log=False)),
            "clock set by hours": (3, self._clock_set),
            "clock corrected": (2, self._clock_corrected),
            "suspended": (2, self._suspended),
            "killed with all its children, for memory": (2, self._killed_for_memory),
            "no memory": (2, self._no_memory),
            "no descriptors": (3, self._no_descriptors),
            "inotify exhausted": (2, self._no_inotify),
        }
        if has_own_pids():
            acts["PIDs reused"] = (3, self._pids_reused)
        return acts

    # -- the disk --------------------------------------------------------------------------------------------------

    async def _disk_full(self) -> bool:
        """A pod fills the node's disk with logs or an ``emptyDir`` until the kubelet evicts it."""
        self.faults.fill_disk(self.rng.choice((0, 0, 4096, 40_000, 400_000)))
        self.later(self._afterwards(self.faults.repair_disk, 0.5, 3.0))
        return True

    async def _disk_read_only(self) -> bool:
        """The file system was mounted with ``errors=remount-ro`` and found an error, until someone remounts it."""
        self.faults.make_disk_read_only()
        self.later(self._afterwards(self.faults.repair_disk, 0.3, 2.0))
        return True

    async def _disk_broken(self) -> bool:
        """A network volume or a failing disk returns EIO for a moment."""
        self.faults.break_disk(5)
        self.later(self._afterwards(self.faults.repair_disk, 0.1, 1.0))
        return True

    async def _torn_page(self, *, of_log: bool) -> bool:
        """The power fails while a page is written that nothing was promised about."""

        async def tear() -> None:
            node_faults.tear_a_page(self.state / "ledger.db", of_log=of_log, torn=self.rng.randbytes(16))

        self.service.gap = tear
        if not self.service.kill():
            self.service.gap = None
            return False
        self.kills["service"] += 1
        return True

    # -- the clock -------------------------------------------------------------------------------------------------

    async def _clock_set(self) -> bool:
        """The hardware clock lost its battery, kept local time, or an operator sets the clock."""
        self.faults.set_clock(self.rng.uniform(-12 * HOUR, 12 * HOUR))
        return True

    async def _clock_corrected(self) -> bool:
        """NTP reaches its server again and steps the clock to the right time."""
        if not self.faults.clock_offset:
            return False
        self.faults.set_clock(0.0)
        return True

    async def _suspended(self) -> bool:
        """A virtual machine is paused, moved to another host, and continues hours later."""
        with self._stopped():
            await asyncio.sleep(self.rng.uniform(0.1, 0.5))
            self.faults.set_clock(self.faults.clock_offset + self.rng.uniform(60.0, 12 * HOUR))
        return True

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        handles: list[int] = []
        try:
            for each in self._daemons():
                stopped = [each, *(child.pid for child in children_of(each))]
                for pid in stopped:
                    with suppress(ProcessLookupError):
                        handles.append(os.pidfd_open(pid))
                        signal.pidfd_send_signal(handles[-1], signal.SIGSTOP)
            yield
        finally:
            for handle in handles:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGCONT)
                os.close(handle)

    # -- what the kernel lends -------------------------------------------------------------------------------------

    async def _killed_for_memory(self) -> bool:
        """A container reaches its memory limit: since Kubernetes 1.28 all of its processes are killed at once."""
        daemon = self.rng.choice((self.service, self.service, self.plugin))
        process = daemon.daemon.process
        if process is None or process.returncode is not None:
            return False
        for child in children_of(process.pid):
            self.kills[kind_of(child)] += child.signal(signal.SIGKILL)
        if not daemon.kill():
            return False
        self.kills[daemon_kind(daemon)] += 1
        return True

    async def _no_memory(self) -> bool:
        """Allocations fail: under ``vm.overcommit_memory=2`` or ``LimitAS=``, while a neighbour uses all memory."""
        return self._limited(partial(node_faults.limit_memory, spare=self.rng.choice((0, 1, 4)) * MEBIBYTE))

    async def _no_descriptors(self) -> bool:
        """Something leaks descriptors, or a low ``LimitNOFILE=`` meets many connections."""
        return self._limited(partial(node_faults.limit_descriptors, spare=self.rng.randint(0, 8)))

    def _limited(self, limit: Callable[[int], None]) -> bool:
        # An interpreter that cannot import its modules says nothing about them.
        serving = [each.daemon.pid for each in (self.service, self.plugin) if each.is_serving()]
        if not serving:
            return False
        pid = self.rng.choice(serving)
        try:
            limit(pid)
        except OSError:
            return False

        def lift() -> None:
            for each in [pid, *(child.pid for child in children_of(pid))]:
                with suppress(OSError):
                    node_faults.no_limit(each)

        self.later(self._afterwards(lift, 0.3, 2.0))
        return True

    async def _no_inotify(self) -> bool:
        """Other programs of the node have used up ``fs.inotify.max_user_instances`` (128 by default) or its watches."""
        self.faults.exhaust_inotify(exhausted=True)
        self.later(self._afterwards(partial(self.faults.exhaust_inotify, exhausted=False), 0.5, 4.0))
        return True

    async def _pids_reused(self) -> bool:
        """Many short-lived processes make the kernel's PIDs wrap around: numbers of ended processes are given again."""
        lowest = self.rng.randint(100, 300)

        async def rewind() -> None:
            for _ in range(40):
                LAST_PID.write_text(str(lowest))
                await asyncio.sleep(0.05)

        self.later(rewind())
        return True

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _daemons(self) -> list[int]:
        processes = (each.daemon.process for each in (self.service, self.plugin))
        return [each.pid for each in processes if each is not None and each.returncode is None]

    async def _afterwards(self, end: Callable[[], None], shortest: float, longest: float) -> None:
        await asyncio.sleep(self.rng.uniform(shortest, longest))
        end()
