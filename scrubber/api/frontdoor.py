"""The admin socket's front door: who calls, by the kernel's word.

gRPC does not say who is at the other end of a Unix socket, so a small relay accepts instead of it and asks
(``SO_PEERCRED``, ``SO_PEERGROUPS``; unix(7), socket(7)). Each connection goes on to the real server over a socket whose
own end is bound to a name that tells the uid and the verdict; gRPC reports that name as the peer. Only this process may
make names in that directory, and a peer without such a name is refused.

Promise: no admin call runs without a uid that the kernel gave; a caller who may not come in is told so in a status, not
by a hang-up; and connections that say nothing keep nobody out.
"""

from __future__ import annotations

import asyncio
import asyncio.trsock
import itertools
import os
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import structlog

from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import NotPermitted

__all__ = ["FrontDoor", "Peer", "actor_of", "admits", "caller_of", "peer_of"]

CONNECTIONS = 64
CONNECTIONS_PER_UID = 16
SILENCE = 10.0
"""Seconds after which a connection that never said anything is closed: every real caller speaks at once. One that did
speak and was quiet for as long is closed when its place is needed, as a caller's next call opens another."""

_SO_PEERGROUPS = 59
_MOST_GROUPS = 256
"""Python asks for at most 1024 bytes of an option; a peer in more groups counts as one in its first group only."""

