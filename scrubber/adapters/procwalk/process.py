"""One process, looked into: its threads' descriptors and its memory map, for as long as it may take.

Every thread's descriptors are looked at, because a process whose first thread has ended shows an empty ``fd`` of its own
while the others live on, and a thread may have a table of descriptors to itself. Threads that each make the next one and end are
in no list that is still true when it is used. So a process is looked through only when a list of them had nobody new, and
whether it lives is the kernel's count of threads to say.

A descriptor opened with ``O_PATH`` holds nothing: it can neither read nor map, and a container needs no right to the
device to open one.
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
"""Entries between two looks at the clock; each costs some microseconds."""
_DOT_ENTRIES = 2
"""A descriptor's place in the kernel's list is its number, behind ``.`` and ``..``."""
_MAX_NON_MATCHING_FILES = 100_000
_MAX_THREAD_LISTS = 16  # of one process's threads, in one look

_FILE_MAPPED = re.compile(rb"^(\S+) \S+ \S+ (\S+ [1-9]\d*)", re.MULTILINE)
"""A line of ``maps`` with an inode: addresses, and the file by device and inode. A name's line break is written as
``\\012`` there, so none forges a line.
"""

_KCMP_FILES = 2
_KCMP_CALL = {"x86_64": 312, "aarch64": 272}.get(platform.machine())
_SAME, _LESS, _GREATER = 0, 1, 2

NonMatchingFiles = set[bytes]
"""Mapped files, as ``maps`` names them, that are known to be no part of the target."""


class ProcessMatch(NamedTuple):
    """A process that holds the target, or that the caller asked for by PID.

    Attributes:
        started: clock ticks since boot.
        hung: a thread is in uninterruptible sleep, or the first thread is dead and others live. Both may pass.
        parts: what of the target it has: device numbers, or the file's inode number; empty when it was only named.
    """

    pid: int
    started: int
    command: str
    hung: bool
    parts: tuple[int, ...] = ()


class ScanPosition(NamedTuple):
    """How far a look has come that had no time left, so that a later one goes on there.

    Attributes:
        started: the process's start time; another process of the same PID is looked at from the beginning.
        parts: what of the target was found.
        tables: threads whose descriptors were all looked at, each with its start time; one for each table.
        thread: the thread whose descriptors were being looked at (0: none), and its start time.
        descriptor: the first of its descriptors that was not looked at.
        address: mappings below it were looked at; None while there are descriptors left.
    """

    started: int = 0
    parts: frozenset[int] = frozenset()
    tables: tuple[tuple[int, int], ...] = ()
    thread: tuple[int, int] = (0, 0)
    descriptor: int = 0
    address: int | None = None

    def furthest(self, other: ScanPosition) -> ScanPosition:
        """The one of both that has come further in the process of ``other``, with what both have found."""
        if self.started != other.started:
            return other
        further = max(
            self,
            other,
            key=lambda each: (-1 if each.address is None else each.address, len(each.tables), each.descriptor),
        )
        return further._replace(parts=self.parts | other.parts)


class _OutOfTime(Exception):
    """The time for this process is over."""


class ProcessScan:
    """One process, looked into once.

    Attributes:
        permission_denied: a part of it may not be looked at by this user.
        interrupted_in: what was being looked at when the time was over; None when it was looked through.
        phase: what it is looking at now: ``threads``, ``descriptors``, ``mappings``.
        started: its start time in clock ticks since boot; None until that is known.
        parts: what of the target was found until now.
        has_exited: it had ended, or was about to, before it was looked through; whoever it left its descriptors to has another
            PID.

    Args:
        non_matching_files: shared by all looks of a walk.
        is_out_of_time: whether the time for this process is over.
        start: where to go on; :attr:`position` of an earlier look at this very process.
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
        """Whether it went on where an earlier look at this very process had stopped."""
        return self._start != ScanPosition()

    @property
    def position(self) -> ScanPosition:
        """Where to go on, once this look was cut."""
        tables = tuple(self._tables.items())
        found = frozenset(self.parts)
        return ScanPosition(self.started or 0, found, tables, self._thread, self._descriptor, self._address)

    def run(self, *, always: bool = False) -> ProcessMatch | None:
        """Look. The answer is None when nothing is found, unless the process lives and ``always`` is set.

        Raises:
            PermissionError: not even its state may be known.
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
        # One that ends has closed its descriptors, and may have forked before: it was looked at too late.
        self.has_exited = not self.parts and now.exiting and now.threads <= 1
        if not (self.parts or always):
            return None
        if now.started != stat.started:  # its PID is another process's, which nobody has looked at
            self.interrupted_in, self.parts = "state", set()
            return None
        hung = now.is_dead or "D" in _thread_states(self.pid)
        return ProcessMatch(self.pid, stat.started, command_line(self.pid), hung, tuple(sorted(self.parts)))

    def _scan(self, threads: int) -> None:
        """Look through everything. ``threads``: how many there were a moment ago."""
        if self._address is None:
            known: set[int] = set()
            tables = self._scanned_tables()
            if threads == 1:  # as most have: no need to list them
                known.add(self.pid)
                self._scan_threads(known, tables)
            if not (self._target.is_complete(self.parts) or (known and self._is_complete_list([self.pid]))):
                self._scan_all_threads(known, tables)
            self._address = 0
        if not self._target.is_complete(self.parts):
            self._scan_mappings()

    def _scanned_tables(self) -> list[int]:
        """Threads, in the kernel's order of their tables, whose descriptors an earlier look has looked at."""
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
            # One that ends shares its lack of a table with all that have ended, and may have made another before.
            if (
                not any_own
                and self._is_complete_list(threads)
                and all(self._is_ending(thread) is False for thread in fresh)
            ):
                return
        raise _OutOfTime

    def _is_complete_list(self, threads: Sequence[int]) -> bool:
        """Whether a list of the threads lacks nobody: it breaks off, and passes over one, where one goes meanwhile."""
        last = read_stat(f"/proc/{self.pid}/task/{threads[-1]}/stat") if threads else None
        return not threads or (last is not None and last.threads <= len(threads))

    def _scan_threads(self, threads: Iterable[int], tables: list[int]) -> bool:
        """Look at those of ``threads`` that share their descriptors with none of ``tables``; whether there were any."""
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
        """When ``thread`` was; 0 when it is gone."""
        if thread == self.pid and self.started is not None:
            return self.started
        now = read_stat(f"/proc/{self.pid}/task/{thread}/stat")
        return 0 if now is None else now.started

    def _check_time(self) -> None:
        if self._is_out_of_time():
            raise _OutOfTime

    # --- descriptors

    def _scan_descriptors(self, place: str, first: int = 0) -> None:
        """Add what of the target is open in ``place``: ``/proc/PID``, or one of its threads; from descriptor ``first`` on."""
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
                    except OSError as error:  # a FUSE of another user's refuses even root
                        _raise_if_shortage(error)
                        self.permission_denied = self.permission_denied or self._may_match(place, entry.name)
                        if self.permission_denied and _is_forbidden(f"{place}/fdinfo/{entry.name}"):
                            return  # this process, or this thread of it, and not this file
        except (FileNotFoundError, ProcessLookupError):
            return  # it ended meanwhile
        finally:
            os.close(directory)

    def _may_match(self, place: str, name: str) -> bool:
        """Whether a descriptor may be of the file that is looked for, by what the kernel tells without its file system."""
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
        """Add what of the target is in the memory map; threads share one, so the first that still has one is asked."""
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
                return  # what is stuck at its end has no map, and may stay for long
        raise _OutOfTime

    def _is_ending(self, thread: int) -> bool | None:
        """Whether a thread is dead, or about to be; None when it is gone."""
        stat = read_stat(f"/proc/{self.pid}/task/{thread}/stat")
        return None if stat is None else stat.is_dead or stat.exiting

    def _scan_map(self, path: str) -> bool:
        """Look through one memory map; False when there is none any more."""
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
        """Add what of the target is mapped at ``addresses``. ``file`` is how ``maps`` names the file.

        That name says who a file is only where ``stat`` gives it the same one: on btrfs and overlayfs it does not, and
        two files may share it. So only then is the answer remembered for the rest of the walk.
        """
        target = self._target
        if isinstance(target, FileTarget):
            device, _, inode = file.partition(b" ")
            if not target.may_match(int(inode)):
                self._remember_non_matching(file)
                return
            if device == maps_device(target.device):
                self.parts.add(target.inode)
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
                self.parts.add(target.inode)  # an equal inode number is all that this user may know
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
    """Whether one of the descriptors of ``proc_directory`` (``/proc/PID``, or one of its threads) is that file.

    Raises:
        PermissionError: this user may not know.
    """
    look = ProcessScan(0, FileTarget(device, inode), set())
    look._scan_descriptors(proc_directory)
    if look.permission_denied and not look.parts:
        raise PermissionError(errno.EACCES, "The descriptors cannot be looked at", proc_directory)
    return bool(look.parts)


