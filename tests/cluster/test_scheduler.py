"""The emulated scheduler and claim controller: which device a claim gets, when it is free again, and for whom."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from scrubber.emulator.cluster import ControlPlane, EmulatedApi
from scrubber.emulator.cluster.allocator import Unallocatable, matches, quantity
from scrubber.emulator.cluster.resources import (
    CLAIM_TEMPLATES,
    CLAIMS,
    DEVICE_CLASSES,
    EVENTS,
    NAMESPACES,
    NODES,
    PODS,
    SLICES,
)
from scrubber.emulator.timings import ClusterTimings
from tests.cluster.emulated import DRIVER, SOON, Json, claim, device, device_status, node, slice_of

TAINT = {"key": "gpu.scrubber.dev/scrub-failed", "effect": "NoSchedule"}
EVICTING = TAINT | {"effect": "NoExecute"}
FAST = ClusterTimings(binding_poll=0.02, scheduling_back_off=0.05)


class Cluster:
    """A node, a device class ``gpu``, and shorthands for what the tests create and wait for."""

    def __init__(self) -> None:
        self.time = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
        self.api = EmulatedApi(now=lambda: self.time)
        self.api.create(NODES, node())
        selector = {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
        self.api.create(DEVICE_CLASSES, {"metadata": {"name": "gpu"}, "spec": {"selectors": [selector]}})

    def publish(self, *devices: str | Json, **more: Any) -> Json:
        bodies = [device(each) if isinstance(each, str) else each for each in devices]
        return self.api.create(SLICES, slice_of(*bodies, **more))

    def claim(self, name: str = "claim", **request: Any) -> Json:
        return self.api.create(CLAIMS, claim(name, **request))

    def pod(self, name: str, *claims: str, template: str = "", **spec: Any) -> Json:
        references = [{"name": each, "resourceClaimName": each} for each in claims]
        references += [{"name": "gpu", "resourceClaimTemplateName": template}] if template else []
        containers = [{"name": "main", "image": "none", "resources": {"limits": spec.pop("limits", {})}}]
        body = {"containers": containers, "resourceClaims": references, **spec}
        return self.api.create(PODS, {"metadata": {"name": name, "namespace": "default"}, "spec": body})

    def get_pod(self, name: str) -> Json:
        return self.api.get(PODS, name, "default")

    def get_claim(self, name: str = "claim") -> Json:
        return self.api.get(CLAIMS, name, "default")

    def devices(self, name: str = "claim") -> list[str]:
        """Return the names of the devices that a claim has."""
        allocation = (self.get_claim(name).get("status") or {}).get("allocation") or {"devices": {"results": []}}
        return [each["device"] for each in allocation["devices"]["results"]]

    def problem(self, name: str) -> str:
        """Return why a pod is not scheduled; empty when nothing was reported."""
        conditions = self.get_pod(name)["status"].get("conditions") or []
        return next((each["message"] for each in conditions if each["status"] == "False"), "")

    def finish(self, name: str, phase: str = "Succeeded") -> None:
        self.api.patch(PODS, name, {"status": {"phase": phase}}, "default", subresource="status")

    def force_delete(self, name: str) -> None:
        self.api.delete(PODS, name, "default", options={"gracePeriodSeconds": 0})

    def set_conditions(self, *conditions: str, claim: str = "claim") -> None:
        """Set conditions of the claim's only device to True."""
        entries = [
            {"type": each, "status": "True", "reason": "Set", "lastTransitionTime": self.api.timestamp()}
            for each in conditions
        ]
        (name,) = self.devices(claim)
        status = {"status": {"devices": [device_status(name, conditions=entries)]}}
        self.api.patch(CLAIMS, claim, status, "default", subresource="status")

    async def until(self, holds: Callable[[], Any]) -> None:
        assert await self.api.store.changes.wait_until(lambda: bool(holds()), SOON), "not in time"

    async def bound(self, name: str) -> str:
        """Wait until a pod is bound; return the node."""
        await self.until(lambda: self.get_pod(name)["spec"].get("nodeName"))
        return str(self.get_pod(name)["spec"]["nodeName"])

    async def refused(self, name: str) -> str:
        """Wait until a pod is reported as unschedulable; return why."""
        await self.until(lambda: self.problem(name))
        return self.problem(name)


