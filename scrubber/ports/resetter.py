"""Device resets."""

from __future__ import annotations

from typing import Protocol

from scrubber.domain.device import Device

__all__ = ["Resetter"]


class Resetter(Protocol):
    async def unavailable(self, device: Device) -> str | None:
        """Why ``device`` cannot be reset here, in a sentence; None when it can."""

    async def reset(self, device: Device, deadline: float) -> None:
        """Reset ``device`` within ``deadline`` seconds. Precondition: nobody holds it.

        Raises:
            Held: somebody has the device after all; nothing was done to it, and it is not at fault.
            Unreadable: the reset failed; the message says how.
            Stuck: it did not end in time.
        """
