"""Cgroup names of jobs: from the name of a job's processes to its directories, and from a process to that name.

Slurm keeps a job in ``system.slice/slurmstepd.scope/job_<id>`` (v2; with several slurmd on a node ``<name>_slurmstepd.scope``)
or ``slurm/uid_<uid>/job_<id>`` (v1; ``slurm_<name>``). Source: cgroup_v2.html and cgroups.html of Slurm. ``scrubber run`` keeps
one in ``scrubber.slice/scrubber-run<id>.slice``, a name that systemd and container runtimes take for a slice.

Only root can create a cgroup above the job's own, so no user can forge a path that begins like this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from scrubber.domain.assignment import JobManager
from scrubber.domain.jobs import parse_process_group, process_group

__all__ = ["RUN_SLICE", "is_job", "job_directories", "job_of_path", "run_directory", "slurm_directories"]

RUN_SLICE = "scrubber.slice"

_SCOPE = re.compile(r"(?:.+_)?slurmstepd\.scope")
_SLURM_V1 = re.compile(r"slurm(?:_.+)?")
_USER = re.compile(r"uid_[0-9]+")
_SLURM_JOB = re.compile(r"job_(?P<id>[0-9]{1,32})")
_RUN = re.compile(r"scrubber-run(?P<id>[0-9A-Za-z]{1,32})\.slice")


def is_job(group: str) -> bool:
    """Whether ``group``, in the place of a pod's UID, names the processes of a job."""
    return parse_process_group(group) is not None


def job_directories(root: Path, group: str) -> tuple[Path, ...]:
    """Return the existing cgroups of a job below ``root``, the directory of a hierarchy.

    Raises:
        OSError: a directory cannot be listed.
    """
    named = parse_process_group(group)
    if named is None:
        return ()
    manager, id = named
    if manager is JobManager.RUN:
        candidates = [run_directory(root, id)]
    else:
        parents = (user for path in slurm_directories(root) for user in (path, *_directories(path, _USER.fullmatch)))
        candidates = [parent / f"job_{id}" for parent in parents]
    return tuple(path for path in candidates if path.is_dir())


def run_directory(root: Path, id: str) -> Path:
    """Return the path of the cgroup of the job ``id`` of ``scrubber run``."""
    return root / RUN_SLICE / f"scrubber-run{id}.slice"


def slurm_directories(root: Path) -> tuple[Path, ...]:
    """Return the cgroups below ``root`` in which Slurm keeps jobs; none where Slurm uses no cgroups, or is not running.

    Raises:
        OSError: a directory cannot be listed.
    """
    slices = _directories(root, lambda name: name.endswith(".slice"))
    scopes = (path for each in slices for path in _directories(each, _SCOPE.fullmatch))
    return (*scopes, *_directories(root, _SLURM_V1.fullmatch))


def job_of_path(path: str) -> str | None:
    """Return the name of the job's processes that the cgroup ``path`` belongs to; None when it belongs to no job.

    Args:
        path: relative to the service's root, as in ``/proc/PID/cgroup``.
    """
    parts = path.removesuffix(" (deleted)").strip("/").split("/")
    # A path of another cgroup namespace lacks what it has in common with the service's own, which only root can create.
    shown = [part for part in parts if part != ".."]
    run = _RUN.fullmatch(shown[1]) if len(shown) > 1 and shown[0] == RUN_SLICE else None
    if run is not None:
        return process_group(JobManager.RUN, run["id"])
    if len(shown) < len(parts) and shown and _SCOPE.fullmatch(shown[0]):
        shown = ["", *shown]
    below: list[str] = []
    if (len(shown) > 2 and (shown[0].endswith(".slice") or not shown[0]) and _SCOPE.fullmatch(shown[1])) or (
        len(shown) > 2 and _SLURM_V1.fullmatch(shown[0]) and _USER.fullmatch(shown[1])
    ):
        below = shown[2:]
    job = _SLURM_JOB.fullmatch(below[0]) if below else None
    return None if job is None else process_group(JobManager.SLURM, job["id"])


def _directories(parent: Path, matches: Callable[[str], object]) -> Iterator[Path]:
    try:
        with os.scandir(parent) as entries:
            found = sorted(
                entry.path for entry in entries if matches(entry.name) and entry.is_dir(follow_symlinks=False)
            )
    except (FileNotFoundError, NotADirectoryError):
        return
    yield from map(Path, found)
