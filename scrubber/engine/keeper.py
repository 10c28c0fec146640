"""The keeper of one device: the only writer of its state.

Others ask: the node for grants, the watch for what it saw, an operator for a scrub. The keeper decides with the domain's
functions and commits as :class:`~scrubber.engine.custody.Custody` says. The lock is held for decisions and commits, never
for a scrub.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from scrubber.domain.assignment import Assignment, Pod, Process
from scrubber.domain.certify import certify
from scrubber.domain.device import Device
from scrubber.domain.errors import Away, BeingReset, DeviceFault, Held, InvalidRequest, LedgerFailure, NotReady
from scrubber.domain.evidence import Certificate, Finding, Occasion, Outcome, Path, ScrubRecord, Severity, Step
from scrubber.domain.health import Cause, Health, WayBack
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.leftover import PodState, Standing
from scrubber.domain.policy import Plan
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.recovery import after_findings, after_scrub
from scrubber.domain.signals import fault_finding, lifetime_findings, snapshot_findings
from scrubber.domain.tending import Act, next_need
from scrubber.engine import narrate, scrub
from scrubber.engine.custody import Custody
from scrubber.engine.finish import to_the_end
from scrubber.engine.holdup import HoldUp, earlier_pod_lives
from scrubber.engine.instruments import Instruments
from scrubber.engine.job import ScrubJob
from scrubber.engine.lookout import GAP
from scrubber.engine.scrub import ScrubResult
from scrubber.engine.steps.work import Work
from scrubber.engine.views import DeviceView
from scrubber.ports import Change, Event

__all__ = ["Keeper"]

_SILENCE = 15.0
"""Seconds without any answer about a device after which it counts as unreadable."""


class Keeper(Custody):
    """One device.

    Args:
        record: the record as the ledger has it.
        changed: called after every change that somebody may want to see.
        still: keeps other devices of the node out of use while it is open (:meth:`Node.still`).
    """

    def __init__(
        self,
        device: Device,
        record: DeviceRecord,
        *,
        instruments: Instruments,
        changed: Callable[[], None],
        still: Callable[[Iterable[str]], AbstractAsyncContextManager[None]],
    ) -> None:
        super().__init__(device, record, instruments=instruments, changed=changed)
        self._still = still
        self._job: ScrubJob | None = None
        # The last scrub, when the ledger failed at its end.
        self._unrecorded: ScrubRecord | None = None
        self._silent_since: float | None = None
        self._hold_up: HoldUp | None = None

    @property
    def job(self) -> ScrubJob | None:
        """The scrub under way."""
        return self._job

    @property
    def view(self) -> DeviceView:
        return DeviceView(self.device, self._record, None if self._job is None else self._job.id)

    # -- being looked at -------------------------------------------------------------------------------------------

    async def held(self) -> bool:
        """Whether anybody holds the device now; keeps count of how long nobody did.

        While it is scrubbed the scrub holds it, and the driver is not asked: the question breaks an eraser's fence.
        """
        if self._job is not None:
            return True
        self._lookout.look()
        held = await self._instruments.holders.held(self.device)
        self._lookout.saw(held=held)
        return held

    async def standings(
        self, asking: Pod | None = None, *, leaving_out: Pod | None = None
    ) -> list[tuple[Grant, Standing]]:
        """Where the pod of each open grant stands, by what the pod watch knows now (refresh it first).

        Args:
            leaving_out: a pod that is not asked about: looking at a pod's processes can mean walking over all there are.
        """
        instruments, limits = self._instruments, self._instruments.policy().limits
        found = []
        for grant in self._record.open_grants:
            if leaving_out is not None and grant.pod == leaving_out:
                continue
            where = await instruments.pods.standing(
                grant,
                limits=limits,
                boot=instruments.identity.boot,
                wall=instruments.clock.wall(),
                free_for=self._lookout.free_for,
                asking=asking,
            )
            found.append((grant, where))
        return found

    async def obstacle(self, asking: Pod | None = None) -> NotReady | None:
        """Why a scrub would get nowhere now; None when it may.

        Asked before one is started; a scrub that was held up is not repeated before its pause is over.
        """
        held = await self.held()
        for grant, where in await self.standings(asking):
            if where.state is PodState.LIVING:
                return earlier_pod_lives(self.device.id, grant, where, asking)
        now = self._instruments.clock.monotonic()
        if self._hold_up is not None and not self._hold_up.over(now, held=held):
            return self._hold_up.refusal
        return None

    async def look(self) -> tuple[Finding, ...]:
        """Ask the driver about the device and let its answer count."""
        try:
            snapshot = await self._instruments.telemetry.snapshot(self.device)
            findings = (
                *snapshot_findings(snapshot, self._instruments.policy()),
                *lifetime_findings(snapshot, dict(self._record.lifetime)),
            )
        except DeviceFault as fault:
            findings = (fault_finding(Step.HEALTH, fault),)
        except Away as away:
            findings = self._silence(away)
        else:
            self._silent_since = None
        await self.report(findings)
        return findings

    def _silence(self, away: Away) -> tuple[Finding, ...]:
        """Nobody could be asked, which is not the device's fault; but no data is never healthy for long.

        A device that is kept back for a reset is not silent: the reset has a deadline, and who began it judges it.
        """
        if isinstance(away, BeingReset):
            self._silent_since = None
            raise away
        now = self._instruments.clock.monotonic()
        self._silent_since = now if self._silent_since is None else self._silent_since
        if now - self._silent_since < _SILENCE:
            raise away
        return (Finding(Step.HEALTH, "unreadable", Severity.FAULT, f"No data for {_SILENCE:g} s: {away}"),)

    async def report(self, findings: Iterable[Finding]) -> None:
        """Let what a look at the device's health found count."""
        everything = tuple(findings)
        async with self._lock:
            now = self._instruments.clock.wall()
            after = after_findings(self._record, everything, self._instruments.policy(), now)
            if after is not self._record:
                after = replace(after, version=self._record.version + 1)
                await self._commit(Change(events=narrate.health_changed(self._record, after, now)), after)

    async def touched(self, seen: DeviceRecord) -> bool:
        """Somebody was found to hold the device although it is granted to nobody: void the certificate; True if so.

        Args:
            seen: the record as it was before the look. A certificate that was issued since is another one's.
        """
        async with self._lock:
            standing = self._record.hygiene is Hygiene.CLEAN and self._record.certificate == seen.certificate
            if not standing or self._job is not None:
                return False
            event = Event("device.touched", self._instruments.clock.wall(), self.device.id)
            await self._commit_seen(Change(events=(event,)), self._record.touched())
            return True

    async def _commit_seen(self, change: Change, record: DeviceRecord) -> None:
        """Commit what takes trust away. If that fails, it is not forgotten: the next look takes it away."""
        try:
            await self._commit(change, record)
        except LedgerFailure:
            self._lookout.miss()
            raise

    async def intruded(self, event: Event, findings: Iterable[Finding] = (), *, seen: bool = True) -> None:
        """Record that somebody without a grant had the device, or may have had: no certificate or exception outlives it.

        Args:
            findings: faults that it means, where the policy says so.
            seen: whether somebody was seen to, or has to be presumed to have.
        """
        async with self._lock:
            before = after = self._record
            if self._job is None:
                after = before.intruded(seen=seen)
            faults = tuple(findings)
            if faults:
                after = after_findings(after, faults, self._instruments.policy(), event.at)
            after = replace(after, version=before.version + 1)
            await self._commit_seen(Change(events=(event, *narrate.health_changed(before, after, event.at))), after)

    def attend(self) -> None:
        """The service is awake; told all the while, also while the device is scrubbed."""
        self._lookout.attend()

    @property
    def unwatched(self) -> bool:
        """Whether nobody looked at the device for so long that somebody may have had it."""
        return self._lookout.gap

    async def void_if_unwatched(self) -> bool:
        """Void what was proved if nobody looked for so long that somebody may have had the device; True if so."""
        if not self.unwatched or self._job is not None:
            return False
        if not self._record.watched and self._record.hygiene is not Hygiene.CLEAN:
            self._lookout.begin()
            return False
        sentence = (
            f"Nobody looked for over {GAP:g} s, or what was seen could not be recorded; somebody may have used it."
        )
        fields = {"reason": "gap", "sentence": sentence}
        event = Event("certificate.voided", self._instruments.clock.wall(), self.device.id, fields=fields)
        await self.intruded(event, seen=False)
        self._lookout.begin()
        return True

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Nobody is granted the device while this is open, and no certificate of it outlives it.

        Raises:
            Held: it is in use, or being scrubbed.
        """
        async with self._lock:
            if self._record.hygiene is Hygiene.IN_USE or self._job is not None:
                raise Held(f"Device {self.device.id}, which would be reset with it, is {self._record.hygiene.value}.")
            if self._record.hygiene is Hygiene.CLEAN:
                event = Event("device.touched", self._instruments.clock.wall(), self.device.id)
                await self._commit(Change(events=(event,)), self._record.touched())
            yield

    async def release(self, seen: DeviceRecord) -> None:
        """Nobody uses the device rightfully any more: dirty from here.

        Args:
            seen: the record that this was concluded from. A device that was granted meanwhile is not released by it.
        """
        async with self._lock:
            if self._record.hygiene is Hygiene.IN_USE and self._record.grants == seen.grants:
                event = Event("device.released", self._instruments.clock.wall(), self.device.id)
                await self._commit(Change(events=(event,)), self._record.released())

    async def adopt(self, grant: Grant | None) -> None:
        """Somebody had the device before this service looked; untouched until it is given back.

        Args:
            grant: its sequence is given here, where nobody else can grant anything.
        """
        async with self._lock:
            record = self._record
            if self._job is not None or record.hygiene not in (Hygiene.DIRTY, Hygiene.IN_USE):
                return  # a scrub began meanwhile: it finds the pod, and so does the next look
            if grant is not None:
                if record.hygiene is Hygiene.IN_USE and any(each.pod == grant.pod for each in record.open_grants):
                    return  # it was granted meanwhile
                grant = replace(grant, sequence=record.grants + 1)
            pod = grant.pod if grant is not None else record.open_grants[-1].pod
            fields = {} if pod is None else {"tenant_namespace": pod.namespace, "pod": pod.name}
            event = Event("device.adopted", self._instruments.clock.wall(), self.device.id, fields=fields)
            grants = () if grant is None else ((self.device.id, grant),)
            await self._commit(Change(grants=grants, events=(event,)), self._record.adopted(grant))

    async def name_grant(self, sequence: int, assignment: Assignment, baseline: tuple[Process, ...]) -> None:
        """The pod of the last grant is known now; nothing changes if ``sequence`` is the last grant no more."""
        async with self._lock:
            if self._record.hygiene is not Hygiene.IN_USE or self._record.grants != sequence:
                return
            pod = assignment.pod
            fields: dict[str, str | int | float | bool | None] = {"grant": sequence}
            fields |= {"tenant_namespace": pod.namespace, "pod": pod.name}
            event = Event("grant.named", self._instruments.clock.wall(), self.device.id, fields=fields)
            await self._commit(Change(events=(event,)), self._record.named(assignment, baseline))

    # -- a person's word -------------------------------------------------------------------------------------------

    async def quarantine(self, reason: str, actor: str) -> None:
        async with self._lock:
            now = self._instruments.clock.wall()
            cause = Cause("operator", reason, WayBack.PERSON, now, actor)
            event = Event("operator.quarantined", now, self.device.id, actor=actor, fields={"reason": reason})
            await self._commit(Change(events=(event,)), self._record.ordered_out(cause))

    async def unquarantine(self, reason: str, actor: str) -> None:
        """Raises :class:`InvalidRequest` when the device is not out of service."""
        async with self._lock:
            if self._record.health not in (Health.QUARANTINED, Health.CONDEMNED):
                raise InvalidRequest(f"Device {self.device.id} is {self._record.health.value}, not quarantined.")
            now = self._instruments.clock.wall()
            event = Event("operator.released", now, self.device.id, actor=actor, fields={"reason": reason})
            await self._commit(Change(events=(event,)), self._record.released_by_person(retry_at=now))

    # -- scrubbing -------------------------------------------------------------------------------------------------

    async def start_scrub(
        self, occasion: Occasion, *, actor: str = "service", asking: Pod | None = None, recover: bool = False
    ) -> ScrubJob:
        """Start the slow path, or join the one under way.

        Args:
            asking: the pod whose start waits for it.
            recover: the device leaves quarantine for it, by way of a reset if its cause needs one.

        Raises:
            NotReady: the device was granted or left quarantine meanwhile, or its last scrub is not off the record yet.
            LedgerFailure: that it starts cannot be recorded, so it does not start.
        """
        async with self._lock:
            if self._job is not None:
                return self._job
            if not self._may_start(recover=recover):
                raise NotReady(
                    f"Device {self.device.id} is {self._record.state} and cannot be scrubbed at this moment.",
                    public=f"Device {self.device.id} is {self._record.state}. The start is tried again.",
                )
            instruments, policy = self._instruments, self._instruments.policy()
            now = instruments.clock.wall()
            record = self._record
            if recover:
                record = record.recovery_started()
            after = replace(record.scrub_started(), version=self._record.version + 1)
            started = ScrubRecord(instruments.new_id("scrub"), self.device.id, Path.SLOW, occasion, now, actor=actor)
            events = (*narrate.health_changed(self._record, after, now), narrate.scrub_started(started))
            plan = policy.plan(Path.SLOW, occasion, recovering=recover, must_reset=recover and after.must_reset)

            async def store_and_begin() -> ScrubJob:
                await self._commit(Change(scrubs=(started,), events=events), after)
                job = ScrubJob(started)
                work = self._work(job, plan=plan, record=after, asking=asking)
                self._job = job
                job.task = instruments.spawn(self._perform(job, work), f"scrub {started.id}")
                self._changed()
                return job

            # A caller that is cancelled stops waiting; what it started goes on.
            return await to_the_end(store_and_begin())

    def _may_start(self, *, recover: bool) -> bool:
        """Whether what the caller saw before it had the lock still holds."""
        if self._retired or self._record.hygiene not in (Hygiene.DIRTY, Hygiene.CLEAN):
            return False
        # A person's quarantine may have come while the caller waited: that one no machine lifts.
        need = next_need(self._record, self._instruments.policy(), self._instruments.identity)
        return not recover or need.act is Act.RECOVER

    def _work(self, job: ScrubJob, *, plan: Plan, record: DeviceRecord, asking: Pod | None) -> Work:
        return Work(
            scrub=job.id,
            device=self.device,
            record=record,
            plan=plan,
            policy=self._instruments.policy(),
            instruments=self._instruments,
            standings=lambda: self.standings(asking),
            urgent=lambda: job.urgent,
            progress=job.progress,
            still=self._still,
        )

    async def _perform(self, job: ScrubJob, work: Work) -> None:
        """Run the plan and commit what it proved. However this ends, joined callers are told."""
        result = ScrubResult(Outcome.ABANDONED, ())
        finished, certificate = job.record, None
        began = self._instruments.clock.monotonic()
        try:
            try:
                result = await scrub.run(work, job.begin)
            finally:
                finished, certificate = await to_the_end(self._conclude(job, work, result, began))
        except LedgerFailure:
            # The record still says "scrubbing": tending settles it once the ledger can be written again.
            finished = replace(job.record, ended=self._instruments.clock.wall(), outcome=Outcome.ABANDONED)
            self._unrecorded = finished
        finally:
            self._job = None
            job.end(finished, certificate)
            self.wake.set()
            self._changed()

    async def _conclude(
        self, job: ScrubJob, work: Work, result: ScrubResult, began: float
    ) -> tuple[ScrubRecord, Certificate | None]:
        async with self._lock:
            if result.outcome is Outcome.PASSED and self._lookout.absent_since(began):
                # Nobody knows what came after the eraser: it may have been gone for as long as the service stood still.
                result = ScrubResult(Outcome.HELD_UP, result.steps)
            looked = self._instruments.clock.monotonic()
            instruments, policy, now = self._instruments, work.policy, self._instruments.clock.wall()
            finished = replace(job.record, ended=now, outcome=result.outcome, steps=result.steps)
            certificate: Certificate | None = None
            if result.outcome is Outcome.PASSED:
                certificate = certify(
                    finished,
                    result.steps,
                    self._record,
                    identity=instruments.identity,
                    policy=policy,
                    certificate_id=instruments.new_id("cert"),
                    now=now,
                )
                finished = replace(finished, certificate=certificate.id)
                hygiene = self._record.scrub_passed(certificate, was_reset=result.was_reset)
            else:
                hygiene = self._record.scrub_ended()
            self._hold_up = HoldUp.after(finished, self._hold_up, instruments.clock.monotonic())
            after = after_scrub(hygiene, result.outcome, result.findings, policy, now)
            after = replace(after, version=self._record.version + 1)
            events = (
                *narrate.scrub_finished(finished, certificate),
                *narrate.health_changed(self._record, after, now, job.id),
            )
            certificates = () if certificate is None else (certificate,)
            await self._commit(Change(scrubs=(finished,), certificates=certificates, events=events), after)
            self._lookout.begin(looked)
            return finished, certificate

    async def check(self, occasion: Occasion, actor: str = "service") -> tuple[ScrubRecord, ScrubResult]:
        """The fast path: checks only. It changes nothing about the device, and records nothing."""
        instruments, policy = self._instruments, self._instruments.policy()
        record = ScrubRecord(
            instruments.new_id("check"), self.device.id, Path.FAST, occasion, instruments.clock.wall(), actor=actor
        )
        job = ScrubJob(record)
        work = self._work(job, plan=policy.plan(Path.FAST, occasion), record=self._record, asking=None)
        result = await scrub.run(work, lambda _: None)
        if result.steps and any(finding.code == "held" for finding in result.steps[0].findings):
            self._lookout.saw(held=True)
        now = instruments.clock.wall()
        return replace(record, ended=now, outcome=result.outcome, steps=result.steps), result

    async def note_check(self, record: ScrubRecord) -> None:
        """Put a check that somebody asked for on record."""
        async with self._lock:
            change = Change(scrubs=(record,), events=narrate.scrub_finished(record, None))
            await to_the_end(self._instruments.ledger.commit(change))
            self._instruments.journal.tell(change.events)

    async def settle(self) -> None:
        """A scrub or recovery is on record that nobody runs (the ledger failed at its end): put the record right."""
        async with self._lock:
            if self._job is not None:
                return
            after = self._record
            now = self._instruments.clock.wall()
            if after.hygiene is Hygiene.SCRUBBING:
                after = after.scrub_ended()
            if after.health is Health.RECOVERING:
                after = after.recovery_failed(retry_at=now, counts=False)
            if after is not self._record:
                scrubs = () if self._unrecorded is None else (self._unrecorded,)
                ended = (event for scrub in scrubs for event in narrate.scrub_finished(scrub, None))
                events = (*ended, *narrate.health_changed(self._record, after, now))
                after = replace(after, version=self._record.version + 1)
                await self._commit(Change(scrubs=scrubs, events=events), after)
                self._unrecorded = None

    async def abandon(self) -> None:
        """Stop the scrub under way, if any; the device is dirty afterwards."""
        job = self._job
        if job is not None and job.task is not None:
            job.task.cancel()
            await asyncio.wait({job.task})
