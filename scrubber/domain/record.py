"""The durable record of one device, and the only functions that change it.

Every change is a new record with a higher version. The controller of the device computes it, the ledger stores it in
one transaction with its audit rows, and only then it is applied in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from scrubber.domain.assignment import Assignment, Claim, Pod, Process
from scrubber.domain.baseline import Baseline
from scrubber.domain.evidence import Certificate, PathKind
from scrubber.domain.handover_kind import UNCONDITIONAL_BASES, Basis, HandOverKind
from scrubber.domain.health.history import PastQuarantine, RecoveryAttempt, append_entry
from scrubber.domain.health.signal_table import SignalTable
from scrubber.domain.states import (
    ADVERTISED,
    HEALTH_TRANSITIONS,
    HYGIENE_TRANSITIONS,
    Cause,
    Health,
    HealthEvent,
    Hygiene,
    HygieneEvent,
    RecoveryMethod,
)
from scrubber.domain.telemetry import LIFETIME_COUNTERS

__all__ = ["MAX_ADMIN_CLAIMS", "ActiveWarning", "BreakGlass", "DeviceRecord", "Grant"]


@dataclass(frozen=True, slots=True)
class Grant:
    """A granted hand-over, to a container of a pod or to a claim with its pods.

    Attributes:
        sequence: number of the grant on its device, from 1; an adoption counts as a grant that was made elsewhere.
        assignment: the pod and container that have the device by it; None for a claim, and when no source named them.
        kind: how it relates to the previous grant.
        at: wall-clock seconds.
        boot: boot ID; no process of an earlier boot is alive.
        certificate: the certificate that it used; None for an exception.
        basis: the certificate, or the exception that replaced one.
        baseline: processes of the pod that existed before its first grant.
        cgroups: names of the container cgroups that had the device by grants of the pod since it was last clean, oldest
            first: for each grant, the first container created after it. A container whose creation was not observed is
            missing.
        started: name of the container cgroup that was created after this grant; empty if none was observed.
        claim: the claim that has the device by it; None for a container.
        path: whether the device was clean already; None for an adoption.
    """

    sequence: int
    assignment: Assignment | None
    kind: HandOverKind
    at: float
    boot: str
    certificate: str | None = None
    basis: Basis = Basis.CERTIFICATE
    baseline: tuple[Process, ...] = ()
    cgroups: tuple[str, ...] = ()
    started: str = ""
    claim: Claim | None = None
    path: PathKind | None = None

    @property
    def pod(self) -> Pod | None:
        """The pod of its container; None for a claim, and when no source named it."""
        return None if self.assignment is None else self.assignment.pod

    @property
    def pods(self) -> tuple[Pod, ...]:
        """The pods that may use the device by it: those of its claim, or the pod of its container."""
        if self.claim is not None:
            return self.claim.pods
        return () if self.assignment is None else (self.assignment.pod,)

    @property
    def tenant(self) -> str | None:
        """The namespace of its claim or pod; None when no source named them."""
        if self.claim is not None:
            return self.claim.tenant
        return None if self.assignment is None else self.assignment.pod.tenant

    def by_pod(self) -> tuple[Grant, ...]:
        """The grant as each of its pods has it: for a claim with pods, one with the ``assignment`` of each pod."""
        if self.claim is None or not self.claim.pods:
            return (self,)
        driver = self.claim.driver
        return tuple(replace(self, assignment=Assignment(pod, "", frozenset(), driver)) for pod in self.claim.pods)


@dataclass(frozen=True, slots=True)
class ActiveWarning:
    """A warning that persists, and since when (wall-clock seconds)."""

    code: str
    since: float


# See docs/decisions/0031-observe-and-break-glass.md.
@dataclass(frozen=True, slots=True)
class BreakGlass:
    """An operator's order to bypass all checks for the device until ``until`` (wall-clock seconds)."""

    until: float
    reason: str
    actor: str


