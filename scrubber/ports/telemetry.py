"""What the driver says about the health of devices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from scrubber.domain.device import Device
from scrubber.domain.telemetry import Signal, Snapshot

__all__ = ["Telemetry"]


class Telemetry(Protocol):
    async def snapshot(self, device: Device) -> Snapshot:
        """One batch of answers about ``device``, within the adapter's question deadline.

        Raises:
            Stuck: no answer in time; the child that was asked is killed and replaced, and no other device waits.
            Lost: the device fell off the bus.
            Unreadable: the answer makes no sense.
            Away: nobody can be asked now (no child can be started); says nothing about the device.
            BeingReset: nobody is asked until the reset that is under way is over.
        """

    def signals(self) -> AsyncIterator[Signal]:
        """Events from now on, for one consumer, until closed. Edges: they can be missed, so compare snapshots too."""
