"""The one pure answer to "may this device be handed over?", from both states, the certificate and the policy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from scrubber.domain.device import NodeIdentity
from scrubber.domain.evidence import Certificate
from scrubber.domain.handover import HandOver
from scrubber.domain.health import Health
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import Enforcement, Policy, Proof
from scrubber.domain.record import DeviceRecord

__all__ = ["Answer", "Decision", "certificate_flaw", "may_be_handed_over"]


class Answer(StrEnum):
    """What to do with a hand-over, as far as the record tells."""

    GO_ON_CERTIFICATE = "go-on-certificate"
    GO_BY_EXCEPTION = "go-by-exception"
    WAIT_FOR_SCRUB = "wait-for-scrub"
    SCRUB = "scrub"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Decision:
    """An answer and its reason: ``reason`` for the operator, in a word or a sentence; ``exception`` names the rule."""

    answer: Answer
    reason: str
    exception: str | None = None

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
    if certificate.policy_digest != policy.digest:
        return "the policy has changed since"
    return None


def may_be_handed_over(
    record: DeviceRecord, kind: HandOver, policy: Policy, node: NodeIdentity, *, ran: bool = True
) -> Decision:
    """Judge one device by its record alone; the fast path's checks come on top of every "go".

    No device leaves quarantine through here, whatever its bytes, and none is granted without a certificate issued
    since its last grant, unless the policy names the exception. In observe mode the answer is always "go", with what
    would have been refused as its reason.

    Args:
        ran: the pod of the last grant was seen to run since: no exception rests on a run that nobody saw.
    """
    decision = _judge(record, kind, policy, node, ran)
    if policy.enforcement is Enforcement.OBSERVE and not decision.go:
        if record.hygiene is Hygiene.SCRUBBING:
            return Decision(Answer.WAIT_FOR_SCRUB, decision.reason)
        return Decision(Answer.GO_BY_EXCEPTION, decision.reason, exception="observe")
    return decision


def _judge(record: DeviceRecord, kind: HandOver, policy: Policy, node: NodeIdentity, ran: bool) -> Decision:
    if record.health not in (Health.HEALTHY, Health.SUSPECT):
        return Decision(Answer.REFUSE, f"the device is {record.health.value}")
    if record.hygiene is Hygiene.SCRUBBING:
        return Decision(Answer.WAIT_FOR_SCRUB, "a scrub is under way")
    if record.hygiene is Hygiene.CLEAN and record.certificate is not None:
        flaw = certificate_flaw(record.certificate, record, node, policy)
        if flaw is None:
            return Decision(Answer.GO_ON_CERTIFICATE, "certified since the last grant")
        return Decision(Answer.SCRUB, f"its certificate does not count: {flaw}")
    exempt = policy.proof_for(kind) is Proof.CHECKS and kind is not HandOver.UNKNOWN and record.previous is not None
    if exempt and ran and record.hygiene in (Hygiene.IN_USE, Hygiene.DIRTY) and record.health is Health.HEALTHY:
        return Decision(Answer.GO_BY_EXCEPTION, f"the policy lets {kind.value} start on checks", exception=kind.value)
    return Decision(Answer.SCRUB, f"the device is {record.hygiene.value}")
