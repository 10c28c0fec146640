"""Discovery of the cgroup hierarchy that holds the pods, its version, and the directory where this node's part begins.

A root in the wrong hierarchy would show every pod as empty, so this reads the kernel's mount table and never guesses.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from scrubber.adapters.cgroups.paths import kubepods_below
from scrubber.adapters.kernel_text import lines_in
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["Hierarchy", "discover_root", "hierarchy_of", "sibling_hierarchies"]

_POD_CONTROLLERS = frozenset({"pids", "name=systemd", "devices", "freezer"})
"""The v1 hierarchies in which every runtime places the processes of a container."""
_MOUNT_OPTIONS = frozenset({"rw", "ro", "xattr", "clone_children", "noprefix", "nsdelegate", "none"})


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A directory of a mounted cgroup hierarchy.

    Attributes:
        version: 1 or 2.
        controllers: controllers of a v1 hierarchy, as named in ``/proc/PID/cgroup``; empty for v2.
        path: path of the directory as shown in ``/proc/PID/cgroup``.
        nsdelegate: whether cgroup namespaces are delegation boundaries, so that no process inside can migrate a process
            across them (a mount option of v2; v1 has no equivalent).
    """

    root: Path
    version: int
    controllers: frozenset[str]
    path: str
    nsdelegate: bool = False


@dataclass(frozen=True, slots=True)
class _Mount:
    source: PurePosixPath  # path within the hierarchy that is mounted
    point: Path
    file_system: str
    options: frozenset[str]


def hierarchy_of(root: Path, mountinfo: bytes) -> Hierarchy:
    """Return the hierarchy that contains ``root``, from the text of ``/proc/self/mountinfo``.

    Raises:
        InvalidConfiguration: ``root`` is not inside a mounted cgroup hierarchy.
    """
    mounts = _mounts(mountinfo)
    root = root.resolve()
    around = [mount for mount in mounts if root.is_relative_to(mount.point)]
    # The deepest mount point provides the directory; of several mounts on one point the last one hides the others.
    mount = max(enumerate(around), key=lambda item: (len(item[1].point.parts), item[0]), default=(0, None))[1]
    if mount is None or mount.file_system not in ("cgroup", "cgroup2"):
        raise InvalidConfiguration(
            f"{root} is not in a cgroup hierarchy: pass a directory below /sys/fs/cgroup, or identify "
            "containers by their environment markers."
        )
    below = mount.source / root.relative_to(mount.point)
    return _hierarchy(root, mount, below)


def sibling_hierarchies(hierarchy: Hierarchy, mountinfo: bytes) -> tuple[Hierarchy, ...]:
    """Return the same directory in the other mounted hierarchies that may hold pod processes: v2, and the main v1 ones.

    On a node with several hierarchies, the kubelet creates a pod's cgroup in all of them, and not every runtime places
    the processes into each of them (in particular not with v2 next to v1). Inspecting only one would show a running pod
    as empty.
    """
    mounts = _mounts(mountinfo)
    below = PurePosixPath(hierarchy.path)
    found: dict[frozenset[str], Hierarchy] = {hierarchy.controllers: hierarchy}
    for mount in mounts:
        if mount.file_system not in ("cgroup", "cgroup2") or not below.is_relative_to(mount.source):
            continue
        root = mount.point / below.relative_to(mount.source)
        other = _hierarchy(root, mount, below)
        tracks_pods = other.version == 2 or not other.controllers.isdisjoint(_POD_CONTROLLERS)
        if tracks_pods and other.controllers not in found and root.is_dir():
            found[other.controllers] = other
    return tuple(found.values())[1:]


def _hierarchy(root: Path, mount: _Mount, below: PurePosixPath) -> Hierarchy:
    if mount.file_system == "cgroup2":
        return Hierarchy(root, 2, frozenset(), str(below), "nsdelegate" in mount.options)
    return Hierarchy(root, 1, mount.options - _MOUNT_OPTIONS, str(below))


# See docs/decisions/0018-kernel-text-and-cgroups.md.
def discover_root(top: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """Return the hierarchy in which the kubelet keeps its pods; if there are no pods yet, the first existing candidate.

    v2 comes first (alone, or next to v1), then the v1 hierarchies that every runtime uses. None: no cgroups are
    mounted.
    """
    candidates = [top] if (top / "cgroup.controllers").exists() else []
    candidates += [
        path for path in (top / "unified", top / "pids", top / "systemd") if (path / "cgroup.procs").exists()
    ]
    for candidate in candidates:
        if kubepods_below(candidate):
            return candidate
    return candidates[0] if candidates else None


def _mounts(mountinfo: bytes) -> list[_Mount]:
    """Return all mounts. A pod's ``subPath`` is part of a line, so a line may contain any byte (proc_pid_mountinfo(5)).

    Exactly one space separates two fields: the source of a mount may be empty.
    """
    mounts: list[_Mount] = []
    for line in lines_in(mountinfo):
        before, separator, after = line.partition(b" - ")
        where, what = before.split(b" "), after.split(b" ")
        if not separator or len(where) < 5 or len(what) < 3:
            continue
        source, point = PurePosixPath(_unescape(where[3])), Path(_unescape(where[4]))
        mounts.append(_Mount(source, point, os.fsdecode(what[0]), frozenset(os.fsdecode(what[2]).split(","))))
    return mounts


def _unescape(field: bytes) -> str:
    """Undo the kernel's escaping of spaces, tabs, line breaks and backslashes in mount paths."""
    return os.fsdecode(re.sub(rb"\\([0-3][0-7]{2})", lambda octal: bytes([int(octal[1], 8)]), field))
