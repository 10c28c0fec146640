"""Holders step: every earlier pod is over, its proved leftovers are killed, and no process holds the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from scrubber.domain.assignment import Pod, Process
from scrubber.domain.errors import DeviceFault, Unreadable
from scrubber.domain.evidence import Finding, FindingCode, Severity, Step, StepResult, Verdict
from scrubber.domain.jobs import job_of
from scrubber.domain.pods import PodState
from scrubber.domain.policy import Enforcement, UninspectedProcessAction
from scrubber.domain.record import Grant
from scrubber.domain.telemetry import Holder, HolderKind, HolderReport, UninspectedProcess
from scrubber.domain.usage import may_be_killed, may_hold_undetected
from scrubber.engine.steps.context import ScrubContext

__all__ = ["check_holders", "clear_holders"]

_OTHER_CONTAINERS = "holders: mappings of the pod's other containers, which run while the device is cleared"
_MAX_WALKS = 4
"""Walks, each continuing where the last one stopped, after which a process counts as impossible to finish inspecting.
"""
_RECHECK_DELAY = 0.5
"""Seconds until an unknown holder is looked for again: a monitoring probe has a device open for a moment only."""
_MAX_NAMED = 32
"""Holders that the record of a scrub names individually."""


async def check_holders(context: ScrubContext) -> StepResult:
    """Fast path: check whether any process holds the device. No walk is made, and nothing is killed."""
    start = context.dependencies.clock.monotonic()
    held = (await context.shared_snapshot()).is_held
    if held is None:
        held = await context.dependencies.holders.is_held(context.device)
    findings = (
        (context.blocking_finding(Step.HOLDERS, FindingCode.DEVICE_BUSY, "A process holds the device."),)
        if held
        else ()
    )
    verdict = Verdict.FAILED if held else Verdict.PASSED
    return StepResult(
        Step.HOLDERS,
        verdict,
        context.dependencies.clock.monotonic() - start,
        findings,
        {"holders": int(held)},
        context.dependencies.holders.not_covered(context.device),
    )


async def clear_holders(context: ScrubContext) -> StepResult:
    """Slow path: clear orphaned erasers first, then earlier pods and their leftovers, then check remaining holders."""
    dependencies, clock = context.dependencies, context.dependencies.clock
    start = clock.monotonic()
    findings: list[Finding] = []
    uncovered: list[str] = []
    ended = 0

    orphan = await dependencies.eraser.find_orphan(context.device)
    if orphan is not None:
        gone = await dependencies.eraser.terminate_orphan(context.device, context.policy.limits.driver_call * 5)
        if gone:
            findings.append(
                Finding(
                    Step.HOLDERS,
                    FindingCode.ORPHANED_ERASER_KILLED,
                    Severity.NOTE,
                    f"The orphaned eraser {orphan} has ended.",
                    {"pid": orphan},
                )
            )
        else:
            message = f"The eraser {orphan} of an earlier scrub cannot be killed."
            findings.append(
                Finding(Step.HOLDERS, FindingCode.ERASER_UNKILLABLE, Severity.FAULT, message, {"pid": orphan})
            )

    if not findings or findings[-1].severity is Severity.NOTE:
        more, ended = await _kill_leftovers(context, uncovered)
        findings += more
    if not any(finding.severity in (Severity.BLOCKING, Severity.FAULT) for finding in findings):
        try:
            findings += await _remaining_holder_findings(context, uncovered)
        except DeviceFault as fault:
            if Step.RESET not in context.plan.steps:
                raise
            # The device may answer no query until it is reset, and a reset is refused while a process holds it.
            findings.append(Finding(Step.HOLDERS, FindingCode.HOLDERS_UNREADABLE, Severity.NOTE, str(fault)))
            uncovered.append("holders: the device did not report its holders before the reset")

    bad = any(finding.severity in (Severity.BLOCKING, Severity.FAULT) for finding in findings)
    measured: dict[str, str | int | float | bool | None] = {
        "leftovers_killed": ended,
        "earlier_pods": sum(len(grant.by_pod()) for grant in context.record.open_grants),
    }
    if allowed := sum(finding.code == FindingCode.INFRASTRUCTURE_HOLDER for finding in findings):
        measured["infrastructure_holders"] = allowed
    return StepResult(
        Step.HOLDERS,
        Verdict.FAILED if bad else Verdict.PASSED,
        clock.monotonic() - start,
        tuple(findings),
        measured,
        (*dependencies.containers.not_covered(), *uncovered),
    )


async def _kill_leftovers(context: ScrubContext, uncovered: list[str]) -> tuple[list[Finding], int]:
    """Kill proved leftovers of earlier grants; return the findings and the number of processes killed."""
    dependencies, limits = context.dependencies, context.policy.limits
    findings: list[Finding] = []
    ended = 0
    for grant, where in await context.pod_liveness():
        if where.in_other_containers and _OTHER_CONTAINERS not in uncovered:
            uncovered.append(_OTHER_CONTAINERS)
        if where.state is PodState.OVER:
            continue
        if where.state is PodState.ALIVE or grant.pod is None:
            findings.append(
                context.blocking_finding(
                    Step.HOLDERS, FindingCode.EARLIER_POD_RUNNING, _earlier_pod_message(grant, len(where.processes))
                )
            )
            continue
        if context.policy.enforcement is Enforcement.OBSERVE:
            message = f"{len(where.processes)} leftover(s) would be killed: {where.proof}."
            findings.append(context.blocking_finding(Step.HOLDERS, FindingCode.LEFTOVERS_OBSERVED, message))
            continue
        if where.unreadable:
            findings.append(await _kill_unreadable_pod(context, grant.pod, where.proof))
            continue
        try:
            survivors = await dependencies.containers.terminate(grant.pod, where.processes, limits.driver_call * 5)
        except Unreadable as unreadable:
            findings.append(context.blocking_finding(Step.HOLDERS, FindingCode.LEFTOVERS_UNREADABLE, str(unreadable)))
            continue
        gone = [process for process in where.processes if process not in survivors]
        ended += len(gone)
        if gone:
            message = f"{len(gone)} leftover(s) of {grant.pod.namespace}/{grant.pod.name} killed: {where.proof}."
            findings.append(
                Finding(
                    Step.HOLDERS,
                    FindingCode.LEFTOVERS_KILLED,
                    Severity.NOTE,
                    message,
                    {"pids": " ".join(str(process.pid) for process in gone)},
                )
            )
        if where.unproven_processes:
            findings.append(
                context.blocking_finding(
                    Step.HOLDERS,
                    FindingCode.EARLIER_POD_RUNNING,
                    _earlier_pod_message(grant, len(where.unproven_processes)),
                )
            )
        if survivors:
            message = f"{len(survivors)} leftover(s) could not be killed (first: PID {survivors[0].pid})."
            findings.append(
                Finding(Step.HOLDERS, FindingCode.HOLDER_UNKILLABLE, Severity.FAULT, message, {"alive": len(survivors)})
            )
    return findings, ended


async def _kill_unreadable_pod(context: ScrubContext, pod: Pod, proof: str) -> Finding:
    containers = context.dependencies.containers
    try:
        ended = await containers.kill_cgroups(pod, context.policy.limits.driver_call * 5)
    except Unreadable as unreadable:
        return context.blocking_finding(Step.HOLDERS, FindingCode.LEFTOVERS_UNREADABLE, str(unreadable))
    if ended:
        message = f"The remaining processes of {pod.namespace}/{pod.name} were killed: {proof}."
        return Finding(Step.HOLDERS, FindingCode.LEFTOVER_POD_KILLED, Severity.NOTE, message, {"pod_uid": pod.uid})
    message = f"The remaining processes of {pod.namespace}/{pod.name} could not be killed: {proof}."
    if containers.not_covered():  # without the kernel's confirmation of a pod's members nothing was killed
        return context.blocking_finding(Step.HOLDERS, FindingCode.LEFTOVERS_UNREADABLE, message)
    return Finding(Step.HOLDERS, FindingCode.HOLDER_UNKILLABLE, Severity.FAULT, message)


def _earlier_pod_message(grant: Grant, processes: int) -> str:
    name = "an unknown pod" if grant.pod is None else f"{grant.pod.namespace}/{grant.pod.name}"
    what = (
        f"{processes} of its process(es) still run" if processes else "it may still be starting or holding the device"
    )
    tenant = f"earlier pod {name}" if not job_of(grant.claim) or grant.claim is None else f"earlier {grant.claim.title}"
    return f"The {tenant} is not over: {what}."


async def _remaining_holder_findings(context: ScrubContext, uncovered: list[str]) -> list[Finding]:
    """Return findings about processes that hold the device after every earlier pod is over.

    The walk is made even if the quick query reports no holder: a process that has the device open but does nothing with
    it yet may be visible to a walk only.
    """
    report, owners = await _walks(context)
    ended: list[Holder] = []
    if await _may_be_probes(context, report):
        await context.dependencies.clock.sleep(_RECHECK_DELAY)
        before = report.holders
        report, owners = await _walks(context)
        left = {each.identity for each in report.holders}
        ended = [each for each in before if each.identity not in left]
    uncovered += report.not_covered
    uncovered += [_not_covered(each) for each in report.holders if each.kind is HolderKind.INFRASTRUCTURE][:_MAX_NAMED]
    named = _select_named(report.holders)
    found = [await _holder_finding(context, holder) for holder in named]
    for each in ended[:_MAX_NAMED]:
        message = f"PID {each.pid} ({each.command or 'unknown'}) held the device for a moment and closed it."
        found.append(Finding(Step.HOLDERS, FindingCode.HOLDER_ENDED, Severity.NOTE, message, {"pid": each.pid}))
    more = report.omitted_count + len(report.holders) - len(named)
    if more:
        message = f"{more} more process(es) of the same pods and units hold the device."
        if all(each.kind is HolderKind.INFRASTRUCTURE for each in report.holders):
            found.append(Finding(Step.HOLDERS, FindingCode.HOLDERS_OMITTED, Severity.NOTE, message, {"more": more}))
        else:
            found.append(Finding(Step.HOLDERS, FindingCode.HOLDERS_OMITTED, Severity.BLOCKING, message, {"more": more}))
    for owner, processes in sorted(owners.items(), key=lambda each: str(each[0])):
        found += await _uninspected_findings(context, owner, processes)
    outside = [each for (_, blocks), processes in owners.items() if not blocks for each in processes]
    if outside:
        pods = len({uid for uid, blocks in owners if not blocks})
        uncovered.append(
            f"holders: {len(outside)} process(es) of {pods} pod(s) that were never granted the device could "
            "not be fully inspected; none of them was found to have a capability, or a node of the device in "
            "its /dev, that lets it open the device; descriptors that they hold and nodes that they hid are "
            "not covered"
        )
    if not any(holder.kind is not HolderKind.INFRASTRUCTURE for holder in report.holders) and (
        await context.dependencies.holders.is_held(context.device)
    ):
        found.append(
            context.blocking_finding(
                Step.HOLDERS, FindingCode.DEVICE_BUSY, "A process has just opened the device; it is checked again."
            )
        )
    return found


async def _may_be_probes(context: ScrubContext, report: HolderReport) -> bool:
    """Return whether only processes that never had the device hold it: monitoring probes end within a moment.

    A process that uses memory, was found before, or is of a pod that has or had the device, is not given that moment.
    """
    unknown = [each for each in report.holders if each.kind is not HolderKind.INFRASTRUCTURE]
    if not unknown or report.omitted_count or any(each.kind is not HolderKind.PROCESS for each in unknown):
        return False
    if any(each.memory_bytes or each.identity in context.known_holders for each in unknown):
        return False
    containers, had = context.dependencies.containers, _pods_that_had_the_device(context)
    return not any([await containers.pod_uid_of(each.pid) in had for each in unknown])


def _pods_that_had_the_device(context: ScrubContext) -> frozenset[str]:
    granted = (pod.uid for grant in context.record.open_grants for pod in grant.pods)
    assigned = (each.pod.uid for each in context.pods.reading.all_assignments(context.device.id))
    return frozenset(uid for uid in (*granted, *assigned) if uid is not None)


Owner = tuple[str | None, bool]
"""The UID of a pod, None for the node; and whether its uninspected processes block the scrub."""


async def _walks(context: ScrubContext) -> tuple[HolderReport, dict[Owner, list[UninspectedProcess]]]:
    """Walk until every process that may have the device ungranted is inspected, or several walks were not enough."""
    dependencies, device = context.dependencies, context.device
    grants = context.record.open_grants
    had = _pods_that_had_the_device(context) | context.unauthorized_use.pods
    walks = 0
    while True:
        report = await dependencies.holders.list_holders(device, had, context.scrub)
        owners: dict[Owner, list[UninspectedProcess]] = {}
        for each in report.uninspected:
            uid = await _pod_of(context, each)
            blocks = uid in had or may_hold_undetected(
                uid, device.id, grants, context.pods.reading, confined=each.confined
            )
            owners.setdefault((uid, blocks), []).append(each)
        walks += 1
        if walks == _MAX_WALKS or not any(blocks for _, blocks in owners):
            return report, owners


async def _pod_of(context: ScrubContext, each: UninspectedProcess) -> str | None:
    if not each.pid:
        return each.pod_uid
    try:
        return await context.dependencies.containers.pod_uid_of(each.pid)
    except Unreadable:
        return None


def _select_named(holders: Sequence[Holder]) -> list[Holder]:
    """Return the ``holders`` to name individually: some of each kind, so that the most severe are included."""
    turns: Counter[HolderKind] = Counter()
    ranked: list[tuple[int, int, Holder]] = []
    for number, holder in enumerate(holders):
        turns[holder.kind] += 1
        ranked.append((turns[holder.kind], number, holder))
    return [holder for _, _, holder in sorted(ranked, key=lambda each: each[:2])[:_MAX_NAMED]]


async def _holder_finding(context: ScrubContext, holder: Holder) -> Finding:
    if holder.kind is HolderKind.UNTRACEABLE:
        # Only a reset removes an untraceable holder, so a plan with a reset continues; the eraser's fence decides in
        # the end.
        cured = Step.RESET in context.plan.steps
        message = "The device is held, but no process was found that holds it."
        message += f" {holder.command}" if holder.command else ""
        return Finding(
            Step.HOLDERS, FindingCode.UNTRACEABLE_HOLDER, Severity.NOTE if cured else Severity.FAULT, message
        )
    owner = await context.dependencies.owners.owner_of(holder.pid)
    if holder.kind is HolderKind.INFRASTRUCTURE:
        context.note_holder(holder, owner, FindingCode.INFRASTRUCTURE_HOLDER)
        message = f"{_infrastructure_name(holder)} has the device open, as the policy allows."
        return Finding(
            Step.HOLDERS,
            FindingCode.INFRASTRUCTURE_HOLDER,
            Severity.NOTE,
            message,
            {"pid": holder.pid, "owner": holder.owner, "memory_bytes": holder.memory_bytes},
        )
    if holder.kind is HolderKind.VALIDATION:
        context.note_holder(holder, owner, FindingCode.VALIDATION_HOLDER)
        message = f"{_infrastructure_name(holder)} runs a program on the device; the scrub waits until it has ended."
        return context.blocking_finding(Step.HOLDERS, FindingCode.VALIDATION_HOLDER, message)
    if holder.kind is HolderKind.UNKILLABLE:
        context.note_holder(holder, owner, FindingCode.HOLDER_UNKILLABLE)
        message = f"PID {holder.pid} holds the device and cannot be killed (uninterruptible)."
        return Finding(Step.HOLDERS, FindingCode.HOLDER_UNKILLABLE, Severity.FAULT, message, {"pid": holder.pid})
    uid = await context.dependencies.containers.pod_uid_of(holder.pid)
    who = f"PID {holder.pid} ({holder.command or 'unknown'}) {owner}"
    record, reading = context.record, context.pods.reading
    if await context.unauthorized_use.handle(holder, uid, record, reading=reading, policy=context.policy):
        message = (
            f"{who} held the device without a grant for over {context.policy.limits.leftover_grace_period:g} "
            "s and was killed."
        )
        return Finding(
            Step.HOLDERS,
            FindingCode.UNAUTHORIZED_PROCESS_KILLED,
            Severity.NOTE,
            message,
            {"pid": holder.pid, "pod_uid": uid},
        )
    if uid is not None and any(pod.uid == uid for grant in record.open_grants for pod in grant.pods):
        context.note_holder(holder, owner, FindingCode.HELD_BY_OWN_POD)
        message = f"{who} holds the device while another container of its pod starts on it."
        return context.blocking_finding(Step.HOLDERS, FindingCode.HELD_BY_OWN_POD, message)
    context.note_holder(holder, owner, FindingCode.UNKNOWN_HOLDER)
    return context.blocking_finding(
        Step.HOLDERS, FindingCode.UNKNOWN_HOLDER, f"{who} holds the device without a grant."
    )


async def _uninspected_findings(
    context: ScrubContext, owner: Owner, processes: Sequence[UninspectedProcess]
) -> list[Finding]:
    """Return findings about uninspected processes of one pod, or of the node. They are not a fault of the device."""
    uid, blocks = owner
    worst = max(processes, key=lambda each: each.walks)
    lasts = worst.walks >= _MAX_WALKS or not worst.pid
    many = f" and {len(processes) - 1} more process(es)" if len(processes) > 1 else ""
    who = "A cgroup" if not worst.pid else f"PID {worst.pid}" + (f" of pod {uid}" if uid is not None else "")
    what = "may hold the device" if blocks else "was never granted the device, which is scrubbed anyway"
    message = f"{who}{many} could not be fully inspected in {worst.walks} walk(s) ({worst.command}); it {what}."
    evidence: dict[str, str | int | float | bool | None] = {
        "pid": worst.pid,
        "pod_uid": uid,
        "processes": len(processes),
        "walks": worst.walks,
        "blocks": blocks,
    }
    if lasts:
        evidence["news"] = context.unauthorized_use.should_report(f"uninspected {uid or 'node'}")
    found = [
        Finding(Step.HOLDERS, FindingCode.UNINSPECTED_PROCESSES, Severity.BLOCKING, message, evidence)
        if blocks
        else Finding(Step.HOLDERS, FindingCode.UNINSPECTED_PROCESSES, Severity.NOTE, message, evidence)
    ]
    if lasts and uid is not None:
        found += [finding for each in processes if (finding := await _kill_uninspected(context, uid, each)) is not None]
    return found


async def _kill_uninspected(context: ScrubContext, uid: str, each: UninspectedProcess) -> Finding | None:
    """Kill a pod's process that several walks could not inspect, if the policy demands it; None when not killed."""
    policy, dependencies = context.policy, context.dependencies
    if (
        policy.uninspected_processes is not UninspectedProcessAction.KILL
        or policy.enforcement is not Enforcement.ENFORCE
        or not each.pid
    ):
        return None
    if each.walks < _MAX_WALKS:
        return None
    record, reading = context.record, context.pods.reading
    if not may_be_killed(uid, record.device, record.open_grants, reading, admin_claims=record.admin_claims):
        return None
    process = Process(each.pid, each.started)
    try:
        if await dependencies.containers.terminate(Pod("", "", uid), (process,), policy.limits.driver_call * 5):
            return None
    except Unreadable:
        return None  # it cannot be determined whether it is still the same process
    message = f"PID {each.pid} of pod {uid} could not be fully inspected in {each.walks} walks and was killed."
    return Finding(
        Step.HOLDERS, FindingCode.UNINSPECTED_PROCESS_KILLED, Severity.NOTE, message, {"pid": each.pid, "pod_uid": uid}
    )


def _infrastructure_name(holder: Holder) -> str:
    owner = f" of {holder.owner}" if holder.owner else ""
    return f"PID {holder.pid} ({holder.command or 'unknown'}){owner}, infrastructure of the node,"


def _not_covered(holder: Holder) -> str:
    """Return what a certificate does not cover because of infrastructure that the policy allows."""
    who = f"{holder.owner or 'infrastructure of the node'} (PID {holder.pid})"
    memory = f"memory: {holder.memory_bytes} bytes in use by {who}" if holder.memory_bytes else ""
    return memory or f"holders: {who} has the device open, as the policy allows"
