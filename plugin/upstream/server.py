"""The five calls of the kubelet, answered by a vendor's plugin through our gate.

Promises: ``Allocate`` refuses what is quarantined before the vendor is asked, and an answer that reaches a device that
was not allocated. ``PreStartContainer`` is asked of us always and first, and of the vendor only after the gate has let
the start through. ``GetPreferredAllocation`` never fails: where the vendor's answer is late or cannot be, ours is
given. Whatever else the vendor says passes through unchanged.
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
from plugin.devices import AdvertisedDevice, ServiceVerdict
from plugin.injection import Injection
from plugin.logs import Log
from plugin.preferred import preferred
from plugin.server import FAULT, Gatekeeper, Streams, answering, distinct, status, tell_refused
from plugin.upstream.answers import named_by_variable
from plugin.upstream.front import Front
from plugin.upstream.listing import Entry
from plugin.upstream.upstream import Upstream
from plugin.upstream.vendor import Garbled, Hung, VendorRefused
from scrubber.domain.errors import Away, InvalidRequest, Quarantined, ScrubberError
from scrubber.ports.runtime import UNTRACED, Span, Tracer

__all__ = ["BehindOurs", "clean_first", "within"]

MARGIN = 0.5
"""Seconds of the kubelet's deadline that are left for our own answer."""


_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")
_Call = Callable[["BehindOurs", _Request, "grpc.aio.ServicerContext[_Request, _Answer]"], Awaitable[_Answer]]
_Spanned = Callable[["BehindOurs", _Request, "grpc.aio.ServicerContext[_Request, _Answer]", Span], Awaitable[_Answer]]


def _tell(log: Log, call: str, error: ScrubberError) -> None:
    """The line about an error that was raised on purpose: by the vendor's plugin, or by us."""
    if isinstance(error, VendorRefused):
        log.warning("vendor.call-refused", sentence=str(error))
    else:
        tell_refused(log, call, error)


def _speaking_in_sentences(call: _Spanned[_Request, _Answer]) -> _Call[_Request, _Answer]:
    """Turn errors into statuses: the vendor's own as it is, the public sentence of ours, and of a fault just that."""

    @functools.wraps(call)
    async def answer(
        self: BehindOurs, request: _Request, context: grpc.aio.ServicerContext[_Request, _Answer]
    ) -> _Answer:
        resource, log, tracer = self._upstream.resource, self.log, self._tracer
        try:
            with answering(call.__name__, resource, request, log=log, tracer=tracer, refused=_tell) as span:
                return await call(self, request, context, span)
        except VendorRefused as error:
            await context.abort(error.status, error.public)
        except ScrubberError as error:
            await context.abort(status(error), error.public)
        except Exception:  # noqa: BLE001 - told of where it was met; the pod reads no more than this
            await context.abort(grpc.StatusCode.INTERNAL, FAULT)
        raise AssertionError("abort raises")

    return answer


