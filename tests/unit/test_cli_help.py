"""The command line documents itself: every flag names its environment variable, and asking for help is cheap."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer

from scrubber.cli.main import app, main

COMMANDS = {
    ("serve",),
    ("plugin",),
    ("demo",),
    ("devices",),
    ("scrub",),
    ("quarantine",),
    ("unquarantine",),
    ("break-glass",),
    ("history",),
    ("reset-plan",),
    ("doctor",),
    ("version",),
    ("policy", "check"),
    ("policy", "show"),
    ("policy", "explain"),
    ("policy", "xids"),
    ("sim", "create"),
    ("sim", "split"),
    ("sim", "merge"),
    ("sim", "fault"),
    ("sim", "clear"),
    ("sim", "tenant"),
}

FLAGS = {
    ("serve",): {
        *("--backend", "--sim-dir", "--state-dir", "--socket", "--policy", "--kubelet-dir", "--pod-resources-socket"),
        *("--pod-logs-dir", "--metrics-address", "--node-name", "--cgroup-root", "--containers", "--log-format"),
        *("--log-level", "--reflection", "--admin-group", "--watch-interval", "--list-settle"),
        *("--nvidia-driver-root", "--fail-on-init-error", "--disable-healthchecks"),
    },
    ("plugin",): {
        *("--kubelet-dir", "--socket", "--resource-name", "--registration", "--log-format", "--log-level"),
        *("--device-list-strategy", "--device-id-strategy", "--pass-device-specs", "--mig-strategy", "--cdi-dir"),
        *("--driver-root", "--nvidia-driver-root", "--dev-root", "--nvidia-dev-root", "--driver-root-ctr-path"),
        *("--container-driver-root", "--cdi-annotation-prefix", "--nvidia-cdi-hook-path", "--nvidia-ctk-path"),
        *("--gdrcopy-enabled", "--gds-enabled", "--mofed-enabled", "--fail-on-init-error", "--config-file"),
        *("--upstream-dir", "--cluster", "--node-name"),
    },
    ("policy", "explain"): {
        *("--kind", "--hygiene", "--health", "--watched", "--model", "--resource", "--xid", "--output"),
        "--node-name",
    },
    ("scrub",): {"--path", "--wait", "--timeout", "--socket", "--output"},
    ("quarantine",): {"--reason", "--socket", "--output"},
    ("break-glass",): {"--for", "--end", "--reason", "--yes", "--socket", "--output"},
    ("reset-plan",): {"--socket", "--output"},
    ("doctor",): {"--socket", "--toolkit-config", "--kubelet-dir", "--node-root", "--output"},
    ("sim", "create"): {"--dir", "--devices", "--memory", "--output"},
    ("sim", "fault"): {
        *("--dir", "--device", "--xid", "--ecc", "--lost", "--stuck", "--slow-clear", "--wont-clear", "--reset"),
        *("--driver-absent", "--ghost", "--unkillable", "--temperature", "--condition", "--counter", "--recovery"),
        *("--repeat", "--rate"),
    },
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
    return [each for each in ALL[name].params if isinstance(each, typer.core.TyperOption) and each.name != "help"]


def helped(name: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*name, "--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_these_are_the_commands() -> None:
    assert set(ALL) == COMMANDS


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_the_flags_that_others_script_against_are_there(name: tuple[str, ...]) -> None:
    assert {flag for each in options(name) for flag in each.opts if flag.startswith("--")} == FLAGS[name]


SAID_EACH_TIME = {"--reason", "--yes", "--for", "--end"}
"""What goes into the audit in somebody's name, or takes the service's promise away: never out of an environment."""


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_names_every_flag_and_its_environment_variable(
    name: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = helped(name, capsys)
    for option in options(name):
        variables = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
        if option.opts[-1] in SAID_EACH_TIME:
            assert variables == [], f"{option.name} could be said without anybody saying it"
            continue
        assert variables, option.name
        # The variables of NVIDIA's plugin keep their names.
        assert name in {("plugin",), ("serve",)} or all(each.startswith("SCRUBBER_") for each in variables)
        assert f"env var: {', '.join(variables)}" in text
        assert option.help
        assert all(flag in text for flag in option.opts)


def test_one_variable_means_one_thing() -> None:
    meanings: dict[str, set[str]] = {}
    for name in ALL:
        for option in options(name):
            if option.envvar:
                meanings.setdefault(str(option.envvar), set()).add(option.opts[-1])
    assert {variable: flags for variable, flags in meanings.items() if len(flags) > 1} == {
        # Where the simulated node is: its own commands call it what it is to them.
        "SCRUBBER_SIM_DIR": {"--dir", "--sim-dir"}
    }


def test_the_summary_names_every_command_in_full_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    for group in ((), ("sim",)):
        with pytest.raises(SystemExit):
            main([*group, "--help"])
        _, _, summary = capsys.readouterr().out.partition("Commands:")
        assert summary
        assert all(line.endswith(".") and not line.endswith("...") for line in summary.strip().splitlines())


def test_help_loads_no_server_and_no_child_machinery() -> None:
    heavy = ("grpc", "google.protobuf", "pydantic", "rich", "structlog", "yaml", "plugin", "scrubber.adapters")
    code = (
        "import sys\nfrom scrubber.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["scrub"], "Missing argument 'DEVICE'"),
        (["scrub", "0", "--path", "middling"], "'middling' is not one of 'fast', 'slow'"),
        (["scrub", "0", "--timeout", "soon"], '"soon" is not a time'),
        (["devices", "--colour"], "No such option: --colour"),
        (["history", "--since", "yesterday"], '"yesterday" is neither a time'),
        (["history", "--limit", "0"], "greater than or equal to 1"),
        (["break-glass", "0", "--reason", "why", "--yes"], "say either for how long, or --end"),
        (["break-glass", "0", "--reason", "why", "--yes", "--for", "1w"], '"1w" is not a time'),
        (["sim", "create", "--dir", "x", "--memory", "lots"], '"lots" is not a size'),
    ],
)
def test_a_wrong_request_exits_with_two_and_asks_nobody(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert sentence in err
