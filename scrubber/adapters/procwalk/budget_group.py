"""The control group that a process belongs to.

A walk shares its time between groups, so that one pod's processes take no time from another's. The kernel's text is
split at line feeds only: a group's name can hold any other character.

Only a pod component that root has made counts: below a unit with a group of its own, or a user's session, names are free.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

__all__ = ["BudgetGroup", "budget_group_of", "pod_of_path"]

_LENGTH = 1 << 16
_POD_SLICE = re.compile(r"(?:.+-)?kubepods(?:-(?:burstable|besteffort))?-pod(?P<uid>[0-9A-Za-z_.]+)\.slice")
_POD = re.compile(r"pod(?P<uid>[0-9A-Za-z.-]+)")
_CLASSES = ("burstable", "besteffort")


class BudgetGroup(NamedTuple):
    """Those who share a part of a walk's time.

    Attributes:
        key: the pod's UID, or the path of the control group.
        pod_uid: the UID; None for processes of the node.
    """

    key: str
    pod_uid: str | None


_NODE_GROUP = BudgetGroup("/", None)


def budget_group_of(pid: int) -> BudgetGroup | None:
    """The group of ``pid``; None when it is gone. One that this user may not know is the node's."""
    try:
        descriptor = os.open(f"/proc/{pid}/cgroup", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError:
        return _NODE_GROUP
    try:
        data = os.read(descriptor, _LENGTH)
    except ProcessLookupError:
        return None
    finally:
        os.close(descriptor)
    paths = [line.split(b":", 2)[2].decode(errors="replace") for line in data.split(b"\n") if line.count(b":") > 1]
    pods = {uid for path in paths if (uid := pod_of_path(path)) is not None}
    if len(pods) == 1:
        (pod,) = pods
        return BudgetGroup(pod, pod)
    return BudgetGroup(max(paths, key=len, default="/"), None)


def pod_of_path(path: str) -> str | None:
    """UID of the pod that a control group's path leads into; None when root has made no pod's component in it."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for number, part in enumerate(parts):
        if match := _POD_SLICE.fullmatch(part):
            return match["uid"].replace("_", "-")
        above = parts[number - 1] if number else ""
        if number > 1 and above in _CLASSES:
            above = parts[number - 2]
        if above == "kubepods" and (match := _POD.fullmatch(part)):
            return match["uid"]
        # What leads to pods is slices, or one plain group. A unit's own group may have anything below it.
        if part == "user.slice" or not (part.endswith(".slice") or number == 0 or part in ("kubepods", *_CLASSES)):
            return None
        if part.endswith((".service", ".scope")):
            return None
    return None
