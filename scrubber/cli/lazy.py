"""A command group that loads only the requested command.

Invariants: the summary, a mistyped command and the completion of a name load no command's module. The summaries in the
table of entries equal those of the modules; a test compares the two.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from scrubber.cli.examples import epilog
from scrubber.cli.parameters import HELP_FLAGS, skip_validation, to_command_line_error

__all__ = ["CommandEntry", "HelpSection", "LazyGroup"]

Command = TyperCommand | TyperGroup


class HelpSection(StrEnum):
    """The headings of the summary, in the order of display."""

    INSPECT = "Inspect"
    OPERATE = "Operate"
    VERIFY = "Verify"
    RUN = "Run"
    TRY = "Try it out"


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command that is not loaded yet.

    Attributes:
        name: name on the command line.
        module: module below ``scrubber.cli.commands``. It has an ``app`` that is the command's own group, or a function
            ``add_commands``.
        section: section of the summary that lists it.
        summary: the first sentence of the command's help.
    """

    name: str
    module: str
    section: HelpSection
    summary: str

    def load(self) -> Command:
        """Import the module and return the command."""
        module = importlib.import_module(f"scrubber.cli.commands.{self.module}")
        own: typer.Typer | None = getattr(module, "app", None)
        if own is None:
            together = typer.Typer(rich_markup_mode=None)
            module.add_commands(together)
            together.registered_commands = [
                each for each in together.registered_commands if _command_name(each) == self.name
            ]
            command = typer.main.get_group(together).commands[self.name]
        else:
            command = typer.main.get_group(own)
            command.name = self.name
        assert isinstance(command, TyperCommand | TyperGroup)
        skip_validation(command)
        _add_examples(command, self.name)
        return command


def _command_name(info: typer.models.CommandInfo) -> str:
    """Return the name that Typer gives the command: an explicit one, or that of its function."""
    assert info.callback is not None
    return info.name or typer.main.get_command_name(info.callback.__name__)


def _add_examples(command: Command, name: str) -> None:
    command.epilog = epilog(name)
    if isinstance(command, TyperGroup):
        for word, below in command.commands.items():
            assert isinstance(below, TyperCommand | TyperGroup)
            _add_examples(below, f"{name} {word}")


class _LazyCommands(MutableMapping[str, Command]):
    """Commands by name, each loaded at its first use."""

    def __init__(self, entries: Sequence[CommandEntry]) -> None:
        self._entries = {each.name: each for each in entries}
        self._loaded: dict[str, Command] = {}

    def __getitem__(self, name: str) -> Command:
        if name not in self._loaded:
            self._loaded[name] = self._entries[name].load()
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._loaded or name in self._entries

    def __setitem__(self, name: str, command: Command) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        self._loaded.pop(name, None)
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._entries
        yield from (name for name in self._loaded if name not in self._entries)

    def __len__(self) -> int:
        return len({*self._entries, *self._loaded})


class LazyGroup(TyperGroup):
    """A group with the commands of :attr:`entries`. Subclass it with a table of them."""

    entries: ClassVar[tuple[CommandEntry, ...]] = ()

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        skip_validation(self)
        self.commands: MutableMapping[str, Any] = _LazyCommands(self.entries)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, with ``help COMMAND`` as a synonym of ``COMMAND --help``."""
        return super().parse_args(ctx, [*args[1:], HELP_FLAGS[-1]] if args[:1] == ["help"] else args)

    def invoke(self, ctx: Any) -> Any:
        """Invoke as usual, with readable messages for invalid values."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            # A missing parameter has its own subclass of the error, which names it.
            if type(error) is not typer.BadParameter:
                raise
            raise to_command_line_error(error) from error

    @property
    def summaries(self) -> dict[str, str]:
        """The summary of each command, by its name."""
        return {each.name: each.summary for each in self.entries}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the summary: a list for each section, all with the same column widths."""
        width = max(len(each.name) for each in self.entries)
        for section in HelpSection:
            rows = [(each.name.ljust(width), each.summary) for each in self.entries if each.section is section]
            if rows:
                with formatter.section(section.value):
                    formatter.write_dl(rows)
