"""Every panel of the committed dashboards shows data after a scenario that covers everything."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.dashboards.prometheus import POSSIBLE
from tests.dashboards.running import SCRAPE
from tests.dashboards.scenario import FinishedScenario
from tests.pods import only_with

BOARDS: Final = Path(__file__).parents[2] / "dashboards"
NAMES: Final = ("fleet", "node", "device")
OF_OTHER_EXPORTERS: Final = frozenset(
    {"Temperature", "Utilization", "Last XID of DCGM", "Uncorrected ECC errors", "Pods that wait", "Nodes booted last"}
)
"""Panels that are empty where no such exporter is scraped; promtool tests their rules (``rules/tests/joins.yaml``)."""

EVERYTHING: Final = ".+"
"""The value of a variable with All selected."""


def board(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((BOARDS / f"{name}.json").read_text())
    return document


def _panels(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in panels:
        yield panel
        yield from _panels(panel.get("panels", []))


def _queries() -> Iterator[Any]:
    for name in NAMES:
        for panel in _panels(board(name)["panels"]):
            if panel["title"] in OF_OTHER_EXPORTERS:
                continue
            for number, target in enumerate(panel.get("targets", [])):
                yield pytest.param(target["expr"], id=f"{name}: {panel['title']} {'ABCDEFGHIJ'[number]}")


QUERIES: Final = tuple(_queries())


def rendered_query(query: str, story: FinishedScenario, device: str | None = None) -> str:
    """Return ``query`` as Grafana would send it: All selected, the scenario's device (or another), its whole time."""
    values = {
        "cluster": ".*",
        "job": EVERYTHING,
        "instance": EVERYTHING,
        "device": device or story.device,
        "__interval": f"{SCRAPE}s",
        "__interval_ms": f"{SCRAPE * 1000}",
        "__rate_interval": f"{4 * SCRAPE}s",
        "__range": f"{story.ended - story.began:.0f}s",
    }
    return re.sub(r"\$\{?(\w+)(?::\w+)?\}?", lambda found: values[found[1]], query)


@only_with(POSSIBLE)
@pytest.mark.parametrize("query", QUERIES)
def test_every_query_of_every_panel_returns_series(query: str, scenario: FinishedScenario) -> None:
    found = scenario.prometheus.range(rendered_query(query, scenario), scenario.began, scenario.ended)
    assert any(not math.isnan(value) for series in found for _, value in series.points), rendered_query(query, scenario)


@only_with(POSSIBLE)
@pytest.mark.parametrize("name", ["fleet", "node"])
@pytest.mark.parametrize(
    ("alert", "about"),
    [
        ("ScrubberServiceDown", {"instance": "cut"}),
        ("ScrubberPluginDown", {"instance": "cut"}),
        ("ScrubberNodeDown", {"instance": "cut"}),
        ("ScrubberTenantCausesQuarantines", {"about": "team-rough"}),
        ("ScrubberDeviceNeedsOperator", {"instance": "ill", "about": "row-remap-failure"}),
        ("ScrubberUnauthorizedUse", {"instance": "strict", "about": "unauthorized-process"}),
    ],
)
def test_alert_table_shows_every_firing_alert_whatever_its_labels(
    name: str, alert: str, about: Mapping[str, str], scenario: FinishedScenario
) -> None:
    (panel,) = (each for each in _panels(board(name)["panels"]) if each["title"] == "Alerts")
    (target,) = panel["targets"]
    query = rendered_query(target["expr"], scenario)
    found = scenario.prometheus.range(
        query, scenario.began, scenario.ended, step=0.5
    )  # an alert may fire for one second
    excused = scenario.outage_alerts() - {(alert, "cut")}
    rows = [
        each.labels
        for each in found
        if each.labels["alertname"] == alert and (alert, each.labels.get("instance", "")) not in excused
    ]
    assert rows
    assert all(row.items() >= about.items() for row in rows)


@only_with(POSSIBLE)
def test_xid_bars_of_a_device_add_up_to_the_counter_including_its_first_value(scenario: FinishedScenario) -> None:
    (panel,) = (each for each in _panels(board("device")["panels"]) if each["title"] == "XIDs")
    (target,) = panel["targets"]
    counted = {
        (series.labels["device"], series.labels["code"]): series.points
        for series in scenario.prometheus.range('scrubber_xids_total{instance="ill"}', scenario.began, scenario.ended)
    }
    assert {code for device, code in counted if device == scenario.device} == {"95"}
    for device in {device for device, _ in counted}:
        drawn = scenario.prometheus.range(
            rendered_query(target["expr"], scenario, device), scenario.began, scenario.ended
        )
        bars = {series.labels["code"]: series.points for series in drawn}
        for code, points in counted.items():
            if code[0] == device:
                assert sum(value for _, value in bars[code[1]]) == points[-1][1]
                assert bars[code[1]][0] == points[0]


def _variables() -> Iterator[Any]:
    for name in NAMES:
        for variable in board(name)["templating"]["list"]:
            if variable["type"] == "query" and variable["name"] != "cluster":  # one cluster has no such label
                yield pytest.param(variable["query"], id=f"{name}: {variable['name']}")


@only_with(POSSIBLE)
@pytest.mark.parametrize("query", tuple(_variables()))
def test_every_dashboard_variable_has_values(query: Any, scenario: FinishedScenario) -> None:
    text = query["query"] if isinstance(query, dict) else query
    match = re.fullmatch(r"label_values\((.+), *(\w+)\)", text)
    assert match, text
    found = scenario.prometheus.range(
        f"group by ({match[2]}) ({rendered_query(match[1], scenario)})", scenario.began, scenario.ended
    )
    assert all(series.labels[match[2]] for series in found)
    assert found
