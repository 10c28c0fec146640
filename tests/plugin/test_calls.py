"""The five calls, as the kubelet makes them: real sockets on both sides of the plugin."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from plugin.gate import SERVICE_AWAY, Gate, GateTimes
from plugin.kubelet.devices import AdvertisedDevices
from plugin.kubelet.server import INTERNAL_ERROR, DevicePlugin, ListAndWatchStreams, PluginServer
from plugin.logs import create_logger
from plugin.resource_mapping import ResourceMapping
from plugin.service_client import ServiceWatch, WatchTimes
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import PluginClient
from scrubber.domain.errors import (
    DeviceBusy,
    InvalidConfiguration,
    LedgerFailure,
    NotReady,
    Quarantined,
    ScrubberError,
    Unavailable,
)
from tests.ahead import advance_until
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

RESOURCE = "scrubber.dev/gpu"
GATE = GateTimes(service_away=0.1, retry=0.02, reserve=DEADLINE)
WATCH = WatchTimes(grace=0.3, heartbeat=60.0, retry=0.02)
HEALTHY_NODE = snapshot(
    device(0, certified=True, numa_node=1), device(1), device(2, advertised=False, refusal="No: XID 95.")
)


@dataclass
class Node:
    service: FakeService
    kubelet: FakeKubelet
    registered: Registered
    advertised: AdvertisedDevices
    endpoint: PluginServer

    async def shown(self, **health: bool) -> None:
        """Wait until the kubelet's newest list contains this health."""
        await self.kubelet.until(
            lambda: self.registered.healthy == {id_.replace("_", "-") for id_, h in health.items() if h}
        )


@asynccontextmanager
async def node(
    directory: Path, shown: pb.Snapshot = HEALTHY_NODE, watch: WatchTimes = WATCH, times: GateTimes = GATE
) -> AsyncIterator[Node]:
    """Provide a service, a kubelet and between them the plugin, registered."""
    log = create_logger("json", "error")
    advertised = AdvertisedDevices()
    kubelet = FakeKubelet(directory)
    client = PluginClient(directory / "s")
    gate = Gate(client, advertised, ResourceMapping(client, log=log), times=times, log=log, clock=time.monotonic)
    streams = ListAndWatchStreams(advertised)
    plugin = DevicePlugin(RESOURCE, advertised, gate, streams=streams, log=log)
    loop = asyncio.get_running_loop()

    def clock() -> float:
        return loop.time()  # looked up on every call: a test may advance it

    following = ServiceWatch(client, advertised, times=watch, log=log, clock=clock)
    async with (
        FakeService(directory / "s", shown) as service,
        PluginServer(directory / "plugin.sock", plugin=plugin, streams=streams) as endpoint,
    ):
        task = asyncio.create_task(following.run())
        await kubelet.connect(endpoint.path)
        yield Node(service, kubelet, await kubelet.new_registration(), advertised, endpoint)
        await kubelet.stop()
        task.cancel()
        await asyncio.wait({task})
        await client.close()


