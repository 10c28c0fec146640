"""Diagnoses a simulated device: one child per diagnosis, killed at its deadline, never together with an eraser."""

from __future__ import annotations

from pathlib import Path

from scrubber.adapters.children.diagnostics import parse_checks
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import ChildDied, Children
from scrubber.adapters.children.request_pool import parse_answer
from scrubber.adapters.deadlines import stall_tolerant_timeout
from scrubber.adapters.locks import lock_path
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.layout import SimDevice
from scrubber.domain.device import Device
from scrubber.domain.diagnostics import DiagnosticCheck, DiagnosticLevel
from scrubber.domain.errors import DriverTimeout, Unreadable

__all__ = ["SimDiagnostics"]

_MODULE = "scrubber.adapters.sim.diagnosis"
_NICE = 19


class SimDiagnostics:
    """:class:`scrubber.ports.Diagnostics` on the memory file.

    Args:
        locks: directory of the devices' lock files, the same as the eraser's: a diagnosis that does not die is then
            found as the device's orphan.
    """

    def __init__(self, inventory: SimInventory, children: Children, locks: Path) -> None:
        self._inventory = inventory
        self._children = children
        self._locks = locks

    async def diagnose(self, device: Device, level: DiagnosticLevel, deadline: float) -> tuple[DiagnosticCheck, ...]:
        if level is DiagnosticLevel.NONE:
            return ()
        found = self._inventory.find_sim_device(device)
        child = await self._children.start(_MODULE, device=device.id, nice=_NICE)
        try:
            async with stall_tolerant_timeout(deadline):  # a node that is slow to start a child uses up none of it
                await child.send(self._request(found, level.seconds))
                checks = parse_checks(parse_answer(await child.receive()))
        except TimeoutError as error:
            how = "it was killed" if await child.kill() else "it could not be killed and was abandoned"
            raise DriverTimeout(
                f"The diagnostic of device {device.index} did not finish within {deadline:g} s; {how}."
            ) from error
        except ChildDied as died:
            raise Unreadable(f"The diagnostic of device {device.index} gave no valid report: {died}") from died
        finally:
            gone = await child.kill()
        if not gone:
            raise DriverTimeout(
                f"The diagnostic of device {device.index} has reported and does not exit; it was abandoned."
            )
        return checks

    def _request(self, found: SimDevice, seconds: float) -> Message:
        return {
            "lock": str(lock_path(self._locks, found.device.id)),
            "memory": str(found.memory),
            "bytes": found.device.memory_bytes,
            "inode": found.inode,
            "control": [str(place / "control.json") for place in found.control_directories],
            "seconds": seconds,
        }
