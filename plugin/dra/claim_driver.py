"""Prepares and releases claims for the kubelet.

Preparing is the gate: the kubelet asks once for each allocation of a claim, and repeats a failed call only after 60 to
90 s. So a call is held while a retry here could still succeed. Releasing is no proof that the tenant has ended, and a
success is final: it is answered only when the service reports that each device is clean or out of service.

Invariants: the claims of one call are independent of each other, and every one of them gets an answer. Nothing is kept
here between calls, so that any instance of the driver answers a repeated call identically. A CDI specification takes
its name only after the service has recorded the grant, and is removed only while the service lists the claim as not
prepared. Instances overlap: one may release a claim that another one prepares again.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol
from weakref import WeakValueDictionary

from plugin.cluster.errors import ApiForbidden, ApiInvalidRequest, ApiNotFound, ClusterError
from plugin.dra.claim_service import (
    ClaimDeviceRequest,
    ClaimGrant,
    ClaimService,
    DeviceOutOfService,
    RecordedClaim,
    ReleaseProgress,
)
from plugin.dra.claims import AllocatedClaim, ClaimIdentity, read_claim
from plugin.dra.device_names import device_names
from plugin.dra.port import ClaimApi
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices
from plugin.kubelet.server import INTERNAL_ERROR
from plugin.logs import Logger, WaitLogger, log_context
from plugin.observers import GateObserver, NullObserver
from scrubber.completion import run_to_completion
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import InvalidRequest, NotReady, RetryableError, ScrubberError, Unavailable
from scrubber.ports.runtime import NOOP_TRACER, Tracer

__all__ = [
    "ClaimAnswer",
    "ClaimDriver",
    "ClaimDriverTimes",
    "ClaimSpecs",
    "ClaimsObserver",
    "DeviceWithdrawal",
    "InjectedDevice",
    "StagedSpec",
]

PREPARE, UNPREPARE = "NodePrepareResources", "NodeUnprepareResources"
RESTORE = "restore"
"""What appears in the place of the kubelet's method where a claim is handed over again without a call."""

API_SERVER_AWAY = "The claim cannot be read, because the API server does not answer. The kubelet tries again."
GPU_DRIVER_AWAY = (
    "It is not known yet where the GPU driver is on this node; the log of the DRA driver contains the cause. The kubelet "
    "tries again."
)


@dataclass(frozen=True, slots=True)
class ClaimDriverTimes:
    """Times of the calls, in seconds.

    Attributes:
        call: limit of a call where the kubelet gives none.
        margin: how much earlier than the kubelet's limit a call is answered.
        release: after which a release that is not done is answered while a pod of the claim still exists.
        orphan: the same where none does: the kubelet then releases one claim after the other.
        lookup: limit of the request that tells the two apart.
        withdrawal: wait for the device of a failed release to be withdrawn from the scheduler.
        retry: between two attempts within a call.
        record: between two attempts to have the service record a release.
        exclusive: wait for another instance that adds or removes CDI specifications.
        rewrite: between two attempts to restore the CDI specifications of prepared claims, after a start.
        quiet: after which the kubelet will not repeat an earlier call about a claim. It does so after up to 90 s.
    """

    call: float = 45.0
    margin: float = 1.0
    release: float = 40.0
    orphan: float = 5.0
    lookup: float = 1.0
    withdrawal: float = 5.0
    retry: float = 0.5
    record: float = 0.05
    exclusive: float = 5.0
    rewrite: float = 10.0
    quiet: float = 100.0


@dataclass(frozen=True, slots=True)
class InjectedDevice:
    """A device of a prepared claim, as the kubelet gets it."""

    requests: tuple[str, ...]
    pool: str
    name: str
    cdi_ids: tuple[str, ...]
    share_id: str = ""


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """The answer about one claim; ``error`` appears in an event of the pod and is empty on success."""

    devices: tuple[InjectedDevice, ...] = ()
    error: str = ""


