"""The health of one device, explored completely: every state that any order of events leads to, and its invariants.

Three models share the events of ``tests/simulation/health_graph.py``: one covers limits, one transient conditions, one
tenants who have a device under a break-glass override. Combined they would have millions of states, and give no other
result. A last test takes the same events through histories with real times and numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from scrubber.domain.evidence import Outcome
from scrubber.domain.handover import HandoverVerdict
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.health.history import DAY, MAX_ENTRIES, RecoveryAttempt
from scrubber.domain.health.recovery import after_findings, after_scrub, apply_attempt_limits, condition_persists
from scrubber.domain.next_action import RecoveryAction, next_action
from scrubber.domain.policy import Enforcement, HealthRule, Policy, RecoveryRule
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Health, Hygiene, RecoveryMethod
from tests.simulation.health_graph import LASTS, SOFT, TENANT, Graph, Place, Promise, events
from tests.simulation.samples import DEVICE, NODE, NOW, POLICY, by_record, certificate

HEALTH = HealthRule(quarantine_after={SOFT: LASTS})
OBSERVING = replace(POLICY, enforcement=Enforcement.OBSERVE)
LIMITED = RecoveryRule(max_attempts=2, max_attempts_per_day=3, max_resets_per_day=2, probation_scrubs=1)
UNLIMITED = RecoveryRule(
    max_attempts=2, max_attempts_per_day=MAX_ENTRIES, max_resets_per_day=MAX_ENTRIES, probation_scrubs=2
)
OF_CONDITIONS = {"hot", "hot, and the breaker is open", "an event", "passed, and it is hot", "it has lasted"}
OF_PEOPLE = {"its glass", "a person takes it out", "a scrub of what is out starts"}
OF_RESTARTS = {"kill -9", "a reboot", "settled"}
OF_TENANTS = {"a tenant gets it", "it is given back"}


def faults(*ways: RecoveryMethod) -> set[str]:
    return {f"{how}: {way.value}" for way in ways for how in ("fault", "failed", "failed after its reset")}


FOR_OTHERS = faults(RecoveryMethod.REBOOT, RecoveryMethod.OPERATOR)
MODELS: Mapping[str, tuple[RecoveryRule, set[str]]] = {
    # The rule in force, and the events that are left out.
    "limits": (LIMITED, OF_CONDITIONS | OF_PEOPLE | FOR_OTHERS | faults(RecoveryMethod.SCRUB)),
    "conditions": (UNLIMITED, {"its glass", "kill -9"} | OF_TENANTS | faults(RecoveryMethod.SCRUB)),
    "tenants": (UNLIMITED, OF_CONDITIONS | OF_RESTARTS | FOR_OTHERS | OF_PEOPLE - {"its glass"}),
}

# -- invariants of every step ------------------------------------------------------------------------------------------


def _comes_back_proved(before: Place, name: str, after: Place) -> bool:
    back = after.record.advertised and not before.record.advertised
    return not back or after.counted.proofs >= after.counted.owed


def _a_fault_takes_it_out(before: Place, name: str, after: Place) -> bool:
    return not name.startswith("fault: ") or not after.record.advertised


def _only_an_operator(before: Place, name: str, after: Place) -> bool:
    is_operators = before.record.health is Health.CONDEMNED or before.record.quarantined_by_operator
    stays = (after.record.health, after.record.cause) == (before.record.health, before.record.cause)
    return not is_operators or stays or name.startswith("a person ")


def _attempts_of_a_day(before: Place, name: str, after: Place) -> bool:
    return after.counted.attempts <= LIMITED.max_attempts_per_day and after.counted.resets <= LIMITED.max_resets_per_day


def _is_condemned_with_a_message(before: Place, name: str, after: Place) -> bool:
    cause = after.record.cause
    if after.record.health is not Health.CONDEMNED:
        return True
    return cause is not None and cause.recovery_method is RecoveryMethod.OPERATOR and cause.message != "said"


def _not_for_a_tenant(before: Place, name: str, after: Place) -> bool:
    """Only a device's own failures condemn it, or a daily limit over several tenants; transient conditions do not."""
    record, counted = after.record, after.counted
    if record.health is not Health.CONDEMNED or before.record.health is Health.CONDEMNED:
        return True
    if record.cause is not None and "within a day" in record.cause.message:
        return {each.tenant for each in record.recent_quarantines} != {TENANT}
    return counted.own >= LIMITED.max_attempts


def _open_breaker(before: Place, name: str, after: Place) -> bool:
    return name != "hot, and the breaker is open" or after.record.advertised is before.record.advertised


def _suspect_at_once(before: Place, name: str, after: Place) -> bool:
    return not name.startswith("hot") or after.record.health is not Health.HEALTHY


def _out_once_it_has_lasted(before: Place, name: str, after: Place) -> bool:
    if name != "hot" or not before.record.advertised:
        return True
    lasted = any(each.code == SOFT and each.since <= NOW - LASTS for each in before.record.warnings)
    return after.record.advertised is not lasted


