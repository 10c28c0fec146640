"""Two clusters in one Prometheus, whose nodes have the same names: neither changes the alerts of the other.

Thanos and Mimir show series of several Prometheus servers in this way, with the external label ``cluster`` of each.
``dashboards/rules/tests`` tests the rules on series without that label, as in the Prometheus of a single cluster.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, Final

import promql_parser as promql
import pytest
import yaml

from dashboards.__main__ import main
from dashboards.cluster_label import parse_label, rename_in_promql
from dashboards.dashboard import DashboardName
from scripts.gen_rules import RULES, prometheus_files
from tests.dashboards.prometheus import POSSIBLE, promtool
from tests.pods import only_with

ROOT: Final = Path(__file__).parents[2]
TRIALS: Final = sorted((RULES / "tests").glob("*.yaml"))
LABEL: Final = "site"

Json = dict[str, Any]

_OUTPUT = re.compile(r"\b(ALERTS|[a-z_]+:scrubber_[a-z0-9_]+:[a-z0-9_]+)(\{)?")
_VARIABLES: Final = {
    "$__rate_interval": "5m",
    "$__range": "6h",
    "$__interval_ms": "15000",
    "$__interval": "15s",
}


def in_cluster(series: list[Json], cluster: str) -> list[Json]:
    return [each | {"series": each["series"].replace("{", f'{{cluster="{cluster}",', 1)} for each in series]


def of_west(text: str) -> str:
    """Return a test's query for the results of the cluster ``west`` only."""
    return _OUTPUT.sub(lambda found: f'{found[1]}{{cluster="west"' + ("," if found[2] else "}"), text)


def value_tests(case: Json) -> Json:
    """Return a test of values, with its expected results in the cluster ``west``."""
    samples = case["exp_samples"]
    if not re.match(r"count\b", case["expr"]):
        samples = [each | {"labels": re.sub(r"\{(?=.)", '{cluster="west",', each["labels"])} for each in samples]
    return case | {"expr": of_west(case["expr"]), "exp_samples": samples}


def alert_test(case: Json) -> Json:
    """Return a test of an alert as one of its series in the cluster ``west``.

    An alert that a daemon is missing everywhere has the job that ``absent()`` names; of one cluster it has none.
    """
    expected = [
        {name: value for name, value in each["exp_labels"].items() if name != "job"} for each in case["exp_alerts"]
    ]
    by = ", ".join(sorted({name for labels in expected for name in labels}))
    alert = f'ALERTS{{cluster="west",alertname="{case["alertname"]}",alertstate="firing"}}'
    samples = [
        {"labels": "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}", "value": 1}
        for labels in expected
    ]
    return {"expr": f"group by ({by}) ({alert})", "eval_time": case["eval_time"], "exp_samples": samples}


def beside(test: Json, other: Json) -> Json:
    """Return a test in the cluster ``west``, with the series of another one in the cluster ``east``."""
    return {
        "interval": test["interval"],
        "name": f"{test['name']} | {other['name']}",
        "input_series": in_cluster(test["input_series"], "west") + in_cluster(other["input_series"], "east"),
        "promql_expr_test": [
            *map(value_tests, test.get("promql_expr_test", [])),
            *map(alert_test, test.get("alert_rule_test", [])),
        ],
    }


def next_test(tests: list[Json], number: int) -> Json:
    """Return the next test with the same times; the test itself if it is the only one."""
    others = [*tests[number + 1 :], *tests[: number + 1]]
    return next(each for each in others if each["interval"] == tests[number]["interval"])


@only_with(POSSIBLE)
@pytest.mark.parametrize("trial", TRIALS, ids=lambda path: path.stem)
def test_alerts_of_a_cluster_are_the_same_beside_a_cluster_with_nodes_of_the_same_names(
    trial: Path, tmp_path: Path
) -> None:
    document = yaml.safe_load(trial.read_text())
    tests = document["tests"]
    document["tests"] = [beside(test, next_test(tests, number)) for number, test in enumerate(tests)]
    document["rule_files"] = [str(RULES / Path(name).name) for name in document["rule_files"]]
    if document["evaluation_interval"] in {"15s", "30s"}:
        document["evaluation_interval"] = "1m"  # test_rules.py tests at which evaluation an alert fires
    written = tmp_path / trial.name
    written.write_text(yaml.safe_dump(document))
    done = promtool("test", "rules", written)
    assert done.returncode == 0, done.stdout


