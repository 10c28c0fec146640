"""The child's side: execute the requests from the socket, and never outlive the parent.

Three mechanisms end a child, forked or started, without its cooperation: ``PR_SET_PDEATHSIG`` kills it when the
parent's thread that started it ends, end of file on the socket ends its loop, and SIGKILL ends it at a deadline. So
nothing here relies on ``finally`` to clean up what the kernel does not clean up automatically.

This module and everything that runs in a child import only light modules of the standard library: a child is replaced
while a device waits for its answer.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from scrubber.adapters.children.message import HEADER_SIZE, Message, body_length, pack, unpack

__all__ = [
    "Fault",
    "ParentSocket",
    "connect_to_parent",
    "connect_to_parent_as",
    "die_with_parent",
    "serve",
    "serve_once",
]

_PR_SET_PDEATHSIG = 1

_IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""A service manager that stops the service signals all processes in its cgroup.

A child that died of such a signal would look as if its device had killed it; the service ends its children itself.
"""

AnyParentSocket = TypeVar("AnyParentSocket", bound="ParentSocket")


class Fault(Exception):
    """An answer that is a refusal: ``code`` is known to the parent, ``message`` is for the operator."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ParentSocket:
    """The socket to the parent; blocking, for one thread."""

    def __init__(self, fd: int, arguments: Sequence[str] = ()) -> None:
        self._fd = fd
        self.arguments = tuple(arguments)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLRDHUP)

    def receive(self) -> Message | None:
        """Return the next message; None once the parent has closed its end."""
        header = self._read(HEADER_SIZE)
        body = None if header is None else self._read(body_length(header))
        return None if body is None else unpack(body)

    def send(self, message: Message) -> None:
        """Write ``message``; exits this process if the parent is gone, because there is no work left."""
        rest = memoryview(pack(message))
        while rest:
            try:
                rest = rest[self._write_some(rest) :]
            except (BrokenPipeError, ConnectionResetError):
                sys.exit(0)

    def is_parent_gone(self) -> bool:
        """Whether the parent has closed its end; does not wait."""
        return bool(self._poll.poll(0))

    def wait(self, seconds: float, also_fd: int) -> None:
        """Return after ``seconds``, or as soon as the parent is gone or the descriptor ``also_fd`` is readable."""
        poll = select.poll()
        poll.register(self._fd, select.POLLRDHUP)
        poll.register(also_fd, select.POLLIN)
        poll.poll(max(0.0, seconds) * 1000)

    def _read(self, length: int) -> bytes | None:
        parts: list[bytes] = []
        while length:
            try:
                part = self._read_some(length)
            except ConnectionResetError:
                return None
            if not part:
                return None
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _read_some(self, length: int) -> bytes:
        return os.read(self._fd, length)

    def _write_some(self, data: memoryview) -> int:
        return os.write(self._fd, data)


def connect_to_parent() -> ParentSocket:
    """Read socket, parent PID and nice value from ``argv`` and connect; then report "ready".

    Exits the process if the parent died before the kernel was set up to watch it.
    """
    return connect_to_parent_as(ParentSocket)


def connect_to_parent_as(socket_factory: Callable[[int, Sequence[str]], AnyParentSocket]) -> AnyParentSocket:
    """Like :func:`connect_to_parent`, with the caller's type of socket."""
    fd, parent, nice = (int(word) for word in sys.argv[1:4])
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    if nice:
        os.nice(nice)
    link = socket_factory(fd, sys.argv[4:])
    link.send({"ready": True})
    return link


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread of ``parent_pid`` that created it ends.

    Exits the process at once when ``parent_pid`` is not its parent any more.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG")
    if os.getppid() != parent_pid:
        sys.exit(0)


def serve(link: ParentSocket, handle: Callable[[Message], Message]) -> None:
    """Answer the messages on ``link`` in sequence with ``handle`` until the parent closes its end.

    A :class:`Fault` becomes an answer. Any other exception ends the child with its traceback on stderr: the parent
    retries once with a fresh child, and then reports the device as unreadable.
    """
    while serve_once(link, handle):
        pass


def serve_once(link: ParentSocket, handle: Callable[[Message], Message]) -> bool:
    """Answer the next message on ``link`` as :func:`serve` does; return whether there was one."""
    message = link.receive()
    if message is None:
        return False
    try:
        answer: Message = {"ok": handle(message)}
    except Fault as fault:
        answer = {"fault": fault.code, "message": fault.message}
    link.send(answer)
    return True
