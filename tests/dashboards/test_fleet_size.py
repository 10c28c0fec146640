"""A fleet of many nodes: no panel shows a row for each of them, and the rules add few series for each.

Prometheus' own engine evaluates the queries, in promtool, over artificial scrapes of more nodes and devices than any panel
may show.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml
from prometheus_client import CollectorRegistry

from dashboards.dashboard import DashboardName
from dashboards.queries import MAX_NODES, MAX_ROWS
from plugin.metrics import PluginMetrics
from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.observability.metrics.recorder import MetricsRecorder
from scrubber.observability.registry.service_metrics import HANDOVER_DURATION
from tests.dashboards.prometheus import POSSIBLE, promtool
from tests.pods import only_with

ROOT: Final = Path(__file__).parents[2]
NODES: Final = 120
DEVICES: Final = 2
MAX_SERIES: Final = 100
"""Rows of a table, or series of a graph."""
SICK: Final = 7
"""The node whose ledger fails."""

RECORDED_PER_NODE: Final = 50
"""The budget of recorded series for a node with two devices."""
SERVICE_SERIES: Final = 800
PLUGIN_SERIES: Final = 250

_NOW: Final = "30m"
_VALUES: Final = {
    "cluster": ".*",
    "job": ".+",
    "instance": ".+",
    "__range": "20m",
    "__rate_interval": "5m",
    "__interval": "1m",
    "__interval_ms": "60000",
}


def queries(board: DashboardName) -> Iterator[tuple[str, str, str]]:
    """Yield (panel, number of the query, query) as Grafana would send it for all nodes."""
    document = json.loads((ROOT / "dashboards" / f"{board}.json").read_text())
    for panel in document["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["refId"], re.sub(r"\$(\w+)", lambda found: _VALUES[found[1]], target["expr"])


def fleet() -> dict[str, str]:
    """Return series of a fleet in which every node has every problem that a table shows."""
    series: dict[str, str] = {}
    for number in range(NODES):
        node = f'instance="node-{number}"'
        service, plugin = f'job="scrubber",{node}', f'job="scrubber-plugin",{node}'
        ok = int(number != SICK)
        series |= {
            f"up{{{service}}}": "1x40",
            f"up{{{plugin}}}": "1x40",
            f'scrubber_build_info{{{service},version="1",backend="sim",driver="1"}}': "1x40",
            f"scrubber_ledger_ok{{{service}}}": f"{ok}x40",
            f'scrubber_plugin_registered{{{plugin},resource="gpu"}}': "1x40",
            f"scrubber_handovers_waiting{{{service}}}": "0x40",
            f"scrubber_audit_intact{{{service}}}": "1x40",
            f"scrubber_audit_verified_timestamp_seconds{{{service}}}": f"{number}x40",
            f"scrubber_audit_head_sequence{{{service}}}": f"{1000 + number}x40",
            f'scrubber_audit_head_hash{{{service},part="0"}}': f"{number}x40",
            f'scrubber_signing_key_info{{{service},key_id="k{number}"}}': "1x40",
            f'scrubber_breaker_open{{{service},breaker="resets"}}': "1x40",
            f'scrubber_yield_start_timestamp_seconds{{{service},requester="operator"}}': "0x40",
            f'scrubber_tenant_quarantines_total{{{service},tenant="team-{number}"}}': "0x20 1x20",
            f'scrubber_policy_info{{{service},policy="default",digest="0"}}': "1x40",
            f"scrubber_policy_rejected{{{service}}}": "0x40",
            f'ALERTS{{alertname="ScrubberX",alertstate="firing",severity="info",{service}}}': "1x40",
            f'ALERTS_FOR_STATE{{alertname="ScrubberX",severity="info",{service}}}': "0x40",
        }
        for device in range(DEVICES):
            one = f'{service},device="GPU-{number}-{device}"'
            series |= {
                f'scrubber_device_state{{{one},hygiene="dirty",health="quarantined"}}': "1x40",
                f'scrubber_device_info{{{one},index="{device}",model="m"}}': "1x40",
                f"scrubber_device_advertised{{{one}}}": "0x40",
                f'scrubber_quarantine_start_timestamp_seconds{{{one},cause_class="xid",recovery_method="reset"}}': "0x40",
                f"scrubber_break_glass_expiry_timestamp_seconds{{{one}}}": "9000x40",
                f'scrubber_device_held_start_timestamp_seconds{{{one},code="unknown-holder",holder=""}}': "0x40",
                f"scrubber_clear_rate_bytes_per_second{{{one}}}": "1000x40",
                f'scrubber_unauthorized_uses_total{{{one},use="unauthorized-process"}}': "0x20 1x20",
            }
    return series


def failures(tests: list[dict[str, Any]], into: Path) -> str:
    """Return promtool's report of the expectations that the fleet does not meet."""
    document = {
        "rule_files": [str(ROOT / "dashboards" / "rules" / "recording.yaml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in fleet().items()],
                "promql_expr_test": [{"eval_time": _NOW, **each} for each in tests],
            }
        ],
    }
    (into / "fleet.yaml").write_text(yaml.safe_dump(document))
    done = promtool("test", "rules", into / "fleet.yaml")
    return "" if done.returncode == 0 else done.stdout


