"""Flags that several commands share. A flag means the same everywhere, and so does its environment variable.

Only settings (where things are, how answers are written) have a variable. What selects, aims or confirms is typed each time:
a forgotten variable would change silently what a command shows or does.
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
    """A group of commands that prints plain text, whatever the terminal."""
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
    """A flag's value in seconds: ``30``, ``500ms``, ``2m``."""
    from scrubber.config.units import parse_seconds

    return _parse_quantity(parse_seconds, value)


def size(value: str | float) -> int:
    """A flag's value in bytes: ``256MiB``."""
    from scrubber.config.units import parse_size

    return _parse_quantity(parse_size, value)


def device_name(text: str) -> str:
    """What names a device, as a person copied it: a table that had no room for its id shows the beginning and "…"."""
    return text.strip().removesuffix("…").removesuffix("...")


def directory(value: str | Path) -> Path:
    """A flag's value as a directory; an empty one, which would be the present directory, is no directory."""
    if isinstance(value, str) and not value.strip():
        raise typer.BadParameter("a directory has a name; this is empty.")
    return Path(value)


SocketOption = Annotated[
    Path,
    typer.Option(
        "--socket",
        envvar="SCRUBBER_SOCKET",
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
        help="How the answer is written: table, json, yaml or name.",
    ),
]
KubeletDirOption = Annotated[
    Path, typer.Option("--kubelet-dir", envvar="SCRUBBER_KUBELET_DIR", metavar="DIR", help="The kubelet's directory.")
]
DevicesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="DEVICE", parser=device_name, help="UUIDs, unique beginnings of some, or indexes.", show_default=False
    ),
]
DeviceArgument = Annotated[
    str,
    typer.Argument(
        metavar="DEVICE", parser=device_name, help="UUID, unique beginning of one, or index.", show_default=False
    ),
]
