"""Evictions, leases, events, custom resources and access reviews of the emulated API server, and answers set by tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from scrubber.emulator.cluster import Account, ApiFault, ApiServer, HttpResponse, ResourceType, Silence
from scrubber.emulator.cluster.access import ACCESS_REVIEWS
from scrubber.emulator.cluster.resources import PODS as PODS_KIND
from tests.cluster.emulated import (
    MERGE_PATCH,
    NODES,
    PODS,
    SOON,
    STRATEGIC_PATCH,
    Client,
    allowed,
    client_of,
    node,
    pod,
)

BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
WIDGETS = ResourceType("example.com", "widgets", "Widget", False, has_status=True, version="v1alpha1", custom=True)
WIDGET_PATH = "/apis/example.com/v1alpha1/widgets"


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as running:
        yield running


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[Client]:
    async with client_of(server) as admin:
        yield admin


def eviction(name: str, **options: Any) -> dict[str, Any]:
    return {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}, "deleteOptions": options}


async def running_pods(server: ApiServer, client: Client, *names: str) -> None:
    for name in names:
        await client.send("POST", PODS, {**pod(name), "metadata": {"name": name, "labels": {"app": "train"}}})
        server.api.patch(PODS_KIND, name, {"status": {"phase": "Running"}}, "default", subresource="status")


@pytest.mark.parametrize(
    ("spec", "evictable"),
    [
        ({"selector": {}}, 2),
        ({"minAvailable": 2, "selector": {"matchLabels": {"app": "train"}}}, 1),
        ({"minAvailable": "100%", "selector": {}}, 0),
        ({"maxUnavailable": 1, "selector": {}}, 3),
        ({"maxUnavailable": 0, "selector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}}, 0),
        ({"maxUnavailable": 0, "selector": {"matchLabels": {"app": "web"}}}, 3),
    ],
)
async def test_budget_limits_the_evictions_of_running_pods(
    server: ApiServer, client: Client, spec: dict[str, Any], evictable: int
) -> None:
    names = ["a", "b", "c"]
    await running_pods(server, client, *names)
    await client.send("POST", BUDGETS, {"metadata": {"name": "keep"}, "spec": spec})
    codes = [(await client.request("POST", f"{PODS}/{each}/eviction", eviction(each))).status_code for each in names]
    assert codes == [201] * evictable + [429] * (3 - evictable)


async def test_budget_does_not_protect_a_pod_that_does_not_run(client: Client) -> None:
    await client.send("POST", PODS, pod("pending"))
    await client.send("POST", BUDGETS, {"metadata": {"name": "keep"}, "spec": {"maxUnavailable": 0, "selector": {}}})
    await client.send("POST", f"{PODS}/pending/eviction", eviction("pending"))


async def test_eviction_of_a_pod_with_two_budgets_is_answered_with_a_status_of_failure(
    server: ApiServer, client: Client
) -> None:
    await running_pods(server, client, "a")
    for name in ("one", "two"):
        await client.send("POST", BUDGETS, {"metadata": {"name": name}, "spec": {"selector": {}}})
    response = await client.request("POST", f"{PODS}/a/eviction", eviction("a"))
    assert (response.status_code, response.json()["status"], response.json()["code"]) == (201, "Failure", 500)
    await client.send("GET", f"{PODS}/a")


async def test_eviction_of_another_pod_than_the_one_meant_is_refused(server: ApiServer, client: Client) -> None:
    await running_pods(server, client, "a")
    assert (await client.refused("POST", f"{PODS}/a/eviction", eviction("b"))).code == 400
    wrong = eviction("a", preconditions={"uid": "of-an-earlier-pod"})
    assert (await client.refused("POST", f"{PODS}/a/eviction", wrong)).code == 409


@pytest.mark.parametrize(
    ("time", "code"),
    [("2031-05-06T07:08:09.000001Z", 201), ("2031-05-06T07:08:09Z", 400), ("2031-05-06T07:08:09.1Z", 400), (7, 400)],
)
async def test_times_of_a_lease_have_microseconds(client: Client, time: object, code: int) -> None:
    lease = {"metadata": {"name": "a"}, "spec": {"holderIdentity": "me", "renewTime": time}}
    assert (await client.request("POST", LEASES, lease)).status_code == code


@pytest.mark.parametrize(
    ("about", "namespace", "code"), [("default", "default", 201), ("", "default", 201), ("kube-system", "default", 422)]
)
async def test_event_is_in_the_namespace_of_its_object(client: Client, about: str, namespace: str, code: int) -> None:
    event = {"metadata": {"name": "e"}, "involvedObject": {"kind": "Pod", "name": "p", "namespace": about}}
    response = await client.request("POST", f"/api/v1/namespaces/{namespace}/events", event)
    assert response.status_code == code


async def test_custom_resource_exists_while_it_is_installed(server: ApiServer, client: Client) -> None:
    assert (await client.refused("GET", WIDGET_PATH)).code == 404
    server.api.install(WIDGETS)
    await client.send("POST", WIDGET_PATH, {"metadata": {"name": "w"}, "spec": {"size": 1}, "status": {"done": True}})
    assert "status" not in await client.send("GET", f"{WIDGET_PATH}/w")
    await client.send("PATCH", f"{WIDGET_PATH}/w/status", {"status": {"done": True}}, kind=MERGE_PATCH)
    refusal = await client.refused("PATCH", f"{WIDGET_PATH}/w", {"spec": {}}, kind=STRATEGIC_PATCH)
    assert (refusal.code, "strategic" in refusal.message) == (415, False)
    server.api.uninstall(WIDGETS)
    assert (await client.refused("GET", f"{WIDGET_PATH}/w")).code == 404
    server.api.install(WIDGETS)
    assert (await client.send("GET", WIDGET_PATH))["items"] == []


async def test_access_review_says_what_the_role_of_its_account_allows(server: ApiServer) -> None:
    async with client_of(server, Account("driver", allowed("get nodes"))) as driver:
        answers = {}
        for verb in ("get", "delete"):
            review = {"spec": {"resourceAttributes": {"verb": verb, "resource": "nodes"}}}
            answers[verb] = (await driver.send("POST", ACCESS_REVIEWS, review))["status"]["allowed"]
        assert answers == {"get": True, "delete": False}
        assert (await driver.refused("POST", ACCESS_REVIEWS, {"spec": {}})).code == 422


async def test_request_whose_answer_is_lost_has_taken_effect(server: ApiServer, client: Client) -> None:
    server.inject(ApiFault(Silence.LOSE, verb="create", times=1))
    waiting = asyncio.create_task(client.request("POST", NODES, node()))
    assert await server.api.store.changes.wait_until(lambda: bool(server.log.requests), SOON)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})
    await client.send("GET", f"{NODES}/node-a")


async def test_answer_of_a_fault_replaces_the_operation(server: ApiServer, client: Client) -> None:
    fault = server.inject(ApiFault(HttpResponse(200, b"<html>", content_type="text/html")))
    assert (await client.request("POST", NODES, node())).text == "<html>"
    fault.answer = b"SSH-2.0-OpenSSH_9.2\r\n"
    with pytest.raises(httpx2.RemoteProtocolError):
        await client.request("POST", NODES, node())
    server.faults.clear()
    assert (await client.send("GET", NODES))["items"] == []


async def test_interceptor_sees_each_request_before_it_takes_effect(server: ApiServer, client: Client) -> None:
    seen: list[tuple[str, str, int]] = []
    server.intercept = lambda each: seen.append(
        (each.operation, each.body["metadata"]["name"], len(list(server.api.store.items(PODS_KIND))))
    )
    await client.send("POST", PODS, pod("a"))
    assert seen == [("create pods", "a", 0)]
