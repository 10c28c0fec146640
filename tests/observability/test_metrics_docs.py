"""docs/metrics.md lists every metric of both daemons with its type and its labels, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from plugin.metrics import PluginMetrics
from scrubber.observability.metrics.labels import BUCKETS
from tests.measures import Measures
from tests.observability.test_metrics_page import flood

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(scrubber_\w+)` \| (\w+) \|(.*?)\| (.+) \|$", re.MULTILINE)


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Return name → type and labels, as documented. Labels are in backticks; their values are not."""
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in ROW.findall(PAGE)}


def registries() -> Mapping[str, CollectorRegistry]:
    plugin = CollectorRegistry()
    PluginMetrics(plugin, dict)
    return {"service": Measures().registry, "plugin": plugin}


def live() -> dict[str, tuple[str, str]]:
    """Return name → type and help text, as the daemons expose them."""
    families = (family for registry in registries().values() for family in registry.collect())
    return {
        family.name + ("_total" if family.type == "counter" else ""): (family.type, family.documentation)
        for family in families
    }


def test_metrics_page_lists_exactly_the_exported_metrics() -> None:
    assert documented().keys() == live().keys()
    assert len(ROW.findall(PAGE)) == len(documented())


@pytest.mark.parametrize("name", sorted(documented()))
def test_metric_type_and_help_match_the_metrics_page(name: str) -> None:
    kind, sentence = live()[name]
    row = next(each for each in ROW.findall(PAGE) if each[0] == name)
    assert (row[1], row[3]) == (kind, sentence)


def test_service_metric_labels_match_the_metrics_page() -> None:
    told = Measures()
    flood(told, devices=2, tenants=2)
    for family in told.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        found = {frozenset(sample.labels.keys() - {"le"}) for sample in family.samples}
        assert found in ({documented()[name][1]}, set()), name


def test_histogram_buckets_match_the_metrics_page() -> None:
    (listed,) = re.findall(r"have the bounds ([^s]+) s;", PAGE)
    assert tuple(float(number) for number in re.findall(r"[\d.]+", listed)) == BUCKETS


@pytest.mark.parametrize("name", sorted(live()))
def test_metric_names_follow_prometheus_conventions(name: str) -> None:
    kind, _ = live()[name]
    assert name.endswith("_total") == (kind == "counter")
    assert not re.search(r"_(ms|milliseconds|percent|kb|mb|minutes)(_|$)", name)


@pytest.mark.parametrize("name", sorted(documented()))
def test_no_metric_uses_a_label_of_the_scraper(name: str) -> None:
    assert not documented()[name][1] & {"namespace", "pod", "container", "instance", "job"}
