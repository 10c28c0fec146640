"""Refusals of the API server: HTTP code, reason, message and causes, as a ``Status`` object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FieldError:
    """One cause of a refusal, for one field."""

    field: str
    """Path of the field, such as ``spec.devices[3].name``."""
    reason: str
    """``FieldValueInvalid``, ``FieldValueRequired``, ``FieldValueForbidden``, ..."""
    message: str


class StatusError(Exception):
    """A request was refused. ``retry_after``: seconds, for the header ``Retry-After``."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        causes: Sequence[FieldError] = (),
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.causes = tuple(causes)
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The ``Status`` object that the client receives."""
        details: dict[str, Any] = {}
        if self.causes:
            details["causes"] = [
                {"reason": each.reason, "message": each.message, "field": each.field} for each in self.causes
            ]
        if self.retry_after is not None:
            details["retryAfterSeconds"] = self.retry_after
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "details": details,
            "code": self.code,
        }


def invalid(qualified_kind: str, name: str, causes: Sequence[FieldError]) -> StatusError:
    """Return the refusal of an object with invalid fields."""
    problems = [f"{each.field}: {each.message}" for each in causes]
    text = problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]"
    return StatusError(422, "Invalid", f'{qualified_kind} "{name}" is invalid: {text}', causes=causes)
