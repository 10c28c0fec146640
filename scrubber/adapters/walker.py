"""The walk over ``/proc`` as a question to a child: what is asked, the child that answers, and how the answer is read.

A walk takes long on a full node, and a tenant can try to make it take for ever. So it is asked of a child of its own
kind (``python -m scrubber.adapters.walker``) that loads no vendor's library, has a budget, and can be killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from scrubber.adapters.children import child
from scrubber.adapters.children.child import Fault
from scrubber.adapters.children.message import Message
from scrubber.adapters.walk import Budget, File, Found, Nodes, Progress, Relay, Target, Unfinished, Walk, walk
from scrubber.domain.errors import Away
from scrubber.domain.telemetry import Uninspected

__all__ = ["WALKER_MODULE", "Answer", "Walker", "about", "budget_within", "read_walk", "uninspected"]

WALKER_MODULE = "scrubber.adapters.walker"

_MILLISECONDS = 1000
_OF_A_POD = 0.125
_MOST_TARGETS = 1024
"""For which a child remembers what is unfinished: more devices than a node has."""


class Answer(NamedTuple):
    """What a walk found.

    Attributes:
        holders: see :class:`scrubber.adapters.walk.Walk`.
        unfinished: who could not be looked through, so that whether they hold anything is not known.
        not_covered: what could not be looked at, in sentences for a certificate.
        more: how many more holders there are, of the groups of those that are told.
        relays: groups whose processes come and go faster than they can be looked at.
    """

    holders: tuple[Found, ...]
    unfinished: tuple[Unfinished, ...]
    not_covered: tuple[str, ...]
    more: int = 0
    relays: tuple[Relay, ...] = ()


def budget_within(deadline: float, each: float | None = None) -> Budget:
    """How long a walk may take that is to be answered within ``deadline`` seconds; ``each``: for one process."""
    whole = deadline * 0.8
    each = whole / 2 if each is None else min(each, whole)
    return Budget(each, whole, min(each, whole * _OF_A_POD))


def about(
    target: Target,
    *,
    excluded: Iterable[int] = (),
    named: Iterable[int] = (),
    budget: Budget | None = None,
    first: Iterable[str] = (),
    own: Iterable[int] = (),
    scrub: str | None = None,
) -> Message:
    """The question who holds ``target``; see :func:`scrubber.adapters.walk.walk`.

    Args:
        scrub: the id of the scrub that asks: what its walks left unfinished goes on. None: nothing goes on.
    """
    wanted: Message = {
        "excluded": sorted(excluded),
        "named": sorted(named),
        "milliseconds": [int(each * _MILLISECONDS) for each in budget or Budget()],
        "first": sorted(first),
        "own": sorted(own),
        "scrub": scrub,
    }
    if isinstance(target, File):
        return {"file": [target.device, target.inode], **wanted}
    return {"nodes": sorted(target.numbers), **wanted}


class Walker:
    """Answers questions that :func:`about` made; one child's.

    What a walk left unfinished goes on in the next one for the same target and the same scrub. A child that is replaced
    begins anew.
    """

    def __init__(self, walk: Callable[..., Walk] = walk) -> None:
        self._walk = walk
        self._progress: dict[Target, Progress] = {}

    def answer(self, question: Message) -> Message:
        """The child's answer."""
        target = _target(question)
        if target not in self._progress and len(self._progress) >= _MOST_TARGETS:
            self._progress.clear()
        progress = self._progress.setdefault(target, Progress())
        progress.begin(_scrub(question))
        found = self._walk(
            target,
            _numbers(question, "excluded"),
            _numbers(question, "named"),
            _budget(question),
            first=_texts(question, "first"),
            progress=progress,
            own=_numbers(question, "own"),
        )
        return {
            "holders": [list(holder) for holder in found.holders],
            "unreadable": [list(row) for row in found.unreadable],
            "unfinished": [list(row) for row in found.unfinished],
            "relays": [list(row) for row in found.relays],
            "counts": [found.untold, found.more, found.missed, found.pieces],
        }


