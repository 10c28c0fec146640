"""The walk over ``/proc`` as a question to a child: what is asked, the child that answers, and how the answer is read.

A walk takes long on a full node, and a tenant can try to make it take for ever. So it is asked of a child of its own
kind (``python -m scrubber.adapters.walker``) that loads no vendor's library, has a budget, and can be killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from scrubber.adapters.children import child
from scrubber.adapters.children.child import Fault
from scrubber.adapters.children.message import Message
from scrubber.adapters.walk import Budget, File, Found, Nodes, Target, Unfinished, walk
from scrubber.domain.errors import Away

__all__ = ["WALKER_MODULE", "Answer", "about", "budget_within", "read_walk"]

WALKER_MODULE = "scrubber.adapters.walker"

_MILLISECONDS = 1000


class Answer(NamedTuple):
    """What a walk found.

    Attributes:
        holders: see :class:`scrubber.adapters.walk.Walk`.
        unfinished: who could not be looked through, so that whether they hold anything is not known.
        not_covered: what could not be looked at, in sentences for a certificate.
    """

    holders: tuple[Found, ...]
    unfinished: tuple[Unfinished, ...]
    not_covered: tuple[str, ...]


def budget_within(deadline: float, each: float | None = None) -> Budget:
    """How long a walk may take that is to be answered within ``deadline`` seconds; ``each``: for one process."""
    whole = deadline * 0.8
    return Budget(whole / 2 if each is None else min(each, whole), whole)


def about(
    target: Target, *, excluded: Iterable[int] = (), named: Iterable[int] = (), budget: Budget | None = None
) -> Message:
    """The question who holds ``target``; see :func:`scrubber.adapters.walk.walk`."""
    each, whole = budget or Budget()
    wanted: Message = {
        "excluded": sorted(excluded),
        "named": sorted(named),
        "milliseconds": [int(each * _MILLISECONDS), int(whole * _MILLISECONDS)],
    }
    if isinstance(target, File):
        return {"file": [target.device, target.inode], **wanted}
    return {"nodes": sorted(target.numbers), **wanted}


def answer(question: Message) -> Message:
    """The child's answer to a question that :func:`about` made."""
    found = walk(_target(question), _numbers(question, "excluded"), _numbers(question, "named"), _budget(question))
    return {
        "holders": [list(holder) for holder in found.holders],
        "unreadable": [list(row) for row in found.unreadable],
        "unfinished": [list(row) for row in found.unfinished],
        "untold": found.untold,
    }


def read_walk(message: Message) -> Answer:
    """A child's answer.

    Raises:
        Away: it makes no sense, which is no fault of the device's.
    """
    rows, unreadable, unfinished = (message.get(key) for key in ("holders", "unreadable", "unfinished"))
    untold = message.get("untold")
    if not (isinstance(rows, list) and isinstance(unreadable, list) and isinstance(unfinished, list)):
        raise Away("The walk over /proc answered no list of holders.")
    try:
        holding = tuple(_found(*row) for row in rows)
        cut_short = tuple(_unfinished(*row) for row in unfinished)
        closed = {int(uid): int(count) for uid, count in unreadable}
        (more,) = _whole(untold)
    except (TypeError, ValueError) as error:
        raise Away("The walk over /proc answered something that makes no sense.") from error
    sentences: list[str] = []
    if closed:
        users = ", ".join(str(uid) for uid in sorted(closed))
        sentences.append(f"holders: {sum(closed.values())} process(es) of uid {users} could not be looked into")
    if more:
        sentences.append(f"holders: {more} more process(es) than are named could not be looked through")
    return Answer(holding, cut_short, tuple(sentences))


def _found(pid: object, started: object, command: object, hung: object, parts: Iterable[object]) -> Found:
    if not isinstance(command, str):
        raise TypeError("A holder's command is a text.")
    pid_, started_, hung_ = _whole(pid, started, hung)
    return Found(pid_, started_, command, bool(hung_), _whole(*parts))


def _unfinished(
    pid: object, started: object, name: object, uid: object, why: object, parts: Iterable[object]
) -> Unfinished:
    if not isinstance(name, str) or not isinstance(why, str):
        raise TypeError("A process has a name, and a reason why it was not looked through.")
    pid_, started_, uid_ = _whole(pid, started, uid)
    return Unfinished(pid_, started_, name, uid_, why, _whole(*parts))


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
        each, whole = _numbers(question, "milliseconds")
    except ValueError as error:
        raise Fault("unreadable", "A budget is two numbers: for a process, and for the walk.") from error
    return Budget(each / _MILLISECONDS, whole / _MILLISECONDS)


def _numbers(question: Message, key: str) -> list[int]:
    found = question.get(key)
    if not isinstance(found, list) or not all(isinstance(each, int) for each in found):
        raise Fault("unreadable", f"A question about holders has a list of numbers under {key!r}.")
    return found


def main() -> None:
    child.serve(child.inherit(), answer)


if __name__ == "__main__":
    main()
