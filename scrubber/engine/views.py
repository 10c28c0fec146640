"""What the engine shows and answers: values that the servers turn into messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from scrubber.domain.assignment import Pod
from scrubber.domain.device import Device, NodeIdentity
from scrubber.domain.evidence import Certificate, PathKind, ScrubRecord, Step
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.health.breaker import BreakerState
from scrubber.domain.policy import Policy
from scrubber.domain.record import DeviceRecord
from scrubber.domain.reset_plan import ResetPlan
from scrubber.engine import refusals
from scrubber.ports.device import EraseProgress
from scrubber.ports.record import CHAIN_START, AuditHead, HistoryEntry, HistoryQuery, TrailPage

__all__ = [
    "Actions",
    "CertificateStatus",
    "CertificateView",
    "DeviceView",
    "GrantedDevice",
    "HandOverCall",
    "NodeView",
    "PodNotice",
    "ScrubUpdate",
    "Service",
    "ServiceView",
]


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device as it is now.

    Attributes:
        scrub: id of the scrub under way.
        advertised: whether the kubelet is told that it is healthy.
        policy: this device's.
        recovery_blocker: why its way back stands still, beyond its cause; empty otherwise.
        unauthorized_users: who uses it without a grant, by the last look: a sentence each.
        uninspected_processes: processes that several walks of its last scrub did not get through: a sentence each.
    """

    device: Device
    record: DeviceRecord
    scrub: str | None = None
    advertised: bool = True
    policy: Policy = field(default_factory=Policy)
    recovery_blocker: str = ""
    unauthorized_users: tuple[str, ...] = ()
    uninspected_processes: tuple[str, ...] = ()

    @property
    def refusal_message(self) -> str:
        """What a pod's status may say about the device; empty while it is in service. Names no tenant."""
        return refusals.out_of_service_message(self.record, self.recovery_blocker)


@dataclass(frozen=True, slots=True)
class PodNotice:
    """What a pod's owner should be told.

    Attributes:
        reason: in one CamelCase word: ``GpuNotHandedOver``, ``GpuOutOfService``.
        message: names devices, states and scrubs, and no other tenant.
        since: wall-clock seconds.
        evict: the policy wants the pod evicted.
    """

    pod: Pod
    devices: tuple[str, ...]
    reason: str
    message: str
    since: float
    evict: bool


@dataclass(frozen=True, slots=True)
class NodeView:
    """All devices at one version.

    Attributes:
        ready: False until every device was looked at once after a start.
        epoch: changes with every start of the service.
        ledger_status: ``"ok"``, or the sentence why nothing is handed over.
        refuses_envvar: the policy refuses devices that are announced to a runtime by an environment variable.
        notices: what owners of pods should be told.
    """

    version: int
    devices: tuple[DeviceView, ...]
    ready: bool
    epoch: str
    ledger_status: str = "ok"
    refuses_envvar: bool = False
    notices: tuple[PodNotice, ...] = ()

    def require_ready(self) -> None:
        """Go on only with a view that has every device.

        Raises:
            NotReady: the service is starting.
        """
        if not self.ready:
            raise refusals.service_starting()


@dataclass(frozen=True, slots=True)
class HandOverCall:
    """A request to hand devices over. ``wait_seconds`` None means the policy's limit.

    ``unreported_allocations`` names ids that were allocated while the service could not be told. All ids are those of the
    kubelet's ``resource``; without one they are our devices'.
    """

    devices: tuple[str, ...]
    wait_seconds: float | None = None
    unreported_allocations: frozenset[str] = frozenset()
    resource: str = ""


@dataclass(frozen=True, slots=True)
class GrantedDevice:
    """One device of a hand-over that was granted."""

    device: str
    grant: int
    kind: HandOverKind
    path: PathKind
    certificate: str | None
    basis: Basis


@dataclass(frozen=True, slots=True)
class ScrubUpdate:
    """An update on a scrub: how far a step is, or (``finished`` set) how it ended.

    Attributes:
        unexplained_residue: that residue was found where a certificate said that there is none; empty otherwise.
    """

    scrub: str
    device: str
    step: Step | None = None
    progress: EraseProgress | None = None
    joined: bool = False
    finished: ScrubRecord | None = None
    certificate: Certificate | None = None
    unexplained_residue: str = ""


@dataclass(frozen=True, slots=True)
class ServiceView:
    """What runs here.

    Attributes:
        ledger_status: ``"ok"`` or the sentence why nothing is handed over.
        key_id, public_key: of the key that signs certificates; the latter as PEM.
        audit_head: the last row of the audit trail.
        paths: absolute paths, by what is there: ``state``, ``policy``, ``kubelet_status``, ``pod-resources``, ``pod-logs``,
            ``cgroups``.
        policy_error: why the policy's file as it stands is not in force; empty otherwise.
        kubelet_status: ``"ok"``, or the sentence why its lists are not believed; empty before anybody looked.
        admin_group, read_group: whose members may act, and look; empty: nobody's.
    """

    version: str
    backend: str
    identity: NodeIdentity
    policy: Policy
    ledger_status: str
    epoch: str
    breaker: BreakerState = field(default_factory=BreakerState)
    key_id: str = ""
    public_key: str = ""
    audit_head: AuditHead = CHAIN_START
    paths: Mapping[str, str] = field(default_factory=dict)
    policy_error: str = ""
    kubelet_status: str = ""
    admin_group: str = ""
    read_group: str = ""


