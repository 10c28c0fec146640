"""The node on which shapes are played, and its laws: every start is based on a proof, or on a named exception.

Its components can be restarted, each as in a cluster: see :class:`tests.simulation.shapes.shape.Component`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from scrubber.domain.errors import RetryableError, ScrubberError
from scrubber.domain.handover_kind import UNCONDITIONAL_BASES, Basis
from scrubber.engine.views import GrantedDevice, HandOverCall
from tests.simulation.cluster import DEFAULT, SimulatedCluster
from tests.simulation.kubelet import Gone, Tenant
from tests.simulation.life import start_outside_service
from tests.simulation.process_table import Proc
from tests.simulation.shapes.kubelet import SHARED, Container, ShapedKubelet, ShapedPod, numbered
from tests.simulation.shapes.shape import Component
from tests.simulation.sharing import SharedLaws

__all__ = ["ShapedCluster", "ShapedLaws"]

SERVICE_BACK, SERVICE_AWAY = 0.3, 15.0
PLUGIN_AWAY = 3.0
UNREGISTERED = 1.2
BOOT, SERVICE_AFTER_BOOT = 1.0, 1.0
"""Seconds without power, and from then until the service runs; the kubelet runs sooner."""
ABSENT = 2.0
"""Seconds for which the plugin waits for a missing service."""


class ShapedLaws(SharedLaws):
    """The usual laws, by container instead of by pod: containers of a pod have different devices."""

    shared: frozenset[str] = frozenset()
    """Devices that are handed out in shares."""

    def container_started(self, pod: ShapedPod, box: Container) -> None:
        """A container starts: it is alone on its devices, and their content was proved clean or is its own."""
        proc = box.first
        assert proc is not None
        for device in sorted(box.devices):
            if device in self._erasers.running:
                self.breach("5", f"{proc.label} starts while an eraser works on {device}")
            for other in self._unauthorized_processes(device, pod.uid):
                self.breach("4", f"{proc.label} starts on {device} while {other.label} (PID {other.pid}) lives")
            for other in self._process_table.holders(device):
                if device not in self.shared and other is not proc:
                    self.breach("4", f"{proc.label} starts on {device} while {other.label} (PID {other.pid}) holds it")
            left = set(self._process_table.gpus[device].cells) - {""}
            if box.granted and any(not self._may_find(proc, device, label) for label in left):
                self.breach("1", f"{proc.label} starts on {device}, which holds what {sorted(left)} wrote")

    def read(self, proc: Proc, device: str) -> None:
        for label in set(self._process_table.read(proc, device)) - {""}:
            if not self._may_find(proc, device, label):
                self.breach("1", f"{proc.label} reads on {device} what {label} wrote")

    def _may_find(self, proc: Proc, device: str, label: str) -> bool:
        """A share may show data of the same tenant; a whole device that of the same container, if policy permits."""
        if device in self.shared:
            return self._may_see(proc.label, label)
        return super(SharedLaws, self)._may_see(proc.label, label)

    def requested_sets(self) -> list[set[str]]:
        return [
            {id_.partition("::")[0] for id_ in ids}
            for pod in self._kubelet.tenants
            if isinstance(pod, ShapedPod)
            for box in pod.boxes
            for ids in box.ids.values()
        ]

    def granted_to(self, pod: ShapedPod, box: Container, resource: str, answer: Sequence[GrantedDevice]) -> None:
        """PreStart of one resource of a container is answered."""
        devices = {id_.partition("::")[0] for id_ in box.ids[resource]}
        if {each.device for each in answer} != devices:
            self.breach("4", f"{sorted(devices)} were requested and {answer} granted")
        for each in answer:
            self._one_granted(pod, each)
            if each.basis is Basis.SHARED and each.device not in self.shared:
                self.breach("1", f"{each.device} is no share, and was granted as one")


class ShapedCluster(SimulatedCluster):
    """A node with the requested number of devices of each resource, all filled by an earlier tenant.

    Args:
        wants: by resource, the number of its devices; at most one of the shared resource.
        happened: called with every event.
        seed: of the kubelet's pauses.
    """

    def __init__(self, device_counts: dict[str, int], happened: Callable[[str], None], seed: str) -> None:
        super().__init__(sum(device_counts.values()), DEFAULT)
        devices = list(self.process_table.gpus)
        self.resources: dict[str, tuple[str, ...]] = {}
        for resource, count in device_counts.items():
            mine, devices = devices[:count], devices[count:]
            self.resources[resource] = numbered(mine, resource)
        for each in self.process_table.gpus.values():
            each.cells = ["earlier/uid-0000/c0#1"] * len(each.cells)
        self.happened = happened
        self.restored = asyncio.Event()
        """Set when the restarted component is back."""
        self.plugin_up = True
        self._unreported: set[tuple[str, str]] = set()
        self.shaped = ShapedKubelet(
            self.process_table,
            now=self.clock.monotonic,
            resources=self.resources,
            pre_start=self._pre_start_of,
            container_starts=self._box_starts,
            happened=happened,
            seed=seed,
        )
        self.kubelet = self.shaped
        self.pod_laws = ShapedLaws(
            process_table=self.process_table,
            kubelet=self.shaped,
            erasers=self.erasers,
            ledger_store=self.ledger_store,
            policy=lambda: self.policy,
            boot=lambda: self.identity.boot,
            now=self.clock.monotonic,
            wall=self.clock.wall,
            late=lambda: 2 * self.pace.health,
        )
        self.pod_laws.shared = frozenset(id_.partition("::")[0] for id_ in self.resources.get(SHARED, ()))
        self.laws = self.pod_laws
        self.ledger_store.granting = lambda: happened("a grant is durable")
        self.runs: Callable[[ShapedPod, Container], None] = lambda pod, box: None
        """Called for every container that runs, after it has read and filled its devices."""

    # -- the plugin ------------------------------------------------------------------------------------------------

    async def allocated(self, allocated: Sequence[dict[str, tuple[str, ...]]]) -> None:
        """Call ``Allocate`` for each container and resource, in order.

        Raises:
            ScrubberError: a device is out of service; the pod fails.
        """
        for each in allocated:
            for resource, ids in each.items():
                self._unreported |= {(resource, id_) for id_ in ids}
                if self.serving:
                    try:
                        await self.node.reserve(ids, resource)
                    except RetryableError:
                        continue
                    self._unreported -= {(resource, id_) for id_ in ids}

    async def _pre_start_of(self, pod: ShapedPod, box: Container, resource: str) -> None:
        if not self.plugin_up:
            raise Gone
        gives_up = self.clock.monotonic() + ABSENT
        while not self.serving:
            if self.clock.monotonic() >= gives_up:
                raise Gone
            await asyncio.sleep(0.1)
        service, ids = self.service, box.ids[resource]
        assert service is not None
        unreported = frozenset(id_ for id_ in ids if (resource, id_) in self._unreported)
        try:
            answer = await service.hand_over(HandOverCall(ids, None, unreported, resource))
        except ScrubberError as refusal:
            self.laws.refused(refusal)
            raise
        self._unreported -= {(resource, id_) for id_ in ids}
        self.pod_laws.granted_to(pod, box, resource, answer)
        grants = [self.ledger_store.grants.get((each.device, each.grant)) for each in answer]
        pod.unjudged = pod.unjudged or any(each.basis in UNCONDITIONAL_BASES for each in answer)
        pod.unnamed = pod.unnamed or any(grant is not None and grant.pod is None for grant in grants)

    def _box_starts(self, pod: ShapedPod, box: Container) -> None:
        self.pod_laws.container_started(pod, box)
        assert box.first is not None
        for device in sorted(box.devices):
            self.process_table.open(box.first, device)
            self.laws.read(box.first, device)
            self.process_table.write(box.first, device)
        self.runs(pod, box)

    # -- restarts --------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Start the service, and send the announcements that the plugin sends every service first."""
        await self.start_service()
        if self.serving:
            for resource, ids in self.resources.items():
                await self.node.announce(resource, {id_: id_.partition("::")[0] for id_ in ids})

    def restart(self, component: Component) -> None:
        """End the component immediately; its return takes time."""
        if component in (Component.SERVICE, Component.SERVICE_AWAY):
            self.kill()
        elif component is Component.PLUGIN:
            self.plugin_up = False
            self._unreported.clear()  # it existed only in the plugin's memory
            self.shaped.plugin_ends()
        elif component is Component.NODE:
            self.kill()
            for erasing in list(self.erasers.running.values()):
                erasing.task.cancel()
            self.shaped.power_off()
            for each in self.process_table.gpus.values():
                each.was_rebooted()
            self.boots += 1
            self._unreported.clear()
        start_outside_service(self._comes_back(component), f"restart of the {component}")

    async def _comes_back(self, component: Component) -> None:
        match component:
            case Component.SERVICE | Component.SERVICE_AWAY:
                await asyncio.sleep(SERVICE_BACK if component is Component.SERVICE else SERVICE_AWAY)
                await self.serve()
            case Component.PLUGIN:
                await asyncio.sleep(PLUGIN_AWAY)
                self.plugin_up = True
            case Component.KUBELET:
                await self.shaped.kubelet_restarts()
            case Component.UNREGISTERED:
                await self.shaped.kubelet_restarts(unregistered=UNREGISTERED)
            case Component.NODE:
                await asyncio.sleep(BOOT)
                kubelet = start_outside_service(self.shaped.power_on(), "kubelet after the boot")
                await asyncio.sleep(SERVICE_AFTER_BOOT)
                await self.serve()
                await kubelet
        self.restored.set()

    async def _pre_start(self, tenant: Tenant) -> None:
        raise AssertionError("a pod of several containers is requested container by container")
