"""Who was seen to use devices without a grant: since when, whether it was told, and when it is to end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from scrubber.domain.assignment import Pod, Process, Reading
from scrubber.domain.errors import Unreadable
from scrubber.domain.policy import Enforcement, Policy, Ungranted
from scrubber.domain.record import Grant
from scrubber.domain.telemetry import Holder
from scrubber.domain.using import Use, judge_use, may_be_ended
from scrubber.ports.node import Containers
from scrubber.ports.runtime import Clock

__all__ = ["Strangers"]

_FORGOTTEN = 120.0
"""Seconds without being seen after which a pod has let go: longer than the pause between two scrubs that it held up."""
_TOLD_AGAIN = 60.0
"""Seconds for which the same owner's use of the same device is told once, whatever number of processes it takes."""


@dataclass(slots=True)
class _Seen:
    """Of one device: by pod, since when it was seen to use it and when last; and by owner, when that was told."""

    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)


class Strangers:
    """All devices'. Lost with the service, which makes everything begin anew: nobody is ended the sooner for it.

    A pod is remembered and not its processes: they could hand the device on from one to the next for ever.
    """

    def __init__(self, *, containers: Containers, clock: Clock) -> None:
        self._containers = containers
        self._clock = clock
        self._devices: dict[str, _Seen] = {}

    def _saw(self, device: str, uid: str) -> float:
        """Pod ``uid`` uses ``device`` now; answers since when it has been seen to."""
        now, seen = self._clock.monotonic(), self._devices.setdefault(device, _Seen())
        for gone in [each for each, at in seen.last.items() if now - at > _FORGOTTEN]:
            del seen.last[gone], seen.first[gone]
        seen.last[uid] = now
        return seen.first.setdefault(uid, now)

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

    def of(self, device: str) -> frozenset[str]:
        """UIDs of the pods that were seen to use ``device`` without a grant not long ago."""
        seen = self._devices.get(device)
        return frozenset() if seen is None else frozenset(seen.first)

    async def meet(
        self, device: str, holder: Holder, uid: str | None, grants: Iterable[Grant], *, reading: Reading, policy: Policy
    ) -> bool:
        """``holder``, of pod ``uid``, was found to use ``device`` a moment ago; whether it was ended.

        That is done to a stranger, where the policy says so, once its pod's use has lasted for the dying grace. A pod is
        given its devices before anything of it runs: so a list that was read since then knows of all that it has.
        """
        open_grants = tuple(grants)
        if uid is None or judge_use(uid, device, open_grants, reading) is not Use.STRANGER:
            return False
        since = self._saw(device, uid)
        if policy.ungranted is not Ungranted.END or policy.enforcement is not Enforcement.ENFORCE:
            return False
        lasted = self._clock.monotonic() - since
        if lasted < policy.limits.dying_grace or reading.at < since:
            return False
        if not may_be_ended(uid, device, open_grants, reading):
            return False
        process = Process(holder.pid, holder.started)
        try:
            return not await self._containers.end(Pod("", "", uid), (process,), policy.limits.question * 5)
        except Unreadable:
            return False  # nothing can be proved against it now
