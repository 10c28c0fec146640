"""The emulated API server over HTTP: objects, conflicts, patches, watches, access, and failures on request."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from lightkube import AsyncClient
from lightkube.config.kubeconfig import KubeConfig
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.models.resource_v1 import Device, ResourcePool, ResourceSliceSpec
from lightkube.resources.core_v1 import Node, Pod
from lightkube.resources.resource_v1 import ResourceSlice

from scrubber.emulator.cluster import Account, ApiFault, ApiServer, Silence, too_many_requests, unauthorized
from scrubber.emulator.timings import ClusterTimings
from tests.cluster.emulated import (
    APPLY_PATCH,
    CLAIMS,
    JSON_PATCH,
    MERGE_PATCH,
    NODES,
    PODS,
    RESOURCE_V1,
    SLICES,
    SOON,
    STRATEGIC_PATCH,
    Client,
    allocation,
    allowed,
    claim,
    client_of,
    device,
    node,
    pod,
    slice_of,
)


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as running:
        yield running


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[Client]:
    async with client_of(server) as admin:
        yield admin


# Objects


async def test_created_object_gets_uid_version_and_time(client: Client) -> None:
    made = await client.send("POST", NODES, node())
    assert {"uid", "resourceVersion", "creationTimestamp"} <= made["metadata"].keys()
    assert await client.send("GET", f"{NODES}/node-a") == made


async def test_generated_names_differ(client: Client) -> None:
    body = slice_of() | {"metadata": {"generateName": "0-gpu-"}}
    names = {(await client.send("POST", SLICES, body))["metadata"]["name"] for _ in range(2)}
    assert len(names) == 2
    assert all(each.startswith("0-gpu-") and len(each) == 11 for each in names)


async def test_second_object_of_a_name_is_refused_as_already_existing(client: Client) -> None:
    await client.send("POST", NODES, node())
    refusal = await client.refused("POST", NODES, node())
    assert (refusal.code, refusal.reason, refusal.message) == (409, "AlreadyExists", 'nodes "node-a" already exists')


@pytest.mark.parametrize("method", ["GET", "DELETE", "PATCH", "PUT"])
async def test_missing_object_is_not_found(client: Client, method: str) -> None:
    body = {"PATCH": {}, "PUT": slice_of()}.get(method)
    refusal = await client.refused(method, f"{SLICES}/slice-0", body, kind=MERGE_PATCH if method == "PATCH" else "")
    assert (refusal.code, refusal.reason) == (404, "NotFound")
    assert refusal.message == 'resourceslices.resource.k8s.io "slice-0" not found'


async def test_object_in_a_missing_namespace_is_not_found(client: Client) -> None:
    body = claim() | {"metadata": {"name": "claim"}}
    refusal = await client.refused("POST", CLAIMS.replace("default", "nowhere"), body)
    assert (refusal.code, refusal.message) == (404, 'namespaces "nowhere" not found')


@pytest.mark.parametrize(
    "path", ["/apis/example.com/v1/widgets", f"{RESOURCE_V1}/widgets", f"{SLICES}/a/status", "/elsewhere"]
)
async def test_unknown_path_is_not_found(client: Client, path: str) -> None:
    assert (await client.refused("GET", path)).code == 404


@pytest.mark.parametrize(
    "body", [b"{", {"kind": "Pod"}, {"apiVersion": "resource.k8s.io/v1beta1", "metadata": {"name": "a"}}, []]
)
async def test_body_that_is_no_such_object_is_a_bad_request(client: Client, body: Any) -> None:
    assert (await client.refused("POST", SLICES, body)).code == 400


async def test_name_in_the_body_must_match_the_url(client: Client) -> None:
    made = await client.send("POST", SLICES, slice_of())
    assert (await client.refused("PUT", f"{SLICES}/slice-1", made)).code == 400


async def test_malformed_http_is_a_bad_request(server: ApiServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(b"GET \x00 nonsense\r\n\r\n")
    assert (await asyncio.wait_for(reader.readline(), SOON)).startswith(b"HTTP/1.1 400")
    writer.close()


async def test_version_and_resources_can_be_discovered(client: Client) -> None:
    assert (await client.send("GET", "/version"))["gitVersion"] == "v1.36.2"
    names = {each["name"] for each in (await client.send("GET", RESOURCE_V1))["resources"]}
    assert {"resourceclaims", "resourceslices", "deviceclasses"} <= names


# Updates, conflicts and generations


async def test_update_of_an_outdated_version_conflicts(client: Client) -> None:
    made = await client.send("POST", SLICES, slice_of())
    await client.send("PUT", f"{SLICES}/slice-0", made | {"spec": slice_of(device("gpu-0"))["spec"]})
    refusal = await client.refused("PUT", f"{SLICES}/slice-0", made | {"spec": slice_of(device("gpu-1"))["spec"]})
    assert (refusal.code, refusal.reason) == (409, "Conflict")
    assert "the object has been modified" in refusal.message


async def test_update_without_a_version_is_unconditional(client: Client) -> None:
    await client.send("POST", SLICES, slice_of())
    await client.send("PUT", f"{SLICES}/slice-0", slice_of(device("gpu-0")))


async def test_update_for_another_uid_conflicts(client: Client) -> None:
    made = await client.send("POST", SLICES, slice_of())
    made["metadata"] |= {"uid": "other"}
    assert (await client.refused("PUT", f"{SLICES}/slice-0", made)).code == 409


async def test_generation_counts_changes_of_the_spec_only(client: Client) -> None:
    made = await client.send("POST", SLICES, slice_of())
    labelled = await client.send("PATCH", f"{SLICES}/slice-0", {"metadata": {"labels": {"a": "b"}}}, kind=MERGE_PATCH)
    changed = await client.send("PUT", f"{SLICES}/slice-0", slice_of(device("gpu-0")))
    assert [each["metadata"]["generation"] for each in (made, labelled, changed)] == [1, 1, 2]


async def test_write_that_changes_nothing_keeps_the_version(client: Client) -> None:
    made = await client.send("POST", SLICES, slice_of())
    assert await client.send("PUT", f"{SLICES}/slice-0", slice_of()) == made


async def test_status_is_written_through_its_subresource_only(client: Client) -> None:
    await client.send("POST", NODES, node())
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    ignored = await client.send("PATCH", f"{NODES}/node-a", {"status": ready}, kind=MERGE_PATCH)
    assert "status" not in ignored
    body = {"status": ready, "spec": {"unschedulable": True}}
    written = await client.send("PATCH", f"{NODES}/node-a/status", body, kind=MERGE_PATCH)
    assert written["status"] == ready
    assert "spec" not in written


# Patches


async def test_merge_patch_sets_and_removes(client: Client) -> None:
    await client.send("POST", NODES, node(a="1", b="2"))
    patched = await client.send(
        "PATCH", f"{NODES}/node-a", {"metadata": {"labels": {"a": None, "c": "3"}}}, kind=MERGE_PATCH
    )
    assert patched["metadata"]["labels"] == {"b": "2", "c": "3"}


async def test_json_patch_applies_its_operations_in_order(client: Client) -> None:
    await client.send("POST", NODES, node(a="1"))
    operations = [
        {"op": "test", "path": "/metadata/labels/a", "value": "1"},
        {"op": "replace", "path": "/metadata/labels/a", "value": "2"},
        {"op": "copy", "from": "/metadata/labels/a", "path": "/metadata/labels/b~1c"},
        {"op": "add", "path": "/spec", "value": {"taints": []}},
        {"op": "add", "path": "/spec/taints/-", "value": {"key": "second"}},
        {"op": "add", "path": "/spec/taints/0", "value": {"key": "first"}},
        {"op": "move", "from": "/metadata/labels/a", "path": "/metadata/labels/d"},
    ]
    patched = await client.send("PATCH", f"{NODES}/node-a", operations, kind=JSON_PATCH)
    assert patched["metadata"]["labels"] == {"b/c": "2", "d": "2"}
    assert patched["spec"]["taints"] == [{"key": "first"}, {"key": "second"}]


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/metadata/labels/a", "value": "other"},
        {"op": "remove", "path": "/metadata/labels/missing"},
        {"op": "add", "path": "/metadata/finalizers/3", "value": "x"},
        {"op": "melt", "path": "/metadata"},
        {"op": "replace", "path": "metadata", "value": 1},
    ],
)
async def test_json_patch_that_cannot_be_applied_is_invalid_and_changes_nothing(
    client: Client, operation: dict[str, Any]
) -> None:
    made = await client.send("POST", NODES, node(a="1"))
    assert (await client.refused("PATCH", f"{NODES}/node-a", [operation], kind=JSON_PATCH)).code == 422
    assert await client.send("GET", f"{NODES}/node-a") == made


async def test_strategic_patch_merges_conditions_and_replaces_taints(client: Client) -> None:
    await client.send("POST", NODES, node() | {"spec": {"taints": [{"key": "old"}]}})
    path = f"{NODES}/node-a"
    for kind in ("Ready", "GpuClean"):
        await client.send(
            "PATCH",
            f"{path}/status",
            {"status": {"conditions": [{"type": kind, "status": "True"}]}},
            kind=STRATEGIC_PATCH,
        )
    body = {
        "status": {"conditions": [{"type": "GpuClean", "reason": "Scrubbed"}, {"type": "Ready", "$patch": "delete"}]}
    }
    patched = await client.send("PATCH", f"{path}/status", body, kind=STRATEGIC_PATCH)
    assert patched["status"]["conditions"] == [{"type": "GpuClean", "status": "True", "reason": "Scrubbed"}]
    patched = await client.send("PATCH", path, {"spec": {"taints": [{"key": "new"}]}}, kind=STRATEGIC_PATCH)
    assert patched["spec"]["taints"] == [{"key": "new"}]


async def test_patch_of_an_unknown_type_is_refused(client: Client) -> None:
    await client.send("POST", NODES, node())
    assert (await client.refused("PATCH", f"{NODES}/node-a", {}, kind="application/json")).code == 415


async def test_patch_with_an_outdated_version_conflicts(client: Client) -> None:
    await client.send("POST", NODES, node())
    body = {"metadata": {"resourceVersion": "1", "labels": {"a": "b"}}}
    assert (await client.refused("PATCH", f"{NODES}/node-a", body, kind=MERGE_PATCH)).code == 409


# Server-side apply


def configuration(**labels: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a", "labels": labels}}


async def test_apply_creates_then_replaces_what_the_manager_applied_before(client: Client) -> None:
    path = f"{NODES}/node-a"
    await client.send("PATCH", path, configuration(a="1", b="2"), kind=APPLY_PATCH, fieldManager="one")
    await client.send("PATCH", path, configuration(c="3"), kind=APPLY_PATCH, fieldManager="other")
    applied = await client.send("PATCH", path, configuration(a="4"), kind=APPLY_PATCH, fieldManager="one")
    assert applied["metadata"]["labels"] == {"a": "4", "c": "3"}


async def test_apply_of_another_managers_field_conflicts_unless_forced(client: Client) -> None:
    path = f"{NODES}/node-a"
    await client.send("PATCH", path, configuration(a="1"), kind=APPLY_PATCH, fieldManager="one")
    refusal = await client.refused("PATCH", path, configuration(a="2"), kind=APPLY_PATCH, fieldManager="other")
    assert (refusal.code, refusal.causes, refusal.fields) == (409, ["FieldManagerConflict"], {".metadata.labels.a"})
    forced = await client.send(
        "PATCH", path, configuration(a="2"), kind=APPLY_PATCH, fieldManager="other", force="true"
    )
    assert forced["metadata"]["labels"] == {"a": "2"}


async def test_apply_merges_device_statuses_of_several_drivers(server: ApiServer, client: Client) -> None:
    await client.send("POST", CLAIMS, claim())
    both = allocation("gpu-0")
    both["devices"]["results"] += allocation("nic-0", driver="nic.example.com")["devices"]["results"]
    await client.send("PATCH", f"{CLAIMS}/claim/status", {"status": {"allocation": both}}, kind=MERGE_PATCH)
    drivers = (("gpu.scrubber.dev", "gpu-0"), ("nic.example.com", "nic-0"))
    path = f"{CLAIMS}/claim/status"
    for driver, name in drivers:
        entry = {"driver": driver, "pool": "node-a", "device": name, "data": {"of": driver}}
        await client.send("PATCH", path, claim_status(devices=[entry]), kind=APPLY_PATCH, fieldManager=driver)
    written = await client.send("GET", f"{CLAIMS}/claim")
    assert {each["device"] for each in written["status"]["devices"]} == {"gpu-0", "nic-0"}
    applied = await client.send("PATCH", path, claim_status(), kind=APPLY_PATCH, fieldManager="nic.example.com")
    assert {each["device"] for each in applied["status"]["devices"]} == {"gpu-0"}


def claim_status(**status: Any) -> dict[str, Any]:
    """Return an apply configuration of the claim's status."""
    place = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "claim"}}
    return {**place, "status": status}


