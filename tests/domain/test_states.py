"""The two state tables of a device: legal and illegal transitions, and a way out of every state."""

from __future__ import annotations

from itertools import product

import pytest

from scrubber.domain.states import (
    HEALTH_TRANSITIONS,
    HYGIENE_TRANSITIONS,
    Health,
    HealthEvent,
    Hygiene,
    HygieneEvent,
    IllegalTransition,
)

HYGIENE_ROWS = {
    # from every state: a service start invalidates what was not watched
    **{(state, HygieneEvent.SERVICE_STARTED): Hygiene.DIRTY for state in Hygiene},
    (Hygiene.DIRTY, HygieneEvent.ADOPTED): Hygiene.IN_USE,
    (Hygiene.IN_USE, HygieneEvent.ADOPTED): Hygiene.IN_USE,
    (Hygiene.DIRTY, HygieneEvent.SCRUB_STARTED): Hygiene.SCRUBBING,
    (Hygiene.CLEAN, HygieneEvent.SCRUB_STARTED): Hygiene.SCRUBBING,
    (Hygiene.SCRUBBING, HygieneEvent.SCRUB_PASSED): Hygiene.CLEAN,
    (Hygiene.SCRUBBING, HygieneEvent.SCRUB_ENDED): Hygiene.DIRTY,
    (Hygiene.CLEAN, HygieneEvent.GRANTED): Hygiene.IN_USE,
    (Hygiene.DIRTY, HygieneEvent.GRANTED): Hygiene.IN_USE,
    (Hygiene.IN_USE, HygieneEvent.GRANTED): Hygiene.IN_USE,
    (Hygiene.IN_USE, HygieneEvent.RELEASED): Hygiene.DIRTY,
    (Hygiene.CLEAN, HygieneEvent.CERTIFICATE_VOIDED): Hygiene.DIRTY,
    (Hygiene.DIRTY, HygieneEvent.CERTIFICATE_VOIDED): Hygiene.DIRTY,
    (Hygiene.SCRUBBING, HygieneEvent.CERTIFICATE_VOIDED): Hygiene.DIRTY,
}

HEALTH_ROWS = {
    (Health.HEALTHY, HealthEvent.SOFT_SIGNAL): Health.SUSPECT,
    (Health.SUSPECT, HealthEvent.SOFT_SIGNAL): Health.SUSPECT,
    (Health.SUSPECT, HealthEvent.SIGNALS_ENDED): Health.HEALTHY,
    (Health.HEALTHY, HealthEvent.FAULT): Health.QUARANTINED,
    (Health.SUSPECT, HealthEvent.FAULT): Health.QUARANTINED,
    (Health.QUARANTINED, HealthEvent.FAULT): Health.QUARANTINED,
    (Health.RECOVERING, HealthEvent.FAULT): Health.QUARANTINED,
    (Health.PROBATION, HealthEvent.FAULT): Health.QUARANTINED,
    **{(state, HealthEvent.QUARANTINED_BY_OPERATOR): Health.QUARANTINED for state in Health},
    **{(state, HealthEvent.ATTEMPTS_EXHAUSTED): Health.CONDEMNED for state in Health},
    (Health.QUARANTINED, HealthEvent.RECOVERY_STARTED): Health.RECOVERING,
    (Health.RECOVERING, HealthEvent.RECOVERY_FAILED): Health.QUARANTINED,
    (Health.RECOVERING, HealthEvent.RECOVERED): Health.PROBATION,
    (Health.PROBATION, HealthEvent.PROBATION_PASSED): Health.HEALTHY,
    (Health.QUARANTINED, HealthEvent.RELEASED_BY_OPERATOR): Health.PROBATION,
    (Health.CONDEMNED, HealthEvent.RELEASED_BY_OPERATOR): Health.PROBATION,
}


@pytest.mark.parametrize(("state", "event"), list(product(Hygiene, HygieneEvent)))
def test_hygiene_changes_by_its_transition_table_only(state: Hygiene, event: HygieneEvent) -> None:
    expected = HYGIENE_ROWS.get((state, event))
    assert HYGIENE_TRANSITIONS.allows(state, event) == (expected is not None)
    if expected is None:
        with pytest.raises(IllegalTransition, match=rf"the event {event.value} is not allowed in state {state.value}"):
            HYGIENE_TRANSITIONS(state, event)
    else:
        assert HYGIENE_TRANSITIONS(state, event) is expected


@pytest.mark.parametrize(("state", "event"), list(product(Health, HealthEvent)))
def test_health_changes_by_its_transition_table_only(state: Health, event: HealthEvent) -> None:
    expected = HEALTH_ROWS.get((state, event))
    assert HEALTH_TRANSITIONS.allows(state, event) == (expected is not None)
    if expected is None:
        with pytest.raises(IllegalTransition, match=rf"the event {event.value} is not allowed in state {state.value}"):
            HEALTH_TRANSITIONS(state, event)
    else:
        assert HEALTH_TRANSITIONS(state, event) is expected


def test_only_a_passed_scrub_makes_a_device_clean() -> None:
    assert {event for _, event, after in HYGIENE_TRANSITIONS if after is Hygiene.CLEAN} == {HygieneEvent.SCRUB_PASSED}


def test_device_in_use_is_never_scrubbed() -> None:
    assert not HYGIENE_TRANSITIONS.allows(Hygiene.IN_USE, HygieneEvent.SCRUB_STARTED)


def test_only_ended_signals_and_a_passed_probation_make_a_device_healthy() -> None:
    rows = {(state, event) for state, event, after in HEALTH_TRANSITIONS if after is Health.HEALTHY}
    assert rows == {(Health.SUSPECT, HealthEvent.SIGNALS_ENDED), (Health.PROBATION, HealthEvent.PROBATION_PASSED)}


def test_condemned_device_returns_only_by_an_operator_and_through_probation() -> None:
    out = (Health.CONDEMNED, Health.QUARANTINED)
    ways = {
        (event, after) for state, event, after in HEALTH_TRANSITIONS if state is Health.CONDEMNED and after not in out
    }
    assert ways == {(HealthEvent.RELEASED_BY_OPERATOR, Health.PROBATION)}


@pytest.mark.parametrize(("hygiene", "health"), list(product(Hygiene, Health)))
def test_every_state_has_a_path_back_to_clean_and_healthy(hygiene: Hygiene, health: Health) -> None:
    reached, frontier = {(hygiene, health)}, [(hygiene, health)]
    while frontier:
        at_hygiene, at_health = frontier.pop()
        following = [(after, at_health) for state, _, after in HYGIENE_TRANSITIONS if state is at_hygiene]
        following += [(at_hygiene, after) for state, _, after in HEALTH_TRANSITIONS if state is at_health]
        new = [each for each in following if each not in reached]
        reached.update(new)
        frontier += new
    assert (Hygiene.CLEAN, Health.HEALTHY) in reached


@pytest.mark.parametrize("health", Health)
def test_every_health_state_except_condemned_has_a_path_back_without_an_operator(health: Health) -> None:
    people = {HealthEvent.RELEASED_BY_OPERATOR, HealthEvent.QUARANTINED_BY_OPERATOR, HealthEvent.ATTEMPTS_EXHAUSTED}
    reached, frontier = {health}, [health]
    while frontier:
        at = frontier.pop()
        new = {after for state, event, after in HEALTH_TRANSITIONS if state is at and event not in people} - reached
        reached |= new
        frontier += new
    assert (Health.HEALTHY in reached) == (health is not Health.CONDEMNED)
