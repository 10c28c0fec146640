"""What the service says of itself when somebody scrapes, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scrubber.domain.device import Device
from scrubber.domain.policy import Enforcement
from scrubber.domain.record import DeviceRecord
from scrubber.ports.record import AuditHead

__all__ = ["DeviceStatus", "ServiceStatus"]


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device of the node's view.

    Attributes:
        advertised: whether the kubelet is told that it is healthy.
        enforcement: how it is judged; one whose glass is broken is observed.
    """

    device: Device
    record: DeviceRecord
    advertised: bool
    enforcement: Enforcement


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """All of it at one moment.

    Attributes:
        devices: every device of the node; the very same sequence for as long as nothing about them changes.
        handovers_waiting: starts that wait now.
        erasers_busy, erasers_free, erasers_waiting: the node's eraser slots, and scrubs that wait for one.
        child_starts: by the module that runs in the child, since the service's start.
        children_abandoned: since the service's start, those that died later included.
        ledger_ok: whether it stores changes.
        ledger_bytes: its files; None: not known.
        audit_head: the last row of the audit trail; None before the ledger is loaded.
        kubelet_trusted: whether its lists are believed.
        kubelet_restarts: as the service saw them.
        policy: name and digest of the one in force; None before there is one.
    """

    devices: Sequence[DeviceStatus] = ()
    handovers_waiting: int = 0
    erasers_busy: int = 0
    erasers_free: int = 0
    erasers_waiting: int = 0
    child_starts: Mapping[str, int] = field(default_factory=dict)
    children_abandoned: int = 0
    ledger_ok: bool = False
    ledger_bytes: int | None = None
    audit_head: AuditHead | None = None
    kubelet_trusted: bool = False
    kubelet_restarts: int = 0
    policy: tuple[str, str] | None = None
