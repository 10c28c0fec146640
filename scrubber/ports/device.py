"""What the engine asks of devices: which there are, what they say, who holds them, and clearing, resetting and diagnosing them.

A backend implements all of these ports for one kind of device; :class:`DeviceBackend` holds them together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from scrubber.domain.device import Device, NodeIdentity
from scrubber.domain.diagnostics import DiagnosticCheck, DiagnosticLevel
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.telemetry import Holder, HolderReport, Signal, Snapshot

__all__ = [
    "ChildCounts",
    "DeviceBackend",
    "Diagnostics",
    "EraseProgress",
    "EraseReport",
    "EraseRequest",
    "Eraser",
    "Holders",
    "InfrastructureLookup",
    "Inventory",
    "OnChipReport",
    "Resetter",
    "Settings",
    "Telemetry",
]


class Inventory(Protocol):
    async def devices(self) -> tuple[Device, ...]:
        """All devices that can be handed out, ordered by index. The parent of instances is not one of them.

        Raises:
            Unavailable: the driver is not there or did not answer.
        """

    async def identity(self) -> NodeIdentity:
        """Node name, boot id and driver version, as certificates carry them.

        Raises:
            Unavailable: the driver is not there or did not answer.
        """


class Telemetry(Protocol):
    async def snapshot(self, device: Device) -> Snapshot:
        """One batch of answers about ``device``, within the adapter's question deadline.

        Raises:
            DriverTimeout: no answer in time; the child that was asked is killed and replaced, and no other device waits.
            DeviceLost: the device fell off the bus.
            Unreadable: the answer makes no sense.
            Unavailable: nobody can be asked now (no child can be started); says nothing about the device.
            ResetInProgress: nobody is asked until the reset that is under way is over.
        """

    def signals(self) -> AsyncIterator[Signal]:
        """Events from now on, for one consumer, until closed. Edges: they can be missed, so compare snapshots too."""


class Holders(Protocol):
    """Whoever cannot answer raises as :meth:`scrubber.ports.Telemetry.snapshot` does."""

    async def is_held(self, device: Device) -> bool:
        """Whether anybody but named infrastructure holds ``device``, as far as that can be told without a walk over
        ``/proc``: the fast path's question.

        Our own processes count too: do not ask while an eraser is at work.
        """

    async def list_holders(
        self, device: Device, pod_uids: Collection[str] = (), scrub: str | None = None
    ) -> HolderReport:
        """All processes that hold ``device``; may walk ``/proc``. Our own children are not among them.

        Infrastructure that the policy names is in the report, as such. When :meth:`is_held` says yes and nobody is found
        or left unfinished, the report holds one ``GHOST``. What was left unfinished goes on with the next call
        for the same scrub.

        Args:
            pod_uids: UIDs of pods that have, or had, the device: their processes are looked at before those of other pods,
                which share what time is left, each pod within a budget.
            scrub: the id of the scrub that asks; None: nothing that an earlier call has looked at counts.

        Raises:
            Unavailable: the walk gave no answer, which is no fault of the device: it may be asked again.
        """

    async def list_users(self, device: Device) -> tuple[Holder, ...]:
        """Who is seen to use ``device`` at this moment: cheap enough to be asked every second while it is granted.

        Infrastructure that the policy names is among them, as such; our own children are not. Whoever uses it without
        being seen on this way (:meth:`not_covered`), or has no process, is missing. Precondition: no eraser is at work.

        Raises:
            Unavailable: as :meth:`list_holders`.
        """

    def not_covered(self, device: Device) -> tuple[str, ...]:
        """Who may hold ``device`` unseen by :meth:`is_held` and :meth:`list_users`: sentences for a certificate's "not covered",
        where no walk was made. Asks nobody.
        """


class Settings(Protocol):
    async def restore(self, device: Device, expected: Mapping[str, str]) -> Mapping[str, str]:
        """Write ``expected`` and read it back; answers the values read. Names that do not apply are left out.

        Raises:
            DriverTimeout, DeviceLost, Unreadable: as :meth:`Telemetry.snapshot`.
        """


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
class EraseProgress:
    """How far a pass is: ``audit``, ``pattern``, ``clear``, ``verify`` or ``on-chip``."""

    phase: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class OnChipReport:
    """What the pass over a device's processors measured.

    Attributes:
        units, units_cleared: processors (SMs) that the device has, and those that proved that they ran.
        shared_bytes, register_bytes: cleared on each of them.
        residue_bytes: non-zero bytes found before, on all of them together.
        failed_bytes: bytes that did not read back as zeros.
    """

    units: int
    units_cleared: int
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
        size_restored: the device's size was changed by a tenant and was put right.
        seconds_by_phase: duration of each pass.
        not_covered_bytes: bytes that no pass could reach; named in ``not_covered``.
        reserved_bytes: the part of those that the driver keeps for itself, and no program can ever reach.
        residue_map: where the residue was: bytes of it in each of equal parts of the memory, in order (64 at most).
        unreleased_bytes: memory still in use above the idle level when the eraser was gone and had been waited for.
        on_chip: None when it was not asked for, or the device has none.
    """

    total_bytes: int
    cleared_bytes: int
    verified_bytes: int
    residue_bytes: int | None
    failed_bytes: int
    fence_broken: bool = False
    size_restored: str | None = None
    seconds_by_phase: tuple[tuple[str, float], ...] = ()
    not_covered: tuple[str, ...] = ()
    not_covered_bytes: int = 0
    reserved_bytes: int = 0
    residue_map: tuple[int, ...] = ()
    unreleased_bytes: int = 0
    on_chip: OnChipReport | None = None


