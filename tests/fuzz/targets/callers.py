"""The name by which the server knows the caller of a connection to the admin socket."""

from __future__ import annotations

import re
from urllib.parse import unquote

from scrubber.api.peer_auth import authorized_actor, caller_name
from scrubber.domain.errors import PermissionDenied
from tests.fuzz.target import target


@target(
    "caller-name",
    parser="gRPC's name of the peer of a connection to the admin socket",
    covers=("scrubber.api.peer_auth",),
    oracle="a caller may act only if the last part of the name is one that the proxy gives to an authorized caller, and then has "
    "the number in it; every refusal is one printable line",
    seeds=(
        b"unix:/run/scrubber/a1000-1f",
        b"unix:/run/scrubber/r1000-1f",
        b"unix:%2Frun%2Fscrubber%2Fa0-0",
        "unix:/run/scrubber/a٣-1".encode(),
        b"unix:/a0-1/../r5-1",
        b"ipv4:127.0.0.1:80",
        b"unix:",
    ),
    words=(b"/a0-1", b"/r0-1", b"unix:", b"%2f", b"%00", b"..", b"/"),
)
def caller(data: bytes) -> bool:
    peer = data.decode("utf-8", "replace")
    scheme, _, path = peer.partition(":")
    named = re.fullmatch(r"(?s).*/(a|r)([0-9]{1,10})-[0-9a-f]{1,4}", unquote(path)) if scheme == "unix" else None
    try:
        actor = authorized_actor(peer)
    except PermissionDenied as error:
        assert str(error).isprintable()
        return False
    assert named is not None
    assert (named[1], actor) == ("a", f"uid:{named[2]}")
    assert caller_name(peer) == actor
    return True
