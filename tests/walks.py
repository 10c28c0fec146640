"""Walks over ``/proc`` on a machine that other processes use, too."""

from __future__ import annotations

from collections.abc import Collection

from scrubber.domain.device import Device
from scrubber.domain.telemetry import HolderReport
from scrubber.ports.device import Holders

__all__ = ["finished_report"]


async def finished_report(holders: Holders, device: Device, but: Collection[int] = ()) -> HolderReport:
    """Return the report of a walk that inspected all processes except those in ``but``, and found no relay.

    Other tests start and end processes all the time. A walk that they kept from finishing reports the uninspected
    processes, and names no ghost.
    """
    while True:
        report = await holders.list_holders(device)
        if {each.pid for each in report.uninspected} <= set(but):
            return report
