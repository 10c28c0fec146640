"""The node's own record in the ledger: requests to leave the driver alone.

While there is one, the node is yielded: no process of the service uses the driver, and every device is withheld and
dirty. The requests are durable, so that a service that is restarted meanwhile does not open the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

__all__ = ["NodeRecord", "YieldRequest", "YieldRequester"]


_MAX_OVERRIDDEN = 16
"""Overridden reasons that are kept, the newest ones: plugins may have been renamed."""


class YieldRequester(StrEnum):
    """Who requests that the node be yielded: operators and the service have one request each, as has each plugin."""

    OPERATOR = "operator"
    PLUGIN = "plugin"
    """A device plugin, for a label of its node."""
    SERVICE = "service"
    """This service, while another one resets a device."""


@dataclass(frozen=True, slots=True)
class YieldRequest:
    """A request to leave the driver alone; ``since`` is in wall-clock seconds. ``actor`` names the plugin, or the operator."""

    requester: YieldRequester
    reason: str
    actor: str
    since: float

    def same_requester(self, other: YieldRequest) -> bool:
        """Return whether one of the two replaces the other; operators share one request."""
        if self.requester is not YieldRequester.PLUGIN:
            return other.requester is self.requester
        return (self.requester, self.actor) == (other.requester, other.actor)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """The requests in effect, oldest first.

    Attributes:
        overridden: by plugin, its reason when an operator ended its request: the same reason of it requests nothing.
    """

    yields: tuple[YieldRequest, ...] = ()
    overridden: tuple[tuple[str, str], ...] = ()

    @property
    def is_yielded(self) -> bool:
        return bool(self.yields)

    def of(self, requester: YieldRequester) -> tuple[YieldRequest, ...]:
        """Return the requests of ``requester``: at most one of the operators and of the service."""
        return tuple(each for each in self.yields if each.requester is requester)

    @property
    def starts(self) -> Mapping[YieldRequester, float]:
        """Each requester that has a request, and when its first one was made."""
        requesters = {each.requester for each in self.yields}
        return {requester: min(each.since for each in self.of(requester)) for requester in requesters}

    def with_request(self, request: YieldRequest) -> NodeRecord:
        """Return the record with ``request`` in place of an earlier one of the same requester.

        It is unchanged where that request is in effect, or is a plugin's and an operator has overridden its reason.
        """
        by_plugin = request.requester is YieldRequester.PLUGIN
        if by_plugin and (request.actor, request.reason) in self.overridden:
            return self
        earlier = next((each for each in self.yields if each.same_requester(request)), None)
        if earlier is not None and earlier.reason == request.reason:
            return self
        since = request.since if earlier is None else earlier.since
        others = tuple(each for each in self.yields if each is not earlier)
        overridden = self._overridden_without(request.actor) if by_plugin else self.overridden
        return NodeRecord((*others, replace(request, since=since)), overridden)

    def without(self, requester: YieldRequester) -> NodeRecord:
        """Return the record without the request of ``requester``: the operators, or the service."""
        return replace(self, yields=tuple(each for each in self.yields if each.requester is not requester))

    def without_plugin(self, plugin: str) -> NodeRecord:
        """Return the record without the request of ``plugin``, whose reason is no longer overridden."""
        ended = [each for each in self.of(YieldRequester.PLUGIN) if each.actor == plugin]
        yields = tuple(each for each in self.yields if each not in ended)
        return NodeRecord(yields, self._overridden_without(plugin))

    def without_any(self) -> NodeRecord:
        """Return the record without requests, as an operator ends them: the reasons of plugins are overridden."""
        plugins = self.of(YieldRequester.PLUGIN)
        ended = {each.actor for each in plugins}
        kept = tuple(each for each in self.overridden if each[0] not in ended)
        return NodeRecord((), (*kept, *((each.actor, each.reason) for each in plugins))[-_MAX_OVERRIDDEN:])

    def _overridden_without(self, plugin: str) -> tuple[tuple[str, str], ...]:
        return tuple(each for each in self.overridden if each[0] != plugin)
