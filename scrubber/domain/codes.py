"""The codes of errors: stable words for logs, metrics, the ledger and clients, each declared once.

Codes of findings are declared beside findings, in :class:`scrubber.domain.evidence.FindingCode`.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["NOT_OF_THE_ENGINE", "ErrorCode"]


class ErrorCode(StrEnum):
    """The code of a :class:`~scrubber.domain.errors.ScrubberError`."""

    # Of each class of errors, where whoever raises one says nothing more precise.
    ERROR = "error"
    RETRY = "retry"
    NOT_READY = "not-ready"
    AWAY = "away"
    BEING_RESET = "being-reset"
    REFUSED = "refused"
    INVALID_REQUEST = "invalid-request"
    QUARANTINED = "quarantined"
    HELD = "held"
    NOT_PERMITTED = "not-permitted"
    DEVICE_FAULT = "device-fault"
    UNREADABLE = "unreadable"
    DRIVER_STUCK = "driver-stuck"
    LOST = "lost"
    FATAL = "fatal"
    BAD_CONFIGURATION = "bad-configuration"
    SECOND_INSTANCE = "second-instance"
    LEDGER = "ledger"
    CHILD_DIED = "child-died"

    # Why a start is refused for now.
    BREAKER = "breaker"
    EARLIER_POD_LIVES = "earlier-pod-lives"
    FOREIGN_ASSIGNMENT = "foreign-assignment"
    HELD_BY_OWN_POD = "held-by-own-pod"
    POD_UNREADABLE = "pod-unreadable"
    REASSIGNED = "reassigned"
    SCRUB_HELD_UP = "scrub-held-up"
    SCRUBBING = "scrubbing"
    SHARING = "sharing"
    SPENT = "spent"
    STARTING = "starting"
    UNASSIGNED = "unassigned"

    # Of a vendor's plugin behind ours.
    VENDOR_GARBLED = "vendor-garbled"
    VENDOR_HUNG = "vendor-hung"
    VENDOR_REFUSED = "vendor-refused"

    # Of the sockets, before the engine is asked.
    UNEXPECTED = "unexpected"
    UNKNOWN_CALLER = "unknown-caller"
    UNKNOWN_METHOD = "unknown-method"
    WRONG_SOCKET = "wrong-socket"
    WRONG_USER = "wrong-user"


NOT_OF_THE_ENGINE = frozenset(
    {
        ErrorCode.UNEXPECTED,
        ErrorCode.UNKNOWN_CALLER,
        ErrorCode.UNKNOWN_METHOD,
        ErrorCode.VENDOR_GARBLED,
        ErrorCode.VENDOR_HUNG,
        ErrorCode.VENDOR_REFUSED,
        ErrorCode.WRONG_SOCKET,
        ErrorCode.WRONG_USER,
    }
)
"""Codes of the sockets and of the plugin; no hand-over ends with one inside the service."""
