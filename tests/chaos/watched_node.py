"""The node of the soak: daemons, kubelet, an independent reader, and the record of what is done to all of them.

Everything that the soak does to a process or a pod is recorded before it is done, so that the reader can distinguish it
from the actions of others.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scrubber.emulator.playground import RESOURCE, Playground
from scrubber.emulator.pods import ContainerSpec, ContainerState, EmulatedPod, PodSpec, PodStatus, RestartPolicy
from tests.chaos.judgement import Event, Facts, PodFacts, UnauthorizedProcess, Verdict
from tests.chaos.lives import tenant
from tests.chaos.node_faults import NodeFaults
from tests.chaos.staging import POLICY, SOON, chaos_stage

__all__ = ["FOR_EVER", "PATIENT", "WatchedNode", "is_under_way", "watched_node"]

DYING_GRACE = 1.0
"""Of the chaos tests' policy (:mod:`tests.chaos.staging`), seconds."""
FOR_EVER = 90.0
"""Seconds after which a waiting pod counts as waiting forever. Every act of the weather passes in a few."""
BOUND = 240.0
"""Seconds within which the pods of a roll-call are bound. The kubelet may repeat a refused release only after 40 s."""
COUNTED_CALLS = (
    *("PreStartContainer", "ContainerStarted", "ContainerDied", "GetDevicePluginOptions"),
    "NodePrepareResources",
)
"""The kubelet events that the reader receives."""
PATIENT = POLICY.replace("limits:\n", "limits:\n  eraserSlots: 6\n") + "diagnostics:\n  recovery: none\n"
"""Devices change hands constantly here: few slots and a second of diagnostics would take most of the run. No device
becomes unhealthy because the machine is busy."""
QUICKLY = PATIENT.replace("driverCall: 10s", "driverCall: 1s")
"""Here devices do become unhealthy: a driver that does not answer is detected."""
SHORTAGE_MESSAGES = (
    *(os.strerror(each) for each in (errno.EMFILE, errno.ENOSPC, errno.EROFS, errno.EIO, errno.ENOMEM)),
    *("No space left", "read-only"),
)
"""What a daemon that could not start because of a shortage of the node tells the operator."""
CLEAN = 60.0
"""Seconds within which devices become clean once nothing happens to them any more."""
TREE = Path(__file__).resolve().parents[2]


