"""The NVIDIA backend: NVML lists the GPUs and the processes that hold them, CUDA clears and diagnoses them.

Of the two adapters, NVIDIA and CUDA, this is the only module that imports the other one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.cuda.diagnostics import CudaDiagnostics
from scrubber.adapters.cuda.erasure import CudaEraser
from scrubber.adapters.cuda.gpu_jobs import GpuJobRunner
from scrubber.adapters.cuda.programs import ProgramLauncher
from scrubber.adapters.nvidia.confidential import NvidiaConfidentialComputing
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.adapters.nvidia.driver_requests import DRIVER_MODULE, driver_arguments
from scrubber.adapters.nvidia.event_watch import EventWatch, event_zygote
from scrubber.adapters.nvidia.gpu_control import NvmlGpuControl
from scrubber.adapters.nvidia.holders import NvidiaHolders
from scrubber.adapters.nvidia.inventory import NvidiaInventory
from scrubber.adapters.nvidia.resetter import NvidiaResetter
from scrubber.adapters.nvidia.settings import NvidiaSettings
from scrubber.adapters.nvidia.telemetry import NvidiaTelemetry
from scrubber.domain.device import Device, NodeIdentity
from scrubber.domain.errors import InvalidConfiguration, Unavailable
from scrubber.ports.device import DeviceBackend, InfrastructureLookup

__all__ = ["nvidia_backend"]

_WAKE_TIMEOUT = 30.0
"""Seconds that GPUs get to wake up. A GPU that takes longer is queried anyway and reported as stuck."""


class _WatchedInventory:
    """:class:`scrubber.ports.Inventory` that starts the event watch for the devices it lists."""

    def __init__(self, inventory: NvidiaInventory, watch: EventWatch, holders: NvidiaHolders) -> None:
        self._inventory = inventory
        self._watch = watch
        self._holders = holders
        self.last_devices: Sequence[Device] = ()

    async def devices(self) -> tuple[Device, ...]:
        found = await self._inventory.devices()
        known = {device.id for device in self.last_devices}
        for device in found:
            if device.id not in known:  # also a device that was absent: a GPU back from MIG mode, or on the bus again
                self._holders.forget(device.id)
        self.last_devices = found
        self._watch.follow(found)
        # The first process that opens a GPU wakes it, which takes seconds unless something keeps the GPU awake. The
        # event children have that time; a driver call made earlier would be reported as stuck.
        await self._watch.wait_until_ready(_WAKE_TIMEOUT)
        return found

    async def identity(self) -> NodeIdentity:
        return await self._inventory.identity()


class _ResetListeners:
    """Caches and watchers whose state about a GPU does not outlive its reset."""

    def __init__(self, watch: EventWatch, holders: NvidiaHolders) -> None:
        self._watch = watch
        self._holders = holders

    async def pause(self, gpu: str) -> None:
        await self._watch.pause(gpu)

    async def resume(self, gpu: str, deadline: float) -> None:
        await self._watch.resume(gpu, deadline)

    def forget(self, device: str) -> None:
        self._watch.forget(device)
        self._holders.forget(device)


@asynccontextmanager
async def nvidia_backend(
    paths: DriverPaths,
    state: Path,
    *,
    node: str,
    driver_call_timeout: float,
    infrastructure: InfrastructureLookup,
    walk_timeout: float = 10.0,
    children: Children | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[DeviceBackend]:
    """Build the backend for the node's NVIDIA GPUs.

    Args:
        state: a directory that only the service uses: locks, fences, compiled kernels.
        driver_call_timeout: timeout of one driver call, in seconds.
        walk_timeout: deadline for the reply to one walk over ``/proc``, in seconds; the processes that it inspects
            share four fifths of that.
        environment: additional variables for the CUDA children.

    Raises:
        InvalidConfiguration: nvidia-ml-py is not installed, or CuPy is missing or cannot be loaded.
    """
    if find_spec("pynvml") is None:  # searched for, not loaded; without it every driver child would only exit
        raise InvalidConfiguration(
            "nvidia-ml-py is not installed, so no GPU can be queried: install the service with its extra "
            "cuda12 (or cuda13, depending on the driver's version)."
        )
    own = children or Children()
    locks = state / "locks"
    locks.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(own.close)
        inventory = NvidiaInventory(paths, own, node=node)
        stack.push_async_callback(inventory.close)
        arguments = driver_arguments(paths)
        questions = RequestPool(
            own, DRIVER_MODULE, arguments=arguments, deadline=driver_call_timeout, environment=paths.environment()
        )
        stack.push_async_callback(questions.close)
        zygote = event_zygote(own, paths)
        stack.push_async_callback(zygote.close)
        watch = EventWatch(zygote, paths, inventory.fingerprint)
        stack.push_async_callback(watch.close)
        holders = NvidiaHolders(own, questions, paths, infrastructure=infrastructure, walk_deadline=walk_timeout)
        stack.push_async_callback(holders.close)
        followed = _WatchedInventory(inventory, watch, holders)
        programs = ProgramLauncher(own, state, libraries=paths.library_directories(), environment=environment)
        stack.push_async_callback(programs.close)
        try:
            await programs.warm_up()  # a missing CuPy is reported now, not by the first scrub
        except Unavailable as away:
            raise InvalidConfiguration(str(away)) from away
        confidential = NvidiaConfidentialComputing(questions, enabled=lambda: inventory.is_confidential)
        workplace = GpuJobRunner(
            programs, NvmlGpuControl(questions, holders), locks, accepting_work=confidential.ready_for_child
        )
        eraser = CudaEraser(workplace)
        resetter = NvidiaResetter(
            devices=lambda: followed.last_devices,
            holders=holders,
            erasers=eraser,
            events=_ResetListeners(watch, holders),
            driver_pool=questions,
            suspendables=(inventory,),
            children=own,
            paths=paths,
        )
        watch.start()
        yield DeviceBackend(
            inventory=followed,
            holders=holders,
            telemetry=NvidiaTelemetry(questions, watch, holders),
            settings=NvidiaSettings(questions),
            resetter=resetter,
            eraser=eraser,
            diagnostics=CudaDiagnostics(workplace),
            children=own,
            not_advertised=lambda: inventory.not_advertised,
            confidential=confidential,
        )
