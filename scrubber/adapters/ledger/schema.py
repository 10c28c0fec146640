"""The tables, and how a database is created and opened.

The schema itself keeps the audit log append-only and contiguous: rows can only be added at the head and removed at
the pruned end. SQLite's locks are exclusive, so no other process changes the ledger while the service has it open, and
no shared-memory file can fault when the disk is full.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from scrubber.adapters.ledger.failures import START_OVER_HINT
from scrubber.domain.errors import LedgerFailure

__all__ = ["APPLICATION_ID", "SCHEMA", "create_database", "open_database"]

APPLICATION_ID = 0x53435242
"""``SCRB``; distinguishes a ledger from any other database."""

SCHEMA = 1
"""``PRAGMA user_version``. Increases with every change to the tables or to a document's format."""

_BUSY_SECONDS = 2.0

_TABLES = (
    """CREATE TABLE devices (
        device TEXT PRIMARY KEY,
        version INTEGER NOT NULL,
        hygiene TEXT NOT NULL,
        health TEXT NOT NULL,
        document TEXT NOT NULL
    ) STRICT, WITHOUT ROWID""",
    # `seen` is the head of the audit log when a row was last written: the row is deleted when the audit log is pruned
    # past it.
    """CREATE TABLE grants (
        device TEXT NOT NULL REFERENCES devices (device),
        sequence INTEGER NOT NULL,
        seen INTEGER NOT NULL,
        document TEXT NOT NULL,
        PRIMARY KEY (device, sequence)
    ) STRICT, WITHOUT ROWID""",
    """CREATE TABLE certificates (
        id TEXT PRIMARY KEY,
        device TEXT NOT NULL REFERENCES devices (device),
        next_grant INTEGER,
        seen INTEGER NOT NULL,
        document TEXT NOT NULL
    ) STRICT, WITHOUT ROWID""",
    """CREATE TABLE scrubs (
        id TEXT PRIMARY KEY,
        device TEXT NOT NULL REFERENCES devices (device),
        finished INTEGER NOT NULL CHECK (finished IN (0, 1)),
        seen INTEGER NOT NULL,
        document TEXT NOT NULL
    ) STRICT, WITHOUT ROWID""",
    # The record of the node itself; without a row it is as at the first start.
    """CREATE TABLE node (
        only INTEGER PRIMARY KEY CHECK (only = 1),
        document TEXT NOT NULL
    ) STRICT""",
    # The pause of the node's agents; without a row there is none.
    """CREATE TABLE agent_pause (
        only INTEGER PRIMARY KEY CHECK (only = 1),
        document TEXT NOT NULL
    ) STRICT""",
    """CREATE TABLE audit (
        sequence INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        name TEXT NOT NULL,
        device TEXT,
        scrub TEXT,
        actor TEXT NOT NULL,
        fields TEXT NOT NULL,
        prev_hash TEXT NOT NULL,
        hash TEXT NOT NULL
    ) STRICT""",
    """CREATE TABLE chain (
        only INTEGER PRIMARY KEY CHECK (only = 1),
        pruned_sequence INTEGER NOT NULL,
        pruned_hash TEXT NOT NULL,
        head_sequence INTEGER NOT NULL,
        head_hash TEXT NOT NULL
    ) STRICT""",
    "CREATE INDEX grants_by_age ON grants (seen)",
    "CREATE INDEX certificates_by_age ON certificates (seen)",
    "CREATE INDEX scrubs_by_age ON scrubs (seen)",
    "CREATE INDEX scrubs_under_way ON scrubs (id) WHERE finished = 0",
    "CREATE INDEX audit_by_device ON audit (device, sequence)",
)

