"""Clients of the service: one class for each socket.

Invariants: every failure is an error of :mod:`scrubber.domain.errors`. If the service responded, it is the class that
the service raised; if the socket is missing or not accessible, the message tells the user what to do. A failed call is
not repeated here: that is the caller's decision. Nothing of the engine is imported.
"""

from __future__ import annotations

import grp
import os
import socket
import stat
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

import grpc

from scrubber.api import scrubber_pb2 as pb
from scrubber.api import scrubber_pb2_grpc
from scrubber.api.peer_versions import USER_AGENT
from scrubber.api.sockets import Purpose, Sockets, grpc_target
from scrubber.api.status import CLASS_KEY, error_from_status
from scrubber.domain.errors import InvalidConfiguration, PermissionDenied, ScrubberError, Unavailable

__all__ = ["AdminClient", "PluginClient", "ReadClient"]

_T = TypeVar("_T")

_OPTIONS = (
    # A service that restarts is back within a second: try to reconnect that often, and no more.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    # Contrary to its name, the time limit of one connection attempt: a loaded node does not mean that the service is
    # away.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.primary_user_agent", USER_AGENT),
)

_UNAVAILABLE_MESSAGE = "The scrub service on this node does not answer."
_NO_ANSWER_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)

_CALL_TIMEOUT = 10.0
"""Seconds for a request about state; the service answers it from memory or from its ledger."""
_SLOW_CALL_TIMEOUT = 60.0
"""Seconds for a request for which the service calls the driver and reads ``/proc``."""
_MAX_PAGE_ENTRIES = 1000
"""Maximum number of history entries in one response."""


