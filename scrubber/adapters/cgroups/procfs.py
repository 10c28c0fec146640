"""What ``/proc`` says about one process, with its two traps: forged command names, and leaders that died first.

A process whose first thread is dead while others run looks like a zombie, and its own ``environ`` is empty and its v1
cgroup reads ``/``; one of the living threads is asked instead. Its threads may come and go faster than one can be asked:
then what it would have said is not known, and that is never "in no cgroup".
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scrubber.adapters.kernel_text import ProcStat, parse_stat
from scrubber.domain.errors import Unreadable

__all__ = ["ProcFs", "ResourceShortage", "boot_ticks", "read_error"]

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_MAX_ATTEMPTS = 32  # to find a thread that is still there when it is asked
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def boot_ticks() -> int:
    """Now, in the unit of start times: clock ticks since boot."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_SECOND)


def _is_all_of_v2(cgroups: bytes) -> bool:
    return cgroups.startswith(b"0::") and cgroups.count(b"\n") == 1


class ResourceShortage(Unreadable):
    """The node, or this service, is short of descriptors or memory: that says nothing about a pod, nor about a device."""


def read_error(subject: object, exc: OSError) -> Unreadable:
    """What to raise when ``subject`` cannot be read."""
    kind = ResourceShortage if exc.errno in _SHORTAGES else Unreadable
    return kind(f"{subject} cannot be read: {exc.strerror or exc}.")


@dataclass(frozen=True, slots=True)
class ProcFs:
    """A mounted proc file system, of the node's own PID namespace."""

    root: Path = Path("/proc")

    def stat(self, pid: int) -> ProcStat | None:
        """The process as it is now, dead or alive; None when there is no such process."""
        data = self._read(f"{pid}/stat")
        return parse_stat(data) if data else None

    def stat_if_alive(self, pid: int) -> ProcStat | None:
        """The process if anything of it still runs: a zombie counts only while one of its threads lives."""
        stat = self.stat(pid)
        return None if stat is None or stat.has_exited else stat

    def cgroup(self, stat: ProcStat) -> bytes | None:
        """The text of the process's ``cgroup`` file (:func:`~scrubber.adapters.kernel_text.cgroup_paths`); None when it is gone.

        Raises:
            Unreadable: it is there, and cannot be asked.
        """
        data = self._read(f"{stat.pid}/cgroup")
        if data and (stat.is_dead or not _is_all_of_v2(data)):
            said = self._read_from_live_thread(stat, "cgroup")
            # Of a thread that ends v2 tells where it was; v1 says "/", which would be in no pod.
            if said is None and not _is_all_of_v2(data) and not self._is_ending(stat.pid):
                raise Unreadable(f"The threads of process {stat.pid} come and go too fast to be asked for its cgroup.")
            data = said or data
        return data or None

    def environ(self, stat: ProcStat) -> bytes | None:
        """The process's environment, empty in the midst of an exec; None when it is gone or may not be seen."""
        data = self._read_from_live_thread(stat, "environ") if stat.is_dead else None
        return self._read(f"{stat.pid}/environ", hidden=True) if data is None else data

    def owner(self, pid: int) -> int | None:
        """The uid under which the process acts; None when it is gone."""
        try:
            return os.stat(f"{self.root}/{pid}").st_uid
        except (FileNotFoundError, ProcessLookupError):
            return None

    def pids(self) -> list[int]:
        """Every process of the node. This is the walk that a fast path must not take."""
        try:
            return [int(name) for name in os.listdir(self.root) if name.isascii() and name.isdecimal()]
        except OSError as exc:
            raise read_error(self.root, exc) from exc

    def _read_from_live_thread(self, stat: ProcStat, file: str) -> bytes | None:
        """What one of the process's threads says that lived before and after; None when none was found in time."""
        for _ in range(_MAX_ATTEMPTS):
            thread = next((each for each in self._threads(stat.pid) if self._is_thread_alive(stat.pid, each)), None)
            if thread is not None:
                data = self._read(f"{stat.pid}/task/{thread}/{file}", hidden=True)
                if data is not None and self._is_thread_alive(stat.pid, thread):
                    return data
            elif self._is_ending(stat.pid):
                return None
        return None

    def _threads(self, pid: int) -> Iterator[str]:
        try:
            with os.scandir(f"{self.root}/{pid}/task") as threads:
                for thread in threads:  # the first that lives will do, and there may be very many
                    yield thread.name
        except (FileNotFoundError, ProcessLookupError):
            return
        except OSError as exc:
            raise read_error(f"{self.root}/{pid}/task", exc) from exc

    def _is_thread_alive(self, pid: int, thread: str) -> bool:
        stat = self._thread_stat(pid, thread)
        return stat is not None and not (stat.is_dead or stat.exiting)

    def _is_ending(self, pid: int) -> bool:
        """Whether nobody in the process does anything any more but end. A list lacks who goes, or comes, meanwhile."""
        stats = [self._thread_stat(pid, thread) for thread in self._threads(pid)]
        seen = [stat for stat in stats if stat is not None and (stat.is_dead or stat.exiting)]
        return not stats or (len(seen) == len(stats) and seen[-1].threads <= len(seen))

    def _thread_stat(self, pid: int, thread: str) -> ProcStat | None:
        data = self._read(f"{pid}/task/{thread}/stat")
        return parse_stat(data) if data else None

    def _read(self, path: str, *, hidden: bool = False) -> bytes | None:
        """The file's content; None when it is gone, or ``hidden`` may be and is."""
        # Path objects and buffered files triple the cost of a walk over thousands of processes.
        try:
            descriptor = os.open(f"{self.root}/{path}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                chunks = []
                while chunk := os.read(descriptor, 65536):
                    chunks.append(chunk)
                return b"".join(chunks)
            finally:
                os.close(descriptor)
        except (FileNotFoundError, ProcessLookupError):
            return None
        except OSError as exc:
            if hidden and isinstance(exc, PermissionError):
                return None
            raise read_error(f"{self.root}/{path}", exc) from exc
