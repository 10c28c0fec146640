"""The durable record of one device, and the only functions that change it.

Every change is a new record with a higher version. The controller of the device computes it, the ledger stores it in one
transaction with its audit rows, and only then it is applied in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from scrubber.domain.assignment import Assignment, Pod, Process
from scrubber.domain.baseline import Baseline
from scrubber.domain.evidence import Certificate
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

__all__ = ["ActiveWarning", "BreakGlass", "DeviceRecord", "Grant"]


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer "go" to a hand-over.

    Attributes:
        sequence: number of the grant on its device, from 1; adoption counts as a grant that somebody else gave.
        assignment: who has the device by it; None when no witness said.
        kind: how it related to the grant before.
        at: wall-clock seconds.
        boot: nothing of an earlier boot lives on.
        certificate: the certificate it used up; None for an exception.
        basis: the certificate, or the exception that stood in for one.
        baseline: processes of the pod that stood there before its first grant.
        cgroups: names of the container cgroups that had the device by grants of the pod since it was last clean, oldest
            first: of each grant the container that was created first after it. One is missing where it was not seen.
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

    @property
    def pod(self) -> Pod | None:
        return None if self.assignment is None else self.assignment.pod


@dataclass(frozen=True, slots=True)
class ActiveWarning:
    """A warning that stands, and since when (wall-clock seconds)."""

    code: str
    since: float


@dataclass(frozen=True, slots=True)
class BreakGlass:
    """A person's order that the device be handed out whatever is known of it, until ``until`` (wall-clock seconds)."""

    until: float
    reason: str
    actor: str


_MAX_CGROUPS = 16
"""Containers of one pod that a grant remembers: of those that crash again and again only the last can still be ending."""

