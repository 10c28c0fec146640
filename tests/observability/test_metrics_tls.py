"""The metrics endpoints of both daemons: plain or encrypted, with or without client certificates.

No client delays the others, a page is rendered once a second, and certificates are replaced without a restart.
"""

from __future__ import annotations

import asyncio
import datetime
import http.client
import ipaddress
import os
import selectors
import socket
import socketserver
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scrubber.config.settings import MetricsTls
from scrubber.domain.errors import InvalidConfiguration
from scrubber.emulator.playground import Playground
from scrubber.observability.metrics_port import bind_metrics_port_or_warn
from scrubber.observability.metrics_server import (
    MetricsServer,
    MetricsServerTimes,
    _CachingApp,
    registry_app,
    serve_metrics,
    serve_metrics_on,
)
from tests.ports import free_port

HOST = str(ipaddress.IPv4Address("127.64.0.0") + os.getpid() % (1 << 22))
"""An address used only by this process: a free port of it stays free, independent of other programs."""
SCRAPER = "127.0.0.1"
"""The source address of connections to any loopback address."""
SOON = 20.0
"""Seconds after which a test gives up; nothing here takes a noticeable part of it."""


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in files."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority that issues certificates as files below ``directory``."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.file = directory / f"{name}.pem"
        self._write(self.file, self._signed(self._name, self._key, authority=True))

    def issue(self, name: str, password: bytes | None = None) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        pair = Pair(self._directory / f"{name}.crt", self._directory / f"{name}.key")
        self._write(pair.certificate, self._signed(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key))
        hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden))
        return pair

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, authority: bool = False
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256())

    def _write(self, path: Path, certificate: x509.Certificate) -> None:
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "cluster")


def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("things", "Things that happened.", registry=made).inc(7)
    return made


@contextmanager
def served(
    tls: MetricsTls | None = None,
    *,
    messages: list[str] | None = None,
    of: CollectorRegistry | None = None,
    deadline: float = SOON,
    fresh: float = 0.0,
) -> Iterator[MetricsServer]:
    reasons: list[str] = [] if messages is None else messages
    times = MetricsServerTimes(connection_timeout=deadline, report_interval=0.0, cache_seconds=fresh)
    with closing(
        serve_metrics(registry_app(of or registry()), HOST, 0, tls=tls, report=reasons.append, timings=times)
    ) as scraping:
        yield scraping


def trusting(authority: Authority, client: Pair | None = None) -> ssl.SSLContext:
    """Return the TLS settings of a scraper: the authority that it trusts, and its own certificate."""
    context = ssl.create_default_context(cafile=str(authority.file))
    if client is not None:
        context.load_cert_chain(client.certificate, client.key)
    return context


class Listening(Protocol):
    @property
    def port(self) -> int: ...


@dataclass(frozen=True)
class At:
    """A daemon in a separate process, listening on this port."""

    port: int


