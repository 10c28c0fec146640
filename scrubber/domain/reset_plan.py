"""The plan of a device reset: its actions and what blocks it."""

from __future__ import annotations

from dataclasses import dataclass

from scrubber.domain.agent_pause import PauseOffer

__all__ = ["ResetPlan"]


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """A reset plan, made before anything is touched.

    Attributes:
        device: the requested device.
        method: how, in the terms of the tool that resets.
        actions: what would be done, in order; one message each.
        unavailable: why this device can never be reset in this setup (in a VM, an instance of a GPU); None when it can.
        blockers: what blocks the reset now and may end (holders by name, instances in use); one message each.
        also_reset: IDs of other devices that are reset with it.
        agents: the blockers among ``blockers``, word for word, that are agents of the node's infrastructure: they never
            end by themselves, and a pause removes them.
        pause_ways: in which the service may pause them, in the order in which they are tried: they are no blockers then.
            Empty if no pause is needed or possible.
    """

    device: str
    method: str
    actions: tuple[str, ...]
    unavailable: str | None = None
    blockers: tuple[str, ...] = ()
    also_reset: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    pause_ways: tuple[PauseOffer, ...] = ()

    @property
    def only_agents_block(self) -> bool:
        """Whether a reset is possible here and only agents block it."""
        return self.unavailable is None and bool(self.blockers) and set(self.blockers) <= set(self.agents)
