"""The documentation of traces: its tables match the code, and its examples work."""

from __future__ import annotations

import ast
import copy
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import typer
import yaml
from opentelemetry.sdk import environment_variables
from packaging.requirements import Requirement

from plugin.dra.claim_driver import PREPARE, RESTORE, UNPREPARE
from plugin.kubelet.server import TRACED_CALLS
from scrubber.cli.command_tree import app
from scrubber.config.settings import TraceExport
from tests.deployed import BASE, DEPLOY, ROOT, apply, documents, unit, value_of

PAGE = (ROOT / "docs" / "tracing.md").read_text()
EXAMPLES = [yaml.safe_load(each) for each in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
ENVIRONMENT = (DEPLOY / "systemd" / "traces.env").read_text()
DROP_IN = "scrubber-plugin.service.d/traces.conf"
SOURCES = [
    *sorted((ROOT / "scrubber" / "engine").rglob("*.py")),
    *(ROOT / "plugin" / name for name in ("dra/claim_driver.py", "gate.py", "kubelet/server.py")),
]


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table whose header begins with ``heading``."""
    lines = PAGE.partition(f"\n| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    assert lines, heading
    return [line.strip("| ").split(" | ") for line in lines]


def code(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def calls(*names: str) -> Iterator[ast.Call]:
    """Yield every call of a method with one of these names, in the sources that open and annotate spans."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
                yield node


def opened() -> set[str]:
    """Return the names of the spans; that of a step contains the step's name."""
    found = {PREPARE, RESTORE, UNPREPARE, *TRACED_CALLS}
    for call in calls("span", "_span"):
        name = call.args[0]
        if isinstance(name, ast.JoinedStr):
            name = name.values[0]
        if isinstance(name, ast.Constant):
            found.add(str(name.value).replace("step ", "step NAME"))
    return found


def test_traces_page_lists_exactly_the_spans() -> None:
    assert {name for row in rows("span") for name in code(row[0])} == opened()


def test_traces_page_lists_exactly_the_attributes() -> None:
    attributes = {
        keyword.arg
        for call in calls("span", "_span", "set_attributes")
        for keyword in call.keywords
        if keyword.arg is not None
    }
    on_the_page = {word for row in rows("span") for word in code(row[2])}
    assert attributes - {"follows"} <= on_the_page, "every exported attribute is documented"
    assert on_the_page <= attributes | {"kind", "path"}


def test_every_variable_on_the_traces_page_exists_in_opentelemetry() -> None:
    known = {name for name in vars(environment_variables) if name.startswith("OTEL_")}
    ours = {"OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_"}  # as abbreviated on the page
    assert set(re.findall(r"OTEL_[A-Z_]+", PAGE + ENVIRONMENT)) - ours <= known


def test_traces_option_is_off_by_default_and_its_values_are_documented() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    for command in ("serve", "plugin", "dra"):
        (flag,) = [each for each in group.commands[command].params if each.name == "traces"]
        assert flag.default is TraceExport.OFF
        assert flag.envvar == "SCRUBBER_TRACES"
    assert "`--traces` (`SCRUBBER_TRACES`) is `off` or `otlp`" in PAGE
    assert set(TraceExport) == {"off", "otlp"}


def patched() -> dict[str, dict[str, Any]]:
    """Return both workloads with the page's patches applied."""
    found = copy.deepcopy(documents(BASE))
    for patch in EXAMPLES[0]["patches"]:
        (target,) = [
            each for each in found if all(value_of(each, key) == wish for key, wish in patch["target"].items())
        ]
        for step in yaml.safe_load(patch["patch"]):
            apply(target, **step)
    return {value_of(each, "name"): each for each in found if each["kind"] == "DaemonSet"}


@pytest.mark.parametrize("name", ["scrubber", "scrubber-plugin"])
def test_example_pods_export_traces_with_their_node_name(name: str) -> None:
    (container,) = patched()[name]["spec"]["template"]["spec"]["containers"]
    names = [each["name"] for each in container["env"]]
    assert len(set(names)) == len(names), "the same variable twice"
    variables = {each["name"]: each for each in container["env"]}
    assert variables["SCRUBBER_TRACES"]["value"] in set(TraceExport)
    assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"]["value"].startswith("https://")
    assert variables["SCRUBBER_NODE_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"


def test_example_egress_policy_covers_both_pods_and_names_its_destinations() -> None:
    policy = EXAMPLES[1]
    assert policy["metadata"]["namespace"] == "scrubber-system"
    assert policy["spec"]["policyTypes"] == ["Egress"]
    for each in patched().values():
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    for way_out in policy["spec"]["egress"]:
        assert way_out["ports"]
        for whom in way_out["to"]:
            assert set(whom) == {"namespaceSelector", "podSelector"}


def test_environment_file_sets_nothing_until_edited() -> None:
    lines = [line for line in ENVIRONMENT.splitlines() if line]
    assert all(line.startswith("#") for line in lines)
    assert "#SCRUBBER_TRACES=otlp" in lines
    assert "#OTEL_EXPORTER_OTLP_ENDPOINT=" in lines
    assert f"deploy/systemd/{DROP_IN}" in PAGE


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_container_image_includes_opentelemetry(cuda: str) -> None:
    names = re.findall(r"^([\w-]+)==", (DEPLOY / "container" / f"cuda{cuda}.txt").read_text(), re.MULTILINE)
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["otel"]
    assert {Requirement(each).name for each in extra} <= set(names)


def test_systemd_drop_in_lets_the_plugin_reach_only_localhost() -> None:
    assert unit(DROP_IN) == {"PrivateNetwork": ["no"], "IPAddressDeny": ["any"], "IPAddressAllow": ["localhost"]}
