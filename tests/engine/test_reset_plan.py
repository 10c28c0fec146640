"""A reset plan names the current use of the device and of all devices reset with it; planning changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from scrubber.domain.device import Device
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.states import Hygiene
from scrubber.engine.node import Node
from tests.simulation.cluster import SimulatedCluster, simulated_cluster
from tests.simulation.timeline import in_virtual_time


@dataclass
class Planning:
    """:class:`scrubber.ports.Resetter` that only plans."""

    together: tuple[str, ...] = ()

    async def plan(self, device: Device) -> ResetPlan:
        return ResetPlan(device.id, "by decree", ("reset",), blockers=("The adapter's own.",), also_reset=self.together)

    async def reset(self, device: Device, deadline: float) -> None:
        raise AssertionError("only a plan was requested, no reset")


def node_of(cluster: SimulatedCluster, resetter: Planning) -> Node:
    """Return a node with the controllers of ``cluster``, whose resets are planned by ``resetter``."""
    assert cluster.service is not None
    dependencies = replace(cluster.service.dependencies, resetter=resetter)
    node = Node(
        dependencies=dependencies, service_view=cluster.node.service_view, epoch="epoch-1", yields=cluster.node.yields
    )
    for controller in cluster.node.devices.controllers.values():
        node.devices.add(controller)
    return node


@in_virtual_time
async def test_reset_plan_of_an_idle_device_has_only_the_adapters_blockers() -> None:
    async with simulated_cluster(devices=2) as cluster:
        await cluster.until(lambda: cluster.record().hygiene is Hygiene.CLEAN)
        before = cluster.record()
        plan = await node_of(cluster, Planning()).actions.reset_plan("0")
        assert (plan.device, plan.actions, plan.blockers) == (
            cluster.controller().id,
            ("reset",),
            ("The adapter's own.",),
        )
        assert cluster.record() == before


@in_virtual_time
async def test_device_in_use_blocks_its_own_reset_and_the_reset_of_devices_grouped_with_it() -> None:
    async with simulated_cluster(devices=2) as cluster:
        await cluster.until(lambda: cluster.record(1).hygiene is Hygiene.CLEAN)
        tenant = await cluster.admit("acme", "train-0", devices=(1,))
        assert tenant is not None
        await cluster.until(lambda: tenant.running)
        used = cluster.controller(1).state.device
        for name, together in (("1", ()), ("0", (used.id, "GPU-unknown"))):
            plan = await node_of(cluster, Planning(together)).actions.reset_plan(name)
            assert plan.blockers == (
                f"Device 1 ({used.id}) is in use by acme/train-0: wait until that has ended.",
                "The adapter's own.",
            )


@in_virtual_time
async def test_reset_plan_of_an_unknown_device_is_refused() -> None:
    async with simulated_cluster(devices=1) as cluster:
        with pytest.raises(InvalidRequest):
            await node_of(cluster, Planning()).actions.reset_plan("7")
