"""The declaration of a fuzzing target: the only description that the runner, the tests and the documents read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["GOAL", "SLOW_GOAL", "SOCKET_GOAL", "Target", "target"]

GOAL: Final = 50_000
"""Inputs that a target gets at least in the recorded runs of one commit; those of all targets are over a million."""
SLOW_GOAL: Final = 20_000
"""The same for a parser that takes a millisecond or more."""
SOCKET_GOAL: Final = 5_000
"""The same where each input opens a connection."""

Check = Callable[[bytes], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One parser or entry point.

    Attributes:
        parser: what is fuzzed, for people.
        covers: modules under test, whose reached lines are reported.
        oracle: what must hold for every input, for people; completes "For every input, ".
        check: applies the oracle to one input: returns whether the input was accepted, and raises when the oracle is
            violated.
        seeds: valid and almost valid inputs.
        words: what inputs are built from, besides what is found in the seeds.
        longest: maximum length of an input in bytes.
        seconds: an input that takes longer is a finding.
        goal: inputs in the recorded runs of one commit.
        share: generated inputs in ``make test``.
    """

    name: str
    parser: str
    covers: tuple[str, ...]
    oracle: str
    check: Check
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...]
    longest: int
    seconds: int
    goal: int
    share: int


def target(
    name: str,
    *,
    parser: str,
    covers: tuple[str, ...],
    oracle: str,
    seeds: tuple[bytes, ...],
    words: tuple[bytes, ...] = (),
    longest: int = 4096,
    seconds: int = 5,
    goal: int = GOAL,
    share: int = 300,
) -> Callable[[Check], Target]:
    """Return a decorator that turns a function into the check of a :class:`Target`."""

    def declare(check: Check) -> Target:
        return Target(
            name=name,
            parser=parser,
            covers=covers,
            oracle=oracle,
            check=check,
            seeds=seeds,
            words=words,
            longest=longest,
            seconds=seconds,
            goal=goal,
            share=share,
        )

    return declare
