"""Requests to the service: runs them until they are answered or interrupted, and resolves device names."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from scrubber.cli.startup import silence_grpc_logs

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.api.client import AdminClient

__all__ = ["fetch_device", "resolve_device", "run", "run_admin_action"]

_T = TypeVar("_T")


class _Interrupted(Exception):
    """The user pressed Ctrl-C."""


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run ``work`` and return its result.

    Each interrupt cancels it once; if it returns nevertheless, its result counts. The handler that ``asyncio.run``
    installs runs only when the main thread wakes up. A signal that the kernel delivers to another thread (gRPC has
    some) does not wake it; a handler of the event loop does.

    Raises:
        KeyboardInterrupt: an interrupt arrived, and it ended ``work``.
    """
    silence_grpc_logs()
    try:
        return asyncio.run(_run_until_interrupted(work))
    except _Interrupted:
        raise KeyboardInterrupt from None


async def _run_until_interrupted(work: Coroutine[Any, Any, _T]) -> _T:
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise _Interrupted from None
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def resolve_device(candidates: Iterable[pb.Device], name: str) -> pb.Device:
    """Return the one of ``candidates`` that matches ``name``: its UUID, a unique prefix of it, or its index.

    The same lookup as in the service, for devices that were already listed.

    Raises:
        InvalidRequest: no device, or more than one, matches the name.
    """
    from scrubber.domain.device import Device, find_device

    by_id = {each.id: each for each in candidates}
    devices = (Device(each.id, each.index, each.model, each.memory_bytes) for each in by_id.values())
    return by_id[find_device(devices, name).id]


def fetch_device(socket: Path, device: str) -> pb.Device:
    """Return the current state of ``device``; raises :class:`InvalidRequest` unless it matches exactly one."""

    async def fetch() -> pb.Device:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            return resolve_device((await client.devices()).devices, device)

    return run(fetch())


def run_admin_action(socket: Path, action: Callable[[AdminClient], Awaitable[pb.DeviceResponse]]) -> pb.DeviceResponse:
    """Request ``action`` from the service; return the answer, with the device afterwards."""

    async def ask_service() -> pb.DeviceResponse:
        from scrubber.api.client import AdminClient

        async with AdminClient(socket) as client:
            return await action(client)

    return run(ask_service())
