"""The page that Prometheus reads, in both of its formats, within 20 ms for 256 devices.

The client library writes each series anew on each scrape, label by label. So what is replaced as a whole writes itself
(:mod:`scrubber.adapters.journal.present`), and the library writes the rest, the histograms with their exemplars among it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from scrubber.adapters.journal.present import Group

__all__ = ["Page"]

_END: Final = b"# EOF\n"
_FAMILY: Final = CONTENT_TYPE_LATEST.partition(";")[0]


class _Counted(Collector):
    """What the library counts, as one collector, without the times at which it made each series: nobody asks for them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric

    describe = collect


class Page:
    """Puts the page together.

    Args:
        registry: everything that is on the page is in here as well, for whoever collects in another way.

    Attributes:
        counted: where the library's own metrics are made.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counted = CollectorRegistry()
        self._all_counted = _Counted(self.counted)
        self._registry = registry
        self._groups: list[Group] = []

    def show(self, group: Group) -> None:
        """Have ``group`` on the page from now on."""
        self._registry.register(group)
        self._groups.append(group)

    def complete(self) -> None:
        """Every metric that the library counts has been made in :attr:`counted`."""
        self._registry.register(self._all_counted)

    def written(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and bytes, in the format that the header ``Accept`` asks for."""
        encode, kind = choose_encoder(accept)
        page: bytes = encode(self._all_counted)
        openmetrics = kind.startswith(_FAMILY)
        parts = "".join(each.page(openmetrics=openmetrics) for each in self._groups).encode(errors="replace")
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
        kind, page = self.written(environ.get("HTTP_ACCEPT", ""))
        start("200 OK", [("Content-Type", kind), ("Content-Length", str(len(page)))])
        return [page if environ["REQUEST_METHOD"] == "GET" else b""]
