"""The keeper of one device: the only writer of its state.

Others ask: the node for grants, the watch for what it saw, an operator for a scrub. The keeper decides with the domain's
functions and commits as :class:`~scrubber.engine.custody.Custody` says. The lock is held for decisions and commits, never
for a scrub.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from scrubber.domain.assignment import Pod, Trust
from scrubber.domain.certify import certify
from scrubber.domain.codes import ErrorCode
from scrubber.domain.device import Device
from scrubber.domain.errors import Held, LedgerFailure, NotReady
from scrubber.domain.evidence import Certificate, FindingCode, Occasion, Outcome, Path, ScrubRecord, Step
from scrubber.domain.health import Health
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.leftover import PodState
from scrubber.domain.policy import Enforcement, News, Plan
from scrubber.domain.record import DeviceRecord
from scrubber.domain.recovery import after_scrub, spent
from scrubber.domain.tally import Attempt
from scrubber.domain.tending import Act, next_need
from scrubber.engine import events as narrate
from scrubber.engine import scrub
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.disturbance import was_disturbed
from scrubber.engine.finish import to_the_end
from scrubber.engine.holdup import HoldUp
from scrubber.engine.job import ScrubJob
from scrubber.engine.neighbourhood import Neighbourhood
from scrubber.engine.possession import Possession
from scrubber.engine.refusals import earlier_pod_lives
from scrubber.engine.scrub import ScrubResult
from scrubber.engine.sealing import sealed
from scrubber.engine.steps.work import Work
from scrubber.engine.views import DeviceView
from scrubber.ports.record import Change, Event
from scrubber.ports.runtime import Span

__all__ = ["Keeper"]


class Keeper(Possession):
    """One device.

    Args:
        record: the record as the ledger has it.
    """

    def __init__(
        self, device: Device, record: DeviceRecord, *, dependencies: Dependencies, around: Neighbourhood
    ) -> None:
        super().__init__(device, record, dependencies=dependencies, around=around)
        # The last scrub, when the ledger failed at its end.
        self._unrecorded: ScrubRecord | None = None
        self._hold_up: HoldUp | None = None
        self._uninspected: tuple[str, ...] = ()
        # The breaker is open, and this device has no way to be reset: it is scrubbed all the same.
        self._no_reset = False

    @property
    def view(self) -> DeviceView:
        scrub = None if self._job is None else self._job.id
        record = self._record
        owed = record.health in (Health.QUARANTINED, Health.PROBATION) and record.must_reset
        waits = self._around.breaker.state.resets if owed and self._reset_stopped_until is not None else ""
        return DeviceView(
            self.device,
            record,
            scrub,
            offered=self.offered,
            policy=self.policy,
            waits=waits,
            strangers=self._strangers,
            uninspected=self._uninspected,
        )

    @property
    def offered(self) -> bool:
        """Whether the kubelet is told that the device is healthy."""
        record = self._record
        if record.advertised or record.ordered_out_by_person:
            return record.advertised
        policy = self.policy
        if policy.enforcement is Enforcement.OBSERVE:
            return True
        if policy.health.news is not News.AT_RELEASE or record.hygiene is not Hygiene.IN_USE:
            return False
        shared = any(grant.assignment is not None and grant.assignment.shares for grant in record.open_grants)
        return not shared and self._is_still_given()

    def _is_still_given(self) -> bool:
        """Whether the kubelet has given the device to a pod of its grants, as far as can be told: else it offers it anew."""
        reading = self._dependencies.pods.reading
        having = {each.pod for each in reading.naming(self.device.id)}
        unsure = reading.trust is not Trust.TRUSTED
        return any(grant.pod is not None and (unsure or grant.pod in having) for grant in self._record.open_grants)

    @property
    def maintenance(self) -> asyncio.Lock:
        """Held by the one device of the node that is scrubbed for maintenance."""
        return self._around.maintenance

    @property
    def _reset_stopped_until(self) -> float | None:
        plan = self.policy.plan(Path.SLOW, Occasion.RECOVERY, recovering=True, must_reset=self._record.must_reset)
        return self._around.breaker.stopped_until() if Step.RESET in plan.steps and not self._no_reset else None

    async def reset_stopped_until(self) -> float | None:
        """Wall-clock seconds before which the breaker lets no recovery reset this device; None where nothing is stopped.

        Raises:
            DeviceFault, Away: it cannot be said whether the device can be reset at all.
        """
        self._no_reset = False
        until = self._reset_stopped_until
        if until is not None:
            self._no_reset = (await self._dependencies.resetter.plan(self.device)).unavailable is not None
        return None if self._no_reset else until

    @property
    def withheld(self) -> bool:
        """Whether an allocation is refused, which fails its pod for good."""
        return not self._record.advertised and (
            self._record.ordered_out_by_person or self.policy.enforcement is not Enforcement.OBSERVE
        )

    async def retire(self) -> DeviceRecord:
        """No change after this one; answers the last record.

        Raises:
            Held: it is in use, or being scrubbed.
        """
        async with self._lock:
            if self._job is not None or self._record.hygiene is Hygiene.IN_USE:
                raise Held(f"Device {self.device.id} is {self._record.state}.")
            self._retired = True
            return self._record

    # -- scrubbing -------------------------------------------------------------------------------------------------

    async def obstacle(self, asking: Pod | None = None) -> NotReady | None:
        """Why a scrub would get nowhere now; None when it may.

        Asked before one is started; a scrub that was held up is not repeated before its pause is over.
        """
        held = await self.held()
        for grant, where in await self.standings(asking):
            if where.state is PodState.LIVING:
                return earlier_pod_lives(self.device.id, grant, where, asking)
        own = await self.held_by_own_pod(asking) if held and self._job is None else None
        if own is not None:
            return own
        now = self._dependencies.clock.monotonic()
        if self._hold_up is not None and not self._hold_up.over(now, held=held):
            return self._hold_up.refusal
        return None

    async def start_scrub(
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
            ordered: why a person orders a reset with it. Neither the day's limits nor the breaker stop that one; a
                device whose own way back is such a scrub leaves quarantine for it.

        Raises:
            Held: a reset is ordered, and a scrub is under way.
            NotReady: the device was granted or left quarantine meanwhile, its last scrub is not off the record yet, or it
                would be reset and the breaker is open.
            LedgerFailure: that it starts cannot be recorded, so it does not start.
        """
        async with self._lock:
            if self._job is not None and ordered:
                raise Held(f"Device {self.device.id} is being scrubbed ({self._job.id}); wait until that has ended.")
            if self._job is not None:
                return self._job
            recover = recover or (bool(ordered) and self._may_start(recover=True))
            if not self._may_start(recover=recover):
                raise NotReady(
                    f"Device {self.device.id} is {self._record.state} and cannot be scrubbed at this moment.",
                    public=f"Device {self.device.id} is {self._record.state}. The start is tried again.",
                )
            dependencies, policy = self._dependencies, self.policy
            now = dependencies.clock.wall()
            record = self._record
            proved = record.certificate if record.hygiene is Hygiene.CLEAN else None
            # A person's release does not forgive a reset that is owed.
            mends = recover or (record.health is Health.PROBATION and record.must_reset)
            plan = policy.plan(
                Path.SLOW,
                occasion,
                recovering=mends,
                must_reset=mends and record.must_reset,
                ordered=bool(ordered),
            )
            if mends and self._no_reset and not ordered:
                plan = replace(plan, steps=tuple(step for step in plan.steps if step is not Step.RESET))
            resets = mends and Step.RESET in plan.steps
            if recover:
                if not ordered:
                    await self._be_worth_an_attempt(now)
                record = record.recovery_started(Attempt(now, resets, ordered=bool(ordered)))
            after = replace(record.scrub_started(), version=self._record.version + 1)
            started = ScrubRecord(dependencies.new_id("scrub"), self.device.id, Path.SLOW, occasion, now, actor=actor)
            orders = [Event("operator.reset", now, self.device.id, started.id, actor, {"reason": ordered})]
            told = (*(orders if ordered else ()), narrate.scrub_started(started, record.tenant))
            events = (*self._health_events(self._record, after, now), *told)

            async def store_and_begin() -> ScrubJob:
                with self._around.breaker.reset(self.device.id) if resets and not ordered else nullcontext():
                    await self._commit(Change(scrubs=(started,), events=events), after)
                job = ScrubJob(started, ordered=bool(ordered), proved=proved)
                work = self._work(job, plan=plan, record=after, asking=asking)
                self._job = job
                job.task = dependencies.spawn(self._perform(job, work), f"scrub {started.id}")
                self._changed()
                return job

            # A caller that is cancelled stops waiting; what it started goes on.
            return await to_the_end(store_and_begin())

    async def _be_worth_an_attempt(self, now: float) -> None:
        """Raises :class:`NotReady` once the device has none left: then it is condemned, or rests."""
        left = spent(self._record, self.policy, now)
        if left is self._record:
            return
        left = replace(left, version=self._record.version + 1)
        await self._commit(Change(events=self._health_events(self._record, left, now)), left)
        raise NotReady(
            f"Device {self.device.id}: {left.cause.sentence if left.cause else left.state}", code=ErrorCode.SPENT
        )

    def _may_start(self, *, recover: bool) -> bool:
        """Whether what the caller saw before it had the lock still holds."""
        if self._retired or self._record.hygiene not in (Hygiene.DIRTY, Hygiene.CLEAN):
            return False
        # A person's quarantine may have come while the caller waited: that one no machine lifts.
        need = next_need(self._record, self.policy, self._dependencies.identity)
        return not recover or need.act is Act.RECOVER

    def _work(self, job: ScrubJob, *, plan: Plan, record: DeviceRecord, asking: Pod | None) -> Work:
        return Work(
            scrub=job.id,
            device=self.device,
            record=record,
            plan=plan,
            policy=self.policy,
            dependencies=self._dependencies,
            standings=lambda: self.standings(self.starting(asking)),
            urgent=lambda: job.urgent,
            progress=job.progress,
            still=self._around.still,
            asking=asking,
        )

    async def _perform(self, job: ScrubJob, work: Work) -> None:
        """Run the plan and commit what it proved. However this ends, joined callers are told."""
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
                # The record still says "scrubbing": tending settles it once the ledger can be written again.
                finished = replace(job.record, ended=self._dependencies.clock.wall(), outcome=Outcome.ABANDONED)
                self._unrecorded = finished
            finally:
                self._job = None
                job.end(finished, certificate)
                span.note(outcome=None if finished.outcome is None else finished.outcome.value)
                self.wake.set()
                self._changed()

    def _span(self, name: str, scrub: ScrubRecord, tenant: str | None) -> AbstractContextManager[Span]:
        return self._dependencies.tracer.span(
            name,
            device=self.device.id,
            scrub_id=scrub.id,
            tenant=tenant,
            path=scrub.path.value,
            occasion=scrub.occasion.value,
        )

    async def _conclude(
        self, job: ScrubJob, work: Work, result: ScrubResult, began: float
    ) -> tuple[ScrubRecord, Certificate | None]:
        async with self._lock:
            if result.outcome is Outcome.PASSED and self._lookout.absent_since(began):
                # Nobody knows what came after the eraser: it may have been gone for as long as the service stood still.
                result = ScrubResult(Outcome.HELD_UP, result.steps)
            looked = self._dependencies.clock.monotonic()
            dependencies, policy, now = self._dependencies, work.policy, self._dependencies.clock.wall()
            finished = replace(job.record, ended=now, outcome=result.outcome, steps=result.steps)
            certificate: Certificate | None = None
            if result.outcome is Outcome.PASSED:
                issued = certify(
                    finished,
                    result.steps,
                    self._record,
                    identity=dependencies.identity,
                    policy=policy,
                    certificate_id=dependencies.new_id("cert"),
                    now=now,
                )
                certificate = sealed(issued, dependencies.signer)
                finished = replace(finished, certificate=certificate.id)
                hygiene = self._record.scrub_passed(certificate, was_reset=result.was_reset, starting=work.asking)
            else:
                hygiene = self._record.scrub_ended()
            if any(step.step is Step.HOLDERS for step in finished.steps):
                lasting = (each for each in finished.findings if each.code == FindingCode.WALK_UNFINISHED)
                self._uninspected = tuple(each.sentence for each in lasting if "news" in each.evidence)
            self._hold_up = HoldUp.after(finished, self._hold_up, dependencies.clock.monotonic())
            if was_disturbed(finished):
                self._disturbances.note(self.allocations)
            hygiene = hygiene.listing_xids(()) if result.was_reset else hygiene
            if self._record.health is Health.PROBATION and result.reset_tried:
                hygiene = hygiene.attempting(Attempt(now, reset=True, ordered=job.ordered))
            after = after_scrub(hygiene, result.outcome, result.findings, policy, now, reset=result.reset_tried)
            after = replace(after, version=self._record.version + 1)
            events = (
                *narrate.scrub_finished(finished, certificate, work.record.tenant),
                *narrate.residue_unexplained(finished, job.proved),
                *self._health_events(self._record, after, now, job.id),
            )
            certificates = () if certificate is None else (certificate,)
            await self._commit(Change(scrubs=(finished,), certificates=certificates, events=events), after)
            dependencies.journal.scrubbed(finished)
            self._lookout.begin(looked)
            return finished, certificate

    async def check(self, occasion: Occasion, actor: str = "service") -> tuple[ScrubRecord, ScrubResult]:
        """The fast path: checks only. It changes nothing about the device, and records nothing."""
        dependencies, policy = self._dependencies, self.policy
        record = ScrubRecord(
            dependencies.new_id("check"), self.device.id, Path.FAST, occasion, dependencies.clock.wall(), actor=actor
        )
        job = ScrubJob(record)
        work = self._work(job, plan=policy.plan(Path.FAST, occasion), record=self._record, asking=None)
        with self._span("check", record, self._record.tenant) as span:
            result = await scrub.run(work, lambda _: None)
            span.note(outcome=result.outcome.value)
        if result.steps and any(finding.code == FindingCode.HELD for finding in result.steps[0].findings):
            self._lookout.saw(held=True)
        now = dependencies.clock.wall()
        return replace(record, ended=now, outcome=result.outcome, steps=result.steps), result

    async def note_check(self, record: ScrubRecord) -> None:
        """Put a check that somebody asked for on record."""
        async with self._lock:
            change = Change(scrubs=(record,), events=narrate.scrub_finished(record, None, self._record.tenant))
            await to_the_end(self._dependencies.ledger.commit(change))
            self._dependencies.journal.tell(change.events)
            self._dependencies.journal.scrubbed(record)

    async def settle(self) -> None:
        """A scrub or recovery is on record that nobody runs (the ledger failed at its end): put the record right."""
        async with self._lock:
            if self._job is not None:
                return
            after = self._record
            now = self._dependencies.clock.wall()
            if after.hygiene is Hygiene.SCRUBBING:
                after = after.scrub_ended()
            if after.health is Health.RECOVERING:
                after = after.recovery_failed(retry_at=now)
            if after is not self._record:
                scrubs = () if self._unrecorded is None else (self._unrecorded,)
                ended = (
                    event for scrub in scrubs for event in narrate.scrub_finished(scrub, None, self._record.tenant)
                )
                events = (*ended, *self._health_events(self._record, after, now))
                after = replace(after, version=self._record.version + 1)
                await self._commit(Change(scrubs=scrubs, events=events), after)
                for each in scrubs:
                    self._dependencies.journal.scrubbed(each)
                self._unrecorded = None

    async def abandon(self) -> None:
        """Stop the scrub under way, if any; the device is dirty afterwards."""
        job = self._job
        if job is not None and job.task is not None:
            job.task.cancel()
            await asyncio.wait({job.task})
