"""Runs one hand-over from request to answer: prepares every device, then grants all or none in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from scrubber.completion import run_to_completion
from scrubber.domain.assignment import Pod, Process
from scrubber.domain.certificate import certify
from scrubber.domain.errors import DeviceFault, Unreadable
from scrubber.domain.evidence import PathKind
from scrubber.domain.handover_kind import UNCONDITIONAL_BASES, Basis, HandOverKind
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.statement import sign_certificate
from scrubber.engine import events, refusals
from scrubber.engine.container_start import PendingStart, record_started_container, watch_start
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.pods import PodTracker
from scrubber.engine.prepare import DevicePreparation, PreparedDevice, ResolvedCall
from scrubber.engine.shared_start import after_shared_grant
from scrubber.engine.views import GrantedDevice
from scrubber.engine.work_gate import WorkGate
from scrubber.ports.record import Event, LedgerChange

__all__ = ["GrantRequest"]

_PAUSE = 0.02
_CHECK_AGE = 2.0
"""Seconds for which the fast path's checks are valid: a device that waited longer for the others is checked again."""


# See docs/decisions/0003-one-transaction-per-decision.md.
class GrantRequest:
    """One request for a set of devices.

    Args:
        earlier_grants: all grants that the node knows, for the baseline of a pod that has other devices too.
        check_pods: lets the pods of the node be checked now.
        require_service: raises NotReady if devices cannot be handed over now.
        work_gate: opened before the commit.

    Attributes:
        result: the granted devices as committed to the ledger; None until the commit.
        record_versions: the version of each device's record that the grant created.
    """

    def __init__(
        self,
        call: ResolvedCall,
        *,
        dependencies: Dependencies,
        pods: PodTracker,
        earlier_grants: Callable[[], Iterable[Grant]],
        check_pods: Callable[[], None],
        require_service: Callable[[], None],
        work_gate: WorkGate,
    ) -> None:
        self._call = call
        self._controllers = [each.controller for each in call.devices]
        self._devices = [
            DevicePreparation(each, call, dependencies=dependencies, check_pods=check_pods) for each in call.devices
        ]
        self._dependencies = dependencies
        self._pods = pods
        self._earlier = earlier_grants
        self._require_service = require_service
        self._work_gate = work_gate
        self._began = dependencies.clock.monotonic()
        self._certified_before = {
            certificate.id for each in self._controllers if (certificate := each.state.record.certificate) is not None
        }
        self._held: tuple[DeviceController, DeviceRecord] | None = None
        self.result: tuple[GrantedDevice, ...] | None = None
        self.record_versions: tuple[int, ...] = ()

    async def run(self) -> tuple[GrantedDevice, ...]:
        """Grant all devices or none.

        Raises:
            Quarantined, Held, NotReady, LedgerFailure.
        """
        while True:
            prepared = await self._gather_prepared([each.wait_until_prepared() for each in self._devices])
            try:
                async with self._work_gate.open():
                    with self._dependencies.tracer.span("grant"):
                        granted = await self._grant(prepared)
            except DeviceFault:
                granted = None  # the next round meets the fault again and quarantines the device
            if granted is not None:
                return granted
            if self._held is not None:
                controller, seen = self._held
                self._held = None
                await controller.occupancy.void_certificate(seen)  # the holder may be gone by the next check
            if self._dependencies.clock.monotonic() >= self._call.deadline:
                raise refusals.device_changed()
            await self._dependencies.clock.sleep(_PAUSE)

    async def _gather_prepared(self, waits: Sequence[Awaitable[PreparedDevice]]) -> list[PreparedDevice]:
        """Return all results, or raise the first refusal, which ends the other waits but not their scrubs."""
        if len(waits) == 1:
            return [await waits[0]]  # a single wait needs no task, which would cost two more turns of the event loop
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _grant(self, prepared: Sequence[PreparedDevice]) -> tuple[GrantedDevice, ...] | None:
        """Grant everything in one transaction; return None if the state of a device changed since it was prepared."""
        baselines = await self._baselines(prepared)
        async with AsyncExitStack() as locks:
            for controller in self._controllers:
                await locks.enter_async_context(controller.state.lock)
            for controller, each in zip(self._controllers, prepared, strict=True):
                aged = self._dependencies.clock.monotonic() - each.checked_at > _CHECK_AGE
                if aged or controller.state.record.version != each.version or controller.state.job is not None:
                    return None
                if controller.state.retired or controller.state.allocations != each.allocations:
                    return None
                if self._call.claim is not None and self._call.plugin_resources(controller.id):
                    return None  # a plugin advertises it since
                # A device that is shared is expected to be held.
                if (
                    each.decision.basis not in (*UNCONDITIONAL_BASES, Basis.SHARED)
                    and await controller.occupancy.is_held()
                ):
                    self._held = (controller, controller.state.record)
                    return None
                if each.decision.basis not in UNCONDITIONAL_BASES and controller.occupancy.coverage.has_gap:
                    return None
            if any(
                controller.state.policy != each.policy
                for controller, each in zip(self._controllers, prepared, strict=True)
            ):
                return None  # the policy changed since, or a break-glass override ended
            self._require_service()
            change, granted = LedgerChange(), []
            left_out: list[Event] = []
            for controller, each, baseline in zip(self._controllers, prepared, baselines, strict=True):
                part, answer = self._device_change(controller, each, baseline)
                change |= part
                granted.append(answer)
                left_out += controller.state.disturbances.omitted_rows()

            async def store_and_apply() -> None:
                # Events omitted from the audit log are in the log already, and are counted.
                await self._dependencies.ledger.commit(LedgerChange(events=tuple(left_out)) | change)
                for controller, record, each in zip(self._controllers, change.records, prepared, strict=True):
                    controller.apply_grant(record, each.allocations)
                self.result = tuple(granted)
                self.record_versions = tuple(record.version for record in change.records)
                self._dependencies.journal.record(change.events)
                for check in change.scrubs:
                    self._dependencies.journal.record_scrub(check)

            # Start watching before the answer, because the kubelet starts the container as soon as it receives it.
            pods = {each.pod for each in prepared if each.pod is not None}
            starts = [watch_start(pod, dependencies=self._dependencies) for pod in pods]
            try:
                await run_to_completion(store_and_apply())
            finally:
                self._follow([start for start in starts if start is not None])
        return self.result

    def _follow(self, awaited: Sequence[PendingStart]) -> None:
        """Record the containers that start on the granted devices; without a grant nothing starts."""
        for start in awaited:
            if self.result is None:
                start.created.cancel()
                continue
            controllers = [
                each for each in self._controllers if (last := each.state.record.last_grant) and last.pod == start.pod
            ]
            follow = record_started_container(start, controllers, dependencies=self._dependencies)
            self._dependencies.spawn(follow, f"start {start.pod.uid}")

    async def _baselines(self, prepared: Sequence[PreparedDevice]) -> list[tuple[Process, ...]]:
        """Return the baseline of each device's pod; a pod is read once, however many devices it gets."""
        boot = self._dependencies.identity.boot
        earlier = [grant for grant in self._earlier() if grant.boot == boot]
        read: dict[Pod | None, tuple[Process, ...] | Unreadable] = {}
        baselines: list[tuple[Process, ...]] = []
        for each in prepared:
            if each.pod not in read:
                try:
                    read[each.pod] = await self._pods.baseline(each.assignment, earlier)
                except Unreadable as unreadable:
                    read[each.pod] = unreadable
            found = read[each.pod]
            if isinstance(found, Unreadable):
                if each.decision.basis not in UNCONDITIONAL_BASES:
                    raise refusals.pod_unreadable(found) from found
                found = ()
            baselines.append(found)
        return baselines

    def _device_change(
        self, controller: DeviceController, prepared: PreparedDevice, baseline: tuple[Process, ...]
    ) -> tuple[LedgerChange, GrantedDevice]:
        """Return the change that grants one device, and the device's part of the answer."""
        record = controller.state.record
        dependencies, now = self._dependencies, self._dependencies.clock.wall()
        sequence = record.grant_sequence + 1
        basis = prepared.decision.basis
        assert basis is not None  # a prepared device may be granted
        used = record.certificate if basis is Basis.CERTIFICATE else None
        fast = certify(
            prepared.check,
            prepared.check.steps,
            record,
            identity=dependencies.identity.for_device(controller.state.device),
            policy=prepared.policy,
            certificate_id=dependencies.new_id("cert"),
            now=now,
            rests_on=record.rests_on,
            basis=basis,
            claim=self._call.claim,
        )
        fast = replace(
            sign_certificate(fast, dependencies.signer.key_id, dependencies.signer.sign), next_grant=sequence
        )
        check = replace(prepared.check, certificate=fast.id)
        assignment = None if prepared.assignment is None else replace(prepared.assignment, shares=prepared.shares)
        own = record.open_grants_of(None if assignment is None else assignment.pod)
        cgroups = own[-1].cgroups if own else ()
        seconds = dependencies.clock.monotonic() - self._began
        path = PathKind.FAST if used is None or used.id in self._certified_before else PathKind.SLOW
        grant = Grant(
            sequence,
            assignment,
            prepared.kind,
            now,
            dependencies.identity.boot,
            fast.id,
            basis,
            baseline,
            cgroups,
            claim=self._call.claim,
            path=path,
        )
        spent = (fast,) if used is None else (replace(used, next_grant=sequence), fast)
        after = record.after_grant(grant, fast, certain=prepared.is_certain)
        after = after_shared_grant(after, prepared.closed_grants) if basis is Basis.SHARED else after
        if prepared.kind in (HandOverKind.OTHER_TENANT, HandOverKind.UNKNOWN):
            after = replace(after.after_tenant_change(now, prepared.policy.signals), version=after.version)
        change = LedgerChange(
            records=(after,),
            grants=((record.device, grant),),
            certificates=spent,
            scrubs=(check,),
            events=(events.granted(grant, fast, path.value, seconds, self._call.actor),),
        )
        return change, GrantedDevice(record.device, sequence, prepared.kind, path, fast.id, basis)
