"""Confidential computing: the ready state of the node's GPUs, and their attestation reports.

NVML has one ready state for all GPUs of the node. While it is off, the driver lets no process open a channel on any of
them, root's included, so the service's own CUDA children need it as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from scrubber.adapters.children.driver_response import text
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.nvidia.driver_requests import device_request, gpu_uuid
from scrubber.domain.device import Device
from scrubber.domain.errors import ScrubberError, Unavailable

__all__ = ["NvidiaConfidentialComputing"]

_READY_STATE = "the ready state"
"""Key of requests that are about no GPU."""


class NvidiaConfidentialComputing:
    """:class:`scrubber.ports.ConfidentialComputing` of the node's driver.

    Args:
        enabled: returns whether the driver reported the mode when the GPUs were last listed.
    """

    def __init__(self, driver_pool: RequestPool, *, enabled: Callable[[], bool]) -> None:
        self._driver_pool = driver_pool
        self._enabled = enabled
        self._wanted = False
        self._children = 0
        self._lock = asyncio.Lock()

    @property
    def enabled(self) -> bool:
        return self._enabled()

    async def set_accepting(self, accepting: bool) -> None:
        self._wanted = accepting
        await self._apply()

    @asynccontextmanager
    async def ready_for_child(self) -> AsyncIterator[None]:
        """Keep the GPUs ready while a child of the service works on one of them.

        Raises:
            Unavailable: they could not be set ready; no memory was touched.
        """
        if not self.enabled:
            yield
            return
        self._children += 1
        try:
            await self._apply()
            yield
        finally:
            self._children -= 1
            with suppress(ScrubberError):  # the work gate sets it again every few seconds, and records a failure
                await asyncio.shield(asyncio.ensure_future(self._apply()))

    async def attest(self, device: Device, nonce: bytes) -> str | None:
        request = device_request(device, "attest", nonce=nonce.hex())
        return text(await self._driver_pool.request(gpu_uuid(device), request), "digest")

    async def _apply(self) -> None:
        async with self._lock:
            ready = self._wanted or self._children > 0
            try:
                answer = await self._driver_pool.request(_READY_STATE, {"ask": "ready_state", "ready": ready})
            except ScrubberError as error:
                words = "ready" if ready else "not ready"
                raise Unavailable(f"The GPUs could not be set {words}: {error}") from error
            if answer.get("ready") is not ready:
                raise Unavailable(f"The driver accepts a change of the GPUs' ready state, but it is still {not ready}.")
