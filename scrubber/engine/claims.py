"""The resource claims of one node: prepares devices for them, and releases the devices again.

A claim is stored in the records of its devices and nowhere else. Whatever concerns all of them is one transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from weakref import WeakValueDictionary

from scrubber.completion import run_to_completion
from scrubber.domain.assignment import Claim, KubeletReading, Pod
from scrubber.domain.claims import (
    PreparedClaimState,
    ReleaseDecision,
    ReleasingDevice,
    decide_release,
    is_prepared_for,
    merge_pods,
    prepared_claim_state,
    replaced_claims,
    shares_against_policy,
    unprepared_claims,
)
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import InvalidRequest, LedgerFailure, NotReady, Refused
from scrubber.domain.evidence import PathKind
from scrubber.domain.policy import Enforcement
from scrubber.domain.record import MAX_ADMIN_CLAIMS, DeviceRecord
from scrubber.domain.states import Hygiene
from scrubber.engine import events, refusals
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.devices import Devices
from scrubber.engine.pods import PodTracker
from scrubber.engine.prepare import RequestedDevice, ResolvedCall
from scrubber.engine.views import (
    ClaimRelease,
    GrantedDevice,
    NodeView,
    PrepareClaimCall,
    PreparedClaim,
    UnpreparedClaim,
    WithheldDevice,
)
from scrubber.ports.record import Event, Journal, Ledger, LedgerChange
from scrubber.ports.runtime import Clock

__all__ = ["DriverlessClaims", "NodeClaims", "prepared_claims"]

_RECHECK = 1.0
"""Seconds after which a release is decided again, also if nothing was published."""
_REPEATED_WITHIN = 100.0
"""Seconds within which the kubelet repeats an Unprepare that was not done."""
_RECHECK_ABANDONED = 0.25
"""Seconds after which it is decided again whether a claim is abandoned."""

RecordChange = Callable[[DeviceRecord], tuple[DeviceRecord, tuple[Event, ...]]]
"""From a device's record to its next one, with the events of the change; the same record: nothing changes."""


