"""Traces of what both daemons do, sent to whoever the operator names; off, and not even loaded, unless asked for.

Promise: a trace changes nothing. No call waits for it, nothing that goes wrong with it is raised, what cannot be sent is
dropped and told of, at most once a minute and at the stop, which waits for it :data:`FLUSH` seconds and a moment. What a
caller says about the trace that it belongs to is believed where it is exactly what W3C Trace Context says, and passed over
elsewhere.
Of text, only what the engine gives as attributes is sent: no sentence of an error, no pod's name, no command.
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
from urllib.parse import urlsplit

import structlog

from scrubber.domain.errors import BadConfiguration, ScrubberError
from scrubber.ports.runtime import Attribute

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanContext

__all__ = ["FLUSH", "Log", "Traces", "otlp"]

_HEADER = "traceparent"
FLUSH = 1.0
"""Seconds that a stop leaves for what has not been sent yet."""
_LET_GO = 0.5
"""Seconds for the sending to notice that it was called off."""
_REMIND = 60.0
"""Seconds between two lines about traces that are lost, at least."""
_LONGEST = 256
"""Characters of an attribute's text."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.{0,200})?", re.ASCII)
_FOLLOWS = "follows"
_MISSING = (
    "--traces otlp needs OpenTelemetry's SDK, which is not installed here ({}): "
    "pip install '.[otel]' in the sources of gpu-scrubber, or start with --traces off."
)
_CORRECT = (
    '--traces otlp is refused, as a variable cannot work and nothing goes on with a default here. OpenTelemetry says: "{}" '
    "Correct the OTEL_ variables."
)
_UNSENT = "They were not sent before the stop, or did not fit into the queue."

_here: ContextVar[Context | None] = ContextVar("trace", default=None)
"""What is being done in this task, as OpenTelemetry's context. Their own would be found by looking for plugins."""


class Log(Protocol):
    """Where it is said that traces are lost; called from another thread, too."""

    def info(self, event: str, **facts: Any) -> Any: ...
    def warning(self, event: str, **facts: Any) -> Any: ...


