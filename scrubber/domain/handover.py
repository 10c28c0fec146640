"""Decides whether a device may be handed over now, from known facts and without I/O.

:func:`decide` is pure and total. Its input is :class:`HandoverFacts`. A fact that was not gathered yet is None; where
the decision depends on it, the verdict is to gather it (:attr:`HandoverVerdict.GATHER`), so nothing is queried
unnecessarily.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from scrubber.domain.assignment import Pod
from scrubber.domain.codes import ErrorCode
from scrubber.domain.device import NodeIdentity
from scrubber.domain.evidence import Certificate, Finding, FindingCode, Severity
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.pods import PodState
from scrubber.domain.policy import Enforcement, Policy, RequiredProof
from scrubber.domain.record import DeviceRecord
from scrubber.domain.sharing import GrantedPod, SharingAction, decide_sharing
from scrubber.domain.states import Health, Hygiene

__all__ = [
    "FastPathChecks",
    "HandoverDecision",
    "HandoverFacts",
    "HandoverVerdict",
    "MissingFact",
    "certificate_flaw",
    "decide",
    "unconditional_basis",
]

_EXCEPTIONS = {
    kind: Basis(kind.value) for kind in (HandOverKind.SAME_CONTAINER, HandOverKind.SAME_POD, HandOverKind.SAME_TENANT)
}
"""The kinds of hand-over that a policy may allow on checks alone. Never to another tenant, regardless of the policy."""

_TEMPORARY_PROBLEMS = (ErrorCode.ASSIGNED_BY_ANOTHER_PLUGIN, ErrorCode.PREPARED_FOR_CLAIM)
"""Problems of an assignment that end when another pod or claim ends."""


class HandoverVerdict(StrEnum):
    """What to do with a hand-over."""

    GRANT = "grant"
    GATHER = "gather"
    """Gather the fact :attr:`HandoverDecision.missing`, then decide again."""
    RECORD = "record"
    """The checks' findings change the device's health: record them, then decide again."""
    JOIN = "join"
    """A scrub is in progress: wait for it, then decide again."""
    SCRUB = "scrub"
    """Run the slow path first, then decide again."""
    WAIT = "wait"
    """Not now. Decide again until the caller's deadline; then refuse."""
    REFUSE = "refuse"
    """Waiting longer changes nothing."""


class MissingFact(StrEnum):
    """A fact that is gathered only where the decision depends on it."""

    GRANTED_PODS = "neighbours"
    EARLIER_PODS = "earlier"
    CHECKS = "checks"


