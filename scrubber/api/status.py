"""Translation between errors and gRPC statuses, in both directions.

Invariants: an error leaves the service as a status and becomes the same class with the same code in the client. On the
plugin's socket, whose responses end up in a pod's status, only the message that any tenant may read is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import grpc

from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import (
    AlreadyRunning,
    BrokenCommand,
    DeviceBusy,
    DeviceFault,
    DeviceLost,
    DriverTimeout,
    FatalError,
    InvalidConfiguration,
    InvalidRequest,
    LedgerFailure,
    NotReady,
    PermissionDenied,
    Quarantined,
    Refused,
    ResetInProgress,
    RetryableError,
    ScrubberError,
    Unavailable,
    Unreadable,
)

__all__ = [
    "CLASS_KEY",
    "CODE_KEY",
    "GRPC_CODES",
    "GRPC_CODES_OF_UNSERVED_METHODS",
    "UNEXPECTED_ERROR_MESSAGE",
    "RpcStatus",
    "error_from_status",
    "status_from_error",
]

CLASS_KEY = "scrubber-error"
"""Trailing metadata: the error's class in :mod:`scrubber.domain.errors`."""
CODE_KEY = "scrubber-code"
"""Trailing metadata: the error's ``code``."""

GRPC_CODES: Mapping[type[ScrubberError], grpc.StatusCode] = {
    ScrubberError: grpc.StatusCode.INTERNAL,
    RetryableError: grpc.StatusCode.UNAVAILABLE,
    NotReady: grpc.StatusCode.UNAVAILABLE,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    BrokenCommand: grpc.StatusCode.UNAVAILABLE,
    ResetInProgress: grpc.StatusCode.UNAVAILABLE,
    Refused: grpc.StatusCode.FAILED_PRECONDITION,
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Quarantined: grpc.StatusCode.FAILED_PRECONDITION,
    DeviceBusy: grpc.StatusCode.FAILED_PRECONDITION,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    DeviceFault: grpc.StatusCode.FAILED_PRECONDITION,
    Unreadable: grpc.StatusCode.FAILED_PRECONDITION,
    DriverTimeout: grpc.StatusCode.FAILED_PRECONDITION,
    DeviceLost: grpc.StatusCode.FAILED_PRECONDITION,
    FatalError: grpc.StatusCode.FAILED_PRECONDITION,
    InvalidConfiguration: grpc.StatusCode.FAILED_PRECONDITION,
    AlreadyRunning: grpc.StatusCode.FAILED_PRECONDITION,
    LedgerFailure: grpc.StatusCode.FAILED_PRECONDITION,
}

UNEXPECTED_ERROR_MESSAGE = "The scrub service failed to answer; see its log on the node."
"""The only text that a caller gets for an unexpected exception."""

GRPC_CODES_OF_UNSERVED_METHODS: Mapping[str, grpc.StatusCode] = {
    ErrorCode.UNKNOWN_METHOD: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.WRONG_SOCKET: grpc.StatusCode.UNIMPLEMENTED,
}
"""What gRPC itself answers for a method that a server does not have; these precede :data:`GRPC_CODES`."""

_LIBRARY_STATUSES: Mapping[grpc.StatusCode, type[ScrubberError]] = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidRequest,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNIMPLEMENTED: Refused,
}
"""Statuses that the library generates itself, without our metadata."""

_CLASSES = {each.__name__: each for each in GRPC_CODES}

# A status is sent in HTTP/2 headers, percent-encoded, and gRPC allows 8 KiB of those: a longer one is lost completely.
_MAX_MESSAGE_BYTES = 2000


@dataclass(frozen=True, slots=True)
class RpcStatus:
    """The arguments of ``context.abort``."""

    code: grpc.StatusCode
    details: str
    metadata: tuple[tuple[str, str], ...]


def status_from_error(error: Exception, *, public: bool) -> RpcStatus:
    """Return the status that represents ``error``.

    Args:
        public: the response may end up in a pod's status, so ``error.public_message`` is sent; else the operator's
            message.
    """
    if not isinstance(error, ScrubberError):
        error = ScrubberError(
            UNEXPECTED_ERROR_MESSAGE, public_message=UNEXPECTED_ERROR_MESSAGE, code=ErrorCode.INTERNAL_ERROR
        )
    known = next(each for each in type(error).__mro__ if each in GRPC_CODES)
    code = error.code.encode("ascii", "replace").decode()
    message = error.public_message if public else str(error)
    status = GRPC_CODES_OF_UNSERVED_METHODS.get(error.code, GRPC_CODES[known])
    return RpcStatus(status, _truncate_message(message), ((CLASS_KEY, known.__name__), (CODE_KEY, code)))


def error_from_status(
    code: grpc.StatusCode, details: str | None, metadata: Iterable[tuple[str, str | bytes]], *, public: bool
) -> ScrubberError:
    """Return the error that a status represents.

    For a status that the library generated, it is the class that fits the caller's next step.

    Args:
        public: the status came over the plugin's socket, so that ``details`` may be shown to any tenant.
    """
    fields = {key: value for key, value in metadata if isinstance(value, str)}
    message = (
        details or f"The scrub service returned the status {code.name.lower().replace('_', ' ')} without a message."
    )
    name = fields.get(CLASS_KEY)
    if name is None:
        return _LIBRARY_STATUSES.get(code, ScrubberError)(message)
    found = _CLASSES.get(name, ScrubberError)
    made: ScrubberError = found(message, public_message=message if public else None, code=fields.get(CODE_KEY))
    return made


def _truncate_message(message: str) -> str:
    """Return ``message`` as UTF-8 that fits into a header. Text from a tenant (a process name) may be invalid UTF-8."""
    encoded = message.encode("utf-8", "replace")
    if len(encoded) <= _MAX_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[:_MAX_MESSAGE_BYTES].decode("utf-8", "ignore") + " …"
