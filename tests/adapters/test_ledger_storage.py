"""A ledger that fills up, on storage that fills up, fails, or hangs: it stays bounded, refuses, and recovers."""

import asyncio
import contextlib
import errno
import os
import resource
import sqlite3
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scrubber.adapters.ledger.failures import ledger_failure
from scrubber.adapters.ledger.offline import verify_ledger
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.adapters.ledger.state_directory import filesystem_magic
from scrubber.domain.errors import LedgerFailure
from scrubber.ports.record import HistoryQuery, LedgerChange
from tests.ledger_samples import GPU, OTHER_GPU, certificate, event, fill, grant, record, scrub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def home_in_memory() -> Iterator[Path]:
    """Provide a directory in memory, for a thousand commits, each of which would wait for the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="ledger-", dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory) / "state"


class TestLedgerSize:
    async def test_ledger_files_stop_growing(self, home_in_memory: Path) -> None:
        home = home_in_memory
        ledger = SqliteLedger(home, max_audit_rows=100)
        await ledger.load()

        async def live(first: int, last: int) -> int:
            for number in range(first, last):
                name = f"{number}"
                await ledger.commit(
                    LedgerChange(
                        records=(record(number, last_grant=grant(number)),),
                        grants=((GPU, grant(number)),),
                        certificates=(certificate(f"C-{name}"),),
                        scrubs=(scrub(f"S-{name}"),),
                        events=(event(note="x" * 200), event(certificate=f"C-{name}")),
                    )
                )
            return sum(path.stat().st_size for path in home.iterdir() if path.name != "ledger.reserve")

        early = await live(1, 350)
        assert await live(350, 900) <= 1.5 * early
        await ledger.close()
        connection = sqlite3.connect(home / "ledger.db")
        for table in ("audit", "grants", "certificates", "scrubs"):
            (rows,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
            assert 0 < rows <= 100, table
        connection.close()

    async def test_long_history_has_no_gaps(self, home: Path) -> None:
        ledger = SqliteLedger(home)
        await ledger.load()
        devices = (GPU, OTHER_GPU)
        await ledger.commit(LedgerChange(events=tuple(event(device=devices[number % 2]) for number in range(500))))
        everything = await ledger.history(HistoryQuery(limit=10_000))
        assert [entry.sequence for entry in everything] == list(range(500, 0, -1))
        of_one = await ledger.history(HistoryQuery(device=GPU, limit=230))
        assert [entry.sequence for entry in of_one] == list(range(499, 39, -2))
        await ledger.close()

    async def test_large_audit_rows_are_bounded_by_total_bytes(self, home: Path) -> None:
        bound = 512 * 1024
        ledger = SqliteLedger(home, max_bytes=bound)
        await ledger.load()
        for number in range(200):
            await ledger.commit(LedgerChange(events=(event(number=number, message="x" * 10_000),)))
        kept = await ledger.history(HistoryQuery(limit=1000))
        assert 10 < len(kept) < 60
        await ledger.close()
        assert (home / "ledger.db").stat().st_size <= 1.5 * bound
        assert verify_ledger(home).intact


async def commit_until_it_fails(ledger: SqliteLedger) -> None:
    for version in range(2, 1000):
        await ledger.commit(LedgerChange(records=(record(version),), events=(event(text="x" * 2000),)))


class TestStorageFailures:
    async def test_full_disk_refuses_the_change_and_recovers(self, cramped: "Cramped") -> None:
        ledger = SqliteLedger(cramped.directory, reserve_bytes=64 * 1024)
        await ledger.load()
        await ledger.commit(LedgerChange(records=(record(1),), events=(event(),)))
        with cramped.full():
            with pytest.raises(
                LedgerFailure, match=f"{cramped.directory}.* Hand-overs are refused until then"
            ) as failed:
                await commit_until_it_fails(ledger)
            assert ledger.health() == str(failed.value)
            stored = (await ledger.history(HistoryQuery(limit=1)))[0].sequence
        await ledger.commit(LedgerChange(records=(record(stored + 1),), events=(event(),)))
        assert ledger.health() == "ok"
        await ledger.close()
        ledger = SqliteLedger(cramped.directory)
        state = await ledger.load()
        assert (state.records[GPU].version, state.head_sequence) == (stored + 1, stored + 1)
        await ledger.close()

    async def test_read_only_storage_is_refused(self, home: Path, read_only: Callable[[Path], None]) -> None:
        await fill(home)
        read_only(home)
        ledger = SqliteLedger(home)
        with pytest.raises(LedgerFailure, match="Hand-overs are refused until then"):
            await ledger.load()
        await ledger.close()

    async def test_cancelled_commit_leaves_the_ledger_usable(self, home: Path) -> None:
        ledger = SqliteLedger(home)
        await ledger.load()
        for _ in range(20):
            committing = asyncio.create_task(ledger.commit(LedgerChange(records=(record(1),), events=(event(),))))
            await asyncio.sleep(0)
            committing.cancel()
            with contextlib.suppress(asyncio.CancelledError, LedgerFailure):
                await committing
        rows = await ledger.history(HistoryQuery())
        await ledger.close()
        ledger = SqliteLedger(home)
        state = await ledger.load()
        assert len(rows) == state.head_sequence == len(state.records) <= 1
        await ledger.close()

    async def test_event_loop_never_waits_for_the_disk(self, home: Path) -> None:
        """The storage hangs until the loop itself releases it."""
        loop, hanging, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def hang(directory: Path) -> int:
            loop.call_soon_threadsafe(hanging.set)
            assert go_on.wait(30), "the event loop is blocked"
            return filesystem_magic(directory)

        ledger = SqliteLedger(home, filesystem=hang)
        loading = asyncio.create_task(ledger.load())
        async with asyncio.timeout(30):
            await hanging.wait()
            go_on.set()
            await loading
        await ledger.close()


class Cramped:
    """A directory whose storage can be filled and freed again."""

    def __init__(self, directory: Path, *, mounted: bool) -> None:
        self.directory = directory
        self._mounted = mounted

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        if self._mounted:
            ballast = self.directory / "ballast"
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(b"x" * 4096):
                    pass
            try:
                yield
            finally:
                ballast.unlink()
        else:
            # Without the right to mount, no file of this process may grow: the kernel then refuses in the same way,
            # with EFBIG.
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, ((self.directory / "ledger.db-wal").stat().st_size + 1, hard))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def cramped(tmp_path: Path) -> Iterator[Cramped]:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "tmpfs", str(disk)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    yield Cramped(disk, mounted=mounted)
    if mounted:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], None]]:
    """Make a directory read-only: for root by a read-only bind mount of it onto itself, for others by its mode."""
    mounted: list[Path] = []
    closed: list[Path] = []

    def act(directory: Path) -> None:
        bind = subprocess.run(["mount", "--bind", str(directory), str(directory)], capture_output=True, check=False)
        if bind.returncode == 0:
            mounted.append(directory)
            subprocess.run(["mount", "-o", "remount,bind,ro", str(directory)], check=True, capture_output=True)
        elif os.geteuid() == 0:
            (directory / "ledger.lock").unlink()
            (directory / "ledger.lock").mkdir()
        else:
            for path in (*directory.iterdir(), directory):
                path.chmod(path.stat().st_mode & 0o500)
                closed.append(path)

    yield act
    for directory in mounted:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
    for path in reversed(closed):
        path.chmod(0o700)


PRIMARY_CODES = {
    name: code
    for name, code in vars(sqlite3).items()
    if name.startswith("SQLITE_") and isinstance(code, int) and name.count("_") == 1 and 0 < code < 100
}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            sqlite3.SQLITE_FULL,
            "No space left for the ledger in /var/lib/scrubber; free some. Hand-overs are refused",
        ),
        (sqlite3.SQLITE_READONLY, "read-only"),
        (sqlite3.SQLITE_READONLY_DBMOVED, "read-only"),
        (sqlite3.SQLITE_CORRUPT, "is damaged"),
        (sqlite3.SQLITE_NOTADB, "is not a ledger"),
        (sqlite3.SQLITE_BUSY, "Another program"),
        (sqlite3.SQLITE_CANTOPEN, "may not be opened"),
        (sqlite3.SQLITE_IOERR_FSYNC, "check the disk"),
        (sqlite3.SQLITE_CONSTRAINT_TRIGGER, "contradicts"),
        *((code, "") for code in sorted(set(PRIMARY_CODES.values()))),
    ],
)
def test_every_sqlite_failure_has_an_actionable_message(code: int, words: str) -> None:
    error = sqlite3.OperationalError("the library's words")
    error.sqlite_errorcode = code
    message = str(ledger_failure(error, Path("/var/lib/scrubber")))
    assert words in message
    assert "/var/lib/scrubber" in message
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left"),
        (errno.EDQUOT, "No space left"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "may not be opened"),
        (errno.EIO, "check the disk"),
    ],
)
def test_every_system_failure_has_an_actionable_message(number: int, words: str) -> None:
    message = str(ledger_failure(OSError(number, os.strerror(number)), Path("/var/lib/scrubber")))
    assert words in message
    assert "Hand-overs are refused" in message
