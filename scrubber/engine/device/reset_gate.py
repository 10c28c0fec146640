"""Decides whether a recovery may reset one device now.

Checks the device's remaining attempts, the node's circuit breaker, and whether the device can be reset at all. The
recovery loop consults the gate before it starts a scrub, and the scrub again under the device's lock. Operator actions
bypass the gate.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from scrubber.domain.evidence import PathKind, ScrubTrigger, Step
from scrubber.domain.health.recovery import apply_attempt_limits
from scrubber.domain.policy import ScrubPlan
from scrubber.domain.states import Health
from scrubber.engine import refusals
from scrubber.engine.breaker import CircuitBreaker
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.health import DeviceHealth
from scrubber.engine.device.state import DeviceState
from scrubber.ports.record import LedgerChange

__all__ = ["ResetGate"]


class ResetGate:
    """Limits on the recoveries of one device, and on their resets."""

    def __init__(
        self, *, state: DeviceState, health: DeviceHealth, breaker: CircuitBreaker, dependencies: Dependencies
    ) -> None:
        self._state = state
        self._health = health
        self._breaker = breaker
        self._dependencies = dependencies
        # The breaker is open, and this device cannot be reset: it is scrubbed without a reset.
        self._no_reset = False

    @property
    def blocker(self) -> str:
        """Why the reset that the device needs for its recovery cannot run now; empty otherwise."""
        record = self._state.record
        owed = record.health in (Health.QUARANTINED, Health.PROBATION) and record.owes_reset
        return self._breaker.state.resets_stopped_reason if owed and self._stopped_until is not None else ""

    @property
    def _stopped_until(self) -> float | None:
        record = self._state.record
        plan = self._state.policy.plan(
            PathKind.SLOW, ScrubTrigger.RECOVERY, recovering=True, must_reset=record.owes_reset
        )
        return self._breaker.resets_stopped_until() if Step.RESET in plan.steps and not self._no_reset else None

    async def resets_stopped_until(self) -> float | None:
        """Return the wall-clock seconds before which the breaker allows no recovery reset; None without a limit.

        Raises:
            DeviceFault, Unavailable: it cannot be determined whether the device can be reset at all.
        """
        self._no_reset = False
        until = self._stopped_until
        if until is not None:
            self._no_reset = (await self._dependencies.resetter.plan(self._state.device)).unavailable is not None
        return None if self._no_reset else until

    async def require_attempts_left(self, now: float) -> None:
        """Raise :class:`NotReady` once the device has no attempts left: it is condemned, or waits before the next one.

        The caller holds the lock.
        """
        left = apply_attempt_limits(self._state.record, self._state.policy, now)
        if left is self._state.record:
            return
        left = replace(left, version=self._state.record.version + 1)
        await self._state.commit(LedgerChange(events=self._health.change_events(self._state.record, left, now)), left)
        raise refusals.attempts_exhausted(left)

    def without_impossible_reset(self, plan: ScrubPlan) -> ScrubPlan:
        """Return the ``plan`` of a recovery, without the reset if the device cannot be reset."""
        return (
            replace(plan, steps=tuple(step for step in plan.steps if step is not Step.RESET))
            if self._no_reset
            else plan
        )

    def reserve_reset(self, *, resets: bool) -> AbstractContextManager[None]:
        """Reserve one of the resets that the breaker allows until the recovery is recorded.

        Args:
            resets: whether the recovery includes a reset.

        Raises:
            NotReady: the breaker is open.
        """
        return self._breaker.reserve_reset(self._state.id) if resets else nullcontext()
