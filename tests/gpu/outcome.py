"""The findings of the check, as values: results, figures, and the report that contains them.

A result is passed, failed, or unavailable with a reason, and nothing else. A part with an error has failed, and does
not affect the others.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from bench.gpu.targets import GpuTargetResult, evaluate_targets

__all__ = ["Figures", "Log", "Report", "Result", "Verdict", "dump", "file_name", "render"]

Figures = Mapping[str, object]
"""Numbers, strings, and lists of them, by names with a unit suffix."""

SCHEMA = 1


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    UNAVAILABLE = "not available here"


@dataclass(frozen=True, slots=True)
class Result:
    """One thing that was tested.

    Attributes:
        name: stable and hierarchical, such as ``attack.global-memory.after``.
        message: what was observed, or why it could not be tested.
    """

    name: str
    verdict: Verdict
    message: str
    figures: Figures = field(default_factory=dict)


class Log:
    """Collects results and prints each at once."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print = print_line
        self._began = time.monotonic()
        self.results: list[Result] = []

    @property
    def seconds(self) -> float:
        """Return the seconds since the check began."""
        return time.monotonic() - self._began

    def passed(self, name: str, message: str, **figures: object) -> None:
        self._add(Result(name, Verdict.PASSED, message, figures))

    def failed(self, name: str, message: str, **figures: object) -> None:
        self._add(Result(name, Verdict.FAILED, message, figures))

    def unavailable(self, name: str, reason: str, **figures: object) -> None:
        self._add(Result(name, Verdict.UNAVAILABLE, reason, figures))

    def judged(self, name: str, good: bool, message: str, **figures: object) -> None:
        """Add a result: passed when ``good``, otherwise failed."""
        self._add(Result(name, Verdict.PASSED if good else Verdict.FAILED, message, figures))

    def figure(self, name: str) -> float | None:
        """Return a measured number: ``<result>:<figure>``; None when it was not measured."""
        result, _, key = name.partition(":")
        for each in self.results:
            value = each.figures.get(key) if each.name == result else None
            if isinstance(value, int | float):
                return float(value)
        return None

    async def part(self, name: str, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Run one part; an error in it becomes a failure of that part."""
        try:
            async with asyncio.timeout(seconds):
                await work()
        except TimeoutError:
            self.failed(name, f"It did not end within {seconds:.0f} s.")
        except Exception as error:  # noqa: BLE001 - the other parts still run, and this one has failed
            where = "".join(traceback.format_exception(error))
            self.failed(name, f"{type(error).__name__}: {error}", traceback=where)

    def _add(self, result: Result) -> None:
        self.results.append(result)
        self._print(f"[{self.seconds:5.1f} s] {_MARKS[result.verdict]} {result.name}: {result.message}")


_MARKS: Mapping[Verdict, str] = {Verdict.PASSED: "pass", Verdict.FAILED: "FAIL", Verdict.UNAVAILABLE: " -- "}


@dataclass(frozen=True, slots=True)
class Report:
    """One run.

    Attributes:
        made: UTC, ISO 8601, to the minute.
        dry: it ran over stand-ins: its figures belong to a test, and are meaningless for any GPU.
        software: versions by name.
    """

    made: str
    seconds: float
    quick: bool
    dry: bool
    model: str
    driver: str
    version: str
    software: Mapping[str, str]
    results: tuple[Result, ...]
    targets: tuple[GpuTargetResult, ...] = ()

    @property
    def failed(self) -> tuple[Result, ...]:
        return tuple(each for each in self.results if each.verdict is Verdict.FAILED)


def finished(log: Log, *, made: str, quick: bool, dry: bool, identity: Mapping[str, str], version: str) -> Report:
    """Return the report of what ``log`` collected. ``identity`` contains ``model``, ``driver`` and other versions."""
    software = {name: value for name, value in identity.items() if name not in ("model", "driver")}
    return Report(
        made=made,
        seconds=round(log.seconds, 1),
        quick=quick,
        dry=dry,
        model=identity.get("model", "unknown"),
        driver=identity.get("driver", "unknown"),
        version=version,
        software=software,
        results=tuple(log.results),
        targets=() if dry else evaluate_targets(log.figure),
    )


def dump(report: Report) -> str:
    """Return the report as JSON, with every raw figure."""
    document = {"schema": SCHEMA, **asdict(report)}
    for written, target in zip(document["targets"], report.targets, strict=True):
        written["met"] = target.met
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def file_name(report: Report) -> str:
    """Return ``gpu-<model>-<driver>.json``; the name of a dry run cannot be mistaken for that of a result."""
    words = f"{report.model}-{report.driver}".removeprefix("NVIDIA ")
    kind = "dry-run" if report.dry else "gpu"
    return f"{kind}-{re.sub(r'[^a-z0-9.]+', '-', words.lower()).strip('-')}.json"


def render(report: Report) -> str:
    """Return the summary in readable form."""
    lines = ["", f"{report.model}, driver {report.driver}, {report.made}, {report.seconds:.0f} s"]
    if report.dry:
        lines.append("DRY RUN over stand-ins: no figure in here says anything about a GPU.")
    counts = {verdict: sum(each.verdict is verdict for each in report.results) for verdict in Verdict}
    lines.append(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    lines += [f"  FAILED {each.name}: {each.message}" for each in report.failed]
    lines += [
        f"  not available here: {each.name}: {each.message}"
        for each in report.results
        if each.verdict is Verdict.UNAVAILABLE
    ]
    if report.targets:
        lines += ["", "Targets"]
        lines += [f"  {each.row}" for each in report.targets]
    return "\n".join(lines) + "\n"
