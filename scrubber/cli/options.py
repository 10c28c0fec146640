"""Flags that several commands share. A flag means the same everywhere, and so does its environment variable.

Only settings (locations, output format) have a variable. Options that select, target or confirm must be typed each
time: a forgotten variable would silently change what a command shows or does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from typer.core import TyperGroup

from scrubber.cli.parameters import HELP_FLAGS
from scrubber.cli.render.output import OutputFormat

__all__ = [
    "DeviceArgument",
    "DevicesArgument",
    "KubeletDirOption",
    "OutputOption",
    "SocketOption",
    "device_name",
    "directory",
    "new_app",
    "seconds",
    "size",
]

_T = TypeVar("_T")


def new_app(text: str, cls: type[TyperGroup] = TyperGroup, epilog: str | None = None) -> typer.Typer:
    """Return a command group that prints plain text on every terminal."""
    return typer.Typer(
        cls=cls,
        help=text,
        epilog=epilog,
        rich_markup_mode=None,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": HELP_FLAGS},
    )


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


def device_name(text: str) -> str:
    """Return a device name as copied by a user: tables truncate ids to a unique prefix and "…"."""
    return text.strip().removesuffix("…").removesuffix("...")


def directory(value: str | Path) -> Path:
    """Parse a directory; refuse an empty one, which would mean the current directory."""
    if isinstance(value, str) and not value.strip():
        raise typer.BadParameter("a directory has a name; this is empty.")
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
        help="Output format. One of: table, json, yaml, name.",
    ),
]
KubeletDirOption = Annotated[
    Path, typer.Option("--kubelet-dir", envvar="SCRUBBER_KUBELET_DIR", metavar="DIR", help="Directory of the kubelet.")
]
DevicesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="DEVICE", parser=device_name, help="UUIDs, unique prefixes of UUIDs, or indexes.", show_default=False
    ),
]
DeviceArgument = Annotated[
    str,
    typer.Argument(
        metavar="DEVICE", parser=device_name, help="UUID, unique prefix of a UUID, or index.", show_default=False
    ),
]
