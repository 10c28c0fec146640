"""One pod's life on the node, in its own worker: sandbox, init containers, containers, restarts, the end.

Promise: a container is started only after a successful reply to ``PreStartContainer`` (or after the kubelet's own gap
skipped it), a refusal delays this pod alone, and a pod stops counting as active only when its containers have ended.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from scrubber.emulator.cdi import CdiUnresolvable
from scrubber.emulator.changes import ChangeNotifier
from scrubber.emulator.containers import Container, ContainerCommand, ContainerRuntime, ContainerStartFailed
from scrubber.emulator.devicemanager import ContainerRunOptions, DeviceManager, StartRefused
from scrubber.emulator.dra.manager import DraManager
from scrubber.emulator.dra.pod_claims import PrepareFailed, UnprepareFailed
from scrubber.emulator.events import KubeletEvent, Recorder
from scrubber.emulator.filesystem import ContainerCreateFailed, create_container_root
from scrubber.emulator.pods import (
    ContainerRecord,
    ContainerSpec,
    ContainerState,
    Deletion,
    EmulatedPod,
    PodPhase,
    RestartPolicy,
)
from scrubber.emulator.timings import KubeletTimings

UNKNOWN_END = 255
"""Exit code of a container that the runtime does not remember."""
KILLED = 128 + signal.SIGKILL


@dataclass(slots=True)
class _StartAttempts:
    """What this run of the kubelet's process remembers about starting one container; lost when it is restarted."""

    not_before: float = 0.0
    refusals: int = 0
    crash_delay: float = 0.0
    delayed_exit: float = -1.0
    """The end of the run for which ``crash_delay`` was last counted."""
    image_pulled: bool = False


