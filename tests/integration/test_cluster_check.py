"""``make cluster-check`` on an emulated cluster: it finds the secret without a gate, and nothing behind ours."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from scrubber.emulator import Kubelet
from scrubber.emulator.cluster import ApiServer, ControlPlane
from scrubber.emulator.cluster.resources import DEVICE_CLASSES, NAMESPACES, PODS
from scrubber.emulator.playground import RESOURCE, Playground, fast_kubelet_timings
from scrubber.emulator.timings import ClusterTimings
from tests import vendor_plugin
from tests.cluster.emulated import DRIVER
from tests.cluster_checks import Checker, scenarios
from tests.integration.acting import QUICK, SOON
from tests.integration.test_dra_driver import ACCOUNT as DRIVER_ACCOUNT
from tests.integration.test_dra_driver import started_driver

MEMORY = 2 << 20
VENDORS = "vendor.example/gpu"
ENDS = ("exits", "is-killed", "crashes-while-computing", "is-deleted", "is-force-deleted", "leaves-a-process")
"""The scenarios that an emulated node covers with one device."""


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let containers find the interpreter of the tests as ``python3``: the emulated node has no images."""
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))


@dataclass
class Cluster:
    """A node with simulated devices, its control plane, and the check."""

    server: ApiServer
    stage: Playground
    checker: Checker

    async def offers(self, resource: str, count: int) -> None:
        """Wait until the node's object in the API server lists so many devices: the kubelet knows of them earlier."""
        await self.stage.kubelet.wait_until(lambda node: node.node_status.allocatable.get(resource) == count, SOON)

    def namespaces(self) -> set[str]:
        return {each["metadata"]["name"] for each in self.server.api.store.items(NAMESPACES)}


@asynccontextmanager
async def cluster(root: Path, *, devices: int = 1) -> AsyncIterator[Cluster]:
    async with ApiServer() as server, ControlPlane(server.api, ClusterTimings().scaled(0.05)):
        stage = Playground(directory=root / "stage", devices=devices, memory="2MiB", policy=QUICK)
        stage.kubelet = Kubelet(
            stage.kubelet.root, timings=fast_kubelet_timings(), cgroup_parent=stage.cgroup_parent, cluster=server.api
        )
        async with stage:
            yield Cluster(server, stage, Checker(server, root))


@asynccontextmanager
async def gated(root: Path, *, devices: int = 1) -> AsyncIterator[Cluster]:
    async with cluster(root, devices=devices) as here:
        await here.stage.start_daemons(SOON)
        await here.stage.wait_until_clean(SOON)
        await here.offers(RESOURCE, devices)
        yield here


@asynccontextmanager
async def with_driver(root: Path, *, resource: str = "") -> AsyncIterator[Cluster]:
    """A cluster with the DRA driver and its device class, which may offer an extended resource."""
    async with cluster(root) as here:
        selector = {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
        extended = {"extendedResourceName": resource} if resource else {}
        here.server.api.create(
            DEVICE_CLASSES, {"metadata": {"name": DRIVER}, "spec": {"selectors": [selector], **extended}}
        )
        await here.stage.service.start()
        await here.stage.wait_until_clean(SOON)
        kubelet = here.stage.kubelet
        await kubelet.wait_until(lambda node: any(each.name == "SlicesDeleted" for each in node.events), SOON)
        kubeconfig = here.server.write_kubeconfig(root / "kubeconfig", here.server.add_account(DRIVER_ACCOUNT))
        directories = kubelet.plugins, kubelet.plugins_registry, kubelet.cdi_directory
        async with started_driver(here.stage.socket_dir, kubeconfig, *directories) as driver:
            await driver.until("slices.published")
            yield here


async def test_check_finds_the_secret_behind_a_vendors_plugin_without_a_gate(short_tmp: Path) -> None:
    async with (
        cluster(short_tmp) as here,
        vendor_plugin.running(here.stage.kubelet.device_plugins, here.stage.sim_dir, resource=VENDORS),
    ):
        await here.offers(VENDORS, 1)
        found = await here.checker.run("--resource", VENDORS, *scenarios(["exits", "is-killed"]))
        assert found.code == 1, found.errors
        assert found.results == {"exits": "found", "is-killed": "found"}
        exits = found.scenario("exits")
        assert (exits["foundBytes"], exits["devices"]) == (MEMORY, ["simgpu0"])
        assert f"{MEMORY}" in found.output
        assert here.namespaces() == {"default", "kube-system"}


async def test_check_finds_nothing_behind_the_plugin_however_the_first_pod_ends(short_tmp: Path) -> None:
    async with gated(short_tmp) as here:
        found = await here.checker.run("--resource", RESOURCE)
        assert found.code == 0, f"{found.output} {found.errors}"
        assert found.results == dict.fromkeys(ENDS, "clean") | {
            "runs-out-of-memory": "not-covered",
            "container-restarts": "not-covered",
            "has-all-devices": "not-covered",
        }
        for name in ENDS:
            each = found.scenario(name)
            assert each["writtenBytes"] == each["ownFoundBytes"] == each["searchedBytes"] == MEMORY, name
        assert found.scenario("is-killed")["firstPodExitCode"] == 128 + signal.SIGKILL
        # The default policy lets a container that restarts have its own data.
        assert found.scenario("container-restarts")["foundBytes"] == MEMORY
        assert here.namespaces() == {"default", "kube-system"}


async def test_check_meets_the_same_devices_again_on_a_node_with_several(short_tmp: Path) -> None:
    async with gated(short_tmp, devices=3) as here:
        found = await here.checker.run("--resource", RESOURCE, *scenarios(["exits", "has-all-devices"]))
        assert found.code == 0, f"{found.output} {found.errors}"
        assert found.results == {"exits": "clean", "has-all-devices": "clean"}
        assert len(found.scenario("has-all-devices")["devices"]) == 3
        assert found.scenario("has-all-devices")["searchedBytes"] == 3 * MEMORY


async def test_check_of_claims_reports_the_certificate_and_does_not_cover_a_restart(short_tmp: Path) -> None:
    async with with_driver(short_tmp) as here:
        names = ["is-deleted", "is-force-deleted", "container-restarts"]
        found = await here.checker.run("--device-class", DRIVER, *scenarios(names))
        assert found.code == 0, f"{found.output} {found.errors}"
        assert found.results == dict(zip(names, ("clean", "clean", "not-covered"), strict=True))
        (certificate,) = found.scenario("is-deleted")["handOver"]["certificates"]
        assert certificate["digest"] in found.output or certificate["digest"][:12] in found.output
        assert found.report["path"] == "resource-claim"


async def test_check_of_an_extended_resource_uses_the_claims_behind_it(short_tmp: Path) -> None:
    async with with_driver(short_tmp, resource="nvidia.com/gpu") as here:
        found = await here.checker.run("--resource", "nvidia.com/gpu", *scenarios(["exits"]))
        assert found.code == 0, f"{found.output} {found.errors}"
        assert found.results == {"exits": "clean"}
        assert found.report["path"] == "extended-resource-by-claim"


async def test_interrupted_check_deletes_its_namespaces(short_tmp: Path) -> None:
    async with gated(short_tmp) as here:
        process = await here.checker.start("--resource", RESOURCE)
        await here.stage.kubelet.wait_until(
            lambda _: any(each["spec"].get("nodeName") for each in here.server.api.store.items(PODS)), SOON
        )
        process.send_signal(signal.SIGTERM)
        found = await here.checker.outcome(process)
        assert found.code == 128 + signal.SIGTERM, found.errors
        assert found.report["interrupted"] is True
        assert here.namespaces() == {"default", "kube-system"}
