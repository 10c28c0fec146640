"""Defects, each of which violates one invariant: they show that the search would find such a defect in the product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scrubber.domain.handover import HandoverDecision, HandoverFacts, HandoverVerdict, decide
from scrubber.domain.handover_kind import Basis
from scrubber.domain.next_action import NextAction, RecoveryAction, next_action
from scrubber.domain.pods import PodLiveness, PodState, pod_liveness
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Hygiene
from tests.model.node import Product

__all__ = ["BROKEN"]


def _grants_dirty(facts: HandoverFacts) -> HandoverDecision:
    found = decide(facts)
    if found.verdict is HandoverVerdict.SCRUB and facts.record.hygiene is Hygiene.DIRTY:
        return HandoverDecision(HandoverVerdict.GRANT, "broken", Basis.CERTIFICATE)
    return found


def _exception_for_every_pod(facts: HandoverFacts) -> HandoverDecision:
    found = decide(facts)
    if found.verdict is HandoverVerdict.SCRUB and facts.record.last_grant is not None:
        return HandoverDecision(HandoverVerdict.GRANT, "broken", Basis.SAME_CONTAINER)
    return found


def _keeps_certificate(record: DeviceRecord, *words: Any, **facts: Any) -> DeviceRecord:
    return replace(record.after_grant(*words, **facts), hygiene=Hygiene.CLEAN, certificate=record.certificate)


def _forgets_grants(record: DeviceRecord, boot: str) -> DeviceRecord:
    return replace(record.after_service_start(boot), open_grants=())


def _over_at_once(*words: Any, **facts: Any) -> PodLiveness:
    return PodLiveness(PodState.OVER)


def _leftover_at_once(processes: Any, absence: Any, **facts: Any) -> PodLiveness:
    facts["leftover_grace_period"] = 0.0
    return pod_liveness(processes, absence, **facts)


def _alive_forever(*words: Any, **facts: Any) -> PodLiveness:
    return PodLiveness(PodState.ALIVE)


def _never_resolves(*words: Any, **facts: Any) -> NextAction:
    found = next_action(*words, **facts)
    return NextAction(RecoveryAction.NOTHING) if found.action is RecoveryAction.RESOLVE else found


def _never_recovers(*words: Any, **facts: Any) -> NextAction:
    found = next_action(*words, **facts)
    return NextAction(RecoveryAction.NOTHING) if found.action is RecoveryAction.RECOVER else found


def _waits_for_a_certificate_only(facts: HandoverFacts) -> HandoverDecision:
    found = decide(facts)
    return found if found.verdict is not HandoverVerdict.SCRUB else HandoverDecision(HandoverVerdict.WAIT, "broken")


def _nothing_without_request(*words: Any, **facts: Any) -> NextAction:
    return NextAction(RecoveryAction.NOTHING)


BROKEN: Mapping[str, tuple[str, Product]] = {
    "a dirty device is granted": ("invariant 1", Product(decide=_grants_dirty)),
    "the exception applies to every pod": ("invariant 1", Product(decide=_exception_for_every_pod)),
    "the answer precedes the commit": ("invariant 1", Product(answers_after_commit=False)),
    "a grant does not use up its certificate": ("invariant 2", Product(after_grant=_keeps_certificate)),
    "a start of the service forgets the grants": ("invariant 1", Product(after_service_start=_forgets_grants)),
    "an orphaned eraser is not waited for": ("invariant 4", Product(waits_for_orphan=False)),
    "a pod without processes is over": ("invariant 5", Product(pod_liveness=_over_at_once)),
    "a deleted pod's processes are leftovers at once": ("invariant 5", Product(pod_liveness=_leftover_at_once)),
    "a pod is never over": ("liveness", Product(pod_liveness=_alive_forever)),
    "a lost end of a scrub is never resolved": ("liveness", Product(next_action=_never_resolves)),
    "a quarantined device is never recovered": ("liveness", Product(next_action=_never_recovers)),
    "a device without a certificate is waited for, and never scrubbed": (
        "liveness",
        Product(decide=_waits_for_a_certificate_only, next_action=_nothing_without_request),
    ),
}
"""Defect → the property that notices it, and the product with it."""
