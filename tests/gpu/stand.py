"""The service's own backend around one unused device, and the other components that the check needs.

The check tests what ships, composed as in the service; only the engine and its ledger are left out. With
``--leave-settings`` the eraser works without its fence, because that changes the compute mode for a moment.
"""

from __future__ import annotations

import os
import platform
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from bench.gpu.paths import Ports
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.cuda.diagnostics import CudaDiagnostics
from scrubber.adapters.cuda.erasure import CudaEraser
from scrubber.adapters.cuda.fence import GpuControl
from scrubber.adapters.cuda.gpu_jobs import GpuJobRunner
from scrubber.adapters.cuda.programs import DIAGNOSIS_MODULE, ProgramLauncher
from scrubber.adapters.nvidia.backend import nvidia_backend
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.adapters.nvidia.driver_requests import DRIVER_MODULE, device_request, driver_arguments, gpu_uuid
from scrubber.adapters.nvidia.gpu_control import NvmlGpuControl
from scrubber.adapters.nvidia.holders import NvidiaHolders
from scrubber.adapters.procwalk import DeviceNodeTarget
from scrubber.adapters.walker import WALKER_MODULE, parse_walk_report, walk_request
from scrubber.domain.device import AccessKind, Device, find_device
from scrubber.domain.errors import DeviceBusy, Unavailable
from scrubber.domain.infrastructure import InfrastructureProcess
from scrubber.domain.telemetry import HolderKind
from scrubber.ports.device import DeviceBackend, Diagnostics, Eraser, InfrastructureLookup
from tests.gpu.extent import Extent
from tests.gpu.programs import library_path, python_path

__all__ = ["Options", "Stand"]

_STAND_IN = Path(__file__).parents[1] / "nvidia/standin"
_WALK_SECONDS = 30.0
_QUESTION_SECONDS = 30.0
"""The first request initialises a GPU that no process keeps awake, which takes seconds."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line; see ``--help``. ``stand_ins`` is the machine of a dry run."""

    places: DriverPaths
    extent: Extent
    device: str | None = None
    leave_settings: bool = False
    allow_settings: bool = False
    allow_reset: bool = False
    infrastructure: frozenset[int] = frozenset()
    stand_ins: Path | None = None

    @property
    def dry(self) -> bool:
        return self.stand_ins is not None


class Unfenced:
    """A :class:`GpuControl` for a machine whose settings must not be changed: as if there were no compute mode."""

    def __init__(self, gpu: GpuControl) -> None:
        self._gpu = gpu

    async def compute_mode(self, device: Device) -> str | None:
        return None

    async def fence(self, device: Device) -> None:
        raise DeviceBusy(f"Device {device.index} may not be fenced: its settings are left alone.")

    async def unfence(self, device: Device, compute_mode: str) -> None:
        raise DeviceBusy(f"Device {device.index} has no fence of ours: its settings are left alone.")

    async def memory(self, device: Device) -> tuple[int, int, int]:
        return await self._gpu.memory(device)

    async def wait_until_idle(self, device: Device, deadline: float) -> int:
        return await self._gpu.wait_until_idle(device, deadline)


@dataclass(frozen=True, slots=True)
class _PathsWithPython(DriverPaths):
    """Paths of a node where Python's libraries may be anywhere: children are given their location."""

    python: str = ""

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": self.python, **library_path(DriverPaths.environment(self))}


