"""An operator that pauses components by a node label, replaces the driver or partitions a GPU, and lets them return."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.cluster.plugin_server import PluginApiServer, kubeconfig
from tests.integration.acting import SOON, history
from tests.integration.nvidia_stage import RESOURCE, NvidiaStage, found_by

LABEL = "nvidia.com/gpu.deploy.client"
NODE = "node-1"


@asynccontextmanager
async def operated(mebibytes: int = 16) -> AsyncIterator[tuple[NvidiaStage, PluginApiServer]]:
    """A stage whose plugin follows :data:`LABEL` of its node, and the API server that has the node."""
    words = ("--yield-labels", LABEL, "--node-name", NODE, "--mig-strategy", "mixed")
    async with PluginApiServer() as cluster, NvidiaStage(plugin=words, mebibytes=mebibytes) as stage:
        cluster.add_node(NODE)
        cluster.role = {"watch nodes"}
        label(cluster, "true")
        stage.plugin.environment = {"KUBECONFIG": str(kubeconfig(stage.directory, cluster.url).path)}
        await stage.start_daemons()
        await stage.wait_until_clean(SOON)
        yield stage, cluster


def label(cluster: PluginApiServer, value: str) -> None:
    """Set :data:`LABEL` of the node."""
    cluster.set_labels(NODE, {LABEL: value})


async def paused(stage: NvidiaStage, cluster: PluginApiServer, value: str) -> None:
    """Pause the components, as the operator does, and wait until the driver is free."""
    label(cluster, value)
    await stage.logged("node.yielded")
    assert stage.child_processes(stage.service) == {}, "each of them can have a GPU open"
    await stage.offers(0)


async def test_driver_replaced_while_components_are_paused_is_used_after_the_restart_that_it_causes() -> None:
    async with operated() as (stage, cluster):
        pod = await stage.kubelet.run(stage.looking("global", "a", "team-a"))
        assert await found_by(pod) == 0
        await paused(stage, cluster, "paused-for-driver-upgrade")
        stage.machine.remove_driver()
        stage.machine.set("driver_version", "999.1")
        stage.machine.bring_driver_back()
        label(cluster, "true")
        async with asyncio.timeout(SOON):
            assert await stage.service.wait_for_exit() != 0, "the libraries of the old driver are of no use"
        assert "The driver changed from" in stage.service.log.read_text()
        await stage.service.start()
        await stage.offers(2)
        devices = await stage.wait_until_clean(SOON)
        assert {each.health for each in devices} == {"healthy"}
        assert {each.certificate.driver_version for each in devices} == {"999.1"}
        assert await history(stage, "health.quarantined") == []


async def test_gpu_partitioned_while_components_are_paused_returns_as_its_instances() -> None:
    async with operated(mebibytes=98) as (stage, cluster):
        await paused(stage, cluster, "paused-for-mig-change")
        stage.machine.gpus[0].split("1g.18gb", "1g.18gb")
        label(cluster, "true")
        await stage.offers(2, "nvidia.com/mig-1g.18gb")
        await stage.offers(1)
        devices = await stage.wait_for_devices(
            lambda found: len(found) == 3 and {each.state for each in found} == {"clean"}, SOON
        )
        assert {each.health for each in devices} == {"healthy"}
        assert await history(stage, "health.quarantined") == []


async def test_capacity_remains_while_the_node_is_yielded_and_the_label_that_vanishes_ends_it() -> None:
    async with operated() as (stage, cluster):
        await paused(stage, cluster, "false")
        assert stage.kubelet.capacity(RESOURCE) == 2
        cluster.set_labels(NODE, {LABEL: None})
        await stage.offers(2)


async def test_node_whose_driver_hangs_at_the_start_of_the_service_can_be_yielded() -> None:
    async with NvidiaStage(gpus=1) as stage:
        stage.machine.set("hangs/nvmlInitWithFlags", "")
        await stage.service.start()
        closed = await stage.command_json("yield", "--reason", "the driver is replaced")
        assert (closed["driver"], closed["remainingPids"]) == ("closed", [])
        assert stage.child_processes(stage.service) == {}
        stage.machine.unset("hangs/nvmlInitWithFlags")
        done = await stage.run_command("resume", "--reason", "done")
        assert done.returncode == 0, done.stderr
        await stage.wait_until_clean(SOON)
