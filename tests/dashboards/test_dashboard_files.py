"""The dashboards as files: they match their generator, Grafana can import them, and each panel states its question."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import promql_parser as promql
import pytest
import yaml

from dashboards.__main__ import main
from dashboards.annotations import ANNOTATIONS
from dashboards.boards import BOARDS
from dashboards.dashboard import DashboardName, to_json
from dashboards.value_mappings import ADVERTISEMENT, HEALTH, HYGIENE, STATE_COLOURS, STATES, STEP_COLOURS, Colour
from scrubber.domain.evidence import Severity, Step, Verdict
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.states import ADVERTISED, Health, Hygiene
from scrubber.observability.registry.plugin_metrics import PLUGIN_METRICS
from scrubber.observability.registry.service_metrics import SERVICE_METRICS

_ROOT: Final = Path(__file__).resolve().parents[2]
_DIRECTORY: Final = _ROOT / "dashboards"

_OURS: Final = re.compile(r"(?:[a-z_]+:)?scrubber_[a-z0-9_]+(?::[a-z0-9_]+)?")
_OF_A_HISTOGRAM: Final = re.compile(r"_(?:bucket|count|sum)$")
_GRAFANAS: Final = frozenset({"__interval", "__interval_ms", "__rate_interval", "__range"})
"""Variables that Grafana defines itself."""
_OUR_VARIABLES: Final = frozenset({"datasource", "cluster", "job", "instance", "device", "runbooks"})

Json = dict[str, Any]


@pytest.fixture(params=list(DashboardName), name="which")
def _which(request: pytest.FixtureRequest) -> DashboardName:
    which: DashboardName = request.param
    return which


@pytest.fixture(name="board")
def _board(which: DashboardName) -> Json:
    return _committed(which)


def _committed(which: DashboardName) -> Json:
    made: Json = json.loads((_DIRECTORY / f"{which}.json").read_text(encoding="utf-8"))
    return made


def _panels(board: Json) -> list[Json]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def _queries(board: Json) -> list[str]:
    return [target["expr"] for panel in _panels(board) for target in panel["targets"]]


def _links(board: Json) -> Iterator[str]:
    for link in board["links"]:
        yield link["url"]
    for panel in _panels(board):
        config = panel["fieldConfig"]
        for link in config["defaults"].get("links", ()):
            yield link["url"]
        for override in config["overrides"]:
            for each in override["properties"]:
                if each["id"] == "links":
                    yield from (link["url"] for link in each["value"])


def _properties(panel: Json, column: str) -> Json:
    return {
        each["id"]: each["value"]
        for override in panel["fieldConfig"]["overrides"]
        if override["matcher"] == {"id": "byName", "options": column}
        for each in override["properties"]
    }


def _tables(board: Json) -> list[Json]:
    return [panel for panel in _panels(board) if panel["type"] == "table"]


def _titles(table: Json) -> dict[str, str]:
    """Return a table's column titles by label or value."""
    titles: dict[str, str] = table["transformations"][-1]["options"]["renameByName"]
    return titles


# --- the files -----------------------------------------------------------------------------------------------------


def test_committed_dashboard_matches_its_generator(which: DashboardName) -> None:
    committed = (_DIRECTORY / f"{which}.json").read_text(encoding="utf-8")
    assert committed == to_json(BOARDS[which]()), "run `make boards`"


def test_every_dashboard_has_a_file_and_there_are_no_others() -> None:
    assert {path.stem for path in _DIRECTORY.glob("*.json")} == {str(each) for each in BOARDS}


def test_dashboard_can_be_imported_and_has_a_stable_uid(board: Json, which: DashboardName) -> None:
    assert board["uid"] == f"scrubber-{which}"
    assert board.get("id") is None  # one from another Grafana would conflict
    assert 39 <= board["schemaVersion"] <= 42
    assert "gpu-scrubber" in board["tags"]
    assert board["description"].endswith("?")
    assert board["refresh"]


