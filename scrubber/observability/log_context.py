"""Binds the device, scrub and tenant that log lines are about, at the places where the engine opens a span.

Invariants: the values bound in a scope are on every line of that scope and of the tasks started in it, including lines
of libraries. Leaving a scope restores the previous values, in whatever order the scopes of a task are left. Nothing
here raises or blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from contextvars import ContextVar, copy_context
from types import TracebackType
from typing import Final, TypeAlias

from structlog.contextvars import bind_contextvars, get_contextvars, unbind_contextvars

from scrubber.ports.runtime import NOOP_TRACER, AttributeValue, Span, Tracer

__all__ = ["CONTEXT_KEYS", "LogContextTracer", "call_without_context", "current_trace_id"]

CONTEXT_KEYS: Final[tuple[str, ...]] = ("device", "scrub_id", "tenant")

_Values: TypeAlias = dict[str, AttributeValue]


class LogContextTracer:
    """A :class:`scrubber.ports.runtime.Tracer` that binds log context and forwards all spans.

    Args:
        inner: the tracer that receives the spans.
    """

    def __init__(self, inner: Tracer = NOOP_TRACER) -> None:
        self._inner = inner
        self._open: ContextVar[tuple[_Values, ...]] = ContextVar("open scopes", default=())

    def span(self, name: str, **attributes: AttributeValue) -> AbstractContextManager[Span]:
        return _LogContextSpan(self._open, self._inner.span(name, **attributes), attributes)


class _LogContextSpan(AbstractContextManager[Span]):
    """One scope. ``open_`` holds the values from before any scope, then those of the open scopes, outermost first."""

    def __init__(
        self, open_: ContextVar[tuple[_Values, ...]], inner: AbstractContextManager[Span], attributes: _Values
    ) -> None:
        self._open = open_
        self._inner = inner
        self._span: Span | None = None
        self._own: _Values = {name: attributes[name] for name in CONTEXT_KEYS if name in attributes}

    def __enter__(self) -> Span:
        self._span = self._inner.__enter__()
        if self._own:
            self._bind()
        return self

    def set_attributes(self, **attributes: AttributeValue) -> None:
        span = self._span
        if span is None:
            return
        span.set_attributes(**attributes)
        noted: _Values = {name: attributes[name] for name in CONTEXT_KEYS if name in attributes}
        if noted:
            self._own.update(noted)
            self._bind()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._span = None
        scopes = self._open.get()
        # If the scope is left in another task than it was entered in, that task has no values of it.
        left = tuple(each for each in scopes if each is not self._own)
        if len(left) < len(scopes):
            self._open.set(left[1:] if len(left) == 1 else left)
            _bind_scopes(left)
        self._inner.__exit__(kind, error, traceback)

    def _bind(self) -> None:
        scopes = self._open.get()
        if not scopes:
            bound = get_contextvars()
            scopes = ({name: bound[name] for name in CONTEXT_KEYS if name in bound},)
        if not any(each is self._own for each in scopes):
            scopes = (*scopes, self._own)
            self._open.set(scopes)
        _bind_scopes(scopes)


def _bind_scopes(scopes: tuple[_Values, ...]) -> None:
    """Bind the values of ``scopes``, the innermost last; None unbinds a key."""
    bound: _Values = {}
    for each in scopes:
        bound.update(each)
    unbind_contextvars(*(name for name in CONTEXT_KEYS if bound.get(name) is None))
    bind_contextvars(**{name: value for name, value in bound.items() if value is not None})


def current_trace_id() -> str | None:
    """Return the trace that log lines of this task name; None without one, and for a trace that is not sampled."""
    bound = get_contextvars().get("trace_id")
    return bound if isinstance(bound, str) else None


def call_without_context(names: Collection[str], callback: Callable[[], None]) -> None:
    """Call ``callback`` as if none of ``names`` were bound; the bindings of the caller stay."""
    if names:
        copy_context().run(_call_unbound, names, callback)
    else:
        callback()


def _call_unbound(names: Collection[str], callback: Callable[[], None]) -> None:
    unbind_contextvars(*names)
    callback()
