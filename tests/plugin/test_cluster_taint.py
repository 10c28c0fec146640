"""The taint of a node without a GPU in service: what is accepted, when it is written, and what is left alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plugin.cluster.client import ApiServerClient
from plugin.cluster.errors import ApiConflict, ApiUnavailable
from plugin.cluster.port import ClusterNode
from plugin.cluster.taint import NodeTaint, TaintEffect
from plugin.cluster.view import ClusterDevice, ClusterView, DeviceServiceStatus
from plugin.cluster.writers import TaintWriter, WriterTimes
from plugin.main import PluginSettings, run
from scrubber.domain.errors import InvalidConfiguration
from scrubber.emulator.cluster.resources import NODES
from tests.cluster.plugin_server import PluginApiServer, kubeconfig

TAINT = NodeTaint("scrubber.dev/no-gpu-in-service", "", TaintEffect.NO_SCHEDULE)
OTHER = {"key": "dedicated", "value": "gpu", "effect": "NoSchedule", "timeAdded": "2031-05-06T07:08:09Z"}
TIMES = WriterTimes()


def devices(*statuses: DeviceServiceStatus) -> ClusterView:
    return ClusterView(True, tuple(ClusterDevice(f"sim-{n}", each, False, "s") for n, each in enumerate(statuses)))


IN, OUT, CONDEMNED, UNVERIFIED = (
    DeviceServiceStatus.IN_SERVICE,
    DeviceServiceStatus.OUT_OF_SERVICE,
    DeviceServiceStatus.CONDEMNED,
    DeviceServiceStatus.UNVERIFIED,
)


@pytest.mark.parametrize(
    ("text", "taint"),
    [
        ("scrubber.dev/no-gpu-in-service:NoSchedule", TAINT),
        ("gpu=broken:NoExecute", NodeTaint("gpu", "broken", TaintEffect.NO_EXECUTE)),
        ("a.b/c_d.e=:PreferNoSchedule", NodeTaint("a.b/c_d.e", "", TaintEffect.PREFER_NO_SCHEDULE)),
        ("", None),
        ("off", None),
    ],
)
def test_taint_is_written_as_for_kubectl(text: str, taint: NodeTaint | None) -> None:
    assert NodeTaint.parse(text) == taint


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a:Never",
        ":NoSchedule",
        "a b:NoSchedule",
        "a=b c:NoSchedule",
        "A.b/c:NoSchedule",
        "a:noschedule",
        "a=b=c:NoSchedule",
    ],
)
def test_invalid_taint_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfiguration, match="is not a taint"):
        NodeTaint.parse(text)


@pytest.mark.parametrize("key", ["node.kubernetes.io/unreachable", "kubernetes.io/x", "a.k8s.io/b"])
def test_taint_of_kubernetes_itself_is_refused(key: str) -> None:
    with pytest.raises(InvalidConfiguration, match="belongs to Kubernetes"):
        NodeTaint.parse(f"{key}:NoSchedule")


async def test_taint_without_cluster_reporting_is_refused(short_tmp: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="--taint needs --cluster-reporting"):
        await run(PluginSettings(kubelet_dir=short_tmp, socket=short_tmp, taint=TAINT))


@pytest.mark.parametrize(
    ("view", "none_in_service"),
    [
        (devices(OUT, CONDEMNED), True),
        (devices(OUT, IN), False),
        (devices(OUT, UNVERIFIED), False),
        (devices(), None),
        (replace(devices(OUT), yielded=True), False),
        (ClusterView(True, yielded=True), False),
        (devices(OUT).without_service(), None),
        (ClusterView(), None),
    ],
)
def test_node_counts_as_without_gpus_only_if_a_service_says_so(view: ClusterView, none_in_service: bool | None) -> None:
    assert view.none_in_service is none_in_service


class NodeTaints:
    """A node's taints, and how often they were replaced."""

    def __init__(self, *taints: Mapping[str, Any]) -> None:
        self.taints: Sequence[Mapping[str, Any]] = taints
        self.writes = 0
        self.raises: list[Exception] = []

    async def get_node(self) -> ClusterNode:
        if self.raises:
            raise self.raises.pop(0)
        return ClusterNode(None, None, {}, tuple(self.taints), str(self.writes))

    async def replace_taints(self, taints: Sequence[Mapping[str, Any]], resource_version: str) -> None:
        if self.raises:
            raise self.raises.pop(0)
        assert resource_version == str(self.writes)
        self.taints, self.writes = tuple(taints), self.writes + 1


