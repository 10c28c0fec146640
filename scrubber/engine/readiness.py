"""Getting one device ready for a start: judge, wait, check, scrub, until its grant would rest on something."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from scrubber.domain import handover
from scrubber.domain.admission import Answer, Decision, may_be_handed_over, unjudged
from scrubber.domain.assignment import Assignment, Pod, Reading, Trust
from scrubber.domain.basis import UNJUDGED, Basis, HandOver, judge
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import DeviceFault, NotReady, Quarantined, ScrubberError
from scrubber.domain.evidence import Finding, FindingCode, Occasion, Outcome, ScrubRecord, Severity, Step
from scrubber.domain.handover import Checks, HandoverFacts, Look, Verdict
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.leftover import PodState
from scrubber.domain.policy import Enforcement, Policy
from scrubber.domain.record import DeviceRecord
from scrubber.domain.sharing import Beside
from scrubber.domain.signals import fault_finding
from scrubber.domain.using import Use
from scrubber.engine.instruments import Instruments
from scrubber.engine.joining import Company, check_beside, company_of, foreign_refusal, must_wait, neighbours_of
from scrubber.engine.keeper import Keeper
from scrubber.ports import Event, Span

__all__ = ["Readiness", "Ready", "Wanted"]

_POLL_FIRST, _POLL_LAST = 0.02, 0.25


@dataclass(frozen=True, slots=True)
class Wanted:
    """A device that is asked for, and under which of the kubelet's ids; ``share``: as one of several that have it."""

    keeper: Keeper
    ids: frozenset[str]
    share: bool = False

    @property
    def device(self) -> str:
        return self.keeper.device.id

    @property
    def shares(self) -> frozenset[str]:
        """The ids to look for in the kubelet's lists; empty where whoever has the device has all of it."""
        return self.ids if self.share else frozenset()


@dataclass(frozen=True, slots=True)
class Ready:
    """What one device's grant would rest on, as of a version of its record."""

    version: int
    assignment: Assignment | None
    certain: bool
    kind: HandOver
    decision: Decision
    check: ScrubRecord
    checked_at: float
    allocations: int
    policy: Policy
    shares: frozenset[str] = frozenset()
    over: frozenset[int] = frozenset()

    @property
    def joins(self) -> bool:
        return self.decision.basis is Basis.SHARED