def scrape(scraping: Listening, context: ssl.SSLContext | None = None, path: str = "/metrics") -> tuple[int, str]:
    """Return status and body."""
    connection: http.client.HTTPConnection = http.client.HTTPConnection(HOST, scraping.port, timeout=SOON)
    if context is not None:
        # The name in the certificates is localhost; the connection uses the address, without a resolver.
        connection = http.client.HTTPSConnection("localhost", scraping.port, timeout=SOON, context=context)
        connection._create_connection = lambda *_, **__: socket.create_connection(  # type: ignore[attr-defined]
            (HOST, scraping.port), SOON
        )
    with closing(connection):
        connection.request("GET", path, headers={"Accept": "application/openmetrics-text"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def until(holds: Callable[[], bool]) -> None:
    """Poll until a condition holds; the server answers from threads."""
    waited = threading.Event()
    for _ in range(int(SOON / 0.01)):
        if holds():
            return
        waited.wait(0.01)
    raise AssertionError("it did not come to that")


def refuses(scraping: Listening, context: ssl.SSLContext) -> bool:
    """Return whether the connection is refused. With TLS 1.3 a client learns that from its first read."""
    try:
        scrape(scraping, context)
    except (OSError, http.client.HTTPException):
        return True
    return False


class TestPlainHttp:
    def test_metrics_page_is_served_without_created_timestamps(self) -> None:
        with served() as scraping:
            status, text = scrape(scraping)
        assert status == 200
        assert "things_total 7.0" in text
        assert "_created" not in text

    def test_scrape_can_select_metrics_by_name(self) -> None:
        with served() as scraping:
            assert scrape(scraping, path="/metrics?name[]=things_total")[1].count("things") >= 1
            assert "things" not in scrape(scraping, path="/metrics?name[]=other_total")[1]

    def test_server_address_contains_the_port_chosen_by_the_system(self) -> None:
        with served() as scraping:
            assert scraping.port > 0
            assert scraping.address == f"{HOST}:{scraping.port}"

    def test_metrics_server_wakes_up_only_for_scrapes_and_shutdown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        waits: list[float | None] = []

        class Noting(selectors.PollSelector):
            def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
                waits.append(timeout)
                return super().select(timeout)

        monkeypatch.setattr(socketserver, "_ServerSelector", Noting)
        with served() as scraping:
            assert scrape(scraping)[0] == 200
        assert set(waits) == {None}

    def test_stopped_server_releases_its_port(self) -> None:
        with served() as scraping:
            port = scraping.port
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), SOON)
        with closing(serve_metrics(registry_app(registry()), HOST, port, report=print)) as again:
            assert again.port == port

    def test_taken_port_is_reported_as_an_error(self) -> None:
        with served() as scraping, pytest.raises(InvalidConfiguration) as refused:
            serve_metrics(registry_app(registry()), HOST, scraping.port, report=print)
        assert str(refused.value) == (
            f"Metrics cannot be served on {scraping.address}: Address already in use. "
            "Choose another --metrics-address, or off."
        )

    def test_taken_optional_port_logs_a_warning_with_the_remedy(self) -> None:
        warned: list[str] = []
        with served() as scraping:
            took = bind_metrics_port_or_warn(HOST, scraping.port, required=False, warn=warned.append)
            assert (took, len(warned)) == (None, 1)
            assert "Choose another --metrics-address, or off." in warned[0]
            with pytest.raises(InvalidConfiguration):
                bind_metrics_port_or_warn(HOST, scraping.port, required=True, warn=warned.append)
        assert len(warned) == 1

    def test_port_is_bound_before_the_page_is_served_and_early_clients_wait(self) -> None:
        listener = bind_metrics_port_or_warn(HOST, 0, required=True, warn=print)
        assert listener is not None
        with socket.create_connection((HOST, int(listener.address.rpartition(":")[2])), SOON) as client:
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            with closing(serve_metrics_on(listener, registry_app(registry()), report=print)):
                assert client.recv(64).startswith(b"HTTP/1.0 200")

    @pytest.mark.parametrize(("host", "message"), [("203.0.113.7", "203.0.113.7:0"), ("::bad::", "[::bad::]:0")])
    def test_host_of_another_machine_is_reported_as_an_error(self, host: str, message: str) -> None:
        with pytest.raises(InvalidConfiguration, match="Choose another --metrics-address, or off") as refused:
            serve_metrics(registry_app(registry()), host, 0, report=print)
        assert message in str(refused.value)

    def test_failing_collector_fails_the_scrape_and_is_reported_once(self) -> None:
        class Broken(Collector):
            def collect(self) -> Iterator[Metric]:
                raise RuntimeError("no such thing")

            def describe(self) -> Iterator[Metric]:
                return iter(())

        messages: list[str] = []
        broken = registry()
        broken.register(Broken())
        with served(messages=messages, of=broken) as scraping:
            status, text = scrape(scraping)
        assert (status, text) == (500, "The metrics could not be collected; the log says why.\n")
        assert messages == ["A scrape failed: RuntimeError('no such thing')"]


