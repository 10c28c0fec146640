"""Authentication of callers of the admin socket, by the kernel's peer credentials.

gRPC does not expose the peer of a Unix socket. So a small proxy accepts the connections instead of gRPC and reads the
peer's credentials (``SO_PEERCRED``, ``SO_PEERGROUPS``; unix(7), socket(7)). It relays each connection to the real
server over a socket whose client end is bound to a name that encodes the uid and the verdict; gRPC reports that name as
the peer. Only this process may create names in that directory, and a peer without such a name is refused.

Invariants: no admin call runs without a uid from the kernel. An unauthorized caller gets a status, not a closed
connection. Silent connections cannot keep other callers out.
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
from scrubber.domain.errors import PermissionDenied

__all__ = ["PeerAuthProxy", "PeerCredentials", "authorized_actor", "caller_name", "is_authorized", "peer_credentials"]

MAX_CONNECTIONS = 64
MAX_CONNECTIONS_PER_UID = 16
IDLE_TIMEOUT = 10.0
"""Seconds after which a connection that never sent data is closed: every real caller sends data at once.

A connection that did send data and was then idle for this long is closed when its slot is needed, because the caller's
next call opens another.
"""

_SO_PEERGROUPS = 59
_MAX_GROUPS = 256
"""Python reads at most 1024 bytes of a socket option; for a peer in more groups, only its first group counts."""

_PEER_NAME = re.compile(r"/(?P<verdict>[ar])(?P<uid>\d{1,10})-[0-9a-f]{1,4}", re.ASCII)


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """The process at the other end, as it was when it connected."""

    pid: int
    uid: int
    gids: frozenset[int]


def peer_credentials(connection: socket.socket | asyncio.trsock.TransportSocket) -> PeerCredentials:
    """Return the credentials of the peer, as the kernel recorded them."""
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError:  # more groups than fit
        packed = b""
    others = struct.unpack(f"{len(packed) // 4}I", packed)
    return PeerCredentials(pid=pid, uid=uid & 0xFFFFFFFF, gids=frozenset({gid & 0xFFFFFFFF, *others}))


def is_authorized(peer: PeerCredentials, *, own_uid: int, operator_gid: int | None) -> bool:
    """Return whether ``peer`` may act on devices: root, the service's own user, and members of the operators' group."""
    return peer.uid in (0, own_uid) or (operator_gid is not None and operator_gid in peer.gids)


def caller_name(peer: str) -> str:
    """Return the caller for the log, like :func:`authorized_actor` but also for a refused one; else empty."""
    scheme, _, path = peer.partition(":")
    named = _PEER_NAME.search(unquote(path)) if scheme == "unix" else None
    return "" if named is None else f"uid:{named['uid']}"


def authorized_actor(peer: str) -> str:
    """Return the actor for the audit log (``uid:1000``) from gRPC's name of a peer that came through the proxy.

    Raises:
        PermissionDenied: the proxy refused the caller, or the caller did not come through it.
    """
    scheme, _, path = peer.partition(":")
    named = _PEER_NAME.search(unquote(path)) if scheme == "unix" else None
    if named is None or named.end() != len(unquote(path)):
        raise PermissionDenied("The caller did not come through the admin socket.", code=ErrorCode.UNKNOWN_CALLER)
    if named["verdict"] != "a":
        raise PermissionDenied(
            f"uid {named['uid']} may not act on devices: only root, the service's user, and members of the "
            "group set with scrubber serve --admin-group may.",
            code=ErrorCode.WRONG_USER,
        )
    return f"uid:{named['uid']}"


@dataclass(frozen=True, slots=True)
class _Connection:
    """The caller of a connection, and the timer that checks whether it has sent data."""

    uid: int
    authorized: bool
    idle_timer: asyncio.TimerHandle


class PeerAuthProxy:
    """Relays connections from the admin socket to the server at ``server_path``.

    Args:
        server_path: the real server's socket, in a directory that only this user may enter.
        operator_gid: group whose members are authorized, besides root and this user.
        max_connections, max_connections_per_uid: limits of open connections; above them the least needed idle
            connection is closed, if there is one.
        idle_timeout: see :data:`IDLE_TIMEOUT`.
    """

    def __init__(
        self,
        server_path: Path,
        *,
        log: structlog.typing.FilteringBoundLogger,
        operator_gid: int | None = None,
        max_connections: int = MAX_CONNECTIONS,
        max_connections_per_uid: int = MAX_CONNECTIONS_PER_UID,
        idle_timeout: float = IDLE_TIMEOUT,
    ) -> None:
        self._server_path = server_path
        self._log = log
        self._operator_gid = operator_gid
        self._max_connections = max_connections
        self._max_connections_per_uid = max_connections_per_uid
        self._idle_timeout = idle_timeout
        self._numbers = itertools.count()
        self._connections: dict[_RelayEnd, _Connection] = {}
        self._relay_tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, path: Path) -> None:
        """Accept connections on a new socket at ``path``."""
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _RelayEnd(on_connect=self._on_connect, on_disconnect=self._on_disconnect), path
        )

    def close(self) -> None:
        """Stop accepting; existing connections stay open."""
        if self._server is not None:
            self._server.close()

    async def abort_connections(self) -> None:
        """Close every connection, including those whose other end does not read."""
        self.close()
        for task in self._relay_tasks:
            task.cancel()
        await asyncio.gather(*self._relay_tasks, return_exceptions=True)
        await asyncio.gather(*(end.abort() for end in list(self._connections)))

    def _on_connect(self, outer: _RelayEnd) -> None:
        peer = peer_credentials(outer.transport.get_extra_info("socket"))
        if not self._make_room_for(peer.uid):
            self._log.warning(
                "admin.too-many-connections", uid=peer.uid, pid=peer.pid, connections=len(self._connections)
            )
            outer.transport.abort()
            return
        admitted = is_authorized(peer, own_uid=os.geteuid(), operator_gid=self._operator_gid)
        if not admitted:
            self._log.warning("admin.caller-refused", uid=peer.uid, pid=peer.pid)
        idle_timer = asyncio.get_running_loop().call_later(self._idle_timeout, self._on_idle_timeout, outer)
        self._connections[outer] = _Connection(peer.uid, admitted, idle_timer)
        task = asyncio.create_task(self._relay(outer, f"{'a' if admitted else 'r'}{peer.uid}"))
        self._relay_tasks.add(task)
        task.add_done_callback(self._relay_tasks.discard)

    def _make_room_for(self, uid: int) -> bool:
        """Return whether there is a slot for another connection of ``uid``, if necessary after closing an idle one."""
        own = [end for end, caller in self._connections.items() if caller.uid == uid]
        if len(own) >= self._max_connections_per_uid:
            return self._evict_idle_connection(own)
        return len(self._connections) < self._max_connections or self._evict_idle_connection(list(self._connections))

    def _evict_idle_connection(self, ends: list[_RelayEnd]) -> bool:
        """Close the least needed idle connection: first unauthorized callers, then silent ones, then the longest idle."""
        quiet_since = asyncio.get_running_loop().time() - self._idle_timeout
        idle = [end for end in ends if not end.has_sent_data or end.last_activity <= quiet_since]
        if not idle:
            return False
        self._close_connection(
            min(idle, key=lambda end: (self._connections[end].authorized, end.has_sent_data, end.last_activity))
        )
        return True

    def _on_idle_timeout(self, outer: _RelayEnd) -> None:
        if not outer.has_sent_data:
            self._close_connection(outer)

    def _close_connection(self, outer: _RelayEnd) -> None:
        self._log.info("admin.connection-closed", uid=self._connections[outer].uid)
        self._on_disconnect(outer)
        outer.transport.abort()

    def _on_disconnect(self, outer: _RelayEnd) -> None:
        caller = self._connections.pop(outer, None)
        if caller is not None:
            caller.idle_timer.cancel()

    async def _relay(self, outer: _RelayEnd, who: str) -> None:
        try:
            connection = self._connect_to_server(who)
            await asyncio.get_running_loop().create_unix_connection(
                lambda: _RelayEnd(on_connect=outer.pair_with), sock=connection
            )
        except OSError as error:
            self._log.error("admin.relay-failed", message=str(error))
            outer.transport.abort()

    def _connect_to_server(self, who: str) -> socket.socket:
        """Return a connection to the real server, bound to a name for the caller that outlives its file."""
        name = self._server_path.with_name(f"{who}-{next(self._numbers) % 0x10000:x}")
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            end.bind(os.fsencode(name))
            try:
                end.connect(os.fsencode(self._server_path))
            finally:
                os.unlink(name)
        except BaseException:
            end.close()
            raise
        return end


class _RelayEnd(asyncio.Protocol):
    """One end of a relayed connection. It writes what the other end reads, as fast as possible; they close together.

    Attributes:
        has_sent_data: whether a byte ever came from it.
        last_activity: time of the last transfer in either direction, in the loop's time; initially its creation.
    """

    transport: asyncio.Transport

    def __init__(
        self, *, on_connect: Callable[[_RelayEnd], None], on_disconnect: Callable[[_RelayEnd], None] | None = None
    ) -> None:
        self._on_connect = on_connect
        self._on_disconnect = on_disconnect
        self._peer: _RelayEnd | None = None
        self._buffered: list[bytes] = []
        self._closed = asyncio.Event()
        self.has_sent_data = False
        self.last_activity = asyncio.get_running_loop().time()

    async def abort(self) -> None:
        """Close both ends at once, discarding unsent data."""
        ends = [end for end in (self, self._peer) if end is not None]
        for end in ends:
            end.transport.abort()
        for end in ends:
            await end._closed.wait()

    def pair_with(self, other: _RelayEnd) -> None:
        """Relay to ``other`` from now on, starting with the data received before it was connected."""
        self._peer, other._peer = other, self
        other.transport.writelines(self._buffered)
        self._buffered.clear()
        if self.transport.is_closing():
            other.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._on_connect(self)

    def data_received(self, data: bytes) -> None:
        self.has_sent_data = True
        self.last_activity = asyncio.get_running_loop().time()
        if self._peer is None:
            self._buffered.append(data)
        else:
            self._peer.last_activity = self.last_activity
            self._peer.transport.write(data)

    def pause_writing(self) -> None:
        if self._peer is not None:
            self._peer.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._peer is not None:
            self._peer.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set()
        if self._peer is not None:
            self._peer.transport.close()
        if self._on_disconnect is not None:
            self._on_disconnect(self)
