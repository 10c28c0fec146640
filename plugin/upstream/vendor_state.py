"""How one resource's plugin stands: there, away for a while, away for too long, at rest, or of no use.

Promises: a restart of the vendor's plugin changes nobody's health for a grace period. A plugin that let a call hang,
or answered what cannot be used, costs the kubelet's main loop that wait once and is then left alone for a while, its
devices unhealthy; one whose list cannot be used has none of them healthy until it registers again.

Pure. Times are seconds on one monotonic clock that the caller reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["VendorState"]


@dataclass(frozen=True, slots=True)
class VendorState:
    """What is known of one resource's plugin.

    Attributes:
        grace: seconds that its last list outlives it.
        disconnected_since: when it went away; None while it is there.
        disconnect_reason: what took it away.
        paused_until: no call is made before; its devices are unhealthy meanwhile.
        pause_reason: why it rests.
        invalid_reason: why nothing of this registration can be used; empty while it can.
        public_reason: the last of the two, as a pod may read it.
    """

    grace: float
    disconnected_since: float | None = None
    disconnect_reason: str = ""
    paused_until: float | None = None
    pause_reason: str = ""
    invalid_reason: str = ""
    public_reason: str = ""

    def on_disconnect(self, reason: str, now: float) -> VendorState:
        """It is away; since when it was first so."""
        return replace(
            self,
            disconnected_since=now if self.disconnected_since is None else self.disconnected_since,
            disconnect_reason=reason,
        )

    def on_list(self) -> VendorState:
        """It sent a list."""
        return replace(self, disconnected_since=None, disconnect_reason="")

    def on_registration(self) -> VendorState:
        """It has come anew: what it did before counts no more, but it is there only once it has sent a list."""
        return VendorState(self.grace, self.disconnected_since, self.disconnect_reason)

    def on_timeout(self, reason: str, until: float, *, public_reason: str) -> VendorState:
        return replace(self, paused_until=until, pause_reason=reason, public_reason=public_reason)

    def on_invalid(self, reason: str, *, public_reason: str) -> VendorState:
        return replace(self, invalid_reason=reason, public_reason=public_reason)

    @property
    def is_present(self) -> bool:
        """Whether it is there."""
        return self.disconnected_since is None and not self.invalid_reason

    def unusable_reason(self, now: float) -> str:
        """Why none of its devices can be used at ``now``; empty while they can."""
        if self.invalid_reason:
            return self.invalid_reason
        if self._is_paused(now):
            return self.pause_reason
        if self.disconnected_since is not None and now >= self.disconnected_since + self.grace:
            return self.disconnect_reason
        return ""

    def public_fault(self, now: float) -> str:
        """What it did for which it is not asked at ``now``, as a pod may read it; empty where it is only away, or there."""
        return self.public_reason if self.invalid_reason or self._is_paused(now) else ""

    def _is_paused(self, now: float) -> bool:
        return self.paused_until is not None and now < self.paused_until

    def seconds_until_change(self, now: float) -> float | None:
        """Seconds until :meth:`unusable_reason` may answer something else by itself; None when it will not."""
        ends = [self.paused_until, None if self.disconnected_since is None else self.disconnected_since + self.grace]
        left = [end - now for end in ends if end is not None and end > now]
        return min(left, default=None)
