"""Translation of SQLite and file system errors into messages that state what to do, in this one place."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from scrubber.domain.errors import LedgerFailure

__all__ = ["REFUSED_UNTIL_THEN", "START_OVER_HINT", "contradiction_message", "is_full", "ledger_failure"]

REFUSED_UNTIL_THEN = "Hand-overs are refused until then."

START_OVER_HINT = (
    "stop the service, move its state directory aside as evidence, and start the service with an empty one: "
    "every device is then scrubbed, a new key signs, and quarantines by operators are lost. Do not restore "
    "an older copy: the service could not detect that. Hand-overs are refused until then."
)
"""The remedy when the ledger cannot be trusted any more."""


def is_full(error: BaseException) -> bool:
    """Return whether ``error`` reports that there is no space left."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _full(directory: Path) -> str:
    return f"No space left for the ledger in {directory}; free some. {REFUSED_UNTIL_THEN}"


def _read_only(directory: Path) -> str:
    return (
        f"The ledger in {directory} cannot be written, because its storage is read-only; make it writable. "
        f"{REFUSED_UNTIL_THEN}"
    )


def _not_ours(directory: Path, detail: object) -> str:
    return (
        f"The ledger in {directory} may not be opened ({detail}); change its owner to the service's user. "
        f"{REFUSED_UNTIL_THEN}"
    )


def _broken(directory: Path, detail: object) -> str:
    return f"The storage of the ledger in {directory} failed ({detail}); check the disk. {REFUSED_UNTIL_THEN}"


def ledger_failure(error: sqlite3.Error | OSError, directory: Path) -> LedgerFailure:
    """Return ``error`` as a :class:`LedgerFailure` about the ledger in ``directory``; raise it ``from error``."""
    if isinstance(error, OSError):
        return LedgerFailure(_of_system(error, directory))
    # Errors that the module raises without calling SQLite have no code.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return LedgerFailure(_of_sqlite(code, error, directory))


def _of_system(error: OSError, directory: Path) -> str:
    if is_full(error):
        return _full(directory)
    if error.errno == errno.EROFS:
        return _read_only(directory)
    if error.errno in (errno.EACCES, errno.EPERM):
        return _not_ours(directory, error.strerror)
    return _broken(directory, error.strerror or error)


def _of_sqlite(code: int, error: sqlite3.Error, directory: Path) -> str:
    match code:
        case sqlite3.SQLITE_FULL:
            return _full(directory)
        case sqlite3.SQLITE_READONLY:
            return _read_only(directory)
        case sqlite3.SQLITE_NOTADB:
            return f"ledger.db in {directory} is not a ledger ({error}); {START_OVER_HINT}"
        case sqlite3.SQLITE_CORRUPT:
            return f"The ledger in {directory} is damaged ({error}); {START_OVER_HINT}"
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return f"Another program has the ledger in {directory} open ({error}); close it. {REFUSED_UNTIL_THEN}"
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
            return _not_ours(directory, error)
        case sqlite3.SQLITE_CONSTRAINT:
            return contradiction_message(f"contradicts the content of the ledger in {directory} ({error})")
        case sqlite3.SQLITE_IOERR:
            return _broken(directory, error)
        case _:
            return (
                f"The ledger in {directory} failed ({error}); see the service's log. Hand-overs are refused "
                "until a change can be stored again."
            )


def contradiction_message(problem: str) -> str:
    """Return the message for a change that must not be stored: always a defect of the program, never of the storage."""
    return f"A change {problem}. Nothing of it was stored. This is a bug in the service; please report it."
