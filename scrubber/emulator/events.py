"""What the emulated kubelet did and when: the raw material of the demo's closing table and of the benchmarks.

Promise: every call to a plugin is recorded with its duration and its outcome as the kubelet's own log would name it,
whether it succeeded, failed, ran into its deadline or was cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import grpc

from scrubber.emulator.changes import ChangeNotifier

Response = TypeVar("Response")

CHANNEL_CLOSED = "grpc: the client connection is closing"


@dataclass(frozen=True, slots=True)
class KubeletEvent:
    """One thing that happened. ``at`` is when it began, on the event loop's (monotonic) clock; seconds."""

    at: float
    name: str
    """An RPC of the protocols (``Allocate``), or ``StreamEnded``, ``Deregistered`` (the socket in ``plugins_registry/``
    that ``detail`` names has gone), ``ContainerStarted``, ``ContainerDied``, ``PodOver``."""
    outcome: str = "OK"
    """``OK``, or the gRPC code in the kubelet's spelling: ``DeadlineExceeded``; of a container its exit code."""
    duration: float = 0.0
    resource: str = ""
    devices: tuple[str, ...] = ()
    pod: str = ""
    """``namespace/name``."""
    pod_uid: str = ""
    container: str = ""
    detail: str = ""


class RpcFailed(Exception):
    """A call to a plugin did not succeed; the message reads as in the kubelet's log."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"rpc error: code = {go_code_name(code)} desc = {details}")
        self.code = code
        self.details = details


def go_code_name(code: grpc.StatusCode) -> str:
    """A status code as Go prints it: ``DEADLINE_EXCEEDED`` → ``DeadlineExceeded``, and ``OK`` as it is."""
    if code is grpc.StatusCode.OK:
        return "OK"
    if code is grpc.StatusCode.CANCELLED:
        return "Canceled"
    return "".join(word.capitalize() for word in code.name.split("_"))


class Recorder:
    """Writes the list that ``Kubelet.events`` shows, and rings the bell for each entry."""

    def __init__(self, changes: ChangeNotifier) -> None:
        self.events: list[KubeletEvent] = []
        self.pod_resources_requests = 0
        self._changes = changes

    def record(self, event: KubeletEvent) -> None:
        """Record what happened."""
        self.events.append(event)
        self._changes.notify()

    async def call(self, event: KubeletEvent, send: Callable[[], Awaitable[Response]]) -> Response:
        """Make an RPC, await its answer, and record ``event`` with its duration and outcome.

        Raises:
            RpcFailed: anything but an answer, a channel closed under the call included.
        """
        clock = asyncio.get_running_loop().time
        begun = clock()
        failure: RpcFailed | None = None
        try:
            return await send()
        except grpc.aio.AioRpcError as error:
            failure = RpcFailed(error.code(), error.details() or "")
            raise failure from error
        except (asyncio.CancelledError, grpc.aio.UsageError):
            failure = RpcFailed(grpc.StatusCode.CANCELLED, CHANNEL_CLOSED)
            # grpc.aio cancels the waiter when its channel is closed, and has another word for one that was closed before:
            # that is an answer, not the end of this task.
            if is_task_cancelled():
                raise
            raise failure from None
        finally:
            outcome = "OK" if failure is None else go_code_name(failure.code)
            detail = "" if failure is None else failure.details
            self.record(replace(event, at=begun, duration=clock() - begun, outcome=outcome, detail=detail))


def is_task_cancelled() -> bool:
    """Whether the running task was asked to end, as against an RPC that was cancelled under it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def sorted_ids(devices: Sequence[str]) -> tuple[str, ...]:
    """Device ids in one order, for the record: on the wire their order is random."""
    return tuple(sorted(devices))
