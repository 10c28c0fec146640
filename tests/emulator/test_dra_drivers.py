"""Registration of DRA drivers, several instances, ResourceSlices of absent drivers, and the health of devices."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from plugin.api import dra_health_pb2 as health
from plugin.api import dra_v1_pb2 as api
from scrubber.emulator import ContainerSpec, EmulatedPod, PodSpec
from scrubber.emulator.cluster import Selection
from scrubber.emulator.cluster.resources import DEVICE_CLASSES, NODES, PODS, SLICES
from scrubber.emulator.dra.health import HealthCache
from tests.cluster.emulated import DRIVER
from tests.dra_emulation import V1, V1BETA1, DraNode, TinyDriver, claiming, dra_node, driving
from tests.emulation import SOON, TinyPlugin, deregistered, registered

HEALTHY, UNHEALTHY = health.HEALTHY, health.UNHEALTHY


class PlainDriver(TinyDriver):
    """Answers without CDI devices."""

    def answer(self, of: api.Claim) -> list[api.Device]:
        return [api.Device(pool_name="node-a", device_name=name) for name in self.devices.get(of.name, ["gpu-0"])]


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[DraNode]:
    async with dra_node(short_tmp) as running:
        yield running


# Registration


@pytest.mark.parametrize(
    ("offered", "used"),
    [([V1, V1BETA1], "v1"), ([V1BETA1, V1], "v1beta1"), (["v9.DRAPlugin", V1BETA1], "v1beta1")],
)
async def test_drivers_first_version_that_the_kubelet_knows_is_used(
    node: DraNode, offered: list[str], used: str
) -> None:
    node.claim()
    async with driving(node, PlainDriver(versions=offered)) as driver:
        pod = await node.run(claiming())
        await node.kubelet.delete(pod)
        assert driver.services == [used, used]


async def test_driver_without_a_known_version_is_notified_of_the_refusal(node: DraNode) -> None:
    driver = TinyDriver(versions=["v2.DRAPlugin"])
    await driver.start(node.kubelet)
    try:
        await node.until(lambda: driver.statuses)
        assert not driver.statuses[0].plugin_registered
        assert "invalid supported gRPC versions" in driver.statuses[0].error
    finally:
        await driver.stop()


async def test_instance_cannot_take_over_the_endpoint_of_another(node: DraNode) -> None:
    async with driving(node, instance="first") as first:
        thief = TinyDriver()
        await thief.start(node.kubelet, "thief", endpoint=first.endpoint)
        try:
            await node.until(lambda: thief.statuses)
            assert "already registered for DRA driver plugin" in thief.statuses[0].error
            assert node.kubelet.dra.plugins.instances(DRIVER) == [first.endpoint]
        finally:
            await thief.stop()


async def test_driver_that_cannot_be_notified_is_deregistered_and_registered_again(node: DraNode) -> None:
    driver = TinyDriver()
    driver.notify_fails = 1
    await driver.start(node.kubelet)
    try:
        await node.until(lambda: len(driver.statuses) == 2)
        await node.until(lambda: node.kubelet.dra.plugins.instances(DRIVER))
        assert [each.plugin_registered for each in driver.statuses] == [True, True]
    finally:
        await driver.stop()


async def test_removed_registration_socket_deregisters_the_driver(node: DraNode) -> None:
    async with driving(node) as driver:
        await driver.stop_registration()
        await node.until(lambda: deregistered(node.kubelet))
        assert node.kubelet.dra.plugins.instances(DRIVER) == []


async def test_newest_connected_instance_is_called(node: DraNode) -> None:
    node.publish("gpu-1", name="more", pool={"name": "more", "generation": 1, "resourceSliceCount": 1})
    for name in ("one", "two"):
        node.claim(name)
    plugins = node.kubelet.dra.plugins
    async with driving(node, PlainDriver(), "old") as old, driving(node, PlainDriver(), "new") as new:
        await node.until(lambda: plugins.connected(DRIVER) == [old.endpoint, new.endpoint])
        await node.run(claiming("a", "one"))
        assert (old.prepares, new.prepares) == ([], [["one"]])
        await new.stop_service()
        await node.until(lambda: plugins.connected(DRIVER) == [old.endpoint])
        assert plugins.instances(DRIVER) == [old.endpoint, new.endpoint]
        await node.run(claiming("b", "two"))
        assert (old.prepares, new.prepares) == ([["two"]], [["one"]])


async def test_device_plugins_and_drivers_register_side_by_side(node: DraNode) -> None:
    def allocatable() -> str | None:
        status = node.api.get(NODES, "node-a").get("status") or {}
        count: str | None = (status.get("allocatable") or {}).get("scrubber.dev/gpu")
        return count

    async with driving(node), registered(node.kubelet, TinyPlugin()):
        assert node.kubelet.dra.plugins.instances(DRIVER)
        assert await node.api.store.changes.wait_until(lambda: allocatable() == "2", SOON)


# Slices of absent drivers


def slices(node: DraNode) -> list[str]:
    return [each["metadata"]["name"] for each in node.api.list(SLICES)]


async def test_restarted_kubelet_deletes_the_nodes_slices_of_all_drivers(node: DraNode) -> None:
    node.publish("nic-0", driver="nic.dev", name="nics")
    node.publish("gpu-0", name="elsewhere", node="node-b")
    await node.kubelet.restart()
    await node.until(lambda: len(node.calls("SlicesDeleted")) == 2)
    assert slices(node) == ["elsewhere"]


async def test_deletion_of_slices_is_retried_until_the_api_server_is_back(node: DraNode) -> None:
    await node.kubelet.stop()
    node.api.available = False
    await node.kubelet.start()
    assert node.api.store.get(SLICES, "slice-0") is not None
    node.api.available = True
    await node.until(lambda: len(node.calls("SlicesDeleted")) == 2)
    assert slices(node) == []


async def test_driver_without_a_connection_loses_its_slices_after_a_while(short_tmp: Path) -> None:
    """Its registration is of no help: the socket in ``plugins_registry`` stays."""
    async with dra_node(short_tmp, slice_wipe_delay=1.0) as node, driving(node) as driver:
        await node.until(lambda: node.kubelet.dra.plugins.connected(DRIVER))
        node.api.delete_collection(SLICES, Selection())
        node.publish("gpu-0")
        node.publish("nic-0", driver="nic.dev", name="nics")
        await driver.stop_service()
        assert await node.api.store.changes.wait_until(lambda: slices(node) == ["nics"], SOON)
        assert node.kubelet.dra.plugins.instances(DRIVER) == [driver.endpoint]


async def test_driver_that_is_back_in_time_keeps_its_slices(node: DraNode) -> None:
    plugins = node.kubelet.dra.plugins
    async with driving(node) as driver:
        await node.until(lambda: plugins.connected(DRIVER))
        assert plugins.pending_deletions == set()
        await driver.stop()
        await node.until(lambda: not plugins.instances(DRIVER))
        assert plugins.pending_deletions == {DRIVER}
        await driver.start(node.kubelet)
        await node.until(lambda: plugins.connected(DRIVER))
        assert plugins.pending_deletions == set()
        assert slices(node) == ["slice-0"]


# Health


def shown(node: DraNode, pod: str = "a") -> dict[str, dict[str, str]]:
    """Return the health in the pod's status: resource → device → health."""
    found = node.pod_object(pod)
    statuses = ((found or {}).get("status") or {}).get("containerStatuses") or [{}]
    return {
        entry["name"]: {each["resourceID"]: each["health"] for each in entry["resources"]}
        for entry in statuses[0].get("allocatedResourcesStatus") or []
    }


