"""The rules of Grafana's own dashboard linter, applied to the committed files. Each exclusion has its reason.

Each rule has its name from there, except those without ``-rule``, which are ours. Two of its rules are for logs, which no dashboard shows. Each rule is also tested on
a dashboard that violates it: a rule that never finds anything would be useless.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import promql_parser as promql
import pytest

_DIRECTORY: Final = Path(__file__).resolve().parents[2] / "dashboards"
_BOARDS: Final = ("fleet", "node", "device")

_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_RATE_INTERVAL: Final = timedelta(seconds=4321)
"""Replaces ``$__rate_interval`` while a query is parsed: no query contains this duration."""
_VARIABLES: Final = {
    "$__rate_interval": f"{int(_RATE_INTERVAL.total_seconds())}s",
    "$__range": "6h",
    "$__interval_ms": "15000",
    "$__interval": "15s",
}
"""Of two names with the same prefix, the longer one comes first."""

_UNITS: Final = frozenset({"none", "short", "percentunit", "celsius", "s", "bytes", "binBps", "opm", "locale", "hex"})
"""Those of Grafana's units that are meaningful here: base units, shares of one, counts, events a minute."""

_PER_SECOND: Final = frozenset({"rate", "irate"})
_OF_COUNTERS: Final = _PER_SECOND | {"increase"}

Json = dict[str, Any]
Rule = Callable[[Json], Iterator[str]]


def _committed(name: str) -> Json:
    made: Json = json.loads((_DIRECTORY / f"{name}.json").read_text(encoding="utf-8"))
    return made


def _panels(board: Json) -> list[Json]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def _targets(board: Json) -> Iterator[tuple[str, Json]]:
    for panel in _panels(board):
        for target in panel.get("targets", ()):
            yield f"{panel['title']}, {target['refId']}", target


def _parsed(text: str) -> promql.Expr:
    for name, value in _VARIABLES.items():
        text = text.replace(name, value)
    tree: promql.Expr = promql.parse(text)
    return tree


def _trees(board: Json) -> Iterator[tuple[str, promql.Expr]]:
    for where, target in _targets(board):
        try:
            yield where, _parsed(target["expr"])
        except ValueError:
            continue  # another rule reports parse errors


def _nodes(tree: promql.Expr) -> list[promql.Expr]:
    """Return all nodes in order, without the inner selector of a range, which the walk yields right after the range."""
    found: list[promql.Expr] = []
    ranges: list[promql.Expr] = []

    def keep(node: promql.Expr) -> bool:
        if isinstance(node, promql.VectorSelector) and ranges:
            ranges.clear()
            return True
        if isinstance(node, promql.MatrixSelector):
            ranges.append(node)
        found.append(node)
        return True

    promql.walk(tree, keep)
    return found


def _selectors(tree: promql.Expr) -> Iterator[promql.VectorSelector]:
    for node in _nodes(tree):
        if isinstance(node, promql.VectorSelector):
            yield node
        elif isinstance(node, promql.MatrixSelector):
            yield node.vector_selector


def _variable(board: Json, name: str) -> Json | None:
    return next((each for each in board["templating"]["list"] if each["name"] == name), None)


def template_datasource(board: Json) -> Iterator[str]:
    sources = [each for each in board["templating"]["list"] if each["type"] == "datasource"]
    if [(each["name"], each["label"], each["query"]) for each in sources] != [
        ("datasource", "Data source", "prometheus")
    ]:
        yield "there has to be one variable for the data source, named and labelled as everywhere"


def _template(name: str, everything: str = ".+") -> Rule:
    def rule(board: Json) -> Iterator[str]:
        variable = _variable(board, name)
        if variable is None:
            yield f"there is no variable {name}"
            return
        expected = {
            "type": "query",
            "label": name.capitalize(),
            "datasource": _DATASOURCE,
            "multi": True,
            "includeAll": True,
            "allValue": everything,
        }
        for key, value in expected.items():
            if variable.get(key) != value:
                yield f"variable {name}: {key} has to be {value!r}"

    return rule


