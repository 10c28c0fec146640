"""The one answer to "may this device be handed over now?": from what is known, without asking anybody.

:func:`decide` is pure and total. What it needs to know comes in as :class:`HandoverFacts`. A fact that was not gathered yet is None; where
the answer depends on it, the answer is to gather it (:attr:`HandoverVerdict.GATHER`), so that nothing is asked in vain.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from scrubber.domain.assignment import Pod
from scrubber.domain.basis import Basis, HandOver
from scrubber.domain.codes import ErrorCode
from scrubber.domain.device import NodeIdentity
from scrubber.domain.evidence import Certificate, Finding, FindingCode, Severity
from scrubber.domain.health import Health
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.leftover import PodState
from scrubber.domain.policy import Enforcement, Policy, Proof
from scrubber.domain.record import DeviceRecord
from scrubber.domain.sharing import Beside, Neighbour, beside

__all__ = [
    "Checks",
    "Decision",
    "HandoverFacts",
    "HandoverVerdict",
    "MissingFact",
    "certificate_flaw",
    "decide",
    "unjudged",
]

_EXCEPTIONS = {kind: Basis(kind.value) for kind in (HandOver.SAME_CONTAINER, HandOver.SAME_POD, HandOver.SAME_TENANT)}
"""The kinds of hand-over that a policy may let start on checks alone. Never to another tenant, whatever it says."""


class HandoverVerdict(StrEnum):
    """What to do with a hand-over."""

    GRANT = "grant"
    GATHER = "gather"
    """Gather the fact :attr:`Decision.missing`, then decide again."""
    RECORD = "record"
    """What the checks found changes the device's health: record it, then decide again."""
    JOIN = "join"
    """A scrub is under way: wait for it, then decide again."""
    SCRUB = "scrub"
    """The slow path first, then decide again."""
    WAIT = "wait"
    """Not now. Decide again until the caller's time is up; then refuse."""
    REFUSE = "refuse"
    """Waiting longer changes nothing."""


class MissingFact(StrEnum):
    """A fact that is gathered only where the answer depends on it."""

    NEIGHBOURS = "neighbours"
    EARLIER = "earlier"
    CHECKS = "checks"


