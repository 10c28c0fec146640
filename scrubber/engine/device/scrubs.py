"""The scrubs of one device: starting one, running it, committing what it proved, and how soon the next one is tried.

The lock is held for decisions and commits, never for a scrub.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import replace

from scrubber.domain.assignment import Pod
from scrubber.domain.certify import certify
from scrubber.domain.errors import LedgerFailure, NotReady
from scrubber.domain.evidence import Certificate, FindingCode, Occasion, Outcome, Path, ScrubRecord, Step
from scrubber.domain.health import Health
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.leftover import PodState
from scrubber.domain.policy import Plan
from scrubber.domain.record import DeviceRecord
from scrubber.domain.recovery import after_scrub
from scrubber.domain.statement import sealed
from scrubber.domain.tally import Attempt
from scrubber.domain.tending import Act, next_need
from scrubber.engine import events, refusals, scrub
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.backoff import Backoff, was_disturbed
from scrubber.engine.device.health import DeviceHealth
from scrubber.engine.device.occupancy import Occupancy
from scrubber.engine.device.reset_gate import ResetGate
from scrubber.engine.device.state import DeviceState, to_the_end
from scrubber.engine.eraser_pool import EraserPool
from scrubber.engine.pods import PodWatch
from scrubber.engine.scrub import ScrubJob, ScrubResult
from scrubber.engine.steps.work import Work
from scrubber.ports.record import Change, Event
from scrubber.ports.runtime import Span

__all__ = ["Scrubs"]


class Scrubs:
    """The scrubs of one device.

    Args:
        reset_gate: whether a recovery may be made, and reset the device.
        eraser_pool: the node's.
        still: keeps other devices of the node, by id, out of use while it is open.

    Attributes:
        uninspected: processes that several walks of the last scrub did not get through: a sentence each.
    """

    def __init__(
        self,
        *,
        state: DeviceState,
        health: DeviceHealth,
        occupancy: Occupancy,
        pods: PodWatch,
        dependencies: Dependencies,
        reset_gate: ResetGate,
        eraser_pool: EraserPool,
        still: Callable[[Iterable[str]], AbstractAsyncContextManager[None]],
    ) -> None:
        self._state = state
        self._health = health
        self._occupancy = occupancy
        self._pods = pods
        self._dependencies = dependencies
        self._reset_gate = reset_gate
        self._eraser_pool = eraser_pool
        self._still = still
        # The last scrub, when the ledger failed at its end.
        self._unrecorded: ScrubRecord | None = None
        self._backoff: Backoff | None = None
        self.uninspected: tuple[str, ...] = ()

    # -- when ------------------------------------------------------------------------------------------------------

    @property
    def put_off(self) -> float:
        """Seconds for which a scrub that no start waits for is put off: the device is used without a grant repeatedly."""
        return self._state.disturbances.pause(self._state.allocations)

    async def blocker(self, asking: Pod | None = None) -> NotReady | None:
        """Return why a scrub would be held up now; None when it may start.

        A scrub that was held up is not repeated before its backoff is over.
        """
        held = await self._occupancy.held()
        for grant, where in await self._occupancy.standings(asking):
            if where.state is PodState.LIVING:
                return refusals.earlier_pod_lives(self._state.id, grant, where, asking)
        own = await self._occupancy.held_by_own_pod(asking) if held and self._state.job is None else None
        if own is not None:
            return own
        now = self._dependencies.clock.monotonic()
        if self._backoff is not None and not self._backoff.over(now, held=held):
            return self._backoff.refusal
        return None

    async def start(
        self,
        occasion: Occasion,
        *,
        actor: str = "service",
        asking: Pod | None = None,
        recover: bool = False,
        ordered: str = "",
    ) -> ScrubJob:
        """Start the slow path, or join the one under way.

        Args:
            asking: the pod whose start waits for it.
            recover: the device leaves quarantine for it, by way of a reset if its cause needs one.
            ordered: why an operator orders a reset with it. Neither the day's limits nor the breaker stop that one; a
                device whose own way back is such a scrub leaves quarantine for it.

        Raises:
            Held: a reset is ordered, and a scrub is under way.
            NotReady: the device was granted or left quarantine meanwhile, its last scrub is not off the record yet, or it
                would be reset and the breaker is open.
            LedgerFailure: the start cannot be recorded, so nothing starts.
        """
        async with self._state.lock:
            if self._state.job is not None and ordered:
                raise refusals.scrubbed_before_reset(self._state.id, self._state.job.id)
            if self._state.job is not None:
                return self._state.job
            recover = recover or (bool(ordered) and self._may_start(recover=True))
            if not self._may_start(recover=recover):
                raise refusals.cannot_be_scrubbed(self._state.id, self._state.record.state)
            dependencies, policy = self._dependencies, self._state.policy
            now = dependencies.clock.wall()
            record = self._state.record
            proved = record.certificate if record.hygiene is Hygiene.CLEAN else None
            # An operator's release does not waive a reset that is owed.
            mends = recover or (record.health is Health.PROBATION and record.must_reset)
            plan = policy.plan(
                Path.SLOW,
                occasion,
                recovering=mends,
                must_reset=mends and record.must_reset,
                ordered=bool(ordered),
            )
            if mends and not ordered:
                plan = self._reset_gate.possible(plan)
            resets = mends and Step.RESET in plan.steps
            if recover:
                if not ordered:
                    await self._reset_gate.be_worth_an_attempt(now)
                record = record.recovery_started(Attempt(now, resets, ordered=bool(ordered)))
            after = replace(record.scrub_started(), version=self._state.record.version + 1)
            started = ScrubRecord(dependencies.new_id("scrub"), self._state.id, Path.SLOW, occasion, now, actor=actor)
            rows = [*self._health.change_events(self._state.record, after, now)]
            if ordered:
                rows.append(Event("operator.reset", now, self._state.id, started.id, actor, {"reason": ordered}))
            rows.append(events.scrub_started(started, record.tenant))

            async def store_and_begin() -> ScrubJob:
                with self._reset_gate.reserved(resets=resets and not ordered):
                    await self._state.commit(Change(scrubs=(started,), events=tuple(rows)), after)
                job = ScrubJob(started, ordered=bool(ordered), proved=proved)
                work = replace(
                    self._work(job.id, plan=plan, record=after, asking=asking),
                    eraser_slot=lambda: self._eraser_pool.slot(lambda: job.urgent),
                    progress=job.progress,
                )
                self._state.job = job
                job.task = dependencies.spawn(self._perform(job, work), f"scrub {started.id}")
                self._state.changed()
                return job

            # A caller that is cancelled stops waiting; what it started goes on.
            return await to_the_end(store_and_begin())

    def _may_start(self, *, recover: bool) -> bool:
        """Return whether what the caller saw before it had the lock still holds."""
        if self._state.retired or self._state.record.hygiene not in (Hygiene.DIRTY, Hygiene.CLEAN):
            return False
        # An operator's quarantine may have come while the caller waited: only an operator lifts that one.
        need = next_need(self._state.record, self._state.policy, self._dependencies.identity.of(self._state.device))
        return not recover or need.act is Act.RECOVER

    def _work(self, scrub: str, *, plan: Plan, record: DeviceRecord, asking: Pod | None = None) -> Work:
        return Work(
            scrub=scrub,
            device=self._state.device,
            record=record,
            plan=plan,
            policy=self._state.policy,
            dependencies=self._dependencies,
            pods=self._pods,
            standings=lambda: self._occupancy.standings(self._state.if_starting(asking)),
            unauthorized_use=self._occupancy.unauthorized_use,
            still=self._still,
            asking=asking,
        )

    async def _perform(self, job: ScrubJob, work: Work) -> None:
        """Run the plan and commit what it proved. However this ends, callers that joined are notified."""
        result = ScrubResult(Outcome.ABANDONED, ())
        finished, certificate = job.record, None
        began = self._dependencies.clock.monotonic()
        with self._span("scrub", job.record, work.record.tenant) as span:
            try:
                try:
                    result = await scrub.run(work, job.begin)
                finally:
                    finished, certificate = await to_the_end(self._conclude(job, work, result, began))
            except LedgerFailure:
                # The record still says "scrubbing": the recovery loop resolves it once the ledger can be written again.
                finished = replace(job.record, ended=self._dependencies.clock.wall(), outcome=Outcome.ABANDONED)
                self._unrecorded = finished
            finally:
                self._state.job = None
                job.end(finished, certificate)
                span.note(outcome=None if finished.outcome is None else finished.outcome.value)
                self._state.wake.set()
                self._state.changed()

    def _span(self, name: str, scrub: ScrubRecord, tenant: str | None) -> AbstractContextManager[Span]:
        return self._dependencies.tracer.span(
            name,
            device=self._state.id,
            scrub_id=scrub.id,
            tenant=tenant,
            path=scrub.path.value,
            occasion=scrub.occasion.value,
        )

    async def _conclude(
        self, job: ScrubJob, work: Work, result: ScrubResult, began: float
    ) -> tuple[ScrubRecord, Certificate | None]:
        """Commit the end of a scrub, and the certificate if it passed."""
        async with self._state.lock:
            if result.outcome is Outcome.PASSED and self._occupancy.coverage.stalled_since(began):
                # What came after the eraser is unknown: the eraser may have been gone for as long as the service was stalled.
                result = ScrubResult(Outcome.HELD_UP, result.steps)
            looked = self._dependencies.clock.monotonic()
            dependencies, policy, now = self._dependencies, work.policy, self._dependencies.clock.wall()
            finished = replace(job.record, ended=now, outcome=result.outcome, steps=result.steps)
            certificate: Certificate | None = None
            if result.outcome is Outcome.PASSED:
                issued = certify(
                    finished,
                    result.steps,
                    self._state.record,
                    identity=dependencies.identity.of(self._state.device),
                    policy=policy,
                    certificate_id=dependencies.new_id("cert"),
                    now=now,
                )
                certificate = sealed(issued, dependencies.signer.key_id, dependencies.signer.sign)
                finished = replace(finished, certificate=certificate.id)
                hygiene = self._state.record.scrub_passed(certificate, was_reset=result.was_reset, starting=work.asking)
            else:
                hygiene = self._state.record.scrub_ended()
            if any(step.step is Step.HOLDERS for step in finished.steps):
                lasting = (each for each in finished.findings if each.code == FindingCode.WALK_UNFINISHED)
                self.uninspected = tuple(each.sentence for each in lasting if "news" in each.evidence)
            self._backoff = Backoff.after(finished, self._backoff, dependencies.clock.monotonic())
            if was_disturbed(finished):
                self._state.disturbances.note(self._state.allocations)
            hygiene = hygiene.listing_errors(()) if result.was_reset else hygiene
            if self._state.record.health is Health.PROBATION and result.reset_tried:
                hygiene = hygiene.attempting(Attempt(now, reset=True, ordered=job.ordered))
            after = after_scrub(hygiene, result.outcome, result.findings, policy, now, reset=result.reset_tried)
            after = replace(after, version=self._state.record.version + 1)
            rows = (
                *events.scrub_finished(finished, certificate, work.record.tenant),
                *events.residue_unexplained(finished, job.proved),
                *self._health.change_events(self._state.record, after, now, job.id),
            )
            certificates = () if certificate is None else (certificate,)
            await self._state.commit(Change(scrubs=(finished,), certificates=certificates, events=rows), after)
            dependencies.journal.scrubbed(finished)
            self._occupancy.coverage.begin(looked)
            return finished, certificate

    async def check(self, occasion: Occasion, actor: str = "service") -> ScrubRecord:
        """Run the fast path: checks only. It changes nothing about the device, and records nothing."""
        dependencies, policy = self._dependencies, self._state.policy
        record = ScrubRecord(
            dependencies.new_id("check"), self._state.id, Path.FAST, occasion, dependencies.clock.wall(), actor=actor
        )
        work = self._work(record.id, plan=policy.plan(Path.FAST, occasion), record=self._state.record)
        with self._span("check", record, self._state.record.tenant) as span:
            result = await scrub.run(work, lambda _: None)
            span.note(outcome=result.outcome.value)
        if result.steps and any(finding.code == FindingCode.HELD for finding in result.steps[0].findings):
            self._occupancy.coverage.saw(held=True)
        return replace(record, ended=dependencies.clock.wall(), outcome=result.outcome, steps=result.steps)

    async def record_check(self, record: ScrubRecord) -> None:
        """Record a check that an operator requested."""
        async with self._state.lock:
            change = Change(scrubs=(record,), events=events.scrub_finished(record, None, self._state.record.tenant))
            await to_the_end(self._dependencies.ledger.commit(change))
            self._dependencies.journal.tell(change.events)
            self._dependencies.journal.scrubbed(record)

    async def resolve(self) -> None:
        """Resolve a scrub or recovery that is on record and not running: the ledger failed at its end."""
        async with self._state.lock:
            if self._state.job is not None:
                return
            after = self._state.record
            now = self._dependencies.clock.wall()
            if after.hygiene is Hygiene.SCRUBBING:
                after = after.scrub_ended()
            if after.health is Health.RECOVERING:
                after = after.recovery_failed(retry_at=now)
            if after is not self._state.record:
                scrubs = () if self._unrecorded is None else (self._unrecorded,)
                tenant = self._state.record.tenant
                ended = (event for each in scrubs for event in events.scrub_finished(each, None, tenant))
                rows = (*ended, *self._health.change_events(self._state.record, after, now))
                after = replace(after, version=self._state.record.version + 1)
                await self._state.commit(Change(scrubs=scrubs, events=rows), after)
                for each in scrubs:
                    self._dependencies.journal.scrubbed(each)
                self._unrecorded = None

    async def abandon(self) -> None:
        """Stop the scrub under way, if any; the device is dirty afterwards."""
        job = self._state.job
        if job is not None and job.task is not None:
            job.task.cancel()
            await asyncio.wait({job.task})