class BehindOurs(deviceplugin_pb2_grpc.DevicePluginServicer):
    """Answers the kubelet for one resource. One for each incarnation; front, gate and upstream outlive it.

    Args:
        injection: how the vendor's plugin was told to announce devices, by the words of NVIDIA's.
        clock: monotonic seconds.
        tracer: is told of every allocation and every start.
    """

    def __init__(
        self,
        upstream: Upstream,
        front: Front,
        gate: Gatekeeper,
        *,
        streams: Streams,
        log: Log,
        injection: Injection,
        clock: Callable[[], float],
        tracer: Tracer = UNTRACED,
    ) -> None:
        self._tracer = tracer
        self._upstream = upstream
        self._front = front
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
        listing = self._upstream.listing
        sent = 0
        with self._streams:
            while True:
                await listing.until(functools.partial(self._has_news, sent))
                if self._streams.closing:
                    return
                sent = listing.version
                yield kubelet.ListAndWatchResponse(devices=listing.sent)
                self._streams.sent()

    @_speaking_in_sentences
    async def GetPreferredAllocation(
        self,
        request: kubelet.PreferredAllocationRequest,
        context: grpc.aio.ServicerContext[kubelet.PreferredAllocationRequest, kubelet.PreferredAllocationResponse],
        span: Span,
    ) -> kubelet.PreferredAllocationResponse:
        offers = self._offers()
        narrowed = [clean_first(each, offers) for each in request.container_requests]
        asked = kubelet.PreferredAllocationRequest(container_requests=narrowed)
        answer = await self._vendors_preference(asked)
        if answer is not None:
            return answer
        return kubelet.PreferredAllocationResponse(
            container_responses=[
                kubelet.ContainerPreferredAllocationResponse(
                    deviceIDs=preferred(
                        each.available_deviceIDs, each.must_include_deviceIDs, each.allocation_size, offers
                    )
                )
                for each in request.container_requests
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
        everything = sorted({device for devices in containers for device in devices})
        if not everything:
            raise InvalidRequest("The request names no device: an allocation needs at least one device id.")
        ids = sorted({id_ for container in request.container_requests for id_ in container.devices_ids})
        await self._gate.reserve(ids, self._upstream.resource, span)
        try:
            answer = await self._vendors_answer(request)
            for container, devices in zip(answer.container_responses, containers, strict=False):
                self._check(container, devices)
        except Hung as error:
            await self._upstream.rest(error)
            raise
        except Garbled as error:
            await self._upstream.condemn(error)
            raise
        self.log.info("allocation.granted", ids=ids, devices=everything)
        return answer

    @_speaking_in_sentences
    async def PreStartContainer(
        self,
        request: kubelet.PreStartContainerRequest,
        context: grpc.aio.ServicerContext[kubelet.PreStartContainerRequest, kubelet.PreStartContainerResponse],
        span: Span,
    ) -> kubelet.PreStartContainerResponse:
        # Its type says otherwise, but a call without a deadline has no time remaining.
        remaining = cast("float | None", context.time_remaining())
        ends = math.inf if remaining is None else self._clock() + remaining
        ids, resource = distinct(request.devices_ids), self._upstream.resource
        for id_ in ids:
            self._device(id_)
        await self._front.recall(resource, ids)
        wanted = self._upstream.options.pre_start_required
        if wanted:
            # A certificate is used up by a hand-over: none is spent on a start that the vendor cannot be asked for.
            await self._upstream.vendor()
        await self._gate.hand_over(ids, resource, ends - self._clock(), span)
        if not wanted:
            return kubelet.PreStartContainerResponse()
        vendor = await self._upstream.vendor()
        return await vendor.pre_start(request, ends - self._clock() - MARGIN)

    def _has_news(self, sent: int) -> bool:
        return self._streams.closing or self._upstream.listing.version > sent

    async def _vendors_answer(self, request: kubelet.AllocateRequest) -> kubelet.AllocateResponse:
        """What the vendor's plugin allocates; asked once more when it is replaced under the call.

        A refusal would fail the pod for good, and the kubelet itself asks for the same devices more than once.
        """
        vendor = await self._upstream.vendor()
        try:
            return await vendor.allocate(request)
        except Hung:
            raise
        except Away:
            vendor = await self._upstream.vendor(after=vendor)
            return await vendor.allocate(request)

    async def _vendors_preference(
        self, request: kubelet.PreferredAllocationRequest
    ) -> kubelet.PreferredAllocationResponse | None:
        """What the vendor's plugin prefers; None when it has no say, does not answer, or answers what was not asked."""
        if not self._upstream.options.get_preferred_allocation_available or not self._upstream.answering:
            return None
        try:
            vendor = await self._upstream.vendor()
            answer = await vendor.preferred(request)
            if within(request, answer):
                return answer
            sentence = "It is none of what was asked."
        except ScrubberError as error:
            sentence = str(error)
        self.log.warning("vendor.preference-unused", sentence=sentence)
        return None

    def _offers(self) -> dict[str, AdvertisedDevice]:
        """The service's devices by the vendor's ids."""
        entries = [entry for entry in self._upstream.listing.entries.values() if entry.offer is not None]
        named: dict[str, list[str]] = {}
        for entry in entries:
            named.setdefault(entry.meaning.device, []).append(entry.id)
        return {entry.id: _renamed(entry, named) for entry in entries}

    def _device(self, id_: str) -> str:
        """Which device of the service an id is.

        Raises:
            Quarantined: none that could be told.
        """
        meaning = self._front.meaning(self._upstream.resource, id_)
        if not meaning.device:
            raise Quarantined(meaning.refusal, public=meaning.refusal)
        return meaning.device

    def _allocatable(self, device_ids: Sequence[str]) -> list[str]:
        """The devices of a container.

        Raises:
            InvalidRequest: none, unknown or duplicate ids.
            Quarantined: an id whose device cannot be told, or a device that is out of service. What is unhealthy for a
                reason that passes, the vendor's own word included, is the vendor's to refuse.
        """
        devices = []
        for id_ in distinct(device_ids):
            entry = self._upstream.listing.entries.get(id_)
            if entry is None:
                raise InvalidRequest(f"Device {id_} is not one of this plugin's: ask for one of its list.")
            devices.append(self._device(id_))
            if entry.offer is not None and entry.offer.verdict is ServiceVerdict.WITHHELD:
                raise Quarantined(entry.offer.refusal, public=entry.offer.refusal)
        return devices

    def _check(self, answer: kubelet.ContainerAllocateResponse, devices: Collection[str]) -> None:
        """Refuse an answer that gives a container what it was not allocated.

        Raises:
            Garbled: it does; another container would fare no better.
        """
        resource = self._upstream.resource
        strangers = self._front.reach.strangers(answer, devices)
        if strangers:
            raise Garbled(
                f"The vendor's plugin for {resource} was asked for {', '.join(sorted(devices))} and gives "
                f"{', '.join(strangers)}: its ids are not what they are taken for.",
                public=f"The vendor's plugin for {resource} gives another device than the one that was asked for.",
            )
        if named_by_variable(answer) and not self._injection.by_envvar:
            sentence = (
                f"The vendor's plugin for {resource} announces devices by an environment variable, which "
                "--device-list-strategy does not name: say there what the vendor's plugin was told, or tell it otherwise."
            )
            raise Garbled(sentence, public=sentence)


def clean_first(
    request: kubelet.ContainerPreferredAllocationRequest, offers: dict[str, AdvertisedDevice]
) -> kubelet.ContainerPreferredAllocationRequest:
    """The request as the vendor gets it: with certified devices only where there are enough of them, else with those
    that are being scrubbed too, else unchanged.

    The vendor's own order, by topology or by load, then decides among devices that are equally ready.
    """
    must = set(request.must_include_deviceIDs)
    for ready in _by_readiness(offers):
        chosen = [id_ for id_ in request.available_deviceIDs if id_ in must or id_ in ready]
        if len(set(chosen)) >= request.allocation_size:
            narrowed = kubelet.ContainerPreferredAllocationRequest()
            narrowed.CopyFrom(request)
            del narrowed.available_deviceIDs[:]
            narrowed.available_deviceIDs.extend(chosen)
            return narrowed
    return request


def _by_readiness(offers: dict[str, AdvertisedDevice]) -> Iterator[frozenset[str]]:
    usable = {id_: offer for id_, offer in offers.items() if offer.verdict is ServiceVerdict.OFFERED}
    yield frozenset(id_ for id_, offer in usable.items() if offer.certified)
    yield frozenset(id_ for id_, offer in usable.items() if offer.certified or offer.scrubbing)


def within(request: kubelet.PreferredAllocationRequest, answer: kubelet.PreferredAllocationResponse) -> bool:
    """Whether ``answer`` is one: for each container, distinct ids that were available, with all that must be among them,
    and no more than were asked for. Fewer are the plugin's right.
    """
    if len(answer.container_responses) < len(request.container_requests):
        return False
    for asked, answered in zip(request.container_requests, answer.container_responses, strict=False):
        ids = set(answered.deviceIDs)
        if len(ids) < len(answered.deviceIDs) or len(ids) > asked.allocation_size:
            return False
        if not ids <= set(asked.available_deviceIDs) or (ids and not set(asked.must_include_deviceIDs) <= ids):
            return False
    return True


def _renamed(entry: Entry, named: dict[str, list[str]]) -> AdvertisedDevice:
    """A device under the vendor's name, and its peers under theirs."""
    assert entry.offer is not None
    peers = frozenset(id_ for peer in entry.offer.peers for id_ in named.get(peer, ()))
    share_of = entry.meaning.device if entry.meaning.replica else ""
    return replace(entry.offer, id=entry.id, peers=peers, share_of=share_of)
