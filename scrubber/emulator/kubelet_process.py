"""One run of the kubelet's process: its sockets, its main loop, its pod workers, and all its in-memory state.

Promise: when it stops, no task and no connection of it is left, while containers, socket files and the checkpoint stay
as a killed kubelet leaves them; a new run starts from those and from the API server alone.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from plugin.api import deviceplugin_pb2_grpc
from scrubber.emulator import sockets
from scrubber.emulator.cdi import CdiRegistry
from scrubber.emulator.changes import ChangeNotifier
from scrubber.emulator.cluster.api import EmulatedApi
from scrubber.emulator.containers import Container, ContainerRuntime
from scrubber.emulator.devicemanager import AllocationRefused, DeviceManager
from scrubber.emulator.dra.manager import DraManager
from scrubber.emulator.dra.plugins import PLUGIN_TYPE
from scrubber.emulator.events import Recorder
from scrubber.emulator.pluginwatcher import DEVICE_PLUGIN, DevicePluginHandler, PluginHandler, PluginWatcher
from scrubber.emulator.podmirror import StatusWriter
from scrubber.emulator.podresources import PodResourcesService
from scrubber.emulator.pods import ContainerState, EmulatedPod, PodPhase
from scrubber.emulator.podworker import PodWorker
from scrubber.emulator.registration import DevicePluginClients, RegistrationService
from scrubber.emulator.timings import KubeletTimings
from scrubber.wire import podresources_pb2_grpc


@dataclass(slots=True)
class NodeStatus:
    """The status last sent to the API server, and so to the scheduler; resource → count.

    ``updates`` counts the updates.
    """

    capacity: Mapping[str, int] = field(default_factory=dict)
    allocatable: Mapping[str, int] = field(default_factory=dict)
    updates: int = 0


@dataclass(frozen=True, slots=True)
class EmulatedNode:
    """What outlives the kubelet's process: directories, the runtime with its containers, the API server's objects."""

    root: Path
    timings: KubeletTimings
    rng: random.Random
    changes: ChangeNotifier
    recorder: Recorder
    runtime: ContainerRuntime
    pods: dict[str, EmulatedPod] = field(default_factory=dict)
    """By UID, in the order of creation; a pod that is gone is not in it."""
    status: NodeStatus = field(default_factory=NodeStatus)
    api_server: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the API server is available; for a node without an emulated one."""
    cluster: EmulatedApi | None = None
    """The API server that the pods come from; without one the kubelet has no Dynamic Resource Allocation."""
    name: str = "node-a"
    lingers: dict[str, float] = field(default_factory=dict)
    """UID of a pod that is deleted by force → for how many seconds its processes live on."""
    orphans: dict[str, float] = field(default_factory=dict)
    """The same for pods that were deleted while the kubelet was down, and which it ends when it is back."""

    @property
    def device_plugins(self) -> Path:
        return self.root / "device-plugins"

    @property
    def plugins_registry(self) -> Path:
        return self.root / "plugins_registry"

    @property
    def pod_resources_socket(self) -> Path:
        return self.root / "pod-resources" / "kubelet.sock"

    @property
    def pod_logs(self) -> Path:
        return self.root / "log" / "pods"

    @property
    def containers(self) -> Path:
        return self.root / "containers"

    @property
    def kubelet_socket(self) -> Path:
        return self.device_plugins / "kubelet.sock"

    @property
    def plugins(self) -> Path:
        return self.root / "plugins"

    @property
    def cdi(self) -> CdiRegistry:
        return CdiRegistry(self.root / "cdi")


