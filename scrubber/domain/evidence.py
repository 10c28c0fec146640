"""What a step saw, what a scrub proved, and the certificate that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

__all__ = [
    "Certificate",
    "Evidence",
    "Finding",
    "FindingCode",
    "Occasion",
    "Outcome",
    "Path",
    "ScrubRecord",
    "Severity",
    "Step",
    "StepResult",
    "Verdict",
]

Evidence = Mapping[str, str | int | float | bool | None]


class Path(StrEnum):
    """Fast: checks only. Slow: the full scrub."""

    FAST = "fast"
    SLOW = "slow"


class Step(StrEnum):
    """The acts of a path."""

    HOLDERS = "holders"
    RESET = "reset"
    MEMORY = "memory"
    ON_CHIP = "on-chip"
    DIAGNOSTICS = "diagnostics"
    SETTINGS = "settings"
    HEALTH = "health"


class Occasion(StrEnum):
    """Why we look."""

    ADMISSION = "admission"
    START = "start"
    RELEASE = "release"
    SERVICE_START = "service-start"
    RECOVERY = "recovery"
    ON_DEMAND = "on-demand"
    SCHEDULE = "schedule"
    VOID = "void"
    """What was proved counts no more: the policy or the driver is another one."""


class Severity(StrEnum):
    """What a finding means for the device."""

    NOTE = "note"
    WARNING = "warning"
    DIRTY = "dirty"
    """The device stays dirty and cannot be handed over now; it is not at fault."""
    FAULT = "fault"
    """The device is quarantined."""


_NOTE, _DIRTY, _FAULT = Severity.NOTE, Severity.DIRTY, Severity.FAULT
_HOLDERS, _RESET, _MEMORY, _ON_CHIP = Step.HOLDERS, Step.RESET, Step.MEMORY, Step.ON_CHIP
_DIAGNOSTICS, _SETTINGS = Step.DIAGNOSTICS, Step.SETTINGS


class FindingCode(StrEnum):
    """The code of a :class:`Finding` that a step of a scrub makes by itself.

    Attributes:
        places: in which steps and with which severities it is found.
    """

    places: tuple[tuple[Step, Severity], ...]

    def __new__(cls, code: str, *places: tuple[Step, Severity]) -> Self:
        member = str.__new__(cls, code)
        member._value_ = code
        member.places = places
        return member

    EARLIER_POD_LIVES = "earlier-pod-lives", (_HOLDERS, _DIRTY)
    ERASER_UNKILLABLE = "eraser-unkillable", (_HOLDERS, _FAULT)
    GHOST = "ghost", (_HOLDERS, _NOTE), (_HOLDERS, _FAULT)
    HELD = "held", *((step, _DIRTY) for step in (_HOLDERS, _RESET, _MEMORY, _DIAGNOSTICS))
    HELD_BY_OWN_POD = "held-by-own-pod", (_HOLDERS, _DIRTY)
    HOLDERS_UNREADABLE = "holders-unreadable", (_HOLDERS, _NOTE)
    INFRASTRUCTURE = "infrastructure", (_HOLDERS, _NOTE)
    LEFTOVERS = "leftovers", (_HOLDERS, _NOTE)
    LEFTOVERS_OBSERVED = "leftovers-observed", (_HOLDERS, _DIRTY)
    LEFTOVERS_UNREADABLE = "leftovers-unreadable", (_HOLDERS, _DIRTY)
    MORE_HOLDERS = "more-holders", (_HOLDERS, _NOTE), (_HOLDERS, _DIRTY)
    ORPHANED_ERASER = "orphaned-eraser", (_HOLDERS, _NOTE)
    POD_ENDED = "pod-ended", (_HOLDERS, _NOTE)
    STRANGER_ENDED = "stranger-ended", (_HOLDERS, _NOTE)
    UNGRANTED_USE = "ungranted-use", (_HOLDERS, _FAULT)
    UNINSPECTED_ENDED = "uninspected-ended", (_HOLDERS, _NOTE)
    UNKILLABLE = "unkillable", (_HOLDERS, _FAULT)
    UNKNOWN_HOLDER = "unknown-holder", (_HOLDERS, _DIRTY)
    WALK_UNFINISHED = "walk-unfinished", (_HOLDERS, _NOTE), (_HOLDERS, _DIRTY)
    RESET_FAILED = "reset-failed", (_RESET, _FAULT)
    RESET_UNAVAILABLE = "reset-unavailable", (_RESET, _NOTE), (_RESET, _FAULT)
    DIAGNOSTICS_FAILED = "diagnostics-failed", (_DIAGNOSTICS, _FAULT)
    DIAGNOSTICS_SLOW = "diagnostics-slow", (_DIAGNOSTICS, _FAULT)
    ERASE_TIMEOUT = "erase-timeout", (_MEMORY, _FAULT)
    FENCE_BROKEN = "fence-broken", (_MEMORY, _DIRTY)
    MEMORY_NOT_BACK = "memory-not-back", (_MEMORY, _FAULT)
    NOT_ALL_CLEARED = "not-all-cleared", (_MEMORY, _FAULT)
    RESIDUE = "residue", (_MEMORY, _NOTE)
    SIZE_MENDED = "size-mended", (_MEMORY, _NOTE)
    VERIFICATION_FAILED = "verification-failed", (_MEMORY, _FAULT)
    ON_CHIP_FAILED = "on-chip-failed", (_ON_CHIP, _FAULT)
    ON_CHIP_RESIDUE = "on-chip-residue", (_ON_CHIP, _NOTE)
    SETTINGS_OFF = "settings-off", (_SETTINGS, _DIRTY)
    SETTINGS_RESTORED = "settings-restored", (_SETTINGS, _NOTE)
    SETTINGS_STAY = "settings-stay", (_SETTINGS, _FAULT)
    SCRUB_OVERDUE = "scrub-overdue", *((step, _FAULT) for step in Step)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a step saw.

    Attributes:
        code: a :class:`FindingCode`, the code of an error that the step met, or what the device showed: a
            code of its :class:`~scrubber.domain.signal_table.SignalTable`, or an error code. The cause of a quarantine when
            the severity is ``FAULT``.
        sentence: for the operator; may name processes and pods.
        evidence: numbers and words that support it; residue is counted in here, never stored.
    """

    step: Step
    code: str
    severity: Severity
    sentence: str
    evidence: Evidence = field(default_factory=dict)


