"""Whether a device works: it is given something to do, and what comes out is checked."""

from __future__ import annotations

from typing import Protocol

from scrubber.domain.device import Device
from scrubber.domain.diagnosis import Check, Level

__all__ = ["Diagnostics"]


class Diagnostics(Protocol):
    async def diagnose(self, device: Device, level: Level, deadline: float) -> tuple[Check, ...]:
        """Run what fits into ``level.seconds``, in a child of its own that is killed ``deadline`` seconds after its order.

        Precondition: nobody holds the device. It overwrites memory: what ran before must have been cleared, and what
        it leaves behind is cleared by itself.

        Raises:
            Held: somebody has the device.
            Stuck: the deadline is over; the child was killed or, if it does not die, abandoned.
            Unreadable: the child died or reported something that makes no sense.
            Away: no child can be started; the device was not touched.
        """