async def test_apply_without_a_field_manager_is_a_bad_request(client: Client) -> None:
    assert (await client.refused("PATCH", f"{NODES}/node-a", configuration(), kind=APPLY_PATCH)).code == 400


# Deletion


@pytest.mark.parametrize("precondition", [{"uid": "other"}, {"resourceVersion": "1"}])
async def test_deletion_under_a_false_precondition_conflicts(client: Client, precondition: dict[str, str]) -> None:
    made = await client.send("POST", SLICES, slice_of())
    refusal = await client.refused("DELETE", f"{SLICES}/slice-0", {"preconditions": precondition})
    assert (refusal.code, refusal.reason) == (409, "Conflict")
    true = {key: made["metadata"][key] for key in ("uid", "resourceVersion")}
    await client.send("DELETE", f"{SLICES}/slice-0", {"preconditions": true})
    assert (await client.refused("GET", f"{SLICES}/slice-0")).code == 404


async def test_object_with_a_finalizer_is_removed_with_its_last_finalizer(client: Client) -> None:
    body = claim()
    body["metadata"]["finalizers"] = ["resource.kubernetes.io/delete-protection"]
    await client.send("POST", CLAIMS, body)
    deleted = await client.send("DELETE", f"{CLAIMS}/claim")
    assert "deletionTimestamp" in deleted["metadata"]
    assert "deletionTimestamp" in (await client.send("GET", f"{CLAIMS}/claim"))["metadata"]
    await client.send("PATCH", f"{CLAIMS}/claim", {"metadata": {"finalizers": None}}, kind=MERGE_PATCH)
    assert (await client.refused("GET", f"{CLAIMS}/claim")).code == 404


