"""The three gRPC services: thin translations between messages and the engine.

Invariant: nothing is decided here. A refusal of the engine passes through as its error, which
:mod:`scrubber.api.interceptor` turns into a status, and a call that its caller cancels is cancelled in the engine, too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, nullcontext, suppress
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import grpc

from scrubber.api import messages, scrubber_pb2_grpc
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.peer_auth import authorized_actor
from scrubber.api.view_streams import ViewStreams
from scrubber.domain.device import find_device
from scrubber.domain.errors import InvalidRequest, LedgerFailure, NotReady, ScrubberError
from scrubber.domain.node_record import YieldRequester
from scrubber.engine.resource_ids import Announcer
from scrubber.engine.views import DeviceView, ScrubUpdate, Service
from scrubber.observability.registry.audit_events import validate_event_names
from scrubber.ports.record import HistoryEntry, HistoryQuery

__all__ = ["AdminServicer", "PluginServicer", "ReadServicer"]

Context = grpc.aio.ServicerContext[Any, Any]

_DEFAULT_HISTORY_LIMIT = 100
_MAX_HISTORY_LIMIT = 1000
_MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Message size in bytes that a client accepts by default (gRPC's default)."""
_ENTRY_OVERHEAD_BYTES = 16
"""Maximum overhead in bytes of an entry in a message: its tag and length, and ``next_before``."""
_ENTRIES_PER_YIELD = 50
"""Entries that are encoded before other calls get a turn."""


class PluginServicer(scrubber_pb2_grpc.PluginServicer):
    """The calls of the device plugin."""

    def __init__(self, service: Service, streams: ViewStreams) -> None:
        self._service = service
        self._streams = streams
        self._devices = messages.DeviceMessages(messages.snapshot_device_message)
        self._announcers: WeakValueDictionary[str, Announcer] = WeakValueDictionary()

    def _announcer(self, plugin: str) -> Announcer | None:
        """Return the plugin's process of this identity; None without one."""
        name = messages.parse_plugin_identity(plugin)
        return self._announcers.setdefault(name, Announcer(time.monotonic)) if name else None

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Context) -> pb.Snapshot:
        return messages.snapshot_message(self._service.view(), self._devices)

    async def WatchSnapshots(
        self, request: pb.GetSnapshotRequest, context: Context
    ) -> AsyncGenerator[pb.Snapshot, None]:
        sent: messages.SnapshotKey | None = None
        announcer = self._announcer(request.plugin)
        async with aclosing(self._streams.views()) as views:
            with nullcontext() if announcer is None else announcer.following():
                async for view in views:
                    part = messages.snapshot_key(view)
                    if part != sent:
                        sent = part
                        yield messages.snapshot_message(view, self._devices)

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        scrubs = await self._service.reserve(tuple(request.device_ids), request.resource)
        return pb.ReserveResponse(scrubs_started=scrubs)

    async def HandOver(self, request: pb.HandOverRequest, context: Context) -> pb.HandOverResponse:
        started = time.monotonic()
        granted = await self._service.hand_over(messages.parse_hand_over_call(request))
        return pb.HandOverResponse(
            devices=[messages.granted_message(each) for each in granted], duration_seconds=time.monotonic() - started
        )

    async def PrepareClaim(self, request: pb.PrepareClaimRequest, context: Context) -> pb.PrepareClaimResponse:
        started = time.monotonic()
        granted = await self._service.claims.prepare(messages.parse_prepare_claim_call(request))
        certificates = []
        for each in granted:
            with suppress(ScrubberError):  # the grant is made, whether or not its certificate can be shown
                if each.certificate:
                    view = await self._service.certificate(each.certificate)
                    certificates.append(messages.claim_certificate_message(view.certificate))
        return pb.PrepareClaimResponse(
            devices=[messages.granted_message(each) for each in granted],
            duration_seconds=time.monotonic() - started,
            certificates=certificates,
        )

    async def UnprepareClaim(self, request: pb.UnprepareClaimRequest, context: Context) -> pb.UnprepareClaimResponse:
        uid, wait = messages.parse_claim_uid(request.claim_uid), messages.parse_wait(request.deadline_seconds)
        release = await self._service.claims.unprepare(uid, wait, withdrawn=request.withdrawn)
        return messages.claim_release_message(release)

    async def SetClaimPods(self, request: pb.SetClaimPodsRequest, context: Context) -> pb.SetClaimPodsResponse:
        uid = messages.parse_claim_uid(request.claim_uid)
        await self._service.claims.set_pods(uid, messages.parse_claim_pods(request.pods))
        return pb.SetClaimPodsResponse()

    async def ListClaims(self, request: pb.ListClaimsRequest, context: Context) -> pb.ListClaimsResponse:
        self._service.view().require_ready()
        claims = self._service.claims
        return messages.claim_list_message(claims.current(), claims.unprepared())

    async def SetResourceMapping(
        self, request: pb.SetResourceMappingRequest, context: Context
    ) -> pb.SetResourceMappingResponse:
        mapping, announcer = messages.parse_resource_mapping(request), self._announcer(request.plugin)
        await self._service.announce(request.resource, mapping, announcer)
        return pb.SetResourceMappingResponse()

    async def SetYield(self, request: pb.SetYieldRequest, context: Context) -> pb.NodeYield:
        plugin = messages.parse_plugin_name(request)
        if reason := messages.parse_yield_reason(request):
            await self._service.yields.request(YieldRequester.PLUGIN, reason, plugin)
        else:
            await self._service.yields.withdraw(YieldRequester.PLUGIN, "the plugin no longer requests it", plugin)
        return messages.yield_message(self._service.service_view())

    async def ReportAgentPause(self, request: pb.AgentPauseReport, context: Context) -> pb.AgentPauseReportResponse:
        await self._service.pauses.report(messages.parse_pause_report(request))
        return pb.AgentPauseReportResponse()


