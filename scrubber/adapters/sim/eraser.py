"""The child that clears one device and proves it: audit, clear and verify, fenced against every other process.

Promise: it reports as "cleared" and "verified" only bytes that it wrote and read back while no other process could have
the device open, and it stops between two chunks as soon as a process tries to open it, or its parent is gone. Residue
is counted, never kept.

Memory that exists is mapped and then cleared with ``memset`` and compared with ``memcmp``, at the speed of the node's
memory; mapping it is timed as a phase of its own. Pages that do not exist are written instead, because a page fault for
each of them takes longer.

The child identifies itself in the device's lock file, which it holds with ``flock`` from the first to the last byte: a
service that finds the lock taken knows which process to wait for. Forked by :mod:`scrubber.adapters.sim.zygote`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import mmap
import os
import signal
import sys
import time
from array import array
from collections.abc import Callable, Iterator

from scrubber.adapters import locks
from scrubber.adapters.children.child import Fault, ParentSocket, serve_once
from scrubber.adapters.children.message import Message

__all__: list[str] = ["run"]

_MAX_CHUNK = 32 * 1024 * 1024
"""Bytes between two checks of the fence: milliseconds of work, beside which the checks cost a hundredth of the time."""

_MIN_CHUNKS = 4
"""Chunks of a small device, so that its progress is reported too."""

_WINDOW = 1024 * 1024 * 1024
"""Bytes mapped at the same time: they count as this process's memory, and every GiB takes 2 MiB of page tables."""

_PART = 256 * 1024
"""Bytes of one write, or of one count of wrong bytes: they remain in the processor's cache."""

_ZEROS = bytes(_PART)
_BLOCK = 4096
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_TMPFS_MAGIC = 0x01021994
_PROGRESS_SECONDS = 0.05
_REAPPEARING_BYTES = b"\xa5" * 64
_PUNCH_KEEPING_SIZE = 0x02 | 0x01


class FenceBroken(Exception):
    """Another process tries to open the device."""


class LeaseFence:
    """The write lease: no other process can have the device open while it is held.

    A process that tries to open it waits (45 s at most, ``/proc/sys/fs/lease-break-time``), and this process gets
    SIGIO.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self.wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGIO, lambda *_: None)
        try:
            fcntl.fcntl(memory, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EBUSY):
                raise Fault("held", "A process has the device open.") from error
            raise Fault("unreadable", f"The device cannot be fenced: {error.strerror}.") from error

    def check(self) -> None:
        """Raise :class:`FenceBroken` if the lease is broken.

        Queries the lease itself: a signal can be late, this cannot.
        """
        if fcntl.fcntl(self._memory, fcntl.F_GETLEASE) != fcntl.F_WRLCK:
            raise FenceBroken


class ClearingFaults:
    """The two faults that concern clearing, read again whenever a control file changes."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths
        self._versions: list[tuple[int, int] | None] = []
        self._documents: list[dict[str, object]] = []

    def slow_clear(self) -> float:
        found = [each.get("slow_clear") for each in self._read()]
        try:
            seconds = [float(value) for value in found if isinstance(value, int | float)]
        except OverflowError as error:
            raise Fault("unreadable", "'slow_clear' is not a number of seconds.") from error
        if not all(map(math.isfinite, seconds)):
            raise Fault("unreadable", "'slow_clear' is not a number of seconds.")
        return max(seconds, default=0.0)

    def wont_clear(self) -> bool:
        return any(each.get("wont_clear") is True for each in self._read())

    def _read(self) -> list[dict[str, object]]:
        seen = [_version(path) for path in self._paths]
        if seen != self._versions:
            self._documents = [_json(path) for path, version in zip(self._paths, seen, strict=True) if version]
            self._versions = seen
        return self._documents


