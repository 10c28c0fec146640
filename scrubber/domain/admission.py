"""The one pure answer to "may this device be handed over?", from both states, the certificate and the policy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from scrubber.domain.basis import Basis, HandOver
from scrubber.domain.device import NodeIdentity
from scrubber.domain.evidence import Certificate
from scrubber.domain.health import Health
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import Enforcement, Policy, Proof
from scrubber.domain.record import DeviceRecord

__all__ = ["Answer", "Decision", "certificate_flaw", "may_be_handed_over", "unjudged"]


_EXCEPTIONS = {kind: Basis(kind.value) for kind in (HandOver.SAME_CONTAINER, HandOver.SAME_POD, HandOver.SAME_TENANT)}
"""The kinds of hand-over that a policy may let start on checks alone. Never to another tenant, whatever it says."""


class Answer(StrEnum):
    """What to do with a hand-over, as far as the record tells."""

    GO_ON_CERTIFICATE = "go-on-certificate"
    GO_BY_EXCEPTION = "go-by-exception"
    WAIT_FOR_SCRUB = "wait-for-scrub"
    SCRUB = "scrub"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Decision:
    """An answer and its reason, for the operator, in a word or a sentence; ``basis`` is what a "go" rests on."""

    answer: Answer
    reason: str
    basis: Basis | None = None

    @property
    def go(self) -> bool:
        return self.answer in (Answer.GO_ON_CERTIFICATE, Answer.GO_BY_EXCEPTION)


def certificate_flaw(certificate: Certificate, record: DeviceRecord, node: NodeIdentity, policy: Policy) -> str | None:
    """Why ``certificate`` does not speak for the device as it is now; None when it does."""
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


def may_be_handed_over(
    record: DeviceRecord, kind: HandOver, policy: Policy, node: NodeIdentity, *, ran: bool = True
) -> Decision:
    """Judge one device by its record alone; the fast path's checks come on top of every "go".

    No device leaves quarantine through here, whatever its bytes, and none is granted without a certificate issued
    since its last grant, unless the policy names the exception. Where the policy observes the answer is always "go", with
    what would have been refused as its reason; only what a person took out is refused. The same holds for a device whose
    glass a person broke.

    Args:
        ran: the pod of the last grant was seen to run since: no exception rests on a run that nobody saw.
    """
    decision = _judge(record, kind, policy, node, ran)
    if policy.enforcement is not Enforcement.OBSERVE or decision.go or record.ordered_out_by_person:
        return decision
    if record.hygiene is Hygiene.SCRUBBING:
        return Decision(Answer.WAIT_FOR_SCRUB, decision.reason)
    return Decision(Answer.GO_BY_EXCEPTION, decision.reason, basis=unjudged(record))


def unjudged(record: DeviceRecord) -> Basis:
    """The exception by which a device is handed over whatever is known of it."""
    return Basis.OBSERVED if record.glass is None else Basis.BREAK_GLASS


def _judge(record: DeviceRecord, kind: HandOver, policy: Policy, node: NodeIdentity, ran: bool) -> Decision:
    if record.health not in (Health.HEALTHY, Health.SUSPECT):
        return Decision(Answer.REFUSE, f"the device is {record.health.value}")
    if record.hygiene is Hygiene.SCRUBBING:
        return Decision(Answer.WAIT_FOR_SCRUB, "a scrub is under way")
    if record.hygiene is Hygiene.CLEAN and record.certificate is not None:
        flaw = certificate_flaw(record.certificate, record, node, policy)
        if flaw is None:
            return Decision(Answer.GO_ON_CERTIFICATE, "certified since the last grant", Basis.CERTIFICATE)
        return Decision(Answer.SCRUB, f"its certificate does not count: {flaw}")
    exception = _EXCEPTIONS.get(kind)
    if policy.proof_for(kind) is not Proof.CHECKS or exception is None:
        return Decision(Answer.SCRUB, f"the device is {record.hygiene.value}")
    missing = _missing(record, ran)
    if missing is not None:
        return Decision(Answer.SCRUB, f"the policy lets {kind.value} start on checks, but {missing}")
    return Decision(Answer.GO_BY_EXCEPTION, f"the policy lets {kind.value} start on checks", exception)


def _missing(record: DeviceRecord, ran: bool) -> str | None:
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
