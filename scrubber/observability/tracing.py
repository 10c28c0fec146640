"""OpenTelemetry traces of both daemons, sent to the configured collector; off, and not even loaded, by default.

Invariants: tracing has no effect on what is traced. No call waits for it, and its errors are never raised. Spans that
cannot be sent are dropped and reported, at most once a minute and at the stop, which waits :data:`FLUSH_SECONDS`
seconds and a moment for it. The caller's trace context is used if it is valid W3C Trace Context, and ignored otherwise.

The only text in spans is what the engine sets as attributes: no error messages, no pod names, no commands.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar, Token
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol, Self, cast
from urllib.parse import unquote, urlsplit

import structlog

from scrubber.domain.errors import InvalidConfiguration, ScrubberError
from scrubber.ports.runtime import AttributeValue

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanContext

__all__ = ["FLUSH_SECONDS", "OpenTelemetryTracer", "TraceLog", "open_otlp_tracer"]

_HEADER = "traceparent"
FLUSH_SECONDS = 1.0
"""Seconds that a stop waits for unsent spans."""
_ABORT_SECONDS = 0.5
"""Seconds for an aborted export to return."""
_REPORT_INTERVAL = 60.0
"""Minimum time between two log lines about lost spans, in seconds."""
_MAX_ATTRIBUTE_CHARS = 256
"""Limit of an attribute's text, in characters."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.{0,200})?", re.ASCII)
_FOLLOWS = "follows"
_SDK_MISSING_MESSAGE = (
    "--traces otlp needs OpenTelemetry's SDK, which is not installed here ({}): "
    "pip install '.[otel]' in the sources of gpu-scrubber, or start with --traces off."
)
_BAD_VARIABLE_MESSAGE = (
    '--traces otlp is refused, as a variable cannot work and nothing goes on with a default here. OpenTelemetry says: "{}" '
    "Correct the OTEL_ variables."
)
_UNSENT_MESSAGE = "They were not sent before the stop, or did not fit into the queue."

_current_context: ContextVar[Context | None] = ContextVar("trace", default=None)
"""The current span of this task, as a context. OpenTelemetry's own variable would trigger its plugin lookup."""


class TraceLog(Protocol):
    """Log for lost traces; called from other threads, too."""

    def info(self, event: str, **facts: Any) -> Any: ...
    def warning(self, event: str, **facts: Any) -> Any: ...


