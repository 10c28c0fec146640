"""A device's settings, brought back to what the policy or the driver's defaults say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from scrubber.domain.device import Device

__all__ = ["Settings"]


class Settings(Protocol):
    async def restore(self, device: Device, wanted: Mapping[str, str]) -> Mapping[str, str]:
        """Write ``wanted`` and read it back; answers the values read. Names that do not apply are left out.

        Raises:
            Stuck, Lost, Unreadable: as :meth:`Telemetry.snapshot`.
        """
