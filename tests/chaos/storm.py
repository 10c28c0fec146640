"""The actors of the chaos test: pods that come and go, a killer, and a supervisor that restarts.

Everything random comes from one seeded generator. The result is judged afterwards (:mod:`tests.chaos.verdict`), from
three independent records: the tenants' own reports, the kubelet's events, and the ledger.
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from scrubber.adapters.sim import control
from scrubber.emulator.playground import RESOURCE, Daemon, Playground
from scrubber.emulator.pods import (
    ContainerSpec,
    ContainerState,
    EmulatedPod,
    PodPhase,
    PodSpec,
    PodStatus,
    RestartPolicy,
)
from tests.chaos.children import ERASER, DaemonChild, children_of
from tests.chaos.staging import until

__all__ = ["Hand", "Supervisor", "Workload", "witness"]

WITNESS = Path(__file__).with_name("witness.py")
EVERYTHING = {
    *("service", "plugin", "eraser", "question"),
    *("service killed in mid-clear", "eraser stopped", "kubelet restarted"),
}
"""What happens in every run, independent of the random draws."""
START_LIMIT = 60.0
"""Seconds within which every waiting pod has started once nothing is killed any more."""
STORM_LIMIT = 240.0
"""The same limit while processes are killed: only against waiting forever."""


def witness(report: Path, name: str, hold: str, *flags: str) -> tuple[str, ...]:
    """Return the command of a container that runs the witness."""
    return (sys.executable, "-S", "-E", str(WITNESS), str(report), name, hold, *flags)


@dataclass(slots=True)
class Supervisor:
    """Restarts a daemon whenever it ends, as systemd or the kubelet would; :attr:`deaths` counts its exit codes."""

    daemon: Daemon
    rng: random.Random
    deaths: Counter[int] = field(default_factory=Counter)
    lives: int = 0
    up_since: float = 0.0
    gap: Callable[[], Awaitable[None]] | None = None
    """Called once, before the next start."""
    log_begins: int = 0
    """Size of the daemon's log at its last start."""

    async def run(self) -> None:
        """Run until cancelled; the daemon may be running already."""
        loop = asyncio.get_running_loop()
        while True:
            if self.daemon.process is None or self.daemon.process.returncode is not None:
                self.log_begins = self.daemon.log.stat().st_size
                await _to_the_end(self.daemon.start())
            self.lives += 1
            self.up_since = loop.time()
            assert self.daemon.process is not None
            self.deaths[await self.daemon.process.wait()] += 1
            gap, self.gap = self.gap, None
            if gap is not None:
                await gap()
            await asyncio.sleep(self.rng.uniform(0.0, 0.3))

    def is_serving(self) -> bool:
        """Return whether the daemon runs and has logged since its start that it serves."""
        if self.daemon.process is None or self.daemon.process.returncode is not None:
            return False
        log = self.daemon.log.read_bytes()[self.log_begins :]
        return b'"service.ready"' in log or b'"plugin.serving"' in log

    def kill(self) -> bool:
        """Send SIGKILL; return False when it is down."""
        process = self.daemon.process
        if process is None or process.returncode is not None:
            return False
        process.kill()
        return True


async def _to_the_end(start: Coroutine[Any, Any, None]) -> None:
    """Complete the start of a process even if cancelled, so that the process is not lost."""
    starting = asyncio.ensure_future(start)
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await starting
        raise


