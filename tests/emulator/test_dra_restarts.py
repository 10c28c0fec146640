"""What the kubelet remembers of claims over its own restarts, reboots and outages of the API server."""

import asyncio
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from scrubber.emulator import Kubelet, PodPhase, RestartPolicy
from scrubber.emulator.cluster import EmulatedApi
from scrubber.emulator.cluster.resources import PODS
from scrubber.emulator.dra.checkpoint import FILE_NAME
from tests.dra_emulation import CDI_KIND, Claims, DraNode, TinyDriver, claiming, dra_node, driving
from tests.emulation import SOON, timings


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[DraNode]:
    async with dra_node(short_tmp) as running:
        yield running


@pytest.fixture
async def driver(node: DraNode) -> AsyncIterator[TinyDriver]:
    async with driving(node) as running:

        async def write(claims: Claims) -> Any:
            for each in claims:
                node.cdi(each.uid, "gpu-0")
            return await running.accept(claims)

        running.on_prepare = write
        yield running


def checkpoint(node: DraNode) -> list[dict[str, Any]]:
    document = json.loads((node.kubelet.root / FILE_NAME).read_text())
    assert document["Checksum"] == zlib.crc32(document["Data"].encode())
    data = json.loads(document["Data"])
    assert (data["kind"], data["apiVersion"]) == ("DRACheckpoint", "checkpoint.dra.kubelet.k8s.io/v1")
    return list(data["ClaimInfoStateList"])


async def back(node: DraNode, driver: TinyDriver) -> None:
    """Wait until a restarted kubelet has found the driver."""
    await node.until(lambda: node.kubelet.dra.plugins.instances(driver.name))


async def test_claim_is_in_the_checkpoint_before_the_call_and_its_devices_after_it(
    node: DraNode, driver: TinyDriver
) -> None:
    made = node.claim()
    during: list[dict[str, Any]] = []
    accept = driver.on_prepare

    async def look(claims: Claims) -> Any:
        during.extend(checkpoint(node))
        return await accept(claims)

    driver.on_prepare = look
    pod = await node.run(claiming())
    uid = made["metadata"]["uid"]
    entry = {"ClaimUID": uid, "ClaimName": "claim", "Namespace": "default", "PodUIDs": {pod.uid: {}}}
    assert during == [entry | {"DriverState": {driver.name: {"Devices": []}}}]
    device = {
        "PoolName": "node-a",
        "DeviceName": "gpu-0",
        "ShareID": None,
        "RequestNames": ["main"],
        "CDIDeviceIDs": [f"{CDI_KIND}={uid}-gpu-0"],
    }
    assert checkpoint(node) == [entry | {"DriverState": {driver.name: {"Devices": [device]}}}]
    await node.kubelet.delete(pod)
    assert checkpoint(node) == []


async def test_restarted_kubelet_does_not_prepare_running_pods_again(node: DraNode, driver: TinyDriver) -> None:
    node.claim()
    pod = await node.run(claiming())
    await node.kubelet.restart()
    await back(node, driver)
    await node.kubelet.delete(pod)
    assert (driver.prepares, driver.unprepares) == ([["claim"]], [["claim"]])


async def test_restarted_kubelet_prepares_the_claim_again_for_another_pod(node: DraNode, driver: TinyDriver) -> None:
    node.claim()
    await node.run(claiming("a"))
    await node.kubelet.restart()
    await back(node, driver)
    await node.run(claiming("b"))
    assert driver.prepares == [["claim"], ["claim"]]
    (entry,) = checkpoint(node)
    assert len(entry["DriverState"][driver.name]["Devices"]) == 2, "a second answer is appended"


async def test_restarted_kubelet_prepares_the_claim_again_for_a_new_sandbox(node: DraNode, driver: TinyDriver) -> None:
    node.claim()
    pod = await node.run(claiming(restart=RestartPolicy.ALWAYS))
    await node.kubelet.restart()
    await back(node, driver)
    node.kubelet.kill_sandbox(pod)
    await node.until(lambda: len(driver.prepares) == 2)
    await pod.wait(lambda status: status.containers["main"].restarts == 1, SOON)


async def test_pod_is_prepared_again_after_a_reboot_without_a_release_between(
    node: DraNode, driver: TinyDriver
) -> None:
    node.claim()
    pod = await node.run(claiming(restart=RestartPolicy.ALWAYS))
    assert list(node.kubelet.cdi_directory.iterdir())
    await driver.stop()
    await node.kubelet.stop()
    emptied: list[bool] = []
    accept = driver.on_prepare

    async def look(claims: Claims) -> Any:
        emptied.append(not list(node.kubelet.cdi_directory.iterdir()))
        return await accept(claims)

    driver.on_prepare = look
    await node.kubelet.reboot()
    await driver.start(node.kubelet)
    await back(node, driver)
    node.api.patch(PODS, "a", {"metadata": {"labels": {"retry": "now"}}}, "default")
    await pod.wait(lambda status: status.containers["main"].restarts == 1, SOON)
    assert (emptied, driver.unprepares) == ([True], [])


