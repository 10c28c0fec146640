"""The node's circuit breaker: checked before a reset and before a quarantine for a soft signal; its changes are logged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from scrubber.domain.breaker import Breaker, breaker_of, out_for_soft_signals
from scrubber.domain.errors import LedgerFailure
from scrubber.domain.health import Health
from scrubber.domain.policy import Policy, ResetUse
from scrubber.domain.record import DeviceRecord
from scrubber.engine import refusals
from scrubber.engine.dependencies import Dependencies
from scrubber.ports.record import Change, Event

__all__ = ["CircuitBreaker", "watch_breaker"]

_EVERY = 5.0
"""Seconds between two checks whether the breaker opened or closed."""


class CircuitBreaker:
    """What recoveries of one node may still do.

    Args:
        records: returns the current records of all devices.
    """

    def __init__(self, records: Callable[[], Collection[DeviceRecord]], dependencies: Dependencies) -> None:
        self._records = records
        self._dependencies = dependencies
        self._starting: set[str] = set()
        self._leaving: set[str] = set()
        self._known: tuple[Policy, int, Breaker] | None = None

    def moved(self) -> None:
        """A record is another one now."""
        self._known = None

    @property
    def state(self) -> Breaker:
        """The breaker as of this second: it is read for each of many devices."""
        policy, now = self._dependencies.policy(), self._dependencies.clock.wall()
        if self._known is not None and self._known[0] is policy and self._known[1] == int(now):
            return self._known[2]
        self._known = (policy, int(now), self._computed(policy, now))
        return self._known[2]

    def _computed(self, policy: Policy, now: float) -> Breaker:
        records = self._records()
        # A device whose change was just applied is on record already.
        begun = {record.device for record in records if record.health is Health.RECOVERING}
        out = {record.device for record in records if out_for_soft_signals(record, policy.signals)}
        starting, leaving = len(self._starting - begun), len(self._leaving - out)
        return breaker_of(
            records,
            policy.breaker,
            now,
            policy.signals,
            required=policy.reset is ResetUse.REQUIRED,
            sustained=policy.health.sustained,
            starting=starting,
            leaving=leaving,
        )

    @property
    def soft_stopped(self) -> bool:
        """Whether no further device is to be taken out for a soft signal."""
        return bool(self.state.soft)

    def stopped_until(self) -> float | None:
        """Wall-clock seconds before which no recovery may reset a device; None while it may."""
        return self.state.resets_until

    @contextmanager
    def leaving(self, device: str) -> Iterator[None]:
        """Count the device among those that are out for a soft signal until that is on its record."""
        self._leaving.add(device)
        self.moved()
        try:
            yield
        finally:
            self._leaving.discard(device)
            self.moved()

    @contextmanager
    def reset(self, device: str) -> Iterator[None]:
        """Hold one of the resets that are left until it is on the record of ``device``.

        Raises:
            NotReady: there is none.
        """
        state = self.state
        if state.resets:
            raise refusals.reset_stopped(device, state.resets)
        self._starting.add(device)
        self.moved()
        try:
            yield
        finally:
            self._starting.discard(device)
            self.moved()


async def watch_breaker(breaker: CircuitBreaker, *, dependencies: Dependencies, every: float = _EVERY) -> None:
    """Tell when something is stopped, and when it goes on again. Until cancelled."""
    before = Breaker()
    while True:
        now = breaker.state.open
        events = [*_told("resets", before.resets, now.resets, dependencies)]
        events += _told("soft", before.soft, now.soft, dependencies)
        if events:
            with suppress(LedgerFailure):  # the log line is written all the same
                await dependencies.ledger.commit(Change(events=tuple(events)))
            dependencies.journal.tell(events)
        before = now
        await dependencies.clock.sleep(every)


def _told(what: str, before: str, now: str, dependencies: Dependencies) -> Iterator[Event]:
    if bool(before) is not bool(now):
        name = "breaker.opened" if now else "breaker.closed"
        yield Event(name, dependencies.clock.wall(), fields={"what": what, "sentence": now or None})
