"""Where Prometheus scrapes: a page over HTTP or HTTPS. Both daemons have one, so neither has a server of its own.

Promises: whoever connects keeps nobody else waiting, by silence or by slowness. The library's server shakes hands in the
thread that accepts, where one silent client ends all scrapes; here each connection has a thread, a deadline, and few
beside it. However many scrape, the page is made by one thread at a time and at most once a second for each form of it,
because that thread competes with the calls that container starts wait for. The whole page, which Prometheus requests, is
always answered: requests for a choice of metrics are limited apart from it. Certificates that were replaced are taken up by
the next scrape, because a restart of the service would make every device dirty.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, Protocol
from urllib.parse import parse_qs, urlencode
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.exposition import gzip_accepted
from prometheus_client.registry import Collector

from scrubber.domain.errors import InvalidConfiguration
from scrubber.observability.metrics_port import MAX_CONNECTIONS, MetricsListener, bind_metrics_port

__all__ = [
    "MetricsServer",
    "MetricsServerTimes",
    "TlsFiles",
    "WsgiApp",
    "check_tls_files",
    "registry_app",
    "serve_metrics",
    "serve_metrics_on",
]

_MAX_FILTERED_RESPONSES = 4
"""Answers other than the whole page that are made within :attr:`MetricsServerTimes.cache_seconds`. The whole page
has as many forms."""

WsgiApp = Callable[[dict[str, Any], Any], Iterable[bytes]]
"""A WSGI application."""


class TlsFiles(Protocol):
    """Files in PEM; ``client_ca``: who may scrape must show a certificate that one of these has signed."""

    @property
    def certificate(self) -> Path: ...

    @property
    def key(self) -> Path: ...

    @property
    def client_ca(self) -> Path | None: ...


@dataclass(frozen=True, slots=True)
class MetricsServerTimes:
    """Seconds.

    Attributes:
        connection_timeout: of one connection, from its beginning to its end.
        report_interval: between two sentences about connections that came to nothing.
        cache_seconds: for which a page is used again after it was made.
    """

    connection_timeout: float = 10.0
    report_interval: float = 60.0
    cache_seconds: float = 1.0


class MetricsServer:
    """A page that is being served; :meth:`close` ends it.

    Attributes:
        address: ``HOST:PORT``, with the port that the system chose where 0 was asked for.
        port: the same.
    """

    def __init__(self, server: _Server, address: str) -> None:
        self.address = address
        self.port = server.server_port
        self._server = server
        # Without an end to its waiting: one that looks around ten times a second costs more than all scrapes.
        self._thread = threading.Thread(target=server.serve_forever, args=(None,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more. What is being answered is not waited for."""
        with suppress(OSError):  # the second call
            # It is ready to be read from then on, which wakes whoever waits for it: shutdown() alone would wait for ever.
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def registry_app(registry: CollectorRegistry) -> WsgiApp:
    """What the library makes of ``registry``, without the times at which it made each series: nobody asks for them."""
    return make_wsgi_app(_WithoutCreationTimes(registry))


def check_tls_files(tls: TlsFiles) -> None:
    """Refuse certificates that cannot be used, before anything is started.

    Raises:
        InvalidConfiguration: they cannot be used.
    """
    _ReloadingTlsContext(tls)


def serve_metrics(
    app: WsgiApp,
    host: str,
    port: int,
    *,
    report: Callable[[str], object],
    tls: TlsFiles | None = None,
    timings: MetricsServerTimes | None = None,
) -> MetricsServer:
    """Answer whoever asks at ``host`` with ``app``, in threads of its own.

    Args:
        report: is told, from any thread, why a connection came to nothing; now and then, however many there are.
        tls: without it, plain HTTP.

    Raises:
        InvalidConfiguration: nobody can listen there, or the certificates cannot be used.
    """
    if tls is not None:
        check_tls_files(tls)
    return serve_metrics_on(bind_metrics_port(host, port), app, report=report, tls=tls, timings=timings)


def serve_metrics_on(
    listener: MetricsListener,
    app: WsgiApp,
    *,
    report: Callable[[str], object],
    tls: TlsFiles | None = None,
    timings: MetricsServerTimes | None = None,
) -> MetricsServer:
    """:func:`serve_metrics` on a port that was taken before; closing what this returns closes the listener too.

    Raises:
        InvalidConfiguration: the certificates cannot be used.
    """
    keys = None if tls is None else _ReloadingTlsContext(tls)
    timings = timings or MetricsServerTimes()
    reporter = _RateLimitedReporter(report, timings.report_interval)
    kept = _CachingApp(_report_errors(app, reporter), timings.cache_seconds)
    server = _Server(listener.socket, kept, keys, reporter, timings.connection_timeout)
    return MetricsServer(server, listener.address)


