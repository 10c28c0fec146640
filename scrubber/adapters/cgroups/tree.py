"""One cgroup hierarchy: the location of a pod, the processes in a cgroup, and the evidence that a cgroup is empty.

The result "no processes" allows the device to be assigned to the next tenant. It is therefore returned only on
evidence: the cgroup no longer exists, or the kernel reports that it is not populated, or every listed process was
inspected and is dead.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from scrubber.adapters.cgroups.hierarchy import Hierarchy
from scrubber.adapters.cgroups.job_paths import is_job, job_directories, job_of_path, slurm_directories
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
    2048  # bytes; a path of twice this length exceeds the kernel's limit, and a tenant may nest arbitrarily deep
)


class CgroupTree:
    """A hierarchy, read through the proc file system ``proc``."""

    def __init__(self, hierarchy: Hierarchy, proc: ProcFs) -> None:
        self.hierarchy = hierarchy
        self._proc = proc

    @property
    def version(self) -> int:
        return self.hierarchy.version

    def kubepods(self) -> tuple[Path, ...]:
        """Return the cgroups under which pods currently are.

        Raises:
            Unreadable
        """
        with self._readable():
            return kubepods_below(self.hierarchy.root)

    def slurm_cgroups(self) -> tuple[Path, ...]:
        """Return the cgroups in which Slurm keeps its jobs; none where it keeps them in no cgroup.

        Raises:
            Unreadable
        """
        with self._readable():
            return slurm_directories(self.hierarchy.root)

    def pod_cgroups(self, uid: str, kubepods: Collection[Path] | None = None) -> tuple[Path, ...]:
        """Return the pod's own cgroups: one, or more after the kubelet's cgroup driver was changed under running pods.

        Those of a job, if ``uid`` names one.

        Args:
            kubepods: result of :meth:`kubepods`, for a caller that makes several queries in one pass.
        """
        if is_job(uid):
            with self._readable():
                return job_directories(self.hierarchy.root, uid)
        bases = self.kubepods() if kubepods is None else kubepods
        candidates = (path for base in bases for path in pod_directories(base, uid))
        return tuple(path for path in candidates if path.is_dir())

    def stray_containers(self, uid: str, kubepods: Collection[Path] | None = None) -> tuple[Path, ...]:
        """Return containers of the pod that are in none of :meth:`pod_cgroups`; ``kubepods`` as in that method."""
        if is_job(uid):
            return ()
        bases = self.kubepods() if kubepods is None else kubepods
        if not any(path.name.endswith(".slice") for path in bases):
            return ()
        with self._readable():
            return stray_directories(self.hierarchy.root, uid)

    def relative_kubepods(self) -> tuple[str, ...]:
        """Return :meth:`kubepods` as paths relative to the root, without a leading slash.

        Raises:
            Unreadable
        """
        return tuple(path.relative_to(self.hierarchy.root).as_posix() for path in self.kubepods())

    def pod_uid_in(self, cgroups: Mapping[str, str], kubepods: Collection[str] | None = None) -> str | None:
        """Return the UID of the pod, or the name of the job's processes, that a process is in, according to this hierarchy.

        Args:
            cgroups: cgroup paths of the process (:func:`~scrubber.adapters.kernel_text.cgroup_paths`).
            kubepods: result of :meth:`relative_kubepods`, for a caller that checks many processes.
        """
        path = self._path_in(cgroups)
        if path is None:
            return None
        uid = pod_uid_of_path(path, self.relative_kubepods() if kubepods is None else kubepods)
        return uid or job_of_path(path)

    def members(
        self, cgroup: Path, container: str, tally: CgroupTally, *, recursive: bool = True
    ) -> list[Process] | None:
        """Return the living processes of ``cgroup`` (``recursive``: and below it); None when another pass is needed.

        An empty result needs more than a list without living processes: a process that forks and exits, or moves
        between two cgroups below, is missing from lists. It cannot hide from the kernel's count (v2), nor, if it only
        moves, from a pass over every process (v1, which has no such count).

        Raises:
            Unreadable: The cgroup, or a process in it, cannot be inspected.
            TooManyProcesses: There are more processes than ``tally`` allows to be inspected.
        """
        found: list[Process] = []
        lost = threaded = by_process = False
        visited = 0
        for directory in walk_cgroups(cgroup) if recursive else (cgroup,):
            visited += 1
            if recursive and not tally.count_cgroup():
                found, lost, by_process = self._members_by_process(cgroup, container, tally), False, True
                break
            pids = read_cgroup_procs(directory, tally.count_processes)
            threaded = threaded or (pids is None and directory == cgroup)
            if pids is None and not recursive:
                return None  # the ancestor that lists the processes is above the pod: the kubelet creates no pods there
            # A threaded cgroup lists no processes; the nearest ancestor that is not threaded does, and the pod's own
            # cgroup is inspected too.
            for pid in pids or ():
                stat = tally.stat_if_alive(pid)
                if stat is not None:
                    found.append(Process(pid, stat.started, container))
                elif _exists(pid) and self._proc.stat(pid) is None:
                    return None  # the process exists and its /proc entry is not visible to us
                else:
                    lost = True
        if found or threaded:
            return found
        if lost or (recursive and self.version == 2 and is_populated(cgroup)):
            return None
        if self.version == 1 and visited > 1 and not by_process:
            return self._members_by_process(cgroup, container, tally)
        return found

    def _members_by_process(self, cgroup: Path, container: str, tally: CgroupTally) -> list[Process]:
        """Find members by a walk over all processes of the node: slow, but a thousand cgroups do not make it slower."""
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
            Unreadable: It may be inside. A text that cannot be parsed and does not contain the cgroup does not prevent
                an answer.
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
        """Return the path of a process in this hierarchy relative to the root; None for a process outside the root.

        The path above the root contains no information about pods of this node: the node itself may be a container of
        another.
        """
        path = next((path for names, path in cgroups.items() if self._is_named(names)), "")
        prefix = self.hierarchy.path.rstrip("/") + "/"
        if path.startswith(prefix):
            return path[len(prefix) - 1 :]
        return path if PurePosixPath(path).parts[1:2] == ("..",) else None

    def _is_named(self, names: str) -> bool:
        """Whether ``names`` is how ``/proc/PID/cgroup`` names this hierarchy."""
        if self.version == 2:
            return not names
        return not self.hierarchy.controllers.isdisjoint(names.split(","))


def is_populated(cgroup: Path) -> bool | None:
    """Whether a living process is in the cgroup or below it; None when the kernel does not report it (v1)."""
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
    """Return the child cgroups of ``cgroup``; an empty list when it no longer exists."""
    try:
        with os.scandir(cgroup) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise read_error(cgroup, exc) from exc


def walk_cgroups(cgroup: Path) -> Iterator[Path]:
    """Yield ``cgroup`` and all cgroups below it, at any depth. Each path is valid until the next one is requested."""
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
    """Return the PIDs in ``cgroup.procs``; None for a threaded cgroup.

    Args:
        count: called with the PIDs as they are read; an exception it raises aborts the read.

    Raises:
        Unreadable
    """
    pids: list[int] = []
    try:
        for lines in _lines_of(cgroup / "cgroup.procs"):
            part = [number_in(line) for line in lines]
            if 0 in part:
                raise Unreadable(
                    f"{cgroup} contains processes of another PID namespace: run the service in the node's PID "
                    "namespace."
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
    """Yield the lines of ``file`` in batches, one per read: the file may be longer than the caller wants to read."""
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
