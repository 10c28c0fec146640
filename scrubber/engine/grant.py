"""One hand-over from request to answer: prepare every device, then grant all of them in one transaction, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from scrubber.domain.assignment import Process
from scrubber.domain.basis import UNJUDGED, Basis, HandOver
from scrubber.domain.certify import certify
from scrubber.domain.errors import DeviceFault, Unreadable
from scrubber.domain.evidence import Path
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.statement import sealed
from scrubber.engine import events, refusals
from scrubber.engine.container_start import AwaitedStart, await_start, follow_start
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.device.state import to_the_end
from scrubber.engine.pods import PodWatch
from scrubber.engine.prepare import Preparation, Prepared, ResolvedCall
from scrubber.engine.shared_start import joined
from scrubber.engine.views import Granted
from scrubber.ports.record import Change, Event

__all__ = ["GrantRequest"]

_PAUSE = 0.02
_CHECK_AGE = 2.0
"""Seconds for which a fast path's checks count: a device that waited longer for its siblings is checked again."""


class GrantRequest:
    """One request for a set of devices.

    Args:
        earlier: all grants that the node knows of, for the baseline of a pod that has other devices too.

    Attributes:
        granted: what the ledger has of it; None as long as it has nothing.
        versions: of each device's record that it made.
    """

    def __init__(
        self, call: ResolvedCall, *, dependencies: Dependencies, pods: PodWatch, earlier: Callable[[], Iterable[Grant]]
    ) -> None:
        self._call = call
        self._controllers = [each.controller for each in call.devices]
        self._devices = [Preparation(each, call, dependencies=dependencies) for each in call.devices]
        self._dependencies = dependencies
        self._pods = pods
        self._earlier = earlier
        self._began = dependencies.clock.monotonic()
        self._held: tuple[DeviceController, DeviceRecord] | None = None
        self.granted: tuple[Granted, ...] | None = None
        self.versions: tuple[int, ...] = ()

    async def run(self) -> tuple[Granted, ...]:
        """All or none.

        Raises:
            Quarantined, Held, NotReady, LedgerFailure.
        """
        while True:
            prepared = await self._together([each.reached() for each in self._devices])
            try:
                with self._dependencies.tracer.span("grant"):
                    granted = await self._grant(prepared)
            except DeviceFault:
                granted = None  # the next round meets it again, and takes the device out of service
            if granted is not None:
                return granted
            if self._held is not None:
                controller, seen = self._held
                self._held = None
                await controller.occupancy.void_certificate(seen)  # whoever it was may be gone by the next look
            if self._dependencies.clock.monotonic() >= self._call.deadline:
                raise refusals.changed_meanwhile()
            await self._dependencies.clock.sleep(_PAUSE)

    async def _together(self, waits: Sequence[Awaitable[Prepared]]) -> list[Prepared]:
        """All results, or the first refusal: it ends the waiting of the others, not the scrubs they wait for."""
        if len(waits) == 1:
            return [await waits[0]]  # nobody to wait for beside it: a task for it would be two more turns of the loop
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _grant(self, prepared: Sequence[Prepared]) -> tuple[Granted, ...] | None:
        """Grant everything in one transaction, or answer None because something has moved since it was prepared."""
        baselines = [await self._baseline(each) for each in prepared]
        async with AsyncExitStack() as locks:
            for controller in self._controllers:
                await locks.enter_async_context(controller.state.lock)
            for controller, each in zip(self._controllers, prepared, strict=True):
                aged = self._dependencies.clock.monotonic() - each.checked_at > _CHECK_AGE
                if aged or controller.state.record.version != each.version or controller.state.job is not None:
                    return None
                if controller.state.retired or controller.state.allocations != each.allocations:
                    return None
                # Of a device that is joined, that somebody holds it says nothing.
                if each.decision.basis not in (*UNJUDGED, Basis.SHARED) and await controller.occupancy.held():
                    self._held = (controller, controller.state.record)
                    return None
                if each.decision.basis not in UNJUDGED and controller.occupancy.coverage.gap:
                    return None
            if any(
                controller.state.policy != each.policy
                for controller, each in zip(self._controllers, prepared, strict=True)
            ):
                return None  # it was judged by rules that are in force no more, or a glass was mended meanwhile
            change, granted = Change(), []
            left_out: list[Event] = []
            for controller, each, baseline in zip(self._controllers, prepared, baselines, strict=True):
                part, answer = self._one(controller, each, baseline)
                change |= part
                granted.append(answer)
                left_out += controller.state.disturbances.left_out()

            async def store_and_apply() -> None:
                # What was left out of the audit trail is in the log already, and is counted.
                await self._dependencies.ledger.commit(Change(events=tuple(left_out)) | change)
                for controller, record, each in zip(self._controllers, change.records, prepared, strict=True):
                    controller.apply_grant(record, each.allocations)
                self.granted = tuple(granted)
                self.versions = tuple(record.version for record in change.records)
                self._dependencies.journal.tell(change.events)
                for check in change.scrubs:
                    self._dependencies.journal.scrubbed(check)

            # Watched from before the answer: the kubelet starts the container as soon as it has that.
            pods = {each.assignment.pod for each in prepared if each.assignment is not None}
            starts = [await_start(pod, dependencies=self._dependencies) for pod in pods]
            try:
                await to_the_end(store_and_apply())
            finally:
                self._follow([start for start in starts if start is not None])
        return self.granted

    def _follow(self, awaited: Sequence[AwaitedStart]) -> None:
        """Note the containers that start on what was granted; nothing starts where nothing was granted."""
        for start in awaited:
            if self.granted is None:
                start.created.cancel()
                continue
            controllers = [
                each for each in self._controllers if (last := each.state.record.last_grant) and last.pod == start.pod
            ]
            follow = follow_start(start, controllers, dependencies=self._dependencies)
            self._dependencies.spawn(follow, f"start {start.pod.uid}")

    async def _baseline(self, prepared: Prepared) -> tuple[Process, ...]:
        boot = self._dependencies.identity.boot
        earlier = [grant for grant in self._earlier() if grant.boot == boot]
        try:
            return await self._pods.baseline(prepared.assignment, earlier)
        except Unreadable as unreadable:
            if prepared.decision.basis in UNJUDGED:
                return ()
            raise refusals.unreadable_pod(unreadable) from unreadable

    def _one(
        self, controller: DeviceController, prepared: Prepared, baseline: tuple[Process, ...]
    ) -> tuple[Change, Granted]:
        """The change that grants one device, and its part of the answer."""
        record = controller.state.record
        dependencies, now = self._dependencies, self._dependencies.clock.wall()
        sequence = record.grants + 1
        basis = prepared.decision.basis
        assert basis is not None  # whatever is prepared may go
        used = record.certificate if basis is Basis.CERTIFICATE else None
        fast = certify(
            prepared.check,
            prepared.check.steps,
            record,
            identity=dependencies.identity.of(controller.state.device),
            policy=prepared.policy,
            certificate_id=dependencies.new_id("cert"),
            now=now,
            rests_on=record.rests_on,
            basis=basis,
        )
        fast = replace(sealed(fast, dependencies.signer.key_id, dependencies.signer.sign), next_grant=sequence)
        check = replace(prepared.check, certificate=fast.id)
        assignment = None if prepared.assignment is None else replace(prepared.assignment, shares=prepared.shares)
        own = record.grants_of(None if assignment is None else assignment.pod)
        cgroups = own[-1].cgroups if own else ()
        grant = Grant(
            sequence, assignment, prepared.kind, now, dependencies.identity.boot, fast.id, basis, baseline, cgroups
        )
        spent = (fast,) if used is None else (replace(used, next_grant=sequence), fast)
        seconds = dependencies.clock.monotonic() - self._began
        after = record.granted(grant, fast, certain=prepared.certain)
        after = joined(after, prepared.over) if basis is Basis.SHARED else after
        if prepared.kind in (HandOver.OTHER_TENANT, HandOver.UNKNOWN):
            after = replace(after.for_another(now, prepared.policy.signals), version=after.version)
        path = Path.FAST if used is None or used.issued_at < now - seconds else Path.SLOW
        change = Change(
            records=(after,),
            grants=((record.device, grant),),
            certificates=spent,
            scrubs=(check,),
            events=(events.granted(grant, fast, path.value, seconds),),
        )
        return change, Granted(record.device, sequence, prepared.kind, path, fast.id, basis)
