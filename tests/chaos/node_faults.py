"""Faults of a node's clock, disk and kernel limits that only the daemons of one soak meet.

The daemons run with a preloaded library (``node_faults.c``), which reads the faults from a page that it shares with
this module. The machine itself keeps its clock and its disk: several soaks run side by side, without any privilege.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import resource
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

__all__ = ["NodeFaults", "limit_descriptors", "limit_memory", "no_limit", "tear_a_page"]

_SOURCE = Path(__file__).with_name("node_faults.c")
_FLAGS = ("-std=gnu11", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
_PAGE = struct.Struct("<4q256s")
_NO_LIMIT = -1
_NANOSECONDS = 1_000_000_000


@cache
def library() -> Path:
    """Return the preloaded library, compiled once for this process."""
    path = Path(tempfile.mkdtemp(prefix="node-faults-")) / "node_faults.so"
    subprocess.run(["gcc", *_FLAGS, "-o", str(path), str(_SOURCE), "-ldl"], check=True)
    return path


class NodeFaults:
    """The faults of one node; none in the beginning.

    Attributes:
        environment: variables of the daemons that meet the faults.
        clock_steps: (monotonic seconds, offset of the wall clock in seconds from then on), in order.
    """

    def __init__(self) -> None:
        path = library().with_name(f"page-{os.urandom(4).hex()}")
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library()), "NODE_FAULTS": str(path)}
        self.clock_steps: list[tuple[float, float]] = []
        self._wall = 0.0
        self._disk_error, self._room = 0, _NO_LIMIT
        self._inotify_exhausted = False
        self._directory = b""
        self._write()

    # -- the clock -------------------------------------------------------------------------------------------------

    @property
    def clock_offset(self) -> float:
        """Seconds by which the daemons' wall clock is ahead."""
        return self._wall

    def set_clock(self, offset: float) -> None:
        """Set the daemons' wall clock, to ``offset`` seconds ahead."""
        self._wall = offset
        self._write()
        self.clock_steps.append((asyncio.get_running_loop().time(), offset))

    # -- the disk --------------------------------------------------------------------------------------------------

    def use_directory(self, directory: Path) -> None:
        """Apply the faults of the disk to all files below ``directory``."""
        self._directory = os.fsencode(directory)
        self._write()

    def fill_disk(self, room: int = 0) -> None:
        """Leave ``room`` bytes on the disk."""
        self._room = room
        self._write()

    def break_disk(self, error: int) -> None:
        """Have every write fail with ``error``."""
        self._disk_error = error
        self._write()

    def make_disk_read_only(self) -> None:
        """Have every write fail as after ext4's ``errors=remount-ro``: files that are open for writing stay open."""
        self.break_disk(errno.EROFS)

    def repair_disk(self) -> None:
        """Make the disk writable, with enough room."""
        self._disk_error, self._room = 0, _NO_LIMIT
        self._write()

    # -- the kernel's limits ---------------------------------------------------------------------------------------

    def exhaust_inotify(self, *, exhausted: bool) -> None:
        """Have new instances and watches of inotify fail, as at the limits of the user; existing ones go on."""
        self._inotify_exhausted = exhausted
        self._write()

    def end(self) -> None:
        """Remove all faults; the clock keeps its offset."""
        self.repair_disk()
        self.exhaust_inotify(exhausted=False)

    def _write(self) -> None:
        wall = round(self._wall * _NANOSECONDS)
        fields = (wall, self._disk_error, self._room, int(self._inotify_exhausted), self._directory)
        self._page[: _PAGE.size] = _PAGE.pack(*fields)


def limit_descriptors(pid: int, spare: int) -> None:
    """Let a process, and those that it starts, open about ``spare`` more files.

    Raises:
        ProcessLookupError, OSError: there is no such process.
    """
    highest = max((int(each) for each in os.listdir(f"/proc/{pid}/fd")), default=0)
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(highest + 1 + spare, hard), hard))


def limit_memory(pid: int, spare: int) -> None:
    """Let a process, and those that it starts, allocate ``spare`` more bytes.

    Raises:
        ProcessLookupError, OSError: there is no such process.
    """
    pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[0])
    _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * mmap.PAGESIZE + spare, hard))


def no_limit(pid: int) -> None:
    """Undo :func:`limit_descriptors` and :func:`limit_memory`.

    Raises:
        ProcessLookupError: there is no such process.
    """
    for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS):
        _, hard = resource.prlimit(pid, which)
        resource.prlimit(pid, which, (hard, hard))


# -- torn pages ----------------------------------------------------------------------------------------------------

_FRAME_HEADER = 24
_LOG_HEADER = 32


def tear_a_page(database: Path, *, of_log: bool, torn: bytes) -> bool:
    """Write half a page into the ledger of a service that was killed, as a power cut does; return whether one could be.

    Only a page that nothing was promised about can be torn: one that was being appended to the write-ahead log, or one
    that was being copied from there into the database.

    Args:
        torn: what the half page contains.
    """
    log = database.with_name(f"{database.name}-wal")
    if not log.exists() or log.stat().st_size < _LOG_HEADER:
        return False
    content = log.read_bytes()
    page_size = struct.unpack_from(">I", content, 8)[0]
    pages, end = _logged_pages(content, page_size)
    half = (torn * (page_size // 2 // len(torn) + 1))[: page_size // 2]
    if of_log:
        header = struct.pack(">II", 1, 0) + content[16:24] + half[:8]
        with log.open("r+b") as file:
            file.seek(end)
            file.write(header + half)
        return True
    stored = database.stat().st_size // page_size
    copied = sorted(page for page in pages if 1 < page <= stored)
    if not copied:
        return False
    with database.open("r+b") as file:
        file.seek((copied[-1] - 1) * page_size)
        file.write(half)
    return True


def _logged_pages(log: bytes, page_size: int) -> tuple[set[int], int]:
    """Return the pages of all committed frames of a write-ahead log, and where the next frame begins.

    Source: https://www.sqlite.org/fileformat2.html#walformat
    """
    order = "big" if log[3] & 1 else "little"
    salt, sums = log[16:24], struct.unpack_from(">II", log, 24)
    committed: set[int] = set()
    pending: set[int] = set()
    end, at = _LOG_HEADER, _LOG_HEADER
    while at + _FRAME_HEADER + page_size <= len(log):
        number, size_after_commit = struct.unpack_from(">II", log, at)
        sums = _checksum(log[at : at + 8] + log[at + _FRAME_HEADER : at + _FRAME_HEADER + page_size], sums, order)
        if log[at + 8 : at + 16] != salt or struct.unpack_from(">II", log, at + 16) != sums:
            break
        at += _FRAME_HEADER + page_size
        pending.add(number)
        if size_after_commit:
            committed |= pending
            pending, end = set(), at
    return committed, end


def _checksum(content: bytes, before: tuple[int, int], order: str) -> tuple[int, int]:
    first, second = before
    words = struct.unpack(f"{'>' if order == 'big' else '<'}{len(content) // 4}I", content)
    for one, two in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + two + first) & 0xFFFFFFFF
    return first, second