def _raise_if_shortage(error: OSError) -> None:
    """Raise ``error`` if it says nothing about the file, but that this process or the node has not enough of something."""
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
    """One of ``threads`` for each table of descriptors: nearly always they share one, and some have a thousand.

    The kernel puts tables into an order, so a thread is compared with few of those that were found before.

    Args:
        known_tables: those of an earlier call, which are not answered again; what is found now is added.
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
                del ordered[middle]  # that one is over
                high -= 1
            else:  # this one is over, or nobody may know: then it is looked at for itself
                yield thread
                break
        else:
            ordered.insert(low, thread)
            yield thread


def _compare_fd_tables(one: int, other: int) -> int:
    """kcmp(2): how the descriptor tables of two threads compare; -1 where that is not to be had."""
    if _KCMP_CALL is None:
        return -1
    return int(_LIBC.syscall(_KCMP_CALL, one, other, _KCMP_FILES, 0, 0))


def _threads(pid: int) -> list[int]:
    """In the kernel's order, the first thread first."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _thread_states(pid: int) -> set[str]:
    """Of those that are there to be asked.

    Raises:
        PermissionError: this user may not know.
    """
    stats = (read_stat(f"/proc/{pid}/task/{thread}/stat") for thread in _threads(pid))
    return {stat.state for stat in stats if stat is not None}