_MAX_CGROUPS = 16
"""Containers of one pod that a grant remembers: of those that crash repeatedly only the last can still be exiting."""

MAX_ADMIN_CLAIMS = 16
"""Maximum number of claims with admin access in a record: monitors of one node are few."""

_MAX_WARNINGS = 32
"""Maximum number of warnings in a record: a driver may report any number."""


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """Both states of a device and everything that decisions about it rest on.

    Attributes:
        version: increases by one with every change.
        cause: set while the device is out of service, or suspect.
        certificate: the unused certificate; None unless the device is clean.
        rests_on: ID of the last slow-path certificate, for fast-path certificates to name.
        last_grant: the newest grant, also after its pod is over.
        open_grants: grants whose pod no scrub has shown to be over yet, oldest first.
        boot: the boot that the record was last started under.
        lifetime_counters: the device's own error counters at the last check, to detect errors that occurred in between.
        certificate_count: number of certificates ever issued for the device.
        failures: failed attempts at recovery since the device was last healthy.
        deferred_attempts: attempts that met a condition that must end without intervention: they do not count as
            failures, but make the pauses longer.
        clean_scrubs: clean slow paths in the current probation.
        retry_at: wall-clock seconds before which recovery does not try again.
        must_reset: a fault requires a reset, and no scrub has proved the device sound after one yet.
        externally_reset: another service says that it reset the device, after the last fault and the last grant. It is
            not observed, so it never counts as proof; the obligation to reset ends with a recovery that passes after it.
        exclusive_use: only the last grant's pod can have used the device since it was last clean. Only then may the
            policy's exceptions leave its residue in place; false for an adopted, touched or unwatched device.
        contaminated: a process without a grant was seen to use it since it was last clean: it is unknown whose data is
            on it.
        warnings: warnings that persist, each with its start.
        recent_quarantines: quarantines of the last day.
        recovery_attempts: recoveries of the last day.
        limits_count_from: wall-clock seconds of an operator's last release: the device's own limits count from there.
        break_glass: set while a break-glass override is in effect.
        baseline: the device's expected facts; None until it was first inspected.
        admin_claims: claims with admin access to it: no grants, so that they change nothing else, and their pods count
            neither as tenants nor as unauthorized users.
    """

    device: str
    version: int = 0
    hygiene: Hygiene = Hygiene.DIRTY
    health: Health = Health.HEALTHY
    cause: Cause | None = None
    certificate: Certificate | None = None
    rests_on: str | None = None
    last_grant: Grant | None = None
    open_grants: tuple[Grant, ...] = ()
    certificate_count: int = 0
    failures: int = 0
    deferred_attempts: int = 0
    clean_scrubs: int = 0
    retry_at: float | None = None
    must_reset: bool = False
    externally_reset: bool = False
    exclusive_use: bool = False
    contaminated: bool = False
    boot: str = ""
    lifetime_counters: tuple[tuple[str, int], ...] = ()
    warnings: tuple[ActiveWarning, ...] = ()
    recent_quarantines: tuple[PastQuarantine, ...] = ()
    recovery_attempts: tuple[RecoveryAttempt, ...] = ()
    limits_count_from: float | None = None
    break_glass: BreakGlass | None = None
    baseline: Baseline | None = None
    admin_claims: tuple[Claim, ...] = ()

    @property
    def previous_assignment(self) -> Assignment | None:
        """The assignment whose data may be on the device; None when that is not certain."""
        return self.last_grant.assignment if self.exclusive_use and self.last_grant is not None else None

    @property
    def tenant(self) -> str | None:
        """The only tenant that has, or had, the device since it was last clean; None when that is not certain."""
        if self.hygiene is Hygiene.CLEAN:
            return None  # its open grants are of a pod that is about to start on it again
        named = {grant.tenant for grant in self.open_grants}
        return named.pop() if len(named) == 1 and not self.contaminated else None

    @property
    def grant_sequence(self) -> int:
        """Sequence of the last grant; 0 when there was none."""
        return 0 if self.last_grant is None else self.last_grant.sequence

    def open_grants_of(self, pod: Pod | None) -> tuple[Grant, ...]:
        """The open grants of ``pod``; empty where its UID is not known."""
        return tuple(each for each in self.open_grants if pod is not None and pod.uid is not None and each.pod == pod)

    def claim(self, uid: str) -> Claim | None:
        """The claim ``uid`` of an open grant; None when there is none."""
        return next((each.claim for each in self.open_grants if each.claim is not None and each.claim.uid == uid), None)

    def prepared_grant(self, uid: str) -> Grant | None:
        """The open grant by which the claim ``uid`` is prepared; None when there is none."""
        found = (each for each in self.open_grants if each.claim is not None and each.claim.uid == uid)
        return next((each for each in found if each.claim is not None and each.claim.is_prepared), None)

    def adopted_since(self, grant: Grant) -> Assignment | None:
        """The assignment of a pod that got the device without a hand-over after ``grant``; None when there is none."""
        later = (each for each in self.open_grants if each.sequence > grant.sequence and each.basis is Basis.ADOPTED)
        return next((each.assignment for each in later if each.pod is not None and each.pod not in grant.pods), None)

    @property
    def prepared_claims(self) -> tuple[Claim, ...]:
        """The claims of open grants that no request to unprepare has released."""
        return tuple(each.claim for each in self.open_grants if each.claim is not None and each.claim.is_prepared)

    @property
    def advertised(self) -> bool:
        """Whether the health state allows advertising the device to the kubelet as ``Healthy``."""
        return self.health in ADVERTISED

    @property
    def is_certified(self) -> bool:
        """Whether the device is clean, with a certificate that no grant has consumed."""
        certificate = self.certificate
        return self.hygiene is Hygiene.CLEAN and certificate is not None and certificate.next_grant is None

    @property
    def owes_reset(self) -> bool:
        """Whether the next recovery has to reset the device."""
        return self.must_reset and not self.externally_reset

    @property
    def quarantined_by_operator(self) -> bool:
        """Whether an operator quarantined the device: that applies under any policy."""
        return self.health is Health.QUARANTINED and self.cause is not None and self.cause.by_operator

    @property
    def state(self) -> str:
        """One word for display: the health if the device is out of service, else the hygiene."""
        return self.hygiene.value if self.advertised else self.health.value

    def _next(self, **changes: object) -> DeviceRecord:
        return replace(self, version=self.version + 1, **changes)  # type: ignore[arg-type]

    # -- hygiene ---------------------------------------------------------------------------------------------------

    def after_service_start(self, boot: str) -> DeviceRecord:
        """Mark the device dirty, because earlier events were not watched. No grant of an earlier boot stays open."""
        still_open = tuple(grant for grant in self.open_grants if grant.boot == boot)
        health = Health.QUARANTINED if self.health is Health.RECOVERING else self.health
        cause = self.cause
        if cause is not None and cause.recovery_method is RecoveryMethod.REBOOT and self.boot not in ("", boot):
            cause = replace(cause, recovery_method=RecoveryMethod.SCRUB)
        return self._next(
            hygiene=HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.SERVICE_STARTED),
            health=health,
            cause=cause,
            certificate=None,
            open_grants=still_open,
            exclusive_use=False,
            boot=boot,
            admin_claims=self.admin_claims if self.boot == boot else (),
            # The driver and the service's event counts start again from zero.
            lifetime_counters=self.without_unlisted_errors(()).lifetime_counters,
        )

    def after_adoption(self, grant: Grant | None) -> DeviceRecord:
        """Record that a pod already has the device: ``grant`` is new, or None for a pod of an open grant."""
        if grant is None:
            return self._next(hygiene=HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.ADOPTED), exclusive_use=False)
        return self._next(
            hygiene=HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.ADOPTED),
            last_grant=grant,
            open_grants=(*self.open_grants, grant),
            exclusive_use=False,
        )

    def after_scrub_start(self) -> DeviceRecord:
        """Void the certificate, if any, because a scrub starts."""
        return self._next(hygiene=HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.SCRUB_STARTED), certificate=None)

    def after_passed_scrub(
        self, certificate: Certificate, *, was_reset: bool, restores: bool = False, starting_pod: Pod | None = None
    ) -> DeviceRecord:
        """Record that the device is proved clean. Every earlier grant's pod was over before the memory was touched.

        Args:
            restores: it was the scrub of a recovery, which proves health as after any reset.
            starting_pod: the pod whose start it was scrubbed for. Its other containers may still be running, so its
                grants stay open: no other pod gets the device before they have ended.
        """
        must_reset = self.must_reset and not (was_reset or (restores and self.externally_reset))
        return self._next(
            hygiene=HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.SCRUB_PASSED),
            certificate=certificate,
            rests_on=certificate.id,
            certificate_count=certificate.sequence,
            open_grants=tuple(
                replace(each, cgroups=())
                for each in self.open_grants
                if starting_pod is not None and each.pod == starting_pod
            ),
            must_reset=must_reset,
            externally_reset=self.externally_reset and must_reset,
            exclusive_use=True,
            contaminated=False,
        )

    def after_unproven_scrub(self) -> DeviceRecord:
        """Record that a scrub ended without proof, for any reason."""
        return self._next(hygiene=HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.SCRUB_ENDED), certificate=None)

    def after_voided_certificate(self) -> DeviceRecord:
        """Void the certificate because the device was used without a grant."""
        return self._next(
            hygiene=HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.CERTIFICATE_VOIDED),
            certificate=None,
            exclusive_use=False,
        )

    def after_unauthorized_use(self, *, observed: bool) -> DeviceRecord:
        """Record use without a grant, or a time in which it may have happened.

        The data on the device may not be the last grant's alone.

        Args:
            observed: whether such use is known or must be presumed.
        """
        after = self.after_voided_certificate() if self.hygiene is Hygiene.CLEAN else self._next(exclusive_use=False)
        return replace(after, contaminated=self.contaminated or observed)

    def with_grant_assignment(self, assignment: Assignment, baseline: tuple[Process, ...]) -> DeviceRecord:
        """Add the pod of the last grant, which no source could name at the time of the grant."""
        assert self.last_grant is not None
        grant = replace(self.last_grant, assignment=assignment, baseline=baseline)
        grants = tuple(grant if each.sequence == grant.sequence else each for each in self.open_grants)
        return self._next(last_grant=grant, open_grants=grants)

    def with_started_container(self, cgroup: str, container: str | None) -> DeviceRecord:
        """Add the container that started on the last grant.

        Args:
            cgroup: name of the container's cgroup.
            container: its name, where the kubelet's list named another container of the pod.
        """
        assert self.last_grant is not None
        cgroups = (*self.last_grant.cgroups, cgroup)[-_MAX_CGROUPS:]
        grant = replace(self.last_grant, cgroups=cgroups, started=cgroup)
        if container is not None and grant.assignment is not None:
            grant = replace(grant, assignment=replace(grant.assignment, container=container))
        grants = tuple(grant if each.sequence == grant.sequence else each for each in self.open_grants)
        return self._next(last_grant=grant, open_grants=grants)

    def with_claim(self, uid: str, change: Callable[[Claim], Claim]) -> DeviceRecord:
        """Change the claim ``uid`` in every grant that names it; the record itself where that changes nothing."""

        def changed(grant: Grant) -> Grant:
            same = grant.claim is not None and grant.claim.uid == uid
            return replace(grant, claim=change(grant.claim)) if same and grant.claim is not None else grant

        grants = tuple(changed(each) for each in self.open_grants)
        last = None if self.last_grant is None else changed(self.last_grant)
        if (grants, last) == (self.open_grants, self.last_grant):
            return self
        return self._next(open_grants=grants, last_grant=last)

    def after_unprepare(self, uid: str, at: float, elsewhere: Collection[Pod] = ()) -> DeviceRecord:
        """Record a request to unprepare the prepared claim ``uid``. Its grant stays open until a scrub shows its pods over.

        Args:
            elsewhere: pods that cannot use the device any more, although they are not over: they have no process, and start
                with other devices. The claim loses them, and a claim that has no other pod its grant.
        """
        after = self.with_claim(
            uid,
            lambda claim: replace(
                claim,
                released_at=at,
                pods=tuple(each for each in claim.pods if each not in elsewhere) or claim.pods,
                listed_pods=tuple(each for each in claim.listed_pods if each not in elsewhere),
            ),
        )
        grants = tuple(each for each in after.open_grants if each.claim is None or each.claim.uid != uid)
        left = after.claim(uid)
        if left is None or not left.pods or not set(left.pods).issubset(elsewhere):
            return after
        unused = not grants and self.hygiene is Hygiene.IN_USE
        hygiene = HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.RELEASED) if unused else self.hygiene
        return replace(after, open_grants=grants, hygiene=hygiene)

    def with_admin_access(self, claim: Claim, *, listed: Collection[str] = ()) -> DeviceRecord:
        """Add a claim with admin access, or set its pods; beyond a limit the oldest one is forgotten.

        Args:
            listed: UIDs of claims that are not forgotten; fewer than the limit, besides ``claim``.
        """
        others = [each for each in self.admin_claims if each.uid != claim.uid]
        while len(others) >= MAX_ADMIN_CLAIMS:
            others.remove(next((each for each in others if each.uid not in listed), others[0]))
        return self if claim in self.admin_claims else self._next(admin_claims=(*others, claim))

    def without_admin_access(self, uid: str) -> DeviceRecord:
        """Remove the claim ``uid`` with admin access, if there is one."""
        left = tuple(each for each in self.admin_claims if each.uid != uid)
        return self if left == self.admin_claims else self._next(admin_claims=left)

    def after_release(self) -> DeviceRecord:
        """Record that no pod of an open grant is entitled to use the device any more.

        The grants stay open until a scrub shows that their pods are over.
        """
        return self._next(hygiene=HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.RELEASED))

    def after_grant(self, grant: Grant, fast: Certificate | None, *, certain: bool) -> DeviceRecord:
        """Record a grant: the device is in use, and this change uses up the certificate.

        Earlier open grants of the same pod or claim are merged into the new grant; the others stay open.

        Args:
            fast: the fast path's own certificate, when it issued one.
            certain: whether PodResources itself named the assignment; a hint is reliable enough to wait for, but not to
                trust.
        """
        same = self.open_grants_of(grant.pod)
        if grant.claim is not None:
            same = tuple(
                each for each in self.open_grants if each.claim is not None and each.claim.uid == grant.claim.uid
            )
        others = tuple(each for each in self.open_grants if each not in same)
        if self.hygiene is Hygiene.CLEAN and grant.basis is Basis.CERTIFICATE:
            others = ()  # a clean device is granted only after the pods of all earlier grants are over
        return self._next(
            hygiene=HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.GRANTED),
            certificate=None,
            last_grant=grant,
            open_grants=(*others, grant),
            certificate_count=self.certificate_count if fast is None else fast.sequence,
            externally_reset=False,
            exclusive_use=self.exclusive_use and certain and grant.basis not in UNCONDITIONAL_BASES,
        )

    # -- health ----------------------------------------------------------------------------------------------------

    def with_baseline(self, baseline: Baseline) -> DeviceRecord:
        """Set the baseline: the device's expected facts from now on."""
        return self._next(baseline=baseline)

    def with_counters(self, counters: Mapping[str, int]) -> DeviceRecord:
        """Set the device's own counters to their current values."""
        return self._next(lifetime_counters=tuple(sorted({**dict(self.lifetime_counters), **counters}.items())))

    def without_unlisted_errors(self, listed: Collection[str]) -> DeviceRecord:
        """Remove the counts of error codes that are not ``listed``: their counters start again from zero."""
        left = tuple(pair for pair in self.lifetime_counters if pair[0] in LIFETIME_COUNTERS or pair[0] in listed)
        return self if left == self.lifetime_counters else self._next(lifetime_counters=left)

    def with_warnings(self, codes: Collection[str], now: float, table: SignalTable) -> DeviceRecord:
        """Set the persisting warnings to ``codes``; new ones start at ``now``."""
        known = {each.code: each for each in self.warnings}
        warnings = tuple(known.get(code, ActiveWarning(code, now)) for code in sorted(codes))
        ordered = sorted(warnings, key=lambda each: (each.code not in table.soft, each.since, each.code))
        warnings = tuple(ordered[:_MAX_WARNINGS])
        return self if warnings == self.warnings else self._next(warnings=warnings)

    def after_tenant_change(self, now: float, table: SignalTable) -> DeviceRecord:
        """Restart warnings that end without intervention, such as heat, at ``now``: another tenant has the device."""
        begun = tuple(
            replace(each, since=now)
            if each.code in table.soft and table.classify(each.code).recovery_method is RecoveryMethod.WAIT
            else each
            for each in self.warnings
        )
        return self if begun == self.warnings else self._next(warnings=begun)

    def after_soft_signal(self, cause: Cause) -> DeviceRecord:
        return self._next(health=HEALTH_TRANSITIONS(self.health, HealthEvent.SOFT_SIGNAL), cause=cause)

    def after_signals_ended(self) -> DeviceRecord:
        return self._next(health=HEALTH_TRANSITIONS(self.health, HealthEvent.SIGNALS_ENDED), cause=None)

    def after_fault(self, cause: Cause, *, retry_at: float, is_failed_attempt: bool) -> DeviceRecord:
        """Quarantine the device for a fault. A quarantine by an operator keeps its cause despite later faults.

        Args:
            is_failed_attempt: whether the device failed during its recovery, so this counts as a failed attempt.
        """
        keep = self.cause is not None and self.cause.by_operator and self.health is Health.QUARANTINED
        strike = PastQuarantine(cause.since, cause.code, self.tenant)
        struck = self.health not in (Health.QUARANTINED, Health.RECOVERING)
        return self._next(
            health=HEALTH_TRANSITIONS(self.health, HealthEvent.FAULT),
            cause=self.cause if keep else cause,
            clean_scrubs=0,
            failures=self.failures + (1 if is_failed_attempt else 0),
            retry_at=retry_at,
            must_reset=self.must_reset or cause.recovery_method is RecoveryMethod.RESET,
            externally_reset=False,
            recent_quarantines=append_entry(self.recent_quarantines, strike) if struck else self.recent_quarantines,
        )

    def after_operator_quarantine(self, cause: Cause) -> DeviceRecord:
        """Quarantine the device by an operator's order; replaces an earlier one."""
        return self._next(
            health=HEALTH_TRANSITIONS(self.health, HealthEvent.QUARANTINED_BY_OPERATOR),
            cause=cause,
            clean_scrubs=0,
            retry_at=None,
            break_glass=None,
        )

    def after_recovery_start(self, attempt: RecoveryAttempt) -> DeviceRecord:
        return self._next(
            health=HEALTH_TRANSITIONS(self.health, HealthEvent.RECOVERY_STARTED),
            recovery_attempts=append_entry(self.recovery_attempts, attempt),
        )

    def after_recovery_failure(self, *, retry_at: float) -> DeviceRecord:
        """Return the device to quarantine without counting a failure: nothing was found."""
        return self._next(health=HEALTH_TRANSITIONS(self.health, HealthEvent.RECOVERY_FAILED), retry_at=retry_at)

    def with_attempt(self, attempt: RecoveryAttempt) -> DeviceRecord:
        """Record an owed reset that was made, or tried, outside a recovery."""
        return self._next(recovery_attempts=append_entry(self.recovery_attempts, attempt))

    def with_reset_required(self) -> DeviceRecord:
        """Record a fault that requires a reset while the device was already out of service."""
        return self if self.owes_reset else self._next(must_reset=True, externally_reset=False)

    def after_external_reset(self, now: float) -> DeviceRecord:
        """Record that another service says it reset the device. A recovery that waits for a reset may go on now."""
        waits = self.health is Health.QUARANTINED and self.retry_at is not None
        return self._next(externally_reset=True, retry_at=min(self.retry_at or now, now) if waits else self.retry_at)

    def with_attempt_result(self, *, counts: bool, reset: bool) -> DeviceRecord:
        """Record the result of the current recovery; its start was recorded on the assumption that it follows its plan.

        Args:
            counts: whether it was an attempt that counts for the daily limits.
            reset: whether the device was reset, or may have been.
        """
        if not self.recovery_attempts:
            return self
        if not counts:
            return self._next(recovery_attempts=self.recovery_attempts[:-1])
        *earlier, last = self.recovery_attempts
        return self if last.reset is reset else self._next(recovery_attempts=(*earlier, replace(last, reset=reset)))

    def after_deferred_attempt(self, cause: Cause, *, retry_at: float) -> DeviceRecord:
        """Record that the recovery, or the probation after it, met a condition that must end without intervention."""
        return replace(
            self.after_fault(cause, retry_at=retry_at, is_failed_attempt=False),
            deferred_attempts=self.deferred_attempts + 1,
        )

    def after_recovery(self, *, retry_at: float) -> DeviceRecord:
        """Start the probation after one clean slow path following the fault."""
        return self._next(
            health=HEALTH_TRANSITIONS(self.health, HealthEvent.RECOVERED), clean_scrubs=0, retry_at=retry_at
        )

    def after_probation_scrub(self, required_scrubs: int, *, retry_at: float) -> DeviceRecord:
        """Count one more clean slow path on probation; the last one needed ends the probation."""
        done = self.clean_scrubs + 1
        if done < required_scrubs:
            return self._next(clean_scrubs=done, retry_at=retry_at)
        return self._next(
            health=HEALTH_TRANSITIONS(self.health, HealthEvent.PROBATION_PASSED),
            cause=None,
            clean_scrubs=0,
            failures=0,
            deferred_attempts=0,
            retry_at=None,
            must_reset=False,
            externally_reset=False,
        )

    def after_condemnation(self, cause: Cause) -> DeviceRecord:
        """Condemn the device: all attempts are used up, and only an operator can release it."""
        return self._next(
            health=HEALTH_TRANSITIONS(self.health, HealthEvent.ATTEMPTS_EXHAUSTED), cause=cause, retry_at=None
        )

    def after_operator_release(self, *, retry_at: float) -> DeviceRecord:
        """Put the device on probation by an operator's order; it must still be proved clean.

        Its past events no longer count for its own limits, but the node's breaker and the counts by tenant continue.
        """
        return self._next(
            health=HEALTH_TRANSITIONS(self.health, HealthEvent.RELEASED_BY_OPERATOR),
            clean_scrubs=0,
            failures=0,
            deferred_attempts=0,
            retry_at=retry_at,
            limits_count_from=retry_at,
        )

    # -- break-glass override --------------------------------------------------------------------------------------

    def with_break_glass(self, override: BreakGlass) -> DeviceRecord:
        """Start a break-glass override: bypass all checks for a time."""
        return self._next(break_glass=override)

    def without_break_glass(self) -> DeviceRecord:
        """End the break-glass override. Grants made during it rest on no proof."""
        return self._next(break_glass=None)
