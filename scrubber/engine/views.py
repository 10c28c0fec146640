"""The engine's API: values that the servers turn into messages, and the protocols that they call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from scrubber.domain.agent_pause import AgentPause, PauseReport
from scrubber.domain.assignment import Claim, Pod
from scrubber.domain.device import Device, NodeIdentity
from scrubber.domain.evidence import Certificate, PathKind, ScrubRecord, Step
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.health.breaker import BreakerState
from scrubber.domain.infrastructure import NamedHolder
from scrubber.domain.jobs import Job
from scrubber.domain.node_record import NodeRecord, YieldRequest, YieldRequester
from scrubber.domain.policy import Policy
from scrubber.domain.record import DeviceRecord
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.states import BindingState, Cause, TaintReason
from scrubber.engine import refusals
from scrubber.engine.resource_ids import Announcer
from scrubber.ports.device import EraseProgress
from scrubber.ports.record import CHAIN_START, AuditHead, AuditLogPage, HistoryEntry, HistoryQuery

__all__ = [
    "Actions",
    "CertificateStatus",
    "CertificateView",
    "ClaimRelease",
    "Claims",
    "DeviceView",
    "GrantedDevice",
    "HandOverCall",
    "Jobs",
    "NodeView",
    "Pauses",
    "PodNotice",
    "PrepareClaimCall",
    "PreparedClaim",
    "ScrubUpdate",
    "Service",
    "ServiceView",
    "StartJobCall",
    "UnpreparedClaim",
    "WithheldDevice",
    "Yields",
]


@dataclass(frozen=True, slots=True)
class DeviceView:
    """The current state of one device.

    Attributes:
        scrub: ID of the scrub in progress.
        advertised: whether the device is advertised to the kubelet as healthy.
        withheld: message for a pod's status why it is not advertised although it is in service: a process without a
            grant holds it, its driver has just reported a fault, or the node is yielded; empty otherwise.
        policy: the policy of this device.
        recovery_blocker: why its recovery cannot continue, beyond its cause; empty otherwise.
        unauthorized_users: a message for each process that used it without a grant at the last check.
        uninspected_processes: a message for each process that several walks of its last scrub could not finish
            inspecting.
        holders: the holders that its last scrub and the last check of its users found.
        taints: why a scheduler should not choose it for a claim.
        binding: whether a scheduler that waits for it may bind a pod to it now.
    """

    device: Device
    record: DeviceRecord
    scrub: str | None = None
    advertised: bool = True
    withheld: str = ""
    policy: Policy = field(default_factory=Policy)
    recovery_blocker: str = ""
    unauthorized_users: tuple[str, ...] = ()
    uninspected_processes: tuple[str, ...] = ()
    holders: tuple[NamedHolder, ...] = ()
    taints: tuple[TaintReason, ...] = ()
    binding: BindingState = BindingState.OUT_OF_SERVICE

    @property
    def refusal_message(self) -> str:
        """Message about the device for a pod's status; empty while the device is in service. Names no tenant."""
        return self.withheld or refusals.out_of_service_message(self.record, self.recovery_blocker)


@dataclass(frozen=True, slots=True)
class PodNotice:
    """A notice for a pod's owner.

    Attributes:
        reason: one CamelCase word: ``GpuHandOverRefused``, ``GpuOutOfService``.
        message: names devices, states and scrubs, and no other tenant.
        since: wall-clock seconds.
        evict: whether the policy demands that the pod be evicted.
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
        ready: False until every device was inspected once after a start.
        epoch: changes with every start of the service.
        ledger_status: ``"ok"``, or the message why no device is handed over.
        refuses_envvar: whether the policy refuses devices that are passed to a runtime in an environment variable.
        notices: notices for the owners of pods.
        yielded: why the node is yielded, for operators; empty while it is not. Devices are then as last seen, or none.
        driver_error: why the driver that the start of the service waits for does not answer; empty otherwise.
        agent_pause: the pause of the node's agents; None while there is none.
        driver_closed: whether no process of the service uses the driver.
        driver_version: version of the node's driver, for devices without one of their own; empty where it is not known.
    """

    version: int
    devices: tuple[DeviceView, ...]
    ready: bool
    epoch: str
    ledger_status: str = "ok"
    refuses_envvar: bool = False
    notices: tuple[PodNotice, ...] = ()
    yielded: str = ""
    driver_error: str = ""
    agent_pause: AgentPause | None = None
    driver_closed: bool = False
    driver_version: str = ""

    def require_ready(self) -> None:
        """Raise unless the view contains every device.

        Raises:
            NotReady: the service is starting.
        """
        if not self.ready:
            raise refusals.service_starting(self.driver_error)


