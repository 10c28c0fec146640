"""The DRA driver as a process of a simulated cluster: the driver itself, between the simulated service and the claims.

Everything in its memory is lost when it is killed. Its CDI files are not, until a reboot; the kernel releases its lock.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from plugin.cluster.errors import ApiNotFound
from plugin.cluster.port import EventContent
from plugin.dra.claim_driver import ClaimAnswer, ClaimDriver, ClaimDriverTimes, InjectedDevice
from plugin.dra.claim_restorer import ClaimRestorer, RestorerTimes
from plugin.dra.claim_service import (
    ClaimDeviceRequest,
    ClaimGrant,
    ClaimToRestore,
    DeviceOutOfService,
    RecordedClaim,
    ReleaseProgress,
)
from plugin.dra.claims import ClaimIdentity, ClaimPod
from plugin.dra.device_names import device_names
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.logs import create_logger
from scrubber.domain.assignment import Claim, Pod
from scrubber.domain.errors import ScrubberError, Unavailable
from scrubber.engine.views import GrantedDevice, PrepareClaimCall
from tests.simulation.kubelet import Gone
from tests.simulation.life import listen, start_outside_service
from tests.simulation.service import Service

__all__ = ["CdiFiles", "DriverProcess", "claim_object"]

POOL = "node-1"
CALL_SECONDS = 26.0
"""Limit of the kubelet for a call; the kubelet's is 45 s."""
TIMES = ClaimDriverTimes(call=CALL_SECONDS, release=5.0, orphan=5.0, rewrite=1.0)

T = TypeVar("T")


@dataclass
class CdiFiles:
    """The CDI specifications of claims on disk, by the claim's UID, and the lock that all instances of the driver share."""

    files: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def stage(
        self, claim_uid: str, devices: Mapping[str, AdvertisedDevice], requests: Mapping[str, Sequence[str]]
    ) -> _Staged:
        ids = {(request, name): (f"{claim_uid}-{name}",) for request, names in requests.items() for name in names}
        return _Staged(ids, tuple(sorted(devices)), self.files, claim_uid)

    def remove(self, claim_uid: str) -> None:
        self.files.pop(claim_uid, None)

    def has(self, claim_uid: str) -> bool:
        return claim_uid in self.files

    def claims(self) -> frozenset[str]:
        return frozenset(self.files)

    @asynccontextmanager
    async def exclusive(self, seconds: float) -> AsyncIterator[bool]:
        try:
            async with asyncio.timeout(seconds):
                await self._lock.acquire()
        except TimeoutError:
            yield False
            return
        try:
            yield True
        finally:
            self._lock.release()


class _Staged:
    def __init__(
        self,
        cdi_ids: Mapping[tuple[str, str], tuple[str, ...]],
        names: tuple[str, ...],
        files: dict[str, tuple[str, ...]],
        uid: str,
    ) -> None:
        self.cdi_ids = cdi_ids
        self._names = names
        self._files = files
        self._uid = uid

    def publish(self) -> bool:
        is_new = self._files.get(self._uid) != self._names
        self._files[self._uid] = self._names
        return is_new

    def discard(self) -> None:
        """Nothing is written before it is published."""


