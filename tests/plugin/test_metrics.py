"""The plugin's metrics: names, limits on cardinality, and series that exist from the start."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.kubelet.registration import RegistrationEnd
from plugin.metrics import MAX_RESOURCES, PluginMetrics
from plugin.observers import NullObserver
from scrubber import __version__
from scrubber.domain.codes import ErrorCode
from scrubber.observability.metrics.labels import REFUSAL_CODES
from scrubber.observability.registry.plugin_metrics import PLUGIN_METRICS

GPU = "nvidia.com/gpu"

CONTRACT = {
    f"{each.name}{suffix}": {*each.label_names, *(("le",) if suffix == "_bucket" else ())}
    for each in PLUGIN_METRICS
    for suffix in (("_count", "_sum", "_bucket") if each.buckets else ("",))
}
"""Name → labels: the interface for dashboards and rules."""

MOST_SERIES = 4500
"""An upper bound for any input; a plugin of one resource has about 250."""


class ScrapedMetrics:
    """Metrics, and what a scrape of them returns."""

    def __init__(self) -> None:
        self.lists: dict[str, AdvertisedDevices] = {}
        self._registry = CollectorRegistry()
        self.metrics = PluginMetrics(self._registry, lambda: self.lists)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(name, labels)

    def series(self) -> dict[str, set[frozenset[tuple[str, str]]]]:
        """Return name → sets of labels."""
        found: dict[str, set[frozenset[tuple[str, str]]]] = {}
        for family in self._registry.collect():
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    found.setdefault(sample.name, set()).add(frozenset(sample.labels.items()))
        return found


@pytest.fixture
def scraped() -> ScrapedMetrics:
    return ScrapedMetrics()


def offer(number: int, *, healthy: bool) -> AdvertisedDevice:
    word = ServiceVerdict.ADVERTISED if healthy else ServiceVerdict.UNKNOWN
    return AdvertisedDevice(id=f"gpu-{number}", index=str(number), verdict=word, healthy=healthy)


async def advertised(*health: bool) -> AdvertisedDevices:
    shown = AdvertisedDevices()
    await shown.update(tuple(offer(number, healthy=each) for number, each in enumerate(health)), "first")
    return shown


async def test_metric_names_and_labels_match_the_declared_ones(scraped: ScrapedMetrics) -> None:
    scraped.lists[GPU] = await advertised(True)
    scraped.metrics.on_registration_status(GPU, registered=True)
    scraped.metrics.on_call_finished("Allocate", "OK", 0.1)
    found = {name: {frozenset(dict(each)) for each in labels} for name, labels in scraped.series().items()}
    assert found == {name: {frozenset(labels)} for name, labels in CONTRACT.items()}


def test_build_info_names_the_version(scraped: ScrapedMetrics) -> None:
    ((labels,),) = [scraped.series()["scrubber_plugin_build_info"]]
    assert dict(labels)["version"] == __version__


def test_service_outage_is_counted_once_however_often_the_service_is_missed(scraped: ScrapedMetrics) -> None:
    for up in (False, False, True, True, False, False, True, False):
        scraped.metrics.on_service_status(up)
    assert scraped("scrubber_plugin_service_outages_total") == 2
    assert scraped("scrubber_plugin_service_up") == 0


def test_service_that_never_connected_counts_no_outage(scraped: ScrapedMetrics) -> None:
    scraped.metrics.on_service_status(False)
    assert scraped("scrubber_plugin_service_outages_total") == 0


def test_counters_and_gauges_are_zero_from_the_start(scraped: ScrapedMetrics) -> None:
    scraped.metrics.on_registration_status(GPU, registered=False)
    assert scraped("scrubber_plugin_handover_refusals_total", code="scrubbing") == 0
    assert scraped("scrubber_plugin_cluster_writes_total", kind="eviction", outcome="failed") == 0
    assert scraped("scrubber_plugin_registrations_total", resource=GPU, mode="classic", outcome="refused") == 0
    assert scraped("scrubber_plugin_registered", resource=GPU) == 0
    assert scraped("scrubber_plugin_listandwatch_streams", resource=GPU) == 0
    assert scraped("scrubber_plugin_listandwatch_updates_total", resource=GPU) == 0
    for over in RegistrationEnd:
        assert scraped("scrubber_plugin_registration_ends_total", resource=GPU, reason=over.label) == 0


def test_registration_end_labels_match_the_alerting_rules() -> None:
    assert {over.label for over in RegistrationEnd} == {
        "stream-ended",
        "no-stream",
        "socket-removed",
        "kubelet-restarted",
        "watcher-did-not-call",
    }


def test_open_streams_are_counted(scraped: ScrapedMetrics) -> None:
    for opened in (True, True, False):
        scraped.metrics.on_stream_status(GPU, opened)
    assert scraped("scrubber_plugin_listandwatch_streams", resource=GPU) == 1


async def test_devices_and_shares_are_counted_when_the_metrics_are_scraped(scraped: ScrapedMetrics) -> None:
    scraped.lists[GPU] = shown = await advertised(True, True, False)
    assert scraped("scrubber_plugin_devices", resource=GPU, health="healthy") == 2
    assert scraped("scrubber_plugin_devices", resource=GPU, health="unhealthy") == 1
    await shown.update((offer(0, healthy=False),), "first")
    assert scraped("scrubber_plugin_devices", resource=GPU, health="healthy") == 0
    assert scraped("scrubber_plugin_devices", resource=GPU, health="unhealthy") == 1


def test_every_refusal_code_of_the_service_has_a_series_in_the_plugin(scraped: ScrapedMetrics) -> None:
    shown = {dict(each)["code"] for each in scraped.series()["scrubber_plugin_handover_refusals_total"]}
    assert shown >= REFUSAL_CODES


def test_unknown_label_values_are_counted_as_other(scraped: ScrapedMetrics) -> None:
    scraped.metrics.on_start_refused("made-up")
    scraped.metrics.on_call_finished("Steal", "LUCKY", 1.0)
    scraped.metrics.on_cluster_write("poem", ok=True)
    assert scraped("scrubber_plugin_handover_refusals_total", code="other") == 1
    assert scraped("scrubber_plugin_rpc_duration_seconds_count", method="other", code="other") == 1
    assert scraped("scrubber_plugin_cluster_writes_total", kind="other", outcome="ok") == 1


def test_number_of_resource_labels_is_bounded(scraped: ScrapedMetrics) -> None:
    for number in range(MAX_RESOURCES + 40):
        scraped.metrics.on_registration_status(f"vendor.example/gpu-{number}", registered=True)
    shown = {dict(each)["resource"] for each in scraped.series()["scrubber_plugin_registered"]}
    assert len(shown) == MAX_RESOURCES + 1
    assert "other" in shown


async def test_devices_of_resources_above_the_limit_are_counted_together(scraped: ScrapedMetrics) -> None:
    for number in range(MAX_RESOURCES + 2):
        name = f"vendor.example/gpu-{number}"
        scraped.metrics.on_registration_status(name, registered=False)
        scraped.lists[name] = await advertised(True, False)
    assert scraped("scrubber_plugin_devices", resource="vendor.example/gpu-0", health="healthy") == 1
    assert scraped("scrubber_plugin_devices", resource="other", health="healthy") == 2


words = st.text(max_size=30) | st.sampled_from([GPU, "watcher", "ok", "Allocate", "OK", "event", "scrubbing", "other"])
calls = st.one_of(
    st.tuples(st.just("on_start_refused"), words),
    st.tuples(st.just("on_registration_status"), words, st.booleans()),
    st.tuples(st.just("on_registration_attempt"), words, words, words),
    st.tuples(st.just("on_registration_end"), words, words),
    st.tuples(st.just("on_stream_status"), words, st.booleans()),
    st.tuples(st.just("on_list_sent"), words),
    st.tuples(st.just("on_call_finished"), words, words, st.floats(0, 1e6)),
    st.tuples(st.just("on_cluster_write"), words, st.booleans()),
    st.tuples(st.just("on_service_status"), st.booleans()),
)


@given(st.lists(calls, max_size=60))
def test_no_observation_raises_an_error_or_creates_an_unknown_label_value(happened: list[tuple[str, object]]) -> None:
    scraped = ScrapedMetrics()
    for name, *facts in happened:
        getattr(scraped.metrics, name)(*facts)
        assert getattr(NullObserver(), name)(*facts) is None
    series = scraped.series()
    for name, labels in series.items():
        if "code" in CONTRACT[name] and "method" not in CONTRACT[name]:
            assert len(labels) == len(ErrorCode) + 1  # and "other"
    methods = {dict(each)["method"] for each in series.get("scrubber_plugin_rpc_duration_seconds_count", set())}
    assert methods <= {"Allocate", "other"}


def test_number_of_series_stays_below_the_documented_maximum() -> None:
    scraped = ScrapedMetrics()
    for resource in map(str, range(2 * MAX_RESOURCES)):
        scraped.lists[resource] = AdvertisedDevices()
        scraped.metrics.on_registration_status(resource, registered=True)
        for way in ("watcher", "classic", "x"):
            for outcome in ("ok", "refused", "failed", "x"):
                scraped.metrics.on_registration_attempt(resource, way, outcome)
        for over in [*(each.label for each in RegistrationEnd), "x"]:
            scraped.metrics.on_registration_end(resource, over)
    kubelets = ("GetDevicePluginOptions", "GetPreferredAllocation", "Allocate", "PreStartContainer")
    for method in (*kubelets, "GetInfo", "NotifyRegistrationStatus", "x"):
        for code in [*(each.name for each in grpc.StatusCode), "x"]:
            scraped.metrics.on_call_finished(method, code, 1.0)
    for what in ("event", "condition", "label", "eviction", "x"):
        scraped.metrics.on_cluster_write(what, ok=True)
    number = sum(map(len, scraped.series().values()))
    assert 2000 < number <= MOST_SERIES


def test_every_grpc_status_code_is_a_known_label_value(scraped: ScrapedMetrics) -> None:
    for code in grpc.StatusCode:
        scraped.metrics.on_call_finished("Allocate", code.name, 0.1)
    shown = {dict(each)["code"] for each in scraped.series()["scrubber_plugin_rpc_duration_seconds_count"]}
    assert shown == {code.name for code in grpc.StatusCode}
