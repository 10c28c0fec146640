"""Command lines that are parsed without Typer: those that people and scripts run most, with plain flags.

Loading Typer and building its commands takes longer than the work of such a command. So a line is parsed here as far as every
word of it is plain; for all others (help, completion, anything unknown, repeated or invalid) there is no command here, and
Typer parses the line. Invariant: a line that is parsed here means the same to Typer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scrubber.cli.exit_codes import ExitCode
from scrubber.cli.render.output import OutputFormat
from scrubber.cli.render.table import device_name

__all__ = ["plain_command"]

_NO_HEADERS = "--no-headers"


@dataclass(frozen=True, slots=True)
class _Flag:
    """A flag with a value.

    Attributes:
        parameter: what it is called in the command.
        words: how it is written; one that begins with two dashes may contain its value.
        variable: the environment variable that replaces it; empty: none.
        parse: raises ValueError for a value that Typer has to refuse.
    """

    parameter: str
    words: tuple[str, ...]
    variable: str
    default: object
    parse: Callable[[str], object]


@dataclass(frozen=True, slots=True)
class _Command:
    """A command.

    Attributes:
        name: its words.
        names: the parameter for the words that are no flags; empty: there are none.
        needs_name: whether there has to be such a word.
        parse_name: returns what such a word means.
        load: returns the function that does the work.
    """

    name: tuple[str, ...]
    flags: tuple[_Flag, ...]
    load: Callable[[], Callable[..., ExitCode | None]]
    names: str = ""
    needs_name: bool = False
    parse_name: Callable[[str], str] = str


def _list_devices() -> Callable[..., None]:
    from scrubber.cli.device_listing import list_devices

    return list_devices


def _diagnose() -> Callable[..., ExitCode]:
    from scrubber.cli.diagnosis import diagnose

    return diagnose


def _check_policies() -> Callable[..., ExitCode]:
    from scrubber.cli.policy_check import check_policies

    return check_policies


def _path(parameter: str, variable: str, default: Path | None = None) -> _Flag:
    return _Flag(parameter, (f"--{parameter.replace('_', '-')}",), variable, default, Path)


_OUTPUT = _Flag("output", ("--output", "-o"), "SCRUBBER_OUTPUT", OutputFormat.TABLE, OutputFormat)
_SOCKET = _Flag("socket", ("--socket-dir",), "SCRUBBER_SOCKET_DIR", Path("/run/scrubber"), Path)
_COMMANDS = (
    _Command(("devices",), (_SOCKET, _OUTPUT), _list_devices, names="device", parse_name=device_name),
    _Command(
        ("doctor",),
        (
            *(_SOCKET, _OUTPUT),
            _Flag("policy", ("--policy",), "SCRUBBER_POLICY", "", str),
            _path("state_dir", "SCRUBBER_STATE_DIR"),
            _path("toolkit_config", "SCRUBBER_TOOLKIT_CONFIG"),
            _path("kubelet_dir", "SCRUBBER_KUBELET_DIR"),
            _path("pod_logs_dir", "SCRUBBER_POD_LOGS_DIR"),
            _path("node_root", "SCRUBBER_NODE_ROOT", Path("/")),
        ),
        _diagnose,
    ),
    _Command(("policy", "check"), (_OUTPUT,), _check_policies, names="policies", needs_name=True),
)


def plain_command(words: Sequence[str], environment: Mapping[str, str]) -> Callable[[], ExitCode | None] | None:
    """Return the command that ``words`` mean; None for a line that Typer has to parse."""
    for command in _COMMANDS:
        if tuple(words[: len(command.name)]) == command.name:
            parameters = _parameters(command, words[len(command.name) :], environment)
            return None if parameters is None else partial(command.load(), **parameters)
    return None


def _parameters(command: _Command, words: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any] | None:
    by_word = {word: flag for flag in command.flags for word in flag.words}
    given: dict[str, str] = {}
    names: list[str] = []
    no_headers = False
    rest = iter(words)
    for word in rest:
        written, equals, value = word.partition("=")
        flag = by_word.get(written)
        if not word.startswith("-"):
            names.append(word)
        elif word == _NO_HEADERS:
            no_headers = True
        elif flag is not None and flag.parameter not in given and (not equals or written.startswith("--")):
            given[flag.parameter] = value if equals else next(rest, "")
        else:
            return None
    if "" in names or (names and not command.names) or (command.needs_name and not names):
        return None
    parameters: dict[str, Any] = {"no_headers": no_headers}
    for flag in command.flags:
        text = given.get(flag.parameter, environment.get(flag.variable) or None)
        if text is None:
            parameters[flag.parameter] = flag.default
            continue
        if not text.strip() or text.startswith("-"):
            return None
        try:
            parameters[flag.parameter] = flag.parse(text)
        except ValueError:
            return None
    if command.names:
        parameters[command.names] = [command.parse_name(name) for name in names]
    return parameters