_TRIGGERS = (
    """CREATE TRIGGER audit_grows_at_its_head BEFORE INSERT ON audit
    WHEN NOT EXISTS (
        SELECT 1 FROM chain WHERE head_sequence = NEW.sequence - 1 AND head_hash = NEW.prev_hash
    )
    BEGIN SELECT RAISE(ABORT, 'an audit row must follow the head of the audit log'); END""",
    """CREATE TRIGGER audit_moves_its_head AFTER INSERT ON audit
    BEGIN UPDATE chain SET head_sequence = NEW.sequence, head_hash = NEW.hash; END""",
    """CREATE TRIGGER audit_is_never_changed BEFORE UPDATE ON audit
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END""",
    """CREATE TRIGGER audit_shrinks_at_its_pruned_end BEFORE DELETE ON audit
    WHEN OLD.sequence > (SELECT pruned_sequence FROM chain)
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END""",
    """CREATE TRIGGER chain_never_goes_back BEFORE UPDATE ON chain
    WHEN NEW.pruned_sequence < OLD.pruned_sequence OR NEW.head_sequence < OLD.head_sequence
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END""",
    """CREATE TRIGGER chain_stays BEFORE DELETE ON chain
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END""",
)


def _connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, cached_statements=64)
    try:
        # Before the first access: the write-ahead log then needs no shared memory.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def _define(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN")
    for statement in (*_TABLES, *_TRIGGERS):
        connection.execute(statement)
    connection.execute("INSERT INTO chain VALUES (1, 0, '', 0, '')")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA}")
    connection.execute("COMMIT")


def create_database(path: Path) -> None:
    """Create a complete, empty ledger at ``path`` and close it; raises ``sqlite3.Error``."""
    connection = _connect(str(path))
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        _define(connection)
    finally:
        connection.close()


def open_database(path: Path, *, reported_directory: Path | None = None) -> sqlite3.Connection:
    """Open the ledger at ``path`` for this thread and check that it is an undamaged ledger with the expected schema.

    Args:
        reported_directory: directory named in errors, when ``path`` is a copy made for inspection; by default the
            directory of ``path``.

    Raises:
        LedgerFailure: It belongs to another program, is newer or damaged, or its tables were changed.
        sqlite3.Error: Any error reported by SQLite.
    """
    reported_directory = path.parent if reported_directory is None else reported_directory
    connection = _connect(str(path))
    try:
        _check_schema(connection, reported_directory / path.name)
        damage = [str(row[0]) for row in connection.execute("PRAGMA quick_check(1)")]
        if damage != ["ok"]:
            raise LedgerFailure(f"The ledger in {reported_directory} is damaged ({damage[0]}); {START_OVER_HINT}")
        if connection.execute("PRAGMA foreign_key_check").fetchone() is not None:
            raise LedgerFailure(f"The ledger in {reported_directory} lost records of devices; {START_OVER_HINT}")
        if _definitions(connection) != _our_definitions():
            raise LedgerFailure(
                f"The tables of the ledger in {reported_directory} were changed by another program; {START_OVER_HINT}"
            )
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != ("wal",):
            raise LedgerFailure(f"The ledger in {reported_directory} cannot use a write-ahead log; use a local disk.")
        # The ledger checkpoints after its commits; SQLite's own checkpoint, before a commit, is a fallback when that is
        # late.
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        connection.execute("PRAGMA journal_size_limit = 16777216")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise LedgerFailure(f"{path} is a database, but not a ledger; {START_OVER_HINT}")
    if version > SCHEMA:
        raise LedgerFailure(
            f"The ledger in {path.parent} was written by a newer version of this program (schema {version}; "
            f"this one reads {SCHEMA}); upgrade, or {START_OVER_HINT}"
        )
    if version < 1:
        raise LedgerFailure(f"The ledger in {path.parent} has the unknown schema {version}; {START_OVER_HINT}")


def _definitions(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    return connection.execute(
        "SELECT name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite!_%' ESCAPE '!' ORDER BY name"
    ).fetchall()


def _our_definitions() -> list[tuple[str, str]]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        _define(connection)
        return _definitions(connection)
    finally:
        connection.close()
