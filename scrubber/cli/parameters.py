"""Fast conversion of command-line values to their types, for the simple cases.

Typer validates every value with pydantic, including defaults, and loading pydantic takes as long as everything else
that a short command does. A plain string needs no validation. Invariant: every value that is not obviously valid goes
through Typer, and if Typer refuses it, the message lists the alternatives. Only whether a path is readable is left to
the code that opens it, whose message is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

__all__ = ["HELP_FLAGS", "CommandLineError", "skip_validation", "to_command_line_error"]

HELP_FLAGS = ["-h", "--help"]

_NEEDS_TYPER = object()
"""Marks a value that Typer must convert."""
_MAX_DIGITS = 18


def skip_validation(command: TyperCommand | TyperGroup) -> None:
    """Use the fast conversion for the parameters of ``command`` and of all commands below it."""
    # Created at the first access, and cached.
    help_flag = command.get_help_option(typer.Context(command, help_option_names=HELP_FLAGS))
    for parameter in (*command.params, help_flag):
        # Typer creates its parameters itself, and offers no way to choose their class.
        if type(parameter) is TyperOption:
            parameter.__class__ = _Option
        elif type(parameter) is TyperArgument:
            parameter.__class__ = _Argument
    if isinstance(command, TyperGroup):
        for each in command.commands.values():
            if isinstance(each, TyperCommand | TyperGroup):
                skip_validation(each)


class CommandLineError(typer.BadParameter):
    """An invalid command line, printed as the message only, without a prefix."""

    def format_message(self) -> str:
        return self.message


def to_command_line_error(error: typer.BadParameter) -> CommandLineError:
    """Return ``error`` in this command's format: the flag, or its environment variable, then the problem."""
    where, parameter = error.param_hint, error.param
    if where is None and parameter is not None:
        where = _parameter_name(parameter, error.ctx)
    hint = where if where is None or isinstance(where, str) else " / ".join(where)
    if hint:
        return CommandLineError(f"{hint}: {error.message}", ctx=error.ctx)
    return CommandLineError(error.message[:1].upper() + error.message[1:], ctx=error.ctx)


def _parameter_name(parameter: Any, ctx: Any) -> str:
    """Return the longest name of a flag, or the environment variable that its value came from."""
    if ctx is not None and getattr(ctx.get_parameter_source(parameter.name), "name", "") == "ENVIRONMENT":
        return str(parameter.envvar)
    if parameter.param_type_name == "argument":
        return str(parameter.display_name_raw)
    return str(max(parameter.opts, key=len))


class _Option(TyperOption):
    def process_value(self, ctx: Any, value: Any) -> Any:
        found = _convert(self, value)
        if found is _NEEDS_TYPER:
            try:
                return super().process_value(ctx, value)
            except typer.BadParameter as error:
                raise _reword_error(self, value, error) from error
        return found if self.callback is None else self.callback(ctx, self, found)

    def display_type_rich(self, ctx: Any) -> str | None:
        """Return a placeholder for the value where the option has no metavar."""
        kind: Any = getattr(getattr(self, "type_descriptor", None), "annotation", None)
        plain = {int: "N", float: "N", str: "TEXT"}.get(kind) if self.metavar is None else None
        return plain or super().display_type_rich(ctx)


class _Argument(TyperArgument):
    def display_type_rich(self, ctx: Any) -> str | None:
        """Return None where the argument has a metavar, as with options."""
        return None if self.metavar is not None else super().display_type_rich(ctx)

    def get_usage_pieces(self, ctx: Any) -> list[str]:
        """Return ``DEVICE``, in brackets where it is optional, and with dots where it may be repeated."""
        word = self.display_name_raw
        return [(word if self.required else f"[{word}]") + ("..." if self.nargs != 1 else "")]

    def process_value(self, ctx: Any, value: Any) -> Any:
        found = _convert(self, value)
        if found is _NEEDS_TYPER:
            try:
                return super().process_value(ctx, value)
            except typer.BadParameter as error:
                raise _reword_error(self, value, error) from error
        return found if self.callback is None else self.callback(ctx, self, found)


def _reword_error(parameter: TyperOption | TyperArgument, value: Any, error: typer.BadParameter) -> typer.BadParameter:
    """Return ``error`` with the allowed values in place of type checking jargon."""
    described: Any = getattr(parameter, "type_descriptor", None)
    kind = getattr(described, "annotation", None)
    if isinstance(value, str) and isinstance(kind, type) and described.parameter_info.parser is None:
        if issubclass(kind, Enum):
            members = ", ".join(str(each.value) for each in kind)
            error.message = f'"{value}" is none of {members}.'
        elif kind in (int, float):
            error.message = _number_error(value, kind, described.parameter_info)
        elif kind is bool:
            error.message = f'"{value}" is neither true nor false.'
    error.message = error.message.removeprefix("Value error, ")
    return error


def _number_error(value: str, kind: type, wanted: Any) -> str:
    try:
        number = kind(value)
    except ValueError:
        return f'"{value}" is no number.' if kind is float else f'"{value}" is no whole number.'
    if wanted.min is not None and number < wanted.min:
        return f"{value} is too little; {wanted.min} is the least."
    if wanted.max is not None and number > wanted.max:
        return f"{value} is too much; {wanted.max} is the most."
    return f'"{value}" is no number that can be used here.'


def _convert(parameter: TyperOption | TyperArgument, value: Any) -> Any:
    described = getattr(parameter, "type_descriptor", None)
    if described is None:  # a different version of Typer
        return _NEEDS_TYPER
    kind, wanted = described.annotation, described.parameter_info
    several = parameter.nargs == -1 or parameter.multiple
    if parameter.required and (value is None or (several and not value)):
        return _NEEDS_TYPER
    if value is None:
        return () if several else None
    if several:
        return _convert_list(value, kind, wanted)
    return _convert_one(value, kind, wanted)


def _convert_list(values: Any, kind: Any, wanted: Any) -> Any:
    of = get_args(kind)
    if get_origin(kind) is not list or len(of) != 1 or not isinstance(values, list | tuple):
        return _NEEDS_TYPER
    found = [_convert_one(each, of[0], wanted) for each in values]
    return _NEEDS_TYPER if any(each is _NEEDS_TYPER for each in found) else found


def _convert_one(value: Any, kind: Any, wanted: Any) -> Any:
    if wanted.parser is not None:
        try:
            return wanted.parser(value)
        except ValueError:
            return _NEEDS_TYPER
    if not isinstance(kind, type):
        return _NEEDS_TYPER
    if issubclass(kind, Enum):
        return _convert_enum(value, tuple(kind))
    if issubclass(kind, Path):
        left_to_opener = not (wanted.exists or wanted.writable or wanted.resolve_path or wanted.path_type)
        anything = wanted.file_okay and wanted.dir_okay
        return Path(value) if left_to_opener and anything and isinstance(value, str | Path) else _NEEDS_TYPER
    if kind in (int, float):
        return _convert_number(value, kind, wanted)
    return value if kind in (str, bool) and type(value) is kind else _NEEDS_TYPER


def _convert_enum(value: Any, members: Sequence[Enum]) -> Any:
    return next((each for each in members if value is each or value == each.value), _NEEDS_TYPER)


def _convert_number(value: Any, kind: type, wanted: Any) -> Any:
    if kind is int and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS:
        value = int(value)
    if type(value) is not kind:
        return _NEEDS_TYPER
    too_small = wanted.min is not None and value < wanted.min
    too_large = wanted.max is not None and value > wanted.max
    return _NEEDS_TYPER if too_small or too_large else value