async def test_pod_on_a_node_is_removed_only_when_its_grace_period_is_zero(client: Client) -> None:
    await client.send("POST", PODS, pod("p", node="node-a"))
    marked = await client.send("DELETE", f"{PODS}/p")
    assert marked["metadata"]["deletionGracePeriodSeconds"] == 30
    await client.send("DELETE", f"{PODS}/p", {"gracePeriodSeconds": 0})
    assert (await client.refused("GET", f"{PODS}/p")).code == 404


async def test_deleted_node_takes_the_slices_that_it_owns_with_it(client: Client) -> None:
    owner = await client.send("POST", NODES, node())
    reference = {"apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": owner["metadata"]["uid"]}
    owned = slice_of()
    owned["metadata"]["ownerReferences"] = [reference]
    await client.send("POST", SLICES, owned)
    await client.send("POST", SLICES, slice_of(name="slice-1"))
    await client.send("DELETE", f"{NODES}/node-a")
    assert [each["metadata"]["name"] for each in (await client.send("GET", SLICES))["items"]] == ["slice-1"]


async def test_namespace_is_gone_when_its_last_pod_is(client: Client) -> None:
    await client.send("POST", "/api/v1/namespaces", {"metadata": {"name": "team"}})
    pods = PODS.replace("default", "team")
    await client.send("POST", pods, pod("p", node="node-a"))
    await client.send("DELETE", "/api/v1/namespaces/team")
    assert (await client.send("GET", "/api/v1/namespaces/team"))["status"]["phase"] == "Terminating"
    assert "deletionTimestamp" in (await client.send("GET", f"{pods}/p"))["metadata"]
    await client.send("DELETE", f"{pods}/p", {"gracePeriodSeconds": 0})
    assert (await client.refused("GET", "/api/v1/namespaces/team")).code == 404


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"containers": []},
        {"containers": [{"image": "none"}]},
        {"containers": ["main"]},
        {"containers": [{"name": "main"}, {"name": "main"}]},
        {"containers": [{"name": "main", "resources": {"limits": {"example.com/gpu": "many"}}}]},
        {"containers": [{"name": "main", "resources": {"claims": [{"name": "gpu"}]}}]},
        {"containers": [{"name": "main"}], "resourceClaims": [{"name": "gpu"}]},
        {"containers": [{"name": "main"}], "restartPolicy": "Sometimes"},
    ],
)
async def test_pod_that_the_kubelet_could_not_run_is_invalid(client: Client, spec: dict[str, Any]) -> None:
    refusal = await client.refused("POST", PODS, {"metadata": {"name": "p"}, "spec": spec})
    assert (refusal.code, refusal.fields) == (422, {"spec"})


