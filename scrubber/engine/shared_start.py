"""Starting on a share of a device that other pods have shares of.

Others hold the device by grants of their own, so that somebody holds it says nothing. Instead everybody who is seen to use
it must be one of them, and the certificate says that no more was asked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from scrubber.domain.assignment import Pod, Reading
from scrubber.domain.basis import UNPROVED
from scrubber.domain.errors import Retry
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
from scrubber.domain.leftover import Standing
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.sharing import Neighbour
from scrubber.domain.telemetry import Holder, HolderKind
from scrubber.domain.using import Use, judge_use
from scrubber.engine import scrub
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.steps.work import Work

__all__ = ["check_beside", "joined", "neighbour", "others_on"]


_LOOK_AGAIN = 0.1
"""Seconds after which who seems to have no grant is looked at once more: a process that has just ended shows no pod."""


async def others_on(
    controller: DeviceController, asking: Pod | None, share: frozenset[str], reading: Reading
) -> list[tuple[Grant, Standing]]:
    """Whom a container would be beside on ``share`` of the device: the open grants, and where their pods stand.

    A pod is beside itself only where it has another share, too: else it starts again on the one it had.
    """
    several = asking is not None and bool(reading.shares_of(asking, controller.id) - share)
    standings = await controller.occupancy.standings(asking, shares=several)
    return [(grant, where) for grant, where in standings if several or asking is None or grant.pod != asking]


def neighbour(grant: Grant, where: Standing) -> Neighbour:
    share = grant.assignment is not None and bool(grant.assignment.shares)
    return Neighbour(grant.pod, where.state, share, grant.basis not in UNPROVED)


async def check_beside(controller: DeviceController, pods: int, dependencies: Dependencies) -> ScrubRecord:
    """The fast path's checks of a device that ``pods`` pods are on by grants. It changes and records nothing."""
    policy = controller.state.policy
    check = dependencies.new_id("check")
    record = ScrubRecord(check, controller.id, Path.FAST, Occasion.START, dependencies.clock.wall())
    plan = policy.plan(Path.FAST, Occasion.START)
    work = Work(
        scrub=check,
        device=controller.state.device,
        record=controller.state.record,
        plan=replace(plan, steps=tuple(step for step in plan.steps if step is not Step.HOLDERS)),
        policy=policy,
        dependencies=dependencies,
        pods=controller.pods,
        standings=controller.occupancy.standings,
        unauthorized_use=controller.occupancy.unauthorized_use,
        still=_nobody,
    )
    users = await _check_users(work, pods)
    result = await scrub.run(work, lambda _: None)
    failed = users.verdict is Verdict.FAILED and result.outcome is Outcome.PASSED
    outcome = Outcome.HELD_UP if failed else result.outcome
    return replace(record, ended=dependencies.clock.wall(), outcome=outcome, steps=(users, *result.steps))


async def _check_users(work: Work, pods: int) -> StepResult:
    """Whether everybody who is seen to use the device has it by a grant. Claims nothing: a walk is not made."""
    dependencies, start = work.dependencies, work.dependencies.clock.monotonic()
    found: list[Finding] = []
    try:
        if before := await _ungranted(work):
            await dependencies.clock.sleep(_LOOK_AGAIN)
            for owner, user in (await _ungranted(work)).items():
                if owner in before:
                    who = f"PID {user.pid} ({user.command or 'unknown'})"
                    found.append(
                        work.dirty(Step.HOLDERS, FindingCode.UNKNOWN_HOLDER, f"{who} uses the device without a grant.")
                    )
    except Retry as away:
        found.append(work.dirty(Step.HOLDERS, away.code, str(away)))
    seconds = dependencies.clock.monotonic() - start
    said = f"holders: shared with {pods} pod{'' if pods == 1 else 's'}, whose processes have it by grants of their own"
    verdict = Verdict.FAILED if found else Verdict.NOT_COVERED
    return StepResult(Step.HOLDERS, verdict, seconds, tuple(found), {"pods": pods}, (said,))


async def _ungranted(work: Work) -> dict[object, Holder]:
    """Who uses the device now and was not granted it: one of each pod, by its UID, and each process of no pod."""
    dependencies = work.dependencies
    found: dict[object, Holder] = {}
    for user in await dependencies.holders.users(work.device):
        if user.kind is HolderKind.INFRASTRUCTURE:
            continue
        uid = await dependencies.containers.pod_uid_of(user.pid) if user.pid else None
        if judge_use(uid, work.device.id, work.record.open_grants, work.pods.reading) is not Use.GRANTED:
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
