"""The walk over ``/proc`` in a child process: the request, the child that serves it, and parsing of the response.

A walk takes long on a full node, and a tenant can try to make it take forever. It therefore runs in a separate child
process (``python -m scrubber.adapters.walker``) that loads no vendor library, has a time budget, and can be killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from scrubber.adapters.children import child
from scrubber.adapters.children.child import Fault
from scrubber.adapters.children.message import Message
from scrubber.adapters.procwalk import (
    Budget,
    ChurningGroup,
    DeviceNodeTarget,
    FileTarget,
    ProcessMatch,
    Reach,
    Target,
    UnfinishedProcess,
    WalkProgress,
    WalkResult,
    walk,
)
from scrubber.domain.errors import Unavailable
from scrubber.domain.telemetry import UninspectedProcess

__all__ = [
    "WALKER_MODULE",
    "WalkReport",
    "Walker",
    "budget_within",
    "parse_walk_report",
    "uninspected_from",
    "walk_request",
]

WALKER_MODULE = "scrubber.adapters.walker"

_LISTS = ("holders", "unreadable", "unfinished", "relays", "counts", "omitted", "partial")
_MILLISECONDS = 1000
_MAX_PID = 2**31 - 1
_POD_SHARE = 0.125
_MAX_TARGETS = 1024
"""Number of targets whose unfinished walks a child remembers: more than the devices of a node."""


class WalkReport(NamedTuple):
    """The result of a walk.

    Attributes:
        holders: see :class:`scrubber.adapters.procwalk.WalkResult`.
        unfinished: processes that could not be inspected completely, so it is unknown whether they hold anything.
        not_covered: messages for a certificate about what could not be inspected.
        holders_omitted: number of further holders, in the groups of the reported ones.
        churning_groups: groups whose processes start and exit faster than they can be inspected.
        omitted_by_part: how many of the further holders hold each part; under 0, how many hold none.
        partial_pids: holders that may hold more, because not all of them may be inspected.
        kinds_omitted: see :class:`scrubber.adapters.procwalk.WalkResult`.
    """

    holders: tuple[ProcessMatch, ...]
    unfinished: tuple[UnfinishedProcess, ...]
    not_covered: tuple[str, ...]
    holders_omitted: int = 0
    churning_groups: tuple[ChurningGroup, ...] = ()
    omitted_by_part: tuple[tuple[int, int], ...] = ()
    partial_pids: tuple[int, ...] = ()
    kinds_omitted: int = 0


def budget_within(deadline: float, per_process: float | None = None) -> Budget:
    """Return a walk budget for a response within ``deadline`` seconds; ``per_process``: seconds for one process."""
    whole = deadline * 0.8
    per_process = whole / 2 if per_process is None else min(per_process, whole)
    return Budget(per_process, whole, min(per_process, whole * _POD_SHARE))


def walk_request(
    target: Target,
    *,
    excluded_pids: Iterable[int] = (),
    requested_pids: Iterable[int] = (),
    budget: Budget | None = None,
    priority_pods: Iterable[str] = (),
    device_numbers: Iterable[int] = (),
    scrub_id: str | None = None,
) -> Message:
    """Return the request for the holders of ``target``; see :func:`scrubber.adapters.procwalk.walk`.

    Args:
        scrub_id: the ID of the requesting scrub: inspections that its earlier walks left unfinished are resumed. None:
            nothing is resumed.
    """
    request: Message = {
        "excluded": sorted(excluded_pids),
        "named": sorted(requested_pids),
        "milliseconds": [int(each * _MILLISECONDS) for each in budget or Budget()],
        "first": sorted(priority_pods),
        "own": sorted(device_numbers),
        "scrub": scrub_id,
    }
    if isinstance(target, FileTarget):
        return {"file": [target.device, *sorted(target.inodes)], **request}
    return {"nodes": sorted(target.numbers), **request}


class Walker:
    """Serves the requests made by :func:`walk_request`; one instance per child process.

    An inspection that a walk left unfinished is resumed by the next walk for the same target and the same scrub. A
    replacement child starts from the beginning.
    """

    def __init__(self, walk: Callable[..., WalkResult] = walk) -> None:
        self._walk = walk
        self._progress: dict[Target, WalkProgress] = {}

    def handle(self, request: Message) -> Message:
        """Return the child's response to ``request``."""
        target = _target(request)
        if target not in self._progress and len(self._progress) >= _MAX_TARGETS:
            self._progress.clear()
        progress = self._progress.setdefault(target, WalkProgress())
        progress.begin(_scrub(request))
        found = self._walk(
            target,
            _numbers(request, "excluded"),
            _numbers(request, "named"),
            _budget(request),
            priority_pods=_texts(request, "first"),
            progress=progress,
            device_numbers=_numbers(request, "own"),
        )
        return {
            "holders": [list(holder) for holder in found.holders],
            "unreadable": [list(row) for row in found.unreadable],
            "unfinished": [[_listed(each) for each in row] for row in found.unfinished],
            "relays": [[_listed(each) for each in row] for row in found.churning_groups],
            "counts": [
                found.unfinished_omitted,
                found.holders_omitted,
                found.missed_count,
                found.resumed_count,
                found.kinds_omitted,
                found.unreadable_omitted,
            ],
            "omitted": [list(row) for row in found.omitted_by_part],
            "partial": list(found.partial_pids),
        }


