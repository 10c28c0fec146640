"""The health of one device: what looks at it show, and what a person says of it.

Looks are many and commits are few: what is found again changes nothing, and the XIDs of one code are told of once a minute.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from scrubber.domain.baseline import ACCEPTABLE, Baseline, facts_of
from scrubber.domain.breaker import out_for_soft_signals
from scrubber.domain.codes import ErrorCode
from scrubber.domain.device import Device
from scrubber.domain.errors import Away, BeingReset, DeviceFault, InvalidRequest, Refused
from scrubber.domain.evidence import Finding, Severity, Step
from scrubber.domain.health import OPERATOR, Cause, Health, WayBack
from scrubber.domain.quantities import span
from scrubber.domain.record import DeviceRecord, Glass
from scrubber.domain.recovery import after_findings
from scrubber.domain.signals import baseline_findings, fault_finding, lifetime_findings, snapshot_findings, xid_of
from scrubber.domain.tally import blamed
from scrubber.engine import events as narrate
from scrubber.engine.custody import Custody
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.neighbourhood import Neighbourhood
from scrubber.ports.record import Change, Event

__all__ = ["Vitals"]

_LONGEST_REASON = 2000
"""Characters of a cause that several people gave reasons for."""
_SILENCE = 15.0
"""Seconds without any answer about a device after which it counts as unreadable."""
_TOLD_AGAIN = 60.0
"""Seconds for which XIDs of one code are counted and not told of again."""
_MOST_CODES = 32
"""Codes of one device that are told of within that time: a driver may list any number."""


class Vitals(Custody):
    """One device's."""

    def __init__(
        self, device: Device, record: DeviceRecord, *, dependencies: Dependencies, around: Neighbourhood
    ) -> None:
        super().__init__(device, record, dependencies=dependencies, around=around)
        self._silent_since: float | None = None
        self._warned: dict[str, float] = {}
        self._told: dict[str, float] = {}

    # -- looks -----------------------------------------------------------------------------------------------------

    async def look(self) -> tuple[Finding, ...]:
        """Ask the driver about the device and let its answer count."""
        try:
            snapshot = await self._dependencies.telemetry.snapshot(self.device)
            await self._forget_xids(snapshot.xids)
            known, baseline = dict(self._record.lifetime), self._record.baseline
            findings = (
                *snapshot_findings(snapshot, self.policy, known, baseline),
                *baseline_findings(self.device, baseline),
                *lifetime_findings(snapshot, known),
            )
        except DeviceFault as fault:
            findings = (fault_finding(Step.HEALTH, fault),)
        except Away as away:
            findings = self._silence(away)
        else:
            self._silent_since = None
        await self.report(findings)
        return findings

    async def _forget_xids(self, listed: Collection[int]) -> None:
        """An XID that the driver lists no more, after a reset of a peer say, is news when it comes again."""
        if self._record.listing_xids(listed) is self._record:
            return
        async with self._lock:
            left = self._record.listing_xids(listed)
            if left is not self._record:
                await self._commit(Change(), left)

    def _silence(self, away: Away) -> tuple[Finding, ...]:
        """Nobody could be asked, which is not the device's fault; but no data is never healthy for long.

        A device that is kept back for a reset is not silent: the reset has a deadline, and who began it judges it.
        """
        if isinstance(away, BeingReset):
            self._silent_since = None
            raise away
        now = self._dependencies.clock.monotonic()
        self._silent_since = now if self._silent_since is None else self._silent_since
        if now - self._silent_since < _SILENCE:
            raise away
        return (Finding(Step.HEALTH, ErrorCode.UNREADABLE, Severity.FAULT, f"No data for {_SILENCE:g} s: {away}"),)

    async def report(self, findings: Iterable[Finding]) -> None:
        """Let what a look at the device's health found count."""
        everything = tuple(findings)
        async with self._lock:
            before, now = self._record, self._dependencies.clock.wall()
            after = self._judged(before, everything, now)
            news = self._news(everything)
            signals = [narrate.signal(finding, before.tenant, self.device.id, now) for finding in news]
            counts = {each.code: int(each.evidence["count"] or 0) for each in news if xid_of(each.code) is not None}
            if counts:
                after = after.noted(counts)
            if after is before:
                return
            after = replace(after, version=before.version + 1)
            events = (*signals, *self._health_events(before, after, now))
            with self._leaving(before, after):
                await self._commit(Change(events=events), after)
            for finding in news:
                self._told[finding.code] = self._dependencies.clock.monotonic()

    def _leaving(self, before: DeviceRecord, after: DeviceRecord) -> AbstractContextManager[None]:
        """To be entered before anything else happens: of many devices that turn hot together each would think it is the first."""
        out = out_for_soft_signals(after) and not out_for_soft_signals(before)
        return self._around.breaker.leaving(self.device.id) if out else nullcontext()

    def _judged(self, record: DeviceRecord, findings: tuple[Finding, ...], now: float) -> DeviceRecord:
        """What ``findings`` make of ``record``. Only while deciding: it remembers which warnings were seen."""
        policy, moment = self.policy, self._dependencies.clock.monotonic()
        self._warned.update({finding.code: moment for finding in findings if finding.severity is Severity.WARNING})
        standing = {each.code for each in record.lasting}
        # One that an earlier service saw counts as seen when this one began.
        self._warned = {code: self._warned.get(code, moment) for code in self._warned.keys() | standing}
        ended = {code for code in standing if moment - self._warned[code] >= policy.health.calm}
        soft = any(each.severity is Severity.WARNING and each.code in policy.health.sustained for each in findings)
        # One that is out already costs the breaker nothing: it must not keep itself in service.
        stopped = soft and not out_for_soft_signals(record) and self._around.breaker.soft_stopped
        after = after_findings(record, findings, policy, now, ended=ended, soft_stopped=stopped)
        self._warned = {each.code: self._warned[each.code] for each in after.lasting}
        return after

    def _news(self, findings: Iterable[Finding]) -> list[Finding]:
        """XIDs that came since they were last told of, of codes that may be told of now."""
        now = self._dependencies.clock.monotonic()
        self._told = {code: at for code, at in self._told.items() if now - at < _TOLD_AGAIN}
        news = [each for each in findings if each.evidence.get("new") and each.code not in self._told]
        return news[: _MOST_CODES - len(self._told)]

    def _health_events(
        self, before: DeviceRecord, after: DeviceRecord, now: float, scrub: str | None = None
    ) -> tuple[Event, ...]:
        """The change of health, and whom too many of them point at."""
        events = narrate.health_changed(before, after, now, scrub)
        tenant = after.strikes[-1].tenant if after.strikes[-1:] != before.strikes[-1:] else None
        if tenant is None:
            return events
        others = [each for each in self._around.records() if each.device != after.device]
        strikes = [strike for record in (*others, after) for strike in record.strikes]
        count, least = blamed(strikes, now)[tenant], self._dependencies.policy().health.blame
        if count < least or count % least:
            return events
        sentence = (
            f"Devices of this node were taken out of service {count} times within a day while {tenant} had them. Look at what "
            "its pods do; to keep them off the node is the scheduler's to do (a taint, a quota)."
        )
        fields: dict[str, str | int | float | bool | None] = {"tenant_namespace": tenant, "quarantines": count}
        fields["sentence"] = sentence
        return (*events, Event("tenant.blamed", now, after.device, fields=fields))

    # -- a person's word -------------------------------------------------------------------------------------------

    async def quarantine(self, reason: str, actor: str) -> None:
        async with self._lock:
            now = self._dependencies.clock.wall()
            before = self._record.cause if self._record.ordered_out_by_person else None
            said = reason if before is None else f"{reason} (and before, by {before.actor}: {before.sentence})"
            cause = Cause(OPERATOR, said[:_LONGEST_REASON], WayBack.PERSON, now, actor)
            event = Event("operator.quarantined", now, self.device.id, actor=actor, fields={"reason": reason})
            mended = self._mended("A person took the device out of service.", now, actor)
            events = (event,) if self._record.glass is None else (event, mended)
            await self._commit(Change(events=events), self._record.ordered_out(cause))

    async def unquarantine(self, reason: str, actor: str) -> None:
        """Raises :class:`Refused` when the device is not out of service."""
        async with self._lock:
            if self._record.health not in (Health.QUARANTINED, Health.CONDEMNED):
                now_is = {Health.PROBATION: "on probation"}.get(self._record.health, self._record.health.value)
                raise Refused(f"Device {self.device.id} is {now_is}, not quarantined.")
            now = self._dependencies.clock.wall()
            event = Event("operator.released", now, self.device.id, actor=actor, fields={"reason": reason})
            await self._commit(Change(events=(event,)), self._record.released_by_person(retry_at=now))

    async def accept_baseline(self, device: Device, reason: str, actor: str) -> None:
        """From now on the device should be as ``device`` describes it, with the warnings that stand on record.

        Args:
            device: as the person who accepts it was shown it: what is written meanwhile is not accepted with it.

        Raises:
            DeviceFault, Away: it cannot be said what the warnings rest on.
        """
        snapshot = await self._dependencies.telemetry.snapshot(self.device)
        async with self._lock:
            now, before = self._dependencies.clock.wall(), self._record.baseline
            known = {} if before is None else dict(before.conditions)
            seen = ACCEPTABLE & ({each.code for each in self._record.lasting} | known.keys())
            normal = tuple(sorted((code, read) for code, read in snapshot.conditions.items() if code in seen))
            baseline = Baseline(facts_of(device), normal, now, actor, reason)
            fields: dict[str, str | int | float | bool | None] = {"reason": reason}
            fields |= {f"is_{name}": value for name, value in (*baseline.facts, *normal)}
            was = () if before is None else (*before.facts, *before.conditions)
            fields |= {f"was_{name}": value for name, value in was}
            event = Event("baseline.accepted", now, self.device.id, actor=actor, fields=fields)
            await self._commit(Change(events=(event,)), self._record.expected(baseline))
            # What was accepted is over at once, and not when it was not seen for a while.
            self._warned |= dict.fromkeys(("baseline-changed", *dict(normal)), -math.inf)
        await self.look()

    async def break_glass(self, seconds: float, reason: str, actor: str) -> None:
        """Have the device handed out for ``seconds`` whatever is known of it; 0 ends that.

        Raises:
            Refused: a time that the policy does not allow, nothing to end, or a device that a person took out.
        """
        async with self._lock:
            now, record = self._dependencies.clock.wall(), self._record
            if seconds == 0:
                if record.glass is None:
                    raise InvalidRequest(f"Device {self.device.id} has no broken glass to mend.")
                event = self._mended(f"Ended by a person: {reason}", now, actor)
                await self._commit(Change(events=(event,)), record.glass_mended())
                return
            longest = self.policy.limits.break_glass
            if seconds > longest:
                raise Refused(
                    f"The policy lets a person break the glass of a device for {span(longest)} at most, not {span(seconds)} "
                    "(limits: break-glass)."
                )
            if record.ordered_out_by_person:
                raise Refused(
                    f"Device {self.device.id} was taken out by {record.cause.actor if record.cause else 'a person'}: release "
                    "it first (scrubber unquarantine)."
                )
            fields: dict[str, str | int | float | bool | None] = {"reason": reason, "seconds": seconds}
            fields |= {"until": now + seconds, "state": record.state}
            event = Event("glass.broken", now, self.device.id, actor=actor, fields=fields)
            await self._commit(Change(events=(event,)), record.glass_broken(Glass(now + seconds, reason, actor)))

    async def mend_glass(self) -> None:
        """End a break-glass whose time is over."""
        glass = self._record.glass
        if glass is None or self._is_broken(glass, self.policy):
            return
        async with self._lock:
            if self._record.glass == glass:
                now = self._dependencies.clock.wall()
                event = self._mended(f"The time that {glass.actor} asked for is over.", now, "service")
                await self._commit(Change(events=(event,)), self._record.glass_mended())

    def _mended(self, sentence: str, now: float, actor: str) -> Event:
        return Event("glass.mended", now, self.device.id, actor=actor, fields={"sentence": sentence})
