"""In front of a vendor's plugin, as kubelet, vendor and service see it: real sockets on all three sides."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import stat
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import watchfiles

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from plugin.device_selection import DeviceSelection
from plugin.gate import GateTimes
from plugin.kubelet.registration import RegistrationTimes
from plugin.main import PluginSettings, PluginTimes, run
from plugin.nvidia.injection import ListStrategy, NvidiaInjection
from plugin.nvidia.settings import NvidiaPluginSettings
from plugin.resource_mapping import discard_mapping
from plugin.service_client import WatchTimes
from plugin.upstream.proxy import UpstreamProxy, UpstreamProxyTimes
from plugin.upstream.registry import UpstreamRegistryTimes, check_directory
from plugin.upstream.resource import UpstreamResourceTimes
from plugin.upstream.vendor import VendorTimes
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import InvalidConfiguration, NotReady, Quarantined, ScrubberError
from tests.emulation import Refusal, TinyPlugin
from tests.plugin_collaborators import (
    DEADLINE,
    Bell,
    FakeKubelet,
    FakeService,
    Registered,
    allocation,
    device,
    preference,
    snapshot,
    start,
)

GPU = "vendor.example/gpu"
NIC = "vendor.example/nic"
BEHIND = UpstreamProxyTimes(
    upstream=UpstreamResourceTimes(grace=DEADLINE, pause=DEADLINE, vendor_away=0.2),
    vendor=VendorTimes(poll=0.05, pause=0.0, heartbeat=60.0, preferred=DEADLINE),
    registry=UpstreamRegistryTimes(poll=0.02, rotation_delay=DEADLINE),
)
STEADY = PluginTimes(
    gate=GateTimes(service_away=0.2, retry=0.02, reserve=DEADLINE),
    registration=RegistrationTimes(stream=DEADLINE),
    watch=WatchTimes(grace=DEADLINE, heartbeat=60.0, retry=0.02),
    upstream=BEHIND,
)
"""Times with which no timer expires before the test is done."""


def steady(**changes: Any) -> PluginTimes:
    """Return :data:`STEADY` with some of the upstream times replaced."""
    return dataclasses.replace(STEADY, upstream=dataclasses.replace(BEHIND, **changes))


class Vendor(TinyPlugin):
    """A vendor's plugin whose every call may be made to hang."""

    def __init__(self, *devices: str, options: api.DevicePluginOptions | None = None) -> None:
        super().__init__(devices or ("sim-0", "sim-1"), options=options or api.DevicePluginOptions())
        self.hung: set[str] = set()

    async def GetDevicePluginOptions(self, request: api.Empty, context: Any) -> api.DevicePluginOptions:
        await self._go_on("GetDevicePluginOptions")
        return self.options

    async def ListAndWatch(self, request: api.Empty, context: Any) -> AsyncIterator[api.ListAndWatchResponse]:
        await self._go_on("ListAndWatch")
        async for each in super().ListAndWatch(request, context):
            yield each

    async def GetPreferredAllocation(
        self, request: api.PreferredAllocationRequest, context: Any
    ) -> api.PreferredAllocationResponse:
        await self._go_on("GetPreferredAllocation")
        return await super().GetPreferredAllocation(request, context)

    async def Allocate(self, request: api.AllocateRequest, context: Any) -> api.AllocateResponse:
        await self._go_on("Allocate")
        return await super().Allocate(request, context)

    async def _go_on(self, call: str) -> None:
        if call in self.hung:
            await asyncio.Event().wait()


@dataclass
class Node:
    directory: Path
    service: FakeService
    kubelet: FakeKubelet
    started: list[TinyPlugin] = field(default_factory=list)

    @property
    def upstream(self) -> Path:
        return self.directory / "u"

    @property
    def socket(self) -> Path:
        return self.upstream / "kubelet.sock"

    async def register(self, endpoint: str, resource: str = GPU, version: str = "v1beta1") -> None:
        """Register as a vendor's plugin does; raises ``grpc.aio.AioRpcError`` when refused."""
        request = api.RegisterRequest(version=version, endpoint=endpoint, resource_name=resource)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 50)]
        async with grpc.aio.insecure_channel(f"unix:{self.socket}", options=options) as channel:
            await rpc.RegistrationStub(channel).Register(request, timeout=DEADLINE, wait_for_ready=True)

    async def vendor(self, vendor: TinyPlugin, resource: str = GPU, endpoint: str = "") -> None:
        """Serve ``vendor`` and register it."""
        endpoint = endpoint or f"vendor-{len(self.started)}.sock"
        await vendor.serve(self.upstream / endpoint)
        self.started.append(vendor)
        await self.register(endpoint, resource)

    async def registered(self, resource: str = GPU) -> Registered:
        """Wait for and return our registration of ``resource`` with the kubelet that has sent a list."""

        def of_resource() -> list[Registered]:
            sockets = [self.kubelet.classic / each.endpoint for each in self.kubelet.requests
                       if each.resource_name == resource]  # fmt: skip
            return [each for each in self.kubelet.registered if each.socket in sockets and each.lists]

        await self.kubelet.until(lambda: bool(of_resource()))
        return of_resource()[-1]

    async def shown(self, registered: Registered, *healthy: str) -> None:
        await self.kubelet.until(lambda: registered.healthy == set(healthy))