def start_time(pid: int) -> int | None:
    """Start time of ``pid`` in clock ticks since boot; None when there is no such process.

    Raises:
        PermissionError: this user may not know.
    """
    stat = read_stat(f"/proc/{pid}/stat")
    return None if stat is None else stat.started


def live_start_time(pid: int) -> int | None:
    """As :func:`start_time`; None also for a zombie without a living thread. A process cannot keep the answer waiting."""
    stat = read_stat(f"/proc/{pid}/stat")
    return None if stat is None or stat.has_exited else stat.started


def user_process_start_time(pid: int) -> int | None:
    """As :func:`live_start_time`; None also for a thread of the kernel's."""
    stat = read_stat(f"/proc/{pid}/stat")
    return None if stat is None or stat.has_exited or stat.kernel_thread else stat.started


def command_line(pid: int) -> str:
    """Its command line. Asks for its memory, which a process can keep busy: for those who may wait."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(_COMMAND_LENGTH * 4)
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace").strip()[:_COMMAND_LENGTH]


def process_name(pid: int) -> str:
    """The short name that the kernel keeps for it; that is never waited for."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read(_COMMAND_LENGTH).decode(errors="replace").strip()
    except OSError:
        return ""


def read_stat(path: str) -> ProcStat | None:
    """What a ``stat`` of ``/proc`` says; None when nobody is there any more."""
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
