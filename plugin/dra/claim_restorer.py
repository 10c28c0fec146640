"""Hands claims over again that only the kubelet takes for prepared.

If a pod joins a claim between two attempts of the kubelet to unprepare it, the kubelet drops the former pod without a call
and takes the claim for prepared. Its devices are released by then, and without the CDI specification no container of the new
pod can start. The kubelet never calls for that pod: what it lists is the only sign.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from plugin.dra.claim_driver import ClaimDriver
from plugin.dra.claim_service import ClaimService, ClaimToRestore
from plugin.logs import Logger, WaitLogger
from scrubber.domain.errors import RetryableError, ScrubberError

__all__ = ["ClaimRestorer", "RestorerTimes"]


@dataclass(frozen=True, slots=True)
class RestorerTimes:
    """Times in seconds.

    Attributes:
        relist: between two lists.
        registered: for which this instance must be registered: before that, the kubelet may have called another one.
    """

    relist: float = 52.0
    registered: float = 100.0


class ClaimRestorer:
    """Restores the claims of one driver.

    Args:
        is_registered: returns whether the kubelet has registered this instance, so that it calls it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        driver: str,
        service: ClaimService,
        claims: ClaimDriver,
        *,
        is_registered: Callable[[], bool],
        times: RestorerTimes,
        log: Logger,
        clock: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._service = service
        self._claims = claims
        self._is_registered = is_registered
        self._times = times
        self._clock = clock
        self._reminder = WaitLogger(log, every=600.0, clock=clock)

    async def run(self) -> NoReturn:
        """Run until cancelled."""
        since: float | None = None
        while True:
            if not self._is_registered():
                since = None
            elif since is None:
                since = self._clock()
            elif self._clock() - since >= self._times.registered:
                await asyncio.gather(
                    *(
                        self._claims.restore(each.namespace, each.name)
                        for each in await self._unprepared()
                        if each.driver == self._driver and self._claims.is_quiet(each.namespace, each.name)
                    )
                )
            await asyncio.sleep(self._times.relist)

    async def _unprepared(self) -> Sequence[ClaimToRestore]:
        try:
            found = await self._service.list_unprepared_claims()
        except ScrubberError as error:
            if not isinstance(error, RetryableError):
                self._reminder.log_waiting("claims.not-listed", message=str(error))
            return ()
        self._reminder.log_ended("claims.listed")
        return found