class TestTls:
    def test_client_that_trusts_the_authority_is_answered(self, authority: Authority) -> None:
        pair = authority.issue("node")
        with served(MetricsTls(pair.certificate, pair.key)) as scraping:
            assert "things_total 7.0" in scrape(scraping, trusting(authority))[1]

    def test_plain_http_client_is_refused_and_the_reason_logged(self, authority: Authority) -> None:
        pair, messages = authority.issue("node"), list[str]()
        with served(MetricsTls(pair.certificate, pair.key), messages=messages) as scraping:
            with pytest.raises((OSError, http.client.HTTPException)):
                scrape(scraping)
            until(lambda: messages == [f"A scrape from {SCRAPER} was refused: HTTP_REQUEST."])

    def test_tls_versions_before_1_2_are_refused(self, authority: Authority) -> None:
        pair = authority.issue("node")
        old = trusting(authority)
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            old.minimum_version = ssl.TLSVersion.TLSv1
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        new = trusting(authority)
        new.maximum_version = ssl.TLSVersion.TLSv1_2
        with served(MetricsTls(pair.certificate, pair.key)) as scraping:
            assert refuses(scraping, old)
            assert not refuses(scraping, new)

    def test_only_clients_with_a_certificate_of_the_client_authority_are_answered(
        self, authority: Authority, tmp_path: Path
    ) -> None:
        pair, other_authority = authority.issue("node"), Authority(tmp_path, "elsewhere")
        messages: list[str] = []
        with served(MetricsTls(pair.certificate, pair.key, authority.file), messages=messages) as scraping:
            assert "things_total 7.0" in scrape(scraping, trusting(authority, authority.issue("prometheus")))[1]
            assert messages == []
            assert refuses(scraping, trusting(authority))
            until(lambda: messages == [f"A scrape from {SCRAPER} was refused: PEER_DID_NOT_RETURN_A_CERTIFICATE."])
            assert refuses(scraping, trusting(authority, other_authority.issue("impostor")))
            until(lambda: messages[-1] == f"A scrape from {SCRAPER} was refused: CERTIFICATE_VERIFY_FAILED.")

    def test_replaced_certificates_are_loaded_without_a_restart(self, authority: Authority, tmp_path: Path) -> None:
        pair, next_one = authority.issue("node"), Authority(tmp_path, "next")
        with served(MetricsTls(pair.certificate, pair.key)) as scraping:
            assert not refuses(scraping, trusting(authority))
            renewed = next_one.issue("renewed")
            os.replace(renewed.certificate, pair.certificate)
            os.replace(renewed.key, pair.key)
            assert not refuses(scraping, trusting(next_one))
            assert refuses(scraping, trusting(authority))

    def test_mismatched_replacement_keeps_the_earlier_certificates(self, authority: Authority, tmp_path: Path) -> None:
        pair, next_one, messages = authority.issue("node"), Authority(tmp_path, "next"), list[str]()
        with served(MetricsTls(pair.certificate, pair.key), messages=messages) as scraping:
            renewed = next_one.issue("renewed")
            os.replace(renewed.certificate, pair.certificate)
            assert not refuses(scraping, trusting(authority))
            assert messages[0].startswith(
                "The certificates for metrics are not taken up, and the earlier ones stay: "
                f"--metrics-key {pair.key} is not the key of --metrics-cert {pair.certificate}"
            )
            assert not refuses(scraping, trusting(authority))
            assert messages[1] == messages[0]  # retried, and not given up
            pair.key.unlink()
            assert not refuses(scraping, trusting(authority))
            os.replace(renewed.key, pair.key)
            assert not refuses(scraping, trusting(next_one))


