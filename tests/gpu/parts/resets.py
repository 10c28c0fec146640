"""What a reset would do here and what blocks it; done only when a flag requests it."""

from __future__ import annotations

import time

from tests.gpu.outcome import Log
from tests.gpu.stand import Stand

__all__ = ["reset"]

_DEADLINE = 90.0


async def reset(stand: Stand, log: Log) -> None:
    """Report the plan always, reset on request."""
    plan = await stand.resetter.plan(stand.device)
    log.passed(
        "reset.plan",
        f"{plan.method}: {plan.unavailable or f'{len(plan.actions)} acts'}; {'; '.join(plan.blockers) or 'nothing blocks it'}.",
        acts=list(plan.actions),
        blockers=list(plan.blockers),
        unavailable=plan.unavailable,
        together=len(plan.also_reset),
    )
    if not stand.options.allow_reset:
        log.unavailable("reset", "Not requested: pass --allow-reset.")
        return
    if plan.unavailable is not None or plan.blockers:
        log.unavailable("reset", plan.unavailable or " ".join(plan.blockers))
        return
    async with stand.without_driver_connections():
        start = time.perf_counter()
        await stand.resetter.reset(stand.device, _DEADLINE)
        seconds = time.perf_counter() - start
    snapshot = await stand.ports.telemetry.snapshot(stand.device)
    log.judged(
        "reset",
        not snapshot.conditions,
        f"It took {seconds:.1f} s; afterwards {dict(snapshot.conditions) or 'nothing'} remains.",
        seconds=seconds,
    )
