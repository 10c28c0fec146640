"""Mounts whose names look like other lines of the mount table."""

import os

from tests.attacks.tools import LIBC, MISLEADING_SPACES, Place, say, stay

TRIES = "has volumes mounted by subPaths that contain line ends, whitespace, escapes or another mount's line"
HOLDS = "the service starts"
THREATS = ("D24",)
DEVICES = 0
TARGETS = "mounts"

LINE = b"30 1 0:9 - cgroup2 cgroup2 rw"
NAMES = (
    *(b"x" + end + LINE for end in MISLEADING_SPACES),
    *(b"\xff\xfe", b"\x85", b"a\nb", b" - cgroup2 cgroup2 rw", b"\\777", b"\\012"),
)
BIND = 0x1000


def attack(place: Place) -> None:
    """On a cluster the kubelet mounts them: the names go into the pod's manifest instead."""
    for name in NAMES:
        sub_path = os.fsencode(place.shared) + b"/" + name
        os.makedirs(sub_path)
        if LIBC.mount(sub_path, sub_path, None, BIND, None):
            raise PermissionError(sub_path)
    say(ready=True, mounts=len(NAMES))
    stay()
