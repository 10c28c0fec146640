"""The recipes for contributors work: following a page produces what the page promises.

A test plays the contributor in a copy of the tree. Blocks of a page that begin with ``# file: PATH`` are applied in their
order, and every line of a shell block but ``make …`` is run and must succeed: it regenerates files, or runs the tests that
notice a forgotten step. Afterwards the test looks for the result itself.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
RECIPES: Final = ROOT / "docs" / "contributing"
COPIED: Final = (
    *("scrubber", "plugin", "dashboards", "policies", "docs", "scripts", "tests", "deploy"),
    *("pyproject.toml", "README.md", "CONTRIBUTING.md"),
)
NOT_COPIED: Final = shutil.ignore_patterns("node_modules", "recorded", "images", "*.pyc.*", ".*")
"""Large files that no recipe touches, and compiled files that another process is writing."""
PYTHON: Final = (sys.executable, "-P")
DEADLINE: Final = 300.0
"""Seconds; for commands that hang."""

_BLOCK = re.compile(r"^( *)(```|~~~)(\w+)\n(.*?)^\1\2$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# file: (\S+)\n")
_PLACE = re.compile(r"# (after|before|replace|inside|end)(?:: (.+))?\n")


@dataclass(frozen=True)
class Change:
    """A part of a file.

    Attributes:
        anchor: the beginning of one line of the file; empty for a new file, and at the end of one.
        place: where the text goes: ``after`` or ``before`` that line, in its place (``replace``), last ``inside`` the brackets
            that it opens, or at the ``end`` of the file; empty for a new file.
    """

    path: str
    place: str
    anchor: str
    text: str

    def apply(self, tree: Path) -> None:
        """Change the file in ``tree``. The test fails unless exactly one line begins with the anchor."""
        file = tree / self.path
        if not self.place:
            assert not file.exists(), f"{self.path} exists already; the recipe creates it"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.text)
            return
        lines = file.read_text().splitlines(keepends=True)
        if self.place == "end":
            first = last = len(lines)
        else:
            found = [number for number, line in enumerate(lines) if line.strip().startswith(self.anchor)]
            assert len(found) == 1, f"{len(found)} lines of {self.path} begin with: {self.anchor}"
            first = found[0] + (self.place == "after")
            last = found[0] + (self.place in ("after", "replace"))
            if self.place == "inside":
                margin = lines[first][: -len(lines[first].lstrip())]
                closing = re.compile(rf"{margin}[)\]}}]")
                first = last = next(at for at in range(first, len(lines)) if closing.match(lines[at]))
        file.write_text("".join([*lines[:first], self.text, *lines[last:]]))


@dataclass(frozen=True)
class Command:
    """One line of a shell block."""

    line: str

    def apply(self, tree: Path) -> None:
        done = run(tree, "bash", "-c", self.line)
        assert done.returncode == 0, f"{self.line}\n{done.stdout}{done.stderr}"


def steps(page: str) -> Iterator[Change | Command]:
    """Yield the steps of a recipe in their order. Every block must be one, or it could become outdated unnoticed."""
    for indent, _, language, text in _BLOCK.findall(page):
        lines = [line.removeprefix(indent) for line in text.splitlines(keepends=True)]
        if language == "sh":
            yield from (Command(line) for line in lines if not line.startswith("make "))
        else:
            yield from changes(lines)


def changes(lines: Sequence[str]) -> Iterator[Change]:
    """Yield the changes of one block. ``# file: PATH`` begins a file, ``# after: LINE`` and the like a place in it."""
    assert _FILE.fullmatch(lines[0]), f"a block does not begin with the name of its file: {lines[0]}"
    path = place = anchor = ""
    text: list[str] = []
    for line in [*lines, "# file: -\n"]:
        file, where = _FILE.fullmatch(line), _PLACE.fullmatch(line)
        if (file or where) and text:
            yield Change(path, place, anchor, "".join(text))
            text = []
        if file:
            path, place, anchor = file[1], "", ""
        elif where:
            place, anchor = where[1], where[2] or ""
        else:
            text.append(line)


