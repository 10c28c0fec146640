"""All processes in ``/proc``, in rounds: those that are quickly looked through come first, and none takes all of the time.

A tenant can make any look at one of its processes long (descriptors, mappings, threads) or never ending (a memory map
that somebody keeps locked). So each process gets a moment first, and those that need more are looked at again, with more
time each, once all had theirs: first those that a caller asked for, those of the pods that had the device and those of the
node; then the other pods, each within a budget of its own. A look that does not come back at all is left behind with its
thread. A process that was not looked through is in the answer by PID: that is never the same as holding nothing.

What was cut goes on in the next walk of the same scrub (:class:`Progress`), where it stopped. What that proves: every
table of descriptors that a process had was looked at once, place by place, and every mapping. Every walk begins with a
quick look at each process, from its first descriptor, so that the quick processes are looked at again by each walk. Those of a group that no single walk gets through are looked at in pieces, over seconds, so
that a descriptor which is moved from a place that was not looked at to one that was, or passed on between two processes of
such a group, is not seen. The answer says how many processes that concerns.

Processes that come and go: a list of ``/proc`` is true for the moment in which it is read. A process that ends before it is
looked at may have left its descriptors to a child, which is in the next list. So lists are read until they have no new
process that ended before it was looked at. Where each of many lists has such a one, and the same group produced one of
them each time, that is a relay: it may carry the target along, and the answer names the group. A process whose parent lives
and was looked through is no part of a relay: what it had at its beginning it had from that parent. A list that missed only
such ones shows that there was no relay then; what else they were is listed as not covered.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scrubber.adapters.proc import fields_in, number_in
from scrubber.adapters.walk.confinement import Confinement
from scrubber.adapters.walk.group import Group, group_of
from scrubber.adapters.walk.look import (
    Found,
    Look,
    Position,
    Settled,
    living_since,
    name_of,
    read_stat,
    start_of_user_process,
    start_time,
)
from scrubber.adapters.walk.seeing import Target

__all__ = ["Budget", "Progress", "Relay", "Unfinished", "Walk", "walk"]

_MOMENT = 0.002
"""Seconds for each process in the first round; in those that follow, an equal share of what is left of the walk."""
_FIRST_SHARE = 0.1
"""Of what a pod may take of a walk: what its processes may take of the first round."""
_LATE_SHARE = 0.25
"""Of the walk: what processes of pods that did not have the device may take of the first round, all of them together."""
_HANGS = 1.0
"""Seconds after the end of its time in which a look comes back, unless it waits in the kernel."""
_WATCH = 0.1
_MOST_HANGING, _MOST_OF_A_POD, _MOST_OF_PODS = 16, 4, 64
"""Looks that may hang over processes of the node, or of one pod that had the device; of one other pod; and of all pods
together, before no more processes of the node, of that pod, or of pods that did not have the device are looked at.
"""
_MOST_LISTS = 16
_COMPLETE = 2
_NEVER = -1
_SAMPLES = 32
"""How often the newest process is looked for after a list in which one was missed, to learn whose it is."""
_OFTEN = 4
"""One list in so many has to name a group before those that name none are taken to be its, too."""
_MOST_PASSES = 4
_MOST_TOLD = 400
_MOST_NAMED = 2000
_MOST_COMMANDS, _SHORT = 64, 16
"""Of so many holders the whole command is told, and so many characters of the others': an answer is a megabyte at most."""
_LOADAVG_LENGTH = 256


class Budget(NamedTuple):
    """Seconds: for one process, for the whole walk, and for all processes of a pod that did not have the device."""

    each: float = 4.0
    whole: float = 8.0
    pod: float = 1.0


class Unfinished(NamedTuple):
    """A process that was not looked through: whether it holds the target, or more of it than ``parts``, is not known.

    Attributes:
        started: clock ticks since boot; 0 when this user may not know.
        name: the short one that the kernel keeps.
        why: a sentence's end for the operator, as in "its descriptors were not looked through within 4 s".
        confined: it was not seen to be able to open a device by itself (:mod:`scrubber.adapters.walk.confinement`).
        walks: how many walks in a row did not get through its group, this one included.
    """

    pid: int
    started: int
    name: str
    uid: int
    why: str
    parts: tuple[int, ...] = ()
    confined: bool = False
    walks: int = 1


