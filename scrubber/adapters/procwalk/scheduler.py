"""Scheduling of a walk over all processes in ``/proc``: quick processes first, and no process uses all of the time.

A tenant can make the scan of one of its processes long (descriptors, mappings, threads) or endless (a memory map that
is kept locked). So each process first gets a short time slice. Those that need more are scanned again,
with more time each, once all processes had their first slice: first those that the caller requested, those of the pods
that had the device and those of the node; then the other pods, each within a separate budget. A scan that never returns
is abandoned together with its thread. A process whose scan is incomplete is in the result by PID: that is never treated
as holding nothing.

An interrupted scan is resumed by the next walk of the same scrub (:class:`WalkProgress`), where it stopped. This proves
that every descriptor table of a process was inspected once, position by position, and every mapping. Every walk begins
with a quick scan of each process, from its first descriptor, so that each walk scans the quick processes again. The
processes of a group that no single walk completes are scanned in pieces, over seconds. A descriptor that is moved from
a position not inspected yet to one already inspected, or passed on between two processes of such a group, is therefore
not seen. The result contains the number of these processes.

Short-lived processes: a list of ``/proc`` is valid only for the moment in which it is read. A process that ends before
it is inspected may have left its descriptors to a child, which is in the next list. So lists are read until they
contain no new process that ended before it was inspected. If each of many lists contains such a process, and the same
group produced one of them each time, that is a relay: it may carry the target along, and the result names the group. A
process of the node whose parent is alive and was inspected is no part of a relay: what it had at its start it inherited
from that parent. This is never assumed of a process in a pod, because the kernel reports the process that adopted an
orphan as its parent.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scrubber.adapters.kernel_text import fields_in, number_in
from scrubber.adapters.procwalk.budget_group import BudgetGroup, budget_group_of
from scrubber.adapters.procwalk.confinement import Confinement, Reach
from scrubber.adapters.procwalk.match import Target
from scrubber.adapters.procwalk.process import (
    NonMatchingFiles,
    ProcessMatch,
    ProcessScan,
    ScanPosition,
    live_start_time,
    process_name,
    read_stat,
    start_time,
    user_process_start_time,
)

__all__ = ["Budget", "ChurningGroup", "UnfinishedProcess", "WalkProgress", "WalkResult", "walk"]

_FIRST_SLICE = 0.002
"""Seconds for each process in the first round; in the following rounds, an equal share of the remaining walk time."""
_FIRST_SHARE = 0.1
"""Fraction of a pod's budget that its processes may use in the first round."""
_LOW_PRIORITY_SHARE = 0.25
"""Fraction of the walk that all pods that did not have the device may use together in the first round."""
_HANG_TIMEOUT = 1.0
"""Seconds after the end of its slice within which a scan returns, unless it is blocked in the kernel."""
_POLL_INTERVAL = 0.1
_MAX_HUNG, _MAX_HUNG_PER_POD, _MAX_HUNG_ALL_PODS = 16, 4, 64
"""Limits on hung scans, beyond which no more of the processes concerned are scanned.

In this order: processes of the node, or of one pod that had the device; processes of one other pod; processes of all
pods together, beyond which pods that did not have the device are no longer scanned.
"""
_MAX_LISTS = 16
_COMPLETE_LISTS_NEEDED = 2
_NO_START_TIME = -1
_SAMPLES = 32
"""How often the newest process is sampled after a list in which one was missed, to determine its group."""
_CHURN_LIST_RATIO = 4
"""If at least one list in this many contains a group, lists with unknown groups are attributed to it, too."""
_MAX_PASSES = 4
_Kind = tuple[str, tuple[int, ...], Reach]
"""Group of a process, the parts of the target that it holds, and what it could open."""

_MAX_REPORTED = 400
_MAX_REPORTED_REQUESTED = 2000
_MAX_FULL_COMMANDS, _SHORT_COMMAND_LENGTH = 64, 16
_MAX_NAMED = 400
"""Number of holders with a full command, length of the other commands, and number of processes with any command or name.

A response is at most a megabyte.
"""
_GROUP_LENGTH = 64
_MAX_CHURNING, _CHURNING_GROUP_LENGTH = 128, 200
"""Number of churning groups to name, and length of a name: users who may create cgroups choose both."""
_MAX_USERS = 32
"""Number of users to list of processes that may not be inspected: a tenant may run processes of any number of users."""
_LOADAVG_LENGTH = 256


