"""Reading a ledger that no service has open: a copy provided to an auditor, or the one on a stopped node.

Guarantee: the original is not modified. A database in write-ahead mode cannot be read without writing next to it, and
evidence must not be written to, so all work is done on a copy. The copy of a ledger that another version wrote is
converted; that changes no row of its audit log.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time

from scrubber.adapters.ledger.chain import ChainReport
from scrubber.adapters.ledger.conversion import convert
from scrubber.adapters.ledger.failures import ledger_failure
from scrubber.adapters.ledger.json_codec import CodecError
from scrubber.adapters.ledger.pages import first_page, next_page
from scrubber.adapters.ledger.queries import verify_stored_chain
from scrubber.adapters.ledger.schema import open_database
from scrubber.adapters.ledger.state_directory import StateDirectory
from scrubber.domain.errors import AlreadyRunning, LedgerFailure
from scrubber.ports.record import AuditLogPage

__all__ = ["read_pages", "verify_ledger"]


def verify_ledger(directory: Path) -> ChainReport:
    """Check the audit chain of the ledger in ``directory``.

    Raises:
        LedgerFailure: There is no ledger, or it is damaged, or this version cannot read it.
        AlreadyRunning: A service has it open; query that service, or stop it first.
    """
    with _open_copy(directory) as connection:
        return verify_stored_chain(connection)


def read_pages(directory: Path, after: int = 0) -> Iterator[AuditLogPage]:
    """Yield the audit log of the ledger in ``directory``, like :meth:`scrubber.ports.record.AuditLog.pages`.

    Raises:
        InvalidRequest: The audit log ends before row ``after``.
        LedgerFailure, AlreadyRunning: As for :func:`verify_ledger`.
    """
    with _open_copy(directory) as connection:
        page: AuditLogPage | None = first_page(connection, after)
        while page is not None:
            yield page
            page = next_page(connection, page)


@contextmanager
def _open_copy(directory: Path) -> Iterator[sqlite3.Connection]:
    """Open a copy of the ledger in ``directory``, and prevent a service from starting on the original meanwhile."""
    place = StateDirectory(directory)
    held: int | None = None
    try:
        held = _lock_original(place)
        with tempfile.TemporaryDirectory(prefix="ledger-") as scratch:
            copy = Path(scratch) / place.database.name
            _copy_file(place.database, copy)
            if place.log.exists():
                _copy_file(place.log, copy.with_name(place.log.name))
            convert(StateDirectory(copy.parent), time(), reported_directory=directory)
            connection = open_database(copy, reported_directory=directory)
            try:
                yield connection
            finally:
                connection.close()
    except FileNotFoundError as error:
        if error.filename is None:  # raised by tempfile: there is no directory for a copy
            raise LedgerFailure(
                f"The ledger is read from a copy, which could not be created. {error.strerror}."
            ) from error
        raise LedgerFailure(f"There is no ledger in {directory}: {error.filename} is missing.") from error
    except PermissionError as error:
        raise LedgerFailure(
            f"You may not read the ledger in {directory} ({error.strerror}); run this command as root, or use "
            "an export of its audit log."
        ) from error
    except (sqlite3.Error, OSError) as error:
        raise ledger_failure(error, directory) from error
    except CodecError as error:
        raise LedgerFailure(
            f"The ledger in {directory} contains data that this program cannot read ({error})."
        ) from error
    finally:
        if held is not None:
            os.close(held)


def _copy_file(original: Path, copy: Path) -> None:
    try:
        shutil.copyfile(original, copy)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise LedgerFailure(
            f"{copy.parent} has no space for a copy of the ledger, from which it is read; free some, or set "
            "TMPDIR to another directory."
        ) from error


def _lock_original(place: StateDirectory) -> int | None:
    """Prevent a service from starting on the ledger meanwhile; None for a copy without its lock file."""
    try:
        descriptor = os.open(place.lock_file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise AlreadyRunning(
            f"A scrub service has the ledger in {place.directory} open; query that service, stop it first, or "
            "use a copy."
        ) from None
    return descriptor
