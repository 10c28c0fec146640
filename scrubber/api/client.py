"""The service as its callers see it: three clients, one for each socket.

Promise: every failure is an error of :mod:`scrubber.domain.errors`, the class that the service raised wherever it
answered at all, and says what to do about a socket that is not there or may not be used. A call that fails is not tried
again in here: what to do about it is the caller's decision. Nothing of the engine is imported.
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
from scrubber.api.sockets import Purpose, Sockets, grpc_target
from scrubber.api.status import CLASS_KEY, error_from_status
from scrubber.domain.errors import InvalidConfiguration, PermissionDenied, ScrubberError, Unavailable

__all__ = ["AdminClient", "PluginClient", "ReadClient"]

_T = TypeVar("_T")

_OPTIONS = (
    # A service that restarts is back within a second: look for it that often, and no more.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    # In spite of its name, how long one attempt to connect may take: a loaded node is not an absent service.
    ("grpc.min_reconnect_backoff_ms", 5000),
)

_UNAVAILABLE_MESSAGE = "The scrub service on this node does not answer."
_NO_ANSWER_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)

_CALL_TIMEOUT = 10.0
"""Seconds that a question about state may take; the service answers it from memory or from its ledger."""
_SLOW_CALL_TIMEOUT = 60.0
"""Seconds that a question may take for which the service asks the driver and walks ``/proc``."""
_MAX_PAGE_ENTRIES = 1000
"""Entries of history that the service gives at once."""


class _Client:
    """One socket, one channel, made at the first call. Use as ``async with``, or :meth:`close` it."""

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
        """Cancel the calls under way and let go of the connection; a later call opens a new one."""
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
        told = tuple(error.trailing_metadata() or ())
        if error.code() in _NO_ANSWER_CODES and all(key != CLASS_KEY for key, _ in told):
            return _no_answer_error(self._path, error.code())
        return error_from_status(error.code(), error.details(), told, public=self.purpose is Purpose.PLUGIN)


class PluginClient(_Client):
    """What the device plugin asks. The text of its errors may be shown to any tenant, as ``error.public``.

    Args:
        trace_metadata: what an allocation and a hand-over tell the service, as metadata, of the trace that they belong to.
    """

    purpose = Purpose.PLUGIN
    stub = scrubber_pb2_grpc.PluginStub

    def __init__(self, sockets: Path, *, trace_metadata: Callable[[], tuple[tuple[str, str], ...]] = tuple) -> None:
        super().__init__(sockets)
        self._trace_metadata = trace_metadata

    async def snapshot(self, timeout: float) -> pb.Snapshot:
        """All devices as they are now; raises :class:`Unavailable` after ``timeout`` seconds."""
        call: Awaitable[pb.Snapshot] = self._stub.GetSnapshot(pb.GetSnapshotRequest(), timeout=timeout)
        return await self._call(call)

    def watch_snapshots(self) -> AsyncGenerator[pb.Snapshot, None]:
        """The present snapshot, then a whole one after every change; raises :class:`Unavailable` when the service goes."""
        return self._stream(self._stub.WatchSnapshots(pb.GetSnapshotRequest()), endless=True)

    async def announce(self, resource: str, mapping: Mapping[str, str], timeout: float) -> pb.AnnounceResponse:
        """Say what the ids of ``resource`` mean, in the place of everything that was announced for it before.

        Args:
            resource: the kubelet's name of it.
            mapping: by the kubelet's id, the id of our device. Ids of devices and ``<device id>::<n>`` need not be among
                them; those that mean one device are its shares.

        Raises:
            Unavailable: no answer within ``timeout`` seconds.
            InvalidRequest: no or too many resources or offers, or one that is no id of such a resource.
            PermissionDenied: the service is an older one that knows no such call (``code`` is ``"unknown-method"``).
        """
        request = pb.AnnounceRequest(
            resource=resource, offers=[pb.Offer(id=id_, device=device) for id_, device in mapping.items()]
        )
        call: Awaitable[pb.AnnounceResponse] = self._stub.Announce(request, timeout=timeout)
        return await self._call(call)

    async def reserve(self, device_ids: Sequence[str], timeout: float, *, resource: str = "") -> pb.ReserveResponse:
        """Tell of an allocation.

        Args:
            resource: the kubelet's name of the resource whose own ids ``device_ids`` are; empty: they are our devices'.

        Raises:
            Unavailable: no answer within ``timeout`` seconds.
            InvalidRequest, Quarantined: as the service says.
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
        """Ask for all of ``device_ids`` or none. Cancelling this stops the waiting, not the scrubs.

        Args:
            wait_seconds: how long the service may wait for scrubs and earlier pods; 0 means the policy's limit.
            reserved_unseen: ids among them that were allocated while the service could not be told.
            resource: the kubelet's name of the resource whose own ids ``device_ids`` are; empty: they are our devices'.
            timeout: seconds after which the service counts as away; more than ``wait_seconds``.

        Raises:
            Unavailable: the service is not there, or did not answer.
            NotReady, Quarantined, DeviceBusy, InvalidRequest, LedgerFailure: as the service says.
        """
        request = pb.HandOverRequest(
            device_ids=device_ids, wait_seconds=wait_seconds, reserved_unseen=reserved_unseen, resource=resource
        )
        call: Awaitable[pb.HandOverResponse] = self._stub.HandOver(
            request, timeout=timeout, metadata=self._trace_metadata()
        )
        return await self._call(call)


