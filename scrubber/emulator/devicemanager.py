"""The kubelet's device manager: which container may have which device, and what each container is started with.

Promise: decisions and refusals are the real kubelet's. An instance of :class:`DeviceManager` lives as long as the
kubelet's process; what must outlive that process is in the checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plugin.api import deviceplugin_pb2 as api
from scrubber.emulator.allocations import (
    Allocation,
    Allocations,
    CheckpointUnreadable,
    group_by_numa_node,
    read_checkpoint,
    write_checkpoint,
)
from scrubber.emulator.devicestore import ResourceDevices
from scrubber.emulator.events import RpcFailed
from scrubber.emulator.pluginclient import DevicePluginClient
from scrubber.emulator.pods import ContainerSpec, EmulatedPod
from scrubber.emulator.timings import KubeletTimings

log = logging.getLogger(__name__)


class AllocationRefused(Exception):
    """A container cannot be given its devices: the pod's admission fails permanently."""


class StartRefused(Exception):
    """A container may not be started now: it waits in ``CreateContainerConfigError``, and its start is tried again."""

    def __init__(self, message: str, *, deadline_exceeded: bool = False) -> None:
        super().__init__(message)
        self.deadline_exceeded = deadline_exceeded


@dataclass(slots=True)
class RegisteredEndpoint:
    """A registered plugin; ``client`` and ``options`` are ``None`` from a kubelet restart to the next registration."""

    client: DevicePluginClient | None = None
    options: api.DevicePluginOptions | None = None
    stopped: bool = False

    def running_client(self, resource: str) -> DevicePluginClient:
        if self.client is None or self.stopped:
            where = self.client.socket if self.client else resource
            raise AllocationRefused(f"endpoint {where} has been stopped")
        return self.client


@dataclass(frozen=True, slots=True)
class ContainerRunOptions:
    """What plugins add to a container's start, merged over its resources."""

    envs: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[api.Mount] = ()
    devices: Sequence[api.DeviceSpec] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi_devices: Sequence[str] = ()


