"""Plans a reset of a GPU: the other devices that it affects, what blocks it, and the order of actions.

Pure functions from facts to a plan. Promise: no plan is without blockers while a reset would reach a device that is in
use.

The rules are those of nvidia-smi's manual page ("--gpu-reset"): before Ampere, GPUs connected by NVLink are reset
together or not at all; on Ampere with NVSwitches, Fabric Manager has to help; from Hopper on, each GPU is reset on its
own. The MIG user guide says that the creator of the instances has to create them again after a reset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.telemetry import Holder, HolderKind

__all__ = ["METHOD", "DeviceLabel", "Generation", "Platform", "ResetFacts", "plan_reset", "reset_targets"]

METHOD = "nvidia-smi --gpu-reset"

_PERSISTENCED = "nvidia-persiste"
"""The part of nvidia-persistenced's name that the kernel keeps as the name of a process."""


class Generation(IntEnum):
    """GPU architectures in their order. ``UNKNOWN`` comes first, because the oldest rules are the most careful."""

    UNKNOWN = 0
    KEPLER = 2
    MAXWELL = 3
    PASCAL = 4
    VOLTA = 5
    TURING = 6
    AMPERE = 7
    ADA = 8
    HOPPER = 9
    BLACKWELL = 10
    RUBIN = 13

    @classmethod
    def from_driver_name(cls, name: str | None) -> Generation:
        """Return the generation that the driver calls ``name``."""
        return cls.__members__.get((name or "").strip(" ").upper(), cls.UNKNOWN)


class Platform(StrEnum):
    """What this kernel runs on: the hardware, or a virtual machine with a whole GPU or a share of one."""

    BARE_METAL = "bare-metal"
    PASSTHROUGH = "passthrough"
    """A virtual machine with the whole GPU: its hypervisor decides whether a reset is available."""
    VGPU = "vgpu"
    """A virtual machine with a share of a GPU."""


@dataclass(frozen=True, slots=True)
class DeviceLabel:
    """A device by its id, and by the index that people use."""

    id: str
    index: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetFacts:
    """Everything that decides about a reset of ``device``, read at one moment.

    Attributes:
        gpu: id of the whole GPU; differs from ``device.id`` for a MIG instance.
        pci_address: PCI address of the GPU.
        siblings: the other devices of the same GPU: MIG instances.
        peers: every other GPU that NVLink connects with it, directly or through others.
        holders: holders of ``device``, a sibling or a peer, by its id; None where they cannot be determined.
        erasers: PID of the process that is clearing one of them now, by its id.
        nvswitch: whether the node has NVSwitches.
        fabric_manager: whether Fabric Manager runs.
        has_reset: whether the kernel offers a reset of the GPU's PCI function (sysfs ``reset``).
        persistence_enabled: ids of the GPUs whose persistence mode is on.
        driver_loaded: whether the driver's kernel module is loaded.
        is_root: whether this service runs as root.
        nvidia_smi: path of nvidia-smi; None when it is not installed.
    """

    device: DeviceLabel
    gpu: str
    pci_address: str
    generation: Generation
    siblings: tuple[DeviceLabel, ...] = ()
    peers: tuple[DeviceLabel, ...] = ()
    holders: Mapping[str, tuple[Holder, ...] | None] = field(default_factory=dict)
    erasers: Mapping[str, int] = field(default_factory=dict)
    nvswitch: bool = False
    fabric_manager: bool = False
    platform: Platform = Platform.BARE_METAL
    has_reset: bool = True
    persistence_enabled: frozenset[str] = frozenset()
    driver_loaded: bool = True
    is_root: bool = True
    nvidia_smi: str | None = "/usr/bin/nvidia-smi"

    @property
    def is_instance(self) -> bool:
        return self.device.id != self.gpu

    def gpu_of(self, device: DeviceLabel) -> str:
        return device.id if device in self.peers else self.gpu

    @property
    def linked_peers(self) -> tuple[DeviceLabel, ...]:
        """The peers that have to be reset in the same command."""
        return self.peers if self.generation < Generation.AMPERE else ()

    @property
    def also_reset(self) -> tuple[DeviceLabel, ...]:
        """Every other device that a reset reaches."""
        return (*self.siblings, *self.linked_peers)


