"""Who may act on devices, and whom the audit names."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from scrubber.api.frontdoor import Peer, actor_of, admits, peer_of
from scrubber.api.sockets import LONGEST_PATH, Purpose, Sockets, target
from scrubber.domain.errors import BadConfiguration, NotPermitted


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
def test_root_the_own_user_and_operators_come_in(
    uid: int, gids: set[int], operators: int | None, admitted: bool
) -> None:
    assert admits(Peer(1, uid, frozenset(gids)), own_uid=500, operators=operators) is admitted


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = peer_of(ours)
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
def test_a_caller_who_came_through_the_door_is_named(peer: str, actor: str) -> None:
    assert actor_of(peer) == actor


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
def test_a_caller_who_came_another_way_is_nobody(peer: str) -> None:
    with pytest.raises(NotPermitted, match="did not come through the admin socket"):
        actor_of(peer)


def test_a_caller_whom_the_door_refused_is_told_who_may() -> None:
    with pytest.raises(NotPermitted, match=r"uid 1000 may not act on devices: .*--admin-group"):
        actor_of("unix:/run/scrubber/door/r1000-1")


def test_a_directory_too_long_for_its_sockets_is_refused_before_anybody_binds() -> None:
    fits = Path("/" + "d" * (LONGEST_PATH - len("/door/a4294967295-ffff") - 1))
    assert len(os.fsencode(Sockets(fits).path(Purpose.PLUGIN))) <= LONGEST_PATH
    with pytest.raises(BadConfiguration, match=r"has 86 bytes, and 85 leave room.*--socket"):
        Sockets(fits.with_name(fits.name + "d"))


def test_the_length_of_a_path_is_counted_in_bytes() -> None:
    with pytest.raises(BadConfiguration):
        Sockets(Path("/" + "é" * 50))


def test_a_path_with_signs_of_its_own_is_quoted_for_the_library() -> None:
    assert target(Path("/run/a b%/#?é")) == "unix:/run/a%20b%25/%23%3F%C3%A9"
