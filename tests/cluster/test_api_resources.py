"""The API server's rules for ResourceSlices and ResourceClaims: limits, permissions, taints, and feature gates."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from scrubber.emulator.cluster import Account, ApiServer, EmulatedApi
from tests.cluster.emulated import (
    CLAIMS,
    DRIVER,
    MERGE_PATCH,
    RESOURCE_V1,
    SLICES,
    Client,
    Json,
    allocation,
    allowed,
    claim,
    client_of,
    device,
    device_status,
    slice_of,
)

COUNTER = {"memory": {"value": "80Gi"}}
TAINT = {"key": "gpu.scrubber.dev/scrub-failed", "value": "yes", "effect": "NoSchedule"}


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as running:
        yield running


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[Client]:
    async with client_of(server) as admin:
        yield admin


def devices(count: int, **more: Any) -> list[Json]:
    return [device(f"gpu-{number}", **more) for number in range(count)]


def attributes(count: int) -> Json:
    return {f"a{number}": {"int": number} for number in range(count)}


def spec(**changes: Any) -> Json:
    """Return a slice with parts of its spec replaced; None removes one."""
    body = slice_of(device("gpu-0"))
    body["spec"] = {key: value for key, value in (body["spec"] | changes).items() if value is not None}
    return body


# Slices


@pytest.mark.parametrize(
    "body",
    [
        slice_of(*devices(128)),
        slice_of(*devices(64, taints=[TAINT])),
        slice_of(*devices(128, bindingConditions=["a"], bindingFailureConditions=["b"])),
        slice_of(*devices(64, consumesCounters=[{"counterSet": "gpu-0", "counters": COUNTER}])),
        slice_of(
            device("g" * 63, attributes=attributes(30), capacity={"memory": {"value": "80Gi"}, "x": {"value": "1"}})
        ),
        slice_of(device("gpu-0", taints=[TAINT | {"key": f"k{number}"} for number in range(16)])),
        slice_of(device("gpu-0", attributes={f"{'d' * 63}/{'i' * 32}": {"string": "s" * 64}})),
        slice_of(device("gpu-0", attributes={"driver": {"version": "580.65.6"}, "ecc": {"bool": True}})),
        slice_of(sharedCounters=[{"name": f"gpu-{n}", "counters": COUNTER} for n in range(8)]),
        spec(nodeName=None, allNodes=True),
        spec(pool={"name": "a/b.c", "generation": 0, "resourceSliceCount": 3}),
    ],
)
async def test_slice_within_the_limits_is_accepted(client: Client, body: Json) -> None:
    assert (await client.send("POST", SLICES, body))["spec"].keys() == body["spec"].keys()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (slice_of(*devices(129)), "spec.devices"),
        (slice_of(*devices(64), device("tainted", taints=[TAINT])), "spec.devices"),
        (
            slice_of(*devices(64), device("part", consumesCounters=[{"counterSet": "a", "counters": COUNTER}])),
            "spec.devices",
        ),
        (slice_of(device("GPU-0")), "spec.devices[0].name"),
        (slice_of(device("0000:3b:00.0")), "spec.devices[0].name"),
        (slice_of(device("g" * 64)), "spec.devices[0].name"),
        (slice_of(device("")), "spec.devices[0].name"),
        (slice_of(device("gpu-0"), device("gpu-0")), "spec.devices[1].name"),
        (slice_of(device("gpu-0", attributes=attributes(33))), "spec.devices[0]"),
        (slice_of(device("gpu-0", attributes=attributes(32), capacity={"m": {"value": "1"}})), "spec.devices[0]"),
        (slice_of(device("gpu-0", attributes={"pci-root": {"int": 1}})), "spec.devices[0].attributes"),
        (slice_of(device("gpu-0", attributes={"i" * 33: {"int": 1}})), "spec.devices[0].attributes"),
        (slice_of(device("gpu-0", attributes={f"{'d' * 64}/id": {"int": 1}})), "spec.devices[0].attributes"),
        (slice_of(device("gpu-0", attributes={"m": {"string": "s" * 65}})), "spec.devices[0].attributes[m].string"),
        (slice_of(device("gpu-0", attributes={"m": {"version": "580.65"}})), "spec.devices[0].attributes[m].version"),
        (slice_of(device("gpu-0", attributes={"m": {"int": 1, "bool": True}})), "spec.devices[0].attributes[m]"),
        (slice_of(device("gpu-0", attributes={"m": {}})), "spec.devices[0].attributes[m]"),
        (slice_of(device("gpu-0", capacity={"m": {"value": "80 GB"}})), "spec.devices[0].capacity[m].value"),
        (slice_of(device("gpu-0", taints=[TAINT] * 17)), "spec.devices[0].taints"),
        (slice_of(device("gpu-0", taints=[TAINT | {"effect": "Evict"}])), "spec.devices[0].taints[0].effect"),
        (slice_of(device("gpu-0", taints=[TAINT | {"key": "a b"}])), "spec.devices[0].taints[0].key"),
        (slice_of(device("gpu-0", taints=[TAINT | {"value": "a b"}])), "spec.devices[0].taints[0].value"),
        (slice_of(device("gpu-0", bindingConditions=["a"])), "spec.devices[0].bindingFailureConditions"),
        (
            slice_of(device("gpu-0", bindingConditions=[*"abcde"], bindingFailureConditions=["f"])),
            "spec.devices[0].bindingConditions",
        ),
        (
            slice_of(device("gpu-0", bindingConditions=["a"], bindingFailureConditions=["a"])),
            "spec.devices[0].bindingFailureConditions",
        ),
        (
            slice_of(device("gpu-0", consumesCounters=[{"counterSet": n, "counters": COUNTER} for n in "abc"])),
            "spec.devices[0].consumesCounters",
        ),
        (slice_of(device("gpu-0"), sharedCounters=[{"name": "a", "counters": COUNTER}]), "spec"),
        (slice_of(sharedCounters=[{"name": f"a{n}", "counters": COUNTER} for n in range(9)]), "spec.sharedCounters"),
        (
            slice_of(sharedCounters=[{"name": "a", "counters": {f"c{n}": {"value": "1"} for n in range(33)}}]),
            "spec.sharedCounters[0].counters",
        ),
        (spec(driver="d" * 64), "spec.driver"),
        (spec(driver="GPU.example.com"), "spec.driver"),
        (spec(pool={"name": "p" * 254, "generation": 1, "resourceSliceCount": 1}), "spec.pool.name"),
        (spec(pool={"name": "", "generation": 1, "resourceSliceCount": 1}), "spec.pool.name"),
        (spec(pool={"name": "a", "generation": 1, "resourceSliceCount": 0}), "spec.pool.resourceSliceCount"),
        (spec(pool={"name": "a", "generation": -1, "resourceSliceCount": 1}), "spec.pool.generation"),
        (spec(nodeName=None), "spec"),
        (spec(allNodes=True), "spec"),
    ],
)
async def test_slice_beyond_a_limit_is_invalid(client: Client, body: Json, field: str) -> None:
    refusal = await client.refused("POST", SLICES, body)
    assert (refusal.code, refusal.reason, refusal.fields) == (422, "Invalid", {field})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"driver": "other.dev"}, "spec.driver"),
        ({"pool": {"name": "other", "generation": 1, "resourceSliceCount": 1}}, "spec.pool.name"),
        ({"nodeName": "node-b"}, "spec.nodeName"),
    ],
)
async def test_driver_pool_and_node_of_a_slice_are_immutable(client: Client, change: Json, field: str) -> None:
    await client.send("POST", SLICES, slice_of())
    refusal = await client.refused("PATCH", f"{SLICES}/slice-0", {"spec": change}, kind=MERGE_PATCH)
    assert (refusal.code, refusal.fields) == (422, {field})


async def test_time_of_a_taint_is_filled_at_every_write_that_lacks_it(client: Client) -> None:
    made = await client.send("POST", SLICES, slice_of(device("gpu-0", taints=[TAINT])))
    assert made["spec"]["devices"][0]["taints"][0]["timeAdded"] == made["metadata"]["creationTimestamp"]
    kept = TAINT | {"timeAdded": "2026-01-01T00:00:00Z"}
    written = await client.send(
        "PUT", f"{SLICES}/slice-0", slice_of(device("gpu-0", taints=[kept, TAINT | {"key": "b"}]))
    )
    times = [each["timeAdded"] for each in written["spec"]["devices"][0]["taints"]]
    assert times[0] == "2026-01-01T00:00:00Z"
    assert times[1] >= made["metadata"]["creationTimestamp"]


@pytest.mark.parametrize(
    ("gate", "field", "value"),
    [
        ("DRADeviceTaints", "taints", [TAINT]),
        ("DRAPartitionableDevices", "consumesCounters", [{"counterSet": "a", "counters": COUNTER}]),
        ("DRADeviceBindingConditions", "bindingConditions", ["a"]),
        ("DRAConsumableCapacity", "allowMultipleAllocations", True),
    ],
)
async def test_fields_of_a_gate_that_is_off_are_dropped_without_an_error(gate: str, field: str, value: Any) -> None:
    more = {field: value} | ({"bindingFailureConditions": ["b"]} if field == "bindingConditions" else {})
    for enabled in (True, False):
        async with ApiServer(EmulatedApi(gates={gate: enabled})) as server, client_of(server) as client:
            made = await client.send("POST", SLICES, slice_of(device("gpu-0", **more)))
            assert (field in made["spec"]["devices"][0]) is enabled


async def test_list_attributes_are_off_by_default() -> None:
    body = slice_of(device("gpu-0", attributes={"links": {"ints": [1, 2]}}))
    async with ApiServer() as server, client_of(server) as client:
        assert (await client.refused("POST", SLICES, body)).fields == {"spec.devices[0].attributes[links]"}
    async with ApiServer(EmulatedApi(gates={"DRAListTypeAttributes": True})) as server, client_of(server) as client:
        await client.send("POST", SLICES, body)


def test_unknown_gate_is_refused() -> None:
    with pytest.raises(ValueError, match="DRAEverything"):
        EmulatedApi(gates={"DRAEverything": True})


# Types and names of fields


@pytest.mark.parametrize(
    "body",
    [
        spec(devices={"gpu-0": {}}),
        spec(devices=["gpu-0"]),
        spec(pool={"name": "a", "generation": "1", "resourceSliceCount": 1}),
        spec(pool={"name": "a", "generation": 1.5, "resourceSliceCount": 1}),
        spec(pool={"name": "a", "generation": True, "resourceSliceCount": 1}),
        spec(driver=7),
        slice_of(device("gpu-0", attributes=["a"])),
        slice_of(device("gpu-0", attributes={"a": {"int": "3"}})),
        slice_of(device("gpu-0", attributes={"a": "H200"})),
        slice_of(device("gpu-0", taints=[TAINT | {"key": None, "value": 1}])),
        slice_of(device("gpu-0", bindingConditions="Clean")),
        slice_of() | {"metadata": {"name": "a", "labels": {"index": 1}}},
        slice_of() | {"metadata": {"name": "a", "ownerReferences": ["node-a"]}},
    ],
)
async def test_field_of_a_wrong_type_is_a_bad_request(client: Client, body: Json) -> None:
    refusal = await client.refused("POST", SLICES, body)
    assert (refusal.code, refusal.reason) == (400, "BadRequest")
    assert "cannot be handled as a ResourceSlice: json: cannot unmarshal" in refusal.message


async def test_field_that_does_not_exist_is_dropped_without_an_error(client: Client) -> None:
    made = await client.send("POST", SLICES, slice_of(device("gpu-0", taint=[TAINT]), nodeNames=["a"]))
    assert made["spec"] == slice_of(device("gpu-0"))["spec"]
    await client.send("POST", CLAIMS, claim())
    await status(client, allocation=allocation("gpu-0"))
    written = await status(client, devices=[device_status(data={"free": {"form": [1]}}, certificate="none")])
    assert written["status"]["devices"] == [device_status(data={"free": {"form": [1]}})]


@pytest.mark.parametrize("path", [SLICES, CLAIMS])
async def test_object_without_a_spec_is_invalid_or_empty_but_never_an_internal_error(client: Client, path: str) -> None:
    response = await client.request("POST", path, {"metadata": {"name": "a"}})
    assert response.status_code == (422 if path == SLICES else 201)


# Claims


async def test_spec_of_a_claim_is_immutable(client: Client) -> None:
    await client.send("POST", CLAIMS, claim())
    assert (await client.refused("PUT", f"{CLAIMS}/claim", claim(count=2))).fields == {"spec"}


async def test_request_has_one_form(client: Client) -> None:
    body = claim()
    body["spec"]["devices"]["requests"][0]["firstAvailable"] = [{"name": "a", "deviceClassName": "gpu"}]
    assert (await client.refused("POST", CLAIMS, body)).code == 422


async def test_more_than_eight_alternatives_are_invalid(client: Client) -> None:
    body = claim()
    alternatives = [{"name": f"a{number}", "deviceClassName": "gpu"} for number in range(9)]
    body["spec"]["devices"]["requests"] = [{"name": "main", "firstAvailable": alternatives}]
    refusal = await client.refused("POST", CLAIMS, body)
    assert refusal.fields == {"spec.devices.requests[0].firstAvailable"}


async def test_admin_access_needs_a_label_of_the_namespace(client: Client) -> None:
    body = claim(adminAccess=True)
    assert (await client.refused("POST", CLAIMS, body)).causes == ["FieldValueForbidden"]
    label = {"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}}
    await client.send("PATCH", "/api/v1/namespaces/default", label, kind=MERGE_PATCH)
    await client.send("POST", CLAIMS, body)


async def status(client: Client, *, method: str = "PATCH", **fields: Any) -> Json:
    return await client.send(method, f"{CLAIMS}/claim/status", {"status": fields}, kind=MERGE_PATCH)


async def test_allocation_of_a_claim_is_immutable_until_it_is_removed(client: Client) -> None:
    await client.send("POST", CLAIMS, claim())
    await status(client, allocation=allocation("gpu-0"))
    body = {"status": {"allocation": allocation("gpu-1")}}
    assert (await client.refused("PATCH", f"{CLAIMS}/claim/status", body, kind=MERGE_PATCH)).code == 422
    await status(client, allocation=None)
    await status(client, allocation=allocation("gpu-1"))


async def test_claim_is_reserved_only_while_it_is_allocated(client: Client) -> None:
    await client.send("POST", CLAIMS, claim())
    body = {"status": {"reservedFor": [{"resource": "pods", "name": "p", "uid": "1"}]}}
    refusal = await client.refused("PATCH", f"{CLAIMS}/claim/status", body, kind=MERGE_PATCH)
    assert refusal.fields == {"status.reservedFor"}


async def test_claim_is_reserved_for_at_most_256_pods(client: Client) -> None:
    await client.send("POST", CLAIMS, claim())
    pods = [{"resource": "pods", "name": f"p{number}", "uid": str(number)} for number in range(257)]
    body = {"status": {"allocation": allocation("gpu-0"), "reservedFor": pods}}
    refusal = await client.refused("PATCH", f"{CLAIMS}/claim/status", body, kind=MERGE_PATCH)
    assert refusal.fields == {"status.reservedFor"}
    body["status"]["reservedFor"] = pods[:256]
    await client.send("PATCH", f"{CLAIMS}/claim/status", body, kind=MERGE_PATCH)


async def test_device_status_of_an_unallocated_claim_is_dropped(client: Client) -> None:
    await client.send("POST", CLAIMS, claim())
    assert "devices" not in (await status(client, devices=[device_status()]))["status"]


async def test_device_status_disappears_with_the_allocation(client: Client) -> None:
    await client.send("POST", CLAIMS, claim())
    await status(client, allocation=allocation("gpu-0"))
    assert (await status(client, devices=[device_status(data={"a": 1})]))["status"]["devices"]
    assert (await status(client, allocation=None))["status"] == {}


CONDITION = {"type": "Clean", "status": "True", "reason": "Scrubbed", "lastTransitionTime": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        (device_status("gpu-1"), "status.devices[0]"),
        (device_status(data=["not", "an", "object"]), "status.devices[0].data"),
        (device_status(data={"text": "x" * 10_240}), "status.devices[0].data"),
        (
            device_status(conditions=[CONDITION | {"type": f"t{number}"} for number in range(9)]),
            "status.devices[0].conditions",
        ),
        (device_status(conditions=[CONDITION | {"reason": ""}]), "status.devices[0].conditions[0].reason"),
        (device_status(conditions=[CONDITION | {"status": "yes"}]), "status.devices[0].conditions[0].status"),
        (device_status(networkData={"ips": ["10.0.0.1"]}), "status.devices[0].networkData.ips[0]"),
        (device_status(networkData={"ips": ["10.0.0.1/24"] * 17}), "status.devices[0].networkData.ips"),
        (device_status(networkData={"interfaceName": "e" * 257}), "status.devices[0].networkData.interfaceName"),
        (device_status(networkData={"hardwareAddress": "e" * 129}), "status.devices[0].networkData.hardwareAddress"),
    ],
)
async def test_device_status_beyond_a_limit_is_invalid(client: Client, entry: Json, field: str) -> None:
    await client.send("POST", CLAIMS, claim())
    await status(client, allocation=allocation("gpu-0"))
    body = {"status": {"devices": [entry]}}
    refusal = await client.refused("PATCH", f"{CLAIMS}/claim/status", body, kind=MERGE_PATCH)
    assert (refusal.code, refusal.fields) == (422, {field})


# Permissions of a claim's status (ResourceClaimGranularStatusAuthorization)


STATUS = ("get resourceclaims", "patch resourceclaims/status")
OWN = "associated-node:patch resourceclaims/driver"


async def allocated(client: Client, node: str = "node-a") -> None:
    await client.send("POST", CLAIMS, claim())
    await status(client, allocation=allocation("gpu-0", node=node))


@pytest.mark.parametrize(
    ("rules", "node", "code"),
    [
        (allowed(*STATUS), "node-a", 422),
        (allowed(*STATUS, OWN, names={OWN: [DRIVER]}), "node-a", 200),
        (allowed(*STATUS, OWN, names={OWN: ["other.dev"]}), "node-a", 422),
        (allowed(*STATUS, OWN), "node-b", 422),
        (allowed(*STATUS, OWN), "", 422),
        (allowed(*STATUS, "associated-node:update resourceclaims/driver"), "node-a", 422),
        (allowed(*STATUS, "arbitrary-node:patch resourceclaims/driver"), "", 200),
        (allowed("get resourceclaims", OWN), "node-a", 403),
    ],
)
async def test_driver_needs_its_permission_on_the_claims_node(
    server: ApiServer, client: Client, rules: list[Json], node: str, code: int
) -> None:
    await allocated(client)
    async with client_of(server, Account("driver", rules, node)) as driver:
        body = {"status": {"devices": [device_status(data={})]}}
        response = await driver.request("PATCH", f"{CLAIMS}/claim/status", body, kind=MERGE_PATCH)
        assert response.status_code == code
        if code == 422:
            assert response.json()["reason"] == "Invalid"
            assert [each["reason"] for each in response.json()["details"]["causes"]] == ["FieldValueForbidden"]


async def test_driver_may_not_change_allocation_or_reservations(server: ApiServer, client: Client) -> None:
    await allocated(client)
    async with client_of(server, Account("driver", allowed(*STATUS, OWN), "node-a")) as driver:
        for field in ({"allocation": None}, {"reservedFor": [{"resource": "pods", "name": "p", "uid": "1"}]}):
            refusal = await driver.refused("PATCH", f"{CLAIMS}/claim/status", {"status": field}, kind=MERGE_PATCH)
            assert (refusal.code, refusal.causes) == (422, ["FieldValueForbidden"])
            assert "resourceclaims/binding" in refusal.message


async def test_permission_of_the_driver_is_not_required_while_the_gate_is_off() -> None:
    api = EmulatedApi(gates={"DRAResourceClaimGranularStatusAuthorization": False})
    async with ApiServer(api) as server, client_of(server) as client:
        await allocated(client)
        async with client_of(server, Account("driver", allowed(*STATUS))) as driver:
            await status(driver, devices=[device_status()])


async def test_classes_are_listed(client: Client) -> None:
    body = {"metadata": {"name": "gpu"}, "spec": {"extendedResourceName": "example.com/gpu"}}
    await client.send("POST", f"{RESOURCE_V1}/deviceclasses", body)
    (item,) = (await client.send("GET", f"{RESOURCE_V1}/deviceclasses"))["items"]
    assert item["spec"]["extendedResourceName"] == "example.com/gpu"
