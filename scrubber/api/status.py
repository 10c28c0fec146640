"""Errors and gRPC statuses, in both directions.

Promise: an error leaves the service as a status and arrives at its client as the same class with the same code; and on
the plugin's socket, whose answers end in a pod's status, only the sentence that any tenant may read is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import grpc

from scrubber.domain import errors
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import (
    Away,
    BadConfiguration,
    BeingReset,
    DeviceFault,
    Fatal,
    Held,
    InvalidRequest,
    LedgerFailure,
    Lost,
    NotPermitted,
    NotReady,
    Quarantined,
    Refused,
    Retry,
    ScrubberError,
    SecondInstance,
    Stuck,
    Unreadable,
)

__all__ = ["CLASS_KEY", "CODES", "CODE_KEY", "UNEXPECTED", "Status", "error_of", "status_of"]

CLASS_KEY = "scrubber-error"
"""Trailing metadata: name of the class in :mod:`scrubber.domain.errors`."""
CODE_KEY = "scrubber-code"
"""Trailing metadata: the error's ``code``."""

CODES: Mapping[type[ScrubberError], grpc.StatusCode] = {
    ScrubberError: grpc.StatusCode.INTERNAL,
    Retry: grpc.StatusCode.UNAVAILABLE,
    NotReady: grpc.StatusCode.UNAVAILABLE,
    Away: grpc.StatusCode.UNAVAILABLE,
    BeingReset: grpc.StatusCode.UNAVAILABLE,
    Refused: grpc.StatusCode.FAILED_PRECONDITION,
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Quarantined: grpc.StatusCode.FAILED_PRECONDITION,
    Held: grpc.StatusCode.FAILED_PRECONDITION,
    NotPermitted: grpc.StatusCode.PERMISSION_DENIED,
    DeviceFault: grpc.StatusCode.FAILED_PRECONDITION,
    Unreadable: grpc.StatusCode.FAILED_PRECONDITION,
    Stuck: grpc.StatusCode.FAILED_PRECONDITION,
    Lost: grpc.StatusCode.FAILED_PRECONDITION,
    Fatal: grpc.StatusCode.FAILED_PRECONDITION,
    BadConfiguration: grpc.StatusCode.FAILED_PRECONDITION,
    SecondInstance: grpc.StatusCode.FAILED_PRECONDITION,
    LedgerFailure: grpc.StatusCode.FAILED_PRECONDITION,
}

UNEXPECTED = "The scrub service failed to answer; its log on the node says why."
"""All that a caller learns of an exception that nobody foresaw."""

_FOREIGN: Mapping[grpc.StatusCode, type[ScrubberError]] = {
    grpc.StatusCode.UNAVAILABLE: Away,
    grpc.StatusCode.DEADLINE_EXCEEDED: Away,
    grpc.StatusCode.CANCELLED: Away,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidRequest,
    grpc.StatusCode.PERMISSION_DENIED: NotPermitted,
    grpc.StatusCode.UNIMPLEMENTED: Refused,
}
"""Statuses that the library makes by itself, so without our metadata."""

# A status travels in HTTP/2 headers, percent-encoded, and gRPC allows 8 KiB of those: a longer one is lost whole.
_LONGEST_SENTENCE = 2000


@dataclass(frozen=True, slots=True)
class Status:
    """What ``context.abort`` takes."""

    code: grpc.StatusCode
    details: str
    metadata: tuple[tuple[str, str], ...]


def status_of(error: Exception, *, public: bool) -> Status:
    """The status that carries ``error``.

    Args:
        public: the answer may end in a pod's status, so ``error.public`` is sent; else the operator's sentence.
    """
    if not isinstance(error, ScrubberError):
        error = ScrubberError(UNEXPECTED, public=UNEXPECTED, code=ErrorCode.UNEXPECTED)
    known = next(each for each in type(error).__mro__ if each in CODES)
    code = error.code.encode("ascii", "replace").decode()
    sentence = error.public if public else str(error)
    return Status(CODES[known], _fitting(sentence), ((CLASS_KEY, known.__name__), (CODE_KEY, code)))


def error_of(
    code: grpc.StatusCode, details: str | None, metadata: Iterable[tuple[str, str | bytes]], *, public: bool
) -> ScrubberError:
    """The error that a status carries; for a status that the library made, the class that tells what to do about it.

    Args:
        public: the status came over the plugin's socket, so that ``details`` may be shown to any tenant.
    """
    told = {key: value for key, value in metadata if isinstance(value, str)}
    sentence = details or f"The scrub service answered {code.name.lower().replace('_', ' ')}, and nothing else."
    name = told.get(CLASS_KEY)
    if name is None:
        return _FOREIGN.get(code, ScrubberError)(sentence)
    found = getattr(errors, name, ScrubberError) if name in errors.__all__ else ScrubberError
    made: ScrubberError = found(sentence, public=sentence if public else None, code=told.get(CODE_KEY))
    return made


def _fitting(sentence: str) -> str:
    """``sentence`` as UTF-8 that fits into a header. Words of a tenant (a process name, say) may be no text at all."""
    encoded = sentence.encode("utf-8", "replace")
    if len(encoded) <= _LONGEST_SENTENCE:
        return encoded.decode()
    return encoded[:_LONGEST_SENTENCE].decode("utf-8", "ignore") + " …"
