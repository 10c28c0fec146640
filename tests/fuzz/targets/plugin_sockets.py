"""The socket on which the plugin answers the kubelet."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.kubelet.server import DevicePlugin, ListAndWatchStreams, PluginServer
from plugin.logs import create_logger
from scrubber.domain.device import Access, AccessKind
from scrubber.ports.runtime import Span
from tests.fuzz.connections import call
from tests.fuzz.loop import complete, on_close
from tests.fuzz.target import SOCKET_GOAL, target

_RESOURCE: Final = "nvidia.com/gpu"
_METHODS: Final[tuple[tuple[str, type[Any], type[Any]], ...]] = (
    ("GetDevicePluginOptions", kubelet.Empty, kubelet.DevicePluginOptions),
    ("GetPreferredAllocation", kubelet.PreferredAllocationRequest, kubelet.PreferredAllocationResponse),
    ("Allocate", kubelet.AllocateRequest, kubelet.AllocateResponse),
    ("PreStartContainer", kubelet.PreStartContainerRequest, kubelet.PreStartContainerResponse),
    ("ListAndWatch", kubelet.Empty, kubelet.ListAndWatchResponse),
)
_ALLOWED: Final = frozenset({grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION})


@dataclass
class _Gate:
    """Grants every start, and records for which devices."""

    granted: list[tuple[str, ...]] = field(default_factory=list)

    async def reserve(self, device_ids: Sequence[str], resource: str, span: Span) -> None: ...

    async def hand_over(self, device_ids: Sequence[str], resource: str, deadline: float | None, span: Span) -> None:
        self.granted.append(tuple(device_ids))


def _device(number: int, verdict: ServiceVerdict) -> AdvertisedDevice:
    access = (Access(AccessKind.MOUNT, f"/sim/{number}", f"/dev/simgpu{number}"),)
    healthy = verdict is ServiceVerdict.ADVERTISED
    return AdvertisedDevice(f"GPU-{number}", str(number), verdict, healthy=healthy, access=access)


@dataclass(frozen=True)
class _Served:
    gate: _Gate
    stack: AsyncExitStack
    channel: grpc.aio.Channel


async def _serve(directory: Path) -> _Served:
    advertised = AdvertisedDevices()
    verdicts = (ServiceVerdict.ADVERTISED, ServiceVerdict.ADVERTISED, ServiceVerdict.WITHHELD)
    await advertised.update(tuple(_device(number, verdict) for number, verdict in enumerate(verdicts)), "one")
    streams, gate = ListAndWatchStreams(advertised), _Gate()
    stack = AsyncExitStack()
    log = create_logger("json", "error", stack.enter_context(open(os.devnull, "w")))  # noqa: SIM115 - closed by the stack
    plugin = DevicePlugin(_RESOURCE, advertised, gate, streams=streams, log=log)
    await stack.enter_async_context(PluginServer(directory / "plugin.sock", plugin=plugin, streams=streams))
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"unix:{directory / 'plugin.sock'}"))
    return _Served(gate, stack, channel)


@cache
def _plugin() -> _Served:
    directory = Path(tempfile.mkdtemp(prefix="f-"))
    served = complete(_serve(directory))

    def stop() -> None:
        complete(served.stack.aclose())
        shutil.rmtree(directory)
        _plugin.cache_clear()

    on_close(stop)
    return served


def _request(method: int, message: Any) -> bytes:
    return bytes((method,)) + bytes(message.SerializeToString())


@target(
    "device-plugin-requests",
    parser="the kubelet's requests on the plugin's socket",
    covers=("plugin.kubelet.server", "plugin.kubelet.preferred_allocation"),
    oracle="a start is answered only after the gate granted exactly its devices, an allocation gives only devices that are "
    "advertised, and a preference names devices of the request",
    seeds=(
        b"\0",
        b"\4",
        _request(
            1,
            kubelet.PreferredAllocationRequest(
                container_requests=[
                    kubelet.ContainerPreferredAllocationRequest(
                        available_deviceIDs=["GPU-0", "GPU-1"], must_include_deviceIDs=["GPU-1"], allocation_size=1
                    )
                ]
            ),
        ),
        _request(
            2, kubelet.AllocateRequest(container_requests=[kubelet.ContainerAllocateRequest(devices_ids=["GPU-0"])])
        ),
        _request(
            2,
            kubelet.AllocateRequest(container_requests=[kubelet.ContainerAllocateRequest(devices_ids=["GPU-2", "x"])]),
        ),
        _request(3, kubelet.PreStartContainerRequest(devices_ids=["GPU-0", "GPU-1"])),
    ),
    words=(b"GPU-0", b"GPU-1", b"GPU-2", b"::0"),
    longest=256,
    seconds=30,
    goal=SOCKET_GOAL,
    share=60,
)
def device_plugin_requests(data: bytes) -> bool:
    served = _plugin()
    name, request_type, answer_type = _METHODS[(data[0] if data else 0) % len(_METHODS)]
    served.gate.granted.clear()
    status, answers = complete(call(served.channel, f"/v1beta1.DevicePlugin/{name}", data[1:], answers=1))
    try:
        request = request_type.FromString(data[1:])
    except DecodeError:
        assert status is grpc.StatusCode.UNKNOWN, "the library's answer to what is not protobuf"
        return False
    assert status in _ALLOWED, (name, status)
    assert status is grpc.StatusCode.OK or name in ("Allocate", "PreStartContainer"), "a call that never fails"
    if status is not grpc.StatusCode.OK:
        assert not served.gate.granted
        return False
    found = answer_type.FromString(answers[0])
    if name == "PreStartContainer":
        assert [sorted(set(each)) for each in served.gate.granted] == [sorted(set(request.devices_ids))]
    elif name == "Allocate":
        assert all(set(each.devices_ids) <= {"GPU-0", "GPU-1"} for each in request.container_requests), request
        for requested, given in zip(request.container_requests, found.container_responses, strict=True):
            mounted = {mount.host_path for mount in given.mounts}
            assert mounted == {f"/sim/{each.removeprefix('GPU-')}" for each in requested.devices_ids}
    elif name == "GetPreferredAllocation":
        for requested, given in zip(request.container_requests, found.container_responses, strict=True):
            assert set(given.deviceIDs) <= {*requested.available_deviceIDs, *requested.must_include_deviceIDs}
    return True
