"""The health of one device as a graph: states (places), the events between them, and their exploration.

A place is a real record, made by the domain's own functions, plus independent counts, so that no statement of the
record about itself is taken for granted. Places are merged: details that affect no decision (versions, ids, the minute
of an attempt) are equal in all of them. The clock is fixed, and the passage of time is an event: a pause is over, a
condition has lasted, a day has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from scrubber.domain.evidence import Certificate, Finding, Outcome, Severity
from scrubber.domain.health.history import DAY, PastQuarantine, RecoveryAttempt, entries_of_last_day
from scrubber.domain.health.recovery import after_findings, after_scrub, apply_attempt_limits
from scrubber.domain.next_action import RecoveryAction, next_action
from scrubber.domain.policy import Policy
from scrubber.domain.record import ActiveWarning, BreakGlass, DeviceRecord
from scrubber.domain.states import ADVERTISED, Cause, Health, Hygiene, RecoveryMethod
from tests.simulation.samples import DEVICE, NODE, NOW, assignment, certificate, finding, grant, pod

__all__ = ["FAULT_OF", "LASTS", "SOFT", "TENANT", "Counted", "Event", "Graph", "Place", "Promise", "events"]

LASTS = 600.0
SOFT, ONCE = "too-hot", "xid-154"
TENANT = "acme"
FAULT_OF = {
    RecoveryMethod.SCRUB: "erase-timeout",
    RecoveryMethod.WAIT: "driver-timeout",
    RecoveryMethod.RESET: "xid-95",
    RecoveryMethod.REBOOT: "xid-79",
    RecoveryMethod.OPERATOR: "xid-122",
}
"""A code for each recovery method."""
BY_AN_OPERATOR = Cause("operator", "because", RecoveryMethod.OPERATOR, NOW, "uid:1000")
BROKEN = BreakGlass(NOW + 1e9, "there is no other", "uid:1000")
CERTIFICATE = certificate()
GRANT = grant(1, assignment(pod(TENANT)))


@dataclass(frozen=True, slots=True)
class Counted:
    """Independent counts of what has happened.

    Attributes:
        proofs: clean slow paths since the last fault; ``owed``: how many the device's return requires.
        attempts, resets: of today, by recoveries.
        own: failures during recovery for which no tenant can be blamed.
    """

    proofs: int = 0
    owed: int = 0
    attempts: int = 0
    resets: int = 0
    own: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """A state. ``planned``: the current scrub is a recovery that includes a reset."""

    record: DeviceRecord
    counted: Counted = Counted()
    planned: bool = False

    @property
    def story(self) -> str:
        record = self.record
        cause = "" if record.cause is None else f" for {record.cause.code} ({record.cause.recovery_method.value})"
        return f"{record.hygiene.value}, {record.health.value}{cause}"


Counting = Callable[[Counted], Counted]


def _unchanged(counted: Counted) -> Counted:
    return counted


@dataclass(frozen=True, slots=True)
class Step:
    """What an event makes of a place. It never depends on the counts: many places differ in nothing else."""

    record: DeviceRecord
    planned: bool
    count: Counting = _unchanged

    def of(self, counted: Counted) -> Place:
        return Place(self.record, self.count(counted), self.planned)


Transition = Callable[[DeviceRecord, bool], Step | None]
"""From a record, and whether a reset is planned, to the step; None where the event cannot happen."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that may happen at a place; called with the place, returns the next one, or None."""

    transition: Transition

    def __call__(self, at: Place) -> Place | None:
        step = self.transition(at.record, at.planned)
        return None if step is None else step.of(at.counted)


Promise = Callable[[Place, str, Place], bool]
"""Returns whether a step from one place to the next, by the event of that name, keeps the invariant."""