def template_label_promql(board: Json) -> Iterator[str]:
    for variable in board["templating"]["list"]:
        if variable["type"] != "query":
            continue
        match = re.fullmatch(r"label_values\((.+), ([a-z_]+)\)", variable["query"])
        if match is None:
            yield f"variable {variable['name']} asks for no label's values"
            continue
        try:
            _parsed(match[1])
        except ValueError as exc:
            yield f"variable {variable['name']}: {exc}"


def template_on_time_change_reload(board: Json) -> Iterator[str]:
    for variable in board["templating"]["list"]:
        if variable["type"] == "query" and variable.get("refresh") != 2:
            yield f"variable {variable['name']} is not queried again when the time range changes"


def panel_datasource(board: Json) -> Iterator[str]:
    for panel in _panels(board):
        if panel.get("datasource") != _DATASOURCE:
            yield f"{panel['title']} does not ask the data source of the variable"
    for where, target in _targets(board):
        if target.get("datasource") != _DATASOURCE:
            yield f"{where} does not ask the data source of the variable"


def panel_title_description(board: Json) -> Iterator[str]:
    for panel in _panels(board):
        if not panel.get("title") or not panel.get("description"):
            yield f"panel {panel['id']} lacks its title or its description"


def panel_units(board: Json) -> Iterator[str]:
    for panel in _panels(board):
        config = panel["fieldConfig"]
        overridden = [each for override in config["overrides"] for each in override["properties"]]
        units = [config["defaults"].get("unit"), *(each["value"] for each in overridden if each["id"] == "unit")]
        for unit in units:
            if unit not in _UNITS:
                yield f"{panel['title']} has no unit that means something here: {unit}"


def panel_no_targets(board: Json) -> Iterator[str]:
    for panel in _panels(board):
        if not panel.get("targets"):
            yield f"{panel['title']} asks nothing"


def target_promql(board: Json) -> Iterator[str]:
    for where, target in _targets(board):
        try:
            tree = _parsed(target["expr"])
        except ValueError as exc:
            yield f"{where}: {exc}"
            continue
        if not any(_selectors(tree)):
            yield f"{where} asks for no series"


def target_rate_interval(board: Json) -> Iterator[str]:
    for where, tree in _trees(board):
        for node in _nodes(tree):
            if isinstance(node, promql.Call) and node.func.name in _PER_SECOND:
                (series,) = node.args
                if not isinstance(series, promql.MatrixSelector) or series.range != _RATE_INTERVAL:
                    yield f"{where}: {node.func.name} is not over $__rate_interval"


def _target_matcher(label: str) -> Rule:
    def rule(board: Json) -> Iterator[str]:
        for where, tree in _trees(board):
            for selector in _selectors(tree):
                matchers = [
                    each
                    for each in selector.matchers.matchers
                    if each.name == label and each.op == promql.MatchOp.Re and each.value == f"${label}"
                ]
                if len(matchers) != 1:
                    yield f'{where}: {selector.name} is not matched by {label}=~"${label}"'

    return rule


def target_counter_agg(board: Json) -> Iterator[str]:
    for where, tree in _trees(board):
        nodes = _nodes(tree)
        moved = [
            str(argument)
            for node in nodes
            if isinstance(node, promql.Call) and node.func.name in _OF_COUNTERS
            for argument in node.args
            if isinstance(argument, promql.MatrixSelector)
        ]
        for node in nodes:
            if isinstance(node, promql.VectorSelector) and _is_counter(node):
                yield f"{where}: {node.name} is a counter and is shown without a rate"
            elif isinstance(node, promql.MatrixSelector) and _is_counter(node.vector_selector):
                if str(node) in moved:
                    moved.remove(str(node))
                else:
                    yield f"{where}: {node.vector_selector.name} is a counter and is queried without rate or increase"


def _is_counter(selector: promql.VectorSelector) -> bool:
    return (selector.name or "").endswith(("_total", "_count", "_sum", "_bucket"))


def uneditable_dashboard(board: Json) -> Iterator[str]:
    if board.get("editable") is not False:
        yield "what is changed in Grafana would be lost with the next import: editable has to be false"


