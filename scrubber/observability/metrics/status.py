"""Status of the service at a scrape, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scrubber.domain.device import Device
from scrubber.domain.infrastructure import NamedHolder
from scrubber.domain.node_record import YieldRequester
from scrubber.domain.policy import Enforcement
from scrubber.domain.record import DeviceRecord
from scrubber.ports.record import AuditHead

__all__ = ["DeviceStatus", "ServiceStatus"]


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device of the node's view.

    Attributes:
        advertised: whether it is reported to the kubelet as healthy.
        enforcement: effective enforcement mode; observe during a break-glass override.
        holders: processes that have the device open without a grant, and agents of the node.
    """

    device: Device
    record: DeviceRecord
    advertised: bool
    enforcement: Enforcement
    holders: tuple[NamedHolder, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """The whole status at one moment.

    Attributes:
        devices: every device of the node; the identical sequence object while nothing about them changes.
        handovers_waiting: number of container starts that wait.
        erasers_busy, erasers_free, erasers_waiting: the node's eraser slots, and scrubs that wait for one.
        child_starts: starts by the module that runs in the child, since the service's start.
        children_abandoned: since the service's start, including those that died later.
        ledger_ok: whether it stores changes.
        ledger_bytes: size of its files; None: unknown.
        audit_head: the last row of the audit log; None before the ledger is loaded.
        kubelet_trusted: whether the kubelet's lists are trusted.
        kubelet_restarts: restarts that the service observed.
        policy: name and digest of the active policy; None before there is one.
        agent_pause_seconds: since the pause of the node's agents began; 0 while there is none.
        yielded: whether the node is yielded, so that the driver is closed.
        waiting_for_driver: whether the start of the service waits for the driver to answer.
        yield_starts: requester of a yield → time of its first request, in wall-clock seconds.
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
    agent_pause_seconds: float = 0.0
    yielded: bool = False
    waiting_for_driver: bool = False
    yield_starts: Mapping[YieldRequester, float] = field(default_factory=dict)
