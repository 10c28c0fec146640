"""All processes in ``/proc``, in rounds: those that are quickly looked through come first, and none takes all of the time.

A tenant can make any look at one of its processes long (descriptors, mappings, threads) or never ending (a memory map
that somebody keeps locked). So each process gets a moment first, and those that need more are looked at again, with more
time each, once all had theirs: first those that a caller asked for, those of the pods that had the device and those of the
node; then the other pods, each within a budget of its own. A look that does not come back at all is left behind with its
thread. A process that was not looked through is in the answer by PID: that is never the same as holding nothing.

What was cut goes on in the next walk of the same scrub (:class:`WalkProgress`), where it stopped. What that proves: every
table of descriptors that a process had was looked at once, place by place, and every mapping. Every walk begins with a
quick look at each process, from its first descriptor, so that the quick processes are looked at again by each walk. Those of a group that no single walk gets through are looked at in pieces, over seconds, so
that a descriptor which is moved from a place that was not looked at to one that was, or passed on between two processes of
such a group, is not seen. The answer says how many processes that concerns.

Processes that come and go: a list of ``/proc`` is true for the moment in which it is read. A process that ends before it is
inspected may have left its descriptors to a child, which is in the next list. So lists are read until they have no new
process that ended before it was inspected. Where each of many lists has such a one, and the same group produced one of
them each time, that is a relay: it may carry the target along, and the answer names the group. A process of the node whose
parent is alive and was inspected is no part of a relay: what it had at its beginning it had from that parent. Of a pod's
process that is never assumed, because the kernel names who adopted an orphan as its parent.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scrubber.adapters.kernel_text import fields_in, number_in
from scrubber.adapters.procwalk.budget_group import BudgetGroup, budget_group_of
from scrubber.adapters.procwalk.confinement import Confinement
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
"""Seconds for each process in the first round; in those that follow, an equal share of what is left of the walk."""
_FIRST_SHARE = 0.1
"""Of what a pod may take of a walk: what its processes may take of the first round."""
_LOW_PRIORITY_SHARE = 0.25
"""Of the walk: what processes of pods that did not have the device may take of the first round, all of them together."""
_HANG_TIMEOUT = 1.0
"""Seconds after the end of its time in which a look comes back, unless it waits in the kernel."""
_POLL_INTERVAL = 0.1
_MAX_HUNG, _MAX_HUNG_PER_POD, _MAX_HUNG_ALL_PODS = 16, 4, 64
"""Looks that may hang over processes of the node, or of one pod that had the device; of one other pod; and of all pods
together, before no more processes of the node, of that pod, or of pods that did not have the device are looked at.
"""
_MAX_LISTS = 16
_COMPLETE_LISTS_NEEDED = 2
_NO_START_TIME = -1
_SAMPLES = 32
"""How often the newest process is looked for after a list in which one was missed, to learn whose it is."""
_CHURN_LIST_RATIO = 4
"""One list in so many has to name a group before those that name none are taken to be its, too."""
_MAX_PASSES = 4
_MAX_REPORTED = 400
_MAX_REPORTED_REQUESTED = 2000
_MAX_FULL_COMMANDS, _SHORT_COMMAND_LENGTH = 64, 16
"""Of so many holders the whole command is told, and so many characters of the others': an answer is a megabyte at most."""
_LOADAVG_LENGTH = 256


class Budget(NamedTuple):
    """Seconds: for one process, for the whole walk, and for all processes of a pod that did not have the device."""

    per_process: float = 4.0
    total: float = 8.0
    per_pod: float = 1.0


class UnfinishedProcess(NamedTuple):
    """A process that was not looked through: whether it holds the target, or more of it than ``parts``, is not known.

    Attributes:
        started: clock ticks since boot; 0 when this user may not know.
        name: the short one that the kernel keeps.
        reason: a sentence's end for the operator, as in "its descriptors were not looked through within 4 s".
        confined: it was not seen to be able to open a device by itself (:mod:`scrubber.adapters.procwalk.confinement`).
        walks: how many walks in a row did not get through its group, this one included.
    """

    pid: int
    started: int
    name: str
    uid: int
    reason: str
    parts: tuple[int, ...] = ()
    confined: bool = False
    walks: int = 1


