"""A yielded node: no process of the service uses the driver, and every device is withheld until the last request ends.

The driver of a node is replaced, its GPUs are partitioned or reset by others while nothing has them open. A service
that did not let go would make each of that fail. So the node is yielded: the service closes its backend and serves on
without one. What happens to the devices meanwhile is no fault of theirs; afterwards they are inspected again, and every
device that no pod has is dirty.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from scrubber.domain.errors import InvalidRequest, NotReady
from scrubber.domain.evidence import PathKind
from scrubber.domain.node_record import NodeRecord, YieldRequest, YieldRequester
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.states import BindingState, Cause, Hygiene
from scrubber.domain.taints import YIELDED
from scrubber.engine import refusals
from scrubber.engine.agent_pauses import AgentPauses
from scrubber.engine.claims import DriverlessClaims
from scrubber.engine.jobs import DriverlessJobs
from scrubber.engine.publisher import Publisher
from scrubber.engine.resource_ids import Announcer
from scrubber.engine.views import (
    CertificateStatus,
    CertificateView,
    DeviceView,
    GrantedDevice,
    HandOverCall,
    NodeView,
    ScrubUpdate,
    ServiceView,
)
from scrubber.ports.record import (
    AuditLog,
    AuditLogPage,
    Certificates,
    Event,
    HistoryEntry,
    HistoryQuery,
    Journal,
    Ledger,
    LedgerChange,
)
from scrubber.ports.runtime import Clock

__all__ = ["DriverlessNode", "YieldControl", "withheld_views"]

_MAX_PLUGINS = 16
"""Plugins of one node that may request a yield at a time."""


# See docs/decisions/0041-a-yielded-node.md.
class YieldControl:
    """The requests to yield the node: the only writer of the node's record.

    Args:
        record: as the ledger has it.
    """

    def __init__(self, record: NodeRecord, *, ledger: Ledger, journal: Journal, clock: Clock) -> None:
        self._record = record
        self._ledger = ledger
        self._journal = journal
        self._clock = clock
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def record(self) -> NodeRecord:
        return self._record

    @property
    def message(self) -> str:
        """Why the node is yielded, for operators; empty while it is not."""
        return " ".join(
            f"Requested by {'the ' if each.requester is YieldRequester.PLUGIN else ''}{each.actor}: {each.reason}."
            for each in self._record.yields
        )

    async def wait_until(self, *, yielded: bool) -> None:
        """Return once there is a request (``yielded``), or none."""
        while self._record.is_yielded is not yielded:
            await self._changed.wait()

    async def request(self, requester: YieldRequester, reason: str, actor: str) -> None:
        """Request that the node be yielded, durably.

        The same request of the same requester changes nothing, nor does a plugin's after an operator has ended it.

        Raises:
            InvalidRequest: no reason, or too many plugins have requests.
            LedgerFailure: nothing has changed.
        """
        if not reason.strip():
            raise InvalidRequest("Yielding the node needs a reason; it is recorded in the audit log.")
        fields = {"requester": requester.value, "reason": reason}

        def with_request(record: NodeRecord, now: float) -> NodeRecord:
            following = record.with_request(YieldRequest(requester, reason, actor, now))
            if len(following.of(YieldRequester.PLUGIN)) > _MAX_PLUGINS:
                raise InvalidRequest(
                    f"{_MAX_PLUGINS} plugins request already that this node be yielded. To end requests of plugins that "
                    "no longer exist, run scrubber resume --all."
                )
            return following

        await self._change(
            with_request,
            lambda now: Event("node.yield-requested", now, actor=actor, fields=fields),
        )

    async def withdraw(self, requester: YieldRequester, reason: str, actor: str, *, everyone: bool = False) -> None:
        """End a request, or all of them; see :class:`scrubber.engine.views.Yields`.

        Raises:
            LedgerFailure: nothing has changed.
        """
        fields = {"requester": ", ".join(YieldRequester) if everyone else requester.value, "reason": reason}

        def without_requests(record: NodeRecord, now: float) -> NodeRecord:
            if everyone:
                return record.without_any()
            return record.without_plugin(actor) if requester is YieldRequester.PLUGIN else record.without(requester)

        await self._change(
            without_requests,
            lambda now: Event("node.yield-ended", now, actor=actor, fields=fields),
        )

    async def _change(self, change: Callable[[NodeRecord, float], NodeRecord], event: Callable[[float], Event]) -> None:
        # A commit whose caller leaves may have happened: it is completed in any case.
        await asyncio.shield(asyncio.ensure_future(self._commit(change, event)))

    async def _commit(self, change: Callable[[NodeRecord, float], NodeRecord], event: Callable[[float], Event]) -> None:
        async with self._lock:
            now = self._clock.wall()
            following = change(self._record, now)
            if following == self._record:
                return
            rows = (event(now),) if following.yields != self._record.yields else ()
            await self._ledger.commit(LedgerChange(node=following, events=rows))
            self._record = following
            self._journal.record(rows)
            self._changed.set()
            self._changed = asyncio.Event()


def withheld_views(views: Sequence[DeviceView]) -> tuple[DeviceView, ...]:
    """Return ``views`` as they are on a yielded node: nothing of them is advertised."""
    return tuple(
        replace(
            each,
            advertised=False,
            scrub=None,
            withheld=refusals.NODE_YIELDED if each.advertised else each.withheld,
            taints=(*(reason for reason in each.taints if reason != YIELDED), YIELDED),
            binding=BindingState.OUT_OF_SERVICE,
        )
        for each in views
    )


def _unwatched(view: DeviceView) -> DeviceView:
    """Return ``view`` as of a device that is not watched: it does not stay clean, and who holds it is not known."""
    record = view.record
    hygiene = Hygiene.IN_USE if record.hygiene is Hygiene.IN_USE else Hygiene.DIRTY
    return replace(view, record=replace(record, hygiene=hygiene, certificate=None), holders=())


class DriverlessNode:
    """Implements :class:`scrubber.engine.views.Service` without a driver.

    Either the node is yielded, or the start of the service waits for the driver to answer. A node can be yielded
    meanwhile: while its driver is replaced, that is what an operator needs.

    Args:
        devices: the devices as they were last seen; empty if the service was started on a yielded node.
        service_view: as of :class:`scrubber.engine.node.Node`.
        remaining_children: returns the PIDs of child processes that could not be killed and may use the driver.
        driver_error: returns why the driver does not answer yet; None: it has been closed, because the node is yielded.
    """

    def __init__(
        self,
        *,
        devices: Sequence[DeviceView],
        yields: YieldControl,
        pauses: AgentPauses,
        service_view: Callable[[], ServiceView],
        epoch: str,
        ledger: Ledger,
        journal: Journal,
        clock: Clock,
        audit_log: AuditLog,
        certificates: Certificates,
        remaining_children: Callable[[], Collection[int]] = frozenset,
        driver_error: Callable[[], str] | None = None,
    ) -> None:
        self.yields = yields
        self.pauses = pauses
        self.actions = _NoActions(self._refusal)
        self.claims = DriverlessClaims(
            ledger=ledger,
            journal=journal,
            clock=clock,
            refusal=self._refusal,
            is_yielded=lambda: yields.record.is_yielded,
        )
        self.jobs = DriverlessJobs(claims=self.claims, refusal=self._refusal)
        self._devices = tuple(_unwatched(each) for each in withheld_views(devices))
        self._service_view = service_view
        self._ledger = ledger
        self._audit_log = audit_log
        self._certificates = certificates
        self._remaining_children = remaining_children
        self._driver_error = driver_error
        self._publisher = Publisher(epoch)
        self.publish()

    def publish(self) -> None:
        """Publish the present state, if it has changed."""
        info = self._service_view()
        self.pauses.driver_closed = self.driver_closed
        self._publisher.publish(
            self._devices,
            ready=self._driver_error is None,
            ledger_status=info.ledger_status,
            refuses_envvar=False,
            yielded=self.yields.message or (refusals.NODE_YIELDED if self._driver_error is None else ""),
            driver_error="" if self._driver_error is None else self._driver_error(),
            agent_pause=self.pauses.pause,
            driver_closed=self.driver_closed,
            driver_version=info.identity.driver,
        )

    @property
    def driver_closed(self) -> bool:
        """Whether no process of the service uses the driver."""
        return self._driver_error is None and not self._remaining_children()

    def _refusal(self) -> NotReady:
        if self._driver_error is None or self.yields.record.is_yielded:
            return refusals.node_yielded(self.yields.message)
        return refusals.service_starting(self._driver_error())

    def view(self) -> NodeView:
        return self._publisher.view

    async def wait_for_change(self, since: int) -> NodeView:
        return await self._publisher.wait_for_change(since)

    def service_view(self) -> ServiceView:
        remaining = tuple(sorted(self._remaining_children()))
        return replace(
            self._service_view(),
            yields=self.yields.record.yields,
            driver_closed=self.driver_closed,
            remaining_pids=remaining,
            agent_pause=self.pauses.pause,
            agent_pause_message=self.pauses.message,
        )

    async def certificate(self, id: str) -> CertificateView:
        found = await self._certificates.certificate(id)
        if found is None:
            raise refusals.no_certificate(id)
        used = found.next_grant is not None
        return CertificateView(found, CertificateStatus.CONSUMED if used else CertificateStatus.VOIDED)

    def audit(self, after: int) -> AsyncIterator[AuditLogPage]:
        return self._audit_log.pages(after)

    async def history(self, query: HistoryQuery) -> Sequence[HistoryEntry]:
        return await self._ledger.history(query)

    async def announce(self, resource: str, mapping: Mapping[str, str], announcer: Announcer | None = None) -> None:
        """Ignore the mapping: plugins repeat it to the next epoch, which begins when the driver is open."""

    async def reserve(self, devices: Sequence[str], resource: str = "") -> tuple[str, ...]:
        """Accept the allocation on a yielded node: the start of the pod waits. While the service starts, it is reported again later."""
        if self._driver_error is not None:
            raise self._refusal()
        return ()

    async def hand_over(self, call: HandOverCall) -> tuple[GrantedDevice, ...]:
        raise self._refusal()


class _NoActions:
    """Implements :class:`scrubber.engine.views.Actions`: each would need the driver, and is refused."""

    def __init__(self, refusal: Callable[[], NotReady]) -> None:
        self._refusal = refusal

    def scrub(self, device: str, path: PathKind, actor: str) -> AsyncIterator[ScrubUpdate]:
        self._refuse()

    def reset(self, device: str, reason: str, actor: str) -> AsyncIterator[ScrubUpdate]:
        self._refuse()

    async def reset_plan(self, device: str) -> ResetPlan:
        self._refuse()

    async def quarantine(self, device: str, reason: str, actor: str) -> tuple[DeviceView, Cause | None]:
        self._refuse()

    async def unquarantine(self, device: str, reason: str, actor: str) -> DeviceView:
        self._refuse()

    async def break_glass(self, device: str, seconds: float, reason: str, actor: str) -> DeviceView:
        self._refuse()

    async def accept_baseline(
        self, device: str, reason: str, actor: str, expected_facts: Mapping[str, str] | None = None
    ) -> DeviceView:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise self._refusal()