@dataclass(frozen=True, slots=True)
class Checks:
    """What the fast path's checks came to.

    Attributes:
        ghost: whatever holds the device has had no process for so long that nobody will ever let it go.
    """

    passed: bool
    findings: tuple[Finding, ...] = ()
    ghost: bool = False

    def found(self, severity: Severity) -> bool:
        return any(finding.severity is severity for finding in self.findings)

    @property
    def only_held(self) -> bool:
        """Whether somebody holds the device, and nothing is wrong with the device itself."""
        return any(each.code == FindingCode.HELD for each in self.findings) and not self.found(Severity.FAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverFacts:
    """Everything that decides about one device of a hand-over.

    Attributes:
        record: the device's, as it is in the ledger.
        kind: how the hand-over relates to the one before.
        policy: the one of this device; observed where a person broke its glass.
        ran: the pod of the last grant was seen to run since: no exception rests on a run that nobody saw.
        trouble: what is wrong with the assignment by the kubelet's word: ``REASSIGNED``, ``UNASSIGNED`` or
            ``FOREIGN_ASSIGNMENT``; None where nothing is.
        share: the device is asked for as one of several shares of it.
        asking: the pod that starts, where that is certain; only a share asks.
        neighbours: pods of grants since the device was last clean, those that are over included; without the asking pod,
            unless it has several shares.
        earlier: where the pods of earlier grants stand, the asking pod left out: its other containers may live.
        checks: what the fast path's checks came to.
    """

    record: DeviceRecord
    kind: HandOver
    policy: Policy
    identity: NodeIdentity
    ran: bool
    trouble: ErrorCode | None = None
    share: bool = False
    asking: Pod | None = None
    neighbours: tuple[Neighbour, ...] | None = None
    earlier: frozenset[PodState] | None = None
    checks: Checks | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict and its reason.

    Attributes:
        reason: for the operator, in a word or a sentence.
        basis: what a grant rests on. Set with ``GRANT``; with ``GATHER`` where it is known what a grant would rest on.
        missing: the fact to gather; set with ``GATHER``.
        code: why not; set with ``WAIT`` and ``REFUSE``.
        pods: how many pods a shared start would be beside.
    """

    verdict: HandoverVerdict
    reason: str
    basis: Basis | None = None
    missing: MissingFact | None = None
    code: ErrorCode | None = None
    pods: int = 0


def decide(facts: HandoverFacts) -> Decision:
    """Return whether the device may be handed over, on what basis, and why.

    No device leaves quarantine through here, whatever its bytes, and none is granted without a certificate issued since its
    last grant, unless the policy names the exception.

    Where the policy observes, the answer is always to grant, with what would have been done otherwise as its reason; only a
    scrub that is under way is waited for, and only what a person took out is refused.
    """
    decision = _enforced(facts)
    observes = facts.policy.enforcement is Enforcement.OBSERVE and not facts.record.ordered_out_by_person
    if not observes or decision.verdict in (HandoverVerdict.GRANT, HandoverVerdict.GATHER):
        return decision
    if facts.record.hygiene is Hygiene.SCRUBBING:
        return Decision(HandoverVerdict.JOIN, decision.reason)
    basis = unjudged(facts.record)
    if facts.checks is None:
        return Decision(HandoverVerdict.GATHER, decision.reason, basis, MissingFact.CHECKS)
    return Decision(HandoverVerdict.GRANT, decision.reason, basis)


def unjudged(record: DeviceRecord) -> Basis:
    """Return the exception by which a device is handed over whatever is known of it."""
    return Basis.OBSERVED if record.glass is None else Basis.BREAK_GLASS


def certificate_flaw(certificate: Certificate, record: DeviceRecord, node: NodeIdentity, policy: Policy) -> str | None:
    """Return why ``certificate`` does not speak for the device as it is now; None when it does."""
    if certificate.device != record.device:
        return "it is another device's"
    if certificate.next_grant is not None:
        return "it is used up"
    if certificate.previous_grant != record.grants:
        return "the device was granted since it was issued"
    if (certificate.node, certificate.boot) != (node.node, node.boot):
        return "it is from another node or boot"
    if certificate.driver != node.driver:
        return "the driver has changed since"
    if certificate.policy_digest not in (policy.digest, policy.proof_digest):
        return "the policy has changed since"
    return None


def _enforced(facts: HandoverFacts) -> Decision:
    """The answer of a policy that is enforced. Each rule takes what the ones before it left open."""
    record = facts.record
    if facts.trouble is not None and facts.policy.enforcement is not Enforcement.OBSERVE:
        for_now = facts.trouble is ErrorCode.FOREIGN_ASSIGNMENT
        return _not(
            HandoverVerdict.WAIT if for_now else HandoverVerdict.REFUSE, facts.trouble, "its assignment is not certain"
        )
    if not record.advertised:
        return _not(HandoverVerdict.REFUSE, ErrorCode.QUARANTINED, f"the device is {record.health.value}")
    if record.hygiene is Hygiene.SCRUBBING:
        return Decision(HandoverVerdict.JOIN, "a scrub is under way")
    if facts.share:
        if facts.neighbours is None:
            return Decision(HandoverVerdict.GATHER, "others may have shares of it", missing=MissingFact.NEIGHBOURS)
        company = beside(facts.asking, facts.neighbours, facts.policy.sharing, sound=_is_sound(record))
        if company.answer is Beside.WAIT and not _is_alone(facts.asking, facts.neighbours):
            return _not(HandoverVerdict.WAIT, ErrorCode.SHARING, company.reason)
        if company.answer is Beside.JOIN:
            return _checked(facts, Basis.SHARED, company.reason, company.pods)
    basis, reason = _basis(facts)
    if basis is None:
        return Decision(HandoverVerdict.SCRUB, reason)
    if facts.earlier is None:
        return Decision(HandoverVerdict.GATHER, reason, basis, MissingFact.EARLIER)
    if PodState.LIVING in facts.earlier:
        return _not(HandoverVerdict.WAIT, ErrorCode.EARLIER_POD_LIVES, "an earlier pod is not over")
    if facts.earlier - {PodState.OVER}:
        return Decision(HandoverVerdict.SCRUB, "an earlier pod has left processes behind")
    return _checked(facts, basis, reason)


def _not(verdict: HandoverVerdict, code: ErrorCode, reason: str) -> Decision:
    return Decision(verdict, reason, code=code)


def _is_alone(asking: Pod | None, neighbours: tuple[Neighbour, ...]) -> bool:
    """Whether no other pod is there to wait for: then the device is scrubbed, unless a container of the pod holds it."""
    living = [each.pod for each in neighbours if each.state is PodState.LIVING]
    return asking is not None and all(pod == asking for pod in living)


def _is_sound(record: DeviceRecord) -> bool:
    return record.hygiene is Hygiene.IN_USE and record.health is Health.HEALTHY and not record.tainted


def _basis(facts: HandoverFacts) -> tuple[Basis | None, str]:
    """What a grant would rest on by the record, and why; None where a scrub has to come first."""
    record, kind = facts.record, facts.kind
    if record.hygiene is Hygiene.CLEAN and record.certificate is not None:
        flaw = certificate_flaw(record.certificate, record, facts.identity, facts.policy)
        if flaw is None:
            return Basis.CERTIFICATE, "certified since the last grant"
        return None, f"its certificate does not count: {flaw}"
    exception = _EXCEPTIONS.get(kind)
    if facts.policy.proof_for(kind) is not Proof.CHECKS or exception is None:
        return None, f"the device is {record.hygiene.value}"
    missing = _missing(record, ran=facts.ran)
    if missing is not None:
        return None, f"the policy lets {kind.value} start on checks, but {missing}"
    return exception, f"the policy lets {kind.value} start on checks"


def _missing(record: DeviceRecord, *, ran: bool) -> str | None:
    """What an exception of the policy's lacks; None when it may stand in for a certificate."""
    if record.previous is None:
        return "somebody else may have used the device since it was last clean"
    if not ran:
        return "no run of the last pod was seen since its grant"
    if record.health is not Health.HEALTHY:
        return f"the device is {record.health.value}"
    if record.hygiene not in (Hygiene.IN_USE, Hygiene.DIRTY):
        return f"the device is {record.hygiene.value}"
    return None


def _checked(facts: HandoverFacts, basis: Basis, reason: str, pods: int = 0) -> Decision:
    """The answer where only the checks can speak against a grant on ``basis``."""
    checks = facts.checks
    if checks is None:
        return Decision(HandoverVerdict.GATHER, reason, basis, MissingFact.CHECKS, pods=pods)
    exception = basis not in (Basis.CERTIFICATE, Basis.SHARED)
    if checks.passed and not (exception and checks.found(Severity.WARNING)):
        return Decision(HandoverVerdict.GRANT, reason, basis, pods=pods)
    if checks.passed:
        return Decision(HandoverVerdict.RECORD, "a device of which the driver warns has no exceptions")
    if checks.found(Severity.FAULT):
        return Decision(HandoverVerdict.RECORD, "its checks found a fault")
    if basis is Basis.SHARED:
        why = next((each.sentence for each in checks.findings if each.severity is Severity.DIRTY), "a check failed.")
        return _not(
            HandoverVerdict.WAIT, ErrorCode.SHARING, f"its users would have to be gone first. {why}".rstrip(".")
        )
    if checks.only_held and not checks.ghost:
        return _not(HandoverVerdict.WAIT, ErrorCode.HELD, "somebody holds it")
    return Decision(HandoverVerdict.SCRUB, "its checks found something")
