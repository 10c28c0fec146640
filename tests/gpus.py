"""GPUs as the service describes them to the plugin, and a driver root with the files that matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.device import Access, AccessKind

CONTROL = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
DRIVER = "550.54.15"


def nodes(*names: str) -> tuple[Access, ...]:
    return tuple(Access(AccessKind.DEVICE_NODE, f"/dev/{name}", f"/dev/{name}") for name in names)


def gpu(number: int, **facts: Any) -> AdvertisedDevice:
    """Return GPU ``number`` of a node, by default offered and healthy."""
    facts.setdefault("verdict", ServiceVerdict.ADVERTISED)
    facts.setdefault("healthy", facts["verdict"] is ServiceVerdict.ADVERTISED)
    return AdvertisedDevice(
        id=f"GPU-{number:08x}", index=str(number), access=nodes(f"nvidia{number}", *CONTROL), **facts
    )


def instance(number: int, part: int, profile: str = "1g.10gb", **facts: Any) -> AdvertisedDevice:
    """Instance ``part`` of GPU ``number``."""
    facts.setdefault("verdict", ServiceVerdict.ADVERTISED)
    facts.setdefault("healthy", facts["verdict"] is ServiceVerdict.ADVERTISED)
    caps = (f"nvidia-caps/nvidia-cap{10 * part + 1}", f"nvidia-caps/nvidia-cap{10 * part + 2}")
    return AdvertisedDevice(
        id=f"MIG-{number:04x}{part:04x}",
        index=f"{number}:{part}",
        parent=f"GPU-{number:08x}",
        profile=profile,
        access=nodes(f"nvidia{number}", *caps, *CONTROL),
        **facts,
    )


def seen(offer: AdvertisedDevice, *, advertised: bool = True) -> pb.SnapshotDevice:
    """Return the device of ``offer`` as the service sends it."""
    return pb.SnapshotDevice(
        id=offer.id,
        index=offer.index,
        advertised=advertised,
        parent=offer.parent,
        profile=offer.profile,
        access=[
            pb.Access(kind=each.kind.value, host_path=each.host_path, container_path=each.container_path)
            for each in offer.access
        ],
    )


def install_driver(root: Path, version: str = DRIVER, *, hook: str = "") -> None:
    """Install a driver of ``version`` below ``root``, as its installer does; ``hook``: a program in ``usr/bin``."""
    libraries = root / "usr/lib/x86_64-linux-gnu"
    programs = root / "usr/bin"
    for directory in (libraries, programs):
        directory.mkdir(parents=True, exist_ok=True)
    for name in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler", "libnvcuvid"):
        (libraries / f"{name}.so.{version}").write_text(name)
        (libraries / f"{name}.so.1").unlink(missing_ok=True)
        (libraries / f"{name}.so.1").symlink_to(f"{name}.so.{version}")
    (libraries / "libcuda.so").unlink(missing_ok=True)
    (libraries / "libcuda.so").symlink_to("libcuda.so.1")
    (libraries / "libc.so.6").write_text("not the driver's")
    (libraries / f"libunrelated.so.{version}").write_text("not the driver's either")
    (programs / "nvidia-smi").write_text("#!/bin/sh\n")
    if hook:
        (programs / hook).write_text("#!/bin/sh\n")
