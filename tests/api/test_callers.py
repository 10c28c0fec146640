"""Authorization of callers: the kernel identifies the caller, the peer proxy decides, and the audit gets the uid.

As root, the callers are real other users. As any other user only one user exists, and the tests cover that one.
"""

from __future__ import annotations

import asyncio
import errno
import grp
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
import structlog

from scrubber.api.client import AdminClient, ReadClient
from scrubber.api.peer_auth import MAX_CONNECTIONS_PER_UID, PeerAuthProxy
from scrubber.api.server import serve
from scrubber.api.sockets import Purpose, Sockets
from scrubber.domain.errors import LedgerFailure, Unavailable
from tests import forkserver
from tests.ahead import advance_until
from tests.api.service import FakeNode

DEADLINE = 20.0
ROOT = os.geteuid() == 0
UNPRIVILEGED_UID = 54321
OPERATORS = next(each for each in grp.getgrall() if each.gr_gid != 0) if ROOT else grp.getgrgid(os.getegid())

CALLER = """
import asyncio, os, sys
from pathlib import Path
from scrubber.api.client import AdminClient, PluginClient, ReadClient
from scrubber.domain.errors import ScrubberError

sockets, ask, uid, *gids = sys.argv[1:]

async def call():
    if ask == "admin":
        async with AdminClient(Path(sockets)) as admin:
            await admin.quarantine("0", "because")
    elif ask == "read":
        async with ReadClient(Path(sockets)) as read:
            await read.devices()
    else:
        async with PluginClient(Path(sockets)) as plugin:
            await plugin.snapshot(10)

if os.geteuid() == 0 and int(uid) != 0:
    os.setgroups([int(each) for each in gids])
    os.setgid(int(uid))
    os.setuid(int(uid))
try:
    asyncio.run(call())
    print("answered")
except ScrubberError as error:
    print(type(error).__name__, error.code, error)
"""


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[FakeNode]:
    node = FakeNode()
    short_tmp.chmod(0o755)
    async with serve(node, Sockets(short_tmp / "s"), grace=0):
        yield node


@pytest.fixture
async def node_with_operators(short_tmp: Path) -> AsyncIterator[FakeNode]:
    node = FakeNode()
    short_tmp.chmod(0o755)
    async with serve(node, Sockets(short_tmp / "s", admin_group=OPERATORS.gr_name), grace=0):
        yield node