async def settled() -> None:
    """Let every part of the control plane react to the last change."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    async with ControlPlane(made.api, FAST):
        yield made


# Allocation


async def test_pod_is_bound_after_its_claim_is_allocated_and_reserved(cluster: Cluster) -> None:
    cluster.publish("gpu-0")
    cluster.claim()
    pod = cluster.pod("a", "claim")
    assert await cluster.bound("a") == "node-a"
    found = cluster.get_claim()
    assert found["metadata"]["finalizers"] == ["resource.kubernetes.io/delete-protection"]
    assert found["status"]["reservedFor"] == [{"resource": "pods", "name": "a", "uid": pod["metadata"]["uid"]}]
    (result,) = found["status"]["allocation"]["devices"]["results"]
    assert result == {"request": "main", "driver": DRIVER, "pool": "node-a", "device": "gpu-0"}
    field = {"key": "metadata.name", "operator": "In", "values": ["node-a"]}
    assert found["status"]["allocation"]["nodeSelector"] == {"nodeSelectorTerms": [{"matchFields": [field]}]}


async def test_first_fit_follows_the_names_of_slices_then_the_order_of_devices(cluster: Cluster) -> None:
    pool = {"name": "node-a", "generation": 1, "resourceSliceCount": 2}
    cluster.publish("gpu-9", "gpu-1", name="b", pool=pool)
    cluster.publish("gpu-8", name="a", pool=pool)
    for name in "xyz":
        cluster.claim(name)
        cluster.pod(name, name)
        await cluster.bound(name)
    assert [cluster.devices(name) for name in "xyz"] == [["gpu-8"], ["gpu-9"], ["gpu-1"]]


async def test_pod_waits_until_enough_devices_are_published(cluster: Cluster) -> None:
    cluster.claim(count=2)
    cluster.pod("a", "claim")
    assert "cannot allocate all claims" in await cluster.refused("a")
    assert [each["reason"] for each in cluster.api.list(EVENTS)] == ["FailedScheduling"]
    cluster.publish("gpu-0", "gpu-1")
    await cluster.bound("a")
    assert cluster.devices() == ["gpu-0", "gpu-1"]


async def test_incomplete_pool_and_older_generations_are_not_used(cluster: Cluster) -> None:
    cluster.publish("gpu-0", name="a", pool={"name": "node-a", "generation": 1, "resourceSliceCount": 1})
    cluster.publish("gpu-1", name="b", pool={"name": "node-a", "generation": 2, "resourceSliceCount": 2})
    cluster.claim()
    cluster.pod("a", "claim")
    await cluster.refused("a")
    cluster.publish("gpu-2", name="c", pool={"name": "node-a", "generation": 2, "resourceSliceCount": 2})
    await cluster.bound("a")
    assert cluster.devices() == ["gpu-1"]


@pytest.mark.parametrize(
    "second",
    [device("gpu-0"), device("gpu-1", consumesCounters=[{"counterSet": "none", "counters": {"m": {"value": "1"}}}])],
)
async def test_duplicate_name_or_unknown_counter_spoils_the_pool(cluster: Cluster, second: Json) -> None:
    pool = {"name": "node-a", "generation": 1, "resourceSliceCount": 2}
    cluster.publish("gpu-0", name="a", pool=pool)
    cluster.publish(second, name="b", pool=pool)
    cluster.claim()
    cluster.pod("a", "claim")
    await cluster.refused("a")


@pytest.mark.parametrize("taint", [TAINT, EVICTING])
async def test_device_with_a_taint_is_chosen_only_with_a_toleration(cluster: Cluster, taint: Json) -> None:
    cluster.publish(device("gpu-0", taints=[taint]), "gpu-1")
    cluster.claim("plain")
    cluster.claim("tolerant", tolerations=[{"key": taint["key"], "operator": "Exists"}])
    cluster.pod("a", "plain")
    await cluster.bound("a")
    cluster.pod("b", "tolerant")
    await cluster.bound("b")
    assert (cluster.devices("plain"), cluster.devices("tolerant")) == (["gpu-1"], ["gpu-0"])


async def test_taint_of_effect_none_blocks_no_pod(cluster: Cluster) -> None:
    cluster.publish(device("gpu-0", taints=[TAINT | {"effect": "None"}]))
    cluster.claim()
    cluster.pod("a", "claim")
    await cluster.bound("a")


async def test_admin_access_takes_no_device_but_is_stopped_by_taints(cluster: Cluster) -> None:
    label = {"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}}
    cluster.api.patch(NAMESPACES, "default", label)
    cluster.publish("gpu-0", device("gpu-1", taints=[TAINT]))
    cluster.claim("tenant")
    cluster.claim("admin", adminAccess=True)
    cluster.claim("every", adminAccess=True, allocationMode="All")
    for name in ("tenant", "admin"):
        cluster.pod(name, name)
        await cluster.bound(name)
    assert cluster.devices("tenant") == cluster.devices("admin") == ["gpu-0"]
    cluster.pod("every", "every")
    await cluster.refused("every")


async def test_first_available_alternative_is_named_in_the_result(cluster: Cluster) -> None:
    cluster.publish("gpu-0")
    body = claim()
    alternatives = [{"name": "many", "deviceClassName": "gpu", "count": 4}, {"name": "one", "deviceClassName": "gpu"}]
    body["spec"]["devices"]["requests"] = [{"name": "main", "firstAvailable": alternatives}]
    cluster.api.create(CLAIMS, body)
    cluster.pod("a", "claim")
    await cluster.bound("a")
    (result,) = cluster.get_claim()["status"]["allocation"]["devices"]["results"]
    assert result["request"] == "main/one"


async def test_configuration_of_the_class_comes_before_that_of_the_claim(cluster: Cluster) -> None:
    opaque = {"opaque": {"driver": DRIVER, "parameters": {"level": "class"}}}
    cluster.api.patch(DEVICE_CLASSES, "gpu", {"spec": {"config": [opaque]}})
    cluster.publish("gpu-0")
    body = claim()
    body["spec"]["devices"]["config"] = [{"requests": ["main"], "opaque": {"driver": DRIVER, "parameters": {}}}]
    cluster.api.create(CLAIMS, body)
    cluster.pod("a", "claim")
    await cluster.bound("a")
    config = cluster.get_claim()["status"]["allocation"]["devices"]["config"]
    assert [each["source"] for each in config] == ["FromClass", "FromClaim"]
    assert config[0]["requests"] == ["main"]


async def test_instances_share_the_counters_of_their_device(cluster: Cluster) -> None:
    pool = {"name": "node-a", "generation": 1, "resourceSliceCount": 2}
    counters = {"name": "gpu-0", "counters": {"memory": {"value": "80Gi"}}}
    cluster.publish(name="a", pool=pool, sharedCounters=[counters])

    def part(name: str, memory: str) -> Json:
        return device(name, consumesCounters=[{"counterSet": "gpu-0", "counters": {"memory": {"value": memory}}}])

    cluster.publish(part("gpu-0-1g", "10Gi"), part("gpu-0", "80Gi"), part("gpu-0-4g", "40Gi"), name="b", pool=pool)
    for name in ("one", "two", "three"):
        cluster.claim(name)
        cluster.pod(name, name)
    await cluster.bound("two")
    await cluster.refused("three")
    assert (cluster.devices("one"), cluster.devices("two")) == (["gpu-0-1g"], ["gpu-0-4g"])


async def test_unsupported_selector_is_reported_and_not_ignored(cluster: Cluster) -> None:
    cluster.publish("gpu-0")
    cluster.claim(selectors=[{"cel": {"expression": "device.attributes.exists(x, true)"}}])
    cluster.pod("a", "claim")
    assert "is not supported by this scheduler" in await cluster.refused("a")


DEVICE = device(
    "gpu-0",
    attributes={"model": {"string": "H200"}, "other.dev/ecc": {"bool": True}, "index": {"int": 3}},
    capacity={"memory": {"value": "141Gi"}},
)


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        (f'device.driver == "{DRIVER}" && device.attributes["{DRIVER}"].model == "H200"', True),
        (f"device.attributes['{DRIVER}'].model != 'H100'", True),
        ('device.attributes["other.dev"].ecc', True),
        ('device.attributes["other.dev"].ecc == false', False),
        (f'device.attributes["{DRIVER}"].index == 3', True),
        (f'device.attributes["{DRIVER}"].missing == "x"', False),
        (f'device.capacity["{DRIVER}"].memory.compareTo(quantity("80Gi")) >= 0', True),
        (f'device.capacity["{DRIVER}"].memory.compareTo(quantity("151G")) > 0', True),
        (f'device.capacity["{DRIVER}"].memory.compareTo(quantity("152G")) > 0', False),
    ],
)
def test_selectors_compare_driver_attributes_and_capacity(expression: str, holds: bool) -> None:
    assert matches(expression, DRIVER, DEVICE) is holds


def test_quantities_are_exact() -> None:
    values = [str(quantity(text)) for text in ("1500m", "2k", "1Ki", "1e3")]
    assert values == ["1.500", "2E+3", "1024", "1E+3"]
    with pytest.raises(Unallocatable):
        quantity("many")


# Sharing, templates, the end of claims


async def test_claim_is_shared_by_several_pods_and_free_after_the_last(cluster: Cluster) -> None:
    cluster.publish("gpu-0")
    cluster.claim()
    for name in ("a", "b"):
        cluster.pod(name, "claim")
        await cluster.bound(name)
    assert [each["name"] for each in cluster.get_claim()["status"]["reservedFor"]] == ["a", "b"]
    cluster.finish("a")
    await cluster.until(lambda: len(cluster.get_claim()["status"]["reservedFor"]) == 1)
    assert cluster.devices() == ["gpu-0"]
    cluster.finish("b", "Failed")
    await cluster.until(lambda: not cluster.devices())
    await cluster.until(lambda: "finalizers" not in cluster.get_claim()["metadata"])


async def test_claim_of_a_template_lives_as_long_as_its_pod(cluster: Cluster) -> None:
    cluster.publish("gpu-0")
    cluster.api.create(
        CLAIM_TEMPLATES, {"metadata": {"name": "one", "namespace": "default"}, "spec": {"spec": claim()["spec"]}}
    )
    pod = cluster.pod("a", template="one")
    await cluster.bound("a")
    (status,) = cluster.get_pod("a")["status"]["resourceClaimStatuses"]
    made = cluster.get_claim(status["resourceClaimName"])
    assert made["metadata"]["name"].startswith("a-gpu-")
    assert made["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
    cluster.finish("a")
    await cluster.until(lambda: cluster.api.find(CLAIMS, status["resourceClaimName"], "default") is None)


async def test_device_is_free_for_the_next_claim_at_once_after_a_forced_deletion(cluster: Cluster) -> None:
    cluster.publish("gpu-0")
    cluster.claim("first")
    cluster.claim("second")
    cluster.pod("a", "first")
    await cluster.bound("a")
    cluster.pod("b", "second")
    await cluster.refused("b")
    cluster.force_delete("a")
    await cluster.bound("b")
    assert (cluster.devices("first"), cluster.devices("second")) == ([], ["gpu-0"])


async def test_terminating_pod_keeps_its_devices(cluster: Cluster) -> None:
    cluster.publish("gpu-0")
    cluster.claim()
    cluster.pod("a", "claim")
    await cluster.bound("a")
    cluster.api.delete(PODS, "a", "default")
    cluster.claim("second")
    cluster.pod("b", "second")
    await cluster.refused("b")
    assert cluster.devices() == ["gpu-0"]


# Taints that evict


async def test_pod_is_evicted_when_its_device_gets_a_taint(cluster: Cluster) -> None:
    cluster.publish("gpu-0")
    cluster.claim()
    cluster.pod("a", "claim")
    await cluster.bound("a")
    cluster.api.patch(SLICES, "slice-0", {"spec": {"devices": [device("gpu-0", taints=[EVICTING])]}})
    await cluster.until(lambda: "deletionTimestamp" in cluster.get_pod("a")["metadata"])
    (reason,) = [each for each in cluster.get_pod("a")["status"]["conditions"] if each["type"] == "DisruptionTarget"]
    assert reason["reason"] == "DeletionByDeviceTaintManager"


async def test_toleration_seconds_count_from_the_time_of_the_taint(cluster: Cluster) -> None:
    cluster.publish("gpu-0")
    cluster.claim(tolerations=[{"key": EVICTING["key"], "operator": "Exists", "tolerationSeconds": 60}])
    cluster.pod("a", "claim")
    await cluster.bound("a")
    added = (cluster.time - timedelta(seconds=59)).isoformat()
    cluster.api.patch(
        SLICES, "slice-0", {"spec": {"devices": [device("gpu-0", taints=[EVICTING | {"timeAdded": added}])]}}
    )
    await settled()
    assert "deletionTimestamp" not in cluster.get_pod("a")["metadata"]
    cluster.time += timedelta(seconds=2)
    cluster.api.patch(NODES, "node-a", {"metadata": {"labels": {"any": "change"}}})
    await cluster.until(lambda: "deletionTimestamp" in cluster.get_pod("a")["metadata"])


# Binding conditions


def dirty(name: str) -> Json:
    return device(name, bindingConditions=["Clean"], bindingFailureConditions=["ScrubFailed"])


async def test_pod_is_bound_when_all_binding_conditions_hold(cluster: Cluster) -> None:
    cluster.publish(dirty("gpu-0"))
    cluster.claim()
    cluster.pod("a", "claim")
    await cluster.until(cluster.devices)
    (result,) = cluster.get_claim()["status"]["allocation"]["devices"]["results"]
    assert (result["bindingConditions"], result["bindingFailureConditions"]) == (["Clean"], ["ScrubFailed"])
    assert "nodeName" not in cluster.get_pod("a")["spec"]
    cluster.set_conditions("Clean")
    await cluster.bound("a")
    cluster.pod("b", "claim")
    await cluster.bound("b")


async def test_pools_with_binding_conditions_are_the_last_choice(cluster: Cluster) -> None:
    cluster.publish(dirty("gpu-0"), name="a", pool={"name": "dirty", "generation": 1, "resourceSliceCount": 1})
    cluster.publish("gpu-1", name="b", pool={"name": "ready", "generation": 1, "resourceSliceCount": 1})
    cluster.claim()
    cluster.pod("a", "claim")
    await cluster.bound("a")
    assert cluster.devices() == ["gpu-1"]


async def test_failed_binding_frees_the_device_which_is_chosen_again(cluster: Cluster) -> None:
    cluster.publish(dirty("gpu-0"))
    cluster.claim()
    cluster.pod("a", "claim")
    await cluster.until(cluster.devices)
    cluster.set_conditions("Clean", "ScrubFailed")
    await cluster.until(lambda: "claim binding failed" in cluster.problem("a"))
    await cluster.until(lambda: cluster.devices() == ["gpu-0"])
    assert "devices" not in cluster.get_claim()["status"]
    assert "nodeName" not in cluster.get_pod("a")["spec"]


async def test_binding_times_out_after_ten_minutes(cluster: Cluster) -> None:
    cluster.publish(dirty("gpu-0"))
    cluster.claim()
    cluster.pod("a", "claim")
    await cluster.until(cluster.devices)
    cluster.time += timedelta(seconds=599)
    await settled()
    assert cluster.problem("a") == ""
    cluster.time += timedelta(seconds=1)
    assert "device binding timeout" in await cluster.refused("a")


# Extended resources


async def test_extended_resource_becomes_a_claim_of_the_pod(cluster: Cluster) -> None:
    cluster.api.patch(DEVICE_CLASSES, "gpu", {"spec": {"extendedResourceName": "nvidia.com/gpu"}})
    cluster.publish("gpu-0", "gpu-1")
    pod = cluster.pod("a", limits={"nvidia.com/gpu": "2"})
    await cluster.bound("a")
    status = cluster.get_pod("a")["status"]["extendedResourceClaimStatus"]
    made = cluster.get_claim(status["resourceClaimName"])
    assert made["metadata"]["name"].startswith("a-extended-resources-")
    assert made["metadata"]["annotations"] == {"resource.kubernetes.io/extended-resource-claim": "true"}
    assert made["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
    (mapping,) = status["requestMappings"]
    assert mapping == {
        "containerName": "main",
        "resourceName": "nvidia.com/gpu",
        "requestName": "container-0-request-0",
    }
    assert [each["request"] for each in made["status"]["allocation"]["devices"]["results"]] == [
        "container-0-request-0"
    ] * 2
    cluster.finish("a")
    await cluster.until(lambda: cluster.api.find(CLAIMS, status["resourceClaimName"], "default") is None)


async def test_implicit_extended_resource_names_its_class(cluster: Cluster) -> None:
    cluster.publish("gpu-0")
    cluster.pod("a", limits={"deviceclass.resource.kubernetes.io/gpu": "1"})
    await cluster.bound("a")


async def test_newest_class_of_an_extended_resource_wins(cluster: Cluster) -> None:
    cluster.api.patch(DEVICE_CLASSES, "gpu", {"spec": {"extendedResourceName": "nvidia.com/gpu"}})
    cluster.time += timedelta(seconds=1)
    spec = {
        "extendedResourceName": "nvidia.com/gpu",
        "selectors": [{"cel": {"expression": 'device.driver == "other"'}}],
    }
    cluster.api.create(DEVICE_CLASSES, {"metadata": {"name": "newer"}, "spec": spec})
    cluster.publish("gpu-0")
    cluster.pod("a", limits={"nvidia.com/gpu": "1"})
    await cluster.refused("a")


@pytest.mark.parametrize(("allocatable", "uses_dra"), [("1", False), ("0", True)])
async def test_node_without_allocatable_plugin_devices_falls_back_to_dra(
    cluster: Cluster, allocatable: str, uses_dra: bool
) -> None:
    cluster.api.patch(DEVICE_CLASSES, "gpu", {"spec": {"extendedResourceName": "nvidia.com/gpu"}})
    status = {"status": {"allocatable": {"nvidia.com/gpu": allocatable}}}
    cluster.api.patch(NODES, "node-a", status, subresource="status")
    cluster.publish("gpu-0")
    cluster.pod("a", limits={"nvidia.com/gpu": "1"})
    await cluster.bound("a")
    assert ("extendedResourceClaimStatus" in cluster.get_pod("a")["status"]) is uses_dra


async def test_plugin_devices_of_a_node_are_counted(cluster: Cluster) -> None:
    status = {"status": {"allocatable": {"nvidia.com/gpu": "1"}}}
    cluster.api.patch(NODES, "node-a", status, subresource="status")
    cluster.pod("a", limits={"nvidia.com/gpu": "1"})
    await cluster.bound("a")
    cluster.pod("b", limits={"nvidia.com/gpu": "1"})
    assert await cluster.refused("b") == "0 nodes are available: Insufficient nvidia.com/gpu"
