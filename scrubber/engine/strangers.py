"""Who was seen to use devices without a grant: since when, whether it was told, and when it is to end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from scrubber.domain.assignment import Pod, Process, Reading
from scrubber.domain.errors import Unreadable
from scrubber.domain.policy import Enforcement, Policy, Ungranted
from scrubber.domain.record import Grant
from scrubber.domain.telemetry import Holder
from scrubber.domain.using import may_be_ended
from scrubber.ports import Clock, Containers

__all__ = ["Strangers"]

_FORGOTTEN = 300.0
"""Seconds without being seen after which a process has let go: longer than the pause between two scrubs that it held up."""
_MOST = 1024
"""Processes that are remembered of one device; whoever forks faster is remembered by his newest."""
_TOLD_AGAIN = 60.0
"""Seconds for which the same owner's use of the same device is told once, whatever number of processes it takes."""

Identity = tuple[int, int]


@dataclass(slots=True)
class _Seen:
    first: dict[Identity, float] = field(default_factory=dict)
    last: dict[Identity, float] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)


class Strangers:
    """All devices'. Lost with the service, which makes everything begin anew: nobody is ended the sooner for it."""

    def __init__(self, *, containers: Containers, clock: Clock) -> None:
        self._containers = containers
        self._clock = clock
        self._devices: dict[str, _Seen] = {}

    def saw(self, device: str, process: Identity) -> float:
        """``process`` uses ``device`` now; answers for how many seconds it has been seen to."""
        now = self._clock.monotonic()
        seen = self._devices.setdefault(device, _Seen())
        if now - seen.last.get(process, now) > _FORGOTTEN:
            del seen.first[process]
        seen.last.pop(process, None)  # the newest comes last
        seen.last[process] = now
        seen.first.setdefault(process, now)
        while len(seen.last) > _MOST:
            oldest = next(iter(seen.last))
            del seen.last[oldest], seen.first[oldest]
        return now - seen.first[process]

    def is_news(self, device: str, owner: str) -> bool:
        """Whether the use by ``owner`` (a pod's UID, or a word for the node) is to be told; asking counts as telling."""
        now = self._clock.monotonic()
        told = self._devices.setdefault(device, _Seen()).told
        for known in [each for each, at in told.items() if now - at >= _TOLD_AGAIN]:
            del told[known]
        if owner in told:
            return False
        told[owner] = now
        return True

    async def meet(
        self, device: str, holder: Holder, uid: str | None, grants: Iterable[Grant], *, reading: Reading, policy: Policy
    ) -> bool:
        """``holder``, of pod ``uid``, was found to use ``device`` without a grant a moment ago; whether it was ended.

        That is done where the policy says so, once the use has lasted for the dying grace.
        """
        lasted = self.saw(device, holder.identity)
        wanted = policy.ungranted is Ungranted.END and policy.enforcement is Enforcement.ENFORCE
        if not wanted or lasted < policy.limits.dying_grace or not may_be_ended(uid, device, grants, reading):
            return False
        process = Process(holder.pid, holder.started)
        try:
            return not await self._containers.end(Pod("", "", uid), (process,), policy.limits.question * 5)
        except Unreadable:
            return False  # nothing can be proved against it now
