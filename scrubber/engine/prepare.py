"""Prepares one device for a start: gathers facts, acts on :func:`scrubber.domain.handover.decide`, and waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from scrubber.domain.assignment import Assignment, Claim, KubeletReading, Pod, Trust
from scrubber.domain.claims import claim_kind, claim_problem
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import DeviceFault, NotReady, ScrubberError
from scrubber.domain.evidence import Finding, FindingCode, Outcome, ScrubRecord, ScrubTrigger, Step
from scrubber.domain.handover import (
    FastPathChecks,
    HandoverDecision,
    HandoverFacts,
    HandoverVerdict,
    MissingFact,
    decide,
)
from scrubber.domain.handover_kind import Basis, HandOverKind, classify_hand_over
from scrubber.domain.health.signals import fault_finding
from scrubber.domain.pods import PodLiveness, PodState
from scrubber.domain.policy import Enforcement, Policy
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.states import Hygiene
from scrubber.domain.usage import UseKind
from scrubber.engine import refusals
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.shared_start import check_shared_use, granted_pod, other_grants
from scrubber.ports.record import Event
from scrubber.ports.runtime import Span

__all__ = ["DevicePreparation", "PreparedDevice", "RequestedDevice", "ResolvedCall"]

_POLL_FIRST, _POLL_LAST = 0.02, 0.25


@dataclass(frozen=True, slots=True)
class RequestedDevice:
    """A requested device.

    Attributes:
        ids: the kubelet's IDs that requested it.
        shares: the IDs to search in the kubelet's lists; empty where a pod always has all of the device.
    """

    controller: DeviceController
    ids: frozenset[str]
    shares: frozenset[str]


async def _keep(claim: Claim) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedCall:
    """A hand-over call whose IDs have been resolved to devices.

    Attributes:
        devices: ordered by ID, which is the order in which locks are taken.
        resource: the kubelet's name of the requested resource, or of a claim's driver; empty where the caller did not give
            it.
        own_resources: returns the resources under which our plugins advertise devices, including this one; for a claim,
            its driver.
        deadline: monotonic seconds.
        claim: the claim to be prepared; None for the start of a container.
        claim_is_starting: whether the kubelet requests the claim for a pod that has no sandbox yet, or only a sandbox.
        actor: who requests the hand-over, for the audit log.
        plugin_resources: returns the resources under which a device plugin advertises a device, given by its ID.
        extended_resources: for which the scheduler created the claim.
        node_resources: returns the resources under which a device plugin advertises any device of the node.
        release_abandoned: releases a claim for which a device is prepared if it is abandoned; returns whether it was.
    """

    devices: tuple[RequestedDevice, ...]
    resource: str
    own_resources: Callable[[], frozenset[str]]
    deadline: float
    claim: Claim | None = None
    claim_is_starting: bool = True
    actor: str = "plugin"
    plugin_resources: Callable[[str], frozenset[str]] = lambda _: frozenset()
    extended_resources: frozenset[str] = frozenset()
    node_resources: Callable[[], frozenset[str]] = frozenset
    release_abandoned: Callable[[Claim], Awaitable[bool]] = _keep

    @property
    def starting_claim(self) -> Claim | None:
        """The claim, if one of its pods is about to start by this call: of that pod, the sandbox does not count."""
        return self.claim if self.claim_is_starting else None


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """What the grant of one device would rest on, as of a version of its record."""

    version: int
    assignment: Assignment | None
    is_certain: bool
    kind: HandOverKind
    decision: HandoverDecision
    check: ScrubRecord
    checked_at: float
    allocations: int
    policy: Policy
    shares: frozenset[str] = frozenset()
    closed_grants: frozenset[int] = frozenset()

    @property
    def pod(self) -> Pod | None:
        """The pod that starts, where it is certain."""
        return None if self.assignment is None else self.assignment.pod


@dataclass(frozen=True, slots=True)
class _Start:
    """The pod and container that start, according to one reading of the kubelet.

    Attributes:
        certain: the assignment, where the kubelet's sources agree.
        following: that assignment, or the one that a single source reports.
        own: the pod, where it is certain enough to distinguish its own earlier use from that of others.
        second_owner: the assignment of the device by another plugin or driver.
        uncertainty: why ``own`` is not known with its UID; empty where it is, and for a claim.
    """

    certain: Assignment | None
    following: Assignment | None
    own: Pod | None
    second_owner: Assignment | None
    uncertainty: str = ""


# See docs/decisions/0004-a-start-must-match-the-assignment.md.
class DevicePreparation:
    """Prepares one device of one call, for as long as the call lasts.

    Args:
        check_pods: lets the pods of the node be checked now.
    """

    def __init__(
        self,
        requested: RequestedDevice,
        call: ResolvedCall,
        *,
        dependencies: Dependencies,
        check_pods: Callable[[], None],
    ) -> None:
        self._requested = requested
        self._check_pods = check_pods
        self._call = call
        self._dependencies = dependencies
        self._requested_assignments: tuple[Assignment | None, ...] = ()
        self._allocations = requested.controller.state.allocations
        self._next_end = requested.controller.occupancy.next_end
        self._ended = False

    async def wait_until_prepared(self) -> PreparedDevice:
        """Return the device as soon as it is prepared.

        Raises:
            Quarantined, NotReady, LedgerFailure: it was not prepared before the deadline, or cannot be.
        """
        with self._dependencies.tracer.span("device", device=self._requested.controller.id, tenant=None) as span:
            try:
                return await self._prepare(span)
            except asyncio.CancelledError:
                if self._ended or self._next_end.is_set():
                    self._check_pods()  # the end was left to this start
                raise

    async def _prepare(self, span: Span) -> PreparedDevice:
        pause, controller, clock = _POLL_FIRST, self._requested.controller, self._dependencies.clock
        while True:
            self._next_end = controller.occupancy.next_end
            reading = await controller.pods.refresh()
            await controller.occupancy.void_after_gap()
            try:
                outcome = await self._decide_once(reading, span)
            except DeviceFault as fault:  # a device that cannot be inspected is quarantined
                await controller.health.report([fault_finding(Step.HOLDERS, fault)])
                outcome = refusals.device_unreadable(controller.id, fault)
            except ScrubberError:
                if self._ended:
                    await self._release_unused()
                raise
            if isinstance(outcome, PreparedDevice):
                span.set_attributes(
                    kind=outcome.kind.value, exception=outcome.decision.basis and outcome.decision.basis.exception
                )
                return outcome
            if self._ended and outcome is not None:
                await self._release_unused()
            left = self._call.deadline - clock.monotonic()
            if left <= 0:
                raise outcome or _being_scrubbed(controller)
            if outcome is not None:
                self._ended = await controller.occupancy.wait_for_end(self._next_end, min(pause, left))
                pause = _POLL_FIRST if self._ended else min(_POLL_LAST, pause * 2)

    async def _release_unused(self) -> None:
        """Release the device if its pods have ended: the end was left to this start, which is refused or waits on."""
        with suppress(ScrubberError):  # detected again by the next check of the pods
            await self._requested.controller.occupancy.release_if_over()

    async def _decide_once(self, reading: KubeletReading, span: Span) -> PreparedDevice | ScrubberError | None:
        """Run one round.

        Returns the prepared device, the refusal to raise at the deadline, or None to run again at once.
        """
        requested, dependencies = self._requested, self._dependencies
        controller, record, share = requested.controller, requested.controller.state.record, requested.shares
        start, claim = self._resolve_start(reading), self._call.claim
        tenant = start.following.pod.tenant if start.following is not None else None if claim is None else claim.tenant
        span.set_attributes(tenant=tenant)
        allocations = controller.state.allocations
        facts = HandoverFacts(
            record=record,
            kind=classify_hand_over(
                record.previous_assignment,
                start.certain,
                allocated_since=controller.state.allocated_since,
                container_count=reading.container_count(controller.id, share),
                init_containers_known=reading.init_containers_known,
            )
            if claim is None
            else claim_kind(record, claim.tenant),
            policy=controller.state.policy,
            identity=dependencies.identity.for_device(controller.state.device),
            last_pod_ran=record.last_grant is not None and controller.pods.has_run(record.last_grant),
            assignment_problem=self._assignment_problem(reading, start)
            if claim is None
            else self._claim_problem(start),
            is_claim=claim is not None,
            is_unmeasured=bool(controller.state.device.claimed_by),
            is_share=bool(share),
            starting_pod=start.own,
        )
        check: ScrubRecord | None = None
        others: list[tuple[Grant, PodLiveness]] = []
        while (decision := decide(facts)).verdict is HandoverVerdict.GATHER:
            match decision.missing:
                case MissingFact.GRANTED_PODS:
                    others = await other_grants(controller, start.own, share, reading)
                    facts = replace(facts, granted_pods=tuple(granted_pod(*each) for each in others))
                case MissingFact.EARLIER_PODS:
                    asking = None if start.following is None else start.following.pod
                    # Other containers of the starting pod may be alive.
                    mine = None if asking is None or asking.uid is None else asking
                    earlier = await controller.occupancy.pod_liveness(
                        asking, excluded_pod=mine, claim=self._call.starting_claim
                    )
                    facts = replace(facts, earlier_pods=frozenset([where.state for _, where in earlier]))
                case _:
                    if decision.basis is Basis.SHARED:
                        check = await check_shared_use(controller, decision.sharing_pods, dependencies)
                    else:
                        check = await controller.scrubs.check(ScrubTrigger.CONTAINER_START)
                    checks = FastPathChecks(check.outcome is Outcome.PASSED, check.findings)
                    if facts.policy.enforcement is not Enforcement.OBSERVE and checks.is_only_held:
                        in_use = record.hygiene is Hygiene.IN_USE
                        if not in_use and await controller.occupancy.void_certificate(record):
                            return None
                        checks = replace(
                            checks, held_without_process=await controller.occupancy.is_held_without_process()
                        )
                    facts = replace(facts, checks=checks)
        if decision.verdict is not HandoverVerdict.GRANT:
            refusal = await self._not_granted(decision, facts, start)
            if refusal is not None and refusal.code == ErrorCode.EARLIER_POD_RUNNING and start.uncertainty:
                return refusals.start_of_unknown_pod(refusal, start.uncertainty)
            return refusal
        assert check is not None  # nothing is granted unchecked
        over = (grant.sequence for grant, where in others if self._is_closed(grant, where))
        return PreparedDevice(
            record.version,
            None
            if start.following is None
            else controller.pods.with_starting_container(start.following, controller.id),
            claim is not None or start.certain is not None,
            facts.kind,
            decision,
            check,
            dependencies.clock.monotonic(),
            allocations,
            facts.policy,
            shares=share,
            closed_grants=frozenset(over if decision.basis is Basis.SHARED else ()),
        )

    def _resolve_start(self, reading: KubeletReading) -> _Start:
        device, share = self._requested.controller.id, self._requested.shares
        if self._call.claim is not None:  # the kubelet lists its pods only once it is prepared
            return _Start(None, None, None, reading.second_owner(device, self._call.own_resources(), None))
        certain = reading.assignment_of(device, share, resource=self._call.resource)
        following = certain or reading.checkpoint_assignment(device, share)
        # PodResources never lists an ordinary init container; the checkpoint does. Beside a trusted list that it
        # confirms, the checkpoint names active pods only: enough to distinguish the starting pod's own earlier use from
        # that of others.
        sure = reading.trust is Trust.TRUSTED and reading.init_containers_known
        starting = certain or (following if sure else None)
        is_known = starting is not None and starting.pod.uid is not None
        return _Start(
            certain,
            following,
            None if starting is None else starting.pod,
            reading.second_owner(device, self._call.own_resources(), None if following is None else following.pod),
            "" if is_known else reading.uncertainty_of(device, share),
        )

    def _assignment_problem(self, reading: KubeletReading, start: _Start) -> ErrorCode | None:
        """What is wrong with the assignment according to the kubelet; None when nothing is."""
        requested, following = self._requested, start.following
        self._requested_assignments = self._requested_assignments or (following,)
        # Shares are allocated to other pods all the time; a whole device only when it is no longer assigned to this
        # pod.
        allocated = not requested.shares and requested.controller.state.allocations != self._allocations
        if allocated or self._requested_assignments != (following,):
            return ErrorCode.REASSIGNED
        if start.second_owner is not None:
            return ErrorCode.ASSIGNED_BY_ANOTHER_PLUGIN
        if requested.controller.state.record.prepared_claims:
            return ErrorCode.PREPARED_FOR_CLAIM
        nobodys = following is None and reading.trust is Trust.TRUSTED
        if nobodys and not reading.listed_assignments(requested.controller.id, requested.shares):
            return ErrorCode.UNASSIGNED
        return None

    def _claim_problem(self, start: _Start) -> ErrorCode | None:
        """What keeps the device from being prepared for the claim of the call; None when nothing does."""
        controller, claim = self._requested.controller, self._call.claim
        assert claim is not None
        problem = claim_problem(
            claim,
            controller.state.record,
            plugin_resources=self._call.plugin_resources(controller.id),
            sharing=controller.state.policy.sharing,
            extended_resources=self._call.extended_resources,
            node_resources=self._call.node_resources(),
        )
        return problem or (None if start.second_owner is None else ErrorCode.ASSIGNED_BY_ANOTHER_PLUGIN)

    async def _not_granted(
        self, decision: HandoverDecision, facts: HandoverFacts, start: _Start
    ) -> ScrubberError | None:
        """Act on ``decision``; return the refusal to raise at the deadline, or None to decide again at once."""
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
            case HandoverVerdict.WAIT, ErrorCode.ASSIGNED_BY_ANOTHER_PLUGIN:
                assert start.second_owner is not None  # the code implies it
                return refusals.assigned_by_another_plugin(device, start.second_owner, self._call.own_resources())
            case HandoverVerdict.WAIT, ErrorCode.PREPARED_FOR_CLAIM:
                prepared = facts.record.prepared_claims[0]
                if await self._call.release_abandoned(prepared):
                    raise refusals.claim_abandoned(prepared)
                return refusals.prepared_for_claim(device, prepared)
            case HandoverVerdict.WAIT, ErrorCode.SHARING_NOT_ALLOWED:
                await self._note_unauthorized(controller, findings)
                return refusals.cannot_be_shared(device, decision.reason)
            case HandoverVerdict.WAIT, ErrorCode.DEVICE_BUSY:
                return await controller.occupancy.own_pod_refusal(start.own) or refusals.device_held(
                    device, controller.state.record.state
                )
            case HandoverVerdict.WAIT, _:
                return await controller.scrubs.blocker(start.own, self._call.starting_claim)
            case _, ErrorCode.REASSIGNED:
                raise refusals.reassigned(device)
            case _, ErrorCode.UNASSIGNED:
                raise refusals.unassigned(device)
            case _, ErrorCode.ADVERTISED_BY_PLUGIN:
                raise refusals.advertised_by_plugin(device, self._call.plugin_resources(device))
            case _, ErrorCode.RESOURCE_OF_PLUGIN:
                raise refusals.resource_of_plugin(self._call.extended_resources & self._call.node_resources())
            case _, ErrorCode.CLAIM_SHARED:
                assert self._call.claim is not None  # the code implies it
                raise refusals.claim_may_not_be_shared(device, len(self._call.claim.pods))
            case _:
                await self._allow_recovery(controller, facts.record, start.own)
                raise refusals.quarantined(device, decision.reason, public_message=controller.view.refusal_message)

    def _is_closed(self, grant: Grant, liveness: PodLiveness) -> bool:
        """Whether the pod of ``grant`` has ended, or is over and absent from the kubelet's lists: nothing to wait for."""
        absent = grant.pod is not None and self._requested.controller.pods.is_absent(grant.pod)
        return liveness.state is PodState.OVER and (liveness.ended or absent)

    async def _allow_recovery(
        self, controller: DeviceController, record: DeviceRecord, starting_pod: Pod | None
    ) -> None:
        """Let the device recover while the pod waits for it, if no other pod of an earlier grant is alive."""
        if starting_pod is None or starting_pod.uid is None or controller.state.job is not None:
            return
        try:
            living = any(
                where.state is PodState.ALIVE for _, where in await controller.occupancy.pod_liveness(starting_pod)
            )
        except DeviceFault:
            return  # the device is out of service for that very reason
        if not living:
            controller.state.note_waiting(starting_pod)
            await controller.occupancy.release(record)

    async def _note_unauthorized(self, controller: DeviceController, findings: Sequence[Finding]) -> None:
        """Record unauthorized use of a shared device, if the checks found any."""
        unknown_holder = next((finding for finding in findings if finding.code == FindingCode.UNKNOWN_HOLDER), None)
        if unknown_holder is not None and not controller.state.record.contaminated:
            fields = {"use": UseKind.UNAUTHORIZED.value, "message": unknown_holder.message}
            now = self._dependencies.clock.wall()
            await controller.occupancy.void_for_unauthorized_use(
                Event("unauthorized.use.detected", now, controller.id, fields=fields)
            )

    async def _join(self, controller: DeviceController, starting_pod: Pod | None) -> ScrubberError | None:
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
        return await controller.scrubs.blocker(starting_pod, self._call.starting_claim) or _being_scrubbed(controller)

    async def _scrub(
        self, controller: DeviceController, record: DeviceRecord, starting_pod: Pod | None
    ) -> ScrubberError | None:
        """Start the slow path, unless it would be blocked, and wait for it."""
        obstacle = await controller.scrubs.blocker(starting_pod, self._call.starting_claim)
        if obstacle is not None:
            return obstacle
        await controller.occupancy.release(record)
        try:
            await controller.scrubs.start(
                ScrubTrigger.CONTAINER_START, starting_pod=starting_pod, claim=self._call.starting_claim
            )
        except NotReady as granted_meanwhile:
            return granted_meanwhile
        return await self._join(controller, starting_pod)


def _being_scrubbed(controller: DeviceController) -> NotReady:
    job = controller.state.job
    state = controller.state.record.state
    return refusals.being_scrubbed(
        controller.id, state, None if job is None else job.id, "" if job is None else job.waits_for
    )
