"""The command line documents itself: every flag names its environment variable, and showing help is fast."""

import shlex
import sys
from collections.abc import Iterator
from typing import TypeGuard

import pytest
import typer

from scrubber.cli.command_tree import app
from scrubber.cli.examples import EXAMPLES
from scrubber.cli.main import main
from scrubber.cli.options import device_name
from tests.cli.terminal import WIDTHS, terminal

COMMANDS = {
    ("serve",),
    ("plugin",),
    ("dra",),
    ("run",),
    ("prolog",),
    ("epilog",),
    ("demo",),
    ("devices",),
    ("device",),
    ("scrub",),
    ("reset",),
    ("quarantine",),
    ("unquarantine",),
    ("break-glass",),
    ("yield",),
    ("resume",),
    ("history",),
    ("reset-plan",),
    ("doctor",),
    ("version",),
    ("completion",),
    ("baseline", "show"),
    ("baseline", "accept"),
    ("certificate", "list"),
    ("certificate", "show"),
    ("certificate", "export"),
    ("certificate", "key"),
    ("certificate", "verify"),
    ("audit", "verify"),
    ("audit", "export"),
    ("audit", "head"),
    ("policy", "check"),
    ("policy", "show"),
    ("policy", "explain"),
    ("policy", "xids"),
    ("backend", "check"),
    ("sim", "create"),
    ("sim", "split"),
    ("sim", "merge"),
    ("sim", "fault"),
    ("sim", "clear"),
    ("sim", "reboot"),
    ("sim", "tenant"),
}

METRICS = ("--metrics-address", "--metrics-cert", "--metrics-key", "--metrics-client-ca")
"""The same for all daemons."""

