"""Tenants that get their devices by claims: a real service and driver, an emulated kubelet and control plane over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from scrubber.adapters.sim import control
from scrubber.emulator import Kubelet
from scrubber.emulator.cluster import ApiServer, ControlPlane
from scrubber.emulator.playground import Playground, fast_kubelet_timings, tenant_argv
from scrubber.emulator.pods import ContainerSpec, EmulatedPod, PodClaim, PodSpec
from scrubber.emulator.timings import ClusterTimings
from tests.cluster.emulated import CLAIMS, DRIVER, PODS, RESOURCE_V1, SLICES, Client, Json, claim, client_of
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

    def held(self) -> AbstractContextManager[object]:
        """Keep the device from being cleaned: this process has it open, and is no pod's."""
        return (self.stage.sim_dir / "devices" / "0" / "memory").open("rb")

    def follows_all_claims(self) -> bool:
        """Whether the driver has listed or watched the claims of all namespaces."""
        requests = [
            each
            for operation in ("list resourceclaims", "watch resourceclaims")
            for each in self.server.log.of(operation, account=ACCOUNT.name)
        ]
        return any(not each.namespace for each in requests)

    async def until_published(self, holds: Callable[[Json], bool]) -> None:
        """Wait until the device is published so that ``holds`` returns true."""
        async with asyncio.timeout(SOON), self.api.watch(SLICES) as slices:
            while not any(map(holds, (await slices.next())[1]["spec"].get("devices") or [])):
                pass

    async def until_allocated(self, name: str) -> Json:
        """Return the device's entry in the allocation of a claim, as soon as there is one."""
        async with asyncio.timeout(SOON), self.api.watch(CLAIMS) as claims:
            while True:
                _, found = await claims.next()
                allocation = (found.get("status") or {}).get("allocation")
                if found["metadata"]["name"] == name and allocation:
                    (result,) = allocation["devices"]["results"]
                    return dict(result)

    async def until_refused(self, name: str, message: str) -> None:
        """Wait until the scheduler reports why a pod is not bound."""
        async with asyncio.timeout(SOON), self.api.watch(PODS) as pods:
            while True:
                _, found = await pods.next()
                conditions = (found.get("status") or {}).get("conditions") or []
                if found["metadata"]["name"] == name and any(message in each.get("message", "") for each in conditions):
                    return

    async def run_writer(self, name: str) -> EmulatedPod:
        """Return a pod that has written its name all over its device, and stays."""
        pod = await self.submit(name, "--write", f"secret of {name}", "--hold", "forever")
        await pod.wait(lambda _: "ready" in pod.read_log("main"), SOON)
        return pod


@asynccontextmanager
async def cluster(root: Path, *flags: str) -> AsyncIterator[Cluster]:
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
            async with started_driver(stage.socket_dir, kubeconfig, *directories, *flags) as driver:
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


BINDING = "--metrics-address", "off", "--binding-conditions"


async def test_pod_on_a_dirty_device_is_bound_once_the_device_is_clean(short_tmp: Path) -> None:
    async with cluster(short_tmp, *BINDING) as here:
        with here.held():
            await here.until_published(lambda device: "bindingConditions" in device)
            pod = here.submit("only", "--read")
            result = await here.until_allocated("only")
            assert result["bindingConditions"] == [f"{DRIVER}/clean"]
            assert result["bindingFailureConditions"] == [f"{DRIVER}/not-clean"]
            assert not pod.done()
        assert (await here.driver.until("claim.binding-allowed"))["claim"] == "default/only"
        assert await found_by(await pod) == ""
        assert here.follows_all_claims()


async def test_pod_on_a_dirty_device_that_fails_its_scrub_is_not_bound_to_it(short_tmp: Path) -> None:
    async with cluster(short_tmp, *BINDING) as here:
        with here.held():
            await here.until_published(lambda device: "bindingConditions" in device)
            pod = here.submit("only", "--read")
            await here.until_allocated("only")
            control.add_faults(here.stage.sim_dir, "0", wont_clear=True)
        await here.until_refused("only", "claim binding failed")
        await here.until_published(lambda device: bool(device.get("taints")))
        assert not pod.done()
        pod.cancel()
        await asyncio.wait({pod})


async def test_driver_without_binding_conditions_does_not_follow_the_claims_of_the_cluster(short_tmp: Path) -> None:
    async with cluster(short_tmp) as here:
        assert await found_by(await here.submit("only", "--read")) == ""
        assert not here.follows_all_claims()