def test_panel_ids_and_titles_are_unique(board: Json) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    titles = [panel["title"] for panel in _panels(board)]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)


def test_panels_do_not_overlap_and_fill_the_width(board: Json) -> None:
    places = [panel["gridPos"] for panel in board["panels"]]
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
    lines = sorted({place["y"] for place in places})
    for line in lines:
        assert sum(place["w"] for place in places if place["y"] == line) == 24, (
            f"the panels at y={line} do not fill 24 columns: set their span"
        )
    for above, line in pairwise(lines):
        assert {place["y"] + place["h"] for place in places if place["y"] == above} == {line}, (
            "panels of unequal height"
        )


# --- texts ---------------------------------------------------------------------------------------------------------


def test_every_panel_description_is_a_question(board: Json) -> None:
    for panel in _panels(board):
        assert re.match(r"[A-Z][^?]+\?", panel["description"]), panel["title"]


def test_every_series_has_a_legend(board: Json) -> None:
    for panel in _panels(board):
        if panel["type"] in {"timeseries", "state-timeline"}:
            assert all(target.get("legendFormat") for target in panel["targets"]), panel["title"]


def test_legend_uses_labels_that_the_query_keeps(board: Json) -> None:
    for panel in _panels(board):
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target.get("legendFormat", "")):
                assert label in _kept(target["expr"]), (panel["title"], label)


def _kept(text: str) -> set[str]:
    """Return the labels of a query's result: those of its outermost aggregations, and of functions that join labels."""
    kept = set(re.findall(r'label_join\(.*?"(\w+)", " / "', text))

    def outermost(node: promql.Expr) -> bool:
        if isinstance(node, promql.AggregateExpr) and str(node.op) not in {"topk", "bottomk"}:
            if node.modifier is not None:
                kept.update(node.modifier.labels)
            return False
        return True

    # A traversal ends at the first aggregation; the other side of a binary expression has the same labels.
    promql.walk(_parsed(text), outermost)
    return kept


def test_tables_use_instant_queries_and_graphs_use_range_queries(board: Json) -> None:
    for panel in _panels(board):
        for target in panel["targets"]:
            if panel["type"] in {"table", "stat"}:
                assert (target["instant"], target["range"]) == (True, False), panel["title"]
            else:
                assert (target["instant"], target["range"]) == (False, True), panel["title"]
        formats = {target.get("format") for target in panel["targets"]}
        assert formats == {{"table": "table", "heatmap": "heatmap"}.get(panel["type"])}, panel["title"]


def test_table_has_a_column_for_each_label_and_no_others(board: Json) -> None:
    for table in _tables(board):
        labels = {label for target in table["targets"] for label in _kept(target["expr"])}
        columns = {source for source in _titles(table) if not source.startswith("Value")}
        assert columns == labels, table["title"]


def test_a_table_shows_or_hides_each_of_its_values(board: Json) -> None:
    for table in _tables(board):
        several = len(table["targets"]) > 1
        values = {f"Value #{target['refId']}" for target in table["targets"]} if several else {"Value"}
        shown = {source for source in _titles(table) if source.startswith("Value")}
        hidden = set(table["transformations"][-1]["options"]["excludeByName"]) - {"Time"}
        assert shown | hidden == values, table["title"]
        assert not shown & hidden, table["title"]
        assert [each["id"] for each in table["transformations"]] == ["merge"] * several + ["organize"], table["title"]


def test_every_value_column_of_a_table_has_a_unit(board: Json) -> None:
    for table in _tables(board):
        for source, title in _titles(table).items():
            if source.startswith("Value"):
                assert "unit" in _properties(table, title), (table["title"], title)


def test_table_is_sorted_by_an_existing_column(board: Json) -> None:
    for table in _tables(board):
        for each in table["options"].get("sortBy", ()):
            assert each["displayName"] in _titles(table).values(), table["title"]


