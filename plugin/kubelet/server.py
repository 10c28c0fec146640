"""The five calls of the kubelet's device-plugin protocol, and the server that answers them.

Invariants: ``ListAndWatch`` sends full lists, and nothing when nothing has changed. ``GetPreferredAllocation`` never
fails. ``Allocate`` refuses only what no retry would fix, because a refusal fails the pod permanently.
``PreStartContainer`` is the gate. A status message names devices and states, never another tenant: it appears in a
pod's status.

One incarnation of the plugin is a server on a socket whose name was never used before. The name is new every time for
two reasons: the end of an old stream can make the kubelet drop the new client of the same name, and gRPC silently takes
over a live socket and removes it by path when it stops, even if the path belongs to another server by then.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import grpc

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.api import deviceplugin_pb2_grpc, pluginregistration_pb2_grpc
from plugin.injection import container_response
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.kubelet.preferred_allocation import preferred_devices
from plugin.kubelet.shares import TimeSlicing, whole_devices
from plugin.kubelet.sockets import SocketFile, add_socket
from plugin.logs import Logger, log_context
from plugin.nvidia.injection import NvidiaInjection
from plugin.observers import CallObserver, NullObserver, StreamObserver
from scrubber.domain.errors import (
    InvalidRequest,
    Quarantined,
    RetryableError,
    ScrubberError,
)
from scrubber.ports.runtime import NOOP_TRACER, Span, Tracer

__all__ = [
    "STOP_GRACE",
    "TRACED_CALLS",
    "CallTimer",
    "DevicePlugin",
    "Gatekeeper",
    "ListAndWatchStreams",
    "PluginServer",
    "call_context",
    "call_fields",
    "grpc_status",
    "list_response",
    "log_refusal",
    "unique_ids",
]

HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"
INTERNAL_ERROR = "The device plugin on this node failed. Its log contains the cause."

STOP_GRACE = 0.25
"""Seconds for calls in progress at a stop; streams end without it, and the kubelet repeats the other calls."""


class Gatekeeper(Protocol):
    """Decides before a container gets a device; :class:`plugin.gate.Gate` requests it from the service."""

    async def reserve(self, device_ids: Sequence[str], resource: str, span: Span) -> None: ...

    async def hand_over(self, device_ids: Sequence[str], resource: str, deadline: float | None, span: Span) -> None: ...


class ListAndWatchStreams:
    """The ``ListAndWatch`` streams of one incarnation of the plugin.

    Args:
        resource: resource of the lists, for ``observer``.

    Attributes:
        opened: set once the kubelet has opened a stream.
        ended: set as soon as a stream ends, even while another is open: the end of any stream makes the kubelet forget
            the resource.
    """

    def __init__(
        self, advertised: AdvertisedDevices, resource: str = "", *, observer: StreamObserver | None = None
    ) -> None:
        self.opened = asyncio.Event()
        self.ended = asyncio.Event()
        self.closing = False
        self._advertised = advertised
        self._resource = resource
        self._observer = observer or NullObserver()
        self._open = 0
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    def __enter__(self) -> None:
        self._observer.on_stream_status(self._resource, opened=True)
        self._open += 1
        self._all_closed.clear()
        self.opened.set()

    def __exit__(self, *exc: object) -> None:
        self._observer.on_stream_status(self._resource, opened=False)
        self._open -= 1
        if not self._open:
            self._all_closed.set()
        self.ended.set()

    async def wait_closed(self) -> None:
        """Return once no stream is open."""
        await self._all_closed.wait()

    def record_list_sent(self) -> None:
        """Record that a full list was sent to the kubelet."""
        self._observer.on_list_sent(self._resource)

    async def close(self) -> None:
        """End every stream cleanly."""
        self.closing = True
        await self._advertised.notify()


_REFUSAL_EVENTS: Mapping[str, str] = {
    "Allocate": "allocation.refused",
    "PreStartContainer": "handover.refused",
    "GetPreferredAllocation": "preferred-allocation.refused",
}
"""Log event of a refused call."""
TRACED_CALLS = frozenset({"Allocate", "PreStartContainer"})
"""Calls that get a span in traces."""


def call_fields(call: str, resource: str, request: object) -> dict[str, object]:
    """Return the fields of every log line about a call; ids are the kubelet's."""
    facts: dict[str, object] = {"method": call, "resource": resource}
    if isinstance(request, kubelet.PreStartContainerRequest):
        facts["devices"] = sorted(request.devices_ids)
    elif isinstance(request, kubelet.AllocateRequest):
        facts["devices"] = sorted(id_ for each in request.container_requests for id_ in each.devices_ids)
    return facts