def environment(tree: Path) -> dict[str, str]:
    """The environment in which Python finds the packages of ``tree`` first, also before an editable installation."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SCRUBBER_", "PYTEST_"))}
    pytest_options = f"-q -p no:cacheprovider --basetemp={tree.parent / 'pytest'}"
    return {**kept, "PYTHONPATH": str(tree), "PYTEST_ADDOPTS": pytest_options}


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in ``tree``; the exit status is the caller's to judge."""
    return subprocess.run(
        command,
        cwd=tree,
        env=environment(tree),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def run_scrubber(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the ``scrubber`` command of ``tree``."""
    return run(tree, *PYTHON, "-m", "scrubber.cli.main", *words)


def scrubber(tree: Path, *words: str) -> str:
    """Return the output of a command of ``tree`` that succeeds."""
    done = run_scrubber(tree, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(tree: Path, code: str, *arguments: str) -> list[str]:
    """Return the lines that ``code`` prints."""
    done = run(tree, *PYTHON, "-c", code, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def is_new(file: Path, original: Path) -> bool:
    return not original.exists() or file.read_bytes() != original.read_bytes()


def follow(name: str, tree: Path) -> Path:
    """Follow the recipe ``name`` in a fresh copy of the tree, and return the copy.

    The Python files that it changes pass the linter and the formatter.
    """
    tree.mkdir()
    for part in COPIED:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, tree / part, ignore=NOT_COPIED)
        else:
            shutil.copy2(ROOT / part, tree / part)
    recipe = list(steps((RECIPES / f"{name}.md").read_text()))
    assert any(isinstance(step, Command) for step in recipe)
    interpreter = tree / ".venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f'#!/bin/sh\nexec {shlex.join(PYTHON)} "$@"\n')
    interpreter.chmod(0o755)
    for step in recipe:
        step.apply(tree)
    written = [
        str(path.relative_to(tree)) for path in tree.rglob("*.py") if is_new(path, ROOT / path.relative_to(tree))
    ]
    for check in (("check",), ("format", "--check")):
        done = run(tree, *PYTHON, "-m", "ruff", *check, "--no-cache", *written)
        assert done.returncode == 0, done.stdout + done.stderr
    return tree


# --- the recipes ------------------------------------------------------------------------------------------------------


@contextmanager
def simulated_service(tree: Path, directory: Path) -> Iterator[Path]:
    """A scrub service of ``tree`` on a simulated node with one device; yields the directory of its sockets."""
    node, sockets = directory / "node", directory / "run"
    scrubber(tree, "sim", "create", "--dir", str(node), "--devices", "1", "--memory", "1MiB")
    words: Sequence[str] = (
        *("serve", "--backend", "sim", "--sim-dir", str(node), "--socket-dir", str(sockets)),
        *("--state-dir", str(directory / "state"), "--kubelet-dir", str(directory / "kubelet")),
        *("--metrics-address", "off"),
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor, (directory / "log").open("wb") as log:
        supervisor.bind(str(directory / "notify"))
        supervisor.settimeout(DEADLINE)
        service = subprocess.Popen(
            [*PYTHON, "-m", "scrubber.cli.main", *words],
            cwd=tree,
            env={**environment(tree), "NOTIFY_SOCKET": str(directory / "notify")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            while b"READY=1" not in supervisor.recv(4096).splitlines():
                pass
            yield sockets
        finally:
            service.terminate()
            service.wait(DEADLINE)


BOARDS: Final = """
from pathlib import Path
from dashboards.boards import BOARDS
from dashboards.dashboard import to_json
from dashboards.value_mappings import STEP_COLOURS
from scrubber.domain.evidence import Step
assert set(STEP_COLOURS) == set(Step)
assert all(Path("dashboards", f"{name}.json").read_text() == to_json(make()) for name, make in BOARDS.items())
"""


def test_scrub_step_of_the_recipe_runs_on_the_simulated_node_and_is_on_the_certificate(
    tmp_path: Path, short_tmp: Path
) -> None:
    tree = follow("add-a-scrub-step", tmp_path / "tree")
    with simulated_service(tree, short_tmp) as sockets:
        scrubbed = scrubber(tree, "scrub", "0", "--socket-dir", str(sockets))
        certificate = scrubber(tree, "certificate", "show", "--device", "0", "--socket-dir", str(sockets))
    assert re.search(r"^step +idle: passed", scrubbed, re.MULTILINE)
    assert re.search(r"^covered +idle: no process has the device open", certificate, re.MULTILINE)
    codes = (tree / "docs" / "codes.md").read_text()
    assert "\n| `device-opened` | idle | blocking | " in codes
    assert "\n| `idle-limited` | idle | note | " in codes
    python(tree, BOARDS)


def test_command_of_the_recipe_is_listed_and_runs(tmp_path: Path) -> None:
    tree = follow("add-a-command", tmp_path / "tree")
    assert re.search(r"^ +ping  +Check that the service answers\.$", scrubber(tree, "--help"), re.MULTILINE)
    assert "Examples:" in scrubber(tree, "ping", "--help")
    alone = run_scrubber(tree, "ping", "--socket-dir", str(tmp_path / "nowhere"))
    assert alone.returncode == 1
    assert alone.stderr.startswith("Error: ")


EXPOSITION: Final = """
from scrubber.domain.evidence import Step, StepResult, Verdict
from tests.measures import Measures, scrub, shown
measures = Measures()
measures.show(shown("GPU-a"))
measures.metrics.record_scrub(scrub(StepResult(Step.ON_CHIP, Verdict.NOT_COVERED, 0.0)))
print(measures.page())
"""


def test_counter_and_gauge_of_the_recipe_are_on_the_exposition(tmp_path: Path) -> None:
    tree = follow("add-a-metric", tmp_path / "tree")
    page = python(tree, EXPOSITION)
    name = "scrubber_uncovered_steps_total"
    assert f"# TYPE {name} counter" in page
    assert f'{name}{{step="on-chip"}} 1.0' in page
    assert f'{name}{{step="memory"}} 0.0' in page, "the series is there before the first step of its kind"
    assert f"\n| `{name}` | counter | `step`: holders, " in (tree / "docs" / "metrics.md").read_text()
    assert name in (tree / "dashboards" / "node.json").read_text()
    assert "# TYPE scrubber_device_open_grants gauge" in page
    assert 'scrubber_device_open_grants{device="GPU-a"} 0.0' in page
    assert "scrubber_device_open_grants" in (tree / "dashboards" / "device.json").read_text()
    python(tree, BOARDS)


def test_policy_setting_of_the_recipe_is_read_shown_documented_and_used(tmp_path: Path) -> None:
    tree = follow("add-a-policy-setting", tmp_path / "tree")
    policy = tmp_path / "policy.yaml"
    policy.write_text("name: mine\nrecovery: {backoffFactor: 3}\n")
    scrubber(tree, "policy", "check", str(policy))
    shown: Mapping[str, Any] = yaml.safe_load(scrubber(tree, "policy", "show", str(policy)))
    assert shown["recovery"]["backoffFactor"] == 3
    policy.write_text("name: mine\nrecovery: {backoffFactor: 11}\n")
    refused = run_scrubber(tree, "policy", "check", str(policy))
    assert refused.returncode != 0
    assert "backoffFactor" in refused.stdout + refused.stderr
    assert '"backoffFactor"' in (tree / "policies" / "schema" / "policy.schema.json").read_text()
    assert "| `backoffFactor` |" in (tree / "docs" / "policy-settings.md").read_text()
    used = "from scrubber.domain.policy import RecoveryRule; print(RecoveryRule(backoff_factor=3).backoff(2))"
    assert python(tree, used) == ["9.0"]


def test_alert_of_the_recipe_is_in_the_prometheus_rule_and_in_the_scenario(tmp_path: Path) -> None:
    tree = follow("add-an-alert", tmp_path / "tree")
    alert = "ScrubberOperatorQuarantine"
    generated = yaml.safe_load((tree / "deploy" / "kubernetes" / "metrics" / "prometheusrule.yaml").read_text())
    names = [rule.get("alert") for group in generated["spec"]["groups"] for rule in group["rules"]]
    assert alert in names
    happens_on = re.search(
        rf'^    "{alert}": "(\w+)",$', (tree / "tests/dashboards/test_alerts.py").read_text(), re.MULTILINE
    )
    assert happens_on is not None
    acts = (tree / "tests" / "dashboards" / "acts.py").read_text()
    assert f'self.fires(node, "{alert}")' in acts
    act = re.search(rf"async def (\w+)\(self, node: Node\) -> None:\n[^#]*?{alert}", acts)
    assert act is not None
    assert re.search(rf"async def {happens_on[1]}\(self, node: Node\) -> None:\n +await self\.{act[1]}\(node\)", acts)


PORTS: Final = """
import asyncio, inspect, sys
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import get_args, get_type_hints
from scrubber.adapters import example
from scrubber.adapters.example.backend import make
from scrubber.backends import BACKENDS, BackendContext
from scrubber.ports.device import DeviceBackend

def methods(port):
    return {name: each for name, each in vars(port).items() if inspect.isfunction(each) and not name.startswith("_")}

async def main(state_dir):
    make(state_dir / "example")
    context = BackendContext(
        settings=SimpleNamespace(state_dir=state_dir), driver_call_timeout=1.0, infrastructure=lambda pid: None
    )
    async with BACKENDS["example"].open(context) as backend:
        for attribute, hint in get_type_hints(DeviceBackend).items():
            port, *optional = get_args(hint) if isinstance(hint, UnionType) else [hint]
            if optional and getattr(backend, attribute) is None:
                continue
            for name, declared in methods(port).items():
                written = getattr(type(getattr(backend, attribute)), name)
                assert inspect.signature(written) == inspect.signature(declared), (attribute, name)
                assert inspect.iscoroutinefunction(written) == inspect.iscoroutinefunction(declared), (attribute, name)
                print(name)
        assert await backend.inventory.devices()

assert example.__file__, "it is a package"
assert BACKENDS["example"].signal_table().errors.prefix
asyncio.run(main(Path(sys.argv[1])))
"""


def test_backend_of_the_recipe_implements_every_port_and_can_be_chosen(tmp_path: Path) -> None:
    tree = follow("add-a-backend", tmp_path / "tree")
    compared = python(tree, PORTS, str(tmp_path / "state"))
    assert {"devices", "snapshot", "list_holders", "restore", "reset", "erase", "diagnose"} <= set(compared)
    assert "example: example devices" in " ".join(scrubber(tree, "serve", "--help").split())
    assert '"worn-out"' in (tree / "policies" / "schema" / "policy.schema.json").read_text()
    settings = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [each["layers"] for each in settings["contracts"] if each.get("containers") == ["scrubber.adapters"]]
    assert len(layers) == 2
    assert all("(example)" in " ".join(each) for each in layers)


def test_every_recipe_is_followed_by_a_test() -> None:
    followed = re.findall(r'follow\("([a-z-]+)"', Path(__file__).read_text())
    assert sorted(followed) == sorted(page.stem for page in RECIPES.glob("add-*.md"))