class StagedSpec(Protocol):
    """A CDI specification that is written and has no name yet."""

    cdi_ids: Mapping[tuple[str, str], tuple[str, ...]]
    """By the request and the name of the device in the pool; the first id belongs to this device alone."""

    def publish(self) -> bool:
        """Give it its name; return False if it was there already.

        Raises:
            Unavailable: that failed.
        """
        ...

    def discard(self) -> None:
        """Remove it, unless it was published."""
        ...


class ClaimSpecs(Protocol):
    """The CDI specifications of claims."""

    def stage(
        self, claim_uid: str, devices: Mapping[str, AdvertisedDevice], requests: Mapping[str, Sequence[str]]
    ) -> StagedSpec:
        """Write the specification of a claim.

        Args:
            devices: by their names in the pool.
            requests: the names of each request's devices.

        Raises:
            Unavailable: it cannot be written; the message names the directory.
            InvalidRequest: a device cannot be injected by CDI.
        """
        ...

    def remove(self, claim_uid: str) -> None:
        """Remove it; nothing happens if there is none, or if that fails, which is logged."""
        ...

    def has(self, claim_uid: str) -> bool:
        """Return whether a container may find a specification of the claim; also True where that is unknown."""
        ...

    def claims(self) -> frozenset[str]:
        """Return the UIDs of all claims that have one."""
        ...

    def exclusive(self, seconds: float) -> AbstractAsyncContextManager[bool]:
        """Keep other instances from adding or removing any; gives False if that did not work within ``seconds``."""
        ...


class DeviceWithdrawal(Protocol):
    """Keeps the scheduler from placing pods on devices that are out of service."""

    async def withdraw(self, devices: Sequence[DeviceOutOfService], timeout: float) -> bool:
        """Have the devices withdrawn; return whether that is done after ``timeout`` seconds. It continues if not."""
        ...


class ClaimsObserver(Protocol):
    """Is informed of claims; never raises and never blocks."""

    def on_prepared(
        self, claim: AllocatedClaim, devices: Mapping[str, AdvertisedDevice], granted: Sequence[ClaimGrant]
    ) -> None:
        """The claim's devices, by their names in the pool, were granted; a repeated call is reported as well."""
        ...

    def on_refused(self, claim: ClaimIdentity, error: ScrubberError) -> None: ...

    def on_released(self, claim: ClaimIdentity) -> None: ...


