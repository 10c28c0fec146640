"""The policy in force, and the file that it comes from.

A file that is replaced takes effect as a whole or not at all: one that is no policy leaves the old one in force, and says
why. Files are replaced in many ways (an editor's rename, a ConfigMap's link, a write in place), so what is looked at is
what the path leads to.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from scrubber.config.policy_file import load_policy
from scrubber.config.shipped import find_policy
from scrubber.domain.errors import BadConfiguration
from scrubber.domain.policy import Policy

__all__ = ["PolicySource"]

_Print = tuple[int, int, int, int] | None


class PolicySource:
    """One policy's.

    Args:
        wanted: a path, or the name of a policy that ships.
        adjust: what the settings of this start make of it; may refuse it.

    Raises:
        BadConfiguration: it cannot be read, or cannot be in force.
    """

    def __init__(self, wanted: str | Path, *, adjust: Callable[[Policy], Policy] = lambda policy: policy) -> None:
        self._path = find_policy(wanted) if isinstance(wanted, str) else wanted
        self._adjust = adjust
        self._seen = _fingerprint(self._path)
        self._policy = adjust(load_policy(self._path))
        self._refused = ""

    @property
    def refused(self) -> str:
        """Why the file as it was last read is not in force; empty otherwise."""
        return self._refused

    @property
    def path(self) -> Path:
        return self._path

    @property
    def policy(self) -> Policy:
        """The one in force."""
        return self._policy

    @property
    def touched(self) -> bool:
        """Whether the file is another one, or another state of it, than when it was last read."""
        return _fingerprint(self._path) != self._seen

    def reload(self) -> bool:
        """Read the file again and put it in force; whether anything is another policy's now.

        Raises:
            BadConfiguration: it cannot be read, or cannot be in force; the old one stays.
        """
        self._seen = _fingerprint(self._path)
        try:
            policy = self._adjust(load_policy(self._path))
        except BadConfiguration as error:
            self._refused = str(error)
            raise
        before, self._policy, self._refused = self._policy, policy, ""
        return policy != before  # not their digests, which are about proof alone


def _fingerprint(path: Path) -> _Print:
    try:
        found = os.stat(path)
    except OSError:
        return None  # gone, for now or for good: reading it says why
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)