# See docs/decisions/0044-claims.md.
class NodeClaims:
    """Implements :class:`scrubber.engine.views.Claims`.

    Args:
        require_service: raises NotReady if devices cannot be handed over now.
        is_yielded: returns whether the node is yielded, so that every device is withheld.
        hand_over: grants all devices of a call or none.
        plugin_resources: returns the resources under which a device plugin advertises a device, given by its ID.
        node_resources: returns those under which a device plugin advertises any device of the node.
        wait_for_change: as :meth:`scrubber.engine.views.Service.wait_for_change`.
        check_pods: lets the pods of the node be checked now.
    """

    def __init__(
        self,
        *,
        devices: Devices,
        pods: PodTracker,
        dependencies: Dependencies,
        require_service: Callable[[], None],
        is_yielded: Callable[[], bool],
        hand_over: Callable[[ResolvedCall], Awaitable[tuple[GrantedDevice, ...]]],
        plugin_resources: Callable[[str], frozenset[str]],
        node_resources: Callable[[], frozenset[str]],
        view: Callable[[], NodeView],
        wait_for_change: Callable[[int], Awaitable[NodeView]],
        check_pods: Callable[[], None],
    ) -> None:
        self._devices = devices
        self._pods = pods
        self._dependencies = dependencies
        self._require_service = require_service
        self._is_yielded = is_yielded
        self._hand_over = hand_over
        self._plugin_resources = plugin_resources
        self._node_resources = node_resources
        self._view = view
        self._wait_for_change = wait_for_change
        self._check_pods = check_pods
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._last_unprepare: dict[str, float] = {}
        """When the last call to unprepare a claim began or ended (monotonic), by its UID."""

    # -- Prepare ---------------------------------------------------------------------------------------------------

    async def prepare(self, call: PrepareClaimCall) -> tuple[GrantedDevice, ...]:
        claim, clock = call.claim, self._dependencies.clock
        self._require_service()
        controllers = self._find((*call.devices, *call.admin_devices))
        granted, admin = controllers[: len(call.devices)], controllers[len(call.devices) :]
        wait = self._dependencies.policy().limits.hand_over if call.wait_seconds is None else call.wait_seconds
        deadline = clock.monotonic() + wait
        async with self._only_call(claim, deadline):
            if call.restores and self._was_unprepared(claim.uid):
                raise refusals.claim_in_progress(claim)
            if call.withdrawn:
                self._note_withdrawn(claim.uid)
            held = await self._is_prepared(call, deadline)
            await self._record_admin_access(claim, admin)
            while held:
                await self.set_pods(claim.uid, claim.pods)
                try:
                    answer = self._answer(claim, granted)
                except Refused:
                    if not call.restores:
                        await self._release_unstarted(claim, deadline)
                    raise
                if answer is not None:
                    return answer
                held = await self._is_prepared(call, deadline)
            if not granted:
                return ()
            ordered = sorted(granted, key=lambda each: each.id)
            return await self._hand_over(
                ResolvedCall(
                    devices=tuple(RequestedDevice(each, frozenset({each.id}), frozenset()) for each in ordered),
                    resource=claim.driver,
                    own_resources=lambda: frozenset({claim.driver}),
                    deadline=deadline,
                    claim=claim,
                    claim_is_starting=not call.restores,
                    actor=call.actor,
                    plugin_resources=self._plugin_resources,
                    extended_resources=call.extended_resources,
                    node_resources=self._node_resources,
                    release_abandoned=lambda other: self._release_other(other, claim, deadline),
                )
            )

    async def _is_prepared(self, call: PrepareClaimCall, deadline: float) -> bool:
        """Return whether the claim is prepared with the devices of ``call``.

        Raises:
            InvalidRequest: it is prepared with other devices, and not abandoned until ``deadline`` (monotonic seconds).
            NotReady: it was, and has been released.
        """
        claim, clock = call.claim, self._dependencies.clock
        while (held := is_prepared_for(claim.uid, call.devices, self._devices.records())) is None:
            await self._pods.refresh()
            requested = () if call.restores else claim.pods
            state = await self._release_abandoned(claim, deadline, requested=requested)
            if state is PreparedClaimState.ABANDONED:
                raise refusals.claim_abandoned(claim)
            left = deadline - clock.monotonic()
            if state is PreparedClaimState.LISTED or claim.manager is not None or left <= 0:
                raise refusals.claim_changed(claim, tuple(each.id for each in self._prepared(claim.uid)))
            await clock.sleep(min(left, _RECHECK_ABANDONED))
        return held

    # -- claims that the kubelet has forgotten ---------------------------------------------------------------------

    async def _release_other(self, prepared: Claim, requesting: Claim, deadline: float) -> bool:
        """Release ``prepared`` if it is abandoned, so that ``requesting`` gets its device; return whether it was.

        Only claims of the driver that asks are released: it removes their CDI specifications before it asks again.
        """
        lock = self._locks.setdefault(prepared.uid, asyncio.Lock())
        if prepared.driver != requesting.driver or lock.locked():
            return False  # a call for it is in progress: waiting here for that one could wait for this one
        async with lock:
            if (await self._state_of(prepared))[0] is not PreparedClaimState.ABANDONED:
                return False
            # A call for it may have been answered since the list was read: of a pod that the list lacks.
            await self._pods.refresh()
            return await self._release_abandoned(prepared, deadline) is PreparedClaimState.ABANDONED

    async def _release_unstarted(self, claim: Claim, deadline: float) -> None:
        """Release a requested claim whose devices may not be used as they are, if its only pod has not started.

        The kubelet calls for a claim that is prepared if it did not get or keep the answer, or refused another claim of the pod.
        A call that names several pods does not tell which of them starts, and another one may start on an answer already.

        Raises:
            NotReady: it was released; the next call is a new hand-over.
        """
        if len(claim.pods) != 1:
            return
        await self._pods.refresh()
        state = await self._release_abandoned(claim, deadline, requested=claim.pods, same_devices=True)
        if state is PreparedClaimState.ABANDONED:
            raise refusals.claim_unstarted(claim)

    async def _release_abandoned(
        self, claim: Claim, deadline: float, *, requested: Collection[Pod] = (), same_devices: bool = False
    ) -> PreparedClaimState:
        """Release a claim if it is abandoned by the newest reading of the kubelet; return what it was.

        Args:
            claim: no other call for it is in progress, nor was since that reading began.
            requested: the pods for which the kubelet requests it right now.
            same_devices: whether it requests it with the devices that the claim is prepared with.
        """
        async with self._no_arrivals(deadline):
            state, starting = await self._state_of(claim, requested, same_devices=same_devices)
            if state is PreparedClaimState.ABANDONED:
                # The kubelet starts these pods only once they have got other devices: they must not keep the former ones.
                await self._release(claim.uid, "service", elsewhere=() if same_devices else starting)
        if state is PreparedClaimState.ABANDONED:
            self._check_pods()
        return state

    async def _state_of(
        self, claim: Claim, requested: Collection[Pod] = (), *, same_devices: bool = False
    ) -> tuple[PreparedClaimState, Collection[Pod]]:
        """Return the state of a prepared claim, and those of its pods that start only with the answer to the present request."""
        known = [each for record in self._devices.records() for each in record.prepared_claims if each.uid == claim.uid]
        pods = tuple(dict.fromkeys(pod for each in known for pod in each.pods))
        limits = self._dependencies.policy().limits
        facts = {pod: await self._pods.claim_pod_facts(pod, requested, limits=limits) for pod in pods}
        state = prepared_claim_state(
            replace(claim, pods=pods),
            facts,
            self._pods.reading,
            is_replaced=claim.uid in replaced_claims(self._devices.records(), self._pods.reading),
            same_devices=same_devices,
        )
        return state, [pod for pod, each in facts.items() if each.is_starting]

    def _find(self, ids: Sequence[str]) -> list[DeviceController]:
        """Return the controllers of ``ids``; raises :class:`InvalidRequest` for unknown, duplicate or no IDs."""
        if not ids:
            raise InvalidRequest("The request names no device.")
        if len(set(ids)) != len(ids):
            raise InvalidRequest("The request names a device twice.")
        unknown = sorted(set(ids) - self._devices.controllers.keys())
        if unknown:
            raise InvalidRequest(f"This node has no device {', '.join(unknown)}.")
        return [self._devices.controllers[each] for each in ids]

    @asynccontextmanager
    async def _only_call(self, claim: Claim, deadline: float) -> AsyncIterator[None]:
        """Wait until no other call for ``claim`` is in progress.

        Otherwise a Prepare whose caller has given up could grant the devices after they were released.

        Raises:
            NotReady: at ``deadline`` (monotonic seconds).
        """
        lock, clock = self._locks.setdefault(claim.uid, asyncio.Lock()), self._dependencies.clock
        try:
            async with clock.timeout(max(0.0, deadline - clock.monotonic())):
                await lock.acquire()
        except TimeoutError:
            raise refusals.claim_in_progress(claim) from None
        try:
            yield
        finally:
            lock.release()

    # See docs/decisions/0044-claims.md.
    def _answer(self, claim: Claim, controllers: Iterable[DeviceController]) -> tuple[GrantedDevice, ...] | None:
        """Return the answer that Prepare gave, from the records; None if an operator has released a device since.

        Raises:
            Quarantined: a device is out of service by now, so that no further pod of the claim may start on it.
            Refused: another pod has got a device since, so that no further pod of the claim may share it with that one.
        """
        found = []
        for controller in sorted(controllers, key=lambda each: each.id):
            record = controller.state.record
            grant = record.prepared_grant(claim.uid)
            if grant is None:
                return None
            if controller.refuses_allocation:
                raise refusals.quarantined_in_claim(
                    controller.id, claim, public_message=controller.view.refusal_message
                )
            other = record.adopted_since(grant)
            if other is not None and controller.state.policy.enforcement is not Enforcement.OBSERVE:
                raise refusals.adopted_in_claim(controller.id, other)
            path = grant.path or PathKind.FAST
            found.append(GrantedDevice(record.device, grant.sequence, grant.kind, path, grant.certificate, grant.basis))
        return tuple(found)

    async def _record_admin_access(self, claim: Claim, controllers: Sequence[DeviceController]) -> None:
        def add(record: DeviceRecord) -> tuple[DeviceRecord, tuple[Event, ...]]:
            known = next((each for each in record.admin_claims if each.uid == claim.uid), None)
            fields = {"tenant": claim.tenant, "claim": str(claim), "claim_uid": claim.uid}
            event = Event(
                "claim.admin-access", self._dependencies.clock.wall(), record.device, actor="driver", fields=fields
            )
            listed = {each.uid for each in record.admin_claims if _may_be_used(each, self._pods.reading)}
            if known is None and len(listed) >= MAX_ADMIN_CLAIMS:
                raise refusals.too_many_admin_claims(record.device)
            return record.with_admin_access(claim, listed=listed), (event,) if known is None else ()

        await self._change(controllers, add)

    # -- pods of a claim -------------------------------------------------------------------------------------------

    async def set_pods(self, uid: str, pods: Sequence[Pod]) -> None:
        await self._set_pods(uid, pods)

    async def _set_pods(self, uid: str, pods: Sequence[Pod], listed: tuple[Pod, ...] = ()) -> None:
        controllers = self._prepared(uid)
        claims = [each for controller in controllers for each in (controller.state.record.claim(uid),) if each]
        if any(pod.namespace != claim.namespace for claim in claims for pod in pods):
            raise InvalidRequest("A claim can only be used by pods of its own namespace.")
        gone = {pod for claim in claims for pod in claim.pods if pod not in pods and await self._pods.is_gone(pod)}
        now = self._dependencies.clock.wall()

        def change(record: DeviceRecord) -> tuple[DeviceRecord, tuple[Event, ...]]:
            before = record.claim(uid)

            def report(claim: Claim) -> Claim:
                merged = merge_pods(claim, pods, over=gone)
                named = (pod for pod in listed or claim.listed_pods if pod in merged)
                return replace(claim, pods=merged, listed_pods=tuple(named))

            after = record.with_claim(uid, report)
            claim = after.claim(uid)
            if after is record or before is None or claim is None:
                return record, ()
            if claim.pods == before.pods:
                return after, ()
            fields: dict[str, str | int | float | bool | None] = {
                "tenant": claim.tenant,
                "claim": str(claim),
                "claim_uid": claim.uid,
                "pods": len(claim.pods),
            }
            rows = [Event("claim.pods-changed", now, record.device, actor="driver", fields=fields)]
            policy = self._devices.controllers[record.device].state.policy
            if policy.enforcement is not Enforcement.OBSERVE and shares_against_policy(after, policy.sharing):
                message = refusals.claim_shared_message(record.device)
                rows.append(
                    Event("claim.shared-against-policy", now, record.device, fields=fields | {"message": message})
                )
            return after, tuple(rows)

        await self._change(controllers, change)

        def change_admin(record: DeviceRecord) -> tuple[DeviceRecord, tuple[Event, ...]]:
            claim = next((each for each in record.admin_claims if each.uid == uid), None)
            return (record if claim is None else record.with_admin_access(replace(claim, pods=tuple(pods)))), ()

        if pods:
            await self._change(self._admin(uid), change_admin)

    async def add_listed_pods(self, reading: KubeletReading) -> None:
        """Add the pods for which the kubelet lists a prepared claim: a pod that shares one starts without a call."""
        claims = {each.uid: each for record in self._devices.records() for each in record.prepared_claims}
        for uid in claims.keys() - replaced_claims(self._devices.records(), reading):
            claim = claims[uid]
            found = (
                pod for pod in reading.pods_of_claim(claim) if pod.uid is not None and pod not in claim.listed_pods
            )
            new = sorted(found, key=lambda each: each.uid or "")
            if new:
                named = (pod for pod in new if pod not in claim.pods)
                await self._set_pods(claim.uid, (*claim.pods, *named), listed=(*claim.listed_pods, *new))

    # -- Unprepare -------------------------------------------------------------------------------------------------

    async def unprepare(
        self, uid: str, wait_seconds: float, actor: str = "driver", *, withdrawn: bool = False
    ) -> ClaimRelease:
        clock = self._dependencies.clock
        self._view().require_ready()
        self._note_unprepare(uid)
        try:
            return await self._unprepare(uid, clock.monotonic() + wait_seconds, actor, withdrawn=withdrawn)
        finally:
            self._note_unprepare(uid)

    async def _unprepare(self, uid: str, deadline: float, actor: str, *, withdrawn: bool) -> ClaimRelease:
        clock = self._dependencies.clock
        try:
            async with self._only_call(Claim(uid, "", "", ""), deadline), self._no_arrivals(deadline):
                await self._release(uid, actor)
                if withdrawn:
                    self._note_withdrawn(uid)
        except NotReady as busy:
            return ClaimRelease(done=False, waits_for=busy.public_message)
        self._check_pods()
        while True:
            version = self._view().version
            decision = self._decide_release(uid)
            if decision.is_done:
                withheld = (WithheldDevice(device, code) for device, code in decision.withheld)
                return ClaimRelease(done=True, withheld=tuple(withheld))
            left = deadline - clock.monotonic()
            if left <= 0:
                return ClaimRelease(done=False, waits_for=self._waits_for(decision))
            try:
                async with clock.timeout(min(left, _RECHECK)):
                    await self._wait_for_change(version)
            except TimeoutError:
                continue

    def _note_unprepare(self, uid: str) -> None:
        now = self._dependencies.clock.monotonic()
        recent = {each: at for each, at in self._last_unprepare.items() if now - at < _REPEATED_WITHIN}
        self._last_unprepare = recent | {uid: now}

    def _was_unprepared(self, uid: str) -> bool:
        """Return whether the kubelet may still wait for the release of a claim, by whichever instance of the driver.

        It would take a claim that is prepared again meanwhile for released, and never release it.
        """
        last = self._last_unprepare.get(uid)
        return last is not None and self._dependencies.clock.monotonic() - last < _REPEATED_WITHIN

    @asynccontextmanager
    async def _no_arrivals(self, deadline: float) -> AsyncIterator[None]:
        """Wait until no device that returns to the node is being inspected; raises :class:`NotReady` at ``deadline``."""
        clock = self._dependencies.clock
        try:
            async with clock.timeout(max(0.0, deadline - clock.monotonic())):
                await self._devices.arrivals.acquire()
        except TimeoutError:
            raise refusals.device_arriving() from None
        try:
            yield
        finally:
            self._devices.arrivals.release()

    async def _release(self, uid: str, actor: str, *, elsewhere: Collection[Pod] = ()) -> None:
        """Record on all devices of the claim that it is to be unprepared, also on those that have left the node.

        Args:
            elsewhere: pods without a process that start only after another hand-over, with other devices.
        """
        now = self._dependencies.clock.wall()

        def released(record: DeviceRecord) -> tuple[DeviceRecord, tuple[Event, ...]]:
            return _released(record, uid, now, actor, elsewhere)

        gone = [(before, released(before)) for before in self._removed_records()]
        left = [(after, rows) for before, (after, rows) in gone if after is not before]
        await self._change(self._prepared(uid), released, left)
        await self._change(self._admin(uid), lambda record: (record.without_admin_access(uid), ()))

    def _note_withdrawn(self, uid: str) -> None:
        grants = (grant for record in self._devices.records() for grant in record.open_grants)
        self._pods.note_withdrawn(uid, (each.claim for each in grants if each.claim is not None))

    def _decide_release(self, uid: str) -> ReleaseDecision:
        remaining = []
        for controller in self._devices.controllers.values():
            record = controller.state.record
            claim = record.claim(uid)
            # A claim that was prepared again meanwhile is not what was to be unprepared.
            if claim is not None and not claim.is_prepared:
                observes = controller.state.policy.enforcement is Enforcement.OBSERVE
                remaining.append(ReleasingDevice(record, self._out_of_service_code(controller), observes))
        for record in self._removed_records():
            if record.claim(uid) is not None:
                remaining.append(ReleasingDevice(record, ErrorCode.DEVICE_LOST))
        return decide_release(remaining)

    def _out_of_service_code(self, controller: DeviceController) -> str:
        record = controller.state.record
        if self._is_yielded():
            return ErrorCode.NODE_YIELDED
        if not record.advertised:
            return ErrorCode.QUARANTINED if record.cause is None else record.cause.code
        return ErrorCode.DEVICE_BUSY if controller.is_blocked_by_a_process else ""

    def _waits_for(self, decision: ReleaseDecision) -> str:
        """Return what the release waits for, for a pod's status; names no tenant."""
        parts = []
        for device in decision.waits_for:
            controller = self._devices.controllers[device]
            job = controller.state.job
            parts.append(
                refusals.release_message(
                    device,
                    controller.state.record.state,
                    "" if job is None else job.id,
                    "" if job is None else job.waits_for,
                )
            )
        return " ".join(parts)

    # -- queries ---------------------------------------------------------------------------------------------------

    def current(self) -> tuple[PreparedClaim, ...]:
        return prepared_claims([*self._devices.records(), *self._removed_records()])

    def unprepared(self) -> tuple[UnpreparedClaim, ...]:
        records = [*self._devices.records(), *self._removed_records()]
        return tuple(sorted(UnpreparedClaim(*each) for each in unprepared_claims(records, self._pods.reading)))

    def _removed_records(self) -> list[DeviceRecord]:
        """Return the records of removed devices that were in use under this boot: no claim outlives its boot."""
        boot = self._dependencies.identity.boot
        return [record for record in self._devices.removed_records.values() if record.boot == boot]

    def _prepared(self, uid: str) -> list[DeviceController]:
        """Return the controllers of the devices for which the claim ``uid`` is prepared."""
        return [
            each
            for each in self._devices.controllers.values()
            if any(claim.uid == uid for claim in each.state.record.prepared_claims)
        ]

    def _admin(self, uid: str) -> list[DeviceController]:
        return [
            each
            for each in self._devices.controllers.values()
            if any(claim.uid == uid for claim in each.state.record.admin_claims)
        ]

    # -- changing records ------------------------------------------------------------------------------------------

    async def _change(
        self,
        controllers: Iterable[DeviceController],
        change: RecordChange,
        removed: Sequence[tuple[DeviceRecord, tuple[Event, ...]]] = (),
    ) -> None:
        """Change the records of ``controllers`` in one transaction.

        Args:
            removed: next records of devices that have left the node, with their events.

        Raises:
            LedgerFailure: nothing has changed.
        """
        async with AsyncExitStack() as locks:
            changed: list[tuple[DeviceController, DeviceRecord]] = []
            rows: list[Event] = [event for _, events in removed for event in events]
            for controller in sorted(controllers, key=lambda each: each.id):
                await locks.enter_async_context(controller.state.lock)
                before = controller.state.record
                after, events = change(before)
                if after is before or controller.state.retired:
                    continue
                changed.append((controller, replace(after, version=before.version + 1)))
                rows += events
            if not changed and not removed:
                return

            async def store_and_apply() -> None:
                try:
                    records = (*(record for _, record in changed), *(record for record, _ in removed))
                    await self._dependencies.ledger.commit(LedgerChange(records=records, events=tuple(rows)))
                except LedgerFailure:
                    for controller, _ in changed:
                        controller.state.on_change()
                    raise
                for controller, record in changed:
                    controller.state.apply(record)
                for record, _ in removed:
                    self._devices.removed_records[record.device] = record
                self._dependencies.journal.record(rows)

            await run_to_completion(store_and_apply())
        self._devices.track_pods()


