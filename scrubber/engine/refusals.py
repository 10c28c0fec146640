"""Refusals of starts and scrubs: the detailed reason for the operator, and what the pod's status may contain."""

from __future__ import annotations

from collections.abc import Collection

from scrubber.domain.assignment import Assignment, Claim, Pod
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import (
    DeviceBusy,
    DeviceFault,
    InvalidRequest,
    NotReady,
    Quarantined,
    Refused,
    ScrubberError,
    Unreadable,
)
from scrubber.domain.jobs import Job
from scrubber.domain.pods import PodLiveness
from scrubber.domain.record import MAX_ADMIN_CLAIMS, DeviceRecord, Grant
from scrubber.domain.states import Hygiene
from scrubber.domain.telemetry import Holder

__all__ = [
    "AGENTS_ARE_PAUSED",
    "NODE_YIELDED",
    "adopted_in_claim",
    "advertised_by_plugin",
    "assigned_by_another_plugin",
    "attempts_exhausted",
    "being_scrubbed",
    "cannot_be_scrubbed",
    "cannot_be_shared",
    "claim_abandoned",
    "claim_changed",
    "claim_in_progress",
    "claim_may_not_be_shared",
    "claim_shared_message",
    "claim_unstarted",
    "device_arriving",
    "device_changed",
    "device_held",
    "device_unreadable",
    "earlier_pod_running",
    "fault_reported_message",
    "held_by_own_pod",
    "job_unreadable",
    "job_without_process",
    "no_certificate",
    "no_free_devices",
    "node_yielded",
    "out_of_service_message",
    "pod_unreadable",
    "prepared_for_claim",
    "quarantined",
    "quarantined_in_claim",
    "reassigned",
    "release_message",
    "reset_during_scrub",
    "reset_stopped",
    "resource_of_plugin",
    "scrub_blocked",
    "service_starting",
    "too_many_admin_claims",
    "unassigned",
    "withheld_message",
    "work_gate_closed",
]

# -- starts -----------------------------------------------------------------------------------------------------------


def service_starting(driver_error: str = "") -> NotReady:
    """Return the refusal of a service that is starting; ``driver_error``: why the driver does not answer yet."""
    state = f"waits for the driver: {driver_error}" if driver_error else "has not inspected every device yet."
    return NotReady(
        f"The service is starting and {state} Retry in a moment.",
        public_message="The scrub service is starting. The start is retried.",
        code=ErrorCode.SERVICE_STARTING,
    )


NODE_YIELDED = "The node's GPU driver is being serviced, so no device is handed over until that has ended."
"""Message for a pod's status on a yielded node."""


def node_yielded(reason: str) -> NotReady:
    """Return the refusal of a node that is yielded for ``reason``."""
    return NotReady(
        f"The node is yielded: the service does not use the driver and hands over no device. {reason} To end it, run "
        "scrubber resume.",
        public_message=NODE_YIELDED,
        code=ErrorCode.NODE_YIELDED,
    )


def work_gate_closed(reason: str) -> NotReady:
    """Return the refusal of a node whose devices cannot be made to accept work."""
    return NotReady(
        f"The devices are in a confidential-computing mode and could not be made to accept work: {reason} This is retried.",
        public_message="The node's GPUs do not accept work yet. The start is retried.",
        code=ErrorCode.WORK_GATE_CLOSED,
    )


def no_certificate(id: str) -> InvalidRequest:
    return InvalidRequest(f"The ledger has no certificate {id!r}; old certificates are pruned with the audit log.")


def out_of_service_message(record: DeviceRecord, recovery_blocker: str) -> str:
    """Return the message about the device for a pod's status; empty while it is in service. Names no tenant.

    Args:
        recovery_blocker: why the recovery cannot continue, beyond its cause; empty otherwise.
    """
    if record.advertised:
        return ""
    cause = record.cause
    why = f" ({cause.code})" if cause is not None else ""
    way = f" {cause.recovery_message}" if cause is not None else ""
    return f"Device {record.device} is {record.health.value}{why}.{way}{f' {recovery_blocker}' if recovery_blocker else ''}"


