"""The events that the audit trail may have, by name: what history can be asked for.

Promise: these are all that the service writes, and a name that is none of them is answered with those that were meant.
``tests/observability/test_event_names.py`` compares them with the sources. Events that only the log has are not here.
"""

from __future__ import annotations

from collections.abc import Iterable

from scrubber.domain.errors import InvalidRequest

__all__ = ["AUDIT_EVENTS", "EVENT_PREFIXES", "UNAUDITED_EVENTS", "validate_event_names"]

AUDIT_EVENTS = (
    "baseline.accepted",
    "baseline.taken",
    "breaker.closed",
    "breaker.opened",
    "certificate.issued",
    "certificate.voided",
    "device.adopted",
    "device.appeared",
    "device.released",
    "device.touched",
    "eraser.orphan",
    "glass.broken",
    "glass.mended",
    "grant.named",
    "handover.granted",
    "health.condemned",
    "health.healthy",
    "health.probation",
    "health.quarantined",
    "health.recovering",
    "health.recovery-failed",
    "health.signal",
    "health.suspect",
    "key.created",
    "leftover.ended",
    "leftover.pod-ended",
    "operator.quarantined",
    "operator.released",
    "operator.reset",
    "policy.accepted",
    "policy.rejected",
    "process.uninspected",
    "reset.finished",
    "residue.unexplained",
    "scrub.finished",
    "scrub.started",
    "service.started",
    "stranger.ended",
    "tenant.blamed",
    "uninspected.ended",
    "use.ungranted",
)
"""In alphabetical order."""

EVENT_PREFIXES = tuple(dict.fromkeys(f"{name.partition('.')[0]}." for name in AUDIT_EVENTS))
"""Each asks for all events that begin with it: ``health.``."""

UNAUDITED_EVENTS = ("audit.broken", "audit.unread", "handover.refused")
"""What the service tells its log and metrics, and not the trail."""

_MAX_QUOTED_CHARS = 60
"""Characters of a wrong name that are told back."""


def validate_event_names(names: Iterable[str]) -> tuple[str, ...]:
    """``names``, each once: whole names of events, and beginnings that end in a dot.

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
