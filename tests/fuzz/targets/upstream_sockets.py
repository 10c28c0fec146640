"""The two sockets in front of a vendor's plugin: its registration, and the kubelet's requests that are passed on."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.api import deviceplugin_pb2_grpc as rpc
from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict
from plugin.kubelet.server import ListAndWatchStreams, PluginServer
from plugin.logs import create_logger
from plugin.nvidia.injection import NvidiaInjection
from plugin.upstream.proxy import UpstreamProxy, UpstreamProxyTimes
from scrubber.domain.device import Access, AccessKind
from scrubber.ports.runtime import Span
from tests.fuzz.connections import CONNECTION_SEEDS, CONNECTION_WORDS, DEADLINE, call, frames, send
from tests.fuzz.loop import complete, on_close
from tests.fuzz.target import SOCKET_GOAL, target

_RESOURCE: Final = "vendor.example/gpu"
_ENDPOINT: Final = "vendor.sock"
_REGISTER: Final = "/v1beta1.Registration/Register"


class _Vendor(rpc.DevicePluginServicer):
    """A vendor's plugin that does what is requested, and records the starts."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []

    async def GetDevicePluginOptions(self, request: kubelet.Empty, context: Any) -> kubelet.DevicePluginOptions:
        return kubelet.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

    async def ListAndWatch(self, request: kubelet.Empty, context: Any) -> AsyncIterator[kubelet.ListAndWatchResponse]:
        yield kubelet.ListAndWatchResponse(
            devices=[kubelet.Device(ID=each, health="Healthy") for each in ("GPU-0", "GPU-1", "GPU-2")]
        )
        await asyncio.Event().wait()

    async def GetPreferredAllocation(
        self, request: kubelet.PreferredAllocationRequest, context: Any
    ) -> kubelet.PreferredAllocationResponse:
        chosen = [list(each.available_deviceIDs)[: each.allocation_size] for each in request.container_requests]
        return kubelet.PreferredAllocationResponse(container_responses=[{"deviceIDs": each} for each in chosen])

    async def Allocate(self, request: kubelet.AllocateRequest, context: Any) -> kubelet.AllocateResponse:
        return kubelet.AllocateResponse(
            container_responses=[{"envs": {"IDS": ",".join(each.devices_ids)}} for each in request.container_requests]
        )

    async def PreStartContainer(
        self, request: kubelet.PreStartContainerRequest, context: Any
    ) -> kubelet.PreStartContainerResponse:
        self.started.append(list(request.devices_ids))
        return kubelet.PreStartContainerResponse()


@dataclass
class _Gate:
    """Grants every start, and records for which devices."""

    granted: list[tuple[str, ...]] = field(default_factory=list)

    async def reserve(self, device_ids: Sequence[str], resource: str, span: Span) -> None: ...

    async def hand_over(self, device_ids: Sequence[str], resource: str, deadline: float | None, span: Span) -> None:
        self.granted.append(tuple(device_ids))


@dataclass(frozen=True)
class _Served:
    directory: Path
    vendor: _Vendor
    gate: _Gate
    proxy: UpstreamProxy
    stack: AsyncExitStack
    registry: grpc.aio.Channel
    plugin: grpc.aio.Channel


def _device(number: int) -> AdvertisedDevice:
    access = (Access(AccessKind.MOUNT, f"/sim/{number}", f"/dev/simgpu{number}"),)
    verdict = ServiceVerdict.WITHHELD if number == 2 else ServiceVerdict.ADVERTISED
    return AdvertisedDevice(f"GPU-{number}", str(number), verdict, healthy=number < 2, access=access)


async def _ignore(resource: str, meanings: Mapping[str, str], epoch: str) -> None: ...


