"""Holders: every earlier pod is over, its proved leftovers are ended, and nobody holds the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from scrubber.domain.assignment import Pod, Process
from scrubber.domain.errors import DeviceFault, Unreadable
from scrubber.domain.evidence import Finding, FindingCode, Severity, Step, StepResult, Verdict
from scrubber.domain.leftover import PodState
from scrubber.domain.policy import Enforcement, Uninspectable
from scrubber.domain.telemetry import Holder, HolderKind, HolderReport, Uninspected
from scrubber.domain.using import may_be_ended, may_hold_unseen
from scrubber.engine.steps.work import Work

__all__ = ["check_holders", "clear_holders"]

_OTHER_CONTAINERS = "holders: mappings of the pod's other containers, which run while the device is cleared"
_SEVERAL = 4
"""Walks, each of which goes on where the last one stopped, after which a process counts as one that cannot be finished."""
_MOST_NAMED = 32
"""Holders that are named one by one in the record of a scrub."""


async def check_holders(work: Work) -> StepResult:
    """The fast path's question: does anybody at all hold the device? No walk, nobody is ended."""
    start = work.dependencies.clock.monotonic()
    held = (await work.one_snapshot()).held
    if held is None:
        held = await work.dependencies.holders.held(work.device)
    findings = (work.dirty(Step.HOLDERS, FindingCode.HELD, "Somebody holds the device."),) if held else ()
    verdict = Verdict.FAILED if held else Verdict.PASSED
    return StepResult(
        Step.HOLDERS,
        verdict,
        work.dependencies.clock.monotonic() - start,
        findings,
        {"holders": int(held)},
        work.dependencies.holders.not_asked(work.device),
    )


async def clear_holders(work: Work) -> StepResult:
    """The slow path's act: orphaned erasers first, then earlier pods and their leftovers, then whoever is left."""
    dependencies, clock = work.dependencies, work.dependencies.clock
    start = clock.monotonic()
    findings: list[Finding] = []
    uncovered: list[str] = []
    ended = 0

    orphan = await dependencies.eraser.orphan(work.device)
    if orphan is not None:
        gone = await dependencies.eraser.end_orphan(work.device, work.policy.limits.question * 5)
        if gone:
            findings.append(
                Finding(
                    Step.HOLDERS,
                    FindingCode.ORPHANED_ERASER,
                    Severity.NOTE,
                    f"Eraser {orphan} was left; it is over.",
                    {"pid": orphan},
                )
            )
        else:
            sentence = f"Eraser {orphan} of an earlier scrub cannot be ended."
            findings.append(
                Finding(Step.HOLDERS, FindingCode.ERASER_UNKILLABLE, Severity.FAULT, sentence, {"pid": orphan})
            )

    if not findings or findings[-1].severity is Severity.NOTE:
        more, ended = await _end_leftovers(work, uncovered)
        findings += more
    if not any(finding.severity in (Severity.DIRTY, Severity.FAULT) for finding in findings):
        try:
            findings += await _holders_left(work, uncovered)
        except DeviceFault as fault:
            if Step.RESET not in work.plan.steps:
                raise
            # It may answer nothing until it is reset, and a reset is refused while anybody has it.
            findings.append(Finding(Step.HOLDERS, FindingCode.HOLDERS_UNREADABLE, Severity.NOTE, str(fault)))
            uncovered.append("holders: the device did not answer who has it before it was reset")

    bad = any(finding.severity in (Severity.DIRTY, Severity.FAULT) for finding in findings)
    return StepResult(
        Step.HOLDERS,
        Verdict.FAILED if bad else Verdict.PASSED,
        clock.monotonic() - start,
        tuple(findings),
        {"leftovers_ended": ended, "earlier_pods": len(work.record.open_grants)},
        (*dependencies.containers.not_covered(), *uncovered),
    )


