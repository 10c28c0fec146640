"""Looking at a ledger that no service has open: the copy that an auditor was given, or the one on a stopped node."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path

from scrubber.adapters.ledger.chain import ChainReport
from scrubber.adapters.ledger.failures import translated
from scrubber.adapters.ledger.place import Place
from scrubber.adapters.ledger.reading import chain_report
from scrubber.adapters.ledger.schema import open_database
from scrubber.adapters.ledger.shapes import Undecodable
from scrubber.domain.errors import LedgerFailure, SecondInstance

__all__ = ["verify"]


def verify(directory: Path) -> ChainReport:
    """Walk the audit chain of the ledger in ``directory``, which stays untouched: the work is done on a copy.

    A database in write-ahead mode cannot be read without writing beside it, and evidence is not written to.

    Raises:
        LedgerFailure: there is no ledger, or it is damaged, newer or not readable as one.
        SecondInstance: a service has it open; ask that service, or stop it first.
    """
    place = Place(directory)
    held = _hold(place)
    try:
        with tempfile.TemporaryDirectory(prefix="ledger-") as scratch:
            copy = Path(scratch) / place.database.name
            shutil.copyfile(place.database, copy)
            log = place.database.with_name(place.database.name + "-wal")
            if log.exists():
                shutil.copyfile(log, copy.with_name(log.name))
            connection = open_database(copy)
            try:
                return chain_report(connection)
            finally:
                connection.close()
    except FileNotFoundError as error:
        raise LedgerFailure(f"There is no ledger in {directory}: {error.filename} is missing.") from error
    except (sqlite3.Error, OSError) as error:
        raise translated(error, directory) from error
    except Undecodable as error:
        raise LedgerFailure(f"The ledger in {directory} holds what this program cannot read ({error}).") from error
    finally:
        if held is not None:
            os.close(held)


def _hold(place: Place) -> int | None:
    """Keep a service from starting on the ledger meanwhile; None for a copy that came without its lock file."""
    try:
        descriptor = os.open(place.lock_file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise translated(error, place.directory) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SecondInstance(
            f"A scrub service has the ledger in {place.directory} open; stop it first, or verify a copy."
        ) from None
    return descriptor
