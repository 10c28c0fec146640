"""Faults of the API server on request, and the log of the requests that it received.

Promise: a fault meets the requests that it names and no others, and every request of a client is in the log with its
outcome, also one that gets no answer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from scrubber.emulator.cluster.http import HttpRequest, HttpResponse
from scrubber.emulator.cluster.status import StatusError


class Silence(Enum):
    """How a request is not answered."""

    HANG = "hang"
    """The connection stays open without an answer."""
    DROP = "drop"
    """The connection is closed without an answer."""
    LOSE = "lose"
    """The request takes effect, and the connection stays open without an answer."""


Answer = StatusError | HttpResponse | bytes | Silence
"""What a client receives instead of the operation's result; bytes are all that is sent on the connection."""


def unauthorized() -> StatusError:
    """Return the refusal of an unknown or expired token."""
    return StatusError(401, "Unauthorized", "Unauthorized")


def too_many_requests(retry_after: int) -> StatusError:
    """Return the refusal of a server that is overloaded; ``retry_after`` in seconds."""
    message = "the server has received too many requests and has asked us to try again later"
    return StatusError(429, "TooManyRequests", message, retry_after=retry_after)


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One request of a client, in the words of a role."""

    at: float
    """Seconds of the event loop's clock."""
    account: str
    """Empty for an unknown token."""
    verb: str
    """``get``, ``list``, ``watch``, ``create``, ``update``, ``patch``, ``delete`` or ``deletecollection``."""
    resource: str
    """With the subresource: ``resourceclaims/status``."""
    namespace: str
    name: str
    code: int
    """HTTP status; 0 for no answer."""
    received_bytes: int
    """Length of the request's body."""
    sent_bytes: int
    """Length of the answer's body; of a watch 0."""
    http: HttpRequest = field(repr=False)

    @property
    def operation(self) -> str:
        """The request as a role names it, such as ``update resourceclaims/status``."""
        return f"{self.verb} {self.resource}"

    @property
    def body(self) -> Any:
        """The body, as JSON; an empty object without one, or one that is no JSON."""
        try:
            return json.loads(self.http.body or b"{}")
        except ValueError:
            return {}


Interceptor = Callable[[ApiRequest], Answer | None]
"""Returns what happens to a request instead of the operation, or None. Its ``code`` is 0 yet."""


@dataclass(slots=True)
class RequestLog:
    """Every request in the order of the answers; a watch is listed at its start."""

    requests: list[ApiRequest] = field(default_factory=list)

    def of(self, operation: str, *, account: str | None = None) -> Sequence[ApiRequest]:
        """Return the requests of one operation, such as ``patch nodes``, of one account or of all."""
        return [each for each in self.requests if each.operation == operation and account in (None, each.account)]

    def counts(self, *, since: float = 0.0, account: str | None = None) -> Counter[str]:
        """Return the number of requests by operation, from the time ``since`` of the event loop's clock."""
        return Counter(each.operation for each in self.requests if each.at >= since and account in (None, each.account))


@dataclass(slots=True, eq=False)
class ApiFault:
    """What happens to requests instead of the operation. An empty field means any."""

    answer: Answer
    verb: str = ""
    resource: str = ""
    name: str = ""
    account: str = ""
    times: int | None = None
    """How many requests it still meets; None: until it is removed."""

    def meets(self, verb: str, resource: str, name: str, account: str) -> bool:
        """Whether a request meets this fault; counts it."""
        given = ((self.verb, verb), (self.resource, resource), (self.name, name), (self.account, account))
        if self.times == 0 or any(expected not in ("", actual) for expected, actual in given):
            return False
        if self.times is not None:
            self.times -= 1
        return True
