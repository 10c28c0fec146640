"""Who holds a simulated device: the kernel's answer first, and only when it is yes a walk over ``/proc``."""

from __future__ import annotations

import asyncio
import os

from scrubber.adapters.children.process import Children
from scrubber.adapters.children.questions import QuestionPool
from scrubber.adapters.sim import control, lease
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.layout import SimDevice
from scrubber.adapters.walk import File, Found
from scrubber.adapters.walker import about, read_walk
from scrubber.domain.device import Device
from scrubber.domain.errors import Lost
from scrubber.domain.telemetry import Holder, HolderKind, HolderReport

__all__ = ["SimHolders"]

_GHOST = Holder(pid=0, started=0, kind=HolderKind.GHOST)


class SimHolders:
    """:class:`scrubber.ports.Holders` by write lease, then by device and inode.

    Args:
        walks: asks children that walk (:mod:`scrubber.adapters.walker`).
        settle: seconds that a ghost or an unkillable holder must stay one before it is called so. A process that is
            just ending looks like both for a moment, and either takes a device out of service.
    """

    def __init__(
        self, inventory: SimInventory, walks: QuestionPool, children: Children, *, settle: float = 0.25
    ) -> None:
        self._inventory = inventory
        self._walks = walks
        self._children = children
        self._settle = settle

    async def held(self, device: Device) -> bool:
        found = self._inventory.find(device)
        return control.read_all(found.control_directories).ghost or lease.held(found.memory, found.inode)

    async def holders(self, device: Device) -> HolderReport:
        found = self._inventory.find(device)
        holding, not_covered = await self._walk(device, found)
        if not holding or any(holder.hung for holder in holding):
            before = {(holder.pid, holder.started) for holder in holding if holder.hung}
            await asyncio.sleep(self._settle)
            holding, not_covered = await self._walk(device, found)
            hung = before & {(holder.pid, holder.started) for holder in holding if holder.hung}
        else:
            hung = set()
        if not holding:
            ghosts = (_GHOST,) if await self.held(device) else ()
            return HolderReport(ghosts, not_covered if ghosts else ())
        unkillable = control.read_all(found.control_directories).unkillable
        return HolderReport(
            tuple(_holder(each, stays=unkillable or (each.pid, each.started) in hung) for each in holding), not_covered
        )

    async def _walk(self, device: Device, found: SimDevice) -> tuple[list[Found], tuple[str, ...]]:
        """Who holds the file, and what could not be looked at; nobody and nothing when the kernel says "free"."""
        if not lease.held(found.memory, found.inode):
            return [], ()
        try:
            target = os.stat(found.memory)
        except FileNotFoundError as error:
            raise Lost(f"{found.memory} is gone.") from error
        question = about(File(target.st_dev, target.st_ino), excluded={os.getpid(), *self._children.pids()})
        return read_walk(await self._walks.ask(device.id, question))


def _holder(found: Found, *, stays: bool) -> Holder:
    kind = HolderKind.UNKILLABLE if stays else HolderKind.PROCESS
    return Holder(found.pid, found.started, kind, found.command)
