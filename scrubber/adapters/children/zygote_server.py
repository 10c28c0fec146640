"""The zygote's side of :mod:`scrubber.adapters.children.zygote_client`: load first, then fork a child for each request.

Guarantee: the zygote forks only while it has a single thread (a lock held by another thread would stay locked forever
in the child). A forked child has no copy of the zygote's socket, so it can neither send in the zygote's name nor keep
the connection open. No child is reaped while its pidfd is being opened, so no PID is mistaken.

A request contains a program and variables for its environment and carries the child's end of a socket; the answer
carries the child's pidfd. A request without a program checks whether forking is possible.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from scrubber.adapters.children.child import Fault, ParentSocket, die_with_parent
from scrubber.adapters.children.message import Message

__all__ = ["ZygoteSocket", "serve_forks"]

Program = Callable[[ParentSocket], None]


class ZygoteSocket(ParentSocket):
    """A socket to the parent over which descriptors are sent and received with the messages."""

    def __init__(self, fd: int, arguments: Sequence[str] = ()) -> None:
        super().__init__(fd, arguments)
        self._socket = socket.socket(fileno=fd)
        self._received_fds: list[int] = []
        self._fd_to_send: int | None = None

    def take_descriptors(self) -> list[int]:
        """Return the descriptors received so far; the caller must close them."""
        taken, self._received_fds = self._received_fds, []
        return taken

    def send_with_fd(self, message: Message, descriptor: int) -> None:
        """Send ``message`` and a copy of ``descriptor``."""
        self._fd_to_send = descriptor
        self.send(message)

    def close(self) -> None:
        """Close this process's end."""
        self._socket.close()

    def _read_some(self, length: int) -> bytes:
        part, descriptors, _, _ = socket.recv_fds(self._socket, length, 1, socket.MSG_CMSG_CLOEXEC)
        self._received_fds += descriptors
        return part

    def _write_some(self, data: memoryview) -> int:
        going, self._fd_to_send = self._fd_to_send, None
        return self._socket.send(data) if going is None else socket.send_fds(self._socket, [data], [going])


def serve_forks(link: ZygoteSocket, programs: Mapping[str, Program]) -> Callable[[], None] | None:
    """Fork a child for each request until the parent closes its end.

    Returns:
        In the zygote None, when the parent has closed its end. In each forked child the function to run: returning it,
        instead of calling it here, leaves nothing of the zygote on the child's stack.
    """
    signal.signal(signal.SIGCHLD, _reap)
    gc.collect()
    gc.freeze()  # the collector never visits what is loaded, so its pages stay shared
    while (message := link.receive()) is not None:
        descriptors = link.take_descriptors()
        try:
            forked = _fork(link, message, descriptors, programs)
        except Fault as fault:
            link.send({"fault": fault.code, "message": fault.message})
        else:
            if forked is not None:
                return forked
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
    return None


def _fork(
    link: ZygoteSocket, message: Message, descriptors: Sequence[int], programs: Mapping[str, Program]
) -> Callable[[], None] | None:
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise Fault("away", f"The zygote does not fork with {threads} threads: a library started some of them.")
    if (name := message.get("program")) is None:
        link.send({"ok": {"pid": os.getpid()}})
        return None
    program, environment = programs.get(str(name)), message.get("environment")
    if program is None or not isinstance(environment, dict) or len(descriptors) != 1:
        raise Fault("away", f"The request for {name!r} cannot be turned into a child process.")
    zygote = os.getpid()
    with _sigchld_blocked():
        try:
            pid = os.fork()  # noqa: TID251 - the only fork: a single thread, and nothing touched yet
        except OSError as error:
            raise Fault("away", f"fork failed: {error.strerror}. This is retried.") from error
        if pid:
            _send_pidfd(link, pid)
            return None
    die_with_parent(zygote)
    link.close()
    return _prepare_child(program, os.dup(descriptors[0]), environment)


def _send_pidfd(link: ZygoteSocket, pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        os.kill(pid, signal.SIGKILL)  # our child, and not reaped yet, so it is still that process
        raise Fault("away", f"A forked child process cannot be watched: {error.strerror}. This is retried.") from error
    try:
        link.send_with_fd({"ok": {"pid": pid}}, pidfd)
    finally:
        os.close(pidfd)


def _prepare_child(program: Program, link: int, environment: Mapping[str, str]) -> Callable[[], None]:
    """Set up this process, which was just forked, as an independent child; return the function it must run."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.environ.update({str(name): str(value) for name, value in environment.items()})

    def run() -> None:
        own = ParentSocket(link)
        own.send({"ready": True})
        program(own)

    return run


@contextmanager
def _sigchld_blocked() -> Iterator[None]:
    """Prevent reaping of children, so that a new PID cannot be reused by another process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reap(_: int, __: FrameType | None) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
