"""Resets simulated devices: as on real ones, conditions are cleared and the memory stays as it is."""

from __future__ import annotations

from contextlib import suppress

from scrubber.adapters.children.process import ChildDied, Children
from scrubber.adapters.children.request_pool import parse_answer
from scrubber.adapters.sim import lease
from scrubber.adapters.sim.holders import SimHolders
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.telemetry import DRIVER_MODULE, device_request
from scrubber.domain.device import Device
from scrubber.domain.errors import DriverTimeout, Unavailable, Unreadable
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.telemetry import Holder, HolderKind

__all__ = ["SimResetter"]


def _blocker(holder: Holder, device: Device) -> str:
    who = f"{holder.owner or holder.command or 'An unnamed process'} (PID {holder.pid})"
    return f"{who} holds device {device.index}: it must end first."


class SimResetter:
    """:class:`scrubber.ports.Resetter`, each reset in its own child: it takes long, and driver calls continue."""

    def __init__(self, inventory: SimInventory, holders: SimHolders, children: Children, node: str) -> None:
        self._inventory = inventory
        self._holders = holders
        self._children = children
        self._node = node

    async def plan(self, device: Device) -> ResetPlan:
        """Plan a reset from the node's files, without a call to the driver, which may hang."""
        found = self._inventory.find_sim_device(device)
        unavailable = None
        if device.parent is not None:
            unavailable = (
                f"Device {device.index} is an instance: only its whole GPU can be reset, and other pods may "
                "be using it."
            )
        held = lease.is_held(found.memory, found.inode)  # not untraceable use: a reset is its cure
        users: tuple[Holder, ...] = ()
        if held or found.node.exists():
            with suppress(Unavailable):  # the plan still says that it is held
                users = await self._holders.list_users(device)
        named = tuple(_blocker(each, device) for each in users)
        return ResetPlan(
            device=device.id,
            method="the simulated driver",
            actions=(
                f"Let the simulated driver reset device {device.index}: its faults and errors end, its memory stays.",
                "Restore its settings to the driver's defaults.",
            ),
            unavailable=unavailable,
            blockers=named or ((f"A process that was not identified holds device {device.index}.",) if held else ()),
            agents=tuple(
                _blocker(each, device)
                for each in users
                if each.kind is HolderKind.INFRASTRUCTURE and each.is_monitoring
            ),
        )

    async def reset(self, device: Device, deadline: float) -> None:
        question = device_request(self._inventory.find_sim_device(device), "reset")
        child = await self._children.start(DRIVER_MODULE, self._node, device=device.id)
        try:
            parse_answer(await child.call(question, deadline))
        except ChildDied as died:
            raise Unreadable(f"The reset of device {device.index} exited without a result: {died}") from died
        except TimeoutError as error:
            raise DriverTimeout(f"The reset of device {device.index} did not finish within {deadline:g} s.") from error
        finally:
            await child.kill()
