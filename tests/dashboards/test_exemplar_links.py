"""Exemplars lead to the trace and to the log lines of one scrub, by labels that the service writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from scrubber.observability.metrics.labels import exemplar

ROOT: Final = Path(__file__).resolve().parents[2]
LABELS: Final = exemplar("scrub-1", "ab" * 16)
LOG_QUERY: Final = '{namespace="scrubber-system"} | json | scrub_id="scrub-1"'
TYPES: Final = ROOT / "dashboards" / "types"


def provisioned() -> dict[str, dict[str, Any]]:
    """Return the settings of each data source by its uid, as Grafana reads them."""
    text = (ROOT / "dashboards" / "datasources.yaml").read_text(encoding="utf-8").replace("$$", "$")
    return {each["uid"]: each for each in yaml.safe_load(text)["datasources"]}


def destination(label: str) -> dict[str, str]:
    found: list[dict[str, str]] = provisioned()["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    (one,) = (each for each in found if each["name"] == label)
    return one


def test_every_label_of_an_exemplar_has_a_destination() -> None:
    assert LABELS is not None
    found = provisioned()["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert [each["name"] for each in found] == sorted(LABELS, reverse=True)


def test_trace_id_of_an_exemplar_leads_to_the_tracing_backend() -> None:
    assert provisioned()[destination("trace_id")["datasourceUid"]]["type"] == "tempo"


def test_scrub_id_of_an_exemplar_leads_to_its_log_lines() -> None:
    link = urlsplit(destination("scrub_id")["url"].replace("${__value.raw}", "scrub-1"))
    (panes,) = parse_qs(link.query)["panes"]
    (pane,) = json.loads(panes).values()
    (query,) = pane["queries"]
    assert link.path == "/explore"
    assert provisioned()[pane["datasource"]]["type"] == query["datasource"]["type"] == "loki"
    assert query["expr"] == LOG_QUERY


def test_log_query_is_the_documented_one() -> None:
    runbooks = (ROOT / "docs" / "runbooks" / "README.md").read_text(encoding="utf-8")
    documented = re.findall(r"^(\{namespace=.* \| scrub_id=)", runbooks, re.MULTILINE)
    assert set(documented) == {LOG_QUERY.removesuffix('"scrub-1"')}


def test_traces_and_log_lines_lead_to_each_other() -> None:
    sources = provisioned()
    logs, (field,) = sources["tempo"]["jsonData"]["tracesToLogsV2"], sources["loki"]["jsonData"]["derivedFields"]
    assert sources[logs["datasourceUid"]]["type"] == "loki"
    assert sources[field["datasourceUid"]]["type"] == "tempo"
    line = json.dumps({"event": "handover.granted", "trace_id": "ab" * 16})
    found = re.search(field["matcherRegex"], line)
    assert found is not None
    assert found[1] == "ab" * 16


@pytest.mark.parametrize("title", ["Hand-over wait", "Scrub duration", "Slow-path step duration, p95"])
def test_graph_of_a_histogram_with_exemplars_requests_them(title: str) -> None:
    board = json.loads((ROOT / "dashboards" / "node.json").read_text(encoding="utf-8"))
    (panel,) = (each for each in board["panels"] if each.get("title") == title)
    assert any(target["exemplar"] for target in panel["targets"])


def test_lock_file_of_the_type_check_names_no_registry_and_both_schemas() -> None:
    packages = json.loads((TYPES / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert not [name for name, package in packages.items() if "resolved" in package]
    schemas = {name: each["version"].split(".")[0] for name, each in packages.items() if "grafana-schema-" in name}
    assert schemas == {f"node_modules/grafana-schema-{major}": major for major in ("11", "12")}
