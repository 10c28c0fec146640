"""The codes of errors: stable words for logs, metrics, the ledger and clients, each declared once.

Codes of findings are declared beside findings, in :class:`scrubber.domain.evidence.FindingCode`.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["NON_ENGINE_CODES", "ErrorCode"]


class ErrorCode(StrEnum):
    """The code of a :class:`~scrubber.domain.errors.ScrubberError`."""

    # Of each class of errors, where whoever raises one says nothing more precise.
    ERROR = "error"
    RETRYABLE = "retry"
    NOT_READY = "not-ready"
    UNAVAILABLE = "away"
    RESET_IN_PROGRESS = "being-reset"
    REFUSED = "refused"
    INVALID_REQUEST = "invalid-request"
    QUARANTINED = "quarantined"
    DEVICE_BUSY = "held"
    PERMISSION_DENIED = "not-permitted"
    DEVICE_FAULT = "device-fault"
    DEVICE_UNREADABLE = "unreadable"
    DRIVER_TIMEOUT = "driver-stuck"
    DEVICE_LOST = "lost"
    FATAL_ERROR = "fatal"
    INVALID_CONFIGURATION = "bad-configuration"
    ALREADY_RUNNING = "second-instance"
    LEDGER_FAILURE = "ledger"
    CHILD_DIED = "child-died"

    # Why a start is refused for now.
    BREAKER_OPEN = "breaker"
    EARLIER_POD_RUNNING = "earlier-pod-lives"
    ASSIGNED_BY_ANOTHER_PLUGIN = "foreign-assignment"
    HELD_BY_OWN_POD = "held-by-own-pod"
    POD_UNREADABLE = "pod-unreadable"
    REASSIGNED = "reassigned"
    SCRUB_BLOCKED = "scrub-held-up"
    SCRUBBING = "scrubbing"
    SHARING_NOT_ALLOWED = "sharing"
    ATTEMPTS_EXHAUSTED = "spent"
    SERVICE_STARTING = "starting"
    UNASSIGNED = "unassigned"

    # Of a vendor's plugin behind ours.
    UPSTREAM_INVALID_RESPONSE = "vendor-garbled"
    UPSTREAM_TIMEOUT = "vendor-hung"
    UPSTREAM_REFUSED = "vendor-refused"

    # Of the sockets, before the engine is asked.
    INTERNAL_ERROR = "unexpected"
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
