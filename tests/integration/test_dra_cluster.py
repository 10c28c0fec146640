"""Tenants that get their devices by claims: a real service and driver, an emulated kubelet and control plane over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from scrubber.emulator import Kubelet
from scrubber.emulator.cluster import ApiServer, ControlPlane
from scrubber.emulator.playground import Playground, fast_kubelet_timings, tenant_argv
from scrubber.emulator.pods import ContainerSpec, EmulatedPod, PodClaim, PodSpec
from scrubber.emulator.timings import ClusterTimings
from tests.cluster.emulated import CLAIMS, DRIVER, RESOURCE_V1, SLICES, Client, claim, client_of
from tests.integration.acting import QUICK, SOON, found_by
from tests.integration.test_dra_driver import ACCOUNT, Driver, started_driver

NODE = "node-a"


@dataclass
class Cluster:
    """A node with one device, and its control plane."""

    stage: Playground
    kubelet: Kubelet
    api: Client
    server: ApiServer
    driver: Driver
    kubeconfig: Path

    def another_driver(self) -> AbstractAsyncContextManager[Driver]:
        directories = self.kubelet.plugins, self.kubelet.plugins_registry, self.kubelet.cdi_directory
        return started_driver(self.stage.socket_dir, self.kubeconfig, *directories)

    def submit(self, name: str, *argv: str) -> asyncio.Task[EmulatedPod]:
        """Create a pod with a claim of one device; the task ends once it is bound to the node."""
        main = ContainerSpec("main", tenant_argv(*argv), claims=["gpu"])
        spec = PodSpec(name, "default", [main], claims=[PodClaim("gpu", claim=name)])

        async def submitted() -> EmulatedPod:
            await self.api.send("POST", CLAIMS, claim(name))
            return await self.kubelet.submit(spec, SOON)

        return asyncio.create_task(submitted())

    async def run_writer(self, name: str) -> EmulatedPod:
        """Return a pod that has written its name all over its device, and stays."""
        pod = await self.submit(name, "--write", f"secret of {name}", "--hold", "forever")
        await pod.wait(lambda _: "ready" in pod.read_log("main"), SOON)
        return pod


@asynccontextmanager
async def cluster(root: Path) -> AsyncIterator[Cluster]:
    async with ApiServer() as server, ControlPlane(server.api, ClusterTimings().scaled(0.05)), client_of(server) as api:
        selector = {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
        await api.send(
            "POST", f"{RESOURCE_V1}/deviceclasses", {"metadata": {"name": "gpu"}, "spec": {"selectors": [selector]}}
        )
        stage = Playground(directory=root / "stage", devices=1, memory="2MiB", policy=QUICK)
        stage.kubelet = Kubelet(
            stage.kubelet.root, timings=fast_kubelet_timings(), cgroup_parent=stage.cgroup_parent, cluster=server.api
        )
        async with stage:
            await stage.service.start()
            await stage.wait_until_clean(SOON)
            kubelet = stage.kubelet
            await kubelet.wait_until(lambda node: any(each.name == "SlicesDeleted" for each in node.events), SOON)
            kubeconfig = server.write_kubeconfig(root / "kubeconfig", server.add_account(ACCOUNT))
            directories = kubelet.plugins, kubelet.plugins_registry, kubelet.cdi_directory
            async with started_driver(stage.socket_dir, kubeconfig, *directories) as driver:
                await driver.until("slices.published")
                yield Cluster(stage, kubelet, api, server, driver, kubeconfig)


async def test_next_tenant_of_a_device_finds_nothing(short_tmp: Path) -> None:
    async with cluster(short_tmp) as here:
        first = await here.run_writer("first")
        second = here.submit("second", "--read")
        await here.kubelet.delete(first)
        assert await found_by(await second) == ""


async def test_next_tenant_finds_nothing_after_a_forced_deletion_of_one_that_still_computes(short_tmp: Path) -> None:
    async with cluster(short_tmp) as here:
        first = await here.run_writer("first")
        second = here.submit("second", "--read")
        await here.kubelet.delete(first, force=True, linger=2.0)
        assert await found_by(await second) == ""


async def test_claim_is_released_by_a_driver_that_was_killed_meanwhile(short_tmp: Path) -> None:
    async with cluster(short_tmp) as here:
        first = await here.run_writer("first")
        here.driver.process.kill()
        await here.driver.process.wait()
        deletion = asyncio.create_task(here.kubelet.delete(first))
        second = here.submit("second", "--read")
        async with here.another_driver():
            await deletion
            assert await found_by(await second) == ""


async def test_claim_is_released_and_its_device_scrubbed_while_the_api_server_is_away(short_tmp: Path) -> None:
    async with cluster(short_tmp) as here:
        first = await here.submit("first", "--write", "secret of first")
        await first.wait(lambda _: "ready" in first.read_log("main"), SOON)
        async with here.server.away():
            await here.stage.wait_for_devices(
                lambda devices: all(each.state == "clean" and each.grant_count == 1 for each in devices),
                SOON,
                "the device is clean after the first tenant",
            )
        assert await found_by(await here.submit("second", "--read")) == ""


async def test_slices_return_after_a_restart_of_the_kubelet_deleted_them(short_tmp: Path) -> None:
    async with cluster(short_tmp) as here:
        (before,) = (await here.api.send("GET", SLICES))["items"]
        await here.kubelet.restart()
        assert (await here.driver.until("slices.published"))["generation"] == 2
        (after,) = (await here.api.send("GET", SLICES))["items"]
        assert after["metadata"]["name"] != before["metadata"]["name"]
        assert after["spec"]["devices"] == before["spec"]["devices"]
        assert await found_by(await here.submit("only", "--read")) == ""
