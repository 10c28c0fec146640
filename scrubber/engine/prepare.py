"""Preparing one device for a start: gather the facts, act on what :func:`scrubber.domain.handover.decide` answers, wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scrubber.domain.assignment import Assignment, Pod, Reading, Trust
from scrubber.domain.basis import Basis, HandOver, judge
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import DeviceFault, NotReady, ScrubberError
from scrubber.domain.evidence import Finding, FindingCode, Occasion, Outcome, ScrubRecord, Step
from scrubber.domain.handover import Checks, Decision, HandoverFacts, HandoverVerdict, MissingFact, decide
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.leftover import PodState, Standing
from scrubber.domain.policy import Enforcement, Policy
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.signals import fault_finding
from scrubber.domain.using import Use
from scrubber.engine import refusals
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.shared_start import check_beside, neighbour, others_on
from scrubber.ports.record import Event
from scrubber.ports.runtime import Span

__all__ = ["Preparation", "Prepared", "RequestedDevice", "ResolvedCall"]

_POLL_FIRST, _POLL_LAST = 0.02, 0.25


@dataclass(frozen=True, slots=True)
class RequestedDevice:
    """A device that is asked for.

    Attributes:
        ids: by which of the kubelet's ids.
        shares: the ids to look for in the kubelet's lists; empty where whoever has the device has all of it.
    """

    controller: DeviceController
    ids: frozenset[str]
    shares: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedCall:
    """One call for a hand-over, once it is known which devices its ids mean.

    Attributes:
        devices: in the order of their ids: the order in which locks are taken.
        resource: the kubelet's name of what is asked for; empty where the caller did not say.
        own: the resources under which our own plugins hand devices out, this one included.
        deadline: monotonic seconds.
    """

    devices: tuple[RequestedDevice, ...]
    resource: str
    own: Callable[[], frozenset[str]]
    deadline: float


@dataclass(frozen=True, slots=True)
class Prepared:
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


@dataclass(frozen=True, slots=True)
class _Start:
    """Whose start it is, by one reading of the kubelet.

    Attributes:
        certain: the assignment, where the kubelet's witnesses agree.
        following: that, or what one witness says.
        own: the pod, where it is certain enough to tell its own earlier use from that of others.
        second_owner: whom another plugin or driver has given the device to.
    """

    certain: Assignment | None
    following: Assignment | None
    own: Pod | None
    second_owner: Assignment | None


class Preparation:
    """One device of one call, for as long as the call lasts."""

    def __init__(self, requested: RequestedDevice, call: ResolvedCall, *, dependencies: Dependencies) -> None:
        self._requested = requested
        self._call = call
        self._dependencies = dependencies
        self._asked_for: tuple[Assignment | None, ...] = ()
        self._allocations = requested.controller.state.allocations

    async def reached(self) -> Prepared:
        """The device, prepared, as soon as it is.

        Raises:
            Quarantined, NotReady, LedgerFailure: it is not, and the time is up; or it will not be.
        """
        pause, controller, clock = _POLL_FIRST, self._requested.controller, self._dependencies.clock
        with self._dependencies.tracer.span("device", device=controller.id, tenant=None) as span:
            while True:
                reading = await controller.pods.refresh()
                await controller.occupancy.void_after_gap()
                try:
                    outcome = await self._decided(reading, span)
                except DeviceFault as fault:  # a device that cannot be looked at is out of service
                    await controller.health.report([fault_finding(Step.HOLDERS, fault)])
                    outcome = refusals.cannot_be_looked_at(controller.id, fault)
                if isinstance(outcome, Prepared):
                    span.note(
                        kind=outcome.kind.value, exception=outcome.decision.basis and outcome.decision.basis.exception
                    )
                    return outcome
                left = self._call.deadline - clock.monotonic()
                if left <= 0:
                    raise outcome or _being_scrubbed(controller)
                if outcome is not None:
                    await clock.sleep(min(pause, left))
                    pause = min(_POLL_LAST, pause * 2)

    async def _decided(self, reading: Reading, span: Span) -> Prepared | ScrubberError | None:
        """One round: prepared, the refusal to give if time is up now, or None when something moved: look again at once."""
        requested, dependencies = self._requested, self._dependencies
        controller, record, share = requested.controller, requested.controller.state.record, requested.shares
        start = self._start_by(reading)
        span.note(tenant=None if start.following is None else start.following.pod.tenant)
        allocations = controller.state.allocations
        facts = HandoverFacts(
            record=record,
            kind=judge(
                record.previous,
                start.certain,
                allocated_since=controller.state.allocated_since,
                containers=reading.containers_with(controller.id, share),
                init_containers_known=reading.init_containers_known,
            ),
            policy=controller.state.policy,
            identity=dependencies.identity.of(controller.state.device),
            ran=record.last_grant is not None and controller.pods.ran(record.last_grant),
            trouble=self._trouble(reading, start),
            share=bool(share),
            asking=start.own,
        )
        check: ScrubRecord | None = None
        others: list[tuple[Grant, Standing]] = []
        while (decision := decide(facts)).verdict is HandoverVerdict.GATHER:
            match decision.missing:
                case MissingFact.NEIGHBOURS:
                    others = await others_on(controller, start.own, share, reading)
                    facts = replace(facts, neighbours=tuple(neighbour(*each) for each in others))
                case MissingFact.EARLIER:
                    asking = None if start.following is None else start.following.pod
                    # The other containers of the asking pod may live.
                    mine = None if asking is None or asking.uid is None else asking
                    earlier = await controller.occupancy.standings(asking, leaving_out=mine)
                    facts = replace(facts, earlier=frozenset([where.state for _, where in earlier]))
                case _:
                    if decision.basis is Basis.SHARED:
                        check = await check_beside(controller, decision.pods, dependencies)
                    else:
                        check = await controller.scrubs.check(Occasion.START)
                    checks = Checks(check.outcome is Outcome.PASSED, check.findings)
                    if facts.policy.enforcement is not Enforcement.OBSERVE and checks.only_held:
                        in_use = record.hygiene is Hygiene.IN_USE
                        if not in_use and await controller.occupancy.void_certificate(record):
                            return None
                        checks = replace(checks, ghost=await controller.occupancy.held_by_no_process())
                    facts = replace(facts, checks=checks)
        if decision.verdict is not HandoverVerdict.GRANT:
            return await self._not_granted(decision, facts, start)
        assert check is not None  # nothing is granted unchecked
        over = (grant.sequence for grant, where in others if self._is_closed(grant, where))
        return Prepared(
            record.version,
            None if start.following is None else controller.pods.as_it_starts(start.following, controller.id),
            start.certain is not None,
            facts.kind,
            decision,
            check,
            dependencies.clock.monotonic(),
            allocations,
            facts.policy,
            shares=share,
            over=frozenset(over if decision.basis is Basis.SHARED else ()),
        )

    def _start_by(self, reading: Reading) -> _Start:
        device, share = self._requested.controller.id, self._requested.shares
        certain = reading.assignment_of(device, share, resource=self._call.resource)
        following = certain or reading.hint_of(device, share)
        # No list names an ordinary init container. The checkpoint does, and beside a list that is trusted and that it bears
        # out it names active pods only: enough to know the starting pod's own earlier use from that of others.
        sure = reading.trust is Trust.TRUSTED and reading.init_containers_known
        starting = certain or (following if sure else None)
        return _Start(
            certain,
            following,
            None if starting is None else starting.pod,
            reading.second_owner(device, self._call.own(), None if following is None else following.pod),
        )

    def _trouble(self, reading: Reading, start: _Start) -> ErrorCode | None:
        """What is wrong with the assignment, by the kubelet's word."""
        requested, following = self._requested, start.following
        self._asked_for = self._asked_for or (following,)
        # Other pods are given other shares all the while; the whole of a device only when it is this pod's no longer.
        allocated = not requested.shares and requested.controller.state.allocations != self._allocations
        if allocated or self._asked_for != (following,):
            return ErrorCode.REASSIGNED
        if start.second_owner is not None:
            return ErrorCode.FOREIGN_ASSIGNMENT
        nobodys = following is None and reading.trust is Trust.TRUSTED
        if nobodys and not reading.having(requested.controller.id, requested.shares):
            return ErrorCode.UNASSIGNED
        return None

    async def _not_granted(self, decision: Decision, facts: HandoverFacts, start: _Start) -> ScrubberError | None:
        """Do what ``decision`` says; the refusal to give if time is up now, or None to decide again at once."""
        controller, device = self._requested.controller, self._requested.controller.id
        findings = () if facts.checks is None else facts.checks.findings
        match decision.verdict, decision.code:
            case HandoverVerdict.RECORD, _:
                await controller.health.report(findings)
                return None
            case HandoverVerdict.JOIN, _:
                return await self._join(controller, start.own)
            case HandoverVerdict.SCRUB, _:
                return await self._scrub(controller, facts.record, start.own)
            case HandoverVerdict.WAIT, ErrorCode.FOREIGN_ASSIGNMENT:
                assert start.second_owner is not None  # that is what the code says
                return refusals.foreign_assignment(device, start.second_owner, self._call.own())
            case HandoverVerdict.WAIT, ErrorCode.SHARING:
                await self._note_unauthorized(controller, findings)
                return refusals.cannot_be_shared(device, decision.reason)
            case HandoverVerdict.WAIT, ErrorCode.HELD:
                return await controller.occupancy.held_by_own_pod(start.own) or refusals.held(
                    device, controller.state.record.state
                )
            case HandoverVerdict.WAIT, _:
                return await controller.scrubs.blocker(start.own)
            case _, ErrorCode.REASSIGNED:
                raise refusals.reassigned(device)
            case _, ErrorCode.UNASSIGNED:
                raise refusals.unassigned(device)
            case _:
                await self._let_it_recover(controller, facts.record, start.own)
                raise refusals.quarantined(device, decision.reason, public=controller.view.refusal)

    def _is_closed(self, grant: Grant, where: Standing) -> bool:
        """Whether the pod of ``grant`` is over and proved to be the kubelet's no longer: there is nothing left to wait for."""
        return (
            where.state is PodState.OVER and grant.pod is not None and self._requested.controller.pods.absent(grant.pod)
        )

    async def _let_it_recover(self, controller: DeviceController, record: DeviceRecord, asking: Pod | None) -> None:
        """Let the device heal under the pod that waits for it, if nothing else of an earlier grant lives."""
        if asking is None or asking.uid is None or controller.state.job is not None:
            return
        try:
            living = any(where.state is PodState.LIVING for _, where in await controller.occupancy.standings(asking))
        except DeviceFault:
            return  # it is out of service for that very reason
        if not living:
            controller.state.note_waiting(asking)
            await controller.occupancy.release(record)

    async def _note_unauthorized(self, controller: DeviceController, findings: Sequence[Finding]) -> None:
        """Record that somebody uses a shared device without a grant, if the checks met one."""
        stranger = next((finding for finding in findings if finding.code == FindingCode.UNKNOWN_HOLDER), None)
        if stranger is not None and not controller.state.record.tainted:
            fields = {"use": Use.STRANGER.value, "sentence": stranger.sentence}
            now = self._dependencies.clock.wall()
            await controller.occupancy.void_for_unauthorized_use(
                Event("use.ungranted", now, controller.id, fields=fields)
            )

    async def _join(self, controller: DeviceController, asking: Pod | None) -> ScrubberError | None:
        job = controller.state.job
        left = self._call.deadline - self._dependencies.clock.monotonic()
        if job is None or left <= 0:
            return _being_scrubbed(controller)
        try:
            async with self._dependencies.clock.timeout(left):
                with self._dependencies.tracer.span("wait", scrub_id=job.id):
                    finished = await job.wait()
        except TimeoutError:
            return _being_scrubbed(controller)
        if finished.outcome in (Outcome.PASSED, Outcome.FAILED):
            return None
        return await controller.scrubs.blocker(asking) or _being_scrubbed(controller)

    async def _scrub(
        self, controller: DeviceController, record: DeviceRecord, asking: Pod | None
    ) -> ScrubberError | None:
        """Start the slow path, unless it would get nowhere, and wait for it."""
        obstacle = await controller.scrubs.blocker(asking)
        if obstacle is not None:
            return obstacle
        await controller.occupancy.release(record)
        try:
            await controller.scrubs.start(Occasion.START, asking=asking)
        except NotReady as granted_meanwhile:
            return granted_meanwhile
        return await self._join(controller, asking)


def _being_scrubbed(controller: DeviceController) -> NotReady:
    return refusals.being_scrubbed(
        controller.id, controller.state.record.state, None if controller.state.job is None else controller.state.job.id
    )
