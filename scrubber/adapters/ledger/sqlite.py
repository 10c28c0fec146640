"""The ledger on a disk. A dedicated thread does all SQLite work; the event loop never waits for the disk.

Guarantee: once :meth:`SqliteLedger.commit` returns, the change survives a power failure and is in the files that the
next instance opens; when it raises, none of the change is stored. While the ledger cannot be written, nothing is handed
over, and :meth:`SqliteLedger.health` reports the reason. On a full disk everything except grants is still stored, from
a private reserve (:mod:`scrubber.adapters.ledger.reserve`). The failure of a history query affects only its caller.
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
from time import monotonic, time
from typing import TypeVar

from scrubber.adapters.ledger.conversion import Conversion, convert
from scrubber.adapters.ledger.failures import START_OVER_HINT, contradiction_message, is_full, ledger_failure
from scrubber.adapters.ledger.json_codec import CodecError
from scrubber.adapters.ledger.pages import check_before, first_page, next_page
from scrubber.adapters.ledger.queries import (
    HistoryBatch,
    read_certificate,
    read_history_batch,
    read_state,
    verify_stored_chain,
)
from scrubber.adapters.ledger.reserve import RESERVE_BYTES, DiskReserve
from scrubber.adapters.ledger.retention import MAX_AUDIT_ROWS, MAX_BYTES, Retention
from scrubber.adapters.ledger.schema import CURRENT, Schema, create_database, open_database
from scrubber.adapters.ledger.state_directory import FileIdentity, StateDirectory, filesystem_magic
from scrubber.adapters.ledger.transaction import store_change
from scrubber.domain.errors import FatalError, LedgerFailure
from scrubber.domain.evidence import Certificate
from scrubber.ports.record import (
    CHAIN_START,
    AuditHead,
    AuditLogPage,
    HistoryEntry,
    HistoryQuery,
    LedgerChange,
    LedgerState,
)

__all__ = ["SqliteLedger"]

T = TypeVar("T")

_CHECKPOINT_EVERY = 250
"""Commits between two checkpoints. They run after the result of a commit is returned; SQLite's own would run before."""

_HISTORY_BATCH_ROWS = 100
"""Entries read at a time."""


