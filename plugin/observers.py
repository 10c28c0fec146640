"""What the plugin's parts tell whoever counts: facts, as they happen, and nothing is asked back.

Promise: a part knows the few facts of its own, and none of what becomes of them. An observer never raises and never
waits; where none is given, nobody is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

__all__ = [
    "CallObserver",
    "ClusterObserver",
    "DeferredObserver",
    "GateObserver",
    "KubeletObserver",
    "NullObserver",
    "PluginObserver",
    "RegistrationObserver",
    "ServiceObserver",
    "StreamObserver",
]


class ServiceObserver(Protocol):
    def on_service_status(self, up: bool) -> None:
        """Whether the scrub service answers; may be told again."""
        ...


class GateObserver(Protocol):
    def on_start_refused(self, code: str) -> None:
        """A start was refused, with this code of a :class:`scrubber.domain.errors.ScrubberError`."""
        ...


class RegistrationObserver(Protocol):
    def on_registration_status(self, resource: str, registered: bool) -> None:
        """Whether the kubelet has the resource of us; False also when it is first tried."""
        ...

    def on_registration_attempt(self, resource: str, mode: str, outcome: str) -> None:
        """``mode``: watcher or classic; ``outcome``: ok (the kubelet has opened its stream), refused or failed."""
        ...

    def on_registration_end(self, resource: str, reason: str) -> None:
        """A registration, or the wait for one, is over: the label of a :class:`plugin.kubelet.registration.RegistrationEnd`."""
        ...


class StreamObserver(Protocol):
    def on_stream_status(self, resource: str, opened: bool) -> None:
        """A ``ListAndWatch`` stream was opened, or is over."""
        ...

    def on_list_sent(self, resource: str) -> None:
        """A full list was sent."""
        ...


class CallObserver(Protocol):
    def on_call_finished(self, method: str, code: str, seconds: float) -> None:
        """A call of the kubelet's was answered. ``method``: without its service; ``code``: gRPC's name, in capitals."""
        ...


class KubeletObserver(RegistrationObserver, StreamObserver, CallObserver, Protocol):
    """All that is to be told about a kubelet."""


class ClusterObserver(Protocol):
    def on_cluster_write(self, kind: str, ok: bool) -> None:
        """The API server took, or did not take: ``event``, ``condition``, ``label`` or ``eviction``."""
        ...


class PluginObserver(ServiceObserver, GateObserver, KubeletObserver, ClusterObserver, Protocol):
    """Everything that the plugin's parts tell."""


class NullObserver:
    """Observes everything, and makes nothing of it."""

    def on_service_status(self, up: bool) -> None: ...
    def on_start_refused(self, code: str) -> None: ...
    def on_registration_status(self, resource: str, registered: bool) -> None: ...
    def on_registration_attempt(self, resource: str, mode: str, outcome: str) -> None: ...
    def on_registration_end(self, resource: str, reason: str) -> None: ...
    def on_stream_status(self, resource: str, opened: bool) -> None: ...
    def on_list_sent(self, resource: str) -> None: ...
    def on_call_finished(self, method: str, code: str, seconds: float) -> None: ...
    def on_cluster_write(self, kind: str, ok: bool) -> None: ...


class DeferredObserver:
    """Keeps what it is told until there is an observer to pass it to, and passes it on from then on.

    Attributes:
        registered_once: set once the kubelet has had a resource.
    """

    def __init__(self) -> None:
        self.registered_once = asyncio.Event()
        self._observer: PluginObserver | None = None
        self._pending: list[Callable[[PluginObserver], None]] = []

    def forward_to(self, observer: PluginObserver) -> None:
        """Tell ``observer`` everything that was kept, in its order."""
        kept, self._pending, self._observer = self._pending, [], observer
        for fact in kept:
            fact(observer)

    def _forward(self, fact: Callable[[PluginObserver], None]) -> None:
        if self._observer is None:
            self._pending.append(fact)
        else:
            fact(self._observer)

    def on_service_status(self, up: bool) -> None:
        self._forward(lambda observer: observer.on_service_status(up))

    def on_start_refused(self, code: str) -> None:
        self._forward(lambda observer: observer.on_start_refused(code))

    def on_registration_status(self, resource: str, registered: bool) -> None:
        if registered:
            self.registered_once.set()
        self._forward(lambda observer: observer.on_registration_status(resource, registered))

    def on_registration_attempt(self, resource: str, mode: str, outcome: str) -> None:
        self._forward(lambda observer: observer.on_registration_attempt(resource, mode, outcome))

    def on_registration_end(self, resource: str, reason: str) -> None:
        self._forward(lambda observer: observer.on_registration_end(resource, reason))

    def on_stream_status(self, resource: str, opened: bool) -> None:
        self._forward(lambda observer: observer.on_stream_status(resource, opened))

    def on_list_sent(self, resource: str) -> None:
        self._forward(lambda observer: observer.on_list_sent(resource))

    def on_call_finished(self, method: str, code: str, seconds: float) -> None:
        self._forward(lambda observer: observer.on_call_finished(method, code, seconds))

    def on_cluster_write(self, kind: str, ok: bool) -> None:
        self._forward(lambda observer: observer.on_cluster_write(kind, ok))