def writer(node: NodeTaints) -> TaintWriter:
    return TaintWriter(node, TAINT, times=TIMES)


async def test_taint_appears_with_the_last_gpu_out_of_service_and_disappears_with_the_first_one_back() -> None:
    node = NodeTaints(OTHER)
    duty = writer(node)
    assert duty.seconds_until_due(0) is None
    duty.update(devices(OUT, IN))
    await duty.write(0)  # it reads that there is no such taint
    assert (duty.seconds_until_due(0), node.writes) == (None, 0)
    duty.update(devices(OUT, OUT))
    assert duty.seconds_until_due(0) == 0
    await duty.write(0)
    assert list(node.taints) == [OTHER, TAINT.to_api()]
    assert duty.seconds_until_due(100) is None
    duty.update(devices(OUT, OUT).without_service())
    assert duty.seconds_until_due(100) is None  # unknown: the taint stays as it is
    duty.update(devices(IN, OUT))
    assert duty.seconds_until_due(1) == TIMES.spacing - 1
    await duty.write(TIMES.spacing)
    assert list(node.taints) == [OTHER]


async def test_taint_is_removed_while_the_node_is_yielded() -> None:
    node = NodeTaints(OTHER)
    duty = writer(node)
    duty.update(devices(OUT))
    await duty.write(0)
    assert list(node.taints) == [OTHER, TAINT.to_api()]
    duty.update(replace(devices(OUT), yielded=True))
    assert duty.seconds_until_due(TIMES.spacing) == 0
    await duty.write(TIMES.spacing)
    assert list(node.taints) == [OTHER]


async def test_taint_left_by_an_earlier_plugin_is_removed_whatever_its_value() -> None:
    node = NodeTaints({**TAINT.to_api(), "value": "old"}, {**TAINT.to_api(), "effect": "NoExecute"})
    duty = writer(node)
    duty.update(devices(IN))
    await duty.write(0)
    assert list(node.taints) == [{**TAINT.to_api(), "effect": "NoExecute"}]


async def test_taint_that_another_client_removed_is_restored() -> None:
    node = NodeTaints()
    duty = writer(node)
    duty.update(devices(OUT))
    await duty.write(0)
    node.taints = ()
    duty.on_node(await node.get_node())
    assert duty.seconds_until_due(TIMES.spacing) == 0
    await duty.write(TIMES.spacing)
    assert list(node.taints) == [TAINT.to_api()]


@pytest.mark.parametrize("error", [ApiUnavailable("away"), ApiConflict("changed")])
async def test_failed_write_of_the_taint_is_due_again(error: Exception) -> None:
    node = NodeTaints()
    duty = writer(node)
    duty.update(devices(OUT))
    node.raises = [error]
    with pytest.raises(type(error)):
        await duty.write(0)
    assert duty.seconds_until_due(0) == 0
    await duty.write(0)
    assert list(node.taints) == [TAINT.to_api()]


async def test_replaced_taints_keep_other_clients_taints_and_refuse_a_stale_node(tmp_path: Path) -> None:
    async with PluginApiServer() as server:
        server.add_node("node-1", zone="a")
        server.api.patch(NODES, "node-1", {"spec": {"taints": [OTHER]}})
        client = ApiServerClient(kubeconfig(tmp_path, server.url), "node-1", deadline=20)
        node = await client.get_node()
        await client.replace_taints([*node.taints, TAINT.to_api()], node.resource_version)
        assert server.node("node-1")["spec"]["taints"] == [OTHER, {"key": TAINT.key, "effect": "NoSchedule"}]
        assert server.labels("node-1") == {"zone": "a"}
        with pytest.raises(ApiConflict):
            await client.replace_taints([], node.resource_version)
        assert (await client.get_node()).taints == (OTHER, TAINT.to_api())
        await client.close()
