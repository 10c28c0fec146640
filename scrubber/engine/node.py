"""The node: grants sets of devices all-or-none, and publishes all devices in one versioned view."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scrubber.domain.assignment import KubeletReading, Pod, Trust
from scrubber.domain.errors import ScrubberError
from scrubber.domain.handover_kind import UNCONDITIONAL_BASES, Basis
from scrubber.domain.pods import PodState
from scrubber.domain.policy import EnvvarInjection
from scrubber.domain.record import Grant
from scrubber.domain.resource_mapping import MappedDevice
from scrubber.domain.states import Hygiene
from scrubber.engine import refusals
from scrubber.engine.claims import NodeClaims
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.devices import Devices
from scrubber.engine.grant import GrantRequest
from scrubber.engine.jobs import NodeJobs
from scrubber.engine.notices import RefusedStarts, out_of_service_notices
from scrubber.engine.operator_actions import OperatorActions
from scrubber.engine.pods import PodTracker
from scrubber.engine.prepare import RequestedDevice, ResolvedCall
from scrubber.engine.publisher import Publisher
from scrubber.engine.resource_ids import Announcer, ResourceIds
from scrubber.engine.views import CertificateStatus, CertificateView, GrantedDevice, HandOverCall, NodeView, ServiceView
from scrubber.engine.work_gate import WorkGate
from scrubber.engine.yielding import YieldControl, withheld_views
from scrubber.ports.record import AuditLogPage, Event, HistoryEntry, HistoryQuery
from scrubber.ports.runtime import Span

__all__ = ["Node"]


class Node:
    """Implements :class:`scrubber.engine.views.Service`.

    Args:
        service_view: returns the view of the service; called each time because the policy and the ledger's health can
            change.
        epoch: changes with every start of the service.
        yields: the requests to yield the node; while there is one, nothing is handed over.

    Attributes:
        pauses: the pause of the node's agents.
        pods: tracks the pods that have, or had, a device.
        devices: the devices of the node.
        actions: the operator actions.
        claims: the resource claims.
        work_gate: decides when devices in a confidential-computing mode accept work.
        pod_check_requested: set to check the pods now rather than in the next round.
        waiting_starts: number of starts that wait for an answer now.
        kubelet_restarts: number of detected kubelet restarts.
    """

    def __init__(
        self, *, dependencies: Dependencies, service_view: Callable[[], ServiceView], epoch: str, yields: YieldControl
    ) -> None:
        self._dependencies = dependencies
        self._info = service_view
        self._publisher = Publisher(epoch)
        self._ready = False
        self.yields = yields
        self.pauses = dependencies.agent_pauses
        self._undelivered: dict[tuple[RequestedDevice, ...], _Undelivered] = {}
        self._ids = ResourceIds()
        self._refusals = RefusedStarts(dependencies.clock)
        self.pods = PodTracker(
            assignments=dependencies.assignments,
            containers=dependencies.containers,
            pod_cgroups=dependencies.pod_cgroups,
            clock=dependencies.clock,
        )
        self.devices = Devices(
            dependencies=dependencies, pods=self.pods, resources=self._ids.resources_of, on_change=self._publish
        )
        self.work_gate = WorkGate(dependencies, self.devices.records)
        self.actions = OperatorActions(devices=self.devices, dependencies=dependencies)
        self.pod_check_requested = asyncio.Event()
        self.claims = NodeClaims(
            devices=self.devices,
            pods=self.pods,
            dependencies=dependencies,
            require_service=self._require_service,
            is_yielded=lambda: yields.record.is_yielded,
            hand_over=self._hand_over_claim,
            plugin_resources=self._ids.advertised_as,
            node_resources=lambda: self._ids.advertised,
            view=self.view,
            wait_for_change=self.wait_for_change,
            check_pods=self.pod_check_requested.set,
        )
        self.jobs = NodeJobs(
            claims=self.claims,
            containers=dependencies.containers,
            pod_cgroups=dependencies.pod_cgroups,
            view=self.view,
        )
        self.waiting_starts = 0
        self.kubelet_restarts = 0

    @property
    def own_resources(self) -> frozenset[str]:
        """Resources under which our plugins advertise devices; empty before the first announcement or request."""
        return self._ids.own_resources(grant for record in self.devices.records() for grant in record.open_grants)

    def assigners(self) -> dict[str, frozenset[str]]:
        """Return, for each device, the plugins' resources and the DRA drivers that rightly assign it; may be empty."""
        own = self.own_resources
        return {record.device: self._ids.assigners_of(record, own) for record in self.devices.records()}

    def resolve_id(self, resource: str, kubelet_id: str) -> MappedDevice | None:
        """Return the managed device behind ``kubelet_id`` of ``resource``, and whether it is a share; else None."""
        return self._ids.resolve_one(resource, kubelet_id, self.devices.known_ids)

    def on_policy_change(self) -> None:
        """Check all devices again after a policy change: certificates of the old policy must be renewed."""
        for controller in self.devices.controllers.values():
            controller.state.wake.set()
        self.devices.eraser_pool.assign()
        self._publish()

    def mark_ready(self) -> None:
        """Publish that every device was inspected once."""
        self._ready = True
        self._publish()

    def publish_yield(self) -> None:
        """Publish that the node is yielded: from now on every device is withheld."""
        self._publish()

    def update_notices(self, reading: KubeletReading) -> None:
        """Forget pods that no longer exist, and publish notices that have become due."""
        self._refusals.prune(reading)
        self._publish()

    def _publish(self) -> None:
        self.devices.retry_removals()
        self.work_gate.notify()
        info, views = self._info(), self.devices.views()
        views = withheld_views(views) if self.yields.record.is_yielded else views
        self._publisher.publish(
            views,
            ready=self._ready,
            ledger_status=info.ledger_status,
            refuses_envvar=info.policy.injection.envvar is EnvvarInjection.REFUSE,
            notices=(*self._refusals.notices(info.policy.stuck_pods), *out_of_service_notices(views)),
            yielded=self.yields.message,
            agent_pause=self.pauses.pause,
            driver_version=info.identity.driver,
        )

    async def follow_pauses(self) -> None:
        """Publish every change of the pause of the node's agents. Runs as long as the node."""
        while True:
            self._publish()
            await self.pauses.wait_for_change()

    # -- queries ---------------------------------------------------------------------------------------------------

    def view(self) -> NodeView:
        return self._publisher.view

    async def wait_for_change(self, since: int) -> NodeView:
        return await self._publisher.wait_for_change(since)

    def service_view(self) -> ServiceView:
        kubelet = _kubelet_status(self.pods.reading)
        return replace(
            self._info(),
            breaker=self.devices.breaker.state.open,
            kubelet_status=kubelet,
            yields=self.yields.record.yields,
            agent_pause=self.pauses.pause,
            agent_pause_message=self.pauses.message,
        )

    async def certificate(self, id: str) -> CertificateView:
        found = await self._dependencies.certificates.certificate(id)
        if found is None:
            raise refusals.no_certificate(id)
        if found.next_grant is not None:
            return CertificateView(found, CertificateStatus.CONSUMED)
        current = {record.certificate.id for record in self.devices.records() if record.certificate is not None}
        return CertificateView(found, CertificateStatus.UNUSED if id in current else CertificateStatus.VOIDED)

    def audit(self, after: int) -> AsyncIterator[AuditLogPage]:
        return self._dependencies.audit_log.pages(after)

    async def history(self, query: HistoryQuery) -> Sequence[HistoryEntry]:
        return await self._dependencies.ledger.history(query)

    # -- hand-overs ------------------------------------------------------------------------------------------------

    async def announce(self, resource: str, mapping: Mapping[str, str], announcer: Announcer | None = None) -> None:
        self._ids.announce(resource, mapping, self.devices.known_ids, announcer)
        if self._dependencies.policy().overrides:
            self.on_policy_change()

    async def reserve(self, devices: Sequence[str], resource: str = "") -> tuple[str, ...]:
        with self._dependencies.tracer.span("reserve", resource=resource, devices=len(devices)):
            self._publisher.view.require_ready()
            controllers = [each.controller for each in self._requested(resource, devices)]
            for controller in controllers:
                if controller.refuses_allocation:
                    raise refusals.quarantined(
                        controller.id, "out of service", public_message=controller.view.refusal_message
                    )
            for controller in controllers:
                controller.state.count_allocation()
            self.pod_check_requested.set()
            return tuple(controller.state.job.id for controller in controllers if controller.state.job is not None)

    async def hand_over(self, call: HandOverCall) -> tuple[GrantedDevice, ...]:
        clock = self._dependencies.clock
        limit = self._dependencies.policy().limits.hand_over
        wait = limit if call.wait_seconds is None else max(0.0, min(limit, call.wait_seconds))
        deadline = clock.monotonic() + wait

        def resolve() -> ResolvedCall:
            return ResolvedCall(
                devices=self._requested(call.resource, call.devices),
                resource=call.resource,
                own_resources=lambda: self.own_resources | ({call.resource} - {""}),
                deadline=deadline,
            )

        async def grant(resolved: ResolvedCall, span: Span) -> tuple[GrantedDevice, ...]:
            for each in resolved.devices:
                if each.ids & call.unreported_allocations:
                    each.controller.state.count_allocation()
            undelivered = self._undelivered.pop(resolved.devices, None)
            if undelivered is not None and await self._still_holds(resolved, undelivered):
                return undelivered.answer
            return await self._grant(resolved, span)

        return await self._answer(resolve, grant, call.resource, call.devices)

    async def _hand_over_claim(self, call: ResolvedCall) -> tuple[GrantedDevice, ...]:
        devices = tuple(each.controller.id for each in call.devices)
        return await self._answer(lambda: call, self._grant, call.resource, devices)

    async def _answer(
        self,
        resolve: Callable[[], ResolvedCall],
        grant: Callable[[ResolvedCall, Span], Awaitable[tuple[GrantedDevice, ...]]],
        resource: str,
        devices: Sequence[str],
    ) -> tuple[GrantedDevice, ...]:
        """Return the result of ``grant`` for the call that ``resolve`` returns, and record refusals."""
        dependencies, clock = self._dependencies, self._dependencies.clock
        only = devices[0] if len(devices) == 1 else None
        with dependencies.tracer.span("hand-over", resource=resource, devices=len(devices)) as span:
            began = clock.monotonic()
            self.waiting_starts += 1
            try:
                self._require_service()
                resolved = resolve()
                only = resolved.devices[0].controller.id if len(resolved.devices) == 1 else None
                granted = await grant(resolved, span)
                if self._refusals.record_grant(
                    self._starting_pods(resolved), [each.controller.id for each in resolved.devices]
                ):
                    self._publish()
            except ScrubberError as refusal:
                span.set_attributes(refused=refusal.code)
                self._publish()
                fields: dict[str, str | int | float | bool | None] = {
                    "code": refusal.code,
                    "message": str(refusal),
                    "duration_seconds": round(clock.monotonic() - began, 6),
                }
                dependencies.journal.record([Event("handover.refused", clock.wall(), only, fields=fields)])
                raise
            finally:
                self.waiting_starts -= 1
            for name in ("kind", "path"):
                span.set_attributes(**{name: " ".join(sorted({getattr(each, name).value for each in granted}))})
            return granted

    async def _grant(self, call: ResolvedCall, span: Span) -> tuple[GrantedDevice, ...]:
        self.devices.track_pods()
        request = GrantRequest(
            call,
            dependencies=self._dependencies,
            pods=self.pods,
            earlier_grants=self.devices.open_grants,
            check_pods=self.pod_check_requested.set,
            require_service=self._require_service,
            work_gate=self.work_gate,
        )
        try:
            return await request.run()
        except asyncio.CancelledError:
            if request.result is not None and call.claim is None:
                self._undelivered[call.devices] = _Undelivered(request.result, request.record_versions)
            raise
        except ScrubberError as refusal:
            asking = self._starting_pods(call)
            span.set_attributes(tenant=next(iter(asking)).tenant if asking else None)
            self._refusals.record_refusal(asking, [each.controller.id for each in call.devices], refusal)
            raise
        finally:
            self.devices.track_pods()

    def _starting_pods(self, call: ResolvedCall) -> set[Pod]:
        """Return the starting pod as a set; empty unless the kubelet's list is certain about it. All pods of a claim."""
        if call.claim is not None:
            return set() if call.claim.manager is not None else set(call.claim.pods)
        reading = self.pods.reading
        assignments = [
            reading.assignment_of(each.controller.id, each.shares, resource=call.resource) for each in call.devices
        ]
        pods = {None if each is None else each.pod for each in assignments}
        return {pod for pod in pods if pod is not None and pod.uid is not None} if len(pods) == 1 else set()

    async def _still_holds(self, call: ResolvedCall, undelivered: _Undelivered) -> bool:
        """Return whether the answer of an earlier, cancelled call is valid for ``call``.

        It is when the same pod and container start again.

        The caller could not answer the kubelet, so nothing was started on this grant.
        """
        answer = undelivered.answer
        if any(granted.basis in UNCONDITIONAL_BASES for granted in answer):
            return False
        reading: KubeletReading = await self.pods.refresh()
        for each in call.devices:
            await each.controller.occupancy.void_after_gap()
        for each, granted, version in zip(call.devices, answer, undelivered.versions, strict=True):
            controller, last = each.controller, each.controller.state.record.last_grant
            # The earlier answer does not reflect what happened to the device since, for example unauthorized use.
            current = controller.state.record.version == version and not controller.occupancy.coverage.has_gap
            current = current and last is not None and last.sequence == granted.grant
            current = current and controller.state.record.hygiene is Hygiene.IN_USE
            current = current and controller.state.record.advertised
            device, shares = controller.id, each.shares
            following = reading.assignment_of(device, shares) or reading.checkpoint_assignment(device, shares)
            if (
                last is None
                or not current
                or controller.state.allocated_since
                or last.assignment is None
                or following is None
            ):
                return False
            following = self.pods.with_starting_container(following, device)
            if following != last.assignment or following.pod.uid is None or await _used_since(controller, last):
                return False
        return True

    def _require_service(self) -> None:
        """Raise unless devices can be handed over at all.

        Raises:
            NotReady: the service is starting, or the node is yielded.
        """
        self._publisher.view.require_ready()
        if self.yields.record.is_yielded:
            raise refusals.node_yielded(self.yields.message)

    def _requested(self, resource: str, ids: Sequence[str]) -> tuple[RequestedDevice, ...]:
        """Return the meaning of ``ids`` of ``resource``, one entry per device, ordered by device ID.

        Raises:
            InvalidRequest: unknown, duplicate or no IDs, or a whole device together with a share of it.
        """
        controllers = self.devices.controllers
        found = self._ids.resolve(resource, ids, controllers.keys())
        return tuple(
            RequestedDevice(
                controllers[device],
                frozenset(meanings),
                shares=frozenset(meanings if all(each.is_share for each in meanings.values()) else ()),
            )
            for device, meanings in found.items()
        )


# See docs/decisions/0003-one-transaction-per-decision.md.
@dataclass(frozen=True, slots=True)
class _Undelivered:
    """An undelivered answer, and the version of each device's record that its grant created."""

    answer: tuple[GrantedDevice, ...]
    versions: tuple[int, ...]


async def _used_since(controller: DeviceController, grant: Grant) -> bool:
    """Return whether something may have been started on ``grant``, the last one."""
    if grant.basis is not Basis.SHARED:
        return await controller.occupancy.is_held()
    # Others hold the device by grants: what matters is whether the pod itself has started.
    standings = await controller.occupancy.pod_liveness(grant.pod, shares=True)
    own = [where.state for each, where in standings if each.pod == grant.pod]
    return any(state is not PodState.OVER for state in own)


def _kubelet_status(reading: KubeletReading) -> str:
    """Return ``ok``, ``none`` on a node without a kubelet, or why the kubelet's lists are not, or not fully, trusted."""
    if not reading.has_kubelet:
        return "none"
    return reading.untrusted_reason if reading.trust is not Trust.TRUSTED else " ".join(reading.caveats) or "ok"
