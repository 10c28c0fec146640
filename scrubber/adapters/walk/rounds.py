"""Everybody in ``/proc``, in rounds: whoever is quickly looked through comes first, and nobody takes all of the time.

A tenant can make any look at one of its processes long (descriptors, mappings, threads) or never ending (a memory map
that somebody keeps locked). So each process gets a moment first, and those that need more are looked at again, with more
time each, once everybody had theirs. A look that does not come back at all is left behind with its thread. Whoever was
not looked through is in the answer by PID: that is never the same as holding nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from scrubber.adapters.walk.look import Found, Look, Settled, name_of, start_of_user_process
from scrubber.adapters.walk.seeing import Target

__all__ = ["Budget", "Unfinished", "Walk", "walk"]

_MOMENT = 0.002
"""Seconds for each process in the first round; in those that follow, an equal share of what is left of the walk."""
_HANGS = 1.0
"""Seconds after the end of its time in which a look comes back, unless it waits in the kernel."""
_WATCH = 0.1
_MOST_HANGING = 16
_MOST_LISTS = 16
_MOST_TOLD = 1000


class Budget(NamedTuple):
    """Seconds: for one process, and for the whole walk."""

    each: float = 4.0
    whole: float = 8.0


class Unfinished(NamedTuple):
    """A process that was not looked through: whether it holds the target, or more of it than ``parts``, is not known.

    Attributes:
        started: clock ticks since boot; 0 when this user may not know.
        name: the short one that the kernel keeps.
        why: a sentence's end for the operator, as in "its descriptors were not looked through within 4 s".
    """

    pid: int
    started: int
    name: str
    uid: int
    why: str
    parts: tuple[int, ...] = ()


class Walk(NamedTuple):
    """What a walk found.

    Attributes:
        holders: who has a part of the target, and those who were asked for by PID.
        unreadable: how many processes (by user) it was not allowed to look into, or not all of.
        unfinished: who was not looked through. Who was found to hold the target all the same is among the holders too.
        untold: how many more there are of those.
    """

    holders: tuple[Found, ...]
    unreadable: tuple[tuple[int, int], ...]
    unfinished: tuple[Unfinished, ...] = ()
    untold: int = 0


_DEFAULT = Budget()


def walk(
    target: Target,
    excluded: Iterable[int] = (),
    named: Iterable[int] = (),
    budget: Budget = _DEFAULT,
    clock: Callable[[], float] = time.monotonic,
) -> Walk:
    """Every process but ``excluded`` that has the target open or mapped, in any of its threads.

    Args:
        named: PIDs that are described as well when they hold nothing that a walk can see. Those that are gone, or
            zombies without a living thread, are not in the answer.
        clock: seconds.
    """
    rounds = _Rounds(target, frozenset(excluded), frozenset(named), budget, clock)
    rounds.walk()
    return rounds.answer()


_hanging: dict[int, tuple[int, threading.Thread]] = {}
"""By PID: start time of a process over which a look hangs, and the thread that was left behind with it. It is not looked
at again until that thread comes back, so that it costs one thread however often somebody walks.
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
    ) -> None:
        self._target = target
        self._named = named - excluded
        self._known = set(excluded | named)
        self._budget = budget
        self._clock = clock
        self._end = clock() + budget.whole
        self._settled: Settled = set()
        self._found: dict[int, Found] = {}
        self._closed_by: dict[int, int] = {}
        self._again: list[int] = []
        self._cut: dict[int, tuple[str, tuple[int, ...]]] = {}
        """Why a process was not looked through until now, and what was found of it."""
        self._steps = self._schedule()
        self._lock = threading.Lock()
        """Held for what follows, and by whoever notes something."""
        self._looker: threading.Thread | None = None
        self._look: Look | None = None
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
        unfinished = [row for row in map(self._unfinished, self._cut) if row is not None]
        unfinished.sort(key=lambda row: row.pid not in self._named)
        told = max(_MOST_TOLD, len(self._named))
        return Walk(
            tuple(sorted(self._found.values())),
            tuple(sorted(Counter(self._closed_by.values()).items())),
            tuple(unfinished[:told]),
            len(unfinished[told:]),
        )

    def _fresh(self) -> Iterator[int]:
        """Whoever was not known yet, also those that were forked meanwhile: one that forks and ends is never there when
        it is looked at, but its child is in the next list. A busy node always has new ones, so the lists come to an end.
        """
        for _ in range(_MOST_LISTS):
            fresh = [pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) not in self._known]
            if not fresh:
                return
            self._known.update(fresh)
            yield from fresh

    def _schedule(self) -> Iterator[tuple[int, float]]:
        """Whom to look at next, and for how many seconds."""
        queue, moment = sorted(self._named), min(_MOMENT, self._budget.each)
        while True:
            for pid in chain(queue, self._fresh()):
                yield pid, moment
            queue, self._again = self._again, []
            share = min(self._budget.each, (self._end - self._clock()) / max(1, len(queue)))
            if not queue or share <= moment:
                return
            moment = share

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
        _hanging[look.pid] = (look.started or 0, looker)
        self._cut[look.pid] = (f"the look at its {look.at} does not come back from the kernel", tuple(look.parts))
        self._looker = self._look = None
        if sum(thread.is_alive() for _, thread in _hanging.values()) >= _MOST_HANGING:
            self._end = self._clock()

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
            elif _still_hangs(pid):
                self._cut[pid] = ("a look at it that was begun earlier has not come back from the kernel", ())
            else:
                self._look_returns_by = time.monotonic() + moment + _HANGS
                return Look(pid, self._target, self._settled, _alarm(self._clock, min(now + moment, self._end)))
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
        for earlier in (self._found, self._cut, self._closed_by):
            earlier.pop(look.pid, None)
        if found is not None:
            self._found[look.pid] = found
        if look.cut is not None:
            self._cut[look.pid] = (f"there was no time to look through its {look.cut}", tuple(look.parts))
            self._again.append(look.pid)
        if look.closed and not look.parts and (uid := _uid_of(look.pid)) is not None:
            self._closed_by[look.pid] = uid

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
        return Unfinished(pid, started, name_of(pid), uid, why, tuple(sorted(parts)))


def _alarm(clock: Callable[[], float], end: float) -> Callable[[], bool]:
    return lambda: clock() > end


def _still_hangs(pid: int) -> bool:
    """Whether an earlier look at this very process has not come back yet."""
    started, thread = _hanging.get(pid, (0, None))
    if thread is None:
        return False
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
