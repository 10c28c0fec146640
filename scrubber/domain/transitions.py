"""A transition table: pairs of state and event that exist, and the error for every other pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Generic, TypeVar

__all__ = ["IllegalTransition", "TransitionTable"]

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class IllegalTransition(AssertionError):
    """The code asked for a pair that the table does not hold: a defect of the program, never of its input."""


class TransitionTable(Generic[S, E]):
    """The only way a device changes state."""

    def __init__(self, pairs: Mapping[tuple[S, E], S]) -> None:
        self._pairs = dict(pairs)

    def __call__(self, state: S, event: E) -> S:
        """The state after ``event``; raises :class:`IllegalTransition` for a pair the table does not hold."""
        try:
            return self._pairs[state, event]
        except KeyError:
            raise IllegalTransition(f"{event.value} cannot happen to a device that is {state.value}") from None

    def allows(self, state: S, event: E) -> bool:
        """Whether the table holds the pair."""
        return (state, event) in self._pairs

    def __iter__(self) -> Iterator[tuple[S, E, S]]:
        """Every row: state, event, next state."""
        return iter((state, event, after) for (state, event), after in self._pairs.items())
