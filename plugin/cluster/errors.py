"""What the API server's refusals mean to whoever asked, split by what is done next.

::

    ClusterError
    ├── Later       away, slow, signed out, or its answer makes no sense: the same again after a pause
    │   └── Busy      it answered, and asks for patience, perhaps for this one request only
    ├── Denied      the role does not allow it: a long pause, because a person must act first
    ├── Exists      the object is there already, or is another one than was meant
    ├── Missing     the object, or its namespace, is not there
    └── Rejected    the request itself is refused: sending it again changes nothing

None of these is a :class:`scrubber.domain.errors.ScrubberError`: those end the plugin, and no answer of the API server does.
"""

from __future__ import annotations

__all__ = [
    "ApiBusy",
    "ApiConflict",
    "ApiForbidden",
    "ApiInvalidRequest",
    "ApiNotFound",
    "ApiUnavailable",
    "ClusterError",
]


class ClusterError(Exception):
    """Base of the above.

    Args:
        message: one sentence for the plugin's log.
        retry_after: seconds that the API server asks for; 0 when it named none.
    """

    def __init__(self, message: str, *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ApiUnavailable(ClusterError):
    """Nothing is wrong with the request."""


class ApiBusy(ApiUnavailable):
    """429, also of a disruption budget; 500 and above."""


class ApiForbidden(ClusterError):
    """403. A namespace that is being deleted answers so, too."""


class ApiConflict(ClusterError):
    """409."""


class ApiNotFound(ClusterError):
    """404."""


class ApiInvalidRequest(ClusterError):
    """400, 413, 422 and their like."""