class _Client:
    """One socket with one channel, opened at the first call. Use as ``async with``, or :meth:`close` it."""

    purpose: ClassVar[Purpose]
    stub: ClassVar[type[Any]]

    def __init__(self, sockets: Path) -> None:
        self._path = Sockets(sockets).path(self.purpose)
        self._channel: grpc.aio.Channel | None = None
        self._stub_instance: Any = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel the calls in progress and close the connection; a later call opens a new one."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    @property
    def _stub(self) -> Any:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(grpc_target(self._path), options=_OPTIONS)
            self._stub_instance = type(self).stub(self._channel)
        return self._stub_instance

    async def _call(self, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._translate_error(error) from error

    async def _stream(
        self, call: grpc.aio.UnaryStreamCall[Any, _T], *, endless: bool = False
    ) -> AsyncGenerator[_T, None]:
        try:
            async for each in call:
                yield each
            if endless:
                raise Unavailable("The scrub service ended the stream.", public_message=_UNAVAILABLE_MESSAGE)
        except grpc.aio.AioRpcError as error:
            raise self._translate_error(error) from error
        finally:
            call.cancel()

    def _translate_error(self, error: grpc.aio.AioRpcError) -> ScrubberError:
        metadata = tuple(error.trailing_metadata() or ())
        if error.code() in _NO_ANSWER_CODES and all(key != CLASS_KEY for key, _ in metadata):
            return _no_answer_error(self._path, error.code())
        return error_from_status(error.code(), error.details(), metadata, public=self.purpose is Purpose.PLUGIN)


class PluginClient(_Client):
    """The calls of the device plugin. The text of its errors may be shown to any tenant, as ``error.public``.

    Args:
        trace_metadata: returns metadata with the trace context, sent with a reservation and a hand-over.
    """

    purpose = Purpose.PLUGIN
    stub = scrubber_pb2_grpc.PluginStub

    def __init__(self, sockets: Path, *, trace_metadata: Callable[[], tuple[tuple[str, str], ...]] = tuple) -> None:
        super().__init__(sockets)
        self._trace_metadata = trace_metadata
        self._identity = os.urandom(16).hex()

    async def snapshot(self, timeout: float) -> pb.Snapshot:
        """Return all devices as they are now; raises :class:`Unavailable` after ``timeout`` seconds."""
        call: Awaitable[pb.Snapshot] = self._stub.GetSnapshot(pb.GetSnapshotRequest(), timeout=timeout)
        return await self._call(call)

    def watch_snapshots(self) -> AsyncGenerator[pb.Snapshot, None]:
        """Yield the snapshot, now and after each change; raises :class:`Unavailable` if the service is lost."""
        return self._stream(self._stub.WatchSnapshots(pb.GetSnapshotRequest(plugin=self._identity)), endless=True)

    async def announce(
        self, resource: str, mapping: Mapping[str, str], timeout: float
    ) -> pb.SetResourceMappingResponse:
        """Announce what the ids of ``resource`` mean, replacing everything announced for it before.

        The devices are kept from claims while this client follows the snapshots, and some seconds beyond.

        Args:
            resource: the kubelet's name of it.
            mapping: the kubelet's id → id of our device. Ids of devices and ``<device id>::<n>`` may be omitted;
                several ids of one device are its shares.

        Raises:
            Unavailable: no response within ``timeout`` seconds.
            InvalidRequest: no or too many resources or offers, or an id that is invalid for such a resource.
            PermissionDenied: the service is an older one without this call (``code`` is ``"unknown-method"``).
        """
        request = pb.SetResourceMappingRequest(
            resource=resource,
            mappings=[pb.IdMapping(id=id_, device_id=device) for id_, device in mapping.items()],
            plugin=self._identity,
        )
        call: Awaitable[pb.SetResourceMappingResponse] = self._stub.SetResourceMapping(request, timeout=timeout)
        return await self._call(call)

    async def set_yield(self, plugin: str, reason: str, timeout: float) -> pb.NodeYield:
        """Request that the node be yielded, or with an empty ``reason`` that this plugin does not request it.

        Args:
            plugin: what this plugin serves, such as its resource; every plugin of a node has a request of its own.

        Raises:
            Unavailable: no response within ``timeout`` seconds.
            InvalidRequest: the name or the reason is too long, or too many plugins have requests.
        """
        request = pb.SetYieldRequest(plugin=plugin, reason=reason)
        call: Awaitable[pb.NodeYield] = self._stub.SetYield(request, timeout=timeout)
        return await self._call(call)

    async def report_agent_pause(self, report: pb.AgentPauseReport, timeout: float) -> None:
        """Report what the plugin offers so that agents release devices, and how far it is; durable on return.

        Raises:
            Unavailable: no response within ``timeout`` seconds; the report may have been recorded.
            InvalidRequest: it contradicts the pause that the service has recorded: nothing may be changed for it.
        """
        call: Awaitable[pb.AgentPauseReportResponse] = self._stub.ReportAgentPause(report, timeout=timeout)
        await self._call(call)

    async def reserve(self, device_ids: Sequence[str], timeout: float, *, resource: str = "") -> pb.ReserveResponse:
        """Notify the service of an allocation.

        Args:
            resource: the kubelet's name of the resource that ``device_ids`` belong to; empty: they are ids of our
                devices.

        Raises:
            Unavailable: no response within ``timeout`` seconds.
            InvalidRequest, Quarantined: refusals of the service.
        """
        call: Awaitable[pb.ReserveResponse] = self._stub.Reserve(
            pb.ReserveRequest(device_ids=device_ids, resource=resource),
            timeout=timeout,
            metadata=self._trace_metadata(),
        )
        return await self._call(call)

    async def hand_over(
        self,
        device_ids: Sequence[str],
        *,
        wait_seconds: float,
        reserved_unseen: Sequence[str] = (),
        resource: str = "",
        timeout: float,
    ) -> pb.HandOverResponse:
        """Request all of ``device_ids`` or none. Cancelling this stops the waiting, not the scrubs.

        Args:
            wait_seconds: how long the service may wait for scrubs and earlier pods; 0 means the policy's limit.
            reserved_unseen: ids among them that were allocated while the service could not be notified.
            resource: the kubelet's name of the resource that ``device_ids`` belong to; empty: they are ids of our
                devices.
            timeout: seconds after which the service counts as away; more than ``wait_seconds``.

        Raises:
            Unavailable: the service is away, or did not respond.
            NotReady, Quarantined, DeviceBusy, InvalidRequest, LedgerFailure: refusals of the service.
        """
        request = pb.HandOverRequest(
            device_ids=device_ids, wait_seconds=wait_seconds, unreserved_ids=reserved_unseen, resource=resource
        )
        call: Awaitable[pb.HandOverResponse] = self._stub.HandOver(
            request, timeout=timeout, metadata=self._trace_metadata()
        )
        return await self._call(call)

    async def prepare_claim(
        self,
        claim: pb.Claim,
        devices: Sequence[pb.ClaimDevice],
        pods: Sequence[pb.ClaimPod],
        *,
        driver: str,
        deadline_seconds: float,
        timeout: float,
        extended_resources: Sequence[str] = (),
        restores: bool = False,
        withdrawn: bool = False,
    ) -> pb.PrepareClaimResponse:
        """Prepare all of ``devices`` for ``claim`` or none; a repeated call gets the same answer.

        Args:
            pods: for which the claim is reserved; at least one.
            deadline_seconds: how long the service may wait for scrubs and earlier users; 0 means the policy's limit.
            timeout: seconds after which the service counts as away; more than ``deadline_seconds``.
            extended_resources: for which the scheduler created the claim; empty for a claim of the user's.
            restores: whether the kubelet takes the claim for prepared and has not called, so that each of ``pods`` may have
                processes.
            withdrawn: whether it has no CDI specification, and gets none before it is prepared.

        Raises:
            Unavailable: the service is away, or did not respond.
            NotReady, Quarantined, Refused, InvalidRequest, LedgerFailure: refusals of the service.
        """
        request = pb.PrepareClaimRequest(
            claim=claim,
            devices=devices,
            pods=pods,
            deadline_seconds=deadline_seconds,
            driver=driver,
            extended_resources=extended_resources,
            restores=restores,
            withdrawn=withdrawn,
        )
        call: Awaitable[pb.PrepareClaimResponse] = self._stub.PrepareClaim(
            request, timeout=timeout, metadata=self._trace_metadata()
        )
        return await self._call(call)

    async def unprepare_claim(
        self, claim_uid: str, *, deadline_seconds: float, timeout: float, withdrawn: bool = False
    ) -> pb.UnprepareClaimResponse:
        """Release a claim; ``done`` once each of its devices is clean or out of service.

        Args:
            deadline_seconds: how long the service may wait; 0: not at all.
            timeout: seconds after which the service counts as away; more than ``deadline_seconds``.
            withdrawn: whether it has no CDI specification, and gets none before it is prepared again.

        Raises:
            Unavailable: the service is away, or did not respond: the claim may be prepared or released.
            NotReady, InvalidRequest, LedgerFailure: refusals of the service.
        """
        request = pb.UnprepareClaimRequest(claim_uid=claim_uid, deadline_seconds=deadline_seconds, withdrawn=withdrawn)
        call: Awaitable[pb.UnprepareClaimResponse] = self._stub.UnprepareClaim(
            request, timeout=timeout, metadata=self._trace_metadata()
        )
        return await self._call(call)

    async def set_claim_pods(self, claim_uid: str, pods: Sequence[pb.ClaimPod], timeout: float) -> None:
        """Report for which pods a claim is reserved now; durable on return. An unknown claim is ignored.

        Raises:
            Unavailable: no response within ``timeout`` seconds.
            InvalidRequest, LedgerFailure: refusals of the service.
        """
        request = pb.SetClaimPodsRequest(claim_uid=claim_uid, pods=pods)
        call: Awaitable[pb.SetClaimPodsResponse] = self._stub.SetClaimPods(request, timeout=timeout)
        await self._call(call)

    async def list_claims(self, timeout: float) -> pb.ListClaimsResponse:
        """Return the claims that are prepared, or whose release is not complete, and those that only the kubelet considers prepared.

        Raises:
            Unavailable: no response within ``timeout`` seconds.
            NotReady: the service is starting, or the node is yielded.
        """
        call: Awaitable[pb.ListClaimsResponse] = self._stub.ListClaims(pb.ListClaimsRequest(), timeout=timeout)
        return await self._call(call)


class ReadClient(_Client):
    """State and history."""

    purpose = Purpose.READ
    stub = scrubber_pb2_grpc.ReadStub

    async def devices(self) -> pb.ListDevicesResponse:
        """Return all devices as they are now."""
        call: Awaitable[pb.ListDevicesResponse] = self._stub.ListDevices(pb.ListDevicesRequest(), timeout=_CALL_TIMEOUT)
        return await self._call(call)

    def watch_devices(self) -> AsyncGenerator[pb.ListDevicesResponse, None]:
        """Yield all devices now and after each change; raises :class:`Unavailable` if the service is lost."""
        return self._stream(self._stub.WatchDevices(pb.ListDevicesRequest()), endless=True)

    async def history(
        self,
        device: str = "",
        since: float = 0.0,
        limit: int | None = 100,
        *,
        tenant: str = "",
        outcome: str = "",
        events: Sequence[str] = (),
        before: int = 0,
    ) -> pb.GetHistoryResponse:
        """Return the pages of :meth:`history_pages` as one; ``next_before`` is that of the last page."""
        found = pb.GetHistoryResponse()
        pages = self.history_pages(device, since, limit, tenant=tenant, outcome=outcome, events=events, before=before)
        async for page in pages:
            found.entries.extend(page.entries)
            found.next_before_sequence = page.next_before_sequence
        return found

    async def history_pages(
        self,
        device: str = "",
        since: float = 0.0,
        limit: int | None = 100,
        *,
        tenant: str = "",
        outcome: str = "",
        events: Sequence[str] = (),
        before: int = 0,
    ) -> AsyncGenerator[pb.GetHistoryResponse, None]:
        """Yield pages of audit rows, newest first; ``next_before`` is not 0 if there are older ones.

        Args:
            device: UUID, unique prefix or index; empty means all.
            since: wall-clock seconds.
            limit: maximum number of rows in all; None means every row.
            tenant: a namespace; empty means all.
            outcome: ``passed``, ``failed``, ``granted``, … as defined by :class:`GetHistoryRequest`; empty means all.
            events: names, and prefixes of names that end in a dot; none means all.
            before: only rows with a smaller sequence; 0 means all.

        Raises:
            InvalidRequest: an invalid argument.
            ScrubberError: the response leads back to rows that were already read.
        """
        request = pb.GetHistoryRequest(
            device=device, since=since, tenant=tenant, outcome=outcome, events=events, before_sequence=before
        )
        left = limit
        while True:
            request.limit = _MAX_PAGE_ENTRIES if left is None else min(_MAX_PAGE_ENTRIES, left)
            call: Awaitable[pb.GetHistoryResponse] = self._stub.GetHistory(request, timeout=_CALL_TIMEOUT)
            page = await self._call(call)
            _check_order(request, page)
            yield page
            left = None if left is None else left - len(page.entries)
            if not page.next_before_sequence or (left is not None and left <= 0):
                return
            request.before_sequence = page.next_before_sequence

    async def service_info(self) -> pb.ServiceInfo:
        """Return the version and configuration of the service, and whether its ledger accepts hand-overs."""
        call: Awaitable[pb.ServiceInfo] = self._stub.GetServiceInfo(pb.GetServiceInfoRequest(), timeout=_CALL_TIMEOUT)
        return await self._call(call)

    async def reset_plan(self, device: str) -> pb.ResetPlan:
        """Return the effects and blockers of a reset of ``device`` (UUID, unique prefix or index); changes nothing.

        Raises:
            InvalidRequest: no such device.
            DriverTimeout, DeviceLost, Unreadable: the device cannot be queried.
        """
        request = pb.GetResetPlanRequest(device=device)
        call: Awaitable[pb.ResetPlan] = self._stub.GetResetPlan(request, timeout=_SLOW_CALL_TIMEOUT)
        return await self._call(call)

    async def certificate(self, id: str) -> pb.SignedCertificate:
        """Return certificate ``id``, as it was signed; raises :class:`InvalidRequest` when there is none."""
        request = pb.GetCertificateRequest(id=id)
        call: Awaitable[pb.SignedCertificate] = self._stub.GetCertificate(request, timeout=_CALL_TIMEOUT)
        return await self._call(call)

    def audit_pages(self, after: int = 0) -> AsyncGenerator[pb.AuditPage, None]:
        """Yield the current audit log, oldest first, without the rows up to sequence ``after``; at least one page.

        Raises:
            NotReady: rows were pruned while they were read, to keep the log bounded; request it again.
        """
        return self._stream(self._stub.ReadAudit(pb.ReadAuditRequest(after_sequence=after)))


class AdminClient(_Client):
    """Calls that act on devices. ``device`` is a UUID, a unique prefix of one, or an index."""

    purpose = Purpose.ADMIN
    stub = scrubber_pb2_grpc.AdminStub

    def scrub(self, device: str, path: str) -> AsyncGenerator[pb.ScrubUpdate, None]:
        """Scrub ``device`` by the ``"fast"`` or the ``"slow"`` path; the last update contains the result.

        A scrub in progress is joined. Ending the iteration does not end the scrub.

        Raises:
            InvalidRequest: no such device or path.
            DeviceBusy: the device is in use.
        """
        return self._stream(self._stub.Scrub(pb.ScrubRequest(device=device, path=path)))

    async def quarantine(self, device: str, reason: str) -> pb.DeviceResponse:
        """Take ``device`` out of service until an operator releases it."""
        request = pb.QuarantineRequest(device=device, reason=reason)
        call: Awaitable[pb.DeviceResponse] = self._stub.Quarantine(request, timeout=_CALL_TIMEOUT)
        return await self._call(call)

    async def unquarantine(self, device: str, reason: str) -> pb.DeviceResponse:
        """Release ``device``, which must pass its checks before it returns to service."""
        request = pb.QuarantineRequest(device=device, reason=reason)
        call: Awaitable[pb.DeviceResponse] = self._stub.Unquarantine(request, timeout=_CALL_TIMEOUT)
        return await self._call(call)

    async def break_glass(self, device: str, seconds: float, reason: str) -> pb.DeviceResponse:
        """Bypass all checks for ``device`` for ``seconds`` from now, in any state; 0 ends the override at once.

        An active override is replaced. It is recorded in the audit log, and reported until it ends.

        Raises:
            InvalidRequest: no such device, no reason, a longer time than the policy allows, or a device that an
                operator quarantined.
        """
        request = pb.BreakGlassRequest(device=device, reason=reason, duration_seconds=seconds)
        call: Awaitable[pb.DeviceResponse] = self._stub.BreakGlass(request, timeout=_CALL_TIMEOUT)
        return await self._call(call)

    def reset(self, device: str, reason: str) -> AsyncGenerator[pb.ScrubUpdate, None]:
        """Reset ``device`` and scrub it; updates as in :meth:`scrub`. Ending the iteration ends neither.

        Raises:
            InvalidRequest: no such device, or no reason.
            DeviceBusy: it, or a device that is reset with it, is in use or being scrubbed, or the reset is blocked.
            Refused: it can never be reset here, or the policy forbids it.
        """
        return self._stream(self._stub.Reset(pb.ResetRequest(device=device, reason=reason)))

    async def accept_baseline(
        self, device: str, reason: str, expected_facts: Mapping[str, str] | None = None
    ) -> pb.DeviceResponse:
        """Accept the current facts of ``device`` as its baseline.

        Args:
            expected_facts: the facts that were shown to the operator; empty when none were shown.

        Raises:
            InvalidRequest: no such device, or no reason.
            Refused: the device differs from what was shown.
        """
        request = pb.AcceptBaselineRequest(device=device, reason=reason, expected_facts=expected_facts)
        call: Awaitable[pb.DeviceResponse] = self._stub.AcceptBaseline(request, timeout=_SLOW_CALL_TIMEOUT)
        return await self._call(call)

    async def yield_node(self, reason: str) -> pb.NodeYield:
        """Request that the node be yielded; returns when that is durable, before the driver is closed.

        Raises:
            InvalidRequest: no reason.
        """
        call: Awaitable[pb.NodeYield] = self._stub.YieldNode(pb.YieldNodeRequest(reason=reason), timeout=_CALL_TIMEOUT)
        return await self._call(call)

    async def resume_node(self, reason: str, *, all_requests: bool = False) -> pb.NodeYield:
        """Withdraw the operators' request, or every request; the reply has those that remain.

        Raises:
            InvalidRequest: no reason.
        """
        request = pb.ResumeNodeRequest(reason=reason, all=all_requests)
        call: Awaitable[pb.NodeYield] = self._stub.ResumeNode(request, timeout=_CALL_TIMEOUT)
        return await self._call(call)

    async def start_job(
        self, job: pb.Job, devices: Sequence[str] = (), *, count: int = 0, wait_seconds: float
    ) -> pb.StartJobResponse:
        """Hand all of ``devices``, or any ``count`` devices, over to ``job``; a repeated call gets the same answer.

        Args:
            wait_seconds: how long the service may wait for scrubs and earlier users; more than 0.

        Raises:
            Unavailable: the service is away, or did not respond: the devices may have been handed over.
            NotReady, Quarantined, Refused, InvalidRequest, LedgerFailure: refusals of the service.
        """
        request = pb.StartJobRequest(job=job, devices=devices, count=count, wait_seconds=wait_seconds)
        call: Awaitable[pb.StartJobResponse] = self._stub.StartJob(request, timeout=wait_seconds + _CALL_TIMEOUT)
        return await self._call(call)

    async def end_job(self, job: pb.Job, *, wait_seconds: float) -> pb.EndJobResponse:
        """Report that ``job`` has ended; ``done`` once each of its devices is clean or out of service.

        Args:
            wait_seconds: how long the service may wait for that; 0: not at all.

        Raises:
            Unavailable: the service is away, or did not respond: the end may have been recorded.
            NotReady, InvalidRequest, LedgerFailure: refusals of the service.
        """
        request = pb.EndJobRequest(job=job, wait_seconds=wait_seconds)
        call: Awaitable[pb.EndJobResponse] = self._stub.EndJob(request, timeout=wait_seconds + _CALL_TIMEOUT)
        return await self._call(call)


def _check_order(request: pb.GetHistoryRequest, page: pb.GetHistoryResponse) -> None:
    """Raise unless ``page`` starts where ``request`` specifies and leads to older rows or to the end."""
    rows = [each.sequence for each in page.entries]
    lost = page.next_before_sequence and page.next_before_sequence not in rows[-1:]
    if lost or (request.before_sequence and rows and rows[0] >= request.before_sequence):
        range_text = f"rows older than row {request.before_sequence}" if request.before_sequence else "the newest rows"
        raise ScrubberError(
            f"The service was asked for {range_text}, returned {len(rows)} rows and continues before row "
            f"{page.next_before_sequence}, which does not lead to older rows. Its audit log may be damaged; "
            "run: scrubber audit verify"
        )


def _no_answer_error(path: Path, code: grpc.StatusCode) -> ScrubberError:
    """Return the error for a missing response on ``path``, with the cause that the path itself reveals."""
    try:
        about = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Unavailable(
            f"The scrub service is not reachable: {path} does not exist. Start it with scrubber serve, or pass "
            "its directory with --socket-dir.",
            public_message=_UNAVAILABLE_MESSAGE,
        )
    except PermissionError:
        return _permission_error(path)
    if not stat.S_ISSOCK(about.st_mode):
        return InvalidConfiguration(
            f"{path} is not a socket; pass the directory of the service's sockets with --socket-dir."
        )
    if not os.access(path, os.W_OK, effective_ids=True):
        return _permission_error(path)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unavailable(f"The scrub service did not answer in time on {path}.", public_message=_UNAVAILABLE_MESSAGE)
    if _has_listener(path):
        return Unavailable(
            f"The scrub service on {path} closed the connection before it answered: it is stopping or "
            "restarting, or this user or all users together have too many open connections. Close some if "
            "they are yours, and retry.",
            public_message=_UNAVAILABLE_MESSAGE,
        )
    return Unavailable(
        f"The scrub service is not reachable: no process listens on {path}. Is scrubber serve running?",
        public_message=_UNAVAILABLE_MESSAGE,
    )


def _has_listener(path: Path) -> bool:
    """Return at once whether a process accepts connections on ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fsencode(path))
        except BlockingIOError:  # the kernel's queue of waiting callers is full
            return True
        except OSError:
            return False
    return True


def _permission_error(path: Path) -> PermissionDenied:
    return PermissionDenied(
        f"uid {os.geteuid()} may not use {path}: run this command as root or as the service's user, "
        f"{_access_hint(path)}.",
        public_message="The caller may not use the scrub service on this node.",
    )


def _access_hint(path: Path) -> str:
    """Return how this user could get access, as far as file permissions show."""
    flags = "--admin-group" if path.parent.name == Purpose.ADMIN else "--admin-group or --read-group"
    for place in (path.parent.parent, path.parent, path):
        try:
            about = place.stat()
        except OSError:
            break
        access = os.X_OK if place != path else os.W_OK
        if not os.access(place, access, effective_ids=True) and about.st_mode & stat.S_IRWXG and about.st_gid != 0:
            try:
                group = grp.getgrgid(about.st_gid).gr_name
            except KeyError:
                group = str(about.st_gid)
            return f"or join the group {group} (usermod -aG {group} NAME; effective at the next login)"
    return f"or grant a group access with scrubber serve {flags}"
