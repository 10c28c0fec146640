"""What the keeper of one device may ask of its node: who else is there, and what all of them together allow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from scrubber.domain.record import DeviceRecord
from scrubber.engine.breaker import CircuitBreaker

__all__ = ["Neighbourhood"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhood:
    """One node's.

    Attributes:
        changed: to be called after every change that somebody may want to see.
        still: keeps other devices out of use while it is open (:meth:`scrubber.engine.node.Node.still`).
        resources: the kubelet's resources under which a device is handed out, as far as anybody has said.
        records: those of all devices.
        breaker: what recoveries may still do.
        maintenance: held by the one device that is scrubbed for maintenance.
    """

    changed: Callable[[], None]
    still: Callable[[Iterable[str]], AbstractAsyncContextManager[None]]
    resources: Callable[[str], frozenset[str]]
    records: Callable[[], Collection[DeviceRecord]]
    breaker: CircuitBreaker
    maintenance: asyncio.Lock = field(default_factory=asyncio.Lock)
