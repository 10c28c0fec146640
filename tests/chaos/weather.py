"""The events on the soak's node: daemons that die, devices that fail, unauthorized processes that read devices.

Everything random comes from one seeded generator. Everything it does to a process of a pod is recorded beforehand, and
every fault that it causes is removed again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from scrubber.adapters.sim import control
from scrubber.domain.errors import ScrubberError
from scrubber.emulator.playground import Daemon, Playground
from tests.chaos.children import ERASER, DaemonChild, children_of, parent_of
from tests.chaos.judgement import UnauthorizedProcess
from tests.chaos.lives import tenant
from tests.chaos.node_faults import NodeFaults
from tests.chaos.shortages import Shortages, daemon_kind, kind_of
from tests.chaos.storm import Supervisor

__all__ = ["Weather"]

_ILLNESSES: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "an application's XID": (4, {"xid": 31}, ("xid",)),
    "an XID that asks for a reset": (5, {"xid": 95}, ()),
    "ECC errors": (3, {"ecc": 2}, ()),
    "a ghost": (3, {"ghost": True}, ("ghost",)),
    "memory that does not clear": (2, {"wont_clear": True}, ("wont-clear",)),
    "fallen off the bus": (1, {"lost": True}, ("lost",)),
    "a driver that does not answer": (1, {"stuck": True}, ("stuck",)),
    "a holder that cannot be ended": (2, {"unkillable": True}, ("unkillable",)),
    "resets that fail": (1, {"reset": "fail"}, ("reset",)),
}
"""Name → how often, the fault, and what is removed again after a while; the service has to repair the rest."""

_WHEN_HURRIED = {
    "service killed": 30,
    "plugin killed": 24,
    "kubelet restarted": 14,
    "eraser killed": 100,
    "driver's or walker's child killed": 80,
    "killed with all its children, for memory": 8,
    "clearing is slow": 20,
}
"""How often instead, where most of what happens are kills."""


@dataclass(slots=True)
class _Stopped:
    """A stopped process, by its pidfd."""

    handle: int

    def go_on(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGCONT)
        os.close(self.handle)


@dataclass(slots=True)
class Weather:
    """Acts until it is stopped; :meth:`calm` undoes lasting effects.

    Attributes:
        faults: of the whole node.
        restarted: called right before another run of the kubelet begins.
        strike: kills a container that will be restarted, if there is one.
        pause: waits between two acts.
        hurried: whether kills are most of what happens.
        spare: acts that do not happen.
        only: the acts that happen; empty: all.
        kills: SIGKILLs, by kind of process.
    """

    stage: Playground
    service: Supervisor
    plugin: Supervisor
    rng: random.Random
    faults: NodeFaults
    reader: Path
    restarted: Callable[[], None]
    strike: Callable[[], None]
    pause: Callable[[], Awaitable[None]]
    hurried: bool = False
    spare: Set[str] = frozenset()
    only: Set[str] = frozenset()
    counted: int = 0
    acts: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    unauthorized: list[UnauthorizedProcess] = field(default_factory=list)
    _stopped: list[_Stopped] = field(default_factory=list)
    _later: set[asyncio.Task[None]] = field(default_factory=set)
    _visits: int = 0

    async def run(self, enough: asyncio.Event) -> None:
        """Act once of each kind, in any order; then by chance. No act is interrupted: it would leave something down."""
        acts = self._possible()
        first = list(acts)
        self.rng.shuffle(first)
        while not enough.is_set():
            new = bool(first)
            name = first.pop() if new else self.rng.choices(list(acts), [each for each, _ in acts.values()])[0]
            if await acts[name][1]():
                self.acts[name] += 1
            elif new:
                first.insert(0, name)  # its target did not exist: later
            await self.pause()

    async def calm(self) -> None:
        """Remove all faults, continue stopped processes, and wait for the unauthorized ones to end."""
        while self._later:
            await asyncio.wait(self._later)
        while self._stopped:
            self._stopped.pop().go_on()
        control.clear_faults(self.stage.sim_dir)
        self.faults.end()

    def _possible(self) -> dict[str, tuple[int, Callable[[], Awaitable[bool]]]]:
        acts: dict[str, tuple[int, Callable[[], Awaitable[bool]]]] = {
            "service killed": (3, partial(self._end, self.service, signal.SIGKILL)),
            "service terminated": (2, partial(self._end, self.service, signal.SIGTERM)),
            "service is stopped": (1, self._stand_still),
            "plugin killed": (3, partial(self._end, self.plugin, signal.SIGKILL)),
            "plugin terminated": (2, partial(self._end, self.plugin, signal.SIGTERM)),
            "kubelet restarted": (2, partial(self._restart_kubelet, 0.0)),
            "kubelet restarted while the plugin is down": (2, self._restart_both),
            "kubelet away": (1, partial(self._restart_kubelet, 1.5)),
            "eraser killed": (9, partial(self._child, signal.SIGKILL, eraser=True)),
            "eraser is stopped": (2, partial(self._child, signal.SIGSTOP, eraser=True)),
            "driver's or walker's child killed": (8, partial(self._child, signal.SIGKILL, eraser=False)),
            "clearing is slow": (5, self._slowness),
            "an unauthorized process": (5, self._use_without_a_grant),
        }
        for name, (weight, fault, lifted) in _ILLNESSES.items():
            acts[name] = (weight, partial(self._illness, fault, lifted))
        acts |= Shortages(
            self.faults,
            self.stage.directory / "state",
            self.service,
            self.plugin,
            self.rng,
            self._in_the_background,
            self.kills,
        ).acts()
        for name, weight in _WHEN_HURRIED.items() if self.hurried else ():
            acts[name] = (weight, acts[name][1])
        return {
            name: act for name, act in acts.items() if name not in self.spare and (name in self.only or not self.only)
        }

    # -- daemons ---------------------------------------------------------------------------------------------------

    async def _end(self, daemon: Supervisor, number: signal.Signals) -> bool:
        # Also while it starts; but mostly it should have work in progress when it is ended.
        up = asyncio.get_running_loop().time() - daemon.up_since
        early = max(0.0, self.rng.choice((0.0, 1.0, 2.0, 3.0)) - up)
        if early and self.hurried:
            return False
        await asyncio.sleep(early)
        if not _signal(daemon.daemon, number):
            return False
        self.kills[daemon_kind(daemon)] += number is signal.SIGKILL
        return True

    async def _stand_still(self) -> bool:
        if not _signal(self.service.daemon, signal.SIGSTOP):
            return False
        await asyncio.sleep(self.rng.uniform(0.3, 1.5))
        _signal(self.service.daemon, signal.SIGCONT)
        return True

    async def _restart_kubelet(self, longest: float) -> bool:
        await self.stage.kubelet.stop()
        self.kills["kubelet"] += 1
        await asyncio.sleep(self.rng.uniform(0.0, longest))
        self.restarted()
        await self.stage.kubelet.start()
        return True

    async def _restart_both(self) -> bool:
        """Until the plugin is back, the kubelet restarts containers without calling it."""
        process = self.plugin.daemon.process
        if process is not None and _signal(self.plugin.daemon, signal.SIGKILL):
            self.kills[daemon_kind(self.plugin)] += 1
            await process.wait()
        await self._restart_kubelet(0.0)
        await asyncio.sleep(self.rng.uniform(0.1, 0.3))  # the pods are restored, and the plugin is not
        self.strike()
        return True

    async def _child(self, number: signal.Signals, *, eraser: bool) -> bool:
        process = self.service.daemon.process
        child = None if process is None else await self._one_of(process.pid, eraser=eraser)
        handle = None if child is None else child.signal_and_keep(number)
        if child is None or handle is None:
            return False
        self.kills[kind_of(child)] += number is signal.SIGKILL
        if number is signal.SIGSTOP:
            self._stopped.append(_Stopped(handle))
        else:
            os.close(handle)
        return True

    async def _one_of(self, daemon: int, *, eraser: bool) -> DaemonChild | None:
        """Erasers live only briefly: wait for one, also briefly."""
        for _ in range(40):
            found = [child for child in children_of(daemon) if (child.module == ERASER) is eraser]
            if found:
                return self.rng.choice(found)
            await asyncio.sleep(0.01)
        return None

    # -- devices ---------------------------------------------------------------------------------------------------

    async def _slowness(self) -> bool:
        """Change how long clearing takes from now on, so that ends occur in the middle of it."""
        control.add_faults(self.stage.sim_dir, self._any(), slow_clear=self.rng.choice((0.001, 0.001, 0.001, 0.3, 0.8)))
        return True

    async def _illness(self, fault: dict[str, Any], lifted: tuple[str, ...]) -> bool:
        device = self._any()
        control.add_faults(self.stage.sim_dir, device, **fault)
        if lifted:
            self._in_the_background(self._heal(device, lifted))
        return True

    async def _heal(self, device: str, lifted: tuple[str, ...]) -> None:
        await asyncio.sleep(self.rng.uniform(0.3, 3.0))
        control.clear_faults(self.stage.sim_dir, device, lifted)

    async def _use_without_a_grant(self) -> bool:
        """Open, as a process of the node, a device that the service reports as clean, and read it."""
        clean_at = asyncio.get_running_loop().time()
        try:
            answer = await self.stage.read_client.devices()
        except ScrubberError:
            await self.stage.read_client.close()  # its connection belonged to an earlier run of the service
            return False
        clean = sorted(int(each.index) for each in answer.devices if each.state == "clean")
        if not clean:
            return False
        index = self.rng.choice(clean)
        self._visits += 1
        path, name = self.stage.sim_dir / "devices" / str(index) / "memory", f"simgpu{index}"
        words = {"device": str(path), "as": name}
        seconds = round(self.rng.uniform(0.3, 2.5), 3)
        argv = tenant(self.reader, f"node/unauthorized-{self._visits}/none", seconds, **words)
        process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL)
        self.unauthorized.append(UnauthorizedProcess(process.pid, name, clean_at))
        self._in_the_background(_see_out(process))
        return True

    def _any(self) -> str:
        return str(self.rng.randrange(len(self.stage.device_files())))

    def _in_the_background(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)


async def _see_out(process: asyncio.subprocess.Process) -> None:
    await process.wait()


def _signal(daemon: Daemon, number: signal.Signals) -> bool:
    """Signal a living daemon; not by its :mod:`subprocess` object, which might reap it and lose its exit status."""
    process = daemon.process
    if process is None or process.returncode is not None:
        return False
    with suppress(OSError):
        handle = os.pidfd_open(process.pid)
        try:
            # A process that the server of tests/forkserver.py has forked is a grandchild.
            if os.getpid() in (parent := parent_of(process.pid), parent_of(parent)):
                signal.pidfd_send_signal(handle, number)
                return True
        finally:
            os.close(handle)
    return False
