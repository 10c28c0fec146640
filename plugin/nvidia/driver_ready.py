"""Reads what the GPU Operator's validator found out about the driver: the file ``driver-ready``.

Invariant: the file is made for a shell, and is parsed here, never executed. Each line is one assignment of a plain
word; anything that a shell would expand, quote or run is refused.

The validator replaces the file atomically once the driver works. It removes the file whenever its own pod stops, also
while the driver keeps running: a missing file means that nothing is known, not that there is no driver.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from scrubber.domain.errors import InvalidConfiguration

__all__ = ["DriverReady", "parse_driver_ready", "read_driver_ready"]

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([A-Za-z0-9_./:@%+,-]*)")
_REQUIRED = ("NVIDIA_DRIVER_ROOT", "DRIVER_ROOT_CTR_PATH", "NVIDIA_DEV_ROOT")


@dataclass(frozen=True, slots=True)
class DriverReady:
    """Where the driver is.

    Attributes:
        driver_root: root directory of the driver on the host.
        driver_root_ctr_path: where NVIDIA's own pods mount it.
        dev_root: directory on the host that contains ``dev`` with the device nodes.
    """

    driver_root: PurePosixPath
    driver_root_ctr_path: Path
    dev_root: PurePosixPath


def read_driver_ready(path: Path) -> DriverReady | None:
    """Read the file; return None while there is none.

    Raises:
        InvalidConfiguration: it cannot be read, or is not what the validator writes; the message contains the line.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InvalidConfiguration(f"--driver-ready-file {path} cannot be read: {error.strerror}.") from error
    return parse_driver_ready(content, str(path))


def parse_driver_ready(content: bytes, name: str) -> DriverReady:
    """Parse the content; ``name`` is the file's name in error messages.

    Raises:
        InvalidConfiguration: a line is not a plain assignment, or a value is missing or not a path.
    """
    values: dict[str, str] = {}
    for number, line in enumerate(content.decode("utf-8", "replace").split("\n"), 1):
        if not line.strip(" \t\r") or line.startswith("#"):
            continue
        match = _ASSIGNMENT.fullmatch(line)
        if match is None:
            raise InvalidConfiguration(
                f"{name}:{number}: {line[:80]!r} is not an assignment of a plain word, such as NVIDIA_DRIVER_ROOT=/."
            )
        if match[1] in values:
            raise InvalidConfiguration(f"{name}:{number}: {match[1]} is assigned twice.")
        values[match[1]] = match[2]
    for key in _REQUIRED:
        value = values.get(key, "")
        if not value.startswith("/") or ".." in value.split("/"):
            raise InvalidConfiguration(
                f'{name}: {key} is "{value}"; the validator writes an absolute path. Is the file of another program?'
            )
    return DriverReady(
        PurePosixPath(values["NVIDIA_DRIVER_ROOT"]),
        Path(values["DRIVER_ROOT_CTR_PATH"]),
        PurePosixPath(values["NVIDIA_DEV_ROOT"]),
    )