class TestInvalidTlsFiles:
    def refusal(self, certificate: Path, key: Path, client_ca: Path | None = None) -> str:
        with pytest.raises(InvalidConfiguration) as refused:
            serve_metrics(registry_app(registry()), HOST, 0, tls=MetricsTls(certificate, key, client_ca), report=print)
        return str(refused.value)

    def test_missing_tls_file_is_refused(self, authority: Authority, tmp_path: Path) -> None:
        pair, away = authority.issue("node"), tmp_path / "away"
        why = "cannot be read: No such file or directory."
        assert self.refusal(away, pair.key) == f"--metrics-cert {away} {why}"
        assert self.refusal(pair.certificate, away) == f"--metrics-key {away} {why}"
        assert self.refusal(pair.certificate, pair.key, away) == f"--metrics-client-ca {away} {why}"
        assert self.refusal(tmp_path, pair.key) == f"--metrics-cert {tmp_path} cannot be read: Is a directory."
        below = pair.key / "key"
        assert self.refusal(pair.certificate, below) == f"--metrics-key {below} cannot be read: Not a directory."

    @pytest.mark.parametrize("contents", [b"", b"\x00\xff" * 99, b"-----BEGIN CERTIFICATE-----\nnone\n"])
    def test_tls_file_with_other_content_is_refused(
        self, authority: Authority, tmp_path: Path, contents: bytes
    ) -> None:
        pair, odd = authority.issue("node"), tmp_path / "odd"
        odd.write_bytes(contents)
        assert self.refusal(odd, pair.key) == f"--metrics-cert {odd} holds no certificate in PEM."
        assert self.refusal(pair.certificate, odd) == (
            f"--metrics-key {odd} holds no private key in PEM that can be used without a passphrase."
        )
        assert self.refusal(pair.certificate, pair.key, odd) == (
            f"--metrics-client-ca {odd} holds no certificate in PEM."
        )

    def test_key_of_another_certificate_is_refused(self, authority: Authority) -> None:
        one, other = authority.issue("one"), authority.issue("other")
        assert self.refusal(one.certificate, other.key) == (
            f"--metrics-key {other.key} is not the key of --metrics-cert {one.certificate}; give the one that was made "
            "with it."
        )

    def test_key_with_a_passphrase_is_refused_without_a_prompt(self, authority: Authority) -> None:
        pair = authority.issue("node", password=b"sesame")
        assert self.refusal(pair.certificate, pair.key).endswith("that can be used without a passphrase.")


class TestSlowAndExcessClients:
    def test_silent_client_does_not_delay_other_scrapes(self, authority: Authority) -> None:
        pair = authority.issue("node")
        tls = MetricsTls(pair.certificate, pair.key)
        with served(tls) as scraping, socket.create_connection((HOST, scraping.port), SOON):
            assert not refuses(scraping, trusting(authority))
        with served() as scraping, socket.create_connection((HOST, scraping.port), SOON):
            assert scrape(scraping)[0] == 200

    @pytest.mark.parametrize("encrypted", [False, True])
    def test_slow_client_is_disconnected(self, authority: Authority, encrypted: bool) -> None:
        pair = authority.issue("node")
        tls = MetricsTls(pair.certificate, pair.key) if encrypted else None
        with served(tls, deadline=0.2) as scraping, socket.create_connection((HOST, scraping.port), SOON) as slow:
            # No pause is as long as the deadline, and neither request nor handshake is ever complete.
            slow.settimeout(0.02)
            begun = b"\x16\x03\x01\x02\x00\x01" if encrypted else b"GET /"
            slow.sendall(begun)

            def is_cut_off() -> bool:
                try:
                    slow.sendall(b"\x00" if encrypted else b"a")
                    return slow.recv(1) == b""
                except TimeoutError:
                    return False
                except OSError:
                    return True

            until(is_cut_off)

    def test_excess_connections_are_closed_and_the_next_scrape_is_answered(self) -> None:
        messages: list[str] = []
        with served(messages=messages) as scraping:
            crowd: list[Any] = [socket.create_connection((HOST, scraping.port), SOON) for _ in range(40)]
            until(lambda: any("32 are open already" in each for each in messages))
            for each in crowd:
                each.close()

            def is_answered() -> bool:
                try:
                    return scrape(scraping)[0] == 200
                except (OSError, http.client.HTTPException):
                    return False

            until(is_answered)

    @pytest.mark.parametrize("encrypted", [False, True])
    def test_scrape_is_answered_while_as_many_silent_connections_as_permitted_are_open(
        self, authority: Authority, encrypted: bool
    ) -> None:
        pair = authority.issue("node")
        tls = MetricsTls(pair.certificate, pair.key) if encrypted else None
        with served(tls) as scraping, ExitStack() as crowd:
            for _ in range(100):
                crowd.enter_context(socket.create_connection((HOST, scraping.port), SOON))
            for _ in range(3):
                assert scrape(scraping, trusting(authority) if encrypted else None)[0] == 200

    def test_port_scanner_does_not_fill_the_log(self, authority: Authority) -> None:
        pair, messages = authority.issue("node"), list[str]()
        times = MetricsServerTimes(report_interval=3600.0)
        tls = MetricsTls(pair.certificate, pair.key)
        with closing(
            serve_metrics(registry_app(registry()), HOST, 0, tls=tls, report=messages.append, timings=times)
        ) as scraping:
            for _ in range(20):
                with pytest.raises((OSError, http.client.HTTPException)):
                    scrape(scraping)
            until(lambda: len(messages) == 1)
            assert not refuses(scraping, trusting(authority))
        assert len(messages) == 1


