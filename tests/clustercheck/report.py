"""What the check has found: the table for people, and the JSON document that can be archived as evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["API_VERSION", "ExitCode", "HandOver", "Report", "Result", "ScenarioReport", "print_table"]

API_VERSION = "clustercheck.scrubber.dev/v1"
LIMITS = (
    "memory that one process cannot allocate: the driver's reserve and the searching process's own context",
    "on-chip memory: registers, shared memory and caches",
    "remains that were changed, or moved by a number of bytes that is not a multiple of 8 on GPUs",
)
"""What a search does not cover in any scenario."""


class Result(StrEnum):
    """The result of one scenario."""

    CLEAN = "clean"
    """The next tenant had the same device, and found nothing."""
    FOUND = "found"
    NOT_COVERED = "not-covered"
    """The scenario proves nothing here, whatever was found."""
    INCOMPLETE = "incomplete"
    """Something went wrong before the search was completed."""


class ExitCode:
    """Exit codes of the command."""

    CLEAN = 0
    FOUND = 1
    CANNOT_START = 2
    INCOMPLETE = 3


@dataclass(frozen=True, slots=True)
class HandOver:
    """What a user of the cluster can see of the hand-over to the next pod."""

    certificates: Sequence[Mapping[str, Any]] = ()
    """From the status of the pod's claims."""
    events: Sequence[Mapping[str, Any]] = ()
    """Warnings about the pod and its claims: reason, message and count."""

    def to_json(self) -> dict[str, Any]:
        return {"certificates": [dict(each) for each in self.certificates], "events": [dict(e) for e in self.events]}

    def __str__(self) -> str:
        parts = [f"certificate {str(each.get('digest', each.get('id', '')))[:19]}" for each in self.certificates]
        parts += [f"{each['reason']} x{each['count']}" for each in self.events]
        return ", ".join(parts) or "nothing visible"


@dataclass(slots=True)
class ScenarioReport:
    """One scenario. Sizes are in bytes, over all devices of the scenario.

    Attributes:
        attempts: searching pods until one had the same device.
        seconds: from the end of the first pod to the start of the pod that had the same device, as the check saw both.
    """

    name: str
    result: Result = Result.INCOMPLETE
    reason: str = ""
    devices: Sequence[str] = ()
    memory_bytes: int = 0
    written_bytes: int = 0
    own_found_bytes: int = 0
    """What the writing pod found of its own secret: the search works."""
    searched_bytes: int = 0
    found_bytes: int = 0
    attempts: int = 0
    seconds: float | None = None
    exit_code: int | None = None
    """Of the first pod's container; None where it was deleted before that was visible."""
    ended_at: datetime | None = None
    started_at: datetime | None = None
    hand_over: HandOver = field(default_factory=HandOver)

    def to_json(self) -> dict[str, Any]:
        return {
            "scenario": self.name,
            "result": self.result.value,
            "reason": self.reason,
            "devices": list(self.devices),
            "memoryBytes": self.memory_bytes,
            "writtenBytes": self.written_bytes,
            "ownFoundBytes": self.own_found_bytes,
            "searchedBytes": self.searched_bytes,
            "foundBytes": self.found_bytes,
            "attempts": self.attempts,
            "firstPodExitCode": self.exit_code,
            "firstPodEndedAt": _time(self.ended_at),
            "nextPodStartedAt": _time(self.started_at),
            "secondsToNextStart": None if self.seconds is None else round(self.seconds, 1),
            "handOver": self.hand_over.to_json(),
        }


@dataclass(slots=True)
class Report:
    """One run of the check."""

    run: str
    version: str
    image: str
    started_at: datetime
    path: str = ""
    resource: str = ""
    device_class: str = ""
    node: Mapping[str, Any] = field(default_factory=dict)
    server_version: str = ""
    driver: str = ""
    leftovers: Sequence[str] = ()
    """Namespaces of earlier runs, which were deleted."""
    remaining: Sequence[str] = ()
    """What this run could not delete."""
    finished_at: datetime | None = None
    interrupted: bool = False
    scenarios: list[ScenarioReport] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        results = {each.result for each in self.scenarios}
        if Result.FOUND in results:
            return ExitCode.FOUND
        if self.interrupted or Result.INCOMPLETE in results or Result.CLEAN not in results:
            return ExitCode.INCOMPLETE
        return ExitCode.CLEAN

    def to_json(self) -> dict[str, Any]:
        info = (self.node.get("status") or {}).get("nodeInfo") or {}
        return {
            "apiVersion": API_VERSION,
            "kind": "ClusterCheckReport",
            "metadata": {"name": self.run},
            "version": self.version,
            "startedAt": _time(self.started_at),
            "finishedAt": _time(self.finished_at),
            "exitCode": self.exit_code,
            "interrupted": self.interrupted,
            "path": self.path,
            "resource": self.resource,
            "deviceClass": self.device_class,
            "image": self.image,
            "node": {
                "name": (self.node.get("metadata") or {}).get("name", ""),
                "kubelet": info.get("kubeletVersion", ""),
                "containerRuntime": info.get("containerRuntimeVersion", ""),
                "kernel": info.get("kernelVersion", ""),
                "osImage": info.get("osImage", ""),
                "driver": self.driver,
            },
            "apiServer": self.server_version,
            "scenarios": [each.to_json() for each in self.scenarios],
            "notCovered": [
                *LIMITS,
                *(f"{each.name}: {each.reason}" for each in self.scenarios if each.result is Result.NOT_COVERED),
            ],
            "deletedLeftovers": list(self.leftovers),
            "notDeleted": list(self.remaining),
        }


def print_table(report: Report, console: Console) -> None:
    """Print one line for each scenario."""
    table = Table(box=None, pad_edge=False)
    for heading in ("SCENARIO", "RESULT", "DEVICE", "FOUND", "SEARCHED", "HAND-OVER", "SECONDS"):
        table.add_column(heading, justify="right" if heading in ("FOUND", "SEARCHED", "SECONDS") else "left")
    for each in report.scenarios:
        seconds = "" if each.seconds is None else f"{each.seconds:.1f}"
        searched = each.result in (Result.CLEAN, Result.FOUND) or each.searched_bytes > 0
        numbers = (str(each.found_bytes), str(each.searched_bytes)) if searched else ("", "")
        table.add_row(each.name, each.result.value, "\n".join(each.devices), *numbers, str(each.hand_over), seconds)
    console.print(table, crop=False)
    for each in report.scenarios:
        if each.reason:
            console.print(f"{each.name}: {each.reason}", markup=False, highlight=False)


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
