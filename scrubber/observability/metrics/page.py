"""The page that Prometheus reads, in both of its formats, within 20 ms for 256 devices.

The client library writes each series anew on each scrape, label by label. So what is replaced as a whole writes itself
(:mod:`scrubber.observability.metrics.page`), and the library writes the rest, the histograms with their exemplars among it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

__all__ = ["MetricGroup", "MetricsPage", "Series", "SnapshotMetric"]

_END: Final = b"# EOF\n"
_FAMILY: Final = CONTENT_TYPE_LATEST.partition(";")[0]


class _LibraryCollector(Collector):
    """What the library counts, as one collector, without the times at which it made each series: nobody asks for them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric

    describe = collect


class MetricsPage:
    """Puts the page together.

    Args:
        registry: everything that is on the page is in here as well, for whoever collects in another way.

    Attributes:
        library_registry: where the library's own metrics are made.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.library_registry = CollectorRegistry()
        self._library_collector = _LibraryCollector(self.library_registry)
        self._registry = registry
        self._groups: list[MetricGroup] = []

    def add_group(self, group: MetricGroup) -> None:
        """Have ``group`` on the page from now on."""
        self._registry.register(group)
        self._groups.append(group)

    def register_library_metrics(self) -> None:
        """Every metric that the library counts has been made in :attr:`library_registry`."""
        self._registry.register(self._library_collector)

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and bytes, in the format that the header ``Accept`` asks for."""
        encode, kind = choose_encoder(accept)
        page: bytes = encode(self._library_collector)
        openmetrics = kind.startswith(_FAMILY)
        parts = "".join(each.render(openmetrics=openmetrics) for each in self._groups).encode(errors="replace")
        return kind, page.removesuffix(_END) + parts + (_END if openmetrics else b"")

    def __call__(
        self, environ: dict[str, Any], start: Callable[[str, Sequence[tuple[str, str]]], object]
    ) -> Iterable[bytes]:
        """The page as a WSGI application. It is not compressed: on loopback that costs more than it saves."""
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            start("405 Method Not Allowed", [("Allow", "GET, HEAD")])
            return [b""]
        if environ.get("PATH_INFO") == "/favicon.ico":
            start("200 OK", [])
            return [b""]
        kind, page = self.render(environ.get("HTTP_ACCEPT", ""))
        start("200 OK", [("Content-Type", kind), ("Content-Length", str(len(page)))])
        return [page if environ["REQUEST_METHOD"] == "GET" else b""]


Series: TypeAlias = Mapping[tuple[str, ...], float]

_ESCAPED: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class SnapshotMetric:
    """One metric: a gauge, or a counter, whose ``name`` then comes without ``_total``.

    Attributes:
        series: what is shown, by the values of the labels. Never changed in place: a new mapping takes its place.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, counter: bool = False) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._counter = counter
        self.series: Series = {}
        self._rendered: tuple[Series, str] = ({}, "")

    def set(self, value: float | None) -> None:
        """The value of a metric without labels; None takes it away."""
        self.series = {} if value is None else {(): value}

    def family(self, *, empty: bool = False) -> Metric:
        """As the client library has it."""
        kind = CounterMetricFamily if self._counter else GaugeMetricFamily
        family: CounterMetricFamily | GaugeMetricFamily = kind(self._name, self._text, labels=self._labels)
        for values, value in () if empty else self.series.items():
            family.add_metric(values, value)
        return family

    def render(self, *, openmetrics: bool) -> str:
        """As it stands on a page; the two formats differ in the head only."""
        series = self.series
        if self._rendered[0] != series:
            self._rendered = (series, "".join(self._lines(series)))
        name = self._name if openmetrics or not self._counter else f"{self._name}_total"
        kind = "counter" if self._counter else "gauge"
        return f"# HELP {name} {self._text}\n# TYPE {name} {kind}\n{self._rendered[1]}"

    def _lines(self, series: Series) -> Iterator[str]:
        name = f"{self._name}_total" if self._counter else self._name
        for values, value in series.items():
            pairs = ",".join(
                f'{label}="{said.translate(_ESCAPED)}"' for label, said in zip(self._labels, values, strict=True)
            )
            number: str = floatToGoString(value)  # type: ignore[no-untyped-call]
            yield f"{name}{{{pairs}}} {number}\n" if pairs else f"{name} {number}\n"


class MetricGroup(Collector):
    """Metrics that are looked up together when somebody scrapes.

    Args:
        refresh: brings the series of ``members`` up to date. Called by the thread that scrapes, so it only looks.
    """

    def __init__(self, members: Iterable[SnapshotMetric], refresh: Callable[[], None]) -> None:
        self._members = tuple(members)
        self._refresh = refresh
        self._lock = threading.Lock()

    def describe(self) -> Iterator[Metric]:
        for member in self._members:
            yield member.family(empty=True)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            self._refresh()
            families = [member.family() for member in self._members]
        yield from families

    def render(self, *, openmetrics: bool) -> str:
        """All members, as they stand on a page."""
        with self._lock:
            self._refresh()
            return "".join(member.render(openmetrics=openmetrics) for member in self._members)
