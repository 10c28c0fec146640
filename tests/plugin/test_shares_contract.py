"""A node whose devices are shared, as the kubelet and the service see it: the whole plugin, real sockets on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from plugin.gate import GateTimes
from plugin.kubelet import RegistrationTimes
from plugin.main import PluginSettings, PluginTimes, run
from plugin.nvidia_config import NvidiaSettings
from plugin.service import WatchTimes
from plugin.shares import Sharing
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import BadConfiguration
from tests.plugin_collaborators import (
    PATIENCE,
    FakeKubelet,
    FakeService,
    Registered,
    allocation,
    device,
    preference,
    snapshot,
    start,
)

GPU = "scrubber.dev/gpu"
TIMES = PluginTimes(
    gate=GateTimes(absent=0.2, retry=0.02, reserve=PATIENCE),
    registration=RegistrationTimes(stream=PATIENCE),
    watch=WatchTimes(grace=PATIENCE, heartbeat=60.0, retry=0.02),
)
TWO = Sharing({GPU: 2})
FOUR = {f"sim-{number}::{share}": f"sim-{number}" for number in range(2) for share in range(2)}


@dataclass
class Node:
    service: FakeService
    kubelet: FakeKubelet
    registered: Registered

    async def shown(self, *healthy: str) -> None:
        await self.kubelet.until(lambda: self.registered.healthy == set(healthy))


@asynccontextmanager
async def node(directory: Path, sharing: Sharing = TWO, shown: pb.Snapshot | None = None) -> AsyncIterator[Node]:
    settings = PluginSettings(
        kubelet_dir=directory,
        socket=directory / "s",
        registration="classic",
        log_format="json",
        log_level="error",
        nvidia=NvidiaSettings(sharing=sharing),
        times=TIMES,
    )
    everything = shown or snapshot(device(0, directory, numa_node=1), device(1, directory))
    async with FakeKubelet(directory) as kubelet, FakeService(directory / "s", everything) as service:
        task = asyncio.create_task(run(settings))
        try:
            yield Node(service, kubelet, await kubelet.new_registration())
        finally:
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled(), task.exception()


async def refused(call: grpc.aio.UnaryUnaryCall[object, object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value.code(), failure.value.details() or ""


async def test_every_device_is_listed_as_its_shares_and_each_is_as_the_device_is(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        assert here.kubelet.requests[0].resource_name == GPU
        assert here.registered.lists[-1] == dict.fromkeys(FOUR, "Healthy")
        assert here.registered.topologies == {"sim-0::0": [1], "sim-0::1": [1], "sim-1::0": [], "sim-1::1": []}
        here.service.show(snapshot(device(0), device(1, advertised=False, refusal="No: XID 95."), version=2))
        await here.shown("sim-0::0", "sim-0::1")
        assert await refused(here.registered.plugin.Allocate(allocation("sim-1::0"))) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "No: XID 95.",
        )


async def test_what_is_renamed_is_registered_under_its_new_name_only(short_tmp: Path) -> None:
    async with node(short_tmp, Sharing({GPU: 2}, renamed=True)) as here:
        assert [each.resource_name for each in here.kubelet.requests] == [f"{GPU}.shared"]
        assert here.service.announced == [(f"{GPU}.shared", FOUR)]


async def test_the_service_is_told_of_shares_and_asked_for_them_as_the_kubelet_names_them(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.registered.plugin.Allocate(allocation("sim-0::1", "sim-0::0"))
        await here.registered.plugin.PreStartContainer(start("sim-0::1", "sim-0::0"), timeout=30)
        assert here.service.announced == [(GPU, FOUR)]
        assert here.service.reserved == [["sim-0::0", "sim-0::1"]]
        assert [(each.resource, list(each.device_ids)) for each in here.service.asked] == [
            (GPU, ["sim-0::0", "sim-0::1"])
        ]


async def test_a_container_is_given_each_device_once_and_never_a_shares_id(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        asked = allocation("sim-1::1", "sim-0::1", "sim-1::0")
        (container,) = (await here.registered.plugin.Allocate(asked)).container_responses
        assert dict(container.envs) == {"SCRUBBER_VISIBLE_DEVICES": "sim-0,sim-1"}
        assert [each.container_path for each in container.mounts] == ["/dev/simgpu0", "/dev/simgpu1"]


async def test_the_device_itself_is_not_on_the_list_and_cannot_be_allocated(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        for id_ in ("sim-0", "sim-0::2"):
            code, words = await refused(here.registered.plugin.Allocate(allocation(id_)))
            assert (code, "not one of this plugin's" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert here.service.reserved == []


async def test_a_preference_spreads_shares_over_devices(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        answer = await here.registered.plugin.GetPreferredAllocation(
            preference(["sim-0::1", "sim-1::0", "sim-1::1"], 1)
        )
        assert list(answer.container_responses[0].deviceIDs) == ["sim-1::0"]


async def test_a_request_for_several_shares_is_refused_where_one_is_the_most(short_tmp: Path) -> None:
    async with node(short_tmp, Sharing({GPU: 2}, one_each=True)) as here:
        code, words = await refused(here.registered.plugin.Allocate(allocation("sim-0::0", "sim-1::0")))
        assert (code, "one is the most" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert here.service.reserved == []
        await here.registered.plugin.Allocate(allocation("sim-0::0"))


async def test_shares_of_our_own_and_a_vendors_plugin_contradict_each_other(short_tmp: Path) -> None:
    settings = PluginSettings(short_tmp, short_tmp / "s", nvidia=NvidiaSettings(sharing=TWO), upstream_dir=short_tmp)
    with pytest.raises(BadConfiguration, match="the vendor's plugin makes the shares"):
        await run(settings)
