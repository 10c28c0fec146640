"""Derives a certificate from the steps of a scrub: it claims only what was measured, and lists what was not."""

from __future__ import annotations

from collections.abc import Iterable

from scrubber.domain.assignment import Claim
from scrubber.domain.device import NodeIdentity
from scrubber.domain.evidence import (
    Attestation,
    Certificate,
    PathKind,
    ScrubRecord,
    Severity,
    Step,
    StepResult,
    Verdict,
)
from scrubber.domain.handover_kind import UNCONDITIONAL_BASES, Basis
from scrubber.domain.policy import Policy
from scrubber.domain.record import DeviceRecord
from scrubber.domain.usage import MAX_UNDETECTED_SECONDS

__all__ = ["certify"]

_EXCEPTION_REASONS = {
    Basis.BREAK_GLASS: "because of a break-glass override",
    Basis.OBSERVE_MODE: "because the policy is in observe mode",
}
_NOT_CLAIMED_REASONS = {
    Verdict.NOT_COVERED: "could not be done",
    Verdict.FAILED: "failed, and an exception allowed the grant",
}


def _claim(result: StepResult) -> str:
    values = {name: "?" if value is None else str(value) for name, value in result.measured.items()}
    match result.step:
        case Step.HOLDERS if "earlier_pods" in values:
            allowed = values.get("infrastructure_holders", "0")
            who = "none" if allowed == "0" else f"none but infrastructure that the policy allows ({allowed})"
            return f"holders: {who}; earlier pods ended: {values['earlier_pods']}, leftovers killed: {values['leftovers_killed']}"
        case Step.HOLDERS:
            return "holders: none"
        case Step.MEMORY:
            of = f"of {values['total_bytes']} bytes"
            if result.measured.get("verified_bytes", 0) is None:
                return f"memory: {values['cleared_bytes']} {of} cleared"
            return f"memory: {values['cleared_bytes']} {of} cleared, {values['verified_bytes']} {of} read back as zeros"
        case Step.ON_CHIP:
            each = f"{values['shared_bytes']} bytes of shared memory and {values['register_bytes']} bytes of registers of each"
            return f"on-chip: {values['units_cleared']} of {values['units']} processors, {each} read back as zeros"
        case Step.DIAGNOSTICS:
            return f"diagnostics: {values['level']}, {values['checks']} checks passed"
        case Step.SETTINGS if "restored" in values:
            return f"settings: {values['checked']} as expected, {values['restored']} of them restored"
        case Step.SETTINGS:
            return "settings: as expected"
        case Step.HEALTH:
            warned = sorted({each.code for each in result.findings if each.severity is Severity.WARNING})
            return f"health: no fault; warnings: {', '.join(warned)}" if warned else "health: no fault"
        case _:
            return f"{result.step.value}: done"


def _claim_with_source(result: StepResult) -> str:
    """Return the claim; one that this service did not measure names who makes it."""
    claimed_by = result.measured.get("claimed_by")
    return f"{_claim(result)} (claimed by {claimed_by}, not measured)" if claimed_by else _claim(result)


def _is_unexplained(result: StepResult) -> bool:
    """Whether the step claims nothing and its result does not contain a reason."""
    explained = any(line.startswith(f"{result.step.value}: ") for line in result.not_covered)
    return result.verdict is Verdict.FAILED or (result.verdict is Verdict.NOT_COVERED and not explained)


def _not_claimed_reason(result: StepResult) -> str:
    if result.step is Step.ON_CHIP and result.verdict is Verdict.NOT_COVERED:
        return "the device has none"
    return _NOT_CLAIMED_REASONS[result.verdict]


def certify(
    scrub: ScrubRecord,
    steps: Iterable[StepResult],
    record: DeviceRecord,
    *,
    identity: NodeIdentity,
    policy: Policy,
    certificate_id: str,
    now: float,
    rests_on: str | None = None,
    basis: Basis = Basis.CERTIFICATE,
    attestation: Attestation | None = None,
    claim: Claim | None = None,
) -> Certificate:
    """Return the certificate of a path that passed; unused.

    Args:
        rests_on: for a fast path, the slow-path certificate that it rests on.
        basis: the basis of the grant; an exception where there is no proof of the memory.
        attestation: the device's attestation, if one was made.
        claim: the claim or job that it is granted to; None for a container.
    """
    done = tuple(steps)
    covered = tuple(_claim_with_source(result) for result in done if result.verdict is Verdict.PASSED)
    missing = [line for result in done for line in result.not_covered]
    missing += [f"{result.step.value}: {_not_claimed_reason(result)}" for result in done if _is_unexplained(result)]
    ran = {result.step for result in done}
    for step in Step:
        if step in ran:
            continue
        why = "not part of this path"
        if step is Step.RESET and record.externally_reset:
            why = "by another service, as that service says; not observed by this one"
        if step is Step.MEMORY and rests_on is not None and basis is Basis.CERTIFICATE:
            why = f"proved by {rests_on}, not checked again"
        elif step is Step.MEMORY and basis is not Basis.CERTIFICATE:
            why = f"not cleared, {_EXCEPTION_REASONS.get(basis, f'as the policy allows for {basis} starts')}"
        missing.append(f"{step.value}: {why}")
    if attestation is not None:
        covered += (f"attestation: report with SHA-256 {attestation.digest}; not compared with reference values",)
    elif record.certificate is not None and record.certificate.attestation is not None:
        missing.append(f"attestation: reported for {record.certificate.id}, not requested again")
    missing.append(
        f"use: a process that used the device for less than {MAX_UNDETECTED_SECONDS:g} s may have gone undetected"
    )
    if claim is not None and claim.manager is not None:
        missing.append(
            "use: processes that start within the job, without a hand-over, or that another service starts for it"
        )
    else:
        missing.append(
            "use: a container that the kubelet starts without calling the plugin, while the plugin is not registered"
        )
    if claim is not None and claim.manager is None:
        missing.append(
            "use: restarts of containers within the claim, and further pods of the claim, which start without a hand-over"
        )
    return Certificate(
        id=certificate_id,
        node=identity.node,
        boot=identity.boot,
        driver=identity.driver,
        device=record.device,
        sequence=record.certificate_count + 1,
        previous_grant=record.grant_sequence,
        path=scrub.path,
        scrub=scrub.id,
        covered=covered,
        not_covered=tuple(missing),
        policy=policy.name,
        policy_digest=policy.proof_digest,
        issued_at=now,
        rests_on=rests_on if scrub.path is PathKind.FAST and basis not in UNCONDITIONAL_BASES else None,
        attestation=attestation,
    )