async def _end_leftovers(work: Work, uncovered: list[str]) -> tuple[list[Finding], int]:
    """Findings about earlier grants' pods, and how many processes were ended."""
    dependencies, limits = work.dependencies, work.policy.limits
    findings: list[Finding] = []
    ended = 0
    for grant, where in await work.standings():
        if where.elsewhere and _OTHER_CONTAINERS not in uncovered:
            uncovered.append(_OTHER_CONTAINERS)
        if where.state is PodState.OVER:
            continue
        if where.state is PodState.LIVING or grant.pod is None:
            findings.append(
                work.dirty(Step.HOLDERS, FindingCode.EARLIER_POD_LIVES, _still_there(grant.pod, len(where.processes)))
            )
            continue
        if work.policy.enforcement is Enforcement.OBSERVE:
            sentence = f"{len(where.processes)} leftover(s) would be ended: {where.proof}."
            findings.append(work.dirty(Step.HOLDERS, FindingCode.LEFTOVERS_OBSERVED, sentence))
            continue
        if where.unread:
            findings.append(await _end_unread(work, grant.pod, where.proof))
            continue
        try:
            survivors = await dependencies.containers.end(grant.pod, where.processes, limits.question * 5)
        except Unreadable as unreadable:
            findings.append(work.dirty(Step.HOLDERS, FindingCode.LEFTOVERS_UNREADABLE, str(unreadable)))
            continue
        gone = [process for process in where.processes if process not in survivors]
        ended += len(gone)
        if gone:
            sentence = f"{len(gone)} leftover(s) of {grant.pod.namespace}/{grant.pod.name} ended: {where.proof}."
            findings.append(
                Finding(
                    Step.HOLDERS,
                    FindingCode.LEFTOVERS,
                    Severity.NOTE,
                    sentence,
                    {"pids": " ".join(str(process.pid) for process in gone)},
                )
            )
        if where.others:
            findings.append(
                work.dirty(Step.HOLDERS, FindingCode.EARLIER_POD_LIVES, _still_there(grant.pod, len(where.others)))
            )
        if survivors:
            sentence = f"{len(survivors)} leftover(s) could not be ended (PID {survivors[0].pid} first)."
            findings.append(
                Finding(Step.HOLDERS, FindingCode.UNKILLABLE, Severity.FAULT, sentence, {"alive": len(survivors)})
            )
    return findings, ended


async def _end_unread(work: Work, pod: Pod, proof: str) -> Finding:
    containers = work.dependencies.containers
    try:
        ended = await containers.end_unread(pod, work.policy.limits.question * 5)
    except Unreadable as unreadable:
        return work.dirty(Step.HOLDERS, FindingCode.LEFTOVERS_UNREADABLE, str(unreadable))
    if ended:
        sentence = f"Whatever was left of {pod.namespace}/{pod.name} was ended: {proof}."
        return Finding(Step.HOLDERS, FindingCode.POD_ENDED, Severity.NOTE, sentence, {"pod_uid": pod.uid})
    sentence = f"What is left of {pod.namespace}/{pod.name} could not be ended: {proof}."
    if containers.not_covered():  # there is no kernel's word on who is in a pod: nobody was ended
        return work.dirty(Step.HOLDERS, FindingCode.LEFTOVERS_UNREADABLE, sentence)
    return Finding(Step.HOLDERS, FindingCode.UNKILLABLE, Severity.FAULT, sentence)


def _still_there(pod: object, processes: int) -> str:
    name = f"{getattr(pod, 'namespace', '?')}/{getattr(pod, 'name', '?')}" if pod is not None else "an unknown pod"
    what = f"{processes} process(es) of it live" if processes else "it may still be starting or holding the device"
    return f"The earlier pod {name} is not over: {what}."


