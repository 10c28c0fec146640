"""Cgroup names of the kubelet and container runtimes: from a pod UID to its directories, from a process to the UID.

Two cgroup drivers name them: systemd (``kubepods-burstable-pod<uid, - written _>.slice``) and cgroupfs
(``kubepods/burstable/pod<uid>``). Guaranteed pods have no QoS class in the path. Container cgroups are the children of
the pod's cgroup in both.

An attacker can forge components of a path. A user with a writable cgroup chooses the names below it freely: a tenant
with a delegated cgroup may create ``kubepods/pod<uid of another pod>`` in its container, and a user of the node may
create ``x-kubepods-pod<uid>.slice`` below ``user@1000.service``. So neither the last match in a path counts nor simply
the first one, but the single pod component directly below a ``kubepods`` that the kubelet created. The components above
it belong to root, and what is below it cannot change it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

__all__ = ["is_valid_uid", "kubepods_below", "mentions_pod", "pod_directories", "pod_uid_of_path", "stray_directories"]

_CLASSES = ("burstable", "besteffort")
_UID = re.compile(r"[0-9A-Za-z](?:[0-9A-Za-z.-]{0,126}[0-9A-Za-z])?")
_SYSTEMD_POD = re.compile(r"(?P<stem>(?:.+-)?kubepods)(?:-(?:burstable|besteffort))?-pod(?P<uid>[0-9A-Za-z_.]+)\.slice")
_CGROUPFS_POD = re.compile(r"pod(?P<uid>[0-9A-Za-z.-]+)")
_RUNTIME_SLICE = "system.slice"
_MAX_ROOT_DEPTH = 2


def is_valid_uid(uid: str) -> bool:
    """Whether ``uid`` is safe as part of a path: it cannot lead out of the directory in which it is looked up."""
    return _UID.fullmatch(uid) is not None


def kubepods_below(root: Path) -> tuple[Path, ...]:
    """Return the cgroups in which a kubelet keeps its pods: at the top, else below its root (``--cgroup-root``, kind).

    The kubelet's own root is one level down, or several levels where they are slices. A unit with its own cgroup (a
    service, a user session) is not such a root: any user may have created what is below it.

    Raises:
        OSError: ``root`` cannot be listed.
    """
    os.listdir(root)
    level = [root]
    for _ in range(_MAX_ROOT_DEPTH + 1):
        found = [path for parent in level for path in _kubepods_in(parent) if path.is_dir()]
        if found:
            return tuple(found)
        level = [path for parent in level for path in _directories_in(parent) if _may_be_kubelet_root(path, root)]
    return ()


def pod_directories(kubepods: Path, uid: str) -> tuple[Path, ...]:
    """Return the possible paths of the pod's cgroup under ``kubepods``: one for each QoS class."""
    if kubepods.name.endswith(".slice"):
        stem = kubepods.name.removesuffix(".slice")
        escaped = uid.replace("-", "_")
        classed = (kubepods / f"{stem}-{word}.slice" / f"{stem}-{word}-pod{escaped}.slice" for word in _CLASSES)
        return (*classed, kubepods / f"{stem}-pod{escaped}.slice")
    return (*(kubepods / word / f"pod{uid}" for word in _CLASSES), kubepods / f"pod{uid}")


def stray_directories(root: Path, uid: str) -> tuple[Path, ...]:
    """Return the containers of a pod that a runtime placed outside the pod's cgroup.

    A runtime with the cgroupfs driver under a kubelet with the systemd driver takes the slice's name for a plain name:
    ``kubepods-burstable-pod<uid>.slice:cri-containerd:<container>``, below the cgroup of the runtime's service. The
    pod's own cgroup then exists and is empty.
    """
    escaped = uid.replace("-", "_")
    found: list[Path] = []
    for parent in (root, *_services(root / _RUNTIME_SLICE)):
        for path in _directories_in(parent):
            match = _SYSTEMD_POD.fullmatch(path.name.partition(":")[0]) if ":" in path.name else None
            if match is not None and match["uid"] == escaped:
                found.append(path)
    return tuple(found)


