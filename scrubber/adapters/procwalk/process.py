"""Inspection of one process within a time limit: the descriptors of its threads and its memory map.

The descriptors of every thread are inspected, because a process whose first thread has ended shows an empty ``fd``
while other threads live on, and a thread may have a separate descriptor table. Threads that each create the next one
and end are missing from every list by the time it is used. So an inspection is complete only when a list of the threads
had no new thread, and the kernel's count of threads decides whether the process lives.

A descriptor opened with ``O_PATH`` holds nothing: it can neither read nor map, and a container needs no permission for
the device to open one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from scrubber.adapters.kernel_text import ProcStat, parse_stat
from scrubber.adapters.procwalk.match import FileTarget, StatxReader, Target, maps_device, read_fdinfo

__all__ = [
    "ProcessMatch",
    "ProcessScan",
    "ScanPosition",
    "command_line",
    "has_open",
    "live_start_time",
    "process_name",
    "read_stat",
    "start_time",
    "user_process_start_time",
]

_COMMAND_LENGTH = 200
_STAT_LENGTH = 4096
_MAPS_CHUNK = 1 << 16
_CLOCK_CHECK_INTERVAL = 256
"""Entries between two reads of the clock; each entry costs some microseconds."""
_DOT_ENTRIES = 2
"""The position of a descriptor in the kernel's directory listing is its number, after ``.`` and ``..``."""
_MAX_NON_MATCHING_FILES = 100_000
_MAX_THREAD_LISTS = 16  # lists of one process's threads, in one scan

_FILE_MAPPED = re.compile(rb"^(\S+) \S+ \S+ (\S+ [1-9]\d*)", re.MULTILINE)
"""A line of ``maps`` with an inode: addresses, and the file by device and inode.

A line break in a name is written as ``\\012`` there, so no name can forge a line.
"""

_KCMP_FILES = 2
_KCMP_CALL = {"x86_64": 312, "aarch64": 272}.get(platform.machine(), -1)  # no call has the number -1: ENOSYS
_SAME, _LESS, _GREATER = 0, 1, 2

NonMatchingFiles = set[bytes]
"""Mapped files, in the notation of ``maps``, that are known not to match the target."""


class ProcessMatch(NamedTuple):
    """A process that holds the target, or that the caller requested by PID.

    Attributes:
        started: start time in clock ticks since boot.
        hung: whether a thread is in uninterruptible sleep, or the first thread is dead and others live. Both may be
            temporary.
        parts: parts of the target that it holds: device numbers, or the file's inode number; empty when it was only
            requested.
    """

    pid: int
    started: int
    command: str
    hung: bool
    parts: tuple[int, ...] = ()


class ScanPosition(NamedTuple):
    """The position at which a scan ran out of time, so that a later one can resume there.

    Attributes:
        started: start time of the process; another process with the same PID is scanned from the beginning.
        parts: parts of the target found so far.
        tables: threads whose descriptors were all inspected, each with its start time; one for each descriptor table.
        thread: the thread whose descriptors were being inspected (0: none), and its start time.
        descriptor: the first of its descriptors that was not inspected.
        address: mappings below it were inspected; None while there are descriptors left.
    """

    started: int = 0
    parts: frozenset[int] = frozenset()
    tables: tuple[tuple[int, int], ...] = ()
    thread: tuple[int, int] = (0, 0)
    descriptor: int = 0
    address: int | None = None

    def furthest(self, other: ScanPosition) -> ScanPosition:
        """Return the position that is further in the process of ``other``, with the parts found by both."""
        if self.started != other.started:
            return other
        further = max(
            self,
            other,
            key=lambda each: (-1 if each.address is None else each.address, len(each.tables), each.descriptor),
        )
        return further._replace(parts=self.parts | other.parts)


class _OutOfTime(Exception):
    """The time for this process is used up."""


