"""The states of a device: hygiene (was its memory proved clean?) and health (can it be trusted to work?).

Two transition tables define all state changes. Also defines the causes of a quarantine and the recovery from each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

__all__ = [
    "ADVERTISED",
    "HEALTH_TRANSITIONS",
    "HYGIENE_TRANSITIONS",
    "OPERATOR_CAUSE",
    "BindingState",
    "Cause",
    "Health",
    "HealthEvent",
    "Hygiene",
    "HygieneEvent",
    "IllegalTransition",
    "RecoveryMethod",
    "TaintReason",
    "TransitionTable",
]

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class IllegalTransition(AssertionError):
    """The code requested a transition that the table does not contain: a bug in the program, never in its input."""


class TransitionTable(Generic[S, E]):
    """The transitions of one state machine; a device changes state only through a table."""

    def __init__(self, pairs: Mapping[tuple[S, E], S]) -> None:
        self._pairs = dict(pairs)

    def __call__(self, state: S, event: E) -> S:
        """Return the state after ``event``; raises :class:`IllegalTransition` for a pair that is not in the table."""
        try:
            return self._pairs[state, event]
        except KeyError:
            raise IllegalTransition(f"the event {event.value} is not allowed in state {state.value}") from None

    def allows(self, state: S, event: E) -> bool:
        """Whether the table contains the pair."""
        return (state, event) in self._pairs

    def __iter__(self) -> Iterator[tuple[S, E, S]]:
        """Iterate over all rows: state, event, next state."""
        return iter((state, event, after) for (state, event), after in self._pairs.items())


class Hygiene(StrEnum):
    """Whether the memory of a device is proved clean. Unknown counts as dirty: there is no fifth state."""

    DIRTY = "dirty"
    SCRUBBING = "scrubbing"
    CLEAN = "clean"
    IN_USE = "in-use"


class HygieneEvent(StrEnum):
    """Events that can change a device's hygiene."""

    SERVICE_STARTED = "service-started"
    ADOPTED = "adopted"
    SCRUB_STARTED = "scrub-started"
    SCRUB_PASSED = "scrub-passed"
    SCRUB_ENDED = "scrub-ended"
    GRANTED = "granted"
    RELEASED = "released"
    CERTIFICATE_VOIDED = "touched"


HYGIENE_TRANSITIONS: TransitionTable[Hygiene, HygieneEvent] = TransitionTable(
    {
        # What happened while the service was not watching makes a device dirty; one that a pod has stays with that pod.
        (Hygiene.DIRTY, HygieneEvent.SERVICE_STARTED): Hygiene.DIRTY,
        (Hygiene.SCRUBBING, HygieneEvent.SERVICE_STARTED): Hygiene.DIRTY,
        (Hygiene.CLEAN, HygieneEvent.SERVICE_STARTED): Hygiene.DIRTY,
        (Hygiene.IN_USE, HygieneEvent.SERVICE_STARTED): Hygiene.DIRTY,
        (Hygiene.DIRTY, HygieneEvent.ADOPTED): Hygiene.IN_USE,
        # A container that the kubelet started without a hand-over, beside one with a hand-over.
        (Hygiene.IN_USE, HygieneEvent.ADOPTED): Hygiene.IN_USE,
        (Hygiene.DIRTY, HygieneEvent.SCRUB_STARTED): Hygiene.SCRUBBING,
        (Hygiene.CLEAN, HygieneEvent.SCRUB_STARTED): Hygiene.SCRUBBING,
        (Hygiene.SCRUBBING, HygieneEvent.SCRUB_PASSED): Hygiene.CLEAN,
        # Failed, refused, abandoned or timed out: none of them proves the memory clean.
        (Hygiene.SCRUBBING, HygieneEvent.SCRUB_ENDED): Hygiene.DIRTY,
        (Hygiene.CLEAN, HygieneEvent.GRANTED): Hygiene.IN_USE,
        # Only by a named exception of the policy (same container on checks, observe mode): see
        # ``scrubber.domain.handover``.
        (Hygiene.DIRTY, HygieneEvent.GRANTED): Hygiene.IN_USE,
        (Hygiene.IN_USE, HygieneEvent.GRANTED): Hygiene.IN_USE,
        (Hygiene.IN_USE, HygieneEvent.RELEASED): Hygiene.DIRTY,
        (Hygiene.CLEAN, HygieneEvent.CERTIFICATE_VOIDED): Hygiene.DIRTY,
        (Hygiene.DIRTY, HygieneEvent.CERTIFICATE_VOIDED): Hygiene.DIRTY,
        (Hygiene.SCRUBBING, HygieneEvent.CERTIFICATE_VOIDED): Hygiene.DIRTY,
    }
)


