"""A node whose devices are shared, as kubelet and service see it: the whole plugin, real sockets on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from plugin.gate import GateTimes
from plugin.kubelet.registration import RegistrationTimes
from plugin.kubelet.shares import TimeSlicing
from plugin.main import PluginSettings, PluginTimes, run
from plugin.nvidia.settings import NvidiaPluginSettings
from plugin.service_client import WatchTimes
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import InvalidConfiguration
from tests.plugin_collaborators import (
    DEADLINE,
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
    gate=GateTimes(service_away=0.2, retry=0.02, reserve=DEADLINE),
    registration=RegistrationTimes(stream=DEADLINE),
    watch=WatchTimes(grace=DEADLINE, heartbeat=60.0, retry=0.02),
)
TWO = TimeSlicing({GPU: 2})
FOUR = {f"sim-{number}::{share}": f"sim-{number}" for number in range(2) for share in range(2)}


@dataclass
class Node:
    service: FakeService
    kubelet: FakeKubelet
    registered: Registered

    async def shown(self, *healthy: str) -> None:
        await self.kubelet.until(lambda: self.registered.healthy == set(healthy))


@asynccontextmanager
async def node(directory: Path, sharing: TimeSlicing = TWO, shown: pb.Snapshot | None = None) -> AsyncIterator[Node]:
    settings = PluginSettings(
        kubelet_dir=directory,
        socket=directory / "s",
        registration="classic",
        log_format="json",
        log_level="error",
        nvidia=NvidiaPluginSettings(sharing=sharing),
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


async def test_every_device_is_listed_as_its_shares_with_the_health_of_the_device(short_tmp: Path) -> None:
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


async def test_renamed_resource_is_registered_under_its_new_name_only(short_tmp: Path) -> None:
    async with node(short_tmp, TimeSlicing({GPU: 2}, use_shared_suffix=True)) as here:
        assert [each.resource_name for each in here.kubelet.requests] == [f"{GPU}.shared"]
        assert here.service.announced == [(f"{GPU}.shared", FOUR)]


async def test_service_is_called_with_the_share_ids_of_the_kubelet(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.registered.plugin.Allocate(allocation("sim-0::1", "sim-0::0"))
        await here.registered.plugin.PreStartContainer(start("sim-0::1", "sim-0::0"), timeout=30)
        assert here.service.announced == [(GPU, FOUR)]
        assert here.service.reserved == [["sim-0::0", "sim-0::1"]]
        assert [(each.resource, list(each.device_ids)) for each in here.service.requests] == [
            (GPU, ["sim-0::0", "sim-0::1"])
        ]


async def test_container_gets_each_shared_device_once_and_never_a_share_id(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        request = allocation("sim-1::1", "sim-0::1", "sim-1::0")
        (container,) = (await here.registered.plugin.Allocate(request)).container_responses
        assert dict(container.envs) == {"SCRUBBER_VISIBLE_DEVICES": "sim-0,sim-1"}
        assert [each.container_path for each in container.mounts] == ["/dev/simgpu0", "/dev/simgpu1"]


async def test_shared_device_itself_is_not_listed_and_cannot_be_allocated(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        for id_ in ("sim-0", "sim-0::2"):
            code, words = await refused(here.registered.plugin.Allocate(allocation(id_)))
            assert (code, "not in the list of this plugin" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert here.service.reserved == []


async def test_preferred_allocation_spreads_shares_over_devices(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        answer = await here.registered.plugin.GetPreferredAllocation(
            preference(["sim-0::1", "sim-1::0", "sim-1::1"], 1)
        )
        assert list(answer.container_responses[0].deviceIDs) == ["sim-1::0"]


async def test_request_for_several_shares_is_refused_with_fail_requests_greater_than_one(short_tmp: Path) -> None:
    async with node(short_tmp, TimeSlicing({GPU: 2}, single_share_only=True)) as here:
        code, words = await refused(here.registered.plugin.Allocate(allocation("sim-0::0", "sim-1::0")))
        assert (code, "the maximum is one" in words) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert here.service.reserved == []
        await here.registered.plugin.Allocate(allocation("sim-0::0"))


async def test_own_shares_and_an_upstream_plugin_are_refused_together(short_tmp: Path) -> None:
    settings = PluginSettings(
        short_tmp, short_tmp / "s", nvidia=NvidiaPluginSettings(sharing=TWO), upstream_dir=short_tmp
    )
    with pytest.raises(InvalidConfiguration, match="the vendor's plugin creates the shares"):
        await run(settings)
