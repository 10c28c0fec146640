"""What whoever works on a device asks of NVML around the work: its memory, its compute mode, and when it is idle again.

The compute mode is asked for and changed in two questions, so that the mode to go back to can be written down in between:
a worker that is killed then leaves behind nothing that cannot be undone.
"""

from __future__ import annotations

from typing import Protocol

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.nvidia.driver_requests import count, device_request, gpu_uuid, optional_count, optional_text
from scrubber.domain.device import Device

__all__ = ["IdleWaiter", "NvmlGpuControl"]


class IdleWaiter(Protocol):
    """Who knows how much memory of a device is in use when nobody has it."""

    async def wait_until_idle(self, device: Device, deadline: float) -> int:
        """Bytes in use above that level, once there are none or ``deadline`` seconds are over."""


class NvmlGpuControl:
    """Raises as :meth:`scrubber.ports.Telemetry.snapshot`."""

    def __init__(self, driver_pool: RequestPool, idle: IdleWaiter) -> None:
        self._driver_pool = driver_pool
        self._idle = idle

    async def compute_mode(self, device: Device) -> str | None:
        """Its compute mode, in words that :meth:`unfence` takes; None when it has none of its own (an instance)."""
        return optional_text(await self._request(device, "compute_mode"), "mode")

    async def fence(self, device: Device) -> None:
        """Let nobody open a second context on ``device``. Precondition: :meth:`compute_mode` was written down."""
        await self._request(device, "fence")

    async def unfence(self, device: Device, compute_mode: str) -> None:
        await self._request(device, "unfence", mode=compute_mode)

    async def memory(self, device: Device) -> tuple[int, int, int]:
        """Bytes in all, those that the driver keeps for itself (0 where it does not say), and those in use."""
        answer = await self._request(device, "used")
        return count(answer, "total"), optional_count(answer, "reserved") or 0, count(answer, "used")

    async def wait_until_idle(self, device: Device, deadline: float) -> int:
        return await self._idle.wait_until_idle(device, deadline)

    async def _request(self, device: Device, ask: str, **more: object) -> Message:
        return await self._driver_pool.request(gpu_uuid(device), device_request(device, ask, **more))
