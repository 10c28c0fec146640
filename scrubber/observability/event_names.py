"""The names of the events in the audit log, which history can be filtered by.

Invariant: the service writes no other events to the audit log, and an unknown name is refused with a list of similar
ones. ``tests/observability/test_event_names.py`` compares the names with the sources. Events that appear only in the
log are not included.
"""

from __future__ import annotations

from collections.abc import Iterable

from scrubber.domain.errors import InvalidRequest

__all__ = ["AUDIT_EVENTS", "EVENT_PREFIXES", "UNAUDITED_EVENTS", "validate_event_names"]

AUDIT_EVENTS = (
    "baseline.accepted",
    "baseline.recorded",
    "break-glass.ended",
    "break-glass.started",
    "breaker.closed",
    "breaker.opened",
    "certificate.issued",
    "certificate.voided",
    "device.adopted",
    "device.appeared",
    "device.marked-dirty",
    "device.released",
    "eraser.orphan.found",
    "grant.identified",
    "handover.granted",
    "health.condemned",
    "health.errors-reported",
    "health.healthy",
    "health.probation",
    "health.quarantined",
    "health.recovering",
    "health.recovery-failed",
    "health.suspect",
    "key.created",
    "leftover.pod.killed",
    "leftover.process.killed",
    "operator.quarantined",
    "operator.released",
    "operator.reset",
    "policy.accepted",
    "policy.rejected",
    "reset.finished",
    "residue.unexplained",
    "scrub.finished",
    "scrub.started",
    "service.started",
    "tenant.flagged",
    "unauthorized.process.killed",
    "unauthorized.use.detected",
    "uninspected.process.found",
    "uninspected.process.killed",
)
"""In alphabetical order."""

EVENT_PREFIXES = tuple(dict.fromkeys(f"{name.partition('.')[0]}." for name in AUDIT_EVENTS))
"""Each selects all events with this prefix: ``health.``."""

UNAUDITED_EVENTS = ("audit.broken", "audit.unverified", "handover.refused")
"""Events that appear in the service's log and metrics, but not in the audit log."""

_MAX_QUOTED_CHARS = 60
"""Limit of an unknown name in the error message, in characters."""


def validate_event_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return ``names`` without duplicates: complete names of events, and prefixes that end in a dot.

    Raises:
        InvalidRequest: one of them is neither.
    """
    asked = tuple(dict.fromkeys(names))
    for each in asked:
        if each not in AUDIT_EVENTS and each not in EVENT_PREFIXES:
            raise InvalidRequest(_unknown_event_message(each))
    return asked


def _unknown_event_message(name: str) -> str:
    if name in UNAUDITED_EVENTS:
        return f'"{name}" is in the service\'s log and metrics, and never on the audit trail.'
    beginning = f"{name.partition('.')[0]}."
    shown = name if len(name) <= _MAX_QUOTED_CHARS else f"{name[:_MAX_QUOTED_CHARS]}…"
    if beginning in EVENT_PREFIXES:
        there = ", ".join(each for each in AUDIT_EVENTS if each.startswith(beginning))
        return f'The audit trail has no event "{shown}"; there are: {there}; "{beginning}" asks for all that begin so.'
    return (
        f'The audit trail has no event "{shown}"; there are those that begin with {", ".join(EVENT_PREFIXES)} '
        "A beginning with its dot asks for all of them."
    )
