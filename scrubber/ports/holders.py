"""Who has a device open or holds its memory."""

from __future__ import annotations

from typing import Protocol

from scrubber.domain.device import Device
from scrubber.domain.telemetry import HolderReport

__all__ = ["Holders"]


class Holders(Protocol):
    async def held(self, device: Device) -> bool:
        """Whether anybody but named infrastructure holds ``device``, as far as that can be told without a walk over
        ``/proc``: the fast path's question.

        Our own processes count too: do not ask while an eraser is at work.
        """

    async def holders(self, device: Device) -> HolderReport:
        """Everybody who holds ``device``; may walk ``/proc``. Our own children are not among them.

        Infrastructure that the policy names is in the report, as such. When :meth:`held` says yes and nobody is found,
        the report holds one ``GHOST``.
        """
