"""The codes of errors: stable identifiers for logs, metrics, the ledger and clients, each declared once.

Codes of findings are declared beside findings, in :class:`scrubber.domain.evidence.FindingCode`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

__all__ = ["NON_ENGINE_CODES", "ErrorCode"]


class ErrorCode(StrEnum):
    """The code of a :class:`~scrubber.domain.errors.ScrubberError`.

    Attributes:
        description: what happened, and what to do if that is not obvious; one sentence for operators, in Markdown.
    """

    description: str

    def __new__(cls, code: str, description: str) -> Self:
        member = str.__new__(cls, code)
        member._value_ = code
        member.description = description
        return member

    # Default code of each error class, used where an error is raised without a more precise code.
    ERROR = "error", "An error that no other code describes; its message has the reason."
    RETRYABLE = "retryable", "A temporary error that no other code describes; try again."
    NOT_READY = (
        "not-ready",
        "The device is not ready yet, for example because it changed while it was being granted; the start is tried again.",
    )
    UNAVAILABLE = (
        "unavailable",
        "The service, the kubelet, a driver or a child process does not answer; try again, and check it if this lasts.",
    )
    RESET_IN_PROGRESS = (
        "reset-in-progress",
        "The device is being reset, and its driver is not queried about it until that has finished.",
    )
    COMMAND_BROKEN = (
        "command-broken",
        (
            "The administrator's program of a command backend misbehaves; no device is at fault, and none is granted that "
            "only this program can prove clean: correct the program."
        ),
    )
    REFUSED = (
        "refused",
        "The policy or the state of the device does not allow the request; the message has the reason and the limit.",
    )
    INVALID_REQUEST = (
        "invalid-request",
        "The request is malformed, or names unknown devices, a device twice or none; correct it.",
    )
    QUARANTINED = (
        "quarantined",
        "The device is out of service; the message names the cause and how the device can return.",
    )
    DEVICE_BUSY = (
        "device-busy",
        "The device is held or being scrubbed: a start waits, and an operator's request can be repeated once it is free.",
    )
    PERMISSION_DENIED = (
        "permission-denied",
        "The caller may not use the socket; the message names the users and groups that may.",
    )
    DEVICE_FAULT = (
        "device-fault",
        "The device has a fault that no other code describes; it is quarantined until an operator has inspected it.",
    )
    DEVICE_UNREADABLE = (
        "device-unreadable",
        "The device returns no data, or inconsistent data; it is quarantined, and scrubbed once it can be read again.",
    )
    DRIVER_TIMEOUT = (
        "driver-timeout",
        "A call to the driver exceeded its deadline; the device is quarantined, and scrubbed once the driver answers again.",
    )
    DEVICE_LOST = (
        "device-lost",
        "The device fell off the bus or disappeared from the node; it is quarantined until a reset brings it back.",
    )
    FATAL_ERROR = "fatal-error", "The daemon cannot continue, for a reason that no other code describes."
    INVALID_CONFIGURATION = (
        "invalid-configuration",
        "A setting, a policy or a path cannot work; correct what the message names.",
    )
    ALREADY_RUNNING = (
        "already-running",
        "Another instance uses the state directory or the sockets; stop one of the two.",
    )
    LEDGER_FAILURE = (
        "ledger-failure",
        "The ledger cannot be read or written, so no device is handed over; runbook `ScrubberLedgerFailing`.",
    )
    CHILD_DIED = (
        "child-died",
        "A child process ended or sent an invalid message before it answered; another one is started for the next request.",
    )

    # Why a start is refused for now.
    NODE_YIELDED = (
        "node-yielded",
        "The node is yielded, so that others can work with its driver; starts are tried again until that has ended.",
    )
    WORK_GATE_CLOSED = (
        "work-gate-closed",
        "The devices' confidential-computing mode keeps them from accepting work; the start is tried again.",
    )
    BREAKER_OPEN = (
        "breaker-open",
        "The node's circuit breaker is open, so that no recovery resets the device now; look for a common cause of the faults.",
    )
    EARLIER_POD_RUNNING = (
        "earlier-pod-running",
        "Processes of a pod that had the device may still run; the start waits until that pod is over.",
    )
    ASSIGNED_BY_ANOTHER_PLUGIN = (
        "assigned-by-another-plugin",
        "Another plugin or DRA driver has given the device to a pod, too: stop it, or exclude the device from it.",
    )
    PREPARED_FOR_CLAIM = (
        "prepared-for-claim",
        "The device is prepared for a resource claim; it is free once that claim was unprepared and its pods have ended.",
    )
    ADVERTISED_BY_PLUGIN = (
        "advertised-by-plugin",
        "The device plugin advertises the device that the DRA driver was asked for: exclude it from one of the two.",
    )
    RESOURCE_OF_PLUGIN = (
        "resource-of-plugin",
        "A device class publishes an extended resource that the device plugin on this node advertises, too: rename one of them.",
    )
    CLAIM_CHANGED = (
        "claim-changed",
        "A claim that is prepared was to be prepared with other devices; delete its pods, so that the kubelet releases it.",
    )
    CLAIM_ABANDONED = (
        "claim-abandoned",
        "The device was prepared for a claim that the kubelet has forgotten, or whose pod has not started; that claim was released, and the call is tried again.",
    )
    CLAIM_SHARED = (
        "claim-shared",
        "A claim is reserved for several pods, and the policy allows one pod on the device (`sharing: never`): use a claim for each pod.",
    )
    CLAIM_IN_PROGRESS = (
        "claim-in-progress",
        "Another call for the same resource claim has not ended yet; the call is tried again.",
    )
    JOB_UNREADABLE = (
        "job-unreadable",
        "The processes of the job cannot be determined, so its end could not be detected; the message names what to set.",
    )
    HELD_BY_OWN_POD = (
        "held-by-own-pod",
        "Another container of the starting pod holds the device; the start waits until that container closes it.",
    )
    POD_UNREADABLE = (
        "pod-unreadable",
        "The processes of the starting pod cannot be determined, so its end could not be detected either.",
    )
    REASSIGNED = (
        "reassigned",
        "The kubelet assigned the device again while its hand-over was in progress; the start is tried again.",
    )
    SCRUB_BLOCKED = (
        "scrub-blocked",
        "The device's last scrub was blocked, and the next one waits for a moment; the message has the reason.",
    )
    SCRUBBING = "scrubbing", "The device is being scrubbed; the start is tried again and joins the scrub."
    SHARING_NOT_ALLOWED = (
        "sharing-not-allowed",
        "Other pods use the device, and this pod may not share it with them now; the message has the reason.",
    )
    ATTEMPTS_EXHAUSTED = (
        "attempts-exhausted",
        "The device has no recovery attempts left: it is condemned, or waits until the limits of the day allow another.",
    )
    SERVICE_STARTING = (
        "service-starting",
        "The service is starting and has not inspected every device yet; the start is tried again.",
    )
    UNASSIGNED = (
        "unassigned",
        "The kubelet's list assigns the device to no pod, so that no container can be about to start on it.",
    )

    # Errors of a vendor's plugin behind ours.
    UPSTREAM_INVALID_RESPONSE = (
        "upstream-invalid-response",
        (
            "The vendor's plugin gave an unusable answer; after an invalid list or `Allocate` response it is not used until it "
            "registers again."
        ),
    )
    UPSTREAM_TIMEOUT = (
        "upstream-timeout",
        "The vendor's plugin did not answer in time; after an `Allocate` it is not called for a minute.",
    )
    UPSTREAM_REFUSED = (
        "upstream-refused",
        "The vendor's plugin refused the call; its status and its message are passed on.",
    )

    # Errors of the sockets, before the engine is called.
    INTERNAL_ERROR = (
        "internal-error",
        "A defect in this program; the service's log has the traceback under `api.failed`: please report it.",
    )
    UNKNOWN_CALLER = "unknown-caller", "The call did not come through the admin socket, so its caller is unknown."
    UNKNOWN_METHOD = "unknown-method", "The socket serves no such method; the client may be newer than the service."
    VERSION_UNSUPPORTED = (
        "version-unsupported",
        "Plugin and service are more than one minor version apart; upgrade one of them.",
    )
    WRONG_SOCKET = "wrong-socket", "The method is served on another socket, which the message names."
    WRONG_USER = (
        "wrong-user",
        "Only root, the service's own user and the members of the admin group may act on devices.",
    )


NON_ENGINE_CODES = frozenset(
    {
        ErrorCode.INTERNAL_ERROR,
        ErrorCode.UNKNOWN_CALLER,
        ErrorCode.UNKNOWN_METHOD,
        ErrorCode.UPSTREAM_INVALID_RESPONSE,
        ErrorCode.UPSTREAM_TIMEOUT,
        ErrorCode.UPSTREAM_REFUSED,
        ErrorCode.VERSION_UNSUPPORTED,
        ErrorCode.WRONG_SOCKET,
        ErrorCode.WRONG_USER,
    }
)
"""Codes of the sockets and of the plugin; no hand-over ends with one inside the service."""
