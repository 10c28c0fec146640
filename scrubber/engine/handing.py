"""One hand-over from request to answer: get every device ready, then grant all of them in one transaction, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from scrubber.domain.admission import Answer, Decision, may_be_handed_over
from scrubber.domain.assignment import Assignment, Pod, Process, Reading, Trust
from scrubber.domain.certify import certify
from scrubber.domain.errors import DeviceFault, NotReady, Quarantined, ScrubberError, Unreadable
from scrubber.domain.evidence import Finding, Occasion, Outcome, Path, ScrubRecord, Severity, Step
from scrubber.domain.handover import HandOver, judge
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.leftover import PodState
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.signals import fault_finding
from scrubber.engine import narrate
from scrubber.engine.finish import to_the_end
from scrubber.engine.instruments import Instruments
from scrubber.engine.keeper import Keeper
from scrubber.engine.views import Granted
from scrubber.ports import Change

__all__ = ["Handing"]

_POLL_FIRST, _POLL_LAST = 0.02, 0.25
_CHECK_AGE = 2.0
"""Seconds for which a fast path's checks count: a device that waited longer for its siblings is checked again."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """What one device's grant would rest on, as of a version of its record."""

    version: int
    assignment: Assignment | None
    certain: bool
    kind: HandOver
    decision: Decision
    check: ScrubRecord
    checked_at: float
    allocations: int


class Handing:
    """One request for a set of devices.

    Args:
        keepers: of the devices asked for, in the order of their ids: the order in which locks are taken.
        earlier: all grants that the node knows of, for the baseline of a pod that has other devices too.
        deadline: monotonic seconds.
    """

    def __init__(
        self,
        keepers: Sequence[Keeper],
        *,
        instruments: Instruments,
        earlier: Callable[[], Iterable[Grant]],
        deadline: float,
    ) -> None:
        self._keepers = keepers
        self._instruments = instruments
        self._earlier = earlier
        self._began = instruments.clock.monotonic()
        self._deadline = deadline
        self._asked_for: dict[str, Assignment | None] = {}
        self.granted: tuple[Granted, ...] | None = None

    async def run(self) -> tuple[Granted, ...]:
        """All or none.

        Raises:
            Quarantined, Held, NotReady, LedgerFailure.
        """
        while True:
            ready = await self._together([self._get_ready(keeper) for keeper in self._keepers])
            try:
                granted = await self._grant(ready)
            except DeviceFault:
                granted = None  # the next round meets it again, and takes the device out of service
            if granted is not None:
                return granted
            if self._left() <= 0:
                raise NotReady(
                    "A device changed while it was being granted, until the time was up.",
                    public="A device changed while it was being granted. The start is tried again.",
                )
            await self._instruments.clock.sleep(_POLL_FIRST)

    def _left(self) -> float:
        return self._deadline - self._instruments.clock.monotonic()

    async def _together(self, waits: Sequence[Awaitable[_Ready]]) -> list[_Ready]:
        """All results, or the first refusal: it ends the waiting of the others, not the scrubs they wait for."""
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- getting one device ready ----------------------------------------------------------------------------------

    async def _get_ready(self, keeper: Keeper) -> _Ready:
        pause = _POLL_FIRST
        while True:
            reading = await self._instruments.pods.refresh()
            outcome = await self._look(keeper, reading)
            if isinstance(outcome, _Ready):
                return outcome
            left = self._left()
            if left <= 0:
                raise outcome or _being_scrubbed(keeper)
            if outcome is not None:
                await self._instruments.clock.sleep(min(pause, left))
                pause = min(_POLL_LAST, pause * 2)

    async def _look(self, keeper: Keeper, reading: Reading) -> _Ready | ScrubberError | None:
        """One round; a device that cannot be looked at is out of service."""
        try:
            return await self._try(keeper, reading)
        except DeviceFault as fault:
            await keeper.report([fault_finding(Step.HOLDERS, fault)])
            device = keeper.device.id
            return NotReady(
                f"Device {device} cannot be looked at: {fault}",
                public=f"Device {device} cannot be looked at now. The start is tried again.",
                code=fault.code,
            )

    async def _try(self, keeper: Keeper, reading: Reading) -> _Ready | ScrubberError | None:
        """One round: ready, the refusal to give if time is up now, or None when something moved: look again at once."""
        policy = self._instruments.policy()
        device, record = keeper.device.id, keeper.record
        certain = reading.assignment_of(device)
        following = certain or reading.hint_of(device)
        asking = None if following is None else following.pod
        kind = judge(
            record.previous,
            certain,
            allocated_since=keeper.allocated_since,
            containers=reading.containers_with(device),
            init_containers_known=reading.init_containers_known,
        )
        if self._asked_for.setdefault(device, following) != following:
            raise NotReady(
                f"Device {device} was assigned anew while its hand-over was under way.",
                public=f"Device {device} was assigned anew. The start is tried again.",
                code="reassigned",
            )
        if following is None and reading.trust is Trust.TRUSTED and not reading.having(device):
            raise NotReady(
                f"The kubelet assigns device {device} to nobody, so nobody can be about to start on it.",
                public=f"Device {device} is assigned to no pod of this node. The start is tried again.",
                code="unassigned",
            )
        allocations = keeper.allocations
        decision = may_be_handed_over(record, kind, policy, self._instruments.identity)
        if decision.answer is Answer.REFUSE:
            await self._let_it_recover(keeper, record, asking)
            raise Quarantined(f"Device {device}: {decision.reason}.", public=keeper.view.refusal)
        if decision.answer is Answer.WAIT_FOR_SCRUB:
            return await self._join(keeper, asking)
        if decision.exception != "observe":
            if not decision.go:
                return await self._scrub(keeper, record, asking)
            others = await self._other_pods(keeper, asking)
            if PodState.LIVING in others:
                return await keeper.obstacle(asking)
            if PodState.LEFTOVER in others:
                return await self._scrub(keeper, record, asking)
        check, result = await keeper.check(Occasion.START)
        if result.outcome is not Outcome.PASSED and decision.exception != "observe":
            return await self._after_failed_check(keeper, record, result.findings, asking)
        now = self._instruments.clock.monotonic()
        return _Ready(record.version, following, certain is not None, kind, decision, check, now, allocations)

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
        held = any(finding.code == "held" for finding in findings)
        if held and record.hygiene is not Hygiene.IN_USE and await keeper.touched():
            return None
        if held:
            device = keeper.device.id
            return NotReady(
                f"Device {device} is still held; its next start waits for the holder's end.",
                public=f"Device {device} is {keeper.record.state}: it is still held. The start is tried again.",
                code="held",
            )
        return await self._scrub(keeper, record, asking)

    async def _join(self, keeper: Keeper, asking: Pod | None) -> ScrubberError | None:
        job = keeper.job
        left = self._left()
        if job is None or left <= 0:
            return _being_scrubbed(keeper)
        try:
            async with self._instruments.clock.timeout(left):
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

    # -- granting --------------------------------------------------------------------------------------------------

    async def _grant(self, ready: Sequence[_Ready]) -> tuple[Granted, ...] | None:
        """Grant everything in one transaction, or answer None because something has moved since it was ready."""
        baselines = [await self._baseline(each) for each in ready]
        async with AsyncExitStack() as locks:
            for keeper in self._keepers:
                await locks.enter_async_context(keeper.deciding())
            for keeper, each in zip(self._keepers, ready, strict=True):
                aged = self._instruments.clock.monotonic() - each.checked_at > _CHECK_AGE
                if aged or keeper.record.version != each.version or keeper.job is not None:
                    return None
                if keeper.retired or keeper.allocations != each.allocations:
                    return None
                if each.decision.exception != "observe" and await keeper.held():
                    return None
            change, granted = Change(), []
            for keeper, each, baseline in zip(self._keepers, ready, baselines, strict=True):
                part, answer = self._one(keeper.record, each, baseline)
                change |= part
                granted.append(answer)

            async def store_and_believe() -> None:
                await self._instruments.ledger.commit(change)
                for keeper, record, each in zip(self._keepers, change.records, ready, strict=True):
                    keeper.believe_granted(record, each.allocations)
                self.granted = tuple(granted)
                self._instruments.journal.tell(change.events)

            await to_the_end(store_and_believe())
        return self.granted

    async def _baseline(self, ready: _Ready) -> tuple[Process, ...]:
        boot = self._instruments.identity.boot
        earlier = [grant for grant in self._earlier() if grant.boot == boot]
        try:
            return await self._instruments.pods.baseline(ready.assignment, earlier)
        except Unreadable as unreadable:
            if ready.decision.exception == "observe":
                return ()
            raise NotReady(
                f"The processes of the pod that is to start cannot be told, so its end could not be either: {unreadable}",
                public="The pod's processes cannot be told on this node now. The start is tried again.",
                code="pod-unreadable",
            ) from unreadable

    def _one(self, record: DeviceRecord, ready: _Ready, baseline: tuple[Process, ...]) -> tuple[Change, Granted]:
        """The change that grants one device, and its part of the answer."""
        instruments, now = self._instruments, self._instruments.clock.wall()
        sequence = record.grants + 1
        exception = ready.decision.exception
        used = None if record.certificate is None or exception is not None else record.certificate
        fast = certify(
            ready.check,
            ready.check.steps,
            record,
            identity=instruments.identity,
            policy=instruments.policy(),
            certificate_id=instruments.new_id("cert"),
            now=now,
            rests_on=record.rests_on,
            exception=exception,
        )
        fast = replace(fast, next_grant=sequence)
        check = replace(ready.check, certificate=fast.id)
        grant = Grant(
            sequence, ready.assignment, ready.kind, now, instruments.identity.boot, fast.id, exception, baseline
        )
        spent = (fast,) if used is None else (replace(used, next_grant=sequence), fast)
        seconds = instruments.clock.monotonic() - self._began
        path = Path.FAST if used is None or used.issued_at < now - seconds else Path.SLOW
        change = Change(
            records=(record.granted(grant, fast, certain=ready.certain),),
            grants=((record.device, grant),),
            certificates=spent,
            scrubs=(check,),
            events=(narrate.granted(record.device, grant, path.value, seconds),),
        )
        return change, Granted(record.device, sequence, ready.kind, path, fast.id, exception)


def _being_scrubbed(keeper: Keeper) -> NotReady:
    scrub = keeper.job.id if keeper.job is not None else "about to start"
    sentence = f"Device {keeper.device.id} is {keeper.record.state} (scrub {scrub})."
    return NotReady(sentence, public=f"{sentence} The start is tried again and joins it.", code="scrubbing")
