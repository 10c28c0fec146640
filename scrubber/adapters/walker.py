"""The walk over ``/proc`` as a question to a child: what is asked, the child that answers, and how the answer is read.

A walk takes long on a full node, and a tenant can try to make it take for ever. So it is asked of a child of its own
kind (``python -m scrubber.adapters.walker``) that loads no vendor's library and can be killed.
"""

from __future__ import annotations

from collections.abc import Iterable

from scrubber.adapters.children import child
from scrubber.adapters.children.child import Fault
from scrubber.adapters.children.message import Message
from scrubber.adapters.walk import File, Found, Nodes, Target, walk
from scrubber.domain.errors import Unreadable

__all__ = ["WALKER_MODULE", "about", "read_walk"]

WALKER_MODULE = "scrubber.adapters.walker"


def about(target: Target, *, excluded: Iterable[int] = (), named: Iterable[int] = ()) -> Message:
    """The question who holds ``target``; see :func:`scrubber.adapters.walk.walk`."""
    wanted: Message = {"excluded": sorted(excluded), "named": sorted(named)}
    if isinstance(target, File):
        return {"file": [target.device, target.inode], **wanted}
    return {"nodes": sorted(target.numbers), **wanted}


def answer(question: Message) -> Message:
    """The child's answer to a question that :func:`about` made."""
    found = walk(_target(question), _numbers(question, "excluded"), _numbers(question, "named"))
    return {
        "holders": [list(holder) for holder in found.holders],
        "unreadable": [list(row) for row in found.unreadable],
    }


def read_walk(message: Message) -> tuple[list[Found], tuple[str, ...]]:
    """The holders in a child's answer, and what it could not look at, in sentences for a certificate.

    Raises:
        Unreadable: the answer makes no sense.
    """
    rows, unreadable = message.get("holders"), message.get("unreadable")
    if not isinstance(rows, list) or not isinstance(unreadable, list):
        raise Unreadable("The walk over /proc answered no list of holders.")
    try:
        holding = [_found(*row) for row in rows]
        closed = {int(uid): int(count) for uid, count in unreadable}
    except (TypeError, ValueError) as error:
        raise Unreadable("The walk over /proc answered something that makes no sense.") from error
    if not closed:
        return holding, ()
    users = ", ".join(str(uid) for uid in sorted(closed))
    sentence = f"holders: {sum(closed.values())} process(es) of uid {users} could not be looked into"
    return holding, (sentence,)


def _found(pid: object, started: object, command: object, hung: object, parts: Iterable[object]) -> Found:
    numbers = tuple(parts)
    if not all(isinstance(each, int) for each in (pid, started, hung, *numbers)) or not isinstance(command, str):
        raise TypeError("A holder is a PID, a start time, a command, whether it hangs, and numbers.")
    return Found(int(str(pid)), int(str(started)), command, bool(hung), tuple(int(str(each)) for each in numbers))


def _target(question: Message) -> Target:
    if "nodes" in question:
        return Nodes(frozenset(_numbers(question, "nodes")))
    try:
        return File(*_numbers(question, "file"))
    except TypeError as error:
        raise Fault("unreadable", "A file is asked for by a device number and an inode.") from error


def _numbers(question: Message, key: str) -> list[int]:
    found = question.get(key)
    if not isinstance(found, list) or not all(isinstance(each, int) for each in found):
        raise Fault("unreadable", f"A question about holders has a list of numbers under {key!r}.")
    return found


def main() -> None:
    child.serve(child.inherit(), answer)


if __name__ == "__main__":
    main()
