"""How this command line uses Typer: the classes of its applications, groups, commands and parameters.

Typer converts every value with pydantic, also defaults and the help flag, and loading pydantic takes as long as
everything else that a short command does. So :class:`Command` turns the parameters that Typer made of a function into
objects of :class:`Option` and :class:`Argument`, which convert texts, numbers, flags, choices and paths themselves and
leave all other kinds to Typer. Only whether a path is readable is left to the code that opens it, whose message is
better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import typer
from typer._click.exceptions import MissingParameter, UsageError
from typer._click.shell_completion import CompletionItem
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

__all__ = ["HELP_FLAGS", "App", "Argument", "Command", "CommandLineError", "Group", "Option"]

HELP_FLAGS = ["-h", "--help"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Convert = Callable[[Any], Any]

_TRUE = ("1", "t", "true", "y", "yes", "on")
_FALSE = ("", "0", "f", "false", "n", "no", "off")
_COMPLETED_BY_THE_SHELL = {"DIR": "dir", "FILE": "file", "PATH": "file", "POLICY": "file"}
"""By the placeholder of a value: what the shell completes, besides the values of a completer."""
_SYNONYMS = {
    "validate": ("check", "verify"),
    "lint": ("check",),
    "check": ("verify", "doctor"),
    "verify": ("check",),
    "list": ("devices", "show"),
    "ls": ("list", "devices", "show"),
    "get": ("show", "devices"),
    "status": ("devices",),
    "describe": ("show", "device"),
    "events": ("history",),
    "log": ("history",),
    "logs": ("history",),
    "clean": ("scrub",),
    "release": ("unquarantine",),
    "cordon": ("quarantine",),
    "uncordon": ("unquarantine",),
    "new": ("create",),
}
"""By a word that is no command of a group: the commands of the same meaning; the first that the group has is suggested.

Typer suggests commands that are spelled similarly.
"""


class App(typer.Typer):
    """An application, or a group of commands, that prints plain text on every terminal."""

    def __init__(self, help: str = "", *, cls: type[TyperGroup] | None = None, epilog: str | None = None) -> None:
        super().__init__(
            cls=cls or Group,
            help=help,
            epilog=epilog,
            rich_markup_mode=None,
            no_args_is_help=True,
            add_completion=False,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": HELP_FLAGS},
        )

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **attributes: Any
    ) -> Callable[[_Function], _Function]:
        """Declare a command, as with Typer."""
        return super().command(name, cls=cls or Command, **attributes)


class CommandLineError(typer.BadParameter):
    """An invalid command line, printed as the message only, without a prefix."""

    def format_message(self) -> str:
        return self.message


class Command(TyperCommand):
    """A command. The first paragraph of its help is also its summary."""

    def __init__(
        self,
        name: str | None,
        *,
        params: list[Any] | None = None,
        help: str | None = None,
        short_help: str | None = None,
        **attributes: Any,
    ) -> None:
        summary = " ".join((help or "").partition("\n\n")[0].split())
        own = [_own_parameter(each) for each in params or ()]
        super().__init__(name, params=own, help=help, short_help=short_help or summary, **attributes)

    def get_help_option(self, ctx: Any) -> Any:
        return _with_default(super().get_help_option(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual; ``--flag=true`` and ``--flag=false`` also mean ``--flag`` and ``--no-flag``, as in Go programs."""
        negations = {name: each.secondary_opts[0] for each in self.params if each.secondary_opts for name in each.opts}
        return super().parse_args(ctx, [_normalize_boolean(word, negations) for word in args])


