"""Command lines: everything that is decided about their words before a command begins."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import typer
from typer import Abort, Exit
from typer._click.exceptions import ClickException

from scrubber.cli.command_tree import app
from scrubber.domain.errors import ScrubberError
from tests.fuzz.target import SLOW_GOAL, target


@cache
def _commands() -> tuple[tuple[str, Any, Any], ...]:
    """Return path, command and context of the parent of every command that is not a group."""

    def leaves(command: Any, context: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if hasattr(inner, "list_commands"):
                below = typer.Context(inner, parent=context, info_name=name)
                yield from leaves(inner, below, f"{path} {name}")
            else:
                yield f"{path} {name}", inner, context

    root = typer.main.get_command(app)
    return tuple(leaves(root, typer.Context(root, info_name="scrubber"), "scrubber"))


def _seeds() -> Iterator[bytes]:
    samples = (b"GPU-1", b"5", b"10s", b"/tmp/x", b"reason", b"json")
    for number, (_, command, _) in enumerate(_commands()):
        flags = [each.opts[-1].encode() for each in command.params if each.opts and each.opts[-1].startswith("-")]
        yield bytes((number,))
        yield bytes((number,)) + b"\0".join(
            (*samples[:1], *(word for flag in flags[:12] for word in (flag, samples[1])))
        )
        yield bytes((number,)) + b"\0".join(
            flag + b"=" + sample for flag, sample in zip(flags, samples * 9, strict=False)
        )


@target(
    "command-line",
    parser="the words of every command",
    covers=("scrubber.cli.app", "scrubber.cli.options", "scrubber.config.units"),
    oracle="a command line is refused with a message, or its help is printed, or every number in it is finite",
    seeds=tuple(_seeds()),
    words=(b"--", b"-o", b"json", b"=", b"nan", b"inf", b"1e999", b"-1", b"1_000", "٣".encode(), b"--yes", b"--help"),
    longest=2048,
    share=200,
    goal=SLOW_GOAL,
)
def command_line(data: bytes) -> bool:
    _, command, parent = _commands()[(data[0] if data else 0) % len(_commands())]
    words = [each.decode(errors="surrogateescape") for each in data[1:].split(b"\0")] if len(data) > 1 else []
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            context = command.make_context(command.name, list(words), parent=parent)
    except ClickException as error:
        assert error.format_message()
        assert error.exit_code == 2, error
        return False
    except (ScrubberError, Abort) as error:
        assert str(error)
        return False
    except Exit as ended:
        assert ended.exit_code == 0
        assert printed.getvalue()
        return False
    for name, value in context.params.items():
        for each in value if isinstance(value, tuple | list) else (value,):
            assert not isinstance(each, float) or math.isfinite(each), (name, each)
    return True