async def becomes(node: DraNode, expected: dict[str, dict[str, str]]) -> None:
    assert await node.api.store.changes.wait_until(lambda: shown(node) == expected, SOON), shown(node)


async def test_health_of_a_claims_devices_appears_in_the_pods_status(node: DraNode) -> None:
    node.claim()
    async with driving(node, PlainDriver()) as driver:
        await node.run(claiming())
        device = f"{DRIVER}/node-a/gpu-0"
        await becomes(node, {"claim:claim": {device: "Unknown"}})
        await driver.report_health(gpu_0=HEALTHY)
        await becomes(node, {"claim:claim": {device: "Healthy"}})
        await driver.report_health(gpu_0=UNHEALTHY)
        await becomes(node, {"claim:claim": {device: "Unhealthy"}})


async def test_first_cdi_id_names_the_device_and_equal_ones_are_merged(node: DraNode) -> None:
    class SharedId(TinyDriver):
        def answer(self, of: api.Claim) -> list[api.Device]:
            node.cdi(of.uid, "all")
            ids = [f"scrubber.dev/claim={of.uid}-all"]
            names = ("gpu-0", "gpu-1")
            return [api.Device(pool_name="node-a", device_name=each, cdi_device_ids=ids) for each in names]

    uid = node.claim()["metadata"]["uid"]
    async with driving(node, SharedId()):
        await node.run(claiming(requests=["claim/main"]))
        await becomes(node, {"claim:claim/main": {f"scrubber.dev/claim={uid}-all": "Unknown"}})


