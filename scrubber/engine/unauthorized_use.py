"""Tracks unauthorized use of one device: by which pods, since when, whether it was reported, and when it is killed."""

from __future__ import annotations

from scrubber.domain.assignment import KubeletReading, Pod, Process
from scrubber.domain.errors import Unreadable
from scrubber.domain.policy import Enforcement, Policy, UnauthorizedUseAction
from scrubber.domain.record import DeviceRecord
from scrubber.domain.telemetry import Holder
from scrubber.domain.usage import UseKind, classify_use, may_be_killed
from scrubber.ports.node import Containers
from scrubber.ports.runtime import Clock

__all__ = ["UnauthorizedUseTracker"]

_FORGET_AFTER = 120.0
"""Seconds unseen after which a pod no longer counts as a user: longer than the pause between two blocked scrubs."""
_REPORT_INTERVAL = 60.0
"""Seconds in which use by the same owner is reported once, regardless of the number of processes."""


class UnauthorizedUseTracker:
    """Observed unauthorized use of one device. Not durable: after a restart the grace period starts again.

    Tracks pods and not their processes: the processes could pass the device from one to the next indefinitely.
    """

    def __init__(self, device: str, *, containers: Containers, clock: Clock) -> None:
        self._device = device
        self._containers = containers
        self._clock = clock
        # By pod: when it was first and last seen to use the device. By owner: when that was last reported.
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._reported_at: dict[str, float] = {}

    def _note_use(self, uid: str) -> float:
        """Note that pod ``uid`` uses the device now; return since when it has been using it."""
        now = self._clock.monotonic()
        for gone in [each for each, at in self._last.items() if now - at > _FORGET_AFTER]:
            del self._last[gone], self._first[gone]
        self._last[uid] = now
        return self._first.setdefault(uid, now)

    def should_report(self, owner: str) -> bool:
        """Return whether to report the use by ``owner`` (a pod's UID, or ``node``) now.

        Each call that returns True counts as the report.
        """
        now = self._clock.monotonic()
        self._reported_at = {known: at for known, at in self._reported_at.items() if now - at < _REPORT_INTERVAL}
        if owner in self._reported_at:
            return False
        self._reported_at[owner] = now
        return True

    @property
    def pods(self) -> frozenset[str]:
        """UIDs of the pods that were recently seen to use the device without a grant."""
        return frozenset(self._first)

    async def handle(
        self, holder: Holder, uid: str | None, record: DeviceRecord, *, reading: KubeletReading, policy: Policy
    ) -> bool:
        """Handle ``holder``, of pod ``uid``, which was just found to use the device; return whether it was killed.

        A process is killed where the policy demands it, once its pod's use has lasted for the leftover grace period. A
        pod is assigned its devices before any of its processes run, so a list read after the use began contains all of
        its devices.
        """
        grants, admin = record.open_grants, record.admin_claims
        if (
            uid is None
            or classify_use(uid, self._device, grants, reading, admin_claims=admin) is not UseKind.UNAUTHORIZED
        ):
            return False
        since = self._note_use(uid)
        if policy.unauthorized_use is not UnauthorizedUseAction.KILL or policy.enforcement is not Enforcement.ENFORCE:
            return False
        lasted = self._clock.monotonic() - since
        if lasted < policy.limits.leftover_grace_period or reading.started_at < since:
            return False
        if not may_be_killed(uid, self._device, grants, reading, admin_claims=admin):
            return False
        process = Process(holder.pid, holder.started)
        try:
            return not await self._containers.terminate(Pod("", "", uid), (process,), policy.limits.driver_call * 5)
        except Unreadable:
            return False  # nothing can be proved against the process now
