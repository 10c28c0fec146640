"""Searches all states of a node, breadth first, for a violated invariant, and for states without a way out."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from scrubber.domain.states import IllegalTransition
from tests.model.node import Broken, Kind, Node

__all__ = ["Report", "search"]


@dataclass
class Report:
    """What was found.

    Attributes:
        complete: whether all states were examined.
        problem: the first broken invariant or state without a way out, with the steps that lead to it.
        steps: how often each step was made.
    """

    states: int = 0
    transitions: int = 0
    records: int = 0
    complete: bool = False
    problem: str = ""
    steps: Counter[str] = field(default_factory=Counter)


def search(node: Node, most: int = 10_000_000) -> Report:
    """Search all states of ``node``, or the first ``most``; liveness is checked of a complete search only.

    Liveness: from every state, steps that happen sooner or later lead to one in which every waiting pod has started or
    its device is out of service with a reason, and to one in which every device that recovers by itself has done so. A
    crash is never needed for that, nor that a user or a process does anything.
    """
    report = Report()
    first = node.canonical(node.first())
    states = [node.pack(first)]
    numbers = {states[0]: 0}
    parents, labels = array("l", [-1]), [""]
    sources, targets = array("l"), array("l")
    position = 0
    try:
        while position < len(states) and len(states) < most:
            state = node.unpack(states[position])
            node.check(state)
            for label, kind, reached in node.transitions(state):
                after = node.pack(node.canonical(reached))
                number = numbers.get(after)
                if number is None:
                    number = numbers[after] = len(states)
                    states.append(after)
                    parents.append(position)
                    labels.append(label)
                report.transitions += 1
                report.steps[label] += 1
                if kind is Kind.SYSTEM and number != position:
                    sources.append(position)
                    targets.append(number)
            position += 1
        report.complete = position == len(states)
    except (Broken, IllegalTransition) as broken:
        report.problem = f"{broken}; after: {_path(position, parents, labels)}"
    report.states, report.records = len(states), len(node._records)
    if report.complete and not report.problem:
        for goal, what in (
            (node.has_started_all, "a pod waits forever"),
            (node.has_way_out, "a device never recovers"),
        ):
            good = bytearray(goal(node.unpack(each)) for each in states)
            stuck = _stuck(good, sources, targets)
            if stuck is not None:
                report.problem = f"liveness: {what}; after: {_path(stuck, parents, labels)}"
                break
    return report


def _stuck(reached: bytearray, sources: array[int], targets: array[int]) -> int | None:
    """Return the first state from which no steps lead to one of ``reached``; None when there is none."""
    first = array("l", [-1]) * len(reached)
    after = array("l", [-1]) * len(sources)
    for edge, target in enumerate(targets):
        after[edge] = first[target]
        first[target] = edge
    left = [number for number, good in enumerate(reached) if good]
    while left:
        edge = first[left.pop()]
        while edge >= 0:
            source = sources[edge]
            if not reached[source]:
                reached[source] = 1
                left.append(source)
            edge = after[edge]
    missing = reached.find(0)
    return None if missing < 0 else missing


def _path(number: int, parents: array[int], labels: Sequence[str]) -> str:
    """Return the steps that lead to a state, up to the names of devices and pods."""
    steps = []
    while number > 0:
        steps.append(labels[number])
        number = parents[number]
    return ", ".join(reversed(steps)) or "nothing"
