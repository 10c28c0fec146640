"""The program of the check's pods: fills the memory of its devices with a secret and ends badly, or searches for one.

It is sent to the container as text, so it needs only the standard library of Python 3.10, and on GPUs the driver's
``libcuda``, which the container gets with its device. Each result is one JSON line on standard output.

The first process of a container starts a second one, which uses the devices: the kernel lets no signal end the first
process of a PID namespace from inside.

Environment:
    CLUSTER_CHECK_PROGRAM: this text.
    CLUSTER_CHECK_KERNELS: the PTX text of ``search.cu``.
    CLUSTER_CHECK_OPTIONS: a JSON object: ``role`` (``write``, ``search`` or ``restart``), ``secret`` (8 bytes as
        hexadecimal digits), ``end`` (how a writer ends), ``memoryLimit`` (bytes; how much an out-of-memory kill takes).
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

BOOT = "import os; exec(compile(os.environ['CLUSTER_CHECK_PROGRAM'], 'tenant.py', 'exec'))"
"""Runs the program, as an argument of ``python3 -c``."""
FAILED = 3
"""Exit code of a pod that could not do its part."""
_CHUNK = 1 << 20
_SMALLEST_PIECE = 2 << 20
_THREADS = 256
_BLOCKS = 2048


class Device(Protocol):
    """One device of this container."""

    name: str
    memory_bytes: int

    def fill(self, secret: bytes) -> int:
        """Write ``secret`` everywhere; return the number of bytes written."""

    def find(self, secret: bytes) -> tuple[int, int]:
        """Return how many bytes of ``secret`` are in the memory, and how many bytes were searched."""

    def crash(self, secret: bytes) -> NoReturn:
        """Abort this process in the middle of a computation."""


class SimulatedDevice:
    """A device of the simulated node, whose memory is a file."""

    def __init__(self, path: str) -> None:
        self.name = os.path.basename(path)
        self._file = os.open(path, os.O_RDWR)
        self.memory_bytes = os.lseek(self._file, 0, os.SEEK_END)

    def fill(self, secret: bytes) -> int:
        chunk, left = secret * (_CHUNK // len(secret)), self.memory_bytes
        os.lseek(self._file, 0, os.SEEK_SET)
        while left:
            left -= os.write(self._file, chunk[:left])
        return self.memory_bytes

    def find(self, secret: bytes) -> tuple[int, int]:
        os.lseek(self._file, 0, os.SEEK_SET)
        found = searched = 0
        while chunk := os.read(self._file, _CHUNK):
            found += chunk.count(secret) * len(secret)
            searched += len(chunk)
        return found, searched

    def crash(self, secret: bytes) -> NoReturn:
        os.pwrite(self._file, secret, 0)
        os.abort()


class CudaError(Exception):
    """A call of the driver's library failed."""


class Cuda:
    """The driver's library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            CudaError: it returned an error.
        """
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise CudaError(f"{name} failed: {(text.value or b'').decode() or status}")

    def devices(self) -> list[GpuDevice]:
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return [GpuDevice(self, number) for number in range(count.value)]


