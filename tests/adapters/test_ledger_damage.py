"""A ledger that was here before is never replaced by an empty one, and nobody rewrites it unnoticed.

Tampering is done the way somebody with root would do it: with SQL, the triggers out of the way.
"""

import errno
import hashlib
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from scrubber.adapters.ledger.offline import verify
from scrubber.adapters.ledger.place import filesystem_magic
from scrubber.adapters.ledger.schema import SCHEMA
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.domain.errors import BadConfiguration, LedgerFailure, SecondInstance
from scrubber.ports.record import Change, HistoryQuery, LedgerState
from tests.ledger_samples import GPU, certificate, event, fill, record


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "state"


async def refusal(home: Path) -> str:
    """The sentence with which a service refuses to start on the ledger in ``home``; its lock is free afterwards."""
    before = sorted(path.name for path in home.iterdir() if path.name != "ledger.lock")
    ledger = SqliteLedger(home)
    try:
        with pytest.raises(LedgerFailure) as failure:
            await ledger.load()
        assert ledger.health() == str(failure.value)
        with pytest.raises(LedgerFailure):
            await ledger.commit(Change(records=(record(1),)))
        with pytest.raises(LedgerFailure):
            await ledger.load()
    finally:
        await ledger.close()
    after = {path.name for path in home.iterdir()}
    assert after >= set(before) - {"ledger.db-wal", "ledger.db-shm"}
    return str(failure.value)


def tamper(home: Path, *statements: str, around_triggers: bool = True) -> None:
    connection = sqlite3.connect(home / "ledger.db", isolation_level=None)
    try:
        triggers = connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
        if around_triggers:
            for name, _ in triggers:
                connection.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            connection.execute(statement)
        if around_triggers:
            for _, sql in triggers:
                connection.execute(sql)
    finally:
        connection.close()


class TestPlace:
    async def test_it_is_private(self, home: Path) -> None:
        await fill(home, 1)
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()} == {0o600}

    async def test_an_empty_directory_that_others_may_read_is_made_private(self, home: Path) -> None:
        home.mkdir()
        home.chmod(0o755)  # as the kubelet makes a hostPath of the type DirectoryOrCreate
        await fill(home, 1)
        assert stat.S_IMODE(home.stat().st_mode) == 0o700

    async def test_a_directory_with_a_ledger_that_others_may_read_is_made_private(self, home: Path) -> None:
        await fill(home, 1)
        home.chmod(0o755)
        ledger = SqliteLedger(home)
        await ledger.load()
        await ledger.close()
        assert stat.S_IMODE(home.stat().st_mode) == 0o700

    @pytest.mark.parametrize("way", ["files of others", "symbolic link"])
    async def test_a_directory_that_may_not_be_ours_alone_keeps_its_mode(self, home: Path, way: str) -> None:
        home.mkdir()
        home.chmod(0o755)
        given = home
        if way == "symbolic link":
            given = home.with_name("link")
            given.symlink_to(home)
        else:
            (home / "passwd").touch()
        await fill(given, 1)
        assert stat.S_IMODE(home.stat().st_mode) == 0o755

    @pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
    async def test_a_directory_that_others_may_write_into_is_refused(self, home: Path, mode: int) -> None:
        home.mkdir()
        home.chmod(mode)
        ledger = SqliteLedger(home)
        with pytest.raises(BadConfiguration, match=f"chmod 700 {home}"):
            await ledger.load()
        await ledger.close()
        assert list(home.iterdir()) == []

    async def test_a_directory_of_another_user_is_refused(self, home: Path) -> None:
        if os.geteuid() == 0:
            home.mkdir()
            os.chown(home, 12345, 12345)
        else:
            home = Path("/usr")
        ledger = SqliteLedger(home)
        with pytest.raises(BadConfiguration, match="belongs to uid"):
            await ledger.load()
        await ledger.close()
        assert not (home / "ledger.lock").exists()

    @pytest.mark.parametrize("magic", [0x6969, 0xFF534D42, 0xFE534D42, 0x65735546, 0x01021997])
    async def test_a_network_file_system_is_refused(self, home: Path, magic: int) -> None:
        ledger = SqliteLedger(home, filesystem=lambda _: magic)
        with pytest.raises(BadConfiguration, match="local disk"):
            await ledger.load()
        await ledger.close()

    def test_the_kernel_tells_the_file_system(self, tmp_path: Path) -> None:
        assert filesystem_magic(Path("/proc")) == 0x9FA0
        assert filesystem_magic(tmp_path) not in (0, 0x9FA0)
        with pytest.raises(FileNotFoundError):
            filesystem_magic(tmp_path / "nowhere")

    async def test_a_second_instance_is_refused_until_the_first_ends(self, home: Path) -> None:
        first, second = SqliteLedger(home), SqliteLedger(home)
        await first.load()
        with pytest.raises(SecondInstance, match=f"PID {os.getpid()}"):
            await second.load()
        await first.commit(Change(records=(record(1),)))
        await first.close()
        assert (await second.load()).records == {GPU: record(1)}
        await second.close()

    async def test_a_start_that_was_cut_short_is_begun_again(self, home: Path) -> None:
        """Killed before the first ledger was complete: nothing was ever recorded, so nothing is lost."""
        home.mkdir(mode=0o700)
        (home / "ledger.db.new").write_bytes(b"half")
        (home / "ledger.db.new-wal").write_bytes(b"half")
        ledger = SqliteLedger(home)
        assert await ledger.load() == LedgerState()
        await ledger.close()
        assert not list(home.glob("*.new*"))

    async def test_a_ledger_whose_marker_was_not_written_yet_is_kept(self, home: Path) -> None:
        await fill(home)
        (home / "ledger.marker").unlink()
        ledger = SqliteLedger(home)
        assert (await ledger.load()).head_sequence == 20
        await ledger.close()
        assert (home / "ledger.marker").exists()


