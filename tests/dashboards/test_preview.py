"""Guarantees of the preview: only loopback and files, one version of Grafana, and variables as in Grafana."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dashboards.preview.record import Prometheus, changed_queries, panels_of, record
from dashboards.preview.variables import UnknownVariable, VariableValue, choose_values, substitute

PREVIEW = Path(__file__).parents[2] / "dashboards" / "preview"
NODES = {"node-a": 1.0, "node-b": float("nan")}


class Answering(Prometheus):
    """A Prometheus of two nodes that records its queries."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.queries: list[str] = []

    def range(self, query: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        self.queries.append(query)
        return [{"metric": {"instance": name}, "values": [[start + step, str(value)]]} for name, value in NODES.items()]

    def instant(self, query: str, at: float) -> list[dict[str, Any]]:
        self.queries.append(query)
        return [{"metric": {"instance": name}, "value": [at, str(value)]} for name, value in NODES.items()]

    def label_values(self, selector: str | None, label: str, start: float, end: float) -> list[str]:
        self.queries.append(selector or "")
        return list(NODES)


def board(*targets: dict[str, Any], **variable: Any) -> dict[str, Any]:
    query = {"name": "instance", "type": "query", "query": "label_values(up, instance)", "multi": True}
    panel = {"id": 7, "type": "timeseries", "title": "Panel", "targets": list(targets)}
    return {"uid": "board", "templating": {"list": [query | variable]}, "panels": [panel]}


def names(_: str | None, __: str) -> list[str]:
    return ["node-a.rack", "node-b"]


def test_lock_file_of_the_preview_names_no_registry() -> None:
    packages = json.loads((PREVIEW / "package-lock.json").read_text())["packages"]
    assert not [name for name, package in packages.items() if "resolved" in package]
    assert all("integrity" in package for name, package in packages.items() if name)


def test_all_grafana_packages_have_the_same_version() -> None:
    packages = json.loads((PREVIEW / "package-lock.json").read_text())["packages"]
    found = {
        name: package["version"]
        for name, package in packages.items()
        if name.removeprefix("node_modules/") in {f"@grafana/{each}" for each in ("data", "ui", "schema", "i18n")}
    }
    assert len(found) == 4
    assert len(set(found.values())) == 1


@pytest.mark.parametrize("form", ["$instance", "${instance}", "${instance:regex}", "[[instance]]"])
def test_dashboard_variable_is_substituted_in_every_syntax(form: str) -> None:
    assert substitute(f'up{{instance=~"{form}"}}', {"instance": VariableValue("All", ".+")}) == 'up{instance=~".+"}'


def test_unknown_dashboard_variable_is_refused() -> None:
    with pytest.raises(UnknownVariable, match="nowhere"):
        substitute("up{instance=~'$nowhere'}", {})


@pytest.mark.parametrize(
    ("variable", "expected", "query"),
    [
        ({"includeAll": True, "allValue": ".+"}, {}, ".+"),
        ({"includeAll": True}, {}, r"node-a\\.rack|node-b"),
        ({}, {}, "node-a.rack"),
        ({}, {"instance": "node-a.rack"}, r"node-a\\.rack"),
        ({"multi": False}, {"instance": "node-a.rack"}, "node-a.rack"),
        ({"regex": "/b$/"}, {}, "node-b"),
    ],
)
def test_dashboard_variable_gets_the_value_that_grafana_would_choose(
    variable: Any, expected: dict[str, str], query: str
) -> None:
    assert choose_values(board(**variable), expected, names)["instance"].query == query


@pytest.mark.parametrize(
    "broken",
    [
        lambda: choose_values(board(), {"nowhere": "x"}, names),
        lambda: choose_values(board(type="adhoc"), {}, names),
        lambda: choose_values(board(query="query_result(up)"), {}, names),
        lambda: choose_values(board(), {}, lambda _, __: []),
    ],
)
def test_dashboard_variable_without_a_possible_value_is_refused(broken: Callable[[], object]) -> None:
    with pytest.raises(UnknownVariable):
        broken()


def test_a_recording_has_a_value_or_none_for_every_step() -> None:
    prometheus = Answering()
    target = {"refId": "A", "expr": 'rate(x{instance=~"$instance"}[$__rate_interval])'}
    answer = record(prometheus, board(target, includeAll=True, allValue=".+"), 90.0, 150.0, scrape=15.0)
    assert prometheus.queries == ["up", 'rate(x{instance=~".+"}[60s])']
    assert answer["variables"] == {"instance": {"text": "All"}}
    a, b = answer["panels"]["7"]["A"]["series"]
    assert a == {"labels": {"instance": "node-a"}, "values": [None, 1, None, None, None]}
    assert b["values"][1] == "nan"


def test_panel_with_few_points_is_queried_in_longer_steps() -> None:
    few = board({"refId": "A", "expr": "increase(x[$__interval]) / $__interval_ms"})
    few["panels"][0]["maxDataPoints"] = 2
    prometheus = Answering()
    answer = record(prometheus, few, 90.0, 210.0, scrape=15.0)
    assert prometheus.queries[-1] == "increase(x[60s]) / 60000"
    assert (answer["from"], answer["panels"]["7"]["A"]["start"], answer["panels"]["7"]["A"]["step"]) == (90, 120, 60)


def test_instant_query_is_evaluated_at_the_end_of_the_range() -> None:
    target = {"refId": "A", "expr": "up", "instant": True}
    answer = record(Answering(), board(target), 90.0, 150.0)["panels"]["7"]["A"]
    assert (answer["start"], answer["series"][0]["values"]) == (150.0, [1])


def test_hidden_query_is_not_evaluated_and_panels_of_a_collapsed_row_are() -> None:
    inner = {"id": 8, "type": "stat", "targets": [{"refId": "A", "expr": "up"}]}
    whole = board({"refId": "A", "expr": "hidden", "hide": True})
    whole["panels"].append({"id": 9, "type": "row", "panels": [inner]})
    prometheus = Answering()
    assert [panel["id"] for panel in panels_of(whole)] == [7, 8]
    assert set(record(prometheus, whole, 90.0, 150.0)["panels"]) == {"8"}
    assert "hidden" not in prometheus.queries


def test_prometheus_with_tls_is_refused() -> None:
    with pytest.raises(ValueError, match="https"):
        Prometheus("https://example.org")


def test_recording_of_a_changed_query_is_detected() -> None:
    before, after = board({"refId": "A", "expr": "up"}), board({"refId": "A", "expr": "up == 1"})
    recorded = record(Answering(), before, 90.0, 150.0)
    assert changed_queries(before, recorded) == []
    assert changed_queries(after, recorded) == ["Panel, A"]
