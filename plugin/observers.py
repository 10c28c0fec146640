"""Observer protocols for the metrics of the plugin.

Invariant: each part of the plugin depends only on the few events that it reports, not on how they are used. An observer
never raises and never blocks; :class:`NullObserver` is the default.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

__all__ = [
    "AgentPauseObserver",
    "CallObserver",
    "ClusterObserver",
    "DeferredObserver",
    "GateObserver",
    "HealthEventObserver",
    "KubeletObserver",
    "NullObserver",
    "PluginObserver",
    "RegistrationObserver",
    "ServiceObserver",
    "StreamObserver",
]


class ServiceObserver(Protocol):
    def on_service_status(self, up: bool) -> None:
        """Report whether the scrub service responds; may be repeated with the same value."""
        ...


class GateObserver(Protocol):
    def on_start_refused(self, code: str) -> None:
        """A start was refused, with this code of a :class:`scrubber.domain.errors.ScrubberError`."""
        ...


class RegistrationObserver(Protocol):
    def on_registration_status(self, resource: str, registered: bool) -> None:
        """Report whether the resource is registered with the kubelet; False also before the first attempt."""
        ...

    def on_registration_attempt(self, resource: str, mode: str, outcome: str) -> None:
        """``mode``: watcher or classic; ``outcome``: ok (the kubelet has opened its stream), refused or failed."""
        ...

    def on_registration_end(self, resource: str, reason: str) -> None:
        """A registration or the wait for one ended: label of :class:`plugin.kubelet.registration.RegistrationEnd`."""
        ...

    def on_resource_dropped(self, resource: str) -> None:
        """The plugin no longer tries to keep the resource registered."""
        ...


class StreamObserver(Protocol):
    def on_stream_status(self, resource: str, opened: bool) -> None:
        """A ``ListAndWatch`` stream was opened or has ended."""
        ...

    def on_list_sent(self, resource: str) -> None:
        """A full list was sent."""
        ...


class CallObserver(Protocol):
    def on_call_finished(self, method: str, code: str, seconds: float) -> None:
        """A call of the kubelet was answered. ``method``: without its service; ``code``: gRPC's name, in capitals."""
        ...


class KubeletObserver(RegistrationObserver, StreamObserver, CallObserver, Protocol):
    """All events about a kubelet."""


class ClusterObserver(Protocol):
    def on_cluster_write(self, kind: str, ok: bool) -> None:
        """The API server accepted or rejected a write: ``event``, ``condition``, ``label``, ``taint``, ``eviction``, ``lease``."""
        ...


class AgentPauseObserver(ClusterObserver, Protocol):
    def on_agent_pause(self, outcome: str) -> None:
        """Agents were ``paused`` or ``restored``, or an attempt to pause them ``failed``."""
        ...


class HealthEventObserver(Protocol):
    def on_health_events(self, outcome: str, count: int) -> None:
        """``count`` events for NVSentinel were ``sent``, or ``dropped``, or an attempt to send them ``failed``."""
        ...


class PluginObserver(ServiceObserver, GateObserver, KubeletObserver, AgentPauseObserver, HealthEventObserver, Protocol):
    """All events of the plugin."""


class NullObserver:
    """Ignores all events."""

    def on_service_status(self, up: bool) -> None: ...
    def on_start_refused(self, code: str) -> None: ...
    def on_registration_status(self, resource: str, registered: bool) -> None: ...
    def on_registration_attempt(self, resource: str, mode: str, outcome: str) -> None: ...
    def on_registration_end(self, resource: str, reason: str) -> None: ...
    def on_resource_dropped(self, resource: str) -> None: ...
    def on_stream_status(self, resource: str, opened: bool) -> None: ...
    def on_list_sent(self, resource: str) -> None: ...
    def on_call_finished(self, method: str, code: str, seconds: float) -> None: ...
    def on_cluster_write(self, kind: str, ok: bool) -> None: ...
    def on_agent_pause(self, outcome: str) -> None: ...
    def on_health_events(self, outcome: str, count: int) -> None: ...


class DeferredObserver:
    """Stores events until an observer is set, then forwards them.

    Attributes:
        registered_once: set once a resource has been registered with the kubelet.
    """

    def __init__(self) -> None:
        self.registered_once = asyncio.Event()
        self._observer: PluginObserver | None = None
        self._pending: list[Callable[[PluginObserver], None]] = []

    def forward_to(self, observer: PluginObserver) -> None:
        """Forward all stored events to ``observer`` in their order, and all later ones at once."""
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

    def on_resource_dropped(self, resource: str) -> None:
        self._forward(lambda observer: observer.on_resource_dropped(resource))

    def on_stream_status(self, resource: str, opened: bool) -> None:
        self._forward(lambda observer: observer.on_stream_status(resource, opened))

    def on_list_sent(self, resource: str) -> None:
        self._forward(lambda observer: observer.on_list_sent(resource))

    def on_call_finished(self, method: str, code: str, seconds: float) -> None:
        self._forward(lambda observer: observer.on_call_finished(method, code, seconds))

    def on_cluster_write(self, kind: str, ok: bool) -> None:
        self._forward(lambda observer: observer.on_cluster_write(kind, ok))

    def on_agent_pause(self, outcome: str) -> None:
        self._forward(lambda observer: observer.on_agent_pause(outcome))

    def on_health_events(self, outcome: str, count: int) -> None:
        self._forward(lambda observer: observer.on_health_events(outcome, count))
