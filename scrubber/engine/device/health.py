"""The health of one device: results of health checks, and operator actions on it.

Checks are frequent and commits are rare: a known finding changes nothing, and errors of one code are reported once a
minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from scrubber.domain.baseline import Baseline, baseline_facts
from scrubber.domain.codes import ErrorCode
from scrubber.domain.device import Device
from scrubber.domain.errors import BrokenCommand, DeviceFault, InvalidRequest, Refused, ResetInProgress, Unavailable
from scrubber.domain.evidence import Finding, Severity, Step
from scrubber.domain.formatting import format_duration
from scrubber.domain.health.breaker import is_out_for_soft_signal
from scrubber.domain.health.history import quarantines_by_tenant
from scrubber.domain.health.recovery import after_findings
from scrubber.domain.health.signals import (
    baseline_findings,
    fault_finding,
    lifetime_findings,
    reported_fault,
    snapshot_findings,
)
from scrubber.domain.record import BreakGlass, DeviceRecord
from scrubber.domain.states import ADVERTISED, OPERATOR_CAUSE, Cause, Health, RecoveryMethod
from scrubber.domain.telemetry import Signal
from scrubber.engine import events
from scrubber.engine.breaker import CircuitBreaker
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.state import DeviceState
from scrubber.ports.record import Event, LedgerChange

__all__ = ["DeviceHealth"]

_LONGEST_REASON = 2000
"""Maximum length in characters of a cause that combines the reasons of several operators."""
_SILENCE = 15.0
"""Seconds without any answer about a device after which it counts as unreadable."""
_REPORT_INTERVAL = 60.0
"""Seconds for which errors of one code are counted and not reported again."""
_MOST_CODES = 32
"""Maximum number of codes of one device that are reported within that interval: a driver may list any number."""


class DeviceHealth:
    """The health of one device.

    Args:
        breaker: decides whether a device may be quarantined for a soft signal.
        records: returns the records of all devices of the node.

    Attributes:
        reported_fault: the fault that the driver reported since the last check began, with its meaning; empty if none.
    """

    def __init__(
        self,
        *,
        state: DeviceState,
        dependencies: Dependencies,
        breaker: CircuitBreaker,
        records: Callable[[], Collection[DeviceRecord]],
    ) -> None:
        self._state = state
        self._dependencies = dependencies
        self._breaker = breaker
        self._records = records
        self._silent_since: float | None = None
        self._warned_at: dict[str, float] = {}
        self._reported_at: dict[str, float] = {}
        self.reported_fault = ""
        self._faults_reported = 0

    # -- checks ----------------------------------------------------------------------------------------------------

    # See docs/decisions/0003-one-transaction-per-decision.md.
    def note_signal(self, signal: Signal) -> None:
        """Withhold the device until its next check if ``signal`` reports a fault.

        The check waits for the driver and for the disk, and the driver of a faulty device may not answer.
        """
        fault = reported_fault(signal, self._state.policy)
        if not fault:
            return
        self._faults_reported += 1
        if not self.reported_fault:
            self.reported_fault = fault
            self._state.on_change()

    async def check(self) -> tuple[Finding, ...]:
        """Query the driver about the device, and report the findings."""
        faults_reported = self._faults_reported
        try:
            snapshot = await self._dependencies.telemetry.snapshot(self._state.device)
            await self._forget_errors(self._state.policy.signals.finding_codes(snapshot.errors))
            known, baseline = dict(self._state.record.lifetime_counters), self._state.record.baseline
            findings = (
                *snapshot_findings(snapshot, self._state.policy, known, baseline),
                *baseline_findings(self._state.device, baseline),
                *lifetime_findings(snapshot, known),
            )
        except DeviceFault as fault:
            findings = (fault_finding(Step.HEALTH, fault),)
        except Unavailable as away:
            findings = self._silence(away)
        else:
            self._silent_since = None
        await self.report(findings)
        # A fault that was reported since the check began may be missing in its findings.
        if self.reported_fault and faults_reported == self._faults_reported:
            self.reported_fault = ""
            self._state.on_change()
        return findings

    async def _forget_errors(self, listed: Collection[str]) -> None:
        """Forget error codes that the driver no longer lists, e.g. after a reset of a peer.

        If they return, they are new.
        """
        if self._state.record.without_unlisted_errors(listed) is self._state.record:
            return
        async with self._state.lock:
            left = self._state.record.without_unlisted_errors(listed)
            if left is not self._state.record:
                await self._state.commit(LedgerChange(), left)

    def _silence(self, away: Unavailable) -> tuple[Finding, ...]:
        """Return the finding for a driver that does not answer, which is not the device's fault at first.

        A device that is being reset is not silent: the reset has a deadline, and its result is evaluated where it was
        started.
        """
        if isinstance(away, ResetInProgress):
            self._silent_since = None
            raise away
        if isinstance(away, BrokenCommand):  # a mistake in a program takes no device out of service
            self._silent_since = None
            return (Finding(Step.HEALTH, away.code, Severity.WARNING, str(away)),)
        now = self._dependencies.clock.monotonic()
        self._silent_since = now if self._silent_since is None else self._silent_since
        if now - self._silent_since < _SILENCE:
            raise away
        return (
            Finding(Step.HEALTH, ErrorCode.DEVICE_UNREADABLE, Severity.FAULT, f"No data for {_SILENCE:g} s: {away}"),
        )

    async def report(self, findings: Iterable[Finding]) -> None:
        """Apply ``findings`` to the device's health, and commit if they change it."""
        everything = tuple(findings)
        async with self._state.lock:
            before, now = self._state.record, self._dependencies.clock.wall()
            after = self.apply_findings(before, everything, now)
            news = self._unreported(everything)
            signals = [events.signal(finding, before.tenant, self._state.id, now) for finding in news]
            errors = self._state.policy.signals.errors
            counts = {
                each.code: int(each.evidence["count"] or 0) for each in news if errors.parse(each.code) is not None
            }
            if counts:
                after = after.with_counters(counts)
            if after is before:
                return
            after = replace(after, version=before.version + 1)
            change = LedgerChange(events=(*signals, *self.change_events(before, after, now)))
            with self.reserve_soft_quarantine(before, after):
                await self._state.commit(change, after)
            for finding in news:
                self._reported_at[finding.code] = self._dependencies.clock.monotonic()

    def reserve_soft_quarantine(self, before: DeviceRecord, after: DeviceRecord) -> AbstractContextManager[None]:
        """Count the device in the breaker until its change is committed.

        Otherwise, of many devices that overheat at the same time, each would count as the first.
        """
        table = self._state.policy.signals
        out = is_out_for_soft_signal(after, table) and not is_out_for_soft_signal(before, table)
        return self._breaker.reserve_soft_quarantine(self._state.id) if out else nullcontext()

    def apply_findings(self, record: DeviceRecord, findings: tuple[Finding, ...], now: float) -> DeviceRecord:
        """Return ``record`` after ``findings``.

        The caller holds the lock: the method remembers which warnings were seen.
        """
        policy, moment = self._state.policy, self._dependencies.clock.monotonic()
        self._warned_at.update({finding.code: moment for finding in findings if finding.severity is Severity.WARNING})
        active = {each.code for each in record.warnings}
        # A warning that an earlier service saw counts as seen when this service started.
        self._warned_at = {code: self._warned_at.get(code, moment) for code in self._warned_at.keys() | active}
        ended = {code for code in active if moment - self._warned_at[code] >= policy.health.quiet_period}
        soft = any(
            each.severity is Severity.WARNING and each.code in policy.health.quarantine_after for each in findings
        )
        # A device that is already out for a soft signal costs the breaker nothing: it must not keep itself in service.
        stopped = soft and not is_out_for_soft_signal(record, policy.signals) and self._breaker.soft_quarantines_stopped
        after = after_findings(record, findings, policy, now, ended=ended, soft_quarantines_stopped=stopped)
        self._warned_at = {each.code: self._warned_at[each.code] for each in after.warnings}
        return after

    def _unreported(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return errors that occurred since they were last reported, of codes that may be reported now."""
        now = self._dependencies.clock.monotonic()
        self._reported_at = {code: at for code, at in self._reported_at.items() if now - at < _REPORT_INTERVAL}
        news = [each for each in findings if each.evidence.get("new") and each.code not in self._reported_at]
        return news[: _MOST_CODES - len(self._reported_at)]

    def change_events(
        self, before: DeviceRecord, after: DeviceRecord, now: float, scrub: str | None = None
    ) -> tuple[Event, ...]:
        """Return the events of a change of health, and of a tenant whose use led to too many quarantines."""
        changed = events.health_changed(before, after, now, scrub)
        tenant = (
            after.recent_quarantines[-1].tenant
            if after.recent_quarantines[-1:] != before.recent_quarantines[-1:]
            else None
        )
        if tenant is None:
            return changed
        others = [each for each in self._records() if each.device != after.device]
        strikes = [strike for record in (*others, after) for strike in record.recent_quarantines]
        count, least = (
            quarantines_by_tenant(strikes, now)[tenant],
            self._dependencies.policy().health.tenant_quarantine_threshold,
        )
        if count < least or count % least:
            return changed
        message = (
            f"Devices of this node were quarantined {count} times within a day while they were assigned to "
            f"{tenant}. Check what its pods do; to keep them off the node, use the scheduler (a taint, a "
            "quota)."
        )
        fields: dict[str, str | int | float | bool | None] = {"tenant": tenant, "quarantines": count}
        fields["message"] = message
        return (*changed, Event("tenant.flagged", now, after.device, fields=fields))

    # -- operator actions ------------------------------------------------------------------------------------------

    async def quarantine(self, reason: str, actor: str) -> Cause | None:
        """Quarantine the device until an operator releases it; return why it was out of service already, if it was."""
        async with self._state.lock:
            now = self._dependencies.clock.wall()
            previous = self._state.record.cause if self._state.record.health not in ADVERTISED else None
            before = self._state.record.cause if self._state.record.quarantined_by_operator else None
            message = reason if before is None else f"{reason} (previously, by {before.actor}: {before.message})"
            cause = Cause(OPERATOR_CAUSE, message[:_LONGEST_REASON], RecoveryMethod.OPERATOR, now, actor)
            event = Event("operator.quarantined", now, self._state.id, actor=actor, fields={"reason": reason})
            ended = self._break_glass_ended("An operator quarantined the device.", now, actor)
            change = LedgerChange(events=(event,) if self._state.record.break_glass is None else (event, ended))
            await self._state.commit(change, self._state.record.after_operator_quarantine(cause))
            return previous

    async def unquarantine(self, reason: str, actor: str) -> None:
        """Release the device from quarantine; raises :class:`Refused` when it is neither quarantined nor condemned."""
        async with self._state.lock:
            if self._state.record.health not in (Health.QUARANTINED, Health.CONDEMNED):
                now_is = {Health.PROBATION: "on probation"}.get(
                    self._state.record.health, self._state.record.health.value
                )
                raise Refused(f"Device {self._state.id} is {now_is}, not quarantined.")
            now = self._dependencies.clock.wall()
            event = Event("operator.released", now, self._state.id, actor=actor, fields={"reason": reason})
            await self._state.commit(
                LedgerChange(events=(event,)), self._state.record.after_operator_release(retry_at=now)
            )

    async def accept_baseline(self, device: Device, reason: str, actor: str) -> None:
        """Accept ``device``, with the warnings on its record, as the baseline from now on.

        Args:
            device: the device as displayed to the operator; later changes are not accepted with it.

        Raises:
            DeviceFault, Unavailable: it cannot be determined what the warnings are based on.
        """
        snapshot = await self._dependencies.telemetry.snapshot(self._state.device)
        async with self._state.lock:
            now, before = self._dependencies.clock.wall(), self._state.record.baseline
            known = {} if before is None else dict(before.conditions)
            seen = self._state.policy.signals.acceptable & (
                {each.code for each in self._state.record.warnings} | known.keys()
            )
            normal = tuple(sorted((code, read) for code, read in snapshot.conditions.items() if code in seen))
            baseline = Baseline(baseline_facts(device), normal, now, actor, reason)
            fields: dict[str, str | int | float | bool | None] = {"reason": reason}
            fields |= {f"current_{name}": value for name, value in (*baseline.facts, *normal)}
            was = () if before is None else (*before.facts, *before.conditions)
            fields |= {f"previous_{name}": value for name, value in was}
            event = Event("baseline.accepted", now, self._state.id, actor=actor, fields=fields)
            await self._state.commit(LedgerChange(events=(event,)), self._state.record.with_baseline(baseline))
            # Warnings about what was accepted end at once, and not after a quiet period.
            self._warned_at |= dict.fromkeys(("baseline-mismatch", *dict(normal)), -math.inf)
        await self.check()

    async def break_glass(self, seconds: float, reason: str, actor: str) -> None:
        """Bypass all checks for the device for ``seconds``; 0 ends an active override.

        Raises:
            InvalidRequest: there is no override to end.
            Refused: the policy does not allow so long a time, or an operator quarantined the device.
        """
        async with self._state.lock:
            now, record = self._dependencies.clock.wall(), self._state.record
            if seconds == 0:
                if record.break_glass is None:
                    raise InvalidRequest(f"Device {self._state.id} has no active break-glass override to end.")
                event = self._break_glass_ended(f"Ended by an operator: {reason}", now, actor)
                await self._state.commit(LedgerChange(events=(event,)), record.without_break_glass())
                return
            longest = self._state.policy.limits.break_glass
            if seconds > longest:
                raise Refused(
                    f"The policy allows a break-glass override of at most {format_duration(longest)}, not "
                    f"{format_duration(seconds)} (limits.breakGlass)."
                )
            if record.quarantined_by_operator:
                raise Refused(
                    f"Device {self._state.id} was quarantined by {record.cause.actor if record.cause else 'an operator'}: release "
                    "it first (scrubber unquarantine)."
                )
            fields: dict[str, str | int | float | bool | None] = {"reason": reason, "duration_seconds": seconds}
            fields |= {"expires_at": now + seconds, "state": record.state}
            event = Event("break-glass.started", now, self._state.id, actor=actor, fields=fields)
            await self._state.commit(
                LedgerChange(events=(event,)), record.with_break_glass(BreakGlass(now + seconds, reason, actor))
            )

    async def end_expired_break_glass(self) -> None:
        """End a break-glass override whose time has expired."""
        glass = self._state.record.break_glass
        if glass is None or self._state.is_override_active(glass, self._state.policy):
            return
        async with self._state.lock:
            if self._state.record.break_glass == glass:
                now = self._dependencies.clock.wall()
                event = self._break_glass_ended(f"The override requested by {glass.actor} has expired.", now, "service")
                await self._state.commit(LedgerChange(events=(event,)), self._state.record.without_break_glass())

    def _break_glass_ended(self, message: str, now: float, actor: str) -> Event:
        return Event("break-glass.ended", now, self._state.id, actor=actor, fields={"message": message})