def _handed_over_in_service_only(before: Place, name: str, after: Place) -> bool:
    record = after.record
    policy = OBSERVING if record.break_glass is not None else POLICY
    goes = [by_record(record, kind, policy).verdict is HandoverVerdict.GRANT for kind in HandOverKind]
    by_word = record.break_glass is not None and not record.quarantined_by_operator
    return not any(goes) or record.advertised or by_word


def _action_has_an_actor(before: Place, name: str, after: Place) -> bool:
    """Automatic actions stop only where the device is healthy, is in use, or needs an operator or a reboot."""
    record = after.record
    if next_action(record, POLICY, NODE).action is not RecoveryAction.NOTHING or record.hygiene is Hygiene.IN_USE:
        return True
    if record.health in (Health.HEALTHY, Health.SUSPECT):
        return record.hygiene is Hygiene.CLEAN
    cause = record.cause
    theirs = cause is not None and (
        cause.by_operator or cause.recovery_method in (RecoveryMethod.OPERATOR, RecoveryMethod.REBOOT)
    )
    return record.health in (Health.QUARANTINED, Health.CONDEMNED) and theirs


PROMISES: Mapping[str, Promise] = MappingProxyType(
    {
        "nothing returns without its clean scrubs after the last fault": _comes_back_proved,
        "a fault takes a device out at once": _a_fault_takes_it_out,
        "only a person brings back what a person took out, and what is condemned": _only_an_operator,
        "attempts and resets stay within the day's limits": _attempts_of_a_day,
        "what is condemned says why, and waits for a person": _is_condemned_with_a_message,
        "no device is condemned for what one tenant did, or for what has to end by itself": _not_for_a_tenant,
        "an open breaker lets no soft signal take a device out": _open_breaker,
        "a soft signal makes suspect at once": _suspect_at_once,
        "a soft signal takes a device out when it has lasted, and not before": _out_once_it_has_lasted,
        "nothing that is out of service is handed over but by a person's word": _handed_over_in_service_only,
        "every required action has an actor": _action_has_an_actor,
    }
)
OF_PLACES = frozenset(
    {
        "attempts and resets stay within the day's limits",
        "nothing that is out of service is handed over but by a person's word",
        "every required action has an actor",
    }
)
"""Invariants of a place, whichever step leads to it."""


@cache
def graph(model: str) -> Graph:
    recovery, left_out = MODELS[model]
    policy = replace(POLICY, recovery=recovery, health=HEALTH)
    happen = {name: each for name, each in events(policy).items() if name not in left_out}
    return Graph.explored(policy, happen, PROMISES, of_places=OF_PLACES)


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("model", MODELS)
def test_health_invariant_holds_in_every_reachable_state(model: str, promise: str) -> None:
    explored = graph(model)
    if promise in explored.broken:
        before, event, after = explored.broken[promise]
        pytest.fail(f"{explored.way_to(before)}\nthen: {event}\n{after.story}\n{after}", pytrace=False)


def test_model_reaches_every_event_and_every_health_state() -> None:
    assert frozenset().union(*(graph(model).happened for model in MODELS)) == events(POLICY).keys()
    for model in MODELS:
        met = {place.record.health for place in graph(model).found}
        assert met == {*Health} - ({Health.SUSPECT} if model != "conditions" else set())


# -- the way out -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_every_reachable_state_recovers_automatically_unless_an_operator_or_a_reboot_is_needed(model: str) -> None:
    """Assumes a simulated cluster without further faults: scrubs pass, resets work, and no fault is reported any more."""
    explored = graph(model)
    known: dict[Place, None] = {}
    for place in explored.found:
        record = replace(place.record, break_glass=None)
        if Place(record) in known:
            continue
        known[Place(record)] = None
        try:
            _comes_out(record, explored.policy)
        except AssertionError as stuck:
            pytest.fail(f"{explored.way_to(place)}\n{stuck}", pytrace=False)


def _comes_out(record: DeviceRecord, policy: Policy) -> None:
    now, boot = NOW, 1
    for _ in range(40):
        need = next_action(record, policy, replace(NODE, boot=f"boot-{boot}"))
        now = max(now, need.due or now)
        if need.action is RecoveryAction.RESOLVE:
            record = record.after_service_start(record.boot)
        elif need.action is RecoveryAction.RECOVER:
            record = after_findings(record, (), policy, now)
            assert not condition_persists(record, ())
            left = apply_attempt_limits(record, policy, now)
            if left is record:
                begun = record.after_recovery_start(RecoveryAttempt(now, record.must_reset)).after_scrub_start()
                record = _passes(begun, policy, now, reset=record.must_reset)
            else:
                record = left
        elif need.action is not RecoveryAction.NOTHING:
            record = _passes(record.after_scrub_start(), policy, now, reset=False)
        elif record.hygiene is Hygiene.IN_USE:
            record = record.after_release()
        elif record.health is Health.HEALTHY:
            return
        elif record.health is Health.SUSPECT:
            record = after_findings(record, (), policy, now)
        else:
            cause = record.cause
            assert cause is not None, "out of service, and nothing says why"
            if cause.recovery_method is RecoveryMethod.REBOOT and not cause.by_operator:
                boot += 1
                record = record.after_service_start(f"boot-{boot}")
            else:
                assert cause.by_operator or cause.recovery_method is RecoveryMethod.OPERATOR, (
                    "no recovery, and no operator is notified"
                )
                record = record.after_operator_release(retry_at=now)
    raise AssertionError(f"it does not come out, and is {record.health.value} in the end")


