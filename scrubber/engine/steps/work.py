"""What a step gets: the device, its record as of the start, the rules, the engine's dependencies, and where progress goes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from scrubber.domain.assignment import Pod
from scrubber.domain.device import Device
from scrubber.domain.evidence import Finding, Severity, Step
from scrubber.domain.leftover import Standing
from scrubber.domain.policy import Plan, Policy
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.telemetry import Snapshot
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.pods import PodWatch
from scrubber.engine.unauthorized_use import UnauthorizedUse
from scrubber.ports.device import EraseReport, Progress

__all__ = ["Work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One scrub's context.

    Attributes:
        standings: where the pod of each open grant stands now.
        unauthorized_use: what was seen of unauthorized use of the device.
        eraser_slot: holds one of the node's eraser slots while it is open; checks need none.
        progress: receives how far the eraser is.
        still: keeps other devices, by id, out of use while it is open; raises ``Held`` when one is in use.
        asking: the pod for whose start the device is scrubbed; None when it is nobody's.
        erased: what the eraser reported, for the steps that judge parts of it.
    """

    scrub: str
    device: Device
    record: DeviceRecord
    plan: Plan
    policy: Policy
    dependencies: Dependencies
    pods: PodWatch
    standings: Callable[[], Awaitable[list[tuple[Grant, Standing]]]]
    unauthorized_use: UnauthorizedUse
    still: Callable[[Iterable[str]], AbstractAsyncContextManager[None]]
    eraser_slot: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    progress: Callable[[Progress], None] = lambda _: None
    asking: Pod | None = None
    erased: list[EraseReport] = field(default_factory=list)
    answers: dict[str, Snapshot] = field(default_factory=dict)

    async def one_snapshot(self) -> Snapshot:
        """The same batch of answers for every check of a fast path; raises what the telemetry port raises."""
        if self.device.id not in self.answers:
            self.answers[self.device.id] = await self.dependencies.telemetry.snapshot(self.device)
        return self.answers[self.device.id]

    def dirty(self, step: Step, code: str, sentence: str) -> Finding:
        """A finding that leaves the device dirty without blaming it."""
        return Finding(step, code, Severity.DIRTY, sentence)
