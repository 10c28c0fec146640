"""The simulated node for the composition root: every device port for one directory, started and closed together.

Promise: one service at a time. A second one, with its own state directory, would not know the grants of the first and
would clear devices that are in use.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.kernel_text import value_in
from scrubber.adapters.locks import SERVICE_LOCK
from scrubber.adapters.shared_walks import SharedWalks
from scrubber.adapters.sim import lease
from scrubber.adapters.sim.diagnostics import SimDiagnostics
from scrubber.adapters.sim.erasure import SimEraser, eraser_zygote
from scrubber.adapters.sim.holders import SimHolders
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.layout import load_node
from scrubber.adapters.sim.resetter import SimResetter
from scrubber.adapters.sim.settings import SimSettings
from scrubber.adapters.sim.signal_watch import SignalWatch
from scrubber.adapters.sim.telemetry import DRIVER_MODULE, SimTelemetry
from scrubber.domain.errors import AlreadyRunning, DeviceFault, InvalidConfiguration, Unavailable
from scrubber.ports.device import DeviceBackend, InfrastructureLookup

__all__ = ["SimBackend", "sim_backend"]


@asynccontextmanager
async def sim_backend(
    directory: Path, *, driver_call_timeout: float, infrastructure: InfrastructureLookup
) -> AsyncIterator[DeviceBackend]:
    """Start the simulated node in ``directory``, and close it at the end.

    Raises:
        InvalidConfiguration: there is none.
        AlreadyRunning: another service uses it.
    """
    backend = SimBackend(directory, driver_call_timeout=driver_call_timeout, infrastructure=infrastructure)
    await backend.start()
    warming = asyncio.create_task(backend.warm_up())  # meanwhile the service starts; the first scrub waits for it
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
        warming.cancel()
        await asyncio.wait({warming})
        await backend.close()


class SimBackend:
    """The device ports of the node in ``directory``.

    Args:
        driver_call_timeout: timeout of one driver call, in seconds.
        walk_timeout: deadline for the reply to one walk over ``/proc``, in seconds.
        confirm_seconds: see :class:`~scrubber.adapters.sim.holders.SimHolders`.
        children: starts the children; its ``abandoned`` and ``pids()`` are for metrics.
        infrastructure: recognizes infrastructure that the policy allows; None: there is none.
    """

    def __init__(
        self,
        directory: Path,
        *,
        driver_call_timeout: float = 1.0,
        walk_timeout: float = 10.0,
        confirm_seconds: float = 0.25,
        children: Children | None = None,
        infrastructure: InfrastructureLookup | None = None,
    ) -> None:
        self._directory = directory.absolute()
        self._lock: int | None = None
        node = str(self._directory)
        self.children = children or Children()
        self._driver_pool = RequestPool(self.children, DRIVER_MODULE, arguments=(node,), deadline=driver_call_timeout)
        self._walks = SharedWalks.in_children(self.children, walk_timeout)
        self._watch = SignalWatch(self._directory)
        self.inventory = SimInventory(self._directory)
        self.holders = SimHolders(
            self.inventory, self._walks, confirm_seconds=confirm_seconds, infrastructure=infrastructure
        )
        self.telemetry = SimTelemetry(self.inventory, self._driver_pool, self._watch)
        self.settings = SimSettings(self.inventory, self._driver_pool)
        self.resetter = SimResetter(self.inventory, self.holders, self.children, node)
        self.diagnostics = SimDiagnostics(self.inventory, self.children, self._directory / "locks")
        self.zygote = eraser_zygote(self.children)
        self.eraser = SimEraser(self.inventory, self.zygote, self._directory / "locks")

    async def start(self) -> None:
        """Lock the node, check it and start to watch it; children start with the first request.

        Raises:
            InvalidConfiguration: there is no simulated node here, or its file system does not support one.
            AlreadyRunning: another service has locked the node.
        """
        devices = load_node(self._directory).devices
        self._lock = _lock_node(self._directory / "locks" / SERVICE_LOCK, self._directory)
        try:
            faults: list[DeviceFault] = []
            for found in devices:
                try:
                    lease.is_held(found.memory, found.inode)
                except DeviceFault as fault:
                    faults.append(fault)
            # A fault of only some devices is their own, and is reported as theirs.
            if devices and len(faults) == len(devices):
                raise InvalidConfiguration(f"The simulated node cannot be used: {faults[0]}") from faults[0]
            self._watch.start()
        except BaseException:
            self._release_node()
            raise

    async def warm_up(self) -> None:
        """Load the eraser; where that is impossible, the first scrub reports it."""
        with suppress(Unavailable):
            await self.zygote.warm_up()

    async def close(self) -> None:
        """End every child and close every stream of signals, then unlock the node.

        An eraser at work leaves its device dirty.
        """
        self._watch.close()
        try:
            await self._driver_pool.close()
            await self._walks.close()
            await self.zygote.close()
            await self.children.close()
        finally:
            self._release_node()

    def _release_node(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _lock_node(path: Path, node: Path) -> int:
    """Lock the node for this process; the descriptor holds it until it is closed, and no child inherits it."""
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidConfiguration(f"The simulated node cannot be used: {path}: {error.strerror}.") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
    except BlockingIOError:
        owner = value_in(os.pread(descriptor, 32, 0)) or "unknown"
        os.close(descriptor)
        raise AlreadyRunning(
            f"Another scrub service (PID {owner}) uses the simulated node in {node}; stop it first, or pass "
            "another simulated node with --sim-dir."
        ) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