class Relay(NamedTuple):
    """A group whose processes come and go so fast that every list had one that ended before it was looked at.

    Attributes:
        group: path of its control group, or the pod's UID; empty when it could not be told.
        pod: the UID, if it is a pod.
        confined: so are all processes of the group that could be asked, and at least one that came and went.
    """

    group: str
    pod: str | None
    confined: bool = False


class Walk(NamedTuple):
    """What a walk found.

    Attributes:
        holders: who has a part of the target, and those who were asked for by PID.
        unreadable: how many processes (by user) it was not allowed to look into, or not all of.
        unfinished: who was not looked through. Who was found to hold the target all the same is among the holders too.
        untold: how many more there are of those. At least one of each group is told, those of the node first.
        more: how many more holders there are. At least one of each group is told, and all that were asked for.
        relays: groups that could not be looked through because their processes come and go.
        missed: how many processes ended before they were looked at, where no list was without one.
        pieces: how many processes were looked through in pieces, by several walks.
    """

    holders: tuple[Found, ...]
    unreadable: tuple[tuple[int, int], ...]
    unfinished: tuple[Unfinished, ...] = ()
    untold: int = 0
    more: int = 0
    relays: tuple[Relay, ...] = ()
    missed: int = 0
    pieces: int = 0


@dataclass(slots=True)
class _Series:
    """Walks in a row that did not get through one group.

    Attributes:
        walks: how many.
        done: who was looked through and found to hold nothing, by PID, with the start time.
        at: how far the look at a process has come.
        pieces: who was looked through by more than one walk.
    """

    walks: int = 0
    done: dict[int, int] = field(default_factory=dict)
    at: dict[int, Position] = field(default_factory=dict)
    pieces: set[int] = field(default_factory=set)


class Progress:
    """How far walks for one target have come with the groups that take long. Pass it to one walk after the other."""

    def __init__(self) -> None:
        self.series: dict[str, _Series] = {}
        self._scrub: str | None = None

    def begin(self, scrub: str | None) -> None:
        """A walk of ``scrub`` begins; None: of no scrub. What another scrub's walks have looked at may have changed since.

        How many walks in a row did not get through a group is kept.
        """
        if scrub is None or scrub != self._scrub:
            self.series = {key: _Series(each.walks) for key, each in self.series.items()}
        self._scrub = scrub


_DEFAULT = Budget()


def walk(
    target: Target,
    excluded: Iterable[int] = (),
    named: Iterable[int] = (),
    budget: Budget = _DEFAULT,
    clock: Callable[[], float] = time.monotonic,
    *,
    first: Iterable[str] = (),
    progress: Progress | None = None,
    group: Callable[[int], Group | None] = group_of,
    own: Iterable[int] = (),
) -> Walk:
    """Every process but ``excluded`` that has the target open or mapped, in any of its threads.

    Args:
        named: PIDs that are described as well when they hold nothing that a walk can see. Those that are gone, or
            zombies without a living thread, are not in the answer.
        clock: seconds.
        first: UIDs of pods that had the device: no budget of their own, and looked at before all other pods.
        progress: of the walk for the same target before, in the same scrub (:meth:`Progress.begin`).
        group: which group a process belongs to; None when it is gone.
        own: numbers of the nodes that give access to the device, if those of the target are not all that; for ``confined``.
    """
    rounds = _Rounds(
        target,
        frozenset(excluded),
        frozenset(named),
        budget,
        clock,
        frozenset(first),
        progress or Progress(),
        group,
        Confinement(target, frozenset(own)),
    )
    rounds.walk()
    return rounds.answer()


_hanging: dict[int, tuple[int, threading.Thread, str | None]] = {}
"""By PID: start time of a process over which a look hangs, the thread that was left behind with it, and its pod. It is not
looked at again until that thread comes back, so that it costs one thread however often somebody walks.
"""