class TestDamage:
    """A ledger that was here before is never replaced by an empty one."""

    async def test_a_vanished_database_is_refused(self, home: Path) -> None:
        await fill(home)
        (home / "ledger.db").unlink()
        assert "ledger.db is missing" in await refusal(home)
        assert not (home / "ledger.db").exists()

    async def test_a_log_without_its_database_is_refused(self, home: Path) -> None:
        home.mkdir(mode=0o700)
        (home / "ledger.db-wal").write_bytes(b"frames")
        assert "ledger.db-wal shows that there was a ledger" in await refusal(home)
        assert (home / "ledger.db-wal").read_bytes() == b"frames"

    async def test_an_emptied_database_is_refused(self, home: Path) -> None:
        await fill(home)
        os.truncate(home / "ledger.db", 0)
        assert "its records were lost" in await refusal(home)

    @pytest.mark.parametrize("kept", [50, 4096, 20_000])
    async def test_a_truncated_database_is_refused(self, home: Path, kept: int) -> None:
        await fill(home)
        assert (home / "ledger.db").stat().st_size > kept
        os.truncate(home / "ledger.db", kept)
        sentence = await refusal(home)
        assert "move its state directory aside as evidence, and start anew" in sentence

    async def test_a_file_that_is_no_database_is_refused(self, home: Path) -> None:
        await fill(home)
        (home / "ledger.db").write_bytes(b"these are not the bytes you are looking for" * 200)
        assert "is not a ledger" in await refusal(home)

    async def test_a_past_that_cannot_be_read_is_no_failure_of_the_record(self, home: Path) -> None:
        ledger = SqliteLedger(home)
        await ledger.load()
        await ledger.commit(
            Change(records=(record(1),), certificates=(certificate("C-1"),), events=(event(certificate="C-1"),))
        )
        await ledger.close()
        tamper(home, "UPDATE certificates SET document = '{}'")
        ledger = SqliteLedger(home)
        await ledger.load()
        with pytest.raises(LedgerFailure, match="certificates C-1"):
            await ledger.history(HistoryQuery())
        assert ledger.health() == "ok"
        await ledger.commit(Change(records=(record(2),)))
        await ledger.close()

    async def test_another_programs_database_is_refused(self, home: Path) -> None:
        home.mkdir(mode=0o700)
        connection = sqlite3.connect(home / "ledger.db")
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
        connection.close()
        assert "is a database, but not a ledger" in await refusal(home)

    async def test_overwritten_pages_are_refused(self, home: Path) -> None:
        await fill(home)
        size = (home / "ledger.db").stat().st_size
        with (home / "ledger.db").open("r+b") as file:
            file.seek(4096)
            file.write(b"\xa5" * (size - 4096))
        assert "damaged" in await refusal(home)

    async def test_a_newer_ledger_is_refused_and_left_alone(self, home: Path) -> None:
        await fill(home)
        newer = SCHEMA + 1
        tamper(home, f"PRAGMA user_version = {newer}", around_triggers=False)
        assert f"written by a newer version of this program (schema {newer}, this one knows {SCHEMA})" in await refusal(
            home
        )
        connection = sqlite3.connect(home / "ledger.db")
        assert connection.execute("PRAGMA user_version").fetchone() == (newer,)
        connection.close()

    @pytest.mark.parametrize(
        ("statement", "complaint"),
        [
            ("UPDATE audit SET actor = 'uid:0' WHERE sequence = 7", "row 7 was changed"),
            ("UPDATE audit SET fields = '{}' WHERE sequence = 7", "row 7 was changed"),
            ("DELETE FROM audit WHERE sequence = 7", "row 7 is missing"),
            ("DELETE FROM audit WHERE sequence = 1", "row 1 is missing"),
            ("DELETE FROM audit WHERE sequence > 15", "ends at row 15, but 20 rows were written"),
            ("DELETE FROM audit", "ends at row 0, but 20 rows were written"),
            ("UPDATE chain SET head_hash = ''", "is not the recorded head"),
            ("UPDATE chain SET pruned_sequence = 3", "where row 4 belongs"),
            ("DELETE FROM chain", "head of the audit trail is gone"),
            ("UPDATE devices SET hygiene = 'clean'", "do not agree"),
            ("UPDATE devices SET document = replace(document, 'dirty', 'tidy')", "'tidy' is not a Hygiene"),
            ("UPDATE devices SET document = json_insert(document, '$.extra', 1)", "unknown field extra"),
            ("DROP TRIGGER audit_is_never_changed", "tables of the ledger"),
            ("CREATE TABLE more (id INTEGER)", "tables of the ledger"),
        ],
    )
    async def test_tampering_is_noticed(self, home: Path, statement: str, complaint: str) -> None:
        await fill(home)
        tamper(home, statement, around_triggers="TRIGGER" not in statement)
        assert complaint in await refusal(home)

    @pytest.mark.parametrize(
        "statement",
        [
            "UPDATE audit SET actor = 'uid:0'",
            "DELETE FROM audit WHERE sequence = 20",
            "INSERT OR REPLACE INTO audit SELECT 20, at, 'x', device, scrub, actor, fields, prev_hash, hash FROM audit",
            "INSERT INTO audit VALUES (22, 0.0, 'x', NULL, NULL, 'x', '{}', '', '')",
            "UPDATE chain SET head_sequence = 3",
            "DELETE FROM chain",
        ],
    )
    async def test_the_schema_itself_keeps_the_trail(self, home: Path, statement: str) -> None:
        await fill(home)
        with pytest.raises(sqlite3.IntegrityError):
            tamper(home, statement, around_triggers=False)
        assert verify(home).intact


