"""A node made of values, served by the sockets: it answers as a test sets, and records the requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace

from scrubber.domain.agent_pause import PauseReport
from scrubber.domain.assignment import Pod
from scrubber.domain.device import Access, AccessKind, Device, NodeIdentity
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.evidence import Certificate, Outcome, PathKind, ScrubRecord, ScrubTrigger, Step
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.health.breaker import BreakerState
from scrubber.domain.jobs import Job
from scrubber.domain.node_record import NodeRecord, YieldRequest, YieldRequester
from scrubber.domain.policy import Policy
from scrubber.domain.record import BreakGlass, DeviceRecord
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.states import Cause
from scrubber.engine.resource_ids import Announcer
from scrubber.engine.views import (
    CertificateStatus,
    CertificateView,
    ClaimRelease,
    DeviceView,
    GrantedDevice,
    HandOverCall,
    NodeView,
    PodNotice,
    PrepareClaimCall,
    PreparedClaim,
    ScrubUpdate,
    ServiceView,
    StartJobCall,
    UnpreparedClaim,
)
from scrubber.ports.device import EraseProgress
from scrubber.ports.record import AuditHead, AuditLogPage, AuditRow, Event, HistoryEntry, HistoryQuery

IDENTITY = NodeIdentity(node="node-1", boot="boot-1", driver="sim-1")

POLICY = Policy(digest="d1")

CERTIFICATE = Certificate(
    id="cert-1",
    node=IDENTITY.node,
    boot=IDENTITY.boot,
    driver=IDENTITY.driver,
    device="GPU-a0",
    sequence=3,
    previous_grant=2,
    path=PathKind.SLOW,
    scrub="scrub-1",
    covered=("memory: 8 of 8 bytes cleared and verified",),
    not_covered=("on-chip memory",),
    policy="default",
    policy_digest="d1",
    issued_at=1000.5,
)


def device(index: int) -> Device:
    """Return device ``GPU-a<index>`` with every field set."""
    return Device(
        id=f"GPU-a{index}",
        index=str(index),
        model="Simulated",
        memory_bytes=8 << 20,
        numa_node=index % 2,
        peers=frozenset({f"GPU-a{index ^ 1}"}),
        access=(Access(AccessKind.MOUNT, f"/sim/devices/{index}/memory", f"/dev/simgpu{index}"),),
    )


def of_record(of: Device, record: DeviceRecord) -> DeviceView:
    """Return the view of ``of`` when only its record decides what the kubelet receives."""
    return DeviceView(of, record, advertised=record.advertised, policy=POLICY)


class FakeYields:
    """A :class:`scrubber.engine.views.Yields` that keeps the requests in memory."""

    def __init__(self, note: Callable[[object], None]) -> None:
        self.record = NodeRecord()
        self._note = note

    async def request(self, requester: YieldRequester, reason: str, actor: str) -> None:
        self._note(("yield", requester, reason, actor))
        self.record = self.record.with_request(YieldRequest(requester, reason, actor, 1000.0))

    async def withdraw(self, requester: YieldRequester, reason: str, actor: str, *, everyone: bool = False) -> None:
        self._note(("resume", requester, reason, actor, everyone))
        plugin = requester is YieldRequester.PLUGIN
        ended = self.record.without_plugin(actor) if plugin else self.record.without(requester)
        self.record = self.record.without_any() if everyone else ended


class FakePauses:
    """A :class:`scrubber.engine.views.Pauses` that keeps the reports."""

    def __init__(self, note: Callable[[object], None]) -> None:
        self._note = note

    async def report(self, report: PauseReport) -> None:
        self._note(report)


class FakeClaims:
    """A :class:`scrubber.engine.views.Claims` that keeps the requests, and answers as a test sets."""

    def __init__(self, note: Callable[[object], None]) -> None:
        self._note = note
        self.release = ClaimRelease(done=True)
        self.prepared: tuple[PreparedClaim, ...] = ()
        self.only_listed: tuple[UnpreparedClaim, ...] = ()

    async def prepare(self, call: PrepareClaimCall) -> tuple[GrantedDevice, ...]:
        self._note(call)
        return tuple(
            GrantedDevice(each, n, HandOverKind.SAME_TENANT, PathKind.FAST, CERTIFICATE.id, Basis.CERTIFICATE)
            for n, each in enumerate(call.devices, 1)
        )

    async def set_pods(self, uid: str, pods: Sequence[Pod]) -> None:
        self._note(("set-pods", uid, tuple(pods)))

    async def unprepare(
        self, uid: str, wait_seconds: float, actor: str = "driver", *, withdrawn: bool = False
    ) -> ClaimRelease:
        self._note(("unprepare", uid, wait_seconds, *(("withdrawn",) if withdrawn else ())))
        return self.release

    def current(self) -> tuple[PreparedClaim, ...]:
        return self.prepared

    def unprepared(self) -> tuple[UnpreparedClaim, ...]:
        return self.only_listed


class FakeJobs:
    """A :class:`scrubber.engine.views.Jobs` that keeps the requests, and answers as a test sets."""

    def __init__(self, note: Callable[[object], None]) -> None:
        self._note = note
        self.release = ClaimRelease(done=True)

    async def start(self, call: StartJobCall) -> tuple[GrantedDevice, ...]:
        self._note(call)
        return tuple(
            GrantedDevice(each, n, HandOverKind.OTHER_TENANT, PathKind.SLOW, CERTIFICATE.id, Basis.CERTIFICATE)
            for n, each in enumerate(call.devices, 1)
        )

    async def end(self, job: Job, wait_seconds: float, actor: str) -> ClaimRelease:
        self._note(("end", job, wait_seconds, actor))
        return self.release


class FakeNode:
    """A :class:`scrubber.engine.views.Service`.

    Attributes:
        failure: raised by the next calls that change something or query the ledger, when set.
        busy: hand-overs wait until it is set; clear it to make them wait.
        waiting: set while a hand-over waits.
        cancelled: set once a hand-over that waited was cancelled.
        requests: the requests, in order.
        plan: the answer to a request for a reset plan.
        breaker: which automatic actions are stopped.
        audit log, head: the audit log, and its last row.
    """

    def __init__(self, devices: int = 2) -> None:
        self.announcers: list[Announcer | None] = []
        self._view = NodeView(
            version=1,
            devices=tuple(of_record(device(n), DeviceRecord(f"GPU-a{n}")) for n in range(devices)),
            ready=True,
            epoch="epoch-1",
        )
        self._news = asyncio.Condition()
        self.ledger = "ok"
        self.breaker = BreakerState()
        self.failure: Exception | None = None
        self.busy = asyncio.Event()
        self.busy.set()
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.requests: list[object] = []
        self.past: list[HistoryEntry] = []
        self.plan = ResetPlan("GPU-a0", "a test", ())
        self.actions = self
        self.yields = FakeYields(self._note)
        self.pauses = FakePauses(self._note)
        self.claims = FakeClaims(self._note)
        self.jobs = FakeJobs(self._note)
        self.audit_log: tuple[AuditRow, ...] = ()
        self.head = AuditHead()

    async def show(
        self, *, ready: bool | None = None, notices: tuple[PodNotice, ...] | None = None, **records: DeviceRecord
    ) -> int:
        """Replace records by device index (``d0=…``), publish a new version of the view, and return its number."""
        devices = tuple(
            of_record(each.device, records.get(f"d{each.device.index}", each.record)) for each in self._view.devices
        )
        async with self._news:
            self._view = replace(
                self._view,
                version=self._view.version + 1,
                devices=devices,
                ready=self._view.ready if ready is None else ready,
                notices=self._view.notices if notices is None else notices,
            )
            self._news.notify_all()
        return self._view.version

    def record(self, index: int) -> DeviceRecord:
        return self._view.devices[index].record

    def view(self) -> NodeView:
        return self._view

    async def wait_for_change(self, since: int) -> NodeView:
        async with self._news:
            await self._news.wait_for(lambda: self._view.version > since)
            return self._view

    def service_view(self) -> ServiceView:
        view = ServiceView("0.1.0", "sim", IDENTITY, POLICY, self.ledger, self._view.epoch, self.breaker)
        return replace(view, yields=self.yields.record.yields)

    async def announce(self, resource: str, mapping: Mapping[str, str], announcer: Announcer | None = None) -> None:
        self._note(("announce", resource, dict(mapping)))
        self.announcers.append(announcer)

    async def reserve(self, devices: Sequence[str], resource: str = "") -> tuple[str, ...]:
        self._note(("reserve", *devices) if not resource else ("reserve", resource, *devices))
        return tuple(f"scrub-{each}" for each in devices)

    async def hand_over(self, call: HandOverCall) -> tuple[GrantedDevice, ...]:
        self._note(call)
        self.waiting.set()
        try:
            await self.busy.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return tuple(
            GrantedDevice(each, n, HandOverKind.OTHER_TENANT, PathKind.SLOW, CERTIFICATE.id, Basis.CERTIFICATE)
            for n, each in enumerate(call.devices, 1)
        )

    async def scrub(self, device: str, path: PathKind, actor: str) -> AsyncIterator[ScrubUpdate]:
        self._note(("scrub", device, path, actor))
        yield ScrubUpdate("scrub-1", device, Step.MEMORY, EraseProgress("clear", 4, 8), joined=True)
        ended = ScrubRecord(
            "scrub-1", device, path, ScrubTrigger.ON_DEMAND, 1000.0, 1001.0, Outcome.PASSED, (), CERTIFICATE.id, actor
        )
        yield ScrubUpdate("scrub-1", device, joined=True, finished=ended, certificate=CERTIFICATE)

    async def reset(self, device: str, reason: str, actor: str) -> AsyncIterator[ScrubUpdate]:
        self._note(("reset", device, reason, actor))
        yield ScrubUpdate("scrub-2", device, Step.RESET)
        ended = ScrubRecord("scrub-2", device, PathKind.SLOW, ScrubTrigger.ON_DEMAND, 1000.0, 1001.0, Outcome.PASSED)
        yield ScrubUpdate("scrub-2", device, finished=ended)

    async def accept_baseline(
        self, device: str, reason: str, actor: str, expected_facts: Mapping[str, str] | None = None
    ) -> DeviceView:
        self._note(("accept-baseline", device, reason, actor))
        return self._named(device)

    async def certificate(self, id: str) -> CertificateView:
        self._note(("certificate", id))
        if id != CERTIFICATE.id:
            raise InvalidRequest(f"There is no certificate {id}.")
        return CertificateView(CERTIFICATE, CertificateStatus.UNUSED)

    async def audit(self, after: int) -> AsyncIterator[AuditLogPage]:
        self._note(("audit", after))
        yield AuditLogPage(AuditHead(after, "h" if after else ""), self.head, self.audit_log)

    async def reset_plan(self, device: str) -> ResetPlan:
        self._note(("reset-plan", device))
        return self.plan

    async def quarantine(self, device: str, reason: str, actor: str) -> tuple[DeviceView, Cause | None]:
        self._note(("quarantine", device, reason, actor))
        view = self._named(device)
        return view, view.record.cause

    async def unquarantine(self, device: str, reason: str, actor: str) -> DeviceView:
        self._note(("unquarantine", device, reason, actor))
        return self._named(device)

    async def break_glass(self, device: str, seconds: float, reason: str, actor: str) -> DeviceView:
        self._note(("break-glass", device, seconds, reason, actor))
        view = self._named(device)
        override = BreakGlass(1000.0 + seconds, reason, actor) if seconds else None
        return replace(view, record=replace(view.record, break_glass=override))

    async def history(self, query: HistoryQuery) -> Sequence[HistoryEntry]:
        self._note(query)
        return [
            each
            for each in self.past
            if query.device in (None, each.event.device)
            and query.matches_event(each.event.name)
            and (query.before is None or each.sequence < query.before)
        ][: query.limit]

    def remember(self, name: str, device: str | None, **fields: str | int | float | bool | None) -> None:
        """Add one audit row to the history."""
        number = len(self.past) + 1
        self.past.insert(0, HistoryEntry(number, f"hash-{number}", Event(name, 1000.0 + number, device, fields=fields)))

    def _named(self, device: str) -> DeviceView:
        return next(each for each in self._view.devices if each.device.id == device)

    def _note(self, request: object) -> None:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
