"""Clears an NVIDIA device: one eraser per scrub, and a report in which every byte of the device is accounted for."""

from __future__ import annotations

from collections.abc import Callable

from scrubber.adapters.children.eraser_report import (
    parse_byte_count,
    parse_residue_map,
    parse_seconds_by_phase,
    wait_for_report,
)
from scrubber.adapters.children.message import Message
from scrubber.adapters.cuda.gpu_jobs import GpuJob, GpuJobResult, GpuJobRunner
from scrubber.adapters.cuda.programs import ERASER_MODULE
from scrubber.domain.device import Device
from scrubber.domain.errors import Unreadable
from scrubber.ports.device import EraseProgress, EraseReport, EraseRequest, OnChipReport

__all__ = ["CudaEraser"]

_NOT_ALLOCATED = (
    "the eraser could not allocate: its own context's, rounding, and what other processes may have allocated"
)
_NOT_FENCED = (
    "fence: this device has no compute mode, so only the checks before and after show that no process opened "
    "it meanwhile"
)
_ON_CHIP_LIMITS = (
    "on-chip: L1 and constant caches, uniform registers, tensor memory, the system's 1 KiB of shared memory "
    "per processor and 16 of 256 registers per thread"
)
_ON_CHIP_NOT_REQUESTED = "on-chip: shared memory and registers, which were not requested to be cleared"


class CudaEraser:
    """:class:`scrubber.ports.Eraser` on a GPU or an instance of one.

    Args:
        release_timeout: seconds to wait, after the eraser has ended, until the driver has reclaimed its memory.
    """

    def __init__(self, jobs: GpuJobRunner, *, release_timeout: float = 5.0) -> None:
        self._jobs = jobs
        self._release_timeout = release_timeout

    async def erase(
        self, device: Device, request: EraseRequest, progress: Callable[[EraseProgress], None]
    ) -> EraseReport:
        gpu = self._jobs.gpu
        total, reserved, _ = await gpu.memory(device)
        if total != device.memory_bytes:
            raise Unreadable(
                f"Device {device.index} has {total} bytes of memory; {device.memory_bytes} were reported when "
                "it was found."
            )
        order: Message = {
            "scrub": request.scrub,
            "audit": request.audit,
            "pattern": request.pattern,
            "on_chip": request.on_chip,
        }
        work = GpuJob(ERASER_MODULE, "eraser", order, lambda child: wait_for_report(child, progress), request.deadline)
        done = await self._jobs.run(device, work)
        unsettled = await gpu.wait_until_idle(device, self._release_timeout)
        _check_passes(request, done.report)
        return _report(device, done, reserved, unsettled)

    async def find_orphan(self, device: Device) -> int | None:
        return await self._jobs.find_orphan(device)

    async def terminate_orphan(self, device: Device, deadline: float) -> bool:
        return await self._jobs.terminate_orphan(device, deadline)


def _check_passes(request: EraseRequest, answer: Message) -> None:
    """Check that every requested pass was made, and that no other pass is reported.

    Raises:
        Unreadable: the passes differ.
    """
    requested = {"audit": request.audit, "pattern": request.pattern, "on-chip": request.on_chip}
    needed = {"clear", "verify", *(phase for phase, needed in requested.items() if needed)}
    made = {phase for phase, _ in parse_seconds_by_phase(answer)}
    counted = {"audit": answer.get("residue_bytes"), "on-chip": answer.get("on_chip")}
    if made != needed or any((value is not None) != requested[phase] for phase, value in counted.items()):
        raise Unreadable(
            f"The eraser's report is invalid: it was asked for {', '.join(sorted(needed))} and reports "
            f"{', '.join(sorted(made))}."
        )


def _report(device: Device, done: GpuJobResult, reserved: int, unsettled: int) -> EraseReport:
    """Build the report: what was measured, against all the memory that the device has."""
    answer = done.report
    total, covered = device.memory_bytes, parse_byte_count(answer, "covered_bytes")
    cleared, verified, failed = (
        parse_byte_count(answer, f"{each}_bytes") for each in ("cleared", "verified", "failed")
    )
    if not max(cleared, verified) <= covered <= total or verified + failed < covered:
        raise Unreadable(
            f"The eraser's report is invalid: of {total} bytes it covered {covered}, cleared {cleared}, "
            f"verified {verified} and failed at {failed}."
        )
    residue = None if answer.get("residue_bytes") is None else parse_byte_count(answer, "residue_bytes")
    left = total - covered
    reserved = min(reserved, left)
    on_chip = _on_chip(answer.get("on_chip"))
    uncovered = [
        f"memory: {reserved} bytes reserved by the driver" if reserved else "",
        f"memory: {left - reserved} bytes that {_NOT_ALLOCATED}" if left > reserved else "",
        _ON_CHIP_NOT_REQUESTED if on_chip is None else _ON_CHIP_LIMITS,
        "" if done.fenced else _NOT_FENCED,
    ]
    return EraseReport(
        total_bytes=total,
        cleared_bytes=cleared,
        verified_bytes=verified,
        residue_bytes=residue,
        failed_bytes=failed,
        fence_broken=done.fence_broken,
        seconds_by_phase=parse_seconds_by_phase(answer),
        not_covered=tuple(each for each in uncovered if each),
        not_covered_bytes=left,
        reserved_bytes=reserved,
        residue_map=parse_residue_map(answer, residue or 0),
        unreleased_bytes=unsettled,
        on_chip=on_chip,
    )


def _on_chip(found: object) -> OnChipReport | None:
    if found is None:
        return None
    if not isinstance(found, dict):
        raise Unreadable("The eraser's report is invalid: it has no on-chip result.")
    return OnChipReport(
        units=parse_byte_count(found, "units"),
        units_cleared=parse_byte_count(found, "units_cleared"),
        shared_bytes=parse_byte_count(found, "shared_bytes"),
        register_bytes=parse_byte_count(found, "register_bytes"),
        residue_bytes=parse_byte_count(found, "residue_bytes"),
        failed_bytes=parse_byte_count(found, "failed_bytes"),
    )
