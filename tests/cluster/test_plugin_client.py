"""The plugin's own client with the emulated API server: every request that the plugin makes to a cluster."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from plugin.cluster.client import ApiServerClient
from plugin.cluster.credentials import Kubeconfig
from plugin.cluster.errors import ApiBusy, ApiConflict, ApiForbidden, ApiInvalidRequest, ApiNotFound, ApiUnavailable
from plugin.cluster.port import EventContent, EventTarget, LeaseState
from plugin.cluster.view import ConditionStatus, NodeCondition
from scrubber.emulator.cluster import Account, ApiFault, ApiServer, StatusError, too_many_requests, unauthorized
from scrubber.emulator.cluster.resources import EVENTS, NODES, PODS
from tests.cluster.emulated import SOON, allowed, node, pod

NOW = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
TAINT = {"key": "scrubber.dev/gpus", "value": "none", "effect": "NoSchedule"}


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as running:
        running.api.create(NODES, node(zone="a"))
        yield running


@pytest.fixture
async def client(server: ApiServer, tmp_path: Path) -> AsyncIterator[ApiServerClient]:
    async for made in client_of(server, tmp_path, Account("plugin")):
        yield made


async def client_of(server: ApiServer, directory: Path, account: Account) -> AsyncIterator[ApiServerClient]:
    path = server.write_kubeconfig(directory / "kubeconfig", server.add_account(account))
    client = ApiServerClient(Kubeconfig(path), "node-a", deadline=SOON)
    yield client
    await client.close()


async def test_condition_labels_and_taints_of_the_node_are_written(server: ApiServer, client: ApiServerClient) -> None:
    condition = NodeCondition(ConditionStatus.FALSE, "GpuOutOfService", "1 of 2 GPUs are in service.")
    assert (await client.patch_condition(condition, since=NOW, now=NOW)).status is ConditionStatus.FALSE
    await client.patch_labels({"scrubber.dev/gpus.clean": "1"})
    before = await client.get_node()
    await client.replace_taints([TAINT], before.resource_version)
    with pytest.raises(ApiConflict):
        await client.change_labels({"zone": None}, before.resource_version)
    after = await client.change_labels({"zone": None}, (await client.get_node()).resource_version)
    assert (dict(after.labels), after.taints) == ({"scrubber.dev/gpus.clean": "1"}, (TAINT,))
    assert server.log.counts(account="plugin")["patch nodes/status"] == 1


async def test_labels_of_the_node_are_watched(server: ApiServer, client: ApiServerClient) -> None:
    seen = []
    async with asyncio.timeout(SOON):
        async for labels in client.watch_labels():
            seen.append(labels.get("zone"))
            if len(seen) == 2:
                break
            server.api.patch(NODES, "node-a", {"metadata": {"labels": {"zone": "b"}}})
    assert seen == ["a", "b"]


async def test_events_and_leases_are_created_and_updated(server: ApiServer, client: ApiServerClient) -> None:
    target = EventTarget("Node", "node-a", "node-a")
    event = EventContent("node-a.abc", target, "GpuOutOfService", "A message.", is_warning=True)
    await client.create_event(event, NOW)
    assert await client.repeat_event(event, NOW, 2) == 2
    assert [each["count"] for each in server.api.list(EVENTS)] == [2]
    made = await client.create_lease("default", "pause", LeaseState("a", 30, NOW))
    updated = await client.update_lease("default", "pause", LeaseState("b", 30, NOW, 1, made.resource_version))
    assert await client.get_lease("default", "pause") == updated == LeaseState("b", 30, updated.renewed_at, 1)


async def test_pod_is_evicted_by_its_uid(server: ApiServer, client: ApiServerClient) -> None:
    made = pod("p", node="node-a")
    made["metadata"]["namespace"] = "default"
    uid = server.api.create(PODS, made)["metadata"]["uid"]
    with pytest.raises(ApiConflict):
        await client.evict_pod("default", "p", "other")
    await client.evict_pod("default", "p", uid)
    assert "deletionTimestamp" in server.api.get(PODS, "p", "default")["metadata"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (unauthorized(), ApiUnavailable),
        (StatusError(403, "Forbidden", "no"), ApiForbidden),
        (StatusError(404, "NotFound", "no"), ApiNotFound),
        (StatusError(409, "Conflict", "no"), ApiConflict),
        (StatusError(422, "Invalid", "no"), ApiInvalidRequest),
        (too_many_requests(7), ApiBusy),
    ],
)
async def test_injected_refusals_reach_the_client_as_its_errors(
    server: ApiServer, client: ApiServerClient, answer: StatusError, error: type[Exception]
) -> None:
    server.inject(ApiFault(answer, verb="get", resource="nodes", times=1))
    with pytest.raises(error) as raised:
        await client.get_node()
    assert getattr(raised.value, "retry_after", 0.0) == (7.0 if error is ApiBusy else 0.0)
    await client.get_node()


async def test_role_without_a_permission_is_forbidden(server: ApiServer, tmp_path: Path) -> None:
    async for client in client_of(server, tmp_path, Account("plugin", allowed("get nodes"))):
        await client.get_node()
        with pytest.raises(ApiForbidden, match='cannot patch resource "nodes"'):
            await client.patch_labels({"a": "b"})
