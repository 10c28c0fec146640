"""Device resets."""

from __future__ import annotations

from typing import Protocol

from scrubber.domain.device import Device
from scrubber.domain.reset import ResetPlan

__all__ = ["Resetter"]


class Resetter(Protocol):
    async def plan(self, device: Device) -> ResetPlan:
        """What a reset of ``device`` would do and what blocks it; changes nothing.

        Raises:
            Stuck, Lost, Unreadable, Away: as :meth:`Telemetry.snapshot`.
        """

    async def reset(self, device: Device, deadline: float) -> None:
        """Reset ``device`` within ``deadline`` seconds. Precondition: nobody holds it.

        Every precondition of its plan is checked first; settings that it has to change for it are restored, whatever
        happens.

        Raises:
            Held: somebody has the device after all, or a blocker of its plan stands; nothing was done to it, and it is
                not at fault.
            Unreadable: the reset failed; the message says how.
            Stuck: it did not end in time.
        """