@asynccontextmanager
async def node(
    directory: Path,
    shown: pb.Snapshot | None = None,
    times: PluginTimes = STEADY,
    injection: NvidiaInjection | None = None,
) -> AsyncIterator[Node]:
    """Provide a service with two simulated devices, a kubelet, and our plugin, still without a vendor's plugin."""
    settings = PluginSettings(
        kubelet_dir=directory,
        socket=directory / "s",
        registration="classic",
        log_format="json",
        log_level="error",
        nvidia=NvidiaPluginSettings(injection=injection or NvidiaInjection()),
        upstream_dir=directory / "u",
        times=times,
    )
    (directory / "u").mkdir(mode=0o755)
    everything = shown or snapshot(device(0), device(1))
    async with FakeKubelet(directory) as kubelet, FakeService(directory / "s", everything) as service:
        task = asyncio.create_task(run(settings))
        here = Node(directory, service, kubelet)
        try:
            yield here
        finally:
            for vendor in here.started:
                await vendor.stop()
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled(), task.exception()


async def fails(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value


async def test_vendors_list_passes_through_and_only_health_is_restricted(short_tmp: Path) -> None:
    vendor = Vendor()
    numa = api.TopologyInfo(nodes=[api.NUMANode(ID=0), api.NUMANode(ID=1)])
    vendor.devices["sim-0"].topology.CopyFrom(numa)
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        assert registered.lists[-1] == {"sim-0": "Healthy", "sim-1": "Healthy"}
        assert registered.topologies == {"sim-0": [0, 1], "sim-1": []}
        here.service.show(snapshot(device(0, advertised=False), device(1), version=2))
        await here.shown(registered, "sim-1")
        await vendor.report(api.Device(ID="sim-0", health="Healthy"), api.Device(ID="sim-1", health="Unhealthy"))
        await here.shown(registered)
        here.service.show(snapshot(device(0), device(1), version=3))
        await here.shown(registered, "sim-0")


async def test_pre_start_is_required_whatever_the_vendor_requires(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.vendor(Vendor(options=api.DevicePluginOptions()))
        options = (await here.registered()).options
        assert (options.pre_start_required, options.get_preferred_allocation_available) == (True, True)


async def test_allocation_is_reserved_at_the_service_and_the_vendors_answer_is_returned_unchanged(
    short_tmp: Path,
) -> None:
    vendor = Vendor("0", "1")
    vendor.answer = api.ContainerAllocateResponse(
        envs={"VENDOR": "x"},
        mounts=[api.Mount(container_path="/opt", host_path="/opt/vendor", read_only=True)],
        devices=[api.DeviceSpec(container_path="/dev/v", host_path="/dev/v", permissions="rw")],
        annotations={"note": "x"},
        cdi_devices=[api.CDIDevice(name="vendor.example/gpu=1")],
    )
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        answer = await (await here.registered()).plugin.Allocate(allocation("1"))
        assert answer.container_responses[0] == vendor.answer
        assert here.service.announced == [(GPU, {"0": "sim-0", "1": "sim-1"})]
        assert here.service.reserved == [["1"]]
        assert [list(each.container_requests[0].devices_ids) for each in vendor.allocate_requests] == [["1"]]


async def test_vendor_replicas_are_announced_and_requested_by_the_kubelets_ids(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.vendor(Vendor("sim-0::0", "sim-0::1", "sim-1::0", "sim-1::1"))
        registered = await here.registered()
        await registered.plugin.Allocate(allocation("sim-0::0", "sim-0::1"))
        await registered.plugin.PreStartContainer(start("sim-0::1", "sim-0::0"), timeout=30)
        assert here.service.announced == [(GPU, {f"sim-{d}::{n}": f"sim-{d}" for d in range(2) for n in range(2)})]
        assert here.service.reserved == [["sim-0::0", "sim-0::1"]]
        assert [(request.resource, list(request.device_ids)) for request in here.service.requests] == [
            (GPU, ["sim-0::0", "sim-0::1"])
        ]


async def test_quarantined_device_is_refused_before_the_vendor_is_called(short_tmp: Path) -> None:
    vendor = Vendor()
    async with node(short_tmp, snapshot(device(0, advertised=False, refusal="No: XID 95."), device(1))) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        refusal = await fails(registered.plugin.Allocate(allocation("sim-0")))
        assert (refusal.code(), refusal.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "No: XID 95.")

        async def quarantined(request: pb.ReserveRequest) -> None:
            raise Quarantined("XID 48", public_message="No: XID 48.")

        here.service.on_reserve = quarantined
        assert (await fails(registered.plugin.Allocate(allocation("sim-1")))).details() == "No: XID 48."
        assert vendor.allocate_requests == []


async def test_device_held_by_an_unknown_process_is_unhealthy_and_its_allocation_is_left_to_the_vendor(
    short_tmp: Path,
) -> None:
    held = device(0, advertised=False, withheld=True, refusal="Device sim-0 is held.")
    async with node(short_tmp, snapshot(held, device(1))) as here:
        await here.vendor(Vendor())
        registered = await here.registered()
        await here.kubelet.until(
            lambda: bool(registered.lists) and registered.lists[-1] == {"sim-0": "Unhealthy", "sim-1": "Healthy"}
        )
        await registered.plugin.Allocate(allocation("sim-0"))


async def test_vendors_refusal_is_returned_with_its_own_message(short_tmp: Path) -> None:
    vendor = Vendor(options=api.DevicePluginOptions(pre_start_required=True))

    async def refuse(devices: list[str]) -> None:
        raise Refusal("not on a Friday")

    vendor.on_allocate = vendor.on_pre_start = refuse
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        plugin = (await here.registered()).plugin
        allocated = await fails(plugin.Allocate(allocation("sim-0")))
        started = await fails(plugin.PreStartContainer(start("sim-0"), timeout=30))
        for refusal in (allocated, started):
            assert (refusal.code(), refusal.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "not on a Friday")


async def test_start_passes_the_gate_first_and_then_the_vendor(short_tmp: Path) -> None:
    order: list[str] = []
    vendor = Vendor("0", "1", options=api.DevicePluginOptions(pre_start_required=True))

    async def gate(request: pb.HandOverRequest) -> None:
        order.append(f"gate {list(request.device_ids)}")

    async def vendors(devices: list[str]) -> None:
        order.append(f"vendor {devices}")

    vendor.on_pre_start = vendors
    async with node(short_tmp) as here:
        here.service.on_hand_over = gate
        await here.vendor(vendor)
        await (await here.registered()).plugin.PreStartContainer(start("0"), timeout=30)
        assert order == ["gate ['0']", "vendor ['0']"]
        left = vendor.seconds_left["PreStartContainer"]
        assert left is not None
        assert left < 30


async def test_start_refused_by_the_gate_does_not_reach_the_vendor(short_tmp: Path) -> None:
    async def scrubbing(request: pb.HandOverRequest) -> None:
        raise NotReady("s7", public_message="The device is being scrubbed (scrub s7).")

    vendor = Vendor(options=api.DevicePluginOptions(pre_start_required=True))
    async with node(short_tmp) as here:
        here.service.on_hand_over = scrubbing
        await here.vendor(vendor)
        refusal = await fails((await here.registered()).plugin.PreStartContainer(start("sim-0"), timeout=30))
        assert refusal.details() == "The device is being scrubbed (scrub s7)."
        assert vendor.pre_starts == []


async def test_vendor_without_pre_start_is_not_called_before_a_start(short_tmp: Path) -> None:
    vendor = Vendor(options=api.DevicePluginOptions(pre_start_required=False))
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        await (await here.registered()).plugin.PreStartContainer(start("sim-0"), timeout=30)
        assert vendor.pre_starts == []


async def test_start_is_refused_without_a_grant_while_the_vendor_that_requires_pre_start_is_down(
    short_tmp: Path,
) -> None:
    vendor = Vendor(options=api.DevicePluginOptions(pre_start_required=True))
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        await vendor.stop()
        # Once a call was refused, the vendor is known to be away.
        await fails(registered.plugin.Allocate(allocation("sim-0"), timeout=30))
        refusal = await fails(registered.plugin.PreStartContainer(start("sim-0"), timeout=30))
        assert (refusal.code(), "is not available" in (refusal.details() or "")) == (grpc.StatusCode.UNAVAILABLE, True)
        assert here.service.requests == []


# Preference


async def test_vendor_chooses_its_preferred_devices_among_the_clean_ones(short_tmp: Path) -> None:
    vendor = Vendor(options=api.DevicePluginOptions(get_preferred_allocation_available=True))
    vendor.preferred = ["sim-1"]
    async with node(short_tmp, snapshot(device(0), device(1, certified=True))) as here:
        await here.vendor(vendor)
        plugin = (await here.registered()).plugin
        answer = await plugin.GetPreferredAllocation(preference(["sim-0", "sim-1"], 1))
        assert [list(each.deviceIDs) for each in answer.container_responses] == [["sim-1"]]
        assert [list(each.available_deviceIDs) for each in vendor.preferred_requests] == [["sim-1"]]


@pytest.mark.parametrize("how", ["no say", "an error", "nonsense", "silence"])
async def test_clean_devices_are_preferred_where_the_vendor_gives_no_preference(short_tmp: Path, how: str) -> None:
    vendor = Vendor(options=api.DevicePluginOptions(get_preferred_allocation_available=how != "no say"))
    vendor.preferred = ["sim-7"] if how == "nonsense" else None
    vendor.hung = {"GetPreferredAllocation"} if how == "silence" else set()
    times = steady(vendor=dataclasses.replace(BEHIND.vendor, preferred=1.0 if how == "silence" else DEADLINE))
    async with node(short_tmp, snapshot(device(0), device(1, certified=True)), times) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        answer = await registered.plugin.GetPreferredAllocation(preference(["sim-0", "sim-1"], 1))
        assert [list(each.deviceIDs) for each in answer.container_responses] == [["sim-1"]]
        assert registered.healthy == {"sim-0", "sim-1"}


# Ids


async def test_ids_of_unknown_devices_are_listed_as_unhealthy_and_never_allocated(short_tmp: Path) -> None:
    vendor = Vendor("sim-0", "SN-77")
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        assert registered.lists[-1] == {"sim-0": "Healthy", "SN-77": "Unhealthy"}
        allocated = await fails(registered.plugin.Allocate(allocation("SN-77")))
        started = await fails(registered.plugin.PreStartContainer(start("SN-77"), timeout=30))
        for refusal in (allocated, started):
            assert "knows no device with this id" in str(refusal.details())
        assert (vendor.allocate_requests, here.service.reserved, here.service.requests) == ([], [], [])


async def test_resource_mapping_is_announced_to_the_service_before_the_kubelet_gets_the_list(short_tmp: Path) -> None:
    announced, may_go_on = asyncio.Event(), asyncio.Event()

    async def slowly(request: pb.SetResourceMappingRequest) -> None:
        announced.set()
        await may_go_on.wait()

    async with node(short_tmp) as here:
        here.service.on_announce = slowly
        await here.vendor(Vendor("0", "1"))
        await asyncio.wait_for(announced.wait(), DEADLINE)
        assert here.kubelet.requests == [], "there is no list yet to register with"
        may_go_on.set()
        assert (await here.registered()).healthy == {"0", "1"}


async def test_restarted_service_gets_the_resource_mapping_without_a_change_of_the_list(
    short_tmp: Path,
) -> None:
    async with node(short_tmp) as here:
        await here.vendor(Vendor("0", "1"))
        registered = await here.registered()
        await here.service.stop()
        await here.service.start(snapshot(device(0), device(1), epoch="second"))
        await here.service.bell.until(lambda: len(here.service.announced) == 2)
        assert here.service.announced[0] == here.service.announced[1]
        assert len(registered.lists) == 1


async def test_id_that_the_vendor_no_longer_lists_stays_announced(short_tmp: Path) -> None:
    vendor = Vendor("0", "1")
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        await vendor.report(api.Device(ID="1", health="Healthy"))
        await here.shown(registered, "1")
        assert here.service.announced[-1] == (GPU, {"0": "sim-0", "1": "sim-1"})
        await registered.plugin.PreStartContainer(start("0"), timeout=30)
        assert list(here.service.requests[-1].device_ids) == ["0"]


async def test_restart_on_an_id_that_was_never_listed_is_announced_and_requested(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.vendor(Vendor("1"))
        registered = await here.registered()
        await registered.plugin.PreStartContainer(start("0"), timeout=30)
        assert here.service.announced[-1] == (GPU, {"1": "sim-1", "0": "sim-0"})
        assert list(here.service.requests[-1].device_ids) == ["0"]


async def test_id_that_changed_its_device_is_never_handed_out_again(short_tmp: Path) -> None:
    """Indices change when a device is lost; containers keep the answer that they were given."""
    async with node(short_tmp) as here:
        await here.vendor(Vendor("0", "1"))
        registered = await here.registered()
        moved = device(1)
        moved.index = "0"
        here.service.show(snapshot(moved, version=2))
        await here.shown(registered)
        allocated = await fails(registered.plugin.Allocate(allocation("0")))
        started = await fails(registered.plugin.PreStartContainer(start("0")))
        for refusal in (allocated, started):
            assert "its id meant sim-0 and now means sim-1" in str(refusal.details())
        assert (here.service.reserved, here.service.requests) == ([], [])


async def test_failed_announcement_does_not_prevent_the_registration(short_tmp: Path) -> None:
    async def broken(request: pb.SetResourceMappingRequest) -> None:
        raise ScrubberError("no")

    async with node(short_tmp) as here:
        here.service.on_announce = broken
        await here.vendor(Vendor("0", "1"))
        assert (await here.registered()).healthy == {"0", "1"}


async def test_device_listed_in_two_resources_is_handed_out_in_neither_resource(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.vendor(Vendor("sim-0", "sim-1"))
        registered = await here.registered()
        await here.vendor(Vendor("0"), NIC)
        await here.shown(registered, "sim-1")
        assert (await here.registered(NIC)).lists[-1] == {"0": "Unhealthy"}


async def test_unknown_id_becomes_healthy_once_its_device_appears_on_the_node(short_tmp: Path) -> None:
    async with node(short_tmp, snapshot(device(0))) as here:
        await here.vendor(Vendor())
        registered = await here.registered()
        assert registered.healthy == {"sim-0"}
        here.service.show(snapshot(device(0), device(1), version=2))
        await here.shown(registered, "sim-0", "sim-1")


async def test_a_container_restarts_on_a_device_that_the_vendor_no_longer_lists(short_tmp: Path) -> None:
    vendor = Vendor()
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        await vendor.report(api.Device(ID="sim-1", health="Healthy"))
        await here.shown(registered, "sim-1")
        assert registered.lists[-1] == {"sim-0": "Unhealthy", "sim-1": "Healthy"}
        await registered.plugin.PreStartContainer(start("sim-0"), timeout=30)
        assert [list(request.device_ids) for request in here.service.requests] == [["sim-0"]]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (allocation(), "needs at least one device id"),
        (api.AllocateRequest(), "needs at least one device id"),
        (allocation("sim-0", "sim-0"), "twice"),
        (allocation(""), "empty device id"),
        (allocation("sim-9"), "not in the list of this plugin"),
    ],
)
async def test_invalid_allocation_does_not_reach_the_vendor(
    short_tmp: Path, request_: api.AllocateRequest, message: str
) -> None:
    vendor = Vendor()
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        refusal = await fails((await here.registered()).plugin.Allocate(request_))
        assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert message in str(refusal.details())
        assert vendor.allocate_requests == []


# Responses


async def test_vendors_answer_with_another_device_is_refused_and_makes_its_resource_unhealthy(short_tmp: Path) -> None:
    vendor = Vendor("0", "1")
    other = "/sim/1/memory"
    vendor.answer = api.ContainerAllocateResponse(mounts=[api.Mount(host_path=other, container_path="/dev/simgpu1")])
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        refusal = await fails(registered.plugin.Allocate(allocation("0")))
        assert refusal.details() == f"The vendor's plugin for {GPU} returned another device than the requested one."
        again = await fails(registered.plugin.Allocate(allocation("1")))
        assert again.details() == refusal.details(), "which device it was is not for pods"
        await here.shown(registered)
        vendor.answer = api.ContainerAllocateResponse()
        await here.register("vendor-0.sock")
        await here.shown(registered, "0", "1")


async def test_vendors_envvar_answer_is_refused_if_the_strategy_is_another_one(short_tmp: Path) -> None:
    vendor = Vendor()
    vendor.answer = api.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": "sim-0"})
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        await (await here.registered()).plugin.Allocate(allocation("sim-0"))
    strict = NvidiaInjection(strategies=(ListStrategy.VOLUME_MOUNTS,))
    short = short_tmp / "2"
    short.mkdir()
    async with node(short, injection=strict) as here:
        await here.vendor(vendor)
        refusal = await fails((await here.registered()).plugin.Allocate(allocation("sim-0")))
        assert "--device-list-strategy" in str(refusal.details())


class Garbage(grpc.GenericRpcHandler):
    """A plugin that answers the calls ``calls`` with invalid messages, and the others like a plugin of one device."""

    def __init__(self, *calls: str) -> None:
        self._calls = calls

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        call = details.method.rpartition("/")[2]
        sane = {
            "GetDevicePluginOptions": api.DevicePluginOptions(pre_start_required=True),
            "ListAndWatch": api.ListAndWatchResponse(devices=[api.Device(ID="sim-0", health="Healthy")]),
            "Allocate": api.AllocateResponse(container_responses=[api.ContainerAllocateResponse()]),
            "PreStartContainer": api.PreStartContainerResponse(),
        }[call]
        answer = b"\xff\xff\xff" if call in self._calls else sane.SerializeToString()

        async def unary(request: bytes, context: Any) -> bytes:
            return answer

        async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
            yield answer
            await asyncio.Event().wait()

        if call == "ListAndWatch":
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)


@asynccontextmanager
async def garbage(here: Node, *calls: str) -> AsyncIterator[None]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Garbage(*calls),))
    server.add_insecure_port(f"unix:{here.upstream / 'garbage.sock'}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


@pytest.mark.parametrize("call", ["Allocate", "PreStartContainer"])
async def test_malformed_answer_of_the_vendor_is_refused_with_a_message(short_tmp: Path, call: str) -> None:
    async with node(short_tmp) as here, garbage(here, call):
        await here.register("garbage.sock")
        plugin = (await here.registered()).plugin
        if call == "Allocate":
            refusal = await fails(plugin.Allocate(allocation("sim-0")))
        else:
            await plugin.Allocate(allocation("sim-0"))
            refusal = await fails(plugin.PreStartContainer(start("sim-0"), timeout=30))
        assert f"its response to {call} is not a valid message" in str(refusal.details())
        again = await fails(plugin.PreStartContainer(start("sim-0"), timeout=30))
        assert again.details() == refusal.details()


async def test_malformed_list_of_the_vendor_is_ignored(short_tmp: Path) -> None:
    async with node(short_tmp) as here, garbage(here, "ListAndWatch"):
        await here.register("garbage.sock")
        await here.vendor(Vendor("sim-1"))
        assert (await here.registered()).lists == [{"sim-1": "Healthy"}]


async def test_vendor_whose_options_cannot_be_read_is_not_registered(short_tmp: Path) -> None:
    async with node(short_tmp) as here, garbage(here, "GetDevicePluginOptions"):
        refusal = await fails(here.register("garbage.sock"))
        assert "its response to GetDevicePluginOptions is not a valid message" in str(refusal.details())


@pytest.mark.parametrize(
    "devices",
    [
        [api.Device(ID="sim-0", health="Healthy"), api.Device(ID="sim-0", health="Healthy")],
        [api.Device(ID="", health="Healthy")],
    ],
)
async def test_invalid_list_makes_the_resource_unhealthy_until_the_vendor_registers_again(
    short_tmp: Path, devices: Sequence[api.Device]
) -> None:
    class Lying(Vendor):
        lies: Sequence[api.Device] = ()

        async def ListAndWatch(self, request: api.Empty, context: Any) -> AsyncIterator[api.ListAndWatchResponse]:
            async for each in super().ListAndWatch(request, context):
                yield api.ListAndWatchResponse(devices=self.lies) if self.lies else each

    vendor = Lying()
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        vendor.lies = devices
        await vendor.report(api.Device(ID="sim-0", health="Healthy"))
        await here.shown(registered)
        vendor.lies = ()
        await here.register("vendor-0.sock")
        await here.shown(registered, "sim-0")


# Coming and going


async def test_each_vendor_resource_is_registered_separately(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.vendor(Vendor("0"))
        await here.vendor(Vendor("1"), NIC)
        assert (await here.registered(GPU)).healthy == {"0"}
        assert (await here.registered(NIC)).healthy == {"1"}
        # The lists arrive independently.
        assert sorted(here.service.announced) == [(GPU, {"0": "sim-0"}), (NIC, {"1": "sim-1"})]


async def test_vendor_resource_is_not_registered_before_both_vendor_and_service_have_reported(short_tmp: Path) -> None:
    mute = Vendor()
    mute.hung = {"ListAndWatch"}
    async with node(short_tmp) as here:
        await here.vendor(mute)
        await here.vendor(Vendor("sim-1"), NIC)
        await here.registered(NIC)
        assert {request.resource_name for request in here.kubelet.requests} == {NIC}


async def test_vendor_that_hangs_in_an_allocation_makes_only_its_own_resource_unhealthy_for_a_while(
    short_tmp: Path,
) -> None:
    hanging = Vendor("sim-0")
    vendors = dataclasses.replace(BEHIND.vendor, allocate=1.0)
    times = steady(upstream=UpstreamResourceTimes(grace=DEADLINE, pause=0.5), vendor=vendors)
    async with node(short_tmp, times=times) as here:
        await here.vendor(hanging)
        await here.vendor(Vendor("sim-1"), NIC)
        mine, others = await here.registered(GPU), await here.registered(NIC)
        hanging.hung, before = {"Allocate"}, len(mine.lists)
        refusal = await fails(mine.plugin.Allocate(allocation("sim-0")))
        assert refusal.details() == f"The vendor's plugin for {GPU} did not respond to Allocate within 1 s."
        # It may have recovered by the time the list is read.
        await here.kubelet.until(lambda: {"sim-0": "Unhealthy"} in mine.lists[before:])
        await others.plugin.Allocate(allocation("sim-1"))
        assert others.healthy == {"sim-1"}
        hanging.hung = set()
        await here.shown(mine, "sim-0")


async def test_unresponsive_vendor_is_unhealthy_after_its_grace_period(short_tmp: Path) -> None:
    vendor = Vendor()
    # Our socket stays: if it was rotated meanwhile, the registration below might end with the old one.
    vendors = dataclasses.replace(BEHIND.vendor, heartbeat=0.2, probe=1.0)
    times = steady(upstream=UpstreamResourceTimes(grace=0.3), vendor=vendors)
    async with node(short_tmp, times=times) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        vendor.hung = {"GetDevicePluginOptions"}
        await here.shown(registered)
        vendor.hung = set()
        await here.register("vendor-0.sock")
        await here.shown(registered, "sim-0", "sim-1")


async def test_vendor_that_registers_again_within_the_grace_period_changes_no_health(short_tmp: Path) -> None:
    first, second = Vendor(), Vendor("sim-1")
    async with node(short_tmp) as here:
        await here.vendor(first)
        registered = await here.registered()
        await first.stop()
        await here.vendor(second)
        await here.kubelet.until(lambda: len(registered.lists) == 2)
        assert registered.lists == [{"sim-0": "Healthy", "sim-1": "Healthy"}, {"sim-1": "Healthy"}]
        assert len(here.kubelet.registered) == 1
        await registered.plugin.Allocate(allocation("sim-1"))
        assert (len(first.allocate_requests), len(second.allocate_requests)) == (0, 1)


async def test_allocation_continues_when_the_vendors_plugin_is_replaced_meanwhile(short_tmp: Path) -> None:
    first, second = Vendor(), Vendor()
    requested = asyncio.Event()

    async def never(devices: list[str]) -> None:
        requested.set()
        await asyncio.Event().wait()

    first.on_allocate = never
    async with node(
        short_tmp, times=steady(upstream=UpstreamResourceTimes(grace=DEADLINE, vendor_away=DEADLINE))
    ) as here:
        await here.vendor(first)
        waiting = asyncio.ensure_future((await here.registered()).plugin.Allocate(allocation("sim-0")))
        await asyncio.wait_for(requested.wait(), DEADLINE)
        await first.stop()
        await here.vendor(second)
        await asyncio.wait_for(waiting, DEADLINE)
        assert len(second.allocate_requests) == 1


async def test_upstream_socket_is_recreated_for_a_vendor_that_is_gone_and_not_for_one_that_is_present(
    short_tmp: Path,
) -> None:
    vendor = Vendor()
    # A vendor that has registered again without sending a list yet counts as away for that long, too.
    async with node(
        short_tmp, times=steady(registry=UpstreamRegistryTimes(poll=0.02, rotation_delay=3.0, closing=0.1))
    ) as here:
        await here.vendor(vendor)
        await here.registered()
        made = here.socket.stat()
        await here.register("vendor-0.sock")
        assert here.socket.stat().st_ino == made.st_ino
        async with asyncio.timeout(DEADLINE):
            watching = watchfiles.awatch(here.upstream, watch_filter=None, debounce=50, step=10, rust_timeout=500)
            (here.upstream / "vendor-0.sock").unlink()
            async for changes in watching:
                if (watchfiles.Change.added, str(here.socket)) in changes:
                    break
        assert here.socket.stat().st_mtime_ns > made.st_mtime_ns


async def test_removed_upstream_socket_is_recreated(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.vendor(Vendor())
        here.socket.unlink()
        await here.vendor(Vendor("sim-1"))
        registered = await here.registered()
        await here.shown(registered, "sim-1")


async def test_service_outage_makes_all_vendor_devices_unhealthy(short_tmp: Path) -> None:
    times = dataclasses.replace(STEADY, watch=dataclasses.replace(STEADY.watch, grace=0.5))
    async with node(short_tmp, times=times) as here:
        await here.vendor(Vendor())
        registered = await here.registered()
        await here.service.stop()
        await here.shown(registered)
        await here.service.start()
        await here.shown(registered, "sim-0", "sim-1")


async def test_kubelet_restart_does_not_affect_the_vendor(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.vendor(Vendor())
        first = await here.registered()
        made = here.socket.stat().st_ino
        await here.kubelet.stop()
        await here.kubelet.start()
        await here.kubelet.until(lambda: len(here.kubelet.registered) > 1 and bool(here.kubelet.registered[-1].lists))
        assert here.kubelet.registered[-1].healthy == first.healthy == {"sim-0", "sim-1"}
        assert here.socket.stat().st_ino == made


# Accepted registrations


@pytest.mark.parametrize(
    ("endpoint", "resource", "version", "message"),
    [
        ("x.sock", GPU, "v1alpha1", "use v1beta1"),
        ("x.sock", "gpu", "v1beta1", "is not a valid resource name"),
        ("x.sock", "kubernetes.io/gpu", "v1beta1", "is reserved for Kubernetes"),
        ("", GPU, "v1beta1", "is not a valid endpoint"),
        ("..", GPU, "v1beta1", "is not a valid endpoint"),
        ("../x.sock", GPU, "v1beta1", "is not a valid endpoint"),
        ("/run/x.sock", GPU, "v1beta1", "is not a valid endpoint"),
        ("kubelet.sock", GPU, "v1beta1", "is not a valid endpoint"),
        ("x" * 120, GPU, "v1beta1", "the limit for a Unix socket is 107"),
        ("unserved.sock", GPU, "v1beta1", "no longer exists"),
        ("file", GPU, "v1beta1", "not a socket"),
        ("link", GPU, "v1beta1", "not a socket"),
    ],
)
async def test_invalid_vendor_registration_is_refused_with_a_message(
    short_tmp: Path, endpoint: str, resource: str, version: str, message: str
) -> None:
    async with node(short_tmp) as here:
        (short_tmp / "u").mkdir(exist_ok=True)
        (short_tmp / "u" / "file").touch()
        (short_tmp / "u" / "link").symlink_to(short_tmp / "s" / "plugin" / "plugin.sock")
        assert message in str((await fails(here.register(endpoint, resource, version))).details())


async def test_only_root_and_the_plugins_user_may_register_a_vendor(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.vendor(Vendor())
        assert stat.S_IMODE(here.socket.stat().st_mode) & 0o007 == 0
    check_directory(short_tmp / "new", short_tmp)
    assert stat.S_IMODE((short_tmp / "new").stat().st_mode) == 0o700


def settings(directory: Path, upstream: Path, **more: Any) -> PluginSettings:
    return PluginSettings(
        kubelet_dir=directory, socket=directory / "s", upstream_dir=upstream, log_level="error", **more
    )


@pytest.mark.parametrize("name", ["device-plugins", "plugins_registry", "link"])
async def test_kubelets_directory_is_refused_as_the_upstream_directory(short_tmp: Path, name: str) -> None:
    (short_tmp / "device-plugins").mkdir()
    (short_tmp / "link").symlink_to(short_tmp / "device-plugins")
    with pytest.raises(InvalidConfiguration, match="kubelet's own directory"):
        await run(settings(short_tmp, short_tmp / name))
    assert list((short_tmp / "device-plugins").iterdir()) == []


async def test_upstream_directory_writable_by_others_is_refused(short_tmp: Path) -> None:
    (short_tmp / "u").mkdir()
    (short_tmp / "u").chmod(0o1777)
    with pytest.raises(InvalidConfiguration, match="any process that can write there can register"):
        await run(settings(short_tmp, short_tmp / "u"))


async def test_upstream_directory_that_a_kubelet_serves_is_refused(short_tmp: Path) -> None:
    async with FakeKubelet(short_tmp / "other"):
        with pytest.raises(InvalidConfiguration, match="Another process serves"):
            await run(settings(short_tmp, short_tmp / "other" / "device-plugins"))
        assert (short_tmp / "other" / "device-plugins" / "kubelet.sock").is_socket()


@pytest.mark.parametrize(
    ("more", "upstream", "message"),
    [
        ({"resource_name": "a.b/c"}, "u", "--resource-name cannot be combined"),
        ({"devices": DeviceSelection.parse("0")}, "u", "--devices cannot be combined"),
        ({}, "d" * 90, "the limit for a Unix socket is 107"),
        ({}, "s/file", "cannot be created"),
    ],
)
async def test_invalid_upstream_setting_is_refused_before_anything_starts(
    short_tmp: Path, more: dict[str, Any], upstream: str, message: str
) -> None:
    (short_tmp / "s").mkdir()
    (short_tmp / "s" / "file").touch()
    with pytest.raises(ScrubberError, match=message):
        await run(settings(short_tmp, short_tmp / upstream, **more))


class AwaitableLog:
    """A log that rings at every event."""

    def __init__(self) -> None:
        self.bell = Bell()
        self.events: list[str] = []

    def info(self, event: str, **facts: Any) -> None:
        self.events.append(event)
        self.bell.ring()

    debug = warning = error = info

    async def until_logged(self, event: str) -> None:
        await self.bell.until(lambda: event in self.events)


@asynccontextmanager
async def receiving(directory: Path) -> AsyncIterator[tuple[AwaitableLog, asyncio.Task[None]]]:
    log = AwaitableLog()
    behind = UpstreamProxy(
        directory / "u",
        directory,
        times=BEHIND,
        injection=NvidiaInjection(),
        publish_mapping=discard_mapping,
        log=log,
        clock=time.monotonic,
    )
    task = asyncio.create_task(behind.run())
    yield log, task
    task.cancel()
    await asyncio.wait({task})


async def test_second_instance_waits_until_the_first_has_released_the_upstream_socket(short_tmp: Path) -> None:
    path = short_tmp / "u" / "kubelet.sock"
    async with receiving(short_tmp) as (one, first):
        await one.until_logged("upstream-registry.serving")
        made = path.stat()
        async with receiving(short_tmp) as (other, _):
            await other.until_logged("upstream-registry.waiting")
            assert path.stat() == made
            first.cancel()
            await other.until_logged("upstream-registry.serving")
            assert path.is_socket()
    assert not path.exists()


async def test_upstream_socket_left_by_a_killed_instance_is_replaced(short_tmp: Path) -> None:
    (short_tmp / "u").mkdir(mode=0o700)
    path = short_tmp / "u" / "kubelet.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with receiving(short_tmp) as (log, _):
        await log.until_logged("upstream-registry.serving")
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            await asyncio.wait_for(channel.channel_ready(), DEADLINE)


async def test_start_without_a_deadline_is_served(short_tmp: Path) -> None:
    vendor = Vendor(options=api.DevicePluginOptions(pre_start_required=True))
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        await (await here.registered()).plugin.PreStartContainer(start("sim-0"))
        assert vendor.pre_starts == [["sim-0"]]