_NAME = re.compile(r"/(?P<verdict>[ar])(?P<uid>\d{1,10})-[0-9a-f]{1,4}")


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as it was when it connected."""

    pid: int
    uid: int
    gids: frozenset[int]


def peer_of(connection: socket.socket | asyncio.trsock.TransportSocket) -> Peer:
    """Who connected, as the kernel noted it."""
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    except OSError:  # more groups than fit
        packed = b""
    others = struct.unpack(f"{len(packed) // 4}I", packed)
    return Peer(pid=pid, uid=uid & 0xFFFFFFFF, gids=frozenset({gid & 0xFFFFFFFF, *others}))


def admits(peer: Peer, *, own_uid: int, operators: int | None) -> bool:
    """Whether ``peer`` may act on devices: root, the service's own user, and members of the operators' group."""
    return peer.uid in (0, own_uid) or (operators is not None and operators in peer.gids)


def caller_of(peer: str) -> str:
    """Who asked, for the log: as :func:`actor_of`, also of one who may not; empty where nobody looked."""
    scheme, _, path = peer.partition(":")
    named = _NAME.search(unquote(path)) if scheme == "unix" else None
    return "" if named is None else f"uid:{named['uid']}"


def actor_of(peer: str) -> str:
    """The actor for the audit (``uid:1000``) from gRPC's name of a peer that came through the door.

    Raises:
        NotPermitted: the door refused the caller, or the caller did not come through it.
    """
    scheme, _, path = peer.partition(":")
    named = _NAME.search(unquote(path)) if scheme == "unix" else None
    if named is None or named.end() != len(unquote(path)):
        raise NotPermitted("The caller did not come through the admin socket.", code=ErrorCode.UNKNOWN_CALLER)
    if named["verdict"] != "a":
        raise NotPermitted(
            f"uid {named['uid']} may not act on devices: root may, the user that the service runs as, "
            "and the members of the group that scrubber serve --admin-group names.",
            code=ErrorCode.WRONG_USER,
        )
    return f"uid:{named['uid']}"


@dataclass(frozen=True, slots=True)
class _Caller:
    """Whose connection it is, and when it is looked at for whether it has said anything."""

    uid: int
    admitted: bool
    look: asyncio.TimerHandle


class FrontDoor:
    """Relays connections from the admin socket to the server at ``behind``.

    Args:
        behind: the real server's socket, in a directory that only this user may enter.
        operators: group whose members come in, besides root and this user.
        connections, connections_per_uid: at once; above it the one that is needed least makes room, if there is one.
        silence: see :data:`SILENCE`.
    """

    def __init__(
        self,
        behind: Path,
        *,
        log: structlog.typing.FilteringBoundLogger,
        operators: int | None = None,
        connections: int = CONNECTIONS,
        connections_per_uid: int = CONNECTIONS_PER_UID,
        silence: float = SILENCE,
    ) -> None:
        self._behind = behind
        self._log = log
        self._operators = operators
        self._connections = connections
        self._connections_per_uid = connections_per_uid
        self._silence = silence
        self._numbers = itertools.count()
        self._open: dict[_End, _Caller] = {}
        self._joining: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self, path: Path) -> None:
        """Accept connections on a new socket at ``path``."""
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _End(arrived=self._arrived, gone=self._gone), path
        )

    def close(self) -> None:
        """Accept no more; the connections that there are go on."""
        if self._server is not None:
            self._server.close()

    async def hang_up(self) -> None:
        """Let go of every connection, also of those whose other end does not read."""
        self.close()
        for task in self._joining:
            task.cancel()
        await asyncio.gather(*self._joining, return_exceptions=True)
        await asyncio.gather(*(end.abort() for end in list(self._open)))

    def _arrived(self, outer: _End) -> None:
        peer = peer_of(outer.transport.get_extra_info("socket"))
        if not self._room_for(peer.uid):
            self._log.warning("admin.too-many-connections", uid=peer.uid, pid=peer.pid, open=len(self._open))
            outer.transport.abort()
            return
        admitted = admits(peer, own_uid=os.geteuid(), operators=self._operators)
        if not admitted:
            self._log.warning("admin.caller-refused", uid=peer.uid, pid=peer.pid)
        look = asyncio.get_running_loop().call_later(self._silence, self._silent, outer)
        self._open[outer] = _Caller(peer.uid, admitted, look)
        task = asyncio.create_task(self._relay(outer, f"{'a' if admitted else 'r'}{peer.uid}"))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    def _room_for(self, uid: int) -> bool:
        """Whether one more of ``uid`` has a place, one that was given up for it included."""
        own = [end for end, caller in self._open.items() if caller.uid == uid]
        if len(own) >= self._connections_per_uid:
            return self._give_up_one(own)
        return len(self._open) < self._connections or self._give_up_one(list(self._open))

    def _give_up_one(self, ends: list[_End]) -> bool:
        """Close the connection that is needed least: of callers who may not act, silent, quiet for the longest time."""
        quiet_since = asyncio.get_running_loop().time() - self._silence
        idle = [end for end in ends if not end.spoke or end.moved <= quiet_since]
        if not idle:
            return False
        self._dismiss(min(idle, key=lambda end: (self._open[end].admitted, end.spoke, end.moved)))
        return True

    def _silent(self, outer: _End) -> None:
        if not outer.spoke:
            self._dismiss(outer)

    def _dismiss(self, outer: _End) -> None:
        self._log.info("admin.connection-closed", uid=self._open[outer].uid)
        self._gone(outer)
        outer.transport.abort()

    def _gone(self, outer: _End) -> None:
        caller = self._open.pop(outer, None)
        if caller is not None:
            caller.look.cancel()

    async def _relay(self, outer: _End, who: str) -> None:
        try:
            connection = self._connected(who)
            await asyncio.get_running_loop().create_unix_connection(lambda: _End(arrived=outer.join), sock=connection)
        except OSError as error:
            self._log.error("admin.relay-failed", sentence=str(error))
            outer.transport.abort()

    def _connected(self, who: str) -> socket.socket:
        """A connection to the server behind; its own end is named for the caller, and the name outlives its file."""
        name = self._behind.with_name(f"{who}-{next(self._numbers) % 0x10000:x}")
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            end.bind(os.fsencode(name))
            try:
                end.connect(os.fsencode(self._behind))
            finally:
                os.unlink(name)
        except BaseException:
            end.close()
            raise
        return end


class _End(asyncio.Protocol):
    """One end of a relayed connection: the other writes what it reads, as fast as it can; they close together.

    Attributes:
        spoke: whether a byte ever came from it.
        moved: when bytes last went either way, in the loop's time; at first, when it was made.
    """

    transport: asyncio.Transport

    def __init__(self, *, arrived: Callable[[_End], None], gone: Callable[[_End], None] | None = None) -> None:
        self._arrived = arrived
        self._gone = gone
        self._other: _End | None = None
        self._early: list[bytes] = []
        self._lost = asyncio.Event()
        self.spoke = False
        self.moved = asyncio.get_running_loop().time()

    async def abort(self) -> None:
        """Close both ends at once, whatever is still to be written."""
        ends = [end for end in (self, self._other) if end is not None]
        for end in ends:
            end.transport.abort()
        for end in ends:
            await end._lost.wait()

    def join(self, other: _End) -> None:
        """Relay to ``other`` from here on, first of all what came before it was there."""
        self._other, other._other = other, self
        other.transport.writelines(self._early)
        self._early.clear()
        if self.transport.is_closing():
            other.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._arrived(self)

    def data_received(self, data: bytes) -> None:
        self.spoke = True
        self.moved = asyncio.get_running_loop().time()
        if self._other is None:
            self._early.append(data)
        else:
            self._other.moved = self.moved
            self._other.transport.write(data)

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost.set()
        if self._other is not None:
            self._other.transport.close()
        if self._gone is not None:
            self._gone(self)
