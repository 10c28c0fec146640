"""What the engine runs on: time, traces and the policy in force."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:  # the plugin needs the tracer only, and is to be registered soon after its start
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
        """As :meth:`timeout`; a standstill of this process for more than a tenth of ``seconds`` is given again, up to as much
        in all.

        For deadlines that a device is blamed for. The body is given a function that says how many of the seconds are over.
        """


AttributeValue: TypeAlias = str | int | float | bool | None


class Span(Protocol):
    def set_attributes(self, **attributes: AttributeValue) -> None:
        """What became known meanwhile; None for what is not so any more. Never raises, never waits."""


class Tracer(Protocol):
    def span(self, name: str, **attributes: AttributeValue) -> AbstractContextManager[Span]:
        """One thing that is done, from entering to leaving, in the task that enters; never raises, never waits.

        What is begun inside, a task too, belongs to it. An exception that leaves it is how it ended, and goes on.

        Args:
            name: stable and of a small set; ``hand-over``, ``scrub``, ``step memory``.
            attributes: ``device``, ``scrub_id`` and ``tenant`` are on every log line inside; None stands for nobody's.
        """


class _NoopTracer:
    """Tells nobody."""

    @contextmanager
    def span(self, name: str, **attributes: AttributeValue) -> Iterator[Span]:
        yield self

    def set_attributes(self, **attributes: AttributeValue) -> None: ...


NOOP_TRACER: Tracer = _NoopTracer()


class PolicyProvider(Protocol):
    @property
    def policy(self) -> Policy:
        """The one in force."""

    @property
    def has_changed(self) -> bool:
        """Whether what it comes from is another thing, or in another state, than when it was last read."""

    def reload(self) -> bool:
        """Read it again and put it in force; whether anything is another policy's now. May block for a moment.

        Raises:
            InvalidConfiguration: it cannot be read, or cannot be in force; the old one stays.
        """