RULES: Final[Mapping[str, Rule]] = {
    "template-datasource-rule": template_datasource,
    "template-cluster": _template("cluster", ".*"),
    "template-job-rule": _template("job"),
    "template-instance-rule": _template("instance"),
    "template-label-promql-rule": template_label_promql,
    "template-on-time-change-reload-rule": template_on_time_change_reload,
    "panel-datasource-rule": panel_datasource,
    "panel-title-description-rule": panel_title_description,
    "panel-units-rule": panel_units,
    "panel-no-targets-rule": panel_no_targets,
    "target-promql-rule": target_promql,
    "target-rate-interval-rule": target_rate_interval,
    "target-cluster": _target_matcher("cluster"),
    "target-job-rule": _target_matcher("job"),
    "target-instance-rule": _target_matcher("instance"),
    "target-counter-agg-rule": target_counter_agg,
    "uneditable-dashboard": uneditable_dashboard,
}


@dataclass(frozen=True, slots=True)
class Exclusion:
    """An exclusion from a rule.

    Attributes:
        panels: (dashboard, panel).
        reason: required.
    """

    rule: str
    panels: frozenset[tuple[str, str]]
    reason: str


EXCLUSIONS: Final = (
    Exclusion(
        "target-counter-agg-rule",
        frozenset(
            {
                ("fleet", "Tenants with quarantines"),
                ("node", "Scrub duration"),
                ("node", "Slow-path step duration, p95"),
                ("node", "Calls to the service, p99"),
                ("node", "Calls per minute by code"),
                ("node", "Calls to the plugin, p99"),
                ("node", "Hand-over wait"),
                ("node", "Leftovers and resets"),
                ("node", "Child processes started"),
                ("node", "Other problems"),
                ("node", "Registrations"),
                ("node", "Starts refused by the gate"),
                ("node", "ListAndWatch updates"),
                ("node", "API server writes"),
                ("node", "Health events for NVSentinel"),
                ("device", "XIDs"),
                ("device", "Unauthorized uses"),
                ("device", "Failed verifications"),
                ("device", "Unexplained residue"),
            }
        ),
        "rate() and increase() see no first step of a series that begins with what it counts, and most of what matters "
        "happens once: a device that shows one XID 79 had an empty graph, and one stranger's use was drawn as 3.7 a minute. "
        "These panels ask for the counter itself, but only beside what it was before, so that a restart and a scraper that "
        "was away are no events (test_first_samples.py).",
    ),
    Exclusion(
        "target-cluster",
        frozenset({("fleet", "Alerts"), ("node", "Alerts")}),
        "That no service or no plugin is scraped in any cluster is of no cluster, and has to be seen whichever one is picked: "
        "the matcher is the variable or nothing (test_alerts_table.py).",
    ),
    Exclusion(
        "target-job-rule",
        frozenset({("fleet", "Alerts"), ("node", "Alerts")}),
        "An alert has the labels that its rule leaves. Those that a daemon or a node is away have no job, because they are of "
        "both daemons: matched by it they were hidden, and the table showed that no alert fires (test_alerts_table.py).",
    ),
    Exclusion(
        "target-instance-rule",
        frozenset({("fleet", "Alerts"), ("node", "Alerts")}),
        "That no service or no plugin is scraped at all, and what is about a tenant, is of no node, and has to be seen "
        "whichever one is picked: the matcher is the variable or nothing (test_alerts_table.py).",
    ),
)


def _excluded(rule: str, board: str) -> set[str]:
    return {panel for each in EXCLUSIONS if each.rule == rule for name, panel in each.panels if name == board}


def _found(rule: str, name: str) -> dict[str, list[str]]:
    """Return a rule's findings for a committed dashboard by panel; findings without a panel stand alone."""
    titles = [panel["title"] for panel in _panels(_committed(name))]
    found: dict[str, list[str]] = {}
    for message in RULES[rule](_committed(name)):
        whose = re.match(r"(.+), [A-Z]: ", message)
        found.setdefault(whose[1] if whose and whose[1] in titles else message, []).append(message)
    return found


@pytest.mark.parametrize("name", _BOARDS)
@pytest.mark.parametrize("rule", RULES)
def test_committed_dashboard_passes_every_linter_rule(rule: str, name: str) -> None:
    excluded = _excluded(rule, name)
    assert {whose: message for whose, message in _found(rule, name).items() if whose not in excluded} == {}


