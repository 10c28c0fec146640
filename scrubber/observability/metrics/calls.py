"""Calls on the service's sockets: how long they took, and which streams are open."""

from __future__ import annotations

from collections import Counter as Counts
from typing import Final

import grpc
from prometheus_client import Histogram

from scrubber.observability.metrics.labels import BUCKETS, OTHER, measured, one_of
from scrubber.observability.metrics.page import Page, Present

__all__ = ["MOST_ANSWERS", "MOST_STREAMS", "CallMetrics"]

MOST_ANSWERS: Final = 128
"""Methods with a status each that are told apart: the service serves some twenty methods. Further ones are one."""
MOST_STREAMS: Final = 16
"""The same for streams."""

_CODES = frozenset(each.name for each in grpc.StatusCode)


class CallMetrics:
    """What :class:`scrubber.api.answering.Answering` tells of.

    Attributes:
        streams: those that are open.
    """

    def __init__(self, page: Page) -> None:
        self._duration = Histogram(
            "scrubber_rpc_duration_seconds",
            "How long calls on the service's sockets took; streams that only follow are not among them.",
            ("service", "method", "code"),
            buckets=BUCKETS,
            registry=page.counted,
        )
        self.streams = Present(
            "scrubber_rpc_streams", "Streams that follow the service and are open now.", ("service", "method")
        )
        self._open: Counts[tuple[str, str]] = Counts()
        self._answers: set[tuple[str, str, str]] = set()

    def answered(self, method: str, code: str, seconds: float) -> None:
        """``method`` as gRPC writes it (``/scrubber.v1.Read/ListDevices``), ``code`` as gRPC calls it (``OK``)."""
        labels = (*_named(method), one_of(_CODES, code))
        if len(self._answers) < MOST_ANSWERS:
            self._answers.add(labels)
        labels = labels if labels in self._answers else (OTHER, OTHER, OTHER)
        self._duration.labels(*labels).observe(measured(seconds) or 0.0)

    def following(self, method: str, change: int) -> None:
        """A stream was opened (1), or is over (-1)."""
        labels = _named(method)
        labels = labels if labels in self._open or len(self._open) < MOST_STREAMS else (OTHER, OTHER)
        self._open[labels] += change
        self.streams.series = {labels: float(max(0, many)) for labels, many in self._open.items()}


def _named(method: str) -> tuple[str, str]:
    service, _, name = method.strip("/").rpartition("/")
    return service, name