class WatchedNode:
    """A running node with an independent reader, and the record of what is done to it. Created by :func:`watched_node`."""

    def __init__(
        self, stage: Playground, reader: asyncio.subprocess.Process, records: Path, faults: NodeFaults
    ) -> None:
        self.stage = stage
        self.faults = faults
        self.socket = stage.directory / "reader.sock"
        self._reader = reader
        self._records = records
        self._clock = asyncio.get_running_loop().time
        self._wall = time.time() - self._clock()
        self._bound: dict[str, tuple[EmulatedPod, PodFacts]] = {}
        self._kubelet_starts = [self._clock()]
        self._orders: list[tuple[int, float]] = []
        self._here: dict[str, EmulatedPod] = {}
        self._scheduler = asyncio.Lock()
        self.waited: list[str] = []
        self.unsettled: list[str] = []
        self.assigned: dict[str, str] = {}
        self.granted: dict[str, str] = {}
        self.exits: dict[str, list[int]] = {}
        self.unauthorized: list[UnauthorizedProcess] = []
        self.without_memory = 0

    # -- pods ------------------------------------------------------------------------------------------------------

    async def bind(self, spec: PodSpec, timeout: float) -> EmulatedPod:
        """Bind a pod like the scheduler: where there is room.

        Raises:
            TimeoutError: there was none within ``timeout`` seconds.
        """
        if self.stage.cluster is not None:
            created = self._clock()
            return self._take_in(await self.stage.kubelet.submit(self._with_claims(spec), timeout), created)
        requested = spec.request(RESOURCE)
        async with self._scheduler:
            await self.stage.kubelet.wait_until(
                lambda kubelet: min(kubelet.schedulable(RESOURCE), self.free()) >= requested, timeout
            )
            return self.create(spec)

    def _with_claims(self, spec: PodSpec) -> PodSpec:
        """Return ``spec`` with a claim for each container that requests devices."""
        assert self.stage.cluster is not None
        claims = {
            each.name: replace(
                self.stage.cluster.pod_claim(spec.namespace, each.resources[RESOURCE]), name=f"gpus-of-{each.name}"
            )
            for each in spec.all_containers
            if RESOURCE in each.resources
        }

        def claiming(containers: Sequence[ContainerSpec]) -> list[ContainerSpec]:
            return [
                replace(each, resources={}, claims=[claims[each.name].name]) if each.name in claims else each
                for each in containers
            ]

        return replace(
            spec,
            containers=claiming(spec.containers),
            init_containers=claiming(spec.init_containers),
            claims=list(claims.values()),
        )

    def create(self, spec: PodSpec) -> EmulatedPod:
        """Bind a pod to the node without a scheduler."""
        created = self._clock()
        return self._take_in(self.stage.kubelet.create(spec), created)

    def _take_in(self, pod: EmulatedPod, created: float) -> EmulatedPod:
        facts = PodFacts(pod.uid, pod.full_name, created, leave_children=pod.spec.leave_children)
        self._bound[pod.uid] = (pod, facts)
        self._here[pod.uid] = pod
        return pod

    async def delete(self, pod: EmulatedPod, *, grace: float) -> None:
        if not pod.gone:
            self._note(pod, deleted=self._clock(), grace=grace)
            await self.stage.kubelet.delete(pod, grace=grace)

    async def delete_by_force(self, pod: EmulatedPod, *, dying_for: float) -> None:
        if not pod.gone:
            self._note(pod, forced=self._clock(), dying_for=dying_for)
            await self.stage.kubelet.delete(pod, force=True, linger=dying_for)

    def kill(self, pod: EmulatedPod) -> None:
        """Send SIGKILL to the first process of the pod's first container, if it exists; recorded beforehand."""
        pid = next(iter(pod.status.containers.values())).pid
        if pid is None:
            return
        with suppress(OSError):
            handle = os.pidfd_open(pid)
            try:
                if pod.uid.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    self._orders.append((pid, self._clock()))
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)

    def strike(self) -> None:
        """Kill a container that will be restarted, if there is one."""
        for pod in self._here.values():
            first = pod.spec.all_containers[0]
            if first.restart is RestartPolicy.ALWAYS and pod.status.containers[first.name].pid is not None:
                self.kill(pod)
                return

    async def note_departures(self) -> None:
        """Record when the kubelet stops listing a pod, until cancelled."""

        def look(_: object) -> bool:
            for uid, pod in list(self._here.items()):
                if pod.gone or (pod.phase.terminal and not pod.active):
                    self._note(pod, left=self._clock(), turned_away=_was_turned_away(pod))
                    del self._here[uid]
            return False

        await self.stage.kubelet.wait_until(look, float("inf"))

    def free(self) -> int:
        """Return how many devices the kubelet would hand out now, if the scheduler does not know of releases yet."""
        kept = sum(pod.spec.request(RESOURCE) for pod in self._here.values())
        return self.stage.kubelet.allocatable(RESOURCE) - kept

    @property
    def starts(self) -> int:
        """Return how many containers have started."""
        return sum(each.name == "ContainerStarted" for each in self.stage.kubelet.events)

    async def wait_for_a_start(self, timeout: float) -> None:
        """Wait until another container starts.

        Raises:
            TimeoutError: none did within ``timeout`` seconds.
        """
        starts = self.starts
        await self.stage.kubelet.wait_until(lambda _: self.starts > starts, timeout)

    def kubelet_restarts(self) -> None:
        self._kubelet_starts.append(self._clock())

    def _note(self, pod: EmulatedPod, **changes: Any) -> None:
        known, facts = self._bound[pod.uid]
        self._bound[pod.uid] = known, replace(facts, **changes)

    # -- the record ------------------------------------------------------------------------------------------------

    async def roll_call(self) -> None:
        """Use every device at once, and record the pods to which the kubelet and the service attribute them."""
        kubelet, cluster = self.stage.kubelet, self.stage.cluster
        number = kubelet.allocatable(RESOURCE) if cluster is None else cluster.schedulable()
        pods = [await self.bind(self.guest(each), BOUND) for each in range(number)]
        for pod in pods:
            try:
                await pod.wait(is_under_way, FOR_EVER)
            except TimeoutError as error:
                self.waited.append(str(error))
        for pod in pods if cluster is not None else ():
            self.assigned |= dict.fromkeys(self.stage.devices_of(pod), pod.uid)
        checkpoint: dict[str, Any] = {"PodDeviceEntries": []}
        if cluster is None:
            checkpoint = json.loads((kubelet.device_plugins / "kubelet_internal_checkpoint").read_text())["Data"]
        for entry in checkpoint["PodDeviceEntries"]:
            for device in {each for ids in entry["DeviceIDs"].values() for each in ids}:
                if self.assigned.setdefault(device, entry["PodUID"]) != entry["PodUID"]:
                    self.unsettled.append(f"the kubelet has given {device} to two pods")
        answer = await self.stage.run_command("devices", "-o", "json")
        for device in _items(answer.stdout):
            if device["hygiene"] == "in-use":
                holder = device["assignedTo"]
                self.granted[device["metadata"]["name"]] = f"{holder['tenant']}/{holder['pod']}"
        for pod in pods:
            await self.delete(pod, grace=2.0)

    def guest(self, number: int) -> PodSpec:
        name = f"guest{number}"
        command = tenant(self.socket, f"roll-call/{name}/main", "forever")
        return PodSpec(name, "roll-call", [ContainerSpec("main", command, {RESOURCE: 1})])

    async def settle(self) -> None:
        """Wait until every device is clean. A device out of service with a cause may stay so; the ledger records it."""
        with suppress(TimeoutError):
            await self.stage.wait_until_clean(CLEAN)
            expected = len(self.stage.device_files())
            await self.stage.wait_for_devices(
                lambda all_: sum(each.state == "clean" for each in all_) == expected, CLEAN
            )
        answer = await self.stage.run_command("devices", "-o", "json")
        for each in _items(answer.stdout):
            out = each["health"] in ("quarantined", "condemned") and each["cause"] is not None
            if each["state"] != "clean" and not out:
                user = (each["assignedTo"] or {}).get("pod")
                self.unsettled.append(f"device {each['index']} is {each['state']}, in use by {user}")
        if answer.returncode != 0:
            self.unsettled.append(f"the service does not answer: {answer.stderr.strip()}")

    async def judge(self) -> Verdict:
        """Stop the daemons, and request the reader's verdict."""
        for name, daemon in (("plugin", self.stage.plugin), ("service", self.stage.service)):
            if daemon.process is not None:
                self.exits.setdefault(name, []).append(await daemon.stop(SOON))
        for each in (self.stage.directory / "state").glob("ledger.db*"):
            shutil.copy(each, self._records / each.name)
        (self._records / "facts.json").write_text(json.dumps(asdict(self._facts())))
        assert self._reader.stdin is not None
        assert self._reader.stdout is not None
        self._reader.stdin.write(f"judge {self._records / 'facts.json'}\n".encode())
        answer = json.loads(await self._reader.stdout.readline())
        (self._records / "verdict.json").write_text(json.dumps(answer, indent=1))
        return Verdict(**answer)

    def _facts(self) -> Facts:
        daemons = {"service": self.stage.service, "plugin": self.stage.plugin}
        names = {}
        for path in self.stage.device_files():
            names[json.loads(path.read_text())["id"]] = f"simgpu{path.parent.name}"
        events = [
            Event(each.at, each.name, each.outcome, each.duration, each.devices, each.pod_uid, each.container)
            for each in self.stage.kubelet.events
            if each.name in COUNTED_CALLS
        ]
        return Facts(
            explained={name: _explained_ends(each.log) for name, each in daemons.items()},
            without_memory=self.without_memory,
            soak_pid=os.getpid(),
            dying_grace=DYING_GRACE,
            wall=self._wall,
            devices=names,
            events=events,
            # A pod may be deleted by force at the moment a restarted kubelet refuses it.
            pods={
                uid: replace(facts, turned_away=facts.turned_away or _was_turned_away(pod))
                for uid, (pod, facts) in self._bound.items()
            },
            kubelet_starts=self._kubelet_starts,
            orders=self._orders,
            unauthorized=self.unauthorized,
            exits=self.exits,
            waited=self.waited,
            unsettled=self.unsettled,
            assigned=self.assigned,
            granted=self.granted,
            ledger=str(self._records / "ledger.db"),
            clock_steps=self.faults.clock_steps,
            with_claims=self.stage.cluster is not None,
        )


