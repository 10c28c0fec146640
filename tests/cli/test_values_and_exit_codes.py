"""Edge cases of the command: quantities, times, exit codes, and internal errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from scrubber.cli import main as command
from scrubber.cli.commands.history import parse_time
from scrubber.cli.exit_codes import ExitCode, exit_code_for
from scrubber.cli.options import seconds, size
from scrubber.cli.render.output import CommandResult, ListDocument, OutputFormat, print_document, print_result
from scrubber.domain import errors
from scrubber.domain.formatting import format_size

EXITS = {
    errors.ScrubberError: ExitCode.FAILED,
    errors.RetryableError: ExitCode.FAILED,
    errors.NotReady: ExitCode.REFUSED,
    errors.Unavailable: ExitCode.FAILED,
    errors.BrokenCommand: ExitCode.FAILED,
    errors.ResetInProgress: ExitCode.FAILED,
    errors.Refused: ExitCode.REFUSED,
    errors.InvalidRequest: ExitCode.USAGE,
    errors.Quarantined: ExitCode.REFUSED,
    errors.DeviceBusy: ExitCode.REFUSED,
    errors.PermissionDenied: ExitCode.REFUSED,
    errors.DeviceFault: ExitCode.FAILED,
    errors.Unreadable: ExitCode.FAILED,
    errors.DriverTimeout: ExitCode.FAILED,
    errors.DeviceLost: ExitCode.FAILED,
    errors.FatalError: ExitCode.FAILED,
    errors.InvalidConfiguration: ExitCode.USAGE,
    errors.AlreadyRunning: ExitCode.REFUSED,
    errors.LedgerFailure: ExitCode.FAILED,
}


def test_every_error_has_a_nonzero_exit_code() -> None:
    assert {kind.__name__ for kind in EXITS} == set(errors.__all__)
    assert {kind: exit_code_for(kind("why")) for kind in EXITS} == EXITS
    assert ExitCode.OK not in EXITS.values()


@pytest.mark.parametrize(
    ("written", "expected"),
    [("30", 30.0), ("0.5", 0.5), ("500ms", 0.5), ("25s", 25.0), ("1.5m", 90.0), ("2h", 7200.0), (" 3 s ", 3.0)],
)
def test_duration_is_parsed(written: str, expected: float) -> None:
    assert seconds(written) == expected


@pytest.mark.parametrize("written", ["", "-1", "1d", "1:30", "inf", "nan", "1e3", "s", "1 2s", "٣s"])
def test_invalid_duration_is_refused(written: str) -> None:
    with pytest.raises(typer.BadParameter, match="time"):
        seconds(written)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("256MiB", 256 * 2**20),
        ("256Mi", 256 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("100MB", 10**8),
        ("2tib", 2**41),
    ],
)
def test_size_is_parsed(written: str, expected: int) -> None:
    assert size(written) == expected


@pytest.mark.parametrize("written", ["", "0", "-1", "many", "1XB", "MiB", "1 2MiB"])
def test_invalid_size_is_refused(written: str) -> None:
    with pytest.raises(typer.BadParameter):
        size(written)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1000, "1000 B"), (4096, "4 KiB"), (256 * 2**20, "256 MiB"), (3 * 2**40, "3072 GiB")],
)
def test_size_is_shown_in_its_largest_whole_unit(count: int, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("written", "moment"),
    [
        ("30m", 10_000.0 - 1800),
        ("90s", 10_000.0 - 90),
        ("1970-01-01T00:01:00Z", 60.0),
        ("1970-01-01T01:01:00+01:00", 60.0),
        ("1970-01-01 00:01", 60.0),
        ("1970-01-02", 86400.0),
    ],
)
def test_since_is_a_duration_ago_or_a_timestamp(written: str, moment: float) -> None:
    assert parse_time(written, now=10_000.0) == moment


@pytest.mark.parametrize("written", ["2", " 2", "1.5", "20261120"])
def test_since_without_a_unit_is_refused(written: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"has no unit; write {written.strip()}h, {written.strip()}m or"):
        parse_time(written, now=10_000.0)


def test_json_and_yaml_are_ascii_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2J\x9b1m\u202e"
    for output in (OutputFormat.JSON, OutputFormat.YAML, OutputFormat.NAME, OutputFormat.TABLE):
        print_result(CommandResult({"said": hostile}, [hostile], ("A",), [(hostile,)], kind="Odd"), output)
    out = capsys.readouterr().out
    assert not {"\x1b", "\x9b", "\u202e"} & set(out)
    assert json.loads(out[: out.index("}") + 1])["said"] == hostile


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_are_used_only_on_terminals_that_allow_them(
    variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_result(CommandResult(None, [], ("STATE",), [("clean",)]), OutputFormat.TABLE)
    assert ("\x1b[32mclean\x1b[0m" in capsys.readouterr().out) is coloured


def test_pipe_gets_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(CommandResult(None, [], ("STATE",), [("clean",)]), OutputFormat.TABLE)
    assert capsys.readouterr().out == "STATE\nclean\n"


def test_version_is_the_distributions_version(capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.metadata

    with pytest.raises(SystemExit) as ended:
        command.main(["version", "-o", "json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["clientVersion"] == importlib.metadata.version("gpu-scrubber")


def test_unexpected_exception_is_one_error_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SCRUBBER_TRACEBACK", raising=False)
    nothing: dict[str, str] = {}
    monkeypatch.setattr("platform.python_version", lambda: nothing["gpu-scrubber"])
    with pytest.raises(SystemExit) as ended:
        command.main(["version"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "Error: Internal error (KeyError: 'gpu-scrubber'). This is a bug in scrubber; to report it, run the command again "
        "with SCRUBBER_TRACEBACK=1 in the environment for a traceback.\n"
    )


def test_full_disk_is_one_error_message() -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "scrubber.cli.main", "version"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert (ended.returncode, ended.stderr) == (
        1,
        b"Error: Standard output could not be written: No space left on device.\n",
    )


def test_json_and_yaml_documents_have_api_version_kind_and_items(capsys: pytest.CaptureFixture[str]) -> None:
    head = {"apiVersion": "cli.scrubber.dev/v1"}
    print_result(CommandResult({"id": "a"}, (), (), (), kind="Thing"), OutputFormat.JSON)
    assert json.loads(capsys.readouterr().out) == head | {"kind": "Thing", "id": "a"}
    print_result(CommandResult([{"kind": "own"}], (), (), (), kind="Thing"), OutputFormat.YAML)
    assert yaml.safe_load(capsys.readouterr().out) == head | {"kind": "ThingList", "items": [{"kind": "own"}]}


def test_stream_is_json_lines_or_a_sequence_of_yaml_documents(capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        print_document({"number": number}, "Count")
    assert [json.loads(line)["number"] for line in capsys.readouterr().out.splitlines()] == [1, 2]
    for number in (1, 2):
        print_document({"number": number}, "Count", OutputFormat.YAML)
    assert [each["number"] for each in yaml.safe_load_all(capsys.readouterr().out)] == [1, 2]


@pytest.mark.parametrize(
    "items", [[], [{"id": "a", "parts": [], "more": {"b": ["\n", {}]}}, {"id": "ü"}]], ids=["none", "two"]
)
@pytest.mark.parametrize("more", [{}, {"next": 7, "rest": None}], ids=["bare", "more"])
@pytest.mark.parametrize("output", [OutputFormat.JSON, OutputFormat.YAML])
def test_incrementally_written_list_equals_the_complete_document(
    capsys: pytest.CaptureFixture[str], output: OutputFormat, more: dict[str, object], items: list[dict[str, object]]
) -> None:
    document = ListDocument(kind="ThingList", output=output)
    for each in items:
        document.add([each])
    document.end(**more)
    written = capsys.readouterr().out
    print_result(CommandResult({"items": items, **more}, (), (), (), kind="ThingList"), output)
    assert written == capsys.readouterr().out


def test_document_requires_a_kind_and_keeps_its_own_keys() -> None:
    with pytest.raises(ValueError, match="kind"):
        CommandResult([], (), (), ())
    with pytest.raises(ValueError, match="own keys"):
        print_result(CommandResult({"kind": "mine"}, (), (), (), kind="Thing"), OutputFormat.JSON)
