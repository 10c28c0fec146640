"""From the driver's description of a GPU to the devices that can be granted. Pure, so every shape can be tested."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from scrubber.adapters.children.driver_response import count, malformed, objects, optional_count, optional_text, text
from scrubber.adapters.children.message import Message
from scrubber.domain.device import Access, AccessKind, Device

__all__ = [
    "GpuDescription",
    "InstanceDescription",
    "devices_of",
    "exclusion_reason",
    "parse_description",
    "peers_of",
    "profile_name",
]

_GIB = 1024**3
_NAMED_PROFILE = re.compile(r"\bMIG ([0-9]+c\.)?([0-9]+g\.[0-9]+gb\S*)")
_HOSTS_OF_VGPUS = ("host-vgpu", "host-vsga")
_SHARED_NODES = ("nvidiactl", "nvidia-uvm")
_TRAITS = ("architecture", "compute_capability", "serial", "vbios", "inforom", "gsp_firmware", "virtualization")


@dataclass(frozen=True, slots=True)
class InstanceDescription:
    """A MIG instance. ``index`` is NVML's index within the GPU; ``memory_bytes`` is the instance's memory in bytes."""

    uuid: str
    index: int
    gi: int
    ci: int
    memory_bytes: int
    profile: str


@dataclass(frozen=True, slots=True)
class GpuDescription:
    """A GPU.

    ``memory_bytes`` is its memory in bytes; ``nvlinks`` is the far end of each active NVLink: address and kind.
    """

    uuid: str
    name: str
    minor: int
    memory_bytes: int
    mig: bool
    traits: tuple[tuple[str, str], ...]
    nvlinks: tuple[tuple[str | None, str | None], ...] = ()
    instances: tuple[InstanceDescription, ...] = ()


def parse_description(answer: Message) -> GpuDescription:
    """Parse the reply to ``describe``.

    Raises:
        Unreadable: the reply is malformed.
    """
    total = _memory(answer)
    instances = tuple(_instance(each, total) for each in objects(answer, "instances"))
    for key in ("uuid", "index"):
        if len({getattr(each, key) for each in instances}) != len(instances):
            raise malformed("instances", f"has two instances with the same {key}")
    if not isinstance(answer.get("mig"), bool):
        raise malformed("mig", "is neither true nor false")
    traits = {name: optional_text(answer, name) for name in _TRAITS}
    return GpuDescription(
        uuid=text(answer, "uuid"),
        name=text(answer, "name"),
        minor=count(answer, "minor"),
        memory_bytes=total,
        mig=answer["mig"] is True,
        traits=tuple((name, value) for name, value in traits.items() if value is not None),
        nvlinks=tuple(
            (optional_text(each, "remote"), optional_text(each, "kind")) for each in objects(answer, "links")
        ),
        instances=instances,
    )


def exclusion_reason(gpu: GpuDescription, address: str) -> str | None:
    """Return the message why no device of ``gpu`` is advertised; None when at least one is."""
    mode = dict(gpu.traits).get("virtualization")
    if mode in _HOSTS_OF_VGPUS:
        return f"The GPU at {address} is a vGPU host ({mode}): virtual machines share it, so it is not advertised."
    if gpu.mig and not gpu.instances:
        return f"The GPU at {address} is in MIG mode and has no instances: create some, or disable MIG mode."
    return None


def peers_of(gpus: Mapping[str, GpuDescription]) -> Mapping[str, frozenset[str]]:
    """Map each of ``gpus`` (given by address) to the GPUs that NVLink connects it with; both by UUID.

    All GPUs that are connected to switches count as connected to each other. A GPU in MIG mode is connected to none.
    """
    whole = {address: gpu for address, gpu in gpus.items() if not gpu.mig}
    switched = {gpu.uuid for gpu in whole.values() if any(_to_switch(link, gpus) for link in gpu.nvlinks)}
    peers: dict[str, set[str]] = {gpu.uuid: set() for gpu in whole.values()}
    for gpu in whole.values():
        direct = {whole[remote].uuid for remote, _ in gpu.nvlinks if remote in whole}
        for peer in direct | (switched if gpu.uuid in switched else set()):
            peers[gpu.uuid].add(peer)
            peers[peer].add(gpu.uuid)
    return {uuid: frozenset(found - {uuid}) for uuid, found in peers.items()}


def devices_of(
    gpu: GpuDescription,
    address: str,
    index: int,
    *,
    numa_node: int | None,
    peers: frozenset[str],
    minors: Mapping[str, int],
    nodes: Path,
    traits: Iterable[tuple[str, str]] = (),
) -> tuple[Device, ...]:
    """Return the devices that can be granted of ``gpu``: the GPU itself, or its instances.

    Args:
        minors: minor numbers of the capability nodes, by name.
        nodes: the host's directory with the device nodes.
        traits: additional traits for each device.
    """
    # A container that is assigned a device node which does not exist fails to start. Where the node for tools exists at
    # all, it is created together with the unified-memory node, at the first use of CUDA.
    tools = (
        ("nvidia-uvm-tools",) if (nodes / "nvidia-uvm-tools").exists() or not (nodes / "nvidia-uvm").exists() else ()
    )
    shared = (f"nvidia{gpu.minor}", *_SHARED_NODES, *tools)
    modeset = ("nvidia-modeset",) if (nodes / "nvidia-modeset").exists() else ()
    described = (("pci_address", address), ("minor", str(gpu.minor)), *gpu.traits, *traits)
    if not gpu.mig:
        return (
            Device(
                id=gpu.uuid,
                index=str(index),
                model=gpu.name,
                memory_bytes=gpu.memory_bytes,
                numa_node=numa_node,
                peers=peers,
                access=tuple(_node(nodes, each) for each in (*shared, *modeset)),
                traits=described,
            ),
        )
    return tuple(
        Device(
            id=each.uuid,
            index=f"{index}:{each.index}",
            model=gpu.name,
            memory_bytes=each.memory_bytes,
            parent=gpu.uuid,
            numa_node=numa_node,
            access=tuple(_node(nodes, name) for name in (*shared, *_capabilities(gpu, each, minors), *modeset)),
            profile=each.profile,
            traits=(*described, ("gpu_instance", str(each.gi)), ("compute_instance", str(each.ci))),
        )
        for each in gpu.instances
    )


def profile_name(slices: int, compute_slices: int, mebibytes: int, total: int) -> str:
    """Return the profile name of an instance as NVIDIA's tools write it (``1g.10gb``, ``1c.2g.20gb``).

    Args:
        mebibytes: the instance's memory in MiB.
        total: the GPU's memory in bytes. Instances get eighths of it, and profile names round these to the GPU's own
            GiB.
    """
    eighths = ceil(mebibytes * 1024**2 / total * 8)
    gigabytes = int(eighths / 8 * ceil(total / _GIB) + 0.5)
    whole = f"{slices}g.{gigabytes}gb"
    return whole if compute_slices == slices else f"{compute_slices}c.{whole}"


def _instance(row: Mapping[str, object], total: int) -> InstanceDescription:
    return InstanceDescription(
        uuid=text(row, "uuid"),
        index=count(row, "index"),
        gi=count(row, "gi"),
        ci=count(row, "ci"),
        memory_bytes=_memory(row),
        profile=_profile(row, total),
    )


def _memory(row: Mapping[str, object]) -> int:
    """Return the bytes of memory; without any, clearing all of it would prove nothing."""
    found = count(row, "total")
    if found == 0:
        raise malformed("total", "is 0")
    return found


def _profile(row: Mapping[str, object], total: int) -> str:
    """Return the driver's profile name; where the driver reports none, derive it by the same rule."""
    slices, compute, mebibytes = (optional_count(row, key) for key in ("slices", "compute_slices", "mebibytes"))
    named = _NAMED_PROFILE.search("" if row.get("name") == "" else optional_text(row, "name") or "")
    if named is not None:
        return (named[1] or "") + named[2]
    if slices is None or compute is None or mebibytes is None:
        return "unknown"
    return profile_name(slices, compute, mebibytes, total)


def _to_switch(link: tuple[str | None, str | None], gpus: Mapping[str, GpuDescription]) -> bool:
    """Whether ``link`` leads to a switch.

    Where the driver does not report the far end, any remote but a known GPU is one.
    """
    remote, kind = link
    return kind == "switch" or (kind is None and remote not in gpus)


def _capabilities(gpu: GpuDescription, instance: InstanceDescription, minors: Mapping[str, int]) -> tuple[str, ...]:
    place = f"gpu{gpu.minor}/gi{instance.gi}"
    names = (f"{place}/access", f"{place}/ci{instance.ci}/access")
    return tuple(f"nvidia-caps/nvidia-cap{minors[name]}" for name in names if name in minors)


def _node(nodes: Path, name: str) -> Access:
    return Access(AccessKind.DEVICE_NODE, str(nodes / name), f"/dev/{name}")