def _passes(record: DeviceRecord, policy: Policy, now: float, *, reset: bool) -> DeviceRecord:
    issued = certificate(sequence=record.certificate_count + 1, previous_grant=record.grant_sequence, boot=record.boot)
    passed = record.after_passed_scrub(issued, was_reset=reset)
    return after_scrub(passed, Outcome.PASSED, (), policy, now, reset=reset)


# -- the same with real times ------------------------------------------------------------------------------------------

REAL = replace(POLICY, health=HealthRule(quarantine_after={SOFT: LASTS}))
TIME_STANDS_FOR = {"the pause is over", "it has lasted", "a day passes"}
HAPPEN = sorted(events(REAL).keys() - TIME_STANDS_FOR)


class Lives(RuleBasedStateMachine):
    """One record through a history of days, under the default policy, with real pauses and limits."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.place = Place(DeviceRecord(DEVICE, boot=NODE.boot))
        self.events = events(REAL, lambda: self.now)
        self.begun: list[tuple[float, bool]] = []

    @rule(name=st.sampled_from(HAPPEN), times=st.integers(1, 3))
    def something_happens(self, name: str, times: int) -> None:
        for _ in range(times):
            self._step(name)

    @rule(seconds=st.sampled_from((1.0, 5.0, 61.0, LASTS, 3_600.0, DAY / 3, DAY)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        ending=st.sampled_from(
            ("passed", "passed, with a reset", "failed: reset", "held up after its reset", "kill -9")
        )
    )
    def recovery_runs(self, ending: str) -> None:
        """Make the next recovery attempt, as soon as it is due."""
        due = next_action(self.place.record, REAL, NODE).due
        self.now = max(self.now, due or self.now)
        self._step("a recovery starts")
        self._step("a scrub starts")
        self._step(ending)

    @rule(rounds=st.integers(1, 12))
    def it_comes_again_and_again(self, rounds: int) -> None:
        """Repeatedly grant the device to a tenant, let it fail in use, reset it, and certify it."""
        for _ in range(rounds):
            for name in ("a tenant gets it", "fault: reset", "it is given back"):
                self._step(name)
            for _ in range(1 + REAL.recovery.probation_scrubs):
                due = next_action(self.place.record, REAL, NODE).due
                self.now = max(self.now, min(due or self.now, self.now + 3_600.0))
                self._step("a recovery starts")
                self._step("a scrub starts")
                self._step("passed, with a reset")
                self._step("passed")

    def _step(self, name: str) -> None:
        before = self.place
        after = self.events[name](before)
        if after is None:
            return
        if name == "a person releases it":
            self.begun.clear()
        if before.planned and before.record.health is Health.RECOVERING and not after.planned:
            made = (
                "after its reset" in name
                or "with a reset" in name
                or name in ("abandoned", "kill -9", "a reboot", "settled")
            )
            # The time is that of the attempt: a reset comes shortly after its begin.
            self.begun += (
                [(before.record.recovery_attempts[-1].at, True)] if made and before.record.recovery_attempts else []
            )
        for promise, kept in PROMISES.items():
            if promise not in NOT_IN_REAL_TIME:
                assert kept(before, name, after), promise
        self.place = after

    @invariant()
    def stays_within_its_limits(self) -> None:
        record = self.place.record
        assert record.failures <= REAL.recovery.max_attempts
        assert len(record.recovery_attempts) <= MAX_ENTRIES
        assert len(record.recent_quarantines) <= MAX_ENTRIES
        resets = [at for at, _ in self.begun if self.now - DAY < at <= self.now]
        assert len(resets) <= REAL.recovery.max_resets_per_day
        if record.retry_at is not None:
            assert record.retry_at - self.now <= max(DAY, REAL.recovery.max_backoff)

    @invariant()
    def has_a_way_out(self) -> None:
        _comes_out(replace(self.place.record, break_glass=None), REAL)


NOT_IN_REAL_TIME = {
    "attempts and resets stay within the day's limits",
    "no device is condemned for what one tenant did, or for what has to end by itself",
    "a soft signal takes a device out when it has lasted, and not before",
}
"""Invariants about merged states."""

TestLives = Lives.TestCase
