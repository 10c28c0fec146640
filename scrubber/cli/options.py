"""Flags that several commands share. A flag means the same everywhere, and so does its environment variable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from scrubber.cli.output import Output
from scrubber.config.quantities import parse_seconds, parse_size
from scrubber.config.settings import LogFormat, LogLevel

__all__ = [
    "DeviceArgument",
    "KubeletDirOption",
    "LogFormatOption",
    "LogLevelOption",
    "OutputOption",
    "SocketOption",
    "new_app",
    "seconds",
    "size",
]

_T = TypeVar("_T")


def new_app(text: str) -> typer.Typer:
    """A group of commands that prints plain text, whatever the terminal."""
    return typer.Typer(
        help=text,
        rich_markup_mode=None,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _flag(parse: Callable[[object], _T], written: str | float) -> _T:
    number = written.strip() if isinstance(written, str) else written
    if isinstance(number, str) and number.replace(".", "", 1).isdecimal():
        number = float(number) if "." in number else int(number)
    try:
        return parse(number)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from error


def seconds(written: str | float) -> float:
    """A flag's value in seconds: ``30``, ``500ms``, ``2m``."""
    return _flag(parse_seconds, written)


def size(written: str | float) -> int:
    """A flag's value in bytes: ``256MiB``."""
    return _flag(parse_size, written)


SocketOption = Annotated[
    Path, typer.Option("--socket", envvar="SCRUBBER_SOCKET", metavar="DIR", help="Directory of the service's sockets.")
]
OutputOption = Annotated[
    Output,
    typer.Option("-o", "--output", envvar="SCRUBBER_OUTPUT", case_sensitive=False, help="How the answer is written."),
]
KubeletDirOption = Annotated[
    Path, typer.Option("--kubelet-dir", envvar="SCRUBBER_KUBELET_DIR", metavar="DIR", help="The kubelet's directory.")
]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format", envvar="SCRUBBER_LOG_FORMAT", help="auto: console on a terminal, JSON lines elsewhere."
    ),
]
LogLevelOption = Annotated[
    LogLevel, typer.Option("--log-level", envvar="SCRUBBER_LOG_LEVEL", help="The least important event that is logged.")
]
DeviceArgument = Annotated[
    str, typer.Argument(metavar="DEVICE", help="UUID, unique beginning of one, or index.", show_default=False)
]