async def _serve(directory: Path) -> _Served:
    stack = AsyncExitStack()
    log = create_logger("json", "error", stack.enter_context(open(os.devnull, "w")))  # noqa: SIM115 - closed by the stack
    proxy = UpstreamProxy(
        directory / "u",
        directory / "kubelet",
        times=UpstreamProxyTimes(),
        injection=NvidiaInjection(),
        publish_mapping=_ignore,
        log=log,
        clock=time.monotonic,
    )
    await proxy.devices.update(tuple(map(_device, range(3))), "one")
    vendor, gate = _Vendor(), _Gate()
    server = grpc.aio.server()
    rpc.add_DevicePluginServicer_to_server(vendor, server)
    server.add_insecure_port(f"unix:{directory / 'u' / _ENDPOINT}")
    await server.start()
    stack.push_async_callback(server.stop, None)
    task = asyncio.create_task(proxy.run())

    async def stop() -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    stack.push_async_callback(stop)
    registry = await stack.enter_async_context(
        grpc.aio.insecure_channel(
            f"unix:{directory / 'u' / 'kubelet.sock'}", options=[("grpc.initial_reconnect_backoff_ms", 20)]
        )
    )
    async with asyncio.timeout(DEADLINE):
        await registry.channel_ready()
        status, _ = await call(registry, _REGISTER, _registration()[1:])
        assert status is grpc.StatusCode.OK, status
        await proxy.devices.wait_until(lambda: _RESOURCE in proxy.devices.lists)
    streams = ListAndWatchStreams(proxy.devices.lists[_RESOURCE])
    plugin = proxy.create_plugin(_RESOURCE, gate, streams)
    await stack.enter_async_context(PluginServer(directory / "plugin.sock", plugin=plugin, streams=streams))
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"unix:{directory / 'plugin.sock'}"))
    return _Served(directory, vendor, gate, proxy, stack, registry, channel)


@cache
def _upstream(purpose: str) -> _Served:
    """Return the sockets for one target: what it registers changes those of no other."""
    directory = Path(tempfile.mkdtemp(prefix="f-"))
    served = complete(_serve(directory))

    def stop() -> None:
        complete(served.stack.aclose())
        shutil.rmtree(directory)
        _upstream.cache_clear()

    on_close(stop)
    return served


def _registration(resource: str = _RESOURCE, endpoint: str = _ENDPOINT, version: str = "v1beta1") -> bytes:
    request = kubelet.RegisterRequest(version=version, endpoint=endpoint, resource_name=resource)
    return b"\0" + bytes(request.SerializeToString())


def _registered(data: bytes) -> bytes:
    """Return the message in ``data`` without its first byte; if that is 1, a valid one with the rest in three of its fields."""
    if data[:1] != b"\1":
        return data[1:]
    name, endpoint, version, *_ = (*(each.decode(errors="replace") for each in data[1:].split(b"\0")), "", "", "")
    return _registration(f"vendor.example/gpu{name}", endpoint or _ENDPOINT, version or "v1beta1")[1:]


@target(
    "upstream-registrations",
    parser="the registration of a vendor's plugin",
    covers=("plugin.upstream.registry",),
    oracle="a plugin is registered only with the version of the protocol, a name that Kubernetes allows, and the name of a "
    "socket beside ours that answers; every other registration is refused as the vendor's mistake or as not available",
    seeds=(
        _registration(),
        _registration("vendor.example/nic"),
        _registration(endpoint="../vendor.sock"),
        _registration(endpoint="kubelet.sock"),
        _registration(endpoint="absent.sock"),
        _registration(endpoint=".scrubber.lock"),
        _registration("kubernetes.io/gpu"),
        _registration(version="v1alpha1"),
        b"\1",
        b"\1-a100",
        b"\1-a_100.x",
        b"\1\0../vendor.sock",
        b"\1\0\0v1beta2",
    ),
    words=(b"v1beta1", b"\x12\x0bvendor.sock", b"vendor.example/", b"kubernetes.io/", b"../", b"/", b"\0", b"."),
    longest=512,
    seconds=60,
    goal=SOCKET_GOAL,
    share=40,
)
def upstream_registrations(data: bytes) -> bool:
    served = _upstream("registrations")
    message = _registered(data)
    status, _ = complete(call(served.registry, _REGISTER, message))
    try:
        request = kubelet.RegisterRequest.FromString(message)
    except DecodeError:
        assert status is grpc.StatusCode.UNKNOWN, "the library's answer to what is not protobuf"
        return False
    if status is not grpc.StatusCode.OK:
        assert status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE), status
        assert (request.version, request.resource_name, request.endpoint) != ("v1beta1", _RESOURCE, _ENDPOINT)
        return False
    domain, _, name = request.resource_name.partition("/")
    assert request.version == "v1beta1"
    assert request.endpoint == _ENDPOINT
    assert name.isascii()
    assert name.replace("-", "").replace("_", "").replace(".", "").isalnum()
    assert domain == domain.lower()
    assert not domain.endswith("kubernetes.io")
    assert len(served.proxy.devices.upstreams) <= 64
    return True


