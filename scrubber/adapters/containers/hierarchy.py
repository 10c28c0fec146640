"""Which cgroup hierarchy holds the pods, of which version, and where this node's part of it begins.

A root in the wrong hierarchy would show every pod as empty, so the kernel's mount table is asked and nothing guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from scrubber.adapters.containers.paths import kubepods_below
from scrubber.domain.errors import BadConfiguration

__all__ = ["Hierarchy", "discover_root", "hierarchy_of"]


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A directory of a mounted cgroup hierarchy.

    Attributes:
        version: 1 or 2.
        controllers: of a v1 hierarchy, as ``/proc/PID/cgroup`` names them; empty for v2.
        below: the directory's path as ``/proc/PID/cgroup`` shows it.
        freezer: v1 only: the same path in the freezer's hierarchy; None when that is not mounted.
    """

    root: Path
    version: int
    controllers: frozenset[str]
    below: str
    freezer: Path | None = None


@dataclass(frozen=True, slots=True)
class _Mount:
    source: PurePosixPath  # the path in the hierarchy that is mounted
    point: Path
    kind: str
    options: frozenset[str]


def hierarchy_of(root: Path, mountinfo: str) -> Hierarchy:
    """The hierarchy that ``root`` is part of, by the text of ``/proc/self/mountinfo``.

    Raises:
        BadConfiguration: ``root`` is not inside a mounted cgroup hierarchy.
    """
    mounts = _mounts(mountinfo)
    root = root.resolve()
    around = [mount for mount in mounts if root.is_relative_to(mount.point)]
    # The deepest mount point shows the directory; of several on one point the last hides the others.
    mount = max(enumerate(around), key=lambda item: (len(item[1].point.parts), item[0]), default=(0, None))[1]
    if mount is None or mount.kind not in ("cgroup", "cgroup2"):
        raise BadConfiguration(
            f"{root} is not in a cgroup hierarchy: name a directory below /sys/fs/cgroup, "
            "or tell containers apart by their environment markers."
        )
    below = mount.source / root.relative_to(mount.point)
    if mount.kind == "cgroup2":
        return Hierarchy(root, 2, frozenset(), str(below))
    controllers = frozenset(mount.options - {"rw", "ro", "xattr", "clone_children", "noprefix"})
    return Hierarchy(root, 1, controllers, str(below), _freezer(mounts, below))


def discover_root(top: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """The hierarchy in which the kubelet keeps its pods; where no pod is there yet, the first that exists.

    v2 comes first (alone, or beside v1), then the v1 hierarchies that every runtime uses. None: no cgroups here.
    """
    candidates = [top] if (top / "cgroup.controllers").exists() else []
    candidates += [
        path for path in (top / "unified", top / "pids", top / "systemd") if (path / "cgroup.procs").exists()
    ]
    for candidate in candidates:
        if kubepods_below(candidate):
            return candidate
    return candidates[0] if candidates else None


def _mounts(mountinfo: str) -> list[_Mount]:
    mounts: list[_Mount] = []
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        where, what = before.split(), after.split()
        if not separator or len(where) < 5 or len(what) < 3:
            continue
        source, point = PurePosixPath(_unescape(where[3])), Path(_unescape(where[4]))
        mounts.append(_Mount(source, point, what[0], frozenset(what[2].split(","))))
    return mounts


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def _freezer(mounts: list[_Mount], below: PurePosixPath) -> Path | None:
    for mount in mounts:
        if mount.kind == "cgroup" and "freezer" in mount.options and below.is_relative_to(mount.source):
            return mount.point / below.relative_to(mount.source)
    return None
