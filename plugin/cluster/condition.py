"""The type of the node's condition and what its status means, as configured.

Inside the plugin, ``True`` always means that every GPU is in service. Other tools expect another type, or the opposite
meaning; only the client of the API server translates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from plugin.cluster.view import ConditionStatus
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["CONDITION_TYPE", "ConditionFormat", "ConditionPolarity"]

CONDITION_TYPE = "GpusInService"
"""Default type; no other component writes it."""

_TYPE = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_TYPES_OF_THE_CONTROL_PLANE = frozenset(
    {"Ready", "MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"}
)


class ConditionPolarity(StrEnum):
    """What the status ``True`` means: that every GPU is in service, or that there is a problem."""

    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class ConditionFormat:
    """Type and polarity of the condition.

    Raises:
        InvalidConfiguration: the type is not valid, or belongs to Kubernetes itself.
    """

    type: str = CONDITION_TYPE
    polarity: ConditionPolarity = ConditionPolarity.GOOD

    def __post_init__(self) -> None:
        if not _TYPE.fullmatch(self.type):
            raise InvalidConfiguration(
                f"--condition-type {self.type!r} is not a valid type of a condition. Use a name such as GpusInService or "
                "example.com/GpusInService."
            )
        if self.type in _TYPES_OF_THE_CONTROL_PLANE:
            raise InvalidConfiguration(
                f"--condition-type {self.type} belongs to Kubernetes, which schedules pods by it. Choose a type that no "
                "other component writes."
            )

    def translate(self, status: ConditionStatus) -> ConditionStatus:
        """Return the status to write for one of ours, or ours for one that was read; ``Unknown`` stays."""
        if self.polarity is ConditionPolarity.GOOD or status is ConditionStatus.UNKNOWN:
            return status
        return ConditionStatus.FALSE if status is ConditionStatus.TRUE else ConditionStatus.TRUE
