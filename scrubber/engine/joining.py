"""Who else has a device: the refusal of one with two owners, and joining one that is shared.

Others hold the device by grants of their own, so that somebody holds it says nothing. Instead everybody who is seen to use
it must be one of them, and the certificate says that no more was asked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from scrubber.domain.assignment import Assignment, Pod, Reading
from scrubber.domain.basis import UNPROVED
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import NotReady, Retry
from scrubber.domain.evidence import (
    Finding,
    FindingCode,
    Occasion,
    Outcome,
    Path,
    ScrubRecord,
    Step,
    StepResult,
    Verdict,
)
from scrubber.domain.health import Health
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.leftover import PodState, Standing
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.sharing import Beside, Neighbour, beside
from scrubber.domain.sharing import Verdict as SharingVerdict
from scrubber.domain.telemetry import Holder, HolderKind
from scrubber.domain.using import Use, judge_use
from scrubber.engine import scrub
from scrubber.engine.instruments import Instruments
from scrubber.engine.keeper import Keeper
from scrubber.engine.scrub import ScrubResult
from scrubber.engine.steps.work import Work

__all__ = ["Company", "check_beside", "company_of", "foreign_refusal", "joined", "must_wait", "neighbours_of"]


_LOOK_AGAIN = 0.1
"""Seconds after which who seems to have no grant is looked at once more: a process that has just ended shows no pod."""


@dataclass(frozen=True, slots=True)
class Company:
    """What sharing means for one start.

    Attributes:
        over: sequences of grants whose pods are over and proved to be the kubelet's no longer: nothing of them is left to
            wait for.
    """

    verdict: SharingVerdict
    over: frozenset[int] = frozenset()


async def company_of(
    keeper: Keeper, starting: Assignment | None, share: frozenset[str], reading: Reading, instruments: Instruments
) -> Company:
    """Whom a container would be beside on ``share`` of the device, and whether it may.

    Args:
        starting: whose start it is, by the kubelet's list, or for an init container by its checkpoint beside a list that is
            trusted; None when that is not certain.
    """
    device, record, asking = keeper.device.id, keeper.record, None if starting is None else starting.pod
    # A pod is beside itself only where it has another share, too: else it starts again on the one it had.
    several = asking is not None and bool(reading.shares_of(asking, device) - share)
    standings = await keeper.standings(asking, shares=several)
    others = [(grant, where) for grant, where in standings if several or asking is None or grant.pod != asking]
    verdict = beside(
        asking,
        [_neighbour(grant, where) for grant, where in others],
        keeper.policy.sharing,
        sound=record.hygiene is Hygiene.IN_USE and record.health is Health.HEALTHY and not record.tainted,
    )
    living = [grant for grant, where in others if where.state is PodState.LIVING]
    if verdict.answer is Beside.WAIT and asking is not None and all(grant.pod == asking for grant in living):
        # No other pod is there to wait for: the device is scrubbed, unless a container of the pod holds it.
        verdict = SharingVerdict(Beside.ALONE)
    over = (
        grant.sequence
        for grant, where in others
        if where.state is PodState.OVER and grant.pod is not None and instruments.pods.absent(grant.pod)
    )
    return Company(verdict, frozenset(over) if verdict.answer is Beside.JOIN else frozenset())


async def neighbours_of(
    keeper: Keeper, starting: Assignment | None, share: frozenset[str], reading: Reading
) -> tuple[Neighbour, ...]:
    device, asking = keeper.device.id, None if starting is None else starting.pod
    several = asking is not None and bool(reading.shares_of(asking, device) - share)
    standings = await keeper.standings(asking, shares=several)
    return tuple(
        _neighbour(grant, where) for grant, where in standings if several or asking is None or grant.pod != asking
    )


def _neighbour(grant: Grant, where: Standing) -> Neighbour:
    share = grant.assignment is not None and bool(grant.assignment.shares)
    return Neighbour(grant.pod, where.state, share, grant.basis not in UNPROVED)


def foreign_refusal(device: str, asking: Pod | None, reading: Reading, own: frozenset[str]) -> NotReady | None:
    """The refusal while another plugin or driver has given the device to another pod, too: then it has two owners.

    Args:
        own: our own resources; while none is known nothing is foreign.
    """
    for each in reading.foreign(device, own) if own else ():
        if each.pod != asking:
            return NotReady(
                f"Device {device} is {each.pod.namespace}/{each.pod.name}'s, too, as {each.resource}, which is none of our "
                f"resources ({', '.join(sorted(own))}): stop that plugin or driver, or exclude the device from it.",
                public=f"Device {device} was also given out as {each.resource}. The start is tried again.",
                code=ErrorCode.FOREIGN_ASSIGNMENT,
            )
    return None


def must_wait(device: str, reason: str) -> NotReady:
    """The refusal of a start on a device that others have."""
    return NotReady(
        f"Device {device} cannot be shared now: {reason}.",
        public=f"Device {device} is in use, and this pod may not be on it beside whoever has it. The start is tried again.",
        code=ErrorCode.SHARING,
    )


async def check_beside(keeper: Keeper, pods: int, instruments: Instruments) -> tuple[ScrubRecord, ScrubResult]:
    """The fast path's checks of a device that ``pods`` pods are on by grants. It changes and records nothing."""
    policy = keeper.policy
    check = instruments.new_id("check")
    record = ScrubRecord(check, keeper.device.id, Path.FAST, Occasion.START, instruments.clock.wall())
    plan = policy.plan(Path.FAST, Occasion.START)
    work = Work(
        scrub=check,
        device=keeper.device,
        record=keeper.record,
        plan=replace(plan, steps=tuple(step for step in plan.steps if step is not Step.HOLDERS)),
        policy=policy,
        instruments=instruments,
        standings=keeper.standings,
        urgent=lambda: True,
        progress=lambda _: None,
        still=_nobody,
    )
    users = await _check_users(work, pods)
    result = await scrub.run(work, lambda _: None)
    failed = users.verdict is Verdict.FAILED and result.outcome is Outcome.PASSED
    result = ScrubResult(Outcome.HELD_UP if failed else result.outcome, (users, *result.steps))
    return replace(record, ended=instruments.clock.wall(), outcome=result.outcome, steps=result.steps), result


