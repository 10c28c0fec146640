"""The sections of a policy file that say what a fault means, what follows from it, and how a device comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field, model_validator

from scrubber.config.policy_values import (
    Codes,
    PositiveSeconds,
    PositiveSecondsOrNever,
    Seconds,
    SecondsOrNever,
    Window,
    choice,
    one_of,
    refuse,
)
from scrubber.config.proof_sections import LevelWord
from scrubber.config.section import Section
from scrubber.domain.policy import (
    BreakerRule,
    HealthRule,
    MaintenanceRule,
    News,
    Policy,
    RecoveryRule,
    StuckRule,
    XidClass,
)
from scrubber.domain.signals import SOFT
from scrubber.domain.tally import DAY, KEPT

__all__ = [
    "BreakerSection",
    "HealthSection",
    "MaintenanceSection",
    "RecoverySection",
    "StuckSection",
    "XidSection",
]

_POLICY = Policy()
_HEALTH, _RECOVERY, _BREAKER = _POLICY.health, _POLICY.recovery, _POLICY.breaker
_MAINTENANCE, _STUCK = _POLICY.maintenance, _POLICY.stuck
_LASTING = ", ".join(f"{code} {seconds / 60:g}m" for code, seconds in sorted(_HEALTH.sustained.items()))


class HealthSection(Section):
    """Soft conditions: they make a device suspect at once, and take it out of service only when they last."""

    sustained: dict[Annotated[str, one_of(SOFT)], SecondsOrNever] = Field(
        {},
        description=f"By condition, how long it may last. What is not written: {_LASTING}, the others never.",
        json_schema_extra={"propertyNames": {"enum": [*sorted(SOFT)]}},
    )
    calm: PositiveSeconds = Field(_HEALTH.calm, description="A condition that was not seen for this long is over.")
    news: Annotated[News, choice(News)] = Field(
        _HEALTH.news, description="When the kubelet hears of a device that turns unhealthy while a pod has it."
    )
    blame: int = Field(
        _HEALTH.blame,
        ge=1,
        le=1000,
        description="Quarantines within a day while one tenant had the device, after which that tenant is told of.",
    )

    def rule(self) -> HealthRule:
        sustained = {**_HEALTH.sustained, **self.sustained}
        lasting = {code: seconds for code, seconds in sorted(sustained.items()) if seconds is not None}
        return HealthRule(sustained=lasting, calm=self.calm, news=self.news, blame=self.blame)


class RecoverySection(Section):
    """The way back of a quarantined device."""

    backoff_initial: PositiveSeconds = Field(
        _RECOVERY.backoff_initial,
        description="Pause before the first attempt; doubled at each failure, and with each quarantine of the same day.",
    )
    backoff_max: PositiveSeconds = Field(_RECOVERY.backoff_max, description="The longest pause between attempts.")
    attempts: int = Field(
        _RECOVERY.attempts, ge=1, le=1000, description="Failed attempts after which the device is condemned."
    )
    attempts_per_day: int = Field(
        _RECOVERY.attempts_per_day, ge=1, le=KEPT, description="What one device gets within 24 hours."
    )
    resets_per_day: int = Field(
        _RECOVERY.resets_per_day, ge=1, le=KEPT, description="What one device gets within 24 hours."
    )
    probation_scrubs: int = Field(
        _RECOVERY.probation_scrubs, ge=1, le=1000, description="Clean slow paths in a row that end the probation."
    )
    probation_interval: Seconds = Field(
        _RECOVERY.probation_interval, description="Pause between the scrubs of the probation."
    )

    def checked(self) -> Self:
        """Itself, if its pauses grow; they may come from a file and an override of it."""
        if self.backoff_max < self.backoff_initial:
            refuse(
                f"the longest pause ({self.backoff_max:g} s) is shorter than the first ({self.backoff_initial:g} s); "
                "write a backoff-max of at least backoff-initial",
                "backoff-max",
            )
        return self

    def rule(self) -> RecoveryRule:
        return RecoveryRule(
            backoff_initial=self.backoff_initial,
            backoff_max=self.backoff_max,
            attempts=self.attempts,
            attempts_per_day=self.attempts_per_day,
            resets_per_day=self.resets_per_day,
            probation_scrubs=self.probation_scrubs,
            probation_interval=self.probation_interval,
        )


class BreakerSection(Section):
    """What the service does by itself on one node, at most. It never stops a scrub, and lets no device in."""

    resets: int = Field(
        _BREAKER.resets, ge=0, le=10_000, description="Resets for recoveries on the node within the window."
    )
    window: PositiveSeconds = Field(_BREAKER.window, description="The time within which resets are counted.")
    soft_percent: int = Field(
        _BREAKER.soft_percent,
        ge=0,
        le=100,
        description="Of the node's devices, how many soft conditions may have out at the same time; one at least.",
    )

    @model_validator(mode="after")
    def _within_a_day(self) -> Self:
        if self.window > DAY:
            refuse("resets are remembered for a day; write a window of at most 24h", "window")
        return self

    def rule(self) -> BreakerRule:
        return BreakerRule(resets=self.resets, window=self.window, soft_percent=self.soft_percent)


class MaintenanceSection(Section):
    """When devices that nobody uses are scrubbed anew, one at a time."""

    every: PositiveSecondsOrNever = Field(
        _MAINTENANCE.every,
        description="Time since the last proof, or never.",
        json_schema_extra={"default": "never"},
    )
    between: Window = Field(
        _MAINTENANCE.between,
        description="The time of the day, in UTC, at which it may begin: 02:00-05:00, or always.",
        json_schema_extra={"default": "always"},
    )
    diagnostics: LevelWord = Field(
        _MAINTENANCE.diagnostics, description="How thoroughly devices are tried out then, if that is more."
    )

    def rule(self) -> MaintenanceRule:
        return MaintenanceRule(every=self.every, between=self.between, diagnostics=self.diagnostics)


class StuckSection(Section):
    """Pods whose starts are refused again and again."""

    tell_after: Seconds = Field(
        _STUCK.tell_after, description="An event is written on the pod, by a plugin that has credentials."
    )
    evict_after: SecondsOrNever = Field(
        _STUCK.evict_after, description="The pod is evicted, or never.", json_schema_extra={"default": "never"}
    )

    @model_validator(mode="after")
    def _told_before_evicted(self) -> Self:
        if self.evict_after is not None and self.evict_after < self.tell_after:
            refuse(
                f"a pod cannot be evicted ({self.evict_after:g} s) before its owner is told why ({self.tell_after:g} s); "
                "write an evict-after of at least tell-after",
                "evict-after",
            )
        return self

    def rule(self) -> StuckRule:
        return StuckRule(tell_after=self.tell_after, evict_after=self.evict_after)


class XidSection(Section):
    """What an XID means for the device. A code that is not named here has the class that it has in xid.yaml."""

    ignore: list[Codes] = Field([], description="Nothing happens.")
    application: list[Codes] = Field([], description="The application's own fault; the device is well.")
    reset: list[Codes] = Field([], description="The device is quarantined until a reset.")
    reboot: list[Codes] = Field([], description="The device is quarantined until a reboot of the node.")
    context: list[Codes] = Field([], description="It depends on what else is seen.")
    service: list[Codes] = Field([], description="The device needs a person.")
    unknown: list[Codes] = Field([], description="Treat like a code that nobody listed.")

    @model_validator(mode="after")
    def _one_class_each(self) -> Self:
        seen: dict[int, XidClass] = {}
        for kind, position, code in self._codes():
            if code in seen:
                places = dict.fromkeys((seen[code].value, kind.value))
                refuse(
                    f"XID {code} is listed twice, under {' and '.join(places)}; keep one of them",
                    kind.value,
                    position,
                )
            seen[code] = kind
        return self

    def _codes(self) -> Iterator[tuple[XidClass, int, int]]:
        for kind in XidClass:
            entries: list[tuple[int, ...]] = getattr(self, kind.value)
            for position, codes in enumerate(entries):
                for code in codes:
                    yield kind, position, code

    def classes(self) -> dict[int, XidClass]:
        return {code: kind for kind, _, code in self._codes()}

    def changed_by(self, other: Section) -> Self:
        """Code by code: one that ``other`` names leaves the list that it was in."""
        changed = {**self.classes(), **(other.classes() if isinstance(other, XidSection) else {})}
        lists: dict[str, list[tuple[int, ...]]] = {kind.value: [] for kind in XidClass}
        for code, kind in changed.items():
            lists[kind.value].append((code,))
        return self.model_copy(update=lists)
