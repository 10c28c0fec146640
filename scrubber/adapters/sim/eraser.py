"""The child that clears one device and proves it: audit, clear and verify, fenced against every other process.

Promise: it reports as "cleared" and "verified" only bytes that it wrote and read back while no other process could have
the device open, and it stops between two chunks as soon as a process tries to open it, or its parent is gone. Residue
is counted, never kept.

The child identifies itself in the device's lock file, which it holds with ``flock`` from the first to the last byte: a
service that finds the lock taken knows which process to wait for. Runs as ``python -m scrubber.adapters.sim.eraser``.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

from scrubber.adapters import locks
from scrubber.adapters.children import child
from scrubber.adapters.children.child import Fault, ParentSocket
from scrubber.adapters.children.message import Message

__all__: list[str] = []

_CHUNK = 1024 * 1024
_BLOCK = 4096
_ZEROS = bytes(_CHUNK)
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


class SimEraseRun:
    """One scrub of one device's memory, pass by pass; its counters are what the report contains."""

    def __init__(self, link: ParentSocket, memory: int, total: int, control: ClearingFaults) -> None:
        self._link = link
        self._memory = memory
        self._control = control
        self._fence = LeaseFence(memory)
        self._buffer = bytearray(_CHUNK)
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
            nonce = int.from_bytes(os.urandom(8), "big")
            self._pass("pattern", lambda offset, size: self._write(offset, block_pattern(nonce, offset, size)))
            self._pass("pattern", lambda offset, size: self._compare(offset, block_pattern(nonce, offset, size)))
        self._pass("clear", self._clear, slowly=True)
        if self._control.wont_clear():
            os.pwrite(self._memory, _REAPPEARING_BYTES[: self.total], self.total // 2)
        self._pass("verify", self._verify)
        if self.failed == 0:
            release_space(self._memory, self.total)
        self._fence.check()

    def _pass(self, phase: str, work: Callable[[int, int], None], *, slowly: bool = False) -> None:
        start = time.monotonic()
        self._send_progress(phase, 0, always=True)
        for offset, size in self._chunks():
            work(offset, size)
            self._send_progress(phase, offset + size, always=offset + size == self.total)
            if slowly:
                self._slow_down(phase, start, offset + size)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - start

    def _chunks(self) -> Iterator[tuple[int, int]]:
        for offset in range(0, self.total, _CHUNK):
            self._check_fence()
            yield offset, min(_CHUNK, self.total - offset)

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
        self.residue = (self.residue or 0) + self._nonzero(offset, size)

    def _clear(self, offset: int, size: int) -> None:
        self._write(offset, _ZEROS[:size])
        self.cleared += size

    def _verify(self, offset: int, size: int) -> None:
        wrong = self._nonzero(offset, size)
        self.failed += wrong
        self.verified += size - wrong

    def _nonzero(self, offset: int, size: int) -> int:
        chunk = self._read(offset, size)
        return 0 if chunk == _ZEROS[:size] else size - chunk.count(0)  # counting is slow, so only where they differ

    def _compare(self, offset: int, expected: bytes) -> None:
        chunk = self._read(offset, len(expected))
        if chunk != expected:
            self.failed += sum(one != other for one, other in zip(chunk, expected, strict=True))

    def _read(self, offset: int, size: int) -> bytes | bytearray:
        """Return ``size`` bytes, valid until the next read: one shared buffer is twice as fast as one for each read."""
        found = os.preadv(self._memory, [memoryview(self._buffer)[:size]], offset)
        if found != size:
            raise Fault("unreadable", f"The device ends at byte {offset + found} instead of {self.total}.")
        return self._buffer if size == _CHUNK else self._buffer[:size]

    def _write(self, offset: int, content: bytes) -> None:
        written = os.pwrite(self._memory, content, offset)
        if written != len(content):
            raise Fault("unreadable", f"The device took {written} of {len(content)} bytes at {offset}.")

    def _send_progress(self, phase: str, done: int, *, always: bool) -> None:
        now = time.monotonic()
        if always or now - self._progress_sent_at >= _PROGRESS_SECONDS:
            self._progress_sent_at = now
            self._link.send({"phase": phase, "done_bytes": done, "total_bytes": self.total})


def block_pattern(nonce: int, offset: int, size: int) -> bytes:
    """Return content that no other block has: each 4 KiB block repeats a 64-bit mix of its number and ``nonce``."""
    parts = []
    for block in range(offset // _BLOCK, -(-(offset + size) // _BLOCK)):
        mixed = ((block ^ nonce) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 32
        parts.append(mixed.to_bytes(8, "big") * (_BLOCK // 8))
    return b"".join(parts)[:size]


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


def main() -> None:
    link = child.connect_to_parent()
    request = link.receive()
    if request is None:
        return
    try:
        link.send({"ok": erase(link, request)})
    except Fault as fault:
        link.send({"fault": fault.code, "message": fault.message})


if __name__ == "__main__":
    main()
