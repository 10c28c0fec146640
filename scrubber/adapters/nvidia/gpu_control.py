"""The NVML calls that surround work on a device: its memory, its compute mode, and waiting until it is idle again.

Reading and changing the compute mode are two requests, so that the caller can record the mode to restore in between: a
worker that is killed then leaves nothing behind that cannot be undone.
"""

from __future__ import annotations

from typing import Protocol

from scrubber.adapters.children.driver_response import count, optional_count, optional_text
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.nvidia.driver_requests import device_request, gpu_uuid
from scrubber.domain.device import Device

__all__ = ["IdleWaiter", "NvmlGpuControl"]


class IdleWaiter(Protocol):
    """Knows how much memory of a device is in use when it is idle."""

    async def wait_until_idle(self, device: Device, deadline: float) -> int:
        """Wait until memory use is at the idle level, or for ``deadline`` seconds; return the bytes above it."""


class NvmlGpuControl:
    """Controls a GPU by NVML requests. Raises as :meth:`scrubber.ports.Telemetry.snapshot`."""

    def __init__(self, driver_pool: RequestPool, idle: IdleWaiter) -> None:
        self._driver_pool = driver_pool
        self._idle = idle

    async def compute_mode(self, device: Device) -> str | None:
        """Return the compute mode, in words that :meth:`unfence` accepts.

        None for an instance, which has none of its own.
        """
        return optional_text(await self._request(device, "compute_mode"), "mode")

    async def fence(self, device: Device) -> None:
        """Let no second context be opened on ``device``. Precondition: the caller has recorded :meth:`compute_mode`."""
        await self._request(device, "fence")

    async def unfence(self, device: Device, compute_mode: str) -> None:
        await self._request(device, "unfence", mode=compute_mode)

    async def memory(self, device: Device) -> tuple[int, int, int]:
        """Return bytes: total, reserved by the driver (0 where it is not reported), and in use."""
        answer = await self._request(device, "used")
        return count(answer, "total"), optional_count(answer, "reserved") or 0, count(answer, "used")

    async def wait_until_idle(self, device: Device, deadline: float) -> int:
        return await self._idle.wait_until_idle(device, deadline)

    async def _request(self, device: Device, ask: str, **more: object) -> Message:
        return await self._driver_pool.request(gpu_uuid(device), device_request(device, ask, **more))