@dataclass(frozen=True)
class Graph:
    """All places that can be reached by some events.

    Attributes:
        policy: the one in force.
        found: each place with its predecessor, and the event between them.
        happened: the events that could happen somewhere.
        broken: for each violated invariant, the first step that violates it.
    """

    policy: Policy
    found: Mapping[Place, tuple[Place | None, str]]
    happened: frozenset[str]
    broken: Mapping[str, tuple[Place, str, Place]]

    @classmethod
    def explored(
        cls, policy: Policy, happen: Mapping[str, Event], promises: Mapping[str, Promise], *, of_places: Collection[str]
    ) -> Graph:
        """Follow every event from every place that any events lead to.

        Args:
            of_places: the promises that depend on nothing but the place after a step. They are checked once for each
                place, not for every way to it.
        """
        folded = _Folding(policy)
        first = Place(folded.record(DeviceRecord(DEVICE, boot=NODE.boot)))
        of_steps = {promise: kept for promise, kept in promises.items() if promise not in of_places}
        # By identity: hashing a record takes longer than everything else, and equal folded records are one object.
        known = {(id(first.record), first.counted, first.planned)}
        steps: dict[tuple[int, bool], list[tuple[str, Step]]] = {}
        found: dict[Place, tuple[Place | None, str]] = {first: (None, "")}
        broken: dict[str, tuple[Place, str, Place]] = {
            each: (first, "", first) for each in of_places if not promises[each](first, "", first)
        }
        happened: set[str] = set()
        edge = [first]
        while edge:
            following = []
            for place in edge:
                if (id(place.record), place.planned) not in steps:
                    steps[id(place.record), place.planned] = [
                        (name, folded.step(step))
                        for name, event in happen.items()
                        if (step := event.transition(place.record, place.planned)) is not None
                    ]
                for name, step in steps[id(place.record), place.planned]:
                    happened.add(name)
                    after = folded.counts(step.of(place.counted))
                    key = (id(after.record), after.counted, after.planned)
                    for promise, kept in (of_steps if key in known else promises).items():
                        if promise not in broken and not kept(place, name, after):
                            broken[promise] = (place, name, after)
                    if key not in known:
                        known.add(key)
                        found[after] = (place, name)
                        following.append(after)
            edge = following
        return cls(policy, found, frozenset(happened), broken)

    def way_to(self, place: Place) -> str:
        """Return the steps to a place, as the explanation of a failed test."""
        lines, here = [place.story], place
        while True:
            before, event = self.found[here]
            if before is None:
                return "\n".join(["", *reversed(lines)])
            lines.append(f"{before.story}; then: {event}")
            here = before


