"""The file of a command backend, and the error codes that a policy classifies for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scrubber.adapters.command.conditions import COMMAND_SIGNALS
from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.config.command_file import CommandFileSource, parse_command_file
from scrubber.config.policy_file import parse_policy
from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.health.signal_table import ErrorClass


def test_verbs_that_a_file_does_not_list_have_five_seconds() -> None:
    found = parse_command_file(b"program: /opt/tool\ndeadlines: {telemetry: 10s}\n", "command.yaml")
    assert (found.deadlines["telemetry"], found.deadlines["inventory"], found.poll_interval) == (10.0, 5.0, 5.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"deadlines: {}\n", 'the key "program" is missing'),
        (b"program: tool\n", 'command.yaml:1: program: "tool" is not an absolute path'),
        (b"program: /opt/tool\ndeadlines: {erase: 5s}\n", "command.yaml:2: "),
        (b"program: /opt/tool\npollInterval: 1ms\n", "command.yaml:2: pollInterval: a time of 0.001 s is too short"),
        (
            b"program: /opt/tool\npollInterval: 1h\n",
            "command.yaml:2: pollInterval: a time of 3600 s is too long here; write at most 600s",
        ),
    ],
)
def test_invalid_file_is_refused_with_its_line(content: bytes, message: str) -> None:
    with pytest.raises(InvalidConfiguration) as raised:
        parse_command_file(content, "command.yaml")
    assert message in str(raised.value)


def test_changed_file_takes_effect_and_an_invalid_one_does_not(tmp_path: Path) -> None:
    file = tmp_path / "command.yaml"
    file.write_text("program: /opt/tool\n")
    source = CommandFileSource(file)
    file.write_text("program: /opt/other-tool\n")
    assert (str(source.current().program), source.rejection) == ("/opt/other-tool", "")
    file.write_text("program: tool that is no path\n")
    assert str(source.current().program) == "/opt/other-tool"
    assert source.rejection.startswith("The changed file is not in force: ")


def test_error_codes_of_a_command_have_the_classes_of_the_policy_and_never_those_of_xids() -> None:
    policy = parse_policy(b"name: mine\nerrors: {reset: [7]}\nxids: {ignore: [7, 8]}\n", "policy.yaml", xids={})
    managed, gpus = policy.with_signals(COMMAND_SIGNALS), policy.with_signals(NVIDIA_SIGNALS)
    assert [managed.error_class(code) for code in (7, 8)] == [ErrorClass.RESET, ErrorClass.UNKNOWN]
    assert [gpus.error_class(code) for code in (7, 8)] == [ErrorClass.IGNORE, ErrorClass.IGNORE]