class ProcessScan:
    """One scan of one process.

    Attributes:
        permission_denied: whether this user may not inspect a part of it.
        interrupted_in: the phase in which the time ran out; None when the scan was completed.
        phase: current phase: ``threads``, ``descriptors``, ``mappings``.
        started: start time in clock ticks since boot; None until it is known.
        parts: parts of the target found so far.
        has_exited: whether it had ended, or was about to, before the scan was complete; a process that inherited its
            descriptors has another PID.

    Args:
        non_matching_files: shared by all scans of a walk.
        is_out_of_time: returns whether the time for this process is used up.
        start: position at which to resume: :attr:`position` of an earlier scan of this very process.
    """

    def __init__(
        self,
        pid: int,
        target: Target,
        non_matching_files: NonMatchingFiles,
        is_out_of_time: Callable[[], bool] = lambda: False,
        start: ScanPosition | None = None,
    ) -> None:
        self.pid = pid
        self.permission_denied = False
        self.interrupted_in: str | None = None
        self.started: int | None = None
        self.parts: set[int] = set()
        self.phase = "state"
        self.has_exited = False
        self._target = target
        self._non_matching_files = non_matching_files
        self._is_out_of_time = is_out_of_time
        self._statx = StatxReader()
        self._resume_at(start or ScanPosition())

    def _resume_at(self, start: ScanPosition) -> None:
        self._tables = dict(start.tables)
        self._thread, self._descriptor, self._address = start.thread, start.descriptor, start.address
        self._start = start
        self.parts.update(start.parts)

    @property
    def is_resumed(self) -> bool:
        """Whether the scan resumed where an earlier scan of this very process had stopped."""
        return self._start != ScanPosition()

    @property
    def position(self) -> ScanPosition:
        """Position at which to resume after this scan was interrupted."""
        tables = tuple(self._tables.items())
        found = frozenset(self.parts)
        return ScanPosition(self.started or 0, found, tables, self._thread, self._descriptor, self._address)

    def run(self, *, always: bool = False) -> ProcessMatch | None:
        """Scan the process. Returns None when nothing is found, unless the process lives and ``always`` is set.

        Raises:
            PermissionError: Not even the state of the process may be read.
        """
        stat = read_stat(f"/proc/{self.pid}/stat")
        if stat is None or stat.kernel_thread:
            self.has_exited = stat is None
            return None
        self.started = stat.started
        if self._start.started != stat.started:
            self.parts.clear()
            self._resume_at(ScanPosition())
        try:
            self._scan(stat.threads)
        except PermissionError:
            self.permission_denied = True
        except _OutOfTime:
            self.interrupted_in = self.phase
        now = read_stat(f"/proc/{self.pid}/stat")
        if now is None or now.has_exited:
            self.has_exited, self.interrupted_in = True, None
            return None
        # An exiting process has closed its descriptors, and may have forked before: the scan came too late.
        self.has_exited = not self._target.is_complete(self.parts) and now.exiting and now.threads <= 1
        if not (self.parts or always):
            return None
        if now.started != stat.started:  # the PID now belongs to another process, which was not scanned
            self.interrupted_in, self.parts = "state", set()
            return None
        hung = now.is_dead or "D" in _thread_states(self.pid)
        return ProcessMatch(self.pid, stat.started, command_line(self.pid), hung, tuple(sorted(self.parts)))

    def _scan(self, threads: int) -> None:
        """Inspect everything. ``threads``: number of threads a moment ago."""
        if self._address is None:
            known: set[int] = set()
            tables = self._scanned_tables()
            if threads == 1:  # true of most processes: no need to list them
                known.add(self.pid)
                self._scan_threads(known, tables)
            if not (self._target.is_complete(self.parts) or (known and self._is_complete_list([self.pid]))):
                self._scan_all_threads(known, tables)
            self._address = 0
        if not self._target.is_complete(self.parts):
            self._scan_mappings()

    def _scanned_tables(self) -> list[int]:
        """Return threads, in the kernel's order of their tables, whose descriptors an earlier scan has inspected."""
        for thread, started in self._start.tables:
            now = read_stat(f"/proc/{self.pid}/task/{thread}/stat")
            if now is None or now.is_dead or now.started != started:
                del self._tables[thread]
        tables: list[int] = []
        for _ in distinct_fd_tables(self._tables, self._check_time, tables):
            pass
        return tables

    def _scan_all_threads(self, known: set[int], tables: list[int]) -> None:
        for _ in range(_MAX_THREAD_LISTS):
            self.phase = "threads"
            threads = _threads(self.pid)
            fresh = sorted(set(threads) - known, key=lambda thread: (thread != self._thread[0], thread))
            known.update(fresh)
            any_own = self._scan_threads(fresh, tables)
            if self._target.is_complete(self.parts):
                return
            # An exiting thread shares its lack of a table with all that have ended, and may have created another
            # before.
            if (
                not any_own
                and self._is_complete_list(threads)
                and all(self._is_ending(thread) is False for thread in fresh)
            ):
                return
        raise _OutOfTime

    def _is_complete_list(self, threads: Sequence[int]) -> bool:
        """Whether a list of threads is complete: it is truncated, or skips a thread, if one ends while it is read."""
        last = read_stat(f"/proc/{self.pid}/task/{threads[-1]}/stat") if threads else None
        return not threads or (last is not None and last.threads <= len(threads))

    def _scan_threads(self, threads: Iterable[int], tables: list[int]) -> bool:
        """Inspect ``threads`` that share their descriptors with none of ``tables``; return whether there were any."""
        any_own = False
        for thread in distinct_fd_tables(threads, self._check_time, tables):
            if thread in self._tables:  # where tables cannot be compared
                continue
            any_own = True
            self.phase = "descriptors"
            place = f"/proc/{self.pid}/task/{thread}"
            here = (thread, self._thread_start_time(thread))
            if here != self._thread:
                self._thread, self._descriptor = here, 0
            self._scan_descriptors(place, self._descriptor)
            if self._target.is_complete(self.parts):
                break
            self._tables[thread] = here[1]
            self._thread, self._descriptor = (0, 0), 0
            self.phase = "threads"
        return any_own

    def _thread_start_time(self, thread: int) -> int:
        """Return the start time of ``thread``; 0 when it has ended."""
        if thread == self.pid and self.started is not None:
            return self.started
        now = read_stat(f"/proc/{self.pid}/task/{thread}/stat")
        return 0 if now is None else now.started

    def _check_time(self) -> None:
        if self._is_out_of_time():
            raise _OutOfTime

    # --- descriptors

    def _scan_descriptors(self, place: str, first: int = 0) -> None:
        """Add parts of the target open in ``place`` (``/proc/PID``, or one of its threads), starting at ``first``."""
        try:
            directory = os.open(f"{place}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            return
        target, see = self._target, self._statx.stat
        filtered = isinstance(target, FileTarget) and not self._statx.uses_statx
        try:
            if first:
                os.lseek(directory, first + _DOT_ENTRIES, os.SEEK_SET)
            with os.scandir(directory) as entries:
                for number, entry in enumerate(entries):
                    if not number % _CLOCK_CHECK_INTERVAL:
                        self._descriptor = int(entry.name)
                        self._check_time()
                    if filtered and not self._may_match(place, entry.name):
                        continue
                    try:
                        part = target.match(see(entry.name, directory))
                        if part is not None and part not in self.parts and not _is_path_only(place, entry.name):
                            self.parts.add(part)
                            if target.is_complete(self.parts):
                                return
                    except (FileNotFoundError, ProcessLookupError):
                        continue  # closed meanwhile
                    except OSError as error:  # a FUSE file system of another user denies access even to root
                        _raise_if_shortage(error)
                        self.permission_denied = self.permission_denied or self._may_match(place, entry.name)
                        if self.permission_denied and _is_forbidden(f"{place}/fdinfo/{entry.name}"):
                            return  # access is denied to this process or thread, not only to this file
        except (FileNotFoundError, ProcessLookupError):
            return  # it ended meanwhile
        finally:
            os.close(directory)

    def _may_match(self, place: str, name: str) -> bool:
        """Whether a descriptor may match the target, according to the kernel without its file system."""
        try:
            return not isinstance(self._target, FileTarget) or self._target.may_match(
                read_fdinfo(f"{place}/fdinfo/{name}")[1]
            )
        except (FileNotFoundError, ProcessLookupError):
            return False  # closed meanwhile
        except OSError as error:
            _raise_if_shortage(error)
            return True

    # --- mappings

    def _scan_mappings(self) -> None:
        """Add parts of the target in the memory map; threads share one map, so any thread that still has it is read."""
        self.phase = "mappings"
        for _ in range(_MAX_THREAD_LISTS):
            self._check_time()
            if self._scan_map(f"/proc/{self.pid}/maps"):
                return
            threads = _threads(self.pid)
            for thread in threads:
                self._check_time()
                if self._scan_map(f"/proc/{self.pid}/task/{thread}/maps"):
                    return
            if self._is_complete_list(threads) and all(self._is_ending(thread) for thread in threads):
                return  # a thread stuck while exiting has no map, and may remain for long
        raise _OutOfTime

    def _is_ending(self, thread: int) -> bool | None:
        """Whether a thread is dead or exiting; None when it no longer exists."""
        stat = read_stat(f"/proc/{self.pid}/task/{thread}/stat")
        return None if stat is None else stat.is_dead or stat.exiting

    def _scan_map(self, path: str) -> bool:
        """Inspect one memory map; False when it no longer exists."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            return False
        any_lines, rest = False, b""
        try:
            while chunk := os.read(descriptor, _MAPS_CHUNK):
                any_lines = True
                lines, _, rest = (rest + chunk).rpartition(b"\n")
                for addresses, file in _FILE_MAPPED.findall(lines):
                    if file not in self._non_matching_files:
                        self._check_mapping(addresses, file)
                        if self.parts and self._target.is_complete(self.parts):
                            return True
                self._check_time()
        except ProcessLookupError:
            return any_lines  # it ended meanwhile
        finally:
            os.close(descriptor)
        return any_lines

    def _check_mapping(self, addresses: bytes, file: bytes) -> None:
        """Add the part of the target that is mapped at ``addresses``. ``file`` is the file in the notation of ``maps``.

        That notation identifies a file only where ``stat`` returns the same values: on btrfs and overlayfs it does not,
        and two files may share it. So the result is remembered for the rest of the walk only if they are the same.
        """
        target = self._target
        if isinstance(target, FileTarget):
            device, _, number = file.partition(b" ")
            inode = int(number)
            if not target.may_match(inode):
                self._remember_non_matching(file)
                return
            if device == maps_device(target.device):
                self.parts.add(inode)
                return
        start, end = (int(each, 16) for each in addresses.split(b"-"))
        if start < (self._address or 0):
            return
        self._address = start
        try:
            seen = self._statx.stat(f"/proc/{self.pid}/map_files/{start:x}-{end:x}")
        except FileNotFoundError:
            return  # unmapped meanwhile
        except OSError as error:
            _raise_if_shortage(error)
            if isinstance(target, FileTarget):
                self.parts.add(int(file.partition(b" ")[2]))  # an equal inode number is all that this user may learn
            else:
                self.permission_denied = True
            return
        part = target.match(seen)
        if part is not None:
            self.parts.add(part)
        elif file == b"%b %d" % (maps_device(seen.device), seen.inode):
            self._remember_non_matching(file)

    def _remember_non_matching(self, file: bytes) -> None:
        if len(self._non_matching_files) < _MAX_NON_MATCHING_FILES:
            self._non_matching_files.add(file)


def has_open(proc_directory: str, device: int, inode: int) -> bool:
    """Whether a descriptor of ``proc_directory`` (``/proc/PID``, or one of its threads) refers to that file.

    Raises:
        PermissionError: This user may not read that.
    """
    scan = ProcessScan(0, FileTarget(device, frozenset({inode})), set())
    scan._scan_descriptors(proc_directory)
    if scan.permission_denied and not scan.parts:
        raise PermissionError(errno.EACCES, "The descriptors cannot be inspected", proc_directory)
    return bool(scan.parts)


def _raise_if_shortage(error: OSError) -> None:
    """Raise ``error`` if it means a lack of resources in this process or on the node, not a property of the file."""
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR):
        raise error


def _is_forbidden(path: str) -> bool:
    """Whether this user may not read ``path`` in ``/proc``."""
    try:
        read_fdinfo(path)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _is_path_only(place: str, name: str) -> bool:
    return bool(read_fdinfo(f"{place}/fdinfo/{name}")[0] & os.O_PATH)


def distinct_fd_tables(
    threads: Iterable[int], check_time: Callable[[], None] = lambda: None, known_tables: list[int] | None = None
) -> Iterator[int]:
    """Yield one of ``threads`` for each descriptor table: nearly always they share one, and there may be a thousand.

    The kernel defines an order of tables, so a thread is compared with only a few of those found before.

    Args:
        known_tables: tables of an earlier call, which are not yielded again; tables found now are added.
    """
    ordered = [] if known_tables is None else known_tables
    for number, thread in enumerate(threads):
        if not number % _CLOCK_CHECK_INTERVAL:
            check_time()
        low, high = 0, len(ordered)
        while low < high:
            middle = (low + high) // 2
            order = _compare_fd_tables(thread, ordered[middle])
            if order == _SAME:
                break
            if order == _LESS:
                high = middle
            elif order == _GREATER:
                low = middle + 1
            elif _compare_fd_tables(thread, thread) == _SAME:
                del ordered[middle]  # that thread has ended
                high -= 1
            else:  # this thread has ended, or may not be read: it is scanned separately
                yield thread
                break
        else:
            ordered.insert(low, thread)
            yield thread


def _compare_fd_tables(one: int, other: int) -> int:
    """Return how the descriptor tables of two threads compare, from kcmp(2); -1 where that is unavailable."""
    return int(_LIBC.syscall(_KCMP_CALL, one, other, _KCMP_FILES, 0, 0))


def _threads(pid: int) -> list[int]:
    """Return the threads in the kernel's order, the first thread first."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _thread_states(pid: int) -> set[str]:
    """Return the states of the threads that can be read.

    Raises:
        PermissionError: This user may not read them.
    """
    stats = (read_stat(f"/proc/{pid}/task/{thread}/stat") for thread in _threads(pid))
    return {stat.state for stat in stats if stat is not None}


def start_time(pid: int) -> int | None:
    """Return the start time of ``pid`` in clock ticks since boot; None when there is no such process.

    Raises:
        PermissionError: This user may not read it.
    """
    stat = read_stat(f"/proc/{pid}/stat")
    return None if stat is None else stat.started


def live_start_time(pid: int) -> int | None:
    """Like :func:`start_time`; None also for a zombie without a living thread. A process cannot delay the result."""
    stat = read_stat(f"/proc/{pid}/stat")
    return None if stat is None or stat.has_exited else stat.started


def user_process_start_time(pid: int) -> int | None:
    """Like :func:`live_start_time`; None also for a kernel thread."""
    stat = read_stat(f"/proc/{pid}/stat")
    return None if stat is None or stat.has_exited or stat.kernel_thread else stat.started


def command_line(pid: int) -> str:
    """Return the command line. Reads the memory of the process, which can delay that: for callers that may wait."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(_COMMAND_LENGTH * 4)
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace").strip()[:_COMMAND_LENGTH]


def process_name(pid: int) -> str:
    """Return the short name that the kernel stores for the process; never blocks."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read(_COMMAND_LENGTH).decode(errors="replace").strip()
    except OSError:
        return ""


def read_stat(path: str) -> ProcStat | None:
    """Parse a ``stat`` file of ``/proc``; None when the process or thread no longer exists."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        return parse_stat(os.read(descriptor, _STAT_LENGTH))
    except ProcessLookupError:
        return None
    finally:
        os.close(descriptor)


_LIBC = ctypes.CDLL(None)
_LIBC.syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong)
_LIBC.syscall.restype = ctypes.c_long
