"""Writes what concerns a claim to the API server: its devices' status with their certificates, and refused parameters.

Invariants: no call of the kubelet waits for it. Only the newest report of a claim is kept, so a long absence of the API
server needs little memory. Entries of other drivers stay as they are, because a write states which version of the claim
it was made from. Nothing about earlier tenants is written.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NoReturn

from plugin.cluster.errors import ApiConflict, ApiForbidden, ApiInvalidRequest, ApiNotFound, ClusterError
from plugin.cluster.port import EventContent, EventTarget
from plugin.cluster.reporter import BackoffTimes, WriterBackoff
from plugin.dra.claim_service import CertificateExtract, ClaimGrant
from plugin.dra.claims import AllocatedClaim, AllocatedDevice, ClaimIdentity, InvalidParameters
from plugin.dra.port import ClaimApi
from plugin.kubelet.devices import AdvertisedDevice
from plugin.logs import Logger, WaitLogger
from plugin.observers import ClusterObserver, NullObserver
from scrubber.domain.errors import ScrubberError

__all__ = ["MAX_DATA_BYTES", "ClaimReports", "certificate_data", "merged_devices"]

Json = dict[str, Any]

MAX_DATA_BYTES = 10 << 10
"""Limit of Kubernetes for the data of one device."""
MAX_REPORTS = 1024
CONDITION = "Ready"
EVENT_REASON = "ParametersRefused"
PERMISSIONS = (
    "The driver's role must allow it to get resourceclaims, to patch resourceclaims/status, associated-node:patch on "
    "resourceclaims/driver, and to create and patch events."
)


@dataclass(frozen=True, slots=True)
class _Report:
    """One claim's status to be written, or its event."""

    ref: ClaimIdentity
    driver: str
    devices: tuple[Json, ...] = ()
    event: EventContent | None = None


@dataclass(slots=True)
class _Queue:
    reports: dict[tuple[str, bool], _Report] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class ClaimReports:
    """Receives reports about claims, and writes them one at a time; a :class:`plugin.dra.claim_driver.ClaimsObserver`.

    Args:
        clock: monotonic seconds; ``wall_clock``: seconds since the epoch; ``jitter``: random, in [0, 1).
    """

    def __init__(
        self,
        driver: str,
        api: ClaimApi,
        *,
        log: Logger,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        jitter: Callable[[], float],
        backoff: BackoffTimes | None = None,
        observer: ClusterObserver | None = None,
    ) -> None:
        self._driver = driver
        self._api = api
        self._observer = observer or NullObserver()
        self._log = log
        self._clock = clock
        self._wall_clock = wall_clock
        self._backoff = WriterBackoff(backoff or BackoffTimes(first=0.5, max=60.0, denied=600.0), jitter)
        self._reminder = WaitLogger(log, every=600.0, clock=clock)
        self._queue = _Queue()

    def on_prepared(
        self, claim: AllocatedClaim, devices: Mapping[str, AdvertisedDevice], granted: Sequence[ClaimGrant]
    ) -> None:
        grants = {each.device_id: each for each in granted}
        now = _time(self._wall_clock())
        entries = tuple(
            _entry(self._driver, each, devices[each.name].id, grants.get(devices[each.name].id), now)
            for each in claim.devices
        )
        self._add(_Report(claim.ref, self._driver, entries))

    def on_refused(self, claim: ClaimIdentity, error: ScrubberError) -> None:
        """Report refused parameters, which the owner of the claim must change; all else is in the pod's events."""
        if isinstance(error, InvalidParameters):
            target = EventTarget("ResourceClaim", claim.name, claim.uid, claim.namespace, "resource.k8s.io/v1")
            digest = zlib.crc32(f"{claim.uid} {error}".encode())
            name = f"{claim.name[:240]}.{digest:08x}"
            event = EventContent(name, target, EVENT_REASON, error.public_message, is_warning=True)
            self._add(_Report(claim, self._driver, event=event))

    def on_released(self, claim: ClaimIdentity) -> None:
        """Forget the status of a claim that was not written yet: the API server drops it with the allocation."""
        self._queue.reports.pop((claim.uid, False), None)

    def _add(self, report: _Report) -> None:
        reports = self._queue.reports
        key = report.ref.uid, report.event is not None
        reports.pop(key, None)
        if len(reports) >= MAX_REPORTS:
            del reports[next(iter(reports))]
        reports[key] = report
        self._queue.arrived.set()

    async def run(self) -> NoReturn:
        """Run until cancelled."""
        while True:
            await self._queue.arrived.wait()
            if (wait := self._backoff.remaining(self._clock())) > 0:
                await asyncio.sleep(wait)
            if not self._queue.reports:
                self._queue.arrived.clear()
                continue
            key, report = next(iter(self._queue.reports.items()))
            try:
                await self._write(report)
            except ApiNotFound:
                self._drop(key, report)
            except ApiConflict as error:
                self._backoff.on_failure(error, self._clock())
            except (ApiForbidden, ApiInvalidRequest) as error:
                # Denied permissions of resourceclaims/driver are answered with 422.
                self._drop(key, report)
                self._reminder.log_waiting(
                    "claim.report-refused", claim=str(report.ref), message=f"{error} {PERMISSIONS}"
                )
            except ClusterError as error:
                self._backoff.on_failure(error, self._clock())
                self._reminder.log_waiting("claim.report-failed", message=str(error))
            else:
                self._drop(key, report)
                self._backoff.reset()
                self._reminder.log_ended("claim.reported-again")

    def _drop(self, key: tuple[str, bool], report: _Report) -> None:
        """Forget a report, unless a newer one of the claim has arrived meanwhile."""
        if self._queue.reports.get(key) is report:
            del self._queue.reports[key]

    async def _write(self, report: _Report) -> None:
        ok = False
        try:
            await (self._write_status(report) if report.event is None else self._write_event(report.event))
            ok = True
        finally:
            self._observer.on_cluster_write("claim-status" if report.event is None else "event", ok)

    async def _write_status(self, report: _Report) -> None:
        found = await self._api.get_claim(report.ref.namespace, report.ref.name)
        metadata, status = found.get("metadata") or {}, found.get("status") or {}
        if metadata.get("uid") != report.ref.uid or not status.get("allocation"):
            return
        present = list(status.get("devices") or [])
        devices = merged_devices(present, report.devices, report.driver)
        if devices != present:
            patch = {"metadata": {"resourceVersion": metadata.get("resourceVersion")}, "status": {"devices": devices}}
            await self._api.patch_claim_status(report.ref.namespace, report.ref.name, patch)

    async def _write_event(self, event: EventContent) -> None:
        now = datetime.fromtimestamp(self._wall_clock(), UTC)
        try:
            await self._api.create_event(event, now)
        except ApiConflict:
            await self._api.repeat_event(event, now, None)


