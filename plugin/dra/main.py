"""The DRA driver as a process: its composition root.

Invariants: it waits for a kubelet and for a service that are not running. If one of its tasks fails, all tasks end and
the process exits, so that its supervisor restarts it. After SIGTERM the registration socket disappears first; the
ResourceSlices stay, because the next instance continues with them.

SIGHUP, and a GPU driver that has moved, make it resolve its NVIDIA settings again; claims that are prepared later get what
they say. If they cannot work, the old ones stay in force. Until it is known where the GPU driver is, no NVIDIA GPU is prepared and
nothing published, and earlier slices stay. Registration does not wait for it: without the driver of claims no pod with a claim
can end, and a new GPU driver may wait for those pods.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from plugin.cluster.client import ApiServerClient
from plugin.cluster.credentials import Credentials
from plugin.device_selection import ALL_DEVICES, DeviceSelection
from plugin.dra.binding import BindingConditions
from plugin.dra.cdi import ClaimCdiSpecs
from plugin.dra.claim_driver import ClaimDriver, ClaimDriverTimes
from plugin.dra.claim_pods import ClaimPodsFollower
from plugin.dra.claim_reports import ClaimReports
from plugin.dra.claim_restorer import ClaimRestorer, RestorerTimes
from plugin.dra.inventory import slice_devices
from plugin.dra.paths import DriverSocketPaths
from plugin.dra.registration import DriverRegistration, DriverRegistrationTimes
from plugin.dra.server import HealthStream, add_driver_services
from plugin.dra.service import ScrubServiceClaims
from plugin.dra.slice_controller import SliceController, SliceTimes
from plugin.instance_lock import WriterLock
from plugin.kubelet.devices import AdvertisedDevices
from plugin.logs import Logger, WaitLogger, create_logger
from plugin.nvidia.cdi import CdiPublisher
from plugin.nvidia.reload import SettingsReload
from plugin.nvidia.settings import NvidiaPluginSettings, NvidiaSettingsSource
from plugin.observers import DeferredObserver, NullObserver
from plugin.process import (
    bind_metrics,
    bind_probes,
    expected_error,
    notify_service_manager,
    open_traces,
    serve_metrics,
    signals,
)
from plugin.service_client import ServiceWatch, WatchTimes
from scrubber import __version__
from scrubber.api.client import PluginClient
from scrubber.config.settings import Address, MetricsTls, TraceExport
from scrubber.domain.errors import InvalidConfiguration
from scrubber.observability.log_sink import LostLineCounter
from scrubber.observability.probes import ProbeServer
from scrubber.ports.runtime import NOOP_TRACER, Tracer

__all__ = ["DriverSettings", "DriverTimes", "run"]

_WAIT_LOG_INTERVAL = 30.0
"""Seconds between log lines about a GPU driver that is not there yet."""


@dataclass(frozen=True, slots=True)
class DriverTimes:
    """All durations of the driver, for tests to scale."""

    calls: ClaimDriverTimes = field(default_factory=ClaimDriverTimes)
    registration: DriverRegistrationTimes = field(default_factory=DriverRegistrationTimes)
    slices: SliceTimes = field(default_factory=SliceTimes)
    restorer: RestorerTimes = field(default_factory=RestorerTimes)
    watch: WatchTimes = field(default_factory=WatchTimes)
    request: float = 10.0
    """Limit of one request to the API server, in seconds."""
    metrics: float = 5.0
    """Seconds that the metrics wait for the registration, which takes precedence."""
    gpu_driver: float = 2.0
    """Seconds between checks of where the GPU driver is."""


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """The settings of the driver.

    Attributes:
        paths: its name, its sockets, and the UID of its pod.
        node_name: this node's name in the cluster, which is also the name of its pool.
        credentials: for the API server.
        cdi_dir: where container runtimes look for CDI specifications.
        socket: directory of the service's sockets.
        devices: the devices that are published and prepared.
        binding_conditions: whether the scheduler binds pods to devices that are being cleaned only once they are clean.
        nvidia: settings for NVIDIA GPUs only.
        nvidia_source: resolves them again; None: they cannot change.
        metrics_required: whether an address in use stops the driver; otherwise it only disables the metrics.
        probe_address: address of the kubelet's probes; None: no probes.
        traces: whether traces are sent; OpenTelemetry's own variables contain the destination.
    """

    paths: DriverSocketPaths
    node_name: str
    credentials: Credentials
    cdi_dir: Path = Path("/var/run/cdi")
    socket: Path = Path("/run/scrubber")
    devices: DeviceSelection = ALL_DEVICES
    binding_conditions: bool = False
    nvidia: NvidiaPluginSettings = field(default_factory=NvidiaPluginSettings)
    nvidia_source: NvidiaSettingsSource | None = field(default=None, compare=False)
    log_format: str = "auto"
    log_level: str = "info"
    metrics_address: Address | None = None
    metrics_required: bool = False
    metrics_tls: MetricsTls | None = None
    probe_address: Address | None = None
    traces: TraceExport = TraceExport.OFF
    times: DriverTimes = field(default_factory=DriverTimes)


async def run(settings: DriverSettings) -> int:
    """Run the driver until SIGTERM or SIGINT; return the exit status.

    Raises:
        InvalidConfiguration: a setting cannot work; nothing was started, or everything running has ended.
    """
    losses = LostLineCounter()
    with ExitStack() as stack:
        log = create_logger(settings.log_format, settings.log_level, libraries=True, losses=losses)
        return await _run(settings, log, losses, stack)


async def _run(settings: DriverSettings, log: Logger, losses: LostLineCounter, stack: ExitStack) -> int:
    settings.paths.check()
    listener = bind_metrics(
        settings.metrics_address, log, stack, required=settings.metrics_required, tls=settings.metrics_tls
    )
    observer: DeferredObserver | NullObserver = NullObserver() if listener is None else DeferredObserver()
    probes = bind_probes(settings.probe_address, stack)
    traces = open_traces(settings.traces, "gpu-scrubber-dra", settings.node_name, log, stack)
    stop, hangup = signals()
    devices = AdvertisedDevices()
    try:
        async with (
            PluginClient(
                settings.socket.absolute(), trace_metadata=traces.outgoing_metadata if traces else tuple
            ) as client,
            _Driver.create(settings, devices, observer, log, client, traces or NOOP_TRACER) as driver,
            asyncio.TaskGroup() as tasks,
        ):
            if probes is not None:
                server = ProbeServer(probes, unready_reason=driver.unready_reason)
                stack.callback(server.close)
                await server.start()
                log.info("probes.serving", address=probes.address)
            log.info("driver.started", version=__version__, driver=settings.paths.driver, node=settings.node_name)
            running = [
                tasks.create_task(driver.watch.run(), name="service snapshots"),
                tasks.create_task(driver.publish(), name="devices"),
                tasks.create_task(driver.slices_once_located(), name="slices"),
                tasks.create_task(driver.follow_settings(hangup), name="settings"),
                tasks.create_task(driver.pods.run(), name="pods of claims"),
                tasks.create_task(driver.reports.run(), name="reports about claims"),
                tasks.create_task(driver.claims.reconcile_specs(), name="specifications"),
                tasks.create_task(driver.claims.remove_left_specs(), name="specifications of released claims"),
                tasks.create_task(driver.restorer.run(), name="claims that only the kubelet takes for prepared"),
                tasks.create_task(notify_service_manager(driver.unready_reason), name="service manager"),
                tasks.create_task(
                    serve_metrics(
                        listener,
                        observer,
                        losses,
                        lambda: {settings.paths.driver: devices},
                        log,
                        stack,
                        tls=settings.metrics_tls,
                        wait=settings.times.metrics,
                    ),
                    name="metrics",
                ),
            ]
            if settings.binding_conditions:
                running.append(tasks.create_task(driver.binding.run(), name="binding conditions"))
            registration = tasks.create_task(driver.registration.run(), name="registration")
            await stop.wait()
            log.info("plugin.stopping")
            registration.cancel()
            await asyncio.wait({registration})
            for task in running:
                task.cancel()
    except BaseExceptionGroup as group:
        error = expected_error(group)
        if error is None and not isinstance(group, ExceptionGroup):
            raise
        if error is None:
            log.error("plugin.failed", exc_info=group)
            return 1
        raise error from group
    log.info("plugin.stopped")
    return 0


class _Driver:
    """The parts of the driver.

    Args:
        claim_api, slice_api, slice_watch, report_api, binding_api, binding_watch: a connection each, because one connection serves one request at a time.

    Raises:
        InvalidConfiguration: a setting cannot work on this node.
    """

    def __init__(
        self,
        settings: DriverSettings,
        devices: AdvertisedDevices,
        observer: DeferredObserver | NullObserver,
        log: Logger,
        client: PluginClient,
        tracer: Tracer,
        *,
        claim_api: ApiServerClient,
        slice_api: ApiServerClient,
        slice_watch: ApiServerClient,
        report_api: ApiServerClient,
        binding_api: ApiServerClient,
        binding_watch: ApiServerClient,
    ) -> None:
        driver, node, times = settings.paths.driver, settings.node_name, settings.times
        self._settings = settings
        self._log = log
        self._devices = devices
        self._changed = asyncio.Event()
        self._nvidia = settings.nvidia
        self._located = asyncio.Event()
        """It is known where the GPU driver is."""
        if not settings.nvidia.pending:
            self._located.set()
        self._specs = specs = ClaimCdiSpecs(
            settings.cdi_dir, driver, log=log, nvidia=self._nvidia_specs(), epoch=lambda: devices.epoch
        )
        specs.check()
        specs.remove_left_behind(time.time())
        self.watch = ServiceWatch(
            client,
            devices,
            times=times.watch,
            log=log,
            clock=time.monotonic,
            selection=settings.devices,
            on_snapshot=lambda _: self._changed.set(),
            observer=observer,
        )
        self.slices = SliceController(
            driver,
            node,
            api=slice_api,
            watch=slice_watch,
            times=times.slices,
            log=log,
            clock=time.monotonic,
            jitter=random.random,
            token=lambda: os.urandom(4).hex(),
            lock=WriterLock(settings.paths.directory),
            observer=observer,
            binding_conditions=settings.binding_conditions,
        )
        self.binding = BindingConditions(
            driver,
            node,
            api=binding_api,
            watch=binding_watch,
            devices=devices,
            withdrawal=self.slices,
            log=log,
            clock=time.monotonic,
            wall_clock=time.time,
            jitter=random.random,
            observer=observer,
        )
        self.reports = ClaimReports(
            driver,
            report_api,
            log=log,
            clock=time.monotonic,
            wall_clock=time.time,
            jitter=random.random,
            observer=observer,
        )
        service = ScrubServiceClaims(client)
        self.pods = ClaimPodsFollower(
            driver,
            service,
            lambda: ApiServerClient(settings.credentials, node, deadline=times.request),
            devices=devices,
            log=log,
            clock=time.monotonic,
            jitter=random.random,
        )
        self.claims = ClaimDriver(
            driver,
            node,
            service=service,
            api=claim_api,
            devices=devices,
            specs=specs,
            withdrawal=self.slices,
            gpu_driver_located=self._located,
            was_ready=lambda: self.watch.was_ready,
            times=times.calls,
            log=log,
            clock=time.monotonic,
            observer=observer,
            tracer=tracer,
            claims_observers=(self.reports, self.pods),
        )
        health = HealthStream(node, devices)
        self.registration = DriverRegistration(
            settings.paths,
            add_services=lambda server: add_driver_services(server, self.claims, health),
            times=times.registration,
            token=lambda: os.urandom(4).hex(),
            log=log,
            clock=time.monotonic,
            observer=observer,
        )
        self.restorer = ClaimRestorer(
            driver,
            service,
            self.claims,
            is_registered=lambda: self.registration.is_registered,
            times=times.restorer,
            log=log,
            clock=time.monotonic,
        )

    @classmethod
    @asynccontextmanager
    async def create(
        cls,
        settings: DriverSettings,
        devices: AdvertisedDevices,
        observer: DeferredObserver | NullObserver,
        log: Logger,
        client: PluginClient,
        tracer: Tracer,
    ) -> AsyncIterator[_Driver]:
        async with AsyncExitStack() as stack:
            apis = []
            for _ in range(6):
                api = ApiServerClient(settings.credentials, settings.node_name, deadline=settings.times.request)
                stack.push_async_callback(api.close)
                apis.append(api)
            yield cls(
                settings,
                devices,
                observer,
                log,
                client,
                tracer,
                claim_api=apis[0],
                slice_api=apis[1],
                slice_watch=apis[2],
                report_api=apis[3],
                binding_api=apis[4],
                binding_watch=apis[5],
            )

    async def publish(self) -> NoReturn:
        """Pass on the devices to the slices after every snapshot of the service.

        A service that has never been ready may not list every device, so that earlier slices stay until then.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self.watch.was_ready:
                await self.slices.update(slice_devices(self._devices.devices))
                self.binding.on_devices()

    async def slices_once_located(self) -> NoReturn:
        await self._located.wait()
        await self.slices.run()

    async def follow_settings(self, hangup: asyncio.Event) -> NoReturn:
        """Resolve the NVIDIA settings again when ``hangup`` is set, and when the GPU driver has moved."""
        settings, log = self._settings, self._log
        reminder = WaitLogger(log, every=_WAIT_LOG_INTERVAL, clock=time.monotonic)
        reload = SettingsReload(settings.nvidia_source, log, hangup=hangup, driver_interval=settings.times.gpu_driver)
        while True:
            if not self._located.is_set():
                reminder.log_waiting("driver.location-unknown", message=self._nvidia.pending)
            requested = await reload.wait()
            try:
                changed = self._use_nvidia(reload.resolve(self._nvidia, everything=requested))
            except InvalidConfiguration as error:
                reload.log_rejected(error, requested=requested)
                continue
            reload.note_accepted()
            if requested and not changed:
                log.info("settings.unchanged")
            if self._nvidia.pending or not changed:
                continue
            if self._located.is_set():
                log.info("settings.reloaded", root=str(self._nvidia.root.host))
            else:
                reminder.log_ended("driver.location-known", root=str(self._nvidia.root.host))
            self._located.set()

    def _use_nvidia(self, found: NvidiaPluginSettings) -> bool:
        """Use the NVIDIA settings ``found`` for claims from now on; return whether they have changed."""
        before = self._nvidia
        if found.pending and self._located.is_set():
            return False  # the driver is being replaced: what was known of it stays valid
        self._nvidia = found
        self._specs.nvidia = self._nvidia_specs()
        return found != before

    def _nvidia_specs(self) -> CdiPublisher:
        nvidia = self._nvidia
        return CdiPublisher(
            self._settings.cdi_dir,
            root=nvidia.root,
            hook=nvidia.hook,
            injection=nvidia.injection,
            log=self._log,
            disabled_hooks=nvidia.disabled_cdi_hooks,
            sockets=nvidia.ipc_sockets,
            host=nvidia.host_root or Path("/"),
        )

    def unready_reason(self) -> str:
        """Return why this instance could not replace another one yet; empty when it could."""
        if not self._located.is_set():
            return "it is not known yet where the GPU driver is"
        if not self.watch.was_ready:
            return "no scrub service that has checked every device has answered yet"
        return "" if self.registration.is_registered else "the kubelet has not registered the driver yet"