# See docs/decisions/0017-budgeted-process-walk.md.
class Budget(NamedTuple):
    """Seconds: for one process, for the whole walk, and for all processes of a pod that did not have the device."""

    per_process: float = 4.0
    total: float = 8.0
    per_pod: float = 1.0


class UnfinishedProcess(NamedTuple):
    """A process that was not scanned completely: it may hold the target, or more of it than ``parts``.

    Attributes:
        started: start time in clock ticks since boot; 0 when this user may not read it.
        name: the short name that the kernel stores.
        reason: why the scan is incomplete, as a clause of a message for the operator.
        reach: device numbers that it could open on its own (:mod:`scrubber.adapters.procwalk.confinement`).
        walks: number of consecutive walks that did not complete its group, including this one.
        group: the end of its group's key; empty when the group could not be determined.
    """

    pid: int
    started: int
    name: str
    uid: int
    reason: str
    parts: tuple[int, ...] = ()
    reach: Reach = None
    walks: int = 1
    group: str = ""

    @property
    def confined(self) -> bool:
        """Whether it showed no sign that it could open the device on its own."""
        return self.reach == frozenset()


class ChurningGroup(NamedTuple):
    """A group with such short-lived processes that every list had one that ended before it was inspected.

    Attributes:
        group: the end of the path of its cgroup, or the pod's UID; empty when it could not be determined, or for all
            groups beyond the number that is named.
        pod_uid: the UID, if it is a pod.
        reach: device numbers that those of its processes that could be checked could open on their own; None if no
            short-lived one could be checked.
    """

    group: str
    pod_uid: str | None
    reach: Reach = None

    @property
    def confined(self) -> bool:
        """Whether none of its processes showed a sign that it could open the device on its own."""
        return self.reach == frozenset()


class WalkResult(NamedTuple):
    """The result of a walk.

    Attributes:
        holders: processes that hold a part of the target, and those requested by PID.
        unreadable: number of processes, by user, that may not be inspected at all or not completely; of the users with
            most of them.
        unreadable_omitted: number of such processes of all other users.
        unfinished: processes that were not scanned completely. Those found to hold the target nevertheless are also in
            ``holders``.
        unfinished_omitted: number of further such processes. At least one of each kind (group, parts found, reach) is
            reported where there is room, those of the node first.
        holders_omitted: number of further holders. At least one of each group is reported, and all requested ones.
        omitted_by_part: how many of them hold each part; under 0, how many hold none.
        churning_groups: groups that could not be scanned completely because their processes start and exit.
        partial_pids: processes in ``holders`` that may hold more, because this user may not inspect all of them.
        kinds_omitted: number of kinds of unfinished processes of which none is reported.
        missed_count: number of processes that ended before they were inspected, when no list was without one.
        resumed_count: number of processes that were scanned in pieces, by several walks.
    """

    holders: tuple[ProcessMatch, ...]
    unreadable: tuple[tuple[int, int], ...]
    unfinished: tuple[UnfinishedProcess, ...] = ()
    unfinished_omitted: int = 0
    holders_omitted: int = 0
    churning_groups: tuple[ChurningGroup, ...] = ()
    missed_count: int = 0
    resumed_count: int = 0
    omitted_by_part: tuple[tuple[int, int], ...] = ()
    partial_pids: tuple[int, ...] = ()
    kinds_omitted: int = 0
    unreadable_omitted: int = 0


@dataclass(slots=True)
class _GroupProgress:
    """Consecutive walks that did not complete one group.

    Attributes:
        walks: number of walks.
        completed: processes that were scanned completely and hold nothing: start time by PID.
        positions: positions of interrupted scans by PID.
        resumed: PIDs of processes whose complete scan took more than one walk.
    """

    walks: int = 0
    completed: dict[int, int] = field(default_factory=dict)
    positions: dict[int, ScanPosition] = field(default_factory=dict)
    resumed: set[int] = field(default_factory=set)


class WalkProgress:
    """Progress of walks for one target in the groups that take long. Pass it to consecutive walks."""

    def __init__(self) -> None:
        self.groups: dict[str, _GroupProgress] = {}
        self._scrub_id: str | None = None

    def begin(self, scrub_id: str | None) -> None:
        """Begin a walk of ``scrub_id`` (None: of no scrub); drop positions from another scrub, as they may be outdated.

        The number of consecutive walks that did not complete a group is kept.
        """
        if scrub_id is None or scrub_id != self._scrub_id:
            self.groups = {key: _GroupProgress(each.walks) for key, each in self.groups.items()}
        self._scrub_id = scrub_id


