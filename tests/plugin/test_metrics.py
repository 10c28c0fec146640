"""What the plugin's metrics make of what its parts tell: names, bounds, and series that are there from the start."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from plugin.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.kubelet import Over
from plugin.metrics import MOST_RESOURCES, Metrics
from plugin.observing import Nobody
from scrubber import __version__
from scrubber.domain.codes import ErrorCode
from scrubber.observability.metrics.labels import REFUSALS

GPU = "nvidia.com/gpu"

CONTRACT = {
    "scrubber_plugin_build_info": {"version", "python"},
    "scrubber_plugin_service_up": set(),
    "scrubber_plugin_service_outages_total": set(),
    "scrubber_plugin_log_lines_lost_total": set(),
    "scrubber_plugin_registrations_total": {"resource", "way", "outcome"},
    "scrubber_plugin_registered": {"resource"},
    "scrubber_plugin_registration_ends_total": {"resource", "why"},
    "scrubber_plugin_streams": {"resource"},
    "scrubber_plugin_lists_sent_total": {"resource"},
    "scrubber_plugin_devices": {"resource", "health"},
    "scrubber_plugin_rpc_duration_seconds_count": {"method", "code"},
    "scrubber_plugin_rpc_duration_seconds_sum": {"method", "code"},
    "scrubber_plugin_rpc_duration_seconds_bucket": {"method", "code", "le"},
    "scrubber_plugin_gate_refusals_total": {"code"},
    "scrubber_plugin_cluster_writes_total": {"what", "outcome"},
}
"""Name → labels: what boards, rules and docs/metrics.md are written with."""

MOST_SERIES = 4500
"""Whatever is told; a plugin of one resource has about 250."""


class Told:
    """Metrics, and what a scrape of them shows."""

    def __init__(self) -> None:
        self.lists: dict[str, AdvertisedDevices] = {}
        self._registry = CollectorRegistry()
        self.metrics = Metrics(self._registry, lambda: self.lists)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(name, labels)

    def series(self) -> dict[str, set[frozenset[tuple[str, str]]]]:
        """Name → sets of labels."""
        found: dict[str, set[frozenset[tuple[str, str]]]] = {}
        for family in self._registry.collect():
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    found.setdefault(sample.name, set()).add(frozenset(sample.labels.items()))
        return found


@pytest.fixture
def told() -> Told:
    return Told()


def offer(number: int, *, healthy: bool) -> AdvertisedDevice:
    word = ServiceVerdict.OFFERED if healthy else ServiceVerdict.NONE
    return AdvertisedDevice(id=f"gpu-{number}", index=str(number), verdict=word, healthy=healthy)


async def advertised(*health: bool) -> AdvertisedDevices:
    shown = AdvertisedDevices()
    await shown.show(tuple(offer(number, healthy=each) for number, each in enumerate(health)), "first")
    return shown


async def test_names_and_labels_are_those_of_the_contract(told: Told) -> None:
    told.lists[GPU] = await advertised(True)
    told.metrics.registered(GPU, now=True)
    told.metrics.answered("Allocate", "OK", 0.1)
    found = {name: {frozenset(dict(each)) for each in labels} for name, labels in told.series().items()}
    assert found == {name: {frozenset(labels)} for name, labels in CONTRACT.items()}


def test_the_build_says_what_it_is(told: Told) -> None:
    ((labels,),) = [told.series()["scrubber_plugin_build_info"]]
    assert dict(labels)["version"] == __version__


def test_a_service_that_goes_away_is_counted_once_however_often_it_is_missed(told: Told) -> None:
    for up in (False, False, True, True, False, False, True, False):
        told.metrics.service(up)
    assert told("scrubber_plugin_service_outages_total") == 2
    assert told("scrubber_plugin_service_up") == 0


def test_a_service_that_was_never_there_has_not_gone_away(told: Told) -> None:
    told.metrics.service(False)
    assert told("scrubber_plugin_service_outages_total") == 0


def test_what_has_not_happened_yet_is_a_zero_from_the_start(told: Told) -> None:
    told.metrics.registered(GPU, now=False)
    assert told("scrubber_plugin_gate_refusals_total", code="scrubbing") == 0
    assert told("scrubber_plugin_cluster_writes_total", what="eviction", outcome="failed") == 0
    assert told("scrubber_plugin_registrations_total", resource=GPU, way="classic", outcome="refused") == 0
    assert told("scrubber_plugin_registered", resource=GPU) == 0
    assert told("scrubber_plugin_streams", resource=GPU) == 0
    assert told("scrubber_plugin_lists_sent_total", resource=GPU) == 0
    for over in Over:
        assert told("scrubber_plugin_registration_ends_total", resource=GPU, why=over.word) == 0


def test_the_ends_of_a_registration_have_the_names_that_rules_ask_for() -> None:
    assert {over.word for over in Over} == {"stream-ended", "no-stream", "socket-removed", "kubelet-anew", "unheard"}


def test_streams_that_are_open_are_counted(told: Told) -> None:
    for opened in (True, True, False):
        told.metrics.stream(GPU, opened)
    assert told("scrubber_plugin_streams", resource=GPU) == 1


async def test_devices_are_counted_when_they_are_asked_for_and_shares_each(told: Told) -> None:
    told.lists[GPU] = shown = await advertised(True, True, False)
    assert told("scrubber_plugin_devices", resource=GPU, health="healthy") == 2
    assert told("scrubber_plugin_devices", resource=GPU, health="unhealthy") == 1
    await shown.show((offer(0, healthy=False),), "first")
    assert told("scrubber_plugin_devices", resource=GPU, health="healthy") == 0
    assert told("scrubber_plugin_devices", resource=GPU, health="unhealthy") == 1


def test_every_code_that_the_service_counts_is_known_here(told: Told) -> None:
    shown = {dict(each)["code"] for each in told.series()["scrubber_plugin_gate_refusals_total"]}
    assert shown >= REFUSALS


def test_what_nobody_knows_is_other(told: Told) -> None:
    told.metrics.refused("made-up")
    told.metrics.answered("Steal", "LUCKY", 1.0)
    told.metrics.wrote("poem", ok=True)
    assert told("scrubber_plugin_gate_refusals_total", code="other") == 1
    assert told("scrubber_plugin_rpc_duration_seconds_count", method="other", code="other") == 1
    assert told("scrubber_plugin_cluster_writes_total", what="other", outcome="ok") == 1


def test_a_vendors_plugin_cannot_make_resources_without_end(told: Told) -> None:
    for number in range(MOST_RESOURCES + 40):
        told.metrics.registered(f"vendor.example/gpu-{number}", now=True)
    shown = {dict(each)["resource"] for each in told.series()["scrubber_plugin_registered"]}
    assert len(shown) == MOST_RESOURCES + 1
    assert "other" in shown


async def test_of_more_resources_the_rest_is_counted_together(told: Told) -> None:
    for number in range(MOST_RESOURCES + 2):
        name = f"vendor.example/gpu-{number}"
        told.metrics.registered(name, now=False)
        told.lists[name] = await advertised(True, False)
    assert told("scrubber_plugin_devices", resource="vendor.example/gpu-0", health="healthy") == 1
    assert told("scrubber_plugin_devices", resource="other", health="healthy") == 2


words = st.text(max_size=30) | st.sampled_from([GPU, "watcher", "ok", "Allocate", "OK", "event", "scrubbing", "other"])
calls = st.one_of(
    st.tuples(st.just("refused"), words),
    st.tuples(st.just("registered"), words, st.booleans()),
    st.tuples(st.just("attempted"), words, words, words),
    st.tuples(st.just("ended"), words, words),
    st.tuples(st.just("stream"), words, st.booleans()),
    st.tuples(st.just("listed"), words),
    st.tuples(st.just("answered"), words, words, st.floats(0, 1e6)),
    st.tuples(st.just("wrote"), words, st.booleans()),
    st.tuples(st.just("service"), st.booleans()),
)


@given(st.lists(calls, max_size=60))
def test_whatever_is_told_nothing_is_raised_and_no_label_is_made_up(happened: list[tuple[str, object]]) -> None:
    told = Told()
    for name, *facts in happened:
        getattr(told.metrics, name)(*facts)
        assert getattr(Nobody(), name)(*facts) is None
    series = told.series()
    for name, labels in series.items():
        if "code" in CONTRACT[name] and "method" not in CONTRACT[name]:
            assert len(labels) == len(ErrorCode) + 1  # and other
    methods = {dict(each)["method"] for each in series.get("scrubber_plugin_rpc_duration_seconds_count", set())}
    assert methods <= {"Allocate", "other"}


def test_the_series_are_fewer_than_the_page_says_at_the_worst() -> None:
    told = Told()
    for resource in map(str, range(2 * MOST_RESOURCES)):
        told.lists[resource] = AdvertisedDevices()
        told.metrics.registered(resource, now=True)
        for way in ("watcher", "classic", "x"):
            for outcome in ("ok", "refused", "failed", "x"):
                told.metrics.attempted(resource, way, outcome)
        for over in [*(each.word for each in Over), "x"]:
            told.metrics.ended(resource, over)
    kubelets = ("GetDevicePluginOptions", "GetPreferredAllocation", "Allocate", "PreStartContainer")
    for method in (*kubelets, "GetInfo", "NotifyRegistrationStatus", "x"):
        for code in [*(each.name for each in grpc.StatusCode), "x"]:
            told.metrics.answered(method, code, 1.0)
    for what in ("event", "condition", "label", "eviction", "x"):
        told.metrics.wrote(what, ok=True)
    number = sum(map(len, told.series().values()))
    assert 2000 < number <= MOST_SERIES


def test_every_status_of_grpcs_is_known_by_its_name(told: Told) -> None:
    for code in grpc.StatusCode:
        told.metrics.answered("Allocate", code.name, 0.1)
    shown = {dict(each)["code"] for each in told.series()["scrubber_plugin_rpc_duration_seconds_count"]}
    assert shown == {code.name for code in grpc.StatusCode}
