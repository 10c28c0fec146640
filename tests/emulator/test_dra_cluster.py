"""A node, a control plane and a driver that meet over HTTP only, as on a real cluster."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from plugin.api import dra_v1_pb2 as api
from scrubber.emulator import ContainerSpec, Kubelet, PodClaim, PodPhase, PodSpec, RestartPolicy
from scrubber.emulator.cluster import ApiServer, ControlPlane
from scrubber.emulator.podobjects import pod_object, pod_spec
from scrubber.emulator.timings import ClusterTimings
from tests.cluster.emulated import (
    CLAIMS,
    MERGE_PATCH,
    NODES,
    PODS,
    RESOURCE_V1,
    SLICES,
    SOON,
    Client,
    claim,
    client_of,
    device_status,
    slice_of,
)
from tests.cluster.emulated import device as slice_device
from tests.dra_emulation import TinyDriver
from tests.emulation import timings


class PlainDriver(TinyDriver):
    """Answers without CDI devices."""

    def answer(self, of: api.Claim) -> list[api.Device]:
        return [api.Device(pool_name="node-a", device_name="gpu-0")]


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as running, ControlPlane(running.api, ClusterTimings().scaled(0.02)):
        yield running


@pytest.fixture
async def kubelet(server: ApiServer, short_tmp: Path) -> AsyncIterator[Kubelet]:
    quick = timings(slice_wipe_delay=3600.0, dra_reconcile=3600.0)
    async with Kubelet(short_tmp, timings=quick, cluster=server.api) as running:
        await running.wait_until(lambda node: any(each.name == "SlicesDeleted" for each in node.events), SOON)
        yield running


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[Client]:
    async with client_of(server) as admin:
        yield admin


async def test_pod_with_a_claim_lives_from_its_creation_to_its_deletion_over_http(
    kubelet: Kubelet, client: Client
) -> None:
    driver = PlainDriver()
    await driver.start(kubelet)
    try:
        await client.send("POST", f"{RESOURCE_V1}/deviceclasses", {"metadata": {"name": "gpu"}, "spec": {}})
        assert (await client.send("GET", f"{NODES}/node-a"))["metadata"]["name"] == "node-a"
        await kubelet.wait_until(lambda node: bool(node.dra.plugins.connected(driver.name)), SOON)
        await client.send("POST", SLICES, slice_of(slice_device("gpu-0")))
        await client.send("POST", CLAIMS, claim())
        container = {
            "name": "main",
            "command": ["sleep", "60"],
            "resources": {"claims": [{"name": "gpu"}]},
        }
        body = {
            "metadata": {"name": "a"},
            "spec": {"containers": [container], "resourceClaims": [{"name": "gpu", "resourceClaimName": "claim"}]},
        }
        async with client.watch(PODS) as watch:
            await client.send("POST", PODS, body)
            phases = []
            while "Running" not in phases:
                phases.append((await watch.next())[1]["status"]["phase"])
            written = {"status": {"devices": [device_status(data={"certificate": "sha256:0"})]}}
            await client.send("PATCH", f"{CLAIMS}/claim/status", written, kind=MERGE_PATCH)
            await client.send("DELETE", f"{PODS}/a", {"gracePeriodSeconds": 1})
            while (await watch.next())[0] != "DELETED":
                pass
        assert (driver.prepares, driver.unprepares) == ([["claim"]], [["claim"]])
        async with client.watch(CLAIMS) as claims:
            status = (await claims.next())[1]["status"]
            while status.get("allocation"):
                status = (await claims.next())[1]["status"]
        assert "devices" not in status
    finally:
        await driver.stop()


async def test_driver_sees_the_deletion_of_its_slices_by_a_restarted_kubelet(kubelet: Kubelet, client: Client) -> None:
    async with client.watch(SLICES, fieldSelector="spec.nodeName=node-a") as watch:
        await client.send("POST", SLICES, slice_of(slice_device("gpu-0")))
        await kubelet.restart()
        assert await watch.names(2) == [("ADDED", "slice-0"), ("DELETED", "slice-0")]


async def test_force_deleted_pod_disappears_at_once(kubelet: Kubelet, client: Client) -> None:
    pod = await kubelet.submit(PodSpec("a", containers=[ContainerSpec("main", ["sleep", "60"])]), SOON)
    await pod.wait(PodPhase.RUNNING, SOON)
    await client.send("DELETE", f"{PODS}/a", {"gracePeriodSeconds": 0})
    assert (await client.refused("GET", f"{PODS}/a")).code == 404
    await kubelet.wait_until(lambda _: pod.gone, SOON)


async def test_log_of_a_container_is_read_through_the_api_server(kubelet: Kubelet, client: Client) -> None:
    body = {"containers": [{"name": "main", "command": ["sh", "-c", "echo $((20 + 22))"]}], "restartPolicy": "Never"}
    await client.send("POST", PODS, {"metadata": {"name": "pending"}, "spec": {**body, "nodeSelector": {"a": "b"}}})
    assert (await client.refused("GET", f"{PODS}/pending/log")).code == 400
    await client.send("POST", PODS, {"metadata": {"name": "a"}, "spec": body})
    await kubelet.wait_until(lambda node: [each.phase for each in node.pods] == [PodPhase.SUCCEEDED], SOON)
    response = await client.request("GET", f"{PODS}/a/log", container="main")
    assert (response.text, response.headers["Content-Type"]) == ("42\n", "text/plain")
    assert (await client.refused("GET", f"{PODS}/a/log", container="other")).code == 400
    assert (await client.refused("GET", f"{PODS}/b/log")).code == 404


async def test_kubelet_continues_after_an_outage_of_the_api_server(
    server: ApiServer, kubelet: Kubelet, client: Client
) -> None:
    spec = PodSpec("a", containers=[ContainerSpec("main", ["sh", "-c", "while [ ! -e die ]; do sleep 0.01; done"])])
    pod = await kubelet.submit(spec, SOON)
    await pod.wait(PodPhase.RUNNING, SOON)
    async with server.away():
        (pod.container_root("main") / "die").touch()
        await pod.wait(PodPhase.SUCCEEDED, SOON)
    async with client.watch(PODS) as watch:
        status = (await watch.next())[1]["status"]
        while status["phase"] != "Succeeded":
            status = (await watch.next())[1]["status"]
    assert status["containerStatuses"][0]["state"] == {"terminated": {"exitCode": 0, "reason": "Completed"}}


def test_pod_is_read_back_as_it_was_written() -> None:
    main = ContainerSpec(
        "main", ["a", "b"], {"example.com/gpu": 2}, {"KEY": "value"}, RestartPolicy.ALWAYS, ("gpu/main",)
    )
    sidecar = ContainerSpec("init", ["c"], restart=RestartPolicy.ALWAYS)
    claims = [PodClaim("gpu", claim="mine"), PodClaim("other", template="one")]
    spec = PodSpec("a", "team", [main], [sidecar], True, claims, {"l": "1"}, {"a": "2"})
    assert pod_spec(pod_object(spec, "node-a")) == spec


def test_pod_of_a_user_gets_the_defaults_of_kubernetes() -> None:
    item = {
        "metadata": {"name": "a", "namespace": "default"},
        "spec": {
            "containers": [{"name": "main", "resources": {"limits": {"cpu": "500m"}}}],
            "initContainers": [{"name": "i"}],
        },
    }
    read = pod_spec(item)
    assert (read.containers[0].argv, read.containers[0].resources) == (["sleep", "infinity"], {})
    assert [each.restart for each in (*read.containers, *read.init_containers)] == [
        RestartPolicy.ALWAYS,
        RestartPolicy.ON_FAILURE,
    ]


def test_container_cannot_use_a_claim_that_the_pod_does_not_have() -> None:
    with pytest.raises(ValueError, match="claims that the pod does not have"):
        PodSpec("a", containers=[ContainerSpec("main", ["true"], claims=["gpu/main"])])
    with pytest.raises(ValueError, match="either a claim or a template"):
        PodClaim("gpu", "claim", "template")
