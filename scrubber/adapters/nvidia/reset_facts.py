"""Reads the facts about a reset from the driver, ``/proc`` and sysfs.

They are the input of :mod:`scrubber.adapters.nvidia.reset_planner`. Promise: reading changes nothing, and also works
for a GPU that replies to nothing until it is reset, because that is the one that most needs a reset.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from scrubber.adapters.children.driver_response import optional_text
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.kernel_text import value_in
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.adapters.nvidia.driver_requests import device_request, gpu_uuid, pci_address_of
from scrubber.adapters.nvidia.reset_planner import DeviceLabel, Generation, Platform, ResetFacts
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceLost, Unreadable
from scrubber.domain.telemetry import Holder
from scrubber.ports.device import Holders

__all__ = ["EraserLookup", "ResetFactsReader", "nvlink_group", "persistence_request"]

_PERSISTENCED = ("nvidia-persistenced/nvidia-persistenced.pid", "nvidia-persistenced.service")
_FABRIC_MANAGER = ("nvidia-fabricmanager/nv-fabricmanager.pid", "nvidia-fabricmanager.service")
_NVIDIA, _BRIDGE = "0x10de", "0x0680"


class EraserLookup(Protocol):
    """Reports which process works on a device's memory: :meth:`scrubber.ports.Eraser.find_orphan`."""

    async def find_orphan(self, device: Device) -> int | None: ...


class ResetFactsReader:
    """Reads the facts about resets.

    Args:
        devices: returns all devices as last listed.
        uid: returns the user id that this service runs as.
    """

    def __init__(
        self,
        *,
        devices: Callable[[], Sequence[Device]],
        holders: Holders,
        erasers: EraserLookup,
        driver_pool: RequestPool,
        paths: DriverPaths,
        uid: Callable[[], int] = os.geteuid,
    ) -> None:
        self._devices = devices
        self._holders = holders
        self._erasers = erasers
        self._driver_pool = driver_pool
        self._paths = paths
        self._uid = uid

    async def read(self, device: Device) -> tuple[ResetFacts, tuple[Device, ...]]:
        """Return the facts about a reset of ``device``, and every device that it would reach, ``device`` first."""
        everything = {each.id: each for each in self._devices()}
        gpu, traits = gpu_uuid(device), dict(device.traits)
        siblings = [each for each in everything.values() if gpu_uuid(each) == gpu and each.id != device.id]
        peers = sorted(nvlink_group(device, everything))
        place = self._paths.pci_devices / pci_address_of(device)
        program = self._paths.find_program("nvidia-smi")
        facts = ResetFacts(
            device=_device_label(device),
            gpu=gpu,
            pci_address=pci_address_of(device),
            generation=Generation.from_driver_name(traits.get("architecture")),
            siblings=tuple(map(_device_label, siblings)),
            peers=tuple(DeviceLabel(each, everything[each].index if each in everything else each) for each in peers),
            nvswitch=self._has_nvswitch(),
            fabric_manager=self._is_daemon_running(*_FABRIC_MANAGER),
            platform=_platform(traits.get("virtualization")),
            has_reset=(place / "reset").exists() and _is_missing_or_filled(place / "reset_method"),
            driver_loaded=(self._paths.proc_driver / "version").exists(),
            is_root=self._uid() == 0,
            nvidia_smi=None if program is None else str(program),
        )
        concerned = (device, *(everything[each.id] for each in facts.also_reset if each.id in everything))
        persistent = frozenset([gpu_uuid(each) for each in concerned if await self._is_persistent(each)])
        return await self.with_current_holders(replace(facts, persistence_enabled=persistent), concerned), concerned

    async def with_current_holders(self, facts: ResetFacts, affected: Sequence[Device]) -> ResetFacts:
        """Return ``facts`` with the present holders and erasers of the devices."""
        erasers = {each.id: await self._erasers.find_orphan(each) for each in affected}
        return replace(
            facts,
            holders={each.id: await self._read_holders(each) for each in affected},
            erasers={id_: pid for id_, pid in erasers.items() if pid is not None},
        )

    async def _read_holders(self, device: Device) -> tuple[Holder, ...] | None:
        """Return the holders of ``device``; None for a GPU that replies to nothing until it is reset."""
        try:
            report = await self._holders.list_holders(device)
        except (DeviceLost, Unreadable):
            return None
        # An uninspected process may hold it. Where a confined one does, the driver refuses: it resets nothing that a
        # process has open.
        unseen = (
            Holder(each.pid, each.started, command=each.command) for each in report.uninspected if not each.confined
        )
        return (*report.holders, *unseen)

    async def _is_persistent(self, device: Device) -> bool:
        try:
            mode = optional_text(await self._driver_pool.request(gpu_uuid(device), persistence_request(device)), "mode")
        except (
            DeviceLost,
            Unreadable,
        ):  # the GPU replies to nothing until it is reset: its daemon has it open, if it runs
            return self._is_daemon_running(*_PERSISTENCED)
        return mode == "enabled"

    def _has_nvswitch(self) -> bool:
        """Whether any PCI function is an NVIDIA bridge that is not a PCI-to-PCI bridge."""
        return any(
            _first_line(vendor) == _NVIDIA and _first_line(vendor.with_name("class")).startswith(_BRIDGE)
            for vendor in self._paths.pci_devices.glob("*/vendor")
        )

    def _is_daemon_running(self, pid_file: str, unit: str) -> bool:
        """Whether a daemon of the driver runs: its PID file names a process, or the cgroup of its unit exists."""
        roots = {self._paths.run, self._paths.driver_root / "run", self._paths.driver_root / "var/run"}
        named = {_first_line(root / pid_file) for root in roots}
        if any(pid.isascii() and pid.isdecimal() and Path("/proc", pid).exists() for pid in named):
            return True
        cgroups = self._paths.sys / "fs/cgroup"
        return any((cgroups / each / "system.slice" / unit).is_dir() for each in ("", "systemd", "unified"))


def nvlink_group(device: Device, devices: Mapping[str, Device]) -> set[str]:
    """Return the ids of all GPUs that NVLink connects with ``device``, directly or through other GPUs."""
    found: set[str] = set()
    waiting = set(device.peers)
    while waiting:
        each = waiting.pop()
        if each not in found and each != device.id:
            found.add(each)
            waiting |= devices[each].peers if each in devices else frozenset()
    return found


def persistence_request(device: Device, mode: str | None = None) -> Message:
    """Build the request to read the persistence mode of a device's whole GPU, or to set it to ``mode``."""
    return {**device_request(device, "persistence", mode=mode), "instance": None}


def _device_label(device: Device) -> DeviceLabel:
    return DeviceLabel(device.id, device.index)


def _platform(word: str | None) -> Platform:
    return {"passthrough": Platform.PASSTHROUGH, "vgpu": Platform.VGPU}.get(word or "", Platform.BARE_METAL)


def _is_missing_or_filled(path: Path) -> bool:
    """Whether ``path`` is missing or not empty.

    Kernels before 5.15 lack it: there every resettable function has ``reset``.
    """
    return not path.exists() or bool(_first_line(path))


def _first_line(path: Path) -> str:
    try:
        return value_in(path.read_bytes())
    except OSError:
        return ""
