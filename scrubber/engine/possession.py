"""Who has the device: what looks at its holders and pods show, and what follows for its hygiene.

A device is released, adopted or touched only by what is seen here; its scrubs are the keeper's (:mod:`scrubber.engine.keeper`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from scrubber.domain.assignment import Assignment, Pod, Process
from scrubber.domain.device import Device
from scrubber.domain.errors import Held, LedgerFailure, NotReady, Unreadable
from scrubber.domain.evidence import Finding
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.leftover import Standing
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.telemetry import HolderKind
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.job import ScrubJob
from scrubber.engine.lookout import GAP
from scrubber.engine.neighbourhood import Neighbourhood
from scrubber.engine.refusals import held_by_own_pod
from scrubber.engine.vitals import Vitals
from scrubber.ports.record import Change, Event

__all__ = ["Possession"]


class Possession(Vitals):
    """One device's."""

    def __init__(
        self, device: Device, record: DeviceRecord, *, dependencies: Dependencies, around: Neighbourhood
    ) -> None:
        super().__init__(device, record, dependencies=dependencies, around=around)
        self._job: ScrubJob | None = None
        self._nobodys_since: float | None = None
        self._strangers: tuple[str, ...] = ()

    @property
    def job(self) -> ScrubJob | None:
        """The scrub under way."""
        return self._job

    async def held(self) -> bool:
        """Whether anybody holds the device now; keeps count of how long nobody did.

        While it is scrubbed the scrub holds it, and the driver is not asked: the question breaks an eraser's fence.
        """
        if self._job is not None:
            return True
        self._lookout.look()
        held = await self._dependencies.holders.held(self.device)
        self._lookout.saw(held=held)
        self._nobodys_since = self._nobodys_since if held else None
        return held

    def note_strangers(self, seen: tuple[str, ...]) -> None:
        """Who uses the device without a grant, by the last look: a sentence each. For people; decides nothing."""
        if seen != self._strangers:
            self._strangers = seen
            self._changed()

    async def nobodys(self) -> bool:
        """Whether what holds the device has had no process for the settle time: nobody will ever let it go."""
        now = self._dependencies.clock.monotonic()
        if await self._dependencies.holders.users(self.device):
            self._nobodys_since = None
            return False
        self._nobodys_since = now if self._nobodys_since is None else self._nobodys_since
        return now - self._nobodys_since >= self.policy.limits.settle

    async def held_by_own_pod(self, asking: Pod | None) -> NotReady | None:
        """The refusal that names a process of ``asking``, which was granted the device before, that holds it now."""
        if asking is None or not any(grant.pod == asking for grant in self._record.open_grants):
            return None
        containers = self._dependencies.containers
        for user in await self._dependencies.holders.users(self.device):
            known = bool(user.pid) and user.kind is not HolderKind.INFRASTRUCTURE
            if known and await containers.pod_uid_of(user.pid) == asking.uid:
                try:
                    processes = await containers.processes(asking)
                except Unreadable:
                    processes = ()
                named = {each.identity: each.container for each in processes}
                return held_by_own_pod(self.device.id, asking, user, named.get(user.identity, ""))
        return None

    async def standings(
        self, asking: Pod | None = None, *, shares: bool = False, leaving_out: Pod | None = None
    ) -> list[tuple[Grant, Standing]]:
        """Where the pod of each open grant stands, by what the pod watch knows now (refresh it first).

        Args:
            asking, shares: as :meth:`scrubber.engine.pods.PodWatch.standing`.
            leaving_out: a pod that is not asked about: looking at a pod's processes can mean walking over all there are.
        """
        dependencies, limits = self._dependencies, self.policy.limits
        found = []
        for grant in self._record.open_grants:
            if leaving_out is not None and grant.pod == leaving_out:
                continue
            where = await dependencies.pods.standing(
                grant,
                limits=limits,
                boot=dependencies.identity.boot,
                wall=dependencies.clock.wall(),
                free_for=self._lookout.free_for,
                asking=asking,
                shares=shares,
            )
            found.append((grant, where))
        return found

    async def touched(self, seen: DeviceRecord) -> bool:
        """Somebody was found to hold the device although it is granted to nobody: void the certificate; True if so.

        Args:
            seen: the record as it was before the look. A certificate that was issued since is another one's.
        """
        async with self._lock:
            standing = self._record.hygiene is Hygiene.CLEAN and self._record.certificate == seen.certificate
            if not standing or self._job is not None:
                return False
            event = Event("device.touched", self._dependencies.clock.wall(), self.device.id)
            self._disturbances.note(self.allocations)
            await self._commit_seen(Change(events=(event,)), self._record.touched())
            return True

    @property
    def scrub_put_off(self) -> float:
        """Seconds for which a scrub that no start waits for is still put off: the device is used again and again ungranted."""
        return self._disturbances.pause(self.allocations)

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
                after = self._judged(after, faults, event.at)
            after = replace(after, version=before.version + 1)
            with self._leaving(before, after):
                await self._commit_seen(Change(events=(event, *self._health_events(before, after, event.at))), after)

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
        event = Event("certificate.voided", self._dependencies.clock.wall(), self.device.id, fields=fields)
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
                event = Event("device.touched", self._dependencies.clock.wall(), self.device.id)
                await self._commit(Change(events=(event,)), self._record.touched())
            yield

    async def release(self, seen: DeviceRecord) -> None:
        """Nobody uses the device rightfully any more: dirty from here.

        Args:
            seen: the record that this was concluded from. A device that was granted meanwhile is not released by it.
        """
        async with self._lock:
            if self._record.hygiene is Hygiene.IN_USE and self._record.grants == seen.grants:
                fields = {"tenant_namespace": self._record.tenant}
                event = Event("device.released", self._dependencies.clock.wall(), self.device.id, fields=fields)
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
            event = Event("device.adopted", self._dependencies.clock.wall(), self.device.id, fields=fields)
            grants = () if grant is None else ((self.device.id, grant),)
            await self._commit(Change(grants=grants, events=(event,)), self._record.adopted(grant))

    async def note_started(self, sequence: int, cgroup: str, container: str | None) -> None:
        """The container that started on the last grant is known now; nothing changes if ``sequence`` is not the last grant.

        Args:
            container: its name, if it is another one than the grant says.
        """
        async with self._lock:
            last = self._record.last_grant
            if last is None or last.sequence != sequence or self._record.hygiene is not Hygiene.IN_USE:
                return
            fields: dict[str, str | int | float | bool | None] = {"grant": sequence}
            if last.pod is not None:
                fields |= {"tenant_namespace": last.pod.namespace, "pod": last.pod.name}
            event = Event(
                "grant.named", self._dependencies.clock.wall(), self.device.id, fields=fields | {"container": container}
            )
            events = () if container is None else (event,)
            await self._commit(Change(events=events), self._record.started(cgroup, container))

    async def name_grant(self, sequence: int, assignment: Assignment, baseline: tuple[Process, ...]) -> None:
        """The pod of the last grant is known now; nothing changes if ``sequence`` is the last grant no more."""
        async with self._lock:
            if self._record.hygiene is not Hygiene.IN_USE or self._record.grants != sequence:
                return
            pod = assignment.pod
            fields: dict[str, str | int | float | bool | None] = {"grant": sequence}
            fields |= {"tenant_namespace": pod.namespace, "pod": pod.name}
            event = Event("grant.named", self._dependencies.clock.wall(), self.device.id, fields=fields)
            await self._commit(Change(events=(event,)), self._record.named(assignment, baseline))
