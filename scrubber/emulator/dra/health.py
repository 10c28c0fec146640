"""The health of DRA devices as the kubelet knows it, from the streams of the drivers.

Promise: a device is Unknown before the first message about it, some time after the last one, and from the end of any
stream of its driver until the next message. Unlike here, the real kubelet keeps it over its own restarts, in
``dra_health_state``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from plugin.api import dra_health_pb2 as api

MAX_MESSAGE = 1024
"""Characters of a health message; a longer one is cut."""
_NAMES = {api.HEALTHY: "Healthy", api.UNHEALTHY: "Unhealthy"}
UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class ClaimDeviceHealth:
    """The health of one device. ``expires``: seconds of the clock."""

    health: str
    message: str
    expires: float


class HealthCache:
    """Health by driver, pool and device."""

    def __init__(self, timeout: float, clock: Callable[[], float]) -> None:
        self._timeout = timeout
        self._clock = clock
        self._known: dict[tuple[str, str, str], ClaimDeviceHealth] = {}

    def update(self, driver: str, devices: Iterable[api.DeviceHealth]) -> set[tuple[str, str]]:
        """Apply a message; return pool and name of the devices whose health or message changed.

        Devices that the message omits keep what was known, until it expires.
        """
        changed: set[tuple[str, str]] = set()
        for each in devices:
            place = (each.device.pool_name, each.device.device_name)
            message = each.message if len(each.message) <= MAX_MESSAGE else f"{each.message[: MAX_MESSAGE - 3]}..."
            timeout = each.health_check_timeout_seconds if each.health_check_timeout_seconds > 0 else self._timeout
            new = ClaimDeviceHealth(_NAMES.get(each.health, UNKNOWN), message, self._clock() + timeout)
            if self.get(driver, *place) != (new.health, new.message):
                changed.add(place)
            self._known[driver, *place] = new
        return changed

    def get(self, driver: str, pool: str, device: str) -> tuple[str, str]:
        """Return health and message of a device."""
        found = self._known.get((driver, pool, device))
        if found is None or found.expires <= self._clock():
            return UNKNOWN, ""
        return found.health, found.message

    def clear(self, driver: str) -> None:
        """Forget the devices of a driver, whichever of its streams has ended."""
        self._known = {key: each for key, each in self._known.items() if key[0] != driver}