_DEFAULT = Budget()


def walk(
    target: Target,
    excluded_pids: Iterable[int] = (),
    requested_pids: Iterable[int] = (),
    budget: Budget = _DEFAULT,
    clock: Callable[[], float] = time.monotonic,
    *,
    priority_pods: Iterable[str] = (),
    progress: WalkProgress | None = None,
    budget_group: Callable[[int], BudgetGroup | None] = budget_group_of,
    device_numbers: Iterable[int] = (),
) -> WalkResult:
    """Return every process except ``excluded_pids`` that has the target open or mapped, in any of its threads.

    Args:
        requested_pids: PIDs that are included even when they hold nothing that a walk can see. Those that have exited,
            or are zombies without a living thread, are omitted.
        clock: returns seconds.
        priority_pods: UIDs of pods that had the device: no per-pod budget limits them, and they are scanned before all
            other pods.
        progress: progress of the previous walk for the same target, in the same scrub (:meth:`WalkProgress.begin`).
        budget_group: returns the group of a process; None when it has exited.
        device_numbers: numbers of the nodes that give access to the device, if there are others than those of the
            target; used for ``reach``.
    """
    rounds = _Scheduler(
        target,
        frozenset(excluded_pids),
        frozenset(requested_pids),
        budget,
        clock,
        frozenset(priority_pods),
        progress or WalkProgress(),
        budget_group,
        Confinement(target, frozenset(device_numbers)),
    )
    rounds.walk()
    return rounds.result()


_hung_scans: dict[int, tuple[int, threading.Thread, str | None]] = {}
"""By PID: start time of a process whose scan hangs, the thread abandoned with the scan, and the pod.

The process is not scanned again until that thread returns, so that it costs one thread no matter how many walks are
made.
"""


