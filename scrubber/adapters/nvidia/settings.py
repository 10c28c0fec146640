"""Restores a GPU's settings, through the driver's child."""

from __future__ import annotations

from collections.abc import Mapping

from scrubber.adapters.children.driver_response import texts
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.nvidia.driver_requests import device_request, gpu_uuid
from scrubber.domain.device import Device

__all__ = ["NvidiaSettings"]


class NvidiaSettings:
    """:class:`scrubber.ports.Settings` of NVML.

    An instance has no settings of its own, and nothing is written through it: other instances depend on its GPU's
    settings.
    """

    def __init__(self, driver_pool: RequestPool) -> None:
        self._driver_pool = driver_pool

    async def restore(self, device: Device, expected: Mapping[str, str]) -> Mapping[str, str]:
        question = device_request(device, "restore", wanted=dict(expected))
        return texts(await self._driver_pool.request(gpu_uuid(device), question), "values")
