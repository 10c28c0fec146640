"""The context of a step: the device, its record at the start, plan and policy, dependencies, and progress callback."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from scrubber.domain.assignment import Pod
from scrubber.domain.device import Device, SharedResource
from scrubber.domain.evidence import Attestation, Finding, Severity, Step
from scrubber.domain.infrastructure import NamedHolder, ProcessOwner
from scrubber.domain.pods import PodLiveness
from scrubber.domain.policy import Policy, ScrubPlan
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.telemetry import Holder, Snapshot
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.pods import PodTracker
from scrubber.engine.unauthorized_use import UnauthorizedUseTracker
from scrubber.ports.device import EraseProgress, EraseReport

__all__ = ["ScrubContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubContext:
    """The context of one scrub.

    Attributes:
        pod_liveness: returns the current liveness of the pod of each open grant.
        unauthorized_use: observed unauthorized use of the device.
        eraser_slot: holds one of the node's eraser slots while open, for work that shares the given resource; checks
            need none.
        progress: receives the eraser's progress.
        keep_out_of_use: keeps other devices, given by ID, out of use while open; raises ``DeviceBusy`` when one is in
            use.
        starting_pod: the pod whose start the device is scrubbed for; None when there is none.
        erase_reports: the eraser's reports, for the steps that evaluate parts of them.
        attestations: the device's attestation, once the last step has requested it.
        known_holders: PID and start time of holders that an earlier scrub or check found.
        holders: the holders that were found and not killed.
        report_wait: called with what the scrub waits for, in words that may reach any tenant; empty when it goes on.
    """

    scrub: str
    device: Device
    record: DeviceRecord
    plan: ScrubPlan
    policy: Policy
    dependencies: Dependencies
    pods: PodTracker
    pod_liveness: Callable[[], Awaitable[list[tuple[Grant, PodLiveness]]]]
    unauthorized_use: UnauthorizedUseTracker
    keep_out_of_use: Callable[[Iterable[str]], AbstractAsyncContextManager[None]]
    eraser_slot: Callable[[SharedResource | None], AbstractAsyncContextManager[None]] = lambda _: nullcontext()
    progress: Callable[[EraseProgress], None] = lambda _: None
    starting_pod: Pod | None = None
    erase_reports: list[EraseReport] = field(default_factory=list)
    attestations: list[Attestation] = field(default_factory=list)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    known_holders: frozenset[tuple[int, int]] = frozenset()
    holders: list[NamedHolder] = field(default_factory=list)
    report_wait: Callable[[str], None] = lambda _: None

    async def shared_snapshot(self) -> Snapshot:
        """Return one snapshot that all checks of a fast path share; raises what the telemetry port raises."""
        if self.device.id not in self.snapshots:
            self.snapshots[self.device.id] = await self.dependencies.telemetry.snapshot(self.device)
        return self.snapshots[self.device.id]

    def note_holder(self, holder: Holder, owner: ProcessOwner, code: str) -> None:
        """Note a holder that the finding ``code`` is about."""
        self.holders.append(NamedHolder(holder, owner, code, self.dependencies.clock.wall()))

    def blocking_finding(self, step: Step, code: str, message: str) -> Finding:
        """Return a finding that leaves the device dirty without counting as its fault."""
        return Finding(step, code, Severity.BLOCKING, message)
