"""How kubelet and runtimes name cgroups: from a pod's UID to its directories, and from a process back to the UID.

Two drivers name them: systemd (``kubepods-burstable-pod<uid, - written _>.slice``) and cgroupfs
(``kubepods/burstable/pod<uid>``); guaranteed pods have no word for their class. Containers are the children of either.

The *outermost* pod below the service's own root counts. A tenant whose cgroup is writable may create
``kubepods/pod<somebody else's uid>`` inside it; the innermost name is the tenant's to forge.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

__all__ = ["kubepods_below", "pod_directories", "pod_uid_in", "pod_uid_of_path", "usable_uid"]

_CLASSES = ("burstable", "besteffort")
_UID = re.compile(r"[0-9A-Za-z](?:[0-9A-Za-z.-]{0,126}[0-9A-Za-z])?")
# What follows ".slice" is a runtime with the cgroupfs driver under a kubelet with the systemd one:
# "kubepods-pod<uid>.slice:cri-containerd:<container>".
_SYSTEMD_POD = re.compile(r"(?:.+-)?kubepods(?:-(?:burstable|besteffort))?-pod(?P<uid>[0-9A-Za-z_.]+?)\.slice(?::.*)?")
_CGROUPFS_POD = re.compile(r"pod(?P<uid>[0-9A-Za-z.-]+)")


def usable_uid(uid: str) -> bool:
    """Whether ``uid`` can be part of a path: nothing that could lead out of the directory it is looked up in."""
    return _UID.fullmatch(uid) is not None


def kubepods_below(root: Path) -> tuple[Path, ...]:
    """The cgroups under which a kubelet keeps its pods: at the top, else one level down (``--cgroup-root``, kind)."""
    top = tuple(path for path in (root / "kubepods.slice", root / "kubepods") if path.is_dir())
    if top:
        return top
    found: list[Path] = []
    for parent in sorted(path for path in root.iterdir() if path.is_dir()):
        stem = parent.name.removesuffix(".slice")
        found += [path for path in (parent / f"{stem}-kubepods.slice", parent / "kubepods") if path.is_dir()]
    return tuple(found)


def pod_directories(kubepods: Path, uid: str) -> tuple[Path, ...]:
    """Where the pod's cgroup can be under ``kubepods``: one path for each class of service."""
    if kubepods.name.endswith(".slice"):
        stem = kubepods.name.removesuffix(".slice")
        escaped = uid.replace("-", "_")
        classed = (kubepods / f"{stem}-{word}.slice" / f"{stem}-{word}-pod{escaped}.slice" for word in _CLASSES)
        return (*classed, kubepods / f"{stem}-pod{escaped}.slice")
    return (*(kubepods / word / f"pod{uid}" for word in _CLASSES), kubepods / f"pod{uid}")


def pod_uid_of_path(path: str) -> str | None:
    """UID of the outermost pod that the cgroup ``path`` names; None when it names none."""
    expecting_pod = False
    for component in path.removesuffix(" (deleted)").split("/"):
        if systemd := _SYSTEMD_POD.fullmatch(component):
            return systemd["uid"].replace("_", "-")
        if expecting_pod and (plain := _CGROUPFS_POD.fullmatch(component)):
            return plain["uid"]
        expecting_pod = component == "kubepods" or (expecting_pod and component in _CLASSES)
    return None


def pod_uid_in(cgroups: str, *, controllers: Collection[str] = (), below: str = "/") -> str | None:
    """UID of the pod that ``/proc/PID/cgroup`` (its text) puts a process in; None for a process of no pod.

    Args:
        controllers: the v1 controllers of the hierarchy that is asked first; empty for v2 (the line ``0::``).
            The other lines are asked after it, the last first.
        below: path of the service's root in that hierarchy. What leads to it says nothing about pods of this node:
            the node itself may be a container of another.
    """
    lines = [line.split(":", 2) for line in cgroups.splitlines() if line.count(":") >= 2]
    asked_first = [path for number, names, path in lines if _is_of(number, names, controllers)]
    others = [path for number, names, path in reversed(lines) if not _is_of(number, names, controllers)]
    for path in (*asked_first, *others):
        uid = pod_uid_of_path(_inside(path, below))
        if uid is not None:
            return uid
    return None


def _is_of(number: str, names: str, controllers: Collection[str]) -> bool:
    if not controllers:
        return number == "0" and not names
    return not set(controllers).isdisjoint(names.split(","))


def _inside(path: str, below: str) -> str:
    prefix = below.rstrip("/") + "/"
    return path[len(prefix) - 1 :] if path.startswith(prefix) else path
