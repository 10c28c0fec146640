"""Looking at a ledger that no service has open: the copy that an auditor was given, or the one on a stopped node.

The promise: what is looked at stays as it is. A database in write-ahead mode cannot be read without writing beside it,
and evidence is not written to, so the work is done on a copy.
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

from scrubber.adapters.ledger.chain import ChainReport
from scrubber.adapters.ledger.failures import translated
from scrubber.adapters.ledger.place import Place
from scrubber.adapters.ledger.reading import chain_report
from scrubber.adapters.ledger.schema import open_database
from scrubber.adapters.ledger.shapes import Undecodable
from scrubber.adapters.ledger.trail import following, opening
from scrubber.domain.errors import LedgerFailure, SecondInstance
from scrubber.ports.record import TrailPage

__all__ = ["pages", "verify"]


def verify(directory: Path) -> ChainReport:
    """Walk the audit chain of the ledger in ``directory``.

    Raises:
        LedgerFailure: there is no ledger, or it is damaged, newer or not readable as one.
        SecondInstance: a service has it open; ask that service, or stop it first.
    """
    with _opened(directory) as connection:
        return chain_report(connection)


def pages(directory: Path, after: int = 0) -> Iterator[TrailPage]:
    """The trail of the ledger in ``directory``, as :meth:`scrubber.ports.record.AuditTrail.pages` answers it.

    Raises:
        InvalidRequest: the trail ends before row ``after``.
        LedgerFailure, SecondInstance: as :func:`verify`.
    """
    with _opened(directory) as connection:
        page: TrailPage | None = opening(connection, after)
        while page is not None:
            yield page
            page = following(connection, page)


@contextmanager
def _opened(directory: Path) -> Iterator[sqlite3.Connection]:
    """A copy of the ledger in ``directory``, and a service kept from starting on the original meanwhile."""
    place = Place(directory)
    held: int | None = None
    try:
        held = _hold(place)
        with tempfile.TemporaryDirectory(prefix="ledger-") as scratch:
            copy = Path(scratch) / place.database.name
            _copied(place.database, copy)
            if place.log.exists():
                _copied(place.log, copy.with_name(place.log.name))
            connection = open_database(copy, home=directory)
            try:
                yield connection
            finally:
                connection.close()
    except FileNotFoundError as error:
        if error.filename is None:  # of tempfile: nowhere to put a copy
            raise LedgerFailure(f"The ledger is looked at on a copy. {error.strerror}.") from error
        raise LedgerFailure(f"There is no ledger in {directory}: {error.filename} is missing.") from error
    except PermissionError as error:
        raise LedgerFailure(
            f"You may not read the ledger in {directory} ({error.strerror}); look at it as root, or ask for an export of "
            "its audit trail."
        ) from error
    except (sqlite3.Error, OSError) as error:
        raise translated(error, directory) from error
    except Undecodable as error:
        raise LedgerFailure(f"The ledger in {directory} holds what this program cannot read ({error}).") from error
    finally:
        if held is not None:
            os.close(held)


def _copied(original: Path, copy: Path) -> None:
    try:
        shutil.copyfile(original, copy)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise LedgerFailure(
            f"{copy.parent} has no room for a copy of the ledger, and the ledger itself is not worked on; free some, or "
            "name another directory in TMPDIR."
        ) from error


def _hold(place: Place) -> int | None:
    """Keep a service from starting on the ledger meanwhile; None for a copy that came without its lock file."""
    try:
        descriptor = os.open(place.lock_file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SecondInstance(
            f"A scrub service has the ledger in {place.directory} open; ask that service, stop it first, or look at a "
            "copy."
        ) from None
    return descriptor