@dataclass(frozen=True, slots=True)
class HandOverCall:
    """A request to hand over devices.

    Attributes:
        devices: IDs of the kubelet's ``resource``; without a resource, IDs of the managed devices.
        wait_seconds: None means the policy's limit.
        unreported_allocations: IDs, in the same form, that were allocated while the service could not be notified.
    """

    devices: tuple[str, ...]
    wait_seconds: float | None = None
    unreported_allocations: frozenset[str] = frozenset()
    resource: str = ""


@dataclass(frozen=True, slots=True)
class PrepareClaimCall:
    """A request to prepare a claim.

    Attributes:
        devices: IDs of the managed devices that the claim gets.
        admin_devices: IDs of devices to which it has admin access: nothing is granted for it.
        wait_seconds: None means the policy's limit.
        extended_resources: for which the scheduler created the claim; empty for a claim of the user's.
        actor: who requests it, for the audit log.
        restores: whether the kubelet takes the claim for prepared and has not called: each of its pods may have processes, and
            none of them is about to get a sandbox.
        withdrawn: whether it has no CDI specification, and gets none before it is prepared.
    """

    claim: Claim
    devices: tuple[str, ...]
    admin_devices: tuple[str, ...] = ()
    wait_seconds: float | None = None
    extended_resources: frozenset[str] = frozenset()
    actor: str = "driver"
    restores: bool = False
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class StartJobCall:
    """A request to hand devices over to a job.

    Attributes:
        actor: who requests it, for the audit log.
        devices: names of the devices: IDs, unique prefixes of IDs, or numbers; empty: any ``count`` devices.
        wait_seconds: None means the policy's limit.
    """

    job: Job
    actor: str
    devices: tuple[str, ...] = ()
    count: int = 0
    wait_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class WithheldDevice:
    """A device that was not scrubbed for the release of a claim, because it is out of service for the reason ``code``."""

    device: str
    code: str


