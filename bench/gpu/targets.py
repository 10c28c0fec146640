"""Targets for a scrub on a GPU, compared with the measurements, in one table.

The targets are those of the H200; on another model a missed one is only information. What was not measured is reported
as unmeasured, and is neither met nor missed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["TARGETS", "GpuTarget", "GpuTargetResult", "evaluate_targets"]


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """A target for one figure.

    Attributes:
        figure: ``<result>:<figure>`` as the check names it.
        least, most: the bounds; None for none.
        unit: ``share`` is printed as a percentage.
    """

    sentence: str
    figure: str
    unit: str
    least: float | None = None
    most: float | None = None

    def met(self, measured: float) -> bool:
        return (self.least is None or measured >= self.least) and (self.most is None or measured <= self.most)


TARGETS = (
    GpuTarget("audit pass against the run's read limit", "bench.passes:audit_share", "share", least=0.90),
    GpuTarget("clear pass against the run's write limit", "bench.passes:clear_share", "share", least=0.90),
    GpuTarget("verify pass against the run's read limit", "bench.passes:verify_share", "share", least=0.90),
    GpuTarget("cleared and verified of total - reserved", "coverage:share", "share", least=0.995),
    GpuTarget("request to certificate: audit, clear, verify, on-chip", "bench.slow-path:seconds", "s", most=1.0),
    GpuTarget("secret found in global memory after the scrub", "attack.global-memory.after:found_bytes", "B", most=0),
    GpuTarget("secret found in shared memory after the scrub", "attack.shared-memory.after:found_bytes", "B", most=0),
    GpuTarget("secret found in registers after the scrub", "attack.registers.after:found_bytes", "B", most=0),
    GpuTarget("secret found in a MIG instance after the scrub", "attack.mig-instance.after:found_bytes", "B", most=0),
)


@dataclass(frozen=True, slots=True)
class GpuTargetResult:
    """A target and its figure; ``measured`` is None when it was not measured."""

    target: GpuTarget
    measured: float | None

    @property
    def met(self) -> bool | None:
        return None if self.measured is None else self.target.met(self.measured)

    @property
    def row(self) -> str:
        bound = "at least" if self.target.least is not None else "at most"
        limit = self.target.least if self.target.least is not None else self.target.most
        verdict = {None: "unmeasured", True: "met", False: "MISSED"}[self.met]
        return (
            f"{verdict:<10} {self.target.sentence}: {_formatted(self.measured, self.target.unit)} "
            f"({bound} {_formatted(limit, self.target.unit)})"
        )


def evaluate_targets(figure: Callable[[str], float | None]) -> tuple[GpuTargetResult, ...]:
    """Return every target with the value that ``figure`` returns for it."""
    return tuple(GpuTargetResult(target, figure(target.figure)) for target in TARGETS)


def _formatted(value: float | None, unit: str) -> str:
    if value is None:
        return "not measured"
    return f"{100 * value:.2f} %" if unit == "share" else f"{value:,.4g} {unit}"
