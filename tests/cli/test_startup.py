"""Imports at the start of a command: only what it needs, with the same results as the full libraries."""

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from scrubber.cli.app import App, Argument, Option
from scrubber.cli.command_tree import Commands, app
from scrubber.cli.lazy import CommandEntry, LazyGroup

NOT_TO_WAIT_FOR = ("grpc", "google.protobuf", "pydantic", "rich", "structlog", "yaml", "cryptography", "plugin")
NO_SERVICE = "asyncio"
DAEMON = ("scrubber.daemon", "scrubber.engine", "scrubber.adapters", "scrubber.config", "scrubber.ports")
COMMAND_MODULES = sorted({f"scrubber.cli.commands.{each.module}" for each in Commands.entries})


def loaded(*words: str, **environment: str) -> set[str]:
    """Return the modules that are loaded when ``scrubber WORDS`` has ended."""
    code = (
        "import json, sys\n"
        "from scrubber.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    command = [sys.executable, "-c", code, *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": "", **environment})
    return set(json.loads(ended.stdout.splitlines()[-1]))


def among(modules: set[str], packages: tuple[str, ...]) -> list[str]:
    return sorted(
        each for each in modules if each.startswith(tuple(f"{name}." for name in packages)) or each in packages
    )


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["--help"], {}),
        ([], {}),
        (["no-such-command"], {}),
        ([""], {"_SCRUBBER_COMPLETE": "complete_zsh"}),
        (["-"], {"_SCRUBBER_COMPLETE": "complete_fish"}),
    ],
)
def test_top_level_help_and_version_import_no_command(words: list[str], environment: dict[str, str]) -> None:
    modules = loaded(*words, **environment)
    assert among(modules, (*NOT_TO_WAIT_FOR, NO_SERVICE, *DAEMON)) == []
    assert modules.isdisjoint(COMMAND_MODULES)


@pytest.mark.parametrize("words", [["version"], ["version", "-o", "json"], ["completion", "bash"], ["serve", "--help"]])
def test_offline_command_imports_no_client(words: list[str]) -> None:
    settings = ("scrubber.config",) if words[0] == "serve" else ()
    unwanted = (*NOT_TO_WAIT_FOR, *(each for each in DAEMON if each not in settings))
    assert among(loaded(*words), unwanted) == []


@pytest.mark.parametrize(
    "words",
    [
        ["devices"],
        ["device", "0"],
        ["history", "--limit", "5", "-o", "json"],
        ["scrub", "0", "--no-wait"],
        ["quarantine", "0", "--reason", "noise"],
        ["reset-plan", "0"],
        ["certificate", "list"],
    ],
)
def test_service_command_imports_only_its_client(words: list[str], tmp_path: Path) -> None:
    modules = loaded(*words, SCRUBBER_SOCKET_DIR=str(tmp_path))
    assert "scrubber.api.client" in modules
    assert among(modules, ("pydantic", "rich", "structlog", "yaml", "cryptography", "plugin", *DAEMON)) == []


@pytest.mark.parametrize("words", [["devices"], ["devices", "0", "-o", "json", "--no-headers"]])
def test_plain_list_of_devices_loads_no_command_line_library(words: list[str], tmp_path: Path) -> None:
    modules = loaded(*words, SCRUBBER_SOCKET_DIR=str(tmp_path))
    assert "scrubber.api.client" in modules
    assert among(modules, ("typer", "scrubber.cli.commands")) == []


def test_completion_of_a_device_imports_only_the_client(tmp_path: Path) -> None:
    modules = loaded("device", "", SCRUBBER_SOCKET_DIR=str(tmp_path), _SCRUBBER_COMPLETE="complete_bash")
    assert "scrubber.api.client" not in modules, "nothing is completed without a line"
    modules = loaded("device", "", SCRUBBER_SOCKET_DIR=str(tmp_path), _SCRUBBER_COMPLETE="complete_zsh")
    assert "scrubber.api.client" in modules
    assert among(modules, ("pydantic", "rich", "structlog", "yaml", "cryptography", "plugin", *DAEMON)) == []