class ChurningGroup(NamedTuple):
    """A group whose processes come and go so fast that every list had one that ended before it was looked at.

    Attributes:
        group: path of its control group, or the pod's UID; empty when it could not be told.
        pod_uid: the UID, if it is a pod.
        confined: so are all processes of the group that could be asked, and at least one that came and went.
    """

    group: str
    pod_uid: str | None
    confined: bool = False


class WalkResult(NamedTuple):
    """What a walk found.

    Attributes:
        holders: who has a part of the target, and those who were asked for by PID.
        unreadable: how many processes (by user) it was not allowed to look into, or not all of.
        unfinished: who was not looked through. Who was found to hold the target all the same is among the holders too.
        unfinished_omitted: how many more there are of those. At least one of each group is told, those of the node first.
        holders_omitted: how many more holders there are. At least one of each group is told, and all that were asked for.
        churning_groups: groups that could not be looked through because their processes come and go.
        missed_count: how many processes ended before they were looked at, where no list was without one.
        resumed_count: how many processes were looked through in pieces, by several walks.
    """

    holders: tuple[ProcessMatch, ...]
    unreadable: tuple[tuple[int, int], ...]
    unfinished: tuple[UnfinishedProcess, ...] = ()
    unfinished_omitted: int = 0
    holders_omitted: int = 0
    churning_groups: tuple[ChurningGroup, ...] = ()
    missed_count: int = 0
    resumed_count: int = 0


@dataclass(slots=True)
class _GroupProgress:
    """Walks in a row that did not get through one group.

    Attributes:
        walks: how many.
        completed: who was looked through and found to hold nothing, by PID, with the start time.
        positions: how far the look at a process has come.
        resumed: who was looked through by more than one walk.
    """

    walks: int = 0
    completed: dict[int, int] = field(default_factory=dict)
    positions: dict[int, ScanPosition] = field(default_factory=dict)
    resumed: set[int] = field(default_factory=set)


class WalkProgress:
    """How far walks for one target have come with the groups that take long. Pass it to one walk after the other."""

    def __init__(self) -> None:
        self.groups: dict[str, _GroupProgress] = {}
        self._scrub_id: str | None = None

    def begin(self, scrub_id: str | None) -> None:
        """A walk of ``scrub_id`` begins; None: of no scrub. What another scrub's walks have looked at may have changed since.

        How many walks in a row did not get through a group is kept.
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
    """Every process but ``excluded_pids`` that has the target open or mapped, in any of its threads.

    Args:
        requested_pids: PIDs that are described as well when they hold nothing that a walk can see. Those that are gone, or
            zombies without a living thread, are not in the answer.
        clock: seconds.
        priority_pods: UIDs of pods that had the device: no budget of their own, and looked at before all other pods.
        progress: of the walk for the same target before, in the same scrub (:meth:`WalkProgress.begin`).
        budget_group: which group a process belongs to; None when it is gone.
        device_numbers: numbers of the nodes that give access to the device, if those of the target are not all that; for ``confined``.
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
"""By PID: start time of a process over which a look hangs, the thread that was left behind with it, and its pod. It is not
looked at again until that thread comes back, so that it costs one thread however often somebody walks.
"""


