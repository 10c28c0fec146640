"""One cgroup hierarchy: where a pod is in it, who is in a cgroup, and how far "nobody" can be believed.

An answer "nobody" is what lets the next tenant in. So it is given only on evidence: the cgroup is gone, or the kernel
says that nothing populates it, or everybody listed was looked at and is dead.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from scrubber.adapters.cgroups.hierarchy import Hierarchy
from scrubber.adapters.cgroups.paths import kubepods_below, pod_directories, pod_uid_of_path, stray_directories
from scrubber.adapters.cgroups.procfs import ProcFs, read_error
from scrubber.adapters.cgroups.tally import CgroupTally
from scrubber.adapters.kernel_text import cgroup_paths, lines_in, number_in
from scrubber.domain.assignment import Process
from scrubber.domain.errors import Unreadable

__all__ = ["CgroupTree", "child_cgroups", "is_populated", "read_cgroup_procs", "walk_cgroups"]

_READ_SIZE = 64 * 1024
_POPULATED = {b"populated 0": False, b"populated 1": True}
_MAX_PATH_LENGTH = (
    2048  # bytes; a path of twice as many is longer than the kernel takes, and a tenant may nest as deep as it likes
)


class CgroupTree:
    """A hierarchy, seen with the eyes of ``proc``."""

    def __init__(self, hierarchy: Hierarchy, proc: ProcFs) -> None:
        self.hierarchy = hierarchy
        self._proc = proc

    @property
    def version(self) -> int:
        return self.hierarchy.version

    def kubepods(self) -> tuple[Path, ...]:
        """The cgroups under which pods are now.

        Raises:
            Unreadable
        """
        with self._readable():
            return kubepods_below(self.hierarchy.root)

    def pod_cgroups(self, uid: str, kubepods: Collection[Path] | None = None) -> tuple[Path, ...]:
        """The pod's own cgroups: one, or more after the kubelet's driver was changed under running pods.

        Args:
            kubepods: those of :meth:`kubepods`, for whoever asks more than this in one look.
        """
        bases = self.kubepods() if kubepods is None else kubepods
        candidates = (path for base in bases for path in pod_directories(base, uid))
        return tuple(path for path in candidates if path.is_dir())

    def stray_containers(self, uid: str, kubepods: Collection[Path] | None = None) -> tuple[Path, ...]:
        """Containers of the pod that are in none of :meth:`pod_cgroups`; ``kubepods`` as there."""
        bases = self.kubepods() if kubepods is None else kubepods
        if not any(path.name.endswith(".slice") for path in bases):
            return ()
        with self._readable():
            return stray_directories(self.hierarchy.root, uid)

    def relative_kubepods(self) -> tuple[str, ...]:
        """:meth:`kubepods` as paths from the root on, without a leading slash.

        Raises:
            Unreadable
        """
        return tuple(path.relative_to(self.hierarchy.root).as_posix() for path in self.kubepods())

    def pod_uid_in(self, cgroups: Mapping[str, str], kubepods: Collection[str] | None = None) -> str | None:
        """UID of the pod that a process is in, as far as this hierarchy says.

        Args:
            cgroups: the process's (:func:`~scrubber.adapters.kernel_text.cgroup_paths`).
            kubepods: those of :meth:`relative_kubepods`, for whoever asks about many processes.
        """
        path = self._path_in(cgroups)
        if path is None:
            return None
        return pod_uid_of_path(path, self.relative_kubepods() if kubepods is None else kubepods)

    def members(
        self, cgroup: Path, container: str, tally: CgroupTally, *, recursive: bool = True
    ) -> list[Process] | None:
        """The living processes of ``cgroup`` (``recursive``: and of all below it); None when another look is needed.

        "Nobody" needs more than a list in which nobody was found alive: a process that forks and exits, or moves
        between two cgroups below, hides from lists. It does not hide from the kernel's count (v2), nor, if it only
        moves, from a look at every process (v1, where there is no such count).

        Raises:
            Unreadable: the cgroup, or a process in it, cannot be looked at.
            TooManyProcesses: there are more processes than ``tally`` lets be looked at.
        """
        found: list[Process] = []
        lost = threaded = asked = False
        visited = 0
        for directory in walk_cgroups(cgroup) if recursive else (cgroup,):
            visited += 1
            if recursive and not tally.count_cgroup():
                found, lost, asked = self._members_by_process(cgroup, container, tally), False, True
                break
            pids = read_cgroup_procs(directory, tally.count_processes)
            threaded = threaded or (pids is None and directory == cgroup)
            if pids is None and not recursive:
                return None  # whoever lists the processes is above the pod: that is not where a kubelet makes pods
            # A cgroup of threads only lists no processes; the nearest cgroup above that is not one does, and the pod's
            # own cgroup is looked at too.
            for pid in pids or ():
                stat = self._proc.stat_if_alive(pid)
                if stat is not None:
                    found.append(Process(pid, stat.started, container))
                elif _exists(pid) and self._proc.stat(pid) is None:
                    return None  # it is there, and we may not see it
                else:
                    lost = True
        if found or threaded:
            return found
        if lost or (recursive and self.version == 2 and is_populated(cgroup)):
            return None
        if self.version == 1 and visited > 1 and not asked:
            return self._members_by_process(cgroup, container, tally)
        return found

    def _members_by_process(self, cgroup: Path, container: str, tally: CgroupTally) -> list[Process]:
        """Walk all processes of the node: slow, but who makes a thousand cgroups cannot make this any slower."""
        inside = f"/{cgroup.relative_to(self.hierarchy.root).as_posix()}/"
        found = [
            Process(stat.pid, stat.started, container)
            for stat, text in tally.all_processes()
            if self._is_inside(inside, text)
        ]
        tally.count_processes(process.pid for process in found)
        return found

    def _is_inside(self, inside: str, text: bytes) -> bool:
        """Whether a process whose ``cgroup`` file has this ``text`` is in the cgroup ``inside``.

        Raises:
            Unreadable: it may be. A text that cannot be read and does not name the cgroup keeps nobody from an answer.
        """
        if os.fsencode(inside.rstrip("/")) not in text:
            return False
        path = self._path_in(cgroup_paths(text))
        return path is not None and f"{path}/".startswith(inside)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise read_error(f"The cgroup hierarchy at {self.hierarchy.root}", exc) from exc

    def _path_in(self, cgroups: Mapping[str, str]) -> str | None:
        """The process's path in this hierarchy from the root on; None outside of it.

        What leads to the root says nothing about pods of this node: the node itself may be a container of another.
        """
        path = next((path for names, path in cgroups.items() if self._is_named(names)), "")
        prefix = self.hierarchy.path.rstrip("/") + "/"
        if path.startswith(prefix):
            return path[len(prefix) - 1 :]
        return path if PurePosixPath(path).parts[1:2] == ("..",) else None

    def _is_named(self, names: str) -> bool:
        """Whether this is what ``/proc/PID/cgroup`` calls this hierarchy."""
        if self.version == 2:
            return not names
        return not self.hierarchy.controllers.isdisjoint(names.split(","))


def is_populated(cgroup: Path) -> bool | None:
    """Whether any living process is in the cgroup or below it; None when the kernel does not say (v1)."""
    try:
        lines = lines_in((cgroup / "cgroup.events").read_bytes())
    except FileNotFoundError:
        return None if cgroup.is_dir() else False
    except OSError as exc:
        if exc.errno == errno.ENODEV:
            return False
        raise read_error(cgroup, exc) from exc
    return next((_POPULATED[line] for line in lines if line in _POPULATED), None)


def child_cgroups(cgroup: Path) -> list[Path]:
    """The cgroups in ``cgroup``; none when it is gone."""
    try:
        with os.scandir(cgroup) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise read_error(cgroup, exc) from exc


def walk_cgroups(cgroup: Path) -> Iterator[Path]:
    """``cgroup`` and all below it, however deep. Each path is good until the next one is asked for."""
    waiting: list[Path | int] = [cgroup]
    try:
        while waiting:
            directory = waiting.pop()
            if isinstance(directory, int):
                os.close(directory)
                continue
            if len(os.fsencode(directory)) > _MAX_PATH_LENGTH:
                descriptor = _open_directory(directory)
                if descriptor is None:
                    continue
                waiting.append(descriptor)  # everything below it is visited before it is closed
                directory = Path(f"/proc/self/fd/{descriptor}")
            yield directory
            waiting += child_cgroups(directory)
    finally:
        for each in waiting:
            if isinstance(each, int):
                os.close(each)


def _open_directory(directory: Path) -> int | None:
    try:
        return os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise read_error(directory, exc) from exc


def read_cgroup_procs(cgroup: Path, count: Callable[[Sequence[int]], None] = lambda _: None) -> list[int] | None:
    """What ``cgroup.procs`` lists; None for a cgroup that holds threads only.

    Args:
        count: told of the PIDs as they are read; what it raises breaks the reading off.

    Raises:
        Unreadable
    """
    pids: list[int] = []
    try:
        for lines in _lines_of(cgroup / "cgroup.procs"):
            part = [number_in(line) for line in lines]
            if 0 in part:
                raise Unreadable(
                    f"{cgroup} holds processes of another PID namespace: run the service in the node's own."
                )
            count(part)
            pids += part
    except FileNotFoundError:
        return []
    except OSError as exc:
        if exc.errno == errno.ENODEV:
            return []  # removed while it was read, and only an empty cgroup can be removed
        if exc.errno == errno.EOPNOTSUPP:
            return None
        raise read_error(f"{cgroup}/cgroup.procs", exc) from exc
    return pids


def _lines_of(file: Path) -> Iterator[list[bytes]]:
    """The lines of ``file``, as many at a time as one read gives: it may be longer than anybody wants to know."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        rest = b""
        while chunk := os.read(descriptor, _READ_SIZE):
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            yield lines_in(whole + newline)
        yield lines_in(rest)
    finally:
        os.close(descriptor)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
