"""Completion of a partial command line.

A shell calls it at each Tab (:mod:`scrubber.cli.commands.completion` has the shell's side). Invariants: a response
comes soon or not at all, an unavailable service is silently ignored, and no value contains a character that is special
to a shell.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from scrubber.cli.render.output import printable

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["Candidate", "candidates", "completion_lines"]

_SERVICE_TIMEOUT = "0.3"
"""Seconds for the service to list its devices, unless ``_SCRUBBER_PATIENCE`` overrides them."""

_SHELL_SAFE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._/:=-]*")
_BUNDLED_POLICIES = ("default", "strict", "trusted")

Command = TyperCommand | TyperGroup
Parameter = TyperOption | TyperArgument


@dataclass(frozen=True, slots=True)
class Candidate:
    """A word that may come next; or, by ``kind``, a request to the shell to complete ``files`` or ``directories``."""

    value: str = ""
    description: str = ""
    kind: str = "word"


def completion_lines(
    command: TyperGroup, shell: str, words: Sequence[str], environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield the lines that ``shell`` reads: kind, value and description, separated by tabs.

    Args:
        words: the words after the command's name up to the cursor; the last one is incomplete. Bash, which splits words
            differently, passes its whole line in ``environment`` instead.
    """
    cut = 0
    if shell == "bash":
        words = _split(environment.get("_SCRUBBER_LINE", ""))[1:] or [""]
        breaks = environment.get("_SCRUBBER_BREAKS", "")
        # Bash replaces only what follows the last of these.
        cut = 1 + max((words[-1].rfind(each) for each in "=:" if each in breaks), default=-1)
    for each in candidates(command, words or [""]):
        if each.kind != "word":
            yield each.kind
        elif _SHELL_SAFE.fullmatch(each.value):
            description = printable(" ".join(each.description.split()))
            yield "\t".join((each.kind, each.value[cut:], description))


