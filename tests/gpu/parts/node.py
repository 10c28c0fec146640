"""Our adapter's view compared with NVIDIA's own tool, the compute mode, and the holders of the device."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

from scrubber.domain.device import Device
from scrubber.domain.errors import ScrubberError
from scrubber.domain.telemetry import HolderKind
from tests.gpu.nvidia_smi import BYTES_PER_MIB, QueryUnsupported, Smi
from tests.gpu.outcome import Log
from tests.gpu.programs import running
from tests.gpu.stand import Stand

__all__ = ["compute_mode", "holders", "inventory"]

_SETTLING = 20.0
_HOST_PID_NAMESPACE = 0xEFFFFFFC
"""The inode of the first PID namespace of every Linux kernel (``PROC_PID_INIT_INO``)."""


async def inventory(stand: Stand, smi: Smi, log: Log) -> None:
    """Compare devices, models, memory and addresses with NVIDIA's tool."""
    identity = await stand.backend.inventory.identity()
    for device in stand.devices:
        log.passed(
            f"inventory.{device.index}",
            f"{device.model}, {device.memory_bytes} bytes, {device.profile or 'whole GPU'}.",
            memory_bytes=device.memory_bytes,
            numa_node=device.numa_node,
            peers=len(device.peers),
            traits={name: value for name, value in device.traits if name not in ("serial", "pci_address")},
        )
    for address, reason in stand.backend.not_advertised().items():
        log.passed(f"inventory.not-advertised.{address}", reason)
    try:
        theirs = await smi.gpus()
    except QueryUnsupported as reason:
        log.unavailable("inventory.nvidia-smi", str(reason))
        return
    parents = {device.parent for device in stand.devices if device.parent is not None}
    ours = {device.id: device for device in stand.devices if device.parent is None}
    known = not theirs.keys() - ours.keys() - parents or bool(stand.backend.not_advertised())
    log.judged(
        "inventory.nvidia-smi",
        known and all(_same(device, identity.driver, theirs.get(uuid)) for uuid, device in ours.items()),
        f"We see {len(ours)} GPUs and {len(stand.devices) - len(ours)} instances; nvidia-smi sees {theirs}.",
    )


def _same(device: Device, driver: str, theirs: tuple[str, int, str] | None) -> bool:
    """Return whether both describe the same GPU; the tool rounds memory to MiB."""
    if theirs is None:
        return False
    model, mebibytes, version = theirs
    close = abs(mebibytes - device.memory_bytes / BYTES_PER_MIB) <= 1
    return close and (model, version) == (device.model, driver)


async def compute_mode(stand: Stand, log: Log) -> None:
    """Change the compute mode like the eraser's fence, check it, and restore it."""
    before = await stand.compute_mode()
    if before is None:
        log.unavailable("settings.compute-mode", "An instance has no compute mode of its own.")
        return
    if stand.options.leave_settings:
        log.unavailable("settings.compute-mode", f"It is {before}, and is left so: --leave-settings.")
        return
    try:
        await stand.gpu.fence(stand.device)
    except ScrubberError as refused:
        log.unavailable("settings.compute-mode", f"It cannot be changed here, so nothing is fenced: {refused}")
        stand.work_unfenced()
        return
    try:
        during = await stand.compute_mode()
    finally:
        await stand.gpu.unfence(stand.device, before)
    after = await stand.compute_mode()
    log.judged(
        "settings.compute-mode",
        during == "exclusive-process" and before == after,
        f"It was {before}, then {during}, and is {after}.",
    )


async def holders(stand: Stand, log: Log) -> None:
    """Check that a process with a context is found in each of the three ways, and in none of them once it is gone."""
    free, above = await _used(stand), await stand.gpu.wait_until_idle(stand.device, _SETTLING)
    log.judged(
        "holders.idle",
        above == 0,
        f"{free} bytes are in use while the device is idle, {above} above what counts as idle.",
        used_bytes=free,
        above_bytes=above,
    )
    environment = stand.cuda_environment(stand.device)
    async with running("tests.gpu.tenant", "hold", environment=environment) as tenant:
        held = int((await tenant.line())["held_bytes"])
        report = await stand.backend.holders.list_holders(stand.device)
        found = {holder.pid: holder.kind for holder in report.holders}
        listed = await stand.listed()
        used = await _used(stand)
        if tenant.pid in listed:
            log.passed("holders.listed", "The driver lists it by its PID.")
        elif os.stat("/proc/self/ns/pid").st_ino != _HOST_PID_NAMESPACE:
            message = f"The driver lists {len(listed)} PIDs, by the host's PID namespace: run in it."
            log.unavailable("holders.listed", message)
        else:
            log.failed("holders.listed", f"The driver lists {len(listed)} PIDs, and not the one that has a context.")
        nodes = await stand.walked()
        seen = "shows" if tenant.pid in nodes else "does not show"
        log.judged(
            "holders.device-node", tenant.pid in nodes, f"A walk over /proc {seen} that it has the device's node open."
        )
        log.judged(
            "holders.used-memory",
            used - free >= held,
            f"{used - free} bytes more are in use; the process requested {held}.",
            context_bytes=used - free - held,
        )
        log.judged(
            "holders.report",
            found.get(tenant.pid) is HolderKind.PROCESS,
            f"The report holds it as {found.get(tenant.pid)}, beside {len(found) - (tenant.pid in found)} others.",
        )
        await tenant.kill()
    with suppress(TimeoutError):  # the driver may list it for a moment, although its memory is below the idle level
        async with asyncio.timeout(_SETTLING):
            while True:
                if not await stand.backend.holders.is_held(stand.device):
                    break
                await asyncio.sleep(0.02)
    above = await stand.gpu.wait_until_idle(stand.device, _SETTLING)
    gone = not await stand.backend.holders.is_held(stand.device)
    log.judged(
        "holders.gone",
        gone and above == 0,
        f"Killed, it is {'gone' if gone else 'still seen'}; {above} bytes are above the idle level.",
        unreleased_bytes=above,
    )


async def _used(stand: Stand) -> int:
    _, _, used = await stand.gpu.memory(stand.device)
    return used