@pytest.mark.parametrize("each", EXCLUSIONS, ids=lambda each: each.rule)
def test_every_linter_exclusion_has_a_reason_and_is_needed(each: Exclusion) -> None:
    assert len(each.reason) > 80
    assert {(name, panel) for name, panel in each.panels if panel not in _found(each.rule, name)} == set()


def _with_query(text: str) -> Callable[[Json], None]:
    """Return a function that breaks a dashboard by another query in its first panel."""

    def break_it(board: Json) -> None:
        _panels(board)[0]["targets"][0]["expr"] = text

    return break_it


def _first(change: Callable[[Json], object]) -> Callable[[Json], None]:
    return lambda board: (change(_panels(board)[0]), None)[1]


def _in_variable(which: str, **changed: object) -> Callable[[Json], None]:
    def break_it(board: Json) -> None:
        variable = _variable(board, which)
        assert variable is not None
        variable.update(changed)

    return break_it


_PICKED: Final = 'cluster=~"$cluster", job=~"$job", instance=~"$instance"'

BROKEN: Final[Mapping[str, tuple[str, Callable[[Json], None]]]] = {
    "a data source of another name": ("template-datasource-rule", _in_variable("datasource", name="prometheus")),
    "no series without a cluster": ("template-cluster", _in_variable("cluster", allValue=".+")),
    "one job only": ("template-job-rule", _in_variable("job", multi=False)),
    "all instances by another word": ("template-instance-rule", _in_variable("instance", allValue=".*")),
    "a variable that asks nothing": ("template-label-promql-rule", _in_variable("job", query="label_values(up{, job)")),
    "a variable that is queried once": ("template-on-time-change-reload-rule", _in_variable("job", refresh=1)),
    "a data source by its id": (
        "panel-datasource-rule",
        _first(lambda panel: panel.update(datasource={"type": "prometheus", "uid": "P18"})),
    ),
    "no description": ("panel-title-description-rule", _first(lambda panel: panel.pop("description"))),
    "no unit": ("panel-units-rule", _first(lambda panel: panel["fieldConfig"]["defaults"].pop("unit"))),
    "a unit of another scale": (
        "panel-units-rule",
        _first(lambda panel: panel["fieldConfig"]["defaults"].update(unit="ms")),
    ),
    "no query": ("panel-no-targets-rule", _first(lambda panel: panel.update(targets=[]))),
    "a query that does not parse": ("target-promql-rule", _with_query(f"sum (up{{{_PICKED}}}")),
    "a query for no series": ("target-promql-rule", _with_query("vector(0)")),
    "a rate over a fixed time": ("target-rate-interval-rule", _with_query(f"sum (rate(a_total{{{_PICKED}}}[5m]))")),
    "a query of all clusters": ("target-cluster", _with_query('up{job=~"$job", instance=~"$instance"}')),
    "a query of all jobs": ("target-job-rule", _with_query('up{instance=~"$instance"}')),
    "a second selector of all instances": (
        "target-instance-rule",
        _with_query(f'up{{{_PICKED}}} and on (job) up{{job=~"$job"}}'),
    ),
    "an instance that is not a choice": ("target-instance-rule", _with_query('up{job=~"$job", instance="$instance"}')),
    "a counter without a rate": ("target-counter-agg-rule", _with_query(f"sum (scrubber_scrubs_total{{{_PICKED}}})")),
    "a counter beside its own rate": (
        "target-counter-agg-rule",
        _with_query(f"rate(a_total{{{_PICKED}}}[$__rate_interval]) / a_total{{{_PICKED}}}"),
    ),
    "a counter's maximum": (
        "target-counter-agg-rule",
        _with_query(f"max_over_time(scrubber_scrubs_total{{{_PICKED}}}[$__range])"),
    ),
    "a board that can be edited": ("uneditable-dashboard", lambda board: board.update(editable=True)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_dashboard_that_breaks_a_linter_rule_is_detected(case: str) -> None:
    rule, break_it = BROKEN[case]
    board = copy.deepcopy(_committed("node"))
    break_it(board)
    assert list(RULES[rule](board)) != []


def test_every_linter_rule_is_tested_with_a_dashboard_that_breaks_it() -> None:
    assert {rule for rule, _ in BROKEN.values()} == set(RULES)
