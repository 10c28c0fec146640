"""The kubelet's PodResources socket: which pod has which device, as far as the kubelet reports.

Promise: it reports no more than the real one: active pods only, no UIDs, no ordinary init containers, one entry per
device and NUMA node, in no order; and it rejects clients that send requests too often.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping
from typing import TypeVar

import grpc

from scrubber.emulator.allocations import NO_NUMA_NODE, group_by_numa_node
from scrubber.emulator.devicemanager import DeviceManager
from scrubber.emulator.dra.manager import DraManager
from scrubber.emulator.events import Recorder
from scrubber.emulator.pods import ContainerSpec, EmulatedPod
from scrubber.emulator.timings import KubeletTimings
from scrubber.wire import podresources_pb2 as api
from scrubber.wire import podresources_pb2_grpc as rpc

Request = TypeVar("Request")
Response = TypeVar("Response")


class PodResourcesService(rpc.PodResourcesListerServicer):
    """Replies from the kubelet's memory; ``pods`` is its table by UID."""

    def __init__(
        self,
        pods: Mapping[str, EmulatedPod],
        devices: DeviceManager,
        timings: KubeletTimings,
        rng: random.Random,
        recorder: Recorder,
        dra: DraManager | None = None,
    ) -> None:
        self._pods = pods
        self._devices = devices
        self._dra = dra
        self._rng = rng
        self._recorder = recorder
        self._rate = float(timings.pod_resources_per_second)
        self._burst = float(timings.pod_resources_burst)
        self._tokens = self._burst
        self._filled_at = asyncio.get_running_loop().time()

    async def List(
        self,
        request: api.ListPodResourcesRequest,
        context: grpc.aio.ServicerContext[api.ListPodResourcesRequest, api.ListPodResourcesResponse],
    ) -> api.ListPodResourcesResponse:
        """Return every active pod, including those without devices and those still being admitted."""
        await self._admit(context)
        self._devices.prune()
        return api.ListPodResourcesResponse(pod_resources=[self._pod(pod) for pod in self._active()])

    async def Get(
        self,
        request: api.GetPodResourcesRequest,
        context: grpc.aio.ServicerContext[api.GetPodResourcesRequest, api.GetPodResourcesResponse],
    ) -> api.GetPodResourcesResponse:
        """Return one pod by name; code ``Unknown`` when there is none."""
        await self._admit(context)
        name = (request.pod_namespace, request.pod_name)
        found = next((pod for pod in self._active() if (pod.spec.namespace, pod.spec.name) == name), None)
        if found is None:
            problem = f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
            await context.abort(grpc.StatusCode.UNKNOWN, problem)
        return api.GetPodResourcesResponse(pod_resources=self._pod(found))

    async def GetAllocatableResources(
        self,
        request: api.AllocatableResourcesRequest,
        context: grpc.aio.ServicerContext[api.AllocatableResourcesRequest, api.AllocatableResourcesResponse],
    ) -> api.AllocatableResourcesResponse:
        """Return every healthy device, taken or not."""
        await self._admit(context)
        entries = [
            entry
            for resource, devices in self._devices.resources().items()
            for entry in self._entries(resource, group_by_numa_node(devices.healthy, devices.numa_nodes))
        ]
        return api.AllocatableResourcesResponse(devices=entries)

    def _active(self) -> list[EmulatedPod]:
        return [pod for pod in self._pods.values() if pod.active]

    def _pod(self, pod: EmulatedPod) -> api.PodResources:
        listed = [each for each in pod.spec.all_containers if not pod.spec.is_ordinary_init(each)]
        containers = [self._container(pod, each) for each in listed]
        return api.PodResources(name=pod.spec.name, namespace=pod.spec.namespace, containers=containers)

    def _container(self, pod: EmulatedPod, container: ContainerSpec) -> api.ContainerResources:
        entries = [
            entry
            for allocation in self._devices.allocations.of_container(pod.uid, container.name)
            for entry in self._entries(allocation.resource, allocation.by_node)
        ]
        self._rng.shuffle(entries)
        dynamic = self._dra.dynamic_resources(pod, container) if self._dra is not None else ()
        return api.ContainerResources(name=container.name, devices=entries, dynamic_resources=dynamic)

    def _entries(self, resource: str, by_node: Mapping[int, tuple[str, ...]]) -> Iterator[api.ContainerDevices]:
        for node, ids in by_node.items():
            topology = None if node == NO_NUMA_NODE else api.TopologyInfo(nodes=[api.NUMANode(ID=node)])
            for device in ids:
                yield api.ContainerDevices(resource_name=resource, device_ids=[device], topology=topology)

    async def _admit(self, context: grpc.aio.ServicerContext[Request, Response]) -> None:
        """Apply the rate limit: a bucket of ``burst`` requests that fills at ``rate`` per second."""
        self._recorder.pod_resources_requests += 1
        now = asyncio.get_running_loop().time()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        if self._tokens < 1:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._tokens -= 1