def log_refusal(log: Logger, call: str, error: ScrubberError) -> None:
    log.warning(_REFUSAL_EVENTS[call], code=error.code, message=str(error), public_message=error.public_message)


@contextmanager
def call_context(
    call: str,
    resource: str,
    request: object,
    *,
    log: Logger,
    tracer: Tracer,
    refused: Callable[[Logger, str, ScrubberError], None] = log_refusal,
) -> Iterator[Span]:
    """Wrap one call of the kubelet from its start to its response: its span, its log fields and its failure.

    Args:
        call: the name of its method.
        refused: logs an error that was raised on purpose.
    """
    facts = call_fields(call, resource, request)
    device_ids = facts.get("devices")
    count = len(set(device_ids)) if isinstance(device_ids, list) else None
    span = tracer.span(call, resource=resource, devices=count) if call in TRACED_CALLS else NOOP_TRACER.span(call)
    with log_context(**facts), span as open_:
        try:
            yield open_
        except ScrubberError as error:
            refused(log, call, error)
            raise
        except Exception as error:  # its text must not appear in a pod's status; the log has all of it
            log.error("api.failed", exc_info=error)
            raise


_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")
_Call = Callable[["DevicePlugin", _Request, "grpc.aio.ServicerContext[_Request, _Answer]"], Awaitable[_Answer]]
_Spanned = Callable[["DevicePlugin", _Request, "grpc.aio.ServicerContext[_Request, _Answer]", Span], Awaitable[_Answer]]


def _errors_to_status(call: _Spanned[_Request, _Answer]) -> _Call[_Request, _Answer]:
    """Turn errors into statuses: the public message of those raised on purpose, and a fixed message for any other."""

    @functools.wraps(call)
    async def answer(
        self: DevicePlugin, request: _Request, context: grpc.aio.ServicerContext[_Request, _Answer]
    ) -> _Answer:
        try:
            with call_context(call.__name__, self.resource, request, log=self.log, tracer=self.tracer) as span:
                return await call(self, request, context, span)
        except ScrubberError as error:
            await context.abort(grpc_status(error), error.public_message)
        except Exception:  # noqa: BLE001 - logged in call_context; the pod's status shows only this message
            await context.abort(grpc.StatusCode.INTERNAL, INTERNAL_ERROR)
        raise AssertionError("abort raises")

    return answer