class _Folding:
    """Finds, for a step, the place with the fewest details that leads to the same decisions."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._records: dict[DeviceRecord, DeviceRecord] = {}

    def record(self, record: DeviceRecord) -> DeviceRecord:
        """Return the folded record: the same object for equal ones."""
        folded = _folded(record, self._policy)
        return self._records.setdefault(folded, folded)

    def step(self, step: Step) -> Step:
        record = self.record(step.record)
        return replace(step, record=record, planned=step.planned and record.hygiene is Hygiene.SCRUBBING)

    def counts(self, place: Place) -> Place:
        rule, counted = self._policy.recovery, place.counted
        limited = rule.max_attempts_per_day < 64
        folded = Counted(
            proofs=min(counted.proofs, counted.owed),
            owed=counted.owed,
            attempts=min(counted.attempts, rule.max_attempts_per_day + 1) if limited else 0,
            resets=min(counted.resets, rule.max_resets_per_day + 1) if limited else 0,
            own=min(counted.own, rule.max_attempts),
        )
        return Place(place.record, folded, place.planned)


def _folded(record: DeviceRecord, policy: Policy) -> DeviceRecord:
    rule, cause, health = policy.recovery, record.cause, record.health
    if cause is not None:
        by_limit = "within a day" in cause.message
        code = cause.code if health in (Health.QUARANTINED, Health.RECOVERING) and not by_limit else ""
        message = "within a day" if by_limit else "attempts" if health is Health.CONDEMNED else "said"
        cause = Cause(code, message, cause.recovery_method, NOW, cause.actor)
    tenants = {
        each.tenant for each in entries_of_last_day(record.recent_quarantines, NOW, after=record.limits_count_from)
    }
    resets = [each.reset for each in entries_of_last_day(record.recovery_attempts, NOW, after=record.limits_count_from)]
    under_way = resets[-1:] if health is Health.RECOVERING else []
    attempts = [*sorted(resets[: len(resets) - len(under_way)]), *under_way]
    retry_at = record.retry_at
    if retry_at is not None:
        retry_at = NOW if retry_at <= NOW else NOW + (DAY if retry_at > NOW + DAY / 2 else 1.0)
    hygiene = record.hygiene
    if hygiene is Hygiene.CLEAN and health not in ADVERTISED:
        hygiene = Hygiene.DIRTY  # no decision depends on its certificate
    lasting = tuple(
        ActiveWarning(each.code, NOW - LASTS if each.since <= NOW - LASTS else NOW) for each in record.warnings
    )
    return DeviceRecord(
        DEVICE,
        hygiene=hygiene,
        health=health,
        cause=cause,
        certificate=CERTIFICATE if hygiene is Hygiene.CLEAN and record.certificate is not None else None,
        open_grants=(GRANT,) if record.open_grants else (),
        failures=min(record.failures, rule.max_attempts),
        clean_scrubs=record.clean_scrubs,
        retry_at=retry_at,
        must_reset=record.must_reset,
        boot=NODE.boot,
        warnings=lasting,
        recent_quarantines=tuple(PastQuarantine(NOW, "", each) for each in sorted(tenants, key=str)),
        recovery_attempts=tuple(RecoveryAttempt(NOW, each) for each in attempts)
        if rule.max_attempts_per_day < 64
        else (),
        break_glass=record.break_glass,
    )


# -- events ------------------------------------------------------------------------------------------------------------


def events(policy: Policy, now: Callable[[], float] = lambda: NOW) -> Mapping[str, Event]:
    """Return all events by name; the last three represent the passage of time, because the clock is fixed."""
    hot, once = finding(SOFT, Severity.WARNING), finding(ONCE, Severity.WARNING)
    faults = {way: finding(code) for way, code in FAULT_OF.items()}
    transitions: Mapping[str, Transition] = {
        "quiet": _look(policy, now),
        "hot": _look(policy, now, hot),
        "hot, and the breaker is open": _look(policy, now, hot, soft_stopped=True),
        "an event": _look(policy, now, once),
        **{f"fault: {way.value}": _look(policy, now, fault) for way, fault in faults.items()},
        "a scrub starts": _scrub_starts(*ADVERTISED, Health.PROBATION),
        "a scrub of what is out starts": _scrub_starts(Health.QUARANTINED, Health.CONDEMNED),
        "a recovery starts": _recovery_starts(policy, now),
        "passed": _ends(policy, now, Outcome.PASSED),
        "passed, with a reset": _ends(policy, now, Outcome.PASSED, reset=True),
        "passed, and it is hot": _ends(policy, now, Outcome.PASSED, hot),
        "held up": _ends(policy, now, Outcome.BLOCKED),
        "held up after its reset": _ends(policy, now, Outcome.BLOCKED, reset=True),
        "abandoned": _ends(policy, now, Outcome.ABANDONED),
        **{f"failed: {way.value}": _ends(policy, now, Outcome.FAILED, fault) for way, fault in faults.items()},
        **{
            f"failed after its reset: {way.value}": _ends(policy, now, Outcome.FAILED, fault, reset=True)
            for way, fault in faults.items()
        },
        "kill -9": _service_starts(NODE.boot),
        "a reboot": _service_starts("boot-2"),
        "settled": _settled(policy, now),
        "a person takes it out": _taken_out_by_an_operator,
        "a person releases it": _released_by_an_operator(policy, now),
        "its glass": _break_glass,
        "a tenant gets it": _granted,
        "it is given back": _when(Hygiene.IN_USE, lambda record: record.after_release()),
        "a process uses it": _when(Hygiene.CLEAN, lambda record: record.after_voided_certificate()),
        "the pause is over": _pause_is_over,
        "it has lasted": _has_lasted,
        "a day passes": _a_day_passes,
    }
    return {name: Event(transition) for name, transition in transitions.items()}


def _after(
    before: DeviceRecord, record: DeviceRecord, planned: bool, policy: Policy, count: Counting = _unchanged
) -> Step:
    """Return the step; proofs count from zero after a quarantine, or continue after an operator's action."""
    out = (Health.QUARANTINED, Health.CONDEMNED)
    changed = (record.health, record.cause) != (before.health, before.cause)
    if record.health not in out or not changed:
        return Step(record, planned, count)
    owed = policy.recovery.probation_scrubs + 1
    return Step(record, planned, lambda counted: replace(count(counted), proofs=0, owed=owed))


