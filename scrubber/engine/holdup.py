"""What keeps a device from being scrubbed, in a sentence, and how soon it is tried again.

A device that is held up must not fill the ledger with scrubs that say so: each one that was held up is followed by a
pause, which doubles, and is longer while somebody still holds the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import NotReady
from scrubber.domain.evidence import Outcome, ScrubRecord, Severity

__all__ = ["HoldUp"]

_FIRST_PAUSE, _FREE_PAUSE, _HELD_PAUSE = 0.25, 2.0, 60.0
"""Seconds: the first pause, the longest one while nobody holds the device, and the longest one while somebody does."""


@dataclass(frozen=True, slots=True)
class HoldUp:
    """Scrubs in a row that were held up: the refusal that says why, how many there were before, and when the last was."""

    refusal: NotReady
    before: int
    at: float

    @classmethod
    def after(cls, finished: ScrubRecord, earlier: HoldUp | None, now: float) -> HoldUp | None:
        """What a finished scrub leaves; None unless it was held up."""
        if finished.outcome is not Outcome.HELD_UP:
            return None
        dirty = (finding.sentence for finding in finished.findings if finding.severity is Severity.DIRTY)
        device, why = finished.device, next(dirty, "it was disturbed")
        refusal = NotReady(
            f"Device {device}: scrub {finished.id} was held up: {why}",
            public=f"Device {device} is dirty: scrub {finished.id} found it still in use. The start is tried again.",
            code=ErrorCode.SCRUB_HELD_UP,
        )
        return cls(refusal, 0 if earlier is None else earlier.before + 1, now)

    def over(self, now: float, *, held: bool) -> bool:
        """Whether the pause is over."""
        longest = _HELD_PAUSE if held else _FREE_PAUSE
        pause: float = min(longest, _FIRST_PAUSE * 2 ** min(self.before, 16))
        return now >= self.at + pause