@only_with(POSSIBLE)
@pytest.mark.parametrize("job", ["scrubber", "scrubber-plugin"])
def test_cluster_that_loses_all_targets_of_a_daemon_fires_an_alert_although_another_cluster_has_some(
    job: str, tmp_path: Path
) -> None:
    """Service discovery that fails removes targets; their ``up`` is then missing, not 0."""
    other = {"scrubber": "scrubber-plugin", "scrubber-plugin": "scrubber"}[job]
    name = {"scrubber": "ScrubberServiceDown", "scrubber-plugin": "ScrubberPluginDown"}[job]
    series = [
        {"series": f'up{{cluster="west",job="{job}",instance="a"}}', "values": "1x20 stale _x60"},
        {"series": f'up{{cluster="west",job="{other}",instance="a"}}', "values": "1x80"},
        {"series": f'up{{cluster="east",job="{job}",instance="a"}}', "values": "1x80"},
        {"series": f'up{{cluster="east",job="{other}",instance="a"}}', "values": "1x80"},
    ]
    alert = f'ALERTS{{alertname="{name}",alertstate="firing",cluster="west",severity="critical"}}'
    test = {
        "interval": "30s",
        "input_series": series,
        "promql_expr_test": [
            {"expr": 'ALERTS{alertstate="firing"}', "eval_time": "12m", "exp_samples": []},
            {"expr": 'ALERTS{alertstate="firing"}', "eval_time": "30m", "exp_samples": [{"labels": alert, "value": 1}]},
        ],
    }
    document = {
        "rule_files": [str(RULES / file) for file in ("recording.yaml", "alerts.yaml")],
        "evaluation_interval": "30s",
        "group_eval_order": ["scrubber.recording", "scrubber.alerts"],
        "tests": [test],
    }
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(document))
    done = promtool("test", "rules", tmp_path / "trial.yaml")
    assert done.returncode == 0, done.stdout


# -- every grouping and every join -------------------------------------------------------------------------------------


def expressions(cluster: str = "cluster") -> list[str]:
    """Return the expressions of all rules."""
    documents = [yaml.safe_load(text) for text in prometheus_files(cluster=cluster).values()]
    return [rule["expr"] for each in documents for group in each["groups"] for rule in group["rules"]]


def board_queries() -> list[str]:
    boards = [json.loads((ROOT / "dashboards" / f"{name}.json").read_text()) for name in DashboardName]
    return [target["expr"] for board in boards for panel in board["panels"] for target in panel.get("targets", ())]


def modifiers(text: str) -> list[list[str]]:
    """Return the labels of each grouping, and of each join, of an expression."""
    for name, value in _VARIABLES.items():
        text = text.replace(name, value)
    found: list[list[str]] = []

    def keep(node: promql.Expr) -> bool:
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            found.append(list(node.modifier.labels))
        if isinstance(node, promql.BinaryExpr) and node.modifier is not None and node.modifier.matching is not None:
            found.append(list(node.modifier.matching.labels))
        return True

    promql.walk(promql.parse(text), keep)
    return found


def test_grouping_and_join_by_node_includes_the_cluster() -> None:
    for text in (*expressions(), *board_queries()):
        for labels in modifiers(text):
            assert "instance" not in labels or "cluster" in labels, text


def test_grouping_in_a_rule_includes_the_cluster() -> None:
    grouped = [labels for text in expressions() for labels in modifiers(text)]
    assert len(grouped) > 50
    assert [labels for labels in grouped if "cluster" not in labels] == []


# -- another name of the label -----------------------------------------------------------------------------------------


def test_rules_can_use_another_cluster_label() -> None:
    texts = "\n".join(prometheus_files(cluster=LABEL).values())
    grouped = [labels for text in expressions(LABEL) for labels in modifiers(text)]
    assert [labels for labels in grouped if LABEL not in labels or "cluster" in labels] == []
    assert "$labels.cluster" not in texts
    assert f"$labels.{LABEL}" in texts
    assert f'{{{LABEL}!=""}}' in texts
    assert "cluster:scrubber_targets:count" in texts


def test_boards_can_use_another_cluster_label(tmp_path: Path) -> None:
    assert main(["--cluster-label", LABEL, "--out", str(tmp_path)]) == 0
    for name in DashboardName:
        text = (tmp_path / f"{name}.json").read_text()
        assert not re.search(r'cluster=~\\"|{{cluster}}|labels\.cluster|"cluster": ', text)
        assert f', {LABEL})"' in text
        assert f'{LABEL}=~\\"$cluster' in text
        renamed = text.replace(LABEL, "cluster")
        committed = (ROOT / "dashboards" / f"{name}.json").read_text()
        assert json.loads(renamed) == json.loads(committed)


def test_word_cluster_in_a_text_is_not_renamed() -> None:
    assert rename_in_promql("in the cluster, by (cluster, job) (cluster:x:y)", "c") == (
        "in the cluster, by (c, job) (cluster:x:y)"
    )


@pytest.mark.parametrize("name", ["instance", "k8s-cluster", "__name__", "", "9"])
def test_label_that_cannot_name_a_cluster_is_refused(name: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="cannot name the label of a cluster"):
        parse_label(name)
