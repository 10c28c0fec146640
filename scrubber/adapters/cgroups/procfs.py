"""Information in ``/proc`` about one process, safe against forged command names and leaders that died first.

A process whose first thread is dead while others run looks like a zombie, its ``environ`` is empty, and its v1 cgroup
reads ``/``; one of the living threads is read instead. The threads of a process may start and exit faster than one can
be read. In that case the result is unknown, which is never reported as "in no cgroup".
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
_MAX_ATTEMPTS = 32  # to find a thread that still exists when it is read
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def boot_ticks() -> int:
    """Return the current time in the unit of start times: clock ticks since boot."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_SECOND)


def _is_all_of_v2(cgroups: bytes) -> bool:
    return cgroups.startswith(b"0::") and cgroups.count(b"\n") == 1


class ResourceShortage(Unreadable):
    """The node or this service has run out of descriptors or memory; this implies nothing about a pod or a device."""


def read_error(subject: object, exc: OSError) -> Unreadable:
    """Return the exception to raise when ``subject`` cannot be read."""
    kind = ResourceShortage if exc.errno in _SHORTAGES else Unreadable
    return kind(f"{subject} cannot be read: {exc.strerror or exc}.")


@dataclass(frozen=True, slots=True)
class ProcFs:
    """A mounted proc file system of the node's own PID namespace."""

    root: Path = Path("/proc")

    def stat(self, pid: int) -> ProcStat | None:
        """Return the current state of the process, dead or alive; None when there is no such process."""
        data = self._read(f"{pid}/stat")
        return parse_stat(data) if data else None

    def stat_if_alive(self, pid: int) -> ProcStat | None:
        """Return the process if any part of it still runs: a zombie counts only while one of its threads lives."""
        stat = self.stat(pid)
        return None if stat is None or stat.has_exited else stat

    def cgroup(self, stat: ProcStat) -> bytes | None:
        """Return the text of the process's ``cgroup`` file, or None when the process has exited.

        Parse the text with :func:`~scrubber.adapters.kernel_text.cgroup_paths`.

        Raises:
            Unreadable: The process exists and its cgroup cannot be determined.
        """
        data = self._read(f"{stat.pid}/cgroup")
        if data and (stat.is_dead or not _is_all_of_v2(data)):
            text = self._read_from_live_thread(stat, "cgroup")
            # For an exiting thread v2 reports its last cgroup; v1 reports "/", which would mean it is in no pod.
            if text is None and not _is_all_of_v2(data) and not self._is_ending(stat.pid):
                raise Unreadable(f"The threads of process {stat.pid} start and exit too fast to read its cgroup.")
            data = text or data
        return data or None

    def environ(self, stat: ProcStat) -> bytes | None:
        """Return the environment of a process, empty during an exec; None when it has exited or may not be read."""
        data = self._read_from_live_thread(stat, "environ") if stat.is_dead else None
        return self._read(f"{stat.pid}/environ", hidden=True) if data is None else data

    def owner(self, pid: int) -> int | None:
        """Return the effective uid of the process; None when the process has exited."""
        try:
            return os.stat(f"{self.root}/{pid}").st_uid
        except (FileNotFoundError, ProcessLookupError):
            return None

    def pids(self) -> list[int]:
        """Return the PIDs of all processes of the node. A fast path must not make this walk."""
        try:
            return [int(name) for name in os.listdir(self.root) if name.isascii() and name.isdecimal()]
        except OSError as exc:
            raise read_error(self.root, exc) from exc

    def _read_from_live_thread(self, stat: ProcStat, file: str) -> bytes | None:
        """Read ``file`` of a thread that was alive before and after the read; None when none was found in time."""
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
                for thread in threads:  # the first live thread suffices, and there may be very many
                    yield thread.name
        except (FileNotFoundError, ProcessLookupError):
            return
        except OSError as exc:
            raise read_error(f"{self.root}/{pid}/task", exc) from exc

    def _is_thread_alive(self, pid: int, thread: str) -> bool:
        stat = self._thread_stat(pid, thread)
        return stat is not None and not (stat.is_dead or stat.exiting)

    def _is_ending(self, pid: int) -> bool:
        """Whether every thread of the process is dead or exiting.

        A listing misses threads that start or end meanwhile, so the kernel's thread count is compared as well.
        """
        listed = [self._thread_stat(pid, thread) for thread in self._threads(pid)]
        left = [stat for stat in listed if stat is not None]
        if not left:  # where threads were listed, others may have been started before these ended
            return not listed or self.stat(pid) is None
        return all(stat.is_dead or stat.exiting for stat in left) and left[-1].threads <= len(left)

    def _thread_stat(self, pid: int, thread: str) -> ProcStat | None:
        data = self._read(f"{pid}/task/{thread}/stat")
        return parse_stat(data) if data else None

    def _read(self, path: str, *, hidden: bool = False) -> bytes | None:
        """Return the file's content; None when it no longer exists, or when ``hidden`` is set and access is denied."""
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