def reset_targets(facts: ResetFacts) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that are reset by the same command."""
    return (facts.gpu, *(peer.id for peer in facts.linked_peers))


# See docs/decisions/0023-resets.md.
def plan_reset(facts: ResetFacts) -> ResetPlan:
    """Plan a reset: its actions, why it is never possible here, and what blocks it now."""
    return ResetPlan(
        device=facts.device.id,
        method=METHOD,
        actions=tuple(_actions(facts)),
        unavailable=next(_permanent_obstacles(facts), None),
        blockers=tuple(_blockers(facts)),
        also_reset=tuple(each.id for each in facts.also_reset),
        agents=tuple(_agents(facts)),
    )


def _permanent_obstacles(facts: ResetFacts) -> Iterator[str]:
    """Yield messages why the device cannot be reset with the present setup, the most basic one first."""
    about = f"Device {facts.device.index}"
    if not facts.is_root:
        yield f"{about} can be reset by root only, but this service does not run as root."
    if facts.nvidia_smi is None:
        yield f"{about} cannot be reset: nvidia-smi is not installed with the driver; install the driver's utilities."
    if facts.platform is Platform.VGPU:
        yield f"{about} is a share of a GPU that belongs to this machine's host: only the host can reset it."
    elif facts.platform is Platform.PASSTHROUGH and not facts.has_reset:
        yield (
            f"{about} is in a virtual machine whose hypervisor offers no reset of {facts.pci_address}: reboot "
            "the virtual machine, or let its hypervisor allow function-level resets."
        )
    if facts.is_instance:
        yield (
            f"{about} is a MIG instance: a reset of its GPU removes all of the GPU's instances, and this "
            "service does not recreate them. Drain the GPU, reset it, and recreate the instances."
        )


def _blockers(facts: ResetFacts) -> Iterator[str]:
    if not facts.driver_loaded:
        yield "The driver is not loaded, and nvidia-smi cannot reset anything without it: load it (modprobe nvidia)."
    for each in (facts.device, *facts.also_reset):
        eraser = facts.erasers.get(each.id)
        if eraser is not None:
            yield f"Device {each.index} is being cleared (PID {eraser}): wait until that has ended."
        holders = facts.holders.get(each.id)
        if holders is None and each != facts.device:  # about the device itself, nvidia-smi has better information
            yield f"The holders of device {each.index}, which would be reset with it, cannot be determined."
        for holder in holders or ():
            yield from _holder_blockers(holder, each, facts)
    if facts.generation is Generation.AMPERE and facts.nvswitch and not facts.fabric_manager:
        yield (
            "Fabric Manager is not running, and GPUs of this generation behind NVSwitches can only be reset "
            "with it: systemctl start nvidia-fabricmanager"
        )


def _holder_blockers(holder: Holder, device: DeviceLabel, facts: ResetFacts) -> Iterator[str]:
    """Yield why ``holder`` blocks a reset, if it does.

    Use that no process explains does not: a reset is its cure, and nvidia-smi refuses the reset when a real process is
    behind it.
    """
    who = _name(holder)
    match holder.kind:
        case HolderKind.UNTRACEABLE:
            return
        case HolderKind.UNKILLABLE:
            yield f"{who} holds device {device.index} and cannot be killed: reboot the node."
        case HolderKind.INFRASTRUCTURE if _PERSISTENCED in f"{holder.owner} {holder.command}":
            if (
                facts.gpu_of(device) not in facts.persistence_enabled
            ):  # it lets go when persistence mode goes off, and this is off
                yield f"{who} holds device {device.index} although persistence mode is off: stop it for the reset."
        case HolderKind.INFRASTRUCTURE:
            yield _infrastructure_blocker(holder, device)
        case HolderKind.PROCESS | HolderKind.VALIDATION:
            yield f"{who} holds device {device.index}: it must end first."


def _agents(facts: ResetFacts) -> Iterator[str]:
    """Yield the blockers that are agents: they let go when they are paused."""
    for each in (facts.device, *facts.also_reset):
        for holder in facts.holders.get(each.id) or ():
            if holder.kind is HolderKind.INFRASTRUCTURE and holder.is_monitoring:
                yield _infrastructure_blocker(holder, each)


def _infrastructure_blocker(holder: Holder, device: DeviceLabel) -> str:
    return (
        f"{_name(holder)} holds device {device.index}; it is infrastructure of the node and is not killed: stop it for "
        "the reset."
    )


def _name(holder: Holder) -> str:
    return f"{holder.owner or holder.command or 'An unnamed process'} (PID {holder.pid})"


def _actions(facts: ResetFacts) -> Iterator[str]:
    gpus = ",".join(reset_targets(facts))
    yield f"Stop watching {gpus} for events; the other GPUs stay watched."
    persistent = ",".join(gpu for gpu in reset_targets(facts) if gpu in facts.persistence_enabled)
    if persistent:
        yield f"Disable persistence mode of {persistent}, so that nvidia-persistenced releases it."
    yield "Check once more for holders."
    yield f"Close this service's own handles of {gpus}; requests about the other GPUs continue."
    yield f"Run {facts.nvidia_smi or 'nvidia-smi'} --gpu-reset -i {gpus}"
    if persistent:
        yield "Enable persistence mode again, whether or not the reset succeeded."
    yield "Watch it for events again, and forget earlier XIDs."
    if facts.is_instance:
        yield "All MIG instances of the GPU are gone: recreate them (nvidia-smi mig, or nvidia-mig-parted)."
    yield "Check that the driver lists and describes it again; then health, settings and memory are checked."
