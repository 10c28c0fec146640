"""What a step saw, what a scrub proved, and the certificate that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "Certificate",
    "Evidence",
    "Finding",
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


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a step saw.

    Attributes:
        code: stable word, also the cause of a quarantine when the severity is ``FAULT``.
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