def read_walk(message: Message) -> Answer:
    """A child's answer.

    Raises:
        Away: it makes no sense, which is no fault of the device's.
    """
    rows, unreadable, unfinished, relayed, counts = (
        message.get(key) for key in ("holders", "unreadable", "unfinished", "relays", "counts")
    )
    if not (
        isinstance(rows, list)
        and isinstance(unreadable, list)
        and isinstance(unfinished, list)
        and isinstance(relayed, list)
        and isinstance(counts, list)
    ):
        raise Away("The walk over /proc answered no list of holders.")
    try:
        holding = tuple(_found(*row) for row in rows)
        cut_short = tuple(_unfinished(*row) for row in unfinished)
        relays = tuple(_relay(*row) for row in relayed)
        closed = {int(uid): int(count) for uid, count in unreadable}
        untold, more, missed, pieces = _whole(*counts)
    except (TypeError, ValueError) as error:
        raise Away("The walk over /proc answered something that makes no sense.") from error
    sentences: list[str] = []
    if closed:
        users = ", ".join(str(uid) for uid in sorted(closed))
        sentences.append(f"holders: {sum(closed.values())} process(es) of uid {users} could not be looked into")
    if untold:
        sentences.append(f"holders: {untold} more process(es) than are named could not be looked through")
    if missed and not relays:
        sentences.append(f"holders: {missed} short-lived process(es) ended before they could be looked at")
    if pieces:
        sentences.append(
            f"holders: {pieces} process(es) were looked through in pieces, over several walks; descriptors moved meanwhile are "
            "not seen"
        )
    return Answer(holding, cut_short, tuple(sentences), more, relays)


def uninspected(unfinished: Iterable[Unfinished], relays: Iterable[Relay]) -> tuple[Uninspected, ...]:
    """What a walk could not look through, as a report of holders has it."""
    of_processes = (
        Uninspected(
            each.pid,
            each.started,
            f"{each.name} of uid {each.uid}: {each.why}",
            confined=each.confined,
            walks=each.walks,
        )
        for each in unfinished
    )
    of_groups = (
        Uninspected(
            0,
            0,
            f"processes of {f'pod {each.pod}' if each.pod else each.group or 'an unknown control group'} come and go "
            "faster than they can be looked at",
            pod=each.pod,
            confined=each.confined,
        )
        for each in relays
    )
    return (*of_processes, *of_groups)


def _found(pid: object, started: object, command: object, hung: object, parts: Iterable[object]) -> Found:
    if not isinstance(command, str):
        raise TypeError("A holder's command is a text.")
    pid_, started_, hung_ = _whole(pid, started, hung)
    return Found(pid_, started_, command, bool(hung_), _whole(*parts))


def _unfinished(
    pid: object,
    started: object,
    name: object,
    uid: object,
    why: object,
    parts: Iterable[object],
    confined: object,
    walks: object,
) -> Unfinished:
    if not isinstance(name, str) or not isinstance(why, str):
        raise TypeError("A process has a name, and a reason why it was not looked through.")
    pid_, started_, uid_, confined_, walks_ = _whole(pid, started, uid, confined, walks)
    return Unfinished(pid_, started_, name, uid_, why, _whole(*parts), bool(confined_), walks_)


def _relay(group: object, pod: object, confined: object) -> Relay:
    if not isinstance(group, str) or not (pod is None or isinstance(pod, str)):
        raise TypeError("A group is a text, and so is a pod.")
    return Relay(group, pod, confined is True)


def _whole(*numbers: object) -> tuple[int, ...]:
    if not all(isinstance(each, int) for each in numbers):
        raise TypeError("PIDs, start times, users and parts are numbers.")
    return tuple(int(each) for each in numbers if isinstance(each, int))


def _target(question: Message) -> Target:
    if "nodes" in question:
        return Nodes(frozenset(_numbers(question, "nodes")))
    try:
        return File(*_numbers(question, "file"))
    except TypeError as error:
        raise Fault("unreadable", "A file is asked for by a device number and an inode.") from error


def _budget(question: Message) -> Budget:
    try:
        each, whole, pod = _numbers(question, "milliseconds")
    except ValueError as error:
        raise Fault("unreadable", "A budget is three numbers: for a process, for the walk, and for a pod.") from error
    return Budget(each / _MILLISECONDS, whole / _MILLISECONDS, pod / _MILLISECONDS)


def _numbers(question: Message, key: str) -> list[int]:
    found = question.get(key)
    if not isinstance(found, list) or not all(isinstance(each, int) for each in found):
        raise Fault("unreadable", f"A question about holders has a list of numbers under {key!r}.")
    return found


def _texts(question: Message, key: str) -> list[str]:
    found = question.get(key)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise Fault("unreadable", f"A question about holders has a list of texts under {key!r}.")
    return found


def _scrub(question: Message) -> str | None:
    found = question.get("scrub")
    if not (found is None or isinstance(found, str)):
        raise Fault("unreadable", "A question about holders has a scrub's id, or null.")
    return found


def main() -> None:
    child.serve(child.inherit(), Walker().answer)


if __name__ == "__main__":
    main()
