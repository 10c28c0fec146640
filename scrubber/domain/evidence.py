"""The findings of steps, the results of scrubs, and certificates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

__all__ = [
    "Attestation",
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
        description: what the step found or did, in one sentence for operators, in Markdown.
        allowed_severities: the steps that report it, each with a severity.
    """

    description: str
    allowed_severities: tuple[tuple[Step, Severity], ...]

    def __new__(cls, code: str, description: str, *places: tuple[Step, Severity]) -> Self:
        member = str.__new__(cls, code)
        member._value_ = code
        member.description = description
        member.allowed_severities = places
        return member

    EARLIER_POD_RUNNING = (
        "earlier-pod-running",
        "A pod that had the device is not over: its processes run, or it may still be starting or hold the device.",
        (_HOLDERS, _BLOCKING),
    )
    ERASER_UNKILLABLE = (
        "eraser-unkillable",
        "The eraser of an earlier scrub still holds the device and cannot be killed.",
        (_HOLDERS, _FAULT),
    )
    UNTRACEABLE_HOLDER = (
        "untraceable-holder",
        "The device is held, but no process that holds it can be found; only a note if this scrub resets the device.",
        (_HOLDERS, _NOTE),
        (_HOLDERS, _FAULT),
    )
    DEVICE_BUSY = (
        "device-busy",
        "A process holds the device, or a device that is reset with it is in use; the scrub is repeated.",
        *((step, _BLOCKING) for step in (_HOLDERS, _RESET, _MEMORY, _DIAGNOSTICS)),
    )
    HELD_BY_OWN_POD = (
        "held-by-own-pod",
        "Another container of the starting pod holds the device.",
        (_HOLDERS, _BLOCKING),
    )
    HOLDERS_UNREADABLE = (
        "holders-unreadable",
        "The device does not answer which processes hold it; the scrub continues, because it resets the device.",
        (_HOLDERS, _NOTE),
    )
    HOLDER_ENDED = (
        "holder-ended",
        "A process that never had the device held it when the scrub looked first, and not when it looked again.",
        (_HOLDERS, _NOTE),
    )
    INFRASTRUCTURE_HOLDER = (
        "infrastructure-holder",
        "A process of the node's infrastructure has the device open, which the policy allows.",
        (_HOLDERS, _NOTE),
    )
    VALIDATION_HOLDER = (
        "validation-holder",
        "A program of the node's infrastructure uses the device; the scrub is repeated until it has ended.",
        (_HOLDERS, _BLOCKING),
    )
    LEFTOVERS_KILLED = (
        "leftovers-killed",
        "Processes of a pod that was over still ran, and were killed.",
        (_HOLDERS, _NOTE),
    )
    LEFTOVERS_OBSERVED = (
        "leftovers-observed",
        "Leftover processes would have been killed if the policy did not only observe.",
        (_HOLDERS, _BLOCKING),
    )
    LEFTOVERS_UNREADABLE = (
        "leftovers-unreadable",
        "The leftover processes of a pod could not be identified with certainty, so they could not be killed.",
        (_HOLDERS, _BLOCKING),
    )
    HOLDERS_OMITTED = (
        "holders-omitted",
        "More processes hold the device than a scrub names; only a note if all of them belong to the infrastructure.",
        (_HOLDERS, _NOTE),
        (_HOLDERS, _BLOCKING),
    )
    ORPHANED_ERASER_KILLED = (
        "orphaned-eraser-killed",
        "The eraser of an earlier run of the service still held the device, and has ended.",
        (_HOLDERS, _NOTE),
    )
    LEFTOVER_POD_KILLED = (
        "leftover-pod-killed",
        "All that was left of a pod was killed together, because its processes could not be read one by one.",
        (_HOLDERS, _NOTE),
    )
    UNAUTHORIZED_PROCESS_KILLED = (
        "unauthorized-process-killed",
        "A process held the device without a grant, and was killed, as the policy requires.",
        (_HOLDERS, _NOTE),
    )
    UNAUTHORIZED_USE = (
        "unauthorized-use",
        "A process used the device without a grant, and the policy has `unauthorizedUse: quarantine`.",
        (_HOLDERS, _FAULT),
    )
    UNINSPECTED_PROCESS_KILLED = (
        "uninspected-process-killed",
        "A process that several walks could not inspect completely was killed, as the policy requires.",
        (_HOLDERS, _NOTE),
    )
    HOLDER_UNKILLABLE = (
        "holder-unkillable",
        "A process that holds the device, or that an earlier pod left behind, cannot be killed.",
        (_HOLDERS, _FAULT),
    )
    UNKNOWN_HOLDER = "unknown-holder", "A process holds the device without a grant.", (_HOLDERS, _BLOCKING)
    UNINSPECTED_PROCESSES = (
        "uninspected-processes",
        "Several walks could not inspect these processes completely; only a note if their pods never had the device.",
        (_HOLDERS, _NOTE),
        (_HOLDERS, _BLOCKING),
    )
    AGENTS_PAUSED = (
        "agents-paused",
        "Agents that had the device open were paused for its reset.",
        (_RESET, _NOTE),
    )
    AGENT_PAUSE_FAILED = (
        "agent-pause-failed",
        "Agents that hold the device were to be paused for its reset, and did not release it; the scrub is repeated.",
        (_RESET, _BLOCKING),
    )
    RESET_LEFT_TO_OTHERS = (
        "reset-left-to-others",
        "Another service of the cluster is asked to reset the device, which agents hold; the scrub is repeated after it.",
        (_RESET, _BLOCKING),
    )
    RESET_FAILED = "reset-failed", "A reset was attempted and failed.", (_RESET, _FAULT)
    RESET_UNAVAILABLE = (
        "reset-unavailable",
        "The device cannot be reset on this platform; only a note if the policy does not require a reset.",
        (_RESET, _NOTE),
        (_RESET, _FAULT),
    )
    DIAGNOSTICS_FAILED = (
        "diagnostics-failed",
        "A diagnostic test had wrong results, or did not finish.",
        (_DIAGNOSTICS, _FAULT),
    )
    DIAGNOSTICS_SLOW = (
        "diagnostics-slow",
        "A diagnostic test measured less than the policy's minimum rate, or no rate.",
        (_DIAGNOSTICS, _FAULT),
    )
    ERASE_TIMEOUT = "erase-timeout", "The memory was not cleared in time.", (_MEMORY, _FAULT)
    FENCE_BROKEN = (
        "fence-broken",
        "While the memory was cleared, a process tried to open the device or removed its fence; the scrub is repeated.",
        (_MEMORY, _BLOCKING),
    )
    MEMORY_NOT_RELEASED = (
        "memory-not-released",
        "Memory stayed in use after it was cleared, although no process has the device any more.",
        (_MEMORY, _FAULT),
    )
    CLAIM_NOT_ACCEPTED = (
        "claim-not-accepted",
        "Only a command claims that the memory is cleared, and the policy does not accept that (`memory.acceptClaims`).",
        (_MEMORY, _BLOCKING),
    )
    CLEARING_INCOMPLETE = (
        "clearing-incomplete",
        "More of the memory could not be cleared and verified than the policy permits.",
        (_MEMORY, _FAULT),
    )
    RESIDUE = "residue", "Data of earlier tenants was found in the memory, and cleared.", (_MEMORY, _NOTE)
    SIZE_RESTORED = "size-restored", "A tenant had changed the device's size; it was restored.", (_MEMORY, _NOTE)
    VERIFICATION_FAILED = (
        "verification-failed",
        "Memory did not read back as it was written.",
        (_MEMORY, _FAULT),
    )
    ON_CHIP_FAILED = (
        "on-chip-failed",
        "On-chip memory did not read back as zeros, or some processors were not reached.",
        (_ON_CHIP, _FAULT),
    )
    ON_CHIP_RESIDUE = (
        "on-chip-residue",
        "Data of earlier tenants was found in on-chip memory, and cleared.",
        (_ON_CHIP, _NOTE),
    )
    SETTINGS_MISMATCH = (
        "settings-mismatch",
        "A setting does not have its expected value; a check changes nothing, so a scrub follows.",
        (_SETTINGS, _BLOCKING),
    )
    SETTINGS_RESTORED = (
        "settings-restored",
        "A setting did not have its expected value, and was restored.",
        (_SETTINGS, _NOTE),
    )
    SETTINGS_NOT_RESTORED = "settings-not-restored", "A setting could not be restored.", (_SETTINGS, _FAULT)
    SCRUB_TIMEOUT = (
        "scrub-timeout",
        "The scrub did not finish this step in time.",
        *((step, _FAULT) for step in Step),
    )


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
class Attestation:
    """A device's attestation report, of which only the digest is kept.

    Attributes:
        digest: SHA-256 of the report, in hexadecimal.
        nonce: the nonce that the report was requested with, in hexadecimal; see
            :func:`scrubber.domain.attestation.attestation_nonce`.
    """

    digest: str
    nonce: str


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
        attestation: the attestation of a device in a confidential-computing mode, made at the end of the slow path;
            None on a fast path and for all other devices.
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
    attestation: Attestation | None = None
    key_id: str | None = None
    signature: str | None = None