class Stand:
    """Created by :meth:`opened`. ``device`` is the one that is checked, ``devices`` are all devices of the node."""

    def __init__(
        self,
        options: Options,
        places: DriverPaths,
        backend: DeviceBackend,
        scratch: Path,
        *,
        children: Children,
        programs: ProgramLauncher,
        questions: RequestPool,
        walks: RequestPool,
        devices: tuple[Device, ...],
        device: Device,
    ) -> None:
        self.options = options
        self.extent = options.extent
        self.places = places
        self.devices = devices
        self.device = device
        self.children = children
        self.backend = backend
        self.resetter = backend.resetter
        self._scratch = scratch
        self._programs = programs
        self._questions = questions
        self._walks = walks
        self.gpu: GpuControl = NvmlGpuControl(questions, _settling(backend))
        self.eraser: Eraser = backend.eraser
        self.diagnostics: Diagnostics = backend.diagnostics
        self.defaults: Mapping[str, str] = {}
        if options.leave_settings:
            self.work_unfenced()

    @property
    def ports(self) -> Ports:
        """The ports that a scrub needs."""
        return Ports(self.backend.holders, self.backend.telemetry, self.backend.settings, self.eraser)

    def work_unfenced(self) -> None:
        """Clear and diagnose without a fence from now on."""
        locks = self._scratch / "locks"
        locks.mkdir(mode=0o700, exist_ok=True)
        workplace = GpuJobRunner(self._programs, Unfenced(self.gpu), locks)
        self.eraser, self.diagnostics = CudaEraser(workplace), CudaDiagnostics(workplace)

    @classmethod
    @asynccontextmanager
    async def opened(cls, options: Options, scratch: Path) -> AsyncIterator[Stand]:
        """Start everything.

        Raises:
            Unavailable: there is no driver, or no device.
            DeviceBusy: the device, whose memory would be overwritten, is in use.
        """
        stand_in = options.stand_ins
        found = options.places
        python = python_path(*(() if stand_in is None else (_STAND_IN,)))
        places = _PathsWithPython(found.driver_root, found.dev, found.proc_driver, found.sys, found.run, python)
        environment = {**places.environment(), **_stood_in(stand_in)}
        children = Children()
        async with AsyncExitStack() as stack:
            backend = await stack.enter_async_context(
                nvidia_backend(
                    places,
                    scratch / "state",
                    node="gpu-check",
                    driver_call_timeout=_QUESTION_SECONDS,
                    infrastructure=_named(options.infrastructure),
                    children=children,
                    environment=environment,
                )
            )
            programs = ProgramLauncher(
                children, scratch / "probe", libraries=places.library_directories(), environment=environment
            )
            stack.push_async_callback(programs.close)
            questions = RequestPool(
                children,
                DRIVER_MODULE,
                arguments=driver_arguments(places),
                deadline=_QUESTION_SECONDS,
                environment=places.environment(),
            )
            stack.push_async_callback(questions.close)
            walks = RequestPool(children, WALKER_MODULE, deadline=_WALK_SECONDS, error_type=Unavailable)
            stack.push_async_callback(walks.close)
            devices = await backend.inventory.devices()
            if not devices:
                raise Unavailable(
                    f"No GPU can be checked: {'; '.join(backend.not_advertised().values()) or 'there is none'}."
                )
            device = devices[0] if options.device is None else find_device(devices, options.device)
            stand = cls(
                options,
                places,
                backend,
                scratch,
                children=children,
                programs=programs,
                questions=questions,
                walks=walks,
                devices=devices,
                device=device,
            )
            await stand._refuse_a_device_in_use()
            if options.allow_settings:
                stand.defaults = (await backend.telemetry.snapshot(device)).defaults
            yield stand

    async def identity(self) -> dict[str, str]:
        """Return ``model`` and ``driver``."""
        return {"model": self.device.model, "driver": (await self.backend.inventory.identity()).driver}

    def software(self) -> dict[str, str]:
        """Return the versions of what the figures depend on."""
        found = {"python": platform.python_version(), "kernel": platform.release().partition("-")[0]}
        found |= {
            name: value for name, value in self.device.traits if name in ("nvml", "cuda", "vbios", "gsp_firmware")
        }
        for name in ("cupy-cuda12x", "cupy-cuda13x", "nvidia-ml-py", "numpy"):
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return found

    def cuda_environment(self, device: Device) -> dict[str, str]:
        """Return the environment of a tenant or a measurement: one device, and nothing of this process's own."""
        no_mps = self._scratch / "no-mps"
        no_mps.mkdir(mode=0o700, exist_ok=True)
        return {
            **self.places.environment(),
            **_stood_in(self.options.stand_ins),
            "CUDA_VISIBLE_DEVICES": device.id,
            "CUDA_MODULE_LOADING": "EAGER",
            "CUDA_CACHE_PATH": str(self._scratch / "cuda-cache"),
            "CUDA_MPS_PIPE_DIRECTORY": str(no_mps),
            "OPENBLAS_NUM_THREADS": "1",
        }

    async def compute_mode(self) -> str | None:
        """Return the compute mode that telemetry reports; None where there is none."""
        return (await self.backend.telemetry.snapshot(self.device)).settings.get("compute_mode")

    async def listed(self) -> frozenset[int]:
        """Return the PIDs that the driver lists for the device."""
        rows = (await self._used())["processes"]
        return frozenset(int(row[0]) for row in rows) if isinstance(rows, list) else frozenset()

    async def walked(self) -> frozenset[int]:
        """Return the PIDs that have the device's own node open or mapped, as found by a walk over ``/proc``."""
        node = next(each for each in self.device.access if each.kind is AccessKind.DEVICE_NODE)
        question = walk_request(DeviceNodeTarget(frozenset({os.stat(node.host_path).st_rdev})))
        found = parse_walk_report(await self._walks.request(self.device.id, question)).holders
        return frozenset(each.pid for each in found)

    @asynccontextmanager
    async def without_driver_connections(self) -> AsyncIterator[None]:
        """Close the check's own driver connections meanwhile, as a reset requires; the backend closes its own."""
        async with self._questions.suspend({gpu_uuid(self.device)}):
            yield

    async def warm(self) -> None:
        """Start a zygote with CuPy loaded; there is none before the first call."""
        await self._programs.warm_up()

    async def fork_and_end(self) -> None:
        """Fork a child, wait until it is ready, and end it."""
        await (await self._programs.start(DIAGNOSIS_MODULE, self.device)).kill()

    async def _used(self) -> Message:
        return await self._questions.request(gpu_uuid(self.device), device_request(self.device, "used"))

    async def _refuse_a_device_in_use(self) -> None:
        """Memory in use without a process is no reason to refuse: the check itself determines the idle level."""
        report = await self.backend.holders.list_holders(self.device)
        users = [
            f"PID {each.pid} ({each.command})"
            for each in report.holders
            if each.kind in (HolderKind.PROCESS, HolderKind.UNKILLABLE)
        ]
        if not users:
            listed = sorted(await self.listed() - self.options.infrastructure)
            users = [f"PID {pid}, which is not in this PID namespace" for pid in listed]
        if users:
            raise DeviceBusy(
                f"Device {self.device.index} is in use by {', '.join(users)}, and its memory would be overwritten: end "
                "them, choose another with --device, or name the node's own daemons with --infrastructure."
            )


def _settling(backend: DeviceBackend) -> NvidiaHolders:
    holders = backend.holders
    assert isinstance(holders, NvidiaHolders), "the backend's own holders know when a device is idle"
    return holders


def _named(pids: frozenset[int]) -> InfrastructureLookup:
    async def name(pid: int, *, has_context: bool) -> InfrastructureProcess | None:
        named = InfrastructureProcess(HolderKind.INFRASTRUCTURE, "named on the command line")
        return named if pid in pids else None

    return name


def _stood_in(world: Path | None) -> dict[str, str]:
    if world is None:
        return {}
    cache = os.environ.get("SCRUBBER_STANDIN_CACHE")
    return {"SCRUBBER_STANDIN_WORLD": str(world), **({"SCRUBBER_STANDIN_CACHE": cache} if cache else {})}
