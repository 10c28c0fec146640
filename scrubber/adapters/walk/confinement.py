"""Whether a process could open a device by itself, as far as that can be seen without opening anything.

Three things are asked: its capabilities, whether a node of the device lies in its ``/dev``, and whether that ``/dev`` is
one that can be read without asking a file system that may never answer. Whatever cannot be told counts as "it could".

What this does not show: the device rules of its container, which cannot be read on cgroup v2. Where they allow the device,
because a container runtime injected it for a pod that asked for no device, a tenant can hide the node: move it out of
``/dev`` or remove it, and make it again with the right to make nodes, which many runtimes give to every container. Nor does
it show descriptors, however they were obtained.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import ExitStack

from scrubber.adapters.proc import fields_in, lines_in, number_in
from scrubber.adapters.walk.seeing import Eye, Nodes, Target

__all__ = ["Confinement", "has_powers", "node_in_dev"]

_LENGTH = 1 << 16
_MOUNTS_LENGTH = 1 << 20
_MOST_ENTRIES, _MOST_DIRECTORIES = 1024, 64
_MOST_ROOTS = 16
"""Roots of one group that are looked at; each container has one."""
_SAFE = (b"tmpfs", b"devtmpfs")
"""File systems that are in memory: reading a directory of theirs comes back."""

_CAP_SYS_MODULE, _CAP_SYS_RAWIO, _CAP_SYS_PTRACE, _CAP_SYS_ADMIN = 16, 17, 19, 21
_POWERS = 1 << _CAP_SYS_MODULE | 1 << _CAP_SYS_RAWIO | 1 << _CAP_SYS_PTRACE | 1 << _CAP_SYS_ADMIN
"""With one of these a process gets at devices that its container was not given, or can hide a node by mounts."""
_CAPABILITIES = re.compile(rb"^Cap(?:Prm|Bnd):\s*([0-9a-f]+)$", re.MULTILINE)

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Confinement:
    """Judges processes for one walk.

    Args:
        target: what is looked for. A file has no node: for one, only capabilities are asked about.
        own: device numbers that give access to the device; None for all of ``target``.
    """

    def __init__(self, target: Target, own: frozenset[int] | None = None) -> None:
        self._nodes = None
        if isinstance(target, Nodes):
            self._nodes = own or target.numbers
        self._eye = Eye()
        self._seen: dict[tuple[str, int, int], bool] = {}
        self._roots: Counter[str] = Counter()

    def is_confined(self, pid: int, group: str) -> bool:
        """Whether ``pid``, of ``group``, has no such capability and no node of the device; False where it cannot be told."""
        if has_powers(pid) is not False:
            return False
        return self._nodes is None or self._is_without_node(pid, group, self._nodes)

    def _is_without_node(self, pid: int, group: str, numbers: frozenset[int]) -> bool:
        try:
            root = self._eye.see(f"/proc/{pid}/root")
            key = (os.readlink(f"/proc/{pid}/ns/mnt"), root.device, root.inode)
        except OSError:
            return False
        if key not in self._seen:
            self._roots[group] += 1
            if self._roots[group] > _MOST_ROOTS:
                return False
            self._seen[key] = node_in_dev(pid, numbers, self._eye) is False
        return self._seen[key]


def has_powers(pid: int) -> bool | None:
    """Whether ``pid`` has, or may get, a capability that leads to devices; None when it is gone or cannot be asked.

    A process in a user namespace of its own is judged by what it has there: one that made it has everything, and may have
    been privileged before. A process that had such capabilities and gave all of them away is not told from others.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            sets = [int(each, 16) for each in _CAPABILITIES.findall(file.read(_LENGTH))]
    except (OSError, ValueError):
        return None
    return any(each & _POWERS for each in sets) if len(sets) == 2 else None


def node_in_dev(pid: int, numbers: frozenset[int], eye: Eye) -> bool | None:
    """Whether a node with one of ``numbers`` is in the ``/dev`` of ``pid``; None where that cannot be told.

    No link is followed, and no directory of another mount is entered.
    """
    if not eye.quiet:
        return None
    try:
        with ExitStack() as opened:
            top = os.open(f"/proc/{pid}/root/dev", os.O_PATH | _DIRECTORY)
            opened.callback(os.close, top)
            mount = _mount_of(top)
            return _has_node(top, mount, numbers, eye, opened) if _is_dev_in_memory(pid, mount) else None
    except (OSError, ValueError):
        return None


def _has_node(top: int, mount: int, numbers: frozenset[int], eye: Eye, opened: ExitStack) -> bool | None:
    target, left, waiting = Nodes(numbers), _MOST_ENTRIES, [top]
    for number, place in enumerate(waiting):
        if number >= _MOST_DIRECTORIES:
            return None
        directory = os.open(".", os.O_RDONLY | _DIRECTORY, dir_fd=place)
        opened.callback(os.close, directory)
        with os.scandir(directory) as entries:
            for entry in entries:
                left -= 1
                if left < 0:
                    return None
                if entry.is_symlink():
                    continue
                if entry.is_dir(follow_symlinks=False):
                    below = os.open(entry.name, os.O_PATH | _DIRECTORY, dir_fd=directory)
                    opened.callback(os.close, below)
                    if _mount_of(below) == mount:
                        waiting.append(below)
                elif target.part(eye.see(entry.name, directory)) is not None:
                    return True
    return False


def _mount_of(descriptor: int) -> int:
    with open(f"/proc/self/fdinfo/{descriptor}", "rb") as file:
        return next(
            number_in(row[1]) for row in map(fields_in, lines_in(file.read(_LENGTH))) if row[:1] == [b"mnt_id:"]
        )


def _is_dev_in_memory(pid: int, mount: int) -> bool:
    """Whether ``mount`` is all of a file system in memory, at ``/dev`` of a process whose root is a mount, too."""
    with open(f"/proc/{pid}/mountinfo", "rb") as file:
        text = file.read(_MOUNTS_LENGTH + 1)
    if len(text) > _MOUNTS_LENGTH:
        return False
    rows = [fields_in(line) for line in lines_in(text)]
    dev = [row for row in rows if len(row) > 6 and number_in(row[0]) == mount]
    if len(dev) != 1 or not any(row[4:5] == [b"/"] for row in rows):
        return False
    (row,) = dev
    return row[3] == b"/" and row[4] == b"/dev" and b"-" in row[6:] and row[row.index(b"-", 6) + 1] in _SAFE
