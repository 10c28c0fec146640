"""A command line that is parsed without Typer means the same to Typer, and every other one is left to it."""

from functools import partial
from typing import Any

import pytest

from scrubber.cli.command_tree import Commands
from scrubber.cli.device_listing import list_devices
from scrubber.cli.diagnosis import diagnose
from scrubber.cli.plain_lines import plain_command
from scrubber.cli.policy_check import check_policies

VARIABLES = (
    *("SCRUBBER_SOCKET_DIR", "SCRUBBER_OUTPUT", "SCRUBBER_POLICY", "SCRUBBER_STATE_DIR", "SCRUBBER_TOOLKIT_CONFIG"),
    *("SCRUBBER_KUBELET_DIR", "SCRUBBER_POD_LOGS_DIR", "SCRUBBER_NODE_ROOT"),
)


def by_typer(words: list[str]) -> dict[str, Any]:
    """Return what Typer passes to the command."""
    path = words[: 2 if words[0] == "policy" else 1]
    found: Any = next(each for each in Commands.entries if each.name == words[0]).load()
    for name in path[1:]:
        found = found.commands[name]
    parameters: dict[str, Any] = dict(found.make_context(path[-1], words[len(path) :]).params)
    for names in ("device", "policies"):
        if names in parameters:
            parameters[names] = list(parameters[names] or ())
    return parameters


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SCRUBBER_SOCKET_DIR": "/run/other", "SCRUBBER_OUTPUT": "json"},
        {each: "name" if each == "SCRUBBER_OUTPUT" else f"/{each.lower()}" for each in VARIABLES},
        dict.fromkeys(VARIABLES, ""),
    ],
    ids=["no variables", "two variables", "all variables", "empty variables"],
)
@pytest.mark.parametrize(
    "words",
    [
        ["devices"],
        ["devices", "0"],
        ["devices", "0", "GPU-1a…", " 2 "],
        ["devices", "-o", "json"],
        ["devices", "--output", "yaml", "1"],
        ["devices", "1", "--output=name", "2"],
        ["devices", "--socket-dir", "/tmp/run", "-o", "wide", "--no-headers"],
        ["devices", "--socket-dir=/tmp/a=b"],
        ["devices", "--no-headers", "--no-headers"],
        ["devices", "\udcff"],
        ["doctor"],
        ["doctor", "-o", "json", "--no-headers"],
        ["doctor", "--socket-dir", "run", "--state-dir", "state/", "--policy", "strict", "--node-root=/host"],
        ["doctor", "--toolkit-config", "/c.toml", "--kubelet-dir", "~/kubelet", "--pod-logs-dir=../logs"],
        ["policy", "check", "default"],
        ["policy", "check", "a.yaml", "--output", "yaml", " b ", "--no-headers"],
    ],
    ids=" ".join,
)
def test_plain_line_means_the_same_to_typer(
    words: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    plain = plain_command(words, environment)
    assert isinstance(plain, partial)
    assert plain.func is {"devices": list_devices, "doctor": diagnose, "policy": check_policies}[words[0]]
    assert not plain.args
    expected = by_typer(words)
    assert expected.pop("watch", False) is False
    assert plain.keywords == expected
    assert {name: type(value) for name, value in plain.keywords.items()} == {
        name: type(value) for name, value in expected.items()
    }


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
        ["doctor", "sim-0"],
        ["doctor", "--policy", ""],
        ["doctor", "--node-root="],
        ["doctor", "--state-dir", "a", "--state-dir", "b"],
        ["policy"],
        ["policy", "show"],
        ["policy", "check"],
        ["policy", "check", "-o", "json"],
        ["policy", "--output", "json", "check", "default"],
        ["policy", "check", "default", "--socket-dir", "/run"],
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
