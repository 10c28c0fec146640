"""The health reported to the kubelet while the scrub service comes and goes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin.kubelet.devices import AdvertisedDevice, Availability, ServiceVerdict
from scrubber.domain.states import BindingState

GRACE = 10.0


def seen(id_: str, advertised: bool = True, **facts: object) -> AdvertisedDevice:
    verdict = ServiceVerdict.ADVERTISED if advertised else ServiceVerdict.WITHHELD
    return AdvertisedDevice(id=id_, index=id_.removeprefix("gpu-"), verdict=verdict, **facts)  # type: ignore[arg-type]


def receive(
    availability: Availability,
    *devices: AdvertisedDevice,
    now: float,
    ready: bool = True,
    epoch: str = "one",
    version: int = 1,
) -> Availability:
    return availability.on_snapshot(devices, epoch=epoch, version=version, ready=ready, now=now)


def health(availability: Availability, now: float) -> dict[str, bool]:
    return {device.id: device.healthy for device in availability.devices(now)}


def device_of(availability: Availability, id_: str) -> AdvertisedDevice:
    return next(device for device in availability.devices(0.0) if device.id == id_)


def test_device_is_healthy_if_and_only_if_the_service_advertises_it() -> None:
    availability = receive(Availability(GRACE), seen("gpu-0"), seen("gpu-1", advertised=False), now=5.0)
    assert health(availability, 5.0) == {"gpu-0": True, "gpu-1": False}
    assert health(availability, 5_000.0) == {"gpu-0": True, "gpu-1": False}


def test_service_restart_changes_no_health_within_the_grace_period() -> None:
    availability = receive(Availability(GRACE), seen("gpu-0"), seen("gpu-1", advertised=False), now=0.0)
    availability = availability.on_disconnect(now=1.0)
    assert health(availability, 10.9) == {"gpu-0": True, "gpu-1": False}
    availability = receive(availability, seen("gpu-0", False), seen("gpu-1", False), ready=False, epoch="two", now=4.0)
    assert health(availability, 10.9) == {"gpu-0": True, "gpu-1": False}
    availability = receive(availability, seen("gpu-0"), seen("gpu-1"), epoch="two", now=9.0)
    assert health(availability, 100.0) == {"gpu-0": True, "gpu-1": True}


def test_no_device_is_healthy_after_the_grace_period_until_a_service_is_ready() -> None:
    availability = receive(Availability(GRACE), seen("gpu-0"), now=0.0).on_disconnect(now=1.0)
    assert health(availability, 11.0) == {"gpu-0": False}
    availability = receive(availability, seen("gpu-0"), ready=False, epoch="two", now=12.0)
    assert health(availability, 12.0) == {"gpu-0": False}
    availability = receive(availability, seen("gpu-0"), epoch="two", version=2, now=13.0)
    assert health(availability, 13.0) == {"gpu-0": True}


def test_service_in_a_crash_loop_gets_one_grace_period() -> None:
    availability = receive(Availability(GRACE), seen("gpu-0"), now=0.0).on_disconnect(now=1.0)
    for second, epoch in enumerate("bcdefgh", start=2):
        availability = receive(availability, seen("gpu-0"), ready=False, epoch=epoch, now=second).on_disconnect(
            now=second
        )
    assert availability.seconds_until_expiry(9.0) == pytest.approx(2.0)
    assert health(availability, 11.0) == {"gpu-0": False}


def test_service_that_was_never_ready_makes_no_device_healthy() -> None:
    availability = receive(Availability(GRACE), seen("gpu-0"), ready=False, now=0.0)
    assert health(availability, 0.0) == {"gpu-0": False}
    assert availability.seconds_until_expiry(0.0) is None
    assert device_of(availability, "gpu-0").verdict is ServiceVerdict.UNKNOWN


def test_device_that_disappears_stays_listed_as_unhealthy() -> None:
    availability = receive(Availability(GRACE), seen("gpu-0"), seen("gpu-1", certified=True), now=0.0)
    availability = receive(availability, seen("gpu-0"), version=2, now=1.0)
    assert health(availability, 1.0) == {"gpu-0": True, "gpu-1": False}
    gone = device_of(availability, "gpu-1")
    assert gone.verdict is ServiceVerdict.WITHHELD
    assert not gone.certified
    assert gone.refusal == "Device gpu-1 is no longer on this node."
    availability = receive(availability, seen("gpu-0"), seen("gpu-1"), version=3, now=2.0)
    assert health(availability, 2.0) == {"gpu-0": True, "gpu-1": True}


def test_device_missing_from_an_unready_services_snapshot_does_not_count_as_gone() -> None:
    availability = receive(Availability(GRACE), seen("gpu-0"), seen("gpu-1"), now=0.0)
    availability = receive(availability, seen("gpu-0"), ready=False, epoch="two", now=1.0)
    assert health(availability, 2.0) == {"gpu-0": True, "gpu-1": True}


def test_certificate_is_void_once_the_service_disconnects() -> None:
    availability = receive(Availability(GRACE), seen("gpu-0", certified=True), now=0.0)
    assert device_of(availability, "gpu-0").certified
    assert not device_of(availability.on_disconnect(now=1.0), "gpu-0").certified


@pytest.mark.parametrize(
    ("before", "after"), [(BindingState.READY, None), (BindingState.BEING_CLEANED, BindingState.BEING_CLEANED)]
)
def test_device_is_not_ready_for_binding_once_the_service_disconnects(
    before: BindingState, after: BindingState | None
) -> None:
    availability = receive(Availability(GRACE), seen("gpu-0", binding=before), now=0.0)
    assert device_of(availability.on_disconnect(now=1.0), "gpu-0").binding is after


def test_snapshot_older_than_the_last_one_is_ignored() -> None:
    newest = receive(Availability(GRACE), seen("gpu-0", False), version=7, now=0.0)
    assert receive(newest, seen("gpu-0", True), version=6, now=1.0) == newest
    restarted = receive(newest, seen("gpu-0", True), version=1, epoch="two", now=1.0)
    assert health(restarted, 1.0) == {"gpu-0": True}


def test_devices_are_listed_in_the_order_of_their_indices() -> None:
    devices = [replace(seen("gpu"), id=f"id-{index}", index=index) for index in ("10", "2", "0:10", "0", "0:2")]
    availability = receive(Availability(GRACE), *devices, now=0.0)
    assert [device.index for device in availability.devices(0.0)] == ["0", "0:2", "0:10", "2", "10"]


@dataclass
class AvailabilityModel:
    """The specification in another form: the last report of a ready service, and until when it is valid."""

    verdicts: dict[str, bool]
    listed: set[str]
    counts_until: float

    def healthy(self, now: float) -> set[str]:
        return {id_ for id_, advertised in self.verdicts.items() if advertised} if now < self.counts_until else set()


ids = st.sampled_from(["gpu-0", "gpu-1", "gpu-2"])
inventories = st.dictionaries(ids, st.booleans())
happenings = st.lists(
    st.tuples(
        st.sampled_from(["ready", "not ready", "lost"]),
        inventories,
        st.sampled_from(["one", "two"]),
        st.integers(0, 80).map(lambda quarters: quarters / 4),  # exact in binary: comparisons involve no rounding
    )
)


@given(happenings)
def test_health_is_the_last_verdict_of_a_ready_service_while_that_verdict_is_valid(
    story: list[tuple[str, dict[str, bool], str, float]],
) -> None:
    availability = Availability(GRACE)
    model = AvailabilityModel({}, set(), -math.inf)
    now = 0.0
    for version, (happening, inventory, epoch, pause) in enumerate(story, start=1):
        devices = [seen(id_, advertised) for id_, advertised in inventory.items()]
        if happening == "lost":
            availability = availability.on_disconnect(now)
        else:
            ready = happening == "ready"
            availability = receive(availability, *devices, ready=ready, epoch=epoch, version=version, now=now)
            model.listed |= set(inventory)
        if happening == "ready":
            model.verdicts, model.counts_until = inventory, math.inf
        else:
            model.counts_until = min(model.counts_until, now + GRACE)
        before_falling = availability.seconds_until_expiry(now)
        now += pause
        shown = availability.devices(now)
        assert {device.id for device in shown} == model.listed
        assert {device.id for device in shown if device.healthy} == model.healthy(now)
        assert {device.id for device in shown if device.verdict is ServiceVerdict.ADVERTISED} >= model.healthy(now)
        if before_falling is not None:
            assert before_falling > 0.0
            assert (pause < before_falling) == (now < model.counts_until)
