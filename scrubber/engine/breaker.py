"""The node's circuit breaker: checked before resets and before quarantines for soft signals; its changes are logged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from scrubber.domain.errors import LedgerFailure
from scrubber.domain.health.breaker import BreakerState, breaker_state, is_out_for_soft_signal
from scrubber.domain.policy import Policy, ResetMode
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Health
from scrubber.engine import refusals
from scrubber.engine.dependencies import Dependencies
from scrubber.ports.record import Event, LedgerChange

__all__ = ["CircuitBreaker", "watch_breaker"]

_INTERVAL = 5.0
"""Seconds between two checks whether the breaker opened or closed."""


# See docs/decisions/0029-circuit-breaker.md.
class CircuitBreaker:
    """Limits for recoveries on one node.

    Args:
        records: returns the current records of all devices.
    """

    def __init__(self, records: Callable[[], Collection[DeviceRecord]], dependencies: Dependencies) -> None:
        self._records = records
        self._dependencies = dependencies
        self._starting: set[str] = set()
        self._leaving: set[str] = set()
        self._cached: tuple[Policy, int, BreakerState] | None = None

    def invalidate(self) -> None:
        """Discard the cached state because a record changed."""
        self._cached = None

    @property
    def state(self) -> BreakerState:
        """The breaker's state, cached for the current second because it is read for each of many devices."""
        policy, now = self._dependencies.policy(), self._dependencies.clock.wall()
        if self._cached is not None and self._cached[0] is policy and self._cached[1] == int(now):
            return self._cached[2]
        self._cached = (policy, int(now), self._computed(policy, now))
        return self._cached[2]

    def _computed(self, policy: Policy, now: float) -> BreakerState:
        records = self._records()
        # A device whose change was just applied is already counted by its record.
        begun = {record.device for record in records if record.health is Health.RECOVERING}
        out = {record.device for record in records if is_out_for_soft_signal(record, policy.signals)}
        starting, leaving = len(self._starting - begun), len(self._leaving - out)
        return breaker_state(
            records,
            policy.breaker,
            now,
            policy.signals,
            resets_required=policy.reset is ResetMode.REQUIRED,
            quarantine_after=policy.health.quarantine_after,
            pending_resets=starting,
            pending_soft_quarantines=leaving,
        )

    @property
    def soft_quarantines_stopped(self) -> bool:
        """Whether no further device may be quarantined for a soft signal."""
        return bool(self.state.soft_signals_stopped_reason)

    def resets_stopped_until(self) -> float | None:
        """Wall-clock seconds before which no recovery may reset a device; None while resets are allowed."""
        return self.state.resets_stopped_until

    @contextmanager
    def reserve_soft_quarantine(self, device: str) -> Iterator[None]:
        """Count the device among those that are out of service for a soft signal until its record shows it."""
        self._leaving.add(device)
        self.invalidate()
        try:
            yield
        finally:
            self._leaving.discard(device)
            self.invalidate()

    @contextmanager
    def reserve_reset(self, device: str) -> Iterator[None]:
        """Reserve one of the remaining resets until the record of ``device`` shows it.

        Raises:
            NotReady: no resets are left.
        """
        state = self.state
        if state.resets_stopped_reason:
            raise refusals.reset_stopped(device, state.resets_stopped_reason)
        self._starting.add(device)
        self.invalidate()
        try:
            yield
        finally:
            self._starting.discard(device)
            self.invalidate()


async def watch_breaker(breaker: CircuitBreaker, *, dependencies: Dependencies, interval: float = _INTERVAL) -> None:
    """Report when the breaker opens and closes, until cancelled."""
    before = BreakerState()
    while True:
        now = breaker.state.open
        events = [*_change_events("resets", before.resets_stopped_reason, now.resets_stopped_reason, dependencies)]
        events += _change_events(
            "soft-quarantines", before.soft_signals_stopped_reason, now.soft_signals_stopped_reason, dependencies
        )
        if events:
            with suppress(LedgerFailure):  # the log line is written even if the ledger fails
                await dependencies.ledger.commit(LedgerChange(events=tuple(events)))
            dependencies.journal.record(events)
        before = now
        await dependencies.clock.sleep(interval)


def _change_events(what: str, before: str, now: str, dependencies: Dependencies) -> Iterator[Event]:
    if bool(before) is not bool(now):
        name = "breaker.opened" if now else "breaker.closed"
        yield Event(name, dependencies.clock.wall(), fields={"breaker": what, "message": now or None})
