"""The tables, and how a database is created and opened.

The schema itself keeps the audit log append-only and contiguous: rows can only be added at the head and removed at
the pruned end. SQLite's locks are exclusive, so no other process changes the ledger while the service has it open, and
no shared-memory file can fault when the disk is full.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scrubber import __version__
from scrubber.adapters.ledger.failures import START_OVER_HINT
from scrubber.adapters.ledger.json_codec import Json
from scrubber.domain.errors import LedgerFailure

__all__ = [
    "APPLICATION_ID",
    "CURRENT",
    "Schema",
    "StoredSchema",
    "connect",
    "create_database",
    "open_database",
    "read_stored_schema",
]

APPLICATION_ID = 0x53435242
"""``SCRB``; distinguishes a ledger from any other database."""

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
    # Which program wrote this file, and which earlier ones can read it. Every version reads these columns.
    """CREATE TABLE compatibility (
        only INTEGER PRIMARY KEY CHECK (only = 1),
        program_version TEXT NOT NULL,
        oldest_schema INTEGER NOT NULL,
        oldest_version TEXT NOT NULL
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

DocumentUpgrade = Callable[[dict[str, Json]], dict[str, Json]]
"""Takes a document of one schema, as a JSON object with its format number, and returns that of the next schema."""


@dataclass(frozen=True, slots=True)
class Schema:
    """One version of what a ledger contains.

    Attributes:
        number: ``PRAGMA user_version``; increases with every change to the tables or to a document's format.
        oldest_reader: number of the oldest schema whose programs can read this one, by dropping what they do not know.
        oldest_reader_version: the first version of this project with that schema.
        upgrades: earlier schema → table → how a document of that table becomes one of the next schema. A table whose
            documents stay the same is omitted.
    """

    number: int
    oldest_reader: int
    oldest_reader_version: str
    tables: tuple[str, ...] = _TABLES
    upgrades: Mapping[int, Mapping[str, DocumentUpgrade]] = field(default_factory=dict)


# See docs/decisions/0046-upgrades.md.
CURRENT = Schema(number=1, oldest_reader=1, oldest_reader_version="0.1.0")


@dataclass(frozen=True, slots=True)
class StoredSchema:
    """What a file says about its own schema.

    Attributes:
        program_version: the version that wrote the file; empty if the file does not say.
        oldest_reader, oldest_reader_version: as in :class:`Schema`; the file's own number if it does not say.
    """

    number: int
    program_version: str
    oldest_reader: int
    oldest_reader_version: str


def connect(path: Path) -> sqlite3.Connection:
    """Open a database for this thread alone; raises ``sqlite3.Error``."""
    return _connect(str(path))


def _connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, cached_statements=64)
    try:
        # Before the first access: the write-ahead log then needs no shared memory.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
    except UnicodeDecodeError as error:  # Python cannot decode SQLite's message, which quotes the damaged schema
        connection.close()
        raise sqlite3.DatabaseError("the schema of the database is malformed, and is not text") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _empty(connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO chain VALUES (1, 0, '', 0, '')")


def _define(
    connection: sqlite3.Connection, schema: Schema, fill: Callable[[sqlite3.Connection], object] = _empty
) -> None:
    """Create the tables, have ``fill`` write into them, and only then the triggers, in one transaction."""
    connection.execute("BEGIN")
    for statement in schema.tables:
        connection.execute(statement)
    fill(connection)
    for statement in _TRIGGERS:
        connection.execute(statement)
    connection.execute(
        "INSERT INTO compatibility VALUES (1, ?, ?, ?)",
        (__version__, schema.oldest_reader, schema.oldest_reader_version),
    )
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {schema.number}")
    connection.execute("COMMIT")


def create_database(
    path: Path, schema: Schema = CURRENT, fill: Callable[[sqlite3.Connection], object] = _empty
) -> None:
    """Create a complete ledger at ``path`` and close it; raises ``sqlite3.Error``, and the errors of ``fill``.

    Args:
        fill: writes the rows of a ledger that is not empty, among them the one in ``chain``.
    """
    connection = _connect(str(path))
    try:
        # An incomplete file is discarded, so that nothing needs to be rolled back.
        connection.execute("PRAGMA journal_mode = MEMORY")
        _define(connection, schema, fill)
        connection.execute("PRAGMA journal_mode = WAL")
    finally:
        connection.close()


def read_stored_schema(connection: sqlite3.Connection, path: Path) -> StoredSchema:
    """Return the schema of the ledger at ``path``, of whatever version.

    Raises:
        LedgerFailure: It is another program's database, or has no schema that any version of this one ever wrote.
        sqlite3.Error: Any error reported by SQLite.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (number,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise LedgerFailure(f"{path} is a database, but not a ledger; {START_OVER_HINT}")
    if number < 1:
        raise LedgerFailure(f"The ledger in {path.parent} has the unknown schema {number}; {START_OVER_HINT}")
    rows: Iterable[tuple[str, int, str]] = ()
    if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'compatibility'").fetchone() is not None:
        rows = connection.execute("SELECT program_version, oldest_schema, oldest_version FROM compatibility").fetchall()
    for program, oldest, version in rows:
        return StoredSchema(number, program, oldest, version)
    return StoredSchema(number, "", number, "")


def open_database(
    path: Path, schema: Schema = CURRENT, *, reported_directory: Path | None = None
) -> sqlite3.Connection:
    """Open the ledger at ``path`` for this thread and check that it is an undamaged ledger with this ``schema``.

    Args:
        reported_directory: directory named in errors, when ``path`` is a copy made for inspection; by default the
            directory of ``path``.

    Raises:
        LedgerFailure: It belongs to another program, has another schema, is damaged, or its tables were changed.
        sqlite3.Error: Any error reported by SQLite.
    """
    reported_directory = path.parent if reported_directory is None else reported_directory
    connection = _connect(str(path))
    try:
        stored = read_stored_schema(connection, reported_directory / path.name)
        if stored.number != schema.number:
            raise LedgerFailure(
                f"The ledger in {reported_directory} has schema {stored.number}; this program writes {schema.number}. "
                "Start its service once, which converts the ledger."
            )
        damage = [str(row[0]) for row in connection.execute("PRAGMA quick_check(1)")]
        if damage != ["ok"]:
            raise LedgerFailure(f"The ledger in {reported_directory} is damaged ({damage[0]}); {START_OVER_HINT}")
        if connection.execute("PRAGMA foreign_key_check").fetchone() is not None:
            raise LedgerFailure(f"The ledger in {reported_directory} lost records of devices; {START_OVER_HINT}")
        if _definitions(connection) != _our_definitions(schema):
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


def _definitions(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    return connection.execute(
        "SELECT name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite!_%' ESCAPE '!' ORDER BY name"
    ).fetchall()


def _our_definitions(schema: Schema) -> list[tuple[str, str]]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        _define(connection, schema)
        return _definitions(connection)
    finally:
        connection.close()