class DevicePlugin(deviceplugin_pb2_grpc.DevicePluginServicer):
    """Answers the kubelet with the advertised devices and through the gate. One for each incarnation; both outlive it.

    Args:
        resource: resource of ``advertised``.
        tracer: records a span of every allocation and every start.
    """

    def __init__(
        self,
        resource: str,
        advertised: AdvertisedDevices,
        gate: Gatekeeper,
        *,
        streams: ListAndWatchStreams,
        log: Logger,
        injection: NvidiaInjection | None = None,
        sharing: TimeSlicing | None = None,
        tracer: Tracer = NOOP_TRACER,
    ) -> None:
        self.resource = resource
        self.tracer = tracer
        self._advertised = advertised
        self._gate = gate
        self._streams = streams
        self._injection = injection or NvidiaInjection()
        self._sharing = sharing or TimeSlicing()
        self.log = log

    async def GetDevicePluginOptions(
        self, request: kubelet.Empty, context: grpc.aio.ServicerContext[kubelet.Empty, kubelet.DevicePluginOptions]
    ) -> kubelet.DevicePluginOptions:
        return kubelet.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

    async def ListAndWatch(
        self, request: kubelet.Empty, context: grpc.aio.ServicerContext[kubelet.Empty, kubelet.ListAndWatchResponse]
    ) -> AsyncIterator[kubelet.ListAndWatchResponse]:
        sent = 0
        with self._streams:
            while True:
                await self._advertised.wait_until(functools.partial(self._has_update, sent))
                if self._streams.closing:
                    return
                sent = self._advertised.version
                yield list_response(self._advertised.devices)
                self._streams.record_list_sent()

    @_errors_to_status
    async def GetPreferredAllocation(
        self,
        request: kubelet.PreferredAllocationRequest,
        context: grpc.aio.ServicerContext[kubelet.PreferredAllocationRequest, kubelet.PreferredAllocationResponse],
        span: Span,
    ) -> kubelet.PreferredAllocationResponse:
        devices = {device.id: device for device in self._advertised.devices}
        return kubelet.PreferredAllocationResponse(
            container_responses=[
                kubelet.ContainerPreferredAllocationResponse(
                    deviceIDs=preferred_devices(
                        container.available_deviceIDs,
                        container.must_include_deviceIDs,
                        container.allocation_size,
                        devices,
                        self._sharing.preference,
                    )
                )
                for container in request.container_requests
            ]
        )

    @_errors_to_status
    async def Allocate(
        self,
        request: kubelet.AllocateRequest,
        context: grpc.aio.ServicerContext[kubelet.AllocateRequest, kubelet.AllocateResponse],
        span: Span,
    ) -> kubelet.AllocateResponse:
        containers = [self._allocatable(container.devices_ids) for container in request.container_requests]
        everything = sorted({device.id for devices in containers for device in devices})
        if not everything:
            raise InvalidRequest("The request names no device: an allocation needs at least one device id.")
        for devices in containers:
            self._sharing.check_request(devices)
        await self._gate.reserve(everything, self.resource, span)
        self.log.info("allocation.granted", devices=everything)
        return kubelet.AllocateResponse(
            container_responses=[container_response(whole_devices(devices), self._injection) for devices in containers]
        )

    @_errors_to_status
    async def PreStartContainer(
        self,
        request: kubelet.PreStartContainerRequest,
        context: grpc.aio.ServicerContext[kubelet.PreStartContainerRequest, kubelet.PreStartContainerResponse],
        span: Span,
    ) -> kubelet.PreStartContainerResponse:
        ids = unique_ids(request.devices_ids)
        await self._gate.hand_over(ids, self.resource, context.time_remaining(), span)
        return kubelet.PreStartContainerResponse()

    def _has_update(self, sent: int) -> bool:
        return self._streams.closing or self._advertised.version > sent

    def _allocatable(self, device_ids: Sequence[str]) -> list[AdvertisedDevice]:
        """Return the devices of a container.

        Raises:
            InvalidRequest: none, unknown or duplicate ids.
            Quarantined: one of the devices is out of service. A device that is unhealthy only because the service is
                away is accepted: a refusal would fail the pod for a temporary reason.
        """
        devices = []
        for id_ in unique_ids(device_ids):
            device = self._advertised.find(id_)
            if device is None:
                raise InvalidRequest(f"Device {id_} is not in the list of this plugin. Request one of the list.")
            if device.verdict is ServiceVerdict.WITHHELD:
                raise Quarantined(device.refusal, public_message=device.refusal)
            devices.append(device)
        return devices


def list_response(devices: Sequence[AdvertisedDevice]) -> kubelet.ListAndWatchResponse:
    """Return the full list for the kubelet, which treats every health except ``Healthy`` as unhealthy."""
    return kubelet.ListAndWatchResponse(
        devices=[
            kubelet.Device(
                ID=device.id,
                health=HEALTHY if device.healthy else UNHEALTHY,
                topology=None
                if device.numa_node is None
                else kubelet.TopologyInfo(nodes=[kubelet.NUMANode(ID=device.numa_node)]),
            )
            for device in devices
        ]
    )


