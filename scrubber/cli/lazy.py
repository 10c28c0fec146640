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
from typer._click.shell_completion import CompletionItem
from typer.core import TyperCommand, TyperGroup

from scrubber.cli.app import HELP_FLAGS, App, Group
from scrubber.cli.examples import epilog

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
        summary: the first paragraph of the command's help.
    """

    name: str
    module: str
    section: HelpSection
    summary: str

    def load(self) -> Command:
        """Import the module and return the command."""
        module = importlib.import_module(f"scrubber.cli.commands.{self.module}")
        own: App | None = getattr(module, "app", None)
        command: Any
        if own is None:
            app = App()
            module.add_commands(app)
            command = typer.main.get_group(app).commands[self.name]
        else:
            command = typer.main.get_group(own)
            command.name = self.name
        assert isinstance(command, TyperCommand | TyperGroup)
        _add_examples(command, self.name)
        return command


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


class LazyGroup(Group):
    """A group with the commands of :attr:`entries`. Subclass it with a table of them."""

    entries: ClassVar[tuple[CommandEntry, ...]] = ()

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: MutableMapping[str, Any] = _LazyCommands(self.entries)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, with ``help COMMAND`` as a synonym of ``COMMAND --help``."""
        return super().parse_args(ctx, [*args[1:], HELP_FLAGS[-1]] if args[:1] == ["help"] else args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin so, from the table; otherwise, as usual, the options."""
        names = [
            CompletionItem(each.name, help=each.summary) for each in self.entries if each.name.startswith(incomplete)
        ]
        return names or super().shell_complete(ctx, incomplete)

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
