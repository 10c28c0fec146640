"""Comparison of the records of a chaos run. Every function returns messages; an empty result means no flaw."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scrubber.adapters.ledger.documents import CERTIFICATE, GRANT
from scrubber.domain.evidence import Certificate
from scrubber.domain.evidence import PathKind as ScrubPath
from scrubber.domain.handover_kind import Basis
from scrubber.domain.record import Grant
from scrubber.emulator.events import KubeletEvent

__all__ = [
    "Record",
    "Report",
    "bytes_that_were_touched",
    "certificates_that_do_not_carry_their_grant",
    "dirty_starts",
    "read_ledger",
    "read_reports",
    "skipped_starts",
    "starts_without_a_grant",
]


@dataclass(frozen=True, slots=True)
class Report:
    """One line of a witness: ``what`` is ``came`` or ``left``; ``at`` is on the kubelet's clock."""

    what: str
    name: str
    at: float
    device: str = ""
    strange: int = 0
    found: str = ""
    damaged: int = 0
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """The ledger's grants and certificates, and the names of its audit rows in order."""

    grants: dict[str, tuple[Grant, ...]]
    certificates: dict[str, Certificate]
    audit: tuple[str, ...]


def read_reports(path: Path) -> list[Report]:
    """Return every witness's lines, in the order in which they were written."""
    return [Report(**json.loads(line)) for line in path.read_text().splitlines()]


def read_ledger(directory: Path, scratch: Path) -> Record:
    """Return the ledger of a stopped service, from a copy in ``scratch``."""
    for each in directory.glob("ledger.db*"):
        shutil.copy(each, scratch / each.name)
    connection = sqlite3.connect(scratch / "ledger.db")
    try:
        grants: defaultdict[str, list[Grant]] = defaultdict(list)
        for device, document in connection.execute("SELECT device, document FROM grants ORDER BY device, sequence"):
            grants[device].append(GRANT.decode(document))
        certificates = [CERTIFICATE.decode(row[0]) for row in connection.execute("SELECT document FROM certificates")]
        audit = tuple(row[0] for row in connection.execute("SELECT name FROM audit ORDER BY sequence"))
    finally:
        connection.close()
    by_device = {device: tuple(found) for device, found in grants.items()}
    return Record(by_device, {each.id: each for each in certificates}, audit)


def dirty_starts(reports: Sequence[Report], events: Sequence[KubeletEvent]) -> list[str]:
    """Return containers with a permitted start that found bytes that were neither zero nor their own."""
    skipped = skipped_starts(events)
    starts: defaultdict[str, list[KubeletEvent]] = defaultdict(list)
    for event in events:
        if event.name == "ContainerStarted":
            starts[f"{event.pod}/{event.container}"].append(event)
    flaws = []
    for report in reports:
        if report.what == "came" and report.strange:
            start = max((each for each in starts[report.name] if each.at <= report.at), key=lambda each: each.at)
            if start not in skipped:
                flaws.append(f"{report.name} found {report.strange} bytes on {report.device}: {report.found!r}")
    return flaws


def bytes_that_were_touched(reports: Sequence[Report]) -> list[str]:
    """Return containers whose bytes were changed by others while they lived."""
    return [f"{each.name} (PID {each.pid}) lost {each.damaged} bytes" for each in reports if each.damaged]


def skipped_starts(events: Sequence[KubeletEvent]) -> list[KubeletEvent]:
    """Return starts without a call of the plugin: the kubelet makes them between its restart and our registration."""
    skipped = []
    for start in events:
        if start.name == "ContainerStarted":
            since = _start_before(start, events, same_container=True)
            if not any(_let_start(event, start) and event.at + event.duration > since for event in events):
                skipped.append(start)
    return skipped


def starts_without_a_grant(events: Sequence[KubeletEvent], record: Record, *, wall: float) -> list[str]:
    """Return permitted starts for which the ledger has no grant since the last start on the device.

    Args:
        wall: seconds to add to a time of the kubelet's clock to get the ledger's.
    """
    flaws = []
    skipped = skipped_starts(events)
    for start in events:
        if start.name != "ContainerStarted" or start in skipped:
            continue
        for device in start.devices:
            since = _start_before(start, events, same_container=False, device=device)
            between = [g for g in record.grants.get(device, ()) if since + wall < g.at <= start.at + wall]
            known = [g for g in between if g.pod is None or g.pod.uid in (None, start.pod_uid)]
            if not known:
                flaws.append(f"{start.pod}/{start.container} started on {device}, and no grant says so: {between}")
    return flaws


def certificates_that_do_not_carry_their_grant(record: Record) -> list[str]:
    """Return grants without a separate certificate, with a used one, or with one older than the last grant."""
    flaws = []
    seen: dict[str, str] = {}
    for device, grants in record.grants.items():
        for number, grant in enumerate(grants, start=1):
            this = f"grant {grant.sequence} of {device}"
            if grant.sequence != number:
                flaws.append(f"{this} is in the place of number {number}")
            if grant.basis is Basis.ADOPTED:
                continue
            if grant.certificate is None:
                flaws.append(f"{this} rests on nothing")
                continue
            fast = record.certificates[grant.certificate]
            used = (
                [fast.id] if grant.basis is not Basis.CERTIFICATE or fast.rests_on is None else [fast.id, fast.rests_on]
            )
            if grant.basis is Basis.CERTIFICATE and fast.rests_on is None:
                flaws.append(f"{this}: nothing proves its memory")
            for name in used:
                certificate = record.certificates[name]
                if name in seen:
                    flaws.append(f"{this} uses up {name}, which {seen[name]} used up")
                seen[name] = this
                if certificate.device != device or certificate.next_grant != grant.sequence:
                    flaws.append(f"{this} rests on {name}, which is for grant {certificate.next_grant}")
                if certificate.previous_grant != grant.sequence - 1:
                    flaws.append(f"{this} rests on {name}, which is older than the grant before")
            if grant.basis is Basis.CERTIFICATE and record.certificates[used[-1]].path is not ScrubPath.SLOW:
                flaws.append(f"{this} rests on a certificate that cleared no memory")
    return flaws


def _let_start(event: KubeletEvent, start: KubeletEvent) -> bool:
    return (
        event.name == "PreStartContainer"
        and event.outcome == "OK"
        and (event.pod_uid, event.container) == (start.pod_uid, start.container)
        and event.at + event.duration <= start.at
    )


def _start_before(
    start: KubeletEvent, events: Sequence[KubeletEvent], *, same_container: bool, device: str = ""
) -> float:
    """Return the time of the previous start: of the same container, or of any on ``device``; minus infinity if none."""
    earlier = [
        event.at
        for event in events
        if event.name == "ContainerStarted"
        and event.at < start.at
        and (
            (event.pod_uid, event.container) == (start.pod_uid, start.container)
            if same_container
            else device in event.devices
        )
    ]
    return max(earlier, default=float("-inf"))
