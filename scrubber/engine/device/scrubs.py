"""The scrubs of one device: starts and runs them, commits their results, and decides when to try the next one.

The lock is held for decisions and commits, never for a scrub.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import replace

from scrubber.completion import run_to_completion
from scrubber.domain.assignment import Claim, Pod
from scrubber.domain.certificate import certify
from scrubber.domain.errors import LedgerFailure, NotReady
from scrubber.domain.evidence import Certificate, FindingCode, Outcome, PathKind, ScrubRecord, ScrubTrigger, Step
from scrubber.domain.health.history import RecoveryAttempt
from scrubber.domain.health.recovery import after_scrub
from scrubber.domain.next_action import RecoveryAction, next_action
from scrubber.domain.pods import PodState
from scrubber.domain.policy import ScrubPlan
from scrubber.domain.record import DeviceRecord
from scrubber.domain.statement import sign_certificate
from scrubber.domain.states import Health, Hygiene
from scrubber.engine import events, refusals, scrub
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.backoff import Backoff
from scrubber.engine.device.disturbances import was_disturbed
from scrubber.engine.device.health import DeviceHealth
from scrubber.engine.device.occupancy import Occupancy
from scrubber.engine.device.reset_gate import ResetGate
from scrubber.engine.device.state import DeviceState
from scrubber.engine.eraser_pool import EraserPool, ScrubPriority
from scrubber.engine.pods import PodTracker
from scrubber.engine.scrub import ScrubJob, ScrubResult
from scrubber.engine.steps.context import ScrubContext
from scrubber.ports.record import Event, LedgerChange
from scrubber.ports.runtime import Span

__all__ = ["Scrubs"]

_HELD = (FindingCode.UNKNOWN_HOLDER, FindingCode.VALIDATION_HOLDER, FindingCode.AGENT_PAUSE_FAILED)
"""Findings about processes that no start can wait for: their end is not the end of a pod that had the device."""


class Scrubs:
    """The scrubs of one device.

    Args:
        reset_gate: decides whether a recovery may start and reset the device.
        eraser_pool: the eraser pool of the node.
        keep_out_of_use: keeps other devices of the node, given by ID, out of use while the context is open.

    Attributes:
        uninspected_processes: a message for each process that several walks of the last scrub could not finish
            inspecting.
        held_since: monotonic time of the first of the consecutive scrubs that a process without a grant blocked; None
            if the last one was not.
    """

    def __init__(
        self,
        *,
        state: DeviceState,
        health: DeviceHealth,
        occupancy: Occupancy,
        pods: PodTracker,
        dependencies: Dependencies,
        reset_gate: ResetGate,
        eraser_pool: EraserPool,
        keep_out_of_use: Callable[[Iterable[str]], AbstractAsyncContextManager[None]],
    ) -> None:
        self._state = state
        self._health = health
        self._occupancy = occupancy
        self._pods = pods
        self._dependencies = dependencies
        self._reset_gate = reset_gate
        self._eraser_pool = eraser_pool
        self._keep_out_of_use = keep_out_of_use
        # The last scrub, if the ledger failed at its end.
        self._unrecorded: ScrubRecord | None = None
        self._backoff: Backoff | None = None
        self.uninspected_processes: tuple[str, ...] = ()
        self.held_since: float | None = None

    # -- when and how a scrub runs -----------------------------------------------------------------------------------

    @property
    def delay(self) -> float:
        """Seconds to delay a scrub that no start waits for: the device is repeatedly used without a grant."""
        return self._state.disturbances.pause(self._state.allocations)

    async def blocker(self, starting_pod: Pod | None = None, claim: Claim | None = None) -> NotReady | None:
        """Return why a scrub would be blocked now; None when it may start.

        A blocked scrub is not repeated before its backoff has ended.

        Args:
            starting_pod: the pod whose start waits for it.
            claim: the claim whose preparation waits for it.
        """
        held = await self._occupancy.is_held()
        for grant, where in await self._occupancy.pod_liveness(starting_pod, claim=claim):
            if where.state is PodState.ALIVE:
                return refusals.earlier_pod_running(self._state.id, grant, where, starting_pod)
        own = await self._occupancy.own_pod_refusal(starting_pod) if held and self._state.job is None else None
        if own is not None:
            return own
        now = self._dependencies.clock.monotonic()
        if self._backoff is not None and not self._backoff.is_over(now, held=held):
            return self._backoff.refusal
        return None

    async def start(
        self,
        trigger: ScrubTrigger,
        *,
        actor: str = "service",
        starting_pod: Pod | None = None,
        claim: Claim | None = None,
        recover: bool = False,
        reset_reason: str = "",
    ) -> ScrubJob:
        """Start the slow path, or join the one in progress.

        Args:
            starting_pod: the pod whose start waits for it.
            claim: the claim whose preparation waits for it.
            recover: the device leaves quarantine for this scrub, with a reset if its cause needs one.
            reset_reason: why an operator requests a reset with it. Such a reset bypasses the daily limits and the
                breaker; a device that recovers by such a scrub leaves quarantine for it.

        Raises:
            DeviceBusy: a reset is requested while a scrub is in progress.
            NotReady: the device was granted or left quarantine in the meantime, its last scrub is not yet resolved on
                record, or the device would be reset and the breaker is open.
            LedgerFailure: the start cannot be recorded, so nothing starts.
        """
        async with self._state.lock:
            if self._state.job is not None and reset_reason:
                raise refusals.reset_during_scrub(self._state.id, self._state.job.id)
            if self._state.job is not None:
                return self._state.job
            recover = recover or (bool(reset_reason) and self._may_start(recover=True))
            if not self._may_start(recover=recover):
                raise refusals.cannot_be_scrubbed(self._state.id, self._state.record.state)
            dependencies, policy = self._dependencies, self._state.policy
            now = dependencies.clock.wall()
            record = self._state.record
            proved = record.certificate if record.hygiene is Hygiene.CLEAN else None
            # An operator's release does not waive a reset that is owed.
            restores = recover or (record.health is Health.PROBATION and record.must_reset)
            plan = policy.plan(
                PathKind.SLOW,
                trigger,
                recovering=restores,
                must_reset=restores and record.owes_reset,
                operator_ordered=bool(reset_reason),
            )
            if restores and not reset_reason:
                plan = self._reset_gate.without_impossible_reset(plan)
            resets = restores and Step.RESET in plan.steps
            if recover:
                if not reset_reason:
                    await self._reset_gate.require_attempts_left(now)
                record = record.after_recovery_start(RecoveryAttempt(now, resets, operator_ordered=bool(reset_reason)))
            after = replace(record.after_scrub_start(), version=self._state.record.version + 1)
            started = ScrubRecord(
                dependencies.new_id("scrub"), self._state.id, PathKind.SLOW, trigger, now, actor=actor
            )
            rows = [*self._health.change_events(self._state.record, after, now)]
            if reset_reason:
                rows.append(Event("operator.reset", now, self._state.id, started.id, actor, {"reason": reset_reason}))
            rows.append(events.scrub_started(started, record.tenant))

            async def store_and_begin() -> ScrubJob:
                with self._reset_gate.reserve_reset(resets=resets and not reset_reason):
                    await self._state.commit(LedgerChange(scrubs=(started,), events=tuple(rows)), after)
                job = ScrubJob(started, operator_ordered=bool(reset_reason), previous_certificate=proved)
                work = replace(
                    self._context(job.id, plan=plan, record=after, starting_pod=starting_pod, claim=claim),
                    eraser_slot=lambda shared: self._eraser_pool.slot(shared, lambda: self._priority(job)),
                    progress=job.report_progress,
                    report_wait=job.report_wait,
                )
                self._state.job = job
                job.task = dependencies.spawn(self._perform(job, work), f"scrub {started.id}")
                self._state.on_change()
                return job

            # A caller that is cancelled stops waiting; the scrub that it started continues.
            return await run_to_completion(store_and_begin())

    def _priority(self, job: ScrubJob) -> ScrubPriority:
        if job.has_waiters:
            return ScrubPriority.START_WAITS
        return ScrubPriority.RESERVED if self._state.is_reserved else ScrubPriority.IDLE

    def _may_start(self, *, recover: bool) -> bool:
        """Return whether the conditions that the caller checked without the lock still hold."""
        if self._state.retired or self._state.record.hygiene not in (Hygiene.DIRTY, Hygiene.CLEAN):
            return False
        # An operator may have quarantined the device while the caller waited: only an operator lifts that quarantine.
        need = next_action(
            self._state.record, self._state.policy, self._dependencies.identity.for_device(self._state.device)
        )
        return not recover or need.action is RecoveryAction.RECOVER

    def _context(
        self,
        scrub: str,
        *,
        plan: ScrubPlan,
        record: DeviceRecord,
        starting_pod: Pod | None = None,
        claim: Claim | None = None,
    ) -> ScrubContext:
        return ScrubContext(
            scrub=scrub,
            device=self._state.device,
            record=record,
            plan=plan,
            policy=self._state.policy,
            dependencies=self._dependencies,
            pods=self._pods,
            pod_liveness=lambda: self._occupancy.pod_liveness(self._state.pod_if_starting(starting_pod), claim=claim),
            unauthorized_use=self._occupancy.unauthorized_use,
            keep_out_of_use=self._keep_out_of_use,
            starting_pod=starting_pod,
            known_holders=frozenset(each.holder.identity for each in self._occupancy.holders),
        )

    async def _perform(self, job: ScrubJob, context: ScrubContext) -> None:
        """Run the plan and commit its result. Callers that joined are notified in every case."""
        result = ScrubResult(Outcome.ABANDONED, ())
        finished, certificate = job.record, None
        began = self._dependencies.clock.monotonic()
        with self._span("scrub", job.record, context.record.tenant) as span:
            try:
                try:
                    result = await scrub.run_scrub(context, job.begin_step)
                finally:
                    finished, certificate = await run_to_completion(self._conclude(job, context, result, began))
            except LedgerFailure:
                # The record still shows "scrubbing": the recovery loop resolves it once the ledger is writable again.
                finished = replace(job.record, ended=self._dependencies.clock.wall(), outcome=Outcome.ABANDONED)
                self._unrecorded = finished
            finally:
                self._state.job = None
                job.finish(finished, certificate)
                span.set_attributes(outcome=None if finished.outcome is None else finished.outcome.value)
                self._state.wake.set()
                self._state.on_change()

    def _span(self, name: str, scrub: ScrubRecord, tenant: str | None) -> AbstractContextManager[Span]:
        return self._dependencies.tracer.span(
            name,
            device=self._state.id,
            scrub_id=scrub.id,
            tenant=tenant,
            path=scrub.path.value,
            trigger=scrub.trigger.value,
        )

    async def _conclude(
        self, job: ScrubJob, context: ScrubContext, result: ScrubResult, began: float
    ) -> tuple[ScrubRecord, Certificate | None]:
        """Commit the end of a scrub, and the certificate if it passed."""
        async with self._state.lock:
            if result.outcome is Outcome.PASSED and self._occupancy.coverage.was_stalled_since(began):
                # What followed the eraser is unknown: it may have been gone for as long as the service was stalled.
                result = ScrubResult(Outcome.BLOCKED, result.steps)
            checked_at = self._dependencies.clock.monotonic()
            dependencies, policy, now = self._dependencies, context.policy, self._dependencies.clock.wall()
            finished = replace(job.record, ended=now, outcome=result.outcome, steps=result.steps)
            certificate: Certificate | None = None
            if result.outcome is Outcome.PASSED:
                issued = certify(
                    finished,
                    result.steps,
                    self._state.record,
                    identity=dependencies.identity.for_device(self._state.device),
                    policy=policy,
                    certificate_id=dependencies.new_id("cert"),
                    now=now,
                    attestation=context.attestations[-1] if context.attestations else None,
                )
                certificate = sign_certificate(issued, dependencies.signer.key_id, dependencies.signer.sign)
                finished = replace(finished, certificate=certificate.id)
                hygiene = self._state.record.after_passed_scrub(
                    certificate,
                    was_reset=result.was_reset,
                    restores=context.plan.restores,
                    starting_pod=context.starting_pod,
                )
            else:
                hygiene = self._state.record.after_unproven_scrub()
            if any(step.step is Step.HOLDERS for step in finished.steps):
                lasting = (each for each in finished.findings if each.code == FindingCode.UNINSPECTED_PROCESSES)
                self.uninspected_processes = tuple(each.message for each in lasting if "news" in each.evidence)
                self._occupancy.set_holders_of_scrub(context.holders)
            if finished.outcome is not Outcome.ABANDONED:
                held = finished.outcome is Outcome.BLOCKED and any(f.code in _HELD for f in finished.findings)
                self.held_since = None if not held else checked_at if self.held_since is None else self.held_since
            self._backoff = Backoff.after(finished, self._backoff, dependencies.clock.monotonic())
            if was_disturbed(finished):
                self._state.disturbances.count(self._state.allocations)
            hygiene = hygiene.without_unlisted_errors(()) if result.was_reset else hygiene
            if self._state.record.health is Health.PROBATION and result.reset_attempted:
                hygiene = hygiene.with_attempt(RecoveryAttempt(now, reset=True, operator_ordered=job.operator_ordered))
            after = after_scrub(hygiene, result.outcome, result.findings, policy, now, reset=result.reset_attempted)
            after = replace(after, version=self._state.record.version + 1)
            rows = (
                *events.scrub_finished(finished, certificate, context.record.tenant),
                *events.residue_unexplained(finished, job.previous_certificate),
                *self._health.change_events(self._state.record, after, now, job.id),
            )
            certificates = () if certificate is None else (certificate,)
            await self._state.commit(LedgerChange(scrubs=(finished,), certificates=certificates, events=rows), after)
            dependencies.journal.record_scrub(finished)
            self._occupancy.coverage.reset(checked_at)
            return finished, certificate

    async def check(self, trigger: ScrubTrigger, actor: str = "service") -> ScrubRecord:
        """Run the fast path: checks only. Does not change the device, and records nothing."""
        dependencies, policy = self._dependencies, self._state.policy
        record = ScrubRecord(
            dependencies.new_id("check"), self._state.id, PathKind.FAST, trigger, dependencies.clock.wall(), actor=actor
        )
        work = self._context(record.id, plan=policy.plan(PathKind.FAST, trigger), record=self._state.record)
        with self._span("check", record, self._state.record.tenant) as span:
            result = await scrub.run_scrub(work, lambda _: None)
            span.set_attributes(outcome=result.outcome.value)
        if result.steps and any(finding.code == FindingCode.DEVICE_BUSY for finding in result.steps[0].findings):
            self._occupancy.coverage.record_check(held=True)
        return replace(record, ended=dependencies.clock.wall(), outcome=result.outcome, steps=result.steps)

    async def record_check(self, record: ScrubRecord) -> None:
        """Record a check that an operator requested."""
        async with self._state.lock:
            change = LedgerChange(
                scrubs=(record,), events=events.scrub_finished(record, None, self._state.record.tenant)
            )
            await run_to_completion(self._dependencies.ledger.commit(change))
            self._dependencies.journal.record(change.events)
            self._dependencies.journal.record_scrub(record)

    async def resolve(self) -> None:
        """Resolve a scrub or recovery that is on record but not running, because the ledger failed at its end."""
        async with self._state.lock:
            if self._state.job is not None:
                return
            after = self._state.record
            now = self._dependencies.clock.wall()
            if after.hygiene is Hygiene.SCRUBBING:
                after = after.after_unproven_scrub()
            if after.health is Health.RECOVERING:
                after = after.after_recovery_failure(retry_at=now)
            if after is not self._state.record:
                scrubs = () if self._unrecorded is None else (self._unrecorded,)
                tenant = self._state.record.tenant
                ended = (event for each in scrubs for event in events.scrub_finished(each, None, tenant))
                rows = (*ended, *self._health.change_events(self._state.record, after, now))
                after = replace(after, version=self._state.record.version + 1)
                await self._state.commit(LedgerChange(scrubs=scrubs, events=rows), after)
                for each in scrubs:
                    self._dependencies.journal.record_scrub(each)
                self._unrecorded = None

    async def abandon(self) -> None:
        """Stop the scrub in progress, if any; the device is dirty afterwards."""
        job = self._state.job
        if job is not None and job.task is not None:
            job.task.cancel()
            await asyncio.wait({job.task})
