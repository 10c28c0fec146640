"""Restores the settings of GPUs, through the driver's child."""

from __future__ import annotations

from collections.abc import Mapping

from scrubber.adapters.amd.requests import device_request, pci_address, texts
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.domain.device import Device

__all__ = ["AmdSettings"]


class AmdSettings:
    """:class:`scrubber.ports.Settings` of the driver's files. A partition has no settings: they are its GPU's."""

    def __init__(self, requests: RequestPool) -> None:
        self._requests = requests

    async def restore(self, device: Device, expected: Mapping[str, str]) -> Mapping[str, str]:
        if device.parent is not None:
            return {}
        request = device_request(device, "restore", wanted=dict(expected))
        return texts(await self._requests.request(pci_address(device), request), "values")