FLAGS = {
    ("serve",): {
        *(
            "--backend",
            "--sim-dir",
            "--config",
            "--state-dir",
            "--socket-dir",
            "--policy",
            "--kubelet",
            "--kubelet-dir",
            "--pod-resources-socket",
        ),
        *(
            "--pod-logs-dir",
            *METRICS,
            "--probe-address",
            "--nvsentinel-reset-journal",
            "--traces",
            "--node-name",
            "--cgroup-root",
            "--container-identity",
            "--log-format",
        ),
        *(
            "--log-level",
            "--grpc-reflection",
            "--admin-group",
            "--read-group",
            "--poll-interval",
            "--list-stabilization-window",
        ),
        *(
            "--nvidia-driver-root",
            "--amd-root",
            "--dcgmi",
            "--dcgm-address",
            "--fail-on-init-error",
            "--disable-healthchecks",
        ),
    },
    ("plugin",): {
        *("--kubelet-dir", "--socket-dir", "--resource-name", "--registration", "--log-format", "--log-level"),
        *(
            "--devices",
            "--device-list-strategy",
            "--device-id-strategy",
            "--pass-device-specs",
            "--mig-strategy",
            "--amd-resource-naming",
            "--cdi-dir",
        ),
        *("--driver-root", "--nvidia-driver-root", "--dev-root", "--nvidia-dev-root", "--driver-root-ctr-path"),
        *("--container-driver-root", "--cdi-annotation-prefix", "--nvidia-cdi-hook-path", "--nvidia-ctk-path"),
        *("--gdrcopy-enabled", "--gds-enabled", "--mofed-enabled", "--fail-on-init-error", "--config-file"),
        *("--upstream-dir", "--cluster-reporting", "--node-name", *METRICS, "--probe-address", "--traces"),
        *("--taint", "--condition-type", "--condition-polarity", "--nvsentinel-socket", "--nvsentinel-strategy"),
        *("--yield-labels", "--pause-labels", "--pause-lease", "--gpu-reset"),
        *(
            "--driver-ready-file",
            "--kubelet-socket",
            "--device-discovery-strategy",
            "--cdi-feature-flags",
            "--mps-root",
        ),
        *("--cdi-disable-hooks", "--shared-devices-allocation-policy", "--imex-channel-ids", "--imex-required"),
        *("--host-root-ctr-path", "--runtime-check"),
    },
    ("run",): {"--device", "--count", "--user", "--wait", "--cgroup-root", "--socket-dir"},
    ("prolog",): {"--device", "--wait", "--socket-dir"},
    ("epilog",): {"--wait", "--socket-dir"},
    ("dra",): {
        *("--driver-name", "--kubelet-plugins-dir", "--registry-dir", "--cdi-dir", "--node-name", "--pod-uid"),
        *("--kubeconfig", "--socket-dir", *METRICS, "--probe-address", "--log-format", "--log-level"),
        *("--driver-root", "--nvidia-driver-root", "--dev-root", "--nvidia-dev-root", "--driver-root-ctr-path"),
        *("--container-driver-root", "--nvidia-cdi-hook-path", "--nvidia-ctk-path", "--cdi-disable-hooks"),
        *("--cdi-feature-flags", "--gdrcopy-enabled", "--gds-enabled", "--mofed-enabled"),
        *("--devices", "--driver-ready-file", "--traces", "--binding-conditions"),
    },
    ("devices",): {"--watch", "--socket-dir", "--output", "--no-headers"},
    ("device",): {"--limit", "--socket-dir", "--output", "--no-headers"},
    ("history",): {
        *("--device", "--tenant", "--outcome", "--event", "--since", "--before", "--limit", "--all"),
        *("--socket-dir", "--output", "--no-headers"),
    },
    ("scrub",): {"--all-idle", "--path", "--wait", "--timeout", "--socket-dir", "--output", "--no-headers"},
    ("reset",): {"--reason", "--yes", "--no-input", "--wait", "--timeout", "--socket-dir", "--output", "--no-headers"},
    ("quarantine",): {"--reason", "--socket-dir", "--output", "--no-headers"},
    ("unquarantine",): {"--reason", "--yes", "--no-input", "--socket-dir", "--output", "--no-headers"},
    ("break-glass",): {
        "--duration",
        "--end",
        "--reason",
        "--yes",
        "--no-input",
        "--socket-dir",
        "--output",
        "--no-headers",
    },
    ("reset-plan",): {"--socket-dir", "--output"},
    ("doctor",): {
        *(
            "--socket-dir",
            "--state-dir",
            "--policy",
            "--toolkit-config",
            "--kubelet-dir",
            "--pod-logs-dir",
            "--node-root",
        ),
        *("--output", "--no-headers"),
    },
    ("backend", "check"): {
        *("--config", "--erase", "--timeout", "--state-dir", "--yes", "--no-input", "--output", "--no-headers"),
    },
    ("version",): {"--service", "--socket-dir", "--output"},
    ("completion",): set(),
    ("baseline", "show"): {"--socket-dir", "--output", "--no-headers"},
    ("baseline", "accept"): {"--reason", "--yes", "--no-input", "--socket-dir", "--output", "--no-headers"},
    ("certificate", "list"): {"--socket-dir", "--output", "--no-headers"},
    ("certificate", "show"): {"--device", "--socket-dir", "--output"},
    ("certificate", "export"): {"--device", "--socket-dir"},
    ("certificate", "key"): {"--socket-dir"},
    ("certificate", "verify"): {"--key", "--socket-dir", "--output"},
    ("audit", "verify"): {"--ledger-dir", "--file", "--head", "--socket-dir", "--output"},
    ("audit", "export"): {"--ledger-dir", "--after", "--socket-dir"},
    ("audit", "head"): {"--socket-dir", "--output"},
    ("policy", "explain"): {
        *("--hand-over", "--hygiene", "--health", "--watched", "--model", "--resource", "--xid", "--output"),
        "--node-name",
    },
    ("sim", "create"): {"--dir", "--devices", "--memory", "--output", "--no-headers"},
    ("sim", "fault"): {
        *(
            "--dir",
            "--device",
            "--xid",
            "--ecc",
            "--lost",
            "--driver-timeout",
            "--slow-clear",
            "--clear-fails",
            "--reset",
        ),
        *(
            "--driver-absent",
            "--untraceable-holder",
            "--holder-unkillable",
            "--temperature",
            "--condition",
            "--counter",
            "--recovery",
        ),
        *("--firmware", "--repeat", "--rate"),
    },
    ("sim", "reboot"): {"--dir"},
}


