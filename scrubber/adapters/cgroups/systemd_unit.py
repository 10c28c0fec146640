"""The systemd unit of a process: identifies the node's own daemons by their cgroup, never by their command name.

Any user can name a program ``nvidia-persistenced``. Moving into a cgroup below ``system.slice`` requires privileges
over the whole node, so the cgroup reported by the kernel is trusted, and only the unit's own cgroup: a process in a
cgroup below it, or in a separate PID namespace, is in a container that the unit started.
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
"""The hierarchies in which systemd keeps its units: v2, and its own v1 hierarchy. A hybrid node has both."""


def systemd_unit_of(pid: int, *, proc: Path = Path("/proc")) -> str | None:
    """Return the service of the node's systemd that ``pid`` belongs to (``nvidia-persistenced.service``).

    None for all other processes: users' services, containers, a process that has exited or may not be inspected, and
    all processes on a node where PID 1 is not systemd.
    """
    node = ProcFs(proc)
    first, before = node.stat(1), node.stat_if_alive(pid)
    if first is None or before is None or not _is_in_node_pid_namespace(proc, pid):
        return None
    unit = parse_systemd_unit(node.cgroup(before) or b"", node.cgroup(first) or b"")
    after = node.stat_if_alive(pid)
    return unit if after is not None and after.started == before.started else None


def parse_systemd_unit(cgroups: bytes, init_cgroups: bytes) -> str | None:
    """Return the unit of a process from the text of its ``/proc/PID/cgroup``; None also if it cannot be parsed.

    Args:
        init_cgroups: the same file of PID 1. PID 1 is in ``init.scope`` at the top of the hierarchy, as seen from the
            cgroup namespace of the reader: a service in a container sees ``/../../..`` in front of every path.
    """
    try:
        init_paths, tops = cgroup_paths(cgroups), cgroup_paths(init_cgroups)
    except Unreadable:
        return None
    units = {
        _unit(init_paths.get(each, ""), tops[each].removesuffix(_INIT))
        for each in _SYSTEMD_HIERARCHIES
        if tops.get(each, "").endswith(_INIT)
    }
    return units.pop() if len(units) == 1 else None


def _unit(path: str, top: str) -> str | None:
    """Return the unit of ``/system.slice/x.service``, or of a service in slices of ``system.slice``; else None.

    A path below the service itself has no unit.
    """
    components = path.removeprefix(f"{top}/").split("/") if path.startswith(f"{top}/") else []
    if len(components) < 2 or components[0] != "system.slice":
        return None
    *slices, unit = components[1:]
    return unit if unit.endswith(".service") and all(_is_slice_of_system(each) for each in slices) else None


def _is_slice_of_system(name: str) -> bool:
    return name.startswith("system-") and name.endswith(".slice")


def _is_in_node_pid_namespace(proc: Path, pid: int) -> bool:
    """Whether ``pid`` is in this service's PID namespace, which is the node's."""
    try:
        return os.readlink(proc / str(pid) / "ns" / "pid") == os.readlink(proc / "self" / "ns" / "pid")
    except OSError:
        return False
