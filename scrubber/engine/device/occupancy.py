"""Which processes and pods have one device: results of holder and pod checks, and their effect on its hygiene.

Only these checks release or adopt a device, or void its certificate for unauthorized use.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from scrubber.domain.assignment import Assignment, Claim, Pod, Process
from scrubber.domain.errors import DeviceBusy, DeviceFault, LedgerFailure, NotReady, Unreadable
from scrubber.domain.evidence import Finding
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.infrastructure import NamedHolder
from scrubber.domain.pods import PodLiveness, PodState
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.states import Hygiene
from scrubber.domain.telemetry import HolderKind
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.health import DeviceHealth
from scrubber.engine.device.state import DeviceState
from scrubber.engine.events import grantee_fields, release_requested
from scrubber.engine.pods import PodTracker
from scrubber.engine.refusals import held_by_own_pod
from scrubber.engine.unauthorized_use import UnauthorizedUseTracker
from scrubber.ports.record import Event, LedgerChange
from scrubber.ports.runtime import Clock

__all__ = ["MAX_WATCH_GAP", "Occupancy", "WatchCoverage"]

MAX_WATCH_GAP = 10.0
"""Seconds between two checks above which there is a watch gap: the device may have been used unseen.

The service was stalled (stopped, swapped out, an event loop that hung), or its driver did not answer.
"""


# See docs/decisions/0002-exceptions-need-an-unbroken-watch.md.
class WatchCoverage:
    """How long one device was seen free, and whether it was watched without a gap. Not durable."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_since: float | None = None
        self._last_check = self._heartbeat = clock.monotonic()
        self._stalled = -math.inf
        self._gap = False

    def begin_check(self) -> None:
        """Begin a check. If the last one was too long ago, there is a gap."""
        self._gap = self.has_gap

    def record_check(self, *, held: bool) -> None:
        """Note the result of a check."""
        self._last_check = self._clock.monotonic()
        if held:
            self._free_since = None
        elif self._free_since is None:
            self._free_since = self._last_check

    def heartbeat(self) -> None:
        """Note that the service is running; also called during a scrub, when the device must not be checked."""
        now = self._clock.monotonic()
        if now - self._heartbeat > MAX_WATCH_GAP:
            self._stalled = now
        self._heartbeat = now

    def was_stalled_since(self, moment: float) -> bool:
        """Return whether the service was stalled for too long after ``moment`` (monotonic seconds)."""
        return self._stalled >= moment or self._clock.monotonic() - max(self._heartbeat, moment) > MAX_WATCH_GAP

    def record_failure(self) -> None:
        """Note that an observation could not be recorded, which counts as a gap."""
        self._gap = True

    def reset(self, at: float | None = None) -> None:
        """Forget gaps before ``at`` (monotonic seconds; default: now).

        The device was proved clean, or the gap is recorded.
        """
        self._last_check, self._gap = self._clock.monotonic() if at is None else at, False

    def note_grant(self) -> None:
        """Note a new grant: the device was not seen free since."""
        self._free_since = None

    @property
    def has_gap(self) -> bool:
        """Whether the device was not checked for so long that it may have been used unseen."""
        return self._gap or self._clock.monotonic() - self._last_check > MAX_WATCH_GAP

    @property
    def free_for(self) -> float:
        """Seconds for which the device has been seen free."""
        return 0.0 if self._free_since is None else self._clock.monotonic() - self._free_since