async def _holders_left(work: Work, uncovered: list[str]) -> list[Finding]:
    """Findings about the processes that hold the device once every earlier pod is over: none of them may be ended.

    They are looked for even if the quick question says that there are none: a process that has a device open and does
    nothing with it yet may show up in a walk only.
    """
    report, owners = await _walks(work)
    uncovered += report.not_covered
    named = _spread(report.holders)
    found = [await _about(work, holder) for holder in named]
    more = report.more + len(report.holders) - len(named)
    if more:
        sentence = f"{more} more process(es) of the same pods and units hold the device."
        if all(each.kind is HolderKind.INFRASTRUCTURE for each in report.holders):
            found.append(Finding(Step.HOLDERS, FindingCode.MORE_HOLDERS, Severity.NOTE, sentence, {"more": more}))
        else:
            found.append(Finding(Step.HOLDERS, FindingCode.MORE_HOLDERS, Severity.DIRTY, sentence, {"more": more}))
    for owner, processes in sorted(owners.items(), key=lambda each: str(each[0])):
        found += await _unfinished(work, owner, processes)
    outside = [each for (_, blocks), processes in owners.items() if not blocks for each in processes]
    if outside:
        pods = len({uid for uid, blocks in owners if not blocks})
        uncovered.append(
            f"holders: {len(outside)} process(es) of {pods} pod(s) that were never given the device could not be looked "
            "through; none of them was seen to have a capability, or a node of the device in its /dev, to open the device by "
            "itself, which shows nothing about descriptors that they hold and nodes that they hid"
        )
    if not any(holder.kind is not HolderKind.INFRASTRUCTURE for holder in report.holders) and (
        await work.dependencies.holders.held(work.device)
    ):
        found.append(
            work.dirty(Step.HOLDERS, FindingCode.HELD, "Somebody has just opened the device; it is looked at again.")
        )
    return found


Owner = tuple[str | None, bool]
"""The UID of a pod, None for the node; and whether what it has keeps the device from being scrubbed."""


async def _walks(work: Work) -> tuple[HolderReport, dict[Owner, list[Uninspected]]]:
    """Walk until all have been looked through that may have the device by themselves, or several walks were not enough."""
    dependencies, device = work.dependencies, work.device
    grants = work.record.open_grants
    had = {grant.pod.uid for grant in grants if grant.pod is not None and grant.pod.uid is not None}
    had |= {each.pod.uid for each in work.pods.reading.naming(device.id) if each.pod.uid is not None}
    had |= work.unauthorized_use.pods
    walks = 0
    while True:
        report = await dependencies.holders.holders(device, had, work.scrub)
        owners: dict[Owner, list[Uninspected]] = {}
        for each in report.unfinished:
            uid = await _pod_of(work, each)
            blocks = uid in had or may_hold_unseen(uid, device.id, grants, work.pods.reading, confined=each.confined)
            owners.setdefault((uid, blocks), []).append(each)
        walks += 1
        if walks == _SEVERAL or not any(blocks for _, blocks in owners):
            return report, owners


async def _pod_of(work: Work, each: Uninspected) -> str | None:
    if not each.pid:
        return each.pod
    try:
        return await work.dependencies.containers.pod_uid_of(each.pid)
    except Unreadable:
        return None


def _spread(holders: Sequence[Holder]) -> list[Holder]:
    """So many of ``holders`` as are named one by one: of each kind some, so that the worst is among them."""
    turns: Counter[HolderKind] = Counter()
    ranked: list[tuple[int, int, Holder]] = []
    for number, holder in enumerate(holders):
        turns[holder.kind] += 1
        ranked.append((turns[holder.kind], number, holder))
    return [holder for _, _, holder in sorted(ranked, key=lambda each: each[:2])[:_MOST_NAMED]]