async def test_plugin_registers_with_pre_start_required_and_preferred_allocation(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        assert here.registered.options.pre_start_required
        assert here.registered.options.get_preferred_allocation_available


async def test_the_list_has_every_device_with_its_health_and_numa_node(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        assert here.registered.lists == [{"sim-0": "Healthy", "sim-1": "Healthy", "sim-2": "Unhealthy"}]
        assert here.registered.topologies == {"sim-0": [1], "sim-1": [], "sim-2": []}


async def test_quarantined_device_is_listed_as_unhealthy_and_unchanged_lists_are_not_sent(
    short_tmp: Path,
) -> None:
    async with node(short_tmp) as here:
        here.service.show(
            snapshot(device(0, scrubbing=True, numa_node=1), device(1), device(2, advertised=False), version=2)
        )
        here.service.show(snapshot(device(0, numa_node=1), device(1, advertised=False), device(2), version=3))
        await here.shown(sim_0=True, sim_2=True)
        assert len(here.registered.lists) == 2


async def test_all_list_and_watch_streams_get_the_same_list(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        others = [await here.kubelet.connect(here.endpoint.path) for _ in range(5)]
        await here.kubelet.until(lambda: all(each.lists for each in others))
        here.service.show(snapshot(device(0), version=2))
        await here.kubelet.until(lambda: all(each.healthy == {"sim-0"} for each in (here.registered, *others)))
        assert all(set(each.lists[-1]) == {"sim-0", "sim-1", "sim-2"} for each in others)


async def test_allocation_returns_mounts_and_device_names_and_reserves_the_devices_at_the_service(
    short_tmp: Path,
) -> None:
    async with node(short_tmp) as here:
        answer = await here.registered.plugin.Allocate(allocation("sim-1", "sim-0"))
        (container,) = answer.container_responses
        assert {(mount.host_path, mount.container_path) for mount in container.mounts} == {
            ("/sim/0/memory", "/dev/simgpu0"),
            ("/sim/1/memory", "/dev/simgpu1"),
        }
        assert container.envs["SCRUBBER_VISIBLE_DEVICES"] == "sim-0,sim-1"
        assert here.service.reserved == [["sim-0", "sim-1"]]


async def test_allocation_has_one_response_per_container(short_tmp: Path) -> None:
    request = api.AllocateRequest(
        container_requests=[api.ContainerAllocateRequest(devices_ids=[id_]) for id_ in ("sim-1", "sim-0")]
    )
    async with node(short_tmp) as here:
        answer = await here.registered.plugin.Allocate(request)
        visible = [each.envs["SCRUBBER_VISIBLE_DEVICES"] for each in answer.container_responses]
        assert visible == ["sim-1", "sim-0"]
        assert here.service.reserved == [["sim-0", "sim-1"]]


async def test_repeated_allocation_gets_the_same_response(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        first = await here.registered.plugin.Allocate(allocation("sim-0", "sim-1"))
        assert await here.registered.plugin.Allocate(allocation("sim-1", "sim-0")) == first


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (api.AllocateRequest(), "needs at least one device id"),
        (allocation(), "needs at least one device id"),
        (allocation(""), "an empty device id"),
        (allocation("sim-0", "sim-0"), "names device sim-0 twice"),
        (allocation("sim-0", "sim-9"), "Device sim-9 is not in the list of this plugin"),
    ],
)
async def test_allocation_with_invalid_device_ids_is_refused(
    short_tmp: Path, request_: api.AllocateRequest, message: str
) -> None:
    async with node(short_tmp) as here:
        with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
            await here.registered.plugin.Allocate(request_)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert here.service.reserved == []


async def test_allocation_of_a_quarantined_device_is_refused_with_the_public_message(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.registered.plugin.Allocate(allocation("sim-2"))
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "No: XID 95.")


async def test_allocation_of_a_device_that_an_unknown_process_holds_is_answered(short_tmp: Path) -> None:
    """The kubelet chose it before it was notified; a refusal would fail the pod for good, and the holder may end."""
    held = device(0, advertised=False, withheld=True, refusal="Device sim-0 is held.")
    async with node(short_tmp, snapshot(held)) as here:
        await here.kubelet.until(lambda: here.registered.lists[-1:] == [{"sim-0": "Unhealthy"}])
        answer = await here.registered.plugin.Allocate(allocation("sim-0"))
        assert answer.container_responses[0].mounts


async def test_allocation_of_a_device_that_the_service_has_just_quarantined_is_refused(short_tmp: Path) -> None:
    async def quarantined(request: object) -> None:
        raise Quarantined("double-bit error under pod a/b", public_message="Device sim-0 is quarantined.")

    async with node(short_tmp) as here:
        here.service.on_reserve = quarantined
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.registered.plugin.Allocate(allocation("sim-0"))
        assert caught.value.details() == "Device sim-0 is quarantined."


async def test_allocation_is_answered_although_the_service_is_down_hung_or_failing(short_tmp: Path) -> None:
    async def hung(request: object) -> None:
        await asyncio.Event().wait()

    async def broken(request: object) -> None:
        raise LedgerFailure("disk full")

    async with node(short_tmp, times=dataclasses.replace(GATE, reserve=0.2)) as here:
        for behaviour in (hung, broken):
            here.service.on_reserve = behaviour
            answer = await here.registered.plugin.Allocate(allocation("sim-0"))
            assert answer.container_responses[0].mounts
        await here.service.stop()
        await here.shown()
        answer = await here.registered.plugin.Allocate(allocation("sim-1"))
        assert answer.container_responses[0].mounts
        await here.service.start()
        await here.shown(sim_0=True, sim_1=True)
        await here.registered.plugin.PreStartContainer(start("sim-1", "sim-0"))
        assert sorted(here.service.requests[-1].unreserved_ids) == ["sim-0", "sim-1"]


async def test_preferred_allocation_prefers_clean_devices_and_needs_no_service(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.service.stop()
        request = preference(["sim-2", "sim-1", "sim-0", "strange"], 2, must=["sim-1"])
        answer = await here.registered.plugin.GetPreferredAllocation(request)
        assert set(answer.container_responses[0].deviceIDs) >= {"sim-1"}
        assert len(answer.container_responses[0].deviceIDs) == 2
    async with node(short_tmp) as here:
        answer = await here.registered.plugin.GetPreferredAllocation(preference(["sim-2", "sim-1", "sim-0"], 1))
        assert list(answer.container_responses[0].deviceIDs) == ["sim-0"]


async def test_start_succeeds_once_the_service_has_granted_all_devices(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.registered.plugin.PreStartContainer(start("sim-1", "sim-0"), timeout=30)
        (request,) = here.service.requests
        assert sorted(request.device_ids) == ["sim-0", "sim-1"]
        assert 20.0 < request.wait_seconds < 25.0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotReady("s7", public_message="Device sim-0 is being scrubbed (scrub s7)."), grpc.StatusCode.UNAVAILABLE),
        (
            DeviceBusy("pid 4711 of x/y", public_message="Device sim-0 is still held."),
            grpc.StatusCode.FAILED_PRECONDITION,
        ),
        (
            LedgerFailure("disk full", public_message="No hand-over can be recorded."),
            grpc.StatusCode.FAILED_PRECONDITION,
        ),
    ],
)
async def test_refused_start_returns_the_public_message_and_nothing_about_other_tenants(
    short_tmp: Path, error: ScrubberError, code: grpc.StatusCode
) -> None:
    async def refuse(request: object) -> None:
        raise error

    async with node(short_tmp) as here:
        here.service.on_hand_over = refuse
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.registered.plugin.PreStartContainer(start("sim-0"), timeout=30)
        assert (caught.value.code(), caught.value.details()) == (code, error.public_message)


async def test_start_without_a_service_is_refused_as_unavailable(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.service.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.registered.plugin.PreStartContainer(start("sim-0"), timeout=30)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, SERVICE_AWAY)


async def test_start_cancelled_by_the_kubelet_is_cancelled_at_the_service(short_tmp: Path) -> None:
    async def scrub(request: object) -> None:
        await asyncio.Event().wait()

    async with node(short_tmp) as here:
        here.service.on_hand_over = scrub
        call = here.registered.plugin.PreStartContainer(start("sim-0"), timeout=30)
        waiting = asyncio.ensure_future(call)
        await here.service.bell.until(lambda: bool(here.service.requests))
        call.cancel()
        await here.service.bell.until(lambda: here.service.cancelled == 1)
        await asyncio.wait({waiting})


async def test_overlapping_starts_of_the_same_devices_all_reach_the_service(short_tmp: Path) -> None:
    scrubbed = asyncio.Event()

    async def scrub(request: object) -> None:
        await scrubbed.wait()

    async with node(short_tmp) as here:
        here.service.on_hand_over = scrub
        calls = [
            asyncio.ensure_future(here.registered.plugin.PreStartContainer(start(*ids), timeout=30))
            for ids in (("sim-0",), ("sim-0",), ("sim-0", "sim-1"))
        ]
        await here.service.bell.until(lambda: len(here.service.requests) == 3)
        scrubbed.set()
        await asyncio.gather(*calls)


@pytest.mark.parametrize("ids", [(), ("",), ("sim-0", "sim-0")])
async def test_start_with_invalid_device_ids_is_refused(short_tmp: Path, ids: tuple[str, ...]) -> None:
    async with node(short_tmp) as here:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await here.registered.plugin.PreStartContainer(start(*ids), timeout=30)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert here.service.requests == []


async def test_internal_error_of_the_plugin_is_logged_and_not_returned_to_the_pod(short_tmp: Path) -> None:
    class Broken:
        async def reserve(self, device_ids: object, resource: str, span: object) -> None:
            raise ValueError("/root/secret")

        async def hand_over(self, device_ids: object, resource: str, deadline: object, span: object) -> None:
            raise ValueError("/root/secret")

    lines = io.StringIO()
    advertised = AdvertisedDevices()
    streams = ListAndWatchStreams(advertised)
    plugin = DevicePlugin(RESOURCE, advertised, Broken(), streams=streams, log=create_logger("json", "error", lines))
    async with (
        PluginServer(short_tmp / "plugin.sock", plugin=plugin, streams=streams) as endpoint,
        grpc.aio.insecure_channel(f"unix:{endpoint.path}") as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rpc.DevicePluginStub(channel).PreStartContainer(start("sim-0"))
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, INTERNAL_ERROR)
    assert "/root/secret" in lines.getvalue()
    (line,) = map(json.loads, lines.getvalue().splitlines())
    assert (line["event"], line["method"], line["resource"]) == ("api.failed", "PreStartContainer", RESOURCE)


async def test_malformed_requests_are_refused_and_the_plugin_keeps_running(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        for method in ("Allocate", "PreStartContainer", "GetPreferredAllocation", "NoSuchThing"):
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = here.registered.channel.unary_unary(
                f"/v1beta1.DevicePlugin/{method}"
            )
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"\xff\xff\xff garbage")
        await here.registered.plugin.PreStartContainer(start("sim-0"), timeout=30)


async def test_short_service_restart_changes_no_list_and_a_long_outage_makes_devices_unhealthy(short_tmp: Path) -> None:
    async with node(short_tmp, watch=WatchTimes(grace=3600.0, heartbeat=60.0, retry=0.02)) as here:
        await here.service.stop()
        await here.advertised.wait_until(lambda: here.advertised.epoch == "")
        await here.service.start(
            snapshot(device(0, numa_node=1), device(1), device(2), version=1, ready=False, epoch="second")
        )
        await here.advertised.wait_until(lambda: here.advertised.epoch == "second")
        here.service.show(snapshot(device(0, numa_node=1), device(1), device(2), version=2, epoch="second"))
        await here.shown(sim_0=True, sim_1=True, sim_2=True)
        assert len(here.registered.lists) == 2
    async with node(short_tmp) as here:
        await here.service.stop()
        await here.shown()
        assert here.registered.lists[-1] == {"sim-0": "Unhealthy", "sim-1": "Unhealthy", "sim-2": "Unhealthy"}


async def test_restarted_service_that_does_not_become_ready_keeps_devices_healthy_only_for_the_grace_period(
    short_tmp: Path,
) -> None:
    async with node(short_tmp, watch=WatchTimes(grace=DEADLINE, heartbeat=1e9)) as here:
        here.service.show(snapshot(device(0, numa_node=1), device(1), device(2), ready=False, epoch="second"))
        await here.advertised.wait_until(lambda: here.advertised.epoch == "second")
        assert here.registered.healthy == {"sim-0", "sim-1"}
        await advance_until(lambda: here.registered.healthy == set())
        here.service.show(snapshot(device(0, numa_node=1), device(1), device(2), version=2, epoch="second"))
        await here.shown(sim_0=True, sim_1=True, sim_2=True)


async def test_service_that_keeps_the_stream_open_without_answering_counts_as_down(short_tmp: Path) -> None:
    class Hung(FakeService):
        hangs = False

        async def GetSnapshot(self, request: object, context: object) -> object:  # type: ignore[override]
            if self.hangs:
                await asyncio.Event().wait()
            return self._shown

        async def WatchSnapshots(self, request: object, context: object) -> AsyncIterator[object]:  # type: ignore[override]
            if not self.hangs:
                yield self._shown
            await asyncio.Event().wait()

    advertised = AdvertisedDevices()
    client = PluginClient(short_tmp / "s")
    times = WatchTimes(grace=0.05, heartbeat=0.05, probe=1.0, retry=0.02)
    watch = ServiceWatch(client, advertised, times=times, log=create_logger("json", "error"), clock=time.monotonic)
    async with Hung(short_tmp / "s", snapshot(device(0))) as service:
        task = asyncio.create_task(watch.run())
        async with asyncio.timeout(20):
            await advertised.wait_until(lambda: any(offer.healthy for offer in advertised.devices))
            service.hangs = True
            await advertised.wait_until(lambda: not any(offer.healthy for offer in advertised.devices))
            service.hangs = False
            await advertised.wait_until(lambda: any(offer.healthy for offer in advertised.devices))
        task.cancel()
        await asyncio.wait({task})
        await client.close()


async def test_device_with_an_unknown_kind_of_access_is_withheld(short_tmp: Path) -> None:
    strange = device(0)
    strange.access[0].kind = "teleport"
    async with node(short_tmp, snapshot(strange, device(1))) as here:
        assert here.registered.healthy == {"sim-1"}
        with pytest.raises(grpc.aio.AioRpcError, match="update the plugin"):
            await here.registered.plugin.Allocate(allocation("sim-0"))


async def test_endpoint_ends_without_an_error_although_its_socket_cannot_be_removed(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, **_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    async with node(short_tmp) as here:
        monkeypatch.setattr(Path, "unlink", read_only)
        await here.endpoint.withdraw()
        monkeypatch.undo()
        assert here.endpoint.streams.closing


async def test_endpoint_that_cannot_be_served_fails_with_the_reason(short_tmp: Path) -> None:
    advertised = AdvertisedDevices()
    client = PluginClient(short_tmp / "s")
    log = create_logger("json", "error")
    gate = Gate(client, advertised, ResourceMapping(client, log=log), times=GATE, log=log, clock=time.monotonic)
    streams = ListAndWatchStreams(advertised)
    plugin = DevicePlugin(RESOURCE, advertised, gate, streams=streams, log=log)
    with pytest.raises(Unavailable, match="does not exist"):
        await PluginServer(short_tmp / "no" / "a.sock", plugin=plugin, streams=streams).__aenter__()
    (short_tmp / "dir.sock").mkdir()
    (short_tmp / "dir.sock" / "full").touch()
    with pytest.raises(InvalidConfiguration, match="Cannot create a socket"):
        await PluginServer(short_tmp / "dir.sock", plugin=plugin, streams=streams).__aenter__()