class _Scheduler:
    """One walk. One thread looks; another one takes over when it does not come back from a look."""

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
        """Seconds that each pod has had."""
        self._low_priority_time_used = 0.0
        self._exited_pids: set[int] = set()
        """Who ended before it was looked through, since that was last asked."""
        self._exited_start_times: dict[int, int] = {}
        """Start times of those who have ended, and may stay in lists until their parents have noticed."""
        self._churning: tuple[ChurningGroup, ...] = ()
        self._missed = 0
        self._lists_ended = False
        """Whether lists came to an end without one that had no new process that was missed."""
        self._non_matching_files: NonMatchingFiles = set()
        self._matches: dict[int, ProcessMatch] = {}
        self._denied_uids: dict[int, int] = {}
        self._completed: dict[int, int] = {}
        """Start times of those who were looked through and have nothing."""
        self._positions: dict[int, ScanPosition] = {
            pid: at for each in self._group_progress.values() for pid, at in each.positions.items()
        }
        self._begun_pids: set[int] = set()
        """Who was looked at from the beginning in this walk."""
        self._rescan_pids: list[int] = []
        self._incomplete: dict[int, tuple[str, tuple[int, ...]]] = {}
        """Why a process was not looked through until now, and what was found of it."""
        self._steps = self._schedule()
        self._lock = threading.Lock()
        """Held for what follows, and by whoever notes something."""
        self._scanner: threading.Thread | None = None
        self._scan: ProcessScan | None = None
        self._scan_began = 0.0
        self._scan_due = 0.0
        self._last_checked = 0.0
        """When somebody last saw whether the look has come back."""
        self._error: Exception | None = None

    def walk(self) -> None:
        """Look at everybody."""
        while self._error is None and self._wait_or_leave_behind(self._start_scanner()):
            pass
        if self._error is not None:
            raise self._error

    def result(self) -> WalkResult:
        """What was found; to be asked for once."""
        rows = [row for row in map(self._unfinished, self._incomplete) if row is not None]
        rows, pieces = self._update_progress(rows)
        rows.sort(key=self._urgency)
        told = self._select_reported([row.pid for row in rows])
        holders = self._select_reported(sorted(self._matches))
        return WalkResult(
            tuple(self._shortened(pid, number) for number, pid in enumerate(sorted(holders))),
            tuple(sorted(Counter(self._denied_uids.values()).items())),
            tuple(row for row in rows if row.pid in told),
            len(rows) - len(told),
            len(self._matches) - len(holders),
            self._churning,
            self._missed if self._lists_ended else 0,
            pieces,
        )

    def _urgency(self, row: UnfinishedProcess) -> tuple[bool, bool, bool, int]:
        """Sorts to the front who must be told: who was asked for, then who may keep the device from being scrubbed."""
        of_a_pod = self._pod_of(row.pid) is not None
        return (row.pid not in self._requested, of_a_pod and row.confined, of_a_pod, row.pid)

    def _select_reported(self, pids: Sequence[int]) -> set[int]:
        """So many of ``pids`` as are told: of each group one, then of each another one; those asked for in any case."""
        turns: Counter[tuple[str, tuple[int, ...]]] = Counter()
        ranked: list[tuple[int, int, int]] = []
        for number, pid in enumerate(pids):
            group, found = self._groups.get(pid), self._matches.get(pid)
            key = ("" if group is None else group.key, () if found is None else found.parts)
            turns[key] += pid not in self._requested
            ranked.append((turns[key] if pid not in self._requested else 0, number, pid))
        most = max(_MAX_REPORTED, sum(pid in self._requested for pid in pids))
        return {pid for _, _, pid in sorted(ranked)[: min(most, _MAX_REPORTED_REQUESTED)]}

    def _shortened(self, pid: int, number: int) -> ProcessMatch:
        found = self._matches[pid]
        return found if number < _MAX_FULL_COMMANDS else found._replace(command=found.command[:_SHORT_COMMAND_LENGTH])

    def _update_progress(self, rows: list[UnfinishedProcess]) -> tuple[list[UnfinishedProcess], int]:
        """Those of ``rows`` whom no walk of their group's series got through, and how many were looked at in pieces."""
        pieces, left = 0, list[UnfinishedProcess]()
        of_groups: dict[str, list[UnfinishedProcess]] = {}
        for row in rows:
            group = self._groups.get(row.pid)
            series = None if group is None else self._group_progress.get(group.key)
            if series is not None and series.completed.get(row.pid) == row.started:
                series.resumed.add(row.pid)
            elif group is not None:
                of_groups.setdefault(group.key, []).append(row)
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

    # --- whom to look at

    def _new_pids(self) -> list[int]:
        """Who was in no list before; those that come first are in front. PIDs of those that have ended may come again."""
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
        """Whether a process of ``group`` has its descriptors from a living ``parent`` that was inspected and held nothing.

        Never so in a pod. The kernel names the process that adopted an orphan as its parent, and a tenant chooses who
        that is (PID 1 of its container, or a subreaper): each link of a relay would look like a child of an idle process.
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
        """Whether it is of a pod that did not have the device: these share what is left of the walk."""
        pod = self._pod_of(pid)
        return pod is not None and pod not in self._priority_pods and pid not in self._requested

    def _priority(self, pid: int) -> tuple[bool, str, bool, int]:
        group = self._groups.get(pid)
        series = None if group is None else self._group_progress.get(group.key)
        late = self._is_low_priority(pid)
        return (late, self._pod_of(pid) or "" if late else "", series is not None and pid in series.completed, pid)

    def _schedule(self) -> Iterator[tuple[int, float]]:
        """Whom to look at next, and for how many seconds."""
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
            # Who ended and had been looked at in part, or not at all, may have left its descriptors to a child: list again.
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
        """All processes in a list of ``/proc``, until two in a row have no new one that ended before it was looked at.

        Two, because a list has the processes by PID, and one that comes behind what was read already is in none: where the
        kernel begins again with low PIDs.

        Args:
            because: for whom the lists are read: who is named when there is no time left to read them to the end.
        """
        missed: list[Counter[BudgetGroup | None]] = []
        complete = 0
        for number in range(_MAX_LISTS):
            fresh = self._new_pids()
            self._exited_pids.clear()
            for pid in fresh:
                yield pid, min(moment, self._first_share(pid)) if self._is_low_priority(pid) else moment
            self._exited_pids |= self._select_ended(pid for pid in fresh if pid in self._incomplete)
            if not number:  # who ended during the first list, which takes long, has left its children to the second
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
        return ChurningGroup(*group, self._is_confined(group))

    def _is_confined(self, group: BudgetGroup) -> bool:
        """Whether all of ``group`` are that can be asked, and at least one that was made just now is among them."""
        seen = [pid for pid, its in list(self._groups.items()) if its == group]
        if group.pod_uid is None or any(_is_alive(pid) and not self._may_be_confined(pid, group) for pid in seen):
            return False
        judged = 0
        for _ in range(_SAMPLES):
            newest = _newest_pid()
            if newest in seen or self._group(newest) != group:
                continue
            if not self._may_be_confined(newest, group):
                return False
            judged += _is_alive(newest)
        return judged > 0

    def _may_be_confined(self, pid: int, group: BudgetGroup) -> bool:
        """False for one that is not confined; one that has ended meanwhile may have been."""
        return self._confinement.is_confined(pid, group.key) or not _is_alive(pid)

    def _first_share(self, pid: int) -> float:
        """Seconds of the first round that are left to a process of a pod that did not have the device."""
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
        """Groups of those who were missed in a list; None: of one that cannot be told.

        Who has gone cannot be asked. So the newest process is asked for again and again: of a group that makes one after
        the other some are caught.
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

    # --- looking

    def _start_scanner(self) -> threading.Thread:
        self._last_checked = time.monotonic()
        self._scanner = threading.Thread(target=self._run_scanner, daemon=True)
        self._scanner.start()
        return self._scanner

    def _wait_or_leave_behind(self, looker: threading.Thread) -> bool:
        """Wait for ``looker``; False when it has ended, True when it hangs over a look and is left to it.

        Where this whole process stood still, ``looker`` did, too: that time is given again.
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

    def _leave_behind(self, looker: threading.Thread, look: ProcessScan) -> None:
        pid = look.pid
        _hung_scans[pid] = (look.started or 0, looker, self._pod_of(pid))
        self._incomplete[pid] = (f"the look at its {look.phase} does not come back from the kernel", tuple(look.parts))
        self._charge_pod(pid)
        self._scanner = self._scan = None

    def _charge_pod(self, pid: int) -> None:
        """Charge a look that is over, or left behind, to its pod."""
        elapsed = self._clock() - self._scan_began
        self._time_used[self._pod_of(pid)] += elapsed
        self._low_priority_time_used += elapsed if self._is_low_priority(pid) else 0.0

    def _too_many_hung(self, pid: int) -> bool:
        """Whether so many looks hang over processes of its pod, or of the node, that no more of them are looked at."""
        if not _hung_scans:
            return False
        hanging = Counter(pod for _, thread, pod in _hung_scans.values() if thread.is_alive())
        if not self._is_low_priority(pid):
            return hanging[self._pod_of(pid)] >= _MAX_HUNG
        return hanging[self._pod_of(pid)] >= _MAX_HUNG_PER_POD or hanging.total() - hanging[None] >= _MAX_HUNG_ALL_PODS

    def _run_scanner(self) -> None:
        """What a looking thread does, until nobody is left, or it was left behind itself."""
        me = threading.current_thread()
        try:
            while (look := self._take_scan(me)) is not None:
                try:
                    found = look.run(always=look.pid in self._requested)
                except PermissionError:  # not even its state may be known
                    found, look.permission_denied = None, True
                self._record(me, look, found)
        except Exception as error:  # noqa: BLE001 - it is raised where the walk was asked for
            with self._lock:
                if self._scanner is me:
                    self._error = error

    def _take_scan(self, me: threading.Thread) -> ProcessScan | None:
        """The next look; None when there is none, or none for ``me`` any more."""
        with self._lock:
            self._scan = self._next_scan() if self._scanner is me else self._scan
            return self._scan if self._scanner is me else None

    def _next_scan(self) -> ProcessScan | None:
        for pid, moment in self._steps:
            now = self._clock()
            if now >= self._end:
                self._incomplete.setdefault(
                    pid, (f"it was not reached before the walk's {self._budget.total:g} s were over", ())
                )
            elif moment <= 0 and self._is_low_priority(pid):
                self._incomplete.setdefault(pid, ("its pod's share of the walk was used up before it was reached", ()))
                self._rescan_pids.append(pid)
            elif _is_still_hung(pid):
                self._incomplete[pid] = ("a look at it that was begun earlier has not come back from the kernel", ())
            elif self._too_many_hung(pid):
                self._incomplete[pid] = ("too many looks at processes like it have not come back from the kernel", ())
            else:
                self._scan_due = time.monotonic() + moment + _HANG_TIMEOUT
                self._scan_began = now
                late = _past_deadline(self._clock, min(now + moment, self._end))
                start = self._positions.get(pid) if pid in self._begun_pids else None
                self._begun_pids.add(pid)
                return ProcessScan(pid, self._target, self._non_matching_files, late, start)
        return None

    def _record(self, me: threading.Thread, look: ProcessScan, found: ProcessMatch | None) -> None:
        with self._lock:
            if (
                self._scanner is not me
            ):  # it came back after all, and its process is told of as one that was not looked through
                return
            self._scan = None
            self._record_result(look, found)

    def _record_result(self, look: ProcessScan, found: ProcessMatch | None) -> None:
        pid = look.pid
        resumed, before = look.is_resumed, self._positions.pop(pid, None)
        for earlier in (self._matches, self._incomplete, self._denied_uids):
            earlier.pop(pid, None)
        self._charge_pod(pid)
        if found is not None:
            self._matches[pid] = found
        if look.has_exited:
            self._exited_pids.add(pid)
            if look.started is None:
                self._known_pids.discard(pid)
            else:
                self._exited_start_times[pid] = look.started
        elif look.interrupted_in is not None:
            self._positions[pid] = look.position if before is None else before.furthest(look.position)
            self._incomplete[pid] = (f"there was no time to look through its {look.interrupted_in}", tuple(look.parts))
            if not self._is_completed(look):
                self._rescan_pids.append(pid)
        elif not look.parts and look.started is not None:
            self._completed[pid] = look.started
            self._record_resumed(pid, before if resumed else None)
        if look.permission_denied and not look.parts and (uid := _uid_of(look.pid)) is not None:
            self._denied_uids[look.pid] = uid

    def _is_completed(self, look: ProcessScan) -> bool:
        """Whether an earlier walk of its group's series has looked through it."""
        group = self._groups.get(look.pid)
        series = None if group is None else self._group_progress.get(group.key)
        return series is not None and series.completed.get(look.pid) == look.started

    def _record_resumed(self, pid: int, before: ScanPosition | None) -> None:
        group = self._groups.get(pid)
        series = None if group is None else self._group_progress.get(group.key)
        if series is not None and before is not None and series.positions.get(pid, before).started == before.started:
            series.resumed.add(pid)

    def _confined(self, pid: int) -> bool:
        group = self._groups.get(pid)
        return self._confinement.is_confined(pid, "" if group is None else group.key)

    def _unfinished(self, pid: int) -> UnfinishedProcess | None:
        """None for one that is over meanwhile, or of the kernel."""
        try:
            started = user_process_start_time(pid)
        except PermissionError:
            started = 0
        uid = _uid_of(pid)
        if started is None or uid is None:
            return None
        why, parts = self._incomplete[pid]
        return UnfinishedProcess(pid, started, process_name(pid), uid, why, tuple(sorted(parts)), self._confined(pid))


def _find_churning_groups(missed: Sequence[Counter[BudgetGroup | None]]) -> tuple[BudgetGroup | None, ...]:
    """Groups that had a process in every list that ended before it was looked at.

    If none is known to have had one in every list, those count that may have had: who was missed is not always told.
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
    """PID of the process, or thread, that was made last on this node."""
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
    """Whether an earlier look at this very process has not come back yet."""
    if pid not in _hung_scans:
        return False
    started, thread, _ = _hung_scans[pid]
    if not thread.is_alive():
        del _hung_scans[pid]
        return False
    return user_process_start_time(pid) == started


def _uid_of(pid: int) -> int | None:
    """None when it is over."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
