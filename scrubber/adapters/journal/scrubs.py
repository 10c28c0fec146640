"""Scrubs: how they ended, what their steps took and found, and what they cleared.

How a scrub ended is counted by its event, as the audit trail has it. What its steps did is taken from its record; the checks
of a hand-over's fast path are steps as well, of a record that has no such event.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Histogram

from scrubber.adapters.journal import findings
from scrubber.adapters.journal.labels import BUCKETS, OTHER, exemplar, field, measured, one_of
from scrubber.adapters.journal.page import Page
from scrubber.domain.codes import ErrorCode
from scrubber.domain.evidence import (
    FindingCode,
    Occasion,
    Outcome,
    Path,
    ScrubRecord,
    Severity,
    Step,
    StepResult,
    Verdict,
)
from scrubber.ports.journal import Event

__all__ = ["Scrubs"]

_PATHS = frozenset(Path)
_OCCASIONS = frozenset(Occasion)
_OUTCOMES = frozenset(Outcome)

_ACTS: Final = {
    "leftover.ended": "process",
    "leftover.pod-ended": "pod",
    "stranger.ended": "stranger",
    "eraser.orphan": "eraser",
}
"""Event → what was ended."""

_METHODS: Final = {"the simulated": "sim", "nvidia-smi": "nvidia-smi"}
"""By how the words of a plan begin."""
_RESETS: frozenset[str] = frozenset(
    {
        "ok",
        FindingCode.RESET_FAILED,
        FindingCode.RESET_UNAVAILABLE,
        FindingCode.HELD,
        FindingCode.SCRUB_OVERDUE,
        ErrorCode.AWAY,
    }
)


class Scrubs:
    """The metrics of scrubs."""

    def __init__(self, page: Page) -> None:
        counted = page.counted
        labels = ("path", "occasion", "outcome")
        self._scrubs = Counter("scrubber_scrubs", "Scrubs that ended.", labels, registry=counted)
        self._duration = Histogram(
            "scrubber_scrub_duration_seconds", "How long scrubs took.", labels, buckets=BUCKETS, registry=counted
        )
        self._steps = Histogram(
            "scrubber_step_duration_seconds",
            "How long steps of scrubs took, those of a hand-over's fast path among them.",
            ("step", "path", "verdict"),
            buckets=BUCKETS,
            registry=counted,
        )
        self._findings = Counter(
            "scrubber_findings",
            "What steps of scrubs found, by code; all XIDs are one code.",
            ("step", "severity", "code"),
            registry=counted,
        )
        self._cleared = Counter("scrubber_cleared_bytes", "Bytes of memory that scrubs cleared.", registry=counted)
        self._verified = Counter(
            "scrubber_verified_bytes", "Bytes of memory that scrubs read back and found clear.", registry=counted
        )
        self._residue = Counter(
            "scrubber_residue_bytes",
            "Bytes of earlier tenants that audits found and scrubs cleared.",
            registry=counted,
        )
        self._unexplained = Counter(
            "scrubber_unexplained_residue_bytes",
            "Residue on devices that were proved clean and that nobody was granted since.",
            registry=counted,
        )
        self._leftovers = Counter(
            "scrubber_leftovers_ended",
            "What outlived its pod, its scrub or its right and was ended: processes, whole pods, strangers, erasers.",
            ("act",),
            registry=counted,
        )
        self._resets = Counter(
            "scrubber_resets", "Resets that were part of a scrub.", ("method", "outcome"), registry=counted
        )
        for path in Path:
            for occasion in Occasion:
                for outcome in Outcome:
                    self._scrubs.labels(path.value, occasion.value, outcome.value)
        for known in sorted(findings.KNOWN):
            self._findings.labels(*map(str, known))
        for act in _ACTS.values():
            self._leftovers.labels(act)
        for method in (*_METHODS.values(), OTHER):
            for came_of_it in sorted(_RESETS | {OTHER}):
                self._resets.labels(method, came_of_it)

    def finished(self, event: Event) -> None:
        labels = (
            one_of(_PATHS, event.fields.get("path")),
            one_of(_OCCASIONS, event.fields.get("occasion")),
            one_of(_OUTCOMES, event.fields.get("outcome")),
        )
        self._scrubs.labels(*labels).inc()
        self._residue.inc(field(event, "residue_bytes") or 0.0)
        self._duration.labels(*labels).observe(field(event, "seconds") or 0.0, exemplar(event.scrub))

    def ended(self, event: Event) -> None:
        """Somebody was ended. An eraser's orphan that could not be is no act."""
        if event.fields.get("ended", True) is not False:
            self._leftovers.labels(_ACTS[event.name]).inc()

    def unexplained(self, event: Event) -> None:
        self._unexplained.inc(field(event, "residue_bytes") or 0.0)

    def scrubbed(self, record: ScrubRecord) -> None:
        named = exemplar(record.id)
        for step in record.steps:
            seconds = measured(step.seconds) or 0.0
            self._steps.labels(step.step.value, record.path.value, step.verdict.value).observe(seconds, named)
            for finding in step.findings:
                self._findings.labels(*map(str, findings.labels_of(finding))).inc()
            if step.step is Step.RESET:
                self._reset(step)
            if step.step is Step.MEMORY:
                self._cleared.inc(measured(step.measured.get("cleared_bytes")) or 0.0)
                self._verified.inc(measured(step.measured.get("verified_bytes")) or 0.0)

    def _reset(self, step: StepResult) -> None:
        words = str(step.measured.get("method"))
        method = next((label for begin, label in _METHODS.items() if words.startswith(begin)), OTHER)
        outcome = "ok"
        if step.verdict is not Verdict.PASSED:
            severe = sorted(step.findings, key=lambda finding: finding.severity is Severity.NOTE)
            outcome = one_of(_RESETS, severe[0].code if severe else None)
        self._resets.labels(method, outcome).inc()
