"""Any history of one record, by its own functions only: the invariants that hold after any order of events."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from scrubber.domain.evidence import Outcome, Severity
from scrubber.domain.health.history import RecoveryAttempt
from scrubber.domain.health.recovery import after_findings, after_scrub
from scrubber.domain.next_action import RecoveryAction, next_action
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import ADVERTISED, HYGIENE_TRANSITIONS, Cause, Health, Hygiene, HygieneEvent, RecoveryMethod
from tests.simulation.samples import DEVICE, NODE, NOW, POLICY, assignment, certificate, finding, grant, pod

BY_OPERATOR = Cause("operator", "because", RecoveryMethod.OPERATOR, NOW, "uid:0")
CODES = ("xid-95", "xid-79", "xid-122", "driver-timeout", "verification-failed", "erase-timeout", "reset-failed")
Event = Callable[[DeviceRecord], DeviceRecord]


def _when(event: HygieneEvent, change: Event) -> Event:
    """Return ``change`` where the table permits the event, otherwise an event without effect."""
    return lambda device: change(device) if HYGIENE_TRANSITIONS.allows(device.hygiene, event) else device


def _ends(outcome: Outcome, *codes: str) -> Event:
    def end(device: DeviceRecord) -> DeviceRecord:
        if device.hygiene is not Hygiene.SCRUBBING:
            return device
        if outcome is Outcome.PASSED:
            issued = certificate(sequence=device.certificate_count + 1, previous_grant=device.grant_sequence)
            ended = device.after_passed_scrub(issued, was_reset=device.must_reset)
        else:
            ended = device.after_unproven_scrub()
        return after_scrub(ended, outcome, [finding(code) for code in codes], POLICY, NOW)

    return end


def _found(*codes: str, severity: Severity = Severity.FAULT) -> Event:
    return lambda device: after_findings(device, [finding(code, severity) for code in codes], POLICY, NOW)


def _recover(device: DeviceRecord) -> DeviceRecord:
    if next_action(device, POLICY, NODE).action is not RecoveryAction.RECOVER:
        return device
    return device.after_recovery_start(RecoveryAttempt(NOW, device.must_reset)).after_scrub_start()


def _granted(uid: str) -> Event:
    def give(device: DeviceRecord) -> DeviceRecord:
        to = grant(device.grant_sequence + 1, assignment(pod(uid=uid)))
        return device.after_grant(to, None, certain=True)

    return lambda device: give(device) if device.advertised and device.certificate is not None else device


EVENTS: tuple[Event, ...] = (
    lambda device: device.after_service_start(NODE.boot),
    lambda device: device.after_service_start("boot-2"),
    _when(HygieneEvent.SCRUB_STARTED, lambda device: device.after_scrub_start()),
    _ends(Outcome.PASSED),
    _ends(Outcome.PASSED),
    _ends(Outcome.BLOCKED),
    _ends(Outcome.ABANDONED),
    *(_ends(Outcome.FAILED, code) for code in CODES),
    *(_found(code) for code in CODES),
    _found("too-hot", severity=Severity.WARNING),
    _found(),
    _recover,
    _recover,
    _granted("uid-1"),
    _granted("uid-2"),
    _when(HygieneEvent.RELEASED, lambda device: device.after_release()),
    _when(HygieneEvent.CERTIFICATE_VOIDED, lambda device: device.after_voided_certificate()),
    lambda device: device.after_operator_quarantine(BY_OPERATOR),
    lambda device: (
        device.after_operator_release(retry_at=NOW)
        if device.health in (Health.QUARANTINED, Health.CONDEMNED)
        else device
    ),
)
lives = st.lists(st.integers(0, len(EVENTS) - 1), max_size=40)
"""Orders of events, as indices into the table."""

RELEASE = len(EVENTS) - 1


@given(lives)
def test_record_keeps_its_invariants_through_any_sequence_of_events(life: list[int]) -> None:
    device = DeviceRecord(DEVICE)
    for index in life:
        before, device = device, EVENTS[index](device)
        assert device is before or device.version > before.version
        if device.certificate is not None:
            assert device.hygiene is Hygiene.CLEAN
        if device.health not in (*ADVERTISED, Health.PROBATION):
            assert device.cause is not None, "out of service without a cause"
        if device.exclusive_use and device.hygiene is Hygiene.IN_USE:
            assert device.previous_assignment == device.open_grants[-1].assignment
        assert device.failures <= POLICY.recovery.max_attempts
        assert {each.sequence for each in device.open_grants} <= set(range(1, device.grant_sequence + 1))


@given(lives)
def test_operator_quarantine_is_lifted_only_by_an_operator(life: list[int]) -> None:
    device = DeviceRecord(DEVICE)
    for index in life:
        before, device = device, EVENTS[index](device)
        ordered = before.health is Health.QUARANTINED and before.cause is not None and before.cause.by_operator
        if ordered and index != RELEASE:
            assert device.health is Health.QUARANTINED
            assert device.cause == before.cause


@given(lives)
def test_every_record_returns_to_clean_and_healthy_by_next_actions_and_an_operator_release(life: list[int]) -> None:
    """The recovery loop suffices, after an operator's action or a reboot where the cause requires one."""
    device = DeviceRecord(DEVICE)
    for index in life:
        device = EVENTS[index](device)
    if device.hygiene is Hygiene.IN_USE:
        device = device.after_release()
    boot = NODE.boot
    for _ in range(30):
        need = next_action(device, POLICY, NODE)
        match need.action:
            case RecoveryAction.RESOLVE:
                device = device.after_service_start(boot)
            case RecoveryAction.RECOVER:
                device = _ends(Outcome.PASSED)(_recover(device))
            case RecoveryAction.SCRUB | RecoveryAction.PROBATION_SCRUB:
                device = _ends(Outcome.PASSED)(device.after_scrub_start())
            case RecoveryAction.NOTHING if device.state == "clean" and device.health is Health.HEALTHY:
                return
            case RecoveryAction.NOTHING if device.health is Health.SUSPECT:
                device = device.after_signals_ended()
            case RecoveryAction.NOTHING:
                device = device.after_operator_release(retry_at=NOW)
    raise AssertionError(f"stuck as {device.hygiene.value}, {device.health.value}")
