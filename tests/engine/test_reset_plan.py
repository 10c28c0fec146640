"""A reset plan names the current use of the device and of all devices reset with it; planning changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from scrubber.domain.device import Device
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.states import Hygiene
from scrubber.engine.node import Node
from tests.world.timeline import in_virtual_time
from tests.world.world import World, a_world


@dataclass
class Planning:
    """:class:`scrubber.ports.Resetter` that only plans."""

    together: tuple[str, ...] = ()

    async def plan(self, device: Device) -> ResetPlan:
        return ResetPlan(device.id, "by decree", ("reset",), blockers=("The adapter's own.",), also_reset=self.together)

    async def reset(self, device: Device, deadline: float) -> None:
        raise AssertionError("a plan was asked for, no reset")


def node_of(world: World, resetter: Planning) -> Node:
    """Return a node with the controllers of ``world``, whose resets are planned by ``resetter``."""
    assert world.service is not None
    dependencies = replace(world.service.dependencies, resetter=resetter)
    node = Node(dependencies=dependencies, service_view=world.node.service_view, epoch="epoch-1")
    for controller in world.node.devices.controllers.values():
        node.devices.add(controller)
    return node


@in_virtual_time
async def test_reset_plan_of_an_idle_device_has_only_the_adapters_blockers() -> None:
    async with a_world(devices=2) as world:
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN)
        before = world.record()
        plan = await node_of(world, Planning()).actions.reset_plan("0")
        assert (plan.device, plan.actions, plan.blockers) == (
            world.controller().id,
            ("reset",),
            ("The adapter's own.",),
        )
        assert world.record() == before


@in_virtual_time
async def test_device_in_use_blocks_its_own_reset_and_the_reset_of_devices_grouped_with_it() -> None:
    async with a_world(devices=2) as world:
        await world.until(lambda: world.record(1).hygiene is Hygiene.CLEAN)
        tenant = await world.admit("acme", "train-0", devices=(1,))
        assert tenant is not None
        await world.until(lambda: tenant.running)
        used = world.controller(1).state.device
        for asked, together in (("1", ()), ("0", (used.id, "GPU-of-nobody"))):
            plan = await node_of(world, Planning(together)).actions.reset_plan(asked)
            assert plan.blockers == (
                f"Device 1 ({used.id}) is in use by acme/train-0: wait until that is over.",
                "The adapter's own.",
            )


@in_virtual_time
async def test_reset_plan_of_an_unknown_device_is_refused() -> None:
    async with a_world(devices=1) as world:
        with pytest.raises(InvalidRequest):
            await node_of(world, Planning()).actions.reset_plan("7")
