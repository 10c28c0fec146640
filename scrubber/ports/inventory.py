"""Which devices there are."""

from __future__ import annotations

from typing import Protocol

from scrubber.domain.device import Device, NodeIdentity

__all__ = ["Inventory"]


class Inventory(Protocol):
    async def devices(self) -> tuple[Device, ...]:
        """All devices that can be handed out, ordered by index. The parent of instances is not one of them.

        Raises:
            Away: the driver is not there or did not answer.
        """

    async def identity(self) -> NodeIdentity:
        """Node name, boot id and driver version, as certificates carry them.

        Raises:
            Away: the driver is not there or did not answer.
        """