class _Service:
    """The service as the driver's client sees it.

    Attributes:
        granted, released: the service's last answers by the claim's UID.
    """

    def __init__(
        self,
        service: Callable[[], Service],
        refused: Callable[[ScrubberError], None],
        restored: Callable[[str, tuple[GrantedDevice, ...]], None],
    ) -> None:
        self._service = service
        self._refused = refused
        self._restored = restored
        self.granted: dict[str, tuple[GrantedDevice, ...]] = {}
        self.released: dict[str, ReleaseProgress] = {}

    async def prepare_claim(
        self,
        claim: ClaimIdentity,
        devices: Sequence[ClaimDeviceRequest],
        pods: Sequence[ClaimPod],
        *,
        driver: str,
        wait_seconds: float,
        extended_resources: Sequence[str] = (),
        restores: bool = False,
        withdrawn: bool = False,
    ) -> Sequence[ClaimGrant]:
        named = Claim(claim.uid, claim.namespace, claim.name, driver, tuple(_pod(each) for each in pods))
        call = PrepareClaimCall(
            named,
            tuple(each.device_id for each in devices if not each.admin_access),
            tuple(each.device_id for each in devices if each.admin_access),
            wait_seconds,
            frozenset(extended_resources),
            restores=restores,
            withdrawn=withdrawn,
        )
        answer = await self._ask(lambda: self._service().prepare_claim(call))
        self.granted[claim.uid] = answer
        if restores:
            self._restored(claim.uid, answer)
        return [ClaimGrant(each.device) for each in answer]

    async def unprepare_claim(self, claim_uid: str, *, wait_seconds: float, withdrawn: bool = False) -> ReleaseProgress:
        release = await self._ask(lambda: self._service().unprepare_claim(claim_uid, wait_seconds, withdrawn=withdrawn))
        withheld = tuple(DeviceOutOfService(each.device, str(each.code)) for each in release.withheld)
        self.released[claim_uid] = ReleaseProgress(release.done, release.waits_for, withheld)
        return self.released[claim_uid]

    async def set_claim_pods(self, claim_uid: str, pods: Sequence[ClaimPod]) -> None:
        raise NotImplementedError  # not by this part of the driver

    async def list_claims(self) -> Sequence[RecordedClaim]:
        async def listed() -> Sequence[RecordedClaim]:
            node = self._service().node
            node.view().require_ready()
            return [
                RecordedClaim(
                    ClaimIdentity(each.claim.namespace, each.claim.name, each.claim.uid),
                    each.claim.driver,
                    each.devices,
                    not each.claim.is_prepared,
                )
                for each in node.claims.current()
            ]

        return await self._ask(listed)

    async def list_unprepared_claims(self) -> Sequence[ClaimToRestore]:
        async def listed() -> Sequence[ClaimToRestore]:
            node = self._service().node
            node.view().require_ready()
            return [ClaimToRestore(each.driver, each.namespace, each.name) for each in node.claims.unprepared()]

        return await self._ask(listed)

    async def _ask(self, request: Callable[[], Awaitable[T]]) -> T:
        try:
            return await request()
        except Gone:
            raise Unavailable("no answer", public_message="The scrub service on this node does not answer.") from None
        except ScrubberError as refusal:
            self._refused(refusal)
            raise


class _Claims:
    """The claims at the API server; ``read`` returns one as JSON, None where there is none."""

    def __init__(self, read: Callable[[str, str], dict[str, Any] | None]) -> None:
        self._read = read

    async def get_claim(self, namespace: str, name: str) -> Mapping[str, Any]:
        found = self._read(namespace, name)
        if found is None:
            raise ApiNotFound(f'resourceclaims "{name}" not found')
        return found

    async def get_device_class(self, name: str) -> Mapping[str, Any]:
        raise ApiNotFound(f'deviceclasses "{name}" not found')

    async def patch_claim_status(self, namespace: str, name: str, patch: Mapping[str, Any]) -> Mapping[str, Any]:
        raise NotImplementedError  # by another part of the driver

    async def create_event(self, event: EventContent, now: object) -> None:
        raise NotImplementedError

    async def repeat_event(self, event: EventContent, now: object, count: int | None) -> int:
        raise NotImplementedError


class _Withdrawal:
    async def withdraw(self, devices: Sequence[DeviceOutOfService], timeout: float) -> bool:
        return True


