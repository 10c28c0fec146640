"""The plugin's request to yield the node: which labels lead to one, and when it is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from plugin.cluster.client import ApiServerClient
from plugin.cluster.deploy_labels import DeployLabels, parse_label_keys, yield_reason
from plugin.cluster.errors import ApiForbidden, ApiUnavailable
from plugin.logs import create_logger
from plugin.yield_sender import YieldSender
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.messages import MAX_REASON_CHARS
from scrubber.domain.errors import InvalidConfiguration, Unavailable
from scrubber.emulator.cluster import Silence
from scrubber.emulator.cluster.resources import NODES
from tests.cluster.plugin_server import PluginApiServer, kubeconfig
from tests.plugin_collaborators import Bell

CLIENT, PLUGIN = "nvidia.com/gpu.deploy.client", "nvidia.com/gpu.deploy.device-plugin"


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({}, ""),
        ({CLIENT: "true"}, ""),
        ({CLIENT: "true", "zone": "false"}, ""),
        ({CLIENT: "false"}, f"node label {CLIENT} is 'false'"),
        ({CLIENT: ""}, ""),
        (
            {CLIENT: "paused-for-driver-upgrade", PLUGIN: "false"},
            f"node label {CLIENT} is 'paused-for-driver-upgrade', {PLUGIN} is 'false'",
        ),
    ],
)
def test_label_with_another_value_than_true_is_a_reason_and_a_missing_one_is_not(
    labels: Mapping[str, str], reason: str
) -> None:
    assert yield_reason(labels, (CLIENT, PLUGIN)) == reason


def test_reason_of_many_labels_is_cut_to_what_the_service_accepts() -> None:
    keys = [f"example.com/label-{number}" for number in range(50)]
    reason = yield_reason(dict.fromkeys(keys, "false"), keys)
    assert (len(reason), reason[-1]) == (MAX_REASON_CHARS, "…")


def test_label_keys_are_separated_by_commas_and_checked() -> None:
    assert parse_label_keys(f" {CLIENT}, {PLUGIN},{CLIENT},") == (CLIENT, PLUGIN)
    assert parse_label_keys("") == ()
    with pytest.raises(InvalidConfiguration, match='"a/b/c" is not the key of a label'):
        parse_label_keys("a/b/c")


class Service:
    """A service that refuses the first requests."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.reasons: list[str] = []
        self.bell = Bell()

    async def set_yield(self, plugin: str, reason: str, timeout: float) -> pb.NodeYield:
        self.reasons.append(reason)
        self.bell.ring()
        if len(self.reasons) <= self.refusals:
            raise Unavailable("The service is away.")
        return pb.NodeYield()


def request(service: Service, reason: str | None = "") -> YieldSender:
    return YieldSender(service, "nvidia.com/gpu", reason, log=create_logger("json"), clock=time.monotonic)


async def test_request_that_failed_is_repeated_until_the_service_has_it() -> None:
    service = Service(refusals=1)
    sent = request(service, None)
    running = asyncio.create_task(sent.run())
    sent.on_snapshot(pb.Snapshot(epoch="first"))
    sent.set_reason("label is false")
    await service.bell.until(lambda: service.reasons == ["label is false"] * 2)
    running.cancel()


@pytest.mark.parametrize("reason", ["label is false", ""])
async def test_first_known_reason_is_sent_to_a_service_that_streams_no_snapshot_yet(reason: str) -> None:
    service = Service(refusals=1)
    sent = request(service, None)
    running = asyncio.create_task(sent.run())
    sent.set_reason(reason)
    await service.bell.until(lambda: service.reasons == [reason] * 2)
    running.cancel()


async def test_service_that_was_started_meanwhile_gets_the_request_again() -> None:
    service = Service()
    sent = request(service, "label is false")
    running = asyncio.create_task(sent.run())
    await service.bell.until(lambda: len(service.reasons) == 1)
    sent.on_snapshot(pb.Snapshot(epoch="second"))
    await service.bell.until(lambda: service.reasons == ["label is false"] * 2)
    running.cancel()