class ReadServicer(scrubber_pb2_grpc.ReadServicer):
    """State and history.

    Args:
        plugin_versions: returns the versions of the plugins that follow the service.
    """

    def __init__(
        self, service: Service, streams: ViewStreams, plugin_versions: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self._service = service
        self._streams = streams
        self._plugin_versions = plugin_versions
        self._devices = messages.DeviceMessages(messages.device_message)

    async def ListDevices(self, request: pb.ListDevicesRequest, context: Context) -> pb.ListDevicesResponse:
        view = self._service.view()
        view.require_ready()
        return messages.device_list_message(view, self._devices)

    async def WatchDevices(
        self, request: pb.ListDevicesRequest, context: Context
    ) -> AsyncGenerator[pb.ListDevicesResponse, None]:
        async with aclosing(self._streams.views()) as views:
            async for view in views:
                view.require_ready()
                yield messages.device_list_message(view, self._devices)

    async def GetHistory(self, request: pb.GetHistoryRequest, context: Context) -> pb.GetHistoryResponse:
        """Newest first. A device that is no longer on the node is found only by its complete id."""
        if request.limit > _MAX_HISTORY_LIMIT:
            raise InvalidRequest(f"A request returns at most {_MAX_HISTORY_LIMIT} history entries.")
        if not math.isfinite(request.since):
            raise InvalidRequest(f"since must be seconds since the epoch, not {request.since}.")
        unknown: InvalidRequest | NotReady | None = None
        device = request.device or None
        if device is not None:
            try:
                device = _resolve_device_id(self._service, device)
            except (InvalidRequest, NotReady) as error:
                unknown = error
        limit = request.limit or _DEFAULT_HISTORY_LIMIT
        query = HistoryQuery(
            device=device,
            since=request.since or None,
            limit=limit,
            tenant=request.tenant or None,
            outcome=request.outcome or None,
            events=validate_event_names(request.events),
            before=request.before_sequence or None,
        )
        entries, more = await self._read_history(query)
        if unknown is None or entries:
            return await _page(entries, more=more)
        # A removed device may have no matching entries; that does not make its id invalid.
        if not await self._service.history(HistoryQuery(device=device, limit=1)):
            raise unknown
        return pb.GetHistoryResponse(next_before_sequence=0)

    async def _read_history(self, query: HistoryQuery) -> tuple[Sequence[HistoryEntry], bool]:
        """Return the entries that match ``query``, and whether there are older ones."""
        try:
            entries = await self._service.history(replace(query, limit=query.limit + 1))
        except LedgerFailure:
            # Damage after the last row of this page must not withhold the rows of the page: the next page is refused
            # for it.
            entries = await self._service.history(query)
            return entries, len(entries) == query.limit
        return entries[: query.limit], len(entries) > query.limit

    async def GetServiceInfo(self, request: pb.GetServiceInfoRequest, context: Context) -> pb.ServiceInfo:
        return messages.service_info_message(self._service.service_view(), self._plugin_versions())

    async def GetResetPlan(self, request: pb.GetResetPlanRequest, context: Context) -> pb.ResetPlan:
        return messages.reset_plan_message(
            await self._service.actions.reset_plan(_resolve_device_id(self._service, request.device))
        )

    async def GetCertificate(self, request: pb.GetCertificateRequest, context: Context) -> pb.SignedCertificate:
        if not request.id:
            raise InvalidRequest("A certificate id is required; scrubber devices shows it.")
        return messages.signed_certificate_message(await self._service.certificate(request.id))

    async def ReadAudit(self, request: pb.ReadAuditRequest, context: Context) -> AsyncGenerator[pb.AuditPage, None]:
        pages = self._service.audit(request.after_sequence)
        try:
            async for page in pages:
                yield messages.audit_page_message(page)
        finally:
            await _close_stream(pages)


class AdminServicer(scrubber_pb2_grpc.AdminServicer):
    """Calls that act on devices, with the uid that the proxy authenticated as the actor."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Scrub(self, request: pb.ScrubRequest, context: Context) -> AsyncGenerator[pb.ScrubUpdate, None]:
        path = messages.parse_scrub_path(request.path)
        updates = self._service.actions.scrub(
            _resolve_device_id(self._service, request.device), path, authorized_actor(context.peer())
        )
        try:
            async for news in updates:
                yield self._update_message(news)
        finally:
            await _close_stream(updates)

    async def Reset(self, request: pb.ResetRequest, context: Context) -> AsyncGenerator[pb.ScrubUpdate, None]:
        reason, device = messages.parse_reason(request), _resolve_device_id(self._service, request.device)
        updates = self._service.actions.reset(device, reason, authorized_actor(context.peer()))
        try:
            async for news in updates:
                yield self._update_message(news)
        finally:
            await _close_stream(updates)

    async def AcceptBaseline(self, request: pb.AcceptBaselineRequest, context: Context) -> pb.DeviceResponse:
        reason, device = messages.parse_reason(request), _resolve_device_id(self._service, request.device)
        view = await self._service.actions.accept_baseline(
            device, reason, authorized_actor(context.peer()), dict(request.expected_facts)
        )
        return pb.DeviceResponse(device=messages.device_message(view))

    async def Quarantine(self, request: pb.QuarantineRequest, context: Context) -> pb.DeviceResponse:
        reason, device = messages.parse_reason(request), _resolve_device_id(self._service, request.device)
        view, previous = await self._service.actions.quarantine(device, reason, authorized_actor(context.peer()))
        return messages.quarantine_message(view, previous)

    async def Unquarantine(self, request: pb.QuarantineRequest, context: Context) -> pb.DeviceResponse:
        reason, device = messages.parse_reason(request), _resolve_device_id(self._service, request.device)
        view = await self._service.actions.unquarantine(device, reason, authorized_actor(context.peer()))
        return pb.DeviceResponse(device=messages.device_message(view))

    async def BreakGlass(self, request: pb.BreakGlassRequest, context: Context) -> pb.DeviceResponse:
        reason, seconds = messages.parse_reason(request), messages.parse_break_glass_seconds(request)
        device = _resolve_device_id(self._service, request.device)
        view = await self._service.actions.break_glass(device, seconds, reason, authorized_actor(context.peer()))
        return pb.DeviceResponse(device=messages.device_message(view))

    async def YieldNode(self, request: pb.YieldNodeRequest, context: Context) -> pb.NodeYield:
        reason, actor = messages.parse_reason(request), authorized_actor(context.peer())
        await self._service.yields.request(YieldRequester.OPERATOR, reason, actor)
        return messages.yield_message(self._service.service_view())

    async def ResumeNode(self, request: pb.ResumeNodeRequest, context: Context) -> pb.NodeYield:
        reason, actor = messages.parse_reason(request), authorized_actor(context.peer())
        await self._service.yields.withdraw(YieldRequester.OPERATOR, reason, actor, everyone=request.all)
        return messages.yield_message(self._service.service_view())

    async def StartJob(self, request: pb.StartJobRequest, context: Context) -> pb.StartJobResponse:
        call = messages.parse_start_job_call(request, authorized_actor(context.peer()))
        granted = await self._service.jobs.start(call)
        return pb.StartJobResponse(devices=[messages.granted_message(each) for each in granted])

    async def EndJob(self, request: pb.EndJobRequest, context: Context) -> pb.EndJobResponse:
        job, wait = messages.parse_job(request.job), messages.parse_wait(request.wait_seconds, "wait_seconds")
        return messages.job_end_message(await self._service.jobs.end(job, wait, authorized_actor(context.peer())))

    def _update_message(self, update: ScrubUpdate) -> pb.ScrubUpdate:
        if update.finished is None:
            return pb.ScrubUpdate(progress=messages.progress_message(update))
        view = _view_of(self._service, update.device)
        result = pb.ScrubResult(
            scrub=messages.scrub_message(update.finished),
            certificate=None if update.certificate is None else messages.certificate_message(update.certificate),
            device=None if view is None else messages.device_message(view),
            unexplained_residue=update.unexplained_residue,
        )
        return pb.ScrubUpdate(result=result)


async def _page(entries: Sequence[HistoryEntry], *, more: bool) -> pb.GetHistoryResponse:
    """Return as many of ``entries`` as fit into one message, and where to continue if that is not all.

    Args:
        more: there are older entries than the last of ``entries``.

    Raises:
        InvalidRequest: the first one alone is too large.
    """
    answer = pb.GetHistoryResponse(next_before_sequence=0)
    room = _MAX_MESSAGE_BYTES
    for number, each in enumerate(entries):
        if number % _ENTRIES_PER_YIELD == _ENTRIES_PER_YIELD - 1:
            await asyncio.sleep(0)
        message = messages.history_entry_message(each)
        room -= message.ByteSize() + _ENTRY_OVERHEAD_BYTES
        if room < 0:
            break
        answer.entries.append(message)
    if more or len(answer.entries) < len(entries):
        if not answer.entries:
            row = entries[0].sequence
            raise InvalidRequest(f"Row {row} is too large for a response; skip it with --before {row}.")
        answer.next_before_sequence = answer.entries[-1].sequence
    return answer


async def _close_stream(stream: AsyncIterator[Any]) -> None:
    """Close a stream that its caller cancelled now, not when it is garbage-collected."""
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()


def _resolve_device_id(service: Service, device: str) -> str:
    """Return the id of the device that ``device`` names.

    Raises:
        InvalidRequest: no device or more than one matches.
        NotReady: the service is starting and does not know its devices yet.
    """
    view = service.view()
    view.require_ready()
    return find_device((each.device for each in view.devices), device).id


def _view_of(service: Service, device: str) -> DeviceView | None:
    return next((each for each in service.view().devices if each.device.id == device), None)
