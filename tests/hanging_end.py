"""A service that ignores its cancellation, with a child: ``python -m tests.hanging_end SECONDS RESET_SECONDS``.

It prints the PID of the child. For RESET_SECONDS a reset is in progress.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

import structlog

from scrubber.adapters.children.process import Children
from scrubber.domain.device import Device
from scrubber.domain.reset_plan import ResetPlan
from scrubber.stop_deadline import CountedResetter, StopDeadline

_DEVICE = Device("GPU-a", "0", "a GPU", 1)


class _Resetter:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def plan(self, device: Device) -> ResetPlan:
        raise NotImplementedError

    async def reset(self, device: Device, deadline: float) -> None:
        await asyncio.sleep(self._seconds)


async def _hang() -> None:
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


async def _run(seconds: float, reset: float) -> None:
    child = await Children().start("tests.adapters.wayward_child")
    deadline = StopDeadline(structlog.get_logger(), seconds=seconds)
    serving = asyncio.create_task(_hang())
    resetting = asyncio.create_task(CountedResetter(_Resetter(reset), deadline).reset(_DEVICE, 1.0)) if reset else None
    await asyncio.sleep(0)
    print(child.pid, flush=True)
    with deadline.enforced():
        serving.cancel()
        await asyncio.wait({serving})
    del resetting


if __name__ == "__main__":
    asyncio.run(_run(float(sys.argv[1]), float(sys.argv[2])))
