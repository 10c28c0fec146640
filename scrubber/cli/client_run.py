"""Requests to the service: runs them until they are answered or interrupted, and resolves device names."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from scrubber.cli.startup import silence_grpc_logs
from scrubber.domain.errors import NotReady, Unavailable

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.api.client import AdminClient

__all__ = ["fetch_device", "resolve_device", "retried", "run", "run_admin_action", "start_job"]

_T = TypeVar("_T")

_RETRY_PAUSE = 1.0
_LONGEST_CALL = 60.0
"""Seconds after which a waiting call is made again, so that a service that is away is noticed."""


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


async def retried(call: Callable[[float], Awaitable[_T]], wait: float) -> _T:
    """Return the result of ``call``; repeat it for ``wait`` seconds while it is refused for now or not answered.

    Args:
        call: called with the seconds that are left, at most a minute.
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            return await call(min(max(0.0, deadline - time.monotonic()), _LONGEST_CALL))
        except (NotReady, Unavailable):
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(min(_RETRY_PAUSE, max(0.0, deadline - time.monotonic())))


async def start_job(
    socket: Path, job: pb.Job, devices: Sequence[str], *, count: int = 0, wait: float
) -> pb.StartJobResponse:
    """Have ``devices``, or any ``count`` of them, handed over to ``job`` within ``wait`` seconds."""
    from scrubber.api.client import AdminClient

    async with AdminClient(socket) as client:
        return await retried(
            lambda left: client.start_job(job, devices, count=count, wait_seconds=max(left, _RETRY_PAUSE)), wait
        )
