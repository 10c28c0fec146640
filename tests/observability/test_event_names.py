"""The event names that history filters accept are those that the service writes to its trail."""

from __future__ import annotations

import pytest

from scrubber.domain.errors import InvalidRequest
from scrubber.observability.event_names import AUDIT_EVENTS, EVENT_PREFIXES, UNAUDITED_EVENTS, validate_event_names
from tests.observability.log_events import told


def test_event_name_list_equals_the_events_in_the_sources() -> None:
    # If the journal chooses the level, it is an event; all others are only log lines.
    written = {name for each in told() if not each.level for name in each.names}
    assert written == {*AUDIT_EVENTS, *UNAUDITED_EVENTS}


def test_event_names_are_unique_and_sorted() -> None:
    assert list(AUDIT_EVENTS) == sorted(set(AUDIT_EVENTS))
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
            'event "break-glass.shattered"; there are: break-glass.ended, break-glass.started; "break-glass." asks for all that begin so.',
        ),
        (
            "break-glass",
            'event "break-glass"; there are: break-glass.ended, break-glass.started; "break-glass." asks for all that begin so.',
        ),
        ("handover.refused", '"handover.refused" is in the service\'s log and metrics, and never on the audit trail.'),
    ],
)
def test_wrong_event_name_is_refused_with_similar_names(name: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate_event_names(["scrub.finished", name])
    assert str(refused.value).removeprefix("The audit trail has no ") == message


@pytest.mark.parametrize(
    "name", ["", ".", "heal", "heal.", "health.q", "Health.", "health.quarantined.", "x" * 100_000]
)
def test_invalid_event_name_is_refused_with_a_bounded_message(name: str) -> None:
    with pytest.raises(InvalidRequest, match="The audit trail has no event") as refused:
        validate_event_names([name])
    assert len(str(refused.value)) < 500
    assert "health." in str(refused.value)