async def test_plugin_that_watches_no_label_withdraws_requests_of_earlier_ones_and_sends_nothing_else() -> None:
    service = Service()
    sent = request(service, "")
    running = asyncio.create_task(sent.run())
    await service.bell.until(lambda: service.reasons == [""])
    sent.on_snapshot(pb.Snapshot(epoch="first"))
    await asyncio.sleep(0)
    sent.on_snapshot(pb.Snapshot(epoch="first", yielded="an earlier plugin requested it"))
    await service.bell.until(lambda: len(service.reasons) > 1)
    assert service.reasons == ["", ""]
    running.cancel()


async def test_request_that_may_have_arrived_is_withdrawn_although_the_service_does_not_look_yielded_yet() -> None:
    service = Service()
    sent = request(service, "")
    running = asyncio.create_task(sent.run())
    await service.bell.until(lambda: service.reasons == [""])
    service.refusals = 2
    sent.set_reason("label is false")
    await service.bell.until(lambda: len(service.reasons) == 2)
    sent.set_reason("")
    await service.bell.until(lambda: service.reasons == ["", "label is false", ""])
    running.cancel()


class NodeWithShortWatches:
    """A :class:`plugin.cluster.deploy_labels.NodeLabels` whose watches end at once."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.bell = Bell()

    async def watch_labels(self) -> AsyncIterator[Mapping[str, str]]:
        self.starts.append(asyncio.get_running_loop().time())
        self.bell.ring()
        await asyncio.sleep(0)
        yield {CLIENT: "false"}

    async def close(self) -> None: ...


async def test_watch_that_ends_at_once_is_started_again_after_a_second_at_the_earliest() -> None:
    node = NodeWithShortWatches()
    reasons: list[str] = []
    labels = DeployLabels(
        lambda: node, (CLIENT,), reasons.append, log=create_logger("json"), clock=time.monotonic, jitter=lambda: 0.0
    )
    running = asyncio.create_task(labels.run())
    await node.bell.until(lambda: len(node.starts) == 2)
    assert node.starts[1] - node.starts[0] >= 1
    assert set(reasons) == {f"node label {CLIENT} is 'false'"}
    running.cancel()


async def test_service_keeps_its_request_while_the_labels_are_not_known_yet() -> None:
    service = Service()
    sent = request(service, None)
    running = asyncio.create_task(sent.run())
    sent.on_snapshot(pb.Snapshot(epoch="first", yielded="the label was paused"))
    await asyncio.sleep(0)
    sent.set_reason("label is paused")
    await service.bell.until(lambda: bool(service.reasons))
    assert service.reasons == ["label is paused"]
    running.cancel()


@pytest.fixture
async def server() -> AsyncIterator[PluginApiServer]:
    async with PluginApiServer() as api_server:
        api_server.add_node("node-1", zone="a")
        api_server.add_node("node-2", zone="b")
        api_server.role = {"watch nodes"}
        yield api_server


@pytest.fixture
async def client(server: PluginApiServer, tmp_path: Path) -> AsyncIterator[ApiServerClient]:
    api_client = ApiServerClient(kubeconfig(tmp_path, server.url), "node-1", deadline=20)
    yield api_client
    await api_client.close()


async def test_watch_yields_the_labels_of_this_node_now_and_after_each_change_of_them(
    server: PluginApiServer, client: ApiServerClient
) -> None:
    labels = client.watch_labels()
    assert await anext(labels) == {"zone": "a"}
    server.api.patch(NODES, "node-1", {"status": {"conditions": []}}, subresource="status")
    server.set_labels("node-2", {"zone": "c"})
    server.set_labels("node-1", {"zone": "d"})
    assert await anext(labels) == {"zone": "d"}


async def test_watch_that_is_refused_or_breaks_is_an_error_and_can_be_started_again(
    server: PluginApiServer, client: ApiServerClient
) -> None:
    server.role = frozenset()
    with pytest.raises(ApiForbidden, match="must allow it to get and watch nodes"):
        await anext(client.watch_labels())
    server.role = frozenset({"watch nodes"})
    server.intercept = lambda each: Silence.DROP
    with pytest.raises(ApiUnavailable):
        await anext(client.watch_labels())
    server.intercept = lambda each: None
    assert await anext(client.watch_labels()) == {"zone": "a"}