async def test_pod_that_is_never_restarted_fails_with_a_reboot_and_is_released(
    node: DraNode, driver: TinyDriver
) -> None:
    node.claim()
    pod = await node.run(claiming())
    await node.kubelet.reboot()
    await pod.wait(PodPhase.FAILED, SOON)
    assert (driver.prepares, driver.unprepares) == ([["claim"]], [["claim"]])


async def test_kubelet_does_not_start_with_a_damaged_checkpoint(node: DraNode, driver: TinyDriver) -> None:
    node.claim()
    await node.run(claiming())
    await node.kubelet.stop()
    path = node.kubelet.root / FILE_NAME
    path.write_text(path.read_text().replace("gpu-0", "gpu-1"))
    with pytest.raises(RuntimeError, match="checkpoint is corrupted"):
        await node.kubelet.start()
    await node.kubelet.stop()
    path.write_text("{")
    with pytest.raises(RuntimeError, match="the kubelet does not start"):
        await node.kubelet.start()


async def test_claims_of_a_running_pod_are_not_released_after_the_loss_of_the_checkpoint(
    node: DraNode, driver: TinyDriver
) -> None:
    """A gap of the real kubelet: it knows the claims' names from the pod, and calls only for claims that it remembers."""
    node.claim()
    pod = await node.run(claiming())
    await node.kubelet.stop()
    (node.kubelet.root / FILE_NAME).unlink()
    await node.kubelet.start()
    await node.kubelet.delete(pod)
    assert driver.unprepares == []


async def test_claim_that_is_prepared_while_a_restarted_kubelet_releases_it_is_never_released(
    node: DraNode, driver: TinyDriver
) -> None:
    """A gap of the real kubelet: the end of the release makes it forget the claim, with the pod that has joined it."""
    accept, release = driver.on_prepare, driver.on_unprepare
    prepared, answered = asyncio.Event(), asyncio.Event()

    async def prepare_late(claims: Claims) -> Any:
        prepared.set()
        await answered.wait()
        return await accept(claims)

    async def release_beside_it(claims: Claims) -> Any:
        await prepared.wait()
        return await release(claims)

    node.claim()
    first = await node.run(claiming("a"))
    await node.kubelet.restart()
    await back(node, driver)
    driver.on_prepare, driver.on_unprepare = prepare_late, release_beside_it
    node.api.delete(PODS, "a", "default", options={"gracePeriodSeconds": 1})
    await node.until(lambda: driver.unprepares)
    second = await node.kubelet.submit(claiming("b"), SOON)
    await node.until(lambda: first.gone)
    answered.set()
    await node.until(lambda: node.calls("FailedPrepareDynamicResources"))
    assert "unable to get claim info" in node.calls("FailedPrepareDynamicResources")[-1].detail
    await node.kubelet.delete(second)
    assert driver.unprepares == [["claim"]]
    assert checkpoint(node) == []


async def test_pod_that_ends_while_the_api_server_is_away_is_reported_afterwards(
    node: DraNode, driver: TinyDriver
) -> None:
    node.claim()
    pod = await node.run(claiming(command="while [ ! -e die ]; do sleep 0.01; done"))
    node.api.available = False
    (pod.container_root("main") / "die").touch()
    await pod.wait(PodPhase.SUCCEEDED, SOON)
    assert driver.unprepares == [["claim"]]
    node.api.available = True
    await node.api.store.changes.wait_until(
        lambda: (node.pod_object("a") or {})["status"]["phase"] == "Succeeded", SOON
    )


async def test_deletion_that_was_requested_while_the_kubelet_was_down_is_carried_out(
    node: DraNode, driver: TinyDriver
) -> None:
    node.claim()
    pod = await node.run(claiming())
    await node.kubelet.stop()
    node.api.delete(PODS, "a", "default", options={"gracePeriodSeconds": 1})
    await node.kubelet.start()
    await back(node, driver)
    await node.until(lambda: pod.gone)
    assert driver.unprepares == [["claim"]]


async def test_node_without_an_api_server_runs_no_pod_with_claims(short_tmp: Path) -> None:
    async with Kubelet(short_tmp, timings=timings()) as kubelet:
        with pytest.raises(ValueError, match="need an API server"):
            kubelet.create(claiming())
        with pytest.raises(RuntimeError, match="no API server"):
            await kubelet.submit(claiming(), SOON)
        with pytest.raises(RuntimeError, match="no API server"):
            _ = kubelet.dra


async def test_pod_bound_before_the_kubelets_first_start_is_run(short_tmp: Path) -> None:
    cluster = EmulatedApi()
    kubelet = Kubelet(short_tmp, timings=timings(), cluster=cluster)
    container = {"name": "main", "command": ["sleep"], "args": ["60"]}
    body = {
        "metadata": {"name": "a", "namespace": "default"},
        "spec": {"nodeName": "node-a", "containers": [container]},
    }
    cluster.create(PODS, body)
    async with kubelet:
        await kubelet.wait_until(lambda node: bool(node.pods) and node.pods[0].phase is PodPhase.RUNNING, SOON)
