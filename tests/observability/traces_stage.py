"""A tracer whose spans are kept for a test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from scrubber.observability.tracing import OpenTelemetryTracer

__all__ = ["RESOURCE", "Sent", "attributes_of", "id_of", "trace_of"]

RESOURCE = {"service.name": "gpu-scrubber"}


@dataclass
class Sent:
    """The finished spans, by a tracer without batching."""

    memory: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    traces: OpenTelemetryTracer = field(init=False)

    def __post_init__(self) -> None:
        self.traces = OpenTelemetryTracer(SimpleSpanProcessor(self.memory), RESOURCE)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.memory.get_finished_spans()

    def named(self, name: str) -> ReadableSpan:
        return [each for each in self.spans if each.name == name][-1]

    def outline(self, span: ReadableSpan) -> str:
        """Return a span and its children, in the order of their start: ``device(check(step holders))``."""
        inside = [each for each in self.spans if each.parent is not None and each.parent.span_id == id_of(span)]
        children = ", ".join(self.outline(each) for each in sorted(inside, key=lambda each: each.start_time or 0))
        return f"{span.name}({children})" if children else span.name


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def trace_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.trace_id)


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})