class _Rounds:
    """One walk. One thread looks; another one takes over when it does not come back from a look."""

    def __init__(
        self,
        target: Target,
        excluded: frozenset[int],
        named: frozenset[int],
        budget: Budget,
        clock: Callable[[], float],
        first: frozenset[str],
        progress: Progress,
        group: Callable[[int], Group | None],
        confinement: Confinement,
    ) -> None:
        self._target = target
        self._named = named - excluded
        self._excluded = excluded
        self._known = set(excluded | named)
        self._budget = budget
        self._clock = clock
        self._end = clock() + budget.whole
        self._first = first
        self._series = progress.series
        self._group = group
        self._confinement = confinement
        self._groups: dict[int, Group] = {}
        self._parents: dict[int, int | None] = {}
        self._spent: defaultdict[str | None, float] = defaultdict(float)
        """Seconds that each pod has had."""
        self._spent_late = 0.0
        self._gone: set[int] = set()
        """Who ended before it was looked through, since that was last asked."""
        self._over: dict[int, int] = {}
        """Start times of those who have ended, and may stay in lists until their parents have noticed."""
        self._relays: tuple[Relay, ...] = ()
        self._missed = 0
        self._lists_ended = False
        """Whether lists came to an end without one that had no new process that was missed."""
        self._settled: Settled = set()
        self._found: dict[int, Found] = {}
        self._closed_by: dict[int, int] = {}
        self._through: dict[int, int] = {}
        """Start times of those who were looked through and have nothing."""
        self._at: dict[int, Position] = {pid: at for each in self._series.values() for pid, at in each.at.items()}
        self._begun: set[int] = set()
        """Who was looked at from the beginning in this walk."""
        self._again: list[int] = []
        self._cut: dict[int, tuple[str, tuple[int, ...]]] = {}
        """Why a process was not looked through until now, and what was found of it."""
        self._steps = self._schedule()
        self._lock = threading.Lock()
        """Held for what follows, and by whoever notes something."""
        self._looker: threading.Thread | None = None
        self._look: Look | None = None
        self._began = 0.0
        self._look_returns_by = 0.0
        self._watched = 0.0
        """When somebody last saw whether the look has come back."""
        self._error: Exception | None = None

    def walk(self) -> None:
        """Look at everybody."""
        while self._error is None and self._is_left_behind(self._start()):
            pass
        if self._error is not None:
            raise self._error

    def answer(self) -> Walk:
        """What was found; to be asked for once."""
        rows = [row for row in map(self._unfinished, self._cut) if row is not None]
        rows, pieces = self._remember(rows)
        rows.sort(key=self._urgency)
        told = self._some([row.pid for row in rows])
        holders = self._some(sorted(self._found))
        return Walk(
            tuple(self._short(pid, number) for number, pid in enumerate(sorted(holders))),
            tuple(sorted(Counter(self._closed_by.values()).items())),
            tuple(row for row in rows if row.pid in told),
            len(rows) - len(told),
            len(self._found) - len(holders),
            self._relays,
            self._missed if self._lists_ended else 0,
            pieces,
        )

    def _urgency(self, row: Unfinished) -> tuple[bool, bool, bool, int]:
        """Sorts to the front who must be told: who was asked for, then who may keep the device from being scrubbed."""
        of_a_pod = self._pod_of(row.pid) is not None
        return (row.pid not in self._named, of_a_pod and row.confined, of_a_pod, row.pid)

    def _some(self, pids: Sequence[int]) -> set[int]:
        """So many of ``pids`` as are told: of each group one, then of each another one; those asked for in any case."""
        turns: Counter[tuple[str, tuple[int, ...]]] = Counter()
        ranked: list[tuple[int, int, int]] = []
        for number, pid in enumerate(pids):
            group, found = self._groups.get(pid), self._found.get(pid)
            key = ("" if group is None else group.key, () if found is None else found.parts)
            turns[key] += pid not in self._named
            ranked.append((turns[key] if pid not in self._named else 0, number, pid))
        most = max(_MOST_TOLD, sum(pid in self._named for pid in pids))
        return {pid for _, _, pid in sorted(ranked)[: min(most, _MOST_NAMED)]}

    def _short(self, pid: int, number: int) -> Found:
        found = self._found[pid]
        return found if number < _MOST_COMMANDS else found._replace(command=found.command[:_SHORT])

    def _remember(self, rows: list[Unfinished]) -> tuple[list[Unfinished], int]:
        """Those of ``rows`` whom no walk of their group's series got through, and how many were looked at in pieces."""
        pieces, left = 0, list[Unfinished]()
        of_groups: dict[str, list[Unfinished]] = {}
        for row in rows:
            group = self._groups.get(row.pid)
            series = None if group is None else self._series.get(group.key)
            if series is not None and series.done.get(row.pid) == row.started:
                series.pieces.add(row.pid)
            elif group is not None:
                of_groups.setdefault(group.key, []).append(row)
        for key in self._series.keys() - of_groups.keys():
            pieces += len(self._series.pop(key).pieces)
        for key, unfinished in of_groups.items():
            series = self._series.setdefault(key, _Series())
            series.walks += 1
            series.at = {row.pid: self._at[row.pid] for row in unfinished if row.pid in self._at}
            left += [row._replace(walks=series.walks) for row in unfinished]
        for pid, started in self._through.items():
            group = self._groups.get(pid)
            if group is not None and group.key in of_groups:
                self._series[group.key].done[pid] = started
        return left, pieces

    # --- whom to look at

    def _fresh(self) -> list[int]:
        """Who was in no list before; those that come first are in front. PIDs of those that have ended may come again."""
        listed = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        fresh = [
            pid for pid in listed if pid not in self._known or self._over.get(pid, _NEVER) not in (_NEVER, _at(pid))
        ]
        self._known.update(fresh)
        for pid in reversed(fresh):  # the newest may be the first to end
            self._place(pid)
        return sorted(fresh, key=self._rank)

    def _place(self, pid: int) -> None:
        found = self._group(pid)
        if found is not None:
            self._groups[pid] = found
            self._parents[pid] = _parent(pid)

    def _is_harmless(self, parent: int | None) -> bool:
        """Whether a process has its descriptors from a parent that lives, and was looked through: then it held nothing."""
        return parent in self._excluded or (
            parent is not None and parent in self._through and _at(parent) == self._through[parent]
        )

    def _pod_of(self, pid: int) -> str | None:
        found = self._groups.get(pid)
        return None if found is None else found.pod

    def _is_late(self, pid: int) -> bool:
        """Whether it is of a pod that did not have the device: these share what is left of the walk."""
        pod = self._pod_of(pid)
        return pod is not None and pod not in self._first and pid not in self._named

    def _rank(self, pid: int) -> tuple[bool, str, bool, int]:
        group = self._groups.get(pid)
        series = None if group is None else self._series.get(group.key)
        late = self._is_late(pid)
        return (late, self._pod_of(pid) or "" if late else "", series is not None and pid in series.done, pid)

    def _schedule(self) -> Iterator[tuple[int, float]]:
        """Whom to look at next, and for how many seconds."""
        moment = min(_MOMENT, self._budget.each)
        for pid in sorted(self._named):
            self._place(pid)
            yield pid, moment
        because: set[Group | None] = {None}
        always: set[Group | None] | None = None
        gone: set[int] = set()
        for _ in range(_MOST_PASSES):
            yield from self._in_lists(moment, because)
            self._gone.clear()
            yield from self._longer(moment)
            # Who ended and had been looked at in part, or not at all, may have left its descriptors to a child: list again.
            gone = self._gone | self._ended(self._cut)
            for pid in gone:
                self._cut.pop(pid, None)
            because = {self._groups.get(pid) for pid in gone}
            always = because if always is None else always & because
            if all(self._is_late(pid) for pid in gone):
                self._relayed(map(self._relay, because))
                return
        self._missed, self._lists_ended = self._missed + len(gone), True
        self._relayed(map(self._relay, always or ()))

    def _in_lists(self, moment: float, because: Iterable[Group | None]) -> Iterator[tuple[int, float]]:
        """All processes in a list of ``/proc``, until two in a row have no new one that ended before it was looked at.

        Two, because a list has the processes by PID, and one that comes behind what was read already is in none: where the
        kernel begins again with low PIDs.

        Args:
            because: for whom the lists are read: who is named when there is no time left to read them to the end.
        """
        missed: list[Counter[Group | None]] = []
        complete = 0
        for number in range(_MOST_LISTS):
            fresh = self._fresh()
            self._gone.clear()
            for pid in fresh:
                yield pid, min(moment, self._first_share(pid)) if self._is_late(pid) else moment
            self._gone |= self._ended(pid for pid in fresh if pid in self._cut)
            if not number:  # who ended during the first list, which takes long, has left its children to the second
                continue
            if fresh and self._clock() >= self._end:
                self._relayed(map(self._relay, because))
                return
            complete = 0 if self._gone else complete + 1
            if complete == _COMPLETE:
                return
            self._missed += len(self._gone)
            missed.append(self._whose(pid for pid in self._gone if not self._is_harmless(self._parents.get(pid))))
        self._lists_ended = True
        self._relayed(map(self._relay, _relays(missed)))

    def _ended(self, pids: Iterable[int]) -> set[int]:
        return {pid for pid in pids if not _lives(pid)}

    def _relayed(self, found: Iterable[Relay]) -> None:
        self._relays = tuple(sorted({*self._relays, *found}, key=lambda each: each.group))

    def _relay(self, group: Group | None) -> Relay:
        if group is None:
            return Relay("", None)
        return Relay(*group, self._is_confined(group))

    def _is_confined(self, group: Group) -> bool:
        """Whether all of ``group`` are that can be asked, and at least one that was made just now is among them."""
        seen = [pid for pid, its in list(self._groups.items()) if its == group]
        if group.pod is None or any(_lives(pid) and not self._may_be_confined(pid, group) for pid in seen):
            return False
        judged = 0
        for _ in range(_SAMPLES):
            newest = _newest()
            if newest in seen or self._group(newest) != group:
                continue
            if not self._may_be_confined(newest, group):
                return False
            judged += _lives(newest)
        return judged > 0

    def _may_be_confined(self, pid: int, group: Group) -> bool:
        """False for one that is not confined; one that has ended meanwhile may have been."""
        return self._confinement.is_confined(pid, group.key) or not _lives(pid)

    def _first_share(self, pid: int) -> float:
        """Seconds of the first round that are left to a process of a pod that did not have the device."""
        of_pod = self._budget.pod * _FIRST_SHARE - self._spent[self._pod_of(pid)]
        return min(of_pod, self._budget.whole * _LATE_SHARE - self._spent_late)

    def _longer(self, moment: float) -> Iterator[tuple[int, float]]:
        quick, late = moment, [pid for pid in self._again if self._is_late(pid)]
        queue, self._again = [pid for pid in self._again if not self._is_late(pid)], []
        while queue:
            share = min(self._budget.each, (self._end - self._clock()) / len(queue))
            if share <= moment:
                break
            moment = share
            for pid in queue:
                yield pid, moment
            queue, self._again = self._again, []
        share = min(self._budget.pod, (self._end - self._clock()) / max(1, len({self._pod_of(pid) for pid in late})))
        for pid in sorted(late, key=self._rank):
            left = share - self._spent[self._pod_of(pid)]
            if pid not in self._begun:
                yield pid, min(quick, left)
                left = share - self._spent[self._pod_of(pid)]
            if pid in self._cut and pid in self._begun:
                yield pid, min(self._budget.each, left)
        self._again = []

    def _whose(self, gone: Iterable[int]) -> Counter[Group | None]:
        """Groups of those who were missed in a list; None: of one that cannot be told.

        Who has gone cannot be asked. So the newest process is asked for again and again: of a group that makes one after
        the other some are caught.
        """
        groups = Counter(self._groups.get(pid) for pid in gone)
        if None in groups:
            caught: dict[int, Group | None] = {}
            for _ in range(_SAMPLES):
                newest = _newest()
                if newest not in self._known and not self._is_harmless(_parent(newest)):
                    caught[newest] = self._group(newest)
            groups += Counter({group for pid, group in caught.items() if group and not _lives(pid)})
        return groups

    # --- looking

    def _start(self) -> threading.Thread:
        self._watched = time.monotonic()
        self._looker = threading.Thread(target=self._go_on, daemon=True)
        self._looker.start()
        return self._looker

    def _is_left_behind(self, looker: threading.Thread) -> bool:
        """Wait for ``looker``; False when it has ended, True when it hangs over a look and is left to it.

        Where this whole process stood still, ``looker`` did, too: that time is given again.
        """
        while looker.is_alive():
            looker.join(_WATCH)
            with self._lock:
                now = time.monotonic()
                self._look_returns_by += max(0.0, now - self._watched - 2 * _WATCH)
                self._watched = now
                if self._look is not None and now > self._look_returns_by:
                    self._leave_behind(looker, self._look)
                    return True
        return False

    def _leave_behind(self, looker: threading.Thread, look: Look) -> None:
        pid = look.pid
        _hanging[pid] = (look.started or 0, looker, self._pod_of(pid))
        self._cut[pid] = (f"the look at its {look.at} does not come back from the kernel", tuple(look.parts))
        self._spend(pid)
        self._looker = self._look = None

    def _spend(self, pid: int) -> None:
        """Charge a look that is over, or left behind, to its pod."""
        spent = self._clock() - self._began
        self._spent[self._pod_of(pid)] += spent
        self._spent_late += spent if self._is_late(pid) else 0.0

    def _too_many_hang(self, pid: int) -> bool:
        """Whether so many looks hang over processes of its pod, or of the node, that no more of them are looked at."""
        if not _hanging:
            return False
        hanging = Counter(pod for _, thread, pod in _hanging.values() if thread.is_alive())
        if not self._is_late(pid):
            return hanging[self._pod_of(pid)] >= _MOST_HANGING
        return hanging[self._pod_of(pid)] >= _MOST_OF_A_POD or hanging.total() - hanging[None] >= _MOST_OF_PODS

    def _go_on(self) -> None:
        """What a looking thread does, until nobody is left, or it was left behind itself."""
        me = threading.current_thread()
        try:
            while (look := self._take(me)) is not None:
                try:
                    found = look.run(always=look.pid in self._named)
                except PermissionError:  # not even its state may be known
                    found, look.closed = None, True
                self._note(me, look, found)
        except Exception as error:  # noqa: BLE001 - it is raised where the walk was asked for
            with self._lock:
                if self._looker is me:
                    self._error = error

    def _take(self, me: threading.Thread) -> Look | None:
        """The next look; None when there is none, or none for ``me`` any more."""
        with self._lock:
            self._look = self._next_look() if self._looker is me else self._look
            return self._look if self._looker is me else None

    def _next_look(self) -> Look | None:
        for pid, moment in self._steps:
            now = self._clock()
            if now >= self._end:
                self._cut.setdefault(
                    pid, (f"it was not reached before the walk's {self._budget.whole:g} s were over", ())
                )
            elif moment <= 0 and self._is_late(pid):
                self._cut.setdefault(pid, ("its pod's share of the walk was used up before it was reached", ()))
                self._again.append(pid)
            elif _still_hangs(pid):
                self._cut[pid] = ("a look at it that was begun earlier has not come back from the kernel", ())
            elif self._too_many_hang(pid):
                self._cut[pid] = ("too many looks at processes like it have not come back from the kernel", ())
            else:
                self._look_returns_by = time.monotonic() + moment + _HANGS
                self._began = now
                late = _alarm(self._clock, min(now + moment, self._end))
                start = self._at.get(pid) if pid in self._begun else None
                self._begun.add(pid)
                return Look(pid, self._target, self._settled, late, start)
        return None

    def _note(self, me: threading.Thread, look: Look, found: Found | None) -> None:
        with self._lock:
            if (
                self._looker is not me
            ):  # it came back after all, and its process is told of as one that was not looked through
                return
            self._look = None
            self._keep(look, found)

    def _keep(self, look: Look, found: Found | None) -> None:
        pid = look.pid
        resumed, before = look.resumed, self._at.pop(pid, None)
        for earlier in (self._found, self._cut, self._closed_by):
            earlier.pop(pid, None)
        self._spend(pid)
        if found is not None:
            self._found[pid] = found
        if look.gone:
            self._gone.add(pid)
            if look.started is None:
                self._known.discard(pid)
            else:
                self._over[pid] = look.started
        elif look.cut is not None:
            self._at[pid] = look.position if before is None else before.or_further(look.position)
            self._cut[pid] = (f"there was no time to look through its {look.cut}", tuple(look.parts))
            if not self._is_done(look):
                self._again.append(pid)
        elif not look.parts and look.started is not None:
            self._through[pid] = look.started
            self._note_pieces(pid, before if resumed else None)
        if look.closed and not look.parts and (uid := _uid_of(look.pid)) is not None:
            self._closed_by[look.pid] = uid

    def _is_done(self, look: Look) -> bool:
        """Whether an earlier walk of its group's series has looked through it."""
        group = self._groups.get(look.pid)
        series = None if group is None else self._series.get(group.key)
        return series is not None and series.done.get(look.pid) == look.started

    def _note_pieces(self, pid: int, before: Position | None) -> None:
        group = self._groups.get(pid)
        series = None if group is None else self._series.get(group.key)
        if series is not None and before is not None and series.at.get(pid, before).started == before.started:
            series.pieces.add(pid)

    def _confined(self, pid: int) -> bool:
        group = self._groups.get(pid)
        return self._confinement.is_confined(pid, "" if group is None else group.key)

    def _unfinished(self, pid: int) -> Unfinished | None:
        """None for one that is over meanwhile, or of the kernel."""
        try:
            started = start_of_user_process(pid)
        except PermissionError:
            started = 0
        uid = _uid_of(pid)
        if started is None or uid is None:
            return None
        why, parts = self._cut[pid]
        return Unfinished(pid, started, name_of(pid), uid, why, tuple(sorted(parts)), self._confined(pid))