def parse_walk_report(message: Message) -> WalkReport:
    """Parse a child's response.

    Raises:
        Unavailable: The response is malformed, which is not a fault of the device.
    """
    lists = [message.get(key) for key in _LISTS]
    if not all(isinstance(each, list) for each in lists):
        raise Unavailable("The walk over /proc returned no list of holders.")
    rows, unreadable, unfinished, relayed, counts, omitted, partial = (each for each in lists if isinstance(each, list))
    try:
        holding = tuple(_found(*row) for row in rows)
        cut_short = tuple(_unfinished(*row) for row in unfinished)
        relays = tuple(_churning_group(*row) for row in relayed)
        closed = dict(_integer_pair(*row) for row in unreadable)
        unreported, more, missed, pieces, kinds_omitted, of_other_users = _integers(*counts)
        by_part = tuple(_integer_pair(*row) for row in omitted)
        partial_pids = _integers(*partial)
    except (TypeError, ValueError) as error:
        raise Unavailable("The walk over /proc returned an invalid result.") from error
    messages: list[str] = []
    if closed:
        users = ", ".join(str(uid) for uid in sorted(closed))
        others = " and others" if of_other_users else ""
        number = sum(closed.values()) + of_other_users
        messages.append(f"holders: {number} process(es) of uid {users}{others} could not be inspected")
    if unreported:
        messages.append(f"holders: {unreported} more process(es) than are named could not be fully inspected")
    if missed and not relays:
        messages.append(f"holders: {missed} short-lived process(es) exited before they could be inspected")
    if pieces:
        messages.append(
            f"holders: {pieces} process(es) were inspected in parts, over several walks; descriptors moved "
            "meanwhile are not detected"
        )
    return WalkReport(holding, cut_short, tuple(messages), more, relays, by_part, partial_pids, kinds_omitted)


def uninspected_from(
    unfinished: Iterable[UnfinishedProcess], churning_groups: Iterable[ChurningGroup]
) -> tuple[UninspectedProcess, ...]:
    """Return what a walk could not inspect, in the form used by a report of holders."""
    of_processes = (
        UninspectedProcess(
            each.pid,
            each.started,
            f"{each.name} of uid {each.uid}: {each.reason}",
            confined=each.confined,
            walks=each.walks,
        )
        for each in unfinished
    )
    of_groups = (
        UninspectedProcess(
            0,
            0,
            f"processes of {f'pod {each.pod_uid}' if each.pod_uid else each.group or 'an unknown cgroup'} start and exit "
            "faster than they can be inspected",
            pod_uid=each.pod_uid,
            confined=each.confined,
        )
        for each in churning_groups
    )
    return (*of_processes, *of_groups)


