"""The registry has every metric of both daemons with its type, help, labels and buckets, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from plugin.kubelet.registration import RegistrationEnd, RegistrationMode
from plugin.metrics import PluginMetrics
from scrubber.observability.registry import plugin_metrics
from scrubber.observability.registry.metric_declaration import MetricDeclaration, MetricType
from scrubber.observability.registry.plugin_metrics import PLUGIN_METRICS
from scrubber.observability.registry.service_metrics import SERVICE_METRICS
from tests.measures import Measures
from tests.observability.test_metrics_page import flood

DECLARED = {each.name: each for each in (*SERVICE_METRICS, *PLUGIN_METRICS)}
MODULES = {"service": "service_metrics.py", "plugin": "plugin_metrics.py"}


def name_of(family: Metric) -> str:
    return family.name + ("_total" if family.type == "counter" else "")


def plugin_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    PluginMetrics(registry, dict)
    return registry


def flooded() -> CollectorRegistry:
    """Return the service's metrics after every label had every value, and undefined ones."""
    measures = Measures()
    flood(measures, devices=2, tenants=2)
    return measures.registry


REGISTRIES: Mapping[str, CollectorRegistry] = {"service": Measures().registry, "plugin": plugin_registry()}
EXPORTED: Mapping[str, Metric] = {
    name_of(family): family for registry in REGISTRIES.values() for family in registry.collect()
}
"""The metrics as the daemons expose them, by name."""


@pytest.mark.parametrize(
    ("component", "declared"),
    [("service", SERVICE_METRICS), ("plugin", PLUGIN_METRICS)],
)
def test_daemon_exports_exactly_its_declared_metrics(component: str, declared: tuple[MetricDeclaration, ...]) -> None:
    place = f"scrubber/observability/registry/{MODULES[component]}"
    exported, names = {name_of(family) for family in REGISTRIES[component].collect()}, {each.name for each in declared}
    assert exported - names == set(), f"declare these metrics in {place}, and run python scripts/gen_reference.py"
    assert names - exported == set(), f"no module creates these metrics: remove them from {place}"


def test_no_two_metrics_have_the_same_name() -> None:
    assert len(DECLARED) == len(SERVICE_METRICS) + len(PLUGIN_METRICS)


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_metric_is_exported_with_its_declared_type_and_help(name: str) -> None:
    assert (EXPORTED[name].type, EXPORTED[name].documentation) == (DECLARED[name].type, DECLARED[name].help)


def test_service_metrics_have_their_declared_labels_and_values() -> None:
    for family in flooded().collect():
        declared = DECLARED[name_of(family)]
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(declared.label_names), declared.name
            for label in declared.labels:
                if label.values:
                    assert sample.labels[label.name] in {*label.values, "other"}, (declared.name, sample)


def test_registration_labels_are_the_modes_and_ends_of_the_plugin() -> None:
    modes = {RegistrationMode.WATCHER, RegistrationMode.CLASSIC}
    assert set(plugin_metrics.REGISTRATIONS.label_values("mode")) == {str(each) for each in modes}
    assert set(plugin_metrics.REGISTRATION_ENDS.label_values("reason")) == {each.label for each in RegistrationEnd}


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_metric_name_follows_prometheus_conventions(name: str) -> None:
    declared = DECLARED[name]
    assert name.endswith("_total") == (declared.type is MetricType.COUNTER)
    assert bool(declared.buckets) == (declared.type is MetricType.HISTOGRAM)
    assert not re.search(r"_(ms|milliseconds|percent|kb|mb|minutes)(_|$)", name)


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_no_metric_uses_a_label_of_the_scraper(name: str) -> None:
    assert not set(DECLARED[name].label_names) & {"namespace", "pod", "container", "instance", "job"}


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_help_of_a_metric_fits_a_table_cell(name: str) -> None:
    assert DECLARED[name].help.endswith(".")
    assert not set(DECLARED[name].help) & {"|", "\n", "\\"}
