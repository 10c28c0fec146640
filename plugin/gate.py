"""The gate: request the hand-over from the service, then answer the kubelet. No container starts without the service.

Invariants: a container start is allowed only by the service's response to this very call, and only for the devices that
the container has, even if the service maps their ids to other devices. ``Allocate`` is answered in milliseconds and
never refused for a temporary reason. If the service could not be notified of it, the next hand-over request reports
that, because the next start is then not a restart of the same container.
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
    "The scrub service maps the ids of this start to other devices than the plugin. The plugin reports its mapping "
    "again, and the start is retried."
)
SERVICE_AWAY = "The scrub service on this node does not respond. The start is retried."


@dataclass(frozen=True, slots=True)
class GateTimes:
    """How long the gate waits, in seconds.

    Attributes:
        hand_over: limit for a scrub in progress; the kubelet gives a start 30 s, and a policy may require less.
        deadline_share: fraction of the caller's own deadline that may be used; 30 s give 25.
        margin: reserved at the end of these for the service's refusal to arrive, which is more informative than a
            timeout.
        service_away: limit for a service that is away; it restarts whenever the service goes away.
        retry: pause between attempts to reach the service.
        reserve: limit for the notification of an ``Allocate``; the kubelet's main loop is blocked meanwhile.
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
        epoch: run of the service that was notified of it; empty for none.
        trace: its trace context; empty when there is none.
    """

    epoch: str
    trace: str


# See docs/decisions/0001-prestartcontainer-is-the-gate.md.
class Gate:
    """Requests hand-overs from the service on behalf of the kubelet.

    Overlapping calls for the same devices are fine: the service joins them. Devices are named by the kubelet's ids of a
    resource; the service was notified of their meaning.

    Args:
        clock: monotonic seconds.
        trace_context: returns the current span's context for other processes; empty where there is none.
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
        """Notify the service of an ``Allocate``; returns also when that failed for a temporary reason.

        Args:
            span: span of the call.

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
            message = str(error) or "The scrub service did not respond in time."
            self._log.warning("allocation.unreported", resource=resource, devices=sorted(device_ids), message=message)
            span.set_attributes(reported=False)
        else:
            self._replace_reservations(unreported, _Reservation(epoch=self._advertised.epoch, trace=trace))

    async def hand_over(self, device_ids: Sequence[str], resource: str, deadline: float | None, span: Span) -> None:
        """Return when the service has handed all of the devices over.

        Args:
            device_ids: the kubelet's ids.
            resource: the resource that the ids belong to.
            deadline: seconds until the caller stops waiting; None when it waits indefinitely.
            span: span of the call.

        Raises:
            Unavailable: the service is away; raised after ``times.service_away`` seconds.
            NotReady: a scrub is in progress, an earlier pod has not ended yet, or other devices were handed over.
            ScrubberError: the refusal of the service; ``public_message`` may be shown to any user.
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
            certificates=sorted({device.certificate_id for device in answer.devices} - {""}),
            duration_seconds=round(self._clock() - began, 4),
        )

    async def _request_hand_over(
        self, device_ids: Sequence[str], resource: str, noted: Mapping[tuple[str, str], _Reservation], ends: float
    ) -> pb.HandOverResponse:
        """Request the hand-over until ``ends``; return the response that grants exactly these devices.

        Raises:
            ScrubberError: the service refused, handed over other devices, or did not respond.
        """
        gone_since: float | None = None
        retold = False
        while True:
            await self._resource_mapping.publish_pending(resource)
            started_at = self._clock()
            left = ends - started_at
            # A notification to one run of the service is unknown to the next run.
            unseen = sorted(
                id_ for (_, id_), note in noted.items() if note.epoch == "" or note.epoch != self._advertised.epoch
            )
            try:
                if left <= 0:
                    raise Unavailable("The deadline of this container start has passed.")
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
                # The service was there until this long call failed, so its absence begins now.
                if gone_since is None or now - started_at > self._times.service_away:
                    gone_since = now
                absent_until = min(gone_since + self._times.service_away, ends)
                if now + self._times.retry >= absent_until:
                    raise Unavailable(str(error), public_message=SERVICE_AWAY) from error
                await asyncio.sleep(self._times.retry)
                continue
            guarded = frozenset(device.id for device in answer.devices)
            if guarded == self._resource_mapping.resolve_devices(resource, device_ids):
                return answer
            # The service uses the mapping of an earlier plugin or of another one; the container has our devices.
            self._log.error(
                "handover.device-mismatch",
                resource=resource,
                devices=sorted(device_ids),
                granted_devices=sorted(guarded),
                message=WRONG_DEVICES,
            )
            if retold or not await self._resource_mapping.republish(resource):
                raise NotReady(WRONG_DEVICES, public_message=WRONG_DEVICES)
            retold = True

    async def _send_reservation(self, device_ids: Sequence[str], resource: str) -> None:
        """Send a reservation, and repeat it once if the service was restarted and does not know the ids yet.

        A refusal would fail the pod permanently.

        Raises:
            ScrubberError: the service refused, or did not respond.
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
        """Replace or delete these reservations; a newer one belongs to the next start and stays."""
        for key, reservation in noted.items():
            if self._reservations.get(key) is not reservation:
                continue
            if settled is None:
                del self._reservations[key]
            else:
                self._reservations[key] = settled


def _allocation_trace(keys: Sequence[tuple[str, str]], noted: Mapping[tuple[str, str], _Reservation]) -> str | None:
    """Return the trace context of the one ``Allocate`` of all ``keys``; None for a container that starts again."""
    traces = {noted[key].trace if key in noted else "" for key in keys}
    return traces.pop() or None if len(traces) == 1 else None
