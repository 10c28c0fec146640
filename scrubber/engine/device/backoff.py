"""Pauses between the scrubs of a blocked device.

A blocked device must not fill the ledger with blocked scrubs: each one is followed by a pause, which doubles, and is
longer while a process still holds the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from scrubber.domain.errors import NotReady
from scrubber.domain.evidence import Outcome, ScrubRecord, Severity
from scrubber.engine import refusals

__all__ = ["Backoff"]

_FIRST_BACKOFF, _FREE_BACKOFF, _HELD_BACKOFF = 0.25, 2.0, 60.0
"""Seconds: the first pause, the longest one while no process holds the device, and the longest one while one does."""


# See docs/decisions/0005-scrub-order-and-pauses.md.
@dataclass(frozen=True, slots=True)
class Backoff:
    """Consecutive blocked scrubs.

    Attributes:
        refusal: the refusal with the reason.
        previous_blocks: number of blocked scrubs before the last one.
        blocked_at: monotonic time of the last one in seconds.
    """

    refusal: NotReady
    previous_blocks: int
    blocked_at: float

    @classmethod
    def after(cls, finished: ScrubRecord, earlier: Backoff | None, now: float) -> Backoff | None:
        """Return the backoff that a finished scrub leads to; None unless the scrub was blocked."""
        if finished.outcome is not Outcome.BLOCKED:
            return None
        dirty = (finding.message for finding in finished.findings if finding.severity is Severity.BLOCKING)
        device, why = finished.device, next(dirty, "it was interrupted")
        refusal = refusals.scrub_blocked(device, finished.id, why)
        return cls(refusal, 0 if earlier is None else earlier.previous_blocks + 1, now)

    def is_over(self, now: float, *, held: bool) -> bool:
        """Return whether the pause has ended."""
        longest = _HELD_BACKOFF if held else _FREE_BACKOFF
        pause: float = min(longest, _FIRST_BACKOFF * 2 ** min(self.previous_blocks, 16))
        return now >= self.blocked_at + pause
