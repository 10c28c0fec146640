"""docs/metrics.md names every metric of both daemons with its type and its labels, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from plugin.metrics import Metrics as PluginMetrics
from scrubber.observability.metrics.labels import BUCKETS
from tests.measures import Measures
from tests.observability.test_metrics_written import flood

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(scrubber_\w+)` \| (\w+) \|(.*?)\| (.+) \|$", re.MULTILINE)


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Name → type and labels, as the page has them. Labels stand in backticks; words that they take do not."""
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in ROW.findall(PAGE)}


def registries() -> Mapping[str, CollectorRegistry]:
    plugin = CollectorRegistry()
    PluginMetrics(plugin, dict)
    return {"service": Measures().registry, "plugin": plugin}


def live() -> dict[str, tuple[str, str]]:
    """Name → type and sentence, as the daemons have them."""
    families = (family for registry in registries().values() for family in registry.collect())
    return {
        family.name + ("_total" if family.type == "counter" else ""): (family.type, family.documentation)
        for family in families
    }


def test_every_metric_is_on_the_page_and_nothing_else() -> None:
    assert documented().keys() == live().keys()
    assert len(ROW.findall(PAGE)) == len(documented())


@pytest.mark.parametrize("name", sorted(documented()))
def test_the_page_says_what_the_metric_says_of_itself(name: str) -> None:
    kind, sentence = live()[name]
    row = next(each for each in ROW.findall(PAGE) if each[0] == name)
    assert (row[1], row[3]) == (kind, sentence)


def test_the_labels_of_the_service_are_those_on_the_page() -> None:
    told = Measures()
    flood(told, devices=2, tenants=2)
    for family in told.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        found = {frozenset(sample.labels.keys() - {"le"}) for sample in family.samples}
        assert found in ({documented()[name][1]}, set()), name


def test_the_bounds_of_histograms_are_those_on_the_page() -> None:
    (listed,) = re.findall(r"have the bounds ([^s]+) s;", PAGE)
    assert tuple(float(number) for number in re.findall(r"[\d.]+", listed)) == BUCKETS


@pytest.mark.parametrize("name", sorted(live()))
def test_no_name_breaks_the_conventions(name: str) -> None:
    kind, _ = live()[name]
    assert name.endswith("_total") == (kind == "counter")
    assert not re.search(r"_(ms|milliseconds|percent|kb|mb|minutes)(_|$)", name)


@pytest.mark.parametrize("name", sorted(documented()))
def test_no_label_is_the_scrapers(name: str) -> None:
    assert not documented()[name][1] & {"namespace", "pod", "container", "instance", "job"}
