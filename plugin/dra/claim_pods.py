"""Reports to the service which pods a prepared claim is reserved for: another pod may join it without a call of the kubelet.

Each prepared claim is watched by itself, because a watch of all claims would send every node those of the whole cluster.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import NoReturn

from plugin.cluster.errors import ClusterError
from plugin.cluster.reporter import BackoffTimes, WriterBackoff
from plugin.dra.claim_service import ClaimGrant, ClaimService
from plugin.dra.claims import AllocatedClaim, ClaimIdentity, ClaimPod, claim_pods
from plugin.dra.port import ClaimWatchApi
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices
from plugin.logs import Logger, WaitLogger
from scrubber.domain.errors import InvalidRequest, RetryableError, ScrubberError

__all__ = ["ClaimPodsFollower"]

_RETRY = 1.0
"""Seconds between two attempts to reach the service."""

_RELIST = 60.0
"""Seconds between two lists of the prepared claims: another instance prepares and releases claims, too."""


class ClaimPodsFollower:
    """Watches the prepared claims; a :class:`plugin.dra.claim_driver.ClaimsObserver`.

    Args:
        connect: creates a connection for one watch.
        devices: their epoch tells that the service has restarted.
        clock: monotonic seconds; ``jitter``: random, in [0, 1).
    """

    def __init__(
        self,
        driver: str,
        service: ClaimService,
        connect: Callable[[], ClaimWatchApi],
        *,
        devices: AdvertisedDevices,
        log: Logger,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        backoff: BackoffTimes | None = None,
    ) -> None:
        self._driver = driver
        self._service = service
        self._connect = connect
        self._devices = devices
        self._clock = clock
        self._jitter = jitter
        self._times = backoff or BackoffTimes(first=1.0, max=60.0, denied=600.0)
        self._reminder = WaitLogger(log, every=600.0, clock=clock)
        self._list_reminder = WaitLogger(log, every=600.0, clock=clock)
        self._wanted: dict[str, ClaimIdentity] = {}
        self._called: set[str] = set()
        """The UIDs of claims that this instance prepared or released since the last list was requested."""
        self._changed = asyncio.Event()

    def on_prepared(
        self, claim: AllocatedClaim, devices: Mapping[str, AdvertisedDevice], granted: Sequence[ClaimGrant]
    ) -> None:
        self._wanted[claim.ref.uid] = claim.ref
        self._called.add(claim.ref.uid)
        self._changed.set()

    def on_refused(self, claim: ClaimIdentity, error: ScrubberError) -> None:
        """Nothing to do: the claim has no devices."""

    def on_released(self, claim: ClaimIdentity) -> None:
        self._wanted.pop(claim.uid, None)
        self._called.add(claim.uid)
        self._changed.set()

    async def run(self) -> NoReturn:
        """Run until cancelled; begins with the claims that are prepared already."""
        tasks: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            group.create_task(self._adopt(), name="claims of other instances")
            while True:
                for uid in tasks.keys() - self._wanted.keys():
                    tasks.pop(uid).cancel()
                for uid in self._wanted.keys() - tasks.keys():
                    tasks[uid] = group.create_task(self._follow(self._wanted[uid]), name=f"pods of claim {uid}")
                await self._changed.wait()
                self._changed.clear()

    async def _adopt(self) -> NoReturn:
        """Watch the claims that the service lists, also those that another instance prepared."""
        while True:
            epoch = self._devices.epoch
            self._called.clear()
            try:
                recorded = await self._service.list_claims()
            except ScrubberError as error:
                if not isinstance(error, RetryableError):
                    self._list_reminder.log_waiting("claims.not-listed", message=str(error))
                await asyncio.sleep(_RETRY)
                continue
            self._list_reminder.log_ended("claims.listed")
            listed = {each.ref.uid: each.ref for each in recorded if each.driver == self._driver}
            # The list may be older than a call that ended meanwhile.
            called = {uid: ref for uid, ref in self._wanted.items() if uid in self._called}
            self._wanted = {uid: ref for uid, ref in listed.items() if uid not in self._called} | called
            self._changed.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(_RELIST):
                    await self._devices.wait_until(functools.partial(self._has_restarted, epoch))

    def _has_restarted(self, epoch: str) -> bool:
        return self._devices.epoch not in ("", epoch)

    async def _follow(self, ref: ClaimIdentity) -> None:
        """Report the pods of one claim, until it is gone; what the service has known since Prepare is not repeated."""
        backoff = WriterBackoff(self._times, self._jitter)
        known: tuple[ClaimPod, ...] = ()
        connection = self._connect()
        try:
            while True:
                try:
                    async with aclosing(connection.watch_claim(ref.namespace, ref.name)) as changes:
                        async for kind, found in changes:
                            backoff.reset()
                            try:
                                pods = None if kind == "DELETED" else claim_pods(ref, found)
                                if pods is None:
                                    return
                                if pods and pods != known:
                                    await self._report(ref, pods)
                                    known = pods
                            except InvalidRequest as error:  # until the claim changes
                                self._log_failure(ref, error)
                            else:
                                self._reminder.log_ended("claim.watched-again")
                except ClusterError as error:
                    backoff.on_failure(error, self._clock())
                    self._log_failure(ref, error)
                    await asyncio.sleep(max(0.0, backoff.remaining(self._clock())))
        finally:
            await connection.close()

    async def _report(self, ref: ClaimIdentity, pods: Sequence[ClaimPod]) -> None:
        """Report the pods; retry until the service accepts them, however long its ledger fails.

        Raises:
            InvalidRequest: the service refuses these pods.
        """
        while True:
            try:
                await self._service.set_claim_pods(ref.uid, pods)
                return
            except InvalidRequest:
                raise
            except ScrubberError as error:
                if not isinstance(error, RetryableError):
                    self._log_failure(ref, error)
                await asyncio.sleep(_RETRY)

    def _log_failure(self, ref: ClaimIdentity, error: Exception) -> None:
        self._reminder.log_waiting("claim.watch-failed", claim=str(ref), message=str(error))