def withheld_message(device: str) -> str:
    """Return the message about a device that a process without a grant holds, for a pod's status."""
    return f"Device {device} is held by a process that has no grant for it. It is offered again when that has ended."


def fault_reported_message(device: str, fault: str) -> str:
    """Return the message about a device whose fault was reported and not checked yet, for a pod's status."""
    return f"Device {device} is withheld: its driver reported {fault}. The device is being checked."


def quarantined(device: str, reason: str, *, public_message: str) -> Quarantined:
    """Refuse a device that is out of service; ``public_message`` as :func:`out_of_service_message` returns it."""
    return Quarantined(f"Device {device}: {reason}.", public_message=public_message)


def device_changed() -> NotReady:
    return NotReady(
        "A device kept changing while it was being granted, until the deadline expired.",
        public_message="A device changed while it was being granted. The start is retried.",
    )


def pod_unreadable(unreadable: Unreadable) -> NotReady:
    return NotReady(
        "The processes of the starting pod cannot be determined, so its end could not be detected either: "
        f"{unreadable}",
        public_message="The pod's processes cannot be determined on this node now. The start is retried.",
        code=ErrorCode.POD_UNREADABLE,
    )


def reassigned(device: str) -> NotReady:
    return NotReady(
        f"Device {device} was reassigned during its hand-over.",
        public_message=f"Device {device} was reassigned. The start is retried.",
        code=ErrorCode.REASSIGNED,
    )


def unassigned(device: str) -> NotReady:
    return NotReady(
        f"The kubelet has not assigned device {device} to any pod, so no container can be starting on it.",
        public_message=f"Device {device} is not assigned to any pod of this node. The start is retried.",
        code=ErrorCode.UNASSIGNED,
    )


def assigned_by_another_plugin(device: str, other: Assignment, own_resources: Collection[str]) -> NotReady:
    """Refuse while another plugin or driver has assigned the device to ``other`` too: it would have two owners."""
    return NotReady(
        f"Device {device} is also assigned to {other.pod.namespace}/{other.pod.name} as {other.resource}, "
        f"which is not one of our resources ({', '.join(sorted(own_resources))}): stop that plugin or driver, "
        "or exclude the device from it.",
        public_message=f"Device {device} was also assigned as {other.resource}. The start is retried.",
        code=ErrorCode.ASSIGNED_BY_ANOTHER_PLUGIN,
    )


def device_unreadable(device: str, fault: DeviceFault) -> NotReady:
    return NotReady(
        f"Device {device} cannot be inspected: {fault}",
        public_message=f"Device {device} cannot be inspected now. The start is retried.",
        code=fault.code,
    )


AGENTS_ARE_PAUSED = "It waits until monitoring agents of the node have been paused for its reset and have released it."
"""What a scrub waits for, in words for a pod's status."""


def being_scrubbed(device: str, state: str, scrub: str | None, waits_for: str = "") -> NotReady:
    """Refuse while ``scrub`` is in progress; None: it is about to start."""
    message = f"Device {device} is {state} (scrub {scrub or 'about to start'}).{' ' if waits_for else ''}{waits_for}"
    return NotReady(message, public_message=f"{message} The start is retried and joins it.", code=ErrorCode.SCRUBBING)


def device_held(device: str, state: str) -> NotReady:
    return NotReady(
        f"Device {device} is still held; the next start waits until its holder ends.",
        public_message=f"Device {device} is {state}: a process still holds it. The start is retried.",
        code=ErrorCode.DEVICE_BUSY,
    )


def cannot_be_shared(device: str, reason: str) -> NotReady:
    """Refuse a start on a device that other pods have."""
    return NotReady(
        f"Device {device} cannot be shared now: {reason}.",
        public_message=f"Device {device} is in use, and this pod may not share it. The start is retried.",
        code=ErrorCode.SHARING_NOT_ALLOWED,
    )


