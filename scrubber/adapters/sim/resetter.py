"""Resets of simulated devices: as on real ones, conditions are lifted and the memory stays as it is."""

from __future__ import annotations

from scrubber.adapters.children.process import ChildDied, Children
from scrubber.adapters.children.questions import answer_of
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.telemetry import DRIVER_MODULE, about
from scrubber.domain.device import Device
from scrubber.domain.errors import Stuck, Unreadable

__all__ = ["SimResetter"]


class SimResetter:
    """:class:`scrubber.ports.Resetter`, each reset in a child of its own: it takes long, and questions go on."""

    def __init__(self, inventory: SimInventory, children: Children, node: str) -> None:
        self._inventory = inventory
        self._children = children
        self._node = node

    async def unavailable(self, device: Device) -> str | None:
        if device.parent is None:
            return None
        return f"Device {device.index} is an instance: only its whole GPU can be reset, and others may be using it."

    async def reset(self, device: Device, deadline: float) -> None:
        question = about(self._inventory.find(device), "reset")
        child = await self._children.start(DRIVER_MODULE, self._node, device=device.id)
        try:
            answer_of(await child.call(question, deadline))
        except ChildDied as died:
            raise Unreadable(f"The reset of device {device.index} broke off: {died}") from died
        except TimeoutError as error:
            raise Stuck(f"The reset of device {device.index} did not end within {deadline:g} s.") from error
        finally:
            await child.kill()
