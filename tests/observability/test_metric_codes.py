"""Every declared code has its own series: none is counted as "other". The sources use codes by their declaration."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.codes import NON_ENGINE_CODES, ErrorCode
from scrubber.domain.evidence import Finding, FindingCode, Severity, Step
from scrubber.observability.metrics.labels import KnownCodes
from scrubber.observability.metrics.recorder import MetricsRecorder
from scrubber.ports.record import Event

SOURCES = sorted(
    path for package in ("scrubber", "plugin") for path in (Path(__file__).parents[2] / package).rglob("*.py")
)
PLACES = [(code, step, severity) for code in FindingCode for step, severity in code.allowed_severities]


@cache
def calls() -> tuple[tuple[str, str, ast.Call], ...]:
    """Return every call in the sources: the file, the last name of the called function, and the call."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = node.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                found.append((path.name, name, node))
    return tuple(found)


def codes() -> Iterator[tuple[str, ast.expr]]:
    """Yield every expression used as the code of an error or a finding, with its file."""
    for file, name, call in calls():
        if name == "Finding" and len(call.args) > 1:
            yield file, call.args[1]
        if name == "blocking_finding" and len(call.args) == 3:
            yield file, call.args[1]
        yield from ((file, each.value) for each in call.keywords if each.arg == "code" and name[:1].isupper())


def written_findings() -> set[tuple[str, str, str]]:
    """Return code, step and severity of findings that are constructed literally, by the names of their members."""
    found = set()
    for _, name, call in calls():
        if name in ("Finding", "blocking_finding") and len(call.args) > 2 and isinstance(call.args[0], ast.Attribute):
            severities = ["BLOCKING"] if name == "blocking_finding" else members(call.args[2], "Severity")
            found |= {
                (code, call.args[0].attr, each) for code in members(call.args[1], "FindingCode") for each in severities
            }
    return found


def members(expression: ast.expr, enum: str) -> list[str]:
    return [
        node.attr
        for node in ast.walk(expression)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == enum
    ]


def outcome_of(happened: Event, metric: str, label: str) -> str:
    """Return the label under which ``happened`` is counted."""
    registry = CollectorRegistry()
    MetricsRecorder(registry, NVIDIA_SIGNALS).count(happened)
    samples = (sample for family in registry.collect() for sample in family.samples)
    (counted,) = (sample for sample in samples if sample.name == metric and sample.value)
    return counted.labels[label]


def test_error_and_finding_codes_are_passed_as_declared_constants() -> None:
    found = list(codes())
    assert len(found) > 60, "the sources are read"
    literals = [(file, each.value) for file, each in found if isinstance(each, ast.Constant)]
    assert [each for each in literals if isinstance(each[1], str)] == [], "an HTTP status is a number"


def test_findings_are_created_only_in_their_declared_steps() -> None:
    declared = {(code.name, step.name, severity.name) for code, step, severity in PLACES}
    assert written_findings() - declared == set()
    assert len(written_findings()) > 40, "the sources are read"


@pytest.mark.parametrize("code", sorted(set(ErrorCode) - NON_ENGINE_CODES))
def test_refusal_is_counted_under_its_own_code(code: ErrorCode) -> None:
    event = Event("handover.refused", 0.0, fields={"code": code, "seconds": 1.0})
    assert outcome_of(event, "scrubber_handovers_total", "outcome") == code


@pytest.mark.parametrize(
    "code",
    sorted({*NVIDIA_SIGNALS.classifications, *(code for code, _, severity in PLACES if severity is Severity.FAULT)}),
)
def test_quarantine_cause_is_counted_under_its_own_code(code: str) -> None:
    event = Event("health.quarantined", 0.0, "GPU-a", fields={"cause": code})
    assert outcome_of(event, "scrubber_quarantines_total", "cause_class") == code


@pytest.mark.parametrize(("code", "step", "severity"), PLACES)
def test_finding_is_counted_under_its_own_code(code: FindingCode, step: Step, severity: Severity) -> None:
    assert KnownCodes(NVIDIA_SIGNALS).finding_labels(Finding(step, code, severity, "")) == (step, severity, code)


@pytest.mark.parametrize("code", sorted(NVIDIA_SIGNALS.classifications))
def test_health_signal_is_counted_under_its_own_code(code: str) -> None:
    assert (Step.HEALTH, NVIDIA_SIGNALS.classifications[code].severity, code) in KnownCodes(NVIDIA_SIGNALS).findings