def unique_ids(device_ids: Sequence[str]) -> list[str]:
    """Return the ids in a stable order; the kubelet's order is random.

    Raises:
        InvalidRequest: there is none, an empty one, or a duplicate.
    """
    ids = sorted(device_ids)
    if not ids:
        raise InvalidRequest("The request names no device: a container's call needs at least one device id.")
    if not ids[0]:
        raise InvalidRequest("The request contains an empty device id.")
    for one, other in itertools.pairwise(ids):
        if one == other:
            raise InvalidRequest(f"The request names device {one} twice.")
    return ids


def grpc_status(error: ScrubberError) -> grpc.StatusCode:
    """Return the status code for an error that was raised on purpose."""
    if isinstance(error, InvalidRequest):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, RetryableError):
        return grpc.StatusCode.UNAVAILABLE
    return grpc.StatusCode.FAILED_PRECONDITION


class PluginServer:
    """Serves the device-plugin protocol and, on the same socket, the kubelet's registration service if one is given.

    Use as a context manager: it serves once entered, and removes its socket on exit.
    """

    def __init__(
        self,
        path: Path,
        *,
        plugin: deviceplugin_pb2_grpc.DevicePluginServicer,
        streams: ListAndWatchStreams,
        registration: pluginregistration_pb2_grpc.RegistrationServicer | None = None,
        observer: CallObserver | None = None,
    ) -> None:
        self._timing = CallTimer(observer or NullObserver(), time.monotonic)
        self.path = path
        self.streams = streams
        self._plugin = plugin
        self._registration = registration
        self._server: grpc.aio.Server | None = None
        self._identity: SocketFile | None = None

    async def __aenter__(self) -> Self:
        """Start to serve.

        Raises:
            Unavailable: the directory does not exist (any more).
            InvalidConfiguration: the socket cannot be created there.
        """
        server = grpc.aio.server(interceptors=[self._timing])
        deviceplugin_pb2_grpc.add_DevicePluginServicer_to_server(self._plugin, server)
        if self._registration is not None:
            pluginregistration_pb2_grpc.add_RegistrationServicer_to_server(self._registration, server)
        self._identity = add_socket(server, self.path)
        await server.start()
        self._server = server
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.withdraw()
        if self._server is not None:
            await self._server.stop(STOP_GRACE)

    async def withdraw(self) -> None:
        """End the streams and remove the socket; calls in progress continue, and the kubelet makes no new connection.

        The socket must be removed before another instance registers: the kubelet's plugin watcher treats a removed
        socket as the end of the endpoint that is registered for the resource by then. One that cannot be removed, on a
        read-only disk, refuses connections from now on, and the next instance removes it.
        """
        await self.streams.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE):
                await self.streams.wait_closed()
        if self.is_intact:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)

    @property
    def is_intact(self) -> bool:
        """Whether the socket file is still the one created here; the kubelet clears its directory when it starts."""
        return self._identity is not None and SocketFile.of(self.path) == self._identity


_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class CallTimer(grpc.aio.ServerInterceptor):
    """Reports the duration of each of the kubelet's calls to ``observer``: the one place that all of them pass.

    ``ListAndWatch`` is excluded: it lasts as long as the kubelet runs.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, observer: CallObserver, clock: Callable[[], float]) -> None:
        self._observer = observer
        self._clock = clock

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler  # None: unknown method, which gRPC answers
        method = str(handler_call_details.method).rpartition("/")[2]
        return grpc.unary_unary_rpc_method_handler(
            self._timed(method, handler.unary_unary), handler.request_deserializer, handler.response_serializer
        )

    def _timed(self, method: str, behaviour: Any) -> Callable[[Any, Any], Awaitable[Any]]:
        async def answer(request: Any, context: Any) -> Any:
            began, code = self._clock(), grpc.StatusCode.OK
            try:
                return await behaviour(request, context)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except grpc.aio.AbortError:
                code = context.code()
                raise
            except BaseException:
                code = grpc.StatusCode.UNKNOWN
                raise
            finally:
                self._observer.on_call_finished(method, code.name, self._clock() - began)

        return answer