def commands() -> Iterator[tuple[tuple[str, ...], typer.core.TyperCommand]]:
    def below(name: tuple[str, ...], command: object) -> Iterator[tuple[tuple[str, ...], typer.core.TyperCommand]]:
        if isinstance(command, typer.core.TyperGroup):
            for word, inner in command.commands.items():
                yield from below((*name, word), inner)
        elif isinstance(command, typer.core.TyperCommand):
            yield name, command

    yield from below((), typer.main.get_command(app))


ALL = dict(commands())


def options(name: tuple[str, ...]) -> list[typer.core.TyperOption]:
    return [each for each in ALL[name].params if is_option(each) and each.name != "help"]


def is_option(parameter: object) -> TypeGuard[typer.core.TyperOption]:
    return isinstance(parameter, typer.core.TyperOption)


def helped(name: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(written(name, capsys).split())


def written(name: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the help text, unmodified."""
    with pytest.raises(SystemExit) as ended:
        main([*name, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_command_list_is_complete() -> None:
    assert set(ALL) == COMMANDS


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_scripted_options_of_each_command_exist(name: tuple[str, ...]) -> None:
    assert {flag for each in options(name) for flag in each.opts if flag.startswith("--")} == FLAGS[name]


def test_commands_whose_tables_have_titles_can_omit_them() -> None:
    assert {name for name in COMMANDS if "--no-headers" in {flag for each in options(name) for flag in each.opts}} == {
        *(("devices",), ("device",), ("history",), ("doctor",), ("certificate", "list")),
        *(("scrub",), ("reset",), ("quarantine",), ("unquarantine",), ("break-glass",)),
        *(("baseline", "show"), ("baseline", "accept"), ("policy", "check"), ("policy", "xids")),
        *(("sim", "create"), ("sim", "split"), ("sim", "merge"), ("yield",), ("resume",), ("backend", "check")),
    }, "add a new command with NoHeadersOption to this list"


DAEMONS = {("serve",), ("plugin",), ("dra",)}
"""Commands of which every option is a setting."""

SETTINGS = {
    *("--socket-dir", "--output", "--no-input", "--state-dir", "--policy", "--toolkit-config", "--kubelet-dir"),
    *("--pod-logs-dir", "--node-root"),
}
"""Options of the other commands that are settings: locations and output formats, the same in every call."""

SETTINGS_OF: dict[tuple[str, ...], set[str]] = {
    ("policy", "explain"): {"--node-name"},
    ("run",): {"--cgroup-root"},
    ("backend", "check"): {"--config"},
    **{("sim", each): {"--dir"} for each in ("create", "split", "merge", "fault", "clear", "reboot")},
}
"""Options that are a setting in one command only."""


def variables(option: typer.core.TyperOption) -> list[str]:
    return [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_only_settings_are_read_from_environment_variables(name: tuple[str, ...]) -> None:
    # A filter, a target or a confirmation from a forgotten variable would silently change what a command shows or does.
    settings = SETTINGS | SETTINGS_OF.get(name, set())
    having = {each.opts[-1] for each in options(name) if variables(each)}
    assert having == {each.opts[-1] for each in options(name) if name in DAEMONS or each.opts[-1] in settings}


def test_no_argument_is_read_from_an_environment_variable() -> None:
    assert [
        name for name, command in ALL.items() for each in command.params if each.envvar and not is_option(each)
    ] == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_names_every_option_and_its_environment_variable(
    name: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = helped(name, capsys)
    for option in options(name):
        # The variables of NVIDIA's plugin keep their names.
        assert name in DAEMONS or all(each.startswith("SCRUBBER_") for each in variables(option))
        assert not variables(option) or f"env var: {', '.join(variables(option))}" in text
        assert option.help
        assert all(flag in text for flag in option.opts)


def test_each_environment_variable_belongs_to_one_option() -> None:
    meanings: dict[str, set[str]] = {}
    for name in ALL:
        for option in options(name):
            if option.envvar:
                meanings.setdefault(str(option.envvar), set()).add(option.opts[-1])
    assert {variable: flags for variable, flags in meanings.items() if len(flags) > 1} == {
        # The location of the simulated node: its own commands use a shorter name.
        "SCRUBBER_SIM_DIR": {"--dir", "--sim-dir"}
    }


def test_top_level_help_lists_every_command_under_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    text = written((), capsys)
    sections: dict[str, list[str]] = {}
    for section in ("Inspect", "Operate", "Verify", "Run", "Try it out"):
        _, heading, below = text.partition(f"\n{section}:\n")
        assert heading
        sections[section] = below.partition("\n\n")[0].splitlines()
    listed = [line for lines in sections.values() for line in lines]
    assert sorted(line.split()[0] for line in listed) == sorted({name[0] for name in COMMANDS}), "each of them once"
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)
    assert sections["Inspect"][0].split()[0] == "devices", "what a new user types first"


@pytest.mark.parametrize("group", ["sim", "policy", "certificate", "audit", "baseline"])
def test_group_help_lists_every_command_of_the_group(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, summary = written((group,), capsys).partition("Commands:")
    lines = summary.strip().splitlines()
    assert {line.split()[0] for line in lines} == {name[1] for name in COMMANDS if name[0] == group}
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_ends_with_an_example_that_parses(name: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    _, _, examples = written(name, capsys).partition("Example")
    lines = [line.strip() for line in examples.splitlines()[1:]]
    assert lines
    for line in lines:
        typed = [words_of(part) for part in (*line.split("|"), *line.split("<(")[1:]) if "scrubber " in part]
        assert any(words[: len(name)] == name for words in typed), line
        for words in typed:
            command = next(each for each in (words[:1], words[:2]) if each in COMMANDS)
            flags = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"}
            known = {flag for option in options(command) for flag in (*option.opts, *option.secondary_opts)}
            assert flags <= known, line
            # Parsing reports every invalid or missing value; nothing runs.
            with ALL[command].make_context("scrubber", list(words[len(command) :])):
                pass


def words_of(typed: str) -> tuple[str, ...]:
    """Return the arguments that a shell passes for ``scrubber WORDS``, without redirections."""
    return tuple(shlex.split(typed.partition("scrubber ")[2].partition(" >")[0].removesuffix(")")))


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("policy", "validate"), "check"),
        (("certificate", "check"), "verify"),
        (("list",), "devices"),
        (("baseline", "list"), "show"),
        (("polcy",), "policy"),
    ],
)
def test_unknown_command_is_answered_with_the_one_that_is_meant(
    words: tuple[str, ...], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"Error: No such command '{words[-1]}'. Did you mean '{meant}'?\n")


@pytest.mark.parametrize(
    ("name", "event"), [("quarantine", "operator.quarantined"), ("unquarantine", "operator.released")]
)
def test_help_of_an_operator_action_names_its_event(name: str, event: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"as the event {event}." in helped((name,), capsys)


def test_help_of_the_history_names_the_option_that_shows_who_requested_an_action(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "With -o wide, it also shows who requested them (ACTOR)." in helped(("history",), capsys)


def test_every_example_belongs_to_an_existing_command() -> None:
    assert {tuple(name.split()) for name in EXAMPLES} == COMMANDS


def test_help_command_equals_the_help_option(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ((), ("sim",), ("sim", "create"), ("version",)):
        with pytest.raises(SystemExit) as ended:
            main(["help", *name])
        assert ended.value.code == 0
        assert capsys.readouterr().out == written(name, capsys)


def test_version_option_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for words in (["--version"], ["version"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        outputs.append((ended.value.code, capsys.readouterr()))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("columns", WIDTHS)
async def test_help_fits_the_terminal_width(columns: int) -> None:
    groups = {name[:1] for name in COMMANDS if len(name) > 1}
    everything = [list(name) for name in ((), *sorted(groups), *sorted(COMMANDS))]
    code = (
        "import sys\nfrom scrubber.cli.main import main\n"
        f"for words in {everything!r}:\n"
        "    try:\n        main([*words, '--help'])\n"
        "    except SystemExit:\n        pass\n"
    )
    async with terminal(columns=columns, program=(sys.executable, "-c", code)) as session:
        result = await session.ended()
    assert result.code == 0
    assert result.text.count("Usage: scrubber") == len(everything)


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["device5"], "'device'"), (["unquarantin", "0"], "'unquarantine'"), (["sim", "creat"], "'create'")],
)
def test_mistyped_command_gets_the_nearest_suggestion(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"Did you mean {meant}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wait"), [(["--wait=false"], False), (["--wait=true"], True), (["--no-wait"], False), ([], True)]
)
def test_flag_with_a_negation_may_be_given_a_value(words: list[str], wait: bool) -> None:
    with ALL["scrub",].make_context("scrub", ["0", *words]) as context:
        assert context.params["wait"] is wait


@pytest.mark.parametrize("copied", ["SIM-GPU-aa…", " SIM-GPU-aa", "SIM-GPU-aa..."])
def test_device_can_be_named_by_a_shortened_id_from_a_table(copied: str) -> None:
    assert device_name(copied) == "SIM-GPU-aa"
    with ALL["quarantine",].make_context("quarantine", [copied, "--reason", "noise"]) as context:
        assert context.params["devices"] == ["SIM-GPU-aa"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scrub"], "Error: Pass a DEVICE, or --all-idle.\n"),
        (["quarantine"], "Missing argument 'DEVICE'"),
        (["scrub", "0", "--path", "middling"], 'Error: --path: "middling" is not one of: fast, slow.\n'),
        (["scrub", "0", "--timeout", "soon"], '"soon" is not a time'),
        (["devices", "--colour"], "No such option: --colour"),
        (["history", "--since", "yesterday"], '"yesterday" is neither a duration'),
        (["history", "--limit", "0"], "Error: --limit: must be at least 1, not 0.\n"),
        (["history", "--before", "-1"], "Error: --before: must be at least 0, not -1.\n"),
        (["history", "--before", "yesterday"], 'Error: --before: "yesterday" is not a whole number.\n'),
        (["history", "--limit", "abc"], 'Error: --limit: "abc" is not a whole number.\n'),
        (["sim", "fault", "--dir", "x", "--rate", "fast"], 'Error: --rate: "fast" is not a number.\n'),
        (["devices", "-o", "xml"], 'Error: --output: "xml" is not one of: table, wide, json, yaml, name.\n'),
        (["devices", "--socket-dir", " "], "Error: --socket-dir: must be the path of a directory; it is empty.\n"),
        (
            ["unquarantine", "0", "--reason", "why", "--no-input"],
            "Error: --no-input disables the confirmation prompt; pass --yes to confirm.\n",
        ),
        (["break-glass", "0", "--reason", "why", "--yes"], "Error: Pass either --duration or --end.\n"),
        (["break-glass", "0", "--reason", "why", "--yes", "--duration", "1w"], '"1w" is not a time'),
        (["sim", "create", "--dir", "x", "--memory", "lots"], '"lots" is not a size'),
    ],
)
def test_usage_error_exits_with_two_and_sends_no_request(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert message in err


def test_invalid_environment_value_is_refused_by_its_variable_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SCRUBBER_OUTPUT", "xml")
    with pytest.raises(SystemExit) as ended:
        main(["history"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(
        'Error: SCRUBBER_OUTPUT: "xml" is not one of: table, wide, json, yaml, name.\n'
    )


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["devices"], "[DEVICE]..."),
        (["scrub"], "[DEVICE]..."),
        (["quarantine"], "DEVICE..."),
        (["unquarantine"], "DEVICE"),
        (["policy", "check"], "POLICY..."),
        (["audit", "export"], "[-]"),
    ],
)
def test_optional_argument_is_shown_once_in_brackets(
    words: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    assert capsys.readouterr().out.splitlines()[0] == f"Usage: scrubber {' '.join(words)} [OPTIONS] {usage}"


@pytest.mark.parametrize("words", ALL)
def test_no_option_shows_a_python_type_name(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    assert not {"<int", "<str>", "<float"} & set(capsys.readouterr().out.split())