class CertificateStatus(StrEnum):
    """What became of a certificate."""

    UNUSED = "unused"
    """The next start of its device may rest on it, as far as it is still good then."""
    CONSUMED = "used"
    VOIDED = "void"
    """It was never used, and never will be."""


@dataclass(frozen=True, slots=True)
class CertificateView:
    """A certificate that was issued here."""

    certificate: Certificate
    status: CertificateStatus


class Actions(Protocol):
    """What operators may order of the devices."""

    def scrub(self, device: str, path: PathKind, actor: str) -> AsyncIterator[ScrubUpdate]:
        """Scrub on demand, or join the scrub under way; ends after the update that has ``finished`` set.

        Raises:
            InvalidRequest: no such device.
            DeviceBusy: it is in use.
        """

    async def reset_plan(self, device: str) -> ResetPlan:
        """What a reset of ``device`` would do and what blocks it, uses of it and of what is reset with it included.

        Changes nothing.

        Raises:
            InvalidRequest: no such device.
            DeviceFault, Unavailable: the device, or whoever is asked about it, did not answer.
        """

    async def quarantine(self, device: str, reason: str, actor: str) -> DeviceView: ...

    async def unquarantine(self, device: str, reason: str, actor: str) -> DeviceView: ...

    async def break_glass(self, device: str, seconds: float, reason: str, actor: str) -> DeviceView:
        """Have the device handed out for ``seconds`` whatever is known of it; 0 ends that.

        Raises:
            InvalidRequest: no such device, or no reason.
            Refused: a time that the policy does not allow, nothing to end, or a device that a person took out.
        """

    def reset(self, device: str, reason: str, actor: str) -> AsyncIterator[ScrubUpdate]:
        """Reset a device that nobody has, and scrub it; news as of :meth:`scrub`.

        Raises:
            InvalidRequest: no such device, or no reason.
            DeviceBusy: it, or a device that is reset with it, is in use or being scrubbed.
            Refused: it can never be reset here, or the policy says never.
            DeviceFault, Unavailable: it cannot be said whether it could be.
        """

    async def accept_baseline(
        self, device: str, reason: str, actor: str, expected_facts: Mapping[str, str] | None = None
    ) -> DeviceView:
        """From now on, what the device is at present is what it should be.

        Args:
            expected_facts: its facts as the person saw them; None or empty when he was shown none.

        Raises:
            InvalidRequest: no such device, or no reason.
            Refused: it is something else than what was shown.
            DeviceFault, Unavailable: it cannot be said what it is.
        """


class Service(Protocol):
    """The engine as the servers see it; :class:`scrubber.engine.node.Node` is the one that there is.

    Every method may raise the errors of :mod:`scrubber.domain.errors`.
    """

    @property
    def actions(self) -> Actions:
        """What operators may order."""

    def view(self) -> NodeView:
        """The present state, without waiting."""

    async def wait_for_change(self, since: int) -> NodeView:
        """The newest state as soon as its version is above ``since``. Consumers that are slow skip versions."""

    def service_view(self) -> ServiceView: ...

    async def announce(self, resource: str, mapping: Mapping[str, str]) -> None:
        """What the ids of ``resource`` mean (id → device), in the place of what was announced for it before.

        Raises:
            InvalidRequest: an impossible name or id, or more of them than are kept.
        """

    async def reserve(self, devices: Sequence[str], resource: str = "") -> tuple[str, ...]:
        """Note an Allocate, which starts what is dirty and free; answers ids of the scrubs that are under way already.

        Answers at once and touches no hardware.

        Args:
            resource: the kubelet's name of the resource whose own ids ``devices`` are; empty: they are our devices'.

        Raises:
            InvalidRequest: unknown, duplicate or no ids.
            Quarantined: one of the devices is out of service. Nothing else is ever refused here.
        """

    async def hand_over(self, call: HandOverCall) -> tuple[GrantedDevice, ...]:
        """All devices of ``call`` or none; the gate. Cancelling it stops the waiting, not the scrubs.

        Raises:
            InvalidRequest, Quarantined, NotReady, Held, LedgerFailure.
        """

    async def certificate(self, id: str) -> CertificateView:
        """The certificate of that id; raises :class:`InvalidRequest` when the ledger has none."""

    def audit(self, after: int) -> AsyncIterator[TrailPage]:
        """The audit trail as it stands, oldest first, without the rows up to ``after``; at least one page.

        Raises:
            NotReady: rows were given up while they were read.
        """

    async def history(self, query: HistoryQuery) -> Sequence[HistoryEntry]: ...