class Readiness:
    """One device of one request, for as long as the request lasts.

    Args:
        resource: the kubelet's name of what is asked for; empty where the caller did not say.
        own: the resources under which our own plugins hand devices out.
        deadline: monotonic seconds.
    """

    def __init__(
        self,
        wanted: Wanted,
        *,
        resource: str,
        instruments: Instruments,
        own: Callable[[], frozenset[str]],
        deadline: float,
    ) -> None:
        self._wanted = wanted
        self._resource = resource
        self._instruments = instruments
        self._own = own
        self._deadline = deadline
        self._asked_for: tuple[Assignment | None, ...] = ()
        self._allocations = wanted.keeper.allocations

    def _left(self) -> float:
        return self._deadline - self._instruments.clock.monotonic()

    async def reached(self) -> Ready:
        """Ready, as soon as it is.

        Raises:
            Quarantined, NotReady, LedgerFailure: it is not, and the time is up; or it will not be.
        """
        with self._instruments.tracer.span("device", device=self._wanted.device, tenant=None) as span:
            ready = await self._reached(span)
            span.note(kind=ready.kind.value, exception=ready.decision.basis and ready.decision.basis.exception)
            return ready

    async def _reached(self, span: Span) -> Ready:
        pause, keeper = _POLL_FIRST, self._wanted.keeper
        while True:
            reading = await self._instruments.pods.refresh()
            await keeper.void_if_unwatched()
            outcome = await self._look(reading, span)
            if isinstance(outcome, Ready):
                return outcome
            left = self._left()
            if left <= 0:
                raise outcome or _being_scrubbed(keeper)
            if outcome is not None:
                await self._instruments.clock.sleep(min(pause, left))
                pause = min(_POLL_LAST, pause * 2)

    async def _look(self, reading: Reading, span: Span) -> Ready | ScrubberError | None:
        """One round; a device that cannot be looked at is out of service."""
        try:
            return await self._try(reading, span)
        except DeviceFault as fault:
            await self._wanted.keeper.report([fault_finding(Step.HOLDERS, fault)])
            device = self._wanted.device
            return NotReady(
                f"Device {device} cannot be looked at: {fault}",
                public=f"Device {device} cannot be looked at now. The start is tried again.",
                code=fault.code,
            )

    async def _try(self, reading: Reading, span: Span) -> Ready | ScrubberError | None:
        """One round: ready, the refusal to give if time is up now, or None when something moved: look again at once."""
        policy, wanted = self._wanted.keeper.policy, self._wanted
        keeper, device, share = wanted.keeper, wanted.device, wanted.shares
        record = keeper.record
        certain = reading.assignment_of(device, share, resource=self._resource)
        following = certain or reading.hint_of(device, share)
        asking = None if following is None else following.pod
        # No list names an ordinary init container. The checkpoint does, and beside a list that is trusted and that it bears
        # out it names active pods only: enough to know the starting pod's own earlier use from that of others.
        sure = reading.trust is Trust.TRUSTED and reading.init_containers_known
        starting = certain or (following if sure else None)
        own = None if starting is None else starting.pod
        span.note(tenant=None if asking is None else asking.tenant)
        kind = judge(
            record.previous,
            certain,
            allocated_since=keeper.allocated_since,
            containers=reading.containers_with(device, share),
            init_containers_known=reading.init_containers_known,
        )
        observing = policy.enforcement is Enforcement.OBSERVE
        facts = HandoverFacts(
            record=record,
            kind=kind,
            policy=policy,
            identity=self._instruments.identity,
            ran=record.last_grant is not None and self._instruments.pods.ran(record.last_grant),
            share=wanted.share,
            asking=own,
        )
        self._asked_for = self._asked_for or (following,)
        # Other pods are given other shares all the while; the whole of a device only when it is this pod's no longer.
        allocated = not wanted.share and keeper.allocations != self._allocations
        if (allocated or self._asked_for != (following,)) and not observing:
            _same(replace(facts, trouble=ErrorCode.REASSIGNED), Verdict.REFUSE)
            raise NotReady(
                f"Device {device} was assigned anew while its hand-over was under way.",
                public=f"Device {device} was assigned anew. The start is tried again.",
                code=ErrorCode.REASSIGNED,
            )
        foreign = None if observing else foreign_refusal(device, asking, reading, self._own())
        if foreign is not None:
            _same(replace(facts, trouble=ErrorCode.FOREIGN_ASSIGNMENT), Verdict.WAIT)
            return foreign
        nobodys = following is None and reading.trust is Trust.TRUSTED and not reading.having(device, share)
        if nobodys and not observing:
            _same(replace(facts, trouble=ErrorCode.UNASSIGNED), Verdict.REFUSE)
            raise NotReady(
                f"The kubelet assigns device {device} to nobody, so nobody can be about to start on it.",
                public=f"Device {device} is assigned to no pod of this node. The start is tried again.",
                code=ErrorCode.UNASSIGNED,
            )
        allocations = keeper.allocations
        ran = record.last_grant is not None and self._instruments.pods.ran(record.last_grant)
        decision = may_be_handed_over(record, kind, policy, self._instruments.identity, ran=ran)
        if decision.answer is Answer.REFUSE:
            _same(facts, Verdict.REFUSE)
            await self._let_it_recover(keeper, record, own)
            raise Quarantined(f"Device {device}: {decision.reason}.", public=keeper.view.refusal)
        if decision.answer is Answer.WAIT_FOR_SCRUB:
            _same(facts, Verdict.JOIN)
            return await self._join(keeper, own)
        company: Company | None = None
        if wanted.share and record.advertised:
            _same(facts, Verdict.LOOK, look=Look.NEIGHBOURS)
            company = await company_of(keeper, starting, share, reading, self._instruments)
            facts = replace(facts, neighbours=await neighbours_of(keeper, starting, share, reading))
            if company.verdict.answer is Beside.JOIN:
                decision = Decision(Answer.GO_BY_EXCEPTION, company.verdict.reason, basis=Basis.SHARED)
            elif company.verdict.answer is Beside.WAIT and observing:
                decision = _observed(record, company.verdict.reason)
            elif company.verdict.answer is Beside.WAIT:
                _same(facts, Verdict.WAIT)
                return must_wait(device, company.verdict.reason)
        if decision.basis not in (*UNJUDGED, Basis.SHARED):
            if not decision.go:
                _same(facts, Verdict.SCRUB)
                return await self._scrub(keeper, record, own)
            _same(facts, Verdict.LOOK, decision.basis, Look.EARLIER)
            others = await self._other_pods(keeper, asking) - {PodState.OVER}
            facts = replace(facts, earlier=frozenset(others))
            if others and observing:
                decision = _observed(record, "an earlier pod is not over")
            elif PodState.LIVING in others:
                _same(facts, Verdict.WAIT)
                return await keeper.obstacle(own)
            elif others:
                _same(facts, Verdict.SCRUB)
                return await self._scrub(keeper, record, own)
        _same(facts, Verdict.LOOK, decision.basis, Look.CHECKS)
        if company is not None and decision.basis is Basis.SHARED:
            check, result = await check_beside(keeper, company.verdict.pods, self._instruments)
        else:
            check, result = await keeper.check(Occasion.START)
        facts = replace(facts, checks=Checks(result.outcome is Outcome.PASSED, tuple(result.findings)))
        if result.outcome is not Outcome.PASSED and observing:
            decision = _observed(record, "its checks found something")
        elif result.outcome is not Outcome.PASSED and decision.basis is Basis.SHARED:
            _same(facts, Verdict.RECORD, Verdict.WAIT)
            return await self._after_failed_joining(keeper, result.findings)
        elif result.outcome is not Outcome.PASSED:
            _same(facts, Verdict.RECORD, Verdict.WAIT, Verdict.SCRUB)
            return await self._after_failed_check(keeper, record, result.findings, own)
        elif decision.basis == kind.value and _warns(result.findings):
            if not observing:
                _same(facts, Verdict.RECORD)
            await keeper.report(result.findings)  # a device that is suspect has no exceptions
            return None
        _same(facts, Verdict.GRANT, decision.basis)
        now = self._instruments.clock.monotonic()
        over = frozenset[int]() if company is None else company.over
        return Ready(
            record.version,
            None if following is None else self._instruments.pods.as_it_starts(following, device),
            certain is not None,
            kind,
            decision,
            check,
            now,
            allocations,
            policy,
            shares=share,
            over=over,
        )

    async def _let_it_recover(self, keeper: Keeper, record: DeviceRecord, asking: Pod | None) -> None:
        """Let the device heal under the pod that waits for it, if nothing else of an earlier grant lives."""
        if asking is None or asking.uid is None or keeper.job is not None:
            return
        try:
            living = any(where.state is PodState.LIVING for _, where in await keeper.standings(asking))
        except DeviceFault:
            return  # it is out of service for that very reason
        if not living:
            keeper.note_waiting(asking)
            await keeper.release(record)

    async def _other_pods(self, keeper: Keeper, asking: Pod | None) -> set[PodState]:
        """Where the pods of earlier grants stand, the asking pod's own left out: its other containers may live."""
        mine = None if asking is None or asking.uid is None else asking
        return {where.state for _, where in await keeper.standings(asking, leaving_out=mine)}

    async def _after_failed_check(
        self, keeper: Keeper, record: DeviceRecord, findings: Sequence[Finding], asking: Pod | None
    ) -> ScrubberError | None:
        """Something is off: the fault quarantines, a holder voids the certificate, the rest takes the slow path."""
        if any(finding.severity is Severity.FAULT for finding in findings):
            await keeper.report(findings)
            return None
        held = any(finding.code == FindingCode.HELD for finding in findings)
        if held and record.hygiene is not Hygiene.IN_USE and await keeper.touched(record):
            return None
        if held and not await keeper.nobodys():
            own = await keeper.held_by_own_pod(asking)
            if own is not None:
                return own
            device = keeper.device.id
            return NotReady(
                f"Device {device} is still held; its next start waits for the holder's end.",
                public=f"Device {device} is {keeper.record.state}: it is still held. The start is tried again.",
                code=ErrorCode.HELD,
            )
        return await self._scrub(keeper, record, asking)

    async def _after_failed_joining(self, keeper: Keeper, findings: Sequence[Finding]) -> ScrubberError | None:
        """A fault quarantines; whatever else is off cannot be put right while others are on the device."""
        if any(finding.severity is Severity.FAULT for finding in findings):
            await keeper.report(findings)
            return None
        stranger = next((finding for finding in findings if finding.code == FindingCode.UNKNOWN_HOLDER), None)
        if stranger is not None and not keeper.record.tainted:
            fields = {"use": Use.STRANGER.value, "sentence": stranger.sentence}
            now = self._instruments.clock.wall()
            await keeper.intruded(Event("use.ungranted", now, keeper.device.id, fields=fields))
        why = next((finding.sentence for finding in findings if finding.severity is Severity.DIRTY), "a check failed.")
        return must_wait(keeper.device.id, f"its users would have to be gone first. {why}".rstrip("."))

    async def _join(self, keeper: Keeper, asking: Pod | None) -> ScrubberError | None:
        job = keeper.job
        left = self._left()
        if job is None or left <= 0:
            return _being_scrubbed(keeper)
        try:
            async with self._instruments.clock.timeout(left):
                with self._instruments.tracer.span("wait", scrub_id=job.id):
                    finished = await job.wait()
        except TimeoutError:
            return _being_scrubbed(keeper)
        if finished.outcome in (Outcome.PASSED, Outcome.FAILED):
            return None
        return await keeper.obstacle(asking) or _being_scrubbed(keeper)

    async def _scrub(self, keeper: Keeper, record: DeviceRecord, asking: Pod | None) -> ScrubberError | None:
        """Start the slow path, unless it would get nowhere, and wait for it."""
        obstacle = await keeper.obstacle(asking)
        if obstacle is not None:
            return obstacle
        await keeper.release(record)
        try:
            await keeper.start_scrub(Occasion.START, asking=asking)
        except NotReady as granted_meanwhile:
            return granted_meanwhile
        return await self._join(keeper, asking)


def _observed(record: DeviceRecord, reason: str) -> Decision:
    """What would have been refused, and is not."""
    return Decision(Answer.GO_BY_EXCEPTION, reason, basis=unjudged(record))


def _warns(findings: Iterable[Finding]) -> bool:
    return any(finding.severity is Severity.WARNING for finding in findings)


def _being_scrubbed(keeper: Keeper) -> NotReady:
    scrub = keeper.job.id if keeper.job is not None else "about to start"
    sentence = f"Device {keeper.device.id} is {keeper.record.state} (scrub {scrub})."
    return NotReady(sentence, public=f"{sentence} The start is tried again and joins it.", code=ErrorCode.SCRUBBING)


def _same(facts: HandoverFacts, *expected: Verdict | Basis | Look | None, look: Look | None = None) -> None:
    """Both ways to decide agree."""
    found = handover.decide(facts)
    verdicts = [each for each in expected if isinstance(each, Verdict)]
    bases = [each for each in expected if isinstance(each, Basis)]
    looks = [each for each in (look, *expected) if isinstance(each, Look)]
    assert found.verdict in verdicts, (found, expected, facts)
    assert not bases or found.basis in bases, (found, expected, facts)
    assert not looks or found.look in looks, (found, expected, facts)
