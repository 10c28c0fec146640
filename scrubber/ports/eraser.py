"""Clearing a device's memory, with proof, in a child that can be killed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from scrubber.domain.device import Device

__all__ = ["EraseReport", "EraseRequest", "Eraser", "OnChip", "Progress"]


@dataclass(frozen=True, slots=True)
class EraseRequest:
    """What to do: count residue first, write an address-derived pattern in between, and always clear and verify.

    ``on_chip`` asks for shared memory and registers as well, where a device has them. ``deadline`` is in seconds, from
    the order to the child on; the child is killed when it is over.
    """

    scrub: str
    audit: bool
    pattern: bool
    deadline: float
    on_chip: bool = True


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pass is: ``audit``, ``pattern``, ``clear``, ``verify`` or ``on-chip``."""

    phase: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class OnChip:
    """What the pass over a device's processors measured.

    Attributes:
        units, units_seen: processors (SMs) that the device has, and those that proved that they ran.
        shared_bytes, register_bytes: cleared on each of them.
        residue_bytes: non-zero bytes found before, on all of them together.
        failed_bytes: bytes that did not read back as zeros.
    """

    units: int
    units_seen: int
    shared_bytes: int
    register_bytes: int
    residue_bytes: int
    failed_bytes: int


@dataclass(frozen=True, slots=True)
class EraseReport:
    """What the eraser measured. Residue is counted, never kept.

    Attributes:
        total_bytes: the device's memory.
        cleared_bytes, verified_bytes: written, and read back as zeros. Short of ``total_bytes`` is a failure or is
            named in ``not_covered``.
        residue_bytes: non-zero bytes found by the audit; None when it did not run.
        failed_bytes: bytes that did not read back as they were written.
        fence_broken: the fence did not hold: somebody tried to open the device, or took the fence down.
        mended: the device's size was changed by a tenant and was put right.
        seconds_by_phase: duration of each pass.
        not_covered_bytes: bytes that no pass could reach; named in ``not_covered``.
        reserved_bytes: the part of those that the driver keeps for itself, and no program can ever reach.
        residue_map: where the residue was: bytes of it in each of equal parts of the memory, in order (64 at most).
        unsettled_bytes: memory still in use above the idle level when the eraser was gone and had been waited for.
        on_chip: None when it was not asked for, or the device has none.
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
    reserved_bytes: int = 0
    residue_map: tuple[int, ...] = ()
    unsettled_bytes: int = 0
    on_chip: OnChip | None = None


class Eraser(Protocol):
    async def erase(self, device: Device, request: EraseRequest, progress: Callable[[Progress], None]) -> EraseReport:
        """Clear ``device`` in a child of its own. Precondition: nobody holds it and every earlier pod is over.

        When cancelled, the child is killed and waited for; one that cannot be killed is abandoned, and
        :meth:`orphan` sees it.

        Raises:
            Held: the child could not fence the device, somebody has it.
            Stuck: the deadline is over; the child was killed or, if it does not die, abandoned.
            Unreadable: the child died or reported something that makes no sense.
            Away: no child can be had, or it was ended with what it came from; it is not the device's fault.
        """

    async def orphan(self, device: Device) -> int | None:
        """PID of an eraser that still works on ``device`` (of an earlier service, or abandoned); None when free.

        A lock that somebody holds without saying who is PID 0.
        """

    async def end_orphan(self, device: Device, deadline: float) -> bool:
        """Wait for, then end, the eraser that :meth:`orphan` names; True once the device's lock is free."""
