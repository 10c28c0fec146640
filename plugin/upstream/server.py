"""The five calls of the kubelet, answered by a vendor's plugin through the gate.

Invariants: ``Allocate`` refuses quarantined devices before the vendor is called, and a response that reaches a device
that was not allocated. The kubelet always calls ``PreStartContainer`` here, and the vendor is called only after the
gate has allowed the start. ``GetPreferredAllocation`` never fails: when the vendor's response is late or invalid, ours
is used. All other responses of the vendor pass through unchanged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import grpc

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.api import deviceplugin_pb2_grpc
from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict
from plugin.kubelet.preferred_allocation import preferred_devices
from plugin.kubelet.server import (
    INTERNAL_ERROR,
    Gatekeeper,
    ListAndWatchStreams,
    call_context,
    grpc_status,
    log_refusal,
    unique_ids,
)
from plugin.logs import Logger
from plugin.nvidia.injection import NvidiaInjection
from plugin.upstream.allocate_response import uses_envvar
from plugin.upstream.device_list import UpstreamListEntry
from plugin.upstream.devices import UpstreamDevices
from plugin.upstream.resource import UpstreamResource
from plugin.upstream.vendor import VendorInvalidAnswer, VendorRefused, VendorTimedOut
from scrubber.domain.errors import InvalidRequest, Quarantined, ScrubberError, Unavailable
from scrubber.ports.runtime import NOOP_TRACER, Span, Tracer

__all__ = ["UpstreamDevicePlugin", "is_valid_preference", "narrow_to_clean"]

ANSWER_MARGIN = 0.5
"""Seconds of the kubelet's deadline that are reserved for our own response."""


_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")
_Call = Callable[["UpstreamDevicePlugin", _Request, "grpc.aio.ServicerContext[_Request, _Answer]"], Awaitable[_Answer]]
_Spanned = Callable[
    ["UpstreamDevicePlugin", _Request, "grpc.aio.ServicerContext[_Request, _Answer]", Span], Awaitable[_Answer]
]


def _log_refusal(log: Logger, call: str, error: ScrubberError) -> None:
    """Log an error that was raised on purpose, by the vendor's plugin or by us."""
    if isinstance(error, VendorRefused):
        log.warning("upstream.call-refused", message=str(error))
    else:
        log_refusal(log, call, error)


def _errors_to_status(call: _Spanned[_Request, _Answer]) -> _Call[_Request, _Answer]:
    """Turn errors into statuses: the vendor's status unchanged, our public message, or a fixed message."""

    @functools.wraps(call)
    async def answer(
        self: UpstreamDevicePlugin, request: _Request, context: grpc.aio.ServicerContext[_Request, _Answer]
    ) -> _Answer:
        resource, log, tracer = self._upstream.resource, self.log, self._tracer
        try:
            with call_context(call.__name__, resource, request, log=log, tracer=tracer, refused=_log_refusal) as span:
                return await call(self, request, context, span)
        except VendorRefused as error:
            await context.abort(error.status, error.public_message)
        except ScrubberError as error:
            await context.abort(grpc_status(error), error.public_message)
        except Exception:  # noqa: BLE001 - logged in call_context; the pod's status shows only this message
            await context.abort(grpc.StatusCode.INTERNAL, INTERNAL_ERROR)
        raise AssertionError("abort raises")

    return answer


