"""The results as a file for programs and as a table for people.

Invariant: both contain the same. ``RESULTS.md`` is rendered only from ``results/latest.json``, and neither contains the
name of the machine, its owner or a path on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, with_config

from bench.figures import Amount, TargetResult, Timing
from bench.machine import Machine

__all__ = ["COMPARISON", "SCHEMA", "Report", "dump", "load", "render", "table"]

SCHEMA = 1
COMPARISON = ("p50", "p99", "reference", "reference p50", "reference p99", "p50 ratio", "p99 ratio", "samples")
"""Columns of durations that were measured alternately with a reference."""
_SIGNIFICANT = 4


@with_config(ConfigDict(extra="forbid", strict=True))
@dataclass(frozen=True, slots=True)
class Report:
    """One run.

    Attributes:
        made: UTC, ISO 8601, to the minute.
        seconds: duration of the run.
        containers: how processes were assigned to pods: ``cgroup v2`` or ``marker``.
    """

    schema: int
    version: str
    made: str
    quick: bool
    seconds: float
    containers: str
    machine: Machine
    timings: tuple[Timing, ...]
    amounts: tuple[Amount, ...]
    targets: tuple[TargetResult, ...]


def dump(report: Report) -> str:
    """Return JSON with times in seconds. It includes derived values (ratios, ``met``) for its readers."""
    document = _rounded(asdict(report))
    for written, timing in zip(document["timings"], report.timings, strict=True):
        written |= _rounded({"ratio_p50": timing.ratio_p50, "ratio_p99": timing.ratio_p99})
    for written, target in zip(document["targets"], report.targets, strict=True):
        written["met"] = target.met
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def load(text: str) -> Report:
    """Parse the output of :func:`dump`.

    Raises:
        ValueError: it is not JSON, of another schema, or something is missing, unknown or of the wrong type.
    """
    document = json.loads(text)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"these results do not have schema {SCHEMA}; run make bench again")
    for each in document.get("timings", ()):
        del each["ratio_p50"], each["ratio_p99"]
    for each in document.get("targets", ()):
        del each["met"]
    return TypeAdapter(Report).validate_json(json.dumps(document))


def _rounded(value: Any) -> Any:
    """Round to four significant digits: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.{_SIGNIFICANT}g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value


def render(report: Report) -> str:
    """Return the content of ``RESULTS.md``."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    machine = report.machine
    yield "# Results of `make bench`"
    yield ""
    yield "Written by `make bench`, which overwrites this file. [README.md](README.md) explains each figure."
    yield ""
    yield from table(
        ("", ""),
        (
            ("machine", f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB, {machine.kernel}"),
            ("software", f"scrubber {report.version}, {machine.python}, grpcio {machine.grpc}"),
            ("containers distinguished by", report.containers),
            ("load before the first measurement", f"{machine.load:g}"),
            ("run", f"{report.made}, {report.seconds:.0f} s{', quick: too few samples for a verdict' * report.quick}"),
        ),
    )
    yield ""
    yield "## Targets"
    yield ""
    yield from table(
        ("target", "limit", "measured", ""),
        [
            (each.sentence, _with_unit(each.limit, each.unit), _with_unit(each.measured, each.unit), _verdict(each))
            for each in report.targets
        ],
    )
    yield ""
    yield "Other load on the machine raises both p99s, so their ratio approaches 1: compare it with the ratio of the medians."
    missed = [each for each in report.targets if not each.met]
    if missed:
        yield ""
        yield "Causes of missed targets:"
        yield ""
        yield from (f"- {each.sentence}: {each.cause}" for each in missed)
    yield ""
    yield "## Times"
    yield ""
    yield "In milliseconds. Samples and reference were measured alternately."
    yield ""
    yield from table(
        (
            "measurement",
            *COMPARISON,
        ),
        [_timing(each) for each in report.timings],
    )
    yield ""
    yield "## Amounts"
    yield ""
    yield from table(
        ("measurement", "value"), [(each.title, _with_unit(each.value, each.unit)) for each in report.amounts]
    )
    yield ""


def _timing(timing: Timing) -> tuple[str, ...]:
    reference = timing.reference
    return (
        timing.title,
        _ms(timing.measured.p50),
        _ms(timing.measured.p99),
        timing.reference_name,
        "" if reference is None else _ms(reference.p50),
        "" if reference is None else _ms(reference.p99),
        _ratio(timing.ratio_p50),
        _ratio(timing.ratio_p99),
        str(timing.measured.samples),
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(header)} |"
    yield f"|{' --- |' * len(header)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _verdict(target: TargetResult) -> str:
    return "met" if target.met else "**missed**"


def _with_unit(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds < 1 else f"{1000 * seconds:.0f}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.1f}"
