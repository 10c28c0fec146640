"""Which systemd unit a process belongs to: how the node's own daemons are known, and never by what they call themselves.

Anybody can name a program ``nvidia-persistenced``. Nobody without privilege over the whole node can move into a cgroup
below ``system.slice``, so the kernel's word about the cgroup is taken, and only that of a unit's own cgroup: what runs in
a cgroup below it, or in a PID namespace of its own, is a container that the unit started.
"""

from __future__ import annotations

import os
from pathlib import Path

from scrubber.adapters.cgroups.procfs import ProcFs
from scrubber.adapters.kernel_text import cgroup_paths
from scrubber.domain.errors import Unreadable

__all__ = ["parse_systemd_unit", "systemd_unit_of"]

_INIT = "/init.scope"
_SYSTEMD_HIERARCHIES = ("", "name=systemd")
"""The hierarchies in which systemd keeps its units: v2, and its own of v1. A hybrid node has both."""


def systemd_unit_of(pid: int, *, proc: Path = Path("/proc")) -> str | None:
    """The service of the node's systemd that ``pid`` belongs to (``nvidia-persistenced.service``).

    None for everybody else: users' services, containers, a process that is gone or may not be looked at, and everybody
    on a node whose first process is not systemd.
    """
    node = ProcFs(proc)
    first, before = node.stat(1), node.stat_if_alive(pid)
    if first is None or before is None or not _is_in_node_pid_namespace(proc, pid):
        return None
    unit = parse_systemd_unit(node.cgroup(before) or b"", node.cgroup(first) or b"")
    after = node.stat_if_alive(pid)
    return unit if after is not None and after.started == before.started else None


def parse_systemd_unit(cgroups: bytes, init_cgroups: bytes) -> str | None:
    """The unit that ``cgroups``, the text of ``/proc/PID/cgroup``, puts a process in; None also if it cannot be read.

    Args:
        init_cgroups: the same of PID 1. It is in ``init.scope`` at the top, wherever the top is as seen from the cgroup
            namespace of whoever asks: a service in a container sees ``/../../..`` in front of everything.
    """
    try:
        theirs, tops = cgroup_paths(cgroups), cgroup_paths(init_cgroups)
    except Unreadable:
        return None
    units = {
        _unit(theirs.get(each, ""), tops[each].removesuffix(_INIT))
        for each in _SYSTEMD_HIERARCHIES
        if tops.get(each, "").endswith(_INIT)
    }
    return units.pop() if len(units) == 1 else None


def _unit(path: str, top: str) -> str | None:
    """``/system.slice/x.service``, or deeper in slices of ``system.slice``; nothing below the service itself."""
    components = path.removeprefix(f"{top}/").split("/") if path.startswith(f"{top}/") else []
    if len(components) < 2 or components[0] != "system.slice":
        return None
    *slices, unit = components[1:]
    return unit if unit.endswith(".service") and all(_is_slice_of_system(each) for each in slices) else None


def _is_slice_of_system(name: str) -> bool:
    return name.startswith("system-") and name.endswith(".slice")


def _is_in_node_pid_namespace(proc: Path, pid: int) -> bool:
    """Whether ``pid`` is in the PID namespace of this service, which is the node's."""
    try:
        return os.readlink(proc / str(pid) / "ns" / "pid") == os.readlink(proc / "self" / "ns" / "pid")
    except OSError:
        return False