async def test_evicted_pod_is_deleted_gracefully(client: Client) -> None:
    await client.send("POST", PODS, pod("p", node="node-a"))
    await client.send("POST", f"{PODS}/p/eviction", {"metadata": {"name": "p"}})
    assert "deletionTimestamp" in (await client.send("GET", f"{PODS}/p"))["metadata"]


# Lists and selectors


async def test_list_of_slices_is_selected_by_node_and_driver(client: Client) -> None:
    for name, place, driver in (("a", "node-a", "x.dev"), ("b", "node-b", "x.dev"), ("c", "node-a", "y.dev")):
        await client.send("POST", SLICES, slice_of(name=name, node=place, driver=driver))
    listed = await client.send("GET", SLICES, fieldSelector="spec.nodeName=node-a,spec.driver!=y.dev")
    assert [each["metadata"]["name"] for each in listed["items"]] == ["a"]
    await client.send("DELETE", SLICES, fieldSelector="spec.nodeName=node-a")
    assert [each["metadata"]["name"] for each in (await client.send("GET", SLICES))["items"]] == ["b"]


async def test_unsupported_field_selector_is_a_bad_request(client: Client) -> None:
    refusal = await client.refused("GET", SLICES, fieldSelector="spec.pool.name=a")
    assert (refusal.code, "field label not supported: spec.pool.name" in refusal.message) == (400, True)


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("zone=a", ["one"]),
        ("zone!=a", ["three", "two"]),
        ("zone in (a, b),!spare", ["one"]),
        ("zone notin (a)", ["three", "two"]),
        ("zone,spare", ["two"]),
    ],
)
async def test_list_is_selected_by_labels(client: Client, selector: str, names: list[str]) -> None:
    for each in (node("one", zone="a"), node("two", zone="b", spare="yes"), node("three")):
        await client.send("POST", NODES, each)
    listed = await client.send("GET", NODES, labelSelector=selector)
    assert [each["metadata"]["name"] for each in listed["items"]] == names


