"""Whether a device works: compares the measurements of a diagnostic with the policy's minimum rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase

from scrubber.domain.evidence import Evidence, Finding, FindingCode, Severity, Step

__all__ = ["CHECK_NAMES", "DiagnosticCheck", "DiagnosticLevel", "diagnostic_findings", "min_rates_of"]


CHECK_NAMES = ("memory-pattern", "matrix-product", "host-to-device", "device-to-host")
"""Names of the checks that a diagnostic can run."""


class DiagnosticLevel(StrEnum):
    """How long a diagnostic may take: nothing, 1 s, 10 s, 60 s."""

    NONE = "none"
    QUICK = "quick"
    STANDARD = "standard"
    EXTENDED = "extended"

    @property
    def seconds(self) -> float:
        return {"none": 0.0, "quick": 1.0, "standard": 10.0, "extended": 60.0}[self.value]


@dataclass(frozen=True, slots=True)
class DiagnosticCheck:
    """The result of one check of a diagnostic.

    Attributes:
        name: one of :data:`CHECK_NAMES`.
        errors: number of wrong results.
        measured: values by names with a unit suffix: ``bytes``, ``bytes_per_second``, ``operations_per_second``,
            ``seconds``.
    """

    name: str
    errors: int
    measured: Mapping[str, float] = field(default_factory=dict)


def min_rates_of(model: str, floors: Mapping[str, Mapping[str, float]]) -> Mapping[str, float]:
    """Return the minimum rates by check for a device of ``model``: those of the first pattern that matches."""
    return next((rates for pattern, rates in floors.items() if fnmatchcase(model, pattern)), {})


def diagnostic_findings(
    checks: Iterable[DiagnosticCheck], model: str, floors: Mapping[str, Mapping[str, float]]
) -> tuple[Finding, ...]:
    """Return the findings of ``checks`` for a device of ``model``.

    Args:
        floors: minimum rates by check, for each pattern of model names (``*H200*``): ``matrix-product`` in operations
            per second, the others in bytes per second. The first matching pattern applies.
    """
    least = min_rates_of(model, floors)
    found: list[Finding] = []
    for check in checks:
        if check.errors:
            message = f"{check.name}: {check.errors} wrong results."
            evidence: Evidence = {"check": check.name, "errors": check.errors}
            found.append(Finding(Step.DIAGNOSTICS, FindingCode.DIAGNOSTICS_FAILED, Severity.FAULT, message, evidence))
        floor = least.get(check.name)
        rate = check.measured.get("operations_per_second", check.measured.get("bytes_per_second"))
        if floor is not None and (rate is None or not rate >= floor):
            rate_text = "no rate was measured" if rate is None else f"{rate:.3g} per second"
            message = f"{check.name}: {rate_text}; the policy's minimum for {model} is {floor:.3g}."
            evidence = {"check": check.name, "rate": rate, "floor": floor}
            found.append(Finding(Step.DIAGNOSTICS, FindingCode.DIAGNOSTICS_SLOW, Severity.FAULT, message, evidence))
    return tuple(found)
