"""Ports for devices: inventory, telemetry, holders, settings, memory erasure, diagnostics and resets.

A backend implements all of these ports for one kind of device; :class:`DeviceBackend` groups them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from scrubber.domain.device import Device, NodeIdentity
from scrubber.domain.diagnostics import DiagnosticCheck, DiagnosticLevel
from scrubber.domain.infrastructure import InfrastructureProcess
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.telemetry import Holder, HolderReport, Signal, Snapshot

__all__ = [
    "AgentControl",
    "ChildCounts",
    "ConfidentialComputing",
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
        """All devices that can be assigned, ordered by index. The parent device of instances is not included.

        Raises:
            Unavailable: the driver is missing or did not answer.
        """

    async def identity(self) -> NodeIdentity:
        """Node name, boot ID and driver version, as certificates contain them.

        Raises:
            Unavailable: the driver is missing or did not answer.
        """


class Telemetry(Protocol):
    async def snapshot(self, device: Device) -> Snapshot:
        """Query ``device`` once for all its values, within the adapter's query deadline.

        Raises:
            DriverTimeout: no answer in time; the queried child process is killed and replaced, and no other device
                waits.
            DeviceLost: the device fell off the bus.
            Unreadable: the answer is invalid.
            Unavailable: no query is possible now (no child process can be started); implies nothing about the device.
            ResetInProgress: the driver is not queried until the current reset has finished.
        """

    def signals(self) -> AsyncIterator[Signal]:
        """Events from now on, for one consumer, until closed. They are edges and may be missed: compare snapshots."""


class Holders(Protocol):
    """The processes that use a device. A failed query raises as :meth:`scrubber.ports.Telemetry.snapshot` does."""

    async def is_held(self, device: Device) -> bool:
        """Whether any process other than named infrastructure holds ``device``; the query of the fast path.

        Covers what can be determined without walking ``/proc``. The service's own child processes count too: do not
        call this while an eraser runs.
        """

    async def list_holders(
        self, device: Device, pod_uids: Collection[str] = (), scrub: str | None = None
    ) -> HolderReport:
        """All processes that hold ``device``, except the service's own children; may walk ``/proc``.

        Infrastructure that the policy allows is in the report, marked as such. When :meth:`is_held` returns true and the
        walk finds no holder and leaves nothing unfinished, the report contains one holder of kind ``UNTRACEABLE``. The
        next call for the same scrub continues with what was left unfinished.

        Args:
            pod_uids: UIDs of pods that are or were assigned the device. Their processes are inspected before those of
                other pods, which share the remaining time, each pod within a budget.
            scrub: ID of the scrub that this call belongs to; None: results of earlier calls are not reused.

        Raises:
            Unavailable: the walk produced no result, which is not a fault of the device; the call may be repeated.
        """

    async def list_users(self, device: Device) -> tuple[Holder, ...]:
        """Processes that visibly use ``device`` now; cheap enough to call every second while the device is granted.

        Infrastructure that the policy names is included, marked as such; the service's own children are not. A user
        that this method cannot detect (:meth:`not_covered`) or that has no process is missing. Precondition: no eraser
        is running.

        Raises:
            Unavailable: as :meth:`list_holders`.
        """

    def not_covered(self, device: Device) -> tuple[str, ...]:
        """Holders that :meth:`is_held` and :meth:`list_users` cannot detect; sends no query.

        The texts go into a certificate's "not covered" where no walk was made.
        """


class Settings(Protocol):
    async def restore(self, device: Device, expected: Mapping[str, str]) -> Mapping[str, str]:
        """Write ``expected`` and read it back; return the values read, without names that the device does not have.

        Raises:
            DriverTimeout, DeviceLost, Unreadable: as :meth:`Telemetry.snapshot`.
        """


@dataclass(frozen=True, slots=True)
class EraseRequest:
    """Which optional passes to run. Clearing and verifying always run.

    Attributes:
        audit: count residue first.
        pattern: write an address-derived pattern before clearing.
        deadline: seconds, counted from the request to the child process, after which the child is killed.
        on_chip: also clear shared memory and registers, where the device has them.
    """

    scrub: str
    audit: bool
    pattern: bool
    deadline: float
    on_chip: bool = True


@dataclass(frozen=True, slots=True)
class EraseProgress:
    """Progress of a pass: ``audit``, ``pattern``, ``clear``, ``verify`` or ``on-chip``."""

    phase: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class OnChipReport:
    """Measurements of the pass over a device's processors.

    Attributes:
        units, units_cleared: processors (SMs) that the device has, and those that proved that they ran.
        shared_bytes, register_bytes: bytes cleared on each processor.
        residue_bytes: non-zero bytes found before clearing, on all processors together.
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
    """Measurements of the eraser. Residue is counted, never stored.

    Attributes:
        total_bytes: the device's memory.
        cleared_bytes, verified_bytes: bytes written, and bytes read back as zeros. Less than ``total_bytes`` is a
            failure unless ``not_covered`` names the rest. ``verified_bytes`` is None where a device whose facts are
            claims (``Device.claimed_by``) does not report it, and ``not_covered`` says so.
        residue_bytes: non-zero bytes found by the audit; None when it did not run.
        failed_bytes: bytes that did not read back as they were written.
        fence_broken: the fence did not hold: another process tried to open the device or removed the fence.
        size_restored: a tenant had changed the device's size, and it was restored.
        seconds_by_phase: duration of each pass, and of what some backends time separately (such as mapping the memory).
        not_covered_bytes: bytes that no pass could reach; named in ``not_covered``.
        reserved_bytes: the part of ``not_covered_bytes`` that the driver reserves for itself and no program can ever
            reach.
        residue_map: bytes of residue in each of at most 64 equal parts of the memory, in order.
        unreleased_bytes: memory in use above the idle level after the eraser exited and the wait for its release ended.
        on_chip: None when it was not requested, or the device has no on-chip memory to clear.
    """

    total_bytes: int
    cleared_bytes: int
    verified_bytes: int | None
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
        """Clear ``device`` in a dedicated child process.

        Precondition: no process holds the device, and every pod that was assigned it has ended. When cancelled, the
        child is killed and reaped; a child that cannot be killed is abandoned, and :meth:`find_orphan` finds it.

        Raises:
            DeviceBusy: the child could not fence the device because another process holds it.
            DriverTimeout: the deadline expired; the child was killed or, if it does not exit, abandoned.
            Unreadable: the child died or returned an invalid report.
            Unavailable: no child can be started, or it was terminated together with its parent process; not a fault of
                the device.
        """

    async def find_orphan(self, device: Device) -> int | None:
        """PID of an eraser that still works on ``device`` (of an earlier service, or abandoned); None when none does.

        0 when a process holds the lock without identifying itself.
        """

    async def terminate_orphan(self, device: Device, deadline: float) -> bool:
        """Wait for, then kill, the eraser that :meth:`find_orphan` returns; return whether its lock is free."""


