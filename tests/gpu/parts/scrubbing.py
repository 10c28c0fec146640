"""What a scrub covers, and what happens when its eraser is killed in the middle of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from scrubber.domain.errors import DeviceFault
from scrubber.domain.policy import MemoryRule
from scrubber.ports.device import EraseProgress, EraseReport, EraseRequest
from tests.gpu.outcome import Log
from tests.gpu.stand import Stand

__all__ = ["coverage", "killed"]

_DEADLINE = 120.0
_SETTLING = 20.0
_OVER = "The scrub was over before its eraser could be killed."


async def coverage(stand: Stand, log: Log) -> None:
    """Check that every byte is either written and read back by the run, or counted and reported as not covered.

    Unreachable memory beyond the default policy's limit, or memory that is not released, fails here as it would fail
    every scrub of the service.
    """
    request = EraseRequest("coverage", audit=True, pattern=True, deadline=_DEADLINE)
    report = await stand.eraser.erase(stand.device, request, lambda _: None)
    reachable = report.total_bytes - report.reserved_bytes
    share = min(report.cleared_bytes, report.verified_bytes or 0) / reachable
    uncovered, allowed = report.not_covered_bytes - report.reserved_bytes, MemoryRule().max_uncovered
    log.judged(
        "coverage",
        report.failed_bytes == report.unreleased_bytes == 0
        and report.cleared_bytes == (report.verified_bytes or 0) > 0
        and (report.verified_bytes or 0) + report.not_covered_bytes == report.total_bytes
        and uncovered <= allowed,
        f"{report.verified_bytes} of {reachable} bytes were cleared and verified ({100 * share:.3f} %); "
        f"{report.failed_bytes} did not read back as zeros, {uncovered} were unreachable (at most {allowed} may), "
        f"{report.unreleased_bytes} stay in use although no process holds the device. Not covered: "
        f"{'; '.join(report.not_covered) or 'nothing'}.",
        share=share,
        total_bytes=report.total_bytes,
        reserved_bytes=report.reserved_bytes,
        cleared_bytes=report.cleared_bytes,
        verified_bytes=report.verified_bytes,
        not_covered_bytes=report.not_covered_bytes,
        failed_bytes=report.failed_bytes,
        residue_bytes=report.residue_bytes,
        unreleased_bytes=report.unreleased_bytes,
        not_covered=list(report.not_covered),
        seconds_by_phase=dict(report.seconds_by_phase),
    )
    _processors(report, log)


def _processors(report: EraseReport, log: Log) -> None:
    chip = report.on_chip
    if chip is None:
        log.failed("coverage.on-chip", "The pass over the processors did not report.")
        return
    log.judged(
        "coverage.on-chip",
        chip.units == chip.units_cleared and chip.failed_bytes == 0,
        f"{chip.units_cleared} of {chip.units} processors ran; {chip.shared_bytes} bytes of shared memory and "
        f"{chip.register_bytes} of registers were cleared on each, {chip.failed_bytes} bytes failed.",
        units=chip.units,
        units_cleared=chip.units_cleared,
        shared_bytes=chip.shared_bytes,
        register_bytes=chip.register_bytes,
        residue_bytes=chip.residue_bytes,
        failed_bytes=chip.failed_bytes,
    )


async def killed(stand: Stand, log: Log) -> None:
    """SIGKILL in mid-clear: no result, no fence left behind, the memory released, and the next scrub passes."""
    reached, seen = asyncio.Event(), list[EraseProgress]()

    def on_progress(progress: EraseProgress) -> None:
        seen.append(progress)
        if progress.phase == "clear":
            reached.set()

    before = await stand.compute_mode()
    request = EraseRequest("killed", audit=True, pattern=True, deadline=_DEADLINE)
    erasing = asyncio.create_task(stand.eraser.erase(stand.device, request, on_progress))
    try:
        clearing = asyncio.create_task(reached.wait())
        await asyncio.wait({erasing, clearing}, return_when=asyncio.FIRST_COMPLETED)
        clearing.cancel()
        pid = await stand.eraser.find_orphan(stand.device)
        if pid is None or not reached.is_set():
            log.unavailable("kill.no-result", _OVER)
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # a child of this process that was not reaped yet, or its zygote's
        await _no_result(erasing, seen, log)
    finally:
        erasing.cancel()
        await asyncio.gather(erasing, return_exceptions=True)
    after = await stand.compute_mode()
    log.judged("kill.fence", before == after, f"The compute mode was {before} before and is {after} afterwards.")
    above = await stand.gpu.wait_until_idle(stand.device, _SETTLING)
    log.judged(
        "kill.memory", above == 0, f"{above} bytes are in use above the idle level afterwards.", unreleased_bytes=above
    )
    report = await stand.eraser.erase(stand.device, request, lambda _: None)
    log.judged(
        "kill.next-scrub",
        report.failed_bytes == 0 and (report.verified_bytes or 0) > 0,
        f"The next scrub counted {report.residue_bytes} bytes of residue and verified {report.verified_bytes} bytes.",
        residue_bytes=report.residue_bytes,
        verified_bytes=report.verified_bytes,
    )


async def _no_result(erasing: asyncio.Task[EraseReport], seen: Sequence[EraseProgress], log: Log) -> None:
    """``seen``: every progress message; those that an eraser sent before its death still arrive after it."""
    try:
        await erasing
    except DeviceFault as fault:
        log.passed("kill.no-result", f"Killed in its {_where(seen[-1])}: {fault}", done_bytes=seen[-1].done_bytes)
    else:
        last = seen[-1]
        if last.phase not in ("audit", "pattern", "clear") and last.done_bytes == last.total_bytes:
            log.unavailable("kill.no-result", _OVER)
        else:
            log.failed("kill.no-result", f"It was killed in its {_where(last)} and still reported a result.")


def _where(progress: EraseProgress) -> str:
    return f"{progress.phase} pass, {progress.done_bytes} of {progress.total_bytes} bytes"
