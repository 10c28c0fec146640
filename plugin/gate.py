"""The rule: ask the service, then answer. No container starts without its word.

Promises: the start of a container is let through only by the service's answer to this very call, and only for the
devices that the container has, whatever the service takes their ids for. An ``Allocate`` is answered in milliseconds and
never refused for something temporary; when the service could not be told of it, the next hand-over says so, because a
start after it is not the same container's start again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plugin.kubelet.devices import AdvertisedDevices
from plugin.logs import Logger
from plugin.observers import GateObserver, NullObserver
from plugin.resource_mapping import ResourceMapping
from plugin.service_client import ScrubService
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import InvalidRequest, NotReady, Quarantined, ScrubberError, Unavailable
from scrubber.ports.runtime import Span

__all__ = ["Gate", "GateTimes"]

WRONG_DEVICES = (
    "The scrub service takes the ids of these devices for others; it is told again, and the start is tried again."
)
SERVICE_AWAY = "The scrub service on this node does not answer; the start is tried again."


@dataclass(frozen=True, slots=True)
class GateTimes:
    """How long the gate waits, in seconds.

    Attributes:
        hand_over: for a scrub under way; the kubelet gives a start 30 s, and a policy may ask for less.
        deadline_share: of the caller's own deadline that may be used; 30 s make 25.
        margin: left of these for the service's refusal to arrive, which says more than a timeout.
        service_away: for a service that is not there, counted anew whenever it goes.
        retry: between attempts to reach it.
        reserve: for telling it of an ``Allocate``; the kubelet's main loop stands still meanwhile.
    """

    hand_over: float = 25.0
    deadline_share: float = 25 / 30
    margin: float = 0.5
    service_away: float = 2.0
    retry: float = 0.1
    reserve: float = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class _Reservation:
    """An ``Allocate`` that no granted start has followed yet.

    Attributes:
        epoch: the service that was told of it; empty for none.
        trace: where it is in a trace; empty when nowhere.
    """

    epoch: str
    trace: str


class Gate:
    """Asks the service on behalf of the kubelet. Overlapping calls for the same devices are fine: the service joins them.

    Devices are named as the kubelet names them, by the ids of a resource; what they mean the service was told.

    Args:
        clock: monotonic seconds.
        trace_context: what the present span is called in other processes; empty where there is none.
    """

    def __init__(
        self,
        service: ScrubService,
        advertised: AdvertisedDevices,
        resource_mapping: ResourceMapping,
        *,
        times: GateTimes,
        log: Logger,
        clock: Callable[[], float],
        observer: GateObserver | None = None,
        trace_context: Callable[[], str] = str,
    ) -> None:
        self._service = service
        self._trace_context = trace_context
        self._observer = observer or NullObserver()
        self._advertised = advertised
        self._resource_mapping = resource_mapping
        self._times = times
        self._log = log
        self._clock = clock
        self._reservations: dict[tuple[str, str], _Reservation] = {}

    async def reserve(self, device_ids: Sequence[str], resource: str, span: Span) -> None:
        """Tell the service of an ``Allocate``; returns also when it could not be told.

        Args:
            span: of the call, in which this is done.

        Raises:
            InvalidRequest: the service does not know these devices.
            Quarantined: one of them is out of service.
        """
        trace = self._trace_context()
        unreported = dict.fromkeys([(resource, id_) for id_ in device_ids], _Reservation(epoch="", trace=trace))
        self._reservations.update(unreported)
        try:
            async with asyncio.timeout(self._times.reserve):
                await self._send_reservation(device_ids, resource)
        except (InvalidRequest, Quarantined):
            raise
        except (ScrubberError, TimeoutError) as error:
            message = str(error) or "The scrub service did not answer in time."
            self._log.warning("allocation.untold", resource=resource, devices=sorted(device_ids), sentence=message)
            span.set_attributes(told=False)
        else:
            self._replace_reservations(unreported, _Reservation(epoch=self._advertised.epoch, trace=trace))

    async def hand_over(self, device_ids: Sequence[str], resource: str, deadline: float | None, span: Span) -> None:
        """Return when the service has handed all of the devices over.

        Args:
            device_ids: as the kubelet names them.
            resource: whose ids they are.
            deadline: seconds until the caller stops waiting; None when it never does.
            span: of the call, in which this is done.

        Raises:
            Unavailable: there is no service; said after ``times.service_away`` seconds.
            NotReady: a scrub is under way, an earlier pod is not over yet, or other devices were handed over.
            ScrubberError: what the service refused with; ``public_message`` may be shown to anybody.
        """
        began = self._clock()
        limit = math.inf if deadline is None else deadline * self._times.deadline_share
        keys = [(resource, id_) for id_ in device_ids]
        noted = {key: self._reservations[key] for key in keys if key in self._reservations}
        span.set_attributes(follows=_allocation_trace(keys, noted))
        try:
            answer = await self._request_hand_over(
                device_ids, resource, noted, began + min(self._times.hand_over, limit)
            )
        except ScrubberError as error:
            self._observer.on_start_refused(error.code)
            raise
        self._replace_reservations(noted, None)
        self._log.info(
            "handover.granted",
            resource=resource,
            devices=sorted(device_ids),
            paths=sorted({device.path for device in answer.devices}),
            certificates=sorted({device.certificate for device in answer.devices} - {""}),
            seconds=round(self._clock() - began, 4),
        )

    async def _request_hand_over(
        self, device_ids: Sequence[str], resource: str, noted: Mapping[tuple[str, str], _Reservation], ends: float
    ) -> pb.HandOverResponse:
        """The service's answer that it has handed over exactly these devices, asked for until ``ends``.

        Raises:
            ScrubberError: it refused, has handed over others, or did not answer.
        """
        gone_since: float | None = None
        retold = False
        while True:
            await self._resource_mapping.publish_pending(resource)
            asked = self._clock()
            left = ends - asked
            # What one run of the service was told, the next one does not know.
            unseen = sorted(
                id_ for (_, id_), note in noted.items() if note.epoch == "" or note.epoch != self._advertised.epoch
            )
            try:
                if left <= 0:
                    raise Unavailable("The time for this start is used up.")
                answer = await self._service.hand_over(
                    device_ids,
                    wait_seconds=left - min(self._times.margin, left / 10),
                    reserved_unseen=unseen,
                    resource=resource,
                    timeout=left,
                )
            except InvalidRequest:
                if retold or not await self._resource_mapping.republish(resource):
                    raise
                retold = True
                continue
            except Unavailable as error:
                now = self._clock()
                # A call that lived for a while lost a service that was there: its absence begins now.
                if gone_since is None or now - asked > self._times.service_away:
                    gone_since = now
                absent_until = min(gone_since + self._times.service_away, ends)
                if now + self._times.retry >= absent_until:
                    raise Unavailable(str(error), public_message=SERVICE_AWAY) from error
                await asyncio.sleep(self._times.retry)
                continue
            guarded = frozenset(device.id for device in answer.devices)
            if guarded == self._resource_mapping.resolve_devices(resource, device_ids):
                return answer
            # It goes by what an earlier plugin told it, or another one; the container has our devices.
            self._log.error(
                "handover.mistaken",
                resource=resource,
                devices=sorted(device_ids),
                handed_over=sorted(guarded),
                sentence=WRONG_DEVICES,
            )
            if retold or not await self._resource_mapping.republish(resource):
                raise NotReady(WRONG_DEVICES, public_message=WRONG_DEVICES)
            retold = True

    async def _send_reservation(self, device_ids: Sequence[str], resource: str) -> None:
        """Of an allocation, and once more where the service was started anew and does not know the ids yet: a refusal
        would fail the pod for good.

        Raises:
            ScrubberError: the service refused, or did not answer.
        """
        try:
            await self._service.reserve(device_ids, timeout=self._times.reserve, resource=resource)
        except InvalidRequest:
            if not await self._resource_mapping.republish(resource):
                raise
            await self._service.reserve(device_ids, timeout=self._times.reserve, resource=resource)

    def _replace_reservations(
        self, noted: Mapping[tuple[str, str], _Reservation], settled: _Reservation | None
    ) -> None:
        """Replace or forget these reservations; one that came since belongs to the next start and stays."""
        for key, reservation in noted.items():
            if self._reservations.get(key) is not reservation:
                continue
            if settled is None:
                del self._reservations[key]
            else:
                self._reservations[key] = settled


def _allocation_trace(keys: Sequence[tuple[str, str]], noted: Mapping[tuple[str, str], _Reservation]) -> str | None:
    """Where the one ``Allocate`` of all these is in a trace. A container that starts again follows none."""
    traces = {noted[key].trace if key in noted else "" for key in keys}
    return traces.pop() or None if len(traces) == 1 else None