def test_graph_that_may_have_no_series_has_a_text_for_no_value(
    board: Json,
) -> None:
    graphs = [panel for panel in _panels(board) if panel["type"] == "timeseries"]
    rare = [graph for graph in graphs if all(" and on (" in target["expr"] for target in graph["targets"])]
    quantiles = [graph for graph in graphs if all("quantile" in target["expr"] for target in graph["targets"])]
    for graph in (*rare, *quantiles):
        assert graph["fieldConfig"]["defaults"].get("noValue"), graph["title"]
    assert bool(rare) == (board["uid"] != f"scrubber-{DashboardName.DEVICE}")


def test_panel_title_states_per_minute_rates(board: Json) -> None:
    for panel in _panels(board):
        by_the_minute = any(target["expr"].startswith("60 * ") for target in panel["targets"])
        assert by_the_minute == ("per minute" in panel["title"]), panel["title"]
        if by_the_minute:
            assert all(target["expr"].startswith("60 * ") for target in panel["targets"]), panel["title"]


def test_queries_of_one_graph_use_one_window(board: Json) -> None:
    """Lines of two windows contradict each other: the lowest node had 92 % while the fleet had 60."""
    for panel in _panels(board):
        if panel["type"] == "timeseries":
            text = " ".join(target["expr"] for target in panel["targets"])
            windows = set(re.findall(r"\d+[mhd]\b", " ".join(re.findall(r":\w+", text))))
            assert len(windows | set(re.findall(r"\$__rate_interval", text))) <= 1, panel["title"]


def test_only_completely_verified_memory_is_green() -> None:
    least = 2**-53  # the rounding error of a share of one
    panels = {which: {each["title"]: each for each in _panels(_committed(which))} for which in DashboardName}
    number = panels[DashboardName.DEVICE]["Unverified memory"]
    column = _properties(panels[DashboardName.NODE]["Device overview"], "Unverified memory")
    for steps in (number["fieldConfig"]["defaults"]["thresholds"]["steps"], column["thresholds"]["steps"]):
        assert steps[0]["color"] == Colour.CLEAN
        assert 0 < steps[1]["value"] < least
        assert all(each["color"] != Colour.CLEAN for each in steps[1:])
    assert "decimals" not in number["fieldConfig"]["defaults"]  # Grafana then shows as many digits as necessary


# --- links ---------------------------------------------------------------------------------------------------------


def test_each_dashboard_links_to_the_others_with_variables_and_time_range(board: Json, which: DashboardName) -> None:
    assert {link["url"] for link in board["links"]} == {
        f"/d/{other.uid}" for other in DashboardName if other is not which
    }
    assert all(link["includeVars"] and link["keepTime"] for link in board["links"])


def test_dashboard_link_leads_to_an_existing_dashboard_and_its_variables(board: Json) -> None:
    for url in _links(board):
        split = urlsplit(url)
        if url.startswith("${runbooks}/"):
            continue
        target = next(each for each in DashboardName if split.path == f"/d/{each.uid}")
        variables = {each["name"] for each in _committed(target)["templating"]["list"]}
        passed = {name.removeprefix("var-") for name, _ in parse_qsl(split.query) if name.startswith("var-")}
        passed |= set(re.findall(r"\${(\w+):queryparam}", split.query))
        assert passed <= variables, url


def test_row_of_the_alerts_links_to_the_runbook_the_node_and_the_device() -> None:
    for which in (DashboardName.FLEET, DashboardName.NODE):
        (table,) = (each for each in _tables(_committed(which)) if each["title"] == "Alerts")
        links = {title: _properties(table, title)["links"][0]["url"] for title in ("Alert", "Node", "Device")}
        assert links["Alert"] == "${runbooks}/${__data.fields.Alert}.md"
        assert "var-cluster=${__data.fields.Cluster}&var-instance=${__data.fields.Node}&" in links["Node"]
        assert "&var-device=${__data.fields.Device}&" in links["Device"]


def test_address_of_the_runbooks_is_configurable(tmp_path: Path) -> None:
    assert main(["--runbooks", "https://pages.example/runbooks/", "--out", str(tmp_path)]) == 0
    board = json.loads((tmp_path / "fleet.json").read_text())
    (variable,) = (each for each in board["templating"]["list"] if each["name"] == "runbooks")
    assert variable["query"] == "https://pages.example/runbooks"


