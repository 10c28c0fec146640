"""Contents of a small ledger, for all ledger tests: one or two devices, a grant, a scrub, a certificate."""

from dataclasses import replace
from pathlib import Path

from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.domain.assignment import Assignment, Pod, Process
from scrubber.domain.evidence import (
    Certificate,
    Finding,
    Outcome,
    ScrubRecord,
    ScrubTrigger,
    Severity,
    Step,
    StepResult,
    Verdict,
)
from scrubber.domain.evidence import PathKind as ScrubPath
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.ports.record import Event, LedgerChange

GPU, OTHER_GPU = "GPU-a", "GPU-b"


def record(version: int, device: str = GPU, **changes: object) -> DeviceRecord:
    return replace(DeviceRecord(device, version=version), **changes)  # type: ignore[arg-type]


def event(name: str = "device.marked-dirty", at: float = 100.0, device: str | None = GPU, **fields: object) -> Event:
    return Event(name, at, device, fields=fields)  # type: ignore[arg-type]


def scrub(name: str, *, finished: bool = True, device: str = GPU) -> ScrubRecord:
    finding = Finding(Step.MEMORY, "residue", Severity.NOTE, "Residue was found.", {"residue_bytes": 7})
    result = StepResult(Step.MEMORY, Verdict.PASSED, 0.25, (finding,), {"cleared_bytes": 1024}, ("on-chip",))
    if not finished:
        return ScrubRecord(name, device, ScrubPath.SLOW, ScrubTrigger.RELEASE, started=99.0)
    return ScrubRecord(
        name,
        device,
        ScrubPath.SLOW,
        ScrubTrigger.RELEASE,
        99.0,
        100.0,
        Outcome.PASSED,
        (result,),
        f"C-{name}",
        "uid:1000",
    )


def certificate(name: str, *, next_grant: int | None = None, device: str = GPU) -> Certificate:
    return Certificate(
        id=name,
        node="node",
        boot="boot",
        driver="1.0",
        device=device,
        sequence=1,
        previous_grant=0,
        path=ScrubPath.SLOW,
        scrub="S-1",
        covered=("memory",),
        not_covered=("on-chip",),
        policy="default",
        policy_digest="abc",
        issued_at=100.0,
        next_grant=next_grant,
    )


def grant(sequence: int, certificate_id: str | None = None, device: str = GPU) -> Grant:
    share = Assignment(Pod("team-a", "web-0", "uid-1"), "main", frozenset({device, "GPU-z"}))
    return Grant(
        sequence,
        share,
        HandOverKind.OTHER_TENANT,
        101.0,
        "boot",
        certificate_id,
        baseline=(Process(17, 4711, "sandbox"),),
    )


async def fill(home: Path, commits: int = 20) -> None:
    """Create a ledger with a history: one record, ``commits`` audit rows."""
    ledger = SqliteLedger(home)
    await ledger.load()
    for version in range(1, commits + 1):
        await ledger.commit(LedgerChange(records=(record(version),), events=(event(number=version),)))
    await ledger.close()
