"""Ports for the engine's runtime: clock, tracer and the policy in force."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:  # the plugin needs only the tracer and must register soon after it starts
    from scrubber.domain.policy import Policy

__all__ = ["NOOP_TRACER", "AttributeValue", "Clock", "PolicyProvider", "Span", "Tracer"]


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never go backwards; for deadlines inside one process."""

    def wall(self) -> float:
        """Seconds since the epoch; for the ledger and for people."""

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``; 0 yields to other tasks once."""

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[object]:
        """Cancel the body after ``seconds`` and raise :class:`TimeoutError` from the ``async with``."""

    def stall_tolerant_timeout(self, seconds: float) -> AbstractAsyncContextManager[Callable[[], float]]:
        """Like :meth:`timeout`, but ignores stalls of this process.

        A stall of this process for more than a tenth of ``seconds`` is added back to the deadline, up to ``seconds`` in
        total. Use it for deadlines whose expiry is blamed on a device. The context manager yields a function that
        returns how many of the seconds have passed.
        """


AttributeValue: TypeAlias = str | int | float | bool | None


class Span(Protocol):
    def set_attributes(self, **attributes: AttributeValue) -> None:
        """Set attributes that became known; None for one that no longer applies. Never raises or blocks."""


# See docs/decisions/0039-logs-and-traces.md.
class Tracer(Protocol):
    def span(self, name: str, **attributes: AttributeValue) -> AbstractContextManager[Span]:
        """Trace one operation, while the context is open, in the task that enters it. Never raises or blocks.

        Spans and tasks that start inside it become its children. An exception that leaves the context is recorded as
        its result and propagates.

        Args:
            name: stable, from a small set: ``hand-over``, ``scrub``, ``step memory``.
            attributes: ``device``, ``scrub_id`` and ``tenant`` appear on every log line inside; None means that there
                is none.
        """


class _NoopTracer:
    """Records nothing."""

    @contextmanager
    def span(self, name: str, **attributes: AttributeValue) -> Iterator[Span]:
        yield self

    def set_attributes(self, **attributes: AttributeValue) -> None: ...


NOOP_TRACER: Tracer = _NoopTracer()


class PolicyProvider(Protocol):
    @property
    def policy(self) -> Policy:
        """The policy in force."""

    @property
    def has_changed(self) -> bool:
        """Whether the policy's source was replaced or modified since it was last read."""

    def reload(self) -> bool:
        """Read the policy's source again and apply it; return whether any setting changed. May block for a moment.

        Raises:
            InvalidConfiguration: the source cannot be read or applied; the old policy stays in force.
        """
