"""Completers: the values that Tab offers for a parameter, as the parameter's ``autocompletion``.

Invariants: an answer comes soon or not at all, and an unavailable service is silently ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["complete_backend", "complete_certificate", "complete_device", "complete_event", "complete_policy"]

_SERVICE_TIMEOUT = "0.3"
"""Seconds for the service to list its devices, unless ``_SCRUBBER_COMPLETE_TIMEOUT`` overrides them."""

_BUNDLED_POLICIES = ("default", "strict", "trusted")


def complete_device(ctx: typer.Context) -> Iterator[tuple[str, str]]:
    """Yield the indexes and UUIDs of the devices, with their states."""
    devices = _fetch_devices(ctx)
    yield from ((each.index, f"{each.state}, {each.id}") for each in devices)
    yield from ((each.id, f"{each.state}, index {each.index}") for each in devices)


def complete_certificate(ctx: typer.Context) -> Iterator[tuple[str, str]]:
    """Yield the ids of the devices' certificates."""
    for each in _fetch_devices(ctx):
        if each.HasField("certificate"):
            yield each.certificate.id, f"of device {each.index}, {each.state}"


def complete_event() -> Iterator[tuple[str, str]]:
    """Yield the names of audit events, and their prefixes."""
    from scrubber.observability.registry.audit_events import AUDIT_EVENTS, EVENT_PREFIXES

    yield from ((each, "all events with this prefix") for each in EVENT_PREFIXES)
    yield from ((each, "") for each in AUDIT_EVENTS)


def complete_backend() -> Sequence[str]:
    """Return the names of the backends."""
    from scrubber.backends import BACKENDS

    return tuple(BACKENDS)


def complete_policy() -> Sequence[str]:
    """Return the names of the bundled policies."""
    return _BUNDLED_POLICIES


def _fetch_devices(ctx: typer.Context) -> Sequence[pb.Device]:
    """Return the devices of the service; none if it does not respond in time."""
    import asyncio

    from scrubber.api.client import ReadClient
    from scrubber.domain.errors import ScrubberError

    async def fetch(socket: Path) -> Sequence[pb.Device]:
        timeout = float(os.environ.get("_SCRUBBER_COMPLETE_TIMEOUT", _SERVICE_TIMEOUT))
        async with asyncio.timeout(timeout), ReadClient(socket) as client:
            return (await client.devices()).devices

    socket: Path | None = ctx.params.get("socket")
    if socket is None:  # an invalid one on the command line
        return ()
    try:
        return asyncio.run(fetch(socket))
    except (ScrubberError, OSError):  # including TimeoutError
        return ()