def test_missing_argument_is_reported_without_loading_a_library() -> None:
    assert among(loaded("device"), NOT_TO_WAIT_FOR) == []


def test_rich_is_loaded_only_for_a_table_that_must_be_folded() -> None:
    code = (
        "import sys\n"
        "from scrubber.cli.render.table import OutputColumn, TableSection, table_lines\n"
        "table = TableSection('', ('ID', OutputColumn('TEXT', min_width=8)), [('a…', 'clean, some text')])\n"
        "for width in (80, 14):\n"
        "    table_lines([table], width, colours=True)\n"
        "    print('rich' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["False", "True"]


def test_doctor_on_an_empty_node_imports_no_file_parsers(tmp_path: Path) -> None:
    modules = loaded("doctor", "--node-root", str(tmp_path), SCRUBBER_SOCKET_DIR=str(tmp_path))
    assert "scrubber.doctor.container_runtime" in modules
    assert among(modules, ("yaml", "tomllib", "cryptography", "rich", "structlog", "plugin")) == []


COLLECTED = """
import gc, sys
from scrubber.cli.main import main
first, last, attribute, *words = sys.argv[1:]
found = []

def collects(phase, info):
    if phase == "start" and first in sys.modules and not hasattr(sys.modules.get(last), attribute):
        found.append(info["generation"])

gc.callbacks.append(collects)
try:
    main(words)
except SystemExit:
    pass
print(len(found), hasattr(sys.modules[last], attribute), gc.isenabled())
"""


@pytest.mark.parametrize(
    ("first", "last", "attribute", "words"),
    [
        *(
            ("yaml", "scrubber.config.policy_file", "with_digest", ["policy", word, "strict"])
            for word in ("check", "show")
        ),
        *(("yaml", "scrubber.config.xid_file", "xid_schema", ["policy", word]) for word in ("xids", "explain")),
        ("grpc", "scrubber.api.client", "ReadClient", ["doctor"]),
    ],
    ids=lambda value: value[1] if isinstance(value, list) and len(value) > 1 else None,
)
def test_short_lived_command_runs_no_garbage_collection(
    first: str, last: str, attribute: str, words: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", COLLECTED, first, last, attribute, *words]
    environment = {"PATH": "", "SCRUBBER_SOCKET_DIR": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout.splitlines()[-1] == "0 True True"


DAEMON_STARTS = """
import atexit, gc
from scrubber.cli.startup import make_gc_rare, restore_gc
usual = gc.get_threshold()
atexit.register(lambda: print(gc.get_freeze_count() > 1000))  # what is registered first is called last
make_gc_rare()
print(gc.get_threshold()[0] > 100 * usual[0])
if {daemon}:
    restore_gc()
    print(gc.get_threshold() == usual)
"""


@pytest.mark.parametrize("daemon", [False, True])
def test_daemon_runs_garbage_collection_as_usual(daemon: bool) -> None:
    program = DAEMON_STARTS.format(daemon=daemon)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == (["True", "True", "False"] if daemon else ["True", "True"])


@pytest.mark.parametrize("entry", Commands.entries, ids=lambda entry: entry.name)
def test_command_table_summary_is_the_first_line_of_the_commands_help(entry: CommandEntry) -> None:
    summary = " ".join((entry.load().help or "").partition("\n\n")[0].split())
    assert summary.startswith(entry.summary)
    rest = summary.removeprefix(entry.summary)
    assert rest == "" or rest.startswith(" "), "the summary is the first sentence"
    assert entry.summary.endswith(".")
    assert len(entry.summary) <= 62, "a line of 80 columns"


def test_lazy_group_lists_its_commands_like_any_group() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, LazyGroup)
    assert list(group.commands) == [each.name for each in Commands.entries]
    assert "version" in group.commands
    assert "nothing" not in group.commands
    with pytest.raises(KeyError):
        group.commands["nothing"]
    assert group.commands["version"] is group.commands["version"]
    group.add_command(TyperCommand("more"))
    del group.commands["version"]
    assert len(group.commands) == len(Commands.entries)
    assert list(group.commands)[-1] == "more"


# --- values: our parameters and Typer's own agree -------------------------------------------------------------------


def parameters() -> Iterator[tuple[str, TyperOption | TyperArgument]]:
    def below(name: str, command: Any) -> Iterator[tuple[str, TyperOption | TyperArgument]]:
        for each in command.params:
            yield f"{name} {each.name}", each
        if isinstance(command, TyperGroup):
            for word, inner in command.commands.items():
                yield from below(f"{name} {word}", inner)

    for word, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        yield from below(word, command)


class Word(Enum):
    JSON = "json"
    SLOW = "Slow"


def of_every_kind(
    parsed: Annotated[int, typer.Option(parser=int)] = 1,
    existing: Annotated[Path, typer.Option(exists=True)] = Path("/"),
    directory: Annotated[Path, typer.Option(file_okay=False)] = Path("/"),
    clamped: Annotated[int, typer.Option(min=0, max=5, clamp=True)] = 3,
    fraction: Annotated[float, typer.Option(max=1.0)] = 0.5,
    whole: int = 7,
    flag: bool = False,
    word: Annotated[Word, typer.Option(case_sensitive=False)] = Word.JSON,
    words: Annotated[list[Word] | None, typer.Option()] = None,
    numbers: Annotated[list[int] | None, typer.Option()] = None,
    pair: tuple[int, str] = (1, "a"),
    moment: Annotated[datetime | None, typer.Option()] = None,
    path: Path | None = None,
    called: Annotated[str, typer.Option(callback=lambda value: f"<{value}>")] = "x",
    several: Annotated[list[str], typer.Argument()] = [],  # noqa: B006 - Typer wants a list
) -> None:
    """A command with a parameter of each kind, more than our commands have now."""


def parameters_of_every_kind() -> Iterator[tuple[str, TyperOption | TyperArgument]]:
    any_app = App()
    any_app.command()(of_every_kind)
    command = typer.main.get_command(any_app)
    for each in command.params:
        assert isinstance(each, TyperOption | TyperArgument)
        yield f"any {each.name}", each


PARAMETERS = {**dict(parameters()), **dict(parameters_of_every_kind())}
WRITTEN = (
    *("", "0", "7", "-1", "007", "99999999999999999999", "1.5", "nan", "json", "JSON", "slow", "30s", "64MiB", "true"),
    *("a b", "-", "/", "/etc/passwd", "2026-01-02", "\N{SUPERSCRIPT TWO}", "\udcff"),
)


def outcome(process: Any, context: typer.Context, value: Any) -> object:
    try:
        return process(context, value)
    except typer.BadParameter as error:
        return "refused", type(error).__name__


@pytest.mark.parametrize("name", PARAMETERS)
def test_option_values_are_converted_as_by_typer(name: str) -> None:
    parameter = PARAMETERS[name]
    context = typer.Context(TyperCommand("any"))
    own = TyperOption if isinstance(parameter, TyperOption) else TyperArgument
    several = parameter.nargs == -1 or parameter.multiple
    assert isinstance(parameter, Option | Argument)
    values = [parameter.get_default(context), None, *([each] if several else each for each in WRITTEN)]
    if several:
        values += [[], (), list(WRITTEN[:2]), list(WRITTEN)]
    for value in values:
        ours = outcome(parameter.process_value, context, value)
        theirs = outcome(lambda ctx, given: own.process_value(parameter, ctx, given), context, value)
        if several and isinstance(ours, list) and isinstance(theirs, tuple):
            theirs = list(theirs)  # commands get a list of either
        assert (type(ours), ours) == (type(theirs), theirs), value
