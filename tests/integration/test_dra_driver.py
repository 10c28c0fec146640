"""``scrubber dra`` between a real service, an emulated API server, and a kubelet whose calls the test makes."""

from __future__ import annotations

import asyncio
import json
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import yaml

from plugin.api import dra_v1_pb2 as dra
from scrubber.adapters.sim import control
from scrubber.emulator.cluster import Account, ApiServer
from scrubber.emulator.playground import Playground
from tests import forkserver
from tests.cluster.emulated import (
    CLAIMS,
    DRIVER,
    NODES,
    SLICES,
    Client,
    allocation,
    claim,
    client_of,
    device,
    node,
    slice_of,
)
from tests.deployed import DEPLOY
from tests.dra_collaborators import Directory, Visit, visit
from tests.gpus import gpu, seen
from tests.integration.acting import QUICK, SOON
from tests.plugin_collaborators import FakeService, snapshot

NODE = "node-a"
ROLE = next(yaml.safe_load_all((DEPLOY / "kubernetes/dra/role.yaml").read_text()))
ACCOUNT = Account("system:serviceaccount:scrubber-system:scrubber-dra", ROLE["rules"], NODE)
"""The driver's own: with its role, and a token that is bound to its node."""
SECRET = b"bytes of the first tenant"
LEFT = dra.Claim(namespace="default", name="left", uid="11111111-2222-3333-4444-555555555555")
"""Of a pod that was deleted while no driver ran; unknown to the API server."""


@dataclass
class Driver:
    """A running ``scrubber dra`` and what it has logged so far."""

    process: Process
    events: list[dict[str, Any]] = field(default_factory=list)

    async def until(self, event: str) -> dict[str, Any]:
        """Return the next log line with this event."""
        assert self.process.stderr is not None
        async with asyncio.timeout(SOON):
            while line := await self.process.stderr.readline():
                self.events.append(json.loads(line))
                if self.events[-1]["event"] == event:
                    return self.events[-1]
        raise AssertionError(f"the driver ended without {event}: {self.events}")


