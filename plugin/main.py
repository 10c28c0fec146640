"""The device plugin as a process: its composition root.

Invariants: it waits for a kubelet and for a service that are not running. If one of its tasks fails, all tasks are
drained and the process exits, so that its supervisor restarts it. SIGTERM ends the kubelet's streams cleanly, so that
the kubelet stops placing pods here at once, and the process exits with 0.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from plugin.cluster.credentials import resolve_credentials
from plugin.gate import Gate, GateTimes
from plugin.instance_lock import WriterLock
from plugin.kubelet.devices import AdvertisedDevices
from plugin.kubelet.registration import KubeletPaths, Registrar, RegistrationMode, RegistrationTimes
from plugin.kubelet.resources import (
    NVIDIA_RESOURCE,
    SIMULATED_RESOURCE,
    AdvertisedResources,
    MigStrategy,
    ResourceLayout,
)
from plugin.kubelet.server import DevicePlugin
from plugin.logs import Logger, create_logger
from plugin.nvidia.settings import NvidiaPluginSettings, health_check_warning, index_warning
from plugin.observers import ClusterObserver, DeferredObserver, NullObserver
from plugin.resource_mapping import PublishMapping, ResourceMapping
from plugin.service_client import ServiceWatch, WatchTimes
from scrubber import __version__
from scrubber.api.client import PluginClient
from scrubber.config.settings import Address, MetricsTls, TraceExport
from scrubber.domain.errors import InvalidConfiguration, ScrubberError
from scrubber.observability.log_sink import LostLineCounter
from scrubber.observability.metrics_port import MetricsListener, bind_metrics_port_or_warn
from scrubber.ports.runtime import NOOP_TRACER, Tracer

if TYPE_CHECKING:
    from plugin.cluster.reporter import ClosableClusterApi, ClusterReporter, ClusterReporterTimes
    from plugin.upstream.devices import UpstreamDevices
    from plugin.upstream.proxy import UpstreamProxy, UpstreamProxyTimes
    from scrubber.observability.tracing import OpenTelemetryTracer

__all__ = ["PluginSettings", "PluginTimes", "run"]


_READY_POLL = 0.1
"""Seconds."""


@dataclass(frozen=True, slots=True)
class PluginTimes:
    """All durations of the plugin, for tests to scale. None: the defaults of a part that is loaded on demand."""

    gate: GateTimes = field(default_factory=GateTimes)
    registration: RegistrationTimes = field(default_factory=RegistrationTimes)
    watch: WatchTimes = field(default_factory=WatchTimes)
    upstream: UpstreamProxyTimes | None = None
    cluster: ClusterReporterTimes | None = None
    metrics: float = 1.0
    """Seconds that the metrics wait for the registration, which takes precedence."""


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """The settings of the plugin.

    Attributes:
        kubelet_dir: contains ``device-plugins/`` and ``plugins_registry/``.
        socket: directory of the service's sockets.
        resource_name: name by which pods request a whole device; empty: ``nvidia.com/gpu`` for an NVIDIA GPU and
            ``scrubber.dev/gpu`` for a simulated one.
        registration: ``auto``, ``watcher`` or ``classic``.
        log_format: ``auto`` (text on a terminal, else JSON lines), ``json`` or ``console``.
        log_level: ``debug``, ``info``, ``warning`` or ``error``.
        nvidia: settings for NVIDIA GPUs only.
        upstream_dir: directory in which vendors' own plugins register, to run behind this one; None: this plugin is the
            only one.
        cluster: ``auto`` (this node's devices are written to the API server where there are credentials) or ``off``.
        node_name: this node's name in the cluster; without it nothing is written to the cluster.
        metrics_address: address for Prometheus to scrape; None: no metrics.
        metrics_required: whether an address in use stops the plugin; otherwise it only disables the metrics, with a
            warning.
        metrics_tls: encryption of scrapes; None: unencrypted.
        traces: whether traces are sent; OpenTelemetry's own variables contain the destination.
        ready_file: created once this instance could take over from another one; None: no file.
    """

    kubelet_dir: Path = Path("/var/lib/kubelet")
    socket: Path = Path("/run/scrubber")
    resource_name: str = ""
    registration: str = "auto"
    log_format: str = "auto"
    log_level: str = "info"
    nvidia: NvidiaPluginSettings = field(default_factory=NvidiaPluginSettings)
    upstream_dir: Path | None = None
    cluster: str = "off"
    node_name: str = ""
    metrics_address: Address | None = None
    metrics_required: bool = False
    metrics_tls: MetricsTls | None = None
    traces: TraceExport = TraceExport.OFF
    ready_file: Path | None = None
    times: PluginTimes = field(default_factory=PluginTimes)


async def run(settings: PluginSettings) -> int:
    """Run the plugin until SIGTERM or SIGINT; return the exit status.

    Raises:
        InvalidConfiguration: a setting cannot work; nothing was started, or everything running has been drained.
    """
    losses = LostLineCounter()
    with ExitStack() as stack:
        log = create_logger(settings.log_format, settings.log_level, libraries=True, losses=losses)
        return await _run(settings, log, losses, stack)


async def _run(settings: PluginSettings, log: Logger, losses: LostLineCounter, stack: ExitStack) -> int:
    mode = _registration_mode(settings.registration)
    nvidia = settings.nvidia
    for resource in _possible_resources(settings):
        _kubelet_paths(settings, resource).check()
    listener = _metrics_port(settings, log, stack)
    traces = _traces(settings, log, stack)
    metrics: DeferredObserver | NullObserver = NullObserver() if listener is None else DeferredObserver()
    reporter = _cluster_reporter(settings, metrics, log)
    client = PluginClient(settings.socket.absolute(), trace_metadata=traces.outgoing_metadata if traces else tuple)
    announcements = ResourceMapping(client, log=log)
    behind = _upstream_proxy(settings, announcements.publish, log, traces or NOOP_TRACER)
    resources = behind.devices if behind else _resources(settings, announcements.publish, log)
    if warning := health_check_warning(nvidia.disabled_health_checks):
        log.warning("plugin.disable-healthchecks-ignored", message=warning)
    if warning := index_warning(nvidia.injection):
        log.warning("plugin.devices-by-index", message=warning)
    gate = Gate(
        client,
        resources,
        announcements,
        times=settings.times.gate,
        log=log,
        clock=time.monotonic,
        observer=metrics,
        trace_context=traces.traceparent if traces else str,
    )
    watch = ServiceWatch(
        client,
        resources,
        times=settings.times.watch,
        log=log,
        clock=time.monotonic,
        uses_envvar=nvidia.injection.uses_envvar,
        on_snapshot=reporter.on_snapshot if reporter else None,
        observer=metrics,
    )

    registrars: dict[str, Registrar] = {}

    def registrar(resource: str, advertised: AdvertisedDevices) -> Registrar:
        registrars[resource] = Registrar(
            _kubelet_paths(settings, resource),
            mode,
            plugin=lambda streams: (
                behind.create_plugin(resource, gate, streams)
                if behind
                else DevicePlugin(
                    resource,
                    advertised,
                    gate,
                    streams=streams,
                    log=log,
                    injection=nvidia.injection,
                    sharing=nvidia.sharing,
                    tracer=traces or NOOP_TRACER,
                )
            ),
            advertised=advertised,
            times=settings.times.registration,
            token=lambda: os.urandom(4).hex(),
            log=log,
            clock=time.monotonic,
            observer=metrics,
        )
        return registrars[resource]

    def ready() -> bool:
        """Return whether a ready service was seen and a server for each resource is up."""
        served = resources.lists.keys() <= registrars.keys() and all(each.is_ready for each in registrars.values())
        return watch.was_ready and served

    if settings.ready_file is not None:
        _remove_ready_file(settings.ready_file)
        stack.callback(settings.ready_file.unlink, missing_ok=True)
    stop = _stop_signals()
    log.info("plugin.started", version=__version__, kubelet=str(settings.kubelet_dir), service=str(settings.socket))
    if reporter:
        reporter.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            service = tasks.create_task(watch.run(), name="service snapshots")
            registration = tasks.create_task(
                _register(resources, registrar, insist=nvidia.fail_on_init_error), name="registration"
            )
            file = settings.ready_file
            others = [tasks.create_task(_create_when_ready(ready, file), name="ready file")] if file else []
            later = _after_registration(settings, listener, metrics, losses, lambda: resources.lists, log, stack)
            others.append(tasks.create_task(later, name="metrics"))
            if behind:
                others.append(tasks.create_task(behind.run(), name="vendors' plugins"))
            await stop.wait()
            log.info("plugin.stopping")
            registration.cancel()
            await asyncio.wait({registration})
            for task in (service, *others):
                task.cancel()
    except BaseExceptionGroup as group:
        error = _expected_error(group)
        if error is None and not isinstance(group, ExceptionGroup):
            raise
        if error is None:
            log.error("plugin.failed", exc_info=group)
            return 1
        raise error from group
    finally:
        await client.close()
        if reporter:  # last: the kubelet's streams have ended by now
            await reporter.stop()
    log.info("plugin.stopped")
    return 0


async def _register(
    resources: AdvertisedResources | UpstreamDevices,
    registrar: Callable[[str, AdvertisedDevices], Registrar],
    *,
    insist: bool,
) -> NoReturn:
    """Register every resource as soon as it has a device: before the first snapshot there is no list to send.

    Args:
        insist: fail when the node cannot be advertised as configured and nothing is advertised yet.

    Raises:
        ExceptionGroup: with :class:`InvalidConfiguration`.
    """
    registered: set[str] = set()
    async with asyncio.TaskGroup() as tasks:
        while True:
            await resources.wait_until(
                lambda: bool(resources.lists.keys() - registered) or _cannot_advertise(resources, insist)
            )
            if _cannot_advertise(resources, insist):
                raise InvalidConfiguration(f"{resources.error} With --no-fail-on-init-error, the plugin waits instead.")
            for resource in sorted(resources.lists.keys() - registered):
                advertised = resources.lists[resource]
                tasks.create_task(registrar(resource, advertised).run(), name=f"registration of {resource}")
                registered.add(resource)


def _remove_ready_file(path: Path) -> None:
    """Remove the file that an earlier run in the same pod left.

    Raises:
        InvalidConfiguration: the file cannot be created there.
    """
    try:
        path.touch()
        path.unlink()
    except OSError as error:
        raise InvalidConfiguration(
            f"--ready-file {path} cannot be created: {error.strerror}. Use a directory that the plugin can write to."
        ) from error


async def _create_when_ready(ready: Callable[[], bool], file: Path) -> None:
    """Create ``file`` once ``ready`` holds."""
    while True:
        if ready():
            file.touch()
            return
        await asyncio.sleep(_READY_POLL)


def _cannot_advertise(resources: AdvertisedResources | UpstreamDevices, insist: bool) -> bool:
    return insist and bool(resources.error) and not resources.lists


def _upstream_proxy(
    settings: PluginSettings, announce: PublishMapping, log: Logger, tracer: Tracer
) -> UpstreamProxy | None:
    """Return the proxy for vendors' plugins behind this one; None when there are none.

    Raises:
        InvalidConfiguration: their directory cannot be used, or a setting contradicts them.
    """
    if settings.upstream_dir is None:
        return None
    if settings.resource_name:
        raise InvalidConfiguration(
            "--resource-name cannot be combined with --upstream-dir: the vendor's plugin names the resource."
        )
    if settings.nvidia.sharing.shares:
        raise InvalidConfiguration(
            "sharing in --config-file cannot be combined with --upstream-dir: the vendor's plugin creates the shares. "
            "Configure it for the vendor's plugin."
        )
    from plugin.upstream.proxy import UpstreamProxy, UpstreamProxyTimes

    return UpstreamProxy(
        settings.upstream_dir.absolute(),
        settings.kubelet_dir.absolute(),
        times=settings.times.upstream or UpstreamProxyTimes(),
        injection=settings.nvidia.injection,
        publish_mapping=announce,
        log=log,
        clock=time.monotonic,
        tracer=tracer,
    )


def _metrics_port(settings: PluginSettings, log: Logger, stack: ExitStack) -> MetricsListener | None:
    """Bind the port of the metrics before anything is started; return None where there is none.

    Raises:
        InvalidConfiguration: a required port cannot be bound, or the certificates cannot be used.
    """
    address = settings.metrics_address
    if address is None:
        return None

    def warn(message: str) -> None:
        log.warning("metrics.unavailable", message=message)

    if settings.metrics_tls is not None:
        from scrubber.observability import metrics_server

        metrics_server.check_tls_files(settings.metrics_tls)
    listener = bind_metrics_port_or_warn(address.host, address.port, required=settings.metrics_required, warn=warn)
    if listener is not None:
        stack.callback(listener.close)
    return listener


async def _after_registration(
    settings: PluginSettings,
    listener: MetricsListener | None,
    observer: DeferredObserver | NullObserver,
    losses: LostLineCounter,
    lists: Callable[[], Mapping[str, AdvertisedDevices]],
    log: Logger,
    stack: ExitStack,
) -> None:
    """Do the slow work that can wait until the kubelet has registered the plugin: metrics and garbage collection.

    Events observed until then are counted. The metrics are served until ``stack`` is closed.
    """
    if listener is not None and isinstance(observer, DeferredObserver):
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.times.metrics):
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

        served = metrics_server.serve_metrics_on(
            listener, metrics_server.registry_app(registry), report=tell, tls=settings.metrics_tls
        )
        stack.callback(served.close)
        log.info("metrics.serving", address=served.address, encrypted=settings.metrics_tls is not None)
    # A full collection visits every loaded object: 24 ms, which would otherwise fall into a hand-over.
    gc.collect()
    gc.freeze()


def _traces(settings: PluginSettings, log: Logger, stack: ExitStack) -> OpenTelemetryTracer | None:
    """Return the tracer, None where traces are off; it sends until ``stack`` is closed.

    Raises:
        InvalidConfiguration: traces cannot be sent as the environment specifies.
    """
    if settings.traces is TraceExport.OFF:
        return None
    from scrubber.observability import tracing

    traces = tracing.open_otlp_tracer("gpu-scrubber-plugin", __version__, settings.node_name, log)
    stack.callback(traces.close)
    return traces


def _cluster_reporter(settings: PluginSettings, metrics: ClusterObserver, log: Logger) -> ClusterReporter | None:
    """Return the reporter of this node to the cluster; None where it is turned off or has no credentials.

    Raises:
        InvalidConfiguration: ``cluster`` is not a valid mode, or ``node_name`` is not a valid name.
    """
    credentials, reason = resolve_credentials(settings.cluster, settings.node_name, os.environ)
    if credentials is None:
        log.info("cluster.not-updated", message=reason)
        return None
    from plugin.cluster.reporter import ClusterReporter, ClusterReporterTimes

    times = settings.times.cluster or ClusterReporterTimes()
    found = credentials
    places = _kubelet_paths(settings, settings.resource_name)

    def connect() -> ClosableClusterApi:
        from plugin.cluster.client import ApiServerClient

        return ApiServerClient(found, settings.node_name, deadline=times.deadline)

    log.info("cluster.updated", node=settings.node_name, credentials=str(credentials))
    return ClusterReporter(
        connect,
        settings.node_name,
        times=times,
        lock=WriterLock(places.writer_lock_directory(_registration_mode(settings.registration))),
        log=log,
        clock=time.monotonic,
        wall_clock=time.time,
        jitter=random.random,
        uses_envvar=settings.nvidia.injection.uses_envvar,
        observer=metrics,
    )


def _resources(settings: PluginSettings, announce: PublishMapping, log: Logger) -> AdvertisedResources:
    """Return the lists; with CDI, a device is listed only after containers can be given it.

    Raises:
        InvalidConfiguration: CDI is requested, and no specification can be written.
    """
    nvidia = settings.nvidia
    layout = ResourceLayout(nvidia.mig, settings.resource_name, nvidia.sharing)
    if not nvidia.injection.needs_cdi:
        return AdvertisedResources(layout, log=log, publish_mapping=announce)
    from plugin.nvidia.cdi import CdiPublisher

    publisher = CdiPublisher(
        nvidia.cdi_directory, root=nvidia.root, hook=nvidia.hook, injection=nvidia.injection, log=log
    )
    publisher.check()
    return AdvertisedResources(layout, log=log, publish=publisher.publish, publish_mapping=announce)


def _kubelet_paths(settings: PluginSettings, resource: str) -> KubeletPaths:
    return KubeletPaths(settings.kubelet_dir.absolute(), resource)


def _possible_resources(settings: PluginSettings) -> list[str]:
    """Return names to check before anything is started; for MIG instances, one of the maximum length."""
    whole = [settings.resource_name] if settings.resource_name else [SIMULATED_RESOURCE, NVIDIA_RESOURCE]
    domain = whole[-1].partition("/")[0]
    sharing = settings.nvidia.sharing
    shared = [sharing.advertised_name(resource) for resource in sharing.shares]
    mixed = [f"{domain}/mig-1c.1g.100gb.me.all"] if settings.nvidia.mig is MigStrategy.MIXED else []
    return [*whole, *shared, *mixed]


def _registration_mode(name: str) -> RegistrationMode:
    try:
        return RegistrationMode(name)
    except ValueError:
        known = ", ".join(RegistrationMode)
        raise InvalidConfiguration(f"Unknown way to register {name!r}. Use one of: {known}.") from None


def _stop_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _expected_error(group: BaseExceptionGroup[BaseException]) -> ScrubberError | None:
    """Return the first error in ``group`` that this project raised on purpose, or None."""
    for error in group.exceptions:
        found = _expected_error(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, ScrubberError):
            return found
    return None
