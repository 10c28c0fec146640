"""A kubelet to try device plugins with: real sockets, real files, real processes, and the real kubelet's behaviour.

Promise: what a device plugin and a PodResources client can observe of Kubernetes 1.36, they observe here, from the
order of calls to the gaps. The node (containers, checkpoint, socket files, the API server's pods) outlives the
kubelet's process, which :meth:`Kubelet.stop` ends and :meth:`Kubelet.start` starts.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from scrubber.config.settings import EMULATOR_MARKER_FILE
from scrubber.emulator import cgroups, sockets
from scrubber.emulator.changes import ChangeNotifier
from scrubber.emulator.cluster.api import EmulatedApi
from scrubber.emulator.cluster.resources import PODS, Json
from scrubber.emulator.cluster.status import StatusError
from scrubber.emulator.containers import ContainerRuntime
from scrubber.emulator.dra.manager import DraManager
from scrubber.emulator.events import KubeletEvent, Recorder
from scrubber.emulator.kubelet_process import EmulatedNode, KubeletProcess, NodeStatus
from scrubber.emulator.podmirror import PodMirror
from scrubber.emulator.podobjects import pod_object, pod_spec
from scrubber.emulator.pods import ContainerState, Deletion, EmulatedPod, PodSpec
from scrubber.emulator.timings import KubeletTimings


class Kubelet:
    """The emulated node below ``root``.

    Its directories are ``<root>/device-plugins/``, ``plugins_registry/``, ``pod-resources/kubelet.sock``,
    ``log/pods/<namespace>_<name>_<uid>/`` and ``containers/<uid>/<container>/`` (a container's root and working
    directory). ``cgroup_parent`` is a writable cgroup v2 directory that the kubelet then uses and removes: containers
    run in ``kubepods/pod<uid>/<64 hex>`` below it. With or without it each process carries the pod's marker
    (:mod:`scrubber.emulator.markers`). ``<root>/emulated`` marks that no real kubelet runs here.

    With a ``cluster`` the node is the object ``node_name`` of its API server, runs the pods that are bound to it there,
    and has Dynamic Resource Allocation: drivers' sockets in ``plugins/``, CDI specifications in ``cdi/``.
    """

    def __init__(
        self,
        root: Path,
        *,
        timings: KubeletTimings | None = None,
        cgroup_parent: Path | None = None,
        rng: random.Random | None = None,
        cluster: EmulatedApi | None = None,
        node_name: str = "node-a",
    ) -> None:
        """Initialise the node; nothing is created or started yet.

        Raises:
            ValueError: ``root`` is so long that the sockets below it could not be used.
        """
        self.root = root
        self._cgroup_parent = cgroup_parent
        changes = ChangeNotifier()
        chance = rng or random.Random()
        groups = cgroup_parent / "kubepods" if cgroup_parent else None
        runtime = ContainerRuntime(groups, chance)
        self._node = EmulatedNode(
            root,
            timings or KubeletTimings(),
            chance,
            changes,
            Recorder(changes),
            runtime,
            cluster=cluster,
            name=node_name,
        )
        self._node.api_server.set()
        sockets.check_length(self._node.kubelet_socket)
        sockets.check_length(self._node.pod_resources_socket)
        self._process: KubeletProcess | None = None
        self._lives = 0
        self._closed = False
        self._crashes: list[BaseException] = []
        self._mirror: PodMirror | None = None
        self._mirroring: asyncio.Task[None] | None = None
        if cluster is not None:
            cluster.log_readers[node_name] = self._read_log
            self._mirror = PodMirror(
                cluster,
                node_name,
                self._node.pods,
                add=self._made_pod,
                on_added=self._pod_added,
                on_changed=self._pod_changed,
                on_removed=self._pod_removed,
            )

    async def __aenter__(self) -> Kubelet:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # The kubelet's process

    async def start(self) -> None:
        """Start the kubelet's process: remove plugins' sockets, serve, and after a restart find the pods again.

        Raises:
            RuntimeError: it runs already, was closed, or a socket cannot be bound.
        """
        if self._closed:
            raise RuntimeError("this node was closed: create another Kubelet")
        if self._process is not None:
            raise RuntimeError("the kubelet is already running")
        node = self._node
        for directory in (node.device_plugins, node.plugins_registry, node.pod_resources_socket.parent):
            directory.mkdir(parents=True, exist_ok=True, mode=0o750)
        for directory in (node.pod_logs, node.containers):
            directory.mkdir(parents=True, exist_ok=True)
        if self._mirror is not None:
            for directory in (node.plugins, node.cdi.directory):
                directory.mkdir(parents=True, exist_ok=True, mode=0o750)
            if self._mirroring is None:
                self._mirroring = asyncio.get_running_loop().create_task(self._mirror.run())
                self._mirroring.add_done_callback(self._mirror_ended)
        (self.root / EMULATOR_MARKER_FILE).write_text("The kubelet of this directory is scrubber's emulator.\n")
        self._process = KubeletProcess(node, restarted=self._lives > 0)
        self._lives += 1
        await self._process.start()
        node.changes.notify()

    async def stop(self) -> None:
        """End the process; containers keep running, and the socket files stay, dead. Nothing to do when it is down."""
        process, self._process = self._process, None
        if process is not None:
            await process.stop()
            self._crashes += process.crashes
            self._node.changes.notify()

    async def restart(self) -> None:
        """Stop and start the process."""
        await self.stop()
        await self.start()

    async def reboot(self) -> None:
        """Restart the node: every process on it ends, and what is not on disk is gone, the CDI specifications too."""
        await self.stop()
        await self._node.runtime.reboot()
        self._node.cdi.clear()
        await self.start()

    async def close(self) -> None:
        """End everything: the process, every container, every leftover process, every control group. Files stay.

        May be called after a failed start, and more than once.

        Raises:
            BaseExceptionGroup: errors of the emulator itself.
            RuntimeError: a process of the node did not end.
        """
        if self._closed:
            return
        self._closed = True
        try:
            await self.stop()
            if self._mirroring is not None:
                self._mirroring.cancel()
                await asyncio.gather(self._mirroring, return_exceptions=True)
        finally:
            try:
                await self._node.runtime.close()
            finally:
                if self._cgroup_parent is not None:
                    cgroups.remove_tree(self._cgroup_parent)
                self._node.changes.notify()
        if self._crashes:
            raise BaseExceptionGroup("the kubelet emulator failed", self._crashes)

    @property
    def running(self) -> bool:
        """Whether the kubelet's process runs."""
        return self._process is not None

    @property
    def healthy(self) -> bool:
        """The kubelet's own health check, which an admission that takes too long fails."""
        return self._process is not None and self._process.healthy

    # Pods

    async def run(self, spec: PodSpec) -> EmulatedPod:
        """Bind a pod to this node without a scheduler, and wait for its admission.

        While the kubelet is down, this waits until it is started.

        ``pod.admitted`` or its status contains the decision: a refusal is a pod in phase ``Failed``, not an error.

        Raises:
            RuntimeError: the node was closed before the decision.
            ValueError: a pod with this namespace and name exists.
        """
        pod = self.create(spec)
        await self._node.changes.wait_until(lambda: pod.admitted is not None or pod.gone or self._closed, None)
        if pod.admitted is None and self._closed:
            raise RuntimeError(f"the node was closed before pod {pod.full_name} was admitted")
        return pod

    def create(self, spec: PodSpec) -> EmulatedPod:
        """Bind a pod and return immediately, before its admission.

        Raises:
            RuntimeError: the node was closed.
            StatusError: the API server refused the pod, or is away.
            ValueError: a pod with this namespace and name exists, or it has claims and the node no API server.
        """
        if self._closed:
            raise RuntimeError("this node was closed: create another Kubelet")
        node = self._node
        if node.cluster is not None and self._mirror is not None:
            made = node.cluster.create(PODS, pod_object(spec, node.name))
            self._mirror.reconcile()
            return node.pods[made["metadata"]["uid"]]
        if spec.claims:
            raise ValueError(f"pod {spec.namespace}/{spec.name} has claims, which need an API server")
        for other in node.pods.values():
            if (other.spec.namespace, other.spec.name) == (spec.namespace, spec.name):
                raise ValueError(f"pod {other.full_name} already exists: delete it first")
        pod = self._pod(spec, str(uuid.UUID(bytes=node.rng.randbytes(16), version=4)))
        node.pods[pod.uid] = pod
        self._pod_added(pod)
        return pod

    def _pod(self, spec: PodSpec, uid: str) -> EmulatedPod:
        logs = self._node.pod_logs / f"{spec.namespace}_{spec.name}_{uid}"
        return EmulatedPod(spec, uid, logs, self._node.containers / uid, self._node.changes)

    async def submit(self, spec: PodSpec, timeout: float) -> EmulatedPod:
        """Create a pod at the API server, and wait until a scheduler has bound it to this node.

        Raises:
            RuntimeError: the node has no API server.
            StatusError: the API server refused the pod.
            TimeoutError: it was not bound to this node within ``timeout`` seconds.
        """
        if self._node.cluster is None:
            raise RuntimeError("this node has no API server")
        uid = self._node.cluster.create(PODS, pod_object(spec))["metadata"]["uid"]
        if not await self._node.changes.wait_until(lambda: uid in self._node.pods, timeout):
            raise TimeoutError(f"pod {spec.namespace}/{spec.name} was not bound to this node within {timeout:g} s")
        return self._node.pods[uid]

    # What the API server reports

    def _made_pod(self, item: Json) -> EmulatedPod:
        return self._pod(pod_spec(item), item["metadata"]["uid"])

    def _read_log(self, uid: str, container: str) -> str:
        pod = self._node.pods.get(uid)
        record = pod.records[container] if pod is not None else None
        if (
            pod is None
            or record is None
            or (record.state is ContainerState.WAITING and not record.has_terminated_before)
        ):
            reason = record.reason if record is not None else "ContainerCreating"
            raise StatusError(400, "BadRequest", f'container "{container}" is waiting to start: {reason}')
        return pod.read_log(container)

    def _pod_added(self, pod: EmulatedPod) -> None:
        if self._process is not None:
            self._process.pod_created(pod)
        self._node.changes.notify()

    def _pod_changed(self, pod: EmulatedPod) -> None:
        if self._process is not None:
            self._process.pod_changed(pod)
        self._node.changes.notify()

    def _pod_removed(self, pod: EmulatedPod) -> None:
        linger = self._node.lingers.pop(pod.uid, 0.0)
        if not pod.finished and self._process is None:
            self._node.orphans[pod.uid] = linger
        elif not pod.finished:
            self._node.runtime.remove_pod_after(pod.uid, linger)
        self._pod_changed(pod)

    def _mirror_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crashes.append(error)
            self._node.changes.notify()

    async def delete(
        self, pod: EmulatedPod, *, grace: float | None = None, force: bool = False, linger: float = 0.0
    ) -> None:
        """Delete a pod and wait until it is gone, as ``kubectl delete`` does.

        ``grace`` seconds pass between SIGTERM and SIGKILL (default: ``timings.termination_grace``). With ``force`` the
        pod is gone immediately, its devices are free, and its processes live on for ``linger`` seconds beside the next
        pod on these devices. While the kubelet is down, a graceful deletion waits for it.

        Raises:
            RuntimeError: the node was closed before the pod had ended.
            StatusError: the API server is away.
        """
        if pod.gone:
            return
        if self._node.cluster is not None:
            self._node.lingers[pod.uid] = linger
            default = self._node.timings.termination_grace
            seconds = 0.0 if force else max(default if grace is None else grace, 1e-3)
            options = {"gracePeriodSeconds": seconds, "preconditions": {"uid": pod.uid}}
            self._node.cluster.delete(PODS, pod.spec.name, pod.spec.namespace, options=options)
            await self._wait_until_gone(pod)
            return
        if force:
            pod.active, pod.gone = False, True
            self._node.pods.pop(pod.uid, None)
            self._node.runtime.remove_pod_after(pod.uid, linger)
        else:
            pod.deletion = Deletion(self._node.timings.termination_grace if grace is None else grace)
        if self._process is not None:
            self._process.pod_changed(pod)
        self._node.changes.notify()
        await self._wait_until_gone(pod)

    async def _wait_until_gone(self, pod: EmulatedPod) -> None:
        await self._node.changes.wait_until(lambda: pod.gone or self._closed, None)
        if not pod.gone:
            raise RuntimeError(f"the node was closed before pod {pod.full_name} had ended")

    @property
    def pods(self) -> list[EmulatedPod]:
        """Every pod that the API server has on this node, oldest first."""
        return list(self._node.pods.values())

    @property
    def api_server(self) -> asyncio.Event:
        """Set while the API server is available. While it is cleared, a restarted kubelet lists and admits no pod."""
        return self._node.api_server

    # Devices

    def capacity(self, resource: str) -> int:
        """Return how many devices of ``resource`` the kubelet counts now, healthy or not; 0 while it is down."""
        return self._process.devices.capacity(resource) if self._process else 0

    def allocatable(self, resource: str) -> int:
        """Return how many healthy devices of ``resource`` the kubelet counts now, taken or not; 0 while it is down."""
        return self._process.devices.allocatable(resource) if self._process else 0

    def healthy_devices(self, resource: str) -> frozenset[str]:
        """Return the ids of the healthy devices of ``resource`` as the kubelet has them now; none while it is down."""
        known = self._process.devices.resources().get(resource) if self._process else None
        return frozenset(known.healthy) if known else frozenset()

    @property
    def node_status(self) -> NodeStatus:
        """The status last sent to the API server, some seconds old; it is not updated while the kubelet is down."""
        return self._node.status

    def schedulable(self, resource: str) -> int:
        """Return how many of ``resource`` the scheduler would still assign on this node; negative when overcommitted.

        This is the published allocatable minus the requests of the pods here: an unhealthy device under a pod is
        subtracted twice.
        """
        requested = sum(pod.spec.request(resource) for pod in self.pods if not pod.phase.terminal)
        return self._node.status.allocatable.get(resource, 0) - requested

    # Claims

    @property
    def dra(self) -> DraManager:
        """The DRA manager of the kubelet's process, to see what it remembers.

        Raises:
            RuntimeError: the kubelet is down, or the node has no API server.
        """
        if self._process is None or self._process.dra is None:
            raise RuntimeError("the kubelet is down, or its node has no API server")
        return self._process.dra

    def kill_sandbox(self, pod: EmulatedPod) -> None:
        """End a pod's sandbox, as a fault of the runtime: the kubelet starts the pod again in another one."""
        self._node.runtime.kill_sandbox(pod.uid)

    # Watching

    @property
    def events(self) -> list[KubeletEvent]:
        """Everything recorded so far, in order of completion; the list keeps growing."""
        return self._node.recorder.events

    @property
    def pod_resources_requests(self) -> int:
        """The number of PodResources requests, rejected ones included."""
        return self._node.recorder.pod_resources_requests

    async def wait_until(self, condition: Callable[[Kubelet], bool], timeout: float) -> None:
        """Wait until ``condition(self)`` holds; it is checked again after every change on the node.

        Raises:
            TimeoutError: it did not hold within ``timeout`` seconds.
        """
        if not await self._node.changes.wait_until(lambda: condition(self), timeout):
            raise TimeoutError(f"the condition was not met within {timeout:g} s; pods: {self.pods}")

    async def wait_for_allocatable(self, resource: str, count: int, timeout: float) -> None:
        """Wait until the kubelet counts exactly ``count`` healthy devices of ``resource``.

        Raises:
            TimeoutError: it did not within ``timeout`` seconds; the message contains both numbers.
        """
        if not await self._node.changes.wait_until(lambda: self.allocatable(resource) == count, timeout):
            raise TimeoutError(
                f"the kubelet has {self.allocatable(resource)} instead of {count} allocatable devices of {resource} after "
                f"{timeout:g} s"
            )

    # Paths

    @property
    def device_plugins(self) -> Path:
        """The directory for sockets of classic plugins; ``kubelet.sock`` and the checkpoint are in it."""
        return self._node.device_plugins

    @property
    def plugins_registry(self) -> Path:
        return self._node.plugins_registry

    @property
    def plugins(self) -> Path:
        """The directory for the sockets that DRA drivers serve."""
        return self._node.plugins

    @property
    def cdi_directory(self) -> Path:
        """The directory for CDI specifications, which a reboot empties."""
        return self._node.cdi.directory

    @property
    def pod_resources_socket(self) -> Path:
        return self._node.pod_resources_socket

    @property
    def pod_logs(self) -> Path:
        return self._node.pod_logs

    @property
    def kubelet_socket(self) -> Path:
        return self._node.kubelet_socket
