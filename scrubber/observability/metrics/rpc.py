"""Calls on the service's sockets: their durations, and the open streams."""

from __future__ import annotations

from collections import Counter as Counts
from typing import Final

import grpc

from scrubber.observability.metrics.create import create_histogram
from scrubber.observability.metrics.labels import OTHER, bounded_label, non_negative_number
from scrubber.observability.metrics.page import MetricsPage, SnapshotMetric
from scrubber.observability.registry import service_metrics as declared

__all__ = ["MAX_CALL_SERIES", "MAX_STREAM_SERIES", "RpcMetrics"]

MAX_CALL_SERIES: Final = 128
"""Limit of combinations of method and status: the service has some twenty methods. Further ones are counted together.
"""
MAX_STREAM_SERIES: Final = 16
"""The same for streams."""

_CODES = frozenset(each.name for each in grpc.StatusCode)


class RpcMetrics:
    """Metrics of calls that :class:`scrubber.api.interceptor.ApiInterceptor` reports.

    Attributes:
        streams: number of open streams.
    """

    def __init__(self, page: MetricsPage) -> None:
        self._duration = create_histogram(declared.RPC_DURATION, page.library_registry)
        self.streams = SnapshotMetric(declared.RPC_STREAMS)
        self._open: Counts[tuple[str, str]] = Counts()
        self._call_labels: set[tuple[str, str, str]] = set()

    def on_call_finished(self, method: str, code: str, seconds: float) -> None:
        """Observe a call: ``method`` as in gRPC (``/scrubber.v1.Read/ListDevices``), ``code`` by name (``OK``)."""
        labels = (*_split_method(method), bounded_label(_CODES, code))
        if len(self._call_labels) < MAX_CALL_SERIES:
            self._call_labels.add(labels)
        labels = labels if labels in self._call_labels else (OTHER, OTHER, OTHER)
        self._duration.labels(*labels).observe(non_negative_number(seconds) or 0.0)

    def on_open_streams_changed(self, method: str, change: int) -> None:
        """Count a stream that was opened (1) or has ended (-1)."""
        labels = _split_method(method)
        labels = labels if labels in self._open or len(self._open) < MAX_STREAM_SERIES else (OTHER, OTHER)
        self._open[labels] += change
        self.streams.series = {labels: float(max(0, many)) for labels, many in self._open.items()}


def _split_method(method: str) -> tuple[str, str]:
    service, _, name = method.strip("/").rpartition("/")
    return service, name
