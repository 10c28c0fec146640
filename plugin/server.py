"""The five calls of the kubelet's device-plugin protocol.

Promises: ``ListAndWatch`` sends full lists, and nothing when nothing has changed; ``GetPreferredAllocation`` never
fails; ``Allocate`` refuses only what no retry would mend (it fails the pod for good); ``PreStartContainer`` is the
gate. A status message names devices and states, never another tenant: it ends up in a pod's status.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import grpc

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.api import deviceplugin_pb2_grpc
from plugin.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.inject import container_response
from plugin.injection import Injection
from plugin.logs import Log, about
from plugin.observing import Nobody, StreamObserver
from plugin.preferred import preferred
from plugin.shares import Sharing, devices_of
from scrubber.domain.errors import InvalidRequest, Quarantined, Retry, ScrubberError
from scrubber.ports.runtime import UNTRACED, Span, Tracer

__all__ = [
    "TRACED",
    "DevicePlugin",
    "Gatekeeper",
    "Streams",
    "answering",
    "asked_for",
    "distinct",
    "listed",
    "status",
    "tell_refused",
]

HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"
FAULT = "The device plugin on this node failed to answer; its log says why."


class Gatekeeper(Protocol):
    """Who is asked before a container gets a device; :class:`plugin.gate.Gate` asks the service."""

    async def reserve(self, device_ids: Sequence[str], resource: str, span: Span) -> None: ...

    async def hand_over(self, device_ids: Sequence[str], resource: str, deadline: float | None, span: Span) -> None: ...


class Streams:
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
        self._observer = observer or Nobody()
        self._open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()

    def __enter__(self) -> None:
        self._observer.stream(self._resource, opened=True)
        self._open += 1
        self._none_open.clear()
        self.opened.set()

    def __exit__(self, *exc: object) -> None:
        self._observer.stream(self._resource, opened=False)
        self._open -= 1
        if not self._open:
            self._none_open.set()
        self.ended.set()

    async def none_open(self) -> None:
        """Return once no stream is open."""
        await self._none_open.wait()

    def sent(self) -> None:
        """The kubelet has taken a full list."""
        self._observer.listed(self._resource)

    async def close(self) -> None:
        """Have every stream end in good order."""
        self.closing = True
        await self._advertised.ring()


_REFUSED: Mapping[str, str] = {
    "Allocate": "allocation.refused",
    "PreStartContainer": "handover.refused",
    "GetPreferredAllocation": "preference.refused",
}
"""What a line about a call that was refused is called."""
TRACED = frozenset({"Allocate", "PreStartContainer"})
"""Calls that a trace has a span of."""


def asked_for(call: str, resource: str, request: object) -> dict[str, object]:
    """What every line about a call names; ids are those that the kubelet knows."""
    facts: dict[str, object] = {"method": call, "resource": resource}
    if isinstance(request, kubelet.PreStartContainerRequest):
        facts["devices"] = sorted(request.devices_ids)
    elif isinstance(request, kubelet.AllocateRequest):
        facts["devices"] = sorted(id_ for each in request.container_requests for id_ in each.devices_ids)
    return facts


def tell_refused(log: Log, call: str, error: ScrubberError) -> None:
    log.warning(_REFUSED[call], code=error.code, sentence=str(error), told=error.public)


@contextmanager
def answering(
    call: str,
    resource: str,
    request: object,
    *,
    log: Log,
    tracer: Tracer,
    refused: Callable[[Log, str, ScrubberError], None] = tell_refused,
) -> Iterator[Span]:
    """A call of the kubelet's, from its beginning to its answer: its span, and what its lines name, how it failed too.

    Args:
        call: the name of its method.
        refused: writes the line about an error that was raised on purpose.
    """
    facts = asked_for(call, resource, request)
    asked = facts.get("devices")
    count = len(set(asked)) if isinstance(asked, list) else None
    span = tracer.span(call, resource=resource, devices=count) if call in TRACED else UNTRACED.span(call)
    with about(**facts), span as open_:
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


def _speaking_in_sentences(call: _Spanned[_Request, _Answer]) -> _Call[_Request, _Answer]:
    """Turn errors into statuses: the public sentence of those raised on purpose, and of a fault nothing but that."""

    @functools.wraps(call)
    async def answer(
        self: DevicePlugin, request: _Request, context: grpc.aio.ServicerContext[_Request, _Answer]
    ) -> _Answer:
        try:
            with answering(call.__name__, self.resource, request, log=self.log, tracer=self.tracer) as span:
                return await call(self, request, context, span)
        except ScrubberError as error:
            await context.abort(status(error), error.public)
        except Exception:  # noqa: BLE001 - told of where it was met; the pod reads no more than this
            await context.abort(grpc.StatusCode.INTERNAL, FAULT)
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
        streams: Streams,
        log: Log,
        injection: Injection | None = None,
        sharing: Sharing | None = None,
        tracer: Tracer = UNTRACED,
    ) -> None:
        self.resource = resource
        self.tracer = tracer
        self._advertised = advertised
        self._gate = gate
        self._streams = streams
        self._injection = injection or Injection()
        self._sharing = sharing or Sharing()
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
                await self._advertised.until(functools.partial(self._has_news, sent))
                if self._streams.closing:
                    return
                sent = self._advertised.version
                yield listed(self._advertised.devices)
                self._streams.sent()

    @_speaking_in_sentences
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
                    deviceIDs=preferred(
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

    @_speaking_in_sentences
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
            self._sharing.check(devices)
        await self._gate.reserve(everything, self.resource, span)
        self.log.info("allocation.granted", devices=everything)
        return kubelet.AllocateResponse(
            container_responses=[container_response(devices_of(devices), self._injection) for devices in containers]
        )

    @_speaking_in_sentences
    async def PreStartContainer(
        self,
        request: kubelet.PreStartContainerRequest,
        context: grpc.aio.ServicerContext[kubelet.PreStartContainerRequest, kubelet.PreStartContainerResponse],
        span: Span,
    ) -> kubelet.PreStartContainerResponse:
        ids = distinct(request.devices_ids)
        await self._gate.hand_over(ids, self.resource, context.time_remaining(), span)
        return kubelet.PreStartContainerResponse()

    def _has_news(self, sent: int) -> bool:
        return self._streams.closing or self._advertised.version > sent

    def _allocatable(self, device_ids: Sequence[str]) -> list[AdvertisedDevice]:
        """The devices of a container's devices.

        Raises:
            InvalidRequest: none, unknown or duplicate ids.
            Quarantined: one of the devices is out of service. A device that is unhealthy only because the service is
                away is none of these: refusing it would fail the pod for something temporary.
        """
        devices = []
        for id_ in distinct(device_ids):
            device = self._advertised.find(id_)
            if device is None:
                raise InvalidRequest(f"Device {id_} is not one of this plugin's: ask for one of its list.")
            if device.verdict is ServiceVerdict.WITHHELD:
                raise Quarantined(device.refusal, public=device.refusal)
            devices.append(device)
        return devices


def listed(devices: Sequence[AdvertisedDevice]) -> kubelet.ListAndWatchResponse:
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


def distinct(device_ids: Sequence[str]) -> list[str]:
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


def status(error: ScrubberError) -> grpc.StatusCode:
    """What the kubelet is answered with an error that was raised on purpose."""
    if isinstance(error, InvalidRequest):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, Retry):
        return grpc.StatusCode.UNAVAILABLE
    return grpc.StatusCode.FAILED_PRECONDITION