class _WithoutCreationTimes(Collector):
    def __init__(self, registry: Any) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric

    def restricted_registry(self, names: Iterable[str]) -> _WithoutCreationTimes:
        """For a scrape that names what it wants."""
        return _WithoutCreationTimes(self._registry.restricted_registry(names))


class _RateLimitedReporter:
    """One sentence at a time, and not one for each connection: a scanner of ports makes thousands."""

    def __init__(self, report: Callable[[str], object], interval: float) -> None:
        self._report = report
        self._interval = interval
        self._last_report: float | None = None
        self._lock = threading.Lock()

    def __call__(self, message: str) -> None:
        with self._lock:
            now = time.monotonic()
            if self._last_report is not None and now - self._last_report < self._interval:
                return
            self._last_report = now
        self._report(message)


class _ReloadingTlsContext:
    """The certificates as the files have them now.

    Raises:
        InvalidConfiguration: they cannot be used.
    """

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._fingerprints = self._read_fingerprints()
        self._context = _context(tls)

    def context(self, report: Callable[[str], None]) -> ssl.SSLContext:
        """For the next connection. Files that cannot be used leave what was in force before, and are tried again."""
        with self._lock:
            try:
                seen = self._read_fingerprints()
                if seen != self._fingerprints:
                    self._context = _context(self._tls)
                    self._fingerprints = seen
            except InvalidConfiguration as error:
                report(f"The certificates for metrics are not taken up, and the earlier ones stay: {error}")
            return self._context

    def _read_fingerprints(self) -> list[tuple[int, int, int] | None]:
        """Which files they are; taken before they are read, so that a change in between is seen the next time."""
        files = (self._tls.certificate, self._tls.key, self._tls.client_ca)
        return [None if path is None else _file_fingerprint(path) for path in files]


