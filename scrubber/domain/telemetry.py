"""What a driver reports about a device in one snapshot: its health, its settings, and its holders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["LIFETIME_COUNTERS", "Holder", "HolderKind", "HolderReport", "Signal", "Snapshot", "UninspectedProcess"]

LIFETIME_COUNTERS = ("ecc_uncorrected_aggregate", "remapped_rows_uncorrectable", "retired_pages")
"""Counters of a snapshot that survive resets and driver reloads; a record stores their last values."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The answers of one query about one device. None means "not applicable here", never "no problem".

    Attributes:
        errors: error codes whose condition persists, each with the number of occurrences since the driver was loaded.
        ecc_uncorrected: volatile uncorrected ECC errors.
        temperature_celsius: temperature of the GPU.
        is_held: the result of :meth:`scrubber.ports.Holders.is_held` where the same query provides it; else None.
        recovery_action: the action that the driver itself requests: ``none``, ``reset``, ``reboot``, …
        settings: current values by name.
        defaults: the driver's own defaults for the names in ``settings``.
        conditions: problems that currently exist, by code (``row-remap-pending``, ``pcie-width``, …), each with the
            value read (``x8 of x16``). The :mod:`~scrubber.domain.health.signal_table` of the backend defines the
            codes.
        counters: errors since the driver was loaded, by name (``ecc_corrected``, ``pcie_replays``, …).
    """

    device: str
    errors: Mapping[int, int] = field(default_factory=dict)
    ecc_uncorrected: int | None = None
    temperature_celsius: int | None = None
    is_held: bool | None = None
    recovery_action: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Signal:
    """An event that the driver reported; ``code`` is ``ecc``, ``lost``, ``changed``, or specific to the backend.

    ``device`` is None when the signal concerns the node (driver gone, inventory changed). Signals are edges and may be
    missed: read a snapshot after receiving one.
    """

    device: str | None
    code: str
    value: int | None = None


class HolderKind(StrEnum):
    """What kind of holder it is, and whether its process can be identified and killed."""

    PROCESS = "process"
    UNKILLABLE = "unkillable"
    """In uninterruptible sleep, or a zombie with live threads."""
    UNTRACEABLE = "ghost"
    """The device is held, but no process can be found that holds it."""
    INFRASTRUCTURE = "infrastructure"
    """The policy allows it beside every tenant."""
    VALIDATION = "validation"
    """The node's infrastructure runs a program on the device: it is never killed, but the device is dirty afterwards."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has the device open or holds its memory; ``pid`` is 0 for an untraceable holder.

    Attributes:
        started: start time in clock ticks since boot.
        command: for the operator only; never in a pod's status.
        owner: of infrastructure, its systemd unit or pod (``namespace/name``); for the operator only.
        memory_bytes: memory of the device that the driver attributes to it; 0 where that is unknown.
        is_monitoring: whether it is infrastructure that merely monitors, and so can be paused.
    """

    pid: int
    started: int
    kind: HolderKind = HolderKind.PROCESS
    command: str = ""
    owner: str = ""
    memory_bytes: int = 0
    is_monitoring: bool = False

    @property
    def identity(self) -> tuple[int, int]:
        return (self.pid, self.started)


@dataclass(frozen=True, slots=True)
class UninspectedProcess:
    """A process that could not be fully inspected, so it is unknown whether it holds a device.

    Attributes:
        pid: 0 for a whole control group whose processes come and go faster than they can be inspected.
        started: start time in clock ticks since boot.
        command: its name and what went wrong, for the operator only.
        pod_uid: UID of the pod of the control group; only where there is no PID to determine it from.
        confined: it was not seen to be able to open the device itself: it has none of the capabilities that give access
            to devices, and no device node of the device is in its ``/dev``. Not a proof: it may hide a node, or hold a
            descriptor.
        walks: number of consecutive walks that could not finish inspecting it and its budget group; each continues
            where the last one stopped.
    """

    pid: int
    started: int
    command: str = ""
    pod_uid: str | None = None
    confined: bool = False
    walks: int = 1


@dataclass(frozen=True, slots=True)
class HolderReport:
    """All processes that hold a device, and what could not be inspected (processes of other users, for example).

    Attributes:
        uninspected: processes that could not be inspected within the time for one process: they may hold the device.
        omitted_count: number of holders beyond those in ``holders``, which has at least one of each pod and each
            systemd unit.
    """

    holders: tuple[Holder, ...] = ()
    not_covered: tuple[str, ...] = ()
    uninspected: tuple[UninspectedProcess, ...] = ()
    omitted_count: int = 0
