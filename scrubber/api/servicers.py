"""The three services, each a thin turn from messages to the engine and back.

Promise: nothing is decided here. What the engine refuses passes through as its error, of which
:mod:`scrubber.api.answering` makes a status, and a call that its caller gives up is cancelled in the engine, too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc

from scrubber.api import messages, scrubber_pb2_grpc
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.frontdoor import actor_of
from scrubber.api.watching import Following
from scrubber.domain.device import find_device
from scrubber.domain.errors import InvalidRequest, LedgerFailure, NotReady
from scrubber.engine.views import DeviceView, ScrubNews, Service
from scrubber.observability import event_names
from scrubber.ports.record import HistoryEntry, HistoryQuery

__all__ = ["AdminServicer", "PluginServicer", "ReadServicer"]

Context = grpc.aio.ServicerContext[Any, Any]

_HISTORY = 100
_LONGEST_HISTORY = 1000
_LARGEST_ANSWER = 4 * 1024 * 1024
"""Bytes that a client takes in one message unless it is told otherwise (gRPC's default)."""
_FRAME = 16
"""Bytes that a message needs at most besides an entry itself: its tag and length, and ``next_before``."""
_AT_A_TIME = 50
"""Entries that are put into messages before other calls have their turn."""


class PluginServicer(scrubber_pb2_grpc.PluginServicer):
    """What the device plugin may do."""

    def __init__(self, service: Service, following: Following) -> None:
        self._service = service
        self._following = following

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Context) -> pb.Snapshot:
        return messages.snapshot(self._service.view())

    async def WatchSnapshots(
        self, request: pb.GetSnapshotRequest, context: Context
    ) -> AsyncGenerator[pb.Snapshot, None]:
        told: messages.PluginPart | None = None
        async with aclosing(self._following.views()) as views:
            async for view in views:
                part = messages.plugin_part(view)
                if part != told:
                    told = part
                    yield messages.snapshot(view)

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        scrubs = await self._service.reserve(tuple(request.device_ids), request.resource)
        return pb.ReserveResponse(scrubs_started=scrubs)

    async def HandOver(self, request: pb.HandOverRequest, context: Context) -> pb.HandOverResponse:
        started = time.monotonic()
        granted = await self._service.hand_over(messages.hand_over_call(request))
        return pb.HandOverResponse(
            devices=[messages.granted_message(each) for each in granted], seconds=time.monotonic() - started
        )

    async def Announce(self, request: pb.AnnounceRequest, context: Context) -> pb.AnnounceResponse:
        await self._service.announce(request.resource, messages.offers_of(request))
        return pb.AnnounceResponse()


class ReadServicer(scrubber_pb2_grpc.ReadServicer):
    """State and history."""

    def __init__(self, service: Service, following: Following) -> None:
        self._service = service
        self._following = following

    async def ListDevices(self, request: pb.ListDevicesRequest, context: Context) -> pb.ListDevicesResponse:
        view = self._service.view()
        view.be_ready()
        return messages.device_list(view)

    async def WatchDevices(
        self, request: pb.ListDevicesRequest, context: Context
    ) -> AsyncGenerator[pb.ListDevicesResponse, None]:
        async with aclosing(self._following.views()) as views:
            async for view in views:
                view.be_ready()
                yield messages.device_list(view)

    async def GetHistory(self, request: pb.GetHistoryRequest, context: Context) -> pb.GetHistoryResponse:
        """Newest first. A device that is no longer on the node is found by its whole id."""
        if request.limit > _LONGEST_HISTORY:
            raise InvalidRequest(f"At most {_LONGEST_HISTORY} entries of history are given at once.")
        if not math.isfinite(request.since):
            raise InvalidRequest(f"History begins at a time in seconds since the epoch, not at {request.since}.")
        unknown: InvalidRequest | NotReady | None = None
        device = request.device or None
        if device is not None:
            try:
                device = _named(self._service, device)
            except (InvalidRequest, NotReady) as error:
                unknown = error
        limit = request.limit or _HISTORY
        query = HistoryQuery(
            device=device,
            since=request.since or None,
            limit=limit,
            tenant=request.tenant or None,
            outcome=request.outcome or None,
            events=event_names.asked_for(request.events),
            before=request.before or None,
        )
        entries, more = await self._past(query)
        if unknown is None or entries:
            return await _page(entries, more=more)
        # Of a device that is gone there may be nothing of what was asked for, which does not make its id a wrong one.
        if not await self._service.history(HistoryQuery(device=device, limit=1)):
            raise unknown
        return pb.GetHistoryResponse(next_before=0)

    async def _past(self, query: HistoryQuery) -> tuple[Sequence[HistoryEntry], bool]:
        """The entries that ``query`` asks for, and whether there are older ones."""
        try:
            entries = await self._service.history(replace(query, limit=query.limit + 1))
        except LedgerFailure:
            # Damage behind the last row of this page does not keep its rows back: the next page is refused for it.
            entries = await self._service.history(query)
            return entries, len(entries) == query.limit
        return entries[: query.limit], len(entries) > query.limit

    async def GetServiceInfo(self, request: pb.GetServiceInfoRequest, context: Context) -> pb.ServiceInfo:
        return messages.service_info(self._service.info())

    async def GetResetPlan(self, request: pb.GetResetPlanRequest, context: Context) -> pb.ResetPlan:
        return messages.reset_plan_message(
            await self._service.actions.reset_plan(_named(self._service, request.device))
        )

    async def GetCertificate(self, request: pb.GetCertificateRequest, context: Context) -> pb.SignedCertificate:
        if not request.id:
            raise InvalidRequest("Say which certificate: its id, as scrubber devices shows it.")
        return messages.signed_certificate(await self._service.certificate(request.id))

    async def ReadAudit(self, request: pb.ReadAuditRequest, context: Context) -> AsyncGenerator[pb.AuditPage, None]:
        pages = self._service.audit(request.after)
        try:
            async for page in pages:
                yield messages.audit_page(page)
        finally:
            await _close(pages)


