"""The recorded costs of a fleet's queries: complete, well inside the interval of the rules, and those of the page."""

from __future__ import annotations

import json
from typing import Any

from bench.fleet import GROUP_INTERVAL, RESULTS, fleet_queries, rule_queries
from bench.fleet_page import PAGE, render_page

RECORDED: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))


def names(costs: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(each["source"], each["name"]) for each in costs}


def test_cost_of_every_query_and_rule_of_a_thousand_nodes_is_recorded() -> None:
    assert (RECORDED["nodes"], RECORDED["devices"]) == (1000, 8)
    panels = fleet_queries(hours=RECORDED["hours"], scrape=RECORDED["scrape_seconds"])
    assert names(RECORDED["panels"]) == {(each.source, each.name) for each in panels}
    assert names(RECORDED["rules"]) == {(each.source, each.name) for each in rule_queries()}


def test_rules_of_a_thousand_nodes_need_less_than_half_of_their_interval() -> None:
    assert max(RECORDED["groups"].values()) < GROUP_INTERVAL / 2


def test_no_query_of_the_fleet_dashboard_takes_more_than_five_seconds() -> None:
    assert max(each["seconds"] for each in RECORDED["panels"]) < 5


def test_page_has_the_recorded_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == render_page(page)