async def test_list_in_pages_continues_where_it_stopped(client: Client, server: ApiServer) -> None:
    for name in "abc":
        await client.send("POST", NODES, node(name))
    first = await client.send("GET", NODES, limit="2")
    second = await client.send("GET", NODES, limit="2", **{"continue": first["metadata"]["continue"]})
    assert [each["metadata"]["name"] for page in (first, second) for each in page["items"]] == ["a", "b", "c"]
    assert "continue" not in second["metadata"]
    await client.send("POST", NODES, node("d"))
    server.api.store.compact()
    assert (await client.refused("GET", NODES, **{"continue": first["metadata"]["continue"]})).code == 410


# Watches


async def test_watch_without_a_version_begins_with_what_exists(client: Client) -> None:
    await client.send("POST", NODES, node())
    async with client.watch(NODES) as watch:
        assert await watch.names(1) == [("ADDED", "node-a")]
        await client.send("PATCH", f"{NODES}/node-a", {"metadata": {"labels": {"a": "b"}}}, kind=MERGE_PATCH)
        await client.send("DELETE", f"{NODES}/node-a")
        assert await watch.names(2) == [("MODIFIED", "node-a"), ("DELETED", "node-a")]


async def test_watch_from_a_version_shows_every_later_change(client: Client) -> None:
    made = await client.send("POST", NODES, node("a"))
    await client.send("POST", NODES, node("b"))
    await client.send("DELETE", f"{NODES}/a")
    async with client.watch(NODES, resourceVersion=made["metadata"]["resourceVersion"]) as watch:
        assert await watch.names(2) == [("ADDED", "b"), ("DELETED", "a")]


