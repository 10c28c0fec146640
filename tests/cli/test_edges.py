"""The edges of the command: quantities, moments, exit codes, and faults of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from scrubber.cli import main as command
from scrubber.cli.exits import Exit, exit_for
from scrubber.cli.history import moment_of
from scrubber.cli.options import seconds, size
from scrubber.cli.output import Answer, ListDocument, Output, emit, emit_one
from scrubber.domain import errors
from scrubber.domain.quantities import binary_size

EXITS = {
    errors.ScrubberError: Exit.NEGATIVE,
    errors.Retry: Exit.NEGATIVE,
    errors.NotReady: Exit.REFUSED,
    errors.Away: Exit.NEGATIVE,
    errors.BeingReset: Exit.NEGATIVE,
    errors.Refused: Exit.REFUSED,
    errors.InvalidRequest: Exit.USAGE,
    errors.Quarantined: Exit.REFUSED,
    errors.Held: Exit.REFUSED,
    errors.NotPermitted: Exit.REFUSED,
    errors.DeviceFault: Exit.NEGATIVE,
    errors.Unreadable: Exit.NEGATIVE,
    errors.Stuck: Exit.NEGATIVE,
    errors.Lost: Exit.NEGATIVE,
    errors.Fatal: Exit.NEGATIVE,
    errors.BadConfiguration: Exit.USAGE,
    errors.SecondInstance: Exit.REFUSED,
    errors.LedgerFailure: Exit.NEGATIVE,
}


def test_every_error_has_its_exit_code_and_none_is_zero() -> None:
    assert {kind.__name__ for kind in EXITS} == set(errors.__all__)
    assert {kind: exit_for(kind("why")) for kind in EXITS} == EXITS
    assert Exit.OK not in EXITS.values()


@pytest.mark.parametrize(
    ("written", "expected"),
    [("30", 30.0), ("0.5", 0.5), ("500ms", 0.5), ("25s", 25.0), ("1.5m", 90.0), ("2h", 7200.0), (" 3 s ", 3.0)],
)
def test_a_time_is_read(written: str, expected: float) -> None:
    assert seconds(written) == expected


@pytest.mark.parametrize("written", ["", "-1", "1d", "1:30", "inf", "nan", "1e3", "s", "1 2s", "٣s"])
def test_what_is_no_time_is_refused(written: str) -> None:
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
def test_a_size_is_read(written: str, expected: int) -> None:
    assert size(written) == expected


@pytest.mark.parametrize("written", ["", "0", "-1", "many", "1XB", "MiB", "1 2MiB"])
def test_what_is_no_size_is_refused(written: str) -> None:
    with pytest.raises(typer.BadParameter):
        size(written)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1000, "1000 B"), (4096, "4 KiB"), (256 * 2**20, "256 MiB"), (3 * 2**40, "3072 GiB")],
)
def test_sizes_are_shown_in_the_largest_whole_unit(count: int, text: str) -> None:
    assert binary_size(count) == text


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
def test_since_is_a_time_ago_or_a_moment(written: str, moment: float) -> None:
    assert moment_of(written, now=10_000.0) == moment


@pytest.mark.parametrize("written", ["2", " 2", "1.5", "20261120"])
def test_since_without_a_unit_is_no_time_ago(written: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"names no unit: write {written.strip()}h, {written.strip()}m or"):
        moment_of(written, now=10_000.0)


def test_json_and_yaml_stay_ascii_and_without_anything_a_terminal_acts_on(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2J\x9b1m\u202e"
    for output in (Output.JSON, Output.YAML, Output.NAME, Output.TABLE):
        emit(Answer({"said": hostile}, [hostile], ("A",), [(hostile,)], kind="Odd"), output)
    out = capsys.readouterr().out
    assert not {"\x1b", "\x9b", "\u202e"} & set(out)
    assert json.loads(out[: out.index("}") + 1])["said"] == hostile


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_are_for_terminals_that_want_them(
    variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    emit(Answer(None, [], ("STATE",), [("clean",)]), Output.TABLE)
    assert ("\x1b[32mclean\x1b[0m" in capsys.readouterr().out) is coloured


def test_a_pipe_gets_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    emit(Answer(None, [], ("STATE",), [("clean",)]), Output.TABLE)
    assert capsys.readouterr().out == "STATE\nclean\n"


def test_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.metadata

    with pytest.raises(SystemExit) as ended:
        command.main(["version", "-o", "json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["version"] == importlib.metadata.version("gpu-scrubber")


def test_a_fault_of_ours_is_a_sentence_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SCRUBBER_TRACEBACK", raising=False)
    nothing: dict[str, str] = {}
    monkeypatch.setattr("platform.python_version", lambda: nothing["gpu-scrubber"])
    with pytest.raises(SystemExit) as ended:
        command.main(["version"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "Error: This is a fault of scrubber itself (KeyError: 'gpu-scrubber'); SCRUBBER_TRACEBACK=1 shows where.\n"
    )


def test_a_disk_that_is_full_is_a_sentence() -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "scrubber.cli.main", "version"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert (ended.returncode, ended.stderr) == (
        1,
        b"Error: Standard output could not be written: No space left on device.\n",
    )


def test_json_and_yaml_say_their_version_and_kind_and_a_list_has_items(capsys: pytest.CaptureFixture[str]) -> None:
    head = {"apiVersion": "cli.scrubber.dev/v1"}
    emit(Answer({"id": "a"}, (), (), (), kind="Thing"), Output.JSON)
    assert json.loads(capsys.readouterr().out) == head | {"kind": "Thing", "id": "a"}
    emit(Answer([{"kind": "own"}], (), (), (), kind="Thing"), Output.YAML)
    assert yaml.safe_load(capsys.readouterr().out) == head | {"kind": "ThingList", "items": [{"kind": "own"}]}


def test_a_stream_is_a_document_a_line_of_json_and_many_documents_of_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        emit_one({"number": number}, "Count")
    assert [json.loads(line)["number"] for line in capsys.readouterr().out.splitlines()] == [1, 2]
    for number in (1, 2):
        emit_one({"number": number}, "Count", Output.YAML)
    assert [each["number"] for each in yaml.safe_load_all(capsys.readouterr().out)] == [1, 2]


@pytest.mark.parametrize(
    "items", [[], [{"id": "a", "parts": [], "more": {"b": ["\n", {}]}}, {"id": "ü"}]], ids=["none", "two"]
)
@pytest.mark.parametrize("more", [{}, {"next": 7, "rest": None}], ids=["bare", "more"])
@pytest.mark.parametrize("output", [Output.JSON, Output.YAML])
def test_a_list_written_item_by_item_is_the_document_that_it_would_be_at_once(
    capsys: pytest.CaptureFixture[str], output: Output, more: dict[str, object], items: list[dict[str, object]]
) -> None:
    document = ListDocument(kind="ThingList", output=output)
    for each in items:
        document.add([each])
    document.end(**more)
    written = capsys.readouterr().out
    emit(Answer({"items": items, **more}, (), (), (), kind="ThingList"), output)
    assert written == capsys.readouterr().out


def test_no_document_is_without_a_kind_and_none_loses_its_own_keys() -> None:
    with pytest.raises(ValueError, match="kind"):
        Answer([], (), (), ())
    with pytest.raises(ValueError, match="own keys"):
        emit(Answer({"kind": "mine"}, (), (), (), kind="Thing"), Output.JSON)