class ReadClient(_Client):
    """State and history."""

    purpose = Purpose.READ
    stub = scrubber_pb2_grpc.ReadStub

    async def devices(self) -> pb.ListDevicesResponse:
        """All devices as they are now."""
        call: Awaitable[pb.ListDevicesResponse] = self._stub.ListDevices(pb.ListDevicesRequest(), timeout=_CALL_TIMEOUT)
        return await self._call(call)

    def watch_devices(self) -> AsyncGenerator[pb.ListDevicesResponse, None]:
        """All devices as they are now, then again after every change; raises :class:`Unavailable` when the service goes."""
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
        """The pages of :meth:`history_pages` as one: audit rows, newest first; ``next_before`` is that of the last one."""
        found = pb.GetHistoryResponse()
        pages = self.history_pages(device, since, limit, tenant=tenant, outcome=outcome, events=events, before=before)
        async for page in pages:
            found.entries.extend(page.entries)
            found.next_before = page.next_before
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
        """Audit rows, newest first, as the service gives them; ``next_before`` is not 0 if there are older ones.

        Args:
            device: UUID, unique prefix or index; empty means all.
            since: wall-clock seconds.
            limit: at most this many rows in all; None means every row.
            tenant: a namespace; empty means all.
            outcome: ``passed``, ``failed``, ``granted``, … as :class:`GetHistoryRequest` says; empty means all.
            events: names, and beginnings of names that end in a dot; none means all.
            before: only rows with a smaller sequence; 0 means all.

        Raises:
            InvalidRequest: one of these means nothing here.
            ScrubberError: its answer leads back to rows that were read.
        """
        request = pb.GetHistoryRequest(
            device=device, since=since, tenant=tenant, outcome=outcome, events=events, before=before
        )
        left = limit
        while True:
            request.limit = _MAX_PAGE_ENTRIES if left is None else min(_MAX_PAGE_ENTRIES, left)
            call: Awaitable[pb.GetHistoryResponse] = self._stub.GetHistory(request, timeout=_CALL_TIMEOUT)
            page = await self._call(call)
            _check_order(request, page)
            yield page
            left = None if left is None else left - len(page.entries)
            if not page.next_before or (left is not None and left <= 0):
                return
            request.before = page.next_before

    async def service_info(self) -> pb.ServiceInfo:
        """What runs there, and whether its ledger takes hand-overs."""
        call: Awaitable[pb.ServiceInfo] = self._stub.GetServiceInfo(pb.GetServiceInfoRequest(), timeout=_CALL_TIMEOUT)
        return await self._call(call)

    async def reset_plan(self, device: str) -> pb.ResetPlan:
        """What a reset of ``device`` (UUID, unique prefix or index) would do and what blocks it; changes nothing.

        Raises:
            InvalidRequest: no such device.
            DriverTimeout, DeviceLost, Unreadable: the device cannot be asked.
        """
        request = pb.GetResetPlanRequest(device=device)
        call: Awaitable[pb.ResetPlan] = self._stub.GetResetPlan(request, timeout=_SLOW_CALL_TIMEOUT)
        return await self._call(call)

    async def certificate(self, id: str) -> pb.SignedCertificate:
        """The certificate that is called ``id``, as it was signed; raises :class:`InvalidRequest` when there is none."""
        request = pb.GetCertificateRequest(id=id)
        call: Awaitable[pb.SignedCertificate] = self._stub.GetCertificate(request, timeout=_CALL_TIMEOUT)
        return await self._call(call)

    def audit_pages(self, after: int = 0) -> AsyncGenerator[pb.AuditPage, None]:
        """The audit trail as of now, oldest first, without the rows up to sequence ``after``; at least one page.

        Raises:
            NotReady: rows were given up while they were read, to keep the trail bounded; ask again.
        """
        return self._stream(self._stub.ReadAudit(pb.ReadAuditRequest(after=after)))