class Traces:
    """A :class:`scrubber.ports.Tracer` that tells OpenTelemetry.

    An attribute ``follows`` with the text of :meth:`here` becomes a link to that span. Log lines inside carry
    ``trace_id``, where the log takes what is bound with structlog.

    Args:
        processor: gets every span that ended.
        resource: who tells: OpenTelemetry's names of it → their values.
        hang_up: called by :meth:`close` when the processor does not come to its end; makes it.
        last_words: called last of all with how many spans were to be sent.
    """

    def __init__(
        self,
        processor: SpanProcessor,
        resource: Mapping[str, str],
        *,
        hang_up: Callable[[], None] = lambda: None,
        last_words: Callable[[int], None] = lambda _: None,
    ) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider

        # What the operator says of it in the standard variables wins; nothing else is found out by itself.
        told = {**resource, **OTELResourceDetector().detect().attributes}
        self._provider = TracerProvider(
            resource=Resource({name: _clean(value) for name, value in told.items()}),
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_span_attributes=32, max_attribute_length=_LONGEST, max_events=0, max_links=4),
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("scrubber")
        self._api = trace
        self._nowhere = Context()
        self._hang_up = hang_up
        self._last_words = last_words
        self._ended = 0

    def span(self, name: str, **attributes: Attribute) -> _Span:
        return _Span(self, name, attributes)

    def here(self) -> str:
        """What is being done in this task, as a ``traceparent``; empty where nothing is."""
        return (
            "" if (around := _here.get()) is None else _written(self._api.get_current_span(around).get_span_context())
        )

    def carried(self) -> tuple[tuple[str, str], ...]:
        """The same as metadata of a call."""
        return ((_HEADER, here),) if (here := self.here()) else ()

    def join(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """What this task does from now on belongs to the trace that its caller's ``metadata`` names, if it names one."""
        said = [value for name, value in metadata or () if name == _HEADER]
        context = self._read(said[0]) if len(said) == 1 else None
        if context is not None:
            _here.set(self.inside(self._api.NonRecordingSpan(context)))

    def close(self) -> None:
        """Send what is left, for at most :data:`FLUSH` seconds; what ends afterwards is told to nobody."""
        ended = self._ended
        ending = Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        ending.start()
        ending.join(FLUSH)
        if ending.is_alive():
            self._hang_up()
            ending.join(_LET_GO)
        self._last_words(ended)

    # -- for its spans ----------------------------------------------------------------------------------------------

    def begin(self, name: str, around: Context | None) -> tuple[OtelSpan, bool]:
        """A span inside ``around``, and whether it is the first one of its trace in this process."""
        kinds = self._api.SpanKind
        parent = None if around is None else self._api.get_current_span(around).get_span_context()
        kind = kinds.SERVER if parent is not None and parent.is_remote else kinds.INTERNAL
        span = self._tracer.start_span(name, context=self._nowhere if around is None else around, kind=kind)
        return span, parent is None or parent.is_remote

    def inside(self, span: OtelSpan) -> Context:
        return self._api.set_span_in_context(span, self._nowhere)

    def end(self, span: OtelSpan, attributes: dict[str, Attribute], error: BaseException | None) -> None:
        if span.is_recording():
            follows = attributes.pop(_FOLLOWS, None)
            if isinstance(follows, str) and (context := self._read(follows)) is not None:
                span.add_link(context)
            told = {f"scrubber.{name}": _clean(value) for name, value in attributes.items() if value is not None}
            if failure := _failure(attributes, error):
                told["error.type"] = failure
                span.set_status(self._api.StatusCode.ERROR, failure)
            if isinstance(error, asyncio.CancelledError):
                told["scrubber.cancelled"] = True
            span.set_attributes(told)
            self._ended += span.get_span_context().trace_flags.sampled
        span.end()

    def _read(self, said: str | bytes) -> SpanContext | None:
        """A ``traceparent`` from outside; None unless it is one."""
        found = _TRACEPARENT.fullmatch(said) if isinstance(said, str) else None
        if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
            return None
        known = self._api.TraceFlags.SAMPLED | self._api.TraceFlags.RANDOM_TRACE_ID
        flags = self._api.TraceFlags(int(found[4], 16) & known)
        context = self._api.SpanContext(int(found[2], 16), int(found[3], 16), is_remote=True, trace_flags=flags)
        return context if context.is_valid else None


class _Span:
    """One thing that is done. Whatever OpenTelemetry does about it, what is done goes on."""

    __slots__ = ("_attributes", "_bound", "_name", "_span", "_token", "_traces")

    def __init__(self, traces: Traces, name: str, attributes: dict[str, Attribute]) -> None:
        self._traces = traces
        self._name = name
        self._attributes = attributes
        self._span: OtelSpan | None = None
        self._token: Token[Context | None] | None = None
        self._bound: Mapping[str, Token[Any]] = {}

    def note(self, **attributes: Attribute) -> None:
        self._attributes.update(attributes)

    def __enter__(self) -> Self:
        with suppress(Exception):
            around = _here.get()
            self._span, first = self._traces.begin(self._name, around)
            self._token = _here.set(self._traces.inside(self._span))
            if first and self._span.is_recording():
                trace = f"{self._span.get_span_context().trace_id:032x}"
                self._bound = structlog.contextvars.bind_contextvars(trace_id=trace)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Left in another task than the one that entered, what is around it there stays as it is (ValueError).
        with suppress(Exception):
            if self._bound:
                structlog.contextvars.reset_contextvars(**self._bound)
        with suppress(Exception):
            if self._token is not None:
                _here.reset(self._token)
        with suppress(Exception):
            if self._span is not None:
                self._traces.end(self._span, self._attributes, error)


_NO_FAILURE = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


def _failure(attributes: Mapping[str, Attribute], error: BaseException | None) -> str:
    """What went wrong, in a word; empty where nothing did: a call that was given up is no failure."""
    if isinstance(error, _NO_FAILURE):
        return ""
    if error is not None:
        return error.code if isinstance(error, ScrubberError) else type(error).__name__
    return "failed" if "failed" in (attributes.get("verdict"), attributes.get("outcome")) else ""


def _clean(value: Any) -> Any:
    """Text as a message can carry it: one that is no UTF-8 would cost all that is sent with it."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _written(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}" if context.is_valid else ""


# -- to a collector ----------------------------------------------------------------------------------------------------


def otlp(service: str, version: str, node: str, log: Log, environment: Mapping[str, str] = os.environ) -> Traces:
    """Traces that go by OTLP over gRPC to where ``OTEL_EXPORTER_OTLP_ENDPOINT`` says. Nobody needs to be there yet.

    Args:
        service: which of the daemons this is.
        node: its node's name in the cluster; empty where nobody said.
        environment: where the standard variables are read; the library reads those of the process.

    Raises:
        BadConfiguration: OpenTelemetry is not installed, no address is given, or a variable cannot work.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.version import __version__
    except ImportError as missing:
        raise BadConfiguration(_MISSING.format(missing)) from missing
    except Exception as error:  # it reads some of its variables as it is loaded
        raise BadConfiguration(_CORRECT.format(error)) from error
    where, encrypted = _endpoint(environment)
    said = Said()
    said.listen()
    resource = {
        "service.name": service,
        "service.version": version,
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.version": __version__,
        **({"k8s.node.name": node} if node else {}),
    }
    try:
        exporter = Sending(OTLPSpanExporter(endpoint=where, insecure=not encrypted), log, said)
        processor = BatchSpanProcessor(cast("SpanExporter", exporter))  # by its methods, which is all that it goes by
        traces = Traces(processor, resource, hang_up=exporter.shutdown, last_words=exporter.last_words)
    except Exception as error:
        raise BadConfiguration(_CORRECT.format(_without_secrets(said.last or str(error)))) from error
    if said.last:  # the library would go on with a default
        traces.close()
        raise BadConfiguration(_CORRECT.format(_without_secrets(said.last)))
    sampler = environment.get("OTEL_TRACES_SAMPLER") or "parentbased_always_on"
    log.info("traces.exporting", endpoint=urlsplit(where).netloc, encrypted=encrypted, sampler=sampler)
    return traces


def _without_secrets(said: str) -> str:
    """What the library said; of headers, which it quotes, in words of ours."""
    if "header" in said.lower():
        return "OTEL_EXPORTER_OTLP_HEADERS is not NAME=VALUE,NAME=VALUE with values as in a URL."
    return said


def _variable(environment: Mapping[str, str], name: str) -> str:
    """One of the standard variables: that for traces wins over that for everything."""
    return environment.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environment.get(f"OTEL_EXPORTER_OTLP_{name}") or ""


def _endpoint(environment: Mapping[str, str]) -> tuple[str, bool]:
    """Where traces go, and whether encrypted.

    Raises:
        BadConfiguration: nobody said, it is no such address, or a file of TLS is not there.
    """
    protocol = _variable(environment, "PROTOCOL")
    if protocol not in ("", "grpc"):
        raise BadConfiguration(
            f'OTEL_EXPORTER_OTLP_PROTOCOL is "{protocol}"; traces are sent by grpc, which collectors take on port 4317.'
        )
    where = _variable(environment, "ENDPOINT")
    if not where:
        raise BadConfiguration(
            "--traces otlp sends nothing to an address that nobody named: set OTEL_EXPORTER_OTLP_ENDPOINT, such as "
            "https://collector.example:4317, or http://127.0.0.1:4317 without encryption."
        )
    try:
        parts = urlsplit(where)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        known = False
    if "@" in where:
        raise BadConfiguration(
            "OTEL_EXPORTER_OTLP_ENDPOINT names a user, and would be in the log with the password: say who you are in "
            "OTEL_EXPORTER_OTLP_HEADERS, or by a client certificate."
        )
    if not known or any(each.isspace() for each in where):
        raise BadConfiguration(
            f'OTEL_EXPORTER_OTLP_ENDPOINT is "{where}": write https://HOST:PORT, or http://HOST:PORT to send without '
            "encryption."
        )
    for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"):
        # The library would go on without it, and trust whom the system trusts.
        if (file := _variable(environment, name)) and not os.access(file, os.R_OK):
            raise BadConfiguration(f"OTEL_EXPORTER_OTLP_{name}: {file} is not there, or cannot be read.")
    if bool(_variable(environment, "CLIENT_KEY")) != bool(_variable(environment, "CLIENT_CERTIFICATE")):
        raise BadConfiguration(
            "OTEL_EXPORTER_OTLP_CLIENT_KEY and OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE come together, or not at all."
        )
    if (timeout := _variable(environment, "TIMEOUT")) and not _is_a_time(timeout):
        raise BadConfiguration(f'OTEL_EXPORTER_OTLP_TIMEOUT is "{timeout}": write seconds, more than 0.')
    return where, urlsplit(where).scheme == "https"


def _is_a_time(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


class Said(logging.Handler):
    """The last thing that OpenTelemetry said. It says a line for each attempt; nothing of that reaches the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def listen(self) -> None:
        """Its loggers belong to the process, and so does this; a second time is the first one's end."""
        library = logging.getLogger("opentelemetry")
        library.propagate = False
        library.handlers[:] = [self]

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("opentelemetry.sdk._shared_internal"):  # that the queue is full, and not why
            self.last = record.getMessage()


class Sending:
    """Hands batches on, and says it when they are lost, seldom. Runs in the thread that sends."""

    def __init__(
        self, exporter: SpanExporter, log: Log, said: Said, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._exporter = exporter
        self._log = log
        self._said = said
        self._clock = clock
        self._sent = 0
        self._lost = 0
        self._said_lost = 0
        self._told: float | None = None
        self._over = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - a batch is lost, and the next one may be better
            self._said.last, result = f"{type(error).__name__}: {error}", SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self._sent += len(spans)
            self._said.last = ""
        else:
            self._lost += len(spans)
            now = self._clock()
            if not self._over and (self._told is None or now - self._told >= _REMIND):
                self._log.warning("traces.lost", spans=self._lost, sentence=self._said.last)
                self._told, self._said_lost, self._lost = now, self._said_lost + self._lost, 0
        return result

    def last_words(self, spans: int) -> None:
        """Say how many of the ``spans`` that there were in all were not sent, but for those that it was said of."""
        if (lost := spans - self._sent - self._said_lost) > 0:
            self._log.warning("traces.lost", spans=lost, sentence=self._said.last or _UNSENT)

    def shutdown(self) -> None:
        """Give up what is under way; may be called from another thread, and again."""
        if not self._over:
            self._over = True
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True