class _Scheduler:
    """One walk. One thread scans; another one replaces it when a scan does not return."""

    def __init__(
        self,
        target: Target,
        excluded: frozenset[int],
        named: frozenset[int],
        budget: Budget,
        clock: Callable[[], float],
        first: frozenset[str],
        progress: WalkProgress,
        group: Callable[[int], BudgetGroup | None],
        confinement: Confinement,
    ) -> None:
        self._target = target
        self._requested = named - excluded
        self._excluded = excluded
        self._known_pids = set(excluded | named)
        self._budget = budget
        self._clock = clock
        self._end = clock() + budget.total
        self._priority_pods = first
        self._group_progress = progress.groups
        self._group = group
        self._confinement = confinement
        self._groups: dict[int, BudgetGroup] = {}
        self._parents: dict[int, int | None] = {}
        self._time_used: defaultdict[str | None, float] = defaultdict(float)
        """Seconds used by each pod."""
        self._low_priority_time_used = 0.0
        self._exited_pids: set[int] = set()
        """Processes that ended before their scan was complete, since this was last cleared."""
        self._exited_start_times: dict[int, int] = {}
        """Start times of processes that have ended, and may remain in lists until their parents reap them."""
        self._churning: tuple[ChurningGroup, ...] = ()
        self._missed = 0
        self._lists_ended = False
        """Whether the lists were exhausted without one that had no missed new process."""
        self._non_matching_files: NonMatchingFiles = set()
        self._matches: dict[int, ProcessMatch] = {}
        self._denied_uids: dict[int, int] = {}
        self._partial_pids: set[int] = set()
        """Processes that hold a part of the target, and that this user may not inspect completely."""
        self._completed: dict[int, int] = {}
        """Start times of processes that were scanned completely and hold nothing."""
        self._positions: dict[int, ScanPosition] = {
            pid: at for each in self._group_progress.values() for pid, at in each.positions.items()
        }
        self._begun_pids: set[int] = set()
        """Processes that were scanned from the beginning in this walk."""
        self._rescan_pids: list[int] = []
        self._incomplete: dict[int, tuple[str, tuple[int, ...]]] = {}
        """Why the scan of a process is incomplete so far, and the parts found in it."""
        self._steps = self._schedule()
        self._lock = threading.Lock()
        """Protects the attributes below; also held while a result is recorded."""
        self._scanner: threading.Thread | None = None
        self._scan: ProcessScan | None = None
        self._scan_began = 0.0
        self._scan_due = 0.0
        self._last_checked = 0.0
        """Time of the last check whether the scan has returned."""
        self._error: Exception | None = None

    def walk(self) -> None:
        """Scan all processes."""
        while self._error is None and self._wait_or_leave_behind(self._start_scanner()):
            pass
        if self._error is not None:
            raise self._error

    def result(self) -> WalkResult:
        """Return the result of the walk; call this once."""
        rows = [row for row in map(self._unfinished, self._incomplete) if row is not None]
        rows, pieces = self._update_progress(rows)
        rows.sort(key=self._urgency)
        reach = {row.pid: row.reach for row in rows}
        reported = self._select_reported([row.pid for row in rows], reach)
        kinds_omitted = {self._kind(pid, reach) for pid in reach} - {self._kind(pid, reach) for pid in reported}
        holders = self._select_reported(sorted(self._matches), {})
        omitted = self._matches.keys() - holders
        denied = sorted(Counter(self._denied_uids.values()).items(), key=lambda row: (-row[1], row[0]))
        return WalkResult(
            tuple(self._shortened(pid, number) for number, pid in enumerate(sorted(holders))),
            tuple(sorted(denied[:_MAX_USERS])),
            tuple(
                row if number < _MAX_NAMED else row._replace(name="")
                for number, row in enumerate(row for row in rows if row.pid in reported)
            ),
            len(rows) - len(reported),
            len(omitted),
            _bounded(self._churning),
            self._missed if self._lists_ended else 0,
            pieces,
            tuple(sorted(Counter(part for pid in omitted for part in self._matches[pid].parts or (0,)).items())),
            tuple(sorted(self._partial_pids & holders)),
            len(kinds_omitted),
            sum(number for _, number in denied[_MAX_USERS:]),
        )

    def _urgency(self, row: UnfinishedProcess) -> tuple[bool, bool, bool, int]:
        """Return a sort key: requested processes first, then those that may keep the device from being scrubbed."""
        of_a_pod = self._pod_of(row.pid) is not None
        return (row.pid not in self._requested, of_a_pod and row.confined, of_a_pod, row.pid)

    def _select_reported(self, pids: Sequence[int], reach: Mapping[int, Reach]) -> set[int]:
        """Return the PIDs to report: one of each group, then another of each group; requested ones in any case.

        Processes of one group that hold different parts, or could open different devices, count as several groups.
        """
        turns: Counter[_Kind] = Counter()
        ranked: list[tuple[int, int, int]] = []
        for number, pid in enumerate(pids):
            kind = self._kind(pid, reach)
            turns[kind] += pid not in self._requested
            ranked.append((turns[kind] if pid not in self._requested else 0, number, pid))
        most = _MAX_REPORTED + sum(pid in self._requested for pid in pids)
        return {pid for _, _, pid in sorted(ranked)[: min(most, _MAX_REPORTED_REQUESTED)]}

    def _kind(self, pid: int, reach: Mapping[int, Reach]) -> _Kind:
        group, found = self._groups.get(pid), self._matches.get(pid)
        return ("" if group is None else group.key, () if found is None else found.parts, reach.get(pid))

    def _shortened(self, pid: int, number: int) -> ProcessMatch:
        found = self._matches[pid]
        if number < _MAX_FULL_COMMANDS:
            return found
        return found._replace(command=found.command[:_SHORT_COMMAND_LENGTH] if number < _MAX_NAMED else "")

    def _update_progress(self, rows: list[UnfinishedProcess]) -> tuple[list[UnfinishedProcess], int]:
        """Return ``rows`` that no walk of their series completed, and how many processes were scanned in pieces."""
        pieces, left = 0, list[UnfinishedProcess]()
        of_groups: dict[str, list[UnfinishedProcess]] = {}
        for row in rows:
            group = self._groups.get(row.pid)
            series = None if group is None else self._group_progress.get(group.key)
            if series is not None and series.completed.get(row.pid) == row.started:
                series.resumed.add(row.pid)
            else:
                key = "" if group is None else group.key
                of_groups.setdefault(key, []).append(row._replace(group=key[-_GROUP_LENGTH:]))
        for key in self._group_progress.keys() - of_groups.keys():
            pieces += len(self._group_progress.pop(key).resumed)
        for key, unfinished in of_groups.items():
            series = self._group_progress.setdefault(key, _GroupProgress())
            series.walks += 1
            series.positions = {row.pid: self._positions[row.pid] for row in unfinished if row.pid in self._positions}
            left += [row._replace(walks=series.walks) for row in unfinished]
        for pid, started in self._completed.items():
            group = self._groups.get(pid)
            if group is not None and group.key in of_groups:
                self._group_progress[group.key].completed[pid] = started
        return left, pieces

    # --- selection of processes

    def _new_pids(self) -> list[int]:
        """Return processes that were in no list before, most urgent first. PIDs of ended processes may be reused."""
        listed = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        fresh = [
            pid
            for pid in listed
            if pid not in self._known_pids
            or self._exited_start_times.get(pid, _NO_START_TIME) not in (_NO_START_TIME, _start_time(pid))
        ]
        self._known_pids.update(fresh)
        for pid in reversed(fresh):  # the newest may be the first to end
            self._record_group(pid)
        return sorted(fresh, key=self._priority)

    def _record_group(self, pid: int) -> None:
        found = self._group(pid)
        if found is not None:
            self._groups[pid] = found
            self._parents[pid] = _parent_pid(pid)

    def _inherited_nothing(self, parent: int | None, group: BudgetGroup | None) -> bool:
        """Whether a process of ``group`` has its descriptors from a living, inspected ``parent`` that held nothing.

        Always false in a pod. The kernel reports the process that adopted an orphan as its parent, and a tenant chooses
        which one that is (PID 1 of its container, or a subreaper): each link of a relay would look like a child of an
        idle process.
        """
        if parent in self._excluded:
            return True
        if parent is None or group is None or group.pod_uid is not None:
            return False
        return parent in self._completed and _start_time(parent) == self._completed[parent]

    def _pod_of(self, pid: int) -> str | None:
        found = self._groups.get(pid)
        return None if found is None else found.pod_uid

    def _is_low_priority(self, pid: int) -> bool:
        """Whether it is in a pod that did not have the device: such pods share the remaining time of the walk."""
        pod = self._pod_of(pid)
        return pod is not None and pod not in self._priority_pods and pid not in self._requested

    def _priority(self, pid: int) -> tuple[bool, str, bool, int]:
        group = self._groups.get(pid)
        series = None if group is None else self._group_progress.get(group.key)
        late = self._is_low_priority(pid)
        return (late, self._pod_of(pid) or "" if late else "", series is not None and pid in series.completed, pid)

    def _schedule(self) -> Iterator[tuple[int, float]]:
        """Yield the next process to scan, and for how many seconds."""
        moment = min(_FIRST_SLICE, self._budget.per_process)
        for pid in sorted(self._requested):
            self._record_group(pid)
            yield pid, moment
        because: set[BudgetGroup | None] = {None}
        always: set[BudgetGroup | None] | None = None
        gone: set[int] = set()
        for _ in range(_MAX_PASSES):
            yield from self._scan_lists(moment, because)
            self._exited_pids.clear()
            yield from self._rescan(moment)
            # Processes that ended after an incomplete scan, or without one, may have left descriptors to a child: list
            # again.
            gone = self._exited_pids | self._select_ended(self._incomplete)
            for pid in gone:
                self._incomplete.pop(pid, None)
            because = {self._groups.get(pid) for pid in gone}
            always = because if always is None else always & because
            if not gone:
                return
        self._missed, self._lists_ended = self._missed + len(gone), True
        self._add_churning(map(self._churning_group, always or ()))

    def _scan_lists(self, moment: float, because: Iterable[BudgetGroup | None]) -> Iterator[tuple[int, float]]:
        """Yield the processes in lists of ``/proc``, until two in a row have no new one that ended before its scan.

        Two, because a list is ordered by PID and misses a process whose PID precedes the part still to be read, as when
        the kernel wraps around to low PIDs.

        Args:
            because: groups because of which the lists are read; they are reported if there is no time to read the lists
                to the end.
        """
        missed: list[Counter[BudgetGroup | None]] = []
        complete = 0
        for number in range(_MAX_LISTS):
            fresh = self._new_pids()
            self._exited_pids.clear()
            for pid in fresh:
                yield pid, min(moment, self._first_share(pid)) if self._is_low_priority(pid) else moment
            self._exited_pids |= self._select_ended(pid for pid in fresh if pid in self._incomplete)
            if not number:  # children of processes that ended during the long first list are in the second
                continue
            if fresh and self._clock() >= self._end:
                self._add_churning(map(self._churning_group, because))
                return
            complete = 0 if self._exited_pids else complete + 1
            if complete == _COMPLETE_LISTS_NEEDED:
                return
            self._missed += len(self._exited_pids)
            missed.append(
                self._groups_of_missed(
                    pid
                    for pid in self._exited_pids
                    if not self._inherited_nothing(self._parents.get(pid), self._groups.get(pid))
                )
            )
        self._lists_ended = True
        self._add_churning(map(self._churning_group, _find_churning_groups(missed)))

    def _select_ended(self, pids: Iterable[int]) -> set[int]:
        return {pid for pid in pids if not _is_alive(pid)}

    def _add_churning(self, found: Iterable[ChurningGroup]) -> None:
        self._churning = tuple(sorted({*self._churning, *found}, key=lambda each: each.group))

    def _churning_group(self, group: BudgetGroup | None) -> ChurningGroup:
        if group is None:
            return ChurningGroup("", None)
        return ChurningGroup(*group, self._reach_of_group(group))

    def _reach_of_group(self, group: BudgetGroup) -> Reach:
        """Return what the checkable processes of ``group`` could open; None if none just created could be checked."""
        if group.pod_uid is None:
            return None
        seen = [pid for pid, its in list(self._groups.items()) if its == group]
        reach, judged = set[int](), 0
        for pid in seen:
            if _is_alive(pid):
                of_process = self._reach_while_alive(pid, group)
                if of_process is None:
                    return None
                reach |= of_process
        for _ in range(_SAMPLES):
            newest = _newest_pid()
            if newest in seen or self._group(newest) != group:
                continue
            of_process = self._reach_while_alive(newest, group)
            if of_process is None:
                return None
            reach |= of_process
            judged += _is_alive(newest)
        return frozenset(reach) if judged else None

    def _reach_while_alive(self, pid: int, group: BudgetGroup) -> Reach:
        """Return what a process could open; nothing for one that has ended before that was determined."""
        reach = self._confinement.reach(pid, group.key)
        return frozenset() if reach is None and not _is_alive(pid) else reach

    def _first_share(self, pid: int) -> float:
        """Return the seconds of the first round left for a process of a pod that did not have the device."""
        of_pod = self._budget.per_pod * _FIRST_SHARE - self._time_used[self._pod_of(pid)]
        return min(of_pod, self._budget.total * _LOW_PRIORITY_SHARE - self._low_priority_time_used)

    def _rescan(self, moment: float) -> Iterator[tuple[int, float]]:
        quick, late = moment, [pid for pid in self._rescan_pids if self._is_low_priority(pid)]
        queue, self._rescan_pids = [pid for pid in self._rescan_pids if not self._is_low_priority(pid)], []
        while queue:
            share = min(self._budget.per_process, (self._end - self._clock()) / len(queue))
            if share <= moment:
                break
            moment = share
            for pid in queue:
                yield pid, moment
            queue, self._rescan_pids = self._rescan_pids, []
        share = min(
            self._budget.per_pod, (self._end - self._clock()) / max(1, len({self._pod_of(pid) for pid in late}))
        )
        for pid in sorted(late, key=self._priority):
            left = share - self._time_used[self._pod_of(pid)]
            if pid not in self._begun_pids:
                yield pid, min(quick, left)
                left = share - self._time_used[self._pod_of(pid)]
            if pid in self._incomplete and pid in self._begun_pids:
                yield pid, min(self._budget.per_process, left)
        self._rescan_pids = []

    def _groups_of_missed(self, gone: Iterable[int]) -> Counter[BudgetGroup | None]:
        """Return the groups of the processes missed in a list; None: of one whose group is unknown.

        A process that has ended cannot be queried. So the newest process is sampled repeatedly: if a group creates one
        after the other, some of them are caught.
        """
        groups = Counter(self._groups.get(pid) for pid in gone)
        if None in groups:
            caught: dict[int, BudgetGroup | None] = {}
            for _ in range(_SAMPLES):
                newest = _newest_pid()
                if newest in self._known_pids:
                    continue
                parent, group = _parent_pid(newest), self._group(newest)
                if not self._inherited_nothing(parent, group):
                    caught[newest] = group
            groups += Counter({group for pid, group in caught.items() if group and not _is_alive(pid)})
        return groups

    # --- scanning

    def _start_scanner(self) -> threading.Thread:
        self._last_checked = time.monotonic()
        self._scanner = threading.Thread(target=self._run_scanner, daemon=True)
        self._scanner.start()
        return self._scanner

    def _wait_or_leave_behind(self, looker: threading.Thread) -> bool:
        """Wait for ``looker``; False when it has ended, True when its scan hangs and it is abandoned.

        If this whole process was stalled, so was ``looker``: that time is granted again.
        """
        while looker.is_alive():
            looker.join(_POLL_INTERVAL)
            with self._lock:
                now = time.monotonic()
                self._scan_due += max(0.0, now - self._last_checked - 2 * _POLL_INTERVAL)
                self._last_checked = now
                if self._scan is not None and now > self._scan_due:
                    self._leave_behind(looker, self._scan)
                    return True
        return False

    def _leave_behind(self, looker: threading.Thread, scan: ProcessScan) -> None:
        pid = scan.pid
        _hung_scans[pid] = (scan.started or 0, looker, self._pod_of(pid))
        self._incomplete[pid] = (f"the scan of its {scan.phase} has not returned from the kernel", tuple(scan.parts))
        self._charge_pod(pid)
        self._scanner = self._scan = None

    def _charge_pod(self, pid: int) -> None:
        """Charge the time of a scan that has ended, or was abandoned, to its pod."""
        elapsed = self._clock() - self._scan_began
        self._time_used[self._pod_of(pid)] += elapsed
        self._low_priority_time_used += elapsed if self._is_low_priority(pid) else 0.0

    def _too_many_hung(self, pid: int) -> bool:
        """Whether so many scans of its pod's, or the node's, processes hang that no more of them are scanned."""
        if not _hung_scans:
            return False
        hanging = Counter(pod for _, thread, pod in _hung_scans.values() if thread.is_alive())
        if not self._is_low_priority(pid):
            return hanging[self._pod_of(pid)] >= _MAX_HUNG
        return hanging[self._pod_of(pid)] >= _MAX_HUNG_PER_POD or hanging.total() - hanging[None] >= _MAX_HUNG_ALL_PODS

    def _run_scanner(self) -> None:
        """Run scans in a thread, until none is left or the thread was abandoned."""
        me = threading.current_thread()
        try:
            while (scan := self._take_scan(me)) is not None:
                try:
                    found = scan.run(always=scan.pid in self._requested)
                except PermissionError:  # not even its state may be read
                    found, scan.permission_denied = None, True
                self._record(me, scan, found)
        except Exception as error:  # noqa: BLE001 - raised again in the caller of the walk
            with self._lock:
                if self._scanner is me:
                    self._error = error

    def _take_scan(self, me: threading.Thread) -> ProcessScan | None:
        """Return the next scan; None when there is none, or when ``me`` was abandoned."""
        with self._lock:
            self._scan = self._next_scan() if self._scanner is me else self._scan
            return self._scan if self._scanner is me else None

    def _next_scan(self) -> ProcessScan | None:
        for pid, moment in self._steps:
            now = self._clock()
            if now >= self._end:
                self._incomplete.setdefault(pid, (f"it was not reached within the walk's {self._budget.total:g} s", ()))
            elif moment <= 0 and self._is_low_priority(pid):
                self._incomplete.setdefault(pid, ("its pod's share of the walk was used up before it was reached", ()))
                self._rescan_pids.append(pid)
            elif _is_still_hung(pid):
                self._incomplete[pid] = ("an earlier scan of it has not returned from the kernel", ())
            elif self._too_many_hung(pid):
                self._incomplete[pid] = ("too many scans of similar processes have not returned from the kernel", ())
            else:
                self._scan_due = time.monotonic() + moment + _HANG_TIMEOUT
                self._scan_began = now
                late = _past_deadline(self._clock, min(now + moment, self._end))
                start = self._positions.get(pid) if pid in self._begun_pids else None
                self._begun_pids.add(pid)
                return ProcessScan(pid, self._target, self._non_matching_files, late, start)
        return None

    def _record(self, me: threading.Thread, scan: ProcessScan, found: ProcessMatch | None) -> None:
        with self._lock:
            if self._scanner is not me:  # it returned after all; its process is reported as not scanned completely
                return
            self._scan = None
            self._record_result(scan, found)

    def _record_result(self, scan: ProcessScan, found: ProcessMatch | None) -> None:
        pid = scan.pid
        resumed, before = scan.is_resumed, self._positions.pop(pid, None)
        for earlier in (self._matches, self._incomplete, self._denied_uids):
            earlier.pop(pid, None)
        self._partial_pids.discard(pid)
        self._charge_pod(pid)
        if found is not None:
            self._matches[pid] = found
        if scan.has_exited:
            self._exited_pids.add(pid)
            if scan.started is None:
                self._known_pids.discard(pid)
            else:
                self._exited_start_times[pid] = scan.started
        elif scan.interrupted_in is not None:
            self._positions[pid] = scan.position if before is None else before.furthest(scan.position)
            self._incomplete[pid] = (f"there was no time to scan its {scan.interrupted_in}", tuple(scan.parts))
            if not self._is_completed(scan):
                self._rescan_pids.append(pid)
        elif not scan.parts and scan.started is not None:
            self._completed[pid] = scan.started
            self._record_resumed(pid, before if resumed else None)
        if scan.permission_denied and scan.parts:
            self._partial_pids.add(pid)
        elif scan.permission_denied and (uid := _uid_of(scan.pid)) is not None:
            self._denied_uids[scan.pid] = uid

    def _is_completed(self, scan: ProcessScan) -> bool:
        """Whether an earlier walk of its group's series has scanned it completely."""
        group = self._groups.get(scan.pid)
        series = None if group is None else self._group_progress.get(group.key)
        return series is not None and series.completed.get(scan.pid) == scan.started

    def _record_resumed(self, pid: int, before: ScanPosition | None) -> None:
        group = self._groups.get(pid)
        series = None if group is None else self._group_progress.get(group.key)
        if series is not None and before is not None and series.positions.get(pid, before).started == before.started:
            series.resumed.add(pid)

    def _reach(self, pid: int) -> Reach:
        group = self._groups.get(pid)
        return self._confinement.reach(pid, "" if group is None else group.key)

    def _unfinished(self, pid: int) -> UnfinishedProcess | None:
        """Return None for a process that has exited meanwhile, or a kernel thread."""
        try:
            started = user_process_start_time(pid)
        except PermissionError:
            started = 0
        uid = _uid_of(pid)
        if started is None or uid is None:
            return None
        why, parts = self._incomplete[pid]
        return UnfinishedProcess(pid, started, process_name(pid), uid, why, tuple(sorted(parts)), self._reach(pid))