# See docs/decisions/0013-vendor-plugin-behind-ours.md.
class UpstreamDevicePlugin(deviceplugin_pb2_grpc.DevicePluginServicer):
    """Answers the kubelet for one resource. One for each incarnation; devices, gate and upstream outlive it.

    Args:
        injection: how the vendor's plugin is configured to announce devices, in NVIDIA's terms.
        clock: monotonic seconds.
        tracer: records a span of every allocation and every start.
    """

    def __init__(
        self,
        upstream: UpstreamResource,
        devices: UpstreamDevices,
        gate: Gatekeeper,
        *,
        streams: ListAndWatchStreams,
        log: Logger,
        injection: NvidiaInjection,
        clock: Callable[[], float],
        tracer: Tracer = NOOP_TRACER,
    ) -> None:
        self._tracer = tracer
        self._upstream = upstream
        self._devices = devices
        self._gate = gate
        self._streams = streams
        self.log = log
        self._injection = injection
        self._clock = clock

    async def GetDevicePluginOptions(
        self, request: kubelet.Empty, context: grpc.aio.ServicerContext[kubelet.Empty, kubelet.DevicePluginOptions]
    ) -> kubelet.DevicePluginOptions:
        options = kubelet.DevicePluginOptions()
        options.CopyFrom(self._upstream.options)
        options.pre_start_required = True
        options.get_preferred_allocation_available = True
        return options

    async def ListAndWatch(
        self, request: kubelet.Empty, context: grpc.aio.ServicerContext[kubelet.Empty, kubelet.ListAndWatchResponse]
    ) -> AsyncIterator[kubelet.ListAndWatchResponse]:
        listing = self._upstream.device_list
        sent = 0
        with self._streams:
            while True:
                await listing.wait_until(functools.partial(self._has_update, sent))
                if self._streams.closing:
                    return
                sent = listing.version
                yield kubelet.ListAndWatchResponse(devices=listing.messages)
                self._streams.record_list_sent()

    @_errors_to_status
    async def GetPreferredAllocation(
        self,
        request: kubelet.PreferredAllocationRequest,
        context: grpc.aio.ServicerContext[kubelet.PreferredAllocationRequest, kubelet.PreferredAllocationResponse],
        span: Span,
    ) -> kubelet.PreferredAllocationResponse:
        offers = self._devices_by_vendor_id()
        narrowed = [narrow_to_clean(each, offers) for each in request.container_requests]
        vendor_request = kubelet.PreferredAllocationRequest(container_requests=narrowed)
        answer = await self._vendor_preference(vendor_request)
        if answer is not None:
            return answer
        return kubelet.PreferredAllocationResponse(
            container_responses=[
                kubelet.ContainerPreferredAllocationResponse(
                    deviceIDs=preferred_devices(
                        each.available_deviceIDs, each.must_include_deviceIDs, each.allocation_size, offers
                    )
                )
                for each in request.container_requests
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
        everything = sorted({device for devices in containers for device in devices})
        if not everything:
            raise InvalidRequest("The request names no device: an allocation needs at least one device id.")
        ids = sorted({id_ for container in request.container_requests for id_ in container.devices_ids})
        await self._gate.reserve(ids, self._upstream.resource, span)
        try:
            answer = await self._allocate_from_vendor(request)
            for container, devices in zip(answer.container_responses, containers, strict=False):
                self._check_response(container, devices)
        except VendorTimedOut as error:
            await self._upstream.pause_vendor(error)
            raise
        except VendorInvalidAnswer as error:
            await self._upstream.reject_vendor(error)
            raise
        self.log.info("allocation.granted", ids=ids, devices=everything)
        return answer

    @_errors_to_status
    async def PreStartContainer(
        self,
        request: kubelet.PreStartContainerRequest,
        context: grpc.aio.ServicerContext[kubelet.PreStartContainerRequest, kubelet.PreStartContainerResponse],
        span: Span,
    ) -> kubelet.PreStartContainerResponse:
        # A call without a deadline has no time remaining, although the type does not allow None.
        remaining = cast("float | None", context.time_remaining())
        ends = math.inf if remaining is None else self._clock() + remaining
        ids, resource = unique_ids(request.devices_ids), self._upstream.resource
        for id_ in ids:
            self._resolve(id_)
        await self._devices.ensure_mapped(resource, ids)
        required = self._upstream.options.pre_start_required
        if required:
            # A hand-over uses up a certificate: do not spend one on a start for which the vendor cannot be called.
            await self._upstream.current_vendor()
        await self._gate.hand_over(ids, resource, ends - self._clock(), span)
        if not required:
            return kubelet.PreStartContainerResponse()
        vendor = await self._upstream.current_vendor()
        return await vendor.pre_start_container(request, ends - self._clock() - ANSWER_MARGIN)

    def _has_update(self, sent: int) -> bool:
        return self._streams.closing or self._upstream.device_list.version > sent

    async def _allocate_from_vendor(self, request: kubelet.AllocateRequest) -> kubelet.AllocateResponse:
        """Allocate through the vendor's plugin; try once more when it is replaced during the call.

        A refusal would fail the pod permanently, and the kubelet itself may request the same devices more than once.
        """
        vendor = await self._upstream.current_vendor()
        try:
            return await vendor.allocate(request)
        except VendorTimedOut:
            raise
        except Unavailable:
            vendor = await self._upstream.current_vendor(after=vendor)
            return await vendor.allocate(request)

    async def _vendor_preference(
        self, request: kubelet.PreferredAllocationRequest
    ) -> kubelet.PreferredAllocationResponse | None:
        """Return the vendor's preference; None when it has none, does not respond, or responds with an invalid one."""
        if not self._upstream.options.get_preferred_allocation_available or not self._upstream.is_available:
            return None
        try:
            vendor = await self._upstream.current_vendor()
            answer = await vendor.get_preferred_allocation(request)
            if is_valid_preference(request, answer):
                return answer
            message = "The response does not match the request."
        except ScrubberError as error:
            message = str(error)
        self.log.warning("upstream.preference-ignored", message=message)
        return None

    def _devices_by_vendor_id(self) -> dict[str, AdvertisedDevice]:
        """Return the service's devices by the vendor's ids."""
        entries = [entry for entry in self._upstream.device_list.entries.values() if entry.device is not None]
        named: dict[str, list[str]] = {}
        for entry in entries:
            named.setdefault(entry.resolved.device, []).append(entry.id)
        return {entry.id: _renamed(entry, named) for entry in entries}

    def _resolve(self, id_: str) -> str:
        """Return the device of the service that an id means.

        Raises:
            Quarantined: the id has no unique device.
        """
        meaning = self._devices.resolve_id(self._upstream.resource, id_)
        if not meaning.device:
            raise Quarantined(meaning.refusal, public_message=meaning.refusal)
        return meaning.device

    def _allocatable(self, device_ids: Sequence[str]) -> list[str]:
        """Return the devices of a container.

        Raises:
            InvalidRequest: none, unknown or duplicate ids.
            Quarantined: an id without a unique device, or a device that is out of service. A device that is unhealthy
                for a temporary reason, including the vendor's own report, is left to the vendor to refuse.
        """
        devices = []
        for id_ in unique_ids(device_ids):
            entry = self._upstream.device_list.entries.get(id_)
            if entry is None:
                raise InvalidRequest(f"Device {id_} is not in the list of this plugin. Request one of the list.")
            devices.append(self._resolve(id_))
            if entry.device is not None and entry.device.verdict is ServiceVerdict.WITHHELD:
                raise Quarantined(entry.device.refusal, public_message=entry.device.refusal)
        return devices

    def _check_response(self, answer: kubelet.ContainerAllocateResponse, devices: Collection[str]) -> None:
        """Refuse a response that gives a container devices that it was not allocated.

        Raises:
            VendorInvalidAnswer: it does; a retry for another container would not help.
        """
        resource = self._upstream.resource
        unallocated = self._devices.device_paths.unallocated_devices(answer, devices)
        if unallocated:
            raise VendorInvalidAnswer(
                f"The vendor's plugin for {resource} was to allocate {', '.join(sorted(devices))} but returned "
                f"{', '.join(unallocated)}: its ids mean other devices than expected.",
                public_message=f"The vendor's plugin for {resource} returned another device than the requested one.",
            )
        if uses_envvar(answer) and not self._injection.uses_envvar:
            message = (
                f"The vendor's plugin for {resource} passes devices in an environment variable, which "
                "--device-list-strategy does not include: configure both plugins alike."
            )
            raise VendorInvalidAnswer(message, public_message=message)


def narrow_to_clean(
    request: kubelet.ContainerPreferredAllocationRequest, devices: dict[str, AdvertisedDevice]
) -> kubelet.ContainerPreferredAllocationRequest:
    """Return the request for the vendor: only certified devices if there are enough, else also those being scrubbed.

    With too few of both, the request is unchanged. The vendor's own order, by topology or by load, then decides among
    devices that are equally ready.
    """
    must = set(request.must_include_deviceIDs)
    for ready in _by_readiness(devices):
        chosen = [id_ for id_ in request.available_deviceIDs if id_ in must or id_ in ready]
        if len(set(chosen)) >= request.allocation_size:
            narrowed = kubelet.ContainerPreferredAllocationRequest()
            narrowed.CopyFrom(request)
            del narrowed.available_deviceIDs[:]
            narrowed.available_deviceIDs.extend(chosen)
            return narrowed
    return request


def _by_readiness(devices: dict[str, AdvertisedDevice]) -> Iterator[frozenset[str]]:
    usable = {id_: offer for id_, offer in devices.items() if offer.verdict is ServiceVerdict.ADVERTISED}
    yield frozenset(id_ for id_, offer in usable.items() if offer.certified)
    yield frozenset(id_ for id_, offer in usable.items() if offer.certified or offer.scrubbing)


def is_valid_preference(
    request: kubelet.PreferredAllocationRequest, response: kubelet.PreferredAllocationResponse
) -> bool:
    """Return whether ``response`` is valid.

    For each container it must contain distinct available ids, all required ones, and no more than requested. Fewer are
    allowed.
    """
    if len(response.container_responses) < len(request.container_requests):
        return False
    for requested, answered in zip(request.container_requests, response.container_responses, strict=False):
        ids = set(answered.deviceIDs)
        if len(ids) < len(answered.deviceIDs) or len(ids) > requested.allocation_size:
            return False
        if not ids <= set(requested.available_deviceIDs) or (ids and not set(requested.must_include_deviceIDs) <= ids):
            return False
    return True


def _renamed(entry: UpstreamListEntry, named: dict[str, list[str]]) -> AdvertisedDevice:
    """Return a device under the vendor's id, with its peers under theirs."""
    assert entry.device is not None
    peers = frozenset(id_ for peer in entry.device.peers for id_ in named.get(peer, ()))
    share_of = entry.resolved.device if entry.resolved.replica else ""
    return replace(entry.device, id=entry.id, peers=peers, share_of=share_of)
