"""The description of a GPU by its driver: the reply to ``describe``. Runs in a child."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pynvml

from scrubber.adapters.children.message import Message
from scrubber.adapters.nvidia.errors import NvmlFault
from scrubber.adapters.nvidia.nvml import NvmlGpu, NvmlInstance

__all__ = ["describe", "links_of", "pci_address"]

_INVALID_ARGUMENT = 2
_VIRTUALISATION = {0: "none", 1: "passthrough", 2: "vgpu", 3: "host-vgpu", 4: "host-vsga"}
_ARCHITECTURES = {
    2: "kepler",
    3: "maxwell",
    4: "pascal",
    5: "volta",
    6: "turing",
    7: "ampere",
    8: "ada",
    9: "hopper",
    10: "blackwell",
    13: "rubin",
}
_REMOTES = {0: "gpu", 1: "npu", 2: "switch"}


def describe(gpu: NvmlGpu) -> Message:
    """Return everything about ``gpu`` and its MIG instances that does not change while the driver is loaded."""
    memory = gpu.memory()
    mig = gpu.optional("nvmlDeviceGetMigMode")
    capability = gpu.optional("nvmlDeviceGetCudaComputeCapability")
    architecture = gpu.optional("nvmlDeviceGetArchitecture")
    mode = gpu.optional("nvmlDeviceGetVirtualizationMode")
    migrated = mig is not None and bool(mig[0])
    return {
        "uuid": gpu.uuid(),
        "name": str(gpu.call("nvmlDeviceGetName")),
        "minor": int(gpu.call("nvmlDeviceGetMinorNumber")),
        "total": memory.total,
        "reserved": memory.reserved,
        "architecture": _word(_ARCHITECTURES, architecture),
        "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
        "virtualization": _word(_VIRTUALISATION, mode),
        "serial": _text(gpu, "nvmlDeviceGetSerial"),
        "vbios": _text(gpu, "nvmlDeviceGetVbiosVersion"),
        "inforom": _text(gpu, "nvmlDeviceGetInforomImageVersion"),
        "gsp_firmware": _text(gpu, "nvmlDeviceGetGspFirmwareVersion"),
        "mig": migrated,
        "instances": [_instance(each) for each in gpu.instances()] if migrated else [],
        "links": [_link(gpu, link) for link, active in links_of(gpu) if active],
    }


def links_of(gpu: NvmlGpu) -> tuple[tuple[int, bool], ...]:
    """Return the GPU's NVLinks, each with whether it is active."""
    found: list[tuple[int, bool]] = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            state = gpu.optional("nvmlDeviceGetNvLinkState", link)
        except NvmlFault as fault:
            if fault.nvml_code != _INVALID_ARGUMENT:
                raise
            break  # the GPU has fewer links than NVML can count
        if state is not None:
            found.append((link, bool(state)))
    return tuple(found)


def _link(gpu: NvmlGpu, link: int) -> Message:
    kind = _far_end(gpu, "nvmlDeviceGetNvLinkRemoteDeviceType", link)
    remote = _far_end(gpu, "nvmlDeviceGetNvLinkRemotePciInfo", link)
    address = None if remote is None else pci_address(int(remote.domain), int(remote.bus), int(remote.device))
    return {"remote": address, "kind": None if kind is None else _REMOTES.get(int(kind))}


def _far_end(gpu: NvmlGpu, function: str, link: int) -> Any:
    """Return NVML's reply about the far end of ``link``; None also where the far end is on no PCI bus of this node."""
    try:
        return gpu.optional(function, link)
    except NvmlFault as fault:
        if fault.nvml_code != _INVALID_ARGUMENT:
            raise
        return None


def pci_address(domain: int, bus: int, device: int) -> str:
    """Return the PCI address as sysfs writes it. GPUs and switches are function 0 of their device."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _instance(instance: NvmlInstance) -> Message:
    memory = instance.memory()
    gi, ci = instance.ids()
    attributes = instance.optional("nvmlDeviceGetAttributes")
    described: Message = {
        "index": instance.index,
        "uuid": instance.uuid(),
        "name": str(instance.optional("nvmlDeviceGetName") or ""),
        "gi": gi,
        "ci": ci,
        "total": memory.total,
        "reserved": memory.reserved,
        "slices": None,
        "compute_slices": None,
        "mebibytes": None,
    }
    if attributes is not None:
        described["slices"] = int(attributes.gpuInstanceSliceCount)
        described["compute_slices"] = int(attributes.computeInstanceSliceCount)
        described["mebibytes"] = int(attributes.memorySizeMB)
    return described


def _word(words: Mapping[int, str], number: Any) -> str | None:
    return None if number is None else words.get(int(number), f"unknown-{int(number)}")


def _text(gpu: NvmlGpu, function: str) -> str | None:
    found = gpu.optional(function)
    if isinstance(found, bytes):
        return found.decode("ascii", "replace") or None
    return str(found) if found else None
