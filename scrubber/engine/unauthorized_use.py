"""Unauthorized use of one device: by which pods, since when, whether it was reported, and when it is ended."""

from __future__ import annotations

from collections.abc import Iterable

from scrubber.domain.assignment import Pod, Process, Reading
from scrubber.domain.errors import Unreadable
from scrubber.domain.policy import Enforcement, Policy, Ungranted
from scrubber.domain.record import Grant
from scrubber.domain.telemetry import Holder
from scrubber.domain.using import Use, judge_use, may_be_ended
from scrubber.ports.node import Containers
from scrubber.ports.runtime import Clock

__all__ = ["UnauthorizedUse"]

_FORGOTTEN = 120.0
"""Seconds without being seen after which a pod has let go: longer than the pause between two scrubs that it held up."""
_TOLD_AGAIN = 60.0
"""Seconds for which the same owner's use is reported once, whatever number of processes it takes."""


class UnauthorizedUse:
    """What was seen of unauthorized use of one device. Not durable: after a restart nothing is ended the sooner for it.

    A pod is remembered and not its processes: they could hand the device on from one to the next for ever.
    """

    def __init__(self, device: str, *, containers: Containers, clock: Clock) -> None:
        self._device = device
        self._containers = containers
        self._clock = clock
        # By pod: since when it was seen to use the device, and when last. By owner: when that was reported.
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._told: dict[str, float] = {}

    def _saw(self, uid: str) -> float:
        """Note that pod ``uid`` uses the device now; return since when it has been seen to."""
        now = self._clock.monotonic()
        for gone in [each for each, at in self._last.items() if now - at > _FORGOTTEN]:
            del self._last[gone], self._first[gone]
        self._last[uid] = now
        return self._first.setdefault(uid, now)

    def is_news(self, owner: str) -> bool:
        """Return whether the use by ``owner`` (a pod's UID, or a word for the node) is to be reported now.

        Each call that returns True counts as the report.
        """
        now = self._clock.monotonic()
        self._told = {known: at for known, at in self._told.items() if now - at < _TOLD_AGAIN}
        if owner in self._told:
            return False
        self._told[owner] = now
        return True

    @property
    def pods(self) -> frozenset[str]:
        """UIDs of the pods that were seen to use the device without a grant not long ago."""
        return frozenset(self._first)

    async def handle(
        self, holder: Holder, uid: str | None, grants: Iterable[Grant], *, reading: Reading, policy: Policy
    ) -> bool:
        """Handle ``holder``, of pod ``uid``, which was found to use the device a moment ago; return whether it was ended.

        A process is ended where the policy says so, once its pod's use has lasted for the dying grace. A pod is given its
        devices before anything of it runs: so a list that was read since then knows of all that it has.
        """
        open_grants = tuple(grants)
        if uid is None or judge_use(uid, self._device, open_grants, reading) is not Use.STRANGER:
            return False
        since = self._saw(uid)
        if policy.ungranted is not Ungranted.END or policy.enforcement is not Enforcement.ENFORCE:
            return False
        lasted = self._clock.monotonic() - since
        if lasted < policy.limits.dying_grace or reading.at < since:
            return False
        if not may_be_ended(uid, self._device, open_grants, reading):
            return False
        process = Process(holder.pid, holder.started)
        try:
            return not await self._containers.end(Pod("", "", uid), (process,), policy.limits.question * 5)
        except Unreadable:
            return False  # nothing can be proved against it now