class DriverProcess:
    """The driver of one node, which is running or not.

    Args:
        service: returns the running service; raises :class:`Gone` without one.
        refused: called with every refusal of the service.
        read: returns a claim at the API server, as JSON.
        restored: called with the UID of a claim that is handed over again without a call of the kubelet.

    Attributes:
        killed: set while it is not running after a kill.
    """

    def __init__(
        self,
        driver: str,
        devices: Iterable[str],
        *,
        service: Callable[[], Service],
        refused: Callable[[ScrubberError], None],
        read: Callable[[str, str], dict[str, Any] | None],
        restored: Callable[[str, tuple[GrantedDevice, ...]], None],
    ) -> None:
        self._driver = driver
        self._ids = tuple(devices)
        self._service = _Service(service, refused, restored)
        self._api = _Claims(read)
        self._running: ClaimDriver | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.cdi = CdiFiles()
        self.killed = asyncio.Event()

    @property
    def is_running(self) -> bool:
        return self._running is not None

    async def start(self) -> None:
        """Start an instance, which gets every call from now on; another one completes its calls."""
        loop = asyncio.get_running_loop()
        self.killed.clear()
        devices, located = AdvertisedDevices(), asyncio.Event()
        seen = (AdvertisedDevice(id_, str(at), ServiceVerdict.ADVERTISED, True) for at, id_ in enumerate(self._ids))
        await devices.update(tuple(seen), "first")
        self._running = ClaimDriver(
            self._driver,
            POOL,
            service=self._service,
            api=self._api,
            devices=devices,
            specs=self.cdi,
            withdrawal=_Withdrawal(),
            gpu_driver_located=located,
            was_ready=lambda: True,
            times=TIMES,
            log=create_logger("json", "error", io.StringIO()),
            clock=loop.time,
        )
        running = self._running
        self._run(running.reconcile_specs(), "specifications")
        restorer = ClaimRestorer(
            self._driver,
            self._service,
            running,
            is_registered=lambda: self._running is running,
            times=RestorerTimes(),
            log=create_logger("json", "error", io.StringIO()),
            clock=loop.time,
        )
        self._run(restorer.run(), "restorer")

    def kill(self) -> None:
        """Simulate kill -9 of every instance: no call is answered."""
        self._running = None
        self.killed.set()
        self.drop_calls()

    def drop_calls(self) -> None:
        """End every call, as when the kubelet is killed; the driver's own work ends only with the driver."""
        for task in list(self._tasks):
            if self._running is None or task.get_name() not in ("specifications", "restorer"):
                task.cancel()

    async def prepare(self, claim: ClaimIdentity) -> tuple[tuple[InjectedDevice, ...], tuple[GrantedDevice, ...]]:
        """Return the answer to the kubelet, and what the service granted.

        Raises:
            Gone: the driver is not running, or has ended before it answered.
            Unavailable: it answered with an error.
        """
        answer = await self._call(lambda driver: driver.prepare([claim], CALL_SECONDS), claim)
        return answer.devices, self._service.granted.get(claim.uid, ())

    async def unprepare(self, claim: ClaimIdentity) -> ReleaseProgress:
        """Return the service's last answer; raises as :meth:`prepare`."""
        await self._call(lambda driver: driver.unprepare([claim], CALL_SECONDS), claim)
        return self._service.released[claim.uid]

    async def _call(
        self, call: Callable[[ClaimDriver], Coroutine[Any, Any, Mapping[str, ClaimAnswer]]], claim: ClaimIdentity
    ) -> ClaimAnswer:
        if self._running is None:
            raise Gone
        task = self._run(call(self._running), "call")
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.cancelled():
            raise Gone
        answer = task.result()[claim.uid]
        if answer.error:
            raise Unavailable(answer.error, public_message=answer.error)
        return answer

    def _run(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = start_outside_service(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(listen)
        return task


def claim_object(
    claim: ClaimIdentity, driver: str, devices: Iterable[str], all_devices: Iterable[str], pods: Iterable[Pod]
) -> dict[str, Any]:
    """Return an allocated claim as the API server has it."""
    names = device_names(all_devices)
    results = [{"request": "gpu", "driver": driver, "pool": POOL, "device": names[each]} for each in devices]
    return {
        "metadata": {"namespace": claim.namespace, "name": claim.name, "uid": claim.uid},
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": pod.name, "uid": pod.uid} for pod in pods],
        },
    }


def _pod(pod: ClaimPod) -> Pod:
    return Pod(pod.namespace, pod.name, pod.uid)
