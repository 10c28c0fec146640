"""What both daemons of this package do as processes: signals, the service manager, and metrics."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING

from plugin.kubelet.devices import AdvertisedDevices
from plugin.logs import Logger
from plugin.observers import DeferredObserver, NullObserver
from scrubber import __version__
from scrubber.config.settings import Address, MetricsTls, TraceExport
from scrubber.domain.errors import ScrubberError
from scrubber.observability.log_sink import LostLineCounter
from scrubber.observability.metrics_port import bind_metrics_port_or_warn
from scrubber.observability.probes import bind_probe_port
from scrubber.observability.systemd import SystemdNotifier, watchdog_interval
from scrubber.observability.tcp_listener import TcpListener

if TYPE_CHECKING:
    from scrubber.observability.tracing import OpenTelemetryTracer

__all__ = [
    "bind_metrics",
    "bind_probes",
    "expected_error",
    "notify_service_manager",
    "open_traces",
    "serve_metrics",
    "signals",
]

_READY_POLL = 0.1
"""Seconds between two checks whether the daemon is ready, for the service manager."""
_START_EXTENSION = "EXTEND_TIMEOUT_USEC=60000000"
"""How much longer the service manager waits for a daemon that waits for its service."""


def bind_metrics(
    address: Address | None, log: Logger, stack: ExitStack, *, required: bool, tls: MetricsTls | None
) -> TcpListener | None:
    """Bind the port of the metrics before anything is started; return None where there is none.

    Args:
        required: whether an address in use stops the daemon; otherwise it only disables the metrics, with a warning.

    Raises:
        InvalidConfiguration: a required port cannot be bound, or the certificates cannot be used.
    """
    if address is None:
        return None

    def warn(message: str) -> None:
        log.warning("metrics.unavailable", message=message)

    if tls is not None:
        from scrubber.observability import metrics_server

        metrics_server.check_tls_files(tls)
    listener = bind_metrics_port_or_warn(address.host, address.port, required=required, warn=warn)
    if listener is not None:
        stack.callback(listener.close)
    return listener


def bind_probes(address: Address | None, stack: ExitStack) -> TcpListener | None:
    """Bind the port of the probes before anything is started; return None where there is none.

    Raises:
        InvalidConfiguration: the address cannot be bound.
    """
    if address is None:
        return None
    listener = bind_probe_port(address.host, address.port)
    stack.callback(listener.close)
    return listener


async def serve_metrics(
    listener: TcpListener | None,
    observer: DeferredObserver | NullObserver,
    losses: LostLineCounter,
    lists: Callable[[], Mapping[str, AdvertisedDevices]],
    log: Logger,
    stack: ExitStack,
    *,
    tls: MetricsTls | None,
    wait: float,
) -> None:
    """Do the slow work that can wait until the kubelet has registered the daemon: metrics and garbage collection.

    Events observed until then are counted. The metrics are served until ``stack`` is closed.

    Args:
        wait: seconds that the metrics wait for the registration.
    """
    if listener is not None and isinstance(observer, DeferredObserver):
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await observer.registered_once.wait()
        for module in ("plugin.metrics", "scrubber.observability.metrics_server"):
            await asyncio.to_thread(importlib.import_module, module)
        from prometheus_client import CollectorRegistry

        from plugin.metrics import PluginMetrics
        from scrubber.observability import metrics_server

        registry = CollectorRegistry()
        metrics = PluginMetrics(registry, lists)
        observer.forward_to(metrics)
        losses.set_callback(metrics.count_lost_line)

        def tell(message: str) -> None:
            log.warning("metrics.scrape-failed", message=message)

        served = metrics_server.serve_metrics_on(listener, metrics_server.registry_app(registry), report=tell, tls=tls)
        stack.callback(served.close)
        log.info("metrics.serving", address=served.address, encrypted=tls is not None)
    # A full collection visits every loaded object: 24 ms, which would otherwise fall into a hand-over.
    gc.collect()
    gc.freeze()


async def notify_service_manager(unready_reason: Callable[[], str]) -> None:
    """Tell systemd, where it is the service manager, when the plugin is ready, and that its event loop runs.

    Until then its timeout for the start is extended: a plugin that waits for its service has not failed.
    """
    if not (address := os.environ.get("NOTIFY_SOCKET", "")):
        return
    interval, clock = watchdog_interval(os.environ), time.monotonic
    with closing(SystemdNotifier(address)) as manager:
        notified, reported = -interval, ""
        while reason := unready_reason():
            if reason != reported or clock() - notified >= interval:
                manager.notify(f"{_START_EXTENSION}\nSTATUS=Waiting: {reason}")
                notified, reported = clock(), reason
            await asyncio.sleep(_READY_POLL)
        while True:
            # Repeat READY: a manager that was too busy for the first one would end the plugin.
            manager.notify("READY=1\nSTATUS=Ready\nWATCHDOG=1")
            await asyncio.sleep(interval)


def open_traces(export: TraceExport, name: str, node: str, log: Logger, stack: ExitStack) -> OpenTelemetryTracer | None:
    """Return the tracer of the daemon ``name``, None where traces are off; it sends until ``stack`` is closed.

    Raises:
        InvalidConfiguration: traces cannot be sent as the environment specifies.
    """
    if export is TraceExport.OFF:
        return None
    from scrubber.observability import tracing

    traces = tracing.open_otlp_tracer(name, __version__, node, log)
    stack.callback(traces.close)
    return traces


def signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Return the event that SIGTERM and SIGINT set, and the one that SIGHUP sets."""
    stop, hangup = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    return stop, hangup


def expected_error(group: BaseExceptionGroup[BaseException]) -> ScrubberError | None:
    """Return the first error in ``group`` that this project raised on purpose, or None."""
    for error in group.exceptions:
        found = expected_error(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, ScrubberError):
            return found
    return None