class ClaimDriver:
    """The kubelet's two calls, for claims of one driver on one node.

    Args:
        pool: name of the node's pool, which is the node's name.
        devices: the node's devices by the service's snapshots.
        gpu_driver_located: set once it is known where the GPU driver is; until then no NVIDIA GPU can be passed to a container.
        was_ready: returns whether a service that knows all devices of the node has listed them; :meth:`AdvertisedDevices.notify`
            follows when that changes.
        clock: monotonic seconds.
        tracer: records a span of every claim of a call.
    """

    def __init__(
        self,
        driver: str,
        pool: str,
        *,
        service: ClaimService,
        api: ClaimApi,
        devices: AdvertisedDevices,
        specs: ClaimSpecs,
        withdrawal: DeviceWithdrawal,
        gpu_driver_located: asyncio.Event,
        was_ready: Callable[[], bool],
        times: ClaimDriverTimes,
        log: Logger,
        clock: Callable[[], float],
        observer: GateObserver | None = None,
        tracer: Tracer = NOOP_TRACER,
        claims_observers: Sequence[ClaimsObserver] = (),
    ) -> None:
        self._driver = driver
        self._pool = pool
        self._service = service
        self._api = api
        self._devices = devices
        self._specs = specs
        self._withdrawal = withdrawal
        self._gpu_driver_located = gpu_driver_located
        self._was_ready = was_ready
        self._times = times
        self._log = log
        self._clock = clock
        self._observer = observer or NullObserver()
        self._tracer = tracer
        self._claims_observers = claims_observers
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._reminder = WaitLogger(log, every=600.0, clock=clock)
        self._list_reminder = WaitLogger(log, every=600.0, clock=clock)
        self._last_calls: dict[tuple[str, str], float] = {}
        """When the kubelet's last call about a claim began or ended, by its namespace and name."""
        self._removal_skipped = False
        """A specification was kept because the service did not answer, or because another instance held the lock."""

    async def prepare(self, claims: Sequence[ClaimIdentity], remaining: float | None) -> Mapping[str, ClaimAnswer]:
        """Return the answer about each claim, by its UID; ``remaining``: seconds that the kubelet waits."""
        return await self._each(PREPARE, claims, remaining, self._prepare)

    async def unprepare(self, claims: Sequence[ClaimIdentity], remaining: float | None) -> Mapping[str, ClaimAnswer]:
        """Return the answer about each claim, by its UID; ``remaining``: seconds that the kubelet waits."""
        return await self._each(UNPREPARE, claims, remaining, self._unprepare)

    async def _each(
        self,
        method: str,
        claims: Sequence[ClaimIdentity],
        remaining: float | None,
        call: Callable[[ClaimIdentity, float], Awaitable[ClaimAnswer]],
    ) -> Mapping[str, ClaimAnswer]:
        limit = self._times.call if remaining is None else min(self._times.call, remaining)
        until = self._clock() + max(0.0, limit - self._times.margin)
        by_uid = {claim.uid: claim for claim in claims}
        self._note_calls(claims)
        try:
            answers = await asyncio.gather(*(self._answer(method, claim, until, call) for claim in by_uid.values()))
        finally:
            self._note_calls(claims)
        return dict(zip(by_uid, answers, strict=True))

    def _note_calls(self, claims: Sequence[ClaimIdentity]) -> None:
        recent = {claim: at for claim, at in self._last_calls.items() if not self._is_past(at)}
        self._last_calls = recent | {(claim.namespace, claim.name): self._clock() for claim in claims}

    def _is_past(self, call: float) -> bool:
        return self._clock() - call >= self._times.quiet

    def is_quiet(self, namespace: str, name: str) -> bool:
        """Return whether the kubelet has made no call about a claim for so long that it will not repeat an earlier one."""
        last = self._last_calls.get((namespace, name))
        return last is None or self._is_past(last)

    async def _answer(
        self,
        method: str,
        claim: ClaimIdentity,
        until: float,
        call: Callable[[ClaimIdentity, float], Awaitable[ClaimAnswer]],
    ) -> ClaimAnswer:
        with log_context(method=method):
            try:
                with self._tracer.span(method, claim_uid=claim.uid, tenant=claim.namespace):
                    async with self._locked(claim, until):
                        return await call(claim, until)
            except ScrubberError as error:
                (self._on_pending if method == UNPREPARE else self._on_refused)(claim, error)
                return ClaimAnswer(error=error.public_message)
            except Exception as error:  # noqa: BLE001 - its text must not appear in a pod's events; the log has all of it
                self._log.error("api.failed", exc_info=error)
                return ClaimAnswer(error=INTERNAL_ERROR)

    def _on_refused(self, claim: ClaimIdentity, error: ScrubberError) -> None:
        self._log.warning(
            "claim.refused",
            claim=str(claim),
            claim_uid=claim.uid,
            code=error.code,
            message=str(error),
            public_message=error.public_message,
        )
        self._observer.on_start_refused(str(error.code))
        for each in self._claims_observers:
            each.on_refused(claim, error)

    def _on_pending(self, claim: ClaimIdentity, error: ScrubberError) -> None:
        self._log.info(
            "claim.release-pending", claim=str(claim), claim_uid=claim.uid, code=error.code, message=str(error)
        )

    @asynccontextmanager
    async def _locked(self, claim: ClaimIdentity, until: float) -> AsyncIterator[None]:
        """Wait for the other call about the same claim: the kubelet repeats a call beside one that takes long.

        Raises:
            NotReady: it lasts until the kubelet's limit.
        """
        lock = self._locks.setdefault(claim.uid, asyncio.Lock())
        try:
            async with asyncio.timeout(until - self._clock()):
                await lock.acquire()
        except TimeoutError:
            message = f"An earlier call about claim {claim} is still in progress. The kubelet tries again."
            raise NotReady(message, public_message=message) from None
        try:
            yield
        finally:
            lock.release()

    # -- CDI specifications

    async def reconcile_specs(self) -> None:
        """Make the specifications match the prepared claims; once after a start, as soon as the service answers.

        The kubelet makes no call when a container of a prepared claim restarts, and without its specification the container
        could not start.
        """
        recorded = await self._remove_other_specs()
        await self._devices.wait_until(lambda: self._devices.version > 0)
        missing = {uid for uid, each in recorded.items() if each.driver == self._driver and not each.releasing}
        while missing:
            failures = {uid: await self._restore_spec(uid) for uid in sorted(missing)}
            missing = {uid for uid, why in failures.items() if why}
            if missing:
                message = failures[min(missing)]
                self._reminder.log_waiting("cdi.claims-not-restored", claims=len(missing), message=message)
                await asyncio.sleep(self._times.rewrite)
        self._reminder.log_ended("cdi.claims-restored")

    async def remove_left_specs(self) -> NoReturn:
        """Remove specifications of claims that are not prepared after each restart of the service, and after a skipped removal.

        A claim that ended while the service was away, or beside another instance, gets no further call of the kubelet.
        """
        epoch = self._devices.epoch
        while True:
            await self._devices.wait_until(functools.partial(self._is_removal_due, epoch))
            if self._removal_skipped:
                await asyncio.sleep(self._times.rewrite)
            epoch, self._removal_skipped = self._devices.epoch or epoch, False
            await self._remove_other_specs()

    def _is_removal_due(self, epoch: str) -> bool:
        return self._removal_skipped or self._devices.epoch not in ("", epoch)

    async def _remove_other_specs(self) -> Mapping[str, RecordedClaim]:
        """Remove the specifications of claims that are not prepared; return those that the service lists."""
        recorded = await self._recorded()
        prepared = {uid for uid, each in recorded.items() if not each.releasing}
        for uid in sorted(self._specs.claims() - prepared):
            async with self._locks.setdefault(uid, asyncio.Lock()):
                if await self._remove_spec(uid):
                    self._log.info("cdi.claim-removed", claim_uid=uid)
        return recorded

    async def _recorded(self) -> Mapping[str, RecordedClaim]:
        """Return the claims that the service lists; wait until it does."""
        while True:
            try:
                recorded = {each.ref.uid: each for each in await self._service.list_claims()}
            except ScrubberError as error:
                if not isinstance(error, RetryableError):
                    self._list_reminder.log_waiting("claims.not-listed", message=str(error))
                await asyncio.sleep(self._times.retry)
            else:
                self._list_reminder.log_ended("claims.listed")
                return recorded

    async def _prepared(self, uid: str) -> RecordedClaim | None:
        """Return the claim if it is prepared; raises :class:`ScrubberError` if the service does not answer."""
        return next(
            (each for each in await self._service.list_claims() if each.ref.uid == uid and not each.releasing), None
        )

    async def _remove_spec(self, uid: str) -> bool:
        """Remove the specification of a claim; return False where the claim is prepared, or where that is unknown."""
        async with self._specs.exclusive(self._times.exclusive) as alone:
            if alone:
                with suppress(ScrubberError):
                    if await self._prepared(uid) is not None:
                        return False
                    self._specs.remove(uid)
                    return True
        self._removal_skipped = True
        await self._devices.notify()
        return False

    async def _restore_spec(self, uid: str) -> str:
        """Write the specification of a prepared claim unless it is there; return why it has to be tried again, or empty."""
        async with self._locks.setdefault(uid, asyncio.Lock()):
            try:
                recorded = await self._prepared(uid)
                if recorded is None:
                    return ""
                ref = recorded.ref
                claim = read_claim(ref, await self._api.get_claim(ref.namespace, ref.name), self._driver, self._pool)
                devices = self._named_devices(claim)
                if self._lacks_gpu_driver(devices):
                    return GPU_DRIVER_AWAY
                staged = self._specs.stage(uid, devices, claim.names_by_request())
                try:
                    async with self._specs.exclusive(self._times.exclusive):
                        # Another instance may have released the claim meanwhile, and removed its specification.
                        if await self._prepared(uid) is not None and staged.publish():
                            self._log.info("cdi.claim-restored", claim_uid=uid)
                finally:
                    staged.discard()
            except (InvalidRequest, ApiNotFound) as error:  # the claim, or its device, is gone
                self._log.warning("cdi.claim-not-restored", claim_uid=uid, message=str(error))
            except (ScrubberError, ClusterError) as error:
                return str(error)
        return ""

    # -- prepare

    async def _prepare(self, ref: ClaimIdentity, until: float, *, restores: bool = False) -> ClaimAnswer:
        began = self._clock()
        claim = read_claim(ref, await self._read(ref, until), self._driver, self._pool)
        devices = await self._resolve(claim, until)
        staged = self._specs.stage(ref.uid, devices, claim.names_by_request())
        try:
            resources = await self._extended_resources(claim, until)
            granted = await self._grant(claim, devices, resources, until, restores=restores)
            async with self._specs.exclusive(min(self._times.exclusive, max(0.0, until - self._clock()))):
                staged.publish()
        finally:
            staged.discard()
        self._log.info(
            "claim.prepared",
            claim=str(ref),
            claim_uid=ref.uid,
            devices=[device.id for device in devices.values()],
            certificates=[each.certificate.id for each in granted if each.certificate is not None],
            duration_seconds=round(self._clock() - began, 3),
        )
        for each in self._claims_observers:
            each.on_prepared(claim, devices, granted)
        return ClaimAnswer(
            tuple(
                InjectedDevice((request,), each.pool, each.name, staged.cdi_ids[request, each.name], each.share_id)
                for each in claim.devices
                for request in each.requests
            )
        )

    async def _read(self, ref: ClaimIdentity, until: float) -> Mapping[str, object]:
        """Return the claim; wait for an API server that is away.

        Raises:
            InvalidRequest: the claim does not exist (any more), or the request is refused for good.
            Unavailable: the API server is away until the end of the call.
        """
        try:
            return await self._wait_for_api(ref, lambda: self._api.get_claim(ref.namespace, ref.name), until)
        except ApiNotFound:
            raise InvalidRequest(f"Claim {ref} does not exist any more.") from None
        except ApiForbidden as error:
            message = f"The driver's role does not allow it to get resourceclaims, so {ref} cannot be prepared."
            raise InvalidRequest(f"{message} {error}", public_message=message) from error
        except ApiInvalidRequest as error:
            raise InvalidRequest(f"Claim {ref} cannot be read: {error}") from error

    async def _extended_resources(self, claim: AllocatedClaim, until: float) -> Sequence[str]:
        """Return the extended resources that the classes of a claim publish, where the scheduler created the claim for such.

        A class that is gone publishes none. Whether the names are advertised twice is no question of safety, so a missing
        permission does not keep the pod from starting.

        Raises:
            Unavailable: the API server is away until the end of the call.
        """
        found = []
        for name in claim.extended_classes:
            try:
                each = await self._wait_for_api(claim.ref, functools.partial(self._api.get_device_class, name), until)
            except (ApiNotFound, ApiForbidden, ApiInvalidRequest) as error:
                self._log.warning("claim.class-unreadable", claim=str(claim.ref), message=str(error))
                continue
            resource = (each.get("spec") or {}).get("extendedResourceName")
            if isinstance(resource, str) and resource:
                found.append(resource)
        return sorted(set(found))

    async def _wait_for_api(
        self, ref: ClaimIdentity, request: Callable[[], Awaitable[Mapping[str, Any]]], until: float
    ) -> Mapping[str, Any]:
        """Return the response to ``request``; wait for an API server that is away.

        Raises:
            ApiNotFound, ApiForbidden, ApiInvalidRequest
            Unavailable: the API server is away until the end of the call.
        """
        while True:
            try:
                async with asyncio.timeout(max(0.0, until - self._clock())):
                    return await request()
            except (ApiNotFound, ApiForbidden, ApiInvalidRequest):
                raise
            except TimeoutError:
                raise Unavailable(f"Claim {ref}: {API_SERVER_AWAY}", public_message=API_SERVER_AWAY) from None
            except ClusterError as error:
                pause = max(self._times.retry, error.retry_after)
                if self._clock() + pause >= until:
                    raise Unavailable(f"Claim {ref}: {error}", public_message=API_SERVER_AWAY) from error
                await asyncio.sleep(pause)

    async def _resolve(self, claim: AllocatedClaim, until: float) -> Mapping[str, AdvertisedDevice]:
        """Return the devices of a claim by their names in the pool; wait until they and their GPU driver are known.

        Raises:
            Unavailable: no ready service, or no GPU driver, was there until the end of the call.
            InvalidRequest: this node has no such device.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - self._clock())):
                await self._devices.wait_until(lambda: self._was_ready() or not self._unknown_names(claim))
                if self._lacks_gpu_driver(self._named_devices(claim)):
                    await self._gpu_driver_located.wait()
        devices = self._named_devices(claim)
        if self._lacks_gpu_driver(devices):
            raise Unavailable(GPU_DRIVER_AWAY, public_message=GPU_DRIVER_AWAY)
        return devices

    def _lacks_gpu_driver(self, devices: Mapping[str, AdvertisedDevice]) -> bool:
        return not self._gpu_driver_located.is_set() and any(device.is_nvidia for device in devices.values())

    def _by_name(self) -> Mapping[str, AdvertisedDevice]:
        by_id = {device.id: device for device in self._devices.devices}
        return {name: by_id[id_] for id_, name in device_names(by_id).items()}

    def _unknown_names(self, claim: AllocatedClaim) -> list[str]:
        return sorted({each.name for each in claim.devices} - self._by_name().keys())

    def _named_devices(self, claim: AllocatedClaim) -> Mapping[str, AdvertisedDevice]:
        """Return the devices of a claim by their names in the pool.

        Raises:
            Unavailable: no service has listed one of them, and none was ready yet.
            InvalidRequest: this node has no such device.
        """
        if unknown := self._unknown_names(claim):
            if self._was_ready():
                raise InvalidRequest(
                    f"Claim {claim.ref} has device {unknown[0]}, which is not on this node, or not selected by the driver's "
                    "--devices. Delete the pod, so that the claim is allocated again."
                )
            if self._devices.version == 0:
                message = "The scrub service on this node does not answer. The kubelet tries again."
            else:
                message = (
                    f"The scrub service on this node is not ready, and has not listed device {unknown[0]} yet. The kubelet "
                    "tries again."
                )
            raise Unavailable(message, public_message=message)
        by_name = self._by_name()
        return {each.name: by_name[each.name] for each in claim.devices}

    async def _grant(
        self,
        claim: AllocatedClaim,
        devices: Mapping[str, AdvertisedDevice],
        extended_resources: Sequence[str],
        until: float,
        *,
        restores: bool,
    ) -> Sequence[ClaimGrant]:
        """Have the service grant the devices; wait for a service that is away.

        A claim that the kubelet has forgotten, and that the service has released for this one, loses its specification before
        its devices are scrubbed for this one, as in every release.
        """
        requested = [ClaimDeviceRequest(devices[each.name].id, each.admin_access) for each in claim.devices]
        while True:
            try:
                return await self._service.prepare_claim(
                    claim.ref,
                    requested,
                    claim.pods,
                    driver=self._driver,
                    wait_seconds=max(0.0, until - self._clock()),
                    extended_resources=extended_resources,
                    restores=restores,
                    withdrawn=not self._specs.has(claim.ref.uid),
                )
            except Unavailable:
                if self._clock() + self._times.retry >= until:
                    raise
                await asyncio.sleep(self._times.retry)
            except NotReady as refusal:
                if refusal.code != ErrorCode.CLAIM_ABANDONED or self._clock() >= until:
                    raise
                for uid in sorted(self._specs.claims()):
                    await self._remove_spec(uid)

    # -- restoring

    async def restore(self, namespace: str, name: str) -> None:
        """Hand over a claim that only the kubelet takes for prepared, so that its pods find their CDI specification.

        Nothing happens if the kubelet has called meanwhile, or if the claim or the API server is gone. A refusal is reported as
        that of a call.
        """
        until = self._clock() + self._times.call - self._times.margin
        with suppress(ClusterError):
            found = await self._api.get_claim(namespace, name)
            uid = (found.get("metadata") or {}).get("uid")
            if isinstance(uid, str) and uid:
                restore = functools.partial(self._restore, found=found)
                await self._answer(RESTORE, ClaimIdentity(namespace, name, uid), until, restore)

    async def _restore(self, ref: ClaimIdentity, until: float, *, found: Mapping[str, object]) -> ClaimAnswer:
        if not self.is_quiet(ref.namespace, ref.name):
            return ClaimAnswer()
        claim = read_claim(ref, found, self._driver, self._pool)
        if all(each.admin_access for each in claim.devices) and self._specs.has(ref.uid):
            # It was never released: of many claims with admin access to a device, the service forgets the oldest.
            return ClaimAnswer()
        # Without its specification, no container has got the devices since their release, whatever pods run by now.
        if not await self._remove_spec(ref.uid):
            return ClaimAnswer()
        answer = await self._prepare(ref, until, restores=True)
        self._log.warning("claim.restored", claim=str(ref), claim_uid=ref.uid)
        return answer

    # -- release

    async def _unprepare(self, ref: ClaimIdentity, until: float) -> ClaimAnswer:
        began = self._clock()
        # Also where the kubelet ends meanwhile: a pod could start with the specification of a released claim.
        progress = await run_to_completion(self._withdraw(ref, min(until, began + self._times.orphan)))
        if not progress.done:
            wait = self._times.release if await self._has_pods(ref) else self._times.orphan
            wait_until = min(until, began + wait)
            progress = await self._service.unprepare_claim(
                ref.uid, wait_seconds=max(0.0, wait_until - self._clock()), withdrawn=not self._specs.has(ref.uid)
            )
        if not progress.done:
            message = progress.waits_for or "A scrub is in progress."
            raise NotReady(message, public_message=f"{message} The kubelet tries again.")
        if progress.withheld:
            limit = min(self._times.withdrawal, until - self._clock())
            withdrawn = await self._withdrawal.withdraw(progress.withheld, max(0.0, limit))
            self._log.warning(
                "claim.devices-withheld",
                claim=str(ref),
                claim_uid=ref.uid,
                devices=[each.device_id for each in progress.withheld],
                causes=[each.code for each in progress.withheld],
                withdrawn=withdrawn,
            )
        self._log.info(
            "claim.released", claim=str(ref), claim_uid=ref.uid, duration_seconds=round(self._clock() - began, 3)
        )
        for each in self._claims_observers:
            each.on_released(ref)
        return ClaimAnswer()

    async def _withdraw(self, ref: ClaimIdentity, until: float) -> ReleaseProgress:
        """Record the release of a claim, and remove its specification; raises as :meth:`_record_release`."""
        progress = await self._record_release(ref, until)
        # The kubelet calls for no pod that joins the claim from here on; without the specification none can start.
        await self._remove_spec(ref.uid)
        return progress

    async def _record_release(self, ref: ClaimIdentity, until: float) -> ReleaseProgress:
        """Have the service record the release of a claim, which it does not while another call is in progress there.

        Raises:
            NotReady: it was not recorded by ``until``. The claim is prepared, and nothing is scrubbed.
        """
        while True:
            progress = await self._service.unprepare_claim(ref.uid, wait_seconds=0.0)
            if progress.done or await self._prepared(ref.uid) is None:
                return progress
            if self._clock() + self._times.record >= until:
                message = progress.waits_for or f"Another call about the devices of claim {ref} is in progress."
                raise NotReady(message, public_message=f"{message} The kubelet tries again.")
            await asyncio.sleep(self._times.record)

    async def _has_pods(self, ref: ClaimIdentity) -> bool:
        """Return whether a pod of the claim still exists; False where that is unknown, since a short wait harms less.

        The claim controller removes a pod from the claim when it is gone, and a pod that is being deleted regularly is
        there until the kubelet's call succeeds.
        """
        try:
            async with asyncio.timeout(self._times.lookup):
                found = await self._api.get_claim(ref.namespace, ref.name)
        except (ClusterError, TimeoutError):
            return False
        metadata, status = found.get("metadata") or {}, found.get("status") or {}
        return metadata.get("uid") == ref.uid and bool(status.get("reservedFor"))
