"""Assessment of which devices a process could open on its own, as far as possible without opening anything.

Three things are checked: the capabilities of the process, whether a node of the device is in its ``/dev``, and whether
that ``/dev`` can be read without querying a file system that may never answer. Anything that cannot be determined
counts as "it could open every device".

Limitations: the device rules of the container are not checked, because they cannot be read on cgroup v2. Where they
allow the device because a container runtime injected it for a pod that requested no device, a tenant can hide the node:
move it out of ``/dev`` or remove it, and create it again with the right to create nodes, which many runtimes grant to
every container. Descriptors, however obtained, are not checked either.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import ExitStack

from scrubber.adapters.kernel_text import fields_in, lines_in, number_in
from scrubber.adapters.procwalk.match import DeviceNodeTarget, StatxReader, Target

__all__ = [
    "Confinement",
    "Reach",
    "device_nodes",
    "has_device_capabilities",
    "shows_dev_in_memory",
    "shows_device_capabilities",
]

Reach = frozenset[int] | None
"""Device numbers that a process could open on its own; None: possibly any, because that cannot be determined."""

_LENGTH = 1 << 16
_MOUNTS_LENGTH = 1 << 20
_MAX_ENTRIES, _MAX_DIRECTORIES = 1024, 64
_MAX_REACH = 64
"""Maximum number of device numbers of one process, which bounds the size of a walk's answer."""
_MAX_ROOTS = 16
"""Maximum number of roots inspected per group; each container has one."""
_MEMORY_FILE_SYSTEMS = (b"tmpfs", b"devtmpfs")
"""In-memory file systems: reading one of their directories always returns."""

_CAP_SYS_MODULE, _CAP_SYS_RAWIO, _CAP_SYS_PTRACE, _CAP_SYS_ADMIN = 16, 17, 19, 21
_DEVICE_CAPABILITIES = 1 << _CAP_SYS_MODULE | 1 << _CAP_SYS_RAWIO | 1 << _CAP_SYS_PTRACE | 1 << _CAP_SYS_ADMIN
"""With one of these a process can access devices that its container was not given, or hide a node by mounts."""
_CAPABILITIES = re.compile(rb"^CapPrm:\t([0-9a-f]{16})\n(?:^Cap.*\n)*?^CapBnd:\t([0-9a-f]{16})\n", re.MULTILINE)
"""Whole lines: a tenant chooses the number of its groups, whose line comes before these, and so where the text is cut."""

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Confinement:
    """Assesses processes for one walk.

    Args:
        target: target of the walk. A file has no device node: for a file, only capabilities are checked.
        device_numbers: device numbers that give access to the device; None for all of ``target``.
    """

    def __init__(self, target: Target, device_numbers: frozenset[int] | None = None) -> None:
        self._nodes = None
        if isinstance(target, DeviceNodeTarget):
            self._nodes = device_numbers or target.numbers
        self._statx = StatxReader()
        self._reach_by_root: dict[tuple[str, int, int], Reach] = {}
        self._roots: Counter[str] = Counter()

    def reach(self, pid: int, group: str) -> Reach:
        """Return the device numbers whose nodes ``pid``, of ``group``, has in its ``/dev``, if it lacks capabilities."""
        if has_device_capabilities(pid) is not False:
            return None
        return frozenset() if self._nodes is None else self._reach_of_root(pid, group, self._nodes)

    def _reach_of_root(self, pid: int, group: str, numbers: frozenset[int]) -> Reach:
        try:
            root = self._statx.stat(f"/proc/{pid}/root")
            key = (os.readlink(f"/proc/{pid}/ns/mnt"), root.device, root.inode)
        except OSError:
            return None
        if key not in self._reach_by_root:
            self._roots[group] += 1
            if self._roots[group] > _MAX_ROOTS:
                return None
            self._reach_by_root[key] = device_nodes(pid, numbers, self._statx)
        return self._reach_by_root[key]


def has_device_capabilities(pid: int) -> bool | None:
    """Whether ``pid`` has, or may get, a capability that gives access to devices; None when it cannot be read.

    A process in a separate user namespace is assessed by its capabilities there: a process that created one has all of
    them, and may have been privileged before. A process that had such capabilities and dropped all of them cannot be
    distinguished from others.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return shows_device_capabilities(file.read(_LENGTH))
    except OSError:
        return None


def shows_device_capabilities(status: bytes) -> bool | None:
    """Like :func:`has_device_capabilities`, from the text of ``/proc/PID/status``."""
    found = _CAPABILITIES.search(status)
    return None if found is None else any(int(each, 16) & _DEVICE_CAPABILITIES for each in found.groups())


def device_nodes(pid: int, numbers: frozenset[int], statx: StatxReader) -> Reach:
    """Return those of ``numbers`` that have a node in the ``/dev`` of ``pid``.

    No symlink is followed, and no directory of another mount is entered.
    """
    if not statx.uses_statx:
        return None
    try:
        with ExitStack() as opened:
            top = os.open(f"/proc/{pid}/root/dev", os.O_PATH | _DIRECTORY)
            opened.callback(os.close, top)
            mount = _mount_of(top)
            return _nodes_below(top, mount, numbers, statx, opened) if _is_dev_in_memory(pid, mount) else None
    except (OSError, ValueError):
        return None


def _nodes_below(top: int, mount: int, numbers: frozenset[int], eye: StatxReader, opened: ExitStack) -> Reach:
    target, left, waiting, found = DeviceNodeTarget(numbers), _MAX_ENTRIES, [top], set[int]()
    for directories, place in enumerate(waiting):
        if directories >= _MAX_DIRECTORIES:
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
                elif (number := target.match(eye.stat(entry.name, directory))) is not None:
                    found.add(number)
    return frozenset(found) if len(found) <= _MAX_REACH else None


def _mount_of(descriptor: int) -> int:
    with open(f"/proc/self/fdinfo/{descriptor}", "rb") as file:
        rows = map(fields_in, lines_in(file.read(_LENGTH)))
    return number_in(b"".join(next((row[1:2] for row in rows if row[:1] == [b"mnt_id:"]), [])))


def _is_dev_in_memory(pid: int, mount: int) -> bool:
    with open(f"/proc/{pid}/mountinfo", "rb") as file:
        text = file.read(_MOUNTS_LENGTH + 1)
    return len(text) <= _MOUNTS_LENGTH and shows_dev_in_memory(text, mount)


def shows_dev_in_memory(mounts: bytes, mount: int) -> bool:
    """Whether ``mount`` is a whole in-memory file system at ``/dev`` of a process whose root is also a mount.

    Args:
        mounts: text of the process's ``/proc/PID/mountinfo``.

    Raises:
        ValueError: A line does not have the kernel's format.
    """
    rows = [fields_in(line) for line in lines_in(mounts)]
    dev = [row for row in rows if len(row) > 6 and number_in(row[0]) == mount]
    if len(dev) != 1 or not any(row[4:5] == [b"/"] for row in rows):
        return False
    (row,) = dev
    kind = b"".join(row[row.index(b"-", 6) + 1 :][:1])
    return row[3] == b"/" and row[4] == b"/dev" and kind in _MEMORY_FILE_SYSTEMS
