"""What ``/proc`` says about one process, with its two traps: forged command names, and leaders that died first.

A process whose first thread is dead while others run looks like a zombie, and its own ``environ`` is empty and its v1
cgroup reads ``/``; one of the living threads is asked instead.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from scrubber.adapters.proc import Stat, parse_stat

__all__ = ["Proc", "boot_ticks"]

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def boot_ticks() -> int:
    """Now, in the unit of start times: clock ticks since boot."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_SECOND)


@dataclass(frozen=True, slots=True)
class Proc:
    """A mounted proc file system, of the node's own PID namespace."""

    root: Path = Path("/proc")

    def stat(self, pid: int) -> Stat | None:
        """The process as it is now, dead or alive; None when there is no such process."""
        data = self._read(f"{pid}/stat")
        return parse_stat(data) if data else None

    def living(self, pid: int) -> Stat | None:
        """The process if anything of it still runs: a zombie counts only while one of its threads lives."""
        stat = self.stat(pid)
        if stat is None or (stat.dead and self._living_thread(pid) is None):
            return None
        return stat

    def cgroup(self, stat: Stat) -> str | None:
        """The text of the process's ``cgroup`` file; None when it is gone."""
        data = self._read(self._witness(stat, "cgroup"))
        return data.decode("utf-8", "surrogateescape") if data else None

    def environ(self, stat: Stat) -> bytes | None:
        """The process's environment, empty in the midst of an exec; None when it is gone or may not be seen."""
        try:
            return self._read(self._witness(stat, "environ"))
        except PermissionError:
            return None

    def owner(self, pid: int) -> int | None:
        """The uid under which the process acts; None when it is gone."""
        try:
            return os.stat(f"{self.root}/{pid}").st_uid
        except (FileNotFoundError, ProcessLookupError):
            return None

    def pids(self) -> list[int]:
        """Every process of the node. This is the walk that a fast path must not take."""
        return [int(name) for name in os.listdir(self.root) if name.isdecimal()]

    def _witness(self, stat: Stat, file: str) -> str:
        thread = self._living_thread(stat.pid) if stat.dead else None
        return f"{stat.pid}/{file}" if thread is None else f"{stat.pid}/task/{thread}/{file}"

    def _living_thread(self, pid: int) -> int | None:
        try:
            with os.scandir(f"{self.root}/{pid}/task") as threads:
                for thread in threads:  # the first that lives will do, and there may be very many
                    data = self._read(f"{pid}/task/{thread.name}/stat")
                    if data and not parse_stat(data).dead:
                        return int(thread.name)
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None

    def _read(self, path: str) -> bytes | None:
        # Path objects and buffered files triple the cost of a walk over thousands of processes.
        try:
            descriptor = os.open(f"{self.root}/{path}", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            return None
        try:
            chunks = []
            while chunk := os.read(descriptor, 65536):
                chunks.append(chunk)
            return b"".join(chunks)
        except (FileNotFoundError, ProcessLookupError):
            return None
        finally:
            os.close(descriptor)