def _split(line: str) -> list[str]:
    """Return the words of an incomplete line, the last one empty if it has not begun."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        words.extend(lexer)
    except ValueError:  # an unclosed quotation
        return [*words, lexer.token]
    return [*words, ""] if not line or line[-1].isspace() else words


def candidates(root: TyperGroup, typed: Sequence[str]) -> Iterator[Candidate]:
    """Yield what may replace the last of ``typed``."""
    line = _ParsedLine(root)
    *before, last = typed
    for word in before:
        line.add_word(word)
    if line.command is None:
        return
    name, equals, rest = last.partition("=")
    option = line.option(name) if equals else None
    if line.pending_option is not None:
        yield from _value_candidates(line.pending_option, last, line.option_values)
    elif option is not None:
        for each in _value_candidates(option, rest, line.option_values):
            yield each if each.kind != "word" else Candidate(f"{name}={each.value}", each.description)
    elif last.startswith("-") and not line.arguments_only:
        yield from _option_candidates(line, last)
    elif isinstance(line.command, TyperGroup):
        yield from _command_candidates(line.command, last)
    else:
        argument = line.argument()
        if argument is not None:
            yield from _value_candidates(argument, last, line.option_values)


@dataclass(slots=True)
class _ParsedLine:
    """What the words so far mean.

    Attributes:
        command: the command whose words come next; None if there is no such command.
        pending_option: the option whose value is next.
        option_values: last value of each option, by its name.
    """

    command: Command | None
    pending_option: TyperOption | None = None
    option_values: dict[str, str] = field(default_factory=dict)
    used_options: set[str] = field(default_factory=set)
    argument_count: int = 0
    arguments_only: bool = False

    def add_word(self, word: str) -> None:
        if self.command is None:
            return
        if self.pending_option is not None:
            self.option_values[self.pending_option.name], self.pending_option = word, None
        elif word == "--" and not self.arguments_only:
            self.arguments_only = True
        elif word.startswith("-") and len(word) > 1 and not self.arguments_only:
            self._flag(word)
        elif isinstance(self.command, TyperGroup):
            found = self.command.commands.get(word)
            self.command = found if isinstance(found, TyperCommand | TyperGroup) else None
            self.used_options.clear()
        else:
            self.argument_count += 1

    def _flag(self, word: str) -> None:
        name, equals, value = word.partition("=")
        if not word.startswith("--") and len(word) > 2:
            name, equals, value = word[:2], "=", word[2:]
        option = self.option(name)
        if option is None:
            return
        self.used_options.add(option.name)
        if equals:
            self.option_values[option.name] = value
        elif not option.is_flag:
            self.pending_option = option

    def option(self, name: str) -> TyperOption | None:
        """Return the option with the flag ``name``, such as ``--output``."""
        if self.command is None or not name.startswith("-"):
            return None
        options = (each for each in self.command.params if isinstance(each, TyperOption))
        return next((each for each in options if name in (*each.opts, *each.secondary_opts)), None)

    def argument(self) -> TyperArgument | None:
        """Return the next argument; None if there are no more."""
        assert self.command is not None
        found = [each for each in self.command.params if isinstance(each, TyperArgument)]
        if self.argument_count < len(found):
            return found[self.argument_count]
        return found[-1] if found and found[-1].nargs == -1 else None


def _command_candidates(group: TyperGroup, begin: str) -> Iterator[Candidate]:
    summaries: Mapping[str, str] = getattr(group, "summaries", {})
    for name in group.commands:
        if name.startswith(begin):
            text = summaries.get(name)
            yield Candidate(name, text if text is not None else group.commands[name].get_short_help_str(80))


def _option_candidates(line: _ParsedLine, begin: str) -> Iterator[Candidate]:
    assert line.command is not None
    for each in line.command.params:
        if isinstance(each, TyperOption) and not each.hidden and (each.multiple or each.name not in line.used_options):
            for name in (*each.opts, *each.secondary_opts):
                if name.startswith(begin) and (name.startswith("--") or begin == name):
                    yield Candidate(name, each.help or "")
    if "--help".startswith(begin):
        yield Candidate("--help", "Show what there is to say.")


def _value_candidates(parameter: Parameter, begin: str, given: Mapping[str, str]) -> Iterator[Candidate]:
    choices = parameter.type_descriptor.choices
    if choices:
        yield from (Candidate(str(each.value)) for each in choices if str(each.value).startswith(begin))
        return
    match _value_kind(parameter):
        case "DEVICE":
            yield from (each for each in _device_candidates(given) if each.value.startswith(begin))
        case "EVENT":
            yield from (each for each in _event_candidates() if each.value.startswith(begin))
        case "CERT" | "CERTIFICATE":
            yield from (each for each in _certificate_candidates(given) if each.value.startswith(begin))
        case "POLICY":
            yield from (Candidate(name) for name in _BUNDLED_POLICIES if name.startswith(begin))
            yield Candidate(kind="files")
        case "DIR":
            yield Candidate(kind="directories")
        case "FILE" | "PATH":
            yield Candidate(kind="files")


def _value_kind(parameter: Parameter) -> str:
    """Return the metavar of the value without its multiplicity: ``DEVICE``."""
    if isinstance(parameter, TyperOption) and "--policy" in parameter.opts:
        return "POLICY"
    word = re.search(r"[A-Z]+", parameter.metavar or "")
    return "" if word is None else word[0]


def _device_candidates(given: Mapping[str, str]) -> Iterator[Candidate]:
    found = _fetch_devices(given)
    yield from (Candidate(each.index, f"{each.state}, {each.id}") for each in found)
    yield from (Candidate(each.id, f"{each.state}, index {each.index}") for each in found)


def _event_candidates() -> Iterator[Candidate]:
    from scrubber.observability.event_names import AUDIT_EVENTS, EVENT_PREFIXES

    yield from (Candidate(each, "all that begin so") for each in EVENT_PREFIXES)
    yield from map(Candidate, AUDIT_EVENTS)


def _certificate_candidates(given: Mapping[str, str]) -> Iterator[Candidate]:
    for each in _fetch_devices(given):
        if each.HasField("certificate"):
            yield Candidate(each.certificate.id, f"of device {each.index}, {each.state}")


def _fetch_devices(given: Mapping[str, str]) -> Sequence[pb.Device]:
    """Return the devices of the service; none if it does not respond in time."""
    import asyncio

    from scrubber.api.client import ReadClient
    from scrubber.domain.errors import ScrubberError

    socket = Path(given.get("socket") or os.environ.get("SCRUBBER_SOCKET_DIR") or "/run/scrubber")

    timeout = float(os.environ.get("_SCRUBBER_PATIENCE", _SERVICE_TIMEOUT))

    async def ask() -> Sequence[Any]:
        async with asyncio.timeout(timeout), ReadClient(socket) as client:
            return (await client.devices()).devices

    try:
        return asyncio.run(ask())
    except (ScrubberError, OSError):  # including TimeoutError
        return ()