def _found(pid: object, started: object, command: object, hung: object, parts: Iterable[object]) -> ProcessMatch:
    if not isinstance(command, str):
        raise TypeError("A holder's command must be a string.")
    pid_, started_, hung_ = _integers(pid, started, hung)
    _require_pid(pid_)
    return ProcessMatch(pid_, started_, command, bool(hung_), _integers(*parts))


def _unfinished(
    pid: object,
    started: object,
    name: object,
    uid: object,
    why: object,
    parts: Iterable[object],
    reach: object,
    walks: object,
    group: object,
) -> UnfinishedProcess:
    if not isinstance(name, str) or not isinstance(why, str) or not isinstance(group, str):
        raise TypeError("A process must have a name, a reason why it was not fully inspected, and a group.")
    pid_, started_, uid_, walks_ = _integers(pid, started, uid, walks)
    _require_pid(pid_)
    return UnfinishedProcess(pid_, started_, name, uid_, why, _integers(*parts), _reach(reach), walks_, group)


def _churning_group(group: object, pod: object, reach: object) -> ChurningGroup:
    if not isinstance(group, str) or not (pod is None or isinstance(pod, str)):
        raise TypeError("A group must be a string, and a pod a string or null.")
    return ChurningGroup(group, pod, _reach(reach))


def _listed(value: object) -> object:
    """Return ``value`` as JSON can represent it."""
    return sorted(value) if isinstance(value, frozenset) else value


def _reach(numbers: object) -> Reach:
    if numbers is None:
        return None
    if not isinstance(numbers, list):
        raise TypeError("Device numbers that a process could open must be a list, or null.")
    return frozenset(_integers(*numbers))


def _require_pid(pid: int) -> None:
    if not 0 < pid <= _MAX_PID:
        raise ValueError("A PID is a positive number that the kernel can represent.")


def _integer_pair(one: object, other: object) -> tuple[int, int]:
    first, second = _integers(one, other)
    return first, second


def _integers(*numbers: object) -> tuple[int, ...]:
    if not all(isinstance(each, int) and 0 <= each < 1 << 64 for each in numbers):
        raise TypeError("PIDs, start times, users and parts must be numbers of 64 bits, and not negative.")
    return tuple(int(each) for each in numbers if isinstance(each, int))


def _target(question: Message) -> Target:
    if "nodes" in question:
        return DeviceNodeTarget(frozenset(_numbers(question, "nodes")))
    match _numbers(question, "file"):
        case [device, *inodes] if inodes:
            return FileTarget(device, frozenset(inodes))
    raise Fault("unreadable", "Files must be a device number, and at least one inode.")


def _budget(question: Message) -> Budget:
    try:
        each, whole, pod = _numbers(question, "milliseconds")
    except ValueError as error:
        raise Fault(
            "unreadable", "A budget must be three numbers: for a process, for the walk, and for a pod."
        ) from error
    return Budget(each / _MILLISECONDS, whole / _MILLISECONDS, pod / _MILLISECONDS)


def _numbers(question: Message, key: str) -> list[int]:
    found = question.get(key)
    if not isinstance(found, list) or not all(isinstance(each, int) for each in found):
        raise Fault("unreadable", f"A holders request needs a list of numbers under {key!r}.")
    return found


def _texts(question: Message, key: str) -> list[str]:
    found = question.get(key)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise Fault("unreadable", f"A holders request needs a list of strings under {key!r}.")
    return found


def _scrub(question: Message) -> str | None:
    found = question.get("scrub")
    if not (found is None or isinstance(found, str)):
        raise Fault("unreadable", "A holders request needs a scrub's id, or null.")
    return found


def main() -> None:
    child.serve(child.connect_to_parent(), Walker().handle)


if __name__ == "__main__":
    main()
