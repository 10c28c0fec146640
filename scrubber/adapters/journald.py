"""Reports resets to systemd's journal, in the form that NVSentinel reads.

NVSentinel's syslog monitor remembers the XIDs of a GPU until this line of this identifier names the GPU. A reset that
succeeded stays successful whether or not the journal takes the line. NVSentinel knows whole GPUs only: an instance is
reported as its GPU, which the devices that were reset with it are part of.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from scrubber.domain.device import Device
from scrubber.domain.reset_plan import ResetPlan
from scrubber.ports.device import Resetter

__all__ = ["RESET_IDENTIFIER", "AnnouncingResetter"]

RESET_IDENTIFIER = "nvsentinel-gpu-reset"
"""The syslog identifier (tag) of the lines."""


class AnnouncingResetter:
    """A resetter whose successful resets are reported to the journal.

    Args:
        journal: the socket of the journal's native protocol, ``/run/systemd/journal/socket``.
        on_failure: called with the ID of a GPU and the reason why its line could not be sent.
    """

    def __init__(self, resetter: Resetter, journal: Path, *, on_failure: Callable[[str, str], object]) -> None:
        self._resetter = resetter
        self._journal = journal
        self._on_failure = on_failure
        self._also_reset: dict[str, tuple[str, ...]] = {}

    async def plan(self, device: Device) -> ResetPlan:
        plan = await self._resetter.plan(device)
        self._also_reset[device.id] = plan.also_reset
        return plan

    async def reset(self, device: Device, deadline: float) -> None:
        await self._resetter.reset(device, deadline)
        gpus = (device.parent,) if device.parent else (device.id, *self._also_reset.get(device.id, ()))
        for each in gpus:
            try:
                self._send(f"GPU reset executed: {each}, success: true")
            except OSError as error:
                self._on_failure(each, f"{self._journal}: {error.strerror or error}")

    def _send(self, message: str) -> None:
        """Send one entry without waiting: a journal that does not read loses it.

        Raises:
            OSError: the journal did not take it.
        """
        fields = {"MESSAGE": message, "PRIORITY": "6", "SYSLOG_IDENTIFIER": RESET_IDENTIFIER}
        entry = "".join(f"{name}={value}\n" for name, value in fields.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            sender.sendto(entry.encode(), str(self._journal))
