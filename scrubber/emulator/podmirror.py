"""The pods of a node between the API server and the kubelet: what is bound to it, and what the kubelet reports.

Promise: a pod that is deleted by force disappears here at once, while its processes live on for a while; a pod that is
deleted regularly stays at the API server until the kubelet has ended it. While the API server is away, neither side
learns anything of the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from scrubber.emulator.changes import ChangeNotifier
from scrubber.emulator.cluster.api import EmulatedApi, reconcile_on_change
from scrubber.emulator.cluster.patches import merge_patch
from scrubber.emulator.cluster.resources import NODES, PODS, Json
from scrubber.emulator.cluster.status import StatusError
from scrubber.emulator.podobjects import status_object
from scrubber.emulator.pods import Deletion, EmulatedPod

Listener = Callable[[EmulatedPod], None]


class PodMirror:
    """Keeps a table of pods by UID like the API server's pods of one node."""

    def __init__(
        self,
        cluster: EmulatedApi,
        node_name: str,
        pods: dict[str, EmulatedPod],
        *,
        add: Callable[[Json], EmulatedPod],
        on_added: Listener,
        on_changed: Listener,
        on_removed: Listener,
    ) -> None:
        """Initialise the mirror.

        Args:
            pods: the table, which this class alone writes to.
            add: makes the emulator's pod for an object.
            on_added: called with a pod after it was added to the table.
            on_changed: called after a change of a pod's object.
            on_removed: called after a pod was removed from the table; it was deleted by force unless it is finished.
        """
        self._cluster = cluster
        self._node_name = node_name
        self._pods = pods
        self._add = add
        self._on_added = on_added
        self._on_changed = on_changed
        self._on_removed = on_removed

    async def run(self) -> None:
        """Follow the API server until cancelled."""
        await reconcile_on_change(self._cluster, self.reconcile)

    def reconcile(self) -> None:
        """Compare once."""
        items = {
            each["metadata"]["uid"]: each
            for each in self._cluster.store.items(PODS)
            if each["spec"].get("nodeName") == self._node_name
        }
        for uid in [uid for uid in self._pods if uid not in items]:
            pod = self._pods.pop(uid)
            pod.active, pod.gone = False, True
            self._on_removed(pod)
        for uid, item in items.items():
            if uid not in self._pods:
                self._pods[uid] = self._add(item)
                self._apply(self._pods[uid], item)
                self._on_added(self._pods[uid])
            elif self._pods[uid].item is not item:
                self._apply(self._pods[uid], item)
                self._on_changed(self._pods[uid])

    def _apply(self, pod: EmulatedPod, item: Mapping[str, Any]) -> None:
        pod.item = item
        metadata = item["metadata"]
        if "deletionTimestamp" in metadata and pod.deletion is None:
            pod.deletion = Deletion(float(metadata.get("deletionGracePeriodSeconds", 0)))


class StatusWriter:
    """Writes the status of pods and of the node, and ends what the kubelet has finished."""

    def __init__(
        self,
        cluster: EmulatedApi,
        node_name: str,
        pods: Mapping[str, EmulatedPod],
        changes: ChangeNotifier,
        *,
        claim_health: Callable[[EmulatedPod], Mapping[str, list[Json]]],
        resync: float,
    ) -> None:
        """Initialise the writer.

        Args:
            claim_health: returns the entries of ``allocatedResourcesStatus`` for a pod's claims, by container.
            resync: seconds after which the statuses are computed again without a change.
        """
        self._cluster = cluster
        self._node_name = node_name
        self._pods = pods
        self._changes = changes
        self._claim_health = claim_health
        self._resync = resync

    def register_node(self) -> None:
        """Create the node's object unless it exists; nothing happens while the API server is away."""
        if self._cluster.available and self._cluster.find(NODES, self._node_name) is None:
            labels = {"kubernetes.io/hostname": self._node_name}
            self._cluster.create(NODES, {"metadata": {"name": self._node_name, "labels": labels}})

    def write_node(self, capacity: Mapping[str, int], allocatable: Mapping[str, int]) -> None:
        """Write the node's resources; nothing happens while the API server is away."""
        self.register_node()
        if self._cluster.available:
            found = {
                key: {name: str(count) for name, count in each.items()}
                for key, each in (("capacity", capacity), ("allocatable", allocatable))
            }
            self._cluster.patch(NODES, self._node_name, {"status": found}, subresource="status")

    async def run(self) -> None:
        """Write after every change until cancelled."""
        while True:
            try:
                for pod in list(self._pods.values()):
                    self._write(pod)
            except StatusError:
                await self._cluster.wait_until_available()
                await asyncio.sleep(0)  # the mirror learns first what has changed meanwhile
            await self._changes.wait_until(_Notified(), self._resync)

    def _write(self, pod: EmulatedPod) -> None:
        if pod.item is None:
            return
        place = (pod.spec.name, pod.spec.namespace)
        current = self._cluster.find(PODS, *place)
        if current is None or current["metadata"]["uid"] != pod.uid:
            return
        status = status_object(pod, self._claim_health(pod))
        if merge_patch(current.get("status") or {}, status) != current.get("status"):
            self._cluster.patch(PODS, pod.spec.name, {"status": status}, pod.spec.namespace, subresource="status")
        if pod.finished and pod.deletion is not None:
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.uid}}
            self._cluster.delete(PODS, *place, options=options)


class _Notified:
    """A condition that holds when it is checked for the second time: after one notification."""

    def __init__(self) -> None:
        self._checked = False

    def __call__(self) -> bool:
        before, self._checked = self._checked, True
        return before
