"""A CUDA context without a GPU: memory that really exists, and work that is done when a program waits for it.

A device's memory is the file of its bytes, mapped. Two processes that compute on it never get the same byte at once,
and a released byte reaches the next process unchanged. Only the context's own share is cleared. The memory of a killed
process is free at once, because its claims count only while it holds the lock on its record.

Work is queued and done when its stream, the device or an event is waited for. A program that reads a result without
waiting therefore always reads an old one here; on a GPU it does occasionally.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.nvidia.hostgpu import PAGE, CUDARuntimeError, HostGpu, lives, require_ready
from tests.nvidia.hostkernels import REGISTER_BYTES, HostKernels, Processor

__all__ = ["NULL_STREAM", "HostContext"]

NULL_STREAM: Final = 0
_SMALL: Final = 256  # alignment of small allocations within a granule
_REAPPEARING: Final = b"\xa5" * 64
_EXCLUSIVE_PROCESS, _PROHIBITED = 3, 2
_PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostContext:
    """The share of one device that one process has.

    Raises:
        CUDARuntimeError: 802 while the GPUs are not ready, 46 when the device's compute mode excludes this process, 2 when there is no memory left.
    """

    def __init__(self, gpu: HostGpu) -> None:
        require_ready(gpu.machine)
        self.gpu = gpu
        self.pid = os.getpid()
        self._failed: int | None = None
        self._claims: dict[int, int] = {}  # offset of a granule or more in the file -> bytes
        self._small: dict[int, int] = {}  # address -> bytes, inside the granules below
        self._granules: list[int] = []  # offsets that small allocations share
        self._queues: dict[int, deque[Callable[[], None]]] = {NULL_STREAM: deque()}
        self._blocking = {NULL_STREAM}
        self._maps: list[mmap.mmap] = []
        self._record = -1
        self._node = self._open_node()
        self._memory = os.open(gpu.memory, os.O_RDWR | os.O_CLOEXEC)
        self.size = gpu.total
        self._base = self._map_memory()
        with self._exclusively():
            self._enter()
            own = self._claim(gpu.number("context_bytes", gpu.granularity))
        ctypes.memset(self._base + own, 0, self._claims[own])  # a driver clears its own memory
        self._own = own
        self.processors = [self._processor(number) for number in range(gpu.multiprocessors)]

    # --- state

    def close(self) -> None:
        """Release everything, as the end of the process would."""
        if self.pid == os.getpid():
            self._record_path.unlink(missing_ok=True)
        os.close(self._record)

    def check(self) -> None:
        """Raise CUDARuntimeError with the status that ended this context, or 3 in a process that was forked with it."""
        if os.getpid() != self.pid:
            raise CUDARuntimeError(3)
        while self.gpu.text("hang") is not None:
            signal.pause()
        if self._failed is not None:
            raise CUDARuntimeError(self._failed)

    def free_bytes(self) -> int:
        with self._exclusively():
            return self.size - sum(size for _, size in self._taken())

    def malloc(self, size: int) -> int:
        """Return the address of ``size`` unshared bytes with the content that was left there.

        Small allocations share a granule, as on a GPU.
        """
        if size > self.gpu.granularity // 2:
            with self._exclusively():
                return self._base + self._claim(size)
        requested = -(-max(size, 1) // _SMALL) * _SMALL
        address = self._room(requested)
        if address is None:
            with self._exclusively():
                self._granules.append(self._claim(self.gpu.granularity))
            address = self._base + self._granules[-1]
        self._small[address] = requested
        return address

    def free(self, address: int) -> None:
        if address == 0:
            return
        self.finish()
        if self._small.pop(address, None) is not None:
            return
        offset = address - self._base
        if offset not in self._claims or offset == self._own or offset in self._granules:
            raise CUDARuntimeError(1)
        with self._exclusively():
            _libc.mprotect(address, self._claims.pop(offset), _PROT_NONE)
            self._write_record()

    # --- work

    def new_stream(self, *, non_blocking: bool) -> int:
        number = max(self._queues) + 1
        self._queues[number] = deque()
        if not non_blocking:
            self._blocking.add(number)
        return number

    def put(self, stream: int, work: Callable[[], None]) -> None:
        if stream not in self._queues:
            raise CUDARuntimeError(1)
        self._queues[stream].append(work)

    def step(self, stream: int) -> bool:
        """Do the next work of ``stream``; return False when there was none."""
        if not self._queues[stream]:
            return False
        work = self._queues[stream].popleft()
        try:
            work()
        except CUDARuntimeError as error:
            self._failed = error.status  # every later call in this context fails
            for queue in self._queues.values():
                queue.clear()
            raise
        if self.gpu.text("wont_clear") is not None:
            offset = int(self.gpu.text("wont_clear") or self.gpu.memory.stat().st_size // 2)
            os.pwrite(self._memory, _REAPPEARING, offset)
        return True

    def finish(self, stream: int | None = None) -> None:
        """Wait for ``stream``, or for all. The others continue meanwhile, but not before it has ended."""
        self.check()
        first = [stream] if stream is not None else []
        if stream == NULL_STREAM:
            first = sorted(self._blocking)
        for number in [*first, *(each for each in self._queues if each not in first)]:
            while self.step(number):
                pass

    # --- effects of work

    def set_bytes(self, address: int, value: int, size: int) -> None:
        self._touch(address, size)
        started = time.monotonic()
        ctypes.memset(address, value, size)
        if value == 0:
            self._dawdle(started, size)

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy between device and host in any direction; host addresses are not checked, as in the runtime."""
        for address in (to, source):
            if self._base <= address < self._base + self.size:
                self._touch(address, size)
        ctypes.memmove(to, source, size)

    def launch(
        self, kernels: HostKernels, name: str, grid: Sequence[int], block: Sequence[int], arguments: Sequence[bytes]
    ) -> None:
        working = self._working_processors()
        bad, status = self._bad_page()
        if bad is not None:
            _libc.mprotect(self._base + bad, PAGE, _PROT_NONE)
        started = time.monotonic()
        if working:
            fault = kernels.launch(name, grid, block, arguments, working, len(self.processors))
            if fault is not None:
                on_it = bad is not None and bad <= fault - self._base < bad + PAGE
                raise CUDARuntimeError(status if on_it else 700)
        if name == "fill_zero":
            self._dawdle(started, 16 * int.from_bytes(arguments[1], "little"))

    def _working_processors(self) -> list[Processor]:
        dead = self.gpu.numbers("sm_dead") or []
        stuck, offset = self.gpu.numbers("sm_stuck") or (-1, 0)
        return [
            replace(each, stuck=each.shared + offset) if each.number == stuck else each
            for each in self.processors
            if each.number not in dead
        ]

    def _touch(self, address: int, size: int) -> None:
        offset = address - self._base
        end = offset + size
        if not any(start <= offset and end <= start + claimed for start, claimed in self._claims.items()):
            raise CUDARuntimeError(1)
        bad, status = self._bad_page()
        if bad is not None and offset < bad + PAGE and bad < end:
            raise CUDARuntimeError(status)

    def _bad_page(self) -> tuple[int | None, int]:
        """Return the offset of the bad page (None if there is none), and the status of touching it."""
        found = self.gpu.numbers("bad_page")
        if not found:
            return None, 0
        return found[0] // PAGE * PAGE, found[1] if len(found) > 1 else 214

    def _dawdle(self, started: float, size: int) -> None:
        """Wait as long as ``slow_clear`` requires; it can be removed at any moment."""
        while (seconds := self.gpu.text("slow_clear")) is not None:
            rest = started + float(seconds) * size / self.size - time.monotonic()
            if rest <= 0:
                break
            time.sleep(min(rest, 0.02))

    # --- claims

    def _open_node(self) -> int:
        try:
            return os.open(self.gpu.node, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise CUDARuntimeError(100) from error

    def _map_memory(self) -> int:
        """Map the whole memory; no part of it may be touched before it is claimed."""
        mapped = mmap.mmap(self._memory, 0)
        self._maps.append(mapped)
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        _libc.mprotect(base, len(mapped), _PROT_NONE)
        return base

    def _processor(self, number: int) -> Processor:
        path = self.gpu.directory / "sm" / str(number)
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, self.gpu.shared_bytes + REGISTER_BYTES)
            mapped = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._maps.append(mapped)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        return Processor(number, address, address + self.gpu.shared_bytes)

    @property
    def _name(self) -> str:
        return str(self.gpu.directory.relative_to(self.gpu.gpu))

    @property
    def _records(self) -> Path:
        return self.gpu.gpu / "processes" / "compute.d"

    @property
    def _record_path(self) -> Path:
        return self._records / str(self.pid)

    def _others(self) -> Iterator[Path]:
        return (each for each in self._records.glob("[0-9]*") if each.name != str(self.pid) and lives(each))

    def _enter(self) -> None:
        mode = self.gpu.number("compute_mode", 0)
        if mode == _PROHIBITED or (mode == _EXCLUSIVE_PROCESS and any(self._others())):
            raise CUDARuntimeError(46)
        descriptor, made = tempfile.mkstemp(dir=self._records, prefix=".")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._record = descriptor
        self._write_record()
        os.replace(made, self._record_path)

    def _write_record(self) -> None:
        """Write the record with one write of fixed length, so that readers never see half: bytes, instance, claims."""
        ids = "" if self.gpu.instance is None else " {} {}".format(*self.gpu.instance)
        claims = "".join(f"{offset} {size}\n" for offset, size in self._claims.items())
        text = f"{sum(self._claims.values())}{ids}\n{self._name}\n{claims}".encode()
        os.pwrite(self._record, text.ljust(os.fstat(self._record).st_size, b"\n"), 0)

    def _taken(self) -> list[tuple[int, int]]:
        """Return (offset, bytes) of all processes' claims on this device's memory, in order."""
        found = list(self._claims.items())
        for record in self._others():
            _, directory, *claims = record.read_text("ascii").split("\n")
            if directory == self._name:
                found += [(int(offset), int(size)) for offset, size in (each.split() for each in claims if each)]
        return sorted(found)

    def _claim(self, size: int) -> int:
        """Return the offset of the first gap of ``size`` bytes, rounded up to granules."""
        requested = -(-size // self.gpu.granularity) * self.gpu.granularity
        offset = 0
        for start, claimed in self._taken():
            if start - offset >= requested:
                break
            offset = max(offset, start + claimed)
        if offset + requested > self.size:
            raise CUDARuntimeError(2)
        _libc.mprotect(self._base + offset, requested, mmap.PROT_READ | mmap.PROT_WRITE)
        self._claims[offset] = requested
        self._write_record()
        return offset

    def _room(self, requested: int) -> int | None:
        for offset in self._granules:
            start = self._base + offset
            end = start + self._claims[offset]
            for address, size in sorted(self._small.items()):
                if start <= address < end:
                    if address - start >= requested:
                        break
                    start = address + size
            if end - start >= requested:
                return start
        return None

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Exclude other processes while claims are read and made."""
        self._records.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._records / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
