"""Command lines that need no library: ``scrubber devices`` with plain flags, which people and scripts run most.

Loading Typer and building its commands takes longer than the request to the service. So a line is parsed here as far as every
word of it is plain; for all others (help, completion, anything unknown, repeated or invalid) there is no command here, and
Typer parses the line. Invariant: a line that is parsed here means the same to Typer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from scrubber.cli.render.output import OutputFormat
from scrubber.cli.render.table import device_name

__all__ = ["plain_command"]

_VALUES = {"--socket-dir": "socket", "--output": "output", "-o": "output"}
_VARIABLES = {"socket": "SCRUBBER_SOCKET_DIR", "output": "SCRUBBER_OUTPUT"}
_DEFAULTS = {"socket": "/run/scrubber", "output": OutputFormat.TABLE.value}
_FORMATS = frozenset(each.value for each in OutputFormat)
_NO_HEADERS = "--no-headers"


def plain_command(words: Sequence[str], environment: Mapping[str, str]) -> Callable[[], None] | None:
    """Return the command that ``words`` mean; None for a line that Typer has to parse."""
    if words[:1] != ["devices"]:
        return None
    given: dict[str, str] = {}
    names: list[str] = []
    no_headers = False
    rest = iter(words[1:])
    for word in rest:
        flag, equals, value = word.partition("=")
        if not word.startswith("-"):
            names.append(word)
        elif word == _NO_HEADERS:
            no_headers = True
        elif flag in _VALUES and _VALUES[flag] not in given and (not equals or flag.startswith("--")):
            given[_VALUES[flag]] = value if equals else next(rest, "")
        else:
            return None
    settings = {
        name: given.get(name) if name in given else environment.get(variable) or _DEFAULTS[name]
        for name, variable in _VARIABLES.items()
    }
    socket, output = settings["socket"] or "", settings["output"] or ""
    if not socket.strip() or socket.startswith("-") or output not in _FORMATS or "" in names:
        return None
    from scrubber.cli.device_listing import list_devices

    return partial(
        list_devices,
        Path(socket),
        [device_name(name) for name in names],
        OutputFormat(output),
        no_headers=no_headers,
    )
