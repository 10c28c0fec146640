"""A tenant of the soak: it reports what it finds, changes to its bytes, and who signals it.

First it reads every byte of each ``dev/simgpu*``, then it fills them with its own text and checks that repeatedly. It
reports each step to an independent reader (:mod:`tests.chaos.reader`), over a connection that ends when it ends, for
any reason. Every signal that can be blocked is, so that it is reported with its sender instead of acted upon.

It imports nothing of the project, and little else: two thousand pods run it. Words of the command line::

    reader=SOCKET name=NAMESPACE/POD/CONTAINER seconds=S|forever
    exit=CODE|kill     how it ends when its time is over (default 0)
    deaf=yes           it does not end on SIGTERM
    hold=fd|map|flight how it holds its devices: open, only mapped, or by a descriptor in flight
    leave=KIND[,KIND]  processes left behind: child, escaped (both hold what it holds), idle (holds nothing), forker
    life=S|forever     how long those live (default forever)
    device=PATH as=simgpuN   an unauthorized process instead of a tenant: opens and reads the device, writes nothing
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from typing import NoReturn

LOOK_EVERY = 0.2
"""Seconds between two checks of its own bytes."""
BLOCK = 4096
SHOWN = 48
FORKS_EVERY = 0.004
"""Seconds for which each process of a forker lives."""
NOT_OURS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGKILL, signal.SIGSTOP}
REPORTED_SIGNALS = signal.valid_signals() - NOT_OURS


class Device:
    """One device, held in one of three ways."""

    def __init__(self, path: str, name: str) -> None:
        self.name = name
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._size = os.fstat(self._fd).st_size
        self._mapping: memoryview | None = None
        self._flight: tuple[socket.socket, socket.socket] | None = None

    def hold(self, how: str) -> None:
        if how == "map":
            import mmap

            self._mapping = memoryview(mmap.mmap(self._fd, self._size))
            os.close(self._fd)
        elif how == "flight":
            self._flight = socket.socketpair()
            self._launch()

    def read(self) -> bytes:
        if self._mapping is not None:
            return bytes(self._mapping)
        if self._flight is None:
            return os.pread(self._fd, self._size, 0)
        _, (self._fd,), _, _ = socket.recv_fds(self._flight[1], 1, 1)
        found = os.pread(self._fd, self._size, 0)
        self._launch()
        return found

    def fill(self, text: bytes) -> None:
        os.pwrite(self._fd, self.full_of(text), 0)

    def full_of(self, text: bytes) -> bytes:
        return (text * (self._size // len(text) + 1))[: self._size]

    def let_go(self) -> None:
        os.close(self._fd)

    def _launch(self) -> None:
        assert self._flight is not None
        socket.send_fds(self._flight[0], [b"x"], [self._fd])
        os.close(self._fd)


class Tenant:
    """One process; what it leaves behind are copies of it with separate connections."""

    def __init__(self, words: dict[str, str]) -> None:
        self._words = words
        self._name = words["name"]
        self._uid = os.environ.get("SCRUBBER_SIM_POD_UID", "none")
        self._run = os.environ.get("SCRUBBER_SIM_RUN", "none")
        self._text = f"{self._name} {self._uid} ".encode()
        self._line: socket.socket | None = None
        self._devices: list[Device] = []
        self._damaged: set[str] = set()

    def live(self) -> NoReturn:
        signal.pthread_sigmask(signal.SIG_BLOCK, REPORTED_SIGNALS)
        ends = _ends(self._words["seconds"])
        if "device" in self._words:
            self._devices = [Device(self._words["device"], self._words["as"])]
            self._connect("unauthorized")
            self._come(b"")
            self._stay(ends, own=False)
        paths = sorted(name for name in os.listdir("dev") if name.startswith("simgpu")) if os.path.isdir("dev") else []
        self._devices = [Device(f"dev/{name}", name) for name in paths]
        self._connect("main")
        self._come(self._text)
        for device in self._devices:
            device.fill(self._text)
        self._report("wrote")
        for kind in filter(None, self._words.get("leave", "").split(",")):
            self._leave(kind)
        for device in self._devices:
            device.hold(self._words.get("hold", "fd"))
        print("ready", flush=True)
        self._stay(ends, own=True, deaf=self._words.get("deaf") == "yes")

    # -- reports ---------------------------------------------------------------------------------------------------

    def _connect(self, role: str) -> None:
        if self._line is not None:
            self._line.close()
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(self._words["reader"])
        names = ",".join(device.name for device in self._devices) or "none"
        self._report("hello", role=role, name=self._name, uid=self._uid, run=self._run, devices=names)

    def _report(self, what: str, **facts: object) -> None:
        assert self._line is not None
        line = " ".join(f"{key}={value}" for key, value in {"at": time.monotonic(), **facts}.items())
        self._line.send(f"{what} {line}".encode())

    def _come(self, own: bytes) -> None:
        for device in self._devices:
            found = device.read()
            strange, first = strangeness(found, device.full_of(own) if own else bytes(len(found)), zeros_too=True)
            self._report("came", device=device.name, bytes=len(found), strange=strange, found=first.hex() or "none")

    def _look(self) -> None:
        for device in self._devices:
            found, expected = device.read(), device.full_of(self._text)
            self._report("looked", device=device.name, bytes=len(found))
            if found != expected and device.name not in self._damaged:
                self._damaged.add(device.name)
                wrong, first = strangeness(found, expected, zeros_too=False)
                self._report("damaged", device=device.name, wrong=wrong, found=first.hex() or "none")

    # -- its life --------------------------------------------------------------------------------------------------

    def _stay(self, ends: float, *, own: bool, deaf: bool = False) -> NoReturn:
        over = False
        while not over:
            rest = ends - time.monotonic()
            received = signal.sigtimedwait(REPORTED_SIGNALS, max(0.0, min(rest, LOOK_EVERY)))
            over = rest <= 0
            if received is not None and received.si_signo == signal.SIGCHLD:
                _reap()
            elif received is not None:
                self._report("signalled", number=received.si_signo, sender=received.si_pid)
                over |= received.si_signo == signal.SIGTERM and not deaf
            if own:
                self._look()
        code = self._words.get("exit", "0")
        self._report("left", code=code)
        if code == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(int(code) if code != "kill" else 1)

    # -- processes it leaves behind --------------------------------------------------------------------------------

    def _leave(self, kind: str) -> None:
        ends = _ends(self._words.get("life", "forever"))
        if _fork():
            return
        if kind in ("escaped", "idle", "forker"):
            os.setsid()
            if _fork():
                os._exit(0)
        if kind == "forker":
            self._fork_on(ends)
        if kind == "idle":
            for device in self._devices:
                device.let_go()
            self._devices = []
        self._words = {**self._words, "exit": "0"}
        self._connect(kind)
        self._stay(ends, own=True, deaf=True)

    def _fork_on(self, ends: float) -> NoReturn:
        """Fork endlessly, so that no process lives long. It reports nothing: its end shows only in its device's use."""
        assert self._line is not None
        self._line.close()
        while time.monotonic() < ends:
            time.sleep(FORKS_EVERY)
            if _fork():
                os._exit(0)
        os._exit(0)


def strangeness(found: bytes, expected: bytes, *, zeros_too: bool) -> tuple[int, bytes]:
    """Return how many bytes are wrong (zeros may count as right), and the beginning of the first wrong block."""
    if found == expected or (zeros_too and not found.strip(b"\0")):
        return 0, b""
    strange, first = abs(len(found) - len(expected)), b""
    for at in range(0, len(expected), BLOCK):
        block, right = found[at : at + BLOCK], expected[at : at + BLOCK]
        if block == right:
            continue
        wrong = sum(a != b and not (zeros_too and a == 0) for a, b in zip(block, right, strict=False))
        strange += wrong
        first = first or (block[:SHOWN] if wrong else b"")
    return strange, first


def _ends(seconds: str) -> float:
    return time.monotonic() + float("inf" if seconds == "forever" else seconds)


def _fork() -> int:
    return os.fork()  # noqa: TID251 - a single thread, no event loop, and the tenant has to fork


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


if __name__ == "__main__":
    Tenant(dict(word.split("=", 1) for word in sys.argv[1:])).live()