class Occupancy:
    """Which processes and pods have one device.

    Attributes:
        coverage: how long the device was watched without a gap.
        unauthorized_use: observed unauthorized use, by pod.
        unauthorized_users: a message for each process without a grant at the last check. For display only.
        holders: the holders that the last scrub and the last check found. For display only.
    """

    def __init__(
        self, *, state: DeviceState, health: DeviceHealth, pods: PodTracker, dependencies: Dependencies
    ) -> None:
        self._state = state
        self._health = health
        self._pods = pods
        self._dependencies = dependencies
        self._held_by_no_process_since: float | None = None
        self.coverage = WatchCoverage(dependencies.clock)
        self.unauthorized_use = UnauthorizedUseTracker(
            state.id, containers=dependencies.containers, clock=dependencies.clock
        )
        self.unauthorized_users: tuple[str, ...] = ()
        self.holders: tuple[NamedHolder, ...] = ()
        self._users: tuple[NamedHolder, ...] = ()
        self._found_by_scrub: tuple[NamedHolder, ...] = ()
        self._container_ended = asyncio.Event()
        self._waiting_starts = 0

    @property
    def has_waiting_start(self) -> bool:
        """Whether a start waits in :meth:`wait_for_end`."""
        return self._waiting_starts > 0

    @property
    def next_end(self) -> asyncio.Event:
        """Set by the next call of :meth:`note_container_end`."""
        return self._container_ended

    def note_container_end(self) -> None:
        """Note that a container of a pod that has the device ended: starts that wait decide again at once."""
        self._container_ended.set()
        self._container_ended = asyncio.Event()

    async def wait_for_end(self, end: asyncio.Event, seconds: float) -> bool:
        """Wait ``seconds``, or until ``end`` is set; return whether it was.

        Args:
            end: :attr:`next_end` of a moment before the caller read anything: an end in the meantime counts.
        """
        self._waiting_starts += 1
        try:
            with suppress(TimeoutError):
                async with self._dependencies.clock.timeout(seconds):
                    await end.wait()
        finally:
            self._waiting_starts -= 1
        return end.is_set()

    async def is_held(self) -> bool:
        """Return whether a process holds the device now; track for how long none did.

        During a scrub the scrub holds it, and the driver is not queried: the query breaks an eraser's fence.
        """
        if self._state.job is not None:
            return True
        self.coverage.begin_check()
        held = await self._dependencies.holders.is_held(self._state.device)
        self.coverage.record_check(held=held)
        self._held_by_no_process_since = self._held_by_no_process_since if held else None
        return held

    def set_unauthorized_users(self, users: tuple[str, ...], holders: tuple[NamedHolder, ...] = ()) -> None:
        """Publish a message for each process that used the device without a grant at the last check.

        Args:
            holders: these processes, and programs of the node's infrastructure.
        """
        self._users = holders
        if self._name_holders() or users != self.unauthorized_users:
            self.unauthorized_users = users
            self._state.on_change()

    def set_holders_of_scrub(self, holders: Iterable[NamedHolder]) -> None:
        """Publish the holders that a scrub found, with the next change of the device."""
        self._found_by_scrub = tuple(holders)
        self._name_holders()

    def _name_holders(self) -> bool:
        """Combine the holders that are known, each since it was first seen; return whether they changed."""
        before = {each.holder.identity: each.since for each in self.holders}
        found = {each.holder.identity: each for each in (*self._users, *self._found_by_scrub)}
        named = tuple(
            replace(found[each], since=min(found[each].since, before.get(each, math.inf))) for each in sorted(found)
        )
        changed, self.holders = named != self.holders, named
        return changed

    async def is_held_without_process(self) -> bool:
        """Return whether the holder has had no process for the idle period of unknown pods.

        Such a holder never releases the device.
        """
        now = self._dependencies.clock.monotonic()
        if await self._dependencies.holders.list_users(self._state.device):
            self._held_by_no_process_since = None
            return False
        self._held_by_no_process_since = (
            now if self._held_by_no_process_since is None else self._held_by_no_process_since
        )
        return now - self._held_by_no_process_since >= self._state.policy.limits.unknown_pod_idle_period

    async def own_pod_refusal(self, starting_pod: Pod | None) -> NotReady | None:
        """Return the refusal that names a process of ``starting_pod`` that holds the device now.

        Only for a pod of an open grant; None otherwise.
        """
        if starting_pod is None or not any(grant.pod == starting_pod for grant in self._state.record.open_grants):
            return None
        containers = self._dependencies.containers
        for user in await self._dependencies.holders.list_users(self._state.device):
            known = bool(user.pid) and user.kind is not HolderKind.INFRASTRUCTURE
            if known and await containers.pod_uid_of(user.pid) == starting_pod.uid:
                try:
                    processes = await containers.processes(starting_pod)
                except Unreadable:
                    processes = ()
                named = {each.identity: each.container for each in processes}
                return held_by_own_pod(self._state.id, starting_pod, user, named.get(user.identity, ""))
        return None

    async def pod_liveness(
        self,
        starting_pod: Pod | None = None,
        *,
        shares: bool = False,
        excluded_pod: Pod | None = None,
        claim: Claim | None = None,
    ) -> list[tuple[Grant, PodLiveness]]:
        """Return the liveness of the pods of each open grant, from what the pod tracker knows now (refresh it first).

        A grant of a claim is returned once for each of its pods, as :meth:`~scrubber.domain.record.Grant.by_pod` does.

        Args:
            starting_pod, shares: as :meth:`scrubber.engine.pods.PodTracker.liveness`.
            excluded_pod: a pod to skip: checking the processes of a pod can mean a walk over all processes.
            claim: the claim that is to be prepared: of its pods one may be about to start, so their sandboxes do not
                count where they were granted the device otherwise.
        """
        dependencies, limits = self._dependencies, self._state.policy.limits
        found = []
        for grant in [part for whole in self._state.record.open_grants for part in whole.by_pod()]:
            if excluded_pod is not None and grant.pod == excluded_pod:
                continue
            own = claim is not None and grant.claim is None and grant.pod in claim.pods
            where = await self._pods.liveness(
                grant,
                limits=limits,
                boot=dependencies.identity.boot,
                wall=dependencies.clock.wall(),
                free_for=self.coverage.free_for,
                starting_pod=grant.pod if own else starting_pod,
                shares=shares or own,
            )
            found.append((grant, where))
        return found

    async def have_pods_ended(self) -> bool:
        """Return whether the kernel shows that every pod of the open grants has ended, so that no list is needed."""
        standings = await self.pod_liveness()
        return bool(standings) and all(where.ended for _, where in standings)

    async def void_certificate(self, record_before: DeviceRecord) -> bool:
        """Void the certificate of a device that was found held without a grant; return whether it was voided.

        Args:
            record_before: the record before the check. A certificate that was issued since then stays valid.
        """
        async with self._state.lock:
            unchanged = (
                self._state.record.hygiene is Hygiene.CLEAN
                and self._state.record.certificate == record_before.certificate
            )
            if not unchanged or self._state.job is not None:
                return False
            event = Event("device.marked-dirty", self._dependencies.clock.wall(), self._state.id)
            self._state.disturbances.count(self._state.allocations)
            await self._commit_or_mark_gap(LedgerChange(events=(event,)), self._state.record.after_voided_certificate())
            return True

    async def _commit_or_mark_gap(self, change: LedgerChange, record: DeviceRecord) -> None:
        """Commit a change that revokes trust. If that fails, the next check revokes it."""
        try:
            await self._state.commit(change, record)
        except LedgerFailure:
            self.coverage.record_failure()
            raise

    async def void_for_unauthorized_use(
        self, event: Event, findings: Iterable[Finding] = (), *, observed: bool = True
    ) -> None:
        """Void certificates and exceptions of a device that was used without a grant, or may have been.

        Args:
            event: the event of the use for the audit log.
            findings: the faults that the policy derives from the use.
            observed: whether the use was seen; False if it only cannot be ruled out.
        """
        async with self._state.lock:
            before = after = self._state.record
            if self._state.job is None:
                after = before.after_unauthorized_use(observed=observed)
            faults = tuple(findings)
            if faults:
                after = self._health.apply_findings(after, faults, event.at)
            after = replace(after, version=before.version + 1)
            with self._health.reserve_soft_quarantine(before, after):
                events = (event, *self._health.change_events(before, after, event.at))
                await self._commit_or_mark_gap(LedgerChange(events=events), after)

    async def void_after_gap(self) -> bool:
        """Void what was proved before a watch gap; return whether there was one to act on."""
        if not self.coverage.has_gap or self._state.job is not None:
            return False
        if not self._state.record.exclusive_use and self._state.record.hygiene is not Hygiene.CLEAN:
            self.coverage.reset()
            return False
        message = (
            f"The device was not watched for over {MAX_WATCH_GAP:g} s, or what was observed could not be "
            "recorded; another process may have used it."
        )
        fields = {"reason": "watch-gap", "message": message}
        event = Event("certificate.voided", self._dependencies.clock.wall(), self._state.id, fields=fields)
        await self.void_for_unauthorized_use(event, observed=False)
        self.coverage.reset()
        return True

    @asynccontextmanager
    async def keep_out_of_use(self) -> AsyncIterator[None]:
        """Keep the device from being granted while the context is open; voids its unused certificate.

        Raises:
            DeviceBusy: the device is in use or being scrubbed.
        """
        async with self._state.lock:
            if self._state.record.hygiene is Hygiene.IN_USE or self._state.job is not None:
                raise DeviceBusy(
                    f"Device {self._state.id}, which would be reset with it, is {self._state.record.hygiene.value}."
                )
            if self._state.record.hygiene is Hygiene.CLEAN:
                event = Event("device.marked-dirty", self._dependencies.clock.wall(), self._state.id)
                await self._state.commit(LedgerChange(events=(event,)), self._state.record.after_voided_certificate())
            yield

    async def release(self, record_before: DeviceRecord) -> None:
        """Release the device, whose grants have ended: it becomes dirty.

        Args:
            record_before: the record that the conclusion is based on. A device that was granted since is not released.
        """
        async with self._state.lock:
            if (
                self._state.record.hygiene is Hygiene.IN_USE
                and self._state.record.grant_sequence == record_before.grant_sequence
            ):
                fields = {"tenant": self._state.record.tenant}
                event = Event("device.released", self._dependencies.clock.wall(), self._state.id, fields=fields)
                await self._state.commit(LedgerChange(events=(event,)), self._state.record.after_release())

    async def release_if_over(self) -> None:
        """Release the device if it is in use and every pod that was granted it is done with it."""
        record = self._state.record
        if record.hygiene is Hygiene.IN_USE and await self._is_over():
            await self.release(record)

    async def _is_over(self) -> bool:
        """Whether every pod that was granted the device has ended, or is no longer listed and over or a proved leftover.

        A pod that no source names may be anywhere: its device is released only by the next hand-over, except when the
        device is out of service and was not seen held for the idle period of unknown pods. Otherwise it could never
        return to service.
        """
        standings = await self.pod_liveness()
        for grant, where in standings:
            if where.state is PodState.ALIVE:
                return False
            if grant.pod is None and self._state.record.advertised:
                return False
            unproven = where.state is PodState.OVER and not where.ended
            if unproven and grant.pod is not None and not self._pods.is_absent(grant.pod):
                return False
        if not standings:
            return False
        try:
            held = await self.is_held()
        except DeviceFault:
            if self._state.record.advertised:
                raise
            held = False  # out of service and answers no query; once released, it is dirty and checked again
        # The scrub names the holder; the claim's release would otherwise wait for it without end.
        if all(grant.claim is not None and where.ended for grant, where in standings):
            return True
        # A leftover explains why the device is held; otherwise a process without a grant holds it.
        if not held or any(where.state is PodState.LEFTOVER for _, where in standings):
            return True
        # No pod starts on a device that is out of service, so only this check detects a holder without a process.
        return not self._state.record.advertised and await self.is_held_without_process()

    async def release_claims(self, record_before: DeviceRecord, actor: str) -> None:
        """Release the device and its claims, which were never unprepared, by an operator's order.

        Args:
            record_before: the record that the conclusion is based on. Nothing is released if it has changed since.
        """
        async with self._state.lock:
            record = self._state.record
            if record.version != record_before.version:
                return
            now = self._dependencies.clock.wall()
            after, rows = record, []
            for grant in record.open_grants:
                if grant.claim is not None:
                    after = after.with_claim(grant.claim.uid, lambda claim: replace(claim, released_at=now))
                    rows.append(release_requested(grant, now, self._state.id, actor))
            rows.append(Event("device.released", now, self._state.id, actor=actor, fields={"tenant": record.tenant}))
            after = replace(after.after_release(), version=record.version + 1)
            await self._state.commit(LedgerChange(events=tuple(rows)), after)

    async def adopt(self, assignment: Assignment | None = None, baseline: tuple[Process, ...] = ()) -> None:
        """Leave the device with a pod that got it without a hand-over; it is scrubbed once that pod is over.

        Args:
            assignment: the pod's assignment; None where the open grants on record name the pod.
            baseline: the processes presumed to be the pod's sandbox.
        """
        async with self._state.lock:
            record = self._state.record
            if self._state.job is not None or record.hygiene not in (Hygiene.DIRTY, Hygiene.IN_USE):
                return  # a scrub has begun: it finds the pod, and so does the next check
            now, grant = self._dependencies.clock.wall(), None
            if assignment is not None:
                if record.hygiene is Hygiene.IN_USE and any(assignment.pod in each.pods for each in record.open_grants):
                    return  # it was granted in the meantime
                boot = self._dependencies.identity.boot
                grant = Grant(
                    record.grant_sequence + 1,
                    assignment,
                    HandOverKind.UNKNOWN,
                    now,
                    boot,
                    basis=Basis.ADOPTED,
                    baseline=baseline,
                )
            fields = grantee_fields(record.open_grants[-1] if grant is None else grant)
            event = Event("device.adopted", now, self._state.id, fields=fields)
            grants = () if grant is None else ((self._state.id, grant),)
            await self._state.commit(LedgerChange(grants=grants, events=(event,)), record.after_adoption(grant))

    async def record_started_container(self, sequence: int, cgroup: str, container: str | None) -> None:
        """Record which container started on the last grant; does nothing if ``sequence`` is not the last grant.

        Args:
            cgroup: name of the container's cgroup.
            container: its name, if the grant names another one.
        """
        async with self._state.lock:
            last = self._state.record.last_grant
            if last is None or last.sequence != sequence or self._state.record.hygiene is not Hygiene.IN_USE:
                return
            fields: dict[str, str | int | float | bool | None] = {"grant": sequence}
            if last.pod is not None:
                fields |= {"tenant": last.pod.namespace, "pod": last.pod.name}
            event = Event(
                "grant.identified",
                self._dependencies.clock.wall(),
                self._state.id,
                fields=fields | {"container": container},
            )
            events = () if container is None else (event,)
            await self._state.commit(
                LedgerChange(events=events), self._state.record.with_started_container(cgroup, container)
            )

    async def record_grant_pod(self, sequence: int, assignment: Assignment, baseline: tuple[Process, ...]) -> None:
        """Record the pod of the last grant; does nothing if ``sequence`` is no longer the last grant."""
        async with self._state.lock:
            if self._state.record.hygiene is not Hygiene.IN_USE or self._state.record.grant_sequence != sequence:
                return
            pod = assignment.pod
            fields: dict[str, str | int | float | bool | None] = {"grant": sequence}
            fields |= {"tenant": pod.namespace, "pod": pod.name}
            event = Event("grant.identified", self._dependencies.clock.wall(), self._state.id, fields=fields)
            await self._state.commit(
                LedgerChange(events=(event,)), self._state.record.with_grant_assignment(assignment, baseline)
            )
