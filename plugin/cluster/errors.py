"""Errors of requests to the API server, grouped by what the caller does next.

::

    ClusterError
    ├── ApiUnavailable     away, slow, rejects the credentials, or malformed response: repeat after a pause
    │   ├── ApiAnswerTooLong  the response is longer than its limit: ask for less at once
    │   └── ApiBusy        it responded and asks to wait, perhaps for this one request only
    ├── ApiForbidden       the role does not allow it: a long pause, because an administrator must act first
    ├── ApiConflict        the object exists already, or is not the intended one
    ├── ApiNotFound        the object or its namespace does not exist
    └── ApiInvalidRequest  the request itself is refused: sending it again changes nothing

None of these is a :class:`scrubber.domain.errors.ScrubberError`: those stop the plugin, and no response of the API
server does.
"""

from __future__ import annotations

__all__ = [
    "ApiAnswerTooLong",
    "ApiBusy",
    "ApiConflict",
    "ApiForbidden",
    "ApiInvalidRequest",
    "ApiNotFound",
    "ApiUnavailable",
    "ClusterError",
]


class ClusterError(Exception):
    """Base class of the errors above.

    Args:
        message: one line for the plugin's log.
        retry_after: seconds that the API server asks to wait; 0 when it gave none.
    """

    def __init__(self, message: str, *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ApiUnavailable(ClusterError):
    """The request itself is valid."""


class ApiAnswerTooLong(ApiUnavailable):
    """The response is longer than its limit."""


class ApiBusy(ApiUnavailable):
    """Status 429, including a disruption budget; 500 and above."""


class ApiForbidden(ClusterError):
    """Status 403, also for a namespace that is being deleted."""


class ApiConflict(ClusterError):
    """Status 409."""


class ApiNotFound(ClusterError):
    """Status 404; or 410, for a version of a list that the API server no longer has."""


class ApiInvalidRequest(ClusterError):
    """Status 400, 413, 422 and similar."""
