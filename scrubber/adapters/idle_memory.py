"""The memory that a driver itself uses on an idle device, and so which memory in use belongs to a process."""

from __future__ import annotations

__all__ = ["IdleMemory"]


# See docs/decisions/0022-idle-memory-level.md.
class IdleMemory:
    """How much memory of a device is in use while no process uses it.

    This is never the amount found when the service started: that would make yesterday's leftovers the measure for
    today. The level starts at ``allowance`` for each slice and only falls, to ``margin`` above the least that was ever
    in use: a process cannot hold less than nothing.

    Args:
        allowance: bytes in use that may be the driver's own, for each slice, until less is measured.
        margin: bytes by which the driver's own use may vary between two readings.
    """

    def __init__(self, allowance: int, margin: int) -> None:
        self._allowance = allowance
        self._margin = margin
        self._least: dict[str, int] = {}

    def limit(self, device: str, slices: int = 1) -> int:
        """Return the bytes that may be in use on idle ``device`` (an id) with ``slices`` of its GPU.

        A whole GPU counts as one.
        """
        least, allowance = self._least.get(device), self._allowance * slices
        return allowance if least is None else min(allowance, least + self._margin)

    def excess(self, device: str, used: int, slices: int = 1) -> int:
        """Return how many of ``used`` bytes belong to holders; 0 when the device is idle."""
        return max(0, used - self.limit(device, slices))

    def record_idle(self, device: str, used: int) -> None:
        """Record that ``used`` bytes were in use while the driver listed no process."""
        self._least[device] = min(used, self._least.get(device, used))

    def forget(self, device: str) -> None:
        """Forget the level after the driver was reloaded or the device was reset: the driver's own use may differ."""
        self._least.pop(device, None)
