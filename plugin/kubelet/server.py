"""The five calls of the kubelet's device-plugin protocol, and the server that takes them.

Promises: ``ListAndWatch`` sends full lists, and nothing when nothing has changed; ``GetPreferredAllocation`` never
fails; ``Allocate`` refuses only what no retry would mend (it fails the pod for good); ``PreStartContainer`` is the
gate. A status message names devices and states, never another tenant: it ends up in a pod's status.

One incarnation of the plugin is a server on a socket whose name was never used before. A new name every time, because the
end of an old stream can make the kubelet drop the new client of the same name, and because gRPC silently takes over a live
socket and removes by path when it stops, whoever owns the path by then.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
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
from plugin.kubelet.sockets import SocketFile
from plugin.logs import Logger, log_context
from plugin.nvidia.injection import NvidiaInjection
from plugin.observers import CallObserver, NullObserver, StreamObserver
from scrubber.domain.errors import (
    InvalidConfiguration,
    InvalidRequest,
    Quarantined,
    RetryableError,
    ScrubberError,
    Unavailable,
)
from scrubber.ports.runtime import NOOP_TRACER, Span, Tracer

__all__ = [
    "TRACED_CALLS",
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
INTERNAL_ERROR = "The device plugin on this node failed to answer; its log says why."

SOCKET_UMASK = 0o117
"""umask: the kubelet is root, and nobody else has business with this socket."""

STOP_GRACE = 0.25
"""Seconds for calls under way at a stop; streams end by themselves, the kubelet repeats the rest."""


class Gatekeeper(Protocol):
    """Who is asked before a container gets a device; :class:`plugin.gate.Gate` asks the service."""

    async def reserve(self, device_ids: Sequence[str], resource: str, span: Span) -> None: ...

    async def hand_over(self, device_ids: Sequence[str], resource: str, deadline: float | None, span: Span) -> None: ...


class ListAndWatchStreams:
    """The ``ListAndWatch`` streams of one incarnation of the plugin.

    Args:
        resource: whose lists they are, for ``observer``.

    Attributes:
        opened: set once the kubelet has opened a stream.
        ended: set as soon as a stream is over, also when another is open: the end of any one makes the kubelet forget
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
        """The kubelet has taken a full list."""
        self._observer.on_list_sent(self._resource)

    async def close(self) -> None:
        """Have every stream end in good order."""
        self.closing = True
        await self._advertised.notify()


_REFUSAL_EVENTS: Mapping[str, str] = {
    "Allocate": "allocation.refused",
    "PreStartContainer": "handover.refused",
    "GetPreferredAllocation": "preference.refused",
}
"""What a line about a call that was refused is called."""
TRACED_CALLS = frozenset({"Allocate", "PreStartContainer"})
"""Calls that a trace has a span of."""


def call_fields(call: str, resource: str, request: object) -> dict[str, object]:
    """What every line about a call names; ids are those that the kubelet knows."""
    facts: dict[str, object] = {"method": call, "resource": resource}
    if isinstance(request, kubelet.PreStartContainerRequest):
        facts["devices"] = sorted(request.devices_ids)
    elif isinstance(request, kubelet.AllocateRequest):
        facts["devices"] = sorted(id_ for each in request.container_requests for id_ in each.devices_ids)
    return facts


def log_refusal(log: Logger, call: str, error: ScrubberError) -> None:
    log.warning(_REFUSAL_EVENTS[call], code=error.code, sentence=str(error), told=error.public_message)


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
    """A call of the kubelet's, from its beginning to its answer: its span, and what its lines name, how it failed too.

    Args:
        call: the name of its method.
        refused: writes the line about an error that was raised on purpose.
    """
    facts = call_fields(call, resource, request)
    asked = facts.get("devices")
    count = len(set(asked)) if isinstance(asked, list) else None
    span = tracer.span(call, resource=resource, devices=count) if call in TRACED_CALLS else NOOP_TRACER.span(call)
    with log_context(**facts), span as open_:
        try:
            yield open_
        except ScrubberError as error:
            refused(log, call, error)
            raise
        except Exception as error:  # its text is not for a pod's status; the log has all of it
            log.error("api.failed", exc_info=error)
            raise


_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")
_Call = Callable[["DevicePlugin", _Request, "grpc.aio.ServicerContext[_Request, _Answer]"], Awaitable[_Answer]]
_Spanned = Callable[["DevicePlugin", _Request, "grpc.aio.ServicerContext[_Request, _Answer]", Span], Awaitable[_Answer]]


