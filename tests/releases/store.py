"""Store what a release promises to the next one, in ``tests/releases/MAJOR.MINOR``: ``python -m tests.releases.store``.

Run it for a release, and only for a release: it replaces what is stored for the version of the tree. ``scrubber.json``
is the descriptor of the API, ``ledger.sql`` a ledger with one of everything.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.protobuf.json_format import MessageToDict, ParseDict

from scrubber import __version__
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.api import scrubber_pb2
from scrubber.domain.agent_pause import AgentPause, AgentPauseRecord, LabelChange, PauseWay
from scrubber.domain.assignment import Claim, Pod
from scrubber.domain.baseline import Baseline
from scrubber.domain.health.history import PastQuarantine, RecoveryAttempt
from scrubber.domain.node_record import NodeRecord, YieldRequest, YieldRequester
from scrubber.domain.record import ActiveWarning, BreakGlass
from scrubber.domain.states import Cause, Health, Hygiene, RecoveryMethod
from scrubber.ports.record import LedgerChange
from tests.ledger_samples import GPU, OTHER_GPU, certificate, event, grant, record, scrub

__all__ = ["RELEASES", "api_of", "create_ledger", "current_api", "sample_change", "stored_versions"]

RELEASES = Path(__file__).parent


def minor(version: str) -> str:
    """Return ``MAJOR.MINOR``."""
    return ".".join(version.split(".")[:2])


def stored_versions() -> list[str]:
    """Return the minor versions that are stored here, the oldest one first."""
    found = (path.name for path in RELEASES.iterdir() if (path / "ledger.sql").exists())
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def current_api() -> descriptor_pb2.FileDescriptorProto:
    """Return the descriptor of the API of this tree."""
    api = descriptor_pb2.FileDescriptorProto()
    scrubber_pb2.DESCRIPTOR.CopyToProto(api)
    return api


def api_of(version: str) -> descriptor_pb2.FileDescriptorProto:
    """Return the stored descriptor of a minor version."""
    text = (RELEASES / version / "scrubber.json").read_text()
    return ParseDict(json.loads(text), descriptor_pb2.FileDescriptorProto())


def create_ledger(version: str, database: Path) -> None:
    """Create the stored ledger of a minor version."""
    database.parent.mkdir(mode=0o700)
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript((RELEASES / version / "ledger.sql").read_text())
        connection.execute("PRAGMA journal_mode = WAL")
    database.with_name("ledger.marker").touch()


def sample_change() -> LedgerChange:
    """Return a change with every kind of document, in which nearly every field has a value."""
    pod = Pod("team-a", "web-0", "uid-1")
    claim = Claim("uid-claim", "team-a", "training", "gpu.scrubber.dev", (pod,), (pod,), 100.5)
    by_container, by_claim = grant(1, "C-1"), replace(grant(2), assignment=None, claim=claim)
    cause = Cause("operator", "Spare part ordered.", RecoveryMethod.OPERATOR, 99.0, "uid:1000")
    used = record(
        1,
        hygiene=Hygiene.IN_USE,
        health=Health.SUSPECT,
        cause=Cause("heat", "The device is hot.", RecoveryMethod.WAIT, 98.0),
        rests_on="C-1",
        last_grant=by_claim,
        open_grants=(by_container, by_claim),
        certificate_count=2,
        boot="boot",
        lifetime_counters=(("retired_pages", 2),),
        warnings=(ActiveWarning("heat", 98.0),),
        recent_quarantines=(PastQuarantine(50.0, "driver-timeout", "team-b"),),
        recovery_attempts=(RecoveryAttempt(60.0, reset=True, operator_ordered=False),),
        limits_count_from=40.0,
        break_glass=BreakGlass(200.0, "a deadline", "uid:1000"),
        baseline=Baseline((("vbios", "96"),), (("ecc", "off"),), 10.0, "uid:0", "as delivered"),
        admin_claims=(claim,),
    )
    out = record(1, OTHER_GPU, health=Health.QUARANTINED, cause=cause, certificate=None, must_reset=True)
    pause = AgentPause("P-1", PauseWay.LABELS, (OTHER_GPU,), 90.0, changes=(LabelChange("dcgm", "true", "false"),))
    return LedgerChange(
        records=(used, out),
        grants=((GPU, by_container), (GPU, by_claim)),
        certificates=(certificate("C-1", next_grant=1), certificate("C-2")),
        scrubs=(scrub("S-1"), scrub("S-2", finished=False, device=OTHER_GPU)),
        events=(event(certificate="C-1", tenant="team-a"), event("device.appeared", device=OTHER_GPU)),
        node=NodeRecord((YieldRequest(YieldRequester.OPERATOR, "driver upgrade", "uid:0", 99.5),)),
        agent_pause=AgentPauseRecord(pause),
    )


async def _fill(home: Path) -> None:
    ledger = SqliteLedger(home)
    await ledger.load()
    await ledger.commit(sample_change())
    await ledger.close()


def _dump(database: Path) -> str:
    with closing(sqlite3.connect(database)) as connection:
        pragmas = [
            f"PRAGMA {name} = {connection.execute(f'PRAGMA {name}').fetchone()[0]};"
            for name in ("application_id", "user_version")
        ]
        return "\n".join([*pragmas, *connection.iterdump(), ""])


def main() -> None:
    out = RELEASES / minor(__version__)
    out.mkdir(exist_ok=True)
    api = json.dumps(MessageToDict(current_api()), indent=1)
    (out / "scrubber.json").write_text(f"{api}\n")
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "state"
        asyncio.run(_fill(home))
        (out / "ledger.sql").write_text(_dump(home / "ledger.db"))
    print(out)


if __name__ == "__main__":
    main()
