"""The codes of errors: stable identifiers for logs, metrics, the ledger and clients, each declared once.

Codes of findings are declared beside findings, in :class:`scrubber.domain.evidence.FindingCode`.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["NON_ENGINE_CODES", "ErrorCode"]


class ErrorCode(StrEnum):
    """The code of a :class:`~scrubber.domain.errors.ScrubberError`."""

    # Default code of each error class, used where an error is raised without a more precise code.
    ERROR = "error"
    RETRYABLE = "retryable"
    NOT_READY = "not-ready"
    UNAVAILABLE = "unavailable"
    RESET_IN_PROGRESS = "reset-in-progress"
    REFUSED = "refused"
    INVALID_REQUEST = "invalid-request"
    QUARANTINED = "quarantined"
    DEVICE_BUSY = "device-busy"
    PERMISSION_DENIED = "permission-denied"
    DEVICE_FAULT = "device-fault"
    DEVICE_UNREADABLE = "device-unreadable"
    DRIVER_TIMEOUT = "driver-timeout"
    DEVICE_LOST = "device-lost"
    FATAL_ERROR = "fatal-error"
    INVALID_CONFIGURATION = "invalid-configuration"
    ALREADY_RUNNING = "already-running"
    LEDGER_FAILURE = "ledger-failure"
    CHILD_DIED = "child-died"

    # Why a start is refused for now.
    BREAKER_OPEN = "breaker-open"
    EARLIER_POD_RUNNING = "earlier-pod-running"
    ASSIGNED_BY_ANOTHER_PLUGIN = "assigned-by-another-plugin"
    HELD_BY_OWN_POD = "held-by-own-pod"
    POD_UNREADABLE = "pod-unreadable"
    REASSIGNED = "reassigned"
    SCRUB_BLOCKED = "scrub-blocked"
    SCRUBBING = "scrubbing"
    SHARING_NOT_ALLOWED = "sharing-not-allowed"
    ATTEMPTS_EXHAUSTED = "attempts-exhausted"
    SERVICE_STARTING = "service-starting"
    UNASSIGNED = "unassigned"

    # Errors of a vendor's plugin behind ours.
    UPSTREAM_INVALID_RESPONSE = "upstream-invalid-response"
    UPSTREAM_TIMEOUT = "upstream-timeout"
    UPSTREAM_REFUSED = "upstream-refused"

    # Errors of the sockets, before the engine is called.
    INTERNAL_ERROR = "internal-error"
    UNKNOWN_CALLER = "unknown-caller"
    UNKNOWN_METHOD = "unknown-method"
    WRONG_SOCKET = "wrong-socket"
    WRONG_USER = "wrong-user"


NON_ENGINE_CODES = frozenset(
    {
        ErrorCode.INTERNAL_ERROR,
        ErrorCode.UNKNOWN_CALLER,
        ErrorCode.UNKNOWN_METHOD,
        ErrorCode.UPSTREAM_INVALID_RESPONSE,
        ErrorCode.UPSTREAM_TIMEOUT,
        ErrorCode.UPSTREAM_REFUSED,
        ErrorCode.WRONG_SOCKET,
        ErrorCode.WRONG_USER,
    }
)
"""Codes of the sockets and of the plugin; no hand-over ends with one inside the service."""
