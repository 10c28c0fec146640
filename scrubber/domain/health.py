"""Health: whether a device may be trusted to work. One table, the causes, and the way back from each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from scrubber.domain.transitions import TransitionTable

__all__ = ["ADVERTISED", "HEALTH", "OPERATOR", "Cause", "Health", "HealthEvent", "WayBack"]


class Health(StrEnum):
    """The life of a device's trustworthiness."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"
    RECOVERING = "recovering"
    PROBATION = "probation"
    CONDEMNED = "condemned"


ADVERTISED = frozenset({Health.HEALTHY, Health.SUSPECT})
"""Only these are shown to the kubelet as ``Healthy``: a device on probation has not earned its way back yet."""


class HealthEvent(StrEnum):
    """Everything that can happen to a device's health."""

    SOFT_SIGNAL = "soft-signal"
    CALM = "calm"
    FAULT = "fault"
    ORDERED_OUT = "ordered-out"
    RECOVERY_STARTED = "recovery-started"
    RECOVERY_FAILED = "recovery-failed"
    RECOVERED = "recovered"
    EARNED = "earned"
    EXHAUSTED = "exhausted"
    RELEASED_BY_PERSON = "released-by-person"


_S, _E = Health, HealthEvent

HEALTH: TransitionTable[Health, HealthEvent] = TransitionTable(
    {
        (_S.HEALTHY, _E.SOFT_SIGNAL): _S.SUSPECT,
        (_S.SUSPECT, _E.SOFT_SIGNAL): _S.SUSPECT,
        (_S.SUSPECT, _E.CALM): _S.HEALTHY,
        **{(state, _E.FAULT): _S.QUARANTINED for state in _S if state is not _S.CONDEMNED},
        **{(state, _E.ORDERED_OUT): _S.QUARANTINED for state in _S},
        **{(state, _E.EXHAUSTED): _S.CONDEMNED for state in _S},
        (_S.QUARANTINED, _E.RECOVERY_STARTED): _S.RECOVERING,
        (_S.RECOVERING, _E.RECOVERY_FAILED): _S.QUARANTINED,
        (_S.RECOVERING, _E.RECOVERED): _S.PROBATION,
        (_S.PROBATION, _E.EARNED): _S.HEALTHY,
        (_S.QUARANTINED, _E.RELEASED_BY_PERSON): _S.PROBATION,
        (_S.CONDEMNED, _E.RELEASED_BY_PERSON): _S.PROBATION,
    }
)


class WayBack(StrEnum):
    """How a quarantined device can earn its way back."""

    SCRUB = "scrub"
    RESET = "reset"
    WAIT = "wait"
    REBOOT = "reboot"
    PERSON = "person"


_SENTENCES = {
    WayBack.SCRUB: "It is scrubbed again after a pause and returns after its probation.",
    WayBack.RESET: "It is reset and scrubbed once it is free, and returns after its probation.",
    WayBack.WAIT: "It is tried again once the condition has ended.",
    WayBack.REBOOT: "It needs a reboot of the node.",
    WayBack.PERSON: "Only a person can release it: scrubber unquarantine DEVICE --reason …",
}


OPERATOR: Final = "operator"
"""The code of the cause when an operator takes a device out of service."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a device is out of service.

    Attributes:
        code: stable word: an error code, ``verification-failed``, ``driver-stuck``, or :data:`OPERATOR`.
        sentence: for the operator; the ledger and the CLI show it.
        way_back: how it can return.
        since: wall-clock seconds.
        actor: ``"service"``, or ``"uid:1000"`` for a person. What a person quarantined only a person releases.
    """

    code: str
    sentence: str
    way_back: WayBack
    since: float
    actor: str = "service"

    @property
    def by_person(self) -> bool:
        return self.actor != "service"

    @property
    def return_sentence(self) -> str:
        """What has to happen before the device comes back."""
        return _SENTENCES[self.way_back]
