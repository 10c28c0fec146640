"""The parent's end of the socket to one child: framed messages with descriptors, one conversation at a time.

Guarantee: a partly received message survives a cancelled wait. A received descriptor is closed unless a caller takes
it. Closing the socket interrupts its users without removing the socket from under the event loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from scrubber.adapters.children.message import HEADER_SIZE, MalformedMessage, Message, body_length, pack, unpack
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import Unavailable

__all__ = ["ChildDied", "ChildSocket"]

_READ_SIZE = 64 * 1024
_MAX_DESCRIPTORS = 4


class ChildDied(Unavailable):
    """The child ended, or sent a malformed message and cannot be used any more. A new child may succeed."""

    code = ErrorCode.CHILD_DIED


class ChildSocket:
    """Messages to and from the child that errors call ``child_name``; takes ownership of ``sock``."""

    def __init__(self, sock: socket.socket, child_name: str) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._child_name = child_name
        self._buffer = bytearray()
        self._descriptors: list[int] = []
        self._users = 0
        self._read_at_once = False
        self._closed = False

    async def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Write one message with copies of ``descriptors``; the caller keeps its own descriptors.

        Raises:
            ChildDied: The child does not read any more.
            MalformedMessage: The message is too long for any child.
        """
        packed = pack(message)
        with self._in_use():
            if descriptors:  # with the first bytes, and at once: a child that gets this request has read all before it
                packed = packed[socket.send_fds(self._socket, [packed], descriptors) :]
            if packed:  # writing nothing fails once the child has ended, although it may have answered before
                await asyncio.get_running_loop().sock_sendall(self._socket, packed)

    async def receive(self) -> Message:
        """Return the next message. If this is cancelled, a partly received message is kept for the next call.

        Raises:
            ChildDied: End of file, or malformed data.
        """
        with self._in_use():
            while (message := self._next_message()) is None:
                self._buffer += await self._read()
        return message

    def receive_nowait(self) -> Message | None:
        """Return the next message if all of it has arrived by now, else None. Queries the kernel and does not wait.

        For a caller that gave up on :meth:`receive`: the event loop may have stalled and not have read since the
        message arrived.

        Raises:
            ChildDied: As for :meth:`receive`.
        """
        with self._in_use():
            while (message := self._next_message()) is None:
                try:
                    self._buffer += self._read_available()
                except BlockingIOError:
                    return None
        return message

    def take_descriptors(self) -> list[int]:
        """Return the descriptors received so far; the caller must close them.

        A descriptor for which this process had no room is missing, and nothing else reports that.
        """
        taken, self._descriptors = self._descriptors, []
        return taken

    def close(self) -> None:
        """Close both directions of the connection; every current user gets :class:`ChildDied`.

        The descriptor is closed when the last user has left: the event loop may be watching it, and its number would be
        reused. After the shutdown both sides read end of file, which makes the users leave.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._closed = True
        self._close_when_unused()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        if self._closed:
            raise ChildDied(f"{self._child_name} was killed.")
        self._users += 1
        try:
            yield
        except OSError as error:
            raise ChildDied(f"{self._child_name} is gone: {error}.") from error
        finally:
            self._users -= 1
            self._close_when_unused()

    def _close_when_unused(self) -> None:
        if self._closed and not self._users:
            self._socket.close()
            for descriptor in self.take_descriptors():
                os.close(descriptor)

    def _next_message(self) -> Message | None:
        """Return the first message in the buffer; None while it is incomplete."""
        try:
            if len(self._buffer) < HEADER_SIZE:
                return None
            length = HEADER_SIZE + body_length(bytes(self._buffer[:HEADER_SIZE]))
            if len(self._buffer) < length:
                return None
            body = bytes(self._buffer[HEADER_SIZE:length])
            del self._buffer[:length]
            return unpack(body)
        except MalformedMessage as error:
            raise ChildDied(f"{self._child_name} sent a malformed message: {error}") from error

    async def _read(self) -> bytes:
        """Read at least one byte, and the descriptors sent with it, which the event loop's own functions would drop."""
        if self._read_at_once:  # a child that sends without a pause would otherwise stop the event loop
            await asyncio.sleep(0)
        self._read_at_once = True
        while True:
            try:
                return self._read_available()
            except BlockingIOError:
                self._read_at_once = False
                await _wait_readable(self._socket)

    def _read_available(self) -> bytes:
        part, descriptors = _receive(self._socket)
        self._descriptors += descriptors
        if not part:
            raise ConnectionResetError("it closed its socket")
        return part


def _receive(link: socket.socket) -> tuple[bytes, list[int]]:
    part, descriptors, _, _ = socket.recv_fds(link, _READ_SIZE, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    return part, descriptors


async def _wait_readable(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(link, _resolve, readable)
    try:
        await readable
    finally:
        loop.remove_reader(link)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