class PodWorker:
    """Brings one admitted pod to its end. :meth:`run` returns when the pod is over."""

    def __init__(
        self,
        pod: EmulatedPod,
        devices: DeviceManager,
        runtime: ContainerRuntime,
        timings: KubeletTimings,
        recorder: Recorder,
        changes: ChangeNotifier,
        rng: random.Random,
        dra: DraManager | None = None,
    ) -> None:
        self._pod = pod
        self._devices = devices
        self._dra = dra
        self._runtime = runtime
        self._timings = timings
        self._recorder = recorder
        self._changes = changes
        self._rng = rng
        self._attempts = {container.name: _StartAttempts() for container in pod.spec.all_containers}
        self._wake_event = asyncio.Event()
        self._clock = asyncio.get_running_loop().time

    def wake(self) -> None:
        """Notify the worker of a change of the pod: a container ended, or its deletion was requested."""
        self._wake_event.set()

    async def run(self) -> None:
        """Run until the pod is over, or until cancelled with the kubelet's process; containers then keep running."""
        pod = self._pod
        pod.log_directory.mkdir(parents=True, exist_ok=True)
        self._adopt()
        while not pod.gone:
            self._wake_event.clear()
            self._record_exits()
            if pod.deletion is not None:
                await self._terminate(pod.deletion)
                return
            if not self._runtime.sandbox_runs(pod.uid) and not self._phase().terminal:
                await self._set_up_sandbox()
                continue
            due = await self._start_due_containers()
            if self._is_ending():
                continue
            phase = self._phase()
            if phase.terminal:
                await self._complete(phase)
                return
            self._set_phase(phase)
            await self._wait_until(due)
        if self._dra is not None:
            await self._runtime.wait_until_removed(pod.uid)
            await self._unprepare()

    async def _set_up_sandbox(self) -> None:
        """Make the first sandbox of the pod, or another one for one that died; claims are prepared before."""
        if self._runtime.has_pod(self._pod.uid):
            await self._runtime.tear_down_sandbox(self._pod.uid)
            self._record_lost(KILLED)
            self._record_event("SandboxChanged", devices=self._pod.device_ids)
        for container in self._pod.spec.init_containers:
            record = self._pod.records[container.name]
            if record.state is ContainerState.TERMINATED:
                record.set_waiting("PodInitializing", "")  # in a new sandbox, init containers run again
        if not await self._prepare():
            return
        await asyncio.sleep(self._timings.sandbox_setup)
        if self._is_ending():
            return
        try:
            await self._runtime.run_sandbox(self._pod.uid)
        except ContainerStartFailed:
            if not self._is_ending():
                raise

    async def _prepare(self) -> bool:
        """Prepare the pod's claims, again and again until that succeeds; return False when the pod ends before."""
        while self._dra is not None and not self._is_ending():
            key = self._pod.resync_key
            try:
                return await self._unless_ending(self._dra.prepare(self._pod))
            except PrepareFailed as error:
                self._dra.report(self._pod, "FailedPrepareDynamicResources", str(error))
            due = self._clock() + self._rng.uniform(*self._timings.pod_resync)
            while not self._is_ending() and self._clock() < due and self._pod.resync_key == key:
                self._wake_event.clear()
                await self._wait_until(due)
        return not self._is_ending()

    async def _unless_ending(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do ``work``; cancel it when the pod's end is requested, and return whether it was completed."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        woken = loop.create_task(self._wake_event.wait())
        try:
            while not task.done() and not self._is_ending():
                await asyncio.wait((task, woken), return_when=asyncio.FIRST_COMPLETED)
                if woken.done():
                    self._wake_event.clear()
                    woken = loop.create_task(self._wake_event.wait())
        finally:
            for each in (task, woken):
                each.cancel()
            await asyncio.gather(task, woken, return_exceptions=True)
        if task.cancelled():
            return False
        task.result()
        return True

    async def _unprepare(self) -> None:
        """Release the pod's claims, again and again until that succeeds: meanwhile the pod stays as it is.

        Its sandbox is stopped before: the kubelet kills a pod as a whole, and then releases its claims.
        """
        if self._dra is not None:
            self._runtime.kill_sandbox(self._pod.uid)
        while self._dra is not None:
            try:
                await self._dra.unprepare(self._pod)
            except UnprepareFailed as error:
                self._dra.report(self._pod, "FailedKillPod", str(error))
                await asyncio.sleep(self._rng.uniform(*self._timings.unprepare_retry))
            else:
                return

    def _record_lost(self, exit_code: int) -> None:
        """Record the end of containers that the runtime has forgotten."""
        for name, record in self._pod.records.items():
            if record.state is ContainerState.RUNNING and self._runtime.container(self._pod.uid, name) is None:
                record.set_terminated(exit_code, 0.0, self._clock())

    def _adopt(self) -> None:
        """Take over containers that the runtime started for an earlier process of the kubelet, now ended."""
        self._record_lost(UNKNOWN_END)  # of an earlier boot of the node
        for name, record in self._pod.records.items():
            container = self._runtime.container(self._pod.uid, name)
            unknown = container is not None and container.started_at > record.ended_at
            if container is not None and unknown and record.state is not ContainerState.RUNNING:
                record.set_running(container.pid)

    def _set_phase(self, phase: PodPhase) -> None:
        self._pod.phase = phase
        self._changes.notify()

    def _is_ending(self) -> bool:
        return self._pod.deletion is not None or self._pod.gone

    async def _wait_until(self, due: float | None) -> None:
        try:
            async with asyncio.timeout_at(due):
                await self._wake_event.wait()
        except TimeoutError:
            return

    def _record_exits(self) -> None:
        for name, record in self._pod.records.items():
            container = self._runtime.container(self._pod.uid, name)
            if record.state is ContainerState.RUNNING and container is not None and container.exit_code is not None:
                record.set_terminated(
                    container.exit_code, container.ended_at - container.started_at, container.ended_at
                )
                self._record_event("ContainerDied", str(container.exit_code), container=name, devices=record.device_ids)

    # Starting

    async def _start_due_containers(self) -> float | None:
        """Make one pass over the containers in order; return when to make the next, ``None``: at the next change."""
        due: list[float] = []
        for container in self._pod.spec.init_containers:
            record = self._pod.records[container.name]
            if self._needs_start(record):
                due += await self._try_start(container, record)
            if not self._is_init_done(record):
                return min(due, default=None)
        for container in self._pod.spec.containers:
            record = self._pod.records[container.name]
            if self._needs_start(record):
                due += await self._try_start(container, record)
        return min(due, default=None)

    def _needs_start(self, record: ContainerRecord) -> bool:
        if record.state is ContainerState.TERMINATED:
            return not self._is_ending() and record.spec.restart.restarts_after(record.exit_code or 0)
        return record.state is ContainerState.WAITING and not self._is_ending()

    def _is_init_done(self, record: ContainerRecord) -> bool:
        """Whether the containers after this init container may start: it has succeeded, or it is a running sidecar."""
        if record.spec.restart is RestartPolicy.ALWAYS:
            return record.state is ContainerState.RUNNING or record.has_terminated_before
        return record.state is ContainerState.TERMINATED and record.exit_code == 0

    async def _try_start(self, container: ContainerSpec, record: ContainerRecord) -> list[float]:
        """Start a container unless it is too early; return the times at which to check it again."""
        attempts = self._attempts[container.name]
        self._count_crash(container, record, attempts)
        if attempts.not_before > self._clock():
            return [attempts.not_before]
        try:
            if not attempts.image_pulled:
                await asyncio.sleep(self._timings.image_pull)
                attempts.image_pulled = True
            options = await self._devices.run_options(self._pod, container)
            if self._dra is not None:
                options = self._dra.run_options(self._pod, container, options)
            if self._is_ending():
                return []
            await self._create(container, record, options)
        except StartRefused as error:
            record.set_waiting("CreateContainerConfigError", str(error))
            first = attempts.refusals == 0 or error.deadline_exceeded
            attempts.refusals += 1
            pause = self._timings.pre_start_first_retry if first else self._rng.uniform(*self._timings.pre_start_retry)
        except (CdiUnresolvable, ContainerCreateFailed, ContainerStartFailed) as error:
            record.set_waiting("CreateContainerError", str(error))
            pause = self._rng.uniform(*self._timings.pre_start_retry)
        else:
            attempts.refusals = 0
            return []
        attempts.not_before = self._clock() + pause
        self._changes.notify()
        return [attempts.not_before]

    def _count_crash(self, container: ContainerSpec, record: ContainerRecord, attempts: _StartAttempts) -> None:
        """Count a crash once per ended run: the first restart is immediate, later ones wait, doubling each time."""
        if not record.has_terminated_before or attempts.delayed_exit == record.ended_at:
            return
        first, longest = self._timings.crash_back_off
        if record.run_seconds > self._timings.crash_back_off_reset:
            attempts.crash_delay = 0.0
        attempts.not_before = record.ended_at + attempts.crash_delay
        attempts.delayed_exit = record.ended_at
        if attempts.not_before > self._clock():
            record.set_waiting(
                "CrashLoopBackOff",
                f"back-off {attempts.crash_delay:g}s restarting failed container={container.name} "
                f"pod={self._pod.spec.name}_{self._pod.spec.namespace}({self._pod.uid})",
            )
        attempts.crash_delay = min(max(first, 2 * attempts.crash_delay), longest)

    async def _create(self, container: ContainerSpec, record: ContainerRecord, options: ContainerRunOptions) -> None:
        pod = self._pod
        root = pod.container_root(container.name)
        create_container_root(root, options)
        run = record.restarts + 1 if record.has_terminated_before else 0
        log = pod.log_directory / container.name / f"{run}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        # The plugin's variables come first, then the pod's own: on a conflict the pod's win, as in the kubelet.
        env = {**options.envs, **container.env}
        command = ContainerCommand(container.argv, env, root, log, pod.spec.leave_children)
        started = await self._runtime.start(pod.uid, container.name, command)
        record.set_running(started.pid)
        self._record_event("ContainerStarted", container=container.name, devices=record.device_ids)

    # Ending

    def _phase(self) -> PodPhase:
        """Return the phase that the kubelet computes from the pod's containers."""
        records = self._pod.records
        for container in self._pod.spec.init_containers:
            record = records[container.name]
            if not self._is_init_done(record):
                failed = record.state is ContainerState.TERMINATED and not self._needs_start(record)
                return PodPhase.FAILED if failed else PodPhase.PENDING
        mains = [records[container.name] for container in self._pod.spec.containers]
        if any(record.state is ContainerState.WAITING and not record.has_terminated_before for record in mains):
            return PodPhase.PENDING
        if any(record.state is not ContainerState.TERMINATED or self._needs_start(record) for record in mains):
            return PodPhase.RUNNING
        return PodPhase.SUCCEEDED if all(record.exit_code == 0 for record in mains) else PodPhase.FAILED

    async def _complete(self, phase: PodPhase) -> None:
        """Finish a pod whose containers have all ended permanently; the pod leaves ``List`` a while later.

        Its phase becomes terminal when its claims are released.
        """
        last = max((record.ended_at for record in self._pod.records.values()), default=0.0)
        leaves_at = last + self._rng.uniform(*self._timings.completed_pod_list_delay)
        await self._end_containers(self._running(), self._timings.termination_grace)
        await self._unprepare()
        self._set_phase(phase)
        while not self._is_ending() and self._clock() < leaves_at:
            self._wake_event.clear()
            await self._wait_until(leaves_at)
        await self._finish_pod()

    async def _terminate(self, deletion: Deletion) -> None:
        """Delete the pod: SIGTERM, the grace period, SIGKILL; then the pod is gone."""
        await self._end_containers(self._running(), deletion.grace, deletion)
        await self._unprepare()
        await asyncio.sleep(self._timings.deleted_pod_list_delay)
        self._record_exits()
        self._pod.phase = self._phase() if self._pod.phase is not PodPhase.PENDING else PodPhase.FAILED
        await self._finish_pod()

    def _running(self) -> list[Container]:
        found = [self._runtime.container(self._pod.uid, name) for name in self._pod.records]
        return [container for container in found if container is not None and container.exit_code is None]

    async def _end_containers(self, running: list[Container], grace: float, deletion: Deletion | None = None) -> None:
        deadline = self._clock() + grace
        if deletion is not None:
            # A kubelet that was restarted meanwhile continues the grace period that began before.
            deadline = deletion.deadline = deletion.deadline if deletion.deadline is not None else deadline
        for together in self._termination_order(running):
            for container in together:
                container.signal(signal.SIGTERM)
            try:
                async with asyncio.timeout_at(deadline):
                    for container in together:
                        await container.exited.wait()
            except TimeoutError:
                for container in together:
                    container.signal(signal.SIGKILL)
            for container in together:
                await container.exited.wait()

    def _termination_order(self, running: list[Container]) -> list[list[Container]]:
        """Return the containers in termination order: all others at once, then the sidecars one by one, in reverse."""
        init = self._pod.spec.init_containers
        sidecars = [each.name for each in init if not self._pod.spec.is_ordinary_init(each)]
        others = [container for container in running if container.name not in sidecars]
        found = {container.name: container for container in running}
        return [others, *([found[name]] for name in reversed(sidecars) if name in found)]

    async def _finish_pod(self) -> None:
        pod = self._pod
        await self._runtime.remove_pod(pod.uid)
        self._record_exits()
        pod.active, pod.finished = False, True
        pod.gone = pod.gone or (pod.deletion is not None and pod.item is None)
        self._record_event("PodOver", pod.phase.value, devices=pod.device_ids)

    def _record_event(self, name: str, outcome: str = "OK", *, devices: tuple[str, ...], container: str = "") -> None:
        pod = self._pod
        at = self._clock()
        self._recorder.record(
            KubeletEvent(at, name, outcome, devices=devices, pod=pod.full_name, pod_uid=pod.uid, container=container)
        )
