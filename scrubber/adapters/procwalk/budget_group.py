"""The cgroup that a process belongs to.

A walk divides its time between groups, so that the processes of one pod take no time from those of another.

Only a pod component created by root counts: below a unit with its own cgroup, or a user session, users choose the
names.
"""

from __future__ import annotations

import errno
import os
import re
from typing import NamedTuple

from scrubber.adapters.kernel_text import cgroup_paths
from scrubber.domain.errors import Unreadable

__all__ = ["BudgetGroup", "budget_group_of", "parse_budget_group", "pod_of_path"]

_LENGTH = 1 << 16
_POD_SLICE = re.compile(r"(?:.+-)?kubepods(?:-(?:burstable|besteffort))?-pod(?P<uid>[0-9A-Za-z_.]+)\.slice")
_POD = re.compile(r"pod(?P<uid>[0-9A-Za-z.-]+)")
_CLASSES = ("burstable", "besteffort")


class BudgetGroup(NamedTuple):
    """The processes that share a part of a walk's time.

    Attributes:
        key: the pod's UID, or the path of the cgroup.
        pod_uid: UID of the pod; None for processes of the node.
    """

    key: str
    pod_uid: str | None


_NODE_GROUP = BudgetGroup("/", None)


def budget_group_of(pid: int) -> BudgetGroup | None:
    """Return the group of ``pid``; None when it has exited, or its group is unknown. See :func:`parse_budget_group`.

    A process that may not be read counts as the node's.
    """
    try:
        descriptor = os.open(f"/proc/{pid}/cgroup", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError:
        return _NODE_GROUP
    try:
        return parse_budget_group(os.read(descriptor, _LENGTH))
    except ProcessLookupError:
        return None
    except OSError as error:
        # Before Linux 6.10 a tenant that nests cgroups until their path is longer than PATH_MAX makes the file unreadable.
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise
    finally:
        os.close(descriptor)


def parse_budget_group(data: bytes) -> BudgetGroup | None:
    """Return the group of a process from the text of its ``/proc/PID/cgroup``.

    None when its group is unknown: where a name contains a line break, which Linux before 5.13 allows, and where the
    process is in two pods. Then it counts neither as a pod's nor as the node's.
    """
    try:
        paths = [os.fsencode(path).decode(errors="replace") for path in cgroup_paths(data).values()]
    except Unreadable:
        return None
    pods = {uid for path in paths if (uid := pod_of_path(path)) is not None}
    if len(pods) > 1:
        return None
    if pods:
        (pod,) = pods
        return BudgetGroup(pod, pod)
    return BudgetGroup(max(paths, key=len, default="/"), None)


def pod_of_path(path: str) -> str | None:
    """Return the UID of the pod in a cgroup path; None when the path has no pod component that root created."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for number, part in enumerate(parts):
        if match := _POD_SLICE.fullmatch(part):
            return match["uid"].replace("_", "-")
        above = parts[number - 1] if number else ""
        if number > 1 and above in _CLASSES:
            above = parts[number - 2]
        if above == "kubepods" and (match := _POD.fullmatch(part)):
            return match["uid"]
        # Only slices, or one plain group, lead to pods. A unit's own cgroup may have any names below it.
        if part == "user.slice" or not (part.endswith(".slice") or number == 0 or part in ("kubepods", *_CLASSES)):
            return None
        if part.endswith((".service", ".scope")):
            return None
    return None
