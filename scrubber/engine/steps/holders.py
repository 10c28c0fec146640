"""Holders: every earlier pod is over, its proved leftovers are ended, and nobody holds the device."""

from __future__ import annotations

from scrubber.domain.assignment import Pod
from scrubber.domain.errors import DeviceFault, Unreadable
from scrubber.domain.evidence import Finding, Severity, Step, StepResult, Verdict
from scrubber.domain.leftover import PodState
from scrubber.domain.policy import Enforcement
from scrubber.domain.telemetry import Holder, HolderKind
from scrubber.engine.steps.work import Work

__all__ = ["check_holders", "clear_holders"]

_OTHER_CONTAINERS = "holders: mappings of the pod's other containers, which run while the device is cleared"


async def check_holders(work: Work) -> StepResult:
    """The fast path's question: does anybody at all hold the device? No walk, nobody is ended."""
    start = work.instruments.clock.monotonic()
    held = (await work.one_snapshot()).held
    if held is None:
        held = await work.instruments.holders.held(work.device)
    findings = (work.dirty(Step.HOLDERS, "held", "Somebody holds the device."),) if held else ()
    verdict = Verdict.FAILED if held else Verdict.PASSED
    return StepResult(
        Step.HOLDERS,
        verdict,
        work.instruments.clock.monotonic() - start,
        findings,
        {"holders": int(held)},
        work.instruments.holders.not_asked(work.device),
    )


async def clear_holders(work: Work) -> StepResult:
    """The slow path's act: orphaned erasers first, then earlier pods and their leftovers, then whoever is left."""
    instruments, clock = work.instruments, work.instruments.clock
    start = clock.monotonic()
    findings: list[Finding] = []
    uncovered: list[str] = []
    ended = 0

    orphan = await instruments.eraser.orphan(work.device)
    if orphan is not None:
        gone = await instruments.eraser.end_orphan(work.device, work.policy.limits.question * 5)
        if gone:
            findings.append(
                Finding(
                    Step.HOLDERS,
                    "orphaned-eraser",
                    Severity.NOTE,
                    f"Eraser {orphan} was left; it is over.",
                    {"pid": orphan},
                )
            )
        else:
            sentence = f"Eraser {orphan} of an earlier scrub cannot be ended."
            findings.append(Finding(Step.HOLDERS, "eraser-unkillable", Severity.FAULT, sentence, {"pid": orphan}))

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
            findings.append(Finding(Step.HOLDERS, "holders-unreadable", Severity.NOTE, str(fault)))
            uncovered.append("holders: the device did not answer who has it before it was reset")

    bad = any(finding.severity in (Severity.DIRTY, Severity.FAULT) for finding in findings)
    return StepResult(
        Step.HOLDERS,
        Verdict.FAILED if bad else Verdict.PASSED,
        clock.monotonic() - start,
        tuple(findings),
        {"leftovers_ended": ended, "earlier_pods": len(work.record.open_grants)},
        (*instruments.containers.not_covered(), *uncovered),
    )


async def _end_leftovers(work: Work, uncovered: list[str]) -> tuple[list[Finding], int]:
    """Findings about earlier grants' pods, and how many processes were ended."""
    instruments, limits = work.instruments, work.policy.limits
    findings: list[Finding] = []
    ended = 0
    for grant, where in await work.standings():
        if where.elsewhere and _OTHER_CONTAINERS not in uncovered:
            uncovered.append(_OTHER_CONTAINERS)
        if where.state is PodState.OVER:
            continue
        if where.state is PodState.LIVING or grant.pod is None:
            findings.append(
                work.dirty(Step.HOLDERS, "earlier-pod-lives", _still_there(grant.pod, len(where.processes)))
            )
            continue
        if work.policy.enforcement is Enforcement.OBSERVE:
            sentence = f"{len(where.processes)} leftover(s) would be ended: {where.proof}."
            findings.append(work.dirty(Step.HOLDERS, "leftovers-observed", sentence))
            continue
        if where.unread:
            findings.append(await _end_unread(work, grant.pod, where.proof))
            continue
        try:
            survivors = await instruments.containers.end(grant.pod, where.processes, limits.question * 5)
        except Unreadable as unreadable:
            findings.append(work.dirty(Step.HOLDERS, "leftovers-unreadable", str(unreadable)))
            continue
        gone = [process for process in where.processes if process not in survivors]
        ended += len(gone)
        if gone:
            sentence = f"{len(gone)} leftover(s) of {grant.pod.namespace}/{grant.pod.name} ended: {where.proof}."
            findings.append(
                Finding(
                    Step.HOLDERS,
                    "leftovers",
                    Severity.NOTE,
                    sentence,
                    {"pids": " ".join(str(process.pid) for process in gone)},
                )
            )
        if where.others:
            findings.append(work.dirty(Step.HOLDERS, "earlier-pod-lives", _still_there(grant.pod, len(where.others))))
        if survivors:
            sentence = f"{len(survivors)} leftover(s) could not be ended (PID {survivors[0].pid} first)."
            findings.append(Finding(Step.HOLDERS, "unkillable", Severity.FAULT, sentence, {"alive": len(survivors)}))
    return findings, ended