def _errors_to_status(call: _Spanned[_Request, _Answer]) -> _Call[_Request, _Answer]:
    """Turn errors into statuses: the public sentence of those raised on purpose, and of a fault nothing but that."""

    @functools.wraps(call)
    async def answer(
        self: DevicePlugin, request: _Request, context: grpc.aio.ServicerContext[_Request, _Answer]
    ) -> _Answer:
        try:
            with call_context(call.__name__, self.resource, request, log=self.log, tracer=self.tracer) as span:
                return await call(self, request, context, span)
        except ScrubberError as error:
            await context.abort(grpc_status(error), error.public_message)
        except Exception:  # noqa: BLE001 - told of where it was met; the pod reads no more than this
            await context.abort(grpc.StatusCode.INTERNAL, INTERNAL_ERROR)
        raise AssertionError("abort raises")

    return answer


class DevicePlugin(deviceplugin_pb2_grpc.DevicePluginServicer):
    """Answers the kubelet from what is advertised and through the gate. One for each incarnation; both outlive it.

    Args:
        resource: as which ``advertised`` are advertised.
        tracer: is told of every allocation and every start.
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
        """The devices of a container's devices.

        Raises:
            InvalidRequest: none, unknown or duplicate ids.
            Quarantined: one of the devices is out of service. A device that is unhealthy only because the service is
                away is none of these: refusing it would fail the pod for something temporary.
        """
        devices = []
        for id_ in unique_ids(device_ids):
            device = self._advertised.find(id_)
            if device is None:
                raise InvalidRequest(f"Device {id_} is not one of this plugin's: ask for one of its list.")
            if device.verdict is ServiceVerdict.WITHHELD:
                raise Quarantined(device.refusal, public_message=device.refusal)
            devices.append(device)
        return devices


def list_response(devices: Sequence[AdvertisedDevice]) -> kubelet.ListAndWatchResponse:
    """The full list as the kubelet reads it; anything but exactly ``Healthy`` is unhealthy to it."""
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
    """The ids in a stable order; the kubelet's is random.

    Raises:
        InvalidRequest: there is none, an empty one, or one twice.
    """
    ids = sorted(device_ids)
    if not ids:
        raise InvalidRequest("The request names no device: a container's call needs at least one device id.")
    if not ids[0]:
        raise InvalidRequest("The request names a device by an empty id.")
    for one, other in itertools.pairwise(ids):
        if one == other:
            raise InvalidRequest(f"The request names device {one} twice.")
    return ids


def grpc_status(error: ScrubberError) -> grpc.StatusCode:
    """What the kubelet is answered with an error that was raised on purpose."""
    if isinstance(error, InvalidRequest):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, RetryableError):
        return grpc.StatusCode.UNAVAILABLE
    return grpc.StatusCode.FAILED_PRECONDITION


class PluginServer:
    """Serves the device-plugin protocol, and on the same socket the kubelet's registration when it is to come here.

    Use as a context manager: it serves once entered, and its socket is gone once left.
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
        self._timing = _CallTimer(observer or NullObserver(), time.monotonic)
        self.path = path
        self.streams = streams
        self._plugin = plugin
        self._registration = registration
        self._server: grpc.aio.Server | None = None
        self._identity: SocketFile | None = None

    async def __aenter__(self) -> Self:
        """Serve.

        Raises:
            Unavailable: the directory is not there (any more).
            InvalidConfiguration: the socket cannot be made there.
        """
        server = grpc.aio.server(interceptors=[self._timing])
        deviceplugin_pb2_grpc.add_DevicePluginServicer_to_server(self._plugin, server)
        if self._registration is not None:
            pluginregistration_pb2_grpc.add_RegistrationServicer_to_server(self._registration, server)
        before = os.umask(SOCKET_UMASK)
        try:
            server.add_insecure_port(f"unix:{self.path}")
        except RuntimeError as error:
            if not self.path.parent.is_dir():
                raise Unavailable(f"{self.path.parent} does not exist.") from error
            raise InvalidConfiguration(
                f"No socket can be made at {self.path}: is the directory writable for uid {os.geteuid()}?"
            ) from error
        finally:
            os.umask(before)
        self._identity = SocketFile.of(self.path)
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
        """End the streams and remove the socket; calls under way go on, and the kubelet makes no new connection.

        The socket goes before another instance registers: the kubelet's plugin watcher takes a socket that has gone for the
        end of whatever is registered for the resource by then.
        """
        await self.streams.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE):
                await self.streams.wait_closed()
        if self.is_intact:
            self.path.unlink(missing_ok=True)

    @property
    def is_intact(self) -> bool:
        """Whether the socket file is still the one that was made here; the kubelet wipes its directory at its start."""
        return self._identity is not None and SocketFile.of(self.path) == self._identity


_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class _CallTimer(grpc.aio.ServerInterceptor):
    """Tells ``observer`` how long each of the kubelet's calls took: the one place through which all of them pass.

    A ``ListAndWatch`` is no call in this sense: it lasts as long as the kubelet does.

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
            return handler  # None: no such method, which gRPC answers
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