class Eraser(Protocol):
    async def erase(
        self, device: Device, request: EraseRequest, progress: Callable[[EraseProgress], None]
    ) -> EraseReport:
        """Clear ``device`` in a child of its own. Precondition: nobody holds it and every earlier pod is over.

        When cancelled, the child is killed and waited for; one that cannot be killed is abandoned, and
        :meth:`find_orphan` sees it.

        Raises:
            DeviceBusy: the child could not fence the device, somebody has it.
            DriverTimeout: the deadline is over; the child was killed or, if it does not die, abandoned.
            Unreadable: the child died or reported something that makes no sense.
            Unavailable: no child can be had, or it was ended with what it came from; it is not the device's fault.
        """

    async def find_orphan(self, device: Device) -> int | None:
        """PID of an eraser that still works on ``device`` (of an earlier service, or abandoned); None when free.

        A lock that somebody holds without saying who is PID 0.
        """

    async def terminate_orphan(self, device: Device, deadline: float) -> bool:
        """Wait for, then end, the eraser that :meth:`find_orphan` names; True once the device's lock is free."""


class Diagnostics(Protocol):
    async def diagnose(self, device: Device, level: DiagnosticLevel, deadline: float) -> tuple[DiagnosticCheck, ...]:
        """Run what fits into ``level.seconds``, in a child of its own that is killed ``deadline`` seconds after its order.

        Precondition: nobody holds the device. It overwrites memory: what ran before must have been cleared, and what
        it leaves behind is cleared by itself.

        Raises:
            DeviceBusy: somebody has the device.
            DriverTimeout: the deadline is over; the child was killed or, if it does not die, abandoned.
            Unreadable: the child died or reported something that makes no sense.
            Unavailable: no child can be started; the device was not touched.
        """


class Resetter(Protocol):
    async def plan(self, device: Device) -> ResetPlan:
        """What a reset of ``device`` would do and what blocks it; changes nothing.

        Raises:
            DriverTimeout, DeviceLost, Unreadable, Unavailable: as :meth:`Telemetry.snapshot`.
        """

    async def reset(self, device: Device, deadline: float) -> None:
        """Reset ``device`` within ``deadline`` seconds. Precondition: nobody holds it.

        Every precondition of its plan is checked first; settings that it has to change for it are restored, whatever
        happens.

        Raises:
            DeviceBusy: somebody has the device after all, or a blocker of its plan stands; nothing was done to it, and it is
                not at fault.
            Unreadable: the reset failed; the message says how.
            DriverTimeout: it did not end in time.
        """


class ChildCounts(Protocol):
    """How many child processes a backend has started, for the metrics."""

    @property
    def starts(self) -> Mapping[str, int]:
        """By kind of child, how many were started."""

    @property
    def abandoned_total(self) -> int:
        """How many outlived SIGKILL and were given up."""


InfrastructureLookup = Callable[[int], Awaitable[str | None]]
"""Returns the name by which a process belongs to the node's infrastructure; None for every other process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBackend:
    """The device ports of one node's devices of one kind.

    Attributes:
        not_advertised: returns the devices that are on the node and not handed out, each with the reason.
    """

    inventory: Inventory
    holders: Holders
    telemetry: Telemetry
    settings: Settings
    resetter: Resetter
    eraser: Eraser
    diagnostics: Diagnostics
    children: ChildCounts
    not_advertised: Callable[[], Mapping[str, str]] = field(default=dict)
