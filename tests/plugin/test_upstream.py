"""In front of a vendor's plugin, as the kubelet, the vendor and the service see it: real sockets on all three sides."""

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

from plugin.announcements import to_nobody
from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from plugin.gate import GateTimes
from plugin.injection import Injection, ListStrategy
from plugin.kubelet import RegistrationTimes
from plugin.main import PluginSettings, PluginTimes, run
from plugin.nvidia_config import NvidiaSettings
from plugin.service import WatchTimes
from plugin.upstream.behind import Behind, BehindTimes
from plugin.upstream.reception import ReceptionTimes, check_directory
from plugin.upstream.upstream import UpstreamTimes
from plugin.upstream.vendor import VendorTimes
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import BadConfiguration, NotReady, Quarantined, ScrubberError
from tests.emulation import Refusal, TinyPlugin
from tests.plugin_collaborators import (
    PATIENCE,
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
BEHIND = BehindTimes(
    upstream=UpstreamTimes(grace=PATIENCE, rest=PATIENCE, absent=0.2),
    vendor=VendorTimes(look=0.05, pause=0.0, heartbeat=60.0, preferred=PATIENCE),
    reception=ReceptionTimes(poll=0.02, patience=PATIENCE),
)
STEADY = PluginTimes(
    gate=GateTimes(absent=0.2, retry=0.02, reserve=PATIENCE),
    registration=RegistrationTimes(stream=PATIENCE),
    watch=WatchTimes(grace=PATIENCE, heartbeat=60.0, retry=0.02),
    behind=BEHIND,
)
"""Nothing happens by itself that the test would have to be faster than."""


def steady(**changes: Any) -> PluginTimes:
    """As :data:`STEADY`, but for these parts of the times of what stands behind us."""
    return dataclasses.replace(STEADY, behind=dataclasses.replace(BEHIND, **changes))


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
        """As a vendor's plugin does; raises ``grpc.aio.AioRpcError`` when refused."""
        request = api.RegisterRequest(version=version, endpoint=endpoint, resource_name=resource)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 50)]
        async with grpc.aio.insecure_channel(f"unix:{self.socket}", options=options) as channel:
            await rpc.RegistrationStub(channel).Register(request, timeout=PATIENCE, wait_for_ready=True)

    async def vendor(self, vendor: TinyPlugin, resource: str = GPU, endpoint: str = "") -> None:
        """``vendor`` serving and registered."""
        endpoint = endpoint or f"vendor-{len(self.started)}.sock"
        await vendor.serve(self.upstream / endpoint)
        self.started.append(vendor)
        await self.register(endpoint, resource)

    async def registered(self, resource: str = GPU) -> Registered:
        """Our registration of ``resource`` with the kubelet, once it has sent a list."""

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
    directory: Path, shown: pb.Snapshot | None = None, times: PluginTimes = STEADY, injection: Injection | None = None
) -> AsyncIterator[Node]:
    """A service with two simulated devices, a kubelet, and our plugin, behind which nobody stands yet."""
    settings = PluginSettings(
        kubelet_dir=directory,
        socket=directory / "s",
        registration="classic",
        log_format="json",
        log_level="error",
        nvidia=NvidiaSettings(injection=injection or Injection()),
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


async def test_the_list_passes_through_and_only_health_is_added_to(short_tmp: Path) -> None:
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


async def test_the_kubelet_is_told_to_ask_before_every_start_whatever_the_vendor_wants(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.vendor(Vendor(options=api.DevicePluginOptions()))
        options = (await here.registered()).options
        assert (options.pre_start_required, options.get_preferred_allocation_available) == (True, True)


async def test_an_allocation_is_told_to_the_service_and_answered_by_the_vendor_unchanged(short_tmp: Path) -> None:
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


async def test_replicas_are_told_and_asked_for_as_the_kubelet_names_them(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.vendor(Vendor("sim-0::0", "sim-0::1", "sim-1::0", "sim-1::1"))
        registered = await here.registered()
        await registered.plugin.Allocate(allocation("sim-0::0", "sim-0::1"))
        await registered.plugin.PreStartContainer(start("sim-0::1", "sim-0::0"), timeout=30)
        assert here.service.announced == [(GPU, {f"sim-{d}::{n}": f"sim-{d}" for d in range(2) for n in range(2)})]
        assert here.service.reserved == [["sim-0::0", "sim-0::1"]]
        assert [(asked.resource, list(asked.device_ids)) for asked in here.service.asked] == [
            (GPU, ["sim-0::0", "sim-0::1"])
        ]


async def test_what_is_quarantined_is_refused_before_the_vendor_is_asked(short_tmp: Path) -> None:
    vendor = Vendor()
    async with node(short_tmp, snapshot(device(0, advertised=False, refusal="No: XID 95."), device(1))) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        refusal = await fails(registered.plugin.Allocate(allocation("sim-0")))
        assert (refusal.code(), refusal.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "No: XID 95.")

        async def quarantined(request: pb.ReserveRequest) -> None:
            raise Quarantined("XID 48", public="No: XID 48.")

        here.service.on_reserve = quarantined
        assert (await fails(registered.plugin.Allocate(allocation("sim-1")))).details() == "No: XID 48."
        assert vendor.allocate_requests == []


async def test_what_the_vendor_refuses_is_refused_in_its_own_words(short_tmp: Path) -> None:
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


async def test_before_a_start_the_gate_is_asked_first_and_then_the_vendor(short_tmp: Path) -> None:
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


async def test_a_start_that_the_gate_refuses_is_not_the_vendors_business(short_tmp: Path) -> None:
    async def scrubbing(request: pb.HandOverRequest) -> None:
        raise NotReady("s7", public="The device is being scrubbed (scrub s7).")

    vendor = Vendor(options=api.DevicePluginOptions(pre_start_required=True))
    async with node(short_tmp) as here:
        here.service.on_hand_over = scrubbing
        await here.vendor(vendor)
        refusal = await fails((await here.registered()).plugin.PreStartContainer(start("sim-0"), timeout=30))
        assert refusal.details() == "The device is being scrubbed (scrub s7)."
        assert vendor.pre_starts == []


async def test_a_vendor_that_does_not_want_to_be_asked_before_a_start_is_not(short_tmp: Path) -> None:
    vendor = Vendor(options=api.DevicePluginOptions(pre_start_required=False))
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        await (await here.registered()).plugin.PreStartContainer(start("sim-0"), timeout=30)
        assert vendor.pre_starts == []


async def test_no_certificate_is_spent_on_a_start_that_the_vendor_cannot_be_asked_for(short_tmp: Path) -> None:
    vendor = Vendor(options=api.DevicePluginOptions(pre_start_required=True))
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        await vendor.stop()
        # From its refusal on it is known that the vendor is away.
        await fails(registered.plugin.Allocate(allocation("sim-0"), timeout=30))
        refusal = await fails(registered.plugin.PreStartContainer(start("sim-0"), timeout=30))
        assert (refusal.code(), "is away" in (refusal.details() or "")) == (grpc.StatusCode.UNAVAILABLE, True)
        assert here.service.asked == []


# Preference


async def test_the_vendor_prefers_among_the_clean_ones(short_tmp: Path) -> None:
    vendor = Vendor(options=api.DevicePluginOptions(get_preferred_allocation_available=True))
    vendor.preferred = ["sim-1"]
    async with node(short_tmp, snapshot(device(0), device(1, certified=True))) as here:
        await here.vendor(vendor)
        plugin = (await here.registered()).plugin
        answer = await plugin.GetPreferredAllocation(preference(["sim-0", "sim-1"], 1))
        assert [list(each.deviceIDs) for each in answer.container_responses] == [["sim-1"]]
        assert [list(each.available_deviceIDs) for each in vendor.preferred_requests] == [["sim-1"]]


@pytest.mark.parametrize("how", ["no say", "an error", "nonsense", "silence"])
async def test_where_the_vendor_prefers_nothing_the_clean_ones_are_preferred(short_tmp: Path, how: str) -> None:
    vendor = Vendor(options=api.DevicePluginOptions(get_preferred_allocation_available=how != "no say"))
    vendor.preferred = ["sim-7"] if how == "nonsense" else None
    vendor.hung = {"GetPreferredAllocation"} if how == "silence" else set()
    times = steady(vendor=dataclasses.replace(BEHIND.vendor, preferred=1.0 if how == "silence" else PATIENCE))
    async with node(short_tmp, snapshot(device(0), device(1, certified=True)), times) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        answer = await registered.plugin.GetPreferredAllocation(preference(["sim-0", "sim-1"], 1))
        assert [list(each.deviceIDs) for each in answer.container_responses] == [["sim-1"]]
        assert registered.healthy == {"sim-0", "sim-1"}


# Ids


async def test_ids_that_mean_no_device_are_listed_as_unhealthy_and_never_handed_out(short_tmp: Path) -> None:
    vendor = Vendor("sim-0", "SN-77")
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        assert registered.lists[-1] == {"sim-0": "Healthy", "SN-77": "Unhealthy"}
        allocated = await fails(registered.plugin.Allocate(allocation("SN-77")))
        started = await fails(registered.plugin.PreStartContainer(start("SN-77"), timeout=30))
        for refusal in (allocated, started):
            assert "knows no device that is called so" in str(refusal.details())
        assert (vendor.allocate_requests, here.service.reserved, here.service.asked) == ([], [], [])


async def test_the_service_knows_what_a_list_means_before_the_kubelet_has_the_list(short_tmp: Path) -> None:
    told, may_go_on = asyncio.Event(), asyncio.Event()

    async def slowly(request: pb.AnnounceRequest) -> None:
        told.set()
        await may_go_on.wait()

    async with node(short_tmp) as here:
        here.service.on_announce = slowly
        await here.vendor(Vendor("0", "1"))
        await asyncio.wait_for(told.wait(), PATIENCE)
        assert here.kubelet.requests == [], "there is no list yet to register with"
        may_go_on.set()
        assert (await here.registered()).healthy == {"0", "1"}


async def test_a_service_that_was_started_anew_is_told_what_ids_mean_without_a_change_of_the_list(
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


async def test_what_an_id_was_stays_announced_when_the_vendor_lists_it_no_more(short_tmp: Path) -> None:
    vendor = Vendor("0", "1")
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        await vendor.report(api.Device(ID="1", health="Healthy"))
        await here.shown(registered, "1")
        assert here.service.announced[-1] == (GPU, {"0": "sim-0", "1": "sim-1"})
        await registered.plugin.PreStartContainer(start("0"), timeout=30)
        assert list(here.service.asked[-1].device_ids) == ["0"]


async def test_a_container_that_restarts_on_an_id_that_no_list_of_ours_had_is_asked_for(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.vendor(Vendor("1"))
        registered = await here.registered()
        await registered.plugin.PreStartContainer(start("0"), timeout=30)
        assert here.service.announced[-1] == (GPU, {"1": "sim-1", "0": "sim-0"})
        assert list(here.service.asked[-1].device_ids) == ["0"]


async def test_an_id_that_has_become_another_device_is_never_handed_out_again(short_tmp: Path) -> None:
    """An index counts anew when a device is lost; containers keep the answer that they were given."""
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
            assert "it was sim-0 and is sim-1 now" in str(refusal.details())
        assert (here.service.reserved, here.service.asked) == ([], [])


async def test_a_service_that_cannot_be_told_keeps_nobody_from_registering(short_tmp: Path) -> None:
    async def broken(request: pb.AnnounceRequest) -> None:
        raise ScrubberError("no")

    async with node(short_tmp) as here:
        here.service.on_announce = broken
        await here.vendor(Vendor("0", "1"))
        assert (await here.registered()).healthy == {"0", "1"}


async def test_one_device_in_two_resources_is_handed_out_in_neither(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.vendor(Vendor("sim-0", "sim-1"))
        registered = await here.registered()
        await here.vendor(Vendor("0"), NIC)
        await here.shown(registered, "sim-1")
        assert (await here.registered(NIC)).lists[-1] == {"0": "Unhealthy"}


async def test_a_device_that_appears_later_on_the_node_makes_its_id_a_name(short_tmp: Path) -> None:
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
        assert [list(asked.device_ids) for asked in here.service.asked] == [["sim-0"]]


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (allocation(), "needs at least one device id"),
        (api.AllocateRequest(), "needs at least one device id"),
        (allocation("sim-0", "sim-0"), "twice"),
        (allocation(""), "empty id"),
        (allocation("sim-9"), "not one of this plugin's"),
    ],
)
async def test_an_allocation_that_makes_no_sense_does_not_reach_the_vendor(
    short_tmp: Path, request_: api.AllocateRequest, sentence: str
) -> None:
    vendor = Vendor()
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        refusal = await fails((await here.registered()).plugin.Allocate(request_))
        assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in str(refusal.details())
        assert vendor.allocate_requests == []


# Answers


async def test_an_answer_that_gives_another_device_is_refused_and_ends_the_trust(short_tmp: Path) -> None:
    vendor = Vendor("0", "1")
    other = "/sim/1/memory"
    vendor.answer = api.ContainerAllocateResponse(mounts=[api.Mount(host_path=other, container_path="/dev/simgpu1")])
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        refusal = await fails(registered.plugin.Allocate(allocation("0")))
        assert refusal.details() == (
            f"The vendor's plugin for {GPU} gives another device than the one that was asked for."
        )
        again = await fails(registered.plugin.Allocate(allocation("1")))
        assert again.details() == refusal.details(), "which device it was is not for pods"
        await here.shown(registered)
        vendor.answer = api.ContainerAllocateResponse()
        await here.register("vendor-0.sock")
        await here.shown(registered, "0", "1")


async def test_devices_are_not_announced_by_the_variable_when_the_vendor_was_told_otherwise(short_tmp: Path) -> None:
    vendor = Vendor()
    vendor.answer = api.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": "sim-0"})
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        await (await here.registered()).plugin.Allocate(allocation("sim-0"))
    strict = Injection(strategies=(ListStrategy.VOLUME_MOUNTS,))
    short = short_tmp / "2"
    short.mkdir()
    async with node(short, injection=strict) as here:
        await here.vendor(vendor)
        refusal = await fails((await here.registered()).plugin.Allocate(allocation("sim-0")))
        assert "--device-list-strategy" in str(refusal.details())


class Garbage(grpc.GenericRpcHandler):
    """Answers what is no message to whichever calls it is told to, and else what a plugin of one device would."""

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
async def test_bytes_that_are_no_answer_are_refused_with_a_sentence(short_tmp: Path, call: str) -> None:
    async with node(short_tmp) as here, garbage(here, call):
        await here.register("garbage.sock")
        plugin = (await here.registered()).plugin
        if call == "Allocate":
            refusal = await fails(plugin.Allocate(allocation("sim-0")))
        else:
            await plugin.Allocate(allocation("sim-0"))
            refusal = await fails(plugin.PreStartContainer(start("sim-0"), timeout=30))
        assert f"its answer to {call} cannot be read" in str(refusal.details())
        again = await fails(plugin.PreStartContainer(start("sim-0"), timeout=30))
        assert again.details() == refusal.details()


async def test_a_list_that_is_no_message_is_no_list(short_tmp: Path) -> None:
    async with node(short_tmp) as here, garbage(here, "ListAndWatch"):
        await here.register("garbage.sock")
        await here.vendor(Vendor("sim-1"))
        assert (await here.registered()).lists == [{"sim-1": "Healthy"}]


async def test_a_plugin_whose_options_cannot_be_read_is_not_taken(short_tmp: Path) -> None:
    async with node(short_tmp) as here, garbage(here, "GetDevicePluginOptions"):
        refusal = await fails(here.register("garbage.sock"))
        assert "its answer to GetDevicePluginOptions cannot be read" in str(refusal.details())


@pytest.mark.parametrize(
    "devices",
    [
        [api.Device(ID="sim-0", health="Healthy"), api.Device(ID="sim-0", health="Healthy")],
        [api.Device(ID="", health="Healthy")],
    ],
)
async def test_a_list_that_makes_no_sense_makes_everything_unhealthy_until_the_plugin_registers_again(
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


async def test_several_resources_are_registered_each_for_itself(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.vendor(Vendor("0"))
        await here.vendor(Vendor("1"), NIC)
        assert (await here.registered(GPU)).healthy == {"0"}
        assert (await here.registered(NIC)).healthy == {"1"}
        # Each list comes when its plugin sends it.
        assert sorted(here.service.announced) == [(GPU, {"0": "sim-0"}), (NIC, {"1": "sim-1"})]


async def test_nothing_is_registered_before_vendor_and_service_have_both_spoken(short_tmp: Path) -> None:
    mute = Vendor()
    mute.hung = {"ListAndWatch"}
    async with node(short_tmp) as here:
        await here.vendor(mute)
        await here.vendor(Vendor("sim-1"), NIC)
        await here.registered(NIC)
        assert {request.resource_name for request in here.kubelet.requests} == {NIC}


async def test_a_plugin_that_hangs_in_an_allocation_costs_its_own_resource_for_a_while(short_tmp: Path) -> None:
    hanging = Vendor("sim-0")
    vendors = dataclasses.replace(BEHIND.vendor, allocate=1.0)
    times = steady(upstream=UpstreamTimes(grace=PATIENCE, rest=0.5), vendor=vendors)
    async with node(short_tmp, times=times) as here:
        await here.vendor(hanging)
        await here.vendor(Vendor("sim-1"), NIC)
        mine, others = await here.registered(GPU), await here.registered(NIC)
        hanging.hung, before = {"Allocate"}, len(mine.lists)
        refusal = await fails(mine.plugin.Allocate(allocation("sim-0")))
        assert refusal.details() == f"The vendor's plugin for {GPU} did not answer Allocate within 1 s."
        # It may be over by the time that somebody looks.
        await here.kubelet.until(lambda: {"sim-0": "Unhealthy"} in mine.lists[before:])
        await others.plugin.Allocate(allocation("sim-1"))
        assert others.healthy == {"sim-1"}
        hanging.hung = set()
        await here.shown(mine, "sim-0")


async def test_a_plugin_that_says_nothing_and_answers_nothing_is_unhealthy_after_the_grace(short_tmp: Path) -> None:
    vendor = Vendor()
    # Our socket stays: were it made anew meanwhile, the registration below might be cut short with the old one.
    vendors = dataclasses.replace(BEHIND.vendor, heartbeat=0.2, probe=1.0)
    times = steady(upstream=UpstreamTimes(grace=0.3), vendor=vendors)
    async with node(short_tmp, times=times) as here:
        await here.vendor(vendor)
        registered = await here.registered()
        vendor.hung = {"GetDevicePluginOptions"}
        await here.shown(registered)
        vendor.hung = set()
        await here.register("vendor-0.sock")
        await here.shown(registered, "sim-0", "sim-1")


async def test_a_plugin_that_registers_again_within_the_grace_changes_nobodys_health(short_tmp: Path) -> None:
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


async def test_an_allocation_goes_on_when_the_plugin_is_replaced_under_it(short_tmp: Path) -> None:
    first, second = Vendor(), Vendor()
    asked = asyncio.Event()

    async def never(devices: list[str]) -> None:
        asked.set()
        await asyncio.Event().wait()

    first.on_allocate = never
    async with node(short_tmp, times=steady(upstream=UpstreamTimes(grace=PATIENCE, absent=PATIENCE))) as here:
        await here.vendor(first)
        waiting = asyncio.ensure_future((await here.registered()).plugin.Allocate(allocation("sim-0")))
        await asyncio.wait_for(asked.wait(), PATIENCE)
        await first.stop()
        await here.vendor(second)
        await asyncio.wait_for(waiting, PATIENCE)
        assert len(second.allocate_requests) == 1


async def test_the_socket_is_made_anew_for_a_plugin_that_is_gone_and_not_for_one_that_is_there(short_tmp: Path) -> None:
    vendor = Vendor()
    # One that has registered again and has sent no list yet is away for that long, too.
    async with node(short_tmp, times=steady(reception=ReceptionTimes(poll=0.02, patience=3.0, closing=0.1))) as here:
        await here.vendor(vendor)
        await here.registered()
        made = here.socket.stat()
        await here.register("vendor-0.sock")
        assert here.socket.stat().st_ino == made.st_ino
        async with asyncio.timeout(PATIENCE):
            watching = watchfiles.awatch(here.upstream, watch_filter=None, debounce=50, step=10, rust_timeout=500)
            (here.upstream / "vendor-0.sock").unlink()
            async for changes in watching:
                if (watchfiles.Change.added, str(here.socket)) in changes:
                    break
        assert here.socket.stat().st_mtime_ns > made.st_mtime_ns


async def test_a_socket_of_ours_that_was_removed_is_made_anew(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.vendor(Vendor())
        here.socket.unlink()
        await here.vendor(Vendor("sim-1"))
        registered = await here.registered()
        await here.shown(registered, "sim-1")


async def test_a_service_that_stays_away_makes_everything_unhealthy(short_tmp: Path) -> None:
    times = dataclasses.replace(STEADY, watch=dataclasses.replace(STEADY.watch, grace=0.5))
    async with node(short_tmp, times=times) as here:
        await here.vendor(Vendor())
        registered = await here.registered()
        await here.service.stop()
        await here.shown(registered)
        await here.service.start()
        await here.shown(registered, "sim-0", "sim-1")


async def test_the_kubelets_restart_is_no_news_for_the_vendor(short_tmp: Path) -> None:
    async with node(short_tmp) as here:
        await here.vendor(Vendor())
        first = await here.registered()
        made = here.socket.stat().st_ino
        await here.kubelet.stop()
        await here.kubelet.start()
        await here.kubelet.until(lambda: len(here.kubelet.registered) > 1 and bool(here.kubelet.registered[-1].lists))
        assert here.kubelet.registered[-1].healthy == first.healthy == {"sim-0", "sim-1"}
        assert here.socket.stat().st_ino == made


# Who may come


@pytest.mark.parametrize(
    ("endpoint", "resource", "version", "sentence"),
    [
        ("x.sock", GPU, "v1alpha1", "register as v1beta1"),
        ("x.sock", "gpu", "v1beta1", "is no name for a resource"),
        ("x.sock", "kubernetes.io/gpu", "v1beta1", "belongs to Kubernetes"),
        ("", GPU, "v1beta1", "is no endpoint"),
        ("..", GPU, "v1beta1", "is no endpoint"),
        ("../x.sock", GPU, "v1beta1", "is no endpoint"),
        ("/run/x.sock", GPU, "v1beta1", "is no endpoint"),
        ("kubelet.sock", GPU, "v1beta1", "is no endpoint"),
        ("x" * 120, GPU, "v1beta1", "may have 107"),
        ("nobody.sock", GPU, "v1beta1", "is gone"),
        ("file", GPU, "v1beta1", "not a socket"),
        ("link", GPU, "v1beta1", "not a socket"),
    ],
)
async def test_a_registration_that_cannot_be_is_refused_with_a_sentence(
    short_tmp: Path, endpoint: str, resource: str, version: str, sentence: str
) -> None:
    async with node(short_tmp) as here:
        (short_tmp / "u").mkdir(exist_ok=True)
        (short_tmp / "u" / "file").touch()
        (short_tmp / "u" / "link").symlink_to(short_tmp / "s" / "plugin" / "plugin.sock")
        assert sentence in str((await fails(here.register(endpoint, resource, version))).details())


async def test_only_root_and_this_user_may_register(short_tmp: Path) -> None:
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
async def test_the_kubelets_own_directory_is_refused(short_tmp: Path, name: str) -> None:
    (short_tmp / "device-plugins").mkdir()
    (short_tmp / "link").symlink_to(short_tmp / "device-plugins")
    with pytest.raises(BadConfiguration, match="kubelet's own directory"):
        await run(settings(short_tmp, short_tmp / name))
    assert list((short_tmp / "device-plugins").iterdir()) == []


async def test_a_directory_that_others_may_write_to_is_refused(short_tmp: Path) -> None:
    (short_tmp / "u").mkdir()
    (short_tmp / "u").chmod(0o1777)
    with pytest.raises(BadConfiguration, match="who may write there may register"):
        await run(settings(short_tmp, short_tmp / "u"))


async def test_a_directory_that_a_kubelet_serves_is_refused(short_tmp: Path) -> None:
    async with FakeKubelet(short_tmp / "other"):
        with pytest.raises(BadConfiguration, match="Somebody else serves"):
            await run(settings(short_tmp, short_tmp / "other" / "device-plugins"))
        assert (short_tmp / "other" / "device-plugins" / "kubelet.sock").is_socket()


@pytest.mark.parametrize(
    ("more", "upstream", "sentence"),
    [
        ({"resource_name": "a.b/c"}, "u", "--resource-name says nothing"),
        ({}, "d" * 90, "may have 107"),
        ({}, "s/file", "cannot be made a directory"),
    ],
)
async def test_a_setting_that_cannot_work_is_refused_before_anything_is_started(
    short_tmp: Path, more: dict[str, Any], upstream: str, sentence: str
) -> None:
    (short_tmp / "s").mkdir()
    (short_tmp / "s" / "file").touch()
    with pytest.raises(ScrubberError, match=sentence):
        await run(settings(short_tmp, short_tmp / upstream, **more))


class Told:
    """A log that rings at every event."""

    def __init__(self) -> None:
        self.bell = Bell()
        self.events: list[str] = []

    def info(self, event: str, **facts: Any) -> None:
        self.events.append(event)
        self.bell.ring()

    debug = warning = error = info

    async def says(self, event: str) -> None:
        await self.bell.until(lambda: event in self.events)


@asynccontextmanager
async def receiving(directory: Path) -> AsyncIterator[tuple[Told, asyncio.Task[None]]]:
    log = Told()
    behind = Behind(
        directory / "u",
        directory,
        times=BEHIND,
        injection=Injection(),
        announce=to_nobody,
        log=log,
        clock=time.monotonic,
    )
    task = asyncio.create_task(behind.run())
    yield log, task
    task.cancel()
    await asyncio.wait({task})


async def test_a_second_instance_waits_until_the_first_is_gone(short_tmp: Path) -> None:
    path = short_tmp / "u" / "kubelet.sock"
    async with receiving(short_tmp) as (one, first):
        await one.says("reception.serving")
        made = path.stat()
        async with receiving(short_tmp) as (other, _):
            await other.says("reception.waiting")
            assert path.stat() == made
            first.cancel()
            await other.says("reception.serving")
            assert path.is_socket()
    assert not path.exists()


async def test_a_socket_that_a_killed_instance_left_is_replaced(short_tmp: Path) -> None:
    (short_tmp / "u").mkdir(mode=0o700)
    path = short_tmp / "u" / "kubelet.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with receiving(short_tmp) as (log, _):
        await log.says("reception.serving")
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            await asyncio.wait_for(channel.channel_ready(), PATIENCE)


async def test_a_start_without_a_deadline_is_served_too(short_tmp: Path) -> None:
    vendor = Vendor(options=api.DevicePluginOptions(pre_start_required=True))
    async with node(short_tmp) as here:
        await here.vendor(vendor)
        await (await here.registered()).plugin.PreStartContainer(start("sim-0"))
        assert vendor.pre_starts == [["sim-0"]]