def earlier_pod_running(device: str, grant: Grant, liveness: PodLiveness, starting_pod: Pod | None) -> NotReady:
    """Refuse while processes of an earlier grant's pod may still run; that can be the starting pod."""
    if grant.pod is not None and grant.pod == starting_pod:
        return NotReady(
            f"Device {device} was last used by container "
            f"{', '.join(sorted({each.container for each in liveness.processes}) or grant.cgroups)} of "
            f"{grant.pod.namespace}/{grant.pod.name} itself, which has not ended "
            f"({len(liveness.processes) or 'an unknown number of'} processes). The device must be cleared "
            "before this start.",
            public_message=f"Device {device} is in-use: an earlier run of this pod has not ended. The start is retried.",
            code=ErrorCode.EARLIER_POD_RUNNING,
        )
    name = "an unknown pod" if grant.pod is None else f"{grant.pod.namespace}/{grant.pod.name}"
    if grant.claim is not None and grant.claim.manager is not None:
        name = grant.claim.title
    return NotReady(
        f"Device {device} waits for {name} to end ({len(liveness.processes)} processes).",
        public_message=f"Device {device} is in-use: its earlier use has not ended. The start is retried.",
        code=ErrorCode.EARLIER_POD_RUNNING,
    )


def start_of_unknown_pod(refusal: ScrubberError, uncertainty: str) -> ScrubberError:
    """Add to ``refusal`` why it is not known which pod starts: its own earlier use then counts as that of another pod."""
    message = f"{str(refusal).removesuffix('.')}. Which pod starts is not certain: {uncertainty.removesuffix('.')}."
    return NotReady(message, public_message=refusal.public_message, code=refusal.code)


def held_by_own_pod(device: str, pod: Pod, holder: Holder, container: str) -> NotReady:
    """Refuse while another container of the starting pod holds the device.

    Args:
        container: name of that container's cgroup; empty where it is not known.
    """
    where = f" in container {container}" if container else ""
    return NotReady(
        f"Device {device} must be cleared before {pod.namespace}/{pod.name} starts, and PID {holder.pid} "
        f"({holder.command or 'unknown'}){where} of the same pod holds it. The start waits until that process "
        "closes it.",
        public_message=f"Device {device} is in-use by another container of this pod. The start is retried.",
        code=ErrorCode.HELD_BY_OWN_POD,
    )


# -- claims -----------------------------------------------------------------------------------------------------------


def prepared_for_claim(device: str, claim: Claim) -> NotReady:
    """Refuse a device that is prepared for ``claim``, whatever asks for it."""
    return NotReady(
        f"Device {device} is prepared for {claim.title} by {claim.driver}. It is free once that claim was unprepared and its "
        "pods have ended. If the kubelet never releases it, `scrubber scrub` of the device does once those pods are gone. If a "
        "device plugin advertises the device too, exclude it from one of the two."
        if claim.manager is None
        else f"Device {device} is used by {claim.title} ({claim.manager}). It is free once that job has ended.",
        public_message=f"Device {device} is prepared for another user, which has not ended. The start is retried.",
        code=ErrorCode.PREPARED_FOR_CLAIM,
    )


_PLUGIN_ENDED = "What a plugin advertised is given to claims half a minute after it has ended."


def advertised_by_plugin(device: str, resources: Collection[str]) -> Refused:
    """Refuse to prepare a device that a device plugin advertises as ``resources``."""
    named = ", ".join(sorted(resources))
    return Refused(
        f"Device {device} is advertised by the device plugin as {named}, so it cannot be given to a resource claim or a job: "
        f"exclude it from one of the two, and restart that one. {_PLUGIN_ENDED}",
        public_message=f"Device {device} is also advertised as {named}; it must be excluded from one of the two.",
        code=ErrorCode.ADVERTISED_BY_PLUGIN,
    )


