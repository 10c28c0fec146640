"""Real cgroups whose names are made to mislead programs that parse ``/proc``."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber.adapters.cgroups.systemd_unit import parse_systemd_unit
from tests.hostile_names import MISLEADING_SPACES
from tests.pods import CGROUP_WAYS, CgroupGround, Node, ground_of, new_pod, node_of

__test__ = bool(CGROUP_WAYS)  # tests.pods reports what cannot be tested on this machine

HIERARCHIES = (b"0::", b"1:name=systemd:", b"2:pids:", b"3:freezer:")
"""Beginnings of lines that would mislead, whichever of them the lines of this machine have."""


@pytest.fixture(params=CGROUP_WAYS)
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    async with node_of(ground_of(request.param)) as made:
        yield made


def enter(pid: int, cgroup: Path, name: bytes) -> None:
    """Move ``pid`` into a cgroup of that name in ``cgroup``; creates the cgroups on the way."""
    inner = os.fsencode(cgroup) + b"/" + name
    os.makedirs(inner)
    Path(os.fsdecode(inner), "cgroup.procs").write_text(str(pid))


def ground(node: Node) -> CgroupGround:
    assert isinstance(node.ground, CgroupGround)
    return node.ground


def forged_lines(path: str) -> bytes:
    """Return a name that contains every misleading line, each between two of the characters at which Python splits."""
    lines = [begin + path.encode() for begin in HIERARCHIES]
    ends = [end for end in MISLEADING_SPACES if end != b"\r"] + [b"\r"]
    return b"".join(end + lines[number % len(lines)] for number, end in enumerate(ends)).strip(b"/")


async def test_process_in_a_cgroup_with_forged_lines_in_its_name_keeps_its_own_pod(node: Node) -> None:
    pod, victim, containers = new_pod(), new_pod("victim"), node.ground.containers()
    await node.start(victim, "main")
    attacker = await node.start(pod, "main")
    root = f"/{ground(node).name}/kubepods/pod{victim.uid}/main"
    for cgroup in ground(node).cgroups(pod, "main"):
        enter(attacker.pid, cgroup, forged_lines(root))
    assert await containers.pod_uid_of(attacker.pid) == pod.uid
    assert [each.pid for each in await containers.processes(pod)] == [attacker.pid]
    assert attacker.pid not in [each.pid for each in await containers.processes(victim)]


async def test_local_user_with_forged_lines_in_a_cgroup_name_has_no_systemd_unit(node: Node) -> None:
    init = b"".join(begin + b"/init.scope\n" for begin in HIERARCHIES)
    user = await node.start(new_pod(), "main")
    for root in ground(node).roots:
        enter(user.pid, root, forged_lines("/system.slice/nvidia-persistenced.service"))
    text = Path(f"/proc/{user.pid}/cgroup").read_bytes()
    assert b"nvidia-persistenced.service" in text
    assert parse_systemd_unit(text, init) is None
