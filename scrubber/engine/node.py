"""The node: the set of devices, and what concerns more than one of them.

It grants sets all-or-none, shows one versioned view of everything, and tends each device when nobody asks. It decides
nothing about a single device; its controller does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

from scrubber.domain.assignment import Pod, Reading, Trust
from scrubber.domain.basis import UNJUDGED, Basis
from scrubber.domain.codes import ErrorCode
from scrubber.domain.device import Device
from scrubber.domain.errors import (
    Held,
    InvalidRequest,
    LedgerFailure,
    Quarantined,
    ScrubberError,
)
from scrubber.domain.evidence import Finding, Severity, Step
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.leftover import PodState
from scrubber.domain.policy import Envvar
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.resources import LONGEST_NAME, MOST_RESOURCES, Announced, Meaning
from scrubber.engine.board import Board
from scrubber.engine.breaker import CircuitBreaker
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController, NodeContext
from scrubber.engine.grant import GrantRequest
from scrubber.engine.notices import Refusals, out_of_service
from scrubber.engine.orders import Orders
from scrubber.engine.prepare import Requested
from scrubber.engine.views import CertificateView, Granted, HandOverCall, NodeView, ServiceView, Standing
from scrubber.ports.record import Event, HistoryEntry, HistoryQuery, TrailPage
from scrubber.ports.runtime import Span

__all__ = ["Node"]


class Node(Orders):
    """Implements :class:`scrubber.engine.views.Service`.

    Args:
        info: what runs here, asked anew each time because the policy and the ledger's word can change.
        epoch: changes with every start of the service.

    Attributes:
        notice: set when somebody should look at the pods now rather than at the next round.
        inventory_changed: set when devices may have come or gone.
        gone: the last records of devices that are no longer here.
        waiting: starts that wait for an answer now.
        kubelet_restarts: those that were noticed.
        breaker: what recoveries may still do.
        maintenance: held by the one device that is scrubbed for maintenance.
    """

    def __init__(self, *, dependencies: Dependencies, info: Callable[[], ServiceView], epoch: str) -> None:
        super().__init__(dependencies)
        self._info = info
        self._board = Board(epoch)
        self._ordered: list[DeviceController] = []
        self._expected: set[str] = set()
        self._leaving: set[str] = set()
        self._ready = False
        self._undelivered: dict[_Key, _Unheard] = {}
        self._announced = Announced()
        self._named: dict[str, set[str]] = {}
        self._resources: dict[str, frozenset[str]] | None = None
        self._refusals = Refusals(dependencies.clock)
        self.breaker = CircuitBreaker(self._records, dependencies)
        self._context = NodeContext(
            changed=self._show,
            still=self.still,
            resources=self.resources_of,
            records=self._records,
            breaker=self.breaker,
        )
        self.gone: dict[str, DeviceRecord] = {}
        self.waiting = 0
        self.kubelet_restarts = 0
        self.maintenance = asyncio.Lock()
        self.notice = asyncio.Event()
        self.inventory_changed = asyncio.Event()

    # -- the set ---------------------------------------------------------------------------------------------------

    @property
    def controllers(self) -> Mapping[str, DeviceController]:
        return self._controllers

    @property
    def known(self) -> frozenset[str]:
        """Ids of the devices that are ours to ask the kubelet about, those that are being welcomed included."""
        return frozenset(self._controllers.keys() | self._expected)

    @property
    def own_resources(self) -> frozenset[str]:
        """Resources under which our own plugins hand devices out: those that they announced or named, and those of the
        grants that are open. Empty while no plugin has said anything.
        """
        given = {
            grant.assignment.resource
            for controller in self._controllers.values()
            for grant in controller.state.record.open_grants
            if grant.assignment is not None and grant.basis is not Basis.ADOPTED
        }
        return frozenset((self._announced.resources.keys() | self._named.keys() | given) - {""})

    def resources_of(self, device: str) -> frozenset[str]:
        """Resources under which the device is handed out, as far as a plugin, a start or the record says."""
        if self._resources is None:
            self._resources = self._resources_by_device()
        said = self._resources.get(device, frozenset())
        controller = self._controllers.get(device)
        last = None if controller is None else controller.state.record.last_grant
        if not said and last is not None and last.assignment is not None and last.basis is not Basis.ADOPTED:
            said = frozenset({last.assignment.resource})
        return said - {""}

    def _resources_by_device(self) -> dict[str, frozenset[str]]:
        """What a plugin announced is its word on all that the resource has; what was asked for counts where there is none."""
        found: dict[str, set[str]] = {}
        for resource, meanings in self._announced.resources.items():
            for meaning in meanings.values():
                found.setdefault(meaning.device, set()).add(resource)
        for resource, devices in self._named.items():
            for device in devices if resource not in self._announced.resources else ():
                found.setdefault(device, set()).add(resource)
        return {device: frozenset(resources) for device, resources in found.items()}

    def _records(self) -> list[DeviceRecord]:
        return [controller.state.record for controller in self._controllers.values()]

    def meaning(self, resource: str, listed: str) -> Meaning | None:
        """The device that ``resource`` calls ``listed``, and whether that is a share of it; None when it is none of ours."""
        return self._announced.meaning(resource, listed, self.known if self._expected else self._controllers)

    def make_controller(self, device: Device, record: DeviceRecord) -> DeviceController:
        """Make the controller of ``device``, whose ``record`` is as the ledger has it. It is not shown before :meth:`add`."""
        self._expected.add(device.id)
        return DeviceController(device, record, dependencies=self._dependencies, node=self._context)

    def add(self, controller: DeviceController) -> None:
        """Hand the device out, scrub it and show it from now on."""
        self._expected.discard(controller.id)
        self._controllers[controller.id] = controller
        self.breaker.moved()
        self._ordered = sorted(self._controllers.values(), key=lambda each: _index(each.state.device))
        self._show()

    async def remove(self, device: str) -> None:
        """Forget a device that is gone; its record stays in the ledger, and with us in case it comes back.

        Raises:
            Held: it is in use, or being scrubbed.
        """
        controller = self._controllers[device]
        self.gone[device] = await controller.state.retire()
        del self._controllers[device]
        self.breaker.moved()
        self._ordered.remove(controller)
        self._show()

    @asynccontextmanager
    async def still(self, devices: Iterable[str]) -> AsyncIterator[None]:
        """Keep ``devices`` out of use while this is open; those that are not handed out here are nobody's.

        Raises:
            Held: one of them is in use, or being scrubbed.
        """
        async with AsyncExitStack() as stack:
            for device in sorted(self._controllers.keys() & set(devices)):
                await stack.enter_async_context(self._controllers[device].occupancy.still())
            yield

    def policy_changed(self) -> None:
        """Another policy is in force: what was proved under the old one is proved again."""
        for controller in self._controllers.values():
            controller.state.wake.set()
        self._show()

    def ready(self) -> None:
        """Every device was looked at once."""
        self._ready = True
        self._show()

    def _show(self) -> None:
        left = [controller for device, controller in self._controllers.items() if device in self._leaving]
        if any(
            controller.state.record.hygiene is not Hygiene.IN_USE and controller.state.job is None
            for controller in left
        ):
            self.inventory_changed.set()
        info, views = self._info(), tuple(controller.view for controller in self._ordered)
        self._board.show(
            views,
            ready=self._ready,
            ledger=info.ledger,
            envvar_refused=info.policy.injection.envvar is Envvar.REFUSE,
            notices=(*self._refusals.notices(info.policy.stuck), *out_of_service(views)),
        )

    def settle_notices(self, reading: Reading) -> None:
        """Forget pods that are no longer there, and show whom time has made worth telling of."""
        self._refusals.settle(reading)
        self._show()

    def open_grants(self) -> Iterable[Grant]:
        """All grants whose pods still matter, and each device's last one."""
        for controller in self._controllers.values():
            yield from controller.state.record.open_grants
            if controller.state.record.last_grant is not None:
                yield controller.state.record.last_grant

    def track(self) -> None:
        """Tell the pod watch which pods matter."""
        grants = [grant for controller in self._controllers.values() for grant in controller.state.record.open_grants]
        self._dependencies.pods.track(grant.pod for grant in grants if grant.pod is not None)

    # -- being asked -----------------------------------------------------------------------------------------------

    def view(self) -> NodeView:
        return self._board.view

    async def changed(self, since: int) -> NodeView:
        return await self._board.changed(since)

    def info(self) -> ServiceView:
        return replace(
            self._info(), breaker=self.breaker.state.open, kubelet=_of_the_kubelet(self._dependencies.pods.reading)
        )

    async def certificate(self, id: str) -> CertificateView:
        found = await self._dependencies.certificates.certificate(id)
        if found is None:
            raise InvalidRequest(f"The ledger has no certificate {id!r}; it forgets old ones with its audit trail.")
        if found.next_grant is not None:
            return CertificateView(found, Standing.USED)
        current = {record.certificate.id for record in self._records() if record.certificate is not None}
        return CertificateView(found, Standing.UNUSED if id in current else Standing.VOID)

    def audit(self, after: int) -> AsyncIterator[TrailPage]:
        return self._dependencies.trail.pages(after)

    async def history(self, query: HistoryQuery) -> Sequence[HistoryEntry]:
        return await self._dependencies.ledger.history(query)

    async def announce(self, resource: str, offers: Mapping[str, str]) -> None:
        self._announced = self._announced.announce(resource, offers, self.known)
        self._resources = None
        if self._dependencies.policy().overrides:
            self.policy_changed()

    async def reserve(self, devices: Sequence[str], resource: str = "") -> tuple[str, ...]:
        with self._dependencies.tracer.span("reserve", resource=resource, devices=len(devices)):
            self._board.view.be_ready()
            controllers = [each.controller for each in self._resolve(resource, devices)]
            for controller in controllers:
                if controller.withheld:
                    raise Quarantined(f"Device {controller.id}: out of service.", public=controller.view.refusal)
            for controller in controllers:
                controller.state.note_allocated()
            self.notice.set()
            return tuple(controller.state.job.id for controller in controllers if controller.state.job is not None)

    async def hand_over(self, call: HandOverCall) -> tuple[Granted, ...]:
        with self._dependencies.tracer.span("hand-over", resource=call.resource, devices=len(call.devices)) as span:
            granted = await self._hand_over(call, span)
            for name in ("kind", "path"):
                span.note(**{name: " ".join(sorted({getattr(each, name).value for each in granted}))})
            return granted

    async def _hand_over(self, call: HandOverCall, span: Span) -> tuple[Granted, ...]:
        dependencies = self._dependencies
        began = dependencies.clock.monotonic()
        limit = dependencies.policy().limits.hand_over
        wait = limit if call.wait_seconds is None else max(0.0, min(limit, call.wait_seconds))
        only = call.devices[0] if len(call.devices) == 1 else None
        self.waiting += 1
        try:
            self._board.view.be_ready()
            wanted = self._resolve(call.resource, call.devices)
            only = wanted[0].device if len(wanted) == 1 else None
            for each in wanted:
                if each.ids & call.reserved_unseen:
                    each.controller.state.note_allocated()
            again = await self._same_answer(wanted)
            if again is not None:
                self._waits_no_more(wanted, call.resource)
                return again
            self.track()
            handing = GrantRequest(
                wanted,
                resource=call.resource,
                dependencies=dependencies,
                earlier=self.open_grants,
                own=lambda: self.own_resources | ({call.resource} - {""}),
                deadline=began + wait,
            )
            try:
                granted = await handing.run()
            except asyncio.CancelledError:
                if handing.granted is not None:
                    self._undelivered[_key(wanted)] = _Unheard(handing.granted, handing.versions)
                raise
            except ScrubberError as refusal:
                asking = self._asking(wanted, call.resource)
                span.note(tenant=next(iter(asking)).tenant if asking else None)
                self._refusals.refused(asking, [each.device for each in wanted], refusal)
                raise
            finally:
                self.track()
            self._waits_no_more(wanted, call.resource)
            return granted
        except ScrubberError as refusal:
            span.note(refused=refusal.code)
            self._show()
            seconds = round(dependencies.clock.monotonic() - began, 6)
            fields: dict[str, str | int | float | bool | None] = {
                "code": refusal.code,
                "sentence": str(refusal),
                "seconds": seconds,
            }
            dependencies.journal.tell([Event("handover.refused", dependencies.clock.wall(), only, fields=fields)])
            raise
        finally:
            self.waiting -= 1

    def _waits_no_more(self, wanted: Sequence[Requested], resource: str) -> None:
        if self._refusals.granted(self._asking(wanted, resource), [each.device for each in wanted]):
            self._show()

    def _asking(self, wanted: Sequence[Requested], resource: str) -> set[Pod]:
        """The pod that a start is of, if the kubelet's list says so for certain."""
        reading = self._dependencies.pods.reading
        assignments = [reading.assignment_of(each.device, each.shares, resource=resource) for each in wanted]
        pods = {None if each is None else each.pod for each in assignments}
        return {pod for pod in pods if pod is not None and pod.uid is not None} if len(pods) == 1 else set()

    async def _same_answer(self, wanted: Sequence[Requested]) -> tuple[Granted, ...] | None:
        """The answer that its caller did not live to hear, if it is the same pod and container that asks again.

        The caller was cancelled before it could answer the kubelet, so nothing was started on this grant.
        """
        unheard = self._undelivered.pop(_key(wanted), None)
        if unheard is None or any(granted.basis in UNJUDGED for granted in unheard.answer):
            return None
        answer = unheard.answer
        reading: Reading = await self._dependencies.pods.refresh()
        for each in wanted:
            await each.controller.occupancy.void_after_gap()
        for each, granted, version in zip(wanted, answer, unheard.versions, strict=True):
            controller, last = each.controller, each.controller.state.record.last_grant
            # Whatever has happened to the device since, a stranger on it say, the answer did not know of it.
            current = controller.state.record.version == version and not controller.occupancy.coverage.gap
            current = current and last is not None and last.sequence == granted.grant
            current = current and controller.state.record.hygiene is Hygiene.IN_USE
            current = current and controller.state.record.advertised
            following = reading.assignment_of(each.device, each.shares) or reading.hint_of(each.device, each.shares)
            if (
                last is None
                or not current
                or controller.state.allocated_since
                or last.assignment is None
                or following is None
            ):
                return None
            following = self._dependencies.pods.as_it_starts(following, each.device)
            if following != last.assignment or following.pod.uid is None or await _used_since(controller, last):
                return None
        return answer

    def _resolve(self, resource: str, ids: Sequence[str]) -> list[Requested]:
        """What ``ids`` of ``resource`` mean, one for each device, in the order of the devices' ids.

        Raises:
            InvalidRequest: unknown, duplicate or no ids, or the whole of a device and a share of it.
        """
        if not ids:
            raise InvalidRequest("The request names no device.")
        if len(set(ids)) != len(ids):
            raise InvalidRequest("The request names a device twice.")
        meanings = {id_: self._announced.meaning(resource, id_, self._controllers) for id_ in ids}
        unknown = sorted(id_ for id_, meaning in meanings.items() if meaning is None)
        if unknown:
            raise InvalidRequest(f"This node has no device {', '.join(unknown)}.")
        asked: dict[str, dict[str, Meaning]] = {}
        for id_, meaning in meanings.items():
            if meaning is not None:
                asked.setdefault(meaning.device, {})[id_] = meaning
        if any(len(found) > 1 and not all(each.share for each in found.values()) for found in asked.values()):
            raise InvalidRequest("The request names a device twice.")
        if 0 < len(resource) <= LONGEST_NAME and (resource in self._named or len(self._named) < MOST_RESOURCES):
            known = self._named.setdefault(resource, set())
            if not known >= asked.keys():
                known |= asked.keys()
                self._resources = None
        return [
            Requested(self._controllers[device], frozenset(found), share=all(each.share for each in found.values()))
            for device, found in sorted(asked.items())
        ]

    # -- devices that come and go ----------------------------------------------------------------------------------

    def described(self, device: Device) -> None:
        """The inventory lists the device: what is new about it counts, unless it is somewhere else now."""
        controller = self._controllers.get(device.id)
        if controller is not None and device.is_where(controller.state.device):
            self._leaving.discard(device.id)
            controller.state.describe(device)

    async def lost(self, device: str) -> None:
        """The inventory lists the device no longer, or somewhere else. One that is in use is looked for once it is free."""
        controller = self._controllers[device]
        try:
            await self.remove(device)
        except Held:
            self._leaving.add(device)
            sentence = "The device is no longer in the inventory, or is somewhere else now."
            await controller.health.report([Finding(Step.HEALTH, ErrorCode.LOST, Severity.FAULT, sentence)])
        else:
            self._leaving.discard(device)

    async def drain(self) -> None:
        """Stop all scrubs; what they worked on is dirty."""
        results = await asyncio.gather(
            *(controller.scrubs.abandon() for controller in self._controllers.values()), return_exceptions=True
        )
        failures = [each for each in results if isinstance(each, LedgerFailure)]
        if failures:
            raise failures[0]


