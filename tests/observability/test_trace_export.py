"""The export of traces: invalid variables, a collector that is away or never answers, and no export."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread, current_thread
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from scrubber.domain.errors import InvalidConfiguration, NotReady
from scrubber.observability import tracing
from scrubber.observability.tracing import OpenTelemetryTracer
from tests.observability.traces_stage import RESOURCE, Sent

PROTOCOLS = ("grpc", "http/protobuf")


@pytest.fixture
def sent() -> Sent:
    return Sent()


@dataclass
class Lines:
    """A log that keeps its lines."""

    lines: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def info(self, event: str, **facts: Any) -> None:
        self.lines.append((event, facts))

    warning = info


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove OpenTelemetry's variables, except an endpoint without a listener."""
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    return monkeypatch


def opened(log: Lines | None = None) -> OpenTelemetryTracer:
    return tracing.open_otlp_tracer("gpu-scrubber", "0.1", "node-1", log or Lines())


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317", "https://HOST:PORT"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector", "https://HOST:PORT"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1:4317", "https://HOST:PORT"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:99999", "https://HOST:PORT"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "unix:///run/otel.sock", "https://HOST:PORT"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/ca.pem", "/nowhere/ca.pem"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a b:4317", "https://HOST:PORT"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "more than 0"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0", "more than 0"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "inf", "more than 0"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "nan", "more than 0"),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", __file__, "together"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "lzma", "lzma"),
        ("OTEL_TRACES_SAMPLER", "sometimes", "sometimes"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many", "OTEL_BSP_MAX_QUEUE_SIZE"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "OTEL_"),
    ],
)
def test_invalid_trace_variable_is_refused_at_start(
    environment: pytest.MonkeyPatch, variable: str, value: str, named: str
) -> None:
    environment.setenv(variable, value)
    with pytest.raises(InvalidConfiguration, match=named):
        opened()