def has(count: int, query: str) -> dict[str, Any]:
    return {"expr": f"count({query})", "exp_samples": [{"labels": "{}", "value": count}]}


@only_with(POSSIBLE)
def test_no_query_of_a_large_fleet_returns_a_row_for_each_node_or_device(tmp_path: Path) -> None:
    every = [query for _, _, query in queries(DashboardName.FLEET)]
    every += [query for title, _, query in queries(DashboardName.NODE) if title.startswith("Device ")]
    assert failures([{"expr": f"count({each}) > {MAX_SERIES}", "exp_samples": []} for each in every], tmp_path) == ""


@only_with(POSSIBLE)
def test_tables_of_a_large_fleet_show_the_same_nodes_in_every_column_and_the_sick_one_among_them(
    tmp_path: Path,
) -> None:
    found = {(title, ref): query for title, ref, query in queries(DashboardName.FLEET)}
    complete = ("A", "B", "C", "D", "G", "H")  # hand-overs are the other two; no container starts here
    tests = [has(MAX_ROWS, found["Node overview", ref]) for ref in complete if ref != "H"]
    tests += [
        has(MAX_ROWS, f"({found['Node overview', ref]}) and on (instance) ({found['Node overview', 'A']})")
        for ref in complete
    ]
    tests += [
        has(MAX_ROWS, f"({found['Audit log', ref]}) and on (instance) ({found['Audit log', 'A']})") for ref in "ABCDE"
    ]
    tests += [
        has(MAX_ROWS, found[title, "A"]) for title in ("Devices out of service", "Circuit breakers", "Yielded nodes")
    ]
    sick = [{"labels": f'{{instance="node-{SICK}"}}', "value": 0}]
    tests.append({"expr": f"({found['Node overview', 'G']}) == 0", "exp_samples": sick})
    assert failures(tests, tmp_path) == ""


@only_with(POSSIBLE)
def test_node_dashboard_with_every_node_selected_shows_the_devices_of_some(tmp_path: Path) -> None:
    found = {(title, ref): query for title, ref, query in queries(DashboardName.NODE)}
    tests = [has(MAX_NODES * DEVICES, found[title, "A"]) for title in ("Device states over time", "Device overview")]
    assert failures(tests, tmp_path) == ""


# -- the budget of series (docs/metrics.md) ----------------------------------------------------------------------------


@only_with(POSSIBLE)
def test_rules_add_no_more_series_for_a_node_than_their_budget(tmp_path: Path) -> None:
    recorded = '{__name__=~".+:scrubber_.+"}'
    # promtool has no memory for the histograms of so many nodes: one value for each bucket, and their quantiles.
    others = RECORDED_PER_NODE - len(HANDOVER_DURATION.buckets) - 1 - 3
    assert failures([{"expr": f"count({recorded}) > {NODES * others}", "exp_samples": []}], tmp_path) == ""


def test_daemons_without_devices_have_no_more_series_than_their_budget() -> None:
    service, plugin = CollectorRegistry(), CollectorRegistry()
    MetricsRecorder(service, NVIDIA_SIGNALS)
    PluginMetrics(plugin, dict).on_registration_status("nvidia.com/gpu", True)
    for registry, budget in ((service, SERVICE_SERIES), (plugin, PLUGIN_SERIES)):
        assert 50 < sum(len(family.samples) for family in registry.collect()) <= budget


def test_page_on_metrics_states_the_budgets() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    section = page.partition("## Number of series")[2].partition("\n## ")[0]
    for budget in (SERVICE_SERIES, PLUGIN_SERIES, RECORDED_PER_NODE):
        assert f" {budget} " in section, budget