async def _check_users(work: Work, pods: int) -> StepResult:
    """Whether everybody who is seen to use the device has it by a grant. Claims nothing: a walk is not made."""
    instruments, start = work.instruments, work.instruments.clock.monotonic()
    found: list[Finding] = []
    try:
        if before := await _ungranted(work):
            await instruments.clock.sleep(_LOOK_AGAIN)
            for owner, user in (await _ungranted(work)).items():
                if owner in before:
                    who = f"PID {user.pid} ({user.command or 'unknown'})"
                    found.append(
                        work.dirty(Step.HOLDERS, FindingCode.UNKNOWN_HOLDER, f"{who} uses the device without a grant.")
                    )
    except Retry as away:
        found.append(work.dirty(Step.HOLDERS, away.code, str(away)))
    seconds = instruments.clock.monotonic() - start
    said = f"holders: shared with {pods} pod{'' if pods == 1 else 's'}, whose processes have it by grants of their own"
    verdict = Verdict.FAILED if found else Verdict.NOT_COVERED
    return StepResult(Step.HOLDERS, verdict, seconds, tuple(found), {"pods": pods}, (said,))


async def _ungranted(work: Work) -> dict[object, Holder]:
    """Who uses the device now and was not granted it: one of each pod, by its UID, and each process of no pod."""
    instruments = work.instruments
    found: dict[object, Holder] = {}
    for user in await instruments.holders.users(work.device):
        if user.kind is HolderKind.INFRASTRUCTURE:
            continue
        uid = await instruments.containers.pod_uid_of(user.pid) if user.pid else None
        if judge_use(uid, work.device.id, work.record.open_grants, instruments.pods.reading) is not Use.GRANTED:
            found[uid or user.identity] = user
    return found


def joined(record: DeviceRecord, over: Collection[int]) -> DeviceRecord:
    """``record`` of a device that was just granted to one more pod.

    Its bytes are not the last grant's alone, so no exception holds before it was scrubbed. Grants of pods that are
    ``over`` end here: a device that is shared without a pause would otherwise keep every one there ever was.
    """
    left = tuple(grant for grant in record.open_grants if grant.sequence not in over)
    return replace(record, watched=False, open_grants=left)


@asynccontextmanager
async def _nobody(_: Iterable[str]) -> AsyncIterator[None]:
    """The checks of the fast path need no other device to keep still."""
    yield
