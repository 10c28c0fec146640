"""The simulated node as the composition root sees it: every device port for one directory, started and closed at once.

Promise: one service at a time. A second one, with a state directory of its own, would know of no grant of the first and
clear devices that are in use.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from scrubber.adapters.children.process import Children
from scrubber.adapters.children.questions import QuestionPool
from scrubber.adapters.locks import SERVICE_LOCK
from scrubber.adapters.proc import value_in
from scrubber.adapters.sim import lease
from scrubber.adapters.sim.diagnostician import SimDiagnostics
from scrubber.adapters.sim.erasure import SimEraser
from scrubber.adapters.sim.holders import SimHolders
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.layout import load
from scrubber.adapters.sim.resetter import SimResetter
from scrubber.adapters.sim.settings import SimSettings
from scrubber.adapters.sim.signals import SignalWatch
from scrubber.adapters.sim.telemetry import DRIVER_MODULE, SimTelemetry
from scrubber.adapters.walker import WALKER_MODULE, budget_within
from scrubber.domain.errors import Away, BadConfiguration, DeviceFault, SecondInstance
from scrubber.ports.device import DeviceBackend

__all__ = ["SimBackend", "sim_backend"]


@asynccontextmanager
async def sim_backend(directory: Path, *, question: float) -> AsyncIterator[DeviceBackend]:
    """The simulated node in ``directory``, started.

    Raises:
        BadConfiguration: there is none.
        SecondInstance: another service has it.
    """
    backend = SimBackend(directory, question_deadline=question)
    await backend.start()
    try:
        yield DeviceBackend(
            inventory=backend.inventory,
            holders=backend.holders,
            telemetry=backend.telemetry,
            settings=backend.settings,
            resetter=backend.resetter,
            eraser=backend.eraser,
            diagnostics=backend.diagnostics,
            children=backend.children,
        )
    finally:
        await backend.close()


class SimBackend:
    """The device ports of the node in ``directory``.

    Args:
        question_deadline: seconds that one question to the driver may take.
        walk_deadline: seconds within which one walk over ``/proc`` is answered.
        settle: see :class:`~scrubber.adapters.sim.holders.SimHolders`.
        children: who starts the children; its ``abandoned`` and ``pids()`` are for metrics.
    """

    def __init__(
        self,
        directory: Path,
        *,
        question_deadline: float = 1.0,
        walk_deadline: float = 10.0,
        settle: float = 0.25,
        children: Children | None = None,
    ) -> None:
        self._directory = directory.absolute()
        self._lock: int | None = None
        node = str(self._directory)
        self.children = children or Children()
        self._questions = QuestionPool(self.children, DRIVER_MODULE, arguments=(node,), deadline=question_deadline)
        self._walks = QuestionPool(self.children, WALKER_MODULE, deadline=walk_deadline, blames=Away)
        self._watch = SignalWatch(self._directory)
        self.inventory = SimInventory(self._directory)
        self.holders = SimHolders(
            self.inventory, self._walks, self.children, budget=budget_within(walk_deadline), settle=settle
        )
        self.telemetry = SimTelemetry(self.inventory, self._questions, self._watch)
        self.settings = SimSettings(self.inventory, self._questions)
        self.resetter = SimResetter(self.inventory, self.children, node)
        self.diagnostics = SimDiagnostics(self.inventory, self.children, self._directory / "locks")
        self.eraser = SimEraser(self.inventory, self.children, self._directory / "locks")

    async def start(self) -> None:
        """Take the node, check it and begin to watch it; children start with the first question.

        Raises:
            BadConfiguration: there is no simulated node here, or its file system cannot carry one.
            SecondInstance: another service has the node.
        """
        devices = load(self._directory).devices
        self._lock = _take(self._directory / "locks" / SERVICE_LOCK, self._directory)
        try:
            faults: list[DeviceFault] = []
            for found in devices:
                try:
                    lease.held(found.memory, found.inode)
                except DeviceFault as fault:
                    faults.append(fault)
            if devices and len(faults) == len(devices):  # one of many is that device's own fault, and shows as such
                raise BadConfiguration(f"The simulated node cannot be used: {faults[0]}") from faults[0]
            self._watch.start()
        except BaseException:
            self._let_go()
            raise

    async def close(self) -> None:
        """End every child and every stream of signals, then let go of the node.

        An eraser at work leaves its device dirty.
        """
        self._watch.close()
        try:
            await self._questions.close()
            await self._walks.close()
            await self.children.close()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _take(path: Path, node: Path) -> int:
    """Lock the node for this process; the descriptor holds it until it is closed, and no child inherits it."""
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadConfiguration(f"The simulated node cannot be used: {path}: {error.strerror}.") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
    except BlockingIOError:
        owner = value_in(os.pread(descriptor, 32, 0)) or "unknown"
        os.close(descriptor)
        raise SecondInstance(
            f"Another scrub service (PID {owner}) works on the simulated node in {node}; stop it first, or give this "
            "one a node of its own with --sim-dir."
        ) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
