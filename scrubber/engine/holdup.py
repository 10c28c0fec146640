"""What keeps a device from being scrubbed, in a sentence, and how soon it is tried again.

A device that is held up must not fill the ledger with scrubs that say so: each one that was held up is followed by a
pause, which doubles, and is longer while somebody still holds the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from scrubber.domain.assignment import Pod
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import NotReady
from scrubber.domain.evidence import Outcome, ScrubRecord, Severity
from scrubber.domain.leftover import Standing
from scrubber.domain.record import Grant
from scrubber.domain.telemetry import Holder

__all__ = ["HoldUp", "earlier_pod_lives", "held_by_own_pod"]

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


def earlier_pod_lives(device: str, grant: Grant, where: Standing, asking: Pod | None) -> NotReady:
    """The refusal while the pod of an earlier grant may still act; that can be the pod that asks."""
    if grant.pod is not None and grant.pod == asking:
        return NotReady(
            f"Device {device} waits for the end of container "
            f"{', '.join(sorted({each.container for each in where.processes}) or grant.cgroups)} of "
            f"{grant.pod.namespace}/{grant.pod.name} itself, which had the device last ({len(where.processes) or 'an unknown number of'} processes). The device has "
            "to be cleared before this start.",
            public=f"Device {device} is in-use: an earlier run of this pod has not ended yet. The start is tried again.",
            code=ErrorCode.EARLIER_POD_LIVES,
        )
    name = "an unknown pod" if grant.pod is None else f"{grant.pod.namespace}/{grant.pod.name}"
    return NotReady(
        f"Device {device} waits for the end of {name} ({len(where.processes)} processes).",
        public=f"Device {device} is in-use: its earlier use has not ended yet. The start is tried again.",
        code=ErrorCode.EARLIER_POD_LIVES,
    )


def held_by_own_pod(device: str, pod: Pod, holder: Holder, container: str) -> NotReady:
    """The refusal while another container of the starting pod holds the device.

    Args:
        container: name of that container's cgroup; empty where it is not known.
    """
    where = f" in container {container}" if container else ""
    return NotReady(
        f"Device {device} has to be cleared before this start of {pod.namespace}/{pod.name}, and PID {holder.pid} "
        f"({holder.command or 'unknown'}){where} of the same pod holds it. The start waits until that process closes it.",
        public=f"Device {device} is in-use by another container of this pod. The start is tried again.",
        code=ErrorCode.HELD_BY_OWN_POD,
    )
