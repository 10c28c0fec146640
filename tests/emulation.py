"""A minimal device plugin and a fast kubelet, for tests of the kubelet's side of the protocol."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from plugin.api import pluginregistration_pb2 as watched
from plugin.api import pluginregistration_pb2_grpc as watched_rpc
from scrubber.emulator import (
    ContainerSpec,
    Kubelet,
    KubeletTimings,
    PodSpec,
    RestartPolicy,
    sockets,
    writable_cgroup_parent,
)
from scrubber.wire import podresources_pb2 as lister
from scrubber.wire import podresources_pb2_grpc as lister_rpc

RESOURCE = "scrubber.dev/gpu"
SOON = 30.0
"""Seconds within which an expected event happens, on a busy machine too. It is a timeout; no test measures it."""
PF_EXITING = 0x4
"""Task flag from the kernel's ``sched.h``."""
FAST = dataclasses.replace(
    KubeletTimings().scaled(0.02),
    # Timeouts after which the kubelet gives up are not shortened: a stalled machine must not look like a plugin that
    # does not answer.
    dial_back=SOON,
    watcher_get_info=KubeletTimings().watcher_get_info,  # retried silently
    watcher_notify=SOON,
    resource_removal=KubeletTimings().resource_removal,
    pre_start_deadline=SOON,
    dra_call=SOON,
)

Context = Any
Hook = Callable[[list[str]], Awaitable[None]]


async def accept(_devices: list[str]) -> None:
    """Default hook of a plugin: accept at once."""


def timings(**changes: Any) -> KubeletTimings:
    """Return fast timings with some replaced: a test that needs a deadline to expire sets it."""
    return dataclasses.replace(FAST, **changes)


class TinyPlugin(rpc.DevicePluginServicer):
    """A device plugin for one resource. Its hooks receive the ids of a request and refuse by raising ``Refusal``."""

    def __init__(self, devices: Sequence[str] = ("gpu-0", "gpu-1"), *, options: api.DevicePluginOptions | None = None):
        self.devices = {device: api.Device(ID=device, health="Healthy") for device in devices}
        self.options = options or api.DevicePluginOptions(pre_start_required=True)
        self.on_allocate: Hook = accept
        self.on_pre_start: Hook = accept
        self.answer = api.ContainerAllocateResponse()
        self.preferred: list[str] | None = None
        self.allocate_requests: list[api.AllocateRequest] = []
        self.preferred_requests: list[api.ContainerPreferredAllocationRequest] = []
        self.pre_starts: list[list[str]] = []
        self.seconds_left: dict[str, float | None] = {}
        """Seconds that the last call of each name had left until its deadline."""
        self.statuses: list[watched.RegistrationStatus] = []
        self.info = watched.PluginInfo(type="DevicePlugin", name=RESOURCE, supported_versions=["v1beta1"])
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def serve(self, socket: Path) -> None:
        self._server = grpc.aio.server()
        rpc.add_DevicePluginServicer_to_server(self, self._server)
        watched_rpc.add_RegistrationServicer_to_server(Watched(self), self._server)
        self._server.add_insecure_port(f"unix:{socket}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def report(self, *devices: api.Device) -> None:
        """Send another full list."""
        async with self._changed:
            self.devices = {device.ID: device for device in devices}
            self._changed.notify_all()

    async def GetDevicePluginOptions(self, request: api.Empty, context: Context) -> api.DevicePluginOptions:
        return self.options

    async def ListAndWatch(self, request: api.Empty, context: Context) -> AsyncIterator[api.ListAndWatchResponse]:
        while True:
            sent = self.devices
            yield api.ListAndWatchResponse(devices=list(sent.values()))
            async with self._changed:
                while self.devices is sent:
                    await self._changed.wait()

    async def GetPreferredAllocation(
        self, request: api.PreferredAllocationRequest, context: Context
    ) -> api.PreferredAllocationResponse:
        self.preferred_requests += request.container_requests
        self.seconds_left["GetPreferredAllocation"] = context.time_remaining()
        if self.preferred is None:
            await context.abort(grpc.StatusCode.INTERNAL, "no preference today")
        answer = api.ContainerPreferredAllocationResponse(deviceIDs=self.preferred)
        return api.PreferredAllocationResponse(container_responses=[answer])

    async def Allocate(self, request: api.AllocateRequest, context: Context) -> api.AllocateResponse:
        self.allocate_requests.append(request)
        self.seconds_left["Allocate"] = context.time_remaining()
        await self._call_hook(self.on_allocate, list(request.container_requests[0].devices_ids), context)
        second = api.ContainerAllocateResponse(envs={"SECOND_RESPONSE": "read"})
        return api.AllocateResponse(container_responses=[self.answer, second])

    async def PreStartContainer(
        self, request: api.PreStartContainerRequest, context: Context
    ) -> api.PreStartContainerResponse:
        self.pre_starts.append(list(request.devices_ids))
        self.seconds_left["PreStartContainer"] = context.time_remaining()
        await self._call_hook(self.on_pre_start, list(request.devices_ids), context)
        return api.PreStartContainerResponse()

    async def _call_hook(self, hook: Hook, devices: list[str], context: Context) -> None:
        try:
            await hook(devices)
        except Refusal as refusal:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refusal))


