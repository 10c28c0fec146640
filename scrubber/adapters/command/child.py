"""Supervises one run of an administrator's program, in a child process of the service.

Guarantee: when a run has been reported, none of its processes is left, whatever the program did: its process group, its
cgroup where there is one, and every process that it detached are killed, or the report says that this was impossible.
The program and all that it starts inherit the descriptor of the device's lock, so a process that survives this
supervisor still blocks the device, and is found by the lock. Nothing that the program prints can occupy more memory
than the limits here.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import time
from contextlib import suppress
from typing import NamedTuple

from scrubber.adapters import locks
from scrubber.adapters.children.child import Fault, ParentSocket
from scrubber.adapters.children.message import MalformedMessage, Message, pack

__all__ = ["MAX_ANSWER", "run"]

MAX_ANSWER = 1 << 20
"""Bytes that a program may print; a program that prints more is broken."""
_MAX_LOG = 2000
_MAX_QUOTED = 60
_MAX_PROGRESS_LINE = 4096
_PROGRESS_INTERVAL = 0.1
_KILL_SECONDS = 2.0
_PR_SET_CHILD_SUBREAPER = 36
_PROGRESS_FD, _LOCK_FD = 3, 4
_FIRST_OWN_FD = 10
_DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)
_CGROUP_MOUNTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
"""Where cgroup v2 is mounted: alone, or on a hybrid node, where the first is an ordinary directory."""
_PREFIX = "scrubber-command-"


class _Order(NamedTuple):
    """What to run.

    Attributes:
        limit: the setting that the deadline comes from, for messages.
        lock: the lock file of the device, taken first; empty where the run concerns no device.
    """

    path: str
    verb: str
    stdin: bytes
    deadline: float
    limit: str
    lock: str
    environment: dict[str, str]


def run(link: ParentSocket) -> None:
    """Serve one request: run the program, report its progress, and answer with its exit status and its output."""
    request = link.receive()
    if request is None:
        return
    environment = request["environment"]
    assert isinstance(environment, dict)
    order = _Order(
        path=str(request["path"]),
        verb=str(request["verb"]),
        stdin=str(request["stdin"]).encode(),
        deadline=float(str(request["deadline"])),
        limit=str(request["limit"]),
        lock=str(request["lock"]),
        environment={str(key): str(value) for key, value in environment.items()},
    )
    try:
        answer: Message = {"ok": _supervise(link, order)}
        pack(answer)
    except Fault as fault:
        answer = {"fault": fault.code, "message": fault.message}
    except MalformedMessage as error:
        answer = {"ok": {"status": 0, "broken": f"its answer cannot be passed on: {error}", "log": ""}}
    link.send(answer)


def _supervise(link: ParentSocket, order: _Order) -> Message:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    lock = _lock(order.lock) if order.lock else None
    started = time.monotonic()
    run_ = _Run(link, order, lock)
    try:
        expired = run_.communicate(started + order.deadline)
    finally:
        alive = not run_.end()
    if alive:
        raise Fault(
            "stuck", f"A process of {order.path} {order.verb} does not die of SIGKILL; the device stays locked."
        )
    if expired:
        raise Fault(
            "stuck",
            f"{order.path} {order.verb} did not finish within {order.deadline:g} s and was killed; find out why it takes "
            f"so long, or raise its limit ({order.limit}).",
        )
    return run_.result(time.monotonic() - started)


def _lock(path: str) -> int:
    """Lock the device; return a descriptor that the program inherits."""
    if not locks.acquire_lock(path):
        raise Fault("held", "Another command, which an earlier run of the service may have started, has the device.")
    itself = os.stat(path)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.path.samestat(os.fstat(int(name)), itself):
                return int(name)
    raise AssertionError("the lock was taken a moment ago")


class _Run:
    """The program's process, its pipes, and what it has printed."""

    def __init__(self, link: ParentSocket, order: _Order, lock: int | None) -> None:
        self._link = link
        self._cgroup = _Cgroup()
        self._rest_of_stdin = memoryview(order.stdin)
        self._output, self._log, self._line = bytearray(), bytearray(), bytearray()
        self._status: int | None = None
        self._broken = ""
        self._reported = 0.0
        self._pid = 0
        stdin, stdin_end = _pipe()
        stdout_end, stdout = _pipe()
        stderr_end, stderr = _pipe()
        progress_end, progress = _pipe()
        self._stdin, self._stdout, self._stderr, self._progress = stdin_end, stdout_end, stderr_end, progress_end
        ends = {0: stdin, 1: stdout, 2: stderr, _PROGRESS_FD: progress}
        if lock is not None:
            ends[_LOCK_FD] = fcntl.fcntl(lock, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FD)
        _close_on_exec()
        try:
            with self._cgroup:
                self._pid = os.posix_spawn(
                    order.path,
                    [order.path, order.verb],
                    order.environment,
                    file_actions=[(os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in ends.items()],
                    setsid=True,
                    setsigmask=[],
                    setsigdef=_DEFAULT_SIGNALS,
                )
        except OSError as error:
            self._broken = f"it cannot be started: {error.strerror}"
        for descriptor in ends.values():
            os.close(descriptor)
        for descriptor in (self._stdin, self._stdout, self._stderr, self._progress):
            os.set_blocking(descriptor, False)

    def communicate(self, end: float) -> bool:
        """Exchange data with the program until it exits; return whether the monotonic time ``end`` came first.

        The parent's disappearance, and output that no program in order prints, end it as well.
        """
        if not self._pid:
            return False
        pidfd = os.pidfd_open(self._pid)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        for descriptor in (self._stdout, self._stderr, self._progress):
            poll.register(descriptor, select.POLLIN)
        poll.register(self._stdin, select.POLLOUT)
        try:
            while not self._broken:
                left = end - time.monotonic()
                if left <= 0:
                    return True
                ready = dict(poll.poll(min(left, 1.0) * 1000))
                if self._link.is_parent_gone():
                    return True
                for descriptor in (self._stdout, self._stderr, self._progress):
                    if descriptor in ready and not self._read(descriptor):
                        poll.unregister(descriptor)
                if self._stdin in ready and not self._write():
                    poll.unregister(self._stdin)
                if pidfd in ready:
                    return False
        finally:
            os.close(pidfd)
        return False

    def end(self) -> bool:
        """Kill whatever is left of the run; return whether nothing is, and read what it had printed."""
        gone = self._kill_all() if self._pid else True
        if not self._broken:
            for descriptor in (self._stdout, self._stderr):
                with suppress(BlockingIOError):  # what cannot be killed keeps it open
                    while self._read(descriptor):
                        continue
        self._cgroup.remove()
        return gone

    def result(self, seconds: float) -> Message:
        """Return status, answer and log of the run."""
        answer: object = None
        if not self._broken and self._output.strip():
            try:
                answer = json.loads(self._output)
            except (ValueError, RecursionError) as error:
                self._broken = f"it printed {_start(self._output)}, which is not one JSON object ({error})"
        log = self._log.decode(errors="replace").strip()
        return {"status": self._status, "answer": answer, "broken": self._broken, "log": log, "seconds": seconds}

    def _read(self, descriptor: int) -> bool:
        """Read what is there; return whether more may follow.

        Raises:
            BlockingIOError: there is nothing now.
        """
        data = os.read(descriptor, 65536)
        if not data:
            return False
        if descriptor == self._stdout:
            self._output += data
            if len(self._output) > MAX_ANSWER:
                self._broken = f"it printed more than {MAX_ANSWER} bytes"
                return False
        elif descriptor == self._stderr:
            self._log = (self._log + data)[-_MAX_LOG:]
        else:
            self._note_progress(data)
        return True

    def _write(self) -> bool:
        """Write more of the request; return whether more is left. A program need not read it."""
        try:
            self._rest_of_stdin = self._rest_of_stdin[os.write(self._stdin, self._rest_of_stdin) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            self._rest_of_stdin = memoryview(b"")
        if not self._rest_of_stdin:
            os.close(self._stdin)
            return False
        return True

    def _note_progress(self, data: bytes) -> None:
        """Forward complete lines, at most ten a second; what is no progress is ignored."""
        *lines, rest = bytes(self._line + data).split(b"\n")
        self._line = bytearray(rest[-_MAX_PROGRESS_LINE:])
        for line in lines:
            try:
                found = json.loads(line)
                phase, done, total = str(found["phase"]), int(found["done"]), int(found["total"])
            except (ValueError, TypeError, KeyError, RecursionError, OverflowError):  # the last one: of Infinity
                continue
            now = time.monotonic()
            if 0 <= done <= total < 1 << 63 and (now - self._reported >= _PROGRESS_INTERVAL or done == total):
                self._reported = now
                self._link.send({"phase": phase[:40], "done_bytes": done, "total_bytes": total})

    def _kill_all(self) -> bool:
        """Kill and reap the process group, the cgroup, and every process that was handed to this one as its parent."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # the leader is not reaped, so the group is still this one
        end = time.monotonic() + _KILL_SECONDS
        while True:
            self._cgroup.kill()
            for pid in _children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == self._pid:
                self._status = os.waitstatus_to_exitcode(status)
            if pid == 0:
                if time.monotonic() > end:
                    return False
                time.sleep(0.001)


def _start(output: bytearray) -> str:
    """Return the start of what was printed, quoted, in ASCII and without control characters."""
    text = output[:_MAX_QUOTED].decode(errors="replace")
    return json.dumps(text).replace("\x7f", "\\u007f") + ("..." if len(output) > _MAX_QUOTED else "")


def _pipe() -> tuple[int, int]:
    """Return a pipe whose descriptors collide with none that the program gets."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FD) for each in ends)
    for each in ends:
        os.close(each)
    return high[0], high[1]


def _close_on_exec() -> None:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            os.set_inheritable(int(name), False)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
        return [int(each) for each in file.read().split(b" ") if each.strip(b"\n")]


class _Cgroup:
    """A cgroup of its own for the program, below that of this process; nothing where none can be created."""

    def __init__(self) -> None:
        self._home = self._own = ""
        root = next((each for each in _CGROUP_MOUNTS if os.path.exists(f"{each}/cgroup.controllers")), None)
        if root is None:
            return
        with suppress(OSError), open("/proc/self/cgroup", "rb") as file:
            path = next((line[3:] for line in file.read().split(b"\n") if line.startswith(b"0::")), b"")
            if path:
                home = root + os.fsdecode(path).rstrip("/")
                _remove_abandoned(home)
                own = f"{home}/{_PREFIX}{os.getpid()}"
                os.mkdir(own)
                self._home, self._own = home, own

    def __enter__(self) -> None:
        """Move this process there, so that what it starts begins there."""
        if self._own and not _write(f"{self._own}/cgroup.procs", b"0"):
            self.remove()

    def __exit__(self, *_: object) -> None:
        if self._own and not _write(f"{self._home}/cgroup.procs", b"0"):
            self._own = ""  # it must not kill itself

    def kill(self) -> None:
        if self._own:
            _write(f"{self._own}/cgroup.kill", b"1")

    def remove(self) -> None:
        own, self._own = self._own, ""
        if own:
            with suppress(OSError):
                os.rmdir(own)


def _remove_abandoned(home: str) -> None:
    """Remove what a process that was killed could not: the kernel refuses while anything runs in it."""
    for name in os.listdir(home):
        pid = name.removeprefix(_PREFIX)
        if pid != name and (pid == str(os.getpid()) or not os.path.exists(f"/proc/{pid}")):
            with suppress(OSError):
                os.rmdir(f"{home}/{name}")


def _write(path: str, data: bytes) -> bool:
    try:
        file = os.open(
            path, os.O_WRONLY | os.O_CLOEXEC
        )  # never creates: what the kernel did not put there is no cgroup
    except OSError:
        return False
    try:
        os.write(file, data)
    except OSError:
        return False
    finally:
        os.close(file)
    return True