class KubeletProcess:
    """The process, which :class:`scrubber.emulator.kubelet.Kubelet` creates at every start."""

    def __init__(self, node: EmulatedNode, *, restarted: bool) -> None:
        self._node = node
        self._restarted = restarted
        self._queue: asyncio.Queue[EmulatedPod] = asyncio.Queue()
        self._known: set[str] = set()
        self._sources_ready = False
        self._admission_began: float | None = None
        self._workers: dict[str, PodWorker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[grpc.aio.Server] = []
        self.crashes: list[BaseException] = []
        """Errors of the emulator itself; ``Kubelet.close()`` raises them."""
        timings, rng = node.timings, node.rng
        self.devices = DeviceManager(
            node.device_plugins, timings, rng, active_pod_uids=self._active_pods, on_change=self._devices_changed
        )
        self._clients = DevicePluginClients(self.devices, timings, node.recorder, rng)
        handlers: dict[str, PluginHandler] = {DEVICE_PLUGIN: DevicePluginHandler(self._clients)}
        self.dra: DraManager | None = None
        self._status_writer: StatusWriter | None = None
        if node.cluster is not None:
            self.dra = DraManager(
                node.root,
                node.cluster,
                node.name,
                node.cdi,
                timings,
                node.recorder,
                active_pod_uids=self._active_pods,
                on_change=node.changes.notify,
            )
            handlers[PLUGIN_TYPE] = self.dra.plugins
            self._status_writer = StatusWriter(
                node.cluster,
                node.name,
                node.pods,
                node.changes,
                claim_health=self.dra.claim_health,
                resync=timings.pod_resync[0],
            )
        self._watcher = PluginWatcher(node.plugins_registry, handlers, timings, node.recorder)

    async def start(self) -> None:
        """Remove the sockets of plugins, load the checkpoint, serve, watch, admit.

        Raises:
            RuntimeError: a socket cannot be bound, or the checkpoint of claims cannot be used.
        """
        node = self._node
        if self._status_writer is not None:
            self._status_writer.register_node()
        if self.dra is not None:
            self.dra.start()
        if self._restarted:
            for pod in node.pods.values():
                pod.active = False  # this process does not know it yet
        for path in node.device_plugins.iterdir():
            if sockets.is_socket(path):
                path.unlink(missing_ok=True)  # its plugin may be removing it at the same time
        self.devices.start()
        registration = grpc.aio.server()
        deviceplugin_pb2_grpc.add_RegistrationServicer_to_server(
            RegistrationService(node.device_plugins, self._clients, node.recorder), registration
        )
        await self._serve(registration, node.kubelet_socket)
        pod_resources = grpc.aio.server()
        podresources_pb2_grpc.add_PodResourcesListerServicer_to_server(
            PodResourcesService(node.pods, self.devices, node.timings, node.rng, node.recorder, self.dra), pod_resources
        )
        await self._serve(pod_resources, node.pod_resources_socket)
        node.runtime.on_exit = self._container_exited
        self._spawn(self._publish_node_status())
        self._spawn(self._sweep_logs())
        self._spawn(self._sync_loop())
        if self.dra is not None:
            self._spawn(self._release_orphans(self.dra))
        if self._status_writer is not None:
            self._spawn(self._status_writer.run())

    async def stop(self) -> None:
        """End the process. May be called after a start that failed half-way."""
        self._node.runtime.on_exit = lambda _container: None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._workers.clear()
        self.devices.stop()
        for server in self._servers:
            await server.stop(None)
        if self.dra is not None:
            await self.dra.plugins.close()
        await self._clients.close()  # last: a registration that was just interrupted has left its client open

    # Notifications of the API server

    def pod_created(self, pod: EmulatedPod) -> None:
        """Handle a pod bound to this node. It waits until the API server's pods have arrived."""
        if self._sources_ready and pod.uid not in self._known:
            self._known.add(pod.uid)
            self._queue.put_nowait(pod)

    def pod_changed(self, pod: EmulatedPod) -> None:
        """Handle a requested deletion, or a pod that is gone."""
        worker = self._workers.get(pod.uid)
        if worker is not None:
            worker.wake()
        elif pod.phase.terminal and not self._node.runtime.has_pod(pod.uid):
            self._forget(
                pod
            )  # otherwise its admission, which was refused, still ends its containers, and forgets it then

    @property
    def healthy(self) -> bool:
        """The kubelet's own health check: one admission does not block the main loop for too long."""
        now = asyncio.get_running_loop().time()
        began = self._admission_began
        return began is None or now - began <= self._node.timings.sync_loop_health

    # The main loop: one admission at a time, for every pod on the node

    async def _sync_loop(self) -> None:
        node = self._node
        if self._restarted:
            await asyncio.sleep(node.timings.empty_list_after_restart)
            await node.api_server.wait()
            if node.cluster is not None:
                await node.cluster.wait_until_available()
        for pod in node.pods.values():
            # All are listed before the first is admitted again: otherwise its admission would free the others' devices.
            pod.active = pod.admitted is True and not pod.phase.terminal
        self._sources_ready = True
        for uid, linger in node.orphans.items():
            node.runtime.remove_pod_after(uid, linger)
        node.orphans.clear()
        for pod in list(node.pods.values()):
            self.pod_created(pod)
        node.changes.notify()
        while True:
            pod = await self._queue.get()
            self._admission_began = asyncio.get_running_loop().time()
            await self._admit(pod)
            self._admission_began = None
            node.changes.notify()

    async def _admit(self, pod: EmulatedPod) -> None:
        if self._needs_no_admission(pod):
            if not pod.gone:  # otherwise its deletion has it removed
                await self._node.runtime.remove_pod(pod.uid)
            self._forget_if_deleted(pod)
            return
        pod.active = True
        try:
            for container in pod.spec.all_containers:
                again = pod.deletion is None and self._needs_admission(pod, container.name)
                if pod.admitted is None or again:
                    await self.devices.allocate(pod, container)
        except AllocationRefused as error:
            pod.phase, pod.reason, pod.admitted = PodPhase.FAILED, "UnexpectedAdmissionError", False
            pod.message = f"Allocate failed due to {error}, which is unexpected"
            pod.active = False
            await self._node.runtime.remove_pod(pod.uid)
            self._forget_if_deleted(pod)
            return
        pod.admitted = True
        if pod.gone:
            pod.active = False
            return
        node = self._node
        worker = PodWorker(
            pod, self.devices, node.runtime, node.timings, node.recorder, node.changes, node.rng, self.dra
        )
        self._workers[pod.uid] = worker
        self._spawn(self._run_worker(pod, worker))

    def _needs_no_admission(self, pod: EmulatedPod) -> bool:
        """Whether the pod has ended, or was deleted before its admission."""
        return pod.gone or pod.phase.terminal or (pod.deletion is not None and pod.admitted is None)

    def _needs_admission(self, pod: EmulatedPod, name: str) -> bool:
        """Whether the container has to be admitted again.

        One that runs, or an init container that has succeeded, does not.
        """
        record = pod.records[name]
        container = self._node.runtime.container(pod.uid, name)
        runs = container is not None and container.exit_code is None
        return not runs and not (record.state is ContainerState.TERMINATED and record.exit_code == 0)

    async def _run_worker(self, pod: EmulatedPod, worker: PodWorker) -> None:
        await worker.run()
        self._workers.pop(pod.uid, None)
        self._forget_if_deleted(pod)
        self._node.changes.notify()

    def _forget_if_deleted(self, pod: EmulatedPod) -> None:
        if pod.deletion is not None or pod.gone:
            self._forget(pod)

    def _forget(self, pod: EmulatedPod) -> None:
        pod.active, pod.finished = False, True
        if pod.item is None:
            pod.gone = True
            self._node.pods.pop(pod.uid, None)
        self._node.changes.notify()

    def _active_pods(self) -> set[str] | None:
        return {pod.uid for pod in self._node.pods.values() if pod.active} if self._sources_ready else None

    def _container_exited(self, container: Container) -> None:
        """Wake the pod's worker with the next relisting of the runtime's containers."""
        loop = asyncio.get_running_loop()
        delay = self._node.rng.uniform(*self._node.timings.relist_delay)
        loop.call_later(delay, self._wake, container.pod_uid)

    def _wake(self, uid: str) -> None:
        worker = self._workers.get(uid)
        if worker is not None:
            worker.wake()

    # Node and device status

    async def _publish_node_status(self) -> None:
        """Update the node's status; the first update comes before the plugin watcher has scanned its directory."""
        await asyncio.sleep(self._node.timings.first_node_status)
        self._update_node_status()
        self._spawn(self._watcher.run())
        while True:
            await asyncio.sleep(self._node.timings.node_status_period)
            self._update_node_status()

    def _update_node_status(self) -> None:
        resources, status = self.devices.resources(), self._node.status
        status.capacity = {name: each.capacity for name, each in resources.items()}
        status.allocatable = {name: each.allocatable for name, each in resources.items()}
        status.updates += 1
        if self._status_writer is not None:
            self._status_writer.write_node(status.capacity, status.allocatable)
        self._node.changes.notify()

    async def _release_orphans(self, dra: DraManager) -> None:
        """Release the claims of pods that are gone, one after another, once per interval."""
        while True:
            await asyncio.sleep(self._node.timings.dra_reconcile)
            await dra.reconcile()

    def _devices_changed(self) -> None:
        """Keep ``allocatedResourcesStatus`` of every pod up to date."""
        for pod in self._node.pods.values():
            for record in pod.records.values():
                record.device_health = {
                    device: self.devices.health(resource, device)
                    for resource, ids in record.devices.items()
                    for device in ids
                }
        self._node.changes.notify()

    async def _sweep_logs(self) -> None:
        """Remove the logs of pods that the API server and the runtime no longer have."""
        while True:
            await asyncio.sleep(self._node.timings.log_directory_removal)
            for directory in self._node.pod_logs.iterdir():
                uid = directory.name.rpartition("_")[2]
                if uid not in self._node.pods and not self._node.runtime.has_pod(uid):
                    shutil.rmtree(directory)

    # Servers and tasks

    async def _serve(self, server: grpc.aio.Server, path: Path) -> None:
        self._servers.append(server)
        await sockets.serve(server, path)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crashes.append(error)
            self._node.changes.notify()
