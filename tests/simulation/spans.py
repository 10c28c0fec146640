"""A tracer that keeps its spans: their nesting, their attributes, and how they ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Self

from scrubber.ports.runtime import AttributeValue, Span

__all__ = ["RecordedSpan", "Recorder"]

_current: ContextVar[RecordedSpan | None] = ContextVar("span", default=None)


@dataclass(eq=False)
class RecordedSpan:
    """One span. ``ended``: the exception with which it ended, ``""`` for none; None while it is open."""

    name: str
    attributes: dict[str, AttributeValue]
    inside: list[Self] = field(default_factory=list)
    ended: str | None = None

    def set_attributes(self, **attributes: AttributeValue) -> None:
        self.attributes.update(attributes)

    def find(self, name: str) -> list[RecordedSpan]:
        """Return the spans of that name among this one and its descendants, in the order of their start."""
        found: list[RecordedSpan] = [self] if self.name == name else []
        return found + [each for child in self.inside for each in child.find(name)]

    @property
    def outline(self) -> str:
        """The nesting as text: ``hand-over(device(check(step holders)), grant)``."""
        inside = ", ".join(each.outline for each in self.inside)
        return f"{self.name}({inside})" if inside else self.name


class Recorder:
    """A :class:`scrubber.ports.Tracer`.

    Attributes:
        roots: spans without a parent.
    """

    def __init__(self) -> None:
        self.roots: list[RecordedSpan] = []

    @contextmanager
    def span(self, name: str, **attributes: AttributeValue) -> Iterator[Span]:
        parent = _current.get()
        span = RecordedSpan(name, dict(attributes))
        (self.roots if parent is None else parent.inside).append(span)
        token = _current.set(span)
        try:
            yield span
        except BaseException as error:
            span.ended = type(error).__name__
            raise
        else:
            span.ended = ""
        finally:
            _current.reset(token)

    def find(self, name: str) -> list[RecordedSpan]:
        return [each for root in self.roots for each in root.find(name)]
