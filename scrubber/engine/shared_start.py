"""Starts a container on a share of a device while other pods have shares of the same device.

The other pods hold the device by grants, so it is expected to be held. Instead, every process that is seen to use it
must belong to a pod with a grant, and the certificate states that nothing more was checked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from scrubber.domain.assignment import KubeletReading, Pod
from scrubber.domain.errors import RetryableError
from scrubber.domain.evidence import (
    Finding,
    FindingCode,
    Outcome,
    PathKind,
    ScrubRecord,
    ScrubTrigger,
    Step,
    StepResult,
    Verdict,
)
from scrubber.domain.handover_kind import UNPROVEN_BASES
from scrubber.domain.pods import PodLiveness
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.sharing import GrantedPod
from scrubber.domain.telemetry import Holder, HolderKind
from scrubber.domain.usage import UseKind, classify_use
from scrubber.engine import scrub
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.steps.context import ScrubContext

__all__ = ["after_shared_grant", "check_shared_use", "granted_pod", "other_grants"]


_RECHECK_DELAY = 0.1
"""Seconds until a user that seems to have no grant is checked again: a process that has just ended shows no pod."""


async def other_grants(
    controller: DeviceController, starting_pod: Pod | None, share: frozenset[str], reading: KubeletReading
) -> list[tuple[Grant, PodLiveness]]:
    """Return the open grants beside which a container would run on ``share``, with the liveness of their pods.

    A pod counts as running beside itself only when it has another share too; otherwise it restarts on the share that it
    had.
    """
    several = starting_pod is not None and bool(reading.shares_of(starting_pod, controller.id) - share)
    standings = await controller.occupancy.pod_liveness(starting_pod, shares=several)
    return [
        (grant, where) for grant, where in standings if several or starting_pod is None or grant.pod != starting_pod
    ]


def granted_pod(grant: Grant, liveness: PodLiveness) -> GrantedPod:
    share = grant.assignment is not None and bool(grant.assignment.shares)
    return GrantedPod(grant.pod, liveness.state, share, grant.basis not in UNPROVEN_BASES)


async def check_shared_use(controller: DeviceController, pods: int, dependencies: Dependencies) -> ScrubRecord:
    """Run the fast path's checks of a device that ``pods`` pods have grants for. Changes and records nothing."""
    policy = controller.state.policy
    check = dependencies.new_id("check")
    record = ScrubRecord(check, controller.id, PathKind.FAST, ScrubTrigger.CONTAINER_START, dependencies.clock.wall())
    plan = policy.plan(PathKind.FAST, ScrubTrigger.CONTAINER_START)
    work = ScrubContext(
        scrub=check,
        device=controller.state.device,
        record=controller.state.record,
        plan=replace(plan, steps=tuple(step for step in plan.steps if step is not Step.HOLDERS)),
        policy=policy,
        dependencies=dependencies,
        pods=controller.pods,
        pod_liveness=controller.occupancy.pod_liveness,
        unauthorized_use=controller.occupancy.unauthorized_use,
        keep_out_of_use=_no_other_devices,
    )
    users = await _check_users(work, pods)
    result = await scrub.run_scrub(work, lambda _: None)
    failed = users.verdict is Verdict.FAILED and result.outcome is Outcome.PASSED
    outcome = Outcome.BLOCKED if failed else result.outcome
    return replace(record, ended=dependencies.clock.wall(), outcome=outcome, steps=(users, *result.steps))


async def _check_users(context: ScrubContext, pods: int) -> StepResult:
    """Check whether every visible user of the device has a grant. Proves no absence of holders: no walk is made."""
    dependencies, start = context.dependencies, context.dependencies.clock.monotonic()
    found: list[Finding] = []
    try:
        if before := await _unauthorized_users(context):
            await dependencies.clock.sleep(_RECHECK_DELAY)
            for owner, user in (await _unauthorized_users(context)).items():
                if owner in before:
                    who = f"PID {user.pid} ({user.command or 'unknown'})"
                    code, what = FindingCode.UNKNOWN_HOLDER, "uses the device without a grant"
                    if user.kind is HolderKind.VALIDATION:
                        code, what = FindingCode.VALIDATION_HOLDER, "of the node's infrastructure uses the device"
                    found.append(context.blocking_finding(Step.HOLDERS, code, f"{who} {what}."))
    except RetryableError as away:
        found.append(context.blocking_finding(Step.HOLDERS, away.code, str(away)))
    seconds = dependencies.clock.monotonic() - start
    message = (
        f"holders: shared with {pods} pod{'' if pods == 1 else 's'}, whose processes use it under their own grants"
    )
    verdict = Verdict.FAILED if found else Verdict.NOT_COVERED
    return StepResult(Step.HOLDERS, verdict, seconds, tuple(found), {"pods": pods}, (message,))


async def _unauthorized_users(context: ScrubContext) -> dict[object, Holder]:
    """Return current users of the device without a grant: one per pod, by its UID, and each process outside pods."""
    dependencies = context.dependencies
    found: dict[object, Holder] = {}
    for user in await dependencies.holders.list_users(context.device):
        if user.kind is HolderKind.INFRASTRUCTURE:
            continue
        uid = await dependencies.containers.pod_uid_of(user.pid) if user.pid else None
        record = context.record
        use = classify_use(
            uid, record.device, record.open_grants, context.pods.reading, admin_claims=record.admin_claims
        )
        if use not in (UseKind.GRANTED, UseKind.ADMIN_ACCESS):
            found[uid or user.identity] = user
    return found


def after_shared_grant(record: DeviceRecord, closed_grants: Collection[int]) -> DeviceRecord:
    """Return ``record`` of a device that was just granted to one more pod.

    Its memory no longer belongs to the last grant alone, so no exception applies until it is scrubbed. Grants whose
    sequence is in ``closed_grants`` end here: a device that is shared without a pause would otherwise accumulate every
    grant it ever had.
    """
    left = tuple(grant for grant in record.open_grants if grant.sequence not in closed_grants)
    return replace(record, exclusive_use=False, open_grants=left)


@asynccontextmanager
async def _no_other_devices(_: Iterable[str]) -> AsyncIterator[None]:
    """The fast path's checks do not require other devices to stay out of use."""
    yield