@dataclass(frozen=True, slots=True)
class FastPathChecks:
    """The result of the fast path's checks.

    Attributes:
        held_without_process: the holder has had no process for so long that it will never release the device.
    """

    passed: bool
    findings: tuple[Finding, ...] = ()
    held_without_process: bool = False

    def has_finding(self, severity: Severity) -> bool:
        return any(finding.severity is severity for finding in self.findings)

    @property
    def is_only_held(self) -> bool:
        """Whether the device is held and nothing is wrong with the device itself."""
        return any(each.code == FindingCode.DEVICE_BUSY for each in self.findings) and not self.has_finding(
            Severity.FAULT
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverFacts:
    """Everything that the decision about one device of a hand-over depends on.

    Attributes:
        record: the device's record in the ledger.
        kind: how the hand-over relates to the previous one.
        policy: the policy of this device; in observe mode while a break-glass override is active.
        last_pod_ran: the pod of the last grant was seen to run since: no exception rests on a run that was not
            observed.
        assignment_problem: what is wrong with the assignment according to the kubelet: ``REASSIGNED``, ``UNASSIGNED``
            or ``ASSIGNED_BY_ANOTHER_PLUGIN``; or with the claim, as :func:`~scrubber.domain.claims.claim_problem`
            returns it; None where nothing is.
        is_claim: whether a claim is to be prepared: no exception applies to it.
        is_unmeasured: whether what is known about the device is the claim of a command: no exception applies to it.
        is_share: whether the request is for one of several shares of the device.
        starting_pod: the pod that starts, where that is certain; used only for a share.
        granted_pods: pods of grants since the device was last clean, including pods that are over; without the starting
            pod, unless it has several shares.
        earlier_pods: the states of the pods of earlier grants, without the starting pod: its other containers may be
            alive.
        checks: the result of the fast path's checks.
    """

    record: DeviceRecord
    kind: HandOverKind
    policy: Policy
    identity: NodeIdentity
    last_pod_ran: bool
    assignment_problem: ErrorCode | None = None
    is_claim: bool = False
    is_unmeasured: bool = False
    is_share: bool = False
    starting_pod: Pod | None = None
    granted_pods: tuple[GrantedPod, ...] | None = None
    earlier_pods: frozenset[PodState] | None = None
    checks: FastPathChecks | None = None


@dataclass(frozen=True, slots=True)
class HandoverDecision:
    """A verdict and its reason.

    Attributes:
        reason: for the operator, a word or a sentence.
        basis: what a grant rests on. Set with ``GRANT``; with ``GATHER`` where it is known what a grant would rest on.
        missing: the fact to gather; set with ``GATHER``.
        code: why not; set with ``WAIT`` and ``REFUSE``.
        sharing_pods: how many pods a shared start would run beside.
    """

    verdict: HandoverVerdict
    reason: str
    basis: Basis | None = None
    missing: MissingFact | None = None
    code: ErrorCode | None = None
    sharing_pods: int = 0


def decide(facts: HandoverFacts) -> HandoverDecision:
    """Return whether the device may be handed over, on what basis, and why.

    No device leaves quarantine through here, regardless of its memory, and none is granted without a
    certificate issued since its last grant, unless the policy names the exception.

    Where the policy observes, the decision is always to grant, and the reason contains what would have been done
    otherwise; only a scrub in progress is waited for, and only a device that an operator quarantined is refused.
    """
    decision = _enforced(facts)
    observes = facts.policy.enforcement is Enforcement.OBSERVE and not facts.record.quarantined_by_operator
    if not observes or decision.verdict in (HandoverVerdict.GRANT, HandoverVerdict.GATHER):
        return decision
    if facts.record.hygiene is Hygiene.SCRUBBING:
        return HandoverDecision(HandoverVerdict.JOIN, decision.reason)
    basis = unconditional_basis(facts.record)
    if facts.checks is None:
        return HandoverDecision(HandoverVerdict.GATHER, decision.reason, basis, MissingFact.CHECKS)
    return HandoverDecision(HandoverVerdict.GRANT, decision.reason, basis)


# See docs/decisions/0031-observe-and-break-glass.md.
def unconditional_basis(record: DeviceRecord) -> Basis:
    """Return the exception under which a device is handed over without any check."""
    return Basis.OBSERVE_MODE if record.break_glass is None else Basis.BREAK_GLASS


def certificate_flaw(certificate: Certificate, record: DeviceRecord, node: NodeIdentity, policy: Policy) -> str | None:
    """Return why ``certificate`` is not valid for the current state of the device; None when it is."""
    if certificate.device != record.device:
        return "it is for another device"
    if certificate.next_grant is not None:
        return "it was already used"
    if certificate.previous_grant != record.grant_sequence:
        return "the device was granted since it was issued"
    if (certificate.node, certificate.boot) != (node.node, node.boot):
        return "it is from another node or boot"
    if certificate.driver != node.driver:
        return "the driver has changed since it was issued"
    if certificate.policy_digest not in (policy.digest, policy.proof_digest):
        return "the policy has changed since it was issued"
    return None


def _enforced(facts: HandoverFacts) -> HandoverDecision:
    """Return the decision of an enforced policy. Each rule handles what the previous ones left undecided."""
    record = facts.record
    if facts.assignment_problem is not None and facts.policy.enforcement is not Enforcement.OBSERVE:
        return _not_granted(
            HandoverVerdict.WAIT if facts.assignment_problem in _TEMPORARY_PROBLEMS else HandoverVerdict.REFUSE,
            facts.assignment_problem,
            "its assignment is not certain",
        )
    if not record.advertised:
        return _not_granted(HandoverVerdict.REFUSE, ErrorCode.QUARANTINED, f"the device is {record.health.value}")
    if record.hygiene is Hygiene.SCRUBBING:
        return HandoverDecision(HandoverVerdict.JOIN, "a scrub is in progress")
    if facts.is_share:
        if facts.granted_pods is None:
            return HandoverDecision(
                HandoverVerdict.GATHER, "other pods may have shares of it", missing=MissingFact.GRANTED_PODS
            )
        company = decide_sharing(
            facts.starting_pod, facts.granted_pods, facts.policy.sharing, device_is_sound=_is_sound(record)
        )
        if company.action is SharingAction.WAIT and not _is_alone(facts.starting_pod, facts.granted_pods):
            return _not_granted(HandoverVerdict.WAIT, ErrorCode.SHARING_NOT_ALLOWED, company.reason)
        if company.action is SharingAction.JOIN:
            return _checked(facts, Basis.SHARED, company.reason, company.pods)
    basis, reason = _basis(facts)
    if basis is None:
        return HandoverDecision(HandoverVerdict.SCRUB, reason)
    if facts.earlier_pods is None:
        return HandoverDecision(HandoverVerdict.GATHER, reason, basis, MissingFact.EARLIER_PODS)
    if PodState.ALIVE in facts.earlier_pods:
        return _not_granted(HandoverVerdict.WAIT, ErrorCode.EARLIER_POD_RUNNING, "an earlier pod is not over")
    if facts.earlier_pods - {PodState.OVER}:
        return HandoverDecision(HandoverVerdict.SCRUB, "an earlier pod left processes behind")
    return _checked(facts, basis, reason)


def _not_granted(verdict: HandoverVerdict, code: ErrorCode, reason: str) -> HandoverDecision:
    return HandoverDecision(verdict, reason, code=code)


def _is_alone(starting_pod: Pod | None, granted_pods: tuple[GrantedPod, ...]) -> bool:
    """Whether no other pod has to end first: then the device is scrubbed, unless a container of the pod holds it."""
    living = [each.pod for each in granted_pods if each.state is PodState.ALIVE]
    return starting_pod is not None and all(pod == starting_pod for pod in living)


def _is_sound(record: DeviceRecord) -> bool:
    return record.hygiene is Hygiene.IN_USE and record.health is Health.HEALTHY and not record.contaminated


def _basis(facts: HandoverFacts) -> tuple[Basis | None, str]:
    """Return what a grant would rest on according to the record, and why; None where a scrub must come first."""
    record, kind = facts.record, facts.kind
    if record.hygiene is Hygiene.CLEAN and record.certificate is not None:
        flaw = certificate_flaw(record.certificate, record, facts.identity, facts.policy)
        if flaw is None:
            return Basis.CERTIFICATE, "a certificate was issued since the last grant"
        return None, f"its certificate is not valid: {flaw}"
    exception = None if facts.is_claim or facts.is_unmeasured else _EXCEPTIONS.get(kind)
    if facts.policy.required_proof(kind) is not RequiredProof.CHECKS or exception is None:
        return None, f"the device is {record.hygiene.value}"
    missing = _missing_for_exception(record, ran=facts.last_pod_ran)
    if missing is not None:
        return None, f"the policy allows a {kind.value} start on checks, but {missing}"
    return exception, f"the policy allows a {kind.value} start on checks"


# See docs/decisions/0002-exceptions-need-an-unbroken-watch.md.
def _missing_for_exception(record: DeviceRecord, *, ran: bool) -> str | None:
    """Return which condition of the policy's exception is not met; None when it may replace a certificate."""
    if record.previous_assignment is None:
        return "another pod or process may have used the device since it was last clean"
    if not ran:
        return "the last pod was not observed to run since its grant"
    if record.health is not Health.HEALTHY:
        return f"the device is {record.health.value}"
    if record.hygiene not in (Hygiene.IN_USE, Hygiene.DIRTY):
        return f"the device is {record.hygiene.value}"
    return None


def _checked(facts: HandoverFacts, basis: Basis, reason: str, pods: int = 0) -> HandoverDecision:
    """Return the decision where only the checks can prevent a grant on ``basis``."""
    checks = facts.checks
    if checks is None:
        return HandoverDecision(HandoverVerdict.GATHER, reason, basis, MissingFact.CHECKS, sharing_pods=pods)
    exception = basis not in (Basis.CERTIFICATE, Basis.SHARED)
    if checks.passed and not (exception and checks.has_finding(Severity.WARNING)):
        return HandoverDecision(HandoverVerdict.GRANT, reason, basis, sharing_pods=pods)
    if checks.passed:
        return HandoverDecision(
            HandoverVerdict.RECORD, "the driver reports a warning for the device, so no exception applies"
        )
    if checks.has_finding(Severity.FAULT):
        return HandoverDecision(HandoverVerdict.RECORD, "the checks found a fault")
    if basis is Basis.SHARED:
        why = next((each.message for each in checks.findings if each.severity is Severity.BLOCKING), "a check failed.")
        return _not_granted(
            HandoverVerdict.WAIT,
            ErrorCode.SHARING_NOT_ALLOWED,
            f"the processes that use it must end first. {why}".rstrip("."),
        )
    if checks.is_only_held and not checks.held_without_process:
        return _not_granted(HandoverVerdict.WAIT, ErrorCode.DEVICE_BUSY, "a process holds it")
    return HandoverDecision(HandoverVerdict.SCRUB, "the checks found a problem")
