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


Event = Callable[[Place], Place | None]
"""Returns None where the event cannot happen."""


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
        first = _folded(Place(DeviceRecord(DEVICE, boot=NODE.boot)), policy)
        found: dict[Place, tuple[Place | None, str]] = {first: (None, "")}
        broken: dict[str, tuple[Place, str, Place]] = {
            each: (first, "", first) for each in of_places if not promises[each](first, "", first)
        }
        happened: set[str] = set()
        edge = [first]
        while edge:
            following = []
            for place in edge:
                for name, event in happen.items():
                    unfolded = event(place)
                    if unfolded is None:
                        continue
                    happened.add(name)
                    after = _folded(unfolded, policy)
                    known = after in found
                    for promise, kept in promises.items():
                        if known and promise in of_places:
                            continue
                        if promise not in broken and not kept(place, name, after):
                            broken[promise] = (place, name, after)
                    if not known:
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


def _folded(place: Place, policy: Policy) -> Place:
    """Return a place that leads to the same decisions, with the fewest details."""
    record, rule = place.record, policy.recovery
    cause, health = record.cause, record.health
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
    folded = DeviceRecord(
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
    counted = place.counted
    if rule.max_attempts_per_day >= 64:
        counted = replace(counted, attempts=0, resets=0)
    counted = Counted(
        proofs=min(counted.proofs, counted.owed),
        owed=counted.owed,
        attempts=min(counted.attempts, rule.max_attempts_per_day + 1),
        resets=min(counted.resets, rule.max_resets_per_day + 1),
        own=min(counted.own, rule.max_attempts),
    )
    return Place(folded, counted, place.planned and hygiene is Hygiene.SCRUBBING)


# -- events ------------------------------------------------------------------------------------------------------------


def events(policy: Policy, now: Callable[[], float] = lambda: NOW) -> Mapping[str, Event]:
    """Return all events by name; the last three represent the passage of time, because the clock is fixed."""
    hot, once = finding(SOFT, Severity.WARNING), finding(ONCE, Severity.WARNING)
    faults = {way: finding(code) for way, code in FAULT_OF.items()}
    return {
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
        "a person takes it out": lambda at: replace(
            at, record=replace(at.record.after_operator_quarantine(BY_AN_OPERATOR), break_glass=None)
        ),
        "a person releases it": _released_by_an_operator(policy, now),
        "its glass": _break_glass,
        "a tenant gets it": _granted,
        "it is given back": _when(Hygiene.IN_USE, lambda record: record.after_release()),
        "a process uses it": _when(Hygiene.CLEAN, lambda record: record.after_voided_certificate()),
        "the pause is over": _pause_is_over,
        "it has lasted": _has_lasted,
        "a day passes": _a_day_passes,
    }


def _after(before: Place, record: DeviceRecord, counted: Counted, policy: Policy) -> Place:
    """Return the next place; proofs count from zero after a quarantine, or continue after an operator's action."""
    out = (Health.QUARANTINED, Health.CONDEMNED)
    changed = (record.health, record.cause) != (before.record.health, before.record.cause)
    if record.health in out and changed:
        counted = replace(counted, proofs=0, owed=policy.recovery.probation_scrubs + 1)
    return Place(record, counted, before.planned)


def _look(policy: Policy, now: Callable[[], float], *found: Finding, soft_stopped: bool = False) -> Event:
    def event(at: Place) -> Place:
        record = after_findings(at.record, found, policy, now(), soft_quarantines_stopped=soft_stopped)
        counted = at.counted
        if record.failures > at.record.failures and at.record.tenant is None:
            counted = replace(counted, own=counted.own + 1)
        return _after(at, record, counted, policy)

    return event


def _scrub_starts(*while_it_is: Health) -> Event:
    def event(at: Place) -> Place | None:
        may = at.record.hygiene in (Hygiene.DIRTY, Hygiene.CLEAN) and at.record.health in while_it_is
        return replace(at, record=at.record.after_scrub_start(), planned=False) if may else None

    return event


def _recovery_starts(policy: Policy, now: Callable[[], float]) -> Event:
    def event(at: Place) -> Place | None:
        need = next_action(at.record, policy, NODE)
        if need.action is not RecoveryAction.RECOVER or (need.due or 0.0) > now():
            return None
        left = apply_attempt_limits(at.record, policy, now())
        if left is not at.record:
            return _after(at, left, at.counted, policy)
        resets = at.record.must_reset
        return replace(
            at,
            record=at.record.after_recovery_start(RecoveryAttempt(now(), resets)).after_scrub_start(),
            planned=resets,
        )

    return event


def _ends(policy: Policy, now: Callable[[], float], outcome: Outcome, *found: Finding, reset: bool = False) -> Event:
    """The current scrub ends; ``reset``: the device was reset in it, as in some recoveries."""
    waits = any(each.code == FAULT_OF[RecoveryMethod.WAIT] for each in found)

    def event(at: Place) -> Place | None:
        record, counted = at.record, at.counted
        if record.hygiene is not Hygiene.SCRUBBING or (reset and not at.planned):
            return None
        recovering, passed = record.health is Health.RECOVERING, outcome is Outcome.PASSED
        if passed and at.planned and not reset:
            return None  # a plan with a reset does not pass without one
        if passed:
            counted = replace(counted, proofs=counted.proofs + 1)
        hygiene = (
            record.after_passed_scrub(_issued(record), was_reset=reset) if passed else record.after_unproven_scrub()
        )
        if recovering:
            may_have = outcome is Outcome.ABANDONED and at.planned
            made = reset or may_have or not (waits or outcome is Outcome.BLOCKED)
            failed = outcome is Outcome.FAILED and not waits
            counted = replace(
                counted,
                attempts=counted.attempts + made,
                resets=counted.resets + (reset or may_have),
                own=counted.own + failed,
            )
        after = after_scrub(hygiene, outcome, found, policy, now(), reset=reset)
        if not recovering and after.failures > record.failures and record.tenant is None:
            counted = replace(counted, own=counted.own + 1)
        return replace(_after(at, after, counted, policy), planned=False)

    return event


def _broken_off(at: Place) -> Counted:
    """Count a recovery with an unknown end as complete: it may have done everything that was planned."""
    if at.record.health is not Health.RECOVERING:
        return at.counted
    return replace(at.counted, attempts=at.counted.attempts + 1, resets=at.counted.resets + at.planned)


def _service_starts(boot: str) -> Event:
    def event(at: Place) -> Place:
        return Place(replace(at.record.after_service_start(boot), boot=NODE.boot), _broken_off(at))

    return event


def _settled(policy: Policy, now: Callable[[], float]) -> Event:
    """The ledger failed at the end of a scrub, and can be written again."""

    def event(at: Place) -> Place | None:
        if next_action(at.record, policy, NODE).action is not RecoveryAction.RESOLVE:
            return None
        record = at.record
        record = record.after_unproven_scrub() if record.hygiene is Hygiene.SCRUBBING else record
        record = record.after_recovery_failure(retry_at=now()) if record.health is Health.RECOVERING else record
        return Place(record, _broken_off(at))

    return event


def _released_by_an_operator(policy: Policy, now: Callable[[], float]) -> Event:
    def event(at: Place) -> Place | None:
        if at.record.health not in (Health.QUARANTINED, Health.CONDEMNED):
            return None
        counted = Counted(owed=policy.recovery.probation_scrubs)
        return Place(at.record.after_operator_release(retry_at=now()), counted, at.planned)

    return event


def _break_glass(at: Place) -> Place | None:
    if at.record.break_glass is not None:
        return replace(at, record=at.record.without_break_glass())
    return None if at.record.quarantined_by_operator else replace(at, record=at.record.with_break_glass(BROKEN))


def _issued(record: DeviceRecord) -> Certificate:
    return replace(CERTIFICATE, sequence=record.certificate_count + 1, previous_grant=record.grant_sequence)


def _granted(at: Place) -> Place | None:
    record = at.record
    certified = record.advertised and record.certificate is not None
    broken = record.break_glass is not None and not record.quarantined_by_operator
    if record.hygiene is Hygiene.SCRUBBING or not (certified or broken):
        return None
    return replace(
        at, record=record.after_grant(replace(GRANT, sequence=record.grant_sequence + 1), None, certain=True)
    )


def _when(hygiene: Hygiene, change: Callable[[DeviceRecord], DeviceRecord]) -> Event:
    return lambda at: replace(at, record=change(at.record)) if at.record.hygiene is hygiene else None


def _pause_is_over(at: Place) -> Place | None:
    due = at.record.retry_at
    if due is None or not NOW < due < NOW + DAY / 2:
        return None
    return replace(at, record=replace(at.record, retry_at=NOW))


def _has_lasted(at: Place) -> Place | None:
    lasting = tuple(replace(each, since=NOW - LASTS) for each in at.record.warnings)
    return replace(at, record=replace(at.record, warnings=lasting)) if lasting else None


def _a_day_passes(at: Place) -> Place | None:
    if at.record.hygiene is Hygiene.SCRUBBING:
        return None  # no scrub takes a day
    due = None if at.record.retry_at is None else NOW
    lasting = tuple(replace(each, since=NOW - LASTS) for each in at.record.warnings)
    record = replace(at.record, recovery_attempts=(), recent_quarantines=(), retry_at=due, warnings=lasting)
    return replace(at, record=record, counted=replace(at.counted, attempts=0, resets=0))