# See docs/decisions/0041-a-yielded-node.md.
class DriverlessClaims:
    """Implements :class:`scrubber.engine.views.Claims` without a driver: nothing is prepared, and nothing is scrubbed.

    A pod must be able to end on a yielded node, or its GPU driver could never be replaced. Every device is withheld
    there, so that the release is complete as soon as it is recorded.

    Args:
        refusal: the refusal of everything else.
        is_yielded: whether the node is yielded; otherwise the service waits for its driver.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        journal: Journal,
        clock: Clock,
        refusal: Callable[[], NotReady],
        is_yielded: Callable[[], bool],
    ) -> None:
        self._ledger = ledger
        self._journal = journal
        self._clock = clock
        self._refusal = refusal
        self._is_yielded = is_yielded
        self._lock = asyncio.Lock()

    async def prepare(self, call: PrepareClaimCall) -> tuple[GrantedDevice, ...]:
        raise self._refusal()

    async def set_pods(self, uid: str, pods: Sequence[Pod]) -> None:
        """Change nothing: the driver reports the pods again to the next epoch."""

    async def unprepare(
        self, uid: str, wait_seconds: float, actor: str = "driver", *, withdrawn: bool = False
    ) -> ClaimRelease:
        if not self._is_yielded():
            raise self._refusal()
        async with self._lock:
            records = (await self._ledger.load()).records.values()
            now = self._clock.wall()
            released = [each for each in (_released(record, uid, now, actor) for record in records) if each[1]]
            if released:
                change = LedgerChange(
                    records=tuple(record for record, _ in released),
                    events=tuple(event for _, rows in released for event in rows),
                )
                await run_to_completion(self._ledger.commit(change))
                self._journal.record(change.events)
        withheld = (record.device for record in records if record.claim(uid) is not None)
        return ClaimRelease(
            done=True, withheld=tuple(WithheldDevice(each, ErrorCode.NODE_YIELDED) for each in sorted(withheld))
        )

    def current(self) -> tuple[PreparedClaim, ...]:
        raise self._refusal()

    def unprepared(self) -> tuple[UnpreparedClaim, ...]:
        raise self._refusal()


def _may_be_used(claim: Claim, reading: KubeletReading) -> bool:
    """Whether the kubelet may list a pod of ``claim``."""
    pods = (*claim.pods, *reading.pods_of_claim(claim))
    return not all(reading.proves_absent(each) for each in pods)


def _released(
    record: DeviceRecord, uid: str, now: float, actor: str, elsewhere: Collection[Pod] = ()
) -> tuple[DeviceRecord, tuple[Event, ...]]:
    """Return ``record`` after a request to unprepare the claim ``uid``, with its events; unchanged if it is not prepared."""
    grant = record.prepared_grant(uid)
    if grant is None:
        return record, ()
    after = record.after_unprepare(uid, now, elsewhere)
    rows = [events.release_requested(grant, now, record.device, actor)]
    if (record.hygiene, after.hygiene) == (Hygiene.IN_USE, Hygiene.DIRTY):
        rows.append(Event("device.released", now, record.device, actor=actor, fields={"tenant": record.tenant}))
    return after, tuple(rows)


def prepared_claims(records: Iterable[DeviceRecord]) -> tuple[PreparedClaim, ...]:
    """Return the claims of ``records`` whose release is not complete, with their devices.

    A claim that an operator released on one of its devices counts as prepared as long as it is on another one.
    """
    claims: dict[str, Claim] = {}
    devices: dict[str, list[str]] = {}
    admin: dict[str, list[str]] = {}
    for record in sorted(records, key=lambda each: each.device):
        for claim in (each.claim for each in record.open_grants if each.claim is not None):
            known = claims.setdefault(claim.uid, claim)
            claims[claim.uid] = claim if claim.is_prepared else known
            devices.setdefault(claim.uid, []).append(record.device)
        for claim in record.admin_claims:
            claims.setdefault(claim.uid, claim)
            admin.setdefault(claim.uid, []).append(record.device)
    return tuple(
        PreparedClaim(claim, tuple(devices.get(uid, ())), tuple(admin.get(uid, ())))
        for uid, claim in sorted(claims.items())
    )
