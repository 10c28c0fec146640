"""A pause of the node's agents for a reset: monitoring that has devices open permanently lets go of them, and returns.

A pause is recorded before anything is changed for it, with every change and its earlier value, so that a crash of any
party at any moment leaves what is needed to restore the agents.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

__all__ = ["AgentPause", "AgentPauseRecord", "LabelChange", "PauseOffer", "PauseReport", "PauseState", "PauseWay"]


class PauseWay(StrEnum):
    """How agents are made to release devices."""

    BACKEND = "backend"
    """The backend asks the monitoring service of its vendor to let go of the driver."""
    LABELS = "labels"
    """The plugin changes labels of the node, so that the agents' pods end."""
    EXTERNAL_RESET = "gpu-reset"
    """Another service of the cluster resets the devices, agents included, while this service has the driver closed."""


class PauseState(StrEnum):
    """How far the plugin is with a pause."""

    WAITING = ""
    """Not further yet; the report says why."""
    PLANNED = "planned"
    """The changes are known, and none is made before they are recorded."""
    PAUSED = "paused"
    """The changes are made; the agents are ending."""
    RESET = "reset"
    """Another service says that it has reset the devices; the request for it is still to be removed."""
    FAILED = "failed"
    """The agents cannot be paused, or the devices not be reset; what was changed is still to be restored."""
    RESTORED = "restored"
    """Every change has been undone, and a request for a reset is gone."""


@dataclass(frozen=True, slots=True)
class LabelChange:
    """A change of a label of the node; ``before`` is None if the node did not have the label."""

    key: str
    before: str | None
    during: str

    def __str__(self) -> str:
        return f"{self.key}: {'no label' if self.before is None else self.before} to {self.during}"


@dataclass(frozen=True, slots=True)
class PauseOffer:
    """A way to pause agents, with a message for each action in order."""

    way: PauseWay
    actions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PauseReport:
    """A report of the plugin.

    Attributes:
        offers: the ways that it offers, the preferred one first; they replace those of earlier reports.
        pause: ID of the pause that the rest is about; empty for none.
        message: why it failed, or is not further yet; for operators.
    """

    offers: tuple[PauseOffer, ...]
    pause: str = ""
    state: PauseState = PauseState.WAITING
    changes: tuple[LabelChange, ...] = ()
    message: str = ""


@dataclass(frozen=True, slots=True)
class AgentPause:
    """A pause of the node's agents.

    Attributes:
        devices: IDs of the devices that are to be reset meanwhile; empty once the last one has been.
        since: wall-clock seconds.
        ending: the agents are to be restored.
        changes: what is to be undone then.
    """

    id: str
    way: PauseWay
    devices: tuple[str, ...]
    since: float
    ending: bool = False
    changes: tuple[LabelChange, ...] = ()

    def with_device(self, device: str) -> AgentPause:
        return self if device in self.devices else replace(self, devices=(*self.devices, device))

    def without_device(self, device: str) -> AgentPause:
        """Return the pause without ``device``; it ends with the last one."""
        left = tuple(each for each in self.devices if each != device)
        return replace(self, devices=left, ending=self.ending or not left)

    def with_changes(self, changes: Iterable[LabelChange]) -> AgentPause:
        """Return the pause with ``changes`` added.

        A recorded change stays as it is: a plugin that plans again may see the value that was set, not the earlier one.
        """
        known = {each.key for each in self.changes}
        return replace(self, changes=(*self.changes, *(each for each in changes if each.key not in known)))

    @property
    def needs_restoring(self) -> bool:
        """Whether something may have been changed for it: labels are changed only after they were recorded."""
        return self.way is not PauseWay.LABELS or bool(self.changes)

    @property
    def is_external_reset(self) -> bool:
        return self.way is PauseWay.EXTERNAL_RESET


@dataclass(frozen=True, slots=True)
class AgentPauseRecord:
    """The ledger's record of a pause; without one, nothing of the node's agents is changed.

    Attributes:
        externally_reset: IDs of devices that another service says it reset, and whose own records do not have it yet.
    """

    pause: AgentPause | None = None
    externally_reset: tuple[str, ...] = ()
