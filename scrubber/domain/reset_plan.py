"""The plan of a device reset: its actions and what blocks it."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    device: str
    method: str
    actions: tuple[str, ...]
    unavailable: str | None = None
    blockers: tuple[str, ...] = ()
    also_reset: tuple[str, ...] = ()