def pod_uid_of_path(path: str, kubepods: Collection[str]) -> str | None:
    """Return the UID of the pod that the cgroup ``path`` belongs to; None when it belongs to no pod.

    Args:
        path: relative to the service's root, as in ``/proc/PID/cgroup``.
        kubepods: paths from :func:`kubepods_below`, relative to the same root, without a leading slash.
    """
    parts = path.removesuffix(" (deleted)").strip("/").split("/")
    bases = [each.split("/") for each in kubepods]
    if parts[0] == "..":
        seen = [part for part in parts if part != ".."]
        return next((uid for base in bases if (uid := _pod_uid_of_truncated_path(seen, base)) is not None), None)
    for base in bases:
        if parts[: len(base)] == base:
            return _pod_uid_below_kubepods(base[-1], parts[len(base) :])
    # Containers that a runtime placed outside the pod's cgroup: at the top, or in the cgroup of the runtime's service.
    service = len(parts) > 2 and parts[0] == _RUNTIME_SLICE and parts[1].endswith(".service")
    return _pod_uid_of_stray(parts[2] if service else parts[0], {base[-1] for base in bases})


def mentions_pod(cgroups: bytes, uid: str) -> bool:
    """Whether the text of ``/proc/PID/cgroup`` contains the pod anywhere, in any hierarchy, legitimately or not."""
    words = re.split(r"[/: \n]", os.fsdecode(cgroups))
    systemd = (match for word in words if (match := _SYSTEMD_POD.fullmatch(word)) is not None)
    return f"pod{uid}" in words or any(match["uid"] == uid.replace("-", "_") for match in systemd)


def _pod_uid_below_kubepods(kubepods: str, parts: list[str]) -> str | None:
    systemd = kubepods.endswith(".slice")
    stem = kubepods.removesuffix(".slice")
    classes = {f"{stem}-{word}.slice" for word in _CLASSES} if systemd else set(_CLASSES)
    pod = parts[1:2] if parts and parts[0] in classes else parts[:1]
    match = (_SYSTEMD_POD if systemd else _CGROUPFS_POD).fullmatch("".join(pod))
    if match is None or (systemd and match["stem"] != stem):
        return None
    return match["uid"].replace("_", "-") if systemd else match["uid"]


def _pod_uid_of_truncated_path(parts: list[str], base: list[str]) -> str | None:
    """Return the pod UID in a path of another cgroup namespace, which lacks the prefix it shares with the service.

    The rest of the path begins next to one of the cgroups that contain the service itself, and those belong to the
    kubelet and to root.
    """
    for begin in range(len(base) + 1):
        shown = base[begin:]
        if parts[: len(shown)] == shown:
            uid = _pod_uid_below_kubepods(base[-1], parts[len(shown) :])
            if uid is not None:
                return uid
    return None


def _pod_uid_of_stray(component: str, kubepods: Collection[str]) -> str | None:
    match = _SYSTEMD_POD.fullmatch(component.partition(":")[0]) if ":" in component else None
    if match is None or f"{match['stem']}.slice" not in kubepods:
        return None
    return match["uid"].replace("_", "-")


def _kubepods_in(parent: Path) -> tuple[Path, ...]:
    named = f"{parent.name.removesuffix('.slice')}-kubepods.slice"
    return (parent / named, parent / "kubepods.slice", parent / "kubepods")


def _may_be_kubelet_root(path: Path, top: Path) -> bool:
    if path.name.endswith((".service", ".scope", ".mount", ".socket", ".swap")) or not _is_owned_by_root(path):
        return False
    return path.parent == top or path.name.endswith(".slice")


def _services(slice_: Path) -> list[Path]:
    """Return services with cgroups below their own, provided that only root or this service can create those."""
    try:
        with os.scandir(slice_) as entries:
            return [slice_ / each.name for each in entries if each.name.endswith(".service") and _may_hold_strays(each)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _may_hold_strays(service: os.DirEntry[str]) -> bool:
    try:
        seen = service.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    # The link count is the number of subdirectories, so no listing is needed. This runs for every pod that has ended.
    return seen.st_nlink > 2 and seen.st_uid in _trusted_owners()


def _directories_in(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_owned_by_root(cgroup: Path) -> bool:
    """Whether only root or this service may create cgroups in it: a delegated cgroup is owned by its user."""
    try:
        return cgroup.stat().st_uid in _trusted_owners()
    except FileNotFoundError:
        return False


def _trusted_owners() -> tuple[int, int]:
    return (0, os.geteuid())
