"""Rows of the audit log are selected by the names of their events; any other name is refused with a helpful message."""

from __future__ import annotations

import pytest

from scrubber.domain.errors import InvalidRequest
from scrubber.observability.registry.audit_events import (
    AUDIT_EVENTS,
    EVENT_PREFIXES,
    UNAUDITED_EVENTS,
    validate_event_names,
)


def test_event_names_are_unique_and_sorted() -> None:
    assert list(AUDIT_EVENTS) == sorted(set(AUDIT_EVENTS))
    assert UNAUDITED_EVENTS.isdisjoint(AUDIT_EVENTS)
    assert list(EVENT_PREFIXES) == sorted({f"{each.split('.')[0]}." for each in AUDIT_EVENTS})


@pytest.mark.parametrize("name", [*AUDIT_EVENTS, *EVENT_PREFIXES])
def test_each_event_name_and_prefix_is_accepted(name: str) -> None:
    assert validate_event_names([name]) == (name,)


def test_duplicate_event_names_are_deduplicated() -> None:
    assert validate_event_names(["unauthorized.use.detected", "health.", "unauthorized.use.detected"]) == (
        "unauthorized.use.detected",
        "health.",
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "break-glass.shattered",
            (
                'The audit log has no event "break-glass.shattered". '
                'Similar events: break-glass.ended, break-glass.started. "break-glass." selects all of them.'
            ),
        ),
        (
            "break-glass",
            (
                'The audit log has no event "break-glass". '
                'Similar events: break-glass.ended, break-glass.started. "break-glass." selects all of them.'
            ),
        ),
        ("handover.refused", 'The event "handover.refused" is logged, but is not in the audit log.'),
        ("plugin.started", 'The event "plugin.started" is logged, but is not in the audit log.'),
    ],
)
def test_wrong_event_name_is_refused_with_similar_names(name: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate_event_names(["scrub.finished", name])
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "name", ["", ".", "heal", "heal.", "health.q", "Health.", "health.quarantined.", "x" * 100_000]
)
def test_invalid_event_name_is_refused_with_a_bounded_message(name: str) -> None:
    with pytest.raises(InvalidRequest, match="The audit log has no event") as refused:
        validate_event_names([name])
    assert len(str(refused.value)) < 500
    assert "health." in str(refused.value)
