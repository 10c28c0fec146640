"""The first event counts: most important events of a GPU happen once, and often create their series.

``increase()`` and ``rate()`` see no step before a series' second sample. Here Prometheus' own engine, in promtool, runs
the dashboards' queries over artificial scrapes; ``test_panels.py`` tests that a real device's XIDs are drawn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
import yaml
from prometheus_client import CollectorRegistry

from dashboards.annotations import ANNOTATIONS
from dashboards.dashboard import DashboardName
from dashboards.queries import NOT_INITIALIZED_AT_ZERO
from plugin.metrics import PluginMetrics
from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.observability.metrics.recorder import MetricsRecorder
from tests.dashboards.prometheus import POSSIBLE, promtool
from tests.measures import Measures, shown
from tests.pods import only_with

ROOT: Final = Path(__file__).parents[2]
SCRAPE: Final = 15
"""Seconds."""
RANGE: Final = "30m"

XIDS: Final = (DashboardName.DEVICE, "XIDs")
TENANTS: Final = (DashboardName.FLEET, "Tenants with quarantines")
CALLS: Final = (DashboardName.NODE, "Calls per minute by code")
WRONG: Final = (DashboardName.NODE, "Other problems")
WAIT: Final = (DashboardName.NODE, "Hand-over wait")
HOW_LONG: Final = (DashboardName.NODE, "Scrub duration")

_TARGET: Final = 'job="scrubber",instance="a"'
_XID: Final = f'{{{_TARGET},device="GPU-1",code="79"}}'
_TENANT: Final = f'{{{_TARGET},tenant="team-x"}}'
_CALL: Final = f'{{{_TARGET},service="scrubber.v1.HandOver",method="HandOver",code="UNAVAILABLE"}}'
_SCRUB: Final = f'{_TARGET},path="slow",trigger="release",outcome="failed"'

Series = Mapping[str, str]


def panel_query(panel: tuple[DashboardName, str], number: int = 0) -> str:
    """Return the committed query, as Grafana would send it: all nodes, a point for each scrape."""
    board, title = panel
    document = json.loads((ROOT / "dashboards" / f"{board}.json").read_text())
    (found,) = (each for each in document["panels"] if each["title"] == title)
    values = {
        "cluster": ".*",
        "job": ".+",
        "instance": ".+",
        "device": "GPU-1",
        "__range": RANGE,
        "__rate_interval": f"{4 * SCRAPE}s",
        "__interval": f"{SCRAPE}s",
        "__interval_ms": f"{SCRAPE * 1000}",
    }
    return re.sub(r"\$(\w+)", lambda name: values[name[1]], found["targets"][number]["expr"])


def promtool_result(
    query: str, series: Series, expected: Mapping[int, float], labels: str, scrapes: int, into: Path
) -> str:
    """Return promtool's result for the assertion that the query's only series has exactly these values, by scrape."""
    tests = [
        {
            "expr": query,
            "eval_time": f"{scrape * SCRAPE}s",
            "exp_samples": [{"labels": labels, "value": expected[scrape]}] if scrape in expected else [],
        }
        for scrape in range(scrapes)
    ]
    test = {
        "interval": f"{SCRAPE}s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": tests,
    }
    path = into / "trial.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": f"{SCRAPE}s", "tests": [test]}))
    done = promtool("test", "rules", path)
    return "" if done.returncode == 0 else done.stdout


def xids(times: str, last: str) -> Series:
    return {
        f"scrubber_xids_total{_XID}": times,
        f"scrubber_xid_last_seen_timestamp_seconds{_XID}": last,
    }


XID_TRIALS: Final[Mapping[str, tuple[Series, Mapping[int, float]]]] = {
    "the first of its number": (xids("_x10 1x30", "_x10 100x30"), {10: 1}),
    "several at a time, and more of them later": (xids("_x10 3x9 5x20", "_x10 100x9 290x20"), {10: 3, 20: 2}),
    "one in each of two lives of the service": (
        xids("_x10 1x5 stale _x5 1x20", "_x10 100x5 stale _x5 290x20"),
        {10: 1, 22: 1},
    ),
    "more in the first life than in the second": (
        xids("_x10 4x5 stale _x5 2x20", "_x10 100x5 stale _x5 290x20"),
        {10: 4, 22: 2},
    ),
    "none, while the scraper is away for eleven minutes": (
        xids("_x3 7x5 _x45 7x5", "_x3 20x5 _x45 20x5"),
        {3: 7},
    ),
    "one, while the scraper is away": (xids("_x3 7x5 _x45 8x5", "_x3 20x5 _x45 500x5"), {3: 7, 54: 1}),
}


@only_with(POSSIBLE)
@pytest.mark.parametrize("trial", XID_TRIALS)
def test_xid_has_one_bar_of_the_height_of_its_occurrences(trial: str, tmp_path: Path) -> None:
    series, expected = XID_TRIALS[trial]
    assert promtool_result(panel_query(XIDS), series, expected, '{code="79"}', 62, tmp_path) == ""


def throughout(first: int, last: int, value: float) -> dict[int, float]:
    return dict.fromkeys(range(first, last + 1), value)


TENANT_TRIALS: Final[Mapping[str, tuple[str, Mapping[int, float]]]] = {
    "granted and out between two scrapes": ("_x10 1x80", throughout(10, 90, 1)),
    "granted before, and the range is longer than the series": ("_x10 0x9 1x70", throughout(20, 90, 1)),
    "seen by one scrape alone": ("_x90 1", {90: 1}),
    "out in both lives of the service": (
        "_x10 0x3 1x9 stale _x5 0x9 1x50",
        {**throughout(14, 23, 1), **throughout(24, 39, 1), **throughout(40, 90, 2)},
    ),
    "granted, and never out": ("_x10 0x80", {}),
}
"""Numbers of scrapes; the range is 120 of them."""


@only_with(POSSIBLE)
@pytest.mark.parametrize("trial", TENANT_TRIALS)
def test_tenant_appears_on_the_dashboard_from_its_first_quarantine(trial: str, tmp_path: Path) -> None:
    values, expected = TENANT_TRIALS[trial]
    series = {f"scrubber_tenant_quarantines_total{_TENANT}": values}
    labels = '{tenant="team-x"}'
    assert promtool_result(f"round({panel_query(TENANTS)})", series, expected, labels, 91, tmp_path) == ""


@only_with(POSSIBLE)
def test_tenant_quarantines_before_the_time_range_are_not_counted(tmp_path: Path) -> None:
    series = {f"scrubber_tenant_quarantines_total{_TENANT}": "_x2 1x200"}
    expected = throughout(2, 121, 1)
    assert promtool_result(f"round({panel_query(TENANTS)})", series, expected, '{tenant="team-x"}', 130, tmp_path) == ""


@only_with(POSSIBLE)
@pytest.mark.parametrize(
    ("calls", "answers", "expected"),
    [
        ("_x10 1x20", "1x30", {10: 4.0} | throughout(11, 30, 0)),
        ("_x10 1x4 stale _x5 2x9", "1x14 0x5 1x10", {10: 4.0} | throughout(11, 14, 0) | throughout(22, 30, 0)),
        ("_x10 5x4 3x15", "1x30", {10: 20.0} | throughout(11, 14, 0) | {15: 12.0} | throughout(16, 30, 0)),
    ],
    ids=["the first of its code", "no earlier samples after an interval without answers", "a restarted service"],
)
def test_calls_per_minute_include_the_first_failure_of_a_series(
    calls: str, answers: str, expected: Mapping[int, float], tmp_path: Path
) -> None:
    series = {f"scrubber_rpc_duration_seconds_count{_CALL}": calls, f"up{{{_TARGET}}}": answers}
    assert promtool_result(panel_query(CALLS), series, expected, '{code="UNAVAILABLE"}', 31, tmp_path) == ""


@only_with(POSSIBLE)
@pytest.mark.parametrize(
    ("uses", "answers", "expected"),
    [
        ("0x9 1x20", "1x30", throughout(1, 30, 0) | {10: 1}),
        ("0x9 1x4 stale _x5 0 2x9", "1x14 0x5 1x10", throughout(1, 14, 0) | {10: 1} | throughout(22, 30, 0) | {22: 2}),
        ("0x9 1x4 0x4 1x11", "1x30", throughout(1, 30, 0) | {10: 1, 20: 1}),
    ],
    ids=["once", "a service that was away", "in each of two lives of the service"],
)
def test_single_unauthorized_use_appears_in_one_bar(
    uses: str, answers: str, expected: Mapping[int, float], tmp_path: Path
) -> None:
    series = {
        f'scrubber_unauthorized_uses_total{{{_TARGET},use="unauthorized-process"}}': uses,
        f"up{{{_TARGET}}}": answers,
    }
    assert promtool_result(panel_query(WRONG, 1), series, expected, "{}", 31, tmp_path) == ""


@only_with(POSSIBLE)
def test_scrub_duration_includes_the_first_scrub_of_a_series(tmp_path: Path) -> None:
    series = {
        f'scrubber_scrub_duration_seconds_bucket{{{_SCRUB},le="{bound}"}}': f"_x10 {count}x20"
        for bound, count in (("60", 0), ("120", 1), ("+Inf", 1))
    } | {f"up{{{_TARGET}}}": "1x30"}
    median = throughout(10, 13, 90.0)
    assert promtool_result(f"{panel_query(HOW_LONG)} > 0", series, median, '{path="slow"}', 31, tmp_path) == ""


@only_with(POSSIBLE)
def test_hand_over_wait_includes_the_first_refusal_of_a_series(tmp_path: Path) -> None:
    refused = f'{_TARGET},path="none",outcome="scrubbing"'
    series = {
        f'scrubber_handover_duration_seconds_bucket{{{refused},le="{bound}"}}': f"_x10 {count}x20"
        for bound, count in (("20", 0), ("25", 1), ("+Inf", 1))
    } | {f"up{{{_TARGET}}}": "1x30"}
    answers = throughout(10, 13, 24.95)
    assert promtool_result(f"{panel_query(WAIT)} > 0", series, answers, "{}", 31, tmp_path) == ""


@only_with(POSSIBLE)
def test_old_counts_do_not_appear_as_new_after_a_failed_scrape(tmp_path: Path) -> None:
    series = {
        f'scrubber_scrub_duration_seconds_bucket{{{_SCRUB},le="{bound}"}}': f"{count}x9 stale {count}x20"
        for bound, count in (("60", 0), ("120", 7), ("+Inf", 7))
    } | {f"up{{{_TARGET}}}": "1x9 0 1x20"}
    assert promtool_result(f"{panel_query(HOW_LONG)} > 0", series, {}, '{path="slow"}', 31, tmp_path) == ""


# -- marks of what changed ---------------------------------------------------------------------------------------------

_OTHER_NODE: Final = 'job="scrubber",instance="b"'

MARK_TRIALS: Final[Mapping[str, tuple[str, Series, Mapping[int, float], str]]] = {
    "a new digest of a policy is marked once, a restart and a new node are not": (
        "Policies",
        {
            f'scrubber_policy_info{{{_TARGET},policy="p",digest="1"}}': "1x20 stale",
            f'scrubber_policy_info{{{_TARGET},policy="p",digest="2"}}': "_x21 1x9 stale _x4 1x30",
            f'scrubber_policy_info{{{_OTHER_NODE},policy="p",digest="3"}}': "_x30 1x30",
        },
        {21: 1},
        '{policy="p",digest="2"}',
    ),
    "a new driver is marked once": (
        "Versions and drivers",
        {
            f'scrubber_build_info{{{_TARGET},version="1",backend="b",driver="570"}}': "1x20 stale",
            f'scrubber_build_info{{{_TARGET},version="1",backend="b",driver="580"}}': "_x25 1x30",
        },
        {25: 1},
        '{version="1",driver="580"}',
    ),
    "a service that starts again is marked once": (
        "Service restarts",
        {f"scrubber_ledger_commit_duration_seconds_count{{{_TARGET}}}": "100+1x20 1+1x30"},
        {21: 1},
        "{}",
    ),
    "a quarantine by an operator is marked once, and by a fault is not": (
        "Quarantines by operators",
        {
            f'scrubber_quarantine_start_timestamp_seconds{{{_TARGET},device="d",cause_class="operator"}}': "_x10 149x30",
            f'scrubber_quarantine_start_timestamp_seconds{{{_TARGET},device="e",cause_class="xid"}}': "_x20 299x20",
        },
        {10: 1},
        "{}",
    ),
}


@only_with(POSSIBLE)
@pytest.mark.parametrize("trial", MARK_TRIALS)
def test_change_is_marked_on_the_graphs(trial: str, tmp_path: Path) -> None:
    name, series, expected, labels = MARK_TRIALS[trial]
    (query,) = (each.query for each in ANNOTATIONS if each.name == name)
    values = {
        "cluster": ".*",
        "job": ".+",
        "instance": ".+",
        "__interval": f"{SCRAPE}s",
        "__interval_ms": f"{SCRAPE * 1000}",
    }
    query = re.sub(r"\$(\w+)", lambda found: values[found[1]], query)
    assert promtool_result(query, series, expected, labels, 50, tmp_path) == ""


# -- the affected metrics ----------------------------------------------------------------------------------------------


def born_counting() -> set[str]:
    """Return the counters and histograms without any series on the page of an idle daemon."""
    registry, plugin = CollectorRegistry(), CollectorRegistry()
    MetricsRecorder(registry, NVIDIA_SIGNALS)
    PluginMetrics(plugin, dict)
    names = set()
    for family in (*registry.collect(), *plugin.collect()):
        if family.type in {"counter", "histogram"} and not family.samples:
            names.add(family.name + "_total" * (family.type == "counter"))
    return names


def zeros(registry: CollectorRegistry) -> set[str]:
    return {sample.name for family in registry.collect() for sample in family.samples if sample.value == 0}


def test_list_of_counters_not_initialized_at_zero_is_complete() -> None:
    """Counters of a device, and the plugin's of a resource, do not exist before there is one, and start at 0 then."""
    of_a_resource = {
        each for each in born_counting() if each.startswith("scrubber_plugin_") and each.endswith("_total")
    }
    registry, measures = CollectorRegistry(), Measures()
    PluginMetrics(registry, dict).on_registration_status("gpu.example/gpu", False)
    assert of_a_resource <= zeros(registry)
    measures.show(shown())
    of_a_device = born_counting() & zeros(measures.registry)
    assert of_a_device
    assert born_counting() - of_a_resource - of_a_device == NOT_INITIALIZED_AT_ZERO


def test_queries_of_counters_not_initialized_at_zero_include_new_series() -> None:
    """Queries that add new series separately are excepted."""
    moved = re.compile(r"\b(?:rate|increase)\((scrubber_\w+?)(?:_bucket|_count|_sum)?\{")
    for board in DashboardName:
        document = json.loads((ROOT / "dashboards" / f"{board}.json").read_text())
        for panel in document["panels"]:
            for target in panel.get("targets", ()):
                for name in NOT_INITIALIZED_AT_ZERO & set(moved.findall(target["expr"])):
                    assert re.search(rf"{name}\w*\{{[^}}]*\}}(?:\[\$__range\]\))? unless ", target["expr"]), (
                        panel["title"],
                        name,
                    )