def _file_fingerprint(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:  # whoever reads it next says why
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _context(tls: TlsFiles) -> ssl.SSLContext:
    """TLS 1.2 or newer.

    Raises:
        InvalidConfiguration: a file that cannot be read, or holds something else.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificates(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "--metrics-cert", tls.certificate)
    _check_readable("--metrics-key", tls.key)
    try:
        # Without a password OpenSSL would ask for one at the terminal.
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidConfiguration(
                f"--metrics-key {tls.key} is not the key of --metrics-cert {tls.certificate}; give the one that was "
                "made with it."
            ) from error
        raise InvalidConfiguration(
            f"--metrics-key {tls.key} holds no private key in PEM that can be used without a passphrase."
        ) from error
    if tls.client_ca is not None:
        _load_certificates(context, "--metrics-client-ca", tls.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_certificates(context: ssl.SSLContext, flag: str, path: Path) -> None:
    _check_readable(flag, path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise InvalidConfiguration(f"{flag} {path} holds no certificate in PEM.") from error


def _check_readable(flag: str, path: Path) -> None:
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise InvalidConfiguration(f"{flag} {path} cannot be read: {error.strerror}.") from error


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, in which it shakes hands, too."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(
        self,
        listener: socket.socket,
        app: WsgiApp,
        tls_context: _ReloadingTlsContext | None,
        report: Callable[[str], None],
        deadline: float,
    ) -> None:
        self.address_family = listener.family
        self._tls_context = tls_context
        self._report = report
        self._deadline = deadline
        self._connection_slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()  # the class above makes one that is not bound
        self.socket = listener
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), port
        self.setup_environ()
        self.set_app(app)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connection_slots.acquire(blocking=False):
            self._report(f"A connection from {client_address[0]} was closed: {MAX_CONNECTIONS} are open already.")
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._connection_slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connection_slots.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        with _close_after(self._deadline, request):
            if self._tls_context is None:
                super().finish_request(request, client_address)
                return
            try:
                secured = self._tls_context.context(self._report).wrap_socket(request, server_side=True)
            except OSError as error:
                self._report(
                    f"A scrape from {client_address[0]} was refused: {getattr(error, 'reason', None) or error}."
                )
                return
            try:
                super().finish_request(secured, client_address)
            finally:
                self.shutdown_request(secured)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Of a client that went away, or was too slow, there is nothing to say; what we did wrong is said by the app."""


@contextmanager
def _close_after(seconds: float, connection: socket.socket) -> Iterator[None]:
    """Close the connection to both sides then, whatever it is doing: a timeout of the socket's counts from byte to byte."""
    line = connection.dup()

    def end() -> None:
        try:
            line.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        line.close()


class _Handler(WSGIRequestHandler):
    server_version = "scrubber"
    sys_version = ""

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no event."""


@dataclass(frozen=True, slots=True)
class _CachedResponse:
    """What an application answered, and when it had (monotonic seconds)."""

    status: str
    headers: list[tuple[str, str]]
    body: bytes
    created_at: float


_BUSY = _CachedResponse(
    "503 Service Unavailable",
    [("Content-Type", "text/plain; charset=utf-8"), ("Retry-After", "1")],
    b"Too many different choices of metrics are requested at once; try again in a second, or without name[].\n",
    0.0,
)


class _CachingApp:
    """An application that makes each answer of ``app`` once in ``cache_seconds`` seconds, one at a time.

    Whoever asks meanwhile waits for that answer without taking processor time, and gets the same one.
    """

    def __init__(self, app: WsgiApp, cache_seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._cache_seconds = cache_seconds
        self._now = now
        self._responses: dict[_CacheKey, _CachedResponse] = {}
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        answer = self._response(_CacheKey.from_environ(environ), environ)
        start_response(answer.status, list(answer.headers))
        return [answer.body]

    def _response(self, form: _CacheKey, environ: dict[str, Any]) -> _CachedResponse:
        with self._lock:
            now = self._now()
            self._responses = {
                each: kept for each, kept in self._responses.items() if now - kept.created_at < self._cache_seconds
            }
            kept = self._responses.get(form)
            if (
                kept is None
                and not form.is_whole_page
                and sum(not each.is_whole_page for each in self._responses) >= _MAX_FILTERED_RESPONSES
            ):
                return _BUSY
            if kept is None:
                kept = self._responses[form] = self._create_response({**environ, **form.environ()})
            return kept

    def _create_response(self, environ: dict[str, Any]) -> _CachedResponse:
        head: list[Any] = []
        body = b"".join(self._app(environ, lambda status, headers: head.extend((status, headers))))
        status, headers = head
        # Fresh from now on, not from the beginning: of a page that took long to make, each waiting thread would make another.
        return _CachedResponse(status, list(headers), body, self._now())


@dataclass(frozen=True, slots=True)
class _CacheKey:
    """What decides the answer to a request. Headers and parameters that change nothing make no other form."""

    method: str
    is_icon: bool
    names: tuple[str, ...]
    openmetrics: bool
    gzip: bool

    @classmethod
    def from_environ(cls, environ: dict[str, Any]) -> _CacheKey:
        return cls(
            environ["REQUEST_METHOD"],
            environ["PATH_INFO"] == "/favicon.ico",
            tuple(sorted(set(parse_qs(environ.get("QUERY_STRING", "")).get("name[]", [])))),
            _prefers_openmetrics(environ.get("HTTP_ACCEPT", "")),
            gzip_accepted(environ.get("HTTP_ACCEPT_ENCODING", "")),
        )

    @property
    def is_whole_page(self) -> bool:
        """Whether it is the whole page, in one of its two formats, compressed or not."""
        return self.method == "GET" and not self.is_icon and not self.names

    def environ(self) -> dict[str, str]:
        """A request for just this form."""
        return {
            "QUERY_STRING": urlencode([("name[]", name) for name in self.names]),
            "HTTP_ACCEPT": "application/openmetrics-text; version=1.0.0" if self.openmetrics else "text/plain",
            "HTTP_ACCEPT_ENCODING": "gzip" if self.gzip else "",
        }


def _prefers_openmetrics(accept: str) -> bool:
    """Return whether OpenMetrics 1 comes before text 1 in an ``Accept`` header, as the library reads it."""
    for offer in accept.split(","):
        kind, _, parameters = offer.strip().partition(";")
        if kind.strip() == "application/openmetrics-text" and "version=0" not in parameters:
            return True
        if kind.strip() == "text/plain" and "version=1" in parameters:
            return False
    return False


def _report_errors(app: WsgiApp, report: Callable[[str], None]) -> WsgiApp:
    """``app``, with a fault of ours told instead of written over the log."""

    def answer(environ: Any, start_response: Any) -> Iterable[bytes]:
        try:
            return app(environ, start_response)
        except Exception as error:  # noqa: BLE001 - the scrape fails, and nothing else may
            report(f"A scrape failed: {error!r}")
            start_response("500 Internal Server Error", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"The metrics could not be collected; the log says why.\n"]

    return answer