class SqliteLedger:
    """A :class:`scrubber.ports.record.Ledger` in ``directory``, for its exclusive use.

    Nothing is opened before :meth:`load`. A failed load may be repeated once its cause is fixed.

    Args:
        directory: created with mode 0700 when it does not exist.
        max_audit_rows, max_bytes: see :class:`Retention`.
        reserve_bytes: space reserved for a full disk; while there is no room for it nothing is granted.
        filesystem: returns the file system type of a directory (``f_type`` of statfs).
        observe: called for every change with the seconds that it took and whether it was stored. Must not raise.
        schema: what it contains; a ledger with another schema is converted.
        wall: wall-clock seconds.

    Attributes:
        conversion: how :meth:`load` converted a ledger that another version wrote; None if that was not necessary.
        size_bytes: size of the database and its log, as of the last change; None before a load.
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
        schema: Schema = CURRENT,
        wall: Callable[[], float] = time,
    ) -> None:
        self._directory = StateDirectory(directory, filesystem)
        self._retention = Retention(max_audit_rows, max_bytes)
        self._reserve = DiskReserve(self._directory.reserve, reserve_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._connection: sqlite3.Connection | None = None
        self._lock: int | None = None
        self._files: Mapping[Path, FileIdentity] = {}
        self._closed = False
        self._since_checkpoint = 0
        self._health = "ok"
        self._head = CHAIN_START
        self._observe = observe
        self._schema = schema
        self._wall = wall
        self.conversion: Conversion | None = None
        self.size_bytes: int | None = None

    async def load(self) -> LedgerState:
        """Lock the directory, check everything in it, and return its state.

        Raises:
            LedgerFailure: The ledger is corrupt, truncated, missing, cannot be converted for this program, or its audit
                chain is broken.
            AlreadyRunning: Another process owns it.
            InvalidConfiguration: The directory is not suitable for a ledger.
        """
        return await self._run(partial(self._record_health, self._load))

    async def commit(self, change: LedgerChange) -> None:
        """Store ``change`` completely and durably, or raise :class:`LedgerFailure` and store none of it."""
        began = monotonic()
        try:
            await self._run(partial(self._record_health, partial(self._commit, change)))
        except FatalError:
            self._observe(monotonic() - began, False)
            raise
        self._observe(monotonic() - began, True)
        self._since_checkpoint += 1
        if self._since_checkpoint >= _CHECKPOINT_EVERY and not self._closed:
            self._since_checkpoint = 0
            self._thread.submit(self._checkpoint)

    async def history(self, query: HistoryQuery) -> Sequence[HistoryEntry]:
        """See :class:`scrubber.ports.record.Ledger`.

        Reads in batches, so that no history query delays a hand-over for long.
        """
        check_before(query.before, self._head)
        found: list[HistoryEntry] = []
        below = query.before
        while len(found) < query.limit:
            batch_query = replace(query, limit=min(_HISTORY_BATCH_ROWS, query.limit - len(found)))
            seen = await self._run(partial(self._history_batch, batch_query, below))
            found.extend(seen.entries)
            below = seen.below
            if below is None:
                break
        return found

    async def pages(self, after: int = 0) -> AsyncIterator[AuditLogPage]:
        """See :class:`scrubber.ports.record.AuditLog`; a page is at most 500 rows."""
        page: AuditLogPage | None = await self._run(partial(self._first_page, after))
        while page is not None:
            yield page
            page = await self._run(partial(self._next_page, page))

    async def certificate(self, id: str) -> Certificate | None:
        """See :class:`scrubber.ports.record.Certificates`."""
        return await self._run(lambda: read_certificate(self._require_connection(), id))

    def head(self) -> AuditHead:
        """Return the last committed audit row, without reading the disk; the start of the chain before a load."""
        return self._head

    async def close(self) -> None:
        """Close the files and release the lock; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        released = asyncio.get_running_loop().run_in_executor(self._thread, self._release)
        self._thread.shutdown(wait=False)
        # Shielded: a caller cancelled here still leaves a ledger that the next instance can open.
        await asyncio.shield(released)

    def health(self) -> str:
        """Return ``"ok"``, or the message of the last load or change that failed; a stored change clears it.

        Exception: a ledger without its whole reserve reports that there is no space, even if it could store a change.
        """
        return self._health

    # -- on the ledger's thread ----------------------------------------------------------------------------------------

    async def _run(self, work: Callable[[], T]) -> T:
        """Run ``work``; every storage error becomes a :class:`LedgerFailure`."""
        if self._closed:
            raise LedgerFailure(f"The ledger in {self._directory.directory} is closed; the service is stopping.")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._translate_errors, work)

    def _translate_errors(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except (sqlite3.Error, OSError) as error:
            raise ledger_failure(error, self._directory.directory) from error
        except CodecError as error:
            raise LedgerFailure(
                f"The ledger in {self._directory.directory} contains data that this program cannot read "
                f"({error}); {START_OVER_HINT}"
            ) from error

    def _record_health(self, work: Callable[[], T]) -> T:
        """Run ``work``, on which hand-overs depend; its failure becomes the ledger's health."""
        try:
            return self._translate_errors(work)
        except FatalError as failure:
            self._health = str(failure)
            raise

    def _require_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise LedgerFailure(f"The ledger in {self._directory.directory} is not open.")
        return self._connection

    def _load(self) -> LedgerState:
        if self._connection is None:
            self._open_directory()
        connection = self._require_connection()
        try:
            report = verify_stored_chain(connection)
            if not report.intact:
                raise LedgerFailure(
                    f"{report.message} The ledger in {self._directory.directory} cannot be trusted; {START_OVER_HINT}"
                )
            found = read_state(connection)
            self._refill_reserve()
        except BaseException:
            self._release()
            raise
        self._head = AuditHead(found.head_sequence, found.head_hash)
        self.size_bytes = self._directory.size()
        return found

    def _open_directory(self) -> None:
        self._directory.prepare()
        self._lock = self._directory.lock()
        try:
            self._reserve.allocate()
            self._directory.ensure_database(partial(create_database, schema=self._schema))
            self.conversion = convert(self._directory, self._wall(), self._schema)
            before = self._directory.file_identities()
            self._connection = open_database(self._directory.database, self._schema)
            self._directory.check_unchanged({path: before[path] for path in before if path != self._directory.log})
            self._files = (
                self._directory.file_identities()
            )  # the log exists now, and remains until the connection is closed
        except BaseException:
            self._release()
            raise

    def _commit(self, change: LedgerChange) -> None:
        connection = self._require_connection()
        self._directory.check_unchanged(self._files)
        if change.grants and not self._reserve.allocate():
            raise self._disk_full_failure()
        try:
            self._store(connection, change)
        except sqlite3.OperationalError as error:
            if change.grants or not is_full(error):
                raise
            self._store_using_reserve(connection, change, error)
        self._refill_reserve()
        self.size_bytes = self._directory.size()

    def _store(self, connection: sqlite3.Connection, change: LedgerChange) -> None:
        try:
            self._head = store_change(connection, change, self._retention)
        except (CodecError, UnicodeError, OverflowError) as error:
            raise LedgerFailure(contradiction_message(f"cannot be written ({error})")) from error

    def _store_using_reserve(
        self, connection: sqlite3.Connection, change: LedgerChange, failed: sqlite3.OperationalError
    ) -> None:
        """Store ``change`` in the reserved space; raises ``failed``, or a later failure, when none is left.

        The log reuses its space from the start once all of it has been copied to the database, which grows by less. A
        checkpoint is therefore made before each attempt, and the reserve lasts for many changes.
        """
        while True:
            self._checkpoint()
            try:
                self._store(connection, change)
            except sqlite3.OperationalError as error:
                if not is_full(error):
                    raise
            else:
                return
            if not self._reserve.release_slice():
                raise failed

    def _refill_reserve(self) -> None:
        """Allocate the released space again; never raises, because the change is already stored."""
        try:
            self._health = "ok" if self._reserve.allocate() else str(self._disk_full_failure())
        except OSError as error:
            self._health = str(ledger_failure(error, self._directory.directory))

    def _disk_full_failure(self) -> LedgerFailure:
        return ledger_failure(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), self._directory.directory)

    def _history_batch(self, query: HistoryQuery, below: int | None) -> HistoryBatch:
        return read_history_batch(self._require_connection(), query, below)

    def _first_page(self, after: int) -> AuditLogPage:
        connection = self._require_connection()
        connection.execute("PRAGMA shrink_memory")  # read what is on the disk now, not what was cached from it
        return first_page(connection, after)

    def _next_page(self, page: AuditLogPage) -> AuditLogPage | None:
        return next_page(self._require_connection(), page)

    def _checkpoint(self) -> None:
        """Copy the write-ahead log into the database. When that fails the log grows, and nothing is lost."""
        if self._connection is not None:
            try:
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            except sqlite3.Error as error:
                self._health = str(ledger_failure(error, self._directory.directory))

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