def resource_of_plugin(resources: Collection[str]) -> Refused:
    """Refuse a claim for extended ``resources`` that the device plugin on this node advertises."""
    named = ", ".join(sorted(resources))
    message = (
        f"The device plugin on this node advertises {named}, and a device class publishes the same name "
        "(extendedResourceName). Remove it from the class, or run the plugin and the DRA driver on different nodes"
    )
    return Refused(
        f"{message}. {_PLUGIN_ENDED}",
        public_message=f"{message}; then delete the pod.",
        code=ErrorCode.RESOURCE_OF_PLUGIN,
    )


def claim_changed(claim: Claim, devices: Collection[str]) -> InvalidRequest:
    """Refuse to prepare a claim that is prepared with other ``devices``."""
    named = ", ".join(sorted(devices))
    return InvalidRequest(
        f"{claim.title.capitalize()} ({claim.uid}) is prepared with {named}, and was requested with other devices. The kubelet "
        "still lists it, or a pod of it may still run. Delete its pods, so that the kubelet releases it; if it does not, "
        f"`scrubber scrub DEVICE` does for each of {named} once those pods are gone.",
        public_message="The claim is still prepared with other devices. Delete its pods, this one included, so that the kubelet "
        "releases it.",
        code=ErrorCode.CLAIM_CHANGED,
    )


def claim_abandoned(claim: Claim) -> NotReady:
    """Refuse one round of a call that found ``claim`` abandoned, and has released it."""
    return NotReady(
        f"{claim.title.capitalize()} ({claim.uid}) was never unprepared, although its pods are gone and the kubelet lists it for "
        "none. It has been released, and its devices are scrubbed. The call is tried again.",
        public_message="The device was prepared for an earlier claim, which has been released now. The start is retried.",
        code=ErrorCode.CLAIM_ABANDONED,
    )


def claim_unstarted(claim: Claim) -> NotReady:
    """Refuse one round of a call for ``claim``, which was prepared, has no pod that started, and has been released."""
    return NotReady(
        f"{claim.title.capitalize()} ({claim.uid}) was prepared, but its pod has not started, and a device of it may not be used "
        "any more as it is. It has been released, so that the device can be scrubbed or recover. The call is tried again.",
        public_message="A device of the claim may not be used any more as it is; the claim has been released before the pod "
        "started. The start is retried.",
        code=ErrorCode.CLAIM_ABANDONED,
    )


def quarantined_in_claim(device: str, claim: Claim, *, public_message: str) -> Quarantined:
    """Refuse a start on a device that failed while it was prepared for ``claim``."""
    end = "the claim's pods are deleted" if claim.manager is None else "the job has ended"
    way = f"Its recovery can begin once {end}."
    return Quarantined(
        f"Device {device} has been taken out of service since it was prepared for {claim.title}. {way}",
        public_message=f"{public_message} {way}",
    )


def adopted_in_claim(device: str, other: Assignment) -> Refused:
    """Refuse a start on a device that ``other`` got without a hand-over while it was prepared for the pod's claim."""
    way = "Delete the claim's pods: the device is scrubbed once every pod on it has ended."
    return Refused(
        f"{other.pod.namespace}/{other.pod.name} was started on device {device} as {other.resource}, without a hand-over, "
        f"since the device was prepared for the claim. Stop that plugin or driver, or exclude the device from it. {way}",
        public_message=f"Device {device} was also given to another pod since it was prepared for the claim. {way}",
        code=ErrorCode.ASSIGNED_BY_ANOTHER_PLUGIN,
    )


def claim_in_progress(claim: Claim) -> NotReady:
    return NotReady(
        f"Another call for {claim.title} has not ended yet.",
        public_message="Another call for this claim has not ended yet. The start is retried.",
        code=ErrorCode.CLAIM_IN_PROGRESS,
    )


def too_many_admin_claims(device: str) -> NotReady:
    message = (
        f"Pods have device {device} by {MAX_ADMIN_CLAIMS} claims with admin access already. Delete one of them; the start is "
        "retried."
    )
    return NotReady(message, public_message=message)