_Key: TypeAlias = "tuple[tuple[str, frozenset[str]], ...]"


@dataclass(frozen=True, slots=True)
class _Unheard:
    """An answer whose caller did not live to hear it, and the version of each device's record that it made."""

    answer: tuple[Granted, ...]
    versions: tuple[int, ...]


def _key(wanted: Sequence[Requested]) -> _Key:
    return tuple((each.device, each.ids) for each in wanted)


async def _used_since(controller: DeviceController, grant: Grant) -> bool:
    """Whether something may have been started on ``grant``, the last one."""
    if grant.basis is not Basis.SHARED:
        return await controller.occupancy.held()
    # Others hold it, by grants of their own: what tells is whether the pod itself has begun.
    standings = await controller.occupancy.standings(grant.pod, shares=True)
    own = [where.state for each, where in standings if each.pod == grant.pod]
    return any(state is not PodState.OVER for state in own)


def _of_the_kubelet(reading: Reading) -> str:
    """``ok``, or why its lists are not believed, or not wholly."""
    return reading.detail if reading.trust is not Trust.TRUSTED else " ".join(reading.remarks) or "ok"


def _index(device: Device) -> tuple[tuple[int, str], ...]:
    """Sort key: ``0:10`` after ``0:9``."""
    return tuple((int(part) if part.isdigit() else 1 << 30, part) for part in device.index.split(":"))