class Counting(Collector):
    """A metric that counts its collections, and their maximum number at once.

    Args:
        companions: threads that each collection waits for, at most ``patience`` seconds, before it continues.
    """

    def __init__(self, companions: int = 0, timeout: float = 0.0) -> None:
        self.times = self.most_at_once = 0
        self._inside = 0
        self._companions = companions
        self._timeout = timeout
        self._changed = threading.Condition()

    def collect(self) -> Iterator[Metric]:
        with self._changed:
            self.times += 1
            self._inside += 1
            self.most_at_once = max(self.most_at_once, self._inside)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._inside > self._companions, self._timeout)
            self._inside -= 1
        yield GaugeMetricFamily("collections", "So far.", value=self.times)

    def describe(self) -> Iterator[Metric]:
        return iter((GaugeMetricFamily("collections", "So far."),))

    def registry(self) -> CollectorRegistry:
        made = registry()
        made.register(self)
        return made


class TestScrapeCost:
    def test_page_is_collected_once_for_all_scrapes_within_a_second(self) -> None:
        counting = Counting()
        with served(of=counting.registry(), fresh=3600.0) as scraping, ThreadPoolExecutor(30) as crowd:
            pages = set(crowd.map(lambda _: scrape(scraping), range(60)))
        assert counting.times == 1
        assert [(status, "collections 1.0" in text) for status, text in pages] == [(200, True)]

    def test_expired_page_is_collected_again(self) -> None:
        counting = Counting()
        with served(of=counting.registry(), fresh=0.0) as scraping:
            assert "collections 1.0" in scrape(scraping)[1]
            assert "collections 2.0" in scrape(scraping)[1]

    def test_no_two_threads_collect_at_once(self) -> None:
        counting = Counting(companions=1, timeout=0.1)
        with served(of=counting.registry(), fresh=0.0) as scraping, ThreadPoolExecutor(8) as crowd:
            assert {status for status, _ in crowd.map(lambda _: scrape(scraping), range(8))} == {200}
        assert (counting.times, counting.most_at_once) == (8, 1)

    def test_differing_scrapes_cause_a_bounded_number_of_collections(self) -> None:
        counting = Counting()
        with served(of=counting.registry(), fresh=3600.0) as scraping:
            answers = [scrape(scraping, path=f"/metrics?name[]=collections&name[]={each}")[0] for each in range(20)]
            assert answers == [200] * 4 + [503] * 16
            assert scrape(scraping, path="/metrics?name[]=3&name[]=collections")[0] == 200
        assert counting.times == 4

    def test_clients_with_name_filters_do_not_block_the_full_page(self) -> None:
        with served(fresh=3600.0) as scraping:
            others = [f"/metrics?name[]={number}" for number in range(9)]
            assert 503 in {scrape(scraping, path=path)[0] for path in others}
            for query in ("", "?x=1", "?x=2"):
                assert scrape(scraping, path=f"/metrics{query}")[0] == 200

    def test_request_details_that_do_not_affect_the_page_cause_no_extra_collection(self) -> None:
        counting = Counting()
        with served(of=counting.registry(), fresh=3600.0) as scraping:
            assert {scrape(scraping, path=f"/{each}?x={each}") for each in range(20)} == {scrape(scraping)}
        assert counting.times == 1

    @pytest.mark.parametrize(
        ("accept", "begins"),
        [
            ("application/openmetrics-text", "application/openmetrics-text; version=1.0.0"),
            (
                "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.5",
                "application/openmetrics-text; version=1.0.0",
            ),
            ("application/openmetrics-text;version=0.0.1,text/plain;version=0.0.4;q=0.5", "text/plain; version=0.0.4"),
            (
                "text/plain;version=1.0.0;q=0.6, application/openmetrics-text;version=1.0.0;q=0.5",
                "text/plain; version=",
            ),
            ("*/*", "text/plain; version=0.0.4"),
        ],
    )
    def test_scrape_gets_the_first_supported_format_of_its_accept_header(self, accept: str, begins: str) -> None:
        with served() as scraping, closing(http.client.HTTPConnection(HOST, scraping.port, timeout=SOON)) as connection:
            connection.request("GET", "/metrics", headers={"Accept": accept})
            assert (connection.getresponse().getheader("Content-Type") or "").startswith(begins)

    def test_slowly_collected_page_is_served_to_all_waiting_scrapes(self) -> None:
        now = [0.0]
        made: list[float] = []

        def slow(_: dict[str, Any], start_response: Any) -> list[bytes]:
            now[0] += 5.0
            made.append(now[0])
            start_response("200 OK", [])
            return [b"page"]

        kept = _CachingApp(slow, 1.0, lambda: now[0])
        for _ in range(3):
            kept({"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics"}, lambda status, headers: None)
        assert made == [5.0]


