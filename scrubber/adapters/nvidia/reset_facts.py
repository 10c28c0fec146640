"""What decides about a reset, read from the driver, ``/proc`` and sysfs: the facts that :mod:`scrubber.domain.reset_plan` judges.

Promise: it reads and changes nothing; and a GPU that answers nothing until it is reset can be looked at all the same,
because that is the one that most needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.kernel_text import value_in
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.adapters.nvidia.driver_requests import device_request, gpu_uuid, optional_text, pci_address_of
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
    """Who works on a device's memory: :meth:`scrubber.ports.Eraser.find_orphan`."""

    async def find_orphan(self, device: Device) -> int | None: ...


class ResetFactsReader:
    """Reads the facts about resets.

    Args:
        devices: all devices as they were last listed.
        uid: the user that this service runs as.
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
        """What decides about a reset of ``device``, and every device that it would reach, ``device`` first."""
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
        """``facts`` with who holds and who clears the devices now."""
        erasers = {each.id: await self._erasers.find_orphan(each) for each in affected}
        return replace(
            facts,
            holders={each.id: await self._read_holders(each) for each in affected},
            erasers={id_: pid for id_, pid in erasers.items() if pid is not None},
        )

    async def _read_holders(self, device: Device) -> tuple[Holder, ...] | None:
        """None for a GPU that answers nothing until it is reset."""
        try:
            report = await self._holders.list_holders(device)
        except (DeviceLost, Unreadable):
            return None
        # What was not looked through may hold it. A confined one that does is the driver's to refuse: it resets nothing that
        # a process has open.
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
        ):  # a GPU that answers nothing until it is reset: its daemon has it open, if it runs
            return self._is_daemon_running(*_PERSISTENCED)
        return mode == "enabled"

    def _has_nvswitch(self) -> bool:
        """Whether any PCI function is a bridge of NVIDIA's that is no PCI-to-PCI bridge."""
        return any(
            _first_line(vendor) == _NVIDIA and _first_line(vendor.with_name("class")).startswith(_BRIDGE)
            for vendor in self._paths.pci_devices.glob("*/vendor")
        )

    def _is_daemon_running(self, pid_file: str, unit: str) -> bool:
        """Whether a daemon of the driver's runs: its PID file names a process, or its unit's cgroup stands."""
        roots = {self._paths.run, self._paths.driver_root / "run", self._paths.driver_root / "var/run"}
        named = {_first_line(root / pid_file) for root in roots}
        if any(pid.isascii() and pid.isdecimal() and Path("/proc", pid).exists() for pid in named):
            return True
        cgroups = self._paths.sys / "fs/cgroup"
        return any((cgroups / each / "system.slice" / unit).is_dir() for each in ("", "systemd", "unified"))


def nvlink_group(device: Device, devices: Mapping[str, Device]) -> set[str]:
    """Ids of all GPUs that NVLink joins ``device`` with, by way of others too."""
    found: set[str] = set()
    waiting = set(device.peers)
    while waiting:
        each = waiting.pop()
        if each not in found and each != device.id:
            found.add(each)
            waiting |= devices[each].peers if each in devices else frozenset()
    return found


def persistence_request(device: Device, mode: str | None = None) -> Message:
    """The question for the persistence mode of a device's whole GPU, or the order to set it."""
    return {**device_request(device, "persistence", mode=mode), "instance": None}


def _device_label(device: Device) -> DeviceLabel:
    return DeviceLabel(device.id, device.index)


def _platform(word: str | None) -> Platform:
    return {"passthrough": Platform.PASSTHROUGH, "vgpu": Platform.VGPU}.get(word or "", Platform.BARE_METAL)


def _is_missing_or_filled(path: Path) -> bool:
    """Kernels before 5.15 have no such file, and then every function that can be reset has a ``reset``."""
    return not path.exists() or bool(_first_line(path))


def _first_line(path: Path) -> str:
    try:
        return value_in(path.read_bytes())
    except OSError:
        return ""
