"""Versions of the service and its plugins, which may differ by one minor version while a node is upgraded.

Every client of this project states its version in the user agent of its calls, also to a service that is older or newer.
The service refuses the calls of plugins that are further apart, so each version needs to know only its neighbours. A
client that states no version is not refused: it is a tool of another project.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from scrubber import __version__
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import Refused

if TYPE_CHECKING:  # the command line, which is to start fast, needs no logging
    import structlog

__all__ = ["USER_AGENT", "PeerVersions", "is_supported", "stated_version"]

USER_AGENT = f"gpu-scrubber/{__version__}"

_STATED = re.compile(r"(?:^|\s)gpu-scrubber/([0-9A-Za-z.+!-]{1,40})(?=\s|$)")
_MINOR = re.compile(r"(\d{1,6})\.(\d{1,6})(?![0-9])")
_MAX_LOGGED_VERSIONS = 100
"""Versions that are logged once each: a caller may state any number."""

Metadata: TypeAlias = "Iterable[tuple[str, str | bytes]] | None"


def stated_version(metadata: Metadata) -> str:
    """Return the version that the client of a call states; empty if it states none."""
    for key, value in metadata or ():
        if key == "user-agent" and isinstance(value, str) and (found := _STATED.search(value)) is not None:
            return found[1]
    return ""


def is_supported(peer: str, own: str = __version__) -> bool:
    """Return whether two versions are at most one minor version apart, and of the same major version."""
    ours, theirs = _MINOR.match(own), _MINOR.match(peer)
    if ours is None or theirs is None:
        return False
    return ours[1] == theirs[1] and abs(int(ours[2]) - int(theirs[2])) <= 1


# See docs/decisions/0046-upgrades.md.
class PeerVersions:
    """The versions of the plugins that call this service. A version other than its own is logged once."""

    def __init__(self, log: structlog.typing.FilteringBoundLogger) -> None:
        self._log = log
        self._logged: set[str] = set()
        self._connected: Counter[str] = Counter()

    def check(self, metadata: Metadata) -> None:
        """Raise :class:`Refused` for a call of a plugin that is more than one minor version apart."""
        version = stated_version(metadata)
        if version in ("", __version__):
            return
        supported, first = is_supported(version), self._is_first(version)
        if supported:
            if first:
                self._log.info("plugin.version-differs", plugin_version=version, version=__version__)
            return
        message = (
            f"The plugin has version {version} and the scrub service version {__version__}. They may differ by one minor "
            "version: upgrade one of them, one minor version at a time."
        )
        if first:
            self._log.error("plugin.version-refused", plugin_version=version, version=__version__, message=message)
        raise Refused(message, public_message=message, code=ErrorCode.VERSION_UNSUPPORTED)

    @contextmanager
    def connected(self, metadata: Metadata) -> Iterator[None]:
        """Count the version of this call's client among :meth:`versions` while the body runs."""
        version = stated_version(metadata)
        self._connected[version] += 1
        try:
            yield
        finally:
            self._connected[version] -= 1

    def versions(self) -> list[str]:
        """Return the versions of the clients that are connected, without those that state none."""
        return sorted(version for version, count in self._connected.items() if version and count > 0)

    def _is_first(self, version: str) -> bool:
        if version in self._logged or len(self._logged) >= _MAX_LOGGED_VERSIONS:
            return False
        self._logged.add(version)
        return True
