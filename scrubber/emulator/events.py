"""What the emulated kubelet did and when: the data of the demo's closing table and of the benchmarks.

Promise: every call to a plugin is recorded with its duration and its outcome, named as in the kubelet's own log,
whether it succeeded, failed, exceeded its deadline or was interrupted.
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
    """One event. ``at`` is when it began, in seconds of the event loop's (monotonic) clock."""

    at: float
    name: str
    """An RPC of the protocols (``Allocate``), or an event of the node.

    These are ``StreamEnded``, ``Deregistered`` (the socket in ``plugins_registry/`` that ``detail`` names was removed),
    ``ContainerStarted``, ``ContainerDied``, ``PodOver`` and ``SandboxChanged`` (a sandbox that died is replaced); with
    an API server also ``SlicesDeleted`` (of a driver, or of all), ``HealthStreamEnded``, ``OrphanNotUnprepared``, and the
    kubelet's events about a pod, ``FailedPrepareDynamicResources`` and ``FailedKillPod``.
    """
    outcome: str = "OK"
    """``OK``, or the gRPC code in the kubelet's spelling: ``DeadlineExceeded``; for a container its exit code."""
    duration: float = 0.0
    resource: str = ""
    """A resource of device plugins, or a DRA driver."""
    devices: tuple[str, ...] = ()
    """Ids of devices; of a DRA call the UIDs of its claims."""
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
    """Return a status code as Go prints it: ``DEADLINE_EXCEEDED`` → ``DeadlineExceeded``, and ``OK`` unchanged."""
    if code is grpc.StatusCode.OK:
        return "OK"
    if code is grpc.StatusCode.CANCELLED:
        return "Canceled"
    return "".join(word.capitalize() for word in code.name.split("_"))


class Recorder:
    """Writes the list behind ``Kubelet.events``, and notifies waiting tasks of each entry."""

    def __init__(self, changes: ChangeNotifier) -> None:
        self.events: list[KubeletEvent] = []
        self.pod_resources_requests = 0
        self._changes = changes

    def record(self, event: KubeletEvent) -> None:
        """Append ``event``, and notify."""
        self.events.append(event)
        self._changes.notify()

    async def call(self, event: KubeletEvent, send: Callable[[], Awaitable[Response]]) -> Response:
        """Make an RPC, await its reply, and record ``event`` with its duration and outcome.

        Raises:
            RpcFailed: the call did not succeed; this includes a channel that was closed during the call.
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
            # grpc.aio cancels the waiting task when its channel is closed, and raises UsageError for one that was
            # closed before: both are an outcome of the call, and not a request that this task ends.
            if is_task_cancelled():
                raise
            raise failure from None
        finally:
            outcome = "OK" if failure is None else go_code_name(failure.code)
            detail = "" if failure is None else failure.details
            self.record(replace(event, at=begun, duration=clock() - begun, outcome=outcome, detail=detail))


def is_task_cancelled() -> bool:
    """Whether the running task was cancelled, in contrast to an RPC that was cancelled while the task awaited it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def sorted_ids(devices: Sequence[str]) -> tuple[str, ...]:
    """Return the device ids in one order, for the record: on the wire their order is random."""
    return tuple(sorted(devices))