def test_invalid_variable_is_refused_although_the_log_shows_errors_only(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OTEL_TRACES_SAMPLER", "sometimes")
    environment.setattr(logging.getLogger(), "level", logging.ERROR)
    logging.getLogger("opentelemetry").setLevel(logging.NOTSET)
    with pytest.raises(InvalidConfiguration, match="sometimes"):
        opened()


@pytest.mark.parametrize("share", ["2", "half", ""])
def test_sampler_ratio_that_the_library_would_ignore_is_refused(environment: pytest.MonkeyPatch, share: str) -> None:
    environment.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    environment.setenv("OTEL_TRACES_SAMPLER_ARG", share)
    with pytest.raises(InvalidConfiguration, match=r"nothing goes on with a default here.*TRACES_SAMPLER_ARG"):
        opened()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_HEADERS", "Authorization: Bearer s3cr3t"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=ok,s3cr3t"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20s3cr3t%0Amore"),
        ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "authorization=s3cr3t%E2%82%AC"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://ingest:s3cr3t@collector.example:4317"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://ingest:s3cr3t@collector.example"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://ingest:s3cr3t@[::1"),
    ],
)
def test_refusal_names_the_variable_and_hides_its_secret(
    environment: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    environment.setenv(variable, value)
    with pytest.raises(InvalidConfiguration, match=variable.replace("_TRACES", "")) as refusal:
        opened()
    assert "s3cr3t" not in str(refusal.value)


def test_variable_that_fails_the_library_import_is_refused_at_start() -> None:
    """The library reads some variables once, at its import."""
    program = "import logging, sys\nfrom scrubber.observability.tracing import open_otlp_tracer\nfrom scrubber.domain.errors import InvalidConfiguration\n"
    program += "try: open_otlp_tracer('x', '0', '', logging.getLogger())\nexcept InvalidConfiguration as refusal: print(refusal)"
    variables = {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "-1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    result = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    assert "Correct the OTEL_ variables" in result.stdout


def test_missing_library_refusal_names_the_package_to_install(environment: pytest.MonkeyPatch) -> None:
    environment.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(InvalidConfiguration, match=r"pip install '\.\[otel\]'"):
        opened()


def test_export_start_is_logged_with_the_endpoint_and_no_secret(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://collector.example:4317/path?token=secret")
    environment.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret")
    log = Lines()
    opened(log).close()
    facts = {"endpoint": "collector.example:4317", "encrypted": True, "sampler": "parentbased_always_on"}
    assert log.lines == [("traces.exporting", facts)]


@contextmanager
def http_collector() -> Iterator[tuple[str, list[tuple[str, ExportTraceServiceRequest]]]]:
    """Provide the address of a collector that accepts OTLP over HTTP, and what it received: path and request."""
    received: list[tuple[str, ExportTraceServiceRequest]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/x-protobuf"
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.parametrize(
    ("variable", "suffix", "path"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "", "/v1/traces"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "/otlp/", "/otlp/v1/traces"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "/mine", "/mine"),
    ],
)
def test_spans_are_sent_over_http_to_the_path_that_the_variable_means(
    environment: pytest.MonkeyPatch, variable: str, suffix: str, path: str
) -> None:
    log = Lines()
    with http_collector() as (address, received):
        environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        environment.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
        environment.setattr(tracing, "FLUSH_SECONDS", 60.0)
        environment.setenv(variable, f"{address}{suffix}")
        traces = opened(log)
        with traces.span("hand-over"):
            pass
        traces.close()
    ((where, request),) = received
    assert where == path
    (resource,) = request.resource_spans
    assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["hand-over"]
    assert [event for event, _ in log.lines] == ["traces.exporting"]


def test_sampler_that_drops_everything_sends_nothing(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OTEL_TRACES_SAMPLER", "always_off")
    sent = Sent()
    with sent.traces.span("hand-over"):
        assert sent.traces.outgoing_metadata() == (("traceparent", sent.traces.traceparent()),)
        assert int(sent.traces.traceparent()[-2:], 16) & 1 == 0, "the service receives the decision not to sample"
    assert sent.spans == ()


def test_traces_are_off_when_the_library_is_disabled_by_its_own_variable(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OTEL_SDK_DISABLED", "true")
    sent = Sent()
    with sent.traces.span("hand-over") as span:
        span.set_attributes(path="fast")
        assert sent.traces.outgoing_metadata() == ()
    assert sent.spans == ()


class Failing(SpanExporter):
    """An exporter that refuses a batch, or raises, as the test sets."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.error is not None:
            raise self.error
        return SpanExportResult.FAILURE


@pytest.mark.parametrize("error", [None, NotReady("not yet")])
def test_lost_spans_are_logged_once_a_minute_with_their_number(sent: Sent, error: Exception | None) -> None:
    with sent.traces.span("step memory"):
        pass
    failing, log, now = Failing(), Lines(), [1000.0]
    failing.error = error
    exporter = tracing.ReportingSpanExporter(failing, log, tracing.OpenTelemetryLogHandler(), clock=lambda: now[0])
    for seconds in (0, 1, 58, 1, 1, 58):
        now[0] += seconds
        assert exporter.export(sent.spans) is SpanExportResult.FAILURE
    assert [(event, facts["lost_spans"]) for event, facts in log.lines] == [("traces.lost", 1), ("traces.lost", 3)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_library_messages_about_export_attempts_are_not_logged(
    environment: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    protocol: str,
) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    log = Lines()
    traces = opened(log)
    with traces.span("hand-over"):
        pass
    traces.close()  # tries to send it to an endpoint without a listener
    assert [event for event, _ in log.lines if event != "traces.lost"] == ["traces.exporting"]
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_shutdown_logs_spans_lost_since_the_last_report(environment: pytest.MonkeyPatch) -> None:
    answers = [SpanExportResult.SUCCESS, SpanExportResult.FAILURE, SpanExportResult.FAILURE]
    exported = Event()

    def export(_: OTLPSpanExporter, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        exported.set()
        return answers.pop(0)

    environment.setattr(OTLPSpanExporter, "export", export)
    environment.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    log = Lines()
    traces = opened(log)
    for name in ("reserve", "hand-over"):
        with traces.span(name):
            pass
        assert exported.wait(60)
        exported.clear()
    with traces.span("hand-over"):
        pass
    traces.close()
    assert [facts["lost_spans"] for event, facts in log.lines if event == "traces.lost"] == [1, 1]


def test_shutdown_without_lost_spans_logs_nothing(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(OTLPSpanExporter, "export", lambda *_: SpanExportResult.SUCCESS)
    environment.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    environment.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    log = Lines()
    traces = opened(log)
    for _ in range(64):  # about half of them are sampled, and each sampled one is complete
        with traces.span("hand-over"):
            pass
    traces.close()
    assert [event for event, _ in log.lines] == ["traces.exporting"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_spans_unsent_at_shutdown_are_logged_with_their_number(environment: pytest.MonkeyPatch, protocol: str) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    log = Lines()
    with unresponsive_server() as endpoint:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        traces = opened(log)
        for _ in range(3):
            with traces.span("hand-over"):
                pass
        traces.close()
    assert [facts["lost_spans"] for event, facts in log.lines if event == "traces.lost"] == [3]
    assert all(facts["message"] for event, facts in log.lines if event == "traces.lost")


@contextmanager
def unresponsive_server() -> Iterator[str]:
    """Provide the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


class Stuck(SpanExporter):
    """An exporter that is busy with one batch until it is shut down."""

    def __init__(self) -> None:
        self.busy, self.over = Event(), Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.busy.set()
        self.over.wait()
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.over.set()


def test_stuck_exporter_blocks_no_caller_and_keeps_a_bounded_queue() -> None:
    stuck = Stuck()
    traces = OpenTelemetryTracer(
        BatchSpanProcessor(stuck, max_queue_size=8, max_export_batch_size=1), RESOURCE, abort_export=stuck.shutdown
    )
    with traces.span("first"):
        pass
    stuck.busy.wait()
    for _ in range(100):
        with traces.span("another"):
            pass
    traces.close()
    assert stuck.over.is_set()


def test_spans_are_sent_by_a_separate_thread(environment: pytest.MonkeyPatch) -> None:
    exported: list[tuple[list[str], Thread]] = []

    def export(_: OTLPSpanExporter, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        exported.append(([each.name for each in spans], current_thread()))
        return SpanExportResult.SUCCESS

    environment.setattr(OTLPSpanExporter, "export", export)
    traces = opened()
    for name in ("reserve", "hand-over"):
        with traces.span(name):
            pass
    traces.close()
    assert [name for names, _ in exported for name in names] == ["reserve", "hand-over"], (
        "what is left is sent at the end"
    )
    assert all(thread is not current_thread() for _, thread in exported)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_unresponsive_collector_does_not_delay_process_exit(environment: pytest.MonkeyPatch, protocol: str) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    code = (
        "from scrubber.observability import tracing; import structlog\n"
        "traces = tracing.open_otlp_tracer('gpu-scrubber', '0.1', '', structlog.get_logger())\n"
        "with traces.span('hand-over'): pass\n"
        "traces.close(); print('over')"
    )
    with unresponsive_server() as endpoint:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert child.returncode == 0, child.stderr
    assert child.stdout.endswith("over\n")


def test_opentelemetry_is_not_imported_unless_enabled() -> None:
    code = (
        "import sys, scrubber.daemon, plugin.main, scrubber.cli.commands.serve\n"
        "print(*sorted(name for name in sys.modules if name.startswith('opentelemetry')))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "\n"