class TestBothDaemons:
    async def test_daemons_require_a_client_certificate_for_scrapes(self, authority: Authority) -> None:
        pair, client = authority.issue("node"), authority.issue("prometheus")
        flags = ["--metrics-cert", str(pair.certificate), "--metrics-key", str(pair.key)]
        flags += ["--metrics-client-ca", str(authority.file)]
        pages = {"scrubber_ledger_ok": At(free_port()), "scrubber_plugin_service_up": At(free_port())}
        async with Playground(devices=1, memory="1MiB") as stage:
            for daemon, at in zip((stage.service, stage.plugin), pages.values(), strict=True):
                daemon.arguments = [*daemon.arguments, *flags, "--metrics-address", f"{HOST}:{at.port}"]
            await stage.start_daemons(3 * SOON)
            for name, at in pages.items():
                _, text = await asyncio.to_thread(scrape, at, trusting(authority, client))
                assert f"\n{name} 1" in text
                assert await asyncio.to_thread(refuses, at, trusting(authority))
            for daemon in (stage.service, stage.plugin):
                await asyncio.to_thread(until, partial(is_in, "PEER_DID_NOT_RETURN_A_CERTIFICATE", daemon.log))

    @pytest.mark.parametrize("command", ["serve", "plugin"])
    async def test_daemons_exit_with_an_error_for_unusable_tls_files(
        self, authority: Authority, tmp_path: Path, short_tmp: Path, command: str
    ) -> None:
        pair, away = authority.issue("node"), tmp_path / "away"
        words = [command, "--socket-dir", str(short_tmp / "s"), "--kubelet-dir", str(short_tmp / "k")]
        words += ["--metrics-address", f"{HOST}:0", "--metrics-cert", str(pair.certificate), "--metrics-key", str(away)]
        if command == "serve":
            await started("sim", "create", "--dir", str(short_tmp / "sim"), "--devices", "1", "--memory", "1MiB")
            words += ["--sim-dir", str(short_tmp / "sim"), "--state-dir", str(short_tmp / "state")]
        code, messages = await started(*words, "--log-level", "error")
        assert (code, messages) == (2, f"Error: --metrics-key {away} cannot be read: No such file or directory.\n")


def is_in(word: str, log: Path) -> bool:
    """Return whether ``log`` contains ``word``: a daemon writes it shortly after it has refused the scraper."""
    return word in log.read_text()


async def started(*words: str) -> tuple[int | None, str]:
    """Run a command; return its exit status and standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scrubber.cli.main", *words),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await asyncio.wait_for(process.communicate(), 3 * SOON)
    return process.returncode, stderr.decode()
