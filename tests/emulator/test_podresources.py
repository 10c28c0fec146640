"""The PodResources socket as the kubelet serves it: what it lists, what it omits, and when it gives no answer."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from plugin.api import deviceplugin_pb2 as api
from scrubber.emulator import Kubelet, PodPhase, RestartPolicy
from scrubber.wire import podresources_pb2 as lister
from tests.emulation import (
    RESOURCE,
    SOON,
    TinyPlugin,
    container,
    emulated,
    listed,
    pod,
    pod_resources,
    registered,
)


@pytest.fixture
async def kubelet(short_tmp: Path) -> AsyncIterator[Kubelet]:
    async with emulated(short_tmp) as running:
        yield running


async def test_pod_is_listed_without_its_devices_during_allocate(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"])) as plugin:
        seen: list[dict[str, dict[str, list[str]]]] = []

        async def look(_devices: list[str]) -> None:
            seen.append(await listed(kubelet))

        plugin.on_allocate = look
        await kubelet.run(pod("p"))
        assert seen == [{"p": {"main": []}}]


async def test_pod_is_listed_with_its_devices_during_pre_start(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"])) as plugin:
        seen: list[dict[str, dict[str, list[str]]]] = []

        async def look(_devices: list[str]) -> None:
            seen.append(await listed(kubelet))

        plugin.on_pre_start = look
        await (await kubelet.run(pod("p"))).wait(PodPhase.RUNNING, SOON)
        assert seen == [{"p": {"main": ["a"]}}]


async def test_init_containers_are_never_listed_and_sidecars_are(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a", "b"])):
        init = container("init", "exec sleep 60")
        sidecar = container("sidecar", restart=RestartPolicy.ALWAYS)
        running = await kubelet.run(pod("p", container("main", gpus=0), init=[sidecar, init]))
        await running.wait(lambda now: now.containers["init"].pid is not None, SOON)
        listed_pod = (await listed(kubelet))["p"]
        held_by_init = running.status.containers["init"].device_ids
        assert sorted(listed_pod) == ["main", "sidecar"]
        assert held_by_init[0] not in [device for ids in listed_pod.values() for device in ids]


async def test_pods_without_devices_are_listed(kubelet: Kubelet) -> None:
    await kubelet.run(pod("p", container(gpus=0), namespace="team"))
    async with pod_resources(kubelet) as client:
        answer = await client.List(lister.ListPodResourcesRequest())
    assert [(each.namespace, each.name) for each in answer.pod_resources] == [("team", "p")]


async def test_device_of_two_numa_nodes_has_an_entry_for_each(kubelet: Kubelet) -> None:
    plugin = TinyPlugin(["a", "b"])
    nodes = api.TopologyInfo(nodes=[api.NUMANode(ID=0), api.NUMANode(ID=1)])
    plugin.devices["a"].topology.CopyFrom(nodes)
    async with registered(kubelet, plugin):
        await kubelet.run(pod("p", container(gpus=2)))
        async with pod_resources(kubelet) as client:
            answer = await client.List(lister.ListPodResourcesRequest())
        entries = answer.pod_resources[0].containers[0].devices
        listed_pod = sorted((list(each.device_ids), [node.ID for node in each.topology.nodes]) for each in entries)
        assert listed_pod == [(["a"], [0]), (["a"], [1]), (["b"], [])]
        assert {each.resource_name for each in entries} == {RESOURCE}


async def test_list_is_empty_after_a_restart_while_the_container_runs(short_tmp: Path) -> None:
    async with emulated(short_tmp, empty_list_after_restart=3600.0) as kubelet, registered(kubelet, TinyPlugin()):
        running = await kubelet.run(pod("p"))
        await running.wait(PodPhase.RUNNING, SOON)
        await kubelet.restart()
        assert await listed(kubelet) == {}
        assert running.status.phase is PodPhase.RUNNING


async def test_list_is_complete_again_once_the_api_servers_pods_arrive(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"])):
        running = await kubelet.run(pod("p"))
        await running.wait(PodPhase.RUNNING, SOON)
        await kubelet.restart()
        await kubelet.wait_until(lambda _node: running.active, SOON)
        assert await listed(kubelet) == {"p": {"main": ["a"]}}


async def test_restarted_kubelet_lists_and_admits_no_pod_while_the_api_server_is_away(short_tmp: Path) -> None:
    async with emulated(short_tmp, empty_list_after_restart=0.0) as kubelet, registered(kubelet, TinyPlugin(["a"])):
        running = await kubelet.run(pod("p"))
        await running.wait(PodPhase.RUNNING, SOON)
        kubelet.api_server.clear()
        await kubelet.restart()
        later = kubelet.create(pod("q", container(gpus=0)))
        assert await listed(kubelet) == {}
        assert later.admitted is None
        kubelet.api_server.set()
        await later.wait(PodPhase.RUNNING, SOON)
        assert await listed(kubelet) == {"p": {"main": ["a"]}, "q": {"main": []}}


async def test_deleted_pod_is_removed_from_the_list(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin()):
        running = await kubelet.run(pod("p"))
        await running.wait(PodPhase.RUNNING, SOON)
        await kubelet.delete(running)
        assert await listed(kubelet) == {}


async def test_completed_pod_is_removed_from_the_list_some_time_after_its_end(short_tmp: Path) -> None:
    async with (
        emulated(short_tmp, completed_pod_list_delay=(3600.0, 3600.0)) as kubelet,
        registered(kubelet, TinyPlugin()),
    ):
        done = await kubelet.run(pod("p", container("main", "true")))
        await done.wait(PodPhase.SUCCEEDED, SOON)
        assert "p" in await listed(kubelet)
        await kubelet.delete(done)
        assert await listed(kubelet) == {}


async def test_completed_pod_releases_its_devices(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"])):
        done = await kubelet.run(pod("p", container("main", "true")))
        await done.wait(PodPhase.SUCCEEDED, SOON)
        await kubelet.wait_until(lambda _node: not done.active, SOON)
        assert await listed(kubelet) == {}
        assert (await kubelet.run(pod("q"))).device_ids == ("a",)


async def test_refused_pod_is_not_listed(kubelet: Kubelet) -> None:
    await kubelet.run(pod("p"))
    assert await listed(kubelet) == {}


async def test_get_returns_one_pod_and_refuses_unknown_ones(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"])), pod_resources(kubelet) as client:
        await kubelet.run(pod("p", namespace="team"))
        answer = await client.Get(lister.GetPodResourcesRequest(pod_name="p", pod_namespace="team"))
        assert answer.pod_resources.name == "p"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.Get(lister.GetPodResourcesRequest(pod_name="p", pod_namespace="other"))
        assert refused.value.details() == "pod p in namespace other not found"


async def test_allocatable_resources_are_the_healthy_devices_whether_allocated_or_free(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a", "b"])) as plugin, pod_resources(kubelet) as client:
        await kubelet.run(pod("p"))
        await plugin.report(api.Device(ID="a", health="Healthy"), api.Device(ID="b", health="Unhealthy"))
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 1, SOON)
        answer = await client.GetAllocatableResources(lister.AllocatableResourcesRequest())
        assert [list(each.device_ids) for each in answer.devices] == [["a"]]


async def test_excess_requests_are_rejected_with_resource_exhausted(short_tmp: Path) -> None:
    async with emulated(short_tmp, pod_resources_per_second=0) as kubelet, pod_resources(kubelet) as client:
        calls = [client.List(lister.ListPodResourcesRequest()) for _ in range(11)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert [each.code() for each in refused] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