class AdminServicer(scrubber_pb2_grpc.AdminServicer):
    """Acting on devices, in the name of the uid that came through the front door."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Scrub(self, request: pb.ScrubRequest, context: Context) -> AsyncGenerator[pb.ScrubUpdate, None]:
        path = messages.path_of(request.path)
        updates = self._service.actions.scrub(_named(self._service, request.device), path, actor_of(context.peer()))
        try:
            async for news in updates:
                yield self._update(news)
        finally:
            await _close(updates)

    async def Reset(self, request: pb.ResetRequest, context: Context) -> AsyncGenerator[pb.ScrubUpdate, None]:
        reason, device = messages.reason_of(request), _named(self._service, request.device)
        updates = self._service.actions.reset(device, reason, actor_of(context.peer()))
        try:
            async for news in updates:
                yield self._update(news)
        finally:
            await _close(updates)

    async def AcceptBaseline(self, request: pb.AcceptBaselineRequest, context: Context) -> pb.DeviceAnswer:
        reason, device = messages.reason_of(request), _named(self._service, request.device)
        view = await self._service.actions.accept_baseline(
            device, reason, actor_of(context.peer()), dict(request.shown)
        )
        return pb.DeviceAnswer(device=messages.device_message(view))

    async def Quarantine(self, request: pb.QuarantineRequest, context: Context) -> pb.DeviceAnswer:
        reason, device = messages.reason_of(request), _named(self._service, request.device)
        view = await self._service.actions.quarantine(device, reason, actor_of(context.peer()))
        return pb.DeviceAnswer(device=messages.device_message(view))

    async def Unquarantine(self, request: pb.QuarantineRequest, context: Context) -> pb.DeviceAnswer:
        reason, device = messages.reason_of(request), _named(self._service, request.device)
        view = await self._service.actions.unquarantine(device, reason, actor_of(context.peer()))
        return pb.DeviceAnswer(device=messages.device_message(view))

    async def BreakGlass(self, request: pb.BreakGlassRequest, context: Context) -> pb.DeviceAnswer:
        reason, seconds = messages.reason_of(request), messages.glass_seconds(request)
        device = _named(self._service, request.device)
        view = await self._service.actions.break_glass(device, seconds, reason, actor_of(context.peer()))
        return pb.DeviceAnswer(device=messages.device_message(view))

    def _update(self, news: ScrubNews) -> pb.ScrubUpdate:
        if news.finished is None:
            return pb.ScrubUpdate(progress=messages.progress_message(news))
        view = _view_of(self._service, news.device)
        result = pb.ScrubResult(
            scrub=messages.scrub_message(news.finished),
            certificate=None if news.certificate is None else messages.certificate_message(news.certificate),
            device=None if view is None else messages.device_message(view),
            unexplained=news.unexplained,
        )
        return pb.ScrubUpdate(result=result)


async def _page(entries: Sequence[HistoryEntry], *, more: bool) -> pb.GetHistoryResponse:
    """As many of ``entries`` as a client takes at once, and where it goes on if that is not all.

    Args:
        more: there are older ones than the last of ``entries``.

    Raises:
        InvalidRequest: the first one alone is too large.
    """
    answer = pb.GetHistoryResponse(next_before=0)
    room = _LARGEST_ANSWER
    for number, each in enumerate(entries):
        if number % _AT_A_TIME == _AT_A_TIME - 1:
            await asyncio.sleep(0)
        message = messages.history_entry(each)
        room -= message.ByteSize() + _FRAME
        if room < 0:
            break
        answer.entries.append(message)
    if more or len(answer.entries) < len(entries):
        if not answer.entries:
            row = entries[0].sequence
            raise InvalidRequest(f"Row {row} is too large for an answer: --before {row} leaves it out.")
        answer.next_before = answer.entries[-1].sequence
    return answer


async def _close(answers: AsyncIterator[Any]) -> None:
    """Let go of what a caller gave up, in this turn of the loop and not when it is collected."""
    if isinstance(answers, AsyncGenerator):
        await answers.aclose()


def _named(service: Service, wanted: str) -> str:
    """Id of the device that people call ``wanted``.

    Raises:
        InvalidRequest: it is none, or more than one.
        NotReady: the service is starting; it cannot say yet which devices there are.
    """
    view = service.view()
    view.be_ready()
    return find_device((each.device for each in view.devices), wanted).id


def _view_of(service: Service, device: str) -> DeviceView | None:
    return next((each for each in service.view().devices if each.device.id == device), None)
