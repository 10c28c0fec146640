"""The state of one resource's vendor plugin: present, away, away for too long, paused, or invalid.

Invariants: a restart of the vendor's plugin changes no device's health during a grace period. A plugin that did not
respond to a call costs the kubelet's main loop that wait once; it is then not called for a while, with its devices
unhealthy. After an unusable response, none of its devices is healthy until it registers again.

Pure. Times are seconds on one monotonic clock that the caller reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["VendorState"]


@dataclass(frozen=True, slots=True)
class VendorState:
    """What is known of one resource's plugin.

    Attributes:
        grace: seconds for which its last list remains valid after it is lost.
        disconnected_since: when it was lost; None while it is present.
        disconnect_reason: why it was lost.
        paused_until: end of the pause, during which it is not called and its devices are unhealthy.
        pause_reason: why it is paused.
        invalid_reason: why nothing of this registration can be used; empty while it can.
        public_reason: the more recent of the last two, as a pod may read it.
    """

    grace: float
    disconnected_since: float | None = None
    disconnect_reason: str = ""
    paused_until: float | None = None
    pause_reason: str = ""
    invalid_reason: str = ""
    public_reason: str = ""

    def on_disconnect(self, reason: str, now: float) -> VendorState:
        """Return the state without a connection; the first time of the loss is kept."""
        return replace(
            self,
            disconnected_since=now if self.disconnected_since is None else self.disconnected_since,
            disconnect_reason=reason,
        )

    def on_list(self) -> VendorState:
        """Return the state after it sent a list."""
        return replace(self, disconnected_since=None, disconnect_reason="")

    def on_registration(self) -> VendorState:
        """Return the state after a new registration: earlier faults are cleared; a list is needed to be present."""
        return VendorState(self.grace, self.disconnected_since, self.disconnect_reason)

    def on_timeout(self, reason: str, until: float, *, public_reason: str) -> VendorState:
        return replace(self, paused_until=until, pause_reason=reason, public_reason=public_reason)

    def on_invalid(self, reason: str, *, public_reason: str) -> VendorState:
        return replace(self, invalid_reason=reason, public_reason=public_reason)

    @property
    def is_present(self) -> bool:
        """Whether the plugin is present and valid."""
        return self.disconnected_since is None and not self.invalid_reason

    def unusable_reason(self, now: float) -> str:
        """Return why none of its devices can be used at ``now``; empty while they can."""
        if self.invalid_reason:
            return self.invalid_reason
        if self._is_paused(now):
            return self.pause_reason
        if self.disconnected_since is not None and now >= self.disconnected_since + self.grace:
            return self.disconnect_reason
        return ""

    def public_fault(self, now: float) -> str:
        """Return the fault for which it is not called at ``now``, as a pod may read it; empty where there is none."""
        return self.public_reason if self.invalid_reason or self._is_paused(now) else ""

    def _is_paused(self, now: float) -> bool:
        return self.paused_until is not None and now < self.paused_until

    def seconds_until_change(self, now: float) -> float | None:
        """Return the seconds until :meth:`unusable_reason` may change without an event; None when it will not."""
        ends = [self.paused_until, None if self.disconnected_since is None else self.disconnected_since + self.grace]
        left = [end - now for end in ends if end is not None and end > now]
        return min(left, default=None)
