"""Every code that the engine and the domain can give has a series of its own: none hides under "other".

The codes are read from the sources and from the one table of what goes wrong, so a new one fails here until the metrics
know it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from scrubber.adapters.journal.findings import KNOWN, labels_of
from scrubber.adapters.journal.metrics import Metrics
from scrubber.domain.evidence import Finding, Severity, Step
from scrubber.domain.signals import SIGNALS
from scrubber.ports import Event

ROOT = Path(__file__).parents[2] / "scrubber"
HARMLESS = {"NOTE", "WARNING", "DIRTY"}
"""Severities that take no device out of service."""


def nodes(*packages: str) -> Iterator[ast.AST]:
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from ast.walk(ast.parse(path.read_text()))


def calls(*packages: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call in the packages, by the last word of what is called."""
    for node in nodes(*packages):
        if isinstance(node, ast.Call):
            called = node.func
            yield called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", ""), node


def texts(expression: ast.expr) -> set[str]:
    """The literal words in ``expression``; none for a code that is only passed on, which is some error's own."""
    return {
        node.value for node in ast.walk(expression) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def refusals() -> set[str]:
    """Codes that the engine gives to a refusal: ``NotReady(…, code="scrubbing")``."""
    given = (keyword.value for _, call in calls("engine") for keyword in call.keywords if keyword.arg == "code")
    return set().union(*map(texts, given))


def causes() -> set[str]:
    """Codes of findings that are a fault or may be one, of causes, and those for which the domain knows a way back.

    A soft signal only warns, and yet takes a device out once it has lasted: the whole table counts.
    """
    found: set[str] = set(SIGNALS)
    for name, call in calls("engine", "domain"):
        if name == "Cause":
            found |= texts(call.args[0])
        if name == "Finding" and getattr(call.args[2], "attr", "") not in HARMLESS:
            found |= texts(call.args[1]) - {"xid-"}
    return found


def findings() -> set[tuple[str, str, str]]:
    """Step, severity and code of every finding that the sources write down as one, a step's ``work.dirty`` included."""
    found: set[tuple[str, str, str]] = set()
    for name, call in calls("engine", "domain"):
        if name == "Finding" and isinstance(call.args[0], ast.Attribute):
            step, codes = Step[call.args[0].attr], texts(call.args[1]) - {"xid-"}
            severities = {each.attr for each in ast.walk(call.args[2]) if isinstance(each, ast.Attribute)}
            found |= {(step, Severity[each], code) for each in severities & set(Severity.__members__) for code in codes}
        if name == "dirty" and len(call.args) == 3 and isinstance(call.args[0], ast.Attribute):
            found |= {(Step[call.args[0].attr], Severity.DIRTY, code) for code in texts(call.args[1])}
    return found


def outcome_of(happened: Event, metric: str, label: str) -> str:
    """The label under which ``happened`` is counted."""
    registry = CollectorRegistry()
    Metrics(registry).count(happened)
    samples = (sample for family in registry.collect() for sample in family.samples)
    (counted,) = (sample for sample in samples if sample.name == metric and sample.value)
    return counted.labels[label]


def test_the_sources_are_read() -> None:
    assert {"scrubbing", "starting"} <= refusals()
    assert {"scrub-overdue", "lost", "operator", "driver-stuck", "settings-stay"} <= causes()
    assert {"pcie-width", "nvlink-down", "hw-slowdown", "hw-thermal-slowdown", "power-brake", "too-hot"} <= causes()


@pytest.mark.parametrize("code", sorted(refusals()))
def test_a_refusal_is_counted_under_its_code(code: str) -> None:
    event = Event("handover.refused", 0.0, fields={"code": code, "seconds": 1.0})
    assert outcome_of(event, "scrubber_handovers_total", "outcome") == code


@pytest.mark.parametrize("code", sorted(causes() - {"operator"}))
def test_a_cause_is_counted_under_its_code(code: str) -> None:
    event = Event("health.quarantined", 0.0, "GPU-a", fields={"cause": code})
    assert outcome_of(event, "scrubber_quarantines_total", "cause_class") == code


def test_findings_are_read() -> None:
    assert {
        ("memory", "note", "residue"),
        ("holders", "dirty", "unknown-holder"),
        ("holders", "note", "ghost"),
        ("holders", "fault", "ghost"),
    } <= findings()


@pytest.mark.parametrize("found", sorted(findings()))
def test_a_finding_is_counted_under_its_code(found: tuple[str, str, str]) -> None:
    step, severity, code = found
    assert labels_of(Finding(Step(step), code, Severity(severity), "")) == found


@pytest.mark.parametrize("code", sorted(SIGNALS))
def test_a_signal_is_counted_under_its_code_by_the_step_that_looks_at_health(code: str) -> None:
    assert (Step.HEALTH, SIGNALS[code].severity, code) in KNOWN