_MAX_WARNINGS = 32
"""Warnings that a record keeps: a driver may say anything."""


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """Both states of a device and everything that a decision about it rests on.

    Attributes:
        version: grows by one with every change.
        cause: set while the device is out of service, or suspect.
        certificate: the unused certificate; None unless the device is clean.
        rests_on: the last slow-path certificate's id, for fast-path certificates to name.
        last_grant: the newest grant, also after its pod is over.
        open_grants: grants whose pod no scrub has shown to be over yet, oldest first.
        boot: the boot that the record was last started under.
        lifetime_counters: the device's own error counters as of the last look, so that errors are noticed that happened while
            nobody looked.
        certificate_count: how many were ever issued for the device.
        failures: failed attempts at recovery since the device was last healthy.
        deferred_attempts: attempts that met something that has to end by itself: they are no failures, and make the pauses longer.
        clean_scrubs: clean slow paths on the probation under way.
        retry_at: wall-clock seconds before which recovery does not try again.
        must_reset: a fault asked for a reset that has not happened yet.
        exclusive_use: nothing but the last grant's pod can have touched the device since it was last clean. Only then may
            the policy's exceptions let its residue stand; an adopted, touched or unwatched device has none.
        contaminated: somebody without a grant was seen to use it since it was last clean: whose bytes are on it nobody knows.
        warnings: warnings that stand, each since when.
        recent_quarantines: quarantines of the last day.
        recovery_attempts: recoveries of the last day.
        limits_count_from: wall-clock seconds of a person's last release: the device's own limits count from there.
        break_glass: set while a person has the device handed out whatever is known of it.
        baseline: what the device should be; None until it was first looked at.
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

    @property
    def previous_assignment(self) -> Assignment | None:
        """Whose bytes may be on the device; None when that is not certain."""
        return self.last_grant.assignment if self.exclusive_use and self.last_grant is not None else None

    @property
    def tenant(self) -> str | None:
        """The only tenant who has, or had, the device since it was last clean; None when that is not certain."""
        if self.hygiene is Hygiene.CLEAN:
            return None  # its open grants are of a pod that is about to start on it again
        named = {grant.pod.tenant if grant.pod is not None else None for grant in self.open_grants}
        return named.pop() if len(named) == 1 and not self.contaminated else None

    @property
    def grant_sequence(self) -> int:
        """Sequence of the last grant; 0 when there was none."""
        return 0 if self.last_grant is None else self.last_grant.sequence

    def open_grants_of(self, pod: Pod | None) -> tuple[Grant, ...]:
        """The open grants of ``pod``; none where its UID is not known."""
        return tuple(each for each in self.open_grants if pod is not None and pod.uid is not None and each.pod == pod)

    @property
    def advertised(self) -> bool:
        """Whether the kubelet is told ``Healthy``."""
        return self.health in ADVERTISED

    @property
    def quarantined_by_operator(self) -> bool:
        """Whether a person took the device out: that holds whatever the policy enforces."""
        return self.health is Health.QUARANTINED and self.cause is not None and self.cause.by_operator

    @property
    def state(self) -> str:
        """One word for people: health when it matters, else hygiene."""
        return self.hygiene.value if self.advertised else self.health.value

    def _next(self, **changes: object) -> DeviceRecord:
        return replace(self, version=self.version + 1, **changes)  # type: ignore[arg-type]

    # -- hygiene ---------------------------------------------------------------------------------------------------

    def after_service_start(self, boot: str) -> DeviceRecord:
        """Whatever happened before was not watched: dirty. Nothing of an earlier boot is open any more."""
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
            # Drivers and whoever listens to them count errors anew.
            lifetime_counters=self.without_unlisted_errors(()).lifetime_counters,
        )

    def after_adoption(self, grant: Grant | None) -> DeviceRecord:
        """Somebody already has the device: ``grant`` is new for a pod we never saw, None for one of the open grants."""
        if grant is None:
            return self._next(hygiene=HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.ADOPTED), exclusive_use=False)
        return self._next(
            hygiene=HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.ADOPTED),
            last_grant=grant,
            open_grants=(*self.open_grants, grant),
            exclusive_use=False,
        )

    def after_scrub_start(self) -> DeviceRecord:
        """The certificate, if any, is void from here on."""
        return self._next(hygiene=HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.SCRUB_STARTED), certificate=None)

    def after_passed_scrub(
        self, certificate: Certificate, *, was_reset: bool, starting_pod: Pod | None = None
    ) -> DeviceRecord:
        """Proved clean. Every earlier grant's pod was over before the memory was touched.

        Args:
            starting_pod: the pod for whose start it was scrubbed. Its other containers may live on, so its grants stay open:
                no other pod gets the device before they have ended.
        """
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
            must_reset=self.must_reset and not was_reset,
            exclusive_use=True,
            contaminated=False,
        )

    def after_unproven_scrub(self) -> DeviceRecord:
        """Ended without proof, for whatever reason."""
        return self._next(hygiene=HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.SCRUB_ENDED), certificate=None)

    def after_voided_certificate(self) -> DeviceRecord:
        """Used without a grant: the certificate is void."""
        return self._next(
            hygiene=HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.CERTIFICATE_VOIDED),
            certificate=None,
            exclusive_use=False,
        )

    def after_unauthorized_use(self, *, observed: bool) -> DeviceRecord:
        """Somebody without a grant used it, or may have while nobody looked: its bytes are not the last grant's alone.

        Args:
            observed: it is known, or has to be presumed, that somebody did.
        """
        after = self.after_voided_certificate() if self.hygiene is Hygiene.CLEAN else self._next(exclusive_use=False)
        return replace(after, contaminated=self.contaminated or observed)

    def with_grant_assignment(self, assignment: Assignment, baseline: tuple[Process, ...]) -> DeviceRecord:
        """The last grant's pod, which no witness could name when it was granted, is known now."""
        assert self.last_grant is not None
        grant = replace(self.last_grant, assignment=assignment, baseline=baseline)
        grants = tuple(grant if each.sequence == grant.sequence else each for each in self.open_grants)
        return self._next(last_grant=grant, open_grants=grants)

    def with_started_container(self, cgroup: str, container: str | None) -> DeviceRecord:
        """The container that started on the last grant is known now.

        Args:
            container: its name, where the kubelet's list named another container of the pod.
        """
        assert self.last_grant is not None
        grant = replace(self.last_grant, cgroups=(*self.last_grant.cgroups, cgroup)[-_MAX_CGROUPS:])
        if container is not None and grant.assignment is not None:
            grant = replace(grant, assignment=replace(grant.assignment, container=container))
        grants = tuple(grant if each.sequence == grant.sequence else each for each in self.open_grants)
        return self._next(last_grant=grant, open_grants=grants)

    def after_release(self) -> DeviceRecord:
        """No open grant's pod uses it rightfully any more. The grants stay open until a scrub shows them over."""
        return self._next(hygiene=HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.RELEASED))

    def after_grant(self, grant: Grant, fast: Certificate | None, *, certain: bool) -> DeviceRecord:
        """In use, and so dirty: the certificate is used up by this very change.

        Earlier open grants of the same pod are one with the new grant; those of others stay open.

        Args:
            fast: the fast path's own certificate, when it issued one.
            certain: whether PodResources itself named the assignment; a hint is good enough to wait for, not to trust.
        """
        others = tuple(each for each in self.open_grants if each not in self.open_grants_of(grant.pod))
        if self.hygiene is Hygiene.CLEAN and grant.basis is Basis.CERTIFICATE:
            others = ()  # nobody is granted a clean device before the pods of all earlier grants are over
        return self._next(
            hygiene=HYGIENE_TRANSITIONS(self.hygiene, HygieneEvent.GRANTED),
            certificate=None,
            last_grant=grant,
            open_grants=(*others, grant),
            certificate_count=self.certificate_count if fast is None else fast.sequence,
            exclusive_use=self.exclusive_use and certain and grant.basis not in UNCONDITIONAL_BASES,
        )

    # -- health ----------------------------------------------------------------------------------------------------

    def with_baseline(self, baseline: Baseline) -> DeviceRecord:
        """From now on the device should be as ``baseline`` says."""
        return self._next(baseline=baseline)

    def with_counters(self, counters: Mapping[str, int]) -> DeviceRecord:
        """The device's own counters, as they are now."""
        return self._next(lifetime_counters=tuple(sorted({**dict(self.lifetime_counters), **counters}.items())))

    def without_unlisted_errors(self, listed: Collection[str]) -> DeviceRecord:
        """Without the counts of error codes that are not ``listed``: whoever counts them begins anew."""
        left = tuple(pair for pair in self.lifetime_counters if pair[0] in LIFETIME_COUNTERS or pair[0] in listed)
        return self if left == self.lifetime_counters else self._next(lifetime_counters=left)

    def with_warnings(self, codes: Collection[str], now: float, table: SignalTable) -> DeviceRecord:
        """The warnings that stand are ``codes``: those that are new stand from ``now`` on."""
        known = {each.code: each for each in self.warnings}
        warnings = tuple(known.get(code, ActiveWarning(code, now)) for code in sorted(codes))
        ordered = sorted(warnings, key=lambda each: (each.code not in table.soft, each.since, each.code))
        warnings = tuple(ordered[:_MAX_WARNINGS])
        return self if warnings == self.warnings else self._next(warnings=warnings)

    def after_tenant_change(self, now: float, table: SignalTable) -> DeviceRecord:
        """Another tenant has it from ``now``: what passes by itself, heat say, was not his before."""
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
        """Out of service. A person's quarantine stays a person's, whatever the device does meanwhile.

        Args:
            is_failed_attempt: the device failed on its way back, so this is a failed attempt.
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
            recent_quarantines=append_entry(self.recent_quarantines, strike) if struck else self.recent_quarantines,
        )

    def after_operator_quarantine(self, cause: Cause) -> DeviceRecord:
        """Quarantined by a person, whatever another one ordered before."""
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
        """Back to quarantine, without a failure: nothing was found."""
        return self._next(health=HEALTH_TRANSITIONS(self.health, HealthEvent.RECOVERY_FAILED), retry_at=retry_at)

    def with_attempt(self, attempt: RecoveryAttempt) -> DeviceRecord:
        """A reset that was owed was made, or tried, outside a recovery."""
        return self._next(recovery_attempts=append_entry(self.recovery_attempts, attempt))

    def with_reset_required(self) -> DeviceRecord:
        """A fault came that asks for a reset, while the device was out already."""
        return self if self.must_reset else self._next(must_reset=True)

    def with_attempt_result(self, *, counts: bool, reset: bool) -> DeviceRecord:
        """What the recovery under way came to; it was begun as one that makes what its plan says.

        Args:
            counts: whether it was an attempt, and counts for the day's limits.
            reset: whether the device was reset, or may have been.
        """
        if not self.recovery_attempts:
            return self
        if not counts:
            return self._next(recovery_attempts=self.recovery_attempts[:-1])
        *earlier, last = self.recovery_attempts
        return self if last.reset is reset else self._next(recovery_attempts=(*earlier, replace(last, reset=reset)))

    def after_deferred_attempt(self, cause: Cause, *, retry_at: float) -> DeviceRecord:
        """The recovery, or the probation after it, met something that has to end by itself."""
        return replace(
            self.after_fault(cause, retry_at=retry_at, is_failed_attempt=False),
            deferred_attempts=self.deferred_attempts + 1,
        )

    def after_recovery(self, *, retry_at: float) -> DeviceRecord:
        """One clean slow path after the fault: on probation from here."""
        return self._next(
            health=HEALTH_TRANSITIONS(self.health, HealthEvent.RECOVERED), clean_scrubs=0, retry_at=retry_at
        )

    def after_probation_scrub(self, required_scrubs: int, *, retry_at: float) -> DeviceRecord:
        """One more clean slow path on probation; the last one needed ends it."""
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
        )

    def after_condemnation(self, cause: Cause) -> DeviceRecord:
        """Every way back is used up: for a person."""
        return self._next(
            health=HEALTH_TRANSITIONS(self.health, HealthEvent.ATTEMPTS_EXHAUSTED), cause=cause, retry_at=None
        )

    def after_operator_release(self, *, retry_at: float) -> DeviceRecord:
        """On probation by a person's word; it still has to prove itself clean.

        What it did is forgiven and not forgotten: the node's breaker and the tenants' counts go on.
        """
        return self._next(
            health=HEALTH_TRANSITIONS(self.health, HealthEvent.RELEASED_BY_OPERATOR),
            clean_scrubs=0,
            failures=0,
            deferred_attempts=0,
            retry_at=retry_at,
            limits_count_from=retry_at,
        )

    # -- a person's emergency --------------------------------------------------------------------------------------

    def with_break_glass(self, override: BreakGlass) -> DeviceRecord:
        """Handed out whatever is known of it, for a time."""
        return self._next(break_glass=override)

    def without_break_glass(self) -> DeviceRecord:
        """Judged as ever again. What it was given meanwhile was given on nothing."""
        return self._next(break_glass=None)
