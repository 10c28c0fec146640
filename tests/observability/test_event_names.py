"""The events that history can be asked for are those that the service writes to its trail."""

from __future__ import annotations

import pytest

from scrubber.domain.errors import InvalidRequest
from scrubber.observability.event_names import BEGINNINGS, ELSEWHERE, EVENTS, asked_for
from tests.observability.log_events import told


def test_they_are_those_that_the_sources_tell() -> None:
    # What the journal levels by itself is an event; everything else is a line of the log alone.
    written = {name for each in told() if not each.level for name in each.names}
    assert written == {*EVENTS, *ELSEWHERE}


def test_each_stands_there_once_and_in_order() -> None:
    assert list(EVENTS) == sorted(set(EVENTS))
    assert list(BEGINNINGS) == sorted({f"{each.split('.')[0]}." for each in EVENTS})


@pytest.mark.parametrize("name", [*EVENTS, *BEGINNINGS])
def test_each_can_be_asked_for(name: str) -> None:
    assert asked_for([name]) == (name,)


def test_what_is_asked_for_twice_is_asked_for_once() -> None:
    assert asked_for(["use.ungranted", "health.", "use.ungranted"]) == ("use.ungranted", "health.")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "glass.shattered",
            'event "glass.shattered"; there are: glass.broken, glass.mended; "glass." asks for all that begin so.',
        ),
        (
            "glass",
            'event "glass"; there are: glass.broken, glass.mended; "glass." asks for all that begin so.',
        ),
        ("handover.refused", '"handover.refused" is in the service\'s log and metrics, and never on the audit trail.'),
    ],
)
def test_a_wrong_name_is_answered_with_those_that_were_meant(name: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked_for(["scrub.finished", name])
    assert str(refused.value).removeprefix("The audit trail has no ") == sentence


@pytest.mark.parametrize(
    "name", ["", ".", "heal", "heal.", "health.q", "Health.", "health.quarantined.", "x" * 100_000]
)
def test_whatever_is_no_name_is_refused_in_a_sentence_of_bounded_length(name: str) -> None:
    with pytest.raises(InvalidRequest, match="The audit trail has no event") as refused:
        asked_for([name])
    assert len(str(refused.value)) < 500
    assert "health." in str(refused.value)
