"""The names of the events in the audit log, by which its rows can be selected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from scrubber.domain.errors import InvalidRequest
from scrubber.observability.registry.events import EVENTS

__all__ = ["AUDIT_EVENTS", "EVENT_PREFIXES", "UNAUDITED_EVENTS", "validate_event_names"]

AUDIT_EVENTS: Final = tuple(sorted({each.name for each in EVENTS if each.audited}))
"""In alphabetical order."""

EVENT_PREFIXES: Final = tuple(dict.fromkeys(f"{name.partition('.')[0]}." for name in AUDIT_EVENTS))
"""Each selects all events with this prefix: ``health.``."""

UNAUDITED_EVENTS: Final = frozenset(each.name for each in EVENTS) - frozenset(AUDIT_EVENTS)
"""Events that appear in the logs only."""

_MAX_QUOTED_CHARS = 60
"""Limit of an unknown name in the error message, in characters."""


def validate_event_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return ``names`` without duplicates: complete names of events, and prefixes that end in a dot.

    Raises:
        InvalidRequest: one of them is neither; the message lists similar names.
    """
    unique = tuple(dict.fromkeys(names))
    for each in unique:
        if each not in AUDIT_EVENTS and each not in EVENT_PREFIXES:
            raise InvalidRequest(_unknown_event_message(each))
    return unique


def _unknown_event_message(name: str) -> str:
    if name in UNAUDITED_EVENTS:
        return f'The event "{name}" is logged, but is not in the audit log.'
    prefix = f"{name.partition('.')[0]}."
    quoted = name if len(name) <= _MAX_QUOTED_CHARS else f"{name[:_MAX_QUOTED_CHARS]}…"
    if prefix in EVENT_PREFIXES:
        similar = ", ".join(each for each in AUDIT_EVENTS if each.startswith(prefix))
        return f'The audit log has no event "{quoted}". Similar events: {similar}. "{prefix}" selects all of them.'
    return (
        f'The audit log has no event "{quoted}". Give the name of an event, or a prefix that selects all events that begin '
        f"with it: {', '.join(EVENT_PREFIXES)}"
    )