async def test_health_message_is_shown_and_cut_at_1024_characters(node: DraNode) -> None:
    node.claim()
    async with driving(node, PlainDriver()) as driver:
        await node.run(claiming())
        await driver.report_health("x" * 2000, gpu_0=UNHEALTHY)

        def message() -> str:
            (status,) = (node.pod_object("a") or {})["status"]["containerStatuses"]
            return str(status["allocatedResourcesStatus"][0]["resources"][0].get("message", ""))

        assert await node.api.store.changes.wait_until(lambda: message() == "x" * 1021 + "...", SOON)


async def test_end_of_an_old_instances_stream_clears_what_the_new_one_sent(node: DraNode) -> None:
    node.claim()
    async with driving(node, PlainDriver(), "old") as old:
        await node.run(claiming())
        device = f"{DRIVER}/node-a/gpu-0"
        await old.report_health(gpu_0=HEALTHY)
        await becomes(node, {"claim:claim": {device: "Healthy"}})
        async with driving(node, PlainDriver(), "new") as new:
            await new.report_health(gpu_0=UNHEALTHY)
            await becomes(node, {"claim:claim": {device: "Unhealthy"}})
            await old.stop()  # the kubelet ignores the end of a stream that sent nothing
            await node.until(lambda: node.calls("HealthStreamEnded"))
            node.api.patch(PODS, "a", {"metadata": {"labels": {"any": "change"}}}, "default")
            await becomes(node, {"claim:claim": {device: "Unknown"}})
            await new.report_health(gpu_0=HEALTHY)
            await becomes(node, {"claim:claim": {device: "Healthy"}})


async def test_health_stream_is_tried_again_for_ever_with_a_driver_that_has_none(node: DraNode) -> None:
    async with driving(node, TinyDriver(has_health=False)):
        await node.until(lambda: len(node.calls("HealthStreamEnded")) >= 3)
        assert {each.outcome for each in node.calls("HealthStreamEnded")} == {"Unimplemented"}


async def test_extended_resources_show_no_health(node: DraNode) -> None:
    node.api.patch(DEVICE_CLASSES, "gpu", {"spec": {"extendedResourceName": "nvidia.com/gpu"}})
    async with driving(node, PlainDriver()) as driver:
        await driver.report_health(gpu_0=HEALTHY)
        main = ContainerSpec("main", ["sleep", "60"], {"nvidia.com/gpu": 1})
        pod: EmulatedPod = await node.run(PodSpec("a", containers=[main]))
        await node.api.store.changes.wait_until(
            lambda: (node.pod_object("a") or {})["status"]["phase"] == "Running", SOON
        )
        assert shown(node) == {}
        assert pod.claimed_resources("main") == {"nvidia.com/gpu"}


async def test_status_shows_no_health_while_the_gate_is_off(short_tmp: Path) -> None:
    async with (
        dra_node(short_tmp, gates={"ResourceHealthStatus": False}) as node,
        driving(node, PlainDriver()) as driver,
    ):
        node.claim()
        await driver.report_health(gpu_0=HEALTHY)
        await node.run(claiming())
        assert await node.api.store.changes.wait_until(
            lambda: (node.pod_object("a") or {})["status"]["phase"] == "Running", SOON
        )
        assert shown(node) == {}


def test_health_is_unknown_some_time_after_the_last_message() -> None:
    now = 0.0
    cache = HealthCache(30.0, lambda: now)

    def report(seconds: int = 0) -> set[tuple[str, str]]:
        place = health.DeviceIdentifier(pool_name="node-a", device_name="gpu-0")
        message = health.DeviceHealth(
            device=place, health=HEALTHY, health_check_timeout_seconds=seconds, last_updated_time=1
        )
        return cache.update(DRIVER, [message])

    assert report() == {("node-a", "gpu-0")}
    now = 29.0
    assert cache.get(DRIVER, "node-a", "gpu-0") == ("Healthy", "")
    assert report() == set()
    now = 59.0
    assert cache.get(DRIVER, "node-a", "gpu-0") == ("Unknown", "")
    report(5)
    now = 64.0
    assert cache.get(DRIVER, "node-a", "gpu-0") == ("Unknown", "")
    report(-5)
    now = 93.0
    assert cache.get(DRIVER, "node-a", "gpu-0") == ("Healthy", "")