_METHODS: Final = tuple(
    (each.name, getattr(kubelet, each.input_type.name), getattr(kubelet, each.output_type.name))
    for each in kubelet.DESCRIPTOR.services_by_name["DevicePlugin"].methods
)
_NUMBERS: Final = {name: number for number, (name, _, _) in enumerate(_METHODS)}


def _request(method: str, **fields: Any) -> bytes:
    number = _NUMBERS[method]
    return bytes((number,)) + bytes(_METHODS[number][1](**fields).SerializeToString())


def _advertised(ids: Collection[str]) -> bool:
    return bool(ids) and set(ids) <= {"GPU-0", "GPU-1"}


@target(
    "upstream-requests",
    parser="the kubelet's requests that are passed on to a vendor's plugin",
    covers=("plugin.upstream.server", "plugin.upstream.vendor"),
    oracle="a start is passed on only after the gate granted exactly its devices, an allocation only for devices that are "
    "advertised, and a preference names devices of the request",
    seeds=(
        *(bytes((number,)) for number in range(len(_METHODS))),
        _request("Allocate", container_requests=[{"devices_ids": ["GPU-0"]}, {"devices_ids": ["GPU-1"]}]),
        _request("Allocate", container_requests=[{"devices_ids": ["GPU-2", "x"]}]),
        _request("PreStartContainer", devices_ids=["GPU-0", "GPU-1"]),
        _request("PreStartContainer", devices_ids=["GPU-7"]),
        _request(
            "GetPreferredAllocation",
            container_requests=[{"available_deviceIDs": ["GPU-0", "GPU-1"], "allocation_size": 1}],
        ),
    ),
    words=(b"GPU-0", b"GPU-1", b"GPU-2", b"::0", b"\x0a\5GPU-0", b"\x0a\5GPU-1"),
    longest=256,
    seconds=60,
    goal=SOCKET_GOAL,
    share=60,
)
def upstream_requests(data: bytes) -> bool:
    served = _upstream("requests")
    name, request_type, answer_type = _METHODS[(data[0] if data else 0) % len(_METHODS)]
    served.gate.granted.clear()
    served.vendor.started.clear()
    status, answers = complete(call(served.plugin, f"/v1beta1.DevicePlugin/{name}", data[1:], answers=1))
    granted, started = served.gate.granted, served.vendor.started
    try:
        request = request_type.FromString(data[1:])
    except DecodeError:
        assert status is grpc.StatusCode.UNKNOWN, "the library's answer to what is not protobuf"
        assert not granted
        return False
    if status is not grpc.StatusCode.OK:
        assert status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION), (name, status)
        assert not granted
        assert not started
        return False
    found = answer_type.FromString(answers[0])
    if name == "PreStartContainer":
        assert [sorted(each) for each in granted] == [sorted(set(request.devices_ids))]
        assert started == [list(request.devices_ids)]
    elif name == "Allocate":
        assert all(_advertised(each.devices_ids) for each in request.container_requests), request
        given = [each.envs["IDS"] for each in found.container_responses]
        assert given == [",".join(each.devices_ids) for each in request.container_requests]
    elif name == "GetPreferredAllocation":
        for each, preferred in zip(request.container_requests, found.container_responses, strict=True):
            assert set(preferred.deviceIDs) <= {*each.available_deviceIDs, *each.must_include_deviceIDs}
    return True


@target(
    "upstream-connections",
    parser="raw bytes and HTTP/2 frames on the plugin's socket and on that for vendors' plugins",
    covers=("plugin.upstream.registry", "plugin.kubelet.server"),
    oracle="the server ends the connection once the client has ended it, and both sockets answer the next caller",
    seeds=CONNECTION_SEEDS,
    words=CONNECTION_WORDS,
    longest=512,
    seconds=60,
    goal=SOCKET_GOAL,
    share=40,
)
def upstream_connections(data: bytes) -> bool:
    served = _upstream("requests")
    path = served.directory / ("plugin.sock" if sum(data) % 2 else "u/kubelet.sock")
    answer = complete(send(path, frames(data)))
    status, answers = complete(call(served.plugin, "/v1beta1.DevicePlugin/GetDevicePluginOptions", b""))
    assert status is grpc.StatusCode.OK, status
    assert kubelet.DevicePluginOptions.FromString(answers[0]).pre_start_required
    status, _ = complete(call(served.registry, _REGISTER, b""))
    assert status is grpc.StatusCode.INVALID_ARGUMENT, status
    return bool(answer)
