"""A node with NVIDIA GPUs for tests: the whole backend, as the service builds it, over a simulated machine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from scrubber.adapters.children.process import Children
from scrubber.adapters.nvidia.backend import nvidia_backend
from scrubber.domain.device import Device
from scrubber.ports.device import DeviceBackend
from tests.nvidia import holder
from tests.nvidia.machine import MIB, Gpu, Instance, Machine, Subject

__all__ = ["NvidiaRig", "standin_environment", "started"]

DEADLINE = 30.0

_ROOT = Path(__file__).parents[2]
_STANDIN = _ROOT / "tests" / "nvidia" / "standin"


def standin_environment(machine: Machine) -> dict[str, str]:
    """Return the environment in which the CUDA children import the stand-in for CuPy, and compute in ``machine``."""
    return {"PYTHONPATH": f"{_STANDIN}:{_ROOT}", "SCRUBBER_STANDIN_WORLD": str(machine.root)}


class NvidiaRig:
    """The rig of the contract, and what only a node with NVIDIA GPUs can do."""

    error_signal = "xid"

    def __init__(self, machine: Machine, backend: DeviceBackend) -> None:
        self.machine = machine
        self.backend = backend

    def gpu(self, device: Device) -> Gpu:
        """Return the GPU that ``device`` is or belongs to."""
        return self.machine.find(device.id)[0]

    def subject(self, device: Device) -> Subject:
        return self.machine.find(device.id)[1]

    # --- the contract's rig

    def fill(self, device: Device, text: str) -> None:
        self.subject(device).fill(text)

    def content(self, device: Device) -> bytes:
        return self.subject(device).content()

    @contextmanager
    def hold(self, device: Device, *, used_bytes: int = MIB) -> Iterator[int]:
        gpu, subject = self.machine.find(device.id)
        ids = map(str, subject.ids) if isinstance(subject, Instance) else ()
        where = [str(gpu.directory), str(gpu.node), str(subject.directory.relative_to(gpu.directory))]
        command = [sys.executable, str(holder.__file__), *where, str(used_bytes), *ids]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "the holder ended before it held anything"
            try:
                yield process.pid
            finally:
                process.kill()

    def raise_error(self, device: Device, code: int) -> None:
        self.gpu(device).raise_xid(code)

    def add_ecc_errors(self, device: Device, errors: int) -> None:
        self.gpu(device).add_ecc_errors(errors)

    def lose(self, device: Device) -> None:
        self.gpu(device).lose()

    def hang(self, device: Device) -> None:
        self.gpu(device).hang()

    def fail_resets(self, device: Device) -> None:
        self.gpu(device).fail_resets()

    def tamper(self, device: Device) -> tuple[str, str]:
        self.gpu(device).set("compute_mode", 2)
        return "compute_mode", "prohibited"

    def remove_driver(self) -> None:
        self.machine.remove_driver()


@asynccontextmanager
async def started(machine: Machine, state: Path, *, question: float = 5.0) -> AsyncIterator[NvidiaRig]:
    """Provide the backend over ``machine``, once the event stream of every GPU is open."""
    children = Children()
    async with nvidia_backend(
        machine.places,
        state,
        node="node-1",
        driver_call_timeout=question,
        infrastructure=_no_infrastructure,
        children=children,
        environment=standin_environment(machine),
    ) as backend:
        signals = backend.telemetry.signals()
        ready = {device.id for device in await backend.inventory.devices()}
        async with asyncio.timeout(DEADLINE):
            while ready:
                first = await anext(signals)
                ready.discard(first.device or "")
        yield NvidiaRig(machine, backend)
    assert children.pids() == frozenset()


async def _no_infrastructure(pid: int, *, has_context: bool) -> None:
    """Treat no process as infrastructure."""