class AdminClient(_Client):
    """Acting on devices. ``device`` is a UUID, a unique prefix of one, or an index."""

    purpose = Purpose.ADMIN
    stub = scrubber_pb2_grpc.AdminStub

    def scrub(self, device: str, path: str) -> AsyncGenerator[pb.ScrubUpdate, None]:
        """Scrub ``device`` by the ``"fast"`` or the ``"slow"`` path; the last update carries the result.

        A scrub that is under way is joined. Giving up the iteration does not end it.

        Raises:
            InvalidRequest: no such device or path.
            DeviceBusy: the device is in use.
        """
        return self._stream(self._stub.Scrub(pb.ScrubRequest(device=device, path=path)))

    async def quarantine(self, device: str, reason: str) -> pb.DeviceAnswer:
        """Take ``device`` out of service until a person releases it."""
        request = pb.QuarantineRequest(device=device, reason=reason)
        call: Awaitable[pb.DeviceAnswer] = self._stub.Quarantine(request, timeout=_CALL_TIMEOUT)
        return await self._call(call)

    async def unquarantine(self, device: str, reason: str) -> pb.DeviceAnswer:
        """Let ``device`` prove itself again."""
        request = pb.QuarantineRequest(device=device, reason=reason)
        call: Awaitable[pb.DeviceAnswer] = self._stub.Unquarantine(request, timeout=_CALL_TIMEOUT)
        return await self._call(call)

    async def break_glass(self, device: str, seconds: float, reason: str) -> pb.DeviceAnswer:
        """For ``seconds`` from now refuse nothing for ``device``, whatever is known of it; 0 ends that at once.

        A time that is running already is replaced. It is on the audit, and told of until it ends.

        Raises:
            InvalidRequest: no such device, no reason, a longer time than the policy allows, or a device that a person
                quarantined.
        """
        request = pb.BreakGlassRequest(device=device, reason=reason, seconds=seconds)
        call: Awaitable[pb.DeviceAnswer] = self._stub.BreakGlass(request, timeout=_CALL_TIMEOUT)
        return await self._call(call)

    def reset(self, device: str, reason: str) -> AsyncGenerator[pb.ScrubUpdate, None]:
        """Reset ``device`` and scrub it; updates as :meth:`scrub`. Giving up the iteration ends neither.

        Raises:
            InvalidRequest: no such device, or no reason.
            DeviceBusy: it, or a device that is reset with it, is in use or being scrubbed, or something blocks the reset.
            Refused: it can never be reset here, or the policy says never.
        """
        return self._stream(self._stub.Reset(pb.ResetRequest(device=device, reason=reason)))

    async def accept_baseline(
        self, device: str, reason: str, expected_facts: Mapping[str, str] | None = None
    ) -> pb.DeviceAnswer:
        """From now on, what ``device`` is at present is what it should be.

        Args:
            expected_facts: its facts as the person who accepts them saw them; empty when nobody was shown any.

        Raises:
            InvalidRequest: no such device, or no reason.
            Refused: it is something else than what was shown.
        """
        request = pb.AcceptBaselineRequest(device=device, reason=reason, shown=expected_facts)
        call: Awaitable[pb.DeviceAnswer] = self._stub.AcceptBaseline(request, timeout=_SLOW_CALL_TIMEOUT)
        return await self._call(call)


