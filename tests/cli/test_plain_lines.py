"""A command line that is parsed without Typer means the same to Typer, and every other one is left to it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scrubber.cli.command_tree import Commands
from scrubber.cli.device_listing import list_devices
from scrubber.cli.plain_lines import plain_command

COMMAND = next(each for each in Commands.entries if each.name == "devices").load()


def by_typer(words: list[str]) -> dict[str, Any]:
    """Return what Typer passes to the command."""
    return dict(COMMAND.make_context("devices", words).params)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SCRUBBER_SOCKET_DIR": "/run/other", "SCRUBBER_OUTPUT": "json"},
        {"SCRUBBER_SOCKET_DIR": "", "SCRUBBER_OUTPUT": ""},
    ],
    ids=["no variables", "variables", "empty variables"],
)
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["0"],
        ["0", "GPU-1a…", " 2 "],
        ["-o", "json"],
        ["--output", "yaml", "1"],
        ["1", "--output=name", "2"],
        ["--socket-dir", "/tmp/run", "-o", "wide", "--no-headers"],
        ["--socket-dir=/tmp/a=b"],
        ["--no-headers", "--no-headers"],
        ["\udcff"],
    ],
    ids=" ".join,
)
def test_plain_line_means_the_same_to_typer(
    words: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SCRUBBER_SOCKET_DIR", "SCRUBBER_OUTPUT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    plain = plain_command(["devices", *words], environment)
    assert isinstance(plain, partial)
    assert plain.func is list_devices
    socket, names, output = plain.args
    expected = by_typer(words)
    assert expected.pop("watch") is False
    assert {"socket": socket, "device": names, "output": output, **plain.keywords} == {
        **expected,
        "device": list(expected["device"] or ()),
    }
    assert isinstance(socket, Path)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--help"],
        ["version"],
        ["device", "0"],
        ["--output", "json", "devices"],
        *(
            ["devices", *words]
            for words in (
                ["--help"],
                ["-h"],
                ["-w"],
                ["--watch"],
                ["--watch=true"],
                ["--no-headers=true"],
                ["--"],
                ["-"],
                ["-ojson"],
                ["-o=json"],
                ["-o"],
                ["--output"],
                ["--output="],
                ["--output", "JSON"],
                ["--output", "xml"],
                ["-o", "json", "--output", "json"],
                ["--socket-dir", ""],
                ["--socket-dir", " "],
                ["--socket-dir", "-o"],
                ["--socket-dir", "/a", "--socket-dir", "/b"],
                ["--outp", "json"],
                [""],
            )
        ),
    ],
    ids=" ".join,
)
def test_any_other_line_is_left_to_typer(words: list[str]) -> None:
    assert plain_command(words, {}) is None


@pytest.mark.parametrize(
    "environment", [{"SCRUBBER_OUTPUT": "JSON"}, {"SCRUBBER_OUTPUT": "xml"}, {"SCRUBBER_SOCKET_DIR": " "}]
)
def test_variable_with_any_other_value_is_left_to_typer(environment: dict[str, str]) -> None:
    assert plain_command(["devices"], environment) is None