async def call(sockets: Path, ask: Purpose, uid: int, *gids: int) -> str:
    """Return the result of a call by another process that runs as ``uid``."""
    # It starts as this user, because another one may be unable to read this tree, and changes the user before it calls.
    child = await forkserver.start(
        *("-c", CALLER, str(sockets), ask.value, str(uid), *map(str, gids)),
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(DEADLINE):
        output, _ = await child.communicate()
    return output.decode().strip()


def open_wide(sockets: Path) -> None:
    """Remove every protection by file modes, so that only the peer proxy protects."""
    for path in (sockets, *sockets.rglob("*")):
        if path.is_dir() and path.name != "door":
            path.chmod(0o755)
        elif path.is_socket() and path.parent.name != "door":
            path.chmod(0o666)


@pytest.mark.parametrize("uid", [0] if ROOT else [os.geteuid()])
async def test_root_and_the_service_user_act_under_their_uid(uid: int, node: FakeNode, short_tmp: Path) -> None:
    assert await call(short_tmp / "s", Purpose.ADMIN, uid) == "answered"
    assert node.requests == [("quarantine", "GPU-a0", "because", f"uid:{uid}")]


@pytest.mark.parametrize("ask", list(Purpose))
async def test_socket_modes_refuse_other_users_and_the_error_names_the_missing_option(
    ask: Purpose, node: FakeNode, short_tmp: Path
) -> None:
    answer = await call(short_tmp / "s", ask, UNPRIVILEGED_UID)
    if ROOT:
        assert answer.startswith(
            f"PermissionDenied permission-denied uid {UNPRIVILEGED_UID} may not use {short_tmp}/s/{ask.socket}"
        )
        assert "--admin-group" in answer
        assert node.requests == []
    else:
        assert answer == "answered"


async def test_unauthorized_caller_past_the_socket_modes_is_refused_by_peer_auth(
    node: FakeNode, short_tmp: Path
) -> None:
    open_wide(short_tmp / "s")
    answer = await call(short_tmp / "s", Purpose.ADMIN, UNPRIVILEGED_UID)
    if ROOT:
        assert answer.startswith(f"PermissionDenied wrong-user uid {UNPRIVILEGED_UID} may not act on devices")
        assert node.requests == []
    else:
        assert answer == "answered"


async def test_unauthorized_caller_gets_the_same_refusal_for_every_method(node: FakeNode, short_tmp: Path) -> None:
    """The proxy refuses every method alike, including health checks and methods that are not served here."""
    behind = short_tmp / "s/door/admin.sock"
    for method in ("/grpc.health.v1.Health/Check", "/scrubber.v1.Plugin/HandOver", "/scrubber.v1.Admin/Quarantine"):
        async with grpc.aio.insecure_channel(f"unix:{behind}") as channel:
            ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask(b"", timeout=DEADLINE)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert node.requests == []


@pytest.mark.parametrize("ask", [Purpose.ADMIN, Purpose.READ])
async def test_operators_are_authorized(ask: Purpose, node_with_operators: FakeNode, short_tmp: Path) -> None:
    assert await call(short_tmp / "s", ask, UNPRIVILEGED_UID, OPERATORS.gr_gid) == "answered"
    if ask is Purpose.ADMIN:
        actor = f"uid:{UNPRIVILEGED_UID if ROOT else os.geteuid()}"
        assert node_with_operators.requests == [("quarantine", "GPU-a0", "because", actor)]


async def test_operators_may_not_use_the_plugin_socket(node_with_operators: FakeNode, short_tmp: Path) -> None:
    answer = await call(short_tmp / "s", Purpose.PLUGIN, UNPRIVILEGED_UID, OPERATORS.gr_gid)
    assert answer.startswith("PermissionDenied") if ROOT else answer == "answered"


async def test_caller_outside_the_operator_group_is_refused(node_with_operators: FakeNode, short_tmp: Path) -> None:
    open_wide(short_tmp / "s")
    answer = await call(short_tmp / "s", Purpose.ADMIN, UNPRIVILEGED_UID)
    assert answer.startswith("PermissionDenied wrong-user") if ROOT else answer == "answered"


def mode(path: Path) -> str:
    return stat.filemode(path.stat().st_mode)


async def test_all_sockets_belong_to_the_service_without_an_admin_group(node: FakeNode, short_tmp: Path) -> None:
    sockets = Sockets(short_tmp / "s")
    for purpose in Purpose:
        assert mode(sockets.path(purpose)) == "srw-rw----"
        assert mode(sockets.path(purpose).parent) == "drwx------"
    assert mode(sockets.internal_dir) == "drwx------"
    assert mode(sockets.directory) == "drwx--x--x", "a later start may name a group, and what is in it is shut"


async def test_operators_may_enter_only_the_admin_and_read_directories(
    node_with_operators: FakeNode, short_tmp: Path
) -> None:
    sockets = Sockets(short_tmp / "s")
    for purpose in (Purpose.ADMIN, Purpose.READ):
        assert mode(sockets.path(purpose)) == "srw-rw----"
        assert mode(sockets.path(purpose).parent) == "drwxr-x---"
        assert sockets.path(purpose).stat().st_gid == OPERATORS.gr_gid
    assert mode(sockets.path(Purpose.PLUGIN).parent) == mode(sockets.internal_dir) == "drwx------"
    assert mode(sockets.directory) == "drwx--x--x"


async def test_socket_modes_do_not_depend_on_the_umask(short_tmp: Path) -> None:
    before = os.umask(0)
    try:
        async with serve(FakeNode(), Sockets(short_tmp / "s"), grace=0):
            assert mode(short_tmp / "s/plugin/plugin.sock") == "srw-rw----"
            assert mode(short_tmp / "s/admin") == "drwx------"
    finally:
        os.umask(before)


SPEAKS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""First bytes of a gRPC client: the preface of HTTP/2 and settings that change nothing."""


async def test_one_caller_cannot_use_every_connection(node: FakeNode, short_tmp: Path) -> None:
    path = Sockets(short_tmp / "s").path(Purpose.ADMIN)
    async with asyncio.timeout(DEADLINE):
        held = [await asyncio.open_unix_connection(path) for _ in range(MAX_CONNECTIONS_PER_UID)]
        for reader, writer in held:
            writer.write(SPEAKS)
            await reader.readuntil(bytes((0, 0, 0, 4, 1)))  # its settings were acknowledged
        async with AdminClient(short_tmp / "s") as admin:
            with pytest.raises(Unavailable, match=r"too many open connections.* retry"):
                await admin.quarantine("0", "one too many")
        for _, writer in held:
            writer.close()
        while True:
            try:
                async with AdminClient(short_tmp / "s") as admin:
                    await admin.quarantine("0", "there is room again")
                break
            except Unavailable:
                continue
    assert len(node.requests) == 1


async def test_idle_connections_do_not_block_new_callers(node: FakeNode, short_tmp: Path) -> None:
    path = Sockets(short_tmp / "s").path(Purpose.ADMIN)
    async with asyncio.timeout(DEADLINE):
        held = []
        for _ in range(MAX_CONNECTIONS_PER_UID):
            reader, writer = await asyncio.open_unix_connection(path)
            # The first frame of the server behind: this connection is relayed. A later one is not relayed sooner.
            await reader.readexactly(9)
            held.append((asyncio.create_task(reader.read()), writer))
        async with AdminClient(short_tmp / "s") as admin:
            await admin.quarantine("0", "no place is free, and one is made")
        oldest, *others = (to_the_end for to_the_end, _ in held)
        await oldest
        assert not any(each.done() for each in others)
        for _, writer in held:
            writer.close()
        await asyncio.gather(*others)
    assert len(node.requests) == 1


class Mute(asyncio.Protocol):
    """One connection to a server that sends nothing and reads everything."""

    def __init__(self, over: set[asyncio.Event], received: asyncio.Event) -> None:
        self._over, self._received = asyncio.Event(), received
        over.add(self._over)

    def data_received(self, data: bytes) -> None:
        self._received.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._over.set()


@asynccontextmanager
async def a_door(short_tmp: Path, received: asyncio.Event | None = None, **limits: float) -> AsyncIterator[Path]:
    """Provide the socket of a proxy with ``limits`` and a mute server behind it; everything is closed afterwards.

    ``received`` is set once the server has received something.
    """
    received = received or asyncio.Event()
    behind, front = short_tmp / "behind", short_tmp / "front"
    over: set[asyncio.Event] = set()
    server = await asyncio.get_running_loop().create_unix_server(lambda: Mute(over, received), behind)
    door = PeerAuthProxy(behind, log=structlog.get_logger(), **limits)  # type: ignore[arg-type]
    await door.listen(front)
    try:
        yield front
    finally:
        await door.abort_connections()
        server.close()
        async with asyncio.timeout(DEADLINE):
            for each in over:
                await each.wait()


async def hang_up(*writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        writer.close()
        with suppress(ConnectionError):  # the other end was faster
            await writer.wait_closed()


async def test_connection_that_sends_nothing_is_closed(short_tmp: Path) -> None:
    async with asyncio.timeout(DEADLINE), a_door(short_tmp, idle_timeout=0.05) as front:
        silent, away = await asyncio.open_unix_connection(front)
        assert await silent.read() == b""
        await hang_up(away)


async def test_idle_connection_is_closed_only_when_its_slot_is_needed(short_tmp: Path) -> None:
    received = asyncio.Event()
    async with a_door(short_tmp, received, idle_timeout=DEADLINE, max_connections_per_uid=2) as front:
        quiet, one = await asyncio.open_unix_connection(front)
        one.write(b"a call that takes its time")
        await asyncio.wait_for(received.wait(), DEADLINE)
        silent, other = await asyncio.open_unix_connection(front)
        ending = asyncio.create_task(silent.read())
        await advance_until(ending.done)
        assert await ending == b""
        assert not quiet.at_eof()  # equally old, but it sent data
        writers = [one, other]
        closed = asyncio.create_task(quiet.read())
        while not closed.done():
            _, writer = await asyncio.open_unix_connection(front)
            writer.write(b"the next")
            writers.append(writer)
        assert await closed == b""
        await hang_up(*writers)


async def test_peer_auth_proxy_applies_backpressure_to_a_caller_whose_data_is_not_read(short_tmp: Path) -> None:
    """Otherwise any process that may connect could fill the service's memory through the proxy."""
    behind, front = short_tmp / "behind", short_tmp / "front"
    deaf = Deaf()
    unread = await asyncio.get_running_loop().create_unix_server(lambda: deaf, behind)
    door = PeerAuthProxy(behind, log=structlog.get_logger())
    await door.listen(front)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as caller:
        caller.connect(str(front))
        async with asyncio.timeout(DEADLINE):
            await deaf.arrived.wait()
        sent, refused = 0, 0
        while sent < 64 << 20 and refused < 100:  # a proxy that still reads gets a hundred turns of the loop to do it
            try:
                sent += caller.send(b"x" * 65536)
                refused = 0
            except BlockingIOError:
                refused += 1
                await asyncio.sleep(0)
    await door.abort_connections()
    deaf.transport.abort()
    unread.close()
    assert sent < 4 << 20


class Deaf(asyncio.Protocol):
    """A server that accepts and never reads."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.arrived = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.pause_reading()
        self.arrived.set()


async def test_read_socket_does_not_depend_on_the_peer_auth_proxy(node: FakeNode, short_tmp: Path) -> None:
    path = Sockets(short_tmp / "s").path(Purpose.ADMIN)
    held = [await asyncio.open_unix_connection(path) for _ in range(MAX_CONNECTIONS_PER_UID)]
    async with ReadClient(short_tmp / "s") as read:
        assert len((await read.devices()).devices) == 2
    for _, writer in held:
        writer.close()


async def test_sockets_that_cannot_be_removed_do_not_hide_why_the_service_ends(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    async def fail() -> None:
        async with serve(FakeNode(), Sockets(short_tmp / "s"), grace=0):
            monkeypatch.setattr(os, "unlink", read_only)
            raise LedgerFailure("The ledger is read-only.")

    with pytest.raises(LedgerFailure, match="read-only"):
        await fail()
    monkeypatch.undo()
