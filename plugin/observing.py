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
    "Deferred",
    "GateObserver",
    "KubeletObserver",
    "Nobody",
    "Observer",
    "RegistrationObserver",
    "ServiceObserver",
    "StreamObserver",
]


class ServiceObserver(Protocol):
    def service(self, up: bool) -> None:
        """Whether the scrub service answers; may be told again."""
        ...


class GateObserver(Protocol):
    def refused(self, code: str) -> None:
        """A start was refused, with this code of a :class:`scrubber.domain.errors.ScrubberError`."""
        ...


class RegistrationObserver(Protocol):
    def registered(self, resource: str, now: bool) -> None:
        """Whether the kubelet has the resource of us; False also when it is first tried."""
        ...

    def attempted(self, resource: str, way: str, outcome: str) -> None:
        """``way``: watcher or classic; ``outcome``: ok (the kubelet has opened its stream), refused or failed."""
        ...

    def ended(self, resource: str, why: str) -> None:
        """A registration, or the wait for one, is over: the name of a member of :class:`plugin.kubelet.Over`."""
        ...


class StreamObserver(Protocol):
    def stream(self, resource: str, opened: bool) -> None:
        """A ``ListAndWatch`` stream was opened, or is over."""
        ...

    def listed(self, resource: str) -> None:
        """A full list was sent."""
        ...


class CallObserver(Protocol):
    def answered(self, method: str, code: str, seconds: float) -> None:
        """A call of the kubelet's was answered. ``method``: without its service; ``code``: gRPC's name, in capitals."""
        ...


class KubeletObserver(RegistrationObserver, StreamObserver, CallObserver, Protocol):
    """All that is to be told about a kubelet."""


class ClusterObserver(Protocol):
    def wrote(self, what: str, ok: bool) -> None:
        """The API server took, or did not take: ``event``, ``condition``, ``label`` or ``eviction``."""
        ...


class Observer(ServiceObserver, GateObserver, KubeletObserver, ClusterObserver, Protocol):
    """Everything that the plugin's parts tell."""


class Nobody:
    """Observes everything, and makes nothing of it."""

    def service(self, up: bool) -> None: ...
    def refused(self, code: str) -> None: ...
    def registered(self, resource: str, now: bool) -> None: ...
    def attempted(self, resource: str, way: str, outcome: str) -> None: ...
    def ended(self, resource: str, why: str) -> None: ...
    def stream(self, resource: str, opened: bool) -> None: ...
    def listed(self, resource: str) -> None: ...
    def answered(self, method: str, code: str, seconds: float) -> None: ...
    def wrote(self, what: str, ok: bool) -> None: ...


class Deferred:
    """Keeps what it is told until there is an observer to pass it to, and passes it on from then on.

    Attributes:
        any_registration: set once the kubelet has had a resource.
    """

    def __init__(self) -> None:
        self.any_registration = asyncio.Event()
        self._observer: Observer | None = None
        self._kept: list[Callable[[Observer], None]] = []

    def pass_on_to(self, observer: Observer) -> None:
        """Tell ``observer`` everything that was kept, in its order."""
        kept, self._kept, self._observer = self._kept, [], observer
        for fact in kept:
            fact(observer)

    def _tell(self, fact: Callable[[Observer], None]) -> None:
        if self._observer is None:
            self._kept.append(fact)
        else:
            fact(self._observer)

    def service(self, up: bool) -> None:
        self._tell(lambda observer: observer.service(up))

    def refused(self, code: str) -> None:
        self._tell(lambda observer: observer.refused(code))

    def registered(self, resource: str, now: bool) -> None:
        if now:
            self.any_registration.set()
        self._tell(lambda observer: observer.registered(resource, now))

    def attempted(self, resource: str, way: str, outcome: str) -> None:
        self._tell(lambda observer: observer.attempted(resource, way, outcome))

    def ended(self, resource: str, why: str) -> None:
        self._tell(lambda observer: observer.ended(resource, why))

    def stream(self, resource: str, opened: bool) -> None:
        self._tell(lambda observer: observer.stream(resource, opened))

    def listed(self, resource: str) -> None:
        self._tell(lambda observer: observer.listed(resource))

    def answered(self, method: str, code: str, seconds: float) -> None:
        self._tell(lambda observer: observer.answered(method, code, seconds))

    def wrote(self, what: str, ok: bool) -> None:
        self._tell(lambda observer: observer.wrote(what, ok))