class GpuDevice:
    """A GPU or an instance of one, and as much of its memory as one process can allocate."""

    def __init__(self, cuda: Cuda, number: int) -> None:
        self._cuda = cuda
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        cuda.call("cuDeviceGet", ctypes.byref(device), number)
        uuid = ctypes.create_string_buffer(16)
        try:  # of an instance, the first one returns its own UUID, the second one that of the whole GPU
            cuda.call("cuDeviceGetUuid_v2", uuid, device)
        except AttributeError:
            cuda.call("cuDeviceGetUuid", uuid, device)
        digits = uuid.raw.hex()
        self.name = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
        total = ctypes.c_size_t()
        cuda.call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
        self.memory_bytes = total.value
        cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._use()
        self._module, self._count = ctypes.c_void_p(), ctypes.c_uint64()
        text = os.environ["CLUSTER_CHECK_KERNELS"].encode() + b"\0"
        cuda.call("cuModuleLoadData", ctypes.byref(self._module), text)
        cuda.call("cuMemAlloc_v2", ctypes.byref(self._count), ctypes.c_size_t(8))
        self._pieces = list(self._allocate())

    def _use(self) -> None:
        self._cuda.call("cuCtxSetCurrent", self._context)

    def _allocate(self) -> Sequence[tuple[int, int]]:
        """Allocate everything that is free; return addresses and sizes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._cuda.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        pieces, size = [], free.value // _SMALLEST_PIECE * _SMALLEST_PIECE
        while size >= _SMALLEST_PIECE:
            address = ctypes.c_uint64()
            try:
                self._cuda.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            except CudaError:
                size = size // 2 // _SMALLEST_PIECE * _SMALLEST_PIECE
            else:
                pieces.append((address.value, size))
        return pieces

    def _launch(self, kernel: str, *arguments: int) -> None:
        function = ctypes.c_void_p()
        self._cuda.call("cuModuleGetFunction", ctypes.byref(function), self._module, kernel.encode())
        values = [ctypes.c_uint64(each) for each in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(each) for each in values))
        grid = (_BLOCKS, 1, 1, _THREADS, 1, 1)
        self._cuda.call("cuLaunchKernel", function, *grid, 0, None, pointers, None)

    def fill(self, secret: bytes) -> int:
        self._use()
        for address, size in self._pieces:
            self._launch("leave", address, size // 8, _word(secret))
        self._cuda.call("cuCtxSynchronize")
        return sum(size for _, size in self._pieces)

    def find(self, secret: bytes) -> tuple[int, int]:
        self._use()
        self._cuda.call("cuMemsetD8_v2", self._count, ctypes.c_ubyte(0), ctypes.c_size_t(8))
        for address, size in self._pieces:
            self._launch("find", address, size // 8, _word(secret), self._count.value)
        found = ctypes.c_uint64()
        self._cuda.call("cuMemcpyDtoH_v2", ctypes.byref(found), self._count, ctypes.c_size_t(8))
        return found.value * 8, sum(size for _, size in self._pieces)

    def crash(self, secret: bytes) -> NoReturn:
        self._use()
        for _ in range(100):
            for address, size in self._pieces:
                self._launch("leave", address, size // 8, _word(secret))
        os.abort()


def _word(secret: bytes) -> int:
    return int.from_bytes(secret, "little")


def open_devices() -> Sequence[Device]:
    """Return the container's devices, each held until this process ends."""
    # Relative to the working directory, which the pod sets to the root of the container.
    simulated = sorted(glob.glob("dev/simgpu*"))
    return [SimulatedDevice(path) for path in simulated] if simulated else Cuda().devices()