class MemoryWindow:
    """Maps the memory file into this process, at most :data:`_WINDOW` bytes at the same time."""

    def __init__(self, memory: int, total: int) -> None:
        self._memory = memory
        self._total = total
        self._start = 0
        self._mapped: mmap.mmap | None = None
        self._address = 0
        self._populated: set[int] = set()
        # On tmpfs a page that was mapped for reading is writable, and takes two thirds of the time. Elsewhere the first
        # write to it would be a page fault of its own.
        self._advice = _MADV_POPULATE_READ if _is_on_tmpfs(memory) else _MADV_POPULATE_WRITE

    def populate(self, offset: int, size: int) -> int:
        """Return the address of a chunk whose pages are all present, so that access to it causes no page fault.

        Raises:
            OSError: the file is shorter (EFAULT), or memory is short.
            ValueError: the file is shorter than the part to be mapped.
        """
        start = offset - offset % _WINDOW
        if self._mapped is None or start != self._start:
            self._mapped = mmap.mmap(self._memory, min(_WINDOW, self._total - start), offset=start)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
            self._start = start
            self._populated.clear()
        if offset not in self._populated:
            self._mapped.madvise(self._advice, offset - start, size)
            self._populated.add(offset)
        return self._address + offset - start


class SimEraseRun:
    """One scrub of one device's memory, pass by pass; its counters are what the report contains."""

    def __init__(self, link: ParentSocket, memory: int, total: int, control: ClearingFaults) -> None:
        self._link = link
        self._memory = memory
        self._control = control
        self._fence = LeaseFence(memory)
        self._window = MemoryWindow(memory, total)
        self._mapping_seconds = 0.0
        self._memcmp = _memcmp()
        self._progress_sent_at = 0.0
        self.total = total
        self.residue: int | None = None
        self.cleared = 0
        self.verified = 0
        self.failed = 0
        self.seconds: dict[str, float] = {}

    def run(self, *, audit: bool, pattern: bool) -> None:
        """Run all passes in order.

        Raises:
            FenceBroken: a process tried to open the device; the counters contain how far the run came.
        """
        if audit:
            self.residue = 0
            self._pass("audit", self._audit)
        if pattern:
            content = BlockPattern(_PART)
            self._pass("pattern", lambda offset, size: self._write_pattern(content, offset, size))
            self._pass("pattern", lambda offset, size: self._compare_pattern(content, offset, size))
        self._pass("clear", self._clear, slowly=True)
        if self._control.wont_clear():
            os.pwrite(self._memory, _REAPPEARING_BYTES[: self.total], self.total // 2)
        self._pass("verify", self._verify)
        if self.failed == 0:
            release_space(self._memory, self.total)
        self.seconds["map"] = self._mapping_seconds
        self._fence.check()

    def _pass(self, phase: str, work: Callable[[int, int], None], *, slowly: bool = False) -> None:
        start = time.monotonic()
        mapping_before = self._mapping_seconds
        self._send_progress(phase, 0, always=True)
        for offset, size in self._chunks():
            work(offset, size)
            self._send_progress(phase, offset + size, always=offset + size == self.total)
            if slowly:
                self._slow_down(phase, start, offset + size)
        mapping = self._mapping_seconds - mapping_before
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - start - mapping

    def _chunks(self) -> Iterator[tuple[int, int]]:
        pages = self.total // _MIN_CHUNKS // mmap.PAGESIZE
        chunk = min(_MAX_CHUNK, max(1, pages) * mmap.PAGESIZE)
        for offset in range(0, self.total, chunk):
            self._check_fence()
            yield offset, min(chunk, self.total - offset)

    def _check_fence(self) -> None:
        if self._link.is_parent_gone():
            sys.exit(0)  # abandoned: no process would receive the report, and the ledger records the device as dirty
        self._fence.check()

    def _slow_down(self, phase: str, start: float, done: int) -> None:
        """Wait as long as the fault ``slow_clear`` demands; check the fence and report progress meanwhile."""
        while (rest := start + self._control.slow_clear() * done / self.total - time.monotonic()) > 0:
            self._check_fence()
            self._send_progress(phase, done, always=False)
            self._link.wait(min(rest, 0.1), self._fence.wake)

    def _audit(self, offset: int, size: int) -> None:
        if not self._is_hole(offset, size):
            self.residue = (self.residue or 0) + self._nonzero(offset, size)

    def _clear(self, offset: int, size: int) -> None:
        if self._is_hole(offset, size):
            for start, part in _parts(offset, size):
                self._write(start, _ZEROS[:part])
        else:
            ctypes.memset(self._map(offset, size), 0, size)
        self.cleared += size

    def _verify(self, offset: int, size: int) -> None:
        wrong = self._nonzero(offset, size)
        self.failed += wrong
        self.verified += size - wrong

    def _is_hole(self, offset: int, size: int) -> bool:
        """Whether the file has no page in this range, which then reads as zeros."""
        try:
            return os.lseek(self._memory, offset, os.SEEK_DATA) >= offset + size
        except OSError as error:
            if error.errno == errno.ENXIO:  # no page until the end of the file
                return True
            raise

    def _nonzero(self, offset: int, size: int) -> int:
        """Return how many bytes are not zero."""
        address = self._map(offset, size)
        # The first byte is zero, and every byte equals the one before it: one stream of memory instead of two.
        if ctypes.string_at(address, 1) == b"\0" and self._memcmp(address, address + 1, size - 1) == 0:
            return 0
        return sum(_count_nonzero(ctypes.string_at(address + start, part)) for start, part in _parts(0, size))

    def _write_pattern(self, content: BlockPattern, offset: int, size: int) -> None:
        for start, part in _parts(offset, size):
            self._write(start, content.at(start, part))

    def _compare_pattern(self, content: BlockPattern, offset: int, size: int) -> None:
        address = self._map(offset, size)
        for start, part in _parts(offset, size):
            found = ctypes.string_at(address + start - offset, part)
            self.failed += count_differences(found, content.at(start, part))

    def _map(self, offset: int, size: int) -> int:
        start = time.monotonic()
        try:
            return self._window.populate(offset, size)
        except (OSError, ValueError) as error:
            raise Fault("unreadable", f"The device's memory cannot be mapped from byte {offset}: {error}.") from error
        finally:
            self._mapping_seconds += time.monotonic() - start

    def _write(self, offset: int, content: bytes) -> None:
        written = os.pwrite(self._memory, content, offset)
        if written != len(content):
            raise Fault("unreadable", f"The device took {written} of {len(content)} bytes at {offset}.")

    def _send_progress(self, phase: str, done: int, *, always: bool) -> None:
        now = time.monotonic()
        if always or now - self._progress_sent_at >= _PROGRESS_SECONDS:
            self._progress_sent_at = now
            self._link.send({"phase": phase, "done_bytes": done, "total_bytes": self.total})


def _is_on_tmpfs(memory: int) -> bool:
    status = ctypes.create_string_buffer(256)  # struct statfs; its first member is a long, f_type
    found = ctypes.CDLL(None).fstatfs(memory, status)
    return found == 0 and ctypes.c_long.from_buffer(status).value == _TMPFS_MAGIC


def _memcmp() -> Callable[[int, int, int], int]:
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return compare


def _parts(offset: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut a chunk into pieces that fit into the processor's cache."""
    for start in range(offset, offset + size, _PART):
        yield start, min(_PART, offset + size - start)


def _count_nonzero(content: bytes) -> int:
    return len(content) - content.count(0)


class BlockPattern:
    """Content that differs in every block of 4 KiB: the block's number in front of random bytes.

    Args:
        size: the most bytes requested at once, a multiple of 4096.
    """

    def __init__(self, size: int) -> None:
        self._content = memoryview(bytearray(os.urandom(size)))
        self._numbers = self._content.cast("Q")[:: _BLOCK // 8]

    def at(self, offset: int, size: int) -> bytes:
        """Return the content of ``size`` bytes at ``offset``, a multiple of 4096."""
        first = offset // _BLOCK
        self._numbers[:] = memoryview(array("Q", range(first, first + len(self._numbers))))
        return self._content[:size].tobytes()


def count_differences(found: bytes, expected: bytes) -> int:
    """Return the number of bytes that differ between two contents of the same length."""
    if found == expected:
        return 0
    differing = int.from_bytes(found, "little") ^ int.from_bytes(expected, "little")
    return _count_nonzero(differing.to_bytes(len(found), "little"))


def _version(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _json(path: str) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            document = json.load(file)
    except ValueError as error:
        raise Fault("unreadable", f"{path} is not JSON: {error}.") from error
    except RecursionError as error:
        raise Fault("unreadable", f"{path} is nested too deeply.") from error
    if not isinstance(document, dict):
        raise Fault("unreadable", f"{path} does not contain a JSON object.")
    return document


def release_space(memory: int, total: int) -> None:
    """Punch the whole file: it then reads as zeros and takes no space. Where that is unsupported, it stays as it is."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    libc.fallocate(memory, _PUNCH_KEEPING_SIZE, 0, total)


def open_memory(path: str, inode: int) -> int:
    try:
        memory = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except BlockingIOError as error:
        raise Fault("held", "A process has the device open and leased.") from error
    except OSError as error:
        code = "lost" if error.errno == errno.ENOENT else "unreadable"
        raise Fault(code, f"The device cannot be opened: {error.strerror}.") from error
    if os.fstat(memory).st_ino != inode:
        raise Fault("unreadable", "The device's memory file was replaced.")
    return memory


def restore_file(memory: int, total: int) -> str | None:
    """Restore size and mode, which a holder of the device could change; return a message when they were wrong."""
    found = os.fstat(memory)
    wrong = []
    if found.st_size != total:
        os.ftruncate(memory, total)
        wrong.append(f"its size was {found.st_size} bytes instead of {total}")
    if found.st_mode & 0o777 != 0o600:
        os.fchmod(memory, 0o600)
        wrong.append(f"its mode was {found.st_mode & 0o777:04o} instead of 0600")
    return f"The memory file was restored: {' and '.join(wrong)}." if wrong else None


def erase(link: ParentSocket, request: Message) -> Message:
    """Run the scrub of ``request`` (built by :class:`scrubber.adapters.sim.erasure.SimEraser`); return the report."""
    total, inode, paths = request["bytes"], request["inode"], request["control"]
    if not isinstance(total, int) or not isinstance(inode, int) or not isinstance(paths, list):
        raise Fault("unreadable", "An erase request must contain bytes, inode and control files.")
    if not locks.acquire_lock(str(request["lock"])):
        raise Fault("held", "Another eraser still works on the device.")
    memory = open_memory(str(request["memory"]), inode)
    try:
        eraser = SimEraseRun(link, memory, total, ClearingFaults(paths))
        restored = restore_file(memory, total)
        fence_broken = False
        try:
            eraser.run(audit=request["audit"] is True, pattern=request["pattern"] is True)
        except FenceBroken:
            fence_broken = True
    except OSError as error:
        raise Fault("unreadable", f"The device cannot be cleared: {error.strerror}.") from error
    return {
        "total_bytes": total,
        "cleared_bytes": eraser.cleared,
        "verified_bytes": eraser.verified,
        "residue_bytes": eraser.residue,
        "failed_bytes": eraser.failed,
        "fence_broken": fence_broken,
        "restored": restored,
        "seconds_by_phase": [list(row) for row in eraser.seconds.items()],
    }


def report_bus_errors(link: ParentSocket) -> object:
    """Turn SIGBUS into a fault, and end the process: the memory file was truncated while this process accessed it.

    The fence prevents that, except in a process that was stopped for longer than the kernel waits for a lease. Python's
    own handlers run only after the instruction that failed, which would then be repeated forever.

    Returns:
        the handler, to be kept until the process ends.
    """

    def report(_: int) -> None:
        try:
            link.send({"fault": "unreadable", "message": "The device's memory was truncated while it was accessed."})
        finally:
            os._exit(0)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(report)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, type(handler))
    libc.signal(signal.SIGBUS, handler)
    return handler


def run(link: ParentSocket) -> None:
    """Execute one request; the zygote calls this in the forked process."""
    kept = report_bus_errors(link)  # noqa: F841 - alive until the process ends
    serve_once(link, lambda request: erase(link, request))
