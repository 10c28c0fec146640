"""Clearing a device's memory, with proof, in a child that can be killed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from scrubber.domain.device import Device

__all__ = ["EraseReport", "EraseRequest", "Eraser", "Progress"]


@dataclass(frozen=True, slots=True)
class EraseRequest:
    """What to do: count residue first, write an address-derived pattern in between, and always clear and verify.

    ``deadline`` is in seconds from the start; the child is killed when it is over.
    """

    scrub: str
    audit: bool
    pattern: bool
    deadline: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pass is: ``audit``, ``pattern``, ``clear`` or ``verify``."""

    phase: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class EraseReport:
    """What the eraser measured. Residue is counted, never kept.

    Attributes:
        total_bytes: the device's memory.
        cleared_bytes, verified_bytes: written, and read back as zeros. Short of ``total_bytes`` is a failure or is
            named in ``not_covered``.
        residue_bytes: non-zero bytes found by the audit; None when it did not run.
        failed_bytes: bytes that did not read back as zeros.
        fence_broken: somebody tried to open the device meanwhile, so the eraser stopped.
        mended: the device's size was changed by a tenant and was put right.
        seconds_by_phase: duration of each pass.
        not_covered_bytes: bytes that no pass could reach; named in ``not_covered``.
    """

    total_bytes: int
    cleared_bytes: int
    verified_bytes: int
    residue_bytes: int | None
    failed_bytes: int
    fence_broken: bool = False
    mended: str | None = None
    seconds_by_phase: tuple[tuple[str, float], ...] = ()
    not_covered: tuple[str, ...] = ()
    not_covered_bytes: int = 0


class Eraser(Protocol):
    async def erase(self, device: Device, request: EraseRequest, progress: Callable[[Progress], None]) -> EraseReport:
        """Clear ``device`` in a child of its own. Precondition: nobody holds it and every earlier pod is over.

        When cancelled, the child is killed and waited for; one that cannot be killed is abandoned, and
        :meth:`orphan` sees it.

        Raises:
            Held: the child could not fence the device, somebody has it.
            Stuck: the deadline is over; the child was killed or, if it does not die, abandoned.
            Unreadable: the child died or reported something that makes no sense.
            Away: no child can be started; the device was not touched, and it is not its fault.
        """

    async def orphan(self, device: Device) -> int | None:
        """PID of an eraser that still works on ``device`` (of an earlier service, or abandoned); None when free.

        A lock that somebody holds without saying who is PID 0.
        """

    async def end_orphan(self, device: Device, deadline: float) -> bool:
        """Wait for, then end, the eraser that :meth:`orphan` names; True once the device's lock is free."""
