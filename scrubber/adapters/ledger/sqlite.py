"""The ledger on a disk. One thread of its own does all the work of SQLite; the event loop never waits for the disk.

The promise: once :meth:`SqliteLedger.commit` returns, the change survives a power cut, and is in the files that the next
instance will open; when it raises, nothing of the change is there. While the ledger cannot be written, nothing is
handed over, and :meth:`SqliteLedger.health` says why. On a full disk everything but grants is still stored, from a
reserve of our own (:mod:`scrubber.adapters.ledger.reserve`). A look at the past that fails is its caller's failure alone.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TypeVar

from scrubber.adapters.ledger.failures import START_ANEW, contradiction, translated
from scrubber.adapters.ledger.place import FileIdentity, Place, filesystem_magic
from scrubber.adapters.ledger.reading import Visit, certificate, chain_report, state, visit
from scrubber.adapters.ledger.reserve import RESERVE_BYTES, Reserve
from scrubber.adapters.ledger.retention import MAX_AUDIT_ROWS, MAX_BYTES, Retention
from scrubber.adapters.ledger.schema import create_database, open_database
from scrubber.adapters.ledger.shapes import Undecodable
from scrubber.adapters.ledger.trail import following, look_back, opening
from scrubber.adapters.ledger.transaction import store
from scrubber.domain.errors import Fatal, LedgerFailure
from scrubber.domain.evidence import Certificate
from scrubber.ports.record import START, Change, Head, HistoryEntry, HistoryQuery, LedgerState, TrailPage

__all__ = ["SqliteLedger"]

T = TypeVar("T")

_CHECKPOINT_EVERY = 250
"""Commits between two checkpoints. They run behind a commit's answer; SQLite's own would run before one."""

_PAGE = 100
"""Entries read at a time."""


class SqliteLedger:
    """A :class:`scrubber.ports.record.Ledger` in ``directory``, which it owns alone.

    Nothing is opened before :meth:`load`. A failed load may be repeated once its cause is mended.

    Args:
        directory: made with mode 0700 when it is not there.
        max_audit_rows, max_bytes: see :class:`Retention`.
        reserve_bytes: what is held back for a full disk; while there is no room for it nothing is granted.
        filesystem: tells which file system a directory is on (``f_type`` of statfs).
        observe: is told of every change: the seconds that it took, and whether it was stored. Never raises.

    Attributes:
        size_bytes: of the database and its log, as of the last change; None before a load.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_audit_rows: int = MAX_AUDIT_ROWS,
        max_bytes: int = MAX_BYTES,
        reserve_bytes: int = RESERVE_BYTES,
        filesystem: Callable[[Path], int] = filesystem_magic,
        observe: Callable[[float, bool], object] = lambda seconds, stored: None,
    ) -> None:
        self._place = Place(directory, filesystem)
        self._retention = Retention(max_audit_rows, max_bytes)
        self._reserve = Reserve(self._place.reserve, reserve_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._connection: sqlite3.Connection | None = None
        self._lock: int | None = None
        self._files: Mapping[Path, FileIdentity] = {}
        self._closed = False
        self._since_checkpoint = 0
        self._health = "ok"
        self._head = START
        self._observe = observe
        self.size_bytes: int | None = None

    async def load(self) -> LedgerState:
        """Take the directory, check everything in it, and answer what is there.

        Raises:
            LedgerFailure: corrupt, truncated, missing, newer than this program, or its audit chain is broken.
            SecondInstance: another process owns it.
            BadConfiguration: the directory is not a place for a ledger.
        """
        return await self._run(partial(self._remembering, self._load))

    async def commit(self, change: Change) -> None:
        """Store ``change`` whole and durably, or raise :class:`LedgerFailure` and store nothing of it."""
        began = monotonic()
        try:
            await self._run(partial(self._remembering, partial(self._commit, change)))
        except Fatal:
            self._observe(monotonic() - began, False)
            raise
        self._observe(monotonic() - began, True)
        self._since_checkpoint += 1
        if self._since_checkpoint >= _CHECKPOINT_EVERY and not self._closed:
            self._since_checkpoint = 0
            self._thread.submit(self._checkpoint)

    async def history(self, query: HistoryQuery) -> Sequence[HistoryEntry]:
        """See :class:`scrubber.ports.record.Ledger`.

        Read visit by visit, so that no question about the past holds up a hand-over for long.
        """
        look_back(query.before, self._head)
        found: list[HistoryEntry] = []
        below = query.before
        while len(found) < query.limit:
            wanted = replace(query, limit=min(_PAGE, query.limit - len(found)))
            seen = await self._run(partial(self._visit, wanted, below))
            found.extend(seen.entries)
            below = seen.below
            if below is None:
                break
        return found

    async def pages(self, after: int = 0) -> AsyncIterator[TrailPage]:
        """See :class:`scrubber.ports.record.AuditTrail`; a page is at most 500 rows."""
        page: TrailPage | None = await self._run(partial(self._opening, after))
        while page is not None:
            yield page
            page = await self._run(partial(self._following, page))

    async def certificate(self, id: str) -> Certificate | None:
        """See :class:`scrubber.ports.record.Certificates`."""
        return await self._run(lambda: certificate(self._open(), id))

    def head(self) -> Head:
        """The last audit row that was committed, without asking the disk; the start of the chain before a load."""
        return self._head

    async def close(self) -> None:
        """Let go of the files and the lock; the second call does nothing."""
        if self._closed:
            return
        self._closed = True
        released = asyncio.get_running_loop().run_in_executor(self._thread, self._release)
        self._thread.shutdown(wait=False)
        # Shielded: whoever is cancelled here still leaves a ledger that the next instance can open.
        await asyncio.shield(released)

    def health(self) -> str:
        """``"ok"``, or the sentence of the last load or change that failed; a change that is stored clears it.

        Except that a ledger without its whole reserve says that there is no space, whatever it could store.
        """
        return self._health

    # -- on the ledger's thread ----------------------------------------------------------------------------------------

    async def _run(self, work: Callable[[], T]) -> T:
        """Run ``work``; whatever the storage does wrong becomes a :class:`LedgerFailure`."""
        if self._closed:
            raise LedgerFailure(f"The ledger in {self._place.directory} is closed; the service is stopping.")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._translating, work)

    def _translating(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except (sqlite3.Error, OSError) as error:
            raise translated(error, self._place.directory) from error
        except Undecodable as error:
            raise LedgerFailure(
                f"The ledger in {self._place.directory} holds what this program cannot read ({error}); {START_ANEW}"
            ) from error

    def _remembering(self, work: Callable[[], T]) -> T:
        """Run ``work``, on which hand-overs depend; its failure is the ledger's health."""
        try:
            return self._translating(work)
        except Fatal as failure:
            self._health = str(failure)
            raise

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise LedgerFailure(f"The ledger in {self._place.directory} is not open.")
        return self._connection

    def _load(self) -> LedgerState:
        if self._connection is None:
            self._take()
        connection = self._open()
        try:
            report = chain_report(connection)
            if not report.intact:
                raise LedgerFailure(
                    f"{report.sentence} The ledger in {self._place.directory} cannot be believed; {START_ANEW}"
                )
            found = state(connection)
            self._tell_of_the_reserve()
        except BaseException:
            self._release()
            raise
        self._head = Head(found.head_sequence, found.head_hash)
        self.size_bytes = self._place.size()
        return found

    def _take(self) -> None:
        self._place.prepare()
        self._lock = self._place.lock()
        try:
            self._reserve.take()
            self._place.settle(create_database)
            before = self._place.identities()
            self._connection = open_database(self._place.database)
            self._place.unchanged({path: before[path] for path in before if path != self._place.log})
            self._files = self._place.identities()  # the log is there now, and stays until the connection is closed
        except BaseException:
            self._release()
            raise

    def _commit(self, change: Change) -> None:
        connection = self._open()
        self._place.unchanged(self._files)
        if change.grants and not self._reserve.take():
            raise self._full()
        try:
            self._store(connection, change)
        except sqlite3.OperationalError as error:
            if change.grants or not _is_full(error):
                raise
            self._store_from_the_reserve(connection, change, error)
        self._tell_of_the_reserve()
        self.size_bytes = self._place.size()

    def _store(self, connection: sqlite3.Connection, change: Change) -> None:
        try:
            self._head = store(connection, change, self._retention)
        except (Undecodable, UnicodeError, OverflowError) as error:
            raise LedgerFailure(contradiction(f"cannot be written ({error})")) from error

    def _store_from_the_reserve(
        self, connection: sqlite3.Connection, change: Change, failed: sqlite3.OperationalError
    ) -> None:
        """Store ``change`` in room that is ours; raises ``failed``, or a later failure, when there is none left.

        The log starts anew in the place that it has once all of it is in the database, which grows by less: so that is
        done before each try, and the reserve lasts for many changes.
        """
        while True:
            self._checkpoint()
            try:
                self._store(connection, change)
            except sqlite3.OperationalError as error:
                if not _is_full(error):
                    raise
            else:
                return
            if not self._reserve.give_back():
                raise failed

    def _tell_of_the_reserve(self) -> None:
        """Take back what was given; raises nothing, for what was stored by now is stored."""
        try:
            self._health = "ok" if self._reserve.take() else str(self._full())
        except OSError as error:
            self._health = str(translated(error, self._place.directory))

    def _full(self) -> LedgerFailure:
        return translated(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), self._place.directory)

    def _visit(self, query: HistoryQuery, below: int | None) -> Visit:
        return visit(self._open(), query, below)

    def _opening(self, after: int) -> TrailPage:
        connection = self._open()
        connection.execute("PRAGMA shrink_memory")  # what the disk has is looked at, and not what was read from it once
        return opening(connection, after)

    def _following(self, page: TrailPage) -> TrailPage | None:
        return following(self._open(), page)

    def _checkpoint(self) -> None:
        """Move the write-ahead log into the database. When that fails the log grows, and nothing is lost."""
        if self._connection is not None:
            try:
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            except sqlite3.Error as error:
                self._health = str(translated(error, self._place.directory))

    def _release(self) -> None:
        connection, self._connection = self._connection, None
        lock, self._lock = self._lock, None
        try:
            if connection is not None:
                connection.close()
        finally:
            self._reserve.close()
            if lock is not None:
                os.close(lock)


def _is_full(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF == sqlite3.SQLITE_FULL