class Workload:
    """Pods that come and go, each with one or more witnesses. One at a time per lane; run as many lanes as needed."""

    def __init__(self, stage: Playground, report: Path, rng: random.Random, enough: asyncio.Event) -> None:
        self._stage = stage
        self._report = report
        self._rng = rng
        self._enough = enough
        self._count = 0
        self.started = 0
        self.turned_away: list[str] = []
        """Pods that the kubelet itself refused at admission, before any start was requested."""
        self.damaged: list[str] = []
        """Pods whose witness reported by its exit code that its bytes were changed."""

    async def run(self) -> None:
        """Run one lane: pod after pod until ``enough`` is set; the last one is run to its end.

        Raises:
            TimeoutError: a pod that was admitted did not start, although nothing was killed any more.
        """
        lives = (
            *(self._short, self._terminated, self._killed, self._forced),
            *(self._leaves_a_child, self._restarts, self._init_then_main, self._two_devices),
        )
        while not self._enough.is_set():
            live = self._rng.choice(lives)
            gpus = 2 if live == self._two_devices else 1
            await self._room_for(gpus)
            if not self._enough.is_set():
                self._count += 1
                await live(self._rng.choice(("team-a", "team-b", "team-c")), f"p{self._count}")

    # -- lives of pods ---------------------------------------------------------------------------------------------

    async def _short(self, namespace: str, name: str) -> None:
        pod = await self._start(PodSpec(name, namespace, [self._main(namespace, name, self._time())]))
        if pod is not None:
            await self._over(pod)

    async def _terminated(self, namespace: str, name: str) -> None:
        pod = await self._start(PodSpec(name, namespace, [self._main(namespace, name, "forever")]))
        if pod is not None:
            await self._a_while()
            await self._stage.kubelet.delete(pod)

    async def _killed(self, namespace: str, name: str) -> None:
        pod = await self._start(PodSpec(name, namespace, [self._main(namespace, name, "forever")]))
        if pod is not None:
            await self._a_while()
            await self._stage.kubelet.delete(pod, grace=0)

    async def _forced(self, namespace: str, name: str) -> None:
        pod = await self._start(PodSpec(name, namespace, [self._main(namespace, name, "forever")]))
        if pod is not None:
            await self._a_while()
            await self._stage.kubelet.delete(pod, force=True, linger=self._rng.uniform(0.2, 1.5))

    async def _leaves_a_child(self, namespace: str, name: str) -> None:
        main = self._main(namespace, name, self._time(), "--leave-leftover")
        pod = await self._start(PodSpec(name, namespace, [main], leave_children=True))
        if pod is not None:
            await self._over(pod)

    async def _restarts(self, namespace: str, name: str) -> None:
        main = self._main(namespace, name, self._time(), restart=RestartPolicy.ALWAYS)
        pod = await self._start(PodSpec(name, namespace, [main]))
        if pod is not None:
            with suppress(TimeoutError):  # a kubelet that was restarted meanwhile may have killed it
                await pod.wait(lambda status: status.containers["main"].restarts >= 2 or status.phase.terminal, 15)
            await self._stage.kubelet.delete(pod)

    async def _init_then_main(self, namespace: str, name: str) -> None:
        init = self._container(namespace, name, "init", self._time())
        pod = await self._start(PodSpec(name, namespace, [self._main(namespace, name, self._time())], [init]))
        if pod is not None:
            await self._over(pod)

    async def _two_devices(self, namespace: str, name: str) -> None:
        pod = await self._start(PodSpec(name, namespace, [self._main(namespace, name, self._time(), gpus=2)]))
        if pod is not None:
            await self._over(pod)

    # -- parts of a life -------------------------------------------------------------------------------------------

    def _main(
        self,
        namespace: str,
        name: str,
        hold: str,
        *flags: str,
        gpus: int = 1,
        restart: RestartPolicy = RestartPolicy.NEVER,
    ) -> ContainerSpec:
        return self._container(namespace, name, "main", hold, *flags, gpus=gpus, restart=restart)

    def _container(
        self,
        namespace: str,
        name: str,
        container: str,
        hold: str,
        *flags: str,
        gpus: int = 1,
        restart: RestartPolicy = RestartPolicy.NEVER,
    ) -> ContainerSpec:
        command = witness(self._report, f"{namespace}/{name}/{container}", hold, *flags)
        return ContainerSpec(container, command, {RESOURCE: gpus}, restart=restart)

    def _time(self) -> str:
        return f"{self._rng.uniform(0.3, 1.2):.2f}"

    async def _a_while(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.3, 1.5))

    async def _room_for(self, gpus: int) -> None:
        await self._stage.kubelet.wait_until(
            lambda kubelet: self._enough.is_set() or kubelet.schedulable(RESOURCE) >= gpus, STORM_LIMIT
        )

    async def _start(self, spec: PodSpec) -> EmulatedPod | None:
        """Return the pod once its last container has started, or None when the kubelet itself refused it."""
        pod = await self._stage.kubelet.run(spec)
        await pod.wait(lambda status: _is_under_way(status) or self._enough.is_set(), STORM_LIMIT)
        await pod.wait(_is_under_way, START_LIMIT)
        if pod.reason == "UnexpectedAdmissionError":
            self.turned_away.append(f"{pod.full_name}: {pod.message}")
            await self._stage.kubelet.delete(pod)
            await self._a_while()
            return None
        self.started += 1
        return pod

    async def _over(self, pod: EmulatedPod) -> None:
        """Wait for its end and delete it. A restarted kubelet may fail a pod; only its end counts here."""
        await pod.wait(lambda status: status.phase.terminal, START_LIMIT)
        codes = [each.exit_code for each in pod.status.containers.values()]
        if pod.phase is PodPhase.FAILED and 1 in codes:
            self.damaged.append(pod.describe())
        await self._stage.kubelet.delete(pod)


