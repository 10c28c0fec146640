"""Which peers may act on devices, and which actor the audit names."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from scrubber.api.peer_auth import PeerCredentials, authorized_actor, is_authorized, peer_credentials
from scrubber.api.sockets import MAX_SOCKET_PATH_BYTES, Purpose, Sockets, grpc_target
from scrubber.domain.errors import InvalidConfiguration, PermissionDenied


@pytest.mark.parametrize(
    ("uid", "gids", "operators", "admitted"),
    [
        (0, {0}, None, True),
        (500, {500}, None, True),
        (1000, {1000}, None, False),
        (1000, {1000, 27}, None, False),
        (1000, {1000, 27}, 27, True),
        (1000, {27}, 27, True),
        (1000, {1000, 28}, 27, False),
        (1000, {0}, 27, False),
        (4294967294, {65534}, None, False),
    ],
)
def test_root_the_service_user_and_operators_are_authorized(
    uid: int, gids: set[int], operators: int | None, admitted: bool
) -> None:
    assert is_authorized(PeerCredentials(1, uid, frozenset(gids)), own_uid=500, operator_gid=operators) is admitted


def test_peer_credentials_come_from_the_kernel() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = peer_credentials(ours)
    assert (peer.pid, peer.uid) == (os.getpid(), os.geteuid())
    assert peer.gids == {os.getegid(), *os.getgroups()}


@pytest.mark.parametrize(
    ("peer", "actor"),
    [
        ("unix:/run/scrubber/door/a0-1", "uid:0"),
        ("unix:/run/my%20dir/door/a1000-ffff", "uid:1000"),
        ("unix:/r/door/a4294967295-0", "uid:4294967295"),
    ],
)
def test_caller_through_the_peer_auth_proxy_is_named_as_actor(peer: str, actor: str) -> None:
    assert authorized_actor(peer) == actor


@pytest.mark.parametrize(
    "peer",
    [
        "unix:",
        "",
        "unix:/run/scrubber/door/admin.sock",
        "unix:/run/scrubber/door/a1000",
        "unix:/run/scrubber/door/a-1-1",
        "unix:/run/scrubber/door/a0-1/x",
        "unix:/run/scrubber/door/xa0-1",
        "ipv4:127.0.0.1:1/a0-1",
        "unix-abstract:/door/a0-1",
    ],
)
def test_caller_that_bypassed_the_peer_auth_proxy_is_refused(peer: str) -> None:
    with pytest.raises(PermissionDenied, match="did not come through the admin socket"):
        authorized_actor(peer)


def test_refused_caller_learns_which_users_are_authorized() -> None:
    with pytest.raises(PermissionDenied, match=r"uid 1000 may not act on devices: .*--admin-group"):
        authorized_actor("unix:/run/scrubber/door/r1000-1")


def test_directory_too_long_for_its_sockets_is_refused_before_binding() -> None:
    fits = Path("/" + "d" * (MAX_SOCKET_PATH_BYTES - len("/door/a4294967295-ffff") - 1))
    assert len(os.fsencode(Sockets(fits).path(Purpose.PLUGIN))) <= MAX_SOCKET_PATH_BYTES
    with pytest.raises(InvalidConfiguration, match=r"has 86 bytes; at most 85 leave room.*--socket-dir"):
        Sockets(fits.with_name(fits.name + "d"))


def test_socket_path_length_is_counted_in_bytes() -> None:
    with pytest.raises(InvalidConfiguration):
        Sockets(Path("/" + "é" * 50))


def test_socket_path_with_special_characters_is_quoted_for_grpc() -> None:
    assert grpc_target(Path("/run/a b%/#?é")) == "unix:/run/a%20b%25/%23%3F%C3%A9"