class Refusal(Exception):
    """Raised by a hook of ``TinyPlugin`` to refuse."""


class Watched(watched_rpc.RegistrationServicer):
    """The registration service of a ``TinyPlugin``, as the plugin watcher calls it."""

    def __init__(self, plugin: TinyPlugin) -> None:
        self._plugin = plugin

    async def GetInfo(self, request: watched.InfoRequest, context: Context) -> watched.PluginInfo:
        return self._plugin.info

    async def NotifyRegistrationStatus(
        self, request: watched.RegistrationStatus, context: Context
    ) -> watched.RegistrationStatusResponse:
        self._plugin.statuses.append(request)
        return watched.RegistrationStatusResponse()


async def register(kubelet: Kubelet, endpoint: str, resource: str = RESOURCE, version: str = "v1beta1") -> None:
    """Register through ``kubelet.sock``; raises ``grpc.aio.AioRpcError`` when refused."""
    request = api.RegisterRequest(version=version, endpoint=endpoint, resource_name=resource)
    async with sockets.channel(kubelet.kubelet_socket) as channel:
        await rpc.RegistrationStub(channel).Register(request, timeout=SOON)


@asynccontextmanager
async def emulated(root: Path, *, cgroups: bool = False, **changes: Any) -> AsyncIterator[Kubelet]:
    """Run a kubelet with fast timings."""
    parent = writable_cgroup_parent() if cgroups else None
    async with Kubelet(root, timings=timings(**changes), cgroup_parent=parent) as kubelet:
        yield kubelet


@asynccontextmanager
async def registered(kubelet: Kubelet, plugin: TinyPlugin, endpoint: str = "tiny.sock") -> AsyncIterator[TinyPlugin]:
    """Serve ``plugin`` and register it through ``kubelet.sock``; yields once the kubelet knows its devices."""

    def lists(node: Kubelet) -> int:
        return sum(event.name == "ListAndWatch" for event in node.events)

    await plugin.serve(kubelet.device_plugins / endpoint)
    try:
        before = lists(kubelet)
        await register(kubelet, endpoint)
        # Wait for the list of this plugin, not for one of an earlier plugin.
        await kubelet.wait_until(
            lambda node: lists(node) > before and node.allocatable(RESOURCE) == len(plugin.devices), SOON
        )
        yield plugin
    finally:
        await plugin.stop()


def deregistered(kubelet: Kubelet) -> set[str]:
    """Return the names of the watched sockets whose removal the kubelet has noticed."""
    return {each.detail for each in kubelet.events if each.name == "Deregistered"}


@asynccontextmanager
async def serving(plugin: TinyPlugin, socket: Path) -> AsyncIterator[TinyPlugin]:
    """Serve ``plugin`` on ``socket``. The kubelet discovers sockets in ``plugins_registry/`` itself."""
    await plugin.serve(socket)
    try:
        yield plugin
    finally:
        await plugin.stop()


@asynccontextmanager
async def pod_resources(kubelet: Kubelet) -> AsyncIterator[lister_rpc.PodResourcesListerStub]:
    """Provide a client of the PodResources socket."""
    async with sockets.channel(kubelet.pod_resources_socket) as channel:
        yield lister_rpc.PodResourcesListerStub(channel)


async def listed(kubelet: Kubelet) -> dict[str, dict[str, list[str]]]:
    """Return the response of ``List``: pod name → container → device ids, sorted."""
    async with pod_resources(kubelet) as client:
        answer: lister.ListPodResourcesResponse = await client.List(lister.ListPodResourcesRequest(), timeout=SOON)
    return {
        pod.name: {each.name: sorted(i for d in each.devices for i in d.device_ids) for each in pod.containers}
        for pod in answer.pod_resources
    }


def container(
    name: str = "main",
    command: str = "sleep 60",
    *,
    gpus: int = 1,
    restart: RestartPolicy = RestartPolicy.NEVER,
    **env: str,
) -> ContainerSpec:
    """Return a container that runs a shell command; use ``exec`` where the first process matters."""
    resources = {RESOURCE: gpus} if gpus else {}
    return ContainerSpec(name, ["sh", "-c", command], resources, env, restart)


def pod(name: str = "a", *containers: ContainerSpec, init: Sequence[ContainerSpec] = (), **more: Any) -> PodSpec:
    """Return a pod, by default with one sleeping container."""
    return PodSpec(name, containers=containers or (container(),), init_containers=init, **more)


def alive(pid: int) -> bool:
    """Return whether a process exists and is neither a zombie nor exiting: those run no more instructions."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and not int(fields[6]) & PF_EXITING


async def ended(pid: int) -> None:
    """Wait until a process has ended, by its pidfd."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(handle, over.set)
    try:
        await asyncio.wait_for(over.wait(), SOON)
    finally:
        loop.remove_reader(handle)
        os.close(handle)