# See docs/decisions/0039-logs-and-traces.md.
class OpenTelemetryTracer:
    """A :class:`scrubber.ports.Tracer` that creates OpenTelemetry spans.

    An attribute ``follows`` with the text of :meth:`traceparent` becomes a link to that span. Log lines inside have the
    field ``trace_id``, if the log merges context bound with structlog.

    Args:
        processor: receives every span that ended.
        resource: attributes of the OpenTelemetry resource.
        abort_export: called by :meth:`close` when the processor does not finish; makes it finish.
        report_unsent: called last, with the total number of spans that should have been sent.
    """

    def __init__(
        self,
        processor: SpanProcessor,
        resource: Mapping[str, str],
        *,
        abort_export: Callable[[], None] = lambda: None,
        report_unsent: Callable[[int], None] = lambda _: None,
    ) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider

        # The standard variables of the operator take precedence; nothing else is detected automatically.
        attributes = {**resource, **OTELResourceDetector().detect().attributes}
        self._provider = TracerProvider(
            resource=Resource({name: _utf8_value(value) for name, value in attributes.items()}),
            shutdown_on_exit=False,
            span_limits=SpanLimits(
                max_span_attributes=32, max_attribute_length=_MAX_ATTRIBUTE_CHARS, max_events=0, max_links=4
            ),
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("scrubber")
        self._api = trace
        self._empty_context = Context()
        self._abort_export = abort_export
        self._report_unsent = report_unsent
        self._sampled_spans = 0

    def span(self, name: str, **attributes: AttributeValue) -> _Span:
        return _Span(self, name, attributes)

    def traceparent(self) -> str:
        """Return the current span of this task as a ``traceparent``; empty where there is none."""
        return (
            ""
            if (around := _current_context.get()) is None
            else _format_traceparent(self._api.get_current_span(around).get_span_context())
        )

    def outgoing_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the same as metadata of a call."""
        return ((_HEADER, here),) if (here := self.traceparent()) else ()

    def join_trace(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Make the following work of this task part of the trace in the caller's ``metadata``, if it names one."""
        headers = [value for name, value in metadata or () if name == _HEADER]
        context = self._parse_traceparent(headers[0]) if len(headers) == 1 else None
        if context is not None:
            _current_context.set(self.context_of(self._api.NonRecordingSpan(context)))

    def close(self) -> None:
        """Send the remaining spans, for at most :data:`FLUSH_SECONDS` seconds; later spans are not reported."""
        ended = self._sampled_spans
        ending = Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        ending.start()
        ending.join(FLUSH_SECONDS)
        if ending.is_alive():
            self._abort_export()
            ending.join(_ABORT_SECONDS)
        self._report_unsent(ended)

    # -- for its spans ----------------------------------------------------------------------------------------------

    def start_span(self, name: str, parent_context: Context | None) -> tuple[OtelSpan, bool]:
        """Return a span inside ``parent_context``, and whether it is the first one of its trace in this process."""
        kinds = self._api.SpanKind
        parent = None if parent_context is None else self._api.get_current_span(parent_context).get_span_context()
        kind = kinds.SERVER if parent is not None and parent.is_remote else kinds.INTERNAL
        span = self._tracer.start_span(
            name, context=self._empty_context if parent_context is None else parent_context, kind=kind
        )
        return span, parent is None or parent.is_remote

    def context_of(self, span: OtelSpan) -> Context:
        return self._api.set_span_in_context(span, self._empty_context)

    def end_span(self, span: OtelSpan, attributes: dict[str, AttributeValue], error: BaseException | None) -> None:
        if span.is_recording():
            follows = attributes.pop(_FOLLOWS, None)
            if isinstance(follows, str) and (context := self._parse_traceparent(follows)) is not None:
                span.add_link(context)
            span_attributes = {
                f"scrubber.{name}": _utf8_value(value) for name, value in attributes.items() if value is not None
            }
            if failure := _failure(attributes, error):
                span_attributes["error.type"] = failure
                span.set_status(self._api.StatusCode.ERROR, failure)
            if isinstance(error, asyncio.CancelledError):
                span_attributes["scrubber.cancelled"] = True
            span.set_attributes(span_attributes)
            self._sampled_spans += span.get_span_context().trace_flags.sampled
        span.end()

    def _parse_traceparent(self, header: str | bytes) -> SpanContext | None:
        """Parse a ``traceparent`` from outside; return None if it is invalid."""
        found = _TRACEPARENT.fullmatch(header) if isinstance(header, str) else None
        if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
            return None
        known = self._api.TraceFlags.SAMPLED | self._api.TraceFlags.RANDOM_TRACE_ID
        flags = self._api.TraceFlags(int(found[4], 16) & known)
        context = self._api.SpanContext(int(found[2], 16), int(found[3], 16), is_remote=True, trace_flags=flags)
        return context if context.is_valid else None


class _Span:
    """One traced operation. Errors of OpenTelemetry never affect the operation."""

    __slots__ = ("_attributes", "_bound", "_name", "_span", "_token", "_traces")

    def __init__(self, traces: OpenTelemetryTracer, name: str, attributes: dict[str, AttributeValue]) -> None:
        self._traces = traces
        self._name = name
        self._attributes = attributes
        self._span: OtelSpan | None = None
        self._token: Token[Context | None] | None = None
        self._bound: Mapping[str, Token[Any]] = {}

    def set_attributes(self, **attributes: AttributeValue) -> None:
        self._attributes.update(attributes)

    def __enter__(self) -> Self:
        with suppress(Exception):
            around = _current_context.get()
            self._span, first = self._traces.start_span(self._name, around)
            self._token = _current_context.set(self._traces.context_of(self._span))
            if first and self._span.is_recording():
                trace = f"{self._span.get_span_context().trace_id:032x}"
                self._bound = structlog.contextvars.bind_contextvars(trace_id=trace)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # When left in another task than it was entered in, that task's context stays as it is (ValueError).
        with suppress(Exception):
            if self._bound:
                structlog.contextvars.reset_contextvars(**self._bound)
        with suppress(Exception):
            if self._token is not None:
                _current_context.reset(self._token)
        with suppress(Exception):
            if self._span is not None:
                self._traces.end_span(self._span, self._attributes, error)


_CANCELLATIONS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


def _failure(attributes: Mapping[str, AttributeValue], error: BaseException | None) -> str:
    """Return the error code of the operation; empty for success and for a cancelled call, which is no failure."""
    if isinstance(error, _CANCELLATIONS):
        return ""
    if error is not None:
        return error.code if isinstance(error, ScrubberError) else type(error).__name__
    return "failed" if "failed" in (attributes.get("verdict"), attributes.get("outcome")) else ""


def _utf8_value(value: Any) -> Any:
    """Return text as valid UTF-8: invalid text would lose the whole batch that is sent with it."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _format_traceparent(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}" if context.is_valid else ""


# -- to a collector ----------------------------------------------------------------------------------------------------


def open_otlp_tracer(
    service: str, version: str, node: str, log: TraceLog, environment: Mapping[str, str] = os.environ
) -> OpenTelemetryTracer:
    """Return a tracer that sends spans by OTLP, over gRPC or HTTP, to ``OTEL_EXPORTER_OTLP_ENDPOINT``, reachable or not.

    Args:
        service: name of the daemon.
        node: its node's name in the cluster; empty where it is unknown.
        environment: the standard variables for checks here; the library reads those of the process.

    Raises:
        InvalidConfiguration: OpenTelemetry is not installed, no address is given, or a variable is invalid.
    """
    over_http = _is_http(environment)
    try:
        make_exporter = _http_exporter() if over_http else _grpc_exporter()
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.version import __version__
    except ImportError as missing:
        raise InvalidConfiguration(_SDK_MISSING_MESSAGE.format(missing)) from missing
    except Exception as error:  # it reads some of its variables when it is loaded
        raise InvalidConfiguration(_BAD_VARIABLE_MESSAGE.format(error)) from error
    where, encrypted = _endpoint(environment, over_http=over_http)
    log_handler = OpenTelemetryLogHandler()
    log_handler.install()
    resource = {
        "service.name": service,
        "service.version": version,
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.version": __version__,
        **({"k8s.node.name": node} if node else {}),
    }
    try:
        exporter = ReportingSpanExporter(make_exporter(where, encrypted), log, log_handler)
        processor = BatchSpanProcessor(cast("SpanExporter", exporter))  # duck-typed: only its methods are called
        traces = OpenTelemetryTracer(
            processor, resource, abort_export=exporter.shutdown, report_unsent=exporter.report_unsent
        )
    except Exception as error:
        raise InvalidConfiguration(
            _BAD_VARIABLE_MESSAGE.format(_without_secrets(log_handler.last_message or str(error)))
        ) from error
    if log_handler.last_message:  # the library would continue with a default
        traces.close()
        raise InvalidConfiguration(_BAD_VARIABLE_MESSAGE.format(_without_secrets(log_handler.last_message)))
    sampler = environment.get("OTEL_TRACES_SAMPLER") or "parentbased_always_on"
    log.info("traces.exporting", endpoint=urlsplit(where).netloc, encrypted=encrypted, sampler=sampler)
    return traces


def _without_secrets(message: str) -> str:
    """Return the library's message; it quotes headers, which may contain secrets, so those messages are replaced."""
    if "header" in message.lower():
        return "OTEL_EXPORTER_OTLP_HEADERS is not NAME=VALUE,NAME=VALUE with values as in a URL."
    return message


def _variable(environment: Mapping[str, str], name: str) -> str:
    """Return one of the standard variables: the one for traces overrides the general one."""
    return environment.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environment.get(f"OTEL_EXPORTER_OTLP_{name}") or ""


def _grpc_exporter() -> Callable[[str, bool], SpanExporter]:
    """Return what creates an exporter for an address, encrypted or not. Raises whatever the library does when loaded."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return lambda where, encrypted: OTLPSpanExporter(endpoint=where, insecure=not encrypted)


def _http_exporter() -> Callable[[str, bool], SpanExporter]:
    """Return the same for OTLP over HTTP, which the address itself says to encrypt."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return lambda where, _: OTLPSpanExporter(endpoint=where)


def _is_http(environment: Mapping[str, str]) -> bool:
    """Return whether spans are sent over HTTP. Raises :class:`InvalidConfiguration` for an unknown protocol."""
    protocol = _variable(environment, "PROTOCOL")
    if protocol not in ("", "grpc", "http/protobuf"):
        raise InvalidConfiguration(
            f'OTEL_EXPORTER_OTLP_PROTOCOL is "{protocol}": write grpc, which collectors take on port 4317, or '
            "http/protobuf, on port 4318."
        )
    return protocol == "http/protobuf"


def _endpoint(environment: Mapping[str, str], *, over_http: bool) -> tuple[str, bool]:
    """Return the collector's address, and whether the connection is encrypted.

    Args:
        over_http: as OpenTelemetry specifies, the general address is then that of the collector, without the path for
            traces, and the address for traces is complete.

    Raises:
        InvalidConfiguration: no address, an invalid one, a missing TLS file, or an impossible header.
    """
    where = _variable(environment, "ENDPOINT")
    if not where:
        raise InvalidConfiguration(
            "--traces otlp needs an address: set OTEL_EXPORTER_OTLP_ENDPOINT, such as "
            "https://collector.example:4317, or http://127.0.0.1:4317 without encryption."
        )
    try:
        parts = urlsplit(where)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        known = False
    if "@" in where:
        raise InvalidConfiguration(
            "OTEL_EXPORTER_OTLP_ENDPOINT names a user, and would be in the log with the password: say who you are in "
            "OTEL_EXPORTER_OTLP_HEADERS, or by a client certificate."
        )
    if not known or any(each.isspace() for each in where):
        raise InvalidConfiguration(
            f'OTEL_EXPORTER_OTLP_ENDPOINT is "{where}": write https://HOST:PORT, or http://HOST:PORT to send without '
            "encryption."
        )
    for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"):
        # Without the file, the library would continue and trust the system's certificate authorities.
        if (file := _variable(environment, name)) and not os.access(file, os.R_OK):
            raise InvalidConfiguration(f"OTEL_EXPORTER_OTLP_{name}: {file} is not there, or cannot be read.")
    if bool(_variable(environment, "CLIENT_KEY")) != bool(_variable(environment, "CLIENT_CERTIFICATE")):
        raise InvalidConfiguration(
            "OTEL_EXPORTER_OTLP_CLIENT_KEY and OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE come together, or not at all."
        )
    if (timeout := _variable(environment, "TIMEOUT")) and not _is_positive_number(timeout):
        raise InvalidConfiguration(f'OTEL_EXPORTER_OTLP_TIMEOUT is "{timeout}": write seconds, more than 0.')
    values = [unquote(each).strip() for each in _variable(environment, "HEADERS").split(",")]
    if not all(each.isascii() and each.isprintable() for each in values):
        # Each batch would be lost, and the library's reason quotes the value.
        raise InvalidConfiguration(
            "OTEL_EXPORTER_OTLP_HEADERS contains a character that no header may contain, such as a line end (%0A): write "
            "NAME=VALUE,NAME=VALUE."
        )
    if over_http and not environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        where = f"{where.rstrip('/')}/v1/traces"
    return where, urlsplit(where).scheme == "https"


def _is_positive_number(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


class OpenTelemetryLogHandler(logging.Handler):
    """Keeps the last message of OpenTelemetry's loggers. They log every attempt, so nothing is forwarded to the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last_message = ""

    def install(self) -> None:
        """Install this as the only handler of OpenTelemetry's process-wide loggers, replacing an earlier one."""
        library = logging.getLogger("opentelemetry")
        library.propagate = False
        library.setLevel(logging.WARNING)  # whatever the level of our own log is: a warning may refuse a setting
        library.handlers[:] = [self]

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("opentelemetry.sdk._shared_internal"):  # reports a full queue, but not the reason
            self.last_message = record.getMessage()


class ReportingSpanExporter:
    """Forwards batches of spans and reports lost ones, rate-limited. Runs in the thread of the exporter."""

    def __init__(
        self,
        exporter: SpanExporter,
        log: TraceLog,
        library_log: OpenTelemetryLogHandler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exporter = exporter
        self._log = log
        self._library_log = library_log
        self._clock = clock
        self._sent = 0
        self._lost = 0
        self._reported_lost = 0
        self._last_report: float | None = None
        self._is_shut_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - this batch is lost, and the next one may succeed
            self._library_log.last_message, result = f"{type(error).__name__}: {error}", SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self._sent += len(spans)
            self._library_log.last_message = ""
        else:
            self._lost += len(spans)
            now = self._clock()
            if not self._is_shut_down and (self._last_report is None or now - self._last_report >= _REPORT_INTERVAL):
                self._log.warning("traces.lost", lost_spans=self._lost, message=self._library_log.last_message)
                self._last_report, self._reported_lost, self._lost = now, self._reported_lost + self._lost, 0
        return result

    def report_unsent(self, spans: int) -> None:
        """Log how many of ``spans``, the total, were not sent and not reported as lost before."""
        if (lost := spans - self._sent - self._reported_lost) > 0:
            self._log.warning("traces.lost", lost_spans=lost, message=self._library_log.last_message or _UNSENT_MESSAGE)

    def shutdown(self) -> None:
        """Abort the export in progress; may be called from another thread, and repeatedly."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True
