"""The file of a command backend: its program, its deadlines, its environment.

A changed file takes effect completely or not at all: while it is invalid, what was read before stays in force.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scrubber.config.value_formats import (
    Duration,
    KeyFormat,
    MappingOf,
    SectionFormat,
    Text,
    json_schema,
    read_document,
)
from scrubber.config.yaml_document import parse_yaml, read_configuration_file
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["CommandFile", "CommandFileSource", "command_file_schema", "parse_command_file"]

_DEFAULT_DEADLINE = 5.0
_SHORTEST = 0.1
_LONGEST_POLL = 600.0
_VERBS = ("capabilities", "inventory", "holders", "telemetry", "settings", "settings-apply", "reset-plan")
"""The verbs with a deadline of their own; those of ``erase``, ``reset`` and ``diagnose`` are in the policy."""


@dataclass(frozen=True, slots=True)
class CommandFile:
    """The content of a file.

    Attributes:
        deadlines: seconds for every verb that has one here.
        poll_interval: seconds between two snapshots that look for new errors.
    """

    program: Path
    deadlines: Mapping[str, float]
    environment: Mapping[str, str]
    poll_interval: float


_FILE = SectionFormat(
    "CommandFile",
    "A program that manages the devices of a node.",
    (
        KeyFormat(
            "program",
            Text(r"^/[^\x00]*$", "not an absolute path; write the whole path, from /"),
            "Absolute path of the program. It and every directory above it must be root's, and writable by no other.",
            required=True,
            example="/usr/local/libexec/scrubber/my-device",
        ),
        KeyFormat(
            "deadlines",
            MappingOf(Duration(_SHORTEST), _VERBS),
            "How long each verb may take; 5s if it is not listed. The policy has those of erase, reset and diagnose.",
            {},
        ),
        KeyFormat(
            "environment",
            MappingOf(Text(r"^[^\x00]*$", "not a text")),
            "Environment variables of the program, besides PATH, LANG and HOME. It inherits none.",
            {},
        ),
        KeyFormat(
            "pollInterval",
            Duration(_SHORTEST, maximum=_LONGEST_POLL),
            "Interval between two checks for new errors of a device.",
            5.0,
        ),
    ),
)


def command_file_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the file, for editors; generated into ``policies/schema/``."""
    return json_schema(_FILE, "Command backend")


def parse_command_file(content: bytes, name: str) -> CommandFile:
    """Parse ``content``; ``name`` is the name of the file in messages.

    Raises:
        InvalidConfiguration: one line for each error: ``FILE:LINE: what is wrong; what helps``.
    """
    document = parse_yaml(content, name)
    if not isinstance(document.value, dict):
        raise InvalidConfiguration(
            f"{name}:{document.line(())}: this file is a mapping of keys to values; begin with a line such as "
            "program: /usr/local/libexec/scrubber/my-device."
        )
    values = read_document(_FILE, document, name)
    return CommandFile(
        Path(values["program"]),
        {**dict.fromkeys(_VERBS, _DEFAULT_DEADLINE), **values.get("deadlines", {})},
        values.get("environment", {}),
        values.get("pollInterval", 5.0),
    )


class CommandFileSource:
    """The file at ``path``, read again whenever it has changed.

    Raises:
        InvalidConfiguration: it cannot be read or applied.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fingerprint = _fingerprint(path)
        self._current = self._read()
        self.rejection = ""
        """Why the file as last read is not in force; empty otherwise."""

    def current(self) -> CommandFile:
        """Return what is in force."""
        now = _fingerprint(self._path)
        if now != self._fingerprint:
            self._fingerprint = now
            try:
                self._current, self.rejection = self._read(), ""
            except InvalidConfiguration as error:
                self.rejection = f"The changed file is not in force: {error}"
        return self._current

    def _read(self) -> CommandFile:
        content = read_configuration_file(
            self._path, "file of the command backend", remedy="pass another one with --config"
        )
        return parse_command_file(content, str(self._path))


def _fingerprint(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)
