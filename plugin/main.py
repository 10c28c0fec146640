"""The device plugin as a process: its composition root.

Invariants: it waits for a kubelet and for a service that are not running. If one of its tasks fails, all tasks are
drained and the process exits, so that its supervisor restarts it. SIGTERM ends the kubelet's streams cleanly, so that
the kubelet stops placing pods here at once, and the process exits with 0.

SIGHUP, and a driver that has moved, make it resolve its NVIDIA settings again. If they have changed, everything that
depends on them is built again and takes over as in a rolling update; if they cannot work, the old ones stay in force.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from plugin.amd import AMD_RESOURCE, AmdNaming, amd_resource
from plugin.cluster.agent_pause import AgentPauser, AgentPauseTimes
from plugin.cluster.condition import ConditionFormat
from plugin.cluster.credentials import ClusterMode, resolve_credentials
from plugin.cluster.errors import ApiForbidden
from plugin.cluster.pause_labels import DEFAULT_LEASE, LeaseName, PauseLabel
from plugin.cluster.taint import NodeTaint
from plugin.device_selection import ALL_DEVICES, DeviceSelection
from plugin.gate import Gate, GateTimes
from plugin.instance_lock import InstanceLock, WriterLock
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices
from plugin.kubelet.registration import KubeletPaths, Registrar, RegistrationMode, RegistrationTimes
from plugin.kubelet.resources import (
    NVIDIA_RESOURCE,
    SIMULATED_RESOURCE,
    AdvertisedResources,
    MigStrategy,
    ResourceLayout,
)
from plugin.kubelet.server import DevicePlugin
from plugin.logs import Logger, WaitLogger, create_logger
from plugin.nvidia.container_runtime import InjectionCheck, check_injection
from plugin.nvidia.reload import SettingsReload
from plugin.nvidia.settings import (
    NvidiaPluginSettings,
    NvidiaSettingsSource,
    health_check_warning,
    index_warning,
)
from plugin.observers import AgentPauseObserver, ClusterObserver, DeferredObserver, HealthEventObserver, NullObserver
from plugin.process import (
    bind_metrics,
    bind_probes,
    expected_error,
    notify_service_manager,
    open_traces,
    serve_metrics,
    signals,
)
from plugin.resource_mapping import PublishMapping, ResourceMapping
from plugin.service_client import ServiceWatch, WatchTimes
from plugin.yield_sender import YieldSender
from scrubber import __version__
from scrubber.api.client import PluginClient
from scrubber.config.settings import Address, MetricsTls, TraceExport
from scrubber.domain.errors import InvalidConfiguration
from scrubber.observability.log_sink import LostLineCounter
from scrubber.observability.probes import ProbeServer
from scrubber.ports.runtime import NOOP_TRACER, Tracer

if TYPE_CHECKING:
    from plugin.cluster.deploy_labels import DeployLabels
    from plugin.cluster.port import PauseApi
    from plugin.cluster.reporter import ClosableClusterApi, ClusterReporter, ClusterReporterTimes
    from plugin.nvsentinel import NvsentinelReporter, NvsentinelTimes
    from plugin.upstream.devices import UpstreamDevices
    from plugin.upstream.proxy import UpstreamProxy, UpstreamProxyTimes
    from scrubber.api.scrubber_pb2 import Snapshot

__all__ = ["PluginSettings", "PluginTimes", "run"]


_WAIT_LOG_INTERVAL = 30.0
"""Seconds between log lines about a driver that is not there yet."""
_MAX_NAME_CHARS = 320
"""The service accepts no longer name of a plugin."""


@dataclass(frozen=True, slots=True)
class PluginTimes:
    """All durations of the plugin, for tests to scale. None: the defaults of a part that is loaded on demand."""

    gate: GateTimes = field(default_factory=GateTimes)
    registration: RegistrationTimes = field(default_factory=RegistrationTimes)
    watch: WatchTimes = field(default_factory=WatchTimes)
    upstream: UpstreamProxyTimes | None = None
    cluster: ClusterReporterTimes | None = None
    nvsentinel: NvsentinelTimes | None = None
    pauses: AgentPauseTimes = field(default_factory=AgentPauseTimes)
    metrics: float = 1.0
    """Seconds that the metrics wait for the registration, which takes precedence."""
    driver: float = 2.0
    """Seconds between checks of where the driver is."""


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """The settings of the plugin.

    Attributes:
        kubelet_dir: contains ``device-plugins/`` and ``plugins_registry/``.
        socket: directory of the service's sockets.
        resource_name: name by which pods request a whole device; empty: ``nvidia.com/gpu`` for an NVIDIA GPU,
            ``amd.com/gpu`` for an AMD GPU and ``scrubber.dev/gpu`` for any other device.
        amd_naming: how partitions of AMD GPUs are advertised.
        devices: the devices that are advertised.
        registration: ``auto``, ``watcher`` or ``classic``.
        log_format: ``auto`` (text on a terminal, else JSON lines), ``json`` or ``console``.
        log_level: ``debug``, ``info``, ``warning`` or ``error``.
        nvidia: settings for NVIDIA GPUs only.
        nvidia_source: resolves them again; None: they cannot change.
        upstream_dir: directory in which vendors' own plugins register, to run behind this one; None: this plugin is the
            only one.
        cluster: ``auto`` (this node's devices are written to the API server where there are credentials) or ``off``.
        condition: type and polarity of the node's condition.
        taint: put on the node while none of its GPUs is in service, where ``cluster`` is not off; None: no taint.
        nvsentinel_socket: socket of NVSentinel's platform connector; None: no health events.
        nvsentinel_strategy: what NVSentinel is to do with them: ``store-only`` or ``execute``.
        node_name: this node's name in the cluster; without it nothing is written to the cluster.
        metrics_address: address for Prometheus to scrape; None: no metrics.
        metrics_required: whether an address in use stops the plugin; otherwise it only disables the metrics, with a
            warning.
        metrics_tls: encryption of scrapes; None: unencrypted.
        probe_address: address of the kubelet's probes; None: no probes.
        traces: whether traces are sent; OpenTelemetry's own variables contain the destination.
        yield_labels: keys of labels of this node that request a yield when their value is not "true".
        pause_labels: labels of this node that pause agents during a reset, in order; empty: none are paused.
        pause_lease: allows one node at a time to do that; None: nothing limits it.
        gpu_reset: whether NVSentinel may reset GPUs of this node for the service.
    """

    kubelet_dir: Path = Path("/var/lib/kubelet")
    socket: Path = Path("/run/scrubber")
    resource_name: str = ""
    amd_naming: AmdNaming = AmdNaming.SINGLE
    devices: DeviceSelection = ALL_DEVICES
    registration: str = "auto"
    log_format: str = "auto"
    log_level: str = "info"
    nvidia: NvidiaPluginSettings = field(default_factory=NvidiaPluginSettings)
    nvidia_source: NvidiaSettingsSource | None = field(default=None, compare=False)
    upstream_dir: Path | None = None
    cluster: str = "off"
    condition: ConditionFormat = field(default_factory=ConditionFormat)
    taint: NodeTaint | None = None
    nvsentinel_socket: Path | None = None
    nvsentinel_strategy: str = "store-only"
    node_name: str = ""
    metrics_address: Address | None = None
    metrics_required: bool = False
    metrics_tls: MetricsTls | None = None
    probe_address: Address | None = None
    traces: TraceExport = TraceExport.OFF
    yield_labels: tuple[str, ...] = ()
    pause_labels: tuple[PauseLabel, ...] = ()
    pause_lease: LeaseName | None = DEFAULT_LEASE
    gpu_reset: bool = False
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
    parts = _Parts(settings, log, stack)
    assembly = None if settings.nvidia.pending else _Assembly(settings.nvidia, parts)

    def lists() -> Mapping[str, AdvertisedDevices]:
        return assembly.resources.lists if assembly else {}

    def unready_reason() -> str:
        """Return why this instance could not take over from another one yet; empty when it could."""
        return assembly.unready_reason if assembly else "it is not known yet where the driver is"

    stop, hangup = signals()
    if parts.probes is not None:
        server = ProbeServer(parts.probes, unready_reason=unready_reason)
        stack.callback(server.close)
        await server.start()
        log.info("probes.serving", address=parts.probes.address)
    log.info("plugin.started", version=__version__, kubelet=str(settings.kubelet_dir), service=str(settings.socket))
    for each in parts.reporters:
        each.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(notify_service_manager(unready_reason), name="service manager")]
            later = serve_metrics(
                parts.listener,
                parts.metrics,
                losses,
                lists,
                log,
                stack,
                tls=settings.metrics_tls,
                wait=settings.times.metrics,
            )
            others.append(tasks.create_task(later, name="metrics"))
            others.append(tasks.create_task(parts.yield_sender.run(), name="yield request"))
            others.append(tasks.create_task(parts.pauses.run(), name="agent pauses"))
            if parts.labels:
                others.append(tasks.create_task(parts.labels.run(), name="deploy labels"))
            reload = _Reload(parts, stop=stop, hangup=hangup)
            while assembly is not None or not stop.is_set():
                successor = tasks.create_task(reload.successor(assembly), name="settings")
                if assembly is not None:
                    await assembly.run(successor)
                assembly = await successor
            for task in others:
                task.cancel()
    except BaseExceptionGroup as group:
        error = expected_error(group)
        if error is None and not isinstance(group, ExceptionGroup):
            raise
        if error is None:
            log.error("plugin.failed", exc_info=group)
            return 1
        raise error from group
    finally:
        await parts.client.close()
        for each in parts.reporters:  # last: the kubelet's streams have ended by now
            await each.stop()
    log.info("plugin.stopped")
    return 0


class _Parts:
    """What outlives a reload.

    Raises:
        InvalidConfiguration: a setting cannot work.
    """

    def __init__(self, settings: PluginSettings, log: Logger, stack: ExitStack) -> None:
        self.settings = settings
        self.log = log
        self.mode = _registration_mode(settings.registration)
        for resource in _possible_resources(settings, settings.nvidia):
            _kubelet_paths(settings, resource).check()
        self.listener = bind_metrics(
            settings.metrics_address, log, stack, required=settings.metrics_required, tls=settings.metrics_tls
        )
        self.probes = bind_probes(settings.probe_address, stack)
        self.traces = open_traces(settings.traces, "gpu-scrubber-plugin", settings.node_name, log, stack)
        self.metrics: DeferredObserver | NullObserver = NullObserver() if self.listener is None else DeferredObserver()
        self.reporter = _cluster_reporter(settings, self.metrics, log)
        nvsentinel = _nvsentinel_reporter(settings, self.metrics, log)
        self.reporters = [each for each in (self.reporter, nvsentinel) if each is not None]
        self.client = PluginClient(
            settings.socket.absolute(), trace_metadata=self.traces.outgoing_metadata if self.traces else tuple
        )
        follows = bool(settings.yield_labels)
        self.yield_sender = YieldSender(
            self.client, _plugin_name(settings), None if follows else "", log=log, clock=time.monotonic
        )
        self.labels = _deploy_labels(settings, self.yield_sender, log)
        self.pauses = _agent_pauses(settings, self.client, self.metrics, log)

    def inform(self, snapshot: Snapshot | None) -> None:
        """Pass on a snapshot of the service; None: no service was ready during the whole grace period."""
        if snapshot is not None:
            self.yield_sender.on_snapshot(snapshot)
        self.pauses.on_snapshot(snapshot)
        for each in self.reporters:
            each.on_snapshot(snapshot)


class _Assembly:
    """Everything that depends on the NVIDIA settings: the lists, the gate and the registrations.

    Raises:
        InvalidConfiguration: the settings cannot work on this node; nothing was started.
    """

    def __init__(self, nvidia: NvidiaPluginSettings, parts: _Parts) -> None:
        settings, log, traces, metrics = parts.settings, parts.log, parts.traces, parts.metrics
        self.nvidia = nvidia
        self._parts = parts
        for resource in _possible_resources(settings, nvidia):
            _kubelet_paths(settings, resource).check()
        mappings = ResourceMapping(parts.client, log=log)
        self._behind = _upstream_proxy(settings, nvidia, mappings.publish, log, traces or NOOP_TRACER)
        self.resources = self._behind.devices if self._behind else _resources(settings, nvidia, mappings.publish, log)
        _log_warnings(nvidia, log)
        self._gate = Gate(
            parts.client,
            self.resources,
            mappings,
            times=settings.times.gate,
            log=log,
            clock=time.monotonic,
            observer=metrics,
            trace_context=traces.traceparent if traces else str,
        )
        self._watch = ServiceWatch(
            parts.client,
            self.resources,
            times=settings.times.watch,
            log=log,
            clock=time.monotonic,
            uses_envvar=nvidia.injection.uses_envvar,
            selection=settings.devices,
            on_snapshot=parts.inform,
            observer=metrics,
        )
        self._registrars: dict[str, Registrar] = {}

    @property
    def unready_reason(self) -> str:
        """Why another instance could not be replaced yet; empty when it could."""
        if not self._watch.was_ready:
            return "no scrub service that has checked every device has answered yet"
        served = {name for name, each in self._registrars.items() if each.is_ready}
        waiting = sorted(self.resources.lists.keys() - served)
        return f"not ready to register {', '.join(waiting)} with the kubelet yet" if waiting else ""

    def check_devices(self, devices: Iterable[AdvertisedDevice]) -> None:
        """Refuse settings with which these devices, which are advertised now, no longer could be.

        Raises:
            InvalidConfiguration: the plugin would exit with these settings.
        """
        if not self.nvidia.fail_on_init_error or not isinstance(self.resources, AdvertisedResources):
            return
        if error := self.resources.error_for(devices):
            raise InvalidConfiguration(error)

    async def run(self, until: asyncio.Task[_Assembly | None]) -> None:
        """Serve the kubelet until the task ``until`` is done; then end its streams first.

        Raises:
            ExceptionGroup: a part failed.
        """
        if self._parts.reporter:
            self._parts.reporter.uses_envvar = self.nvidia.injection.uses_envvar
        async with asyncio.TaskGroup() as tasks:
            service = tasks.create_task(self._watch.run(), name="service snapshots")
            insist = self.nvidia.fail_on_init_error
            registration = tasks.create_task(
                _register(self.resources, self._registrar, insist=insist), name="registration"
            )
            others = [tasks.create_task(self._behind.run(), name="vendors' plugins")] if self._behind else []
            await asyncio.wait({until})
            registration.cancel()
            await asyncio.wait({registration})
            for task in (service, *others):
                task.cancel()
        for resource in self._registrars:
            self._parts.metrics.on_resource_dropped(resource)

    def _registrar(self, resource: str, advertised: AdvertisedDevices) -> Registrar:
        settings, log, tracer = self._parts.settings, self._parts.log, self._parts.traces or NOOP_TRACER
        self._registrars[resource] = Registrar(
            _kubelet_paths(settings, resource),
            self._parts.mode,
            plugin=lambda streams: (
                self._behind.create_plugin(resource, self._gate, streams)
                if self._behind
                else DevicePlugin(
                    resource,
                    advertised,
                    self._gate,
                    streams=streams,
                    log=log,
                    injection=self.nvidia.injection,
                    sharing=self.nvidia.sharing,
                    tracer=tracer,
                )
            ),
            advertised=advertised,
            times=settings.times.registration,
            token=lambda: os.urandom(4).hex(),
            log=log,
            clock=time.monotonic,
            observer=self._parts.metrics,
        )
        return self._registrars[resource]


class _Reload:
    """Waits until the NVIDIA settings change, and builds what serves with the new ones.

    Args:
        stop: the plugin is asked to stop.
        hangup: the settings are to be resolved again.
    """

    def __init__(self, parts: _Parts, *, stop: asyncio.Event, hangup: asyncio.Event) -> None:
        self._parts = parts
        self._stop = stop
        settings = parts.settings
        self._reload = SettingsReload(
            settings.nvidia_source, parts.log, hangup=hangup, driver_interval=settings.times.driver, wake=(stop,)
        )
        self._reminder = WaitLogger(parts.log, every=_WAIT_LOG_INTERVAL, clock=time.monotonic)

    async def successor(self, current: _Assembly | None) -> _Assembly | None:
        """Return what replaces ``current`` (None: nothing serves yet) once its settings differ; None at a stop.

        Raises:
            InvalidConfiguration: nothing serves yet, and the driver was found, but the settings cannot work.
        """
        known = current.nvidia if current else self._parts.settings.nvidia
        pending = known.pending
        while True:
            if current is None:
                self._reminder.log_waiting("driver.location-unknown", message=pending)
            requested = await self._reload.wait()
            if self._stop.is_set():
                self._parts.log.info("plugin.stopping")
                return None
            try:
                nvidia = self._reload.resolve(known, everything=requested)
                pending = nvidia.pending
                if pending and requested:
                    known = nvidia
                if pending or (current is not None and nvidia == current.nvidia):
                    self._reload.note_accepted()
                    if requested and not pending:
                        self._parts.log.info("settings.unchanged")
                    continue
                successor = _Assembly(nvidia, self._parts)
                if current is not None:
                    successor.check_devices(current.resources.devices)
            except InvalidConfiguration as error:
                if current is None and not requested:
                    raise
                self._reload.log_rejected(error, requested=requested)
                continue
            self._reminder.log_ended("driver.location-known", root=str(nvidia.root.host))
            self._reload.note_accepted()
            if current is not None:
                self._parts.log.info("settings.reloaded", root=str(nvidia.root.host))
            return successor


def _log_warnings(nvidia: NvidiaPluginSettings, log: Logger) -> None:
    for ignored in nvidia.ignored:
        log.warning("settings.ignored", message=ignored)
    if warning := health_check_warning(nvidia.disabled_health_checks, nvidia.enabled_health_checks):
        log.warning("plugin.disable-healthchecks-ignored", message=warning)
    if warning := index_warning(nvidia.injection):
        log.warning("plugin.devices-by-index", message=warning)


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


def _cannot_advertise(resources: AdvertisedResources | UpstreamDevices, insist: bool) -> bool:
    return insist and bool(resources.error) and not resources.lists


def _upstream_proxy(
    settings: PluginSettings, nvidia: NvidiaPluginSettings, announce: PublishMapping, log: Logger, tracer: Tracer
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
    if settings.devices != ALL_DEVICES:
        raise InvalidConfiguration(
            "--devices cannot be combined with --upstream-dir: the vendor's plugin decides which devices it advertises. "
            "Configure it there."
        )
    if nvidia.sharing.shares:
        raise InvalidConfiguration(
            "sharing in --config-file cannot be combined with --upstream-dir: the vendor's plugin creates the shares. "
            "Configure it for the vendor's plugin."
        )
    from plugin.upstream.proxy import UpstreamProxy, UpstreamProxyTimes

    return UpstreamProxy(
        settings.upstream_dir.absolute(),
        settings.kubelet_dir.absolute(),
        times=settings.times.upstream or UpstreamProxyTimes(),
        injection=nvidia.injection,
        publish_mapping=announce,
        log=log,
        clock=time.monotonic,
        tracer=tracer,
    )


def _cluster_reporter(settings: PluginSettings, metrics: ClusterObserver, log: Logger) -> ClusterReporter | None:
    """Return the reporter of this node to the cluster; None where it is turned off or has no credentials.

    Raises:
        InvalidConfiguration: ``cluster`` is not a valid mode, or ``node_name`` is not a valid name; or there is a taint
            and nothing may be written.
    """
    if settings.taint is not None and settings.cluster == ClusterMode.OFF:
        raise InvalidConfiguration(
            "--taint needs --cluster-reporting: without it nothing is written to the API server."
        )
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

        return ApiServerClient(found, settings.node_name, deadline=times.deadline, condition=settings.condition)

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
        taint=settings.taint,
        observer=metrics,
    )


def _deploy_labels(settings: PluginSettings, request: YieldSender, log: Logger) -> DeployLabels | None:
    """Return the watch of this node's labels; None where there are no labels to watch.

    Raises:
        InvalidConfiguration: there are, and nothing to read them with.
    """
    if not settings.yield_labels:
        return None
    credentials, reason = resolve_credentials(ClusterMode.AUTO.value, settings.node_name, os.environ)
    if credentials is None:
        raise InvalidConfiguration(f"--yield-labels needs access to the API server: {reason}.")
    from plugin.cluster.deploy_labels import DeployLabels, NodeLabels

    found, times = credentials, settings.times.cluster
    deadline = 10.0 if times is None else times.deadline

    def connect() -> NodeLabels:
        from plugin.cluster.client import ApiServerClient

        return ApiServerClient(found, settings.node_name, deadline=deadline)

    return DeployLabels(
        connect, settings.yield_labels, request.set_reason, log=log, clock=time.monotonic, jitter=random.random
    )


def _agent_pauses(
    settings: PluginSettings, service: PluginClient, metrics: AgentPauseObserver, log: Logger
) -> AgentPauser:
    """Return what pauses agents. Without labels it offers nothing, and restores what an earlier instance changed.

    Raises:
        InvalidConfiguration: there are labels, and nothing to change them with.
    """
    credentials, reason = resolve_credentials(ClusterMode.AUTO.value, settings.node_name, os.environ)
    if settings.pause_labels and credentials is None:
        raise InvalidConfiguration(f"--pause-labels needs access to the API server: {reason}.")
    if settings.gpu_reset and credentials is None:
        raise InvalidConfiguration(f"--gpu-reset needs access to the API server: {reason}.")
    deadline = 10.0 if settings.times.cluster is None else settings.times.cluster.deadline

    def connect() -> PauseApi:
        if credentials is None:
            raise ApiForbidden(f"The plugin has no access to the API server: {reason}.")
        from plugin.cluster.client import ApiServerClient

        return ApiServerClient(credentials, settings.node_name, deadline=deadline)

    places = _kubelet_paths(settings, settings.resource_name)
    return AgentPauser(
        service,
        connect,
        settings.node_name,
        labels=settings.pause_labels,
        lease=settings.pause_lease,
        gpu_reset=settings.gpu_reset,
        times=settings.times.pauses,
        lock=InstanceLock(places.writer_lock_directory(_registration_mode(settings.registration)), "agent-pause"),
        log=log,
        clock=time.monotonic,
        wall_clock=time.time,
        jitter=random.random,
        observer=metrics,
    )


def _nvsentinel_reporter(
    settings: PluginSettings, metrics: HealthEventObserver, log: Logger
) -> NvsentinelReporter | None:
    """Return the reporter of this node to NVSentinel; None where it is turned off.

    Raises:
        InvalidConfiguration: the node has no name, or there is no such strategy.
    """
    if settings.nvsentinel_socket is None:
        return None
    from plugin.nvsentinel import NvsentinelReporter, NvsentinelTimes, ProcessingStrategy

    if not settings.node_name:
        raise InvalidConfiguration(
            "--nvsentinel-socket needs --node-name: an event without the name of its node would be ignored."
        )
    log.info(
        "nvsentinel.reporting",
        node=settings.node_name,
        socket=str(settings.nvsentinel_socket),
        strategy=settings.nvsentinel_strategy,
    )
    return NvsentinelReporter(
        settings.nvsentinel_socket,
        settings.node_name,
        strategy=ProcessingStrategy(settings.nvsentinel_strategy),
        times=settings.times.nvsentinel or NvsentinelTimes(),
        log=log,
        clock=time.monotonic,
        wall_clock=time.time,
        jitter=random.random,
        observer=metrics,
    )


def _resources(
    settings: PluginSettings, nvidia: NvidiaPluginSettings, announce: PublishMapping, log: Logger
) -> AdvertisedResources:
    """Return the lists; with CDI, a device is listed only after containers can be given it.

    Raises:
        InvalidConfiguration: CDI is requested, and no specification can be written.
    """
    host = nvidia.host_root
    found = (
        InjectionCheck() if host is None else check_injection(nvidia.injection.strategies, host, nvidia.cdi_directory)
    )
    refused = found.error if nvidia.refuse_unsuitable_runtime else ""
    layout = ResourceLayout(nvidia.mig, settings.resource_name, nvidia.sharing, refused, settings.amd_naming)
    unknown = found.unknown or (found.error if not refused else "")
    if not nvidia.injection.needs_cdi:
        return AdvertisedResources(layout, log=log, publish_mapping=announce, injection_unknown=unknown)
    from plugin.nvidia.cdi import CdiPublisher

    publisher = CdiPublisher(
        nvidia.cdi_directory,
        root=nvidia.root,
        hook=nvidia.hook,
        injection=nvidia.injection,
        log=log,
        disabled_hooks=nvidia.disabled_cdi_hooks,
        sockets=nvidia.ipc_sockets,
        host=nvidia.host_root or Path("/"),
    )
    publisher.check()
    return AdvertisedResources(
        layout, log=log, publish=publisher.publish, publish_mapping=announce, injection_unknown=unknown
    )


def _kubelet_paths(settings: PluginSettings, resource: str) -> KubeletPaths:
    return KubeletPaths(settings.kubelet_dir.absolute(), resource)


def _plugin_name(settings: PluginSettings) -> str:
    """Return what distinguishes this plugin from others of its node, also after a restart with other labels."""
    if settings.resource_name or settings.upstream_dir is None:
        return settings.resource_name or NVIDIA_RESOURCE
    return ascii(str(settings.upstream_dir))[1:-1][-_MAX_NAME_CHARS:]


def _possible_resources(settings: PluginSettings, nvidia: NvidiaPluginSettings) -> list[str]:
    """Return names to check before anything is started; for MIG instances, one of the maximum length."""
    whole = [settings.resource_name] if settings.resource_name else [SIMULATED_RESOURCE, AMD_RESOURCE, NVIDIA_RESOURCE]
    domain = whole[-1].partition("/")[0]
    sharing = nvidia.sharing
    shared = [sharing.advertised_name(resource) for resource in sharing.shares]
    mixed = [f"{domain}/mig-1c.1g.100gb.me.all"] if nvidia.mig is MigStrategy.MIXED else []
    if settings.amd_naming is AmdNaming.MIXED:
        mixed.append(amd_resource(settings.resource_name or AMD_RESOURCE, "cpx_nps8", settings.amd_naming))
    return [*whole, *shared, *mixed]


def _registration_mode(name: str) -> RegistrationMode:
    try:
        return RegistrationMode(name)
    except ValueError:
        known = ", ".join(RegistrationMode)
        raise InvalidConfiguration(f"Unknown way to register {name!r}. Use one of: {known}.") from None