def _more(*, proofs: int = 0, attempts: int = 0, resets: int = 0, own: int = 0) -> Counting:
    return lambda counted: Counted(
        counted.proofs + proofs, counted.owed, counted.attempts + attempts, counted.resets + resets, counted.own + own
    )


def _look(policy: Policy, now: Callable[[], float], *found: Finding, soft_stopped: bool = False) -> Transition:
    def transition(before: DeviceRecord, planned: bool) -> Step:
        record = after_findings(before, found, policy, now(), soft_quarantines_stopped=soft_stopped)
        failed = record.failures > before.failures and before.tenant is None
        return _after(before, record, planned, policy, _more(own=1) if failed else _unchanged)

    return transition


def _scrub_starts(*while_it_is: Health) -> Transition:
    def transition(record: DeviceRecord, _: bool) -> Step | None:
        may = record.hygiene in (Hygiene.DIRTY, Hygiene.CLEAN) and record.health in while_it_is
        return Step(record.after_scrub_start(), planned=False) if may else None

    return transition


def _recovery_starts(policy: Policy, now: Callable[[], float]) -> Transition:
    def transition(record: DeviceRecord, planned: bool) -> Step | None:
        need = next_action(record, policy, NODE)
        if need.action is not RecoveryAction.RECOVER or (need.due or 0.0) > now():
            return None
        left = apply_attempt_limits(record, policy, now())
        if left is not record:
            return _after(record, left, planned, policy)
        resets = record.must_reset
        return Step(record.after_recovery_start(RecoveryAttempt(now(), resets)).after_scrub_start(), planned=resets)

    return transition


def _ends(
    policy: Policy, now: Callable[[], float], outcome: Outcome, *found: Finding, reset: bool = False
) -> Transition:
    """The current scrub ends; ``reset``: the device was reset in it, as in some recoveries."""
    waits = any(each.code == FAULT_OF[RecoveryMethod.WAIT] for each in found)

    def transition(record: DeviceRecord, planned: bool) -> Step | None:
        if record.hygiene is not Hygiene.SCRUBBING or (reset and not planned):
            return None
        recovering, passed = record.health is Health.RECOVERING, outcome is Outcome.PASSED
        if passed and planned and not reset:
            return None  # a plan with a reset does not pass without one
        attempts = resets = own = 0
        hygiene = (
            record.after_passed_scrub(_issued(record), was_reset=reset) if passed else record.after_unproven_scrub()
        )
        if recovering:
            may_have = outcome is Outcome.ABANDONED and planned
            attempts = reset or may_have or not (waits or outcome is Outcome.BLOCKED)
            resets = reset or may_have
            own = outcome is Outcome.FAILED and not waits
        after = after_scrub(hygiene, outcome, found, policy, now(), reset=reset)
        if not recovering and after.failures > record.failures and record.tenant is None:
            own = 1
        count = _more(proofs=passed, attempts=attempts, resets=resets, own=own)
        return _after(record, after, False, policy, count)

    return transition


