"""An invalid ledger: the service does not start on it, reports why, and leaves it unchanged."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from scrubber.emulator.playground import Playground
from tests.integration.acting import SOON, running, staged, writer


def truncate(ledger: Path) -> None:
    with ledger.open("r+b") as file:
        file.truncate(ledger.stat().st_size // 2)


def raise_version(ledger: Path) -> None:
    with sqlite3.connect(ledger) as connection:
        connection.execute("PRAGMA user_version = 99")
        connection.execute("UPDATE compatibility SET oldest_schema = 98, oldest_version = '9.7.0'")
    connection.close()


def rewrite_history(ledger: Path) -> None:
    connection = sqlite3.connect(ledger, isolation_level=None)
    (sql,) = connection.execute("SELECT sql FROM sqlite_schema WHERE name = 'audit_is_never_changed'").fetchone()
    connection.execute("DROP TRIGGER audit_is_never_changed")
    connection.execute("UPDATE audit SET actor = 'forged' WHERE name = 'handover.granted'")
    connection.execute(sql)
    connection.close()


def lose(ledger: Path) -> None:
    ledger.rename(ledger.with_name("elsewhere.db"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "damaged"),
        (raise_version, "install version 9.7.0"),
        (rewrite_history, "was changed after it was written"),
        (lose, "missing"),
    ],
)
async def test_service_does_not_start_on_an_untrusted_ledger_and_leaves_it_unchanged(
    damage: Callable[[Path], None], words: str
) -> None:
    async with staged(devices=1) as stage:
        await running(stage, writer("a", "team-a"))
        await stage.service.stop()
        ledger = stage.directory / "state" / "ledger.db"
        damage(ledger)
        found = ledger.read_bytes() if ledger.exists() else None
        assert await _exit_status(stage) == 1
        line = stage.service.log.read_text().splitlines()[-1]
        assert words in line, line
        assert str(ledger.parent) in line
        assert (ledger.read_bytes() if ledger.exists() else None) == found


async def _exit_status(stage: Playground) -> int:
    await stage.service.start()
    assert stage.service.process is not None
    async with asyncio.timeout(SOON):
        return await stage.service.process.wait()