def _explained_ends(log: Path) -> int:
    """Return how many runs of a daemon ended with a message about a shortage of the node."""
    return sum(
        line.startswith("Error: ") and any(each in line for each in SHORTAGE_MESSAGES)
        for line in log.read_text(errors="replace").splitlines()
    )


def _items(written: str) -> list[dict[str, Any]]:
    """Return what a command listed as JSON; nothing if it wrote nothing."""
    return list(json.loads(written)["items"]) if written else []


def _was_turned_away(pod: EmulatedPod) -> bool:
    return pod.reason == "UnexpectedAdmissionError"


def is_under_way(status: PodStatus) -> bool:
    """Return whether every container of the pod has started once, or the pod is over."""
    containers = status.containers.values()
    started = all(each.state is not ContainerState.WAITING or each.exit_code is not None for each in containers)
    return started or status.phase.terminal or status.gone


@asynccontextmanager
async def watched_node(
    records: Path,
    *,
    devices: int,
    memory: str = "1MiB",
    policy: str = QUICKLY,
    dra: bool = False,
    faults: NodeFaults | None = None,
) -> AsyncIterator[WatchedNode]:
    """Provide a node with both daemons and a reader; its records are left in ``records``."""
    faults = faults or NodeFaults()
    options: dict[str, Any] = {"devices": devices, "memory": memory, "policy": policy, "dra": dra}
    async with chaos_stage(records, **options, environment=faults.environment) as stage:
        faults.use_directory(stage.directory)
        reader = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.reader", str(stage.directory)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(TREE)},
            limit=1 << 26,
        )
        node = WatchedNode(stage, reader, records, faults)
        departures = asyncio.create_task(node.note_departures())
        try:
            assert reader.stdout is not None
            await reader.stdout.readline()
            yield node
        finally:
            departures.cancel()
            with suppress(asyncio.CancelledError):
                await departures
            assert reader.stdin is not None
            reader.stdin.close()
            await reader.wait()
