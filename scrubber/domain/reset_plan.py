"""What a reset of a device would do, and what stands in its way."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ResetPlan"]


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """Made before anything is touched, and shown to whoever asks.

    Attributes:
        device: what was asked for.
        method: how, in the words of the tool that does it.
        actions: what would be done, in order, a sentence each.
        unavailable: why this device can never be reset here as things are set up (in a VM, an instance of a GPU): a
            sentence; None when it can.
        blockers: what stands in the way now and may go away (holders by name, instances in use): a sentence each.
        also_reset: ids of other devices that are reset with it.
    """

    device: str
    method: str
    actions: tuple[str, ...]
    unavailable: str | None = None
    blockers: tuple[str, ...] = ()
    also_reset: tuple[str, ...] = ()
