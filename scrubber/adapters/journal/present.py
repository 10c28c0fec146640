"""What is so at present: metrics whose series are replaced together, so that a scrape never sees half of a change.

On a node of many devices nearly all series are of this kind, and the client library writes each anew on each scrape, label by
label. So these write themselves, and keep what they wrote for as long as it holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

__all__ = ["Group", "Present", "Series"]

Series: TypeAlias = Mapping[tuple[str, ...], float]

_ESCAPED: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Present:
    """One metric: a gauge, or a counter, whose ``name`` then comes without ``_total``.

    Attributes:
        series: what is shown, by the values of the labels. Never changed in place: a new mapping takes its place.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, counter: bool = False) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._counter = counter
        self.series: Series = {}
        self._written: tuple[Series, str] = ({}, "")

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

    def page(self, *, openmetrics: bool) -> str:
        """As it stands on a page; the two formats differ in the head only."""
        series = self.series
        if self._written[0] != series:
            self._written = (series, "".join(self._lines(series)))
        name = self._name if openmetrics or not self._counter else f"{self._name}_total"
        kind = "counter" if self._counter else "gauge"
        return f"# HELP {name} {self._text}\n# TYPE {name} {kind}\n{self._written[1]}"

    def _lines(self, series: Series) -> Iterator[str]:
        name = f"{self._name}_total" if self._counter else self._name
        for values, value in series.items():
            pairs = ",".join(
                f'{label}="{said.translate(_ESCAPED)}"' for label, said in zip(self._labels, values, strict=True)
            )
            number: str = floatToGoString(value)  # type: ignore[no-untyped-call]
            yield f"{name}{{{pairs}}} {number}\n" if pairs else f"{name} {number}\n"


class Group(Collector):
    """Metrics that are looked up together when somebody scrapes.

    Args:
        look: brings the series of ``members`` up to date. Called by the thread that scrapes, so it only looks.
    """

    def __init__(self, members: Iterable[Present], look: Callable[[], None]) -> None:
        self._members = tuple(members)
        self._look = look
        self._lock = threading.Lock()

    def describe(self) -> Iterator[Metric]:
        for member in self._members:
            yield member.family(empty=True)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            self._look()
            families = [member.family() for member in self._members]
        yield from families

    def page(self, *, openmetrics: bool) -> str:
        """All members, as they stand on a page."""
        with self._lock:
            self._look()
            return "".join(member.page(openmetrics=openmetrics) for member in self._members)