class TestVerify:
    async def test_a_whole_ledger_is_intact_and_stays_untouched(self, home: Path, tmp_path: Path) -> None:
        await fill(home)
        copy = tmp_path / "copy"
        shutil.copytree(home, copy)
        (copy / "ledger.lock").unlink()

        def digest() -> dict[str, str]:
            return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in copy.iterdir()}

        before = digest()
        report = verify(copy)
        assert report.intact
        assert (report.rows, report.pruned.sequence, report.head.sequence) == (20, 0, 20)
        assert digest() == before

    async def test_the_head_is_the_one_that_a_start_reports(self, home: Path) -> None:
        await fill(home)
        ledger = SqliteLedger(home)
        state = await ledger.load()
        await ledger.close()
        report = verify(home)
        assert (report.head.sequence, report.head.hash) == (state.head_sequence, state.head_hash)

    async def test_a_broken_chain_is_reported(self, home: Path) -> None:
        await fill(home)
        tamper(home, "UPDATE audit SET name = 'nothing.happened' WHERE sequence = 7")
        report = verify(home)
        assert not report.intact
        assert report.sentence == "Audit row 7 was changed after it was written."

    async def test_a_running_service_is_not_disturbed(self, home: Path) -> None:
        ledger = SqliteLedger(home)
        await ledger.load()
        with pytest.raises(SecondInstance):
            verify(home)
        await ledger.commit(Change(records=(record(1),)))
        await ledger.close()

    async def test_no_room_for_the_copy_says_what_to_do(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        await fill(home)
        monkeypatch.setattr("shutil.copyfile", full)
        with pytest.raises(LedgerFailure, match=r"no room for a copy of the ledger, .*; free some, or name .* TMPDIR"):
            verify(home)

    async def test_a_ledger_that_may_not_be_read_says_who_may(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def kept_out(*_: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        await fill(home)
        monkeypatch.setattr("shutil.copyfile", kept_out)
        with pytest.raises(
            LedgerFailure, match=f"You may not read the ledger in {home} .*; look at it as root, or ask"
        ):
            verify(home)

    async def test_a_directory_without_a_ledger_is_said_to_be_one(self, tmp_path: Path) -> None:
        with pytest.raises(LedgerFailure, match=r"no ledger in .*ledger.db is missing"):
            verify(tmp_path)
        assert list(tmp_path.iterdir()) == []


def remove(home: Path) -> None:
    shutil.rmtree(home)


def remove_and_make_anew(home: Path) -> None:
    shutil.rmtree(home)
    home.mkdir(mode=0o700)
    (home / "ledger.db").touch()


def rename_the_directory(home: Path) -> None:
    home.rename(home.with_name("elsewhere"))


def rename(name: str) -> Callable[[Path], None]:
    def act(home: Path) -> None:
        (home / name).rename(home / "elsewhere")

    return act


def replace_by_a_copy(home: Path) -> None:
    shutil.copy2(home / "ledger.db", home / "copy")
    (home / "copy").replace(home / "ledger.db")


class TestFilesTakenAwayWhileOpen:
    @pytest.mark.parametrize(
        "act",
        [
            remove,
            remove_and_make_anew,
            rename_the_directory,
            rename("ledger.db"),
            rename("ledger.db-wal"),
            rename("ledger.lock"),
            replace_by_a_copy,
        ],
    )
    async def test_no_change_is_acknowledged_any_more(self, home: Path, act: Callable[[Path], None]) -> None:
        ledger = SqliteLedger(home)
        await ledger.load()
        await ledger.commit(Change(records=(record(1),), events=(event(),)))
        act(home)
        for version in (2, 3):
            with pytest.raises(LedgerFailure, match=f"{home}.*put the file back.*, or restart the service") as failed:
                await ledger.commit(Change(records=(record(version),), events=(event(),)))
            assert ledger.health() == str(failed.value)
        assert (await ledger.history(HistoryQuery()))[0].sequence == 1
        await ledger.close()

    async def test_a_file_that_is_put_back_ends_the_refusal_and_loses_nothing(self, home: Path) -> None:
        ledger = SqliteLedger(home)
        await ledger.load()
        await ledger.commit(Change(records=(record(1),), events=(event(),)))
        (home / "ledger.db").rename(home / "elsewhere")
        with pytest.raises(LedgerFailure):
            await ledger.commit(Change(records=(record(2),), events=(event(),)))
        (home / "elsewhere").rename(home / "ledger.db")
        await ledger.commit(Change(records=(record(2),), events=(event(),)))
        assert ledger.health() == "ok"
        await ledger.close()
        again = SqliteLedger(home)
        assert (await again.load()).records[GPU].version == 2
        await again.close()
