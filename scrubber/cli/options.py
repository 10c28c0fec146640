"""Flags that several commands share. A flag means the same everywhere, and so does its environment variable.

Only settings (locations, output format) have a variable. Options that select, target or confirm must be typed each
time: a forgotten variable would silently change what a command shows or does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from scrubber.cli.completers import complete_device
from scrubber.cli.render.output import OutputFormat
from scrubber.cli.render.table import device_name

__all__ = [
    "DeviceArgument",
    "DevicesArgument",
    "JobDeviceOption",
    "NoHeadersOption",
    "OutputOption",
    "SocketOption",
    "device_name",
    "directory",
    "seconds",
    "size",
]

_T = TypeVar("_T")


def _parse_quantity(parse: Callable[[object], _T], written: str | float) -> _T:
    number = written.strip() if isinstance(written, str) else written
    if isinstance(number, str) and number.replace(".", "", 1).isdecimal():
        number = float(number) if "." in number else int(number)
    try:
        return parse(number)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from error


def seconds(value: str | float) -> float:
    """Parse a duration in seconds: ``30``, ``500ms``, ``2m``."""
    from scrubber.config.units import parse_seconds

    return _parse_quantity(parse_seconds, value)


def size(value: str | float) -> int:
    """Parse a size in bytes: ``256MiB``."""
    from scrubber.config.units import parse_size

    return _parse_quantity(parse_size, value)


def directory(value: str | Path) -> Path:
    """Parse a directory; refuse an empty one, which would mean the current directory."""
    if isinstance(value, str) and not value.strip():
        raise typer.BadParameter("must be the path of a directory; it is empty.")
    return Path(value)


SocketOption = Annotated[
    Path,
    typer.Option(
        "--socket-dir",
        envvar="SCRUBBER_SOCKET_DIR",
        metavar="DIR",
        parser=directory,
        help="Directory of the service's sockets.",
    ),
]
OutputOption = Annotated[
    OutputFormat,
    typer.Option(
        "-o",
        "--output",
        envvar="SCRUBBER_OUTPUT",
        metavar="FORMAT",
        case_sensitive=False,
        help="Output format. One of: table, wide, json, yaml, name.",
    ),
]
NoHeadersOption = Annotated[
    bool, typer.Option("--no-headers", help="Omit the column titles of tables; no effect with other formats.")
]
DevicesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="DEVICE",
        parser=device_name,
        autocompletion=complete_device,
        help="UUIDs, unique prefixes of UUIDs, or indexes.",
        show_default=False,
    ),
]
JobDeviceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        parser=device_name,
        autocompletion=complete_device,
        help="UUID, unique prefix of a UUID, or index; can be repeated.",
        show_default=False,
    ),
]
DeviceArgument = Annotated[
    str,
    typer.Argument(
        metavar="DEVICE",
        parser=device_name,
        autocompletion=complete_device,
        help="UUID, unique prefix of a UUID, or index.",
        show_default=False,
    ),
]