class Verdict(StrEnum):
    """How a step ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_COVERED = "not-covered"


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step of a scrub. ``measured`` holds what was measured, by unit-suffixed names (``cleared_bytes``)."""

    step: Step
    verdict: Verdict
    seconds: float
    findings: tuple[Finding, ...] = ()
    measured: Evidence = field(default_factory=dict)
    not_covered: tuple[str, ...] = ()


class Outcome(StrEnum):
    """How a scrub ended. Only ``PASSED`` makes a certificate."""

    PASSED = "passed"
    HELD_UP = "held-up"
    """Somebody has the device, or an earlier pod is not over: try again later."""
    FAILED = "failed"
    """The device is at fault."""
    ABANDONED = "abandoned"
    """Stopped by a shutdown, a crash or a deadline before it could say anything."""


@dataclass(frozen=True, slots=True)
class ScrubRecord:
    """A scrub, finished or under way (``ended`` and ``outcome`` are None then). Times are wall-clock seconds."""

    id: str
    device: str
    path: Path
    occasion: Occasion
    started: float
    ended: float | None = None
    outcome: Outcome | None = None
    steps: tuple[StepResult, ...] = ()
    certificate: str | None = None
    actor: str = "service"

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for step in self.steps for finding in step.findings)

    def measured(self, step: Step, name: str) -> int:
        """A whole number that ``step`` measured; 0 when it did not run or did not measure it."""
        for result in self.steps:
            if result.step is step:
                value = result.measured.get(name, 0)
                return int(value) if isinstance(value, int | float) else 0
        return 0


@dataclass(frozen=True, slots=True)
class Certificate:
    """The single-use result of a path: what was proved about one device, between two grants.

    Attributes:
        sequence: number of this certificate on its device, counting from 1.
        previous_grant: sequence of the last grant before it (0: none yet). It is good for the next grant only.
        next_grant: sequence of the grant that used it up; None while unused.
        covered: what was measured, e.g. ``"memory: 268435456 of 268435456 bytes cleared and verified"``.
        not_covered: what was not, in the same manner. Never empty by omission: a step that did not run is in here.
        rests_on: for a fast path, the id of the slow-path certificate under it.
        issued_at: wall-clock seconds.
        key_id: of the node's key that signed it; None until then.
        signature: in base64, over what :func:`scrubber.domain.statement.statement` says, so not over ``next_grant``.
    """

    id: str
    node: str
    boot: str
    driver: str
    device: str
    sequence: int
    previous_grant: int
    path: Path
    scrub: str
    covered: tuple[str, ...]
    not_covered: tuple[str, ...]
    policy: str
    policy_digest: str
    issued_at: float
    next_grant: int | None = None
    rests_on: str | None = None
    key_id: str | None = None
    signature: str | None = None
