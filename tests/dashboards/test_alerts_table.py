"""The dashboards' table of alerts shows every alert that fires, with any labels that its rule leaves.

Here Prometheus' own engine evaluates the rules over artificial scrapes; ``test_panels.py`` tests that an alert of the
real scenario is in the table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.dashboards.prometheus import POSSIBLE, promtool
from tests.pods import only_with

DASHBOARDS: Final = Path(__file__).parents[2] / "dashboards"
RULES: Final = [str(DASHBOARDS / "rules" / name) for name in ("recording.yaml", "alerts.yaml")]

AWAY: Final = {'up{job="scrubber",instance="a"}': "1x19 0x41", 'up{job="scrubber-plugin",instance="a"}': "1x60"}
NO_PLUGIN: Final = {'up{job="scrubber",instance="a"}': "1x60"}
WAITS: Final = {
    **AWAY,
    'up{job="scrubber",instance="a"}': "1x60",
    'scrubber_quarantine_start_timestamp_seconds{job="scrubber",instance="a",device="GPU-1",cause_class="xid",recovery_method="reboot"}': (
        "_x20 600x40"
    ),
}
TENANT: Final = {
    **AWAY,
    'up{job="scrubber",instance="a"}': "1x60",
    'scrubber_tenant_quarantines_total{job="scrubber",instance="a",tenant="team-x"}': "0x19 3x41",
}
USED: Final = {
    **AWAY,
    'up{job="scrubber",instance="a"}': "1x60",
    'scrubber_unauthorized_uses_total{job="scrubber",instance="a",device="GPU-1",use="unauthorized-process"}': "0x19 1x41",
}


def table_query(board: str, *, job: str, instance: str, cluster: str = ".*") -> str:
    """Return the table's query, as Grafana would send it."""
    document = json.loads((DASHBOARDS / f"{board}.json").read_text())
    (panel,) = (each for each in document["panels"] if each["title"] == "Alerts")
    (target,) = panel["targets"]
    expr: str = target["expr"]
    return expr.replace("$cluster", cluster).replace("$job", job).replace("$instance", instance)


def promtool_result(series: dict[str, str], query: str, rows: list[tuple[str, float]], into: Path) -> str:
    """Return promtool's result for the assertion that the table has exactly these rows after half an hour."""
    samples = [{"labels": labels, "value": value} for labels, value in rows]
    test: dict[str, Any] = {
        "interval": "30s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": "29m", "exp_samples": samples}],
    }
    path = into / "table.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "rule_files": RULES,
                "evaluation_interval": "30s",
                "group_eval_order": ["scrubber.recording", "scrubber.alerts"],
                "tests": [test],
            }
        )
    )
    done = promtool("test", "rules", path)
    return "" if done.returncode == 0 else done.stdout


@only_with(POSSIBLE)
@pytest.mark.parametrize("board", ["fleet", "node"])
@pytest.mark.parametrize(
    ("series", "instance", "row"),
    [
        pytest.param(AWAY, "a", '{alertname="ScrubberServiceDown",severity="critical",instance="a"}', id="no job"),
        pytest.param(NO_PLUGIN, "a", '{alertname="ScrubberPluginDown",severity="critical"}', id="of no node"),
        pytest.param(
            TENANT,
            "a",
            '{alertname="ScrubberTenantCausesQuarantines",severity="warning",about="team-x"}',
            id="of a tenant",
        ),
        pytest.param(
            WAITS,
            ".+",
            '{alertname="ScrubberDeviceNeedsOperator",severity="warning",instance="a",device="GPU-1",about="xid"}',
            id="of a device",
        ),
        pytest.param(
            USED,
            "(a|b)",
            '{alertname="ScrubberUnauthorizedUse",severity="critical",instance="a",device="GPU-1",about="unauthorized-process"}',
            id="of a use",
        ),
    ],
)
def test_alert_table_shows_a_firing_alert_with_its_labels_and_duration(
    board: str, series: dict[str, str], instance: str, row: str, tmp_path: Path
) -> None:
    since = 0 if series is NO_PLUGIN else 600
    query = table_query(board, job="scrubber", instance=instance)
    assert promtool_result(series, query, [(row, 29 * 60 - since)], tmp_path) == ""


@only_with(POSSIBLE)
def test_alert_table_omits_alerts_of_nodes_that_are_not_selected(tmp_path: Path) -> None:
    assert promtool_result(AWAY, table_query("node", job=".+", instance="b"), [], tmp_path) == ""


@only_with(POSSIBLE)
def test_alert_table_omits_pending_alerts(tmp_path: Path) -> None:
    soon = {'up{job="scrubber",instance="a"}': "1x56 0x4", 'up{job="scrubber-plugin",instance="a"}': "1x60"}
    assert promtool_result(soon, table_query("node", job=".+", instance="a"), [], tmp_path) == ""


def in_clusters(*names: str) -> dict[str, str]:
    """Return the scrapes of clusters in which a node ``a`` has lost its service."""
    return {series[:-1] + f',cluster="{name}"}}': values for name in names for series, values in AWAY.items()}


@only_with(POSSIBLE)
@pytest.mark.parametrize(("cluster", "shown"), [(".*", ["east", "west"]), ("west", ["west"])])
def test_alert_table_shows_a_node_of_each_selected_cluster_that_has_its_name(
    cluster: str, shown: list[str], tmp_path: Path
) -> None:
    rows = [
        (f'{{alertname="ScrubberServiceDown",severity="critical",cluster="{name}",instance="a"}}', 29.0 * 60 - 600)
        for name in shown
    ]
    query = table_query("fleet", job=".+", instance=".+", cluster=cluster)
    assert promtool_result(in_clusters("east", "west"), query, rows, tmp_path) == ""