async def _end_unread(work: Work, pod: Pod, proof: str) -> Finding:
    containers = work.instruments.containers
    try:
        ended = await containers.end_unread(pod, work.policy.limits.question * 5)
    except Unreadable as unreadable:
        return work.dirty(Step.HOLDERS, "leftovers-unreadable", str(unreadable))
    if ended:
        sentence = f"Whatever was left of {pod.namespace}/{pod.name} was ended: {proof}."
        return Finding(Step.HOLDERS, "pod-ended", Severity.NOTE, sentence, {"pod_uid": pod.uid})
    sentence = f"What is left of {pod.namespace}/{pod.name} could not be ended: {proof}."
    if containers.not_covered():  # there is no kernel's word on who is in a pod: nobody was ended
        return work.dirty(Step.HOLDERS, "leftovers-unreadable", sentence)
    return Finding(Step.HOLDERS, "unkillable", Severity.FAULT, sentence)


def _still_there(pod: object, processes: int) -> str:
    name = f"{getattr(pod, 'namespace', '?')}/{getattr(pod, 'name', '?')}" if pod is not None else "an unknown pod"
    what = f"{processes} process(es) of it live" if processes else "it may still be starting or holding the device"
    return f"The earlier pod {name} is not over: {what}."


async def _holders_left(work: Work, uncovered: list[str]) -> list[Finding]:
    """Whoever holds the device once every earlier pod is over: nobody of them may be ended.

    They are looked for even if the quick question says that there is nobody: who has a device open and does nothing
    with it yet may show up in a walk only.
    """
    report = await work.instruments.holders.holders(work.device)
    uncovered += report.not_covered
    found = [await _about(work, holder) for holder in report.holders]
    found += [await _unfinished(work, holder) for holder in report.unfinished]
    if not any(holder.kind is not HolderKind.INFRASTRUCTURE for holder in report.holders) and (
        await work.instruments.holders.held(work.device)
    ):
        found.append(work.dirty(Step.HOLDERS, "held", "Somebody has just opened the device; it is looked at again."))
    return found


async def _about(work: Work, holder: Holder) -> Finding:
    if holder.kind is HolderKind.GHOST:
        # A reset is a ghost's only cure, so a plan that has one goes on; the eraser's fence has the last word.
        cured = Step.RESET in work.plan.steps
        sentence = "Something holds the device and no process can be found for it."
        sentence += f" {holder.command}" if holder.command else ""
        return Finding(Step.HOLDERS, "ghost", Severity.NOTE if cured else Severity.FAULT, sentence)
    if holder.kind is HolderKind.INFRASTRUCTURE:
        sentence = f"PID {holder.pid} ({holder.command or 'unknown'}) of the node's infrastructure has the device open."
        return Finding(Step.HOLDERS, "infrastructure", Severity.NOTE, sentence, {"pid": holder.pid})
    if holder.kind is HolderKind.UNKILLABLE:
        sentence = f"PID {holder.pid} holds the device and cannot be ended (uninterruptible)."
        return Finding(Step.HOLDERS, "unkillable", Severity.FAULT, sentence, {"pid": holder.pid})
    uid = await work.instruments.containers.pod_uid_of(holder.pid)
    who = _who(holder, uid)
    grants, reading = work.record.open_grants, work.instruments.pods.reading
    strangers = work.instruments.strangers
    if await strangers.meet(work.device.id, holder, uid, grants, reading=reading, policy=work.policy):
        sentence = f"{who} held the device without a grant for over {work.policy.limits.dying_grace:g} s and was ended."
        return Finding(Step.HOLDERS, "stranger-ended", Severity.NOTE, sentence, {"pid": holder.pid, "pod_uid": uid})
    if any(grant.pod is not None and grant.pod.uid == uid for grant in grants if uid is not None):
        sentence = f"{who} holds the device while another container of its own pod starts on it."
        return work.dirty(Step.HOLDERS, "held-by-own-pod", sentence)
    return work.dirty(Step.HOLDERS, "unknown-holder", f"{who} holds the device without a grant.")


async def _unfinished(work: Work, holder: Holder) -> Finding:
    """Whoever cannot be looked through may hold the device; that blames him, and not the device."""
    uid = await work.instruments.containers.pod_uid_of(holder.pid)
    sentence = f"{_who(holder, uid)} has more open than can be looked through in time; it may hold the device."
    return work.dirty(Step.HOLDERS, "walk-unfinished", sentence)


def _who(holder: Holder, uid: str | None) -> str:
    return f"PID {holder.pid} ({holder.command or 'unknown'})" + (f" of pod {uid}" if uid is not None else "")
