"""What the plugin's parts tell whoever counts: facts, as they happen, and nothing is asked back.

Promise: a part knows the few facts of its own, and none of what becomes of them. An observer never raises and never
waits; where none is given, nobody is told.
"""

from __future__ import annotations

from typing import Protocol

__all__ = [
    "CallObserver",
    "ClusterObserver",
    "GateObserver",
    "KubeletObserver",
    "Nobody",
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
