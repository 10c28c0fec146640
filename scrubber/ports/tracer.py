"""What is being done at the moment: scopes that the engine opens, and that log lines and traces are told apart by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeAlias

__all__ = ["UNTRACED", "Attribute", "Span", "Tracer"]

Attribute: TypeAlias = str | int | float | bool | None


class Span(Protocol):
    def note(self, **attributes: Attribute) -> None:
        """What became known meanwhile; None for what is not so any more. Never raises, never waits."""


class Tracer(Protocol):
    def span(self, name: str, **attributes: Attribute) -> AbstractContextManager[Span]:
        """One thing that is done, from entering to leaving, in the task that enters; never raises, never waits.

        What is begun inside, a task too, belongs to it. An exception that leaves it is how it ended, and goes on.

        Args:
            name: stable and of a small set; ``hand-over``, ``scrub``, ``step memory``.
            attributes: ``device``, ``scrub_id`` and ``tenant`` are on every log line inside; None stands for nobody's.
        """


class _Untraced:
    """Tells nobody."""

    @contextmanager
    def span(self, name: str, **attributes: Attribute) -> Iterator[Span]:
        yield self

    def note(self, **attributes: Attribute) -> None: ...


UNTRACED: Tracer = _Untraced()
