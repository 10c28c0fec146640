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
    "Outcome",
    "PathKind",
    "ScrubRecord",
    "ScrubTrigger",
    "Severity",
    "Step",
    "StepResult",
    "Verdict",
]

Evidence = Mapping[str, str | int | float | bool | None]


class PathKind(StrEnum):
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


class ScrubTrigger(StrEnum):
    """Why we look."""

    RESERVATION = "admission"
    CONTAINER_START = "start"
    RELEASE = "release"
    SERVICE_START = "service-start"
    RECOVERY = "recovery"
    ON_DEMAND = "on-demand"
    MAINTENANCE = "schedule"
    CERTIFICATE_VOIDED = "void"
    """What was proved counts no more: the policy or the driver is another one."""


class Severity(StrEnum):
    """What a finding means for the device."""

    NOTE = "note"
    WARNING = "warning"
    BLOCKING = "dirty"
    """The device stays dirty and cannot be handed over now; it is not at fault."""
    FAULT = "fault"
    """The device is quarantined."""


_NOTE, _BLOCKING, _FAULT = Severity.NOTE, Severity.BLOCKING, Severity.FAULT
_HOLDERS, _RESET, _MEMORY, _ON_CHIP = Step.HOLDERS, Step.RESET, Step.MEMORY, Step.ON_CHIP
_DIAGNOSTICS, _SETTINGS = Step.DIAGNOSTICS, Step.SETTINGS


class FindingCode(StrEnum):
    """The code of a :class:`Finding` that a step of a scrub makes by itself.

    Attributes:
        allowed_severities: in which steps and with which severities it is found.
    """

    allowed_severities: tuple[tuple[Step, Severity], ...]

    def __new__(cls, code: str, *places: tuple[Step, Severity]) -> Self:
        member = str.__new__(cls, code)
        member._value_ = code
        member.allowed_severities = places
        return member

    EARLIER_POD_RUNNING = "earlier-pod-lives", (_HOLDERS, _BLOCKING)
    ERASER_UNKILLABLE = "eraser-unkillable", (_HOLDERS, _FAULT)
    UNTRACEABLE_HOLDER = "ghost", (_HOLDERS, _NOTE), (_HOLDERS, _FAULT)
    DEVICE_BUSY = "held", *((step, _BLOCKING) for step in (_HOLDERS, _RESET, _MEMORY, _DIAGNOSTICS))
    HELD_BY_OWN_POD = "held-by-own-pod", (_HOLDERS, _BLOCKING)
    HOLDERS_UNREADABLE = "holders-unreadable", (_HOLDERS, _NOTE)
    INFRASTRUCTURE_HOLDER = "infrastructure", (_HOLDERS, _NOTE)
    LEFTOVERS_KILLED = "leftovers", (_HOLDERS, _NOTE)
    LEFTOVERS_OBSERVED = "leftovers-observed", (_HOLDERS, _BLOCKING)
    LEFTOVERS_UNREADABLE = "leftovers-unreadable", (_HOLDERS, _BLOCKING)
    HOLDERS_OMITTED = "more-holders", (_HOLDERS, _NOTE), (_HOLDERS, _BLOCKING)
    ORPHANED_ERASER_KILLED = "orphaned-eraser", (_HOLDERS, _NOTE)
    LEFTOVER_POD_KILLED = "pod-ended", (_HOLDERS, _NOTE)
    UNAUTHORIZED_PROCESS_KILLED = "stranger-ended", (_HOLDERS, _NOTE)
    UNAUTHORIZED_USE = "ungranted-use", (_HOLDERS, _FAULT)
    UNINSPECTED_PROCESS_KILLED = "uninspected-ended", (_HOLDERS, _NOTE)
    HOLDER_UNKILLABLE = "unkillable", (_HOLDERS, _FAULT)
    UNKNOWN_HOLDER = "unknown-holder", (_HOLDERS, _BLOCKING)
    UNINSPECTED_PROCESSES = "walk-unfinished", (_HOLDERS, _NOTE), (_HOLDERS, _BLOCKING)
    RESET_FAILED = "reset-failed", (_RESET, _FAULT)
    RESET_UNAVAILABLE = "reset-unavailable", (_RESET, _NOTE), (_RESET, _FAULT)
    DIAGNOSTICS_FAILED = "diagnostics-failed", (_DIAGNOSTICS, _FAULT)
    DIAGNOSTICS_SLOW = "diagnostics-slow", (_DIAGNOSTICS, _FAULT)
    ERASE_TIMEOUT = "erase-timeout", (_MEMORY, _FAULT)
    FENCE_BROKEN = "fence-broken", (_MEMORY, _BLOCKING)
    MEMORY_NOT_RELEASED = "memory-not-back", (_MEMORY, _FAULT)
    CLEARING_INCOMPLETE = "not-all-cleared", (_MEMORY, _FAULT)
    RESIDUE = "residue", (_MEMORY, _NOTE)
    SIZE_RESTORED = "size-mended", (_MEMORY, _NOTE)
    VERIFICATION_FAILED = "verification-failed", (_MEMORY, _FAULT)
    ON_CHIP_FAILED = "on-chip-failed", (_ON_CHIP, _FAULT)
    ON_CHIP_RESIDUE = "on-chip-residue", (_ON_CHIP, _NOTE)
    SETTINGS_MISMATCH = "settings-off", (_SETTINGS, _BLOCKING)
    SETTINGS_RESTORED = "settings-restored", (_SETTINGS, _NOTE)
    SETTINGS_NOT_RESTORED = "settings-stay", (_SETTINGS, _FAULT)
    SCRUB_TIMEOUT = "scrub-overdue", *((step, _FAULT) for step in Step)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a step saw.

    Attributes:
        code: a :class:`FindingCode`, the code of an error that the step met, or what the device showed: a
            code of its :class:`~scrubber.domain.health.signal_table.SignalTable`, or an error code. The cause of a quarantine when
            the severity is ``FAULT``.
        message: for the operator; may name processes and pods.
        evidence: numbers and words that support it; residue is counted in here, never stored.
    """

    step: Step
    code: str
    severity: Severity
    message: str
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
    BLOCKED = "held-up"
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
    path: PathKind
    trigger: ScrubTrigger
    started: float
    ended: float | None = None
    outcome: Outcome | None = None
    steps: tuple[StepResult, ...] = ()
    certificate: str | None = None
    actor: str = "service"

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for step in self.steps for finding in step.findings)

    def measurement(self, step: Step, name: str) -> int:
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
    path: PathKind
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