@asynccontextmanager
async def started_driver(
    service: Path, kubeconfig: Path, plugins: Path, registry: Path, specifications: Path, *flags: str
) -> AsyncIterator[Driver]:
    words = ["--node-name", NODE, "--kubeconfig", str(kubeconfig), "--socket-dir", str(service)]
    words += ["--kubelet-plugins-dir", str(plugins), "--registry-dir", str(registry), "--cdi-dir", str(specifications)]
    process = await forkserver.start(
        *("scrubber.cli.main", "dra", *words),
        *("--log-format", "json", *(flags or ("--metrics-address", "off"))),
        stderr=PIPE,
    )
    try:
        yield Driver(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@dataclass
class Node:
    """A node with a service, a driver, and the kubelet's connection to it."""

    stage: Playground
    api: Client
    directory: Directory
    root: Path
    kubeconfig: Path

    def memory(self, number: int) -> Path:
        return self.stage.sim_dir / "devices" / str(number) / "memory"

    async def slices(self) -> list[dict[str, Any]]:
        return list((await self.api.send("GET", SLICES))["items"])

    async def published(self) -> list[dict[str, Any]]:
        return [device for each in await self.slices() for device in each["spec"].get("devices", [])]

    async def allocate(self, name: str, device: str, pod: str) -> dra.Claim:
        """Create a claim that is allocated and reserved for a pod, as the scheduler leaves it."""
        made = await self.api.send("POST", CLAIMS, claim(name))
        made["status"] = {
            "allocation": allocation(device),
            "reservedFor": [{"resource": "pods", "name": pod, "uid": f"uid-of-{pod}"}],
        }
        await self.api.send("PUT", f"{CLAIMS}/{name}/status", made)
        return dra.Claim(namespace="default", name=name, uid=made["metadata"]["uid"])

    def driver(self, *flags: str) -> AbstractAsyncContextManager[Driver]:
        directories = self.directory.plugins, self.directory.registry, self.root / "cdi"
        return started_driver(self.stage.socket_dir, self.kubeconfig, *directories, *flags)

    async def connect(self) -> Visit:
        return await visit(self.directory.registry / f"{DRIVER}-reg.sock")


@asynccontextmanager
async def running_node(root: Path) -> AsyncIterator[Node]:
    stage = Playground(directory=root / "stage", devices=2, memory="2MiB", policy=QUICK)
    try:
        made = await stage.run_command(
            "sim", "create", "--dir", str(stage.sim_dir), "--devices", "2", "--memory", "2MiB"
        )
        assert made.returncode == 0, made.stderr
        await stage.service.start()
        await stage.wait_until_clean(SOON)
        async with ApiServer() as server, client_of(server) as api:
            await api.send("POST", NODES, node(NODE))
            kubeconfig = server.write_kubeconfig(root / "kubeconfig", server.add_account(ACCOUNT))
            yield Node(stage, api, Directory(root), root, kubeconfig)
    finally:
        await stage.close()


async def prepare(kubelet: Visit, claim: dra.Claim, timeout: float = SOON) -> dra.NodePrepareResourceResponse:
    response = await kubelet.driver().NodePrepareResources(
        dra.NodePrepareResourcesRequest(claims=[claim]), timeout=timeout
    )
    answer: dra.NodePrepareResourceResponse = response.claims[claim.uid]
    return answer


async def unprepare(kubelet: Visit, claim: dra.Claim, timeout: float = SOON) -> str:
    response = await kubelet.driver().NodeUnprepareResources(
        dra.NodeUnprepareResourcesRequest(claims=[claim]), timeout=timeout
    )
    return str(response.claims[claim.uid].error)


async def test_claim_is_prepared_released_and_scrubbed_before_the_next_one(short_tmp: Path) -> None:
    async with running_node(short_tmp) as here, here.driver() as driver:
        assert (await driver.until("slices.published"))["devices"] == 2
        first, second = [each["name"] for each in await here.published()]
        kubelet = await here.connect()

        one = await here.allocate("one", first, "train-0")
        prepared = await prepare(kubelet, one)
        assert prepared.error == ""
        (device,) = prepared.devices
        assert (list(device.request_names), device.pool_name, device.device_name) == (["main"], NODE, first)
        (spec,) = (short_tmp / "cdi").glob("*.json")
        assert json.loads(spec.read_text())["kind"] == f"{DRIVER}/claim"
        assert list(device.cdi_device_ids) == [f"{DRIVER}/claim={one.uid}{each}" for each in (f"-{first}", ".main")]
        here.memory(0).write_bytes(SECRET)
        assert await prepare(kubelet, one) == prepared
        async with asyncio.timeout(SOON), here.api.watch(CLAIMS) as claims:
            while not (status := (await claims.next())[1]["status"]).get("devices"):
                pass
        (shown,) = status["devices"]
        assert (shown["driver"], shown["device"]) == (DRIVER, first)
        assert shown["conditions"][0]["reason"] == "Certified"
        assert shown["data"]["certificate"]["covered"]

        two = await here.allocate("two", first, "train-1")
        assert (await prepare(kubelet, two, timeout=3.0)).error
        other = await here.allocate("other", second, "train-2")
        assert (await prepare(kubelet, other)).error == ""

        assert await unprepare(kubelet, one) == ""
        assert not here.memory(0).read_bytes().strip(b"\0")
        assert (await prepare(kubelet, two)).error == ""
        assert {path.name for path in (short_tmp / "cdi").iterdir()} == {
            f".{DRIVER}-claims.lock",
            *(f"{DRIVER}-claim_{each.uid}.json" for each in (two, other)),
        }
        await kubelet.channel.close()


async def test_killed_driver_continues_where_it_was(short_tmp: Path) -> None:
    async with running_node(short_tmp) as here:
        async with here.driver() as driver:
            await driver.until("slices.published")
            first, second = [each["name"] for each in await here.published()]
            kubelet = await here.connect()
            one, two = await here.allocate("one", first, "train-0"), await here.allocate("two", second, "train-1")
            prepared = await prepare(kubelet, one)
            assert (await prepare(kubelet, two)).error == ""
            await kubelet.channel.close()
            before = await here.slices()
            driver.process.kill()
            await driver.process.wait()
        left = short_tmp / "cdi" / f"{DRIVER}-claim_00000000-0000-0000-0000-000000000000.json"
        left.write_text("{}")
        async with here.driver() as driver:
            assert (await driver.until("cdi.claim-removed"))["claim_uid"] == "00000000-0000-0000-0000-000000000000"
            kubelet = await here.connect()
            assert await prepare(kubelet, one) == prepared
            assert [each["spec"] for each in await here.slices()] == [each["spec"] for each in before]

            # The kubelet deletes the slices of every driver when it starts.
            for each in before:
                await here.api.send("DELETE", f"{SLICES}/{each['metadata']['name']}")
            await driver.until("slices.published")
            assert [each["name"] for each in await here.published()] == [
                each["name"] for slice_ in before for each in slice_["spec"]["devices"]
            ]

            driver.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(SOON):
                assert await driver.process.wait() == 0
            assert here.directory.names() == []
            assert len(await here.slices()) == 1
            await kubelet.channel.close()


async def test_slices_of_an_earlier_instance_stay_until_the_service_is_ready(short_tmp: Path) -> None:
    directory = Directory(short_tmp)
    async with (
        ApiServer() as server,
        client_of(server) as api,
        FakeService(short_tmp / "service", snapshot(ready=False)) as service,
    ):
        await api.send("POST", NODES, node(NODE))
        earlier = await api.send("POST", SLICES, slice_of(device("gpu-0")))
        kubeconfig = server.write_kubeconfig(short_tmp / "kubeconfig", server.add_account(ACCOUNT))
        places = directory.plugins, directory.registry, short_tmp / "cdi"
        async with started_driver(short_tmp / "service", kubeconfig, *places) as driver:
            for event in ("service.instance-changed", "plugin.serving"):
                if all(each["event"] != event for each in driver.events):
                    await driver.until(event)
            kubelet = await visit(directory.registry / f"{DRIVER}-reg.sock")
            for _ in range(20):  # each is a request to the API server, as a write of slices would be
                assert "does not exist" in (await prepare(kubelet, LEFT)).error
            await kubelet.channel.close()
            assert [each["metadata"]["uid"] for each in (await api.send("GET", SLICES))["items"]] == [
                earlier["metadata"]["uid"]
            ]
            service.show(snapshot(seen(gpu(0)), version=2))
            assert (await driver.until("slices.published"))["devices"] == 1


async def test_device_that_fails_while_it_is_released_gets_a_taint_and_does_not_keep_the_pod(short_tmp: Path) -> None:
    async with running_node(short_tmp) as here, here.driver() as driver:
        await driver.until("slices.published")
        first, _ = [each["name"] for each in await here.published()]
        kubelet = await here.connect()
        one = await here.allocate("one", first, "train-0")
        assert (await prepare(kubelet, one)).error == ""
        here.memory(0).write_bytes(SECRET)
        control.add_faults(here.stage.sim_dir, "0", wont_clear=True)
        assert await unprepare(kubelet, one) == ""
        assert [each["name"] for each in await here.published() if each.get("taints")] == [first]
        await kubelet.channel.close()


def get(address: str, path: str) -> str:
    with urlopen(f"http://{address}{path}", timeout=SOON) as response:
        text: str = response.read().decode()
        return text


async def test_driver_serves_metrics_and_is_ready_once_the_kubelet_has_registered_it(short_tmp: Path) -> None:
    flags = "--metrics-address", "127.0.0.1:0", "--probe-address", "127.0.0.1:0"
    async with running_node(short_tmp) as here, here.driver(*flags) as driver:
        probes = str((await driver.until("probes.serving"))["address"])
        await driver.until("slices.published")
        with pytest.raises(HTTPError, match="503"):
            await asyncio.to_thread(get, probes, "/readyz")
        kubelet = await here.connect()
        await kubelet.driver().NodePrepareResources(dra.NodePrepareResourcesRequest(), timeout=SOON)
        await driver.until("kubelet.registered")
        assert await asyncio.to_thread(get, probes, "/readyz")
        text = await asyncio.to_thread(get, str((await driver.until("metrics.serving"))["address"]), "/metrics")
        assert f'scrubber_plugin_registered{{resource="{DRIVER}"}} 1.0' in text
        assert f'scrubber_plugin_devices{{health="healthy",resource="{DRIVER}"}} 2.0' in text
        assert 'scrubber_plugin_cluster_writes_total{kind="resource-slice",outcome="ok"} 1.0' in text
        assert 'scrubber_plugin_rpc_duration_seconds_count{code="OK",method="NodePrepareResources"} 1.0' in text
        await kubelet.channel.close()


READY = "NVIDIA_DRIVER_ROOT={0}\nDRIVER_ROOT_CTR_PATH={0}\nNVIDIA_DEV_ROOT=/\nDEV_ROOT_CTR_PATH=/\n"


async def test_driver_offers_selected_devices_once_the_gpu_driver_is_found_and_follows_it(short_tmp: Path) -> None:
    ready = short_tmp / "driver-ready"
    flags = "--metrics-address", "off", "--devices", "1", "--driver-ready-file", str(ready)
    async with running_node(short_tmp) as here, here.driver(*flags) as driver:
        await driver.until("driver.location-unknown")
        await driver.until("plugin.serving")
        kubelet = await here.connect()
        assert await unprepare(kubelet, LEFT) == ""
        await kubelet.channel.close()
        assert await here.slices() == []
        ready.write_text(READY.format("/first"))
        assert (await driver.until("driver.location-known"))["root"] == "/first"
        assert (await driver.until("slices.published"))["devices"] == 1
        kubelet = await here.connect()
        await kubelet.channel.close()
        driver.process.send_signal(signal.SIGHUP)
        await driver.until("settings.unchanged")
        ready.write_text("nonsense\n")
        assert "is not an assignment" in (await driver.until("settings.rejected"))["message"]
        ready.unlink()
        driver.process.send_signal(signal.SIGHUP)
        await driver.until("settings.unchanged")
        ready.write_text(READY.format("/second"))
        assert (await driver.until("settings.reloaded"))["root"] == "/second"
