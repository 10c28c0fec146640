"""The service's own backend around one unused AMD device, as the parts of the check need it."""

from __future__ import annotations

import os
import platform
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.paths import Ports
from scrubber.adapters.amd.backend import amd_backend
from scrubber.adapters.amd.holders import AmdHolders
from scrubber.adapters.children.process import Children
from scrubber.domain.device import Device, find_device
from scrubber.domain.errors import DeviceBusy, Unavailable
from scrubber.domain.infrastructure import InfrastructureProcess
from scrubber.domain.telemetry import HolderKind
from scrubber.ports.device import DeviceBackend, InfrastructureLookup
from tests.gpu.extent import Extent
from tests.gpu.programs import library_path, python_path

__all__ = ["AmdOptions", "AmdStand"]

_DRIVER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class AmdOptions:
    """The options of the command line; see ``--help``."""

    root: Path
    extent: Extent
    device: str | None = None
    allow_settings: bool = False
    allow_reset: bool = False
    infrastructure: frozenset[int] = frozenset()
    dry: bool = False


class AmdStand:
    """Created by :meth:`opened`. ``device`` is the one that is checked, ``devices`` are all devices of the node."""

    def __init__(
        self, options: AmdOptions, backend: DeviceBackend, devices: tuple[Device, ...], device: Device
    ) -> None:
        self.options = options
        self.extent = options.extent
        self.backend = backend
        self.devices = devices
        self.device = device
        assert isinstance(backend.holders, AmdHolders), "the backend's own holders know when a device is idle"
        self.holders = backend.holders

    @property
    def ports(self) -> Ports:
        """The ports that a scrub needs."""
        return Ports(self.holders, self.backend.telemetry, self.backend.settings, self.backend.eraser)

    @classmethod
    @asynccontextmanager
    async def opened(cls, options: AmdOptions, scratch: Path) -> AsyncIterator[AmdStand]:
        """Start everything.

        Raises:
            Unavailable: there is no driver, or no device.
            DeviceBusy: the device, whose memory would be overwritten, is in use.
        """
        async with amd_backend(
            options.root,
            scratch / "state",
            node="gpu-check",
            driver_call_timeout=_DRIVER_SECONDS,
            infrastructure=_named(options.infrastructure),
            children=Children(),
        ) as backend:
            devices = await backend.inventory.devices()
            if not devices:
                raise Unavailable(
                    f"No GPU can be checked: {'; '.join(backend.not_advertised().values()) or 'there is none'}."
                )
            device = devices[0] if options.device is None else find_device(devices, options.device)
            users = [
                f"PID {each.pid} ({each.command})"
                for each in (await backend.holders.list_holders(device)).holders
                if each.kind in (HolderKind.PROCESS, HolderKind.UNKILLABLE)
            ]
            if users:
                raise DeviceBusy(
                    f"Device {device.index} is in use by {', '.join(users)}, and its memory would be overwritten: end "
                    "them, choose another with --device, or name the node's own daemons with --infrastructure."
                )
            yield cls(options, backend, devices, device)

    async def identity(self) -> dict[str, str]:
        """Return ``model``, ``driver``, and the versions of what the figures depend on."""
        found = {name: value for name, value in self.device.traits if name in ("architecture", "vbios")}
        driver = (await self.backend.inventory.identity()).driver
        software = {"python": platform.python_version(), "kernel": platform.release().partition("-")[0]}
        return {"model": self.device.model, "driver": driver, **software, **found}

    @property
    def compute_units(self) -> int:
        return int(dict(self.device.traits)["compute_units"])

    def tenant(self, *arguments: str) -> tuple[str, ...]:
        """Return the arguments of a tenant of the device."""
        return str(self.options.root), dict(self.device.traits)["architecture"], str(self.compute_units), *arguments

    def environment(self) -> dict[str, str]:
        """Return the environment of a tenant: one device, and nothing of this process's own."""
        traits = dict(self.device.traits)
        is_named = self.device.parent is None and "unique_id" in traits
        return {
            "PATH": os.defpath,
            "PYTHONPATH": python_path(),
            "ROCR_VISIBLE_DEVICES": f"GPU-{traits['unique_id']}" if is_named else traits["runtime_position"],
            **library_path({}),
        }

    async def wait_until_idle(self, deadline: float) -> int:
        """Return the bytes that stay in use above the idle level."""
        return await self.holders.wait_until_idle(self.device, deadline)


def _named(pids: frozenset[int]) -> InfrastructureLookup:
    async def name(pid: int, *, has_context: bool) -> InfrastructureProcess | None:
        named = InfrastructureProcess(HolderKind.INFRASTRUCTURE, "named on the command line")
        return named if pid in pids else None

    return name
