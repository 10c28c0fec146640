"""What a device needs when nobody asks, so that every state has a way out."""

from __future__ import annotations

from itertools import product

import pytest

from scrubber.domain.health import Health, WayBack
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.record import DeviceRecord
from scrubber.domain.tending import Act, Need, next_need
from tests.world.samples import NODE, NOW, POLICY, cause, certificate, record


def need(device: DeviceRecord) -> Need:
    return next_need(device, POLICY, NODE)


def test_what_is_dirty_is_scrubbed_at_once() -> None:
    assert need(record()) == Need(Act.SCRUB)


@pytest.mark.parametrize("health", Health)
def test_what_is_in_use_is_left_alone(health: Health) -> None:
    if health is not Health.RECOVERING:
        assert need(record(Hygiene.IN_USE, health, cause=cause())).act is Act.NOTHING


def test_a_clean_device_with_a_valid_certificate_needs_nothing() -> None:
    assert need(record(Hygiene.CLEAN, certificate=certificate())).act is Act.NOTHING


@pytest.mark.parametrize("change", [{"policy_digest": "sha256:older"}, {"driver": "driver-0"}, {"boot": "boot-0"}])
def test_a_clean_device_whose_certificate_no_longer_counts_is_scrubbed_anew(change: dict[str, object]) -> None:
    assert need(record(Hygiene.CLEAN, certificate=certificate(**change))) == Need(Act.SCRUB)
    assert need(record(Hygiene.CLEAN)) == Need(Act.SCRUB)


@pytest.mark.parametrize("way", [WayBack.SCRUB, WayBack.RESET, WayBack.WAIT])
def test_a_quarantine_with_a_way_back_is_tried_when_its_pause_is_over(way: WayBack) -> None:
    device = record(health=Health.QUARANTINED, cause=cause(way_back=way), retry_at=NOW + 4)
    assert need(device) == Need(Act.RECOVER, NOW + 4)


@pytest.mark.parametrize(
    "why",
    [cause("operator", WayBack.PERSON, actor="uid:0"), cause("xid-79", WayBack.REBOOT), cause(way_back=WayBack.PERSON)],
)
def test_a_quarantine_that_waits_for_a_person_or_a_reboot_is_left_to_them(why: object) -> None:
    assert need(record(health=Health.QUARANTINED, cause=why)).act is Act.NOTHING


def test_what_a_person_quarantined_is_never_tried_whatever_its_way_back() -> None:
    device = record(health=Health.QUARANTINED, cause=cause(way_back=WayBack.RESET, actor="uid:0"))
    assert need(device).act is Act.NOTHING


@pytest.mark.parametrize("hygiene", [Hygiene.DIRTY, Hygiene.CLEAN])
def test_a_device_on_probation_proves_itself_again_after_the_interval(hygiene: Hygiene) -> None:
    assert need(record(hygiene, Health.PROBATION, retry_at=NOW + 5)) == Need(Act.PROVE, NOW + 5)


def test_a_condemned_device_is_for_a_person() -> None:
    assert need(record(health=Health.CONDEMNED, cause=cause())).act is Act.NOTHING


@pytest.mark.parametrize(
    ("hygiene", "health"),
    [(Hygiene.SCRUBBING, health) for health in Health] + [(hygiene, Health.RECOVERING) for hygiene in Hygiene],
)
def test_a_scrub_or_recovery_that_nobody_runs_is_put_right(hygiene: Hygiene, health: Health) -> None:
    assert need(record(hygiene, health, cause=cause())) == Need(Act.SETTLE)


@pytest.mark.parametrize(("hygiene", "health"), list(product(Hygiene, Health)))
def test_nothing_is_only_needed_where_somebody_else_has_to_act(hygiene: Hygiene, health: Health) -> None:
    device = record(hygiene, health, cause=cause(way_back=WayBack.SCRUB), certificate=certificate())
    nobody_runs = hygiene is Hygiene.SCRUBBING or health is Health.RECOVERING
    left_alone = hygiene is Hygiene.IN_USE or health is Health.CONDEMNED or device.state == "clean"
    assert (need(device).act is Act.NOTHING) == (left_alone and not nobody_runs)