def _is_over(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def _is_under_way(status: PodStatus) -> bool:
    """Return whether every container of the pod has started once, or the pod is over."""
    started = all(each.state is not ContainerState.WAITING for each in status.containers.values())
    return started or status.phase.terminal


class Hand:
    """Kills its permitted targets at random times: the two daemons and the service's children."""

    def __init__(self, stage: Playground, service: Supervisor, plugin: Supervisor, rng: random.Random) -> None:
        self._stage = stage
        self._service = service
        self._plugin = plugin
        self._rng = rng
        self.kills: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self._stopped: list[int] = []
        """Pidfds of stopped erasers."""

    async def run(self, requested: int) -> None:
        """Run until ``requested`` kills are done, and every possible act has happened."""
        acts = {self._eraser: 34, self._question: 30, self._the_service: 17, self._the_plugin: 9}
        acts |= {self._slowness: 12, self._stopped_eraser: 6}
        restarts = [requested // 4, requested // 2, requested * 3 // 4]
        while self.kills.total() < requested or not self.kills.keys() | self.others.keys() >= EVERYTHING:
            (act,) = self._rng.choices(list(acts), weights=list(acts.values()))
            act()
            if act in (self._the_service, self._the_plugin) and self._rng.random() < 0.5:
                # Kills in immediate succession leave no pod the time to start, and then break nothing.
                await until(lambda: self._stage.kubelet.allocatable(RESOURCE) > 0, "a device that can be given out")
            if restarts and self.kills.total() >= restarts[0]:
                restarts.pop(0)
                await self._stage.kubelet.restart()
                self.others["kubelet restarted"] += 1
            await asyncio.sleep(self._rng.uniform(0.02, 0.38))

    async def let_go(self) -> None:
        """Continue every eraser that was stopped, and wait for its end.

        One that was stopped before the kernel began to watch its parent may have outlived it: it then exits on its
        own.

        Raises:
            TimeoutError: one did not end.
        """
        while self._stopped:
            handle = self._stopped.pop()
            try:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGCONT)
                await until(partial(_is_over, handle), "a stopped eraser's end")
            finally:
                os.close(handle)

    # -- acts ------------------------------------------------------------------------------------------------------

    def _eraser(self) -> None:
        child = self._child(lambda child: child.module == ERASER)
        if child is not None and child.signal(signal.SIGKILL):
            self.kills["eraser"] += 1

    def _question(self) -> None:
        child = self._child(lambda child: child.module != ERASER)
        if child is not None and child.signal(signal.SIGKILL):
            self.kills["question"] += 1

    def _the_service(self) -> None:
        # Also while it starts; but mostly it should have work in progress when it is killed.
        up = asyncio.get_running_loop().time() - self._service.up_since
        if up < self._rng.choice((0.2, 1.5, 2.5, 4.0)):
            return
        if self._erasers():
            self.others["service killed in mid-clear"] += 1
        if self._service.kill():
            self.kills["service"] += 1

    def _the_plugin(self) -> None:
        if self._plugin.kill():
            self.kills["plugin"] += 1

    def _stopped_eraser(self) -> None:
        """Stop an eraser; sometimes also kill the service meanwhile."""
        child = self._child(lambda child: child.module == ERASER)
        if child is not None and (handle := child.signal_and_keep(signal.SIGSTOP)) is not None:
            self.others["eraser stopped"] += 1
            self._stopped.append(handle)
            if self._rng.random() < 0.5 and self._service.kill():
                self.kills["service"] += 1

    def _slowness(self) -> None:
        """Change how long clearing takes from now on, so that kills occur in the middle of it."""
        for index in range(len(self._stage.device_files())):
            slowly = self._rng.choice((0.001, 0.2, 0.5, 0.9))
            control.add_faults(self._stage.sim_dir, str(index), slow_clear=slowly)

    def _child(self, matches: Callable[[DaemonChild], bool]) -> DaemonChild | None:
        process = self._service.daemon.process
        if process is None or process.returncode is not None:
            return None
        found = [child for child in children_of(process.pid) if matches(child)]
        return self._rng.choice(found) if found else None

    def _erasers(self) -> list[DaemonChild]:
        process = self._service.daemon.process
        assert process is not None
        return [child for child in children_of(process.pid) if child.module == ERASER]
