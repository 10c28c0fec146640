"""Binding conditions: tells the scheduler when a device that it placed a pod on is clean, or that it will not be.

The scheduler copies the conditions of a device from its slice into the allocation, and looks at the claim's status every
5 s before it binds the pod. The kubelet does not know the pod yet, and calls nothing. So the driver follows the claims of
the whole cluster: the API server cannot select them by node.

Invariants: the service decides; a condition grants nothing, and the preparation of the claim is the gate as for every
other one. A device gets its taint before its claim fails, because nothing else keeps the scheduler from choosing it again.
A condition that is set stays: it counts for all pods of the claim.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NoReturn

from plugin.cluster.errors import ApiForbidden, ApiInvalidRequest, ApiNotFound, ApiUnavailable, ClusterError
from plugin.cluster.reporter import BackoffTimes, WriterBackoff
from plugin.dra.claim_driver import DeviceWithdrawal
from plugin.dra.claim_reports import PERMISSIONS
from plugin.dra.claim_service import DeviceOutOfService
from plugin.dra.claims import AllocatedDevice, ClaimIdentity, awaited_devices
from plugin.dra.device_names import device_names
from plugin.dra.inventory import OUT_OF_SERVICE, device_taints
from plugin.dra.port import AllClaimsApi, ClaimApi, Json
from plugin.dra.slices import clean_condition, not_clean_condition
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices
from plugin.logs import Logger, WaitLogger
from plugin.observers import ClusterObserver, NullObserver
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.states import BindingState

__all__ = ["BindingConditions", "BindingDecision", "decide_binding", "with_decisions"]

WITHDRAWAL = 5.0
"""Seconds for the taint of a device to be written before its claim fails."""


@dataclass(frozen=True, slots=True)
class BindingDecision:
    """What is written about one device; ``withdrawn``: a device that needs a taint before."""

    ready: bool
    reason: str
    message: str
    withdrawn: DeviceOutOfService | None = None


def decide_binding(allocated: AllocatedDevice, device: AdvertisedDevice | None) -> BindingDecision | None:
    """Return what the scheduler should learn of an allocated device now; None: it waits.

    Args:
        device: None, if the node has none of that name.
    """
    if device is None or device.gone:
        return BindingDecision(False, "DeviceGone", f"Device {allocated.name} is no longer offered on this node.")
    if allocated.admin_access:
        return BindingDecision(True, "AdminAccess", "A claim with admin access does not wait for a scrub.")
    if device.binding is BindingState.READY and device.healthy:
        return BindingDecision(True, "Clean", "The device was proved clean.")
    if device.binding is BindingState.OUT_OF_SERVICE or (device.binding is None and not device.healthy):
        taints = device_taints(device)
        withdrawn = DeviceOutOfService(device.id, taints[0].reason if taints else OUT_OF_SERVICE)
        message = device.refusal or f"Device {device.id} is out of service."
        return BindingDecision(False, "OutOfService", message, withdrawn)
    return None


def with_decisions(
    present: Sequence[Json], driver: str, decisions: Mapping[AllocatedDevice, BindingDecision], now: str
) -> list[Json]:
    """Return ``status.devices`` with the conditions of the devices that were decided about; all else stays."""
    decided = {
        (driver, each.pool, each.name, each.share_id): _conditions(driver, decision, now)
        for each, decision in decisions.items()
    }
    devices: list[Json] = []
    for entry in present:
        key = (entry["driver"], entry["pool"], entry["device"], entry.get("shareID") or "")
        mine = decided.pop(key, [])
        types = {each["type"] for each in mine}
        others = [each for each in entry.get("conditions") or [] if each.get("type") not in types]
        devices.append({**entry, "conditions": [*others, *mine]} if mine else entry)
    for (_, pool, name, share_id), conditions in decided.items():
        share = {"shareID": share_id} if share_id else {}
        devices.append({"driver": driver, "pool": pool, "device": name, **share, "conditions": conditions})
    return devices


def _conditions(driver: str, decision: BindingDecision, now: str) -> list[dict[str, str]]:
    common = {"reason": decision.reason, "message": decision.message[:1024], "lastTransitionTime": now}
    ready = {"type": clean_condition(driver), "status": "True" if decision.ready else "False", **common}
    return [ready] if decision.ready else [ready, {"type": not_clean_condition(driver), "status": "True", **common}]


class BindingConditions:
    """Sets the binding conditions of the claims that are allocated on this node.

    Args:
        pool: name of the node's pool, which is the node's name.
        watch: another connection, because a watch occupies one.
        devices: the node's devices by the service's snapshots.
        clock: monotonic seconds; ``wall_clock``: seconds since the epoch; ``jitter``: random, in [0, 1).
    """

    def __init__(
        self,
        driver: str,
        pool: str,
        *,
        api: ClaimApi,
        watch: AllClaimsApi,
        devices: AdvertisedDevices,
        withdrawal: DeviceWithdrawal,
        log: Logger,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        jitter: Callable[[], float],
        backoff: BackoffTimes | None = None,
        observer: ClusterObserver | None = None,
    ) -> None:
        self._driver = driver
        self._pool = pool
        self._api = api
        self._watch = watch
        self._devices = devices
        self._withdrawal = withdrawal
        self._log = log
        self._clock = clock
        self._wall_clock = wall_clock
        self._observer = observer or NullObserver()
        times = backoff or BackoffTimes(first=0.5, max=30.0, denied=60.0)
        self._backoff = WriterBackoff(times, jitter)
        self._watch_backoff = WriterBackoff(times, jitter)
        self._reminder = WaitLogger(log, every=600.0, clock=clock)
        self._watch_reminder = WaitLogger(log, every=600.0, clock=clock)
        self._awaited: dict[str, tuple[ClaimIdentity, tuple[AllocatedDevice, ...]]] = {}
        """The claims on this node that the scheduler waits for, by their UIDs."""
        self._changed = asyncio.Event()

    def on_devices(self) -> None:
        """Decide again, because the devices may have changed."""
        self._changed.set()

    async def run(self) -> NoReturn:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="claims of the cluster")
            while True:
                await self._changed.wait()
                if (wait := self._backoff.remaining(self._clock())) > 0:
                    await asyncio.sleep(wait)
                self._changed.clear()
                if self._devices.version > 0:
                    await self._write_decided()

    # -- following the claims

    async def _follow(self) -> NoReturn:
        version = ""
        while True:
            progress = False
            try:
                if not version:
                    version, found = await self._watch.list_claims(self._is_awaited)
                    self._awaited.clear()
                    for each in found:
                        self._store(each)
                    self._on_watched()
                async with aclosing(self._watch.watch_claims(version)) as changes:
                    async for kind, claim in changes:
                        progress = True
                        version = claim["metadata"].get("resourceVersion") or version
                        self._on_watched()
                        if kind == "DELETED":
                            self._awaited.pop(claim["metadata"].get("uid", ""), None)
                        else:
                            self._store(claim)
                continue
            except ApiNotFound as error:
                version = ""  # too old: changes were missed
                self._watch_backoff.on_failure(error, self._clock())
            except ClusterError as error:
                self._watch_backoff.on_failure(error, self._clock())
                if not progress:  # one that has worked also ends where it has grown too long
                    self._watch_reminder.log_waiting("claim.binding-delayed", message=str(error))
            await asyncio.sleep(max(0.0, self._watch_backoff.remaining(self._clock())))

    def _on_watched(self) -> None:
        self._watch_backoff.reset()
        self._watch_reminder.log_ended("claim.binding-resumed")

    def _awaited_devices(self, claim: Json) -> tuple[ClaimIdentity, tuple[AllocatedDevice, ...]]:
        ready, failed = clean_condition(self._driver), not_clean_condition(self._driver)
        return awaited_devices(claim, self._driver, self._pool, ready=ready, failed=failed)

    def _is_awaited(self, claim: Json) -> bool:
        try:
            return bool(self._awaited_devices(claim)[1])
        except InvalidRequest:
            return False

    def _store(self, claim: Json) -> None:
        if self._is_awaited(claim):
            ref, devices = self._awaited_devices(claim)
            self._awaited[ref.uid] = ref, devices
            self._changed.set()
        else:
            self._awaited.pop(claim["metadata"].get("uid", ""), None)

    # -- writing

    async def _write_decided(self) -> None:
        """Write about each claim with a device that is decided about; try again later what fails."""
        for uid, (ref, devices) in list(self._awaited.items()):
            decisions = self._decide(devices)
            if not decisions:
                continue
            ok = False
            try:
                await self._write(ref, decisions)
                ok = True
            except ApiNotFound:
                self._awaited.pop(uid, None)
            except (ApiForbidden, ApiInvalidRequest) as error:
                # Denied permissions of resourceclaims/driver are answered with 422. Other claims do not wait for this one.
                self._awaited.pop(uid, None)
                self._reminder.log_waiting("claim.binding-delayed", message=f"Claim {ref}: {error} {PERMISSIONS}")
            except ClusterError as error:
                self._backoff.on_failure(error, self._clock())
                self._reminder.log_waiting("claim.binding-delayed", message=str(error))
                self._changed.set()
                return
            else:
                self._backoff.reset()
                self._reminder.log_ended("claim.binding-resumed")
            finally:
                self._observer.on_cluster_write("claim-status", ok)

    def _decide(self, devices: Sequence[AllocatedDevice]) -> Mapping[AllocatedDevice, BindingDecision]:
        by_id = {device.id: device for device in self._devices.devices}
        by_name = {name: by_id[id_] for id_, name in device_names(by_id).items()}
        decisions = {each: decide_binding(each, by_name.get(each.name)) for each in devices}
        return {each: decision for each, decision in decisions.items() if decision is not None}

    async def _write(self, ref: ClaimIdentity, decisions: Mapping[AllocatedDevice, BindingDecision]) -> None:
        """Write the decisions, as far as the scheduler still waits for them."""
        withdrawn = [each.withdrawn for each in decisions.values() if each.withdrawn is not None]
        known = not withdrawn or await self._withdrawal.withdraw(withdrawn, WITHDRAWAL)
        found = await self._api.get_claim(ref.namespace, ref.name)
        self._awaited.pop(ref.uid, None)
        self._store(found)
        _, awaited = self._awaited.get(ref.uid, (ref, ()))
        decisions = {each: decision for each, decision in decisions.items() if each in awaited}
        if not decisions:
            return
        now = datetime.fromtimestamp(self._wall_clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        devices = with_decisions(found["status"].get("devices") or [], self._driver, decisions, now)
        patch = {
            "metadata": {"resourceVersion": found["metadata"].get("resourceVersion")},
            "status": {"devices": devices},
        }
        self._store(await self._api.patch_claim_status(ref.namespace, ref.name, patch))
        _, awaited = self._awaited.get(ref.uid, (ref, ()))
        if not decisions.keys().isdisjoint(awaited):
            raise ApiUnavailable(
                "The API server does not keep the status of a claim's devices (feature gate DRAResourceClaimDeviceStatus), "
                "so that pods wait for devices in vain. Start the driver without --binding-conditions."
            )
        for each, decision in decisions.items():
            facts = {"claim": str(ref), "claim_uid": ref.uid, "device": each.name}
            if decision.ready:
                self._log.info("claim.binding-allowed", **facts)
            else:
                self._log.warning(
                    "claim.binding-refused", **facts, reason=decision.reason, message=decision.message, withdrawn=known
                )