def report(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def write(devices: Sequence[Device], secret: bytes) -> None:
    """Fill the devices, and report that the search finds the secret where it is."""
    written = [each.fill(secret) for each in devices]
    found = [each.find(secret)[0] for each in devices]
    report(
        "wrote",
        driver=driver_version(),
        devices=[
            {"name": each.name, "memoryBytes": each.memory_bytes, "writtenBytes": filled, "foundBytes": own}
            for each, filled, own in zip(devices, written, found, strict=True)
        ],
    )


def search(devices: Sequence[Device], secret: bytes) -> None:
    """Report what is found of the secret, and then that the same search finds a secret of its own."""
    found = [each.find(secret) for each in devices]
    own = secrets.token_bytes(len(secret))
    proof = [(each.fill(own), each.find(own)[0]) for each in devices]
    report(
        "searched",
        devices=[
            {
                "name": each.name,
                "memoryBytes": each.memory_bytes,
                "foundBytes": bytes_,
                "searchedBytes": searched,
                "ownWrittenBytes": filled,
                "ownFoundBytes": again,
            }
            for each, (bytes_, searched), (filled, again) in zip(devices, found, proof, strict=True)
        ],
    )


def driver_version() -> str:
    """Return the line of the driver; empty without one."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            return file.readline().strip()
    except OSError:
        return ""


def end(how: str, devices: Sequence[Device], secret: bytes, memory_limit: int) -> None:
    """End as requested; returns for a normal exit."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "crash":
        devices[0].crash(secret)
    elif how == "hold":
        hold()
    elif how == "out-of-memory":
        run_out_of_memory(memory_limit)


def hold() -> NoReturn:
    while True:
        time.sleep(3600)


def run_out_of_memory(limit: int) -> None:
    """Allocate until the kernel kills this container; reports where it has no limit of its own, and returns."""
    actual = container_limit()
    if actual != limit:
        report("not-covered", message=f"the container's memory limit is {actual or 'not visible'} instead of {limit}")
        return
    taken: list[bytearray] = []
    while sum(len(each) for each in taken) < limit + limit // 4:
        taken.append(bytearray(os.urandom(1 << 12) * (1 << 12)))
    report("not-covered", message="the container allocated more than its memory limit, and was not killed")


def container_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def leave_process_behind() -> None:
    """Start a process in a session of its own that holds the devices, and whose parent ends at once."""
    ready, write_end = os.pipe()
    environment = {**os.environ, "CLUSTER_CHECK_PART": "parent-of-leftover", "CLUSTER_CHECK_READY": str(write_end)}
    parent = subprocess.Popen(command(), env=environment, start_new_session=True, pass_fds=(write_end,))
    os.close(write_end)
    parent.wait()
    if not os.read(ready, 1):
        raise RuntimeError("the process to be left behind ended too early")


def be_parent_of_leftover() -> None:
    ready = int(os.environ["CLUSTER_CHECK_READY"])
    subprocess.Popen(command(), env={**os.environ, "CLUSTER_CHECK_PART": "leftover"}, pass_fds=(ready,))


def be_leftover() -> NoReturn:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    simulated = sorted(glob.glob("dev/simgpu*"))
    if simulated:
        held = [SimulatedDevice(path) for path in simulated]
    else:  # a context, but no memory: the process that started this one fills all of it
        cuda, context = Cuda(), ctypes.c_void_p()
        cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        held = []
    os.write(int(os.environ["CLUSTER_CHECK_READY"]), b"1")
    time.sleep(600)
    sys.exit(len(held))


def work() -> None:
    """Play the role of the second process."""
    options = json.loads(os.environ["CLUSTER_CHECK_OPTIONS"])
    secret = bytes.fromhex(options["secret"])
    if options.get("end") == "leftover":
        leave_process_behind()
    devices = open_devices()
    if not devices:
        raise RuntimeError("the container has no device")
    if options["role"] == "search":
        search(devices, secret)
        hold()
    if options["role"] == "restart":
        search(devices, secret)
    write(devices, secret)
    end(options["end"], devices, secret, options["memoryLimit"])
    if options["role"] == "restart":
        sys.exit(1)


def command() -> Sequence[str]:
    return [sys.executable, "-c", BOOT]


def supervise() -> None:
    """Run the second process, and end as it ends. A searcher ends at once when the pod is deleted."""
    process = subprocess.Popen(command(), env={**os.environ, "CLUSTER_CHECK_PART": "worker"})
    if json.loads(os.environ["CLUSTER_CHECK_OPTIONS"])["role"] == "search":
        signal.signal(signal.SIGTERM, lambda *_: process.kill())
    status = process.wait()
    sys.exit(status if status >= 0 else 128 - status)


def main() -> None:
    parts = {"worker": work, "parent-of-leftover": be_parent_of_leftover, "leftover": be_leftover}
    try:
        parts.get(os.environ.get("CLUSTER_CHECK_PART", ""), supervise)()
    except (CudaError, OSError, RuntimeError, MemoryError, LookupError, ValueError, AttributeError) as error:
        report("failed", message=f"{type(error).__name__}: {error}")
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