class Group(TyperGroup):
    """A group of commands."""

    def get_help_option(self, ctx: Any) -> Any:
        return _with_default(super().get_help_option(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve as usual; an unknown command is an error, also for Tab, and names the command of the same meaning."""
        try:
            name, command, rest = super().resolve_command(ctx, args)
        except UsageError as error:
            meant = next((each for each in _SYNONYMS.get(args[0], ()) if each in self.commands), None)
            if meant is None:
                raise
            raise UsageError(f"No such command '{args[0]}'. Did you mean '{meant}'?", ctx=ctx) from error
        if command is None:
            raise typer.BadParameter(f'"{args[0]}" is not a command.', ctx=ctx)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Invoke as usual; an invalid value is reported as ``--flag: what is wrong and what is allowed``."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            # A missing parameter has its own subclass of the error, which names it.
            if type(error) is not typer.BadParameter:
                raise
            raise _to_command_line_error(error) from error


class _PlainParameter:
    """A parameter that converts plain values itself, and leaves all others to the one that Typer made."""

    def __init__(self, declared: TyperOption | TyperArgument) -> None:
        """Take over what Typer made of the declaration."""
        vars(self).update(vars(declared))
        self._declared = declared
        self._convert = _converter(declared.type_descriptor)

    def process_value(self, ctx: Any, value: Any) -> Any:
        if self._convert is None:
            return self._declared.process_value(ctx, value)
        return _process(self, ctx, value, self._convert)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[CompletionItem]:
        return [*self._declared.shell_complete(ctx, incomplete), *_paths(self._declared.metavar)]


class Option(_PlainParameter, TyperOption):
    """An option that converts plain values itself."""


class Argument(_PlainParameter, TyperArgument):
    """An argument that converts plain values itself."""

    def display_type_rich(self, ctx: Any) -> str | None:
        """Return None where the argument has a metavar, as with options."""
        return None if self.metavar is not None else super().display_type_rich(ctx)

    def get_usage_pieces(self, ctx: Any) -> list[str]:
        """Return ``DEVICE``, in brackets where it is optional, and with dots where it may be repeated."""
        word = self.display_name_raw
        return [(word if self.required else f"[{word}]") + ("..." if self.nargs != 1 else "")]


def _own_parameter(parameter: Any) -> Any:
    if isinstance(parameter, TyperOption):
        return Option(parameter)
    return Argument(parameter) if isinstance(parameter, TyperArgument) else parameter


def _with_default(help_flag: TyperOption | None) -> TyperOption | None:
    """Return the help flag with a default: Typer does not validate a flag that is already true or false."""
    if help_flag is not None:
        help_flag.default = False
    return help_flag


def _normalize_boolean(word: str, negations: Mapping[str, str]) -> str:
    """Return ``--flag`` or ``--no-flag`` for ``--flag=true`` or ``--flag=false``; other words unchanged."""
    name, equals, value = word.partition("=")
    if not equals or name not in negations:
        return word
    if value.lower() in ("1", "t", "true"):
        return name
    return negations[name] if value.lower() in ("0", "f", "false") else word


def _paths(metavar: str | None) -> Iterator[CompletionItem]:
    """Yield the request to the shell to complete files or directories, where the value is one."""
    if metavar in _COMPLETED_BY_THE_SHELL:
        yield CompletionItem("", type=_COMPLETED_BY_THE_SHELL[metavar])


def _to_command_line_error(error: typer.BadParameter) -> CommandLineError:
    where, parameter = error.param_hint, error.param
    if where is None and parameter is not None:
        where = _parameter_name(parameter, error.ctx)
    hint = where if where is None or isinstance(where, str) else " / ".join(where)
    if hint:
        return CommandLineError(f"{hint}: {error.message}", ctx=error.ctx)
    return CommandLineError(error.message, ctx=error.ctx)


def _parameter_name(parameter: Any, ctx: Any) -> str:
    """Return the longest name of a flag, or the environment variable that its value came from."""
    if ctx is not None and getattr(ctx.get_parameter_source(parameter.name), "name", "") == "ENVIRONMENT":
        return str(parameter.envvar)
    if parameter.param_type_name == "argument":
        return str(parameter.display_name_raw)
    return str(max(parameter.opts, key=len))


# -- conversion of values ----------------------------------------------------------------------------------------------


def _process(parameter: Any, ctx: Any, value: Any, convert: _Convert) -> Any:
    if parameter.required and parameter.value_is_missing(value):
        raise MissingParameter(ctx=ctx, param=parameter)
    several = parameter.multiple or parameter.nargs == -1
    try:
        if value is None:
            value = () if several else None
        else:
            value = [convert(each) for each in value] if several else convert(value)
    except ValueError as error:
        raise typer.BadParameter(str(error), ctx=ctx, param=parameter) from error
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)


def _converter(declared: Any) -> _Convert | None:
    """Return the function that converts one value; None for a kind that is left to Typer. It raises ``ValueError``."""
    kind, info = declared.annotation, declared.parameter_info
    if declared.is_list:
        (kind,) = get_args(kind)
    if info.parser is not None:
        parser: _Convert = info.parser
        return parser
    if kind is str:
        return str
    if kind is bool:
        return _to_bool
    if kind in (int, float):
        return None if info.clamp else partial(_to_number, kind, info.min, info.max)
    if kind is Path:
        checked = info.exists or info.writable or info.resolve_path or info.path_type is not None
        return None if checked or not (info.file_okay and info.dir_okay) else Path
    if isinstance(kind, type) and issubclass(kind, Enum):
        return partial(_to_choice, kind, info.case_sensitive)
    return None


def _to_choice(choices: type[Enum], case_sensitive: bool, value: Any) -> Enum:
    for each in choices:
        name = str(each.value)
        if value is each or value == name or (not case_sensitive and str(value).casefold() == name.casefold()):
            return each
    raise ValueError(f'"{value}" is not one of: {", ".join(str(each.value) for each in choices)}.')


def _to_number(kind: type[Any], least: float | None, most: float | None, value: Any) -> Any:
    what = "whole number" if kind is int else "number"
    try:
        number = kind(value) if str(value).isascii() else None
    except ValueError:
        number = None
    if number is None:
        raise ValueError(f'"{value}" is not a {what}.')
    # A comparison with "not a number" is false.
    if least is not None and not number >= least:
        raise ValueError(f"must be at least {least}, not {value}.")
    if most is not None and not number <= most:
        raise ValueError(f"must be at most {most}, not {value}.")
    return number


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise ValueError(f'"{value}" is not one of: true, false.')
    return word in _TRUE