def merged_devices(present: Sequence[Mapping[str, Any]], mine: Sequence[Json], driver: str) -> list[Mapping[str, Any]]:
    """Return ``status.devices`` with this driver's entries replaced by ``mine``; those of other drivers stay.

    The time of a condition that stays, and conditions of other types, are kept.
    """
    before = {_key(each): each for each in present if each.get("driver") == driver}
    return [
        *(each for each in present if each.get("driver") != driver),
        *(_continued(each, before.get(_key(each))) for each in mine),
    ]


def _key(entry: Mapping[str, Any]) -> tuple[object, ...]:
    return entry.get("driver"), entry.get("pool"), entry.get("device"), entry.get("shareID")


def _continued(entry: Json, before: Mapping[str, Any] | None) -> Json:
    if before is None:
        return entry
    old = {each.get("type"): each for each in before.get("conditions") or []}
    (ready,) = entry["conditions"]
    known = old.pop(CONDITION, None)
    if known is not None and known.get("status") == ready["status"]:
        ready = ready | {"lastTransitionTime": known.get("lastTransitionTime")}
    return entry | {"conditions": [ready, *old.values()]}


def _entry(driver: str, device: AllocatedDevice, device_id: str, grant: ClaimGrant | None, now: str) -> Json:
    certificate = None if grant is None else grant.certificate
    if device.admin_access:
        reason, message = (
            "AdminAccess",
            "The claim has admin access: the device was neither checked nor scrubbed for it.",
        )
    elif certificate is not None:
        reason, message = "Certified", "The device was proved clean before it was granted to the claim."
    else:
        reason, message = "Granted", "The device was granted to the claim. Its certificate is in the node's ledger."
    condition = {"type": CONDITION, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now}
    entry: Json = {"driver": driver, "pool": device.pool, "device": device.name, "conditions": [condition]}
    if device.share_id:
        entry["shareID"] = device.share_id
    if certificate is not None:
        entry["data"] = certificate_data(certificate, device_id)
    return entry


def certificate_data(certificate: CertificateExtract, device_id: str) -> Json:
    """Return the certificate for the status of a claim, within :data:`MAX_DATA_BYTES`.

    If it would be larger, its lists are cut from their ends, and ``truncated`` says so.
    """
    lists = {"covered": list(certificate.covered), "notCovered": list(certificate.not_covered)}
    data: Json = {
        "certificate": {
            "id": certificate.id,
            "digest": certificate.digest,
            "device": device_id,
            "issuedAt": _time(certificate.issued_at),
            **lists,
        }
    }
    while len(json.dumps(data).encode()) > MAX_DATA_BYTES and any(lists.values()):
        max(lists.values(), key=lambda each: sum(map(len, each))).pop()
        data["certificate"] |= {**lists, "truncated": True}
    return data


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
