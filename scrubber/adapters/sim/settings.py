"""Restores a simulated device's settings, through the driver's child."""

from __future__ import annotations

from collections.abc import Mapping

from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.telemetry import device_request, texts
from scrubber.domain.device import Device

__all__ = ["SimSettings"]


class SimSettings:
    """:class:`scrubber.ports.Settings` of ``settings.json``."""

    def __init__(self, inventory: SimInventory, driver_pool: RequestPool) -> None:
        self._inventory = inventory
        self._driver_pool = driver_pool

    async def restore(self, device: Device, expected: Mapping[str, str]) -> Mapping[str, str]:
        question = device_request(self._inventory.find_sim_device(device), "restore", wanted=dict(expected))
        return texts(await self._driver_pool.request(device.id, question), "values")
