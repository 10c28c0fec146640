"""Who holds a simulated device: the kernel's answer first, and only when it is yes a walk over ``/proc``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection

from scrubber.adapters.children.process import Children
from scrubber.adapters.children.questions import QuestionPool
from scrubber.adapters.sim import control, lease
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.layout import SimDevice
from scrubber.adapters.walk import Budget, File, Found
from scrubber.adapters.walker import Answer, about, read_walk, uninspected
from scrubber.domain.device import Device
from scrubber.domain.errors import Lost
from scrubber.domain.telemetry import Holder, HolderKind, HolderReport

__all__ = ["SimHolders"]

_GHOST = Holder(pid=0, started=0, kind=HolderKind.GHOST)
_NOBODY = Answer((), (), ())


class SimHolders:
    """:class:`scrubber.ports.Holders` by write lease, then by device and inode.

    Args:
        walks: asks children that walk (:mod:`scrubber.adapters.walker`), and blames no device for a walk.
        budget: seconds for a walk, and for each process; less than a question to ``walks`` may take.
        settle: seconds that a ghost or an unkillable holder must stay one before it is called so. A process that is
            just ending looks like both for a moment, and either takes a device out of service.
    """

    def __init__(
        self,
        inventory: SimInventory,
        walks: QuestionPool,
        children: Children,
        *,
        budget: Budget | None = None,
        settle: float = 0.25,
    ) -> None:
        self._inventory = inventory
        self._walks = walks
        self._children = children
        self._budget = budget
        self._settle = settle

    async def held(self, device: Device) -> bool:
        found = self._inventory.find(device)
        return control.read_all(found.control_directories).ghost or lease.held(found.memory, found.inode)

    async def holders(self, device: Device, had: Collection[str] = (), scrub: str | None = None) -> HolderReport:
        found = self._inventory.find(device)
        look = await self._walk(device, found, had, scrub)
        hung = _hung(look)
        if hung or not look.holders:
            await asyncio.sleep(self._settle)
            look = await self._walk(device, found, had, scrub)
            hung &= _hung(look)
        unfinished = uninspected((each for each in look.unfinished if not each.parts), look.relays)
        if not look.holders:
            ghosts = (_GHOST,) if not unfinished and await self.held(device) else ()
            return HolderReport(ghosts, look.not_covered if ghosts or unfinished else (), unfinished)
        unkillable = control.read_all(found.control_directories).unkillable
        holding = tuple(_holder(each, stays=unkillable or (each.pid, each.started) in hung) for each in look.holders)
        return HolderReport(holding, look.not_covered, unfinished, look.more)

    async def users(self, device: Device) -> tuple[Holder, ...]:
        look = await self._walk(device, self._inventory.find(device))
        return tuple(_holder(each, stays=False) for each in look.holders)

    def not_asked(self, device: Device) -> tuple[str, ...]:
        """Nothing: the lease sees descriptors and mappings wherever they are."""
        return ()

    async def _walk(
        self, device: Device, found: SimDevice, had: Collection[str] = (), scrub: str | None = None
    ) -> Answer:
        """Who holds the file, and what could not be looked at; nobody and nothing when the kernel says "free"."""
        if not lease.held(found.memory, found.inode):
            return _NOBODY
        try:
            target = os.stat(found.memory)
        except FileNotFoundError as error:
            raise Lost(f"{found.memory} is gone.") from error
        ours = {os.getpid(), *self._children.pids()}
        question = about(File(target.st_dev, target.st_ino), excluded=ours, budget=self._budget, first=had, scrub=scrub)
        return read_walk(await self._walks.ask(device.id, question))


def _hung(look: Answer) -> set[tuple[int, int]]:
    return {(each.pid, each.started) for each in look.holders if each.hung}


def _holder(found: Found, *, stays: bool) -> Holder:
    kind = HolderKind.UNKILLABLE if stays else HolderKind.PROCESS
    return Holder(found.pid, found.started, kind, found.command)