def _check_order(request: pb.GetHistoryRequest, page: pb.GetHistoryResponse) -> None:
    """Raise unless ``page`` answers the whole of ``request`` and leads to older rows, or to none."""
    rows = [each.sequence for each in page.entries]
    lost = page.next_before and page.next_before not in rows[-1:]
    if lost or (request.before and rows and rows[0] >= request.before):
        asked = f"what is older than row {request.before}" if request.before else "the newest rows"
        raise ScrubberError(
            f"Asked for {asked}, the service gave {len(rows)} rows and goes on before "
            f"row {page.next_before}, which does not lead to older ones. Its audit trail may be damaged: scrubber audit verify."
        )


def _no_answer_error(path: Path, code: grpc.StatusCode) -> ScrubberError:
    """Why nobody answered on ``path``, as far as the path itself tells."""
    try:
        about = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Unavailable(
            f"The scrub service is not there: {path} does not exist. "
            "Start it with scrubber serve, or give its directory with --socket.",
            public_message=_UNAVAILABLE_MESSAGE,
        )
    except PermissionError:
        return _permission_error(path)
    if not stat.S_ISSOCK(about.st_mode):
        return InvalidConfiguration(
            f"{path} is not a socket; give the directory of the service's sockets with --socket."
        )
    if not os.access(path, os.W_OK, effective_ids=True):
        return _permission_error(path)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unavailable(f"The scrub service did not answer in time on {path}.", public_message=_UNAVAILABLE_MESSAGE)
    if _has_listener(path):
        return Unavailable(
            f"The scrub service on {path} closed the connection before it answered: it is stopping or restarting, or too "
            "many connections are open, of this user or in all. Close some if they are yours, and try again.",
            public_message=_UNAVAILABLE_MESSAGE,
        )
    return Unavailable(
        f"The scrub service is not there: nobody answers on {path}. Is scrubber serve running?",
        public_message=_UNAVAILABLE_MESSAGE,
    )


def _has_listener(path: Path) -> bool:
    """Whether anybody accepts connections on ``path``; answers at once."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fsencode(path))
        except BlockingIOError:  # more callers wait there than the kernel lets queue
            return True
        except OSError:
            return False
    return True


def _permission_error(path: Path) -> PermissionDenied:
    return PermissionDenied(
        f"uid {os.geteuid()} may not use {path}: call as root or as the user that the service runs as, {_access_hint(path)}.",
        public_message="The caller may not use the scrub service on this node.",
    )


def _access_hint(path: Path) -> str:
    """What would let this user in, as far as can be seen from outside."""
    flags = "--admin-group" if path.parent.name == Purpose.ADMIN else "--admin-group or --read-group"
    for place in (path.parent.parent, path.parent, path):
        try:
            about = place.stat()
        except OSError:
            break
        wanted = os.X_OK if place != path else os.W_OK
        if not os.access(place, wanted, effective_ids=True) and about.st_mode & stat.S_IRWXG and about.st_gid != 0:
            try:
                group = grp.getgrgid(about.st_gid).gr_name
            except KeyError:
                group = str(about.st_gid)
            return f"or be in the group {group} (usermod -aG {group} NAME; it counts from the next login)"
    return f"or have a group let in with scrubber serve {flags}"
