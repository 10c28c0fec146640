"""The findings of steps, the results of scrubs, and certificates."""

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
    """The steps of a path."""

    HOLDERS = "holders"
    RESET = "reset"
    MEMORY = "memory"
    ON_CHIP = "on-chip"
    DIAGNOSTICS = "diagnostics"
    SETTINGS = "settings"
    HEALTH = "health"


class ScrubTrigger(StrEnum):
    """Why a scrub or a check runs."""

    CONTAINER_START = "start"
    RELEASE = "release"
    SERVICE_START = "service-start"
    RECOVERY = "recovery"
    ON_DEMAND = "on-demand"
    MAINTENANCE = "maintenance"
    CERTIFICATE_VOIDED = "certificate-voided"
    """The certificate is no longer valid: the policy or the driver changed."""


class Severity(StrEnum):
    """What a finding means for the device."""

    NOTE = "note"
    WARNING = "warning"
    BLOCKING = "blocking"
    """The device stays dirty and cannot be handed over now; it is not at fault."""
    FAULT = "fault"
    """The device is quarantined."""


_NOTE, _BLOCKING, _FAULT = Severity.NOTE, Severity.BLOCKING, Severity.FAULT
_HOLDERS, _RESET, _MEMORY, _ON_CHIP = Step.HOLDERS, Step.RESET, Step.MEMORY, Step.ON_CHIP
_DIAGNOSTICS, _SETTINGS = Step.DIAGNOSTICS, Step.SETTINGS


class FindingCode(StrEnum):
    """The code of a :class:`Finding` that originates in a step of a scrub.

    Attributes:
        allowed_severities: the steps that report it, each with a severity.
    """

    allowed_severities: tuple[tuple[Step, Severity], ...]

    def __new__(cls, code: str, *places: tuple[Step, Severity]) -> Self:
        member = str.__new__(cls, code)
        member._value_ = code
        member.allowed_severities = places
        return member

    EARLIER_POD_RUNNING = "earlier-pod-running", (_HOLDERS, _BLOCKING)
    ERASER_UNKILLABLE = "eraser-unkillable", (_HOLDERS, _FAULT)
    UNTRACEABLE_HOLDER = "untraceable-holder", (_HOLDERS, _NOTE), (_HOLDERS, _FAULT)
    DEVICE_BUSY = "device-busy", *((step, _BLOCKING) for step in (_HOLDERS, _RESET, _MEMORY, _DIAGNOSTICS))
    HELD_BY_OWN_POD = "held-by-own-pod", (_HOLDERS, _BLOCKING)
    HOLDERS_UNREADABLE = "holders-unreadable", (_HOLDERS, _NOTE)
    INFRASTRUCTURE_HOLDER = "infrastructure-holder", (_HOLDERS, _NOTE)
    LEFTOVERS_KILLED = "leftovers-killed", (_HOLDERS, _NOTE)
    LEFTOVERS_OBSERVED = "leftovers-observed", (_HOLDERS, _BLOCKING)
    LEFTOVERS_UNREADABLE = "leftovers-unreadable", (_HOLDERS, _BLOCKING)
    HOLDERS_OMITTED = "holders-omitted", (_HOLDERS, _NOTE), (_HOLDERS, _BLOCKING)
    ORPHANED_ERASER_KILLED = "orphaned-eraser-killed", (_HOLDERS, _NOTE)
    LEFTOVER_POD_KILLED = "leftover-pod-killed", (_HOLDERS, _NOTE)
    UNAUTHORIZED_PROCESS_KILLED = "unauthorized-process-killed", (_HOLDERS, _NOTE)
    UNAUTHORIZED_USE = "unauthorized-use", (_HOLDERS, _FAULT)
    UNINSPECTED_PROCESS_KILLED = "uninspected-process-killed", (_HOLDERS, _NOTE)
    HOLDER_UNKILLABLE = "holder-unkillable", (_HOLDERS, _FAULT)
    UNKNOWN_HOLDER = "unknown-holder", (_HOLDERS, _BLOCKING)
    UNINSPECTED_PROCESSES = "uninspected-processes", (_HOLDERS, _NOTE), (_HOLDERS, _BLOCKING)
    RESET_FAILED = "reset-failed", (_RESET, _FAULT)
    RESET_UNAVAILABLE = "reset-unavailable", (_RESET, _NOTE), (_RESET, _FAULT)
    DIAGNOSTICS_FAILED = "diagnostics-failed", (_DIAGNOSTICS, _FAULT)
    DIAGNOSTICS_SLOW = "diagnostics-slow", (_DIAGNOSTICS, _FAULT)
    ERASE_TIMEOUT = "erase-timeout", (_MEMORY, _FAULT)
    FENCE_BROKEN = "fence-broken", (_MEMORY, _BLOCKING)
    MEMORY_NOT_RELEASED = "memory-not-released", (_MEMORY, _FAULT)
    CLEARING_INCOMPLETE = "clearing-incomplete", (_MEMORY, _FAULT)
    RESIDUE = "residue", (_MEMORY, _NOTE)
    SIZE_RESTORED = "size-restored", (_MEMORY, _NOTE)
    VERIFICATION_FAILED = "verification-failed", (_MEMORY, _FAULT)
    ON_CHIP_FAILED = "on-chip-failed", (_ON_CHIP, _FAULT)
    ON_CHIP_RESIDUE = "on-chip-residue", (_ON_CHIP, _NOTE)
    SETTINGS_MISMATCH = "settings-mismatch", (_SETTINGS, _BLOCKING)
    SETTINGS_RESTORED = "settings-restored", (_SETTINGS, _NOTE)
    SETTINGS_NOT_RESTORED = "settings-not-restored", (_SETTINGS, _FAULT)
    SCRUB_TIMEOUT = "scrub-timeout", *((step, _FAULT) for step in Step)


