"""The program of a command backend: who may change it, and the digest of what runs.

The program runs as root, so no other user may be able to replace it: neither the file, nor a directory or a link on the
way to it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

from scrubber.domain.errors import BrokenCommand

__all__ = ["Executable", "ownership_problem"]

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS = 40  # as the kernel's
_Fingerprint = tuple[int, int, int, int, int]


def ownership_problem(path: Path, owner: int = 0) -> str | None:
    """Return why ``path`` may not run as root, in one sentence that says what to do; None if it may.

    Args:
        owner: uid that must own the file, and every directory and link on the way to it; root (0) may always.
    """
    if not path.is_absolute():
        return f"{path} is not an absolute path; write the whole path, from /."
    try:
        passed = [(each, each.lstat()) for each in _passed_on_the_way_to(path)]
        found = path.stat()
    except OSError as error:
        return f"{path} cannot be found: {error.strerror or error}."
    if not stat.S_ISREG(found.st_mode) or not found.st_mode & stat.S_IXUSR:
        return f"{path} is not an executable file; run: chmod 0755 {path}"
    for each, state in passed:
        link = stat.S_ISLNK(state.st_mode)
        if state.st_uid not in (0, owner):
            command = f"chown {'-h ' if link else ''}root {each}"
            return f"{each} belongs to the uid {state.st_uid}, who could replace the program; run: {command}"
        sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX
        if state.st_mode & _OTHERS_MAY_WRITE and not (link or sticky):
            return f"{each} is writable by others, who could replace the program; run: chmod go-w {each}"
    return None


def _passed_on_the_way_to(path: Path) -> list[Path]:
    """Return each directory and link that the kernel passes from ``/`` to what ``path`` leads to, and that itself.

    A link that leads to another link passes the directory of the second one, which the resolved path does not contain.

    Raises:
        OSError: something on the way is missing, or there are too many links.
    """
    at, links = Path("/"), 0
    found, waiting = {at: None}, list(reversed(path.parts[1:]))
    while waiting:
        name = waiting.pop()
        at = at.parent if name == ".." else at / name
        found[at] = None
        if not stat.S_ISLNK(at.lstat().st_mode):
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = at.readlink()
        waiting += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        at = Path("/") if target.is_absolute() else at.parent
    return list(found)


class Executable:
    """The program at ``path``; its ownership is checked before each run, and its digest is that of the file then.

    Args:
        owner: see :func:`ownership_problem`.
    """

    def __init__(self, path: Path, *, owner: int = 0) -> None:
        self.path = path
        self._owner = owner
        self._known: tuple[_Fingerprint, str] | None = None

    def digest(self) -> str:
        """Return ``sha256:`` and the hexadecimal digest of the file; it is read again only after it changed.

        Raises:
            BrokenCommand: it may not run as root, or cannot be read.
        """
        problem = ownership_problem(self.path, self._owner)
        if problem is not None:
            raise BrokenCommand(f"The command does not run: {problem}")
        try:
            with self.path.open("rb") as file:
                now = _fingerprint(os.fstat(file.fileno()))
                if self._known is None or self._known[0] != now:
                    self._known = now, f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        except OSError as error:
            raise BrokenCommand(f"The command {self.path} cannot be read: {error.strerror}.") from error
        return self._known[1]


def _fingerprint(found: os.stat_result) -> _Fingerprint:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
