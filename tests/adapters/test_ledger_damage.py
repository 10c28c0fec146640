"""An existing ledger is never replaced by an empty one, and no change to it goes unnoticed.

Tampering is done as an attacker with root would do it: with SQL, and with the triggers removed.
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

from scrubber.adapters.ledger.offline import verify_ledger
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.adapters.ledger.state_directory import filesystem_magic
from scrubber.domain.errors import AlreadyRunning, InvalidConfiguration, LedgerFailure
from scrubber.ports.record import HistoryQuery, LedgerChange, LedgerState
from tests.ledger_samples import GPU, certificate, event, fill, record


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "state"


async def refusal(home: Path) -> str:
    """Return the message of a service that refuses to start on the ledger in ``home``; its lock is free afterwards."""
    before = sorted(path.name for path in home.iterdir() if path.name != "ledger.lock")
    ledger = SqliteLedger(home)
    try:
        with pytest.raises(LedgerFailure) as failure:
            await ledger.load()
        assert ledger.health() == str(failure.value)
        with pytest.raises(LedgerFailure):
            await ledger.commit(LedgerChange(records=(record(1),)))
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


class TestStateDirectory:
    async def test_state_directory_is_private(self, home: Path) -> None:
        await fill(home, 1)
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()} == {0o600}

    async def test_empty_state_directory_readable_by_others_is_made_private(self, home: Path) -> None:
        home.mkdir()
        home.chmod(0o755)  # as the kubelet creates a hostPath of type DirectoryOrCreate
        await fill(home, 1)
        assert stat.S_IMODE(home.stat().st_mode) == 0o700

    async def test_state_directory_with_a_ledger_readable_by_others_is_made_private(self, home: Path) -> None:
        await fill(home, 1)
        home.chmod(0o755)
        ledger = SqliteLedger(home)
        await ledger.load()
        await ledger.close()
        assert stat.S_IMODE(home.stat().st_mode) == 0o700

    @pytest.mark.parametrize("way", ["files of others", "symbolic link"])
    async def test_state_directory_with_foreign_files_or_behind_a_symlink_keeps_its_mode(
        self, home: Path, way: str
    ) -> None:
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
    async def test_state_directory_writable_by_others_is_refused(self, home: Path, mode: int) -> None:
        home.mkdir()
        home.chmod(mode)
        ledger = SqliteLedger(home)
        with pytest.raises(InvalidConfiguration, match=f"chmod 700 {home}"):
            await ledger.load()
        await ledger.close()
        assert list(home.iterdir()) == []

    async def test_state_directory_of_another_user_is_refused(self, home: Path) -> None:
        if os.geteuid() == 0:
            home.mkdir()
            os.chown(home, 12345, 12345)
        else:
            home = Path("/usr")
        ledger = SqliteLedger(home)
        with pytest.raises(InvalidConfiguration, match="belongs to uid"):
            await ledger.load()
        await ledger.close()
        assert not (home / "ledger.lock").exists()

    @pytest.mark.parametrize("magic", [0x6969, 0xFF534D42, 0xFE534D42, 0x65735546, 0x01021997])
    async def test_state_directory_on_a_network_file_system_is_refused(self, home: Path, magic: int) -> None:
        ledger = SqliteLedger(home, filesystem=lambda _: magic)
        with pytest.raises(InvalidConfiguration, match="local disk"):
            await ledger.load()
        await ledger.close()

    def test_file_system_type_is_read_from_the_kernel(self, tmp_path: Path) -> None:
        assert filesystem_magic(Path("/proc")) == 0x9FA0
        assert filesystem_magic(tmp_path) not in (0, 0x9FA0)
        with pytest.raises(FileNotFoundError):
            filesystem_magic(tmp_path / "nowhere")

    async def test_second_instance_is_refused_until_the_first_ends(self, home: Path) -> None:
        first, second = SqliteLedger(home), SqliteLedger(home)
        await first.load()
        with pytest.raises(AlreadyRunning, match=f"PID {os.getpid()}"):
            await second.load()
        await first.commit(LedgerChange(records=(record(1),)))
        await first.close()
        assert (await second.load()).records == {GPU: record(1)}
        await second.close()

    async def test_interrupted_first_start_is_repeated(self, home: Path) -> None:
        """Killed before the first ledger was complete: no record had been written, so nothing is lost."""
        home.mkdir(mode=0o700)
        (home / "ledger.db.new").write_bytes(b"half")
        (home / "ledger.db.new-wal").write_bytes(b"half")
        ledger = SqliteLedger(home)
        assert await ledger.load() == LedgerState()
        await ledger.close()
        assert not list(home.glob("*.new*"))

    async def test_ledger_without_its_marker_file_is_kept(self, home: Path) -> None:
        await fill(home)
        (home / "ledger.marker").unlink()
        ledger = SqliteLedger(home)
        assert (await ledger.load()).head_sequence == 20
        await ledger.close()
        assert (home / "ledger.marker").exists()


class TestDamagedLedger:
    """An existing ledger is never replaced by an empty one."""

    async def test_missing_database_is_refused(self, home: Path) -> None:
        await fill(home)
        (home / "ledger.db").unlink()
        assert "ledger.db is missing" in await refusal(home)
        assert not (home / "ledger.db").exists()

    async def test_write_ahead_log_without_its_database_is_refused(self, home: Path) -> None:
        home.mkdir(mode=0o700)
        (home / "ledger.db-wal").write_bytes(b"frames")
        assert "ledger.db-wal shows that a ledger existed" in await refusal(home)
        assert (home / "ledger.db-wal").read_bytes() == b"frames"

    async def test_emptied_database_is_refused(self, home: Path) -> None:
        await fill(home)
        os.truncate(home / "ledger.db", 0)
        assert "its records were lost" in await refusal(home)

    @pytest.mark.parametrize("kept", [50, 4096, 20_000])
    async def test_truncated_database_is_refused(self, home: Path, kept: int) -> None:
        await fill(home)
        assert (home / "ledger.db").stat().st_size > kept
        os.truncate(home / "ledger.db", kept)
        message = await refusal(home)
        assert "move its state directory aside as evidence, and start the service with an empty one" in message

    async def test_file_that_is_no_database_is_refused(self, home: Path) -> None:
        await fill(home)
        (home / "ledger.db").write_bytes(b"these are not the bytes you are looking for" * 200)
        assert "is not a ledger" in await refusal(home)

    async def test_unreadable_history_does_not_fail_ledger_health_or_commits(self, home: Path) -> None:
        ledger = SqliteLedger(home)
        await ledger.load()
        await ledger.commit(
            LedgerChange(records=(record(1),), certificates=(certificate("C-1"),), events=(event(certificate="C-1"),))
        )
        await ledger.close()
        tamper(home, "UPDATE certificates SET document = '{}'")
        ledger = SqliteLedger(home)
        await ledger.load()
        with pytest.raises(LedgerFailure, match="certificates C-1"):
            await ledger.history(HistoryQuery())
        assert ledger.health() == "ok"
        await ledger.commit(LedgerChange(records=(record(2),)))
        await ledger.close()

    async def test_another_programs_database_is_refused(self, home: Path) -> None:
        home.mkdir(mode=0o700)
        connection = sqlite3.connect(home / "ledger.db")
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
        connection.close()
        assert "is a database, but not a ledger" in await refusal(home)

    async def test_database_with_overwritten_pages_is_refused(self, home: Path) -> None:
        await fill(home)
        size = (home / "ledger.db").stat().st_size
        with (home / "ledger.db").open("r+b") as file:
            file.seek(4096)
            file.write(b"\xa5" * (size - 4096))
        assert "damaged" in await refusal(home)

    async def test_damaged_schema_that_is_not_text_is_refused(self, home: Path) -> None:
        await fill(home)
        content = (home / "ledger.db").read_bytes()
        for before, after in (
            (b"tabledevicesdevices", b"table\xf7evicesdevices"),
            (b"CREATE TABLE devices", b"CREATE TABLX devices"),
        ):
            assert before in content
            content = content.replace(before, after)
        (home / "ledger.db").write_bytes(content)
        assert "damaged" in await refusal(home)

    @pytest.mark.parametrize(
        ("statement", "message"),
        [
            ("UPDATE audit SET actor = 'uid:0' WHERE sequence = 7", "row 7 was changed"),
            ("UPDATE audit SET fields = '{}' WHERE sequence = 7", "row 7 was changed"),
            ("UPDATE audit SET at = 9e999 WHERE sequence = 7", "row 7 was changed"),
            ("DELETE FROM audit WHERE sequence = 7", "row 7 is missing"),
            ("DELETE FROM audit WHERE sequence = 1", "row 1 is missing"),
            ("DELETE FROM audit WHERE sequence > 15", "ends at row 15, but 20 rows were written"),
            ("DELETE FROM audit", "ends at row 0, but 20 rows were written"),
            ("UPDATE chain SET head_hash = ''", "is not the recorded head"),
            ("UPDATE chain SET pruned_sequence = 3", "where row 4 is expected"),
            ("DELETE FROM chain", "head of the audit log is missing"),
            ("UPDATE devices SET hygiene = 'clean'", "do not agree"),
            ("UPDATE devices SET document = replace(document, 'dirty', 'tidy')", "'tidy' is not a Hygiene"),
            ("UPDATE devices SET document = json_insert(document, '$.extra', 1)", "unknown field extra"),
            (f"UPDATE devices SET document = '{'[' * 100_000}'", "not JSON: maximum recursion depth"),
            ("DROP TRIGGER audit_is_never_changed", "tables of the ledger"),
            ("CREATE TABLE more (id INTEGER)", "tables of the ledger"),
        ],
        ids=lambda text: f"{text:.60}",
    )
    async def test_tampering_with_the_ledger_is_detected(self, home: Path, statement: str, message: str) -> None:
        await fill(home)
        tamper(home, statement, around_triggers="TRIGGER" not in statement)
        assert message in await refusal(home)

    async def test_hash_that_is_not_ascii_breaks_the_chain(self, home: Path) -> None:
        await fill(home)
        tamper(home, "UPDATE audit SET prev_hash = 'é' WHERE sequence = 1", "UPDATE chain SET pruned_hash = 'é'")
        assert "row 1 was changed" in await refusal(home)

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
    async def test_database_schema_prevents_changes_to_the_audit_log(self, home: Path, statement: str) -> None:
        await fill(home)
        with pytest.raises(sqlite3.IntegrityError):
            tamper(home, statement, around_triggers=False)
        assert verify_ledger(home).intact


class TestVerifyLedger:
    async def test_intact_ledger_verifies_and_stays_unchanged(self, home: Path, tmp_path: Path) -> None:
        await fill(home)
        copy = tmp_path / "copy"
        shutil.copytree(home, copy)
        (copy / "ledger.lock").unlink()

        def digest() -> dict[str, str]:
            return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in copy.iterdir()}

        before = digest()
        report = verify_ledger(copy)
        assert report.intact
        assert (report.rows, report.pruned.sequence, report.head.sequence) == (20, 0, 20)
        assert digest() == before

    async def test_verified_head_equals_the_head_loaded_at_start(self, home: Path) -> None:
        await fill(home)
        ledger = SqliteLedger(home)
        state = await ledger.load()
        await ledger.close()
        report = verify_ledger(home)
        assert (report.head.sequence, report.head.hash) == (state.head_sequence, state.head_hash)

    async def test_broken_chain_is_reported(self, home: Path) -> None:
        await fill(home)
        tamper(home, "UPDATE audit SET name = 'nothing.happened' WHERE sequence = 7")
        report = verify_ledger(home)
        assert not report.intact
        assert report.message == "Audit row 7 was changed after it was written."

    async def test_verification_does_not_disturb_a_running_service(self, home: Path) -> None:
        ledger = SqliteLedger(home)
        await ledger.load()
        with pytest.raises(AlreadyRunning):
            verify_ledger(home)
        await ledger.commit(LedgerChange(records=(record(1),)))
        await ledger.close()

    async def test_verification_without_space_for_a_copy_reports_the_remedy(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        await fill(home)
        monkeypatch.setattr("shutil.copyfile", full)
        with pytest.raises(LedgerFailure, match=r"no space for a copy of the ledger, .*; free some, or set TMPDIR"):
            verify_ledger(home)

    async def test_unreadable_ledger_error_names_the_users_with_access(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def kept_out(*_: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        await fill(home)
        monkeypatch.setattr("shutil.copyfile", kept_out)
        with pytest.raises(
            LedgerFailure, match=f"You may not read the ledger in {home} .*; run this command as root, or use"
        ):
            verify_ledger(home)

    async def test_verification_of_a_directory_without_a_ledger_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(LedgerFailure, match=r"no ledger in .*ledger.db is missing"):
            verify_ledger(tmp_path)
        assert list(tmp_path.iterdir()) == []


def remove(home: Path) -> None:
    shutil.rmtree(home)


def remove_and_recreate(home: Path) -> None:
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


class TestFilesRemovedWhileOpen:
    @pytest.mark.parametrize(
        "act",
        [
            remove,
            remove_and_recreate,
            rename_the_directory,
            rename("ledger.db"),
            rename("ledger.db-wal"),
            rename("ledger.lock"),
            replace_by_a_copy,
        ],
    )
    async def test_ledger_with_removed_files_acknowledges_no_change(
        self, home: Path, act: Callable[[Path], None]
    ) -> None:
        ledger = SqliteLedger(home)
        await ledger.load()
        await ledger.commit(LedgerChange(records=(record(1),), events=(event(),)))
        act(home)
        for version in (2, 3):
            with pytest.raises(
                LedgerFailure, match=f"{home}.*restore the file to its place.*, or restart the service"
            ) as failed:
                await ledger.commit(LedgerChange(records=(record(version),), events=(event(),)))
            assert ledger.health() == str(failed.value)
        assert (await ledger.history(HistoryQuery()))[0].sequence == 1
        await ledger.close()

    async def test_restored_file_ends_the_refusal_and_loses_no_change(self, home: Path) -> None:
        ledger = SqliteLedger(home)
        await ledger.load()
        await ledger.commit(LedgerChange(records=(record(1),), events=(event(),)))
        (home / "ledger.db").rename(home / "elsewhere")
        with pytest.raises(LedgerFailure):
            await ledger.commit(LedgerChange(records=(record(2),), events=(event(),)))
        (home / "elsewhere").rename(home / "ledger.db")
        await ledger.commit(LedgerChange(records=(record(2),), events=(event(),)))
        assert ledger.health() == "ok"
        await ledger.close()
        again = SqliteLedger(home)
        assert (await again.load()).records[GPU].version == 2
        await again.close()
