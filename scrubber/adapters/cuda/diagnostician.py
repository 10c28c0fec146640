"""Diagnosing an NVIDIA device: behind the same fence and lock as an eraser, in a child of its own."""

from __future__ import annotations

from scrubber.adapters.children.checking import checks_of
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Child
from scrubber.adapters.children.questions import answer_of
from scrubber.adapters.cuda.programs import DIAGNOSIS
from scrubber.adapters.cuda.workplace import Work, Workplace
from scrubber.domain.device import Device
from scrubber.domain.diagnosis import Check, Level

__all__ = ["CudaDiagnostics"]


class CudaDiagnostics:
    """:class:`scrubber.ports.Diagnostics` on a GPU or an instance of one.

    Args:
        workplace: the eraser's: no two of them work on one device.
        settle_limit: seconds to wait, when the child is gone, until the driver has taken its memory back. What is not
            back by then is found by whoever looks for holders next.
    """

    def __init__(self, workplace: Workplace, *, settle_limit: float = 5.0) -> None:
        self._workplace = workplace
        self._settle_limit = settle_limit

    async def diagnose(self, device: Device, level: Level, deadline: float) -> tuple[Check, ...]:
        if level is Level.NONE:
            return ()
        order: Message = {"seconds": level.seconds}
        done = await self._workplace.do(device, Work(DIAGNOSIS, "diagnostic", order, _listen, deadline))
        await self._workplace.gpu.settled(device, self._settle_limit)
        return checks_of(done.report)


async def _listen(child: Child) -> Message:
    return answer_of(await child.receive())
