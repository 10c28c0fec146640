"""Ledgers of other versions: those of this version, edited with SQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from scrubber.adapters.ledger.schema import CURRENT

__all__ = ["edited", "make_newer", "make_older"]


@contextmanager
def edited(home: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(home / "ledger.db", isolation_level=None)) as connection:
        yield connection
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def make_newer(home: Path, *statements: str, oldest_reader: int = CURRENT.number) -> None:
    """Turn the ledger into one of the next schema, which has a table, a column and fields that this one lacks."""
    with edited(home) as connection:
        connection.execute("CREATE TABLE topology (gpu TEXT PRIMARY KEY) STRICT")
        connection.execute("ALTER TABLE audit ADD COLUMN region TEXT")
        connection.execute("ALTER TABLE devices ADD COLUMN rack TEXT")
        for table in ("devices", "grants", "scrubs", "node", "agent_pause"):
            connection.execute(
                f"UPDATE {table} SET document = json_set(document, '$.format', 2, '$.rack', 'r7', '$.tags', json('[1]'))"
            )
        for grant in ("$.last_grant", "$.open_grants[0]"):
            connection.execute(
                f"UPDATE devices SET document = json_set(document, '{grant}.rack', 'r7')"
                f" WHERE json_type(document, '{grant}') = 'object'"
            )
        connection.execute(
            "UPDATE compatibility SET program_version = '0.2.0', oldest_schema = ?, oldest_version = '0.1.7'",
            (oldest_reader,),
        )
        connection.execute(f"PRAGMA user_version = {CURRENT.number + 1}")
        for statement in statements:
            connection.execute(statement)


def make_older(home: Path, *statements: str) -> None:
    """Turn the ledger into one of a time before records had the fields ``contaminated`` and ``admin_claims``."""
    with edited(home) as connection:
        connection.execute("UPDATE devices SET document = json_remove(document, '$.contaminated', '$.admin_claims')")
        connection.execute("UPDATE compatibility SET program_version = '0.0.9'")
        for statement in statements:
            connection.execute(statement)