@pytest.mark.parametrize("arguments", [["--runbooks", "https://pages.example"], ["--cluster-label", "site"]])
def test_dashboards_in_the_tree_are_never_written_with_other_addresses_or_labels(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "need --out" in capsys.readouterr().err


def test_dashboard_link_uses_existing_columns_of_its_table(board: Json) -> None:
    for table in _tables(board):
        columns = set(re.findall(r"__data\.fields\.(\w+)", json.dumps(table["fieldConfig"])))
        assert columns <= set(_titles(table).values()), table["title"]


def test_dashboards_link_from_fleet_to_node_and_from_both_to_device() -> None:
    below = {which: {urlsplit(url).path for url in _links(_committed(which)) if "?" in url} for which in DashboardName}
    assert below[DashboardName.FLEET] == {f"/d/{DashboardName.NODE.uid}", f"/d/{DashboardName.DEVICE.uid}"}
    assert below[DashboardName.NODE] == {
        f"/d/{DashboardName.NODE.uid}",
        f"/d/{DashboardName.DEVICE.uid}",
    }  # to one of several nodes


def test_query_uses_exactly_the_variables_of_its_dashboard(board: Json) -> None:
    variables = {each["name"] for each in board["templating"]["list"]}
    assert variables <= _OUR_VARIABLES
    for query in _queries(board):
        assert set(re.findall(r"\$(\w+)", query)) <= variables | _GRAFANAS, query


def test_every_query_of_the_device_dashboard_selects_the_device() -> None:
    for query in _queries(_committed(DashboardName.DEVICE)):
        assert query.count("{") == query.count('device="$device"'), query


# --- consistency with the code -------------------------------------------------------------------------------------


def test_every_device_state_has_a_number_a_text_and_a_colour() -> None:
    expected = {(hygiene, health) for hygiene in Hygiene for health in ADVERTISED}
    combined = {_hygiene_and_health(each.matchers) for each in STATES}
    assert combined == expected | {(None, health) for health in set(Health) - ADVERTISED}
    assert {_hygiene_and_health(each.matchers)[0] for each in HYGIENE} == set(Hygiene)
    assert {_hygiene_and_health(each.matchers)[1] for each in HEALTH} == set(Health)
    assert set(STATE_COLOURS) == set(Hygiene) | (set(Health) - ADVERTISED)


def _hygiene_and_health(matchers: tuple[str, ...]) -> tuple[str | None, str | None]:
    states = dict(re.findall(r'(\w+)="([\w-]+)"', " ".join(matchers)))
    return states.get("hygiene"), states.get("health")


def test_each_step_has_a_colour_of_its_own() -> None:
    assert set(STEP_COLOURS) == set(Step)
    assert len(set(STEP_COLOURS.values())) == len(STEP_COLOURS)


def test_each_number_means_one_state_among_states_shown_together() -> None:
    for together in (STATES, (*HYGIENE, *HEALTH, *ADVERTISEMENT)):
        numbers = [each.number for each in together]
        assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("values", [Severity, Verdict], ids=["severities", "verdicts"])
def test_every_coloured_table_text_has_its_colours(values: type[Severity] | type[Verdict]) -> None:
    coloured = {
        frozenset(mapping["options"])
        for which in DashboardName
        for table in _tables(_committed(which))
        for title in _titles(table).values()
        for mapping in _properties(table, title).get("mappings", ())
    }
    assert frozenset(values) in coloured


def _coloured(which: DashboardName, title: str) -> set[str]:
    """Return the series of a graph with an explicit colour."""
    graph = next(each for each in _panels(_committed(which)) if each["title"] == title)
    matchers = [each["matcher"] for each in graph["fieldConfig"]["overrides"]]
    return {each["options"] for each in matchers if each["id"] == "byName"}


def test_every_scrub_step_and_hand_over_kind_has_its_colour() -> None:
    assert _coloured(DashboardName.DEVICE, "Slow-path steps") == set(Step)
    assert _coloured(DashboardName.NODE, "Slow-path step duration, p95") == set(Step)
    assert _coloured(DashboardName.NODE, "Hand-overs per minute by kind") == set(HandOverKind)


def _queried_metrics() -> set[str]:
    """Return the names of our metrics that the dashboards query, a histogram by its base name."""
    texts = [query for which in DashboardName for query in _queries(_committed(which))]
    texts += [each["query"] for which in DashboardName for each in _committed(which)["templating"]["list"]]
    return {_OF_A_HISTOGRAM.sub("", name) for text in texts for name in _OURS.findall(text)}


def _recorded() -> set[str]:
    files = [yaml.safe_load((_DIRECTORY / "rules" / name).read_text()) for name in ("recording.yaml", "joins.yaml")]
    return {rule["record"] for rules in files for group in rules["groups"] for rule in group["rules"]}


def _declared() -> dict[str, set[str]]:
    """Return the labels of each metric, by its name."""
    return {each.name: set(each.label_names) for each in (*SERVICE_METRICS, *PLUGIN_METRICS)}


def test_annotation_selects_by_the_variables_and_names_labels_that_its_query_keeps(board: Json) -> None:
    annotations = board["annotations"]["list"]
    assert len({each["name"] for each in annotations}) == len(annotations) == len(ANNOTATIONS)
    for each in annotations:
        selectors = [node for node in _nodes(each["expr"]) if isinstance(node, promql.VectorSelector)]
        assert selectors
        for selector in selectors:
            assert str(selector.name) == "" or _OF_A_HISTOGRAM.sub("", str(selector.name)) in _declared()
            names = {matcher.name for matcher in selector.matchers.matchers}
            assert names >= {"cluster", "job", "instance"}
        assert set(re.findall(r"{{(\w+)}}", each["titleFormat"])) <= _kept(each["expr"]), each["name"]


def test_every_recorded_series_in_a_dashboard_has_a_recording_rule() -> None:
    assert {name for name in _queried_metrics() if ":" in name} <= _recorded()


def test_every_metric_in_a_dashboard_is_declared() -> None:
    assert {name for name in _queried_metrics() if ":" not in name} <= _declared().keys()


def test_every_metric_is_shown_on_a_dashboard() -> None:
    by_rules = set(_OURS.findall((_DIRECTORY / "rules" / "recording.yaml").read_text(encoding="utf-8")))
    assert _declared().keys() <= _queried_metrics() | {_OF_A_HISTOGRAM.sub("", name) for name in by_rules}


def test_query_uses_labels_that_its_metrics_have(board: Json) -> None:
    declared = _declared()
    for query in _queries(board):
        nodes = _nodes(query)
        selectors = [node for node in nodes if isinstance(node, promql.VectorSelector)]
        own = {str(node.name): declared.get(_OF_A_HISTOGRAM.sub("", str(node.name))) for node in selectors}
        for selector in selectors:
            labels = own[str(selector.name)]
            matched = {each.name for each in selector.matchers.matchers} - {"cluster", "job", "instance"}
            assert labels is None or matched <= labels, (selector.name, matched)
        if None in own.values():  # a recorded series or an alert: its rule defines the labels
            continue
        for node in nodes:
            if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
                known = {label for labels in own.values() for label in labels or ()}
                assert set(node.modifier.labels) <= known | {"cluster", "job", "instance", "le"}, query


def _nodes(text: str) -> list[promql.Expr]:
    found: list[promql.Expr] = []
    promql.walk(_parsed(text), found.append)
    return found


def _parsed(text: str) -> promql.Expr:
    for name, value in {
        "__rate_interval": "5m",
        "__range": "6h",
        "__interval_ms": "15000",
        "__interval": "15s",
    }.items():
        text = text.replace(f"${name}", value)
    tree: promql.Expr = promql.parse(text)
    return tree