async def _about(work: Work, holder: Holder) -> Finding:
    if holder.kind is HolderKind.GHOST:
        # A reset is a ghost's only cure, so a plan that has one goes on; the eraser's fence has the last word.
        cured = Step.RESET in work.plan.steps
        sentence = "Something holds the device and no process can be found for it."
        sentence += f" {holder.command}" if holder.command else ""
        return Finding(Step.HOLDERS, FindingCode.GHOST, Severity.NOTE if cured else Severity.FAULT, sentence)
    if holder.kind is HolderKind.INFRASTRUCTURE:
        sentence = f"PID {holder.pid} ({holder.command or 'unknown'}) of the node's infrastructure has the device open."
        return Finding(Step.HOLDERS, FindingCode.INFRASTRUCTURE, Severity.NOTE, sentence, {"pid": holder.pid})
    if holder.kind is HolderKind.UNKILLABLE:
        sentence = f"PID {holder.pid} holds the device and cannot be ended (uninterruptible)."
        return Finding(Step.HOLDERS, FindingCode.UNKILLABLE, Severity.FAULT, sentence, {"pid": holder.pid})
    uid = await work.dependencies.containers.pod_uid_of(holder.pid)
    who = _who(holder, uid)
    grants, reading = work.record.open_grants, work.pods.reading
    if await work.unauthorized_use.handle(holder, uid, grants, reading=reading, policy=work.policy):
        sentence = f"{who} held the device without a grant for over {work.policy.limits.dying_grace:g} s and was ended."
        return Finding(
            Step.HOLDERS, FindingCode.STRANGER_ENDED, Severity.NOTE, sentence, {"pid": holder.pid, "pod_uid": uid}
        )
    if any(grant.pod is not None and grant.pod.uid == uid for grant in grants if uid is not None):
        sentence = f"{who} holds the device while another container of its own pod starts on it."
        return work.dirty(Step.HOLDERS, FindingCode.HELD_BY_OWN_POD, sentence)
    return work.dirty(Step.HOLDERS, FindingCode.UNKNOWN_HOLDER, f"{who} holds the device without a grant.")


async def _unfinished(work: Work, owner: Owner, processes: Sequence[Uninspected]) -> list[Finding]:
    """Findings about processes of one pod, or of the node, that were not looked through. They are no fault of the device."""
    uid, blocks = owner
    worst = max(processes, key=lambda each: each.walks)
    lasts = worst.walks >= _SEVERAL or not worst.pid
    many = f" and {len(processes) - 1} more process(es)" if len(processes) > 1 else ""
    who = "A control group" if not worst.pid else f"PID {worst.pid}" + (f" of pod {uid}" if uid is not None else "")
    what = "may hold the device" if blocks else "was never given the device, which is scrubbed all the same"
    sentence = f"{who}{many} could not be looked through in {worst.walks} walk(s) ({worst.command}); it {what}."
    evidence: dict[str, str | int | float | bool | None] = {
        "pid": worst.pid,
        "pod_uid": uid,
        "processes": len(processes),
        "walks": worst.walks,
        "blocks": blocks,
    }
    if lasts:
        evidence["news"] = work.unauthorized_use.is_news(f"uninspected {uid or 'node'}")
    found = [
        Finding(Step.HOLDERS, FindingCode.WALK_UNFINISHED, Severity.DIRTY, sentence, evidence)
        if blocks
        else Finding(Step.HOLDERS, FindingCode.WALK_UNFINISHED, Severity.NOTE, sentence, evidence)
    ]
    if lasts and uid is not None:
        found += [finding for each in processes if (finding := await _ended(work, uid, each)) is not None]
    return found


async def _ended(work: Work, uid: str, each: Uninspected) -> Finding | None:
    """End a process of a pod that several walks did not get through, where the policy says so; None when it was not."""
    policy, dependencies = work.policy, work.dependencies
    if policy.uninspectable is not Uninspectable.END or policy.enforcement is not Enforcement.ENFORCE or not each.pid:
        return None
    if each.walks < _SEVERAL:
        return None
    if not may_be_ended(uid, work.device.id, work.record.open_grants, work.pods.reading):
        return None
    process = Process(each.pid, each.started)
    try:
        if await dependencies.containers.end(Pod("", "", uid), (process,), policy.limits.question * 5):
            return None
    except Unreadable:
        return None  # whether it is still the same process cannot be told
    sentence = f"PID {each.pid} of pod {uid} could not be looked through in {each.walks} walks and was ended."
    return Finding(
        Step.HOLDERS, FindingCode.UNINSPECTED_ENDED, Severity.NOTE, sentence, {"pid": each.pid, "pod_uid": uid}
    )


def _who(holder: Holder, uid: str | None) -> str:
    return f"PID {holder.pid} ({holder.command or 'unknown'})" + (f" of pod {uid}" if uid is not None else "")