@dataclass(frozen=True, slots=True)
class ClaimRelease:
    """The progress of the release of a claim.

    Attributes:
        done: each device of the claim is clean, or out of service.
        waits_for: what the release waits for, for a pod's status; empty when it is done.
        withheld: the devices that are out of service.
    """

    done: bool
    waits_for: str = ""
    withheld: tuple[WithheldDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedClaim:
    """A claim whose release is not complete, with the IDs of its devices."""

    claim: Claim
    devices: tuple[str, ...] = ()
    admin_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class UnpreparedClaim:
    """A claim that the kubelet lists with devices and that is not prepared; the list has no UID."""

    driver: str
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class GrantedDevice:
    """One device of a granted hand-over."""

    device: str
    grant: int
    kind: HandOverKind
    path: PathKind
    certificate: str | None
    basis: Basis


@dataclass(frozen=True, slots=True)
class ScrubUpdate:
    """An update on a scrub: the progress of a step, or (``finished`` set) the result.

    Attributes:
        unexplained_residue: message that residue was found where a certificate states that there is none; empty
            otherwise.
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
    """The running service.

    Attributes:
        ledger_status: ``"ok"``, or the message why no device is handed over.
        key_id, public_key: the key that signs certificates; ``public_key`` is PEM.
        audit_head: the last row of the audit log.
        paths: absolute paths by name: ``state``, ``policy``, ``kubelet``, ``pod-resources``, ``pod-logs``,
            ``cgroups``.
        policy_error: why the current policy file is not in force; empty otherwise.
        kubelet_status: ``"ok"``, ``"none"`` on a node without a kubelet, or the message why the kubelet's lists are not trusted; empty before the first
            reading.
        yields: requests to yield the node; empty while it is not yielded.
        driver_closed: whether no process of the service uses the driver: only while the node is yielded.
        remaining_pids: child processes that could not be killed, and may use the driver of a yielded node.
        agent_pause: the pause of the node's agents; None while there is none.
        agent_pause_message: why it is not further yet, or failed; empty otherwise.
        admin_group, read_group: groups whose members may run actions and read; empty: no group.
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
    yields: tuple[YieldRequest, ...] = ()
    driver_closed: bool = False
    remaining_pids: tuple[int, ...] = ()
    agent_pause: AgentPause | None = None
    agent_pause_message: str = ""


class CertificateStatus(StrEnum):
    """The status of a certificate."""

    UNUSED = "unused"
    """The next start on its device may rest on it, if it is still valid then."""
    CONSUMED = "consumed"
    VOIDED = "voided"
    """It was never used and can no longer be used."""


@dataclass(frozen=True, slots=True)
class CertificateView:
    """A certificate that this service issued, with its status."""

    certificate: Certificate
    status: CertificateStatus


class Actions(Protocol):
    """Operator actions on devices."""

    def scrub(self, device: str, path: PathKind, actor: str) -> AsyncIterator[ScrubUpdate]:
        """Scrub on demand, or join the scrub in progress; ends after the update that has ``finished`` set.

        Raises:
            InvalidRequest: no such device.
            DeviceBusy: the device is in use.
        """

    async def reset_plan(self, device: str) -> ResetPlan:
        """What a reset of ``device`` would do and what blocks it, including uses of every device that is reset with it.

        Agents that would be paused for it do not block it. Changes nothing.

        Raises:
            InvalidRequest: no such device.
            DeviceFault, Unavailable: the device or its driver did not answer.
        """

    async def quarantine(self, device: str, reason: str, actor: str) -> tuple[DeviceView, Cause | None]:
        """Quarantine the device until an operator releases it; return it, and why it was out of service already, if it was.

        Raises:
            InvalidRequest: no such device, or no reason.
        """

    async def unquarantine(self, device: str, reason: str, actor: str) -> DeviceView: ...

    async def break_glass(self, device: str, seconds: float, reason: str, actor: str) -> DeviceView:
        """Bypass all checks for the device for ``seconds``; 0 ends the override.

        Raises:
            InvalidRequest: no such device, or no reason.
            Refused: a time that the policy does not allow, no override to end, or a device that an operator
                quarantined.
        """

    def reset(self, device: str, reason: str, actor: str) -> AsyncIterator[ScrubUpdate]:
        """Reset a free device and scrub it; yields updates as :meth:`scrub` does.

        Raises:
            InvalidRequest: no such device, or no reason.
            DeviceBusy: the device, or one that is reset with it, is in use or being scrubbed.
            Refused: the device can never be reset here, or the policy forbids resets.
            DeviceFault, Unavailable: it cannot be determined whether the device can be reset.
        """

    async def accept_baseline(
        self, device: str, reason: str, actor: str, expected_facts: Mapping[str, str] | None = None
    ) -> DeviceView:
        """Accept the current facts of the device as its baseline.

        Args:
            expected_facts: the facts that were displayed to the operator; None or empty when none were displayed.

        Raises:
            InvalidRequest: no such device, or no reason.
            Refused: the facts differ from those displayed.
            DeviceFault, Unavailable: the facts cannot be determined.
        """


class Yields(Protocol):
    """Requests to yield the node: to close the driver and to withhold every device until the last of them ends."""

    @property
    def record(self) -> NodeRecord:
        """The requests in effect."""

    async def request(self, requester: YieldRequester, reason: str, actor: str) -> None:
        """Request that the node be yielded; returns when that is durable, before the driver is closed.

        A reason of a plugin that an operator has overridden requests nothing.

        Args:
            actor: names the operator, or the plugin: each plugin has a request of its own.

        Raises:
            InvalidRequest: no reason, or too many plugins have requests.
            LedgerFailure: nothing has changed.
        """

    async def withdraw(self, requester: YieldRequester, reason: str, actor: str, *, everyone: bool = False) -> None:
        """End the request of the operators, of the service, or of the plugin that ``actor`` names.

        Args:
            everyone: end all others too, as an operator, who thereby overrides their reasons.

        Raises:
            LedgerFailure: nothing has changed.
        """


class Pauses(Protocol):
    """The pause of the node's agents, as far as the plugin takes part in it."""

    async def report(self, report: PauseReport) -> None:
        """Take a report of the plugin; returns when what it changes is durable.

        A report about a pause that is over changes nothing.

        Raises:
            InvalidRequest: changes are planned for a pause that is over or ending: none must be made; or a reset is
                reported that cannot have happened.
            LedgerFailure: nothing has changed.
        """


class Claims(Protocol):
    """Resource claims, for a DRA driver."""

    async def prepare(self, call: PrepareClaimCall) -> tuple[GrantedDevice, ...]:
        """Prepare all devices of ``call`` or none; repeated calls get the same answer.

        Raises:
            InvalidRequest: unknown, duplicate or no devices, or the claim is prepared with other devices.
            Refused: a device plugin advertises a device, or the policy does not allow the claim's pods to share it.
            Quarantined, NotReady, LedgerFailure: as for the start of a container.
        """

    async def set_pods(self, uid: str, pods: Sequence[Pod]) -> None:
        """Set the pods that may use the devices of a claim; one that is not over stays. Ignores an unknown claim.

        Raises:
            LedgerFailure: nothing has changed.
        """

    async def unprepare(
        self, uid: str, wait_seconds: float, actor: str = "driver", *, withdrawn: bool = False
    ) -> ClaimRelease:
        """Release a claim, and wait until its devices are scrubbed or out of service; an unknown claim is released.

        Args:
            withdrawn: whether it has no CDI specification, and gets none before it is prepared again.

        Raises:
            NotReady: the service is starting.
            LedgerFailure: nothing has changed.
        """

    def current(self) -> tuple[PreparedClaim, ...]:
        """The claims whose release is not complete.

        Raises:
            NotReady: there is no driver.
        """

    def unprepared(self) -> tuple[UnpreparedClaim, ...]:
        """The claims of any driver that the kubelet lists for a pod with devices, and that are not prepared here."""


class Jobs(Protocol):
    """Jobs of workload managers, and commands of ``scrubber run``."""

    async def start(self, call: StartJobCall) -> tuple[GrantedDevice, ...]:
        """Hand over all devices of ``call`` or none; repeated calls for a job get the same answer.

        Raises:
            InvalidRequest: unknown, duplicate or no devices.
            Refused: a device plugin advertises a device.
            Quarantined, NotReady, LedgerFailure: as for the start of a container; NotReady also if the end of the job could
                not be seen.
        """

    async def end(self, job: Job, wait_seconds: float, actor: str) -> ClaimRelease:
        """Note the end of a job, and wait until its devices are scrubbed or out of service; an unknown job has ended.

        Its devices are released once it has no process left.

        Raises:
            NotReady: the service is starting.
            LedgerFailure: nothing has changed.
        """


class Service(Protocol):
    """The engine's interface for the servers.

    :class:`scrubber.engine.node.Node` implements it, and :class:`scrubber.engine.yielding.DriverlessNode` without a
    driver.

    Every method may raise the errors of :mod:`scrubber.domain.errors`.
    """

    @property
    def actions(self) -> Actions:
        """Actions that operators may run."""

    @property
    def yields(self) -> Yields:
        """The requests to yield the node."""

    @property
    def claims(self) -> Claims:
        """The resource claims of the node."""

    @property
    def jobs(self) -> Jobs:
        """The jobs of the node."""

    @property
    def pauses(self) -> Pauses:
        """The pause of the node's agents."""

    def view(self) -> NodeView:
        """The current state, without waiting."""

    async def wait_for_change(self, since: int) -> NodeView:
        """Return the newest state once its version is above ``since``. Slow consumers skip versions."""

    def service_view(self) -> ServiceView: ...

    async def announce(self, resource: str, mapping: Mapping[str, str], announcer: Announcer | None = None) -> None:
        """Set what the IDs of ``resource`` mean (ID → device), replacing its previous announcement.

        Args:
            announcer: the plugin, whose end lets claims have these devices; None: one whose end cannot be noticed.

        Raises:
            InvalidRequest: an invalid name or ID, or more of them than are stored.
        """

    async def reserve(self, devices: Sequence[str], resource: str = "") -> tuple[str, ...]:
        """Note an Allocate and start scrubs of dirty free devices; return the IDs of scrubs already in progress.

        Returns immediately and touches no hardware.

        Args:
            resource: the kubelet's resource that ``devices`` are IDs of; empty: they are IDs of the managed devices.

        Raises:
            InvalidRequest: unknown, duplicate or no IDs.
            Quarantined: one of the devices is out of service. Nothing else is ever refused here.
        """

    async def hand_over(self, call: HandOverCall) -> tuple[GrantedDevice, ...]:
        """Hand over all devices of ``call`` or none. Cancelling it stops the wait, not the scrubs.

        Raises:
            InvalidRequest, Quarantined, NotReady, Held, LedgerFailure.
        """

    async def certificate(self, id: str) -> CertificateView:
        """The certificate with that ID; raises :class:`InvalidRequest` when the ledger has none."""

    def audit(self, after: int) -> AsyncIterator[AuditLogPage]:
        """The current audit log, oldest first, without the rows up to ``after``; at least one page.

        Raises:
            NotReady: rows were deleted while they were read.
        """

    async def history(self, query: HistoryQuery) -> Sequence[HistoryEntry]: ...
