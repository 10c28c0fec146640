"""Runs the checks, each within a bound: a file system that hangs costs the look at it, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from scrubber.cli.checks.finding import Check, Examination, Level, Node, unseen

__all__ = ["PATIENCE", "results"]

PATIENCE = 3.0
"""Seconds for one check."""
_ALL_TOGETHER = 3
"""How many times as long all of them may take before each gets but a moment."""
_MOMENT = 0.1


class _Look:
    """One check in a thread of its own, which is left behind when it does not come back."""

    def __init__(self, check: Examination, node: Node) -> None:
        self._check, self._node = check, node
        self._found: tuple[Check, ...] = ()
        self._thread = threading.Thread(target=self._run, name=check.__name__, daemon=True)
        self._thread.start()

    def found(self, seconds: float) -> tuple[Check, ...]:
        self._thread.join(seconds)
        if not self._thread.is_alive():
            return self._found
        sentence = "It did not come to an end: something that it looks at hangs, so nothing is known of it."
        remedy = "dmesg, and cat /proc/mounts: look for a file system or a driver that does not answer."
        return (Check(self._name, Level.WARNING, sentence, remedy),)

    @property
    def _name(self) -> str:
        return self._check.__name__.replace("_", "-")

    def _run(self) -> None:
        try:
            self._found = tuple(self._check(self._node))
        except OSError as error:
            self._found = (unseen(self._name, "so nothing is known of it", error),)
        except Exception as bug:  # noqa: BLE001 - one check that is wrong must not silence all others
            sentence = f"This look is a fault of scrubber itself ({type(bug).__name__}: {bug})."
            remedy = "Report it; what the check is for stands in docs/node-setup.md."
            self._found = (Check(self._name, Level.ERROR, sentence, remedy),)


def results(checks: Sequence[Examination], node: Node, patience: float = PATIENCE) -> tuple[Check, ...]:
    """What every check found, in their order; raises nothing.

    One after the other: they load modules, and two threads that load the same ones can find them half made.

    Args:
        patience: seconds for each; however many hang, the whole takes little more than three times as long.
    """
    due = time.monotonic() + _ALL_TOGETHER * patience
    found: list[Check] = []
    for check in checks:
        found += _Look(check, node).found(max(min(patience, due - time.monotonic()), min(_MOMENT, patience)))
    return tuple(found)
