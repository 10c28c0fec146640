"""How one resource's plugin stands: there, away for a while, away for too long, at rest, or of no use.

Promises: a restart of the vendor's plugin changes nobody's health for a grace period. A plugin that let a call hang,
or answered what cannot be used, costs the kubelet's main loop that wait once and is then left alone for a while, its
devices unhealthy; one whose list cannot be used has none of them healthy until it registers again.

Pure. Times are seconds on one monotonic clock that the caller reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Standing"]


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of one resource's plugin.

    Attributes:
        grace: seconds that its last list outlives it.
        lost_since: when it went away; None while it is there.
        why: what took it away.
        rests_until: no call is made before; its devices are unhealthy meanwhile.
        rest: why it rests.
        unsound: why nothing of this registration can be used; empty while it can.
        told: the last of the two, as a pod may read it.
    """

    grace: float
    lost_since: float | None = None
    why: str = ""
    rests_until: float | None = None
    rest: str = ""
    unsound: str = ""
    told: str = ""

    def lost(self, why: str, now: float) -> Standing:
        """It is away; since when it was first so."""
        return replace(self, lost_since=now if self.lost_since is None else self.lost_since, why=why)

    def heard(self) -> Standing:
        """It sent a list."""
        return replace(self, lost_since=None, why="")

    def registered(self) -> Standing:
        """It has come anew: what it did before counts no more, but it is there only once it has sent a list."""
        return Standing(self.grace, self.lost_since, self.why)

    def resting(self, why: str, until: float, *, told: str) -> Standing:
        return replace(self, rests_until=until, rest=why, told=told)

    def useless(self, why: str, *, told: str) -> Standing:
        return replace(self, unsound=why, told=told)

    @property
    def present(self) -> bool:
        """Whether it is there."""
        return self.lost_since is None and not self.unsound

    def trouble(self, now: float) -> str:
        """Why none of its devices can be used at ``now``; empty while they can."""
        if self.unsound:
            return self.unsound
        if self._rests(now):
            return self.rest
        if self.lost_since is not None and now >= self.lost_since + self.grace:
            return self.why
        return ""

    def fault(self, now: float) -> str:
        """What it did for which it is not asked at ``now``, as a pod may read it; empty where it is only away, or there."""
        return self.told if self.unsound or self._rests(now) else ""

    def _rests(self, now: float) -> bool:
        return self.rests_until is not None and now < self.rests_until

    def changes_in(self, now: float) -> float | None:
        """Seconds until :meth:`trouble` may answer something else by itself; None when it will not."""
        ends = [self.rests_until, None if self.lost_since is None else self.lost_since + self.grace]
        left = [end - now for end in ends if end is not None and end > now]
        return min(left, default=None)