def device_arriving() -> NotReady:
    return NotReady(
        "A device that has returned to the node is being inspected.",
        public_message="A device has just returned to the node and is being inspected. The release is retried.",
    )


def claim_may_not_be_shared(device: str, pods: int) -> Refused:
    """Refuse a claim with several ``pods`` where the policy allows one pod on the device."""
    message = (
        f"Device {device} may be used by one pod at a time (policy: sharing: never), and the claim is reserved for {pods} "
        "pods. Use a claim for each pod, from a ResourceClaimTemplate."
    )
    return Refused(message, public_message=message, code=ErrorCode.CLAIM_SHARED)


def release_message(device: str, state: str, scrub: str, waits_for: str) -> str:
    """Return what the release of a claim waits for on ``device``, for a pod's status.

    Args:
        scrub: the ID of the scrub in progress, empty without one; ``waits_for``: what that scrub waits for.
    """
    if scrub:
        return f"Device {device} is {state} (scrub {scrub}).{' ' if waits_for else ''}{waits_for}"
    if state == Hygiene.IN_USE:
        return f"Device {device} is {state}: processes of the pods that used it have not ended."
    return f"Device {device} is {state}, and its scrub has not begun, or was blocked because it is still held."


def claim_shared_message(device: str) -> str:
    """Return the message about a device that a second pod joined by a claim, for a pod's status."""
    return f"Device {device} is used by several pods of one claim, which the policy does not allow (sharing: never)."


# -- jobs ---------------------------------------------------------------------------------------------------------------


def job_unreadable(job: Job, unreadable: Unreadable) -> NotReady:
    """Refuse a job whose processes cannot be determined: its end could not be seen."""
    return NotReady(f"No device is handed over to {job}. {unreadable}", code=ErrorCode.JOB_UNREADABLE)


def job_without_process(job: Job) -> NotReady:
    """Refuse a job of ``scrubber run`` that has no process: it would be over as soon as it began."""
    return NotReady(
        f"No process is in the cgroup of {job}, so its end could not be seen. If the service does not see the node's cgroups, "
        "pass their directory with --cgroup-root, to the service and to scrubber run.",
        code=ErrorCode.JOB_UNREADABLE,
    )


def no_free_devices(free: int, requested: int) -> NotReady:
    """Refuse a job that requests any devices, more than are free."""
    return NotReady(
        f"{free} of {requested} requested devices are free. scrubber devices shows what the others are used for.",
        code=ErrorCode.DEVICE_BUSY,
    )


# -- scrubs and resets ------------------------------------------------------------------------------------------------


def cannot_be_scrubbed(device: str, state: str) -> NotReady:
    return NotReady(
        f"Device {device} is {state} and cannot be scrubbed now.",
        public_message=f"Device {device} is {state}. The start is retried.",
    )


def scrub_blocked(device: str, scrub: str, reason: str) -> NotReady:
    """Refuse during the backoff after ``scrub``."""
    return NotReady(
        f"Device {device}: scrub {scrub} was blocked: {reason}",
        public_message=f"Device {device} is dirty: scrub {scrub} found it still in use. The start is retried.",
        code=ErrorCode.SCRUB_BLOCKED,
    )


def reset_during_scrub(device: str, scrub: str) -> DeviceBusy:
    """Refuse an operator's reset while ``scrub`` is in progress."""
    return DeviceBusy(f"Device {device} is being scrubbed ({scrub}); wait until the scrub has ended.")


def attempts_exhausted(record: DeviceRecord) -> NotReady:
    """Refuse a recovery: the device has no attempts left, and is condemned or waits."""
    return NotReady(
        f"Device {record.device}: {record.cause.message if record.cause else record.state}",
        code=ErrorCode.ATTEMPTS_EXHAUSTED,
    )


def reset_stopped(device: str, reason: str) -> NotReady:
    """Refuse a recovery's reset while the circuit breaker is open."""
    return NotReady(f"The reset of device {device} is postponed. {reason}", code=ErrorCode.BREAKER_OPEN)