def _bounded(groups: Iterable[ChurningGroup]) -> tuple[ChurningGroup, ...]:
    """Return ``groups`` with short names, those of pods first; one without a name, that may hold anything, for others."""
    ranked = sorted(groups, key=lambda each: (each.pod_uid is None, each.group))
    named = tuple(each._replace(group=each.group[-_CHURNING_GROUP_LENGTH:]) for each in ranked[:_MAX_CHURNING])
    return (*named, ChurningGroup("", None)) if len(ranked) > _MAX_CHURNING else named


def _find_churning_groups(missed: Sequence[Counter[BudgetGroup | None]]) -> tuple[BudgetGroup | None, ...]:
    """Return groups that had a process in every list that ended before it was inspected.

    If none is known to have had one in every list, groups that may have had one count: the group of a missed process is
    not always known.
    """
    groups = {group for each in missed for group in each if group is not None}
    always = {group for group in groups if all(group in each for each in missed)}
    maybe = {
        group
        for group in groups
        if sum(group in each for each in missed) * _CHURN_LIST_RATIO >= len(missed)
        and all(group in each or None in each for each in missed)
    }
    named = always or maybe
    if not named and missed and all(None in each for each in missed):
        return (None,)
    return tuple(named)


def _newest_pid() -> int:
    """Return the PID of the process, or thread, that was created last on this node."""
    with open("/proc/loadavg", "rb") as file:
        return number_in(fields_in(file.read(_LOADAVG_LENGTH).removesuffix(b"\n"))[-1])


def _start_time(pid: int) -> int | None:
    try:
        return start_time(pid)
    except PermissionError:
        return None


def _parent_pid(pid: int) -> int | None:
    try:
        stat = read_stat(f"/proc/{pid}/stat")
    except PermissionError:
        return None
    return None if stat is None else stat.parent


def _is_alive(pid: int) -> bool:
    try:
        return live_start_time(pid) is not None
    except PermissionError:
        return True


def _past_deadline(clock: Callable[[], float], end: float) -> Callable[[], bool]:
    return lambda: clock() > end


def _is_still_hung(pid: int) -> bool:
    """Whether an earlier scan of this very process has not returned yet."""
    if pid not in _hung_scans:
        return False
    started, thread, _ = _hung_scans[pid]
    if not thread.is_alive():
        del _hung_scans[pid]
        return False
    return user_process_start_time(pid) == started


def _uid_of(pid: int) -> int | None:
    """Return the owner of the process; None when it has exited."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
