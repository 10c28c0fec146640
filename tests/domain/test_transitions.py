"""The two tables by which a device changes state: what is legal, what is not, and that every state has a way out."""

from __future__ import annotations

from itertools import product

import pytest

from scrubber.domain.health import HEALTH, Health, HealthEvent
from scrubber.domain.hygiene import HYGIENE, Hygiene, HygieneEvent
from scrubber.domain.transitions import IllegalTransition

HYGIENE_ROWS = {
    # from everywhere, a start of the service forgets what it did not watch
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
    (Hygiene.CLEAN, HygieneEvent.TOUCHED): Hygiene.DIRTY,
    (Hygiene.DIRTY, HygieneEvent.TOUCHED): Hygiene.DIRTY,
    (Hygiene.SCRUBBING, HygieneEvent.TOUCHED): Hygiene.DIRTY,
}

HEALTH_ROWS = {
    (Health.HEALTHY, HealthEvent.SOFT_SIGNAL): Health.SUSPECT,
    (Health.SUSPECT, HealthEvent.SOFT_SIGNAL): Health.SUSPECT,
    (Health.SUSPECT, HealthEvent.CALM): Health.HEALTHY,
    (Health.HEALTHY, HealthEvent.FAULT): Health.QUARANTINED,
    (Health.SUSPECT, HealthEvent.FAULT): Health.QUARANTINED,
    (Health.QUARANTINED, HealthEvent.FAULT): Health.QUARANTINED,
    (Health.RECOVERING, HealthEvent.FAULT): Health.QUARANTINED,
    (Health.PROBATION, HealthEvent.FAULT): Health.QUARANTINED,
    **{(state, HealthEvent.ORDERED_OUT): Health.QUARANTINED for state in Health},
    **{(state, HealthEvent.EXHAUSTED): Health.CONDEMNED for state in Health},
    (Health.QUARANTINED, HealthEvent.RECOVERY_STARTED): Health.RECOVERING,
    (Health.RECOVERING, HealthEvent.RECOVERY_FAILED): Health.QUARANTINED,
    (Health.RECOVERING, HealthEvent.RECOVERED): Health.PROBATION,
    (Health.PROBATION, HealthEvent.EARNED): Health.HEALTHY,
    (Health.QUARANTINED, HealthEvent.RELEASED_BY_PERSON): Health.PROBATION,
    (Health.CONDEMNED, HealthEvent.RELEASED_BY_PERSON): Health.PROBATION,
}


@pytest.mark.parametrize(("state", "event"), list(product(Hygiene, HygieneEvent)))
def test_hygiene_changes_by_its_table_and_in_no_other_way(state: Hygiene, event: HygieneEvent) -> None:
    expected = HYGIENE_ROWS.get((state, event))
    assert HYGIENE.allows(state, event) == (expected is not None)
    if expected is None:
        with pytest.raises(IllegalTransition, match=rf"{event.value} cannot happen to a device that is {state.value}"):
            HYGIENE(state, event)
    else:
        assert HYGIENE(state, event) is expected


@pytest.mark.parametrize(("state", "event"), list(product(Health, HealthEvent)))
def test_health_changes_by_its_table_and_in_no_other_way(state: Health, event: HealthEvent) -> None:
    expected = HEALTH_ROWS.get((state, event))
    assert HEALTH.allows(state, event) == (expected is not None)
    if expected is None:
        with pytest.raises(IllegalTransition, match=rf"{event.value} cannot happen to a device that is {state.value}"):
            HEALTH(state, event)
    else:
        assert HEALTH(state, event) is expected


def test_only_a_scrub_that_passed_makes_a_device_clean() -> None:
    assert {event for _, event, after in HYGIENE if after is Hygiene.CLEAN} == {HygieneEvent.SCRUB_PASSED}


def test_nothing_is_scrubbed_while_it_is_in_use() -> None:
    assert not HYGIENE.allows(Hygiene.IN_USE, HygieneEvent.SCRUB_STARTED)


def test_only_calm_and_an_earned_probation_make_a_device_healthy() -> None:
    rows = {(state, event) for state, event, after in HEALTH if after is Health.HEALTHY}
    assert rows == {(Health.SUSPECT, HealthEvent.CALM), (Health.PROBATION, HealthEvent.EARNED)}


def test_what_is_condemned_returns_by_a_person_and_through_probation() -> None:
    out = (Health.CONDEMNED, Health.QUARANTINED)
    ways = {(event, after) for state, event, after in HEALTH if state is Health.CONDEMNED and after not in out}
    assert ways == {(HealthEvent.RELEASED_BY_PERSON, Health.PROBATION)}


@pytest.mark.parametrize(("hygiene", "health"), list(product(Hygiene, Health)))
def test_from_every_state_a_path_leads_back_to_clean_and_healthy(hygiene: Hygiene, health: Health) -> None:
    reached, frontier = {(hygiene, health)}, [(hygiene, health)]
    while frontier:
        at_hygiene, at_health = frontier.pop()
        following = [(after, at_health) for state, _, after in HYGIENE if state is at_hygiene]
        following += [(at_hygiene, after) for state, _, after in HEALTH if state is at_health]
        new = [each for each in following if each not in reached]
        reached.update(new)
        frontier += new
    assert (Hygiene.CLEAN, Health.HEALTHY) in reached


@pytest.mark.parametrize("health", Health)
def test_from_every_health_but_condemned_a_path_leads_back_without_a_person(health: Health) -> None:
    people = {HealthEvent.RELEASED_BY_PERSON, HealthEvent.ORDERED_OUT, HealthEvent.EXHAUSTED}
    reached, frontier = {health}, [health]
    while frontier:
        at = frontier.pop()
        new = {after for state, event, after in HEALTH if state is at and event not in people} - reached
        reached |= new
        frontier += new
    assert (Health.HEALTHY in reached) == (health is not Health.CONDEMNED)
