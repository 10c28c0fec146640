"""The jobs of one node: devices are handed over to a job, and its end is noted, as for a resource claim."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from scrubber.domain.assignment import JobManager
from scrubber.domain.device import find_device
from scrubber.domain.errors import InvalidRequest, NotReady, Unreadable
from scrubber.domain.jobs import Job, find_numbered_device
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Hygiene
from scrubber.engine import refusals
from scrubber.engine.views import (
    ClaimRelease,
    Claims,
    DeviceView,
    GrantedDevice,
    NodeView,
    PrepareClaimCall,
    StartJobCall,
)
from scrubber.ports.node import Containers, PodCgroups

__all__ = ["DriverlessJobs", "NodeJobs"]


# See docs/decisions/0048-jobs.md.
class NodeJobs:
    """Implements :class:`scrubber.engine.views.Jobs`."""

    def __init__(
        self, *, claims: Claims, containers: Containers, pod_cgroups: PodCgroups, view: Callable[[], NodeView]
    ) -> None:
        self._claims = claims
        self._containers = containers
        self._pod_cgroups = pod_cgroups
        self._view = view
        self._requested: list[str] = []

    async def start(self, call: StartJobCall) -> tuple[GrantedDevice, ...]:
        view, job = self._view(), call.job
        view.require_ready()
        if view.yielded:
            raise refusals.node_yielded(view.yielded)
        await self._require_visible(job)
        devices = self._devices(call)
        with self._keep(devices):
            await self._end_earlier(job, devices, call.actor)
            prepared = PrepareClaimCall(job.claim, devices, wait_seconds=call.wait_seconds, actor=call.actor)
            return await self._claims.prepare(prepared)

    async def end(self, job: Job, wait_seconds: float, actor: str) -> ClaimRelease:
        return await self._claims.unprepare(job.uid, wait_seconds, actor)

    async def _require_visible(self, job: Job) -> None:
        """Raise unless the end of the job will be seen: a job that nothing shows would look over while it runs."""
        try:
            if job.manager is JobManager.SLURM:
                await self._pod_cgroups.require_job_cgroups()
            elif not await self._containers.processes(job.pod):
                raise refusals.job_without_process(job)
        except Unreadable as unreadable:
            raise refusals.job_unreadable(job, unreadable) from unreadable

    def _devices(self, call: StartJobCall) -> tuple[str, ...]:
        """Return the IDs of the requested devices; of any, those that are free, the clean ones first.

        Raises:
            InvalidRequest: no such device, one twice, or no number of devices.
            NotReady: not enough devices are free.
        """
        views = self._view().devices
        find = find_numbered_device if call.job.manager is JobManager.SLURM else find_device
        named = tuple(find((each.device for each in views), name).id for name in call.devices)
        if named:
            return named
        if not 0 < call.count <= len(views):
            raise InvalidRequest(f"A job needs 1 to {len(views)} devices of this node, not {call.count}.")
        mine = tuple(each.device.id for each in views if each.record.prepared_grant(call.job.uid) is not None)
        if len(mine) == call.count:
            return mine  # the answer to an earlier call was lost
        free = sorted((each for each in views if self._is_free(each)), key=_preference)
        if len(free) < call.count:
            raise refusals.no_free_devices(len(free), call.count)
        return tuple(each.device.id for each in free[: call.count])

    def _is_free(self, view: DeviceView) -> bool:
        in_use = view.record.hygiene is Hygiene.IN_USE
        return view.advertised and not in_use and view.device.id not in self._requested

    @contextmanager
    def _keep(self, devices: Sequence[str]) -> Iterator[None]:
        """Keep calls that leave the choice to the service from choosing ``devices``."""
        self._requested += devices
        try:
            yield
        finally:
            for each in devices:
                self._requested.remove(each)

    async def _end_earlier(self, job: Job, devices: Sequence[str], actor: str) -> None:
        """Note the end of earlier jobs of the same manager that have any of ``devices``: it gives a device to one at a time.

        Whether they have ended is then decided by their processes.
        """
        if job.manager is JobManager.RUN:
            return
        records = [each.record for each in self._view().devices]
        for uid in sorted(set(_earlier_jobs(job, devices, records))):
            await self._claims.unprepare(uid, 0.0, actor)


def _preference(view: DeviceView) -> tuple[bool, int, str]:
    return (not view.record.is_certified, len(view.device.index), view.device.index)


def _earlier_jobs(job: Job, devices: Sequence[str], records: Sequence[DeviceRecord]) -> Iterator[str]:
    own = {each.device for each in records if each.prepared_grant(job.uid) is not None}
    for record in records:
        for claim in record.prepared_claims:
            if claim.uid != job.uid and claim.manager is job.manager and record.device in devices:
                yield claim.uid
    if own and own != set(devices):
        yield job.uid  # it was queued again, with other devices, and its epilog did not come


class DriverlessJobs:
    """Implements :class:`scrubber.engine.views.Jobs` without a driver: no job starts, and the end of one is noted.

    Args:
        refusal: the refusal of a start.
    """

    def __init__(self, *, claims: Claims, refusal: Callable[[], NotReady]) -> None:
        self._claims = claims
        self._refusal = refusal

    async def start(self, call: StartJobCall) -> tuple[GrantedDevice, ...]:
        raise self._refusal()

    async def end(self, job: Job, wait_seconds: float, actor: str) -> ClaimRelease:
        return await self._claims.unprepare(job.uid, wait_seconds, actor)
