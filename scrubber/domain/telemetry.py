"""What a driver tells about a device, in one batch: its health, its settings, and who holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["LIFETIME_COUNTERS", "Holder", "HolderKind", "HolderReport", "Signal", "Snapshot", "UninspectedProcess"]

LIFETIME_COUNTERS = ("ecc_uncorrected_aggregate", "remapped_rows_uncorrectable", "retired_pages")
"""Counters of a snapshot that survive resets and reloads of the driver; a record keeps their last values."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One batch of answers about one device. None means "not applicable here", never "fine".

    Attributes:
        errors: error codes whose condition still stands, each with how often it was seen since the driver was loaded.
        ecc_uncorrected: volatile uncorrected ECC errors.
        temperature_celsius: of the GPU.
        is_held: what :meth:`scrubber.ports.Holders.is_held` would say, where it is told in the same batch; else None.
        recovery_action: what the driver itself asks for: ``none``, ``reset``, ``reboot``, …
        settings: current values by name; ``defaults`` the driver's own defaults for the same names.
        conditions: what is wrong while it lasts, by code (``row-remap-pending``, ``pcie-width``, …), each with
            what was read (``x8 of x16``). What the codes mean is in the :mod:`~scrubber.domain.health.signal_table` of the backend.
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
    """An event that the driver reported by itself; ``code`` is ``ecc``, ``lost``, ``changed``, or the backend's own …

    ``device`` is None when the signal concerns the node (driver gone, inventory changed). Signals are edges and may
    be missed: whoever receives one reads a snapshot.
    """

    device: str | None
    code: str
    value: int | None = None


class HolderKind(StrEnum):
    """Why a process could, or could not, be looked at."""

    PROCESS = "process"
    UNKILLABLE = "unkillable"
    """In uninterruptible sleep, or a zombie with live threads."""
    UNTRACEABLE = "ghost"
    """Something holds the device and no process can be found for it."""
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has the device open or holds its memory; ``pid`` is 0 for a ghost.

    Attributes:
        started: start time in clock ticks since boot.
        command: for the operator's eyes only; never in a pod's status.
    """

    pid: int
    started: int
    kind: HolderKind = HolderKind.PROCESS
    command: str = ""

    @property
    def identity(self) -> tuple[int, int]:
        return (self.pid, self.started)


@dataclass(frozen=True, slots=True)
class UninspectedProcess:
    """A process that could not be looked through, so that whether it holds a device is not known.

    Attributes:
        pid: 0 for a whole control group whose processes come and go faster than they can be looked at.
        started: start time in clock ticks since boot.
        command: its name and what went wrong, for the operator only.
        pod_uid: UID of the pod that the control group is; only where there is no PID to ask about.
        confined: it was not seen to be able to open the device by itself: it has none of the capabilities that lead to devices,
            and no node of the device is in its ``/dev``. No proof: it may hide a node, or hold a descriptor.
        walks: how many walks in a row did not get through it and its neighbours; each goes on where the last one stopped.
    """

    pid: int
    started: int
    command: str = ""
    pod_uid: str | None = None
    confined: bool = False
    walks: int = 1


@dataclass(frozen=True, slots=True)
class HolderReport:
    """All processes that hold a device, and what could not be looked at (processes of other users, say).

    Attributes:
        uninspected: processes that could not be looked through in the time that one process gets: they may hold it.
        omitted_count: how many more holders there are than ``holders`` lists. Of each pod and each unit at least one is listed.
    """

    holders: tuple[Holder, ...] = ()
    not_covered: tuple[str, ...] = ()
    uninspected: tuple[UninspectedProcess, ...] = ()
    omitted_count: int = 0
