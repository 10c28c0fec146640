"""Diagnoses an NVIDIA device in a separate child, behind the same fence and lock as an eraser."""

from __future__ import annotations

from scrubber.adapters.children.diagnostics import parse_checks
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Child
from scrubber.adapters.children.request_pool import parse_answer
from scrubber.adapters.cuda.gpu_jobs import GpuJob, GpuJobRunner
from scrubber.adapters.cuda.programs import DIAGNOSIS_MODULE
from scrubber.domain.device import Device
from scrubber.domain.diagnostics import DiagnosticCheck, DiagnosticLevel

__all__ = ["CudaDiagnostics"]


class CudaDiagnostics:
    """:class:`scrubber.ports.Diagnostics` on a GPU or an instance of one.

    Args:
        jobs: the runner that the eraser uses too: no two jobs work on one device.
        release_timeout: seconds to wait, after the child has ended, until the driver has reclaimed its memory. Memory
            that is not released by then is found by the next check for holders.
    """

    def __init__(self, jobs: GpuJobRunner, *, release_timeout: float = 5.0) -> None:
        self._jobs = jobs
        self._release_timeout = release_timeout

    async def diagnose(self, device: Device, level: DiagnosticLevel, deadline: float) -> tuple[DiagnosticCheck, ...]:
        if level is DiagnosticLevel.NONE:
            return ()
        order: Message = {"seconds": level.seconds}
        done = await self._jobs.run(device, GpuJob(DIAGNOSIS_MODULE, "diagnostic", order, _read_report, deadline))
        await self._jobs.gpu.wait_until_idle(device, self._release_timeout)
        return parse_checks(done.report)


async def _read_report(child: Child) -> Message:
    return parse_answer(await child.receive())