def _broken_off(record: DeviceRecord, planned: bool) -> Counting:
    """Count a recovery with an unknown end as complete: it may have done everything that was planned."""
    return _more(attempts=1, resets=planned) if record.health is Health.RECOVERING else _unchanged


def _service_starts(boot: str) -> Transition:
    return lambda record, planned: Step(
        replace(record.after_service_start(boot), boot=NODE.boot), False, _broken_off(record, planned)
    )


def _settled(policy: Policy, now: Callable[[], float]) -> Transition:
    """The ledger failed at the end of a scrub, and can be written again."""

    def transition(before: DeviceRecord, planned: bool) -> Step | None:
        if next_action(before, policy, NODE).action is not RecoveryAction.RESOLVE:
            return None
        record = before.after_unproven_scrub() if before.hygiene is Hygiene.SCRUBBING else before
        record = record.after_recovery_failure(retry_at=now()) if record.health is Health.RECOVERING else record
        return Step(record, False, _broken_off(before, planned))

    return transition


def _taken_out_by_an_operator(record: DeviceRecord, planned: bool) -> Step:
    return Step(replace(record.after_operator_quarantine(BY_AN_OPERATOR), break_glass=None), planned)


def _released_by_an_operator(policy: Policy, now: Callable[[], float]) -> Transition:
    counted = Counted(owed=policy.recovery.probation_scrubs)

    def transition(record: DeviceRecord, planned: bool) -> Step | None:
        if record.health not in (Health.QUARANTINED, Health.CONDEMNED):
            return None
        return Step(record.after_operator_release(retry_at=now()), planned, lambda _: counted)

    return transition


def _break_glass(record: DeviceRecord, planned: bool) -> Step | None:
    if record.break_glass is not None:
        return Step(record.without_break_glass(), planned)
    return None if record.quarantined_by_operator else Step(record.with_break_glass(BROKEN), planned)


def _issued(record: DeviceRecord) -> Certificate:
    return replace(CERTIFICATE, sequence=record.certificate_count + 1, previous_grant=record.grant_sequence)


def _granted(record: DeviceRecord, planned: bool) -> Step | None:
    certified = record.advertised and record.certificate is not None
    broken = record.break_glass is not None and not record.quarantined_by_operator
    if record.hygiene is Hygiene.SCRUBBING or not (certified or broken):
        return None
    return Step(record.after_grant(replace(GRANT, sequence=record.grant_sequence + 1), None, certain=True), planned)


def _when(hygiene: Hygiene, change: Callable[[DeviceRecord], DeviceRecord]) -> Transition:
    return lambda record, planned: Step(change(record), planned) if record.hygiene is hygiene else None


def _pause_is_over(record: DeviceRecord, planned: bool) -> Step | None:
    due = record.retry_at
    if due is None or not NOW < due < NOW + DAY / 2:
        return None
    return Step(replace(record, retry_at=NOW), planned)


def _has_lasted(record: DeviceRecord, planned: bool) -> Step | None:
    lasting = tuple(replace(each, since=NOW - LASTS) for each in record.warnings)
    return Step(replace(record, warnings=lasting), planned) if lasting else None


def _a_day_passes(record: DeviceRecord, planned: bool) -> Step | None:
    if record.hygiene is Hygiene.SCRUBBING:
        return None  # no scrub takes a day
    due = None if record.retry_at is None else NOW
    lasting = tuple(replace(each, since=NOW - LASTS) for each in record.warnings)
    later = replace(record, recovery_attempts=(), recent_quarantines=(), retry_at=due, warnings=lasting)
    return Step(later, planned, lambda counted: replace(counted, attempts=0, resets=0))
