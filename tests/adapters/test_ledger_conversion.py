"""A ledger that another version wrote is converted, or refused with what to do instead; it is never lost.

The other version's ledger is one of this version that was edited with SQL: an earlier one lacks a field, a newer one has
more.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scrubber import __version__
from scrubber.adapters.ledger.json_codec import Json
from scrubber.adapters.ledger.offline import verify_ledger
from scrubber.adapters.ledger.schema import CURRENT, Schema
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.domain.assignment import Assignment, Claim, Pod
from scrubber.domain.errors import LedgerFailure
from scrubber.domain.evidence import PathKind
from scrubber.domain.handover_kind import Basis, HandOverKind
from scrubber.domain.record import ActiveWarning
from scrubber.domain.states import Cause, Health, Hygiene, RecoveryMethod
from scrubber.ports.record import HistoryQuery, LedgerChange, LedgerState
from tests.ledger_samples import GPU, OTHER_GPU, certificate, event, grant, record, scrub
from tests.ledger_versions import edited, make_newer, make_older

ROOT = Path(__file__).parents[2]
NOW = 1234.5
CLAIM = Claim("uid-claim", "team-a", "training", "gpu.scrubber.dev", (Pod("team-a", "web-0", "uid-1"),))
LISTED_CLAIM = replace(CLAIM, listed_pods=CLAIM.pods)
RECORD = record(1, health=Health.PROBATION, last_grant=grant(7, "C-1"), open_grants=(grant(7, "C-1"),), must_reset=True)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "state"


async def stored(home: Path) -> LedgerState:
    """Create a ledger with one document in each of its tables; return its state."""
    ledger = SqliteLedger(home)
    await ledger.load()
    await ledger.commit(
        LedgerChange(
            records=(RECORD, record(1, OTHER_GPU)),
            grants=((GPU, grant(7, "C-1")),),
            certificates=(certificate("C-1", next_grant=7),),
            scrubs=(scrub("S-1"), scrub("S-2", finished=False)),
            events=(event(certificate="C-1"), event("device.appeared", device=OTHER_GPU)),
        )
    )
    state = await ledger.load()
    await ledger.close()
    return state


def add_fields(document: dict[str, Json]) -> dict[str, Json]:
    return {**document, "contaminated": False, "admin_claims": []}


NEXT = replace(CURRENT, number=CURRENT.number + 1, upgrades={CURRENT.number: {"devices": add_fields}})
"""The schema of this program, if it had gained these two fields in it."""


async def opened(home: Path, schema: Schema = CURRENT) -> tuple[SqliteLedger, LedgerState]:
    ledger = SqliteLedger(home, schema=schema, wall=lambda: NOW)
    return ledger, await ledger.load()


async def refusal(home: Path, schema: Schema = CURRENT) -> str:
    """Return why the ledger is refused; neither it nor its directory has changed then."""
    before = (home / "ledger.db").read_bytes(), names(home)
    ledger = SqliteLedger(home, schema=schema)
    with pytest.raises(LedgerFailure) as failure:
        await ledger.load()
    await ledger.close()
    assert ((home / "ledger.db").read_bytes(), names(home)) == before
    return str(failure.value)


def names(home: Path) -> set[str]:
    return {path.name for path in home.iterdir()} - {"ledger.db-wal", "ledger.lock", "ledger.reserve"}


class TestUpgrade:
    async def test_upgraded_ledger_has_every_record_and_the_whole_audit_log(self, home: Path) -> None:
        before = await stored(home)
        make_older(home)
        ledger, state = await opened(home, NEXT)
        history = await ledger.history(HistoryQuery())
        await ledger.close()
        assert state == before
        assert [each.event.name for each in history] == ["device.appeared", "device.marked-dirty"]
        assert history[1].certificate == certificate("C-1", next_grant=7)

    async def test_upgraded_ledger_stores_changes_and_opens_again_without_a_conversion(self, home: Path) -> None:
        await stored(home)
        make_older(home)
        ledger, _ = await opened(home, NEXT)
        await ledger.commit(LedgerChange(records=(record(2, OTHER_GPU),), events=(event(),)))
        await ledger.close()
        ledger, state = await opened(home, NEXT)
        await ledger.close()
        assert ledger.conversion is None
        assert state.records[OTHER_GPU].version == 2

    async def test_earlier_ledger_is_kept_as_a_private_copy_that_its_schema_names(self, home: Path) -> None:
        await stored(home)
        make_older(home)
        before = (home / "ledger.db").read_bytes()
        ledger, _ = await opened(home, NEXT)
        await ledger.close()
        copy = home / f"ledger-schema-{CURRENT.number}.db"
        assert ledger.conversion is not None
        assert (ledger.conversion.copy, ledger.conversion.from_version) == (copy, "0.0.9")
        assert copy.read_bytes() == before
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600

    async def test_record_that_an_upgrade_cannot_convert_refuses_the_ledger_and_names_the_version_to_install(
        self, home: Path
    ) -> None:
        await stored(home)
        make_older(home, "UPDATE devices SET document = json_remove(document, '$.must_reset')")
        message = await refusal(home, NEXT)
        assert f"written by version 0.0.9, contains data that version {__version__} cannot convert" in message
        assert "missing field must_reset" in message
        assert "install version 0.0.9 again" in message

    async def test_schema_that_is_too_old_is_refused(self, home: Path) -> None:
        await stored(home)
        message = await refusal(home, replace(NEXT, number=CURRENT.number + 2, upgrades={CURRENT.number + 1: {}}))
        assert "Upgrade one minor version at a time" in message

    async def test_several_schemas_are_upgraded_at_once(self, home: Path) -> None:
        await stored(home)
        make_older(home)

        def rename(document: dict[str, Json]) -> dict[str, Json]:
            return {("must_reset" if name == "owes_reset" else name): value for name, value in document.items()}

        with edited(home) as connection:
            connection.execute(
                "UPDATE devices SET document = replace(document, '\"must_reset\"', '\"owes_reset\"')",
            )
        steps = {CURRENT.number: {"devices": add_fields}, CURRENT.number + 1: {"devices": rename}}
        ledger, state = await opened(home, replace(NEXT, number=CURRENT.number + 2, upgrades=steps))
        await ledger.close()
        assert state.records[GPU].must_reset


class TestEarlierVersion:
    async def test_newer_ledger_is_read_without_what_this_version_does_not_know(self, home: Path) -> None:
        before = await stored(home)
        make_newer(home)
        ledger, state = await opened(home)
        history = await ledger.history(HistoryQuery())
        await ledger.close()
        assert ledger.conversion is not None
        assert (ledger.conversion.from_version, ledger.conversion.quarantined) == ("0.2.0", ())
        assert ledger.conversion.omitted == 0
        assert state == before
        assert [each.event.name for each in history] == ["device.appeared", "device.marked-dirty"]
        assert verify_ledger(home).intact

    async def test_device_whose_newer_record_cannot_be_read_is_quarantined_and_no_other(self, home: Path) -> None:
        await stored(home)
        make_newer(
            home, f"UPDATE devices SET document = json_set(document, '$.health', 'resting') WHERE device = '{GPU}'"
        )
        ledger, state = await opened(home)
        await ledger.close()
        found = state.records[GPU]
        assert ledger.conversion is not None
        assert ledger.conversion.quarantined == (GPU,)
        assert (found.hygiene, found.health, found.contaminated) == (Hygiene.DIRTY, Health.QUARANTINED, True)
        assert found.cause is not None
        assert (found.cause.recovery_method, found.cause.since) == (RecoveryMethod.OPERATOR, NOW)
        assert "'resting' is not a Health" in found.cause.message
        assert (found.open_grants, found.must_reset) == (RECORD.open_grants, True)
        assert state.records[OTHER_GPU].health is Health.HEALTHY

    async def test_unreadable_record_keeps_the_quarantine_of_an_operator(self, home: Path) -> None:
        await stored(home)
        cause = Cause("operator", "Spare.", RecoveryMethod.OPERATOR, 7.0, "uid:1000")
        ledger, _ = await opened(home)
        await ledger.commit(LedgerChange(records=(replace(RECORD, version=2, health=Health.QUARANTINED, cause=cause),)))
        await ledger.close()
        make_newer(home, "UPDATE devices SET document = json_set(document, '$.hygiene', 'rinsed')")
        ledger, state = await opened(home)
        await ledger.close()
        assert state.records[GPU].cause == cause

    async def test_condemned_device_whose_newer_record_cannot_be_read_stays_condemned(self, home: Path) -> None:
        await stored(home)
        cause = Cause("recovery-failed", "Three attempts failed.", RecoveryMethod.OPERATOR, 7.0)
        ledger, _ = await opened(home)
        await ledger.commit(LedgerChange(records=(replace(RECORD, version=2, health=Health.CONDEMNED, cause=cause),)))
        await ledger.close()
        make_newer(home, "UPDATE devices SET document = json_set(document, '$.hygiene', 'rinsed')")
        ledger, state = await opened(home)
        await ledger.close()
        assert (state.records[GPU].health, state.records[GPU].cause) == (Health.CONDEMNED, cause)

    async def test_grant_after_an_unreadable_one_has_a_new_number(self, home: Path) -> None:
        await stored(home)
        make_newer(
            home,
            f"UPDATE devices SET document = json_set(document, '$.last_grant.kind', 'odd') WHERE device = '{GPU}'",
            "UPDATE grants SET document = json_set(document, '$.kind', 'odd')",
        )
        ledger, state = await opened(home)
        await ledger.close()
        assert state.records[GPU].last_grant == replace(grant(7, "C-1"), kind=HandOverKind.UNKNOWN)

    async def test_salvaged_record_counts_every_stored_grant(self, home: Path) -> None:
        await stored(home)
        make_newer(
            home,
            "UPDATE devices SET document = json_set(document, '$.health', 'resting', '$.last_grant.sequence', 3,"
            f" '$.open_grants[0].sequence', 3) WHERE device = '{GPU}'",
        )
        ledger, state = await opened(home)
        await ledger.close()
        assert state.records[GPU].grant_sequence == 7

    async def test_salvaged_record_without_any_of_the_stored_grants_refuses_the_ledger(self, home: Path) -> None:
        await stored(home)
        make_newer(
            home,
            "UPDATE devices SET document = json_set(document, '$.health', 'resting', '$.last_grant', null,"
            f" '$.open_grants', json('[]')) WHERE device = '{GPU}'",
        )
        message = await refusal(home)
        assert f"device {GPU}: last_grant: missing, but grant 7 was made" in message

    @pytest.mark.parametrize(
        ("path", "lost"),
        [
            ("basis", {"basis": Basis.ADOPTED}),
            ("kind", {"kind": HandOverKind.UNKNOWN}),
            ("path", {"path": None}),
            ("at", {"at": NOW}),
            ("claim.released_at", {"claim": LISTED_CLAIM}),
            ("claim.listed_pods[0].name", {"claim": CLAIM}),
        ],
    )
    async def test_open_grant_with_an_unknown_value_keeps_its_claim_and_the_other_grants(
        self, home: Path, path: str, lost: dict[str, Any]
    ) -> None:
        claimed = replace(grant(8), assignment=None, claim=LISTED_CLAIM, path=PathKind.FAST)
        ledger, _ = await opened(home)
        await ledger.commit(LedgerChange(records=(record(1, open_grants=(grant(7), claimed), last_grant=claimed),)))
        await ledger.close()
        make_newer(
            home, f"UPDATE devices SET document = json_set(document, '$.open_grants[1].{path}', json('[\"odd\"]'))"
        )
        ledger, state = await opened(home)
        await ledger.close()
        found = state.records[GPU]
        assert found.open_grants == (grant(7), replace(claimed, **lost))
        assert found.health is Health.QUARANTINED
        assert found.cause is not None
        assert "Grant 8 was kept in a reduced form" in found.cause.message

    async def test_open_grant_with_an_unknown_field_of_its_assignment_keeps_its_pod(self, home: Path) -> None:
        await stored(home)
        make_newer(
            home,
            "UPDATE devices SET document = json_set(document, '$.open_grants[0].assignment.container', 7,"
            f" '$.open_grants[0].assignment.devices', 'all') WHERE device = '{GPU}'",
        )
        ledger, state = await opened(home)
        await ledger.close()
        (found,) = state.records[GPU].open_grants
        assert found.assignment == Assignment(Pod("team-a", "web-0", "uid-1"), "", frozenset({GPU}))

    @pytest.mark.parametrize("field", ["sequence", "boot", "assignment.pod.uid"])
    async def test_open_grant_whose_pods_or_time_are_not_certain_refuses_the_ledger(
        self, home: Path, field: str
    ) -> None:
        await stored(home)
        make_newer(
            home,
            f"UPDATE devices SET document = json_set(document, '$.open_grants[0].{field}', json('[]'))"
            f" WHERE device = '{GPU}'",
        )
        message = await refusal(home)
        assert f"device {GPU}: " in message
        assert "install version 0.2.0 again" in message

    async def test_open_grants_in_an_unknown_form_refuse_the_ledger(self, home: Path) -> None:
        await stored(home)
        make_newer(
            home, f"UPDATE devices SET document = json_set(document, '$.open_grants', 'many') WHERE device = '{GPU}'"
        )
        assert "open_grants: 'many' is not a list" in await refusal(home)

    async def test_lists_of_a_record_keep_the_entries_that_can_be_read(self, home: Path) -> None:
        monitor = Claim("uid-monitor", "monitoring", "gpus", "gpu.scrubber.dev", CLAIM.pods)
        ledger, _ = await opened(home)
        warnings = (ActiveWarning("hot", 1.0), ActiveWarning("slow", 2.0))
        await ledger.commit(LedgerChange(records=(record(1, warnings=warnings, admin_claims=(monitor, CLAIM)),)))
        await ledger.close()
        make_newer(
            home,
            "UPDATE devices SET document = json_set(document, '$.warnings[0].since', 'dawn',"
            " '$.admin_claims[1].released_at', 'dawn')",
        )
        ledger, state = await opened(home)
        await ledger.close()
        assert state.records[GPU].warnings == (ActiveWarning("slow", 2.0),)
        assert state.records[GPU].admin_claims == (monitor, CLAIM)

    async def test_prepared_claim_survives_the_return_to_an_earlier_version(self, home: Path) -> None:
        claimed = replace(grant(8), assignment=None, claim=CLAIM)
        ledger, _ = await opened(home)
        await ledger.commit(LedgerChange(records=(record(1, open_grants=(claimed,), last_grant=claimed),)))
        await ledger.close()
        make_newer(home, "UPDATE devices SET document = json_set(document, '$.open_grants[0].claim.rack', 'r7')")
        ledger, state = await opened(home)
        await ledger.close()
        assert state.records[GPU].claim(CLAIM.uid) == CLAIM

    async def test_certificate_with_an_unknown_field_is_only_in_the_copy(self, home: Path) -> None:
        await stored(home)
        make_newer(home, "UPDATE certificates SET document = json_set(document, '$.format', 2, '$.witness', 'x')")
        ledger, _ = await opened(home)
        assert await ledger.certificate("C-1") is None
        await ledger.close()
        assert ledger.conversion is not None
        assert ledger.conversion.omitted == 1

    async def test_certificate_of_a_newer_format_with_known_fields_is_kept(self, home: Path) -> None:
        await stored(home)
        make_newer(home, "UPDATE certificates SET document = json_set(document, '$.format', 2)")
        ledger, _ = await opened(home)
        assert await ledger.certificate("C-1") == certificate("C-1", next_grant=7)
        await ledger.close()

    async def test_unreadable_request_to_yield_the_node_refuses_the_ledger(self, home: Path) -> None:
        await stored(home)
        make_newer(
            home, 'INSERT INTO node VALUES (1, \'{"format":2,"overridden":[],"yields":[{"requester":"moon"}]}\')'
        )
        assert "install version 0.2.0 again" in await refusal(home)

    async def test_ledger_that_this_version_cannot_read_names_the_version_to_go_through(self, home: Path) -> None:
        await stored(home)
        make_newer(home, oldest_reader=CURRENT.number + 1)
        message = await refusal(home)
        assert f"written by version 0.2.0 (schema {CURRENT.number + 1})" in message
        assert "Go back one minor version at a time: install version 0.1.7" in message

    async def test_upgrade_after_a_return_is_an_ordinary_upgrade(self, home: Path) -> None:
        before = await stored(home)
        for _ in range(3):
            make_newer(home)
            ledger, state = await opened(home)
            await ledger.close()
            assert state == before
        assert names(home) == {"ledger.db", "ledger.marker", f"ledger-schema-{CURRENT.number + 1}.db"}

    async def test_copies_of_distant_schemas_are_removed(self, home: Path) -> None:
        await stored(home)
        make_newer(home)
        for number in (CURRENT.number + 1, CURRENT.number + 2, 77):
            (home / f"ledger-schema-{number}.db").write_bytes(b"old")
        (home / "ledger-schema-notes.db").touch()
        ledger, _ = await opened(home)
        await ledger.close()
        assert names(home) == {
            *("ledger.db", "ledger.marker", "ledger-schema-notes.db"),
            f"ledger-schema-{CURRENT.number + 1}.db",
        }


class TestStorage:
    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            ("UPDATE audit SET region = 'eu', actor = 'forged' WHERE sequence = 1", "row 1 was changed"),
            ("DELETE FROM audit WHERE sequence = 2", "ends at row 1, but 2 rows were written"),
        ],
    )
    async def test_newer_ledger_with_a_broken_audit_log_is_refused(self, home: Path, damage: str, words: str) -> None:
        await stored(home)
        triggers = [f"DROP TRIGGER {each}" for each in ("audit_is_never_changed", "audit_shrinks_at_its_pruned_end")]
        make_newer(home, *triggers, damage)
        assert words in await refusal(home)

    async def test_copy_of_a_newer_ledger_verifies_and_stays_unchanged(self, home: Path) -> None:
        await stored(home)
        make_newer(home)
        before = (home / "ledger.db").read_bytes()
        report = verify_ledger(home)
        assert (report.intact, report.rows) == (True, 2)
        assert (home / "ledger.db").read_bytes() == before

    async def test_kill_between_any_two_changes_of_the_directory_loses_nothing(self, home: Path) -> None:
        """The n-th process kills itself before its n-th change; the last one converts the ledger."""
        before = await stored(home)
        make_newer(home)
        kills = 0
        while await _converting(home, kills) != 0:
            kills += 1
            with closing(sqlite3.connect(home / "ledger.db")) as connection:
                assert connection.execute("SELECT count(*) FROM audit").fetchone() == (2,)
        assert kills > 5
        ledger, state = await opened(home)
        await ledger.close()
        assert state == before
        assert names(home) == {"ledger.db", "ledger.marker", f"ledger-schema-{CURRENT.number + 1}.db"}


async def _converting(home: Path, survived: int) -> int:
    """Load the ledger in a process that kills itself after ``survived`` changes; return its exit status."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.adapters.converting", str(home), str(survived), cwd=ROOT, env=os.environ
    )
    return await process.wait()