def _relays(missed: Sequence[Counter[Group | None]]) -> tuple[Group | None, ...]:
    """Groups that had a process in every list that ended before it was looked at.

    If none is known to have had one in every list, those count that may have had: who was missed is not always told.
    """
    groups = {group for each in missed for group in each if group is not None}
    always = {group for group in groups if all(group in each for each in missed)}
    maybe = {
        group
        for group in groups
        if sum(group in each for each in missed) * _OFTEN >= len(missed)
        and all(group in each or None in each for each in missed)
    }
    named = always or maybe
    if not named and missed and all(None in each for each in missed):
        return (None,)
    return tuple(named)


def _newest() -> int:
    """PID of the process, or thread, that was made last on this node."""
    with open("/proc/loadavg", "rb") as file:
        return number_in(fields_in(file.read(_LOADAVG_LENGTH).removesuffix(b"\n"))[-1])


def _at(pid: int) -> int | None:
    try:
        return start_time(pid)
    except PermissionError:
        return None


def _parent(pid: int) -> int | None:
    try:
        stat = read_stat(f"/proc/{pid}/stat")
    except PermissionError:
        return None
    return None if stat is None else stat.parent


def _lives(pid: int) -> bool:
    try:
        return living_since(pid) is not None
    except PermissionError:
        return True


def _alarm(clock: Callable[[], float], end: float) -> Callable[[], bool]:
    return lambda: clock() > end


def _still_hangs(pid: int) -> bool:
    """Whether an earlier look at this very process has not come back yet."""
    if pid not in _hanging:
        return False
    started, thread, _ = _hanging[pid]
    if not thread.is_alive():
        del _hanging[pid]
        return False
    return start_of_user_process(pid) == started


def _uid_of(pid: int) -> int | None:
    """None when it is over."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
