"""Runs what a command asks until it is answered or interrupted, and finds the device that a person means."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["resolve_device", "run"]

_T = TypeVar("_T")


class _Interrupted(Exception):
    """A person pressed Ctrl-C."""


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """What ``work`` answers. An interrupt cancels it, once for each; work that answers all the same is answered.

    The handler that ``asyncio.run`` installs runs when the main thread wakes next, and a signal that the kernel gave to
    another thread (gRPC has some) does not wake it: the loop's own handler does.

    Raises:
        KeyboardInterrupt: an interrupt came first, and ``work`` ended by it.
    """
    # gRPC's core writes lines of its own to standard error when a service goes away; it reads this when it is loaded.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
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
    """The one of ``candidates`` that ``name`` names: its UUID, a unique prefix of it, or its index.

    What the service does with a name, done here for devices that were listed already.

    Raises:
        InvalidRequest: no device, or more than one, answers to the name.
    """
    from scrubber.domain.device import Device, find_device

    by_id = {each.id: each for each in candidates}
    devices = (Device(each.id, each.index, each.model, each.memory_bytes) for each in by_id.values())
    return by_id[find_device(devices, name).id]
