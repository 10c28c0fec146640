"""Clears and diagnoses AMD devices, and reports every byte of a device: cleared, or named as not covered."""

from __future__ import annotations

from collections.abc import Callable

from scrubber.adapters.amd.jobs import DIAGNOSIS_MODULE, ERASER_MODULE, AmdJob, AmdJobRunner
from scrubber.adapters.amd.requests import Trait, device_request, pci_address, trait
from scrubber.adapters.children.diagnostics import parse_checks
from scrubber.adapters.children.eraser_report import (
    parse_byte_count,
    parse_residue_map,
    parse_seconds_by_phase,
    wait_for_report,
)
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Child
from scrubber.adapters.children.request_pool import RequestPool, parse_answer
from scrubber.domain.device import Device
from scrubber.domain.diagnostics import DiagnosticCheck, DiagnosticLevel
from scrubber.domain.errors import ScrubberError, Unreadable
from scrubber.ports.device import EraseProgress, EraseReport, EraseRequest

__all__ = ["AmdDiagnostics", "AmdEraser"]

_SHARED_MEMORY_MODE = "NPS1"
_NOT_FENCED = (
    "fence: AMD's driver has no exclusive mode, so only the checks before and after show that no process used the device "
    "meanwhile"
)
_SHARED_MEMORY = (
    "memory: the partitions of this GPU share its memory (NPS1), so memory that this partition's tenant freed may have "
    "been reused by another one and not by the eraser"
)
_CLAIMED = (
    "on-chip: local memory and registers: claimed: the driver accepted a request to run its cleaner shader, and nothing "
    "measures whether that cleared them; drivers until about Linux 6.15 ignore a request if no work came before it"
)
_NOT_REQUESTED = "on-chip: local memory and registers: the policy does not require them to be cleared"
_NO_CLEANER = "on-chip: local memory and registers: not cleared: the driver offers no cleaner shader for this GPU"
_CLEANER_FAILED = (
    "on-chip: local memory and registers: not cleared: the driver did not accept a request to run its cleaner shader"
)


class AmdEraser:
    """:class:`scrubber.ports.Eraser` on a GPU or a partition of one.

    Args:
        requests: children of :data:`~scrubber.adapters.amd.requests.DRIVER_MODULE`.
    """

    def __init__(self, jobs: AmdJobRunner, requests: RequestPool) -> None:
        self._jobs = jobs
        self._requests = requests

    async def erase(
        self, device: Device, request: EraseRequest, progress: Callable[[EraseProgress], None]
    ) -> EraseReport:
        order: Message = {"audit": request.audit, "pattern": request.pattern}
        job = AmdJob(ERASER_MODULE, "eraser", order, lambda child: wait_for_report(child, progress), request.deadline)
        report, unreleased, shared_use = await self._jobs.run(device, job)
        _check_passes(request, report)
        uncovered = [_NOT_FENCED]
        if (
            device.parent is not None
            and dict(device.traits).get(Trait.MEMORY_MODE, _SHARED_MEMORY_MODE) == _SHARED_MEMORY_MODE
        ):
            uncovered.append(_SHARED_MEMORY)
        uncovered.append(await self._run_cleaner(device) if request.on_chip else _NOT_REQUESTED)
        return _report(device, report, unreleased, uncovered, shared_use=shared_use)

    async def find_orphan(self, device: Device) -> int | None:
        return await self._jobs.find_orphan(device)

    async def terminate_orphan(self, device: Device, deadline: float) -> bool:
        return await self._jobs.terminate_orphan(device, deadline)

    async def _run_cleaner(self, device: Device) -> str:
        """Have the driver run its cleaner shader; return what the certificate says about that, which is never a proof."""
        request = device_request(device, "clean", partition=int(trait(device, Trait.PARTITION)))
        try:
            answer = await self._requests.request(pci_address(device), request)
        except ScrubberError as error:
            return f"{_CLEANER_FAILED}: {error}"
        return _CLAIMED if answer.get("done") is True else _NO_CLEANER


class AmdDiagnostics:
    """:class:`scrubber.ports.Diagnostics` on a GPU or a partition of one."""

    def __init__(self, jobs: AmdJobRunner) -> None:
        self._jobs = jobs

    async def diagnose(self, device: Device, level: DiagnosticLevel, deadline: float) -> tuple[DiagnosticCheck, ...]:
        if level is DiagnosticLevel.NONE:
            return ()
        job = AmdJob(DIAGNOSIS_MODULE, "diagnostic", {"seconds": level.seconds}, _read_report, deadline)
        report, _, _ = await self._jobs.run(device, job)
        return parse_checks(report)


async def _read_report(child: Child) -> Message:
    return parse_answer(await child.receive())


def _check_passes(request: EraseRequest, report: Message) -> None:
    """Check that every requested pass was made, and that no other pass is reported.

    Raises:
        Unreadable: the passes differ.
    """
    needed = {"clear", "verify"} | ({"audit"} if request.audit else set()) | ({"pattern"} if request.pattern else set())
    made = {phase for phase, _ in parse_seconds_by_phase(report)}
    if made != needed or (report.get("residue_bytes") is not None) != request.audit:
        raise Unreadable(
            f"The eraser's report is invalid: it was asked for {', '.join(sorted(needed))} and reports "
            f"{', '.join(sorted(made))}."
        )


def _report(device: Device, answer: Message, unreleased: int, uncovered: list[str], *, shared_use: bool) -> EraseReport:
    """Build the report: what was measured, against all the memory that the device has."""
    total, covered = device.memory_bytes, parse_byte_count(answer, "covered_bytes")
    cleared, verified, failed = (
        parse_byte_count(answer, f"{each}_bytes") for each in ("cleared", "verified", "failed")
    )
    if not max(cleared, verified) <= covered <= total or verified + failed < covered:
        raise Unreadable(
            f"The eraser's report is invalid: of {total} bytes it covered {covered}, cleared {cleared}, verified "
            f"{verified} and failed at {failed}."
        )
    residue = None if answer.get("residue_bytes") is None else parse_byte_count(answer, "residue_bytes")
    left = total - covered
    if left:
        uncovered = [
            f"memory: {left} bytes that the eraser could not allocate: the driver's own, and those of its context",
            *uncovered,
        ]
    return EraseReport(
        total_bytes=total,
        cleared_bytes=cleared,
        verified_bytes=verified,
        residue_bytes=residue,
        failed_bytes=failed,
        fence_broken=shared_use,
        seconds_by_phase=parse_seconds_by_phase(answer),
        not_covered=tuple(uncovered),
        not_covered_bytes=left,
        residue_map=parse_residue_map(answer, residue or 0),
        unreleased_bytes=unreleased,
    )