@dataclass(frozen=True, slots=True)
class Finding:
    """An observation of a step.

    Attributes:
        code: a :class:`FindingCode`, the code of an error that the step met, or a code of the device: a code of its
            :class:`~scrubber.domain.health.signal_table.SignalTable`, or an error code. It is the cause of a quarantine
            when the severity is ``FAULT``.
        message: for the operator; may name processes and pods.
        evidence: supporting numbers and words; residue is counted here, never stored.
    """

    step: Step
    code: str
    severity: Severity
    message: str
    evidence: Evidence = field(default_factory=dict)


class Verdict(StrEnum):
    """The result of a step."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_COVERED = "not-covered"


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step of a scrub. ``measured`` has values by unit-suffixed names (``cleared_bytes``)."""

    step: Step
    verdict: Verdict
    seconds: float
    findings: tuple[Finding, ...] = ()
    measured: Evidence = field(default_factory=dict)
    not_covered: tuple[str, ...] = ()


class Outcome(StrEnum):
    """The result of a scrub. Only ``PASSED`` leads to a certificate."""

    PASSED = "passed"
    BLOCKED = "blocked"
    """A process holds the device, or an earlier pod is not over: try again later."""
    FAILED = "failed"
    """The device is at fault."""
    ABANDONED = "abandoned"
    """Stopped by a shutdown, a crash or a deadline before it had a result."""


@dataclass(frozen=True, slots=True)
class ScrubRecord:
    """A scrub, finished or in progress (then ``ended`` and ``outcome`` are None). Times are wall-clock seconds."""

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
        """Return a whole number that ``step`` measured; 0 when it did not run or did not measure it."""
        for result in self.steps:
            if result.step is step:
                value = result.measured.get(name, 0)
                return int(value) if isinstance(value, int | float) else 0
        return 0


@dataclass(frozen=True, slots=True)
class Certificate:
    """The single-use result of a path: what was proved about one device between two grants.

    Attributes:
        sequence: number of this certificate on its device, counting from 1.
        previous_grant: sequence of the last grant before it (0: none yet). The certificate is valid for the next grant
            only.
        next_grant: sequence of the grant that used it; None while unused.
        covered: what was measured, e.g. ``"memory: 268435456 of 268435456 bytes cleared and verified"``.
        not_covered: what was not measured, in the same form. Never empty by omission: it contains each step that did
            not run.
        rests_on: for a fast path, the ID of the slow-path certificate that it rests on.
        issued_at: wall-clock seconds.
        key_id: ID of the node's key that signed it; None until then.
        signature: in base64, over the result of :func:`scrubber.domain.statement.statement`, which excludes
            ``next_grant``.
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