class Health(StrEnum):
    """How far a device can be trusted to work."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"
    RECOVERING = "recovering"
    PROBATION = "probation"
    CONDEMNED = "condemned"


ADVERTISED = frozenset({Health.HEALTHY, Health.SUSPECT})
"""Only these are advertised to the kubelet as ``Healthy``: a device on probation has not returned to service yet."""


class HealthEvent(StrEnum):
    """Events that can change a device's health."""

    SOFT_SIGNAL = "soft-signal"
    SIGNALS_ENDED = "calm"
    FAULT = "fault"
    QUARANTINED_BY_OPERATOR = "ordered-out"
    RECOVERY_STARTED = "recovery-started"
    RECOVERY_FAILED = "recovery-failed"
    RECOVERED = "recovered"
    PROBATION_PASSED = "earned"
    ATTEMPTS_EXHAUSTED = "exhausted"
    RELEASED_BY_OPERATOR = "released-by-person"


HEALTH_TRANSITIONS: TransitionTable[Health, HealthEvent] = TransitionTable(
    {
        (Health.HEALTHY, HealthEvent.SOFT_SIGNAL): Health.SUSPECT,
        (Health.SUSPECT, HealthEvent.SOFT_SIGNAL): Health.SUSPECT,
        (Health.SUSPECT, HealthEvent.SIGNALS_ENDED): Health.HEALTHY,
        **{(state, HealthEvent.FAULT): Health.QUARANTINED for state in Health if state is not Health.CONDEMNED},
        **{(state, HealthEvent.QUARANTINED_BY_OPERATOR): Health.QUARANTINED for state in Health},
        **{(state, HealthEvent.ATTEMPTS_EXHAUSTED): Health.CONDEMNED for state in Health},
        (Health.QUARANTINED, HealthEvent.RECOVERY_STARTED): Health.RECOVERING,
        (Health.RECOVERING, HealthEvent.RECOVERY_FAILED): Health.QUARANTINED,
        (Health.RECOVERING, HealthEvent.RECOVERED): Health.PROBATION,
        (Health.PROBATION, HealthEvent.PROBATION_PASSED): Health.HEALTHY,
        (Health.QUARANTINED, HealthEvent.RELEASED_BY_OPERATOR): Health.PROBATION,
        (Health.CONDEMNED, HealthEvent.RELEASED_BY_OPERATOR): Health.PROBATION,
    }
)


class RecoveryMethod(StrEnum):
    """How a quarantined device can recover."""

    SCRUB = "scrub"
    RESET = "reset"
    WAIT = "wait"
    REBOOT = "reboot"
    OPERATOR = "operator"


_RECOVERY_MESSAGES = {
    RecoveryMethod.SCRUB: "It is scrubbed again after a pause and returns after its probation.",
    RecoveryMethod.RESET: "It is reset and scrubbed once it is free, and returns after its probation.",
    RecoveryMethod.WAIT: "Recovery is retried once the condition has ended.",
    RecoveryMethod.REBOOT: "It needs a reboot of the node.",
    RecoveryMethod.OPERATOR: "Only an operator can release it: scrubber unquarantine DEVICE --reason …",
}


OPERATOR_CAUSE: Final = "operator"
"""The code of the cause when an operator takes a device out of service."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a device is out of service.

    Attributes:
        code: stable identifier: an error code, ``verification-failed``, ``driver-timeout``, or :data:`OPERATOR_CAUSE`.
        message: for the operator; shown in the ledger and the CLI.
        recovery_method: how the device can return.
        since: wall-clock seconds.
        actor: ``"service"``, or ``"uid:1000"`` for an operator. Only an operator releases a device that an operator
            quarantined.
    """

    code: str
    message: str
    recovery_method: RecoveryMethod
    since: float
    actor: str = "service"

    @property
    def by_operator(self) -> bool:
        return self.actor != "service"

    @property
    def recovery_message(self) -> str:
        """What must happen before the device returns to service."""
        return _RECOVERY_MESSAGES[self.recovery_method]


class BindingState(StrEnum):
    """What the scheduler learns of a device that a waiting pod was placed on."""

    READY = "ready"
    """It has an unused certificate, or the policy waits for none."""
    BEING_CLEANED = "being-cleaned"
    """Free, and on its way to a certificate without a request: dirty, being scrubbed, recovering, or on probation."""
    IN_USE = "in-use"
    """It may be used, or its earlier pods are not over yet."""
    OUT_OF_SERVICE = "out-of-service"
    """Another device should be chosen; :func:`scrubber.domain.taints.taint_reasons` names the reason."""


@dataclass(frozen=True, slots=True)
class TaintReason:
    """A reason why no further pod should get a device.

    Attributes:
        reason: one word: the code of the cause, or the state.
        evicts: whether the pods that use the device are to be evicted, too.
    """

    reason: str
    evicts: bool = False
