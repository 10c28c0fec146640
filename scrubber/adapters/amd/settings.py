"""Restores the settings of GPUs, through the driver's child."""

from __future__ import annotations

from collections.abc import Mapping

from scrubber.adapters.amd.driver_settings import COMPUTE_MODE, MEMORY_MODE
from scrubber.adapters.amd.requests import device_request, pci_address
from scrubber.adapters.children.driver_response import texts
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.domain.device import Device

__all__ = ["AmdSettings"]


class AmdSettings:
    """:class:`scrubber.ports.Settings` of the driver's files. Of a partition, only the modes of its GPU are settings.

    A partition mode that differs is reported as it is found. The next reset of the GPU, which this is a reason for,
    changes it: see :class:`~scrubber.adapters.amd.resetter.AmdResetter`.
    """

    def __init__(self, requests: RequestPool) -> None:
        self._requests = requests
        self._modes: dict[str, dict[str, str]] = {}

    async def restore(self, device: Device, expected: Mapping[str, str]) -> Mapping[str, str]:
        address = pci_address(device)
        request = device_request(device, "restore", wanted=dict(expected))
        found = texts(await self._requests.request(address, request), "values")
        self._modes[address] = {
            name: expected[name]
            for name in (COMPUTE_MODE, MEMORY_MODE)
            if name in expected and expected[name] != found.get(name)
        }
        return found

    def requested_mode(self, address: str, name: str) -> str | None:
        """Return the partition mode that the GPU at ``address`` should have and lacked when it was last restored."""
        return self._modes.get(address, {}).get(name)

    def forget(self, address: str) -> None:
        """Forget what was requested of the GPU at ``address``.

        One reset tries it, whatever comes of it: the policy may have been corrected meanwhile. If it still expects that
        mode, the next :meth:`restore` requests it again.
        """
        self._modes.pop(address, None)
