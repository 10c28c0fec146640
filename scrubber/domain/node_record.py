"""The node's own record in the ledger: requests to leave the driver alone.

While there is one, the node is yielded: no process of the service uses the driver, and every device is withheld and
dirty. The requests are durable, so that a service that is restarted meanwhile does not open the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

__all__ = ["NodeRecord", "YieldRequest", "YieldRequester"]


class YieldRequester(StrEnum):
    """Who requested that the node be yielded. Each has at most one request, and ends its own."""

    OPERATOR = "operator"
    PLUGIN = "plugin"
    """The device plugin, for a label of its node."""


@dataclass(frozen=True, slots=True)
class YieldRequest:
    """A request to leave the driver alone; ``since`` is in wall-clock seconds."""

    requester: YieldRequester
    reason: str
    actor: str
    since: float


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """The requests in effect, oldest first.

    Attributes:
        overridden: the plugin's reason when an operator ended its request: the same reason requests nothing; empty if
            there is none.
    """

    yields: tuple[YieldRequest, ...] = ()
    overridden: str = ""

    @property
    def is_yielded(self) -> bool:
        return bool(self.yields)

    def request_of(self, requester: YieldRequester) -> YieldRequest | None:
        """Return the request of ``requester``; None when it has none."""
        return next((each for each in self.yields if each.requester is requester), None)

    def with_request(self, request: YieldRequest) -> NodeRecord:
        """Return the record with ``request`` in place of an earlier one of the same requester.

        It is unchanged where that request is in effect, or is the plugin's and an operator has overridden its reason.
        """
        earlier, by_plugin = self.request_of(request.requester), request.requester is YieldRequester.PLUGIN
        if (earlier is not None and earlier.reason == request.reason) or (
            by_plugin and self.overridden == request.reason
        ):
            return self
        since = request.since if earlier is None else earlier.since
        following = (*self._others(request.requester), replace(request, since=since))
        return NodeRecord(following, "" if by_plugin else self.overridden)

    def without(self, *requesters: YieldRequester) -> NodeRecord:
        """Return the record without the requests of ``requesters``.

        The plugin ends only its own, and thereby the override of its reason. So where the operator's is ended too, it
        is an operator who ends the plugin's, and overrides its reason.
        """
        ended, overridden = self.request_of(YieldRequester.PLUGIN), self.overridden
        if set(requesters) == {YieldRequester.PLUGIN}:
            overridden = ""
        elif YieldRequester.PLUGIN in requesters and ended is not None:
            overridden = ended.reason
        return NodeRecord(self._others(*requesters), overridden)

    def _others(self, *requesters: YieldRequester) -> tuple[YieldRequest, ...]:
        return tuple(each for each in self.yields if each.requester not in requesters)
