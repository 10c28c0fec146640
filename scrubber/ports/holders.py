"""Who has a device open or holds its memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from scrubber.domain.device import Device
from scrubber.domain.telemetry import Holder, HolderReport

__all__ = ["Holders"]


class Holders(Protocol):
    """Whoever cannot answer raises as :meth:`scrubber.ports.Telemetry.snapshot` does."""

    async def held(self, device: Device) -> bool:
        """Whether anybody but named infrastructure holds ``device``, as far as that can be told without a walk over
        ``/proc``: the fast path's question.

        Our own processes count too: do not ask while an eraser is at work.
        """

    async def holders(self, device: Device, had: Collection[str] = (), scrub: str | None = None) -> HolderReport:
        """All processes that hold ``device``; may walk ``/proc``. Our own children are not among them.

        Infrastructure that the policy names is in the report, as such. When :meth:`held` says yes and nobody is found
        or left unfinished, the report holds one ``GHOST``. What was left unfinished goes on with the next call
        for the same scrub.

        Args:
            had: UIDs of pods that have, or had, the device: their processes are looked at before those of other pods,
                which share what time is left, each pod within a budget.
            scrub: the id of the scrub that asks; None: nothing that an earlier call has looked at counts.

        Raises:
            Away: the walk gave no answer, which is no fault of the device: it may be asked again.
        """

    async def users(self, device: Device) -> tuple[Holder, ...]:
        """Who is seen to use ``device`` at this moment: cheap enough to be asked every second while it is granted.

        Infrastructure that the policy names is among them, as such; our own children are not. Whoever uses it without
        being seen on this way (:meth:`not_asked`), or has no process, is missing. Precondition: no eraser is at work.

        Raises:
            Away: as :meth:`holders`.
        """

    def not_asked(self, device: Device) -> tuple[str, ...]:
        """Who may hold ``device`` unseen by :meth:`held` and :meth:`users`: sentences for a certificate's "not covered",
        where no walk was made. Asks nobody.
        """