class Diagnostics(Protocol):
    async def diagnose(self, device: Device, level: DiagnosticLevel, deadline: float) -> tuple[DiagnosticCheck, ...]:
        """Run what fits into ``level.seconds`` in a child process, killed ``deadline`` seconds after its request.

        Precondition: no process holds the device. Diagnostics overwrite memory: clear the memory of the previous tenant
        first; the diagnostics clear what they leave behind.

        Raises:
            DeviceBusy: another process holds the device.
            DriverTimeout: the deadline expired; the child was killed or, if it does not exit, abandoned.
            Unreadable: the child died or returned an invalid report.
            Unavailable: no child can be started; the device was not touched.
        """


class Resetter(Protocol):
    async def plan(self, device: Device) -> ResetPlan:
        """What a reset of ``device`` would do and what blocks it; changes nothing.

        Raises:
            DriverTimeout, DeviceLost, Unreadable, Unavailable: as :meth:`Telemetry.snapshot`.
        """

    async def reset(self, device: Device, deadline: float) -> None:
        """Reset ``device`` within ``deadline`` seconds. Precondition: no process holds it.

        Every precondition of its plan is checked first. Settings that must change for the reset are restored in every
        case.

        Raises:
            DeviceBusy: a process holds the device after all, or its plan has a blocker; nothing was done to the device,
                and it is not at fault.
            Unreadable: the reset failed; the message contains the reason.
            DriverTimeout: the reset did not finish in time.
        """


class ConfidentialComputing(Protocol):
    """The confidential-computing mode of the node's driver: one switch for all devices, and their attestation reports.

    While the switch is off, no process can start work on any device; work that has started continues.
    """

    @property
    def enabled(self) -> bool:
        """Whether the mode is on, as of the last listing of the devices; if not, no other member does anything."""

    async def set_accepting(self, accepting: bool) -> None:
        """Turn the switch on or off. It stays on for a child of the service that needs it, and is off afterwards.

        Raises:
            Unavailable: the switch is not known to be in that position.
        """

    async def attest(self, device: Device, nonce: bytes) -> str | None:
        """Request an attestation report for ``nonce``; return its SHA-256 in hexadecimal.

        None for a device that is not in the mode, although others are. Precondition: ``enabled``.

        Raises:
            DriverTimeout, DeviceLost, Unreadable, Unavailable: as :meth:`Telemetry.snapshot`; Unreadable also for a
                report that does not contain the nonce.
        """


class AgentControl(Protocol):
    """Agents of the devices' vendor that let go of the driver on request, on the whole node."""

    @property
    def actions(self) -> tuple[str, ...]:
        """What :meth:`pause` does, one message for each action in order."""

    async def pause(self) -> None:
        """Let the agents close every device. Processes that hold devices for other reasons stay.

        Raises:
            Refused: they cannot be paused this way on this node; nothing has changed.
            Unavailable: it failed now, or may have happened: call :meth:`restore`.
        """

    async def restore(self) -> None:
        """Let the agents use the devices again; does no harm where they do.

        Raises:
            Unavailable: they may still be paused; call it again.
        """


class ChildCounts(Protocol):
    """The child processes that a backend has started: their numbers, for the metrics, and those that remain."""

    @property
    def starts(self) -> Mapping[str, int]:
        """Number of child processes started, by kind of child."""

    @property
    def abandoned_total(self) -> int:
        """Number of child processes that survived SIGKILL and were abandoned."""

    def pids(self) -> frozenset[int]:
        """PIDs of the child processes that are not known to be dead. After the backend is closed: abandoned ones."""


class InfrastructureLookup(Protocol):
    """Recognizes processes of the node's infrastructure."""

    async def __call__(self, pid: int, *, has_context: bool) -> InfrastructureProcess | None:
        """What ``pid`` is to the policy; None for a process that is not infrastructure, or has exited.

        Args:
            has_context: whether it has a context on the device, and does not merely have the device open.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBackend:
    """The device ports for all devices of one kind on a node.

    Attributes:
        not_advertised: returns the devices that are on the node but are not advertised, each with the reason.
        poll_interval: returns the seconds below which the health of a device is not polled, because a query is
            expensive.
        confidential: None for devices without a confidential-computing mode.
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
    poll_interval: Callable[[Device], float] = lambda _: 0.0
    confidential: ConfidentialComputing | None = None
