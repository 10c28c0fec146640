"""The page for Prometheus, in both of its formats, within 20 ms for 256 devices.

The client library formats each series again at each scrape, label by label. So metrics that are replaced as a whole are
rendered here (:class:`SnapshotMetric`), and the library renders the rest, including histograms with exemplars.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from scrubber.observability.metrics.create import create_family
from scrubber.observability.registry.metric_declaration import MetricDeclaration, MetricType

__all__ = ["MetricGroup", "MetricsPage", "Series", "SnapshotMetric"]

_END: Final = b"# EOF\n"
_FAMILY: Final = CONTENT_TYPE_LATEST.partition(";")[0]


class _LibraryCollector(Collector):
    """The library's metrics as one collector, without the unused ``_created`` series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric

    describe = collect


class MetricsPage:
    """Assembles the page.

    Args:
        registry: receives all metrics of the page as well, for other ways of collection.

    Attributes:
        library_registry: registry of the library's own metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.library_registry = CollectorRegistry()
        self._library_collector = _LibraryCollector(self.library_registry)
        self._registry = registry
        self._groups: list[MetricGroup] = []

    def add_group(self, group: MetricGroup) -> None:
        """Add ``group`` to the page."""
        self._registry.register(group)
        self._groups.append(group)

    def register_library_metrics(self) -> None:
        """Register :attr:`library_registry`, once every metric of the library has been created in it."""
        self._registry.register(self._library_collector)

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Return content type and bytes, in the format that the ``Accept`` header requests."""
        encode, kind = choose_encoder(accept)
        page: bytes = encode(self._library_collector)
        openmetrics = kind.startswith(_FAMILY)
        parts = "".join(each.render(openmetrics=openmetrics) for each in self._groups).encode(errors="replace")
        return kind, page.removesuffix(_END) + parts + (_END if openmetrics else b"")

    def __call__(
        self, environ: dict[str, Any], start: Callable[[str, Sequence[tuple[str, str]]], object]
    ) -> Iterable[bytes]:
        """Serve the page as a WSGI application, uncompressed: on loopback, compression costs more than it saves."""
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
    """One gauge or counter.

    Attributes:
        series: values by label values. Never modified in place: it is replaced by a new mapping.
    """

    def __init__(self, declared: MetricDeclaration) -> None:
        self._declared = declared
        self.series: Series = {}
        self._rendered: tuple[Series, str] = ({}, "")

    def set(self, value: float | None) -> None:
        """Set the value of a metric without labels; None removes it."""
        self.series = {} if value is None else {(): value}

    def family(self, *, empty: bool = False) -> Metric:
        """Return the metric as the client library's type."""
        family = create_family(self._declared)
        for values, value in () if empty else self.series.items():
            family.add_metric(values, value)
        return family

    def render(self, *, openmetrics: bool) -> str:
        """Return the text for a page; the two formats differ only in the header."""
        series = self.series
        if self._rendered[0] != series:
            self._rendered = (series, "".join(self._lines(series)))
        counter = self._declared.type is MetricType.COUNTER
        name = self._declared.name.removesuffix("_total") if openmetrics and counter else self._declared.name
        return f"# HELP {name} {self._declared.help}\n# TYPE {name} {self._declared.type}\n{self._rendered[1]}"

    def _lines(self, series: Series) -> Iterator[str]:
        name, labels = self._declared.name, self._declared.label_names
        for values, value in series.items():
            pairs = ",".join(
                f'{label}="{label_value.translate(_ESCAPED)}"'
                for label, label_value in zip(labels, values, strict=True)
            )
            number: str = floatToGoString(value)  # type: ignore[no-untyped-call]
            yield f"{name}{{{pairs}}} {number}\n" if pairs else f"{name} {number}\n"


class MetricGroup(Collector):
    """Metrics that are updated together at a scrape.

    Args:
        refresh: updates the series of ``members``. Called by the thread of the scrape, so it must only read.
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
        """Return the text of all members for a page."""
        with self._lock:
            self._refresh()
            return "".join(member.render(openmetrics=openmetrics) for member in self._members)
