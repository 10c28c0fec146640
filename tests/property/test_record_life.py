"""Any life of one record, by its own functions only: what no order of events can bring about."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from scrubber.domain.evidence import Outcome, Severity
from scrubber.domain.health import ADVERTISED, Cause, Health, WayBack
from scrubber.domain.hygiene import HYGIENE, Hygiene, HygieneEvent
from scrubber.domain.record import DeviceRecord
from scrubber.domain.recovery import after_findings, after_scrub
from scrubber.domain.tally import Attempt
from scrubber.domain.tending import Act, next_need
from tests.world.samples import DEVICE, NODE, NOW, POLICY, assignment, certificate, finding, grant, pod

PERSON = Cause("operator", "because", WayBack.PERSON, NOW, "uid:0")
CODES = ("xid-95", "xid-79", "xid-122", "driver-stuck", "verification-failed", "erase-timeout", "reset-failed")
Event = Callable[[DeviceRecord], DeviceRecord]


def _when(event: HygieneEvent, change: Event) -> Event:
    """``change`` where the table has the event, else nothing."""
    return lambda device: change(device) if HYGIENE.allows(device.hygiene, event) else device


def _ends(outcome: Outcome, *codes: str) -> Event:
    def end(device: DeviceRecord) -> DeviceRecord:
        if device.hygiene is not Hygiene.SCRUBBING:
            return device
        if outcome is Outcome.PASSED:
            issued = certificate(sequence=device.certificates + 1, previous_grant=device.grants)
            ended = device.scrub_passed(issued, was_reset=device.must_reset)
        else:
            ended = device.scrub_ended()
        return after_scrub(ended, outcome, [finding(code) for code in codes], POLICY, NOW)

    return end


def _found(*codes: str, severity: Severity = Severity.FAULT) -> Event:
    return lambda device: after_findings(device, [finding(code, severity) for code in codes], POLICY, NOW)


def _recover(device: DeviceRecord) -> DeviceRecord:
    if next_need(device, POLICY, NODE).act is not Act.RECOVER:
        return device
    return device.recovery_started(Attempt(NOW, device.must_reset)).scrub_started()


def _granted(uid: str) -> Event:
    def give(device: DeviceRecord) -> DeviceRecord:
        to = grant(device.grants + 1, assignment(pod(uid=uid)))
        return device.granted(to, None, certain=True)

    return lambda device: give(device) if device.advertised and device.certificate is not None else device


EVENTS: tuple[Event, ...] = (
    lambda device: device.service_started(NODE.boot),
    lambda device: device.service_started("boot-2"),
    _when(HygieneEvent.SCRUB_STARTED, lambda device: device.scrub_started()),
    _ends(Outcome.PASSED),
    _ends(Outcome.PASSED),
    _ends(Outcome.HELD_UP),
    _ends(Outcome.ABANDONED),
    *(_ends(Outcome.FAILED, code) for code in CODES),
    *(_found(code) for code in CODES),
    _found("too-hot", severity=Severity.WARNING),
    _found(),
    _recover,
    _recover,
    _granted("uid-1"),
    _granted("uid-2"),
    _when(HygieneEvent.RELEASED, lambda device: device.released()),
    _when(HygieneEvent.TOUCHED, lambda device: device.touched()),
    lambda device: device.ordered_out(PERSON),
    lambda device: (
        device.released_by_person(retry_at=NOW) if device.health in (Health.QUARANTINED, Health.CONDEMNED) else device
    ),
)
lives = st.lists(st.integers(0, len(EVENTS) - 1), max_size=40)
"""Orders of events, as indices into the table."""

RELEASE = len(EVENTS) - 1


@given(lives)
def test_whatever_happens_a_record_keeps_its_promises(life: list[int]) -> None:
    device = DeviceRecord(DEVICE)
    for index in life:
        before, device = device, EVENTS[index](device)
        assert device is before or device.version > before.version
        if device.certificate is not None:
            assert device.hygiene is Hygiene.CLEAN
        if device.health not in (*ADVERTISED, Health.PROBATION):
            assert device.cause is not None, "out of service without a cause"
        if device.watched and device.hygiene is Hygiene.IN_USE:
            assert device.previous == device.open_grants[-1].assignment
        assert device.failures <= POLICY.recovery.attempts
        assert {each.sequence for each in device.open_grants} <= set(range(1, device.grants + 1))


@given(lives)
def test_only_a_person_lifts_what_a_person_ordered(life: list[int]) -> None:
    device = DeviceRecord(DEVICE)
    for index in life:
        before, device = device, EVENTS[index](device)
        ordered = before.health is Health.QUARANTINED and before.cause is not None and before.cause.by_person
        if ordered and index != RELEASE:
            assert device.health is Health.QUARANTINED
            assert device.cause == before.cause


@given(lives)
def test_from_anywhere_the_way_back_that_is_open_leads_to_clean_and_healthy(life: list[int]) -> None:
    """By tending alone, or after the act of a person or a reboot where the cause asks for one."""
    device = DeviceRecord(DEVICE)
    for index in life:
        device = EVENTS[index](device)
    if device.hygiene is Hygiene.IN_USE:
        device = device.released()
    boot = NODE.boot
    for _ in range(30):
        need = next_need(device, POLICY, NODE)
        match need.act:
            case Act.SETTLE:
                device = device.service_started(boot)
            case Act.RECOVER:
                device = _ends(Outcome.PASSED)(_recover(device))
            case Act.SCRUB | Act.PROVE:
                device = _ends(Outcome.PASSED)(device.scrub_started())
            case Act.NOTHING if device.state == "clean" and device.health is Health.HEALTHY:
                return
            case Act.NOTHING if device.health is Health.SUSPECT:
                device = device.calmed()
            case Act.NOTHING:
                device = device.released_by_person(retry_at=NOW)
    raise AssertionError(f"stuck as {device.hygiene.value}, {device.health.value}")