class DeviceManager:
    """Devices by resource, endpoints by resource, allocations."""

    def __init__(
        self,
        directory: Path,
        timings: KubeletTimings,
        rng: random.Random,
        *,
        active_pod_uids: Callable[[], Collection[str] | None],
        on_change: Callable[[], None],
    ) -> None:
        """Initialise the manager; :meth:`start` loads the checkpoint.

        Args:
            active_pod_uids: returns the UIDs of the pods that hold devices, or ``None`` until the API server's pods
                have arrived: nothing is pruned before that.
            on_change: called after every change of devices, health or assignments.
        """
        self._directory = directory
        self._timings = timings
        self._rng = rng
        self._active = active_pod_uids
        self._changed = on_change
        self._endpoints: dict[str, RegisteredEndpoint] = {}
        self._resources: dict[str, ResourceDevices] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._reusable: tuple[str, dict[str, set[str]]] = ("", {})
        self.allocations = Allocations()

    def start(self) -> None:
        """Load the checkpoint. Resources that it names count 0 devices until their plugins register again."""
        try:
            self.allocations, registered = read_checkpoint(self._directory)
        except CheckpointUnreadable as error:
            # As the real kubelet does: it continues without, and users of the file must expect that.
            log.warning("continuing without a checkpoint: %s", error)
            return
        for resource in registered:
            self._resources[resource] = ResourceDevices()
            self._stop_endpoint(resource, RegisteredEndpoint())

    def stop(self) -> None:
        """Cancel the timers, which end with the process."""
        for timer in self._timers:
            timer.cancel()

    # What plugins report

    async def plugin_connected(self, client: DevicePluginClient) -> None:
        """Use a dialled plugin as the resource's endpoint, with the options that it now returns.

        Raises:
            RpcFailed: ``GetDevicePluginOptions`` failed; nothing has changed.
        """
        options = await client.get_options()
        self._endpoints[client.resource] = RegisteredEndpoint(client, options)
        self._changed()

    def plugin_disconnected(self, resource: str) -> None:
        """Handle the end of a stream: mark the resource's devices unhealthy, and schedule the resource's removal."""
        endpoint = self._endpoints.get(resource)
        if endpoint is None:
            return
        if resource in self._resources:
            self._resources[resource].mark_unhealthy()
        self._stop_endpoint(resource, endpoint)
        self._changed()

    def devices_reported(self, resource: str, devices: Collection[api.Device]) -> None:
        """Apply a full list from a stream of the resource, even an outdated stream."""
        self._resources.setdefault(resource, ResourceDevices()).update(devices)
        self._checkpoint()
        self._changed()

    def _stop_endpoint(self, resource: str, endpoint: RegisteredEndpoint) -> None:
        endpoint.stopped = True
        self._endpoints[resource] = endpoint
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._timings.resource_removal, self._remove_resource, resource, endpoint)
        self._timers.add(timer)

    def _remove_resource(self, resource: str, endpoint: RegisteredEndpoint) -> None:
        if self._endpoints.get(resource) is endpoint and endpoint.stopped:
            self._endpoints.pop(resource)
            self._resources.pop(resource, None)
            self._checkpoint()
            self._changed()

    # Queries

    def resources(self) -> dict[str, ResourceDevices]:
        """Return the devices of every resource that the kubelet knows."""
        return self._resources

    def capacity(self, resource: str) -> int:
        known = self._resources.get(resource)
        return known.capacity if known else 0

    def allocatable(self, resource: str) -> int:
        known = self._resources.get(resource)
        return known.allocatable if known else 0

    def health(self, resource: str, device: str) -> str:
        return self._resources.get(resource, ResourceDevices()).health(device)

    def prune(self) -> None:
        """Forget the allocations of pods that are no longer active; their devices are free immediately."""
        active = self._active()
        if active is not None and self.allocations.retain_pods(active):
            self._checkpoint()

    # Admission, on the main loop

    async def allocate(self, pod: EmulatedPod, container: ContainerSpec) -> None:
        """Give ``container`` its devices and record the plugin's reply durably.

        After a restart of the kubelet a container that is not running is admitted again: it keeps the devices that it
        has in the checkpoint, and gets others if it has none there.

        Devices of an ordinary init container are passed on to the containers after it.

        Raises:
            AllocationRefused: too few devices, or the plugin refused; the pod gets this message.
        """
        uid, reusable = self._reusable
        if uid != pod.uid:
            reusable = {}
            self._reusable = (pod.uid, reusable)
        self.prune()
        for resource, count in _plugin_requests(pod, container):
            if count:
                await self._allocate_resource(pod, container, resource, count, reusable.get(resource, set()))
        for allocation in self.allocations.of_container(pod.uid, container.name):
            handed_on = reusable.setdefault(allocation.resource, set())
            if pod.spec.is_ordinary_init(container):
                handed_on |= allocation.devices
            else:
                handed_on -= allocation.devices

    async def _allocate_resource(
        self, pod: EmulatedPod, container: ContainerSpec, resource: str, count: int, reusable: set[str]
    ) -> None:
        held = self._allocated_devices(pod, container, resource, count)
        self._check_usable(resource, held)
        if held:
            return
        chosen = await self._choose(resource, count, reusable)
        try:
            client = self._endpoint(resource).running_client(resource)
            response = await client.allocate(chosen, pod=pod.full_name, uid=pod.uid, container=container.name)
        except RpcFailed as error:
            raise AllocationRefused(str(error)) from error
        if not response.container_responses:
            raise AllocationRefused("no containers return in allocation response")
        by_node = group_by_numa_node(chosen, self._resources[resource].numa_nodes)
        answer = response.container_responses[0].SerializeToString()
        self.allocations.add(Allocation(pod.uid, container.name, resource, by_node, answer))
        self._checkpoint()
        pod.records[container.name].devices[resource] = tuple(sorted(chosen))
        self._changed()

    def _allocated_devices(
        self, pod: EmulatedPod, container: ContainerSpec, resource: str, count: int
    ) -> frozenset[str]:
        allocation = self.allocations.get(pod.uid, container.name, resource)
        held = allocation.devices if allocation else frozenset()
        if held and len(held) != count:
            raise AllocationRefused(
                f'pod "{pod.uid}" container "{container.name}" changed request for resource "{resource}" '
                f"from {len(held)} to {count}"
            )
        return held

    def _check_usable(self, resource: str, held: frozenset[str]) -> None:
        if resource not in self._resources:
            # The real kubelet ignores a resource that it does not know and leaves it to the scheduler, which would not
            # have bound this pod; a pod bound here without its devices would only mislead.
            raise AllocationRefused(f"cannot allocate unregistered device {resource}")
        healthy = self._resources[resource].healthy
        if not healthy:
            raise AllocationRefused(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        if not held <= healthy:
            raise AllocationRefused(
                f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
            )

    async def _choose(self, resource: str, count: int, reusable: set[str]) -> set[str]:
        chosen = set(self._shuffled(reusable)[:count])
        missing = count - len(chosen)
        if not missing:
            return chosen
        available = self._resources[resource].healthy - self.allocations.allocated_devices(resource)
        if len(available) < missing:
            raise AllocationRefused(
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {missing}, Available: {len(available)}"
            )
        endpoint = self._endpoint(resource)
        preferred: set[str] = set()
        if endpoint.options is not None and endpoint.options.get_preferred_allocation_available:
            try:
                preferred = await endpoint.running_client(resource).get_preferred_allocation(
                    available | chosen, chosen, count
                )
            except RpcFailed as error:
                raise AllocationRefused(f"device plugin GetPreferredAllocation rpc failed with err: {error}") from error
        order = [*self._shuffled(preferred & available), *self._shuffled(available - preferred)]
        return chosen | set(order[:missing])

    def _endpoint(self, resource: str) -> RegisteredEndpoint:
        try:
            return self._endpoints[resource]
        except KeyError:
            raise AllocationRefused(f"endpoint not found in cache for a registered resource: {resource}") from None

    # Start, in the pod's worker

    async def run_options(self, pod: EmulatedPod, container: ContainerSpec) -> ContainerRunOptions:
        """Call ``PreStartContainer`` where the plugin requires it, then replay the recorded replies.

        Until a plugin has registered again after a restart of the kubelet, its options are unknown, and the call is
        silently skipped: a gap of the real kubelet, reproduced on purpose.

        Raises:
            StartRefused: the plugin refused, is unreachable or took too long.
        """
        for resource, count in _plugin_requests(pod, container):
            if count and (resource in self._resources or resource in self.allocations.resources()):
                await self._pre_start(pod, container, resource)
        merged = [each.response for each in self.allocations.of_container(pod.uid, container.name)]
        return ContainerRunOptions(
            envs={key: value for each in merged for key, value in each.envs.items()},
            mounts=[mount for each in merged for mount in each.mounts],
            devices=[device for each in merged for device in each.devices],
            annotations={key: value for each in merged for key, value in each.annotations.items()},
            cdi_devices=[device.name for each in merged for device in each.cdi_devices],
        )

    async def _pre_start(self, pod: EmulatedPod, container: ContainerSpec, resource: str) -> None:
        try:
            endpoint = self._endpoint(resource)
            if endpoint.options is None or not endpoint.options.pre_start_required:
                return
            allocation = self.allocations.get(pod.uid, container.name, resource)
            if allocation is None:
                raise AllocationRefused(
                    f"no devices found allocated in local cache for pod {pod.uid}, container {container.name}, "
                    f"resource {resource}"
                )
            client = endpoint.running_client(resource)
            await client.pre_start(allocation.devices, pod=pod.full_name, uid=pod.uid, container=container.name)
        except AllocationRefused as error:
            raise StartRefused(str(error)) from error
        except RpcFailed as error:
            late = error.code.name == "DEADLINE_EXCEEDED"
            message = f"device plugin PreStartContainer rpc failed with err: {error}"
            raise StartRefused(message, deadline_exceeded=late) from error

    def _checkpoint(self) -> None:
        registered = {resource: devices.healthy for resource, devices in self._resources.items()}
        write_checkpoint(self._directory, self.allocations, registered)

    def _shuffled(self, devices: Collection[str]) -> list[str]:
        mixed = sorted(devices)
        self._rng.shuffle(mixed)
        return mixed


def _plugin_requests(pod: EmulatedPod, container: ContainerSpec) -> list[tuple[str, int]]:
    """Return what a container requests of device plugins; resources that it gets from a claim are not among it."""
    claimed = pod.claimed_resources(container.name)
    return [(resource, count) for resource, count in container.resources.items() if resource not in claimed]
