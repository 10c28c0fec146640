"""The parent's end of the socket to one child: whole messages, one conversation at a time, and descriptors with them.

Promise: what was read of a message survives a cancelled wait, a descriptor that arrives is closed unless somebody takes
it, and hanging up ends whoever talks without pulling the socket from under the event loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from scrubber.adapters.children.message import HEADER, Garbled, Message, body_length, pack, unpack
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import Away

__all__ = ["ChildDied", "Conversation"]

_READ_SIZE = 64 * 1024
_MOST_DESCRIPTORS = 4


class ChildDied(Away):
    """The child ended, or spoke nonsense and cannot be talked to any more. A fresh one may do better."""

    code = ErrorCode.CHILD_DIED


class Conversation:
    """Messages to and from the child that ``who`` names in sentences; takes over ``link``."""

    def __init__(self, link: socket.socket, who: str) -> None:
        self._link = link
        self._link.setblocking(False)
        self._who = who
        self._buffer = bytearray()
        self._descriptors: list[int] = []
        self._talking = 0
        self._hung_up = False

    async def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Write one message; copies of ``descriptors`` go with it, and the caller keeps its own.

        Raises:
            ChildDied: nobody reads any more.
            Garbled: the message is too long for any child.
        """
        packed = pack(message)
        with self._conversing():
            if descriptors:  # with the first bytes, and at once: a child that is asked for this has read all else
                packed = packed[socket.send_fds(self._link, [packed], descriptors) :]
            if packed:  # to write nothing fails once the child has ended, and it may have answered before that
                await asyncio.get_running_loop().sock_sendall(self._link, packed)

    async def receive(self) -> Message:
        """The next message. What was read of one when this is cancelled is kept for the next call.

        Raises:
            ChildDied: end of file, or something that is no message.
        """
        with self._conversing():
            while (message := self._next()) is None:
                self._buffer += await self._read()
        return message

    def lying_ready(self) -> Message | None:
        """The next message if it has arrived, whole, by now; else None. Asks the kernel, and does not wait.

        For whoever gave up :meth:`receive`: the event loop may have stood still, and not have looked since it arrived.

        Raises:
            ChildDied: as :meth:`receive`.
        """
        with self._conversing():
            while (message := self._next()) is None:
                try:
                    self._buffer += self._part()
                except BlockingIOError:
                    return None
        return message

    def take_descriptors(self) -> list[int]:
        """The descriptors that came with what was received until now; whoever takes them closes them.

        One for which this process had no room is missing, and nothing else says so.
        """
        taken, self._descriptors = self._descriptors, []
        return taken

    def hang_up(self) -> None:
        """End the conversation, for both sides; whoever is in it gets :class:`ChildDied`.

        The socket is closed when they have left: the event loop may be watching the descriptor for them, and its number
        would be given to somebody else. Shut down, it reads end-of-file on both sides, which makes them leave.
        """
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._hung_up = True
        self._close_when_done()

    @contextmanager
    def _conversing(self) -> Iterator[None]:
        if self._hung_up:
            raise ChildDied(f"{self._who} was ended.")
        self._talking += 1
        try:
            yield
        except OSError as error:
            raise ChildDied(f"{self._who} is gone: {error}.") from error
        finally:
            self._talking -= 1
            self._close_when_done()

    def _close_when_done(self) -> None:
        if self._hung_up and not self._talking:
            self._link.close()
            for descriptor in self.take_descriptors():
                os.close(descriptor)

    def _next(self) -> Message | None:
        """The first message in the buffer; None while it is not whole."""
        try:
            if len(self._buffer) < HEADER:
                return None
            length = HEADER + body_length(bytes(self._buffer[:HEADER]))
            if len(self._buffer) < length:
                return None
            body = bytes(self._buffer[HEADER:length])
            del self._buffer[:length]
            return unpack(body)
        except Garbled as error:
            raise ChildDied(f"{self._who} makes no sense: {error}") from error

    async def _read(self) -> bytes:
        """At least one byte, and the descriptors that came with it, which the event loop's own calls would drop."""
        while True:
            try:
                return self._part()
            except BlockingIOError:
                await _readable(self._link)

    def _part(self) -> bytes:
        part, descriptors = _receive(self._link)
        self._descriptors += descriptors
        if not part:
            raise ConnectionResetError("it closed its socket")
        return part


def _receive(link: socket.socket) -> tuple[bytes, list[int]]:
    part, descriptors, _, _ = socket.recv_fds(link, _READ_SIZE, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    return part, descriptors


async def _readable(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(link, _settle, readable)
    try:
        await readable
    finally:
        loop.remove_reader(link)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
