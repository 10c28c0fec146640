"""What decides about a reset, read from the driver, ``/proc`` and sysfs: the facts that :mod:`resetplan` judges.

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
from scrubber.adapters.children.questions import QuestionPool
from scrubber.adapters.nvidia.places import Places
from scrubber.adapters.nvidia.question import about, gpu_of, optional_text, pci_address_of
from scrubber.adapters.nvidia.resetplan import Generation, Named, Platform, ResetFacts
from scrubber.adapters.proc import value_in
from scrubber.domain.device import Device
from scrubber.domain.errors import Lost, Unreadable
from scrubber.domain.telemetry import Holder
from scrubber.ports.device import Holders

__all__ = ["Erasers", "ResetSurvey", "linked", "persistence"]

_PERSISTENCED = ("nvidia-persistenced/nvidia-persistenced.pid", "nvidia-persistenced.service")
_FABRIC_MANAGER = ("nvidia-fabricmanager/nv-fabricmanager.pid", "nvidia-fabricmanager.service")
_NVIDIA, _BRIDGE = "0x10de", "0x0680"


class Erasers(Protocol):
    """Who works on a device's memory: :meth:`scrubber.ports.Eraser.orphan`."""

    async def orphan(self, device: Device) -> int | None: ...


class ResetSurvey:
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
        erasers: Erasers,
        questions: QuestionPool,
        places: Places,
        uid: Callable[[], int] = os.geteuid,
    ) -> None:
        self._devices = devices
        self._holders = holders
        self._erasers = erasers
        self._questions = questions
        self._places = places
        self._uid = uid

    async def look(self, device: Device) -> tuple[ResetFacts, tuple[Device, ...]]:
        """What decides about a reset of ``device``, and every device that it would reach, ``device`` first."""
        everything = {each.id: each for each in self._devices()}
        gpu, traits = gpu_of(device), dict(device.traits)
        siblings = [each for each in everything.values() if gpu_of(each) == gpu and each.id != device.id]
        peers = sorted(linked(device, everything))
        place = self._places.pci_devices / pci_address_of(device)
        program = self._places.find_program("nvidia-smi")
        facts = ResetFacts(
            device=_named(device),
            gpu=gpu,
            pci_address=pci_address_of(device),
            generation=Generation.named(traits.get("architecture")),
            siblings=tuple(map(_named, siblings)),
            peers=tuple(Named(each, everything[each].index if each in everything else each) for each in peers),
            nvswitch=self._has_nvswitch(),
            fabric_manager=self._runs(*_FABRIC_MANAGER),
            platform=_platform(traits.get("virtualization")),
            has_reset=(place / "reset").exists() and _says_something(place / "reset_method"),
            loaded=(self._places.proc_driver / "version").exists(),
            root=self._uid() == 0,
            program=None if program is None else str(program),
        )
        concerned = (device, *(everything[each.id] for each in facts.together if each.id in everything))
        persistent = frozenset([gpu_of(each) for each in concerned if await self._is_persistent(each)])
        return await self.with_holders(replace(facts, persistent=persistent), concerned), concerned

    async def with_holders(self, facts: ResetFacts, concerned: Sequence[Device]) -> ResetFacts:
        """``facts`` with who holds and who clears the devices now."""
        erasers = {each.id: await self._erasers.orphan(each) for each in concerned}
        return replace(
            facts,
            holders={each.id: await self._who_holds(each) for each in concerned},
            erasers={id_: pid for id_, pid in erasers.items() if pid is not None},
        )

    async def _who_holds(self, device: Device) -> tuple[Holder, ...] | None:
        """None for a GPU that answers nothing until it is reset."""
        try:
            report = await self._holders.holders(device)
        except (Lost, Unreadable):
            return None
        # What was not looked through may hold it. A confined one that does is the driver's to refuse: it resets nothing that
        # a process has open.
        unseen = (
            Holder(each.pid, each.started, command=each.command) for each in report.unfinished if not each.confined
        )
        return (*report.holders, *unseen)

    async def _is_persistent(self, device: Device) -> bool:
        try:
            mode = optional_text(await self._questions.ask(gpu_of(device), persistence(device)), "mode")
        except (Lost, Unreadable):  # a GPU that answers nothing until it is reset: its daemon has it open, if it runs
            return self._runs(*_PERSISTENCED)
        return mode == "enabled"

    def _has_nvswitch(self) -> bool:
        """Whether any PCI function is a bridge of NVIDIA's that is no PCI-to-PCI bridge."""
        return any(
            _first_line(vendor) == _NVIDIA and _first_line(vendor.with_name("class")).startswith(_BRIDGE)
            for vendor in self._places.pci_devices.glob("*/vendor")
        )

    def _runs(self, pid_file: str, unit: str) -> bool:
        """Whether a daemon of the driver's runs: its PID file names a process, or its unit's cgroup stands."""
        roots = {self._places.run, self._places.driver_root / "run", self._places.driver_root / "var/run"}
        named = {_first_line(root / pid_file) for root in roots}
        if any(pid.isascii() and pid.isdecimal() and Path("/proc", pid).exists() for pid in named):
            return True
        cgroups = self._places.sys / "fs/cgroup"
        return any((cgroups / each / "system.slice" / unit).is_dir() for each in ("", "systemd", "unified"))


def linked(device: Device, everything: Mapping[str, Device]) -> set[str]:
    """Ids of all GPUs that NVLink joins ``device`` with, by way of others too."""
    found: set[str] = set()
    waiting = set(device.peers)
    while waiting:
        each = waiting.pop()
        if each not in found and each != device.id:
            found.add(each)
            waiting |= everything[each].peers if each in everything else frozenset()
    return found


def persistence(device: Device, mode: str | None = None) -> Message:
    """The question for the persistence mode of a device's whole GPU, or the order to set it."""
    return {**about(device, "persistence", mode=mode), "instance": None}


def _named(device: Device) -> Named:
    return Named(device.id, device.index)


def _platform(word: str | None) -> Platform:
    return {"passthrough": Platform.PASSTHROUGH, "vgpu": Platform.VGPU}.get(word or "", Platform.BARE_METAL)


def _says_something(path: Path) -> bool:
    """Kernels before 5.15 have no such file, and then every function that can be reset has a ``reset``."""
    return not path.exists() or bool(_first_line(path))


def _first_line(path: Path) -> str:
    try:
        return value_in(path.read_bytes())
    except OSError:
        return ""