async def test_object_that_leaves_a_selection_is_shown_as_deleted(client: Client) -> None:
    await client.send("POST", NODES, node(zone="a"))
    async with client.watch(NODES, labelSelector="zone=a") as watch:
        await client.send("PATCH", f"{NODES}/node-a", {"metadata": {"labels": {"zone": "b"}}}, kind=MERGE_PATCH)
        await client.send("PATCH", f"{NODES}/node-a", {"metadata": {"labels": {"zone": "a"}}}, kind=MERGE_PATCH)
        assert await watch.names(3) == [("ADDED", "node-a"), ("DELETED", "node-a"), ("ADDED", "node-a")]


async def test_watch_from_a_compacted_version_ends_with_gone(client: Client, server: ApiServer) -> None:
    made = await client.send("POST", NODES, node("a"))
    await client.send("POST", NODES, node("b"))
    server.api.store.compact()
    async with client.watch(NODES, resourceVersion=made["metadata"]["resourceVersion"]) as watch:
        kind, status = await watch.next()
        assert (kind, status["code"], status["reason"]) == ("ERROR", 410, "Expired")
        assert await watch.ends()


async def test_bookmarks_bring_a_quiet_watch_to_the_present_version(client: Client, server: ApiServer) -> None:
    async with client.watch(SLICES, allowWatchBookmarks="true", sendInitialEvents="true") as watch:
        kind, initial = await watch.next()
        assert (kind, initial["metadata"]["annotations"]) == ("BOOKMARK", {"k8s.io/initial-events-end": "true"})
        made = await client.send("POST", NODES, node())
        server.send_bookmarks()
        kind, bookmark = await watch.next()
        assert (kind, bookmark["kind"]) == ("BOOKMARK", "ResourceSlice")
        assert bookmark["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


async def test_bookmarks_come_periodically() -> None:
    async with (
        ApiServer(timings=ClusterTimings(bookmark_period=0.01)) as server,
        client_of(server) as client,
        client.watch(SLICES, allowWatchBookmarks="true") as watch,
    ):
        assert (await watch.next())[0] == "BOOKMARK"


async def test_watch_ends_after_its_time(client: Client) -> None:
    async with client.watch(NODES, timeoutSeconds="0.01") as watch:
        assert await watch.ends()


async def test_watch_of_a_closed_connection_is_forgotten(client: Client, server: ApiServer) -> None:
    async with client.watch(NODES):
        assert len(server._connections) == 1
    await asyncio.wait_for(asyncio.gather(*server._connections), SOON)


# Access


async def test_unknown_token_is_unauthorized(server: ApiServer) -> None:
    async with client_of(server) as client:
        server.revoke(client.token)
        refusal = await client.refused("GET", NODES)
    assert (refusal.code, refusal.reason) == (401, "Unauthorized")


async def test_operation_outside_the_role_is_forbidden_with_the_missing_permission(server: ApiServer) -> None:
    account = Account("system:serviceaccount:gpu:driver", allowed("list resourceslices"))
    async with client_of(server, account) as client:
        await client.send("GET", SLICES)
        refusal = await client.refused("POST", SLICES, slice_of())
    assert (refusal.code, refusal.reason) == (403, "Forbidden")
    assert refusal.message == (
        'resourceslices.resource.k8s.io is forbidden: User "system:serviceaccount:gpu:driver" cannot create resource '
        '"resourceslices" in API group "resource.k8s.io" at the cluster scope'
    )


async def test_admission_policy_denies_with_unprocessable_entity(server: ApiServer, client: Client) -> None:
    def own_slices_only(operation: str, kind: Any, new: Any, old: Any, account: Account) -> str | None:
        if kind.plural != "resourceslices" or account.node == (new or old)["spec"]["nodeName"]:
            return None
        return "a driver writes the slices of its own node only"

    server.api.admission.append(own_slices_only)
    async with client_of(server, Account("driver", node="node-a")) as driver:
        await driver.send("POST", SLICES, slice_of())
        refusal = await driver.refused("POST", SLICES, slice_of(name="other", node="node-b"))
        assert (refusal.code, "its own node only" in refusal.message) == (422, True)
    assert (await client.refused("DELETE", f"{SLICES}/slice-0")).code == 422


# Failures on request


async def test_fault_meets_the_requests_that_it_names_as_often_as_set(server: ApiServer, client: Client) -> None:
    server.inject(ApiFault(too_many_requests(3), verb="create", resource="nodes", times=1))
    await client.send("GET", NODES)
    refusal = await client.refused("POST", NODES, node())
    assert (refusal.code, refusal.reason, refusal.retry_after) == (429, "TooManyRequests", "3")
    await client.send("POST", NODES, node())


async def test_fault_is_permanent_until_it_is_removed(server: ApiServer, client: Client) -> None:
    fault = server.inject(ApiFault(unauthorized()))
    assert [(await client.refused("GET", NODES)).code for _ in range(2)] == [401, 401]
    server.faults.remove(fault)
    await client.send("GET", NODES)


async def test_request_without_an_answer_is_logged_with_code_zero(server: ApiServer, client: Client) -> None:
    server.inject(ApiFault(Silence.DROP, times=1))
    with pytest.raises(httpx2.RemoteProtocolError):
        await client.request("GET", NODES)
    server.inject(ApiFault(Silence.HANG, times=1))
    hanging = asyncio.create_task(client.request("GET", NODES))
    for _ in range(6000):
        if len(server.log.requests) == 2:
            break
        await asyncio.sleep(0.01)
    assert not hanging.done()
    hanging.cancel()
    await asyncio.wait({hanging})
    assert [each.code for each in server.log.requests] == [0, 0]


async def test_server_that_is_away_refuses_connections_and_ends_watches(server: ApiServer, client: Client) -> None:
    await client.send("POST", NODES, node())
    async with client.watch(NODES, resourceVersion="0") as watch:
        await watch.next()
        async with server.away():
            with pytest.raises(httpx2.TransportError):
                await watch.next()
            with pytest.raises(httpx2.ConnectError):
                await client.request("GET", NODES)
    assert (await client.send("GET", f"{NODES}/node-a"))["metadata"]["name"] == "node-a"


async def test_log_counts_requests_by_operation(server: ApiServer, client: Client) -> None:
    await client.send("POST", SLICES, slice_of(device("gpu-0")))
    await client.request("PATCH", f"{CLAIMS}/missing/status", {}, kind=MERGE_PATCH)
    async with client.watch(SLICES) as watch:
        await watch.next()
    counts = server.log.counts(account="admin")
    assert counts == {"create resourceslices": 1, "patch resourceclaims/status": 1, "watch resourceslices": 1}
    (created,) = server.log.of("create resourceslices")
    assert created.code == 201
    assert created.received_bytes > 100
    assert created.sent_bytes > created.received_bytes
    assert server.log.counts(since=created.at + 3600) == {}


# The library of our own client


async def test_library_of_the_plugin_works_with_the_server(server: ApiServer, tmp_path: Path) -> None:
    path = server.write_kubeconfig(tmp_path / "kubeconfig", server.add_account())
    config = KubeConfig.from_file(path).get()
    assert config is not None
    client = AsyncClient(config, field_manager="driver", trust_env=False)
    await client.create(Node(metadata=ObjectMeta(name="node-a")))
    pool = ResourcePool(generation=1, name="node-a", resourceSliceCount=1)
    made = ResourceSlice(
        metadata=ObjectMeta(name="slice-0"),
        spec=ResourceSliceSpec(driver="gpu.scrubber.dev", pool=pool, nodeName="node-a", devices=[Device(name="gpu-0")]),
    )
    created = await client.create(made)
    assert created.metadata is not None
    created.spec.devices = [Device(name="gpu-1")]
    await client.replace(created)
    await client.patch(Node, "node-a", {"metadata": {"labels": {"a": "b"}}})
    await client.apply(Node(metadata=ObjectMeta(name="node-a", labels={"c": "d"})))
    listed = [each async for each in client.list(ResourceSlice, fields={"spec.nodeName": "node-a"})]
    assert [each.spec.devices for each in listed] == [[Device(name="gpu-1")]]
    assert [each async for each in client.list(Pod, namespace="*")] == []
    await client.delete(ResourceSlice, "slice-0")
    async for kind, item in client.watch(ResourceSlice, resource_version=created.metadata.resourceVersion):
        assert item.metadata is not None
        if kind == "DELETED":
            break
    await client.close()
